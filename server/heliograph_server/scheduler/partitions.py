"""Cut a schedule over several hosts into partitions: a graph for each host, and the edges between.
Pure.

    whole:    x ─ n0 ─ n1 ─ n2 ─▸ y         n1 runs on another host than n0 and n2
    partition:  x ─ n0 ┐         ┌ n2 ─▸ y
                     └▸ (n0) ─ n1 ┘         two edges

A value that a partition reads from another one is an input of it, an arrival; a partition computes
again what follows from small values by a few exact ops, such as a mask from positions. A result
that another partition reads departs as soon as its split has run. Other partitions read a weight or
variable through an inserted `cont`. This node comes after the assignments that precede the reader
and before all later ones, so its value is the one that the reader would see in the whole graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from heliograph_proto.errors import UnsupportedError
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_server.scheduler.model import ALL_ROWS, Schedule
from heliograph_server.scheduler.weight_homes import NOWHERE

#: A value of the whole graph, and the number of its host's assignments that come before: 0 for a
#: constant value, `OWN` for a value that is read where it lies or that comes with the run.
Version: TypeAlias = tuple[int, int]
OWN = -1

#: Ops with the same bits on every device, of which masks are made, and the most of them that a
#: partition computes again in place of an edge. They may read inputs of the run, and values of so
#: many bytes, which cross.
EXACT_OPS = frozenset(
    ("add", "arange", "bitwise_and", "cast", "fill", "greater_equal", "less", "logical_and")
    + ("reshape", "sub", "where")
)
MOST_AGAIN = 16
SMALL_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Crossing:
    """An edge: a value that goes from one partition to another in each run."""

    #: The value in the whole graph.
    value: int
    #: Places of partitions.
    source: int
    target: int
    #: The source's node that makes the value, and the target's leaf that receives it.
    node: int
    leaf: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PartitionGraph:
    """A partition's graph, and the numbers of its parts in the whole graph."""

    site: int
    graph: Graph
    #: The whole graph's inputs that it receives with each run, in order.
    inputs: tuple[int, ...]
    #: Places of the whole graph's outputs that it makes, in order. They come first among its own
    #: outputs.
    outputs: tuple[int, ...]
    #: Its weights and variables: pairs of its leaf and the whole graph's value.
    bound: tuple[tuple[int, int], ...]
    #: For each node: the place of its device in the schedule, and its number in the whole graph. An
    #: inserted node has the number of the first node that reads it.
    devices: tuple[int, ...]
    nodes: tuple[int, ...]
    inserted: frozenset[int]
    begins: frozenset[int]
    #: Nodes that another partition computes too, instead of values that cross.
    repeated: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Partitions:
    """A graph in partitions, in the order of their sites."""

    pieces: tuple[PartitionGraph, ...]
    crossings: tuple[Crossing, ...]


def cut_partitions(
    graph: Graph, schedule: Schedule, sites: Sequence[int], *, repeats: bool = True
) -> Partitions:
    """Cut a schedule into partitions. `sites` is the host number of each device of the schedule;
    `repeats` lets partitions compute values again.

    Raises UnsupportedError, with the reason, if the schedule must run as a whole.
    """
    if schedule.taps:
        raise UnsupportedError("nodes are observed")
    for one in schedule.splits:
        if any(c.rows != ALL_ROWS and sites[c.source] != sites[c.destination] for c in one.copies):
            raise UnsupportedError("rows of a weight go from one host to another")
    return _Cut(graph, schedule, sites, EXACT_OPS if repeats else frozenset()).partitions()


@dataclass(slots=True)
class _Draft:
    """A partition under construction."""

    site: int
    #: Its leaves, in order.
    leaves: dict[Version, int] = field(default_factory=dict)
    #: Leaves that others read, by the number of this partition's assignments that come before.
    read_after: dict[int, list[Version]] = field(default_factory=dict)
    assigned: int = 0
    nodes: list[Node] = field(default_factory=list)
    devices: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    inserted: set[int] = field(default_factory=set)
    #: Numbers of other sites' nodes that this one computes again, and their places here.
    again: set[int] = field(default_factory=set)
    repeated: set[int] = field(default_factory=set)
    begins: set[int] = field(default_factory=set)
    #: The nodes that make the values read here and elsewhere.
    made: dict[Version, int] = field(default_factory=dict)

    def leaf(self, version: Version) -> None:
        self.leaves.setdefault(version, len(self.leaves))

    def add(self, version: Version, node: Node, device: int, number: int) -> None:
        self.made[version] = len(self.nodes)
        self.nodes.append(node)
        self.devices.append(device)
        self.numbers.append(number)

    def value(self, version: Version) -> int:
        """Return a value's number in the partition."""
        found = self.leaves.get(version)
        return len(self.leaves) + self.made[version] if found is None else found


@dataclass(frozen=True, slots=True)
class _Cone:
    """The exact nodes that make a value, in order, and the small values that they read beside
    inputs of the run."""

    nodes: tuple[int, ...]
    small: tuple[int, ...]


class _Cut:
    """One cut. It finds the partitions' leaves first, since their numbers come before the
    nodes'."""

    def __init__(
        self, graph: Graph, schedule: Schedule, sites: Sequence[int], exact_ops: frozenset[str]
    ) -> None:
        self._graph, self._exact_ops = graph, exact_ops
        self._schedule = schedule
        self._leaves = len(graph.leaves)
        self._site_of = [sites[one.device] for one in schedule.assignments]
        self._home = [sites[home] if home >= 0 else NOWHERE for home in schedule.homes]
        self._drafts = {site: _Draft(site) for site in self._site_of}
        #: The remote readers of each version: sites, and the first node of each that reads it.
        self._readers: dict[tuple[int, Version], dict[int, int]] = {}
        #: The nodes that a site computes again before a node that reads them, in order.
        self._again: dict[int, list[int]] = {}
        self._cones: dict[int, _Cone | None] = {}
        #: The operands of each node.
        self._operands = [self._read(number) for number in range(len(graph.nodes))]

    def _read(self, number: int) -> tuple[Version, ...]:
        site, node = self._site_of[number], self._graph.nodes[number]
        found = tuple(self._version(site, value) for value in node.operands)
        for value, version in zip(node.operands, found, strict=True):
            if self._source(value) not in (site, NOWHERE):
                if not self._computes_again(value, site, number):
                    self._cross(self._source(value), version, site, number)
            elif value < self._leaves:
                self._drafts[site].leaf(version)
        if node.op == "assign":
            if self._source(node.operands[0]) != site:
                raise UnsupportedError("a variable is assigned to from another host")
            self._drafts[site].assigned += 1
        return found

    def _computes_again(self, value: int, site: int, reader: int) -> bool:
        """True if a site computes a value of another one again, for a node that reads it: that has
        the same bits and costs less than a copy."""
        cone = self._cone(value)
        if cone is None or (cone.small and self._graph.type_of(value).nbytes <= SMALL_BYTES):
            return False
        draft = self._drafts[site]
        for small in cone.small:
            if self._source(small) != site:
                self._cross(self._source(small), (small, 0), site, reader)
        for number in cone.nodes:
            if number in draft.again or self._site_of[number] == site:
                continue
            draft.again.add(number)
            self._again.setdefault(reader, []).append(number)
            for operand in self._graph.nodes[number].operands:
                if operand < self._leaves:
                    draft.leaf((operand, OWN))
        return True

    def _cone(self, value: int) -> _Cone | None:
        """Return what a value is computed from, if that can be done again anywhere."""
        if value < self._leaves:
            return _Cone((), ()) if self._home[value] == NOWHERE else None
        if value not in self._cones:
            self._cones[value] = self._new_cone(value)
        return self._cones[value]

    def _new_cone(self, value: int) -> _Cone | None:
        node = self._graph.nodes[value - self._leaves]
        if node.op not in self._exact_ops:
            return None
        nodes, small = set[int](), set[int]()
        for operand in node.operands:
            if (cone := self._cone(operand)) is not None:
                nodes.update(cone.nodes)
                small.update(cone.small)
            elif operand >= self._leaves and self._graph.type_of(operand).nbytes <= SMALL_BYTES:
                small.add(operand)
            else:
                return None
        if len(nodes) >= MOST_AGAIN:
            return None
        return _Cone((*sorted(nodes), value - self._leaves), tuple(sorted(small)))

    def _source(self, value: int) -> int:
        """Return the site where a value is made or lies."""
        return self._home[value] if value < self._leaves else self._site_of[value - self._leaves]

    def _version(self, site: int, value: int) -> Version:
        """Return the version that a site reads now. Several variables may share memory, so all
        assignments count."""
        if value >= self._leaves:
            return value, 0
        source = self._home[value]
        if source in (site, NOWHERE):
            return value, OWN
        is_variable = self._graph.leaves[value].kind is LeafKind.VARIABLE
        return value, self._draft(source).assigned if is_variable else 0

    def _draft(self, site: int) -> _Draft:
        return self._drafts.setdefault(site, _Draft(site))

    def _cross(self, source: int, version: Version, target: int, number: int) -> None:
        readers = self._readers.setdefault((source, version), {})
        if not readers and version[0] < self._leaves:
            home = self._draft(source)
            home.leaf((version[0], OWN))
            home.read_after.setdefault(version[1], []).append(version)
        readers.setdefault(target, number)
        self._drafts[target].leaf(version)

    def partitions(self) -> Partitions:
        """Return all partitions and the edges between them."""
        begins = {one.nodes[0] for one in self._schedule.splits if one.nodes}
        for draft in self._drafts.values():
            draft.assigned = 0
            self._insert(draft)
        for number in range(len(self._graph.nodes)):
            self._add(self._drafts[self._site_of[number]], number, number in begins)
        drafts = [self._drafts[site] for site in sorted(self._drafts)]
        places = {one.site: place for place, one in enumerate(drafts)}
        return Partitions(tuple(map(self._piece, drafts)), tuple(self._crossings(places)))

    def _insert(self, draft: _Draft) -> None:
        """Insert copies of leaves for others, with their present values."""
        for version in draft.read_after.get(draft.assigned, ()):
            leaf = self._graph.leaves[version[0]]
            node = Node("cont", (draft.leaves[version[0], OWN],), leaf.type)
            reader = min(self._readers[draft.site, version].values())
            draft.inserted.add(len(draft.nodes))
            draft.add(version, node, self._schedule.homes[version[0]], reader)

    def _add(self, draft: _Draft, number: int, begins: bool) -> None:
        """Add a node of the whole graph, with the partition's numbers."""
        node = self._graph.nodes[number]
        if begins:
            draft.begins.add(len(draft.nodes))
        for again in self._again.get(number, ()):
            self._compute_again(draft, again, number)
        operands = tuple(draft.value(version) for version in self._operands[number])
        made = Node(node.op, operands, node.type, node.attributes, node.name)
        draft.add((self._leaves + number, 0), made, self._schedule.assignments[number].device, number)
        if node.op == "assign":
            draft.assigned += 1
            self._insert(draft)

    def _compute_again(self, draft: _Draft, number: int, reader: int) -> None:
        node = self._graph.nodes[number]
        versions = ((value, OWN if value < self._leaves else 0) for value in node.operands)
        operands = tuple(map(draft.value, versions))
        made = Node(node.op, operands, node.type, node.attributes, node.name)
        draft.repeated.add(len(draft.nodes))
        draft.add((self._leaves + number, 0), made, self._schedule.assignments[reader].device, number)

    def _crossings(self, places: Mapping[int, int]) -> Iterator[Crossing]:
        for (source, version), readers in self._readers.items():
            size_bytes = self._graph.type_of(version[0]).nbytes
            node = self._drafts[source].made[version]
            for target in readers:
                leaf = self._drafts[target].leaves[version]
                yield Crossing(version[0], places[source], places[target], node, leaf, size_bytes)

    def _piece(self, draft: _Draft) -> PartitionGraph:
        leaves, outputs = self._piece_leaves(draft), []
        places = [
            place
            for place, port in enumerate(self._graph.outputs)
            if port.value >= self._leaves and self._source(port.value) == draft.site
        ]
        for place in places:
            port = self._graph.outputs[place]
            outputs.append(Output(f"output {place}", draft.value((port.value, 0))))
        if not outputs:
            # A graph needs an output. A leaf as output costs nothing.
            outputs.append(Output("none", 0 if leaves else len(draft.nodes) - 1))
        own = [(value, leaf) for (value, version), leaf in draft.leaves.items() if version == OWN]
        return PartitionGraph(
            site=draft.site,
            graph=Graph(leaves, tuple(draft.nodes), tuple(outputs)),
            inputs=tuple(value for value, _ in own if self._home[value] == NOWHERE),
            outputs=tuple(places),
            bound=tuple((leaf, value) for value, leaf in own if self._home[value] != NOWHERE),
            devices=tuple(draft.devices),
            nodes=tuple(draft.numbers),
            inserted=frozenset(draft.inserted),
            repeated=frozenset(draft.repeated),
            begins=frozenset(draft.begins),
        )

    def _piece_leaves(self, draft: _Draft) -> tuple[Leaf, ...]:
        found = []
        for value, version in draft.leaves:
            leaf = self._graph.leaves[value] if value < self._leaves else None
            if leaf is not None and version == OWN:
                found.append(Leaf(leaf.kind, f"leaf {value}", leaf.type, leaf.digest))
            else:
                name = f"value {value}" + (f", version {version}" if version else "")
                found.append(Leaf(LeafKind.INPUT, name, self._graph.type_of(value)))
        return tuple(found)
