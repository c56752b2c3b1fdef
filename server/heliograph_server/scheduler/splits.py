"""Splits from assignments: consecutive nodes on one device, and the copies before each.

It also decides which splits must have ended before one begins; the others may run at the same time.
Splits of one device run one after the other, so one number per device says which have ended: a
vector clock, after Fidge and Mattern (1988).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output, reordered
from heliograph_server.scheduler.model import ALL_ROWS, Assignment, Copy, Problem, Schedule, Split

#: Ops that read only the rows, or experts, of their first operand that another operand names: the
#: place of that operand, and the number of dimensions of the first one for which its rows are those
#: of its first axis.
READS_ROWS = {"get_rows": (1, 2), "mul_mat_id": (2, 3)}


def split(
    problem: Problem,
    homes: Sequence[int],
    assignments: Sequence[Assignment],
    taps: frozenset[int] = frozenset(),
) -> Schedule:
    """Begin a new split where the device changes or the problem requires one, and copy the values
    that the device cannot read.

    As in ggml, a new split also begins where a weight must be copied and the present split already
    has copies, so that not all copies of weights lie in memory at once. Where a node reads only
    those rows, or experts, of a weight that an operand names, that operand is computed in an
    earlier split, so that only these rows need copying. A split also ends after each node of
    `taps`, whose result is an output of its split.
    """
    drafts = _Drafts(problem, homes, assignments, taps)
    drafts.add_all()
    return Schedule(drafts.splits(), tuple(assignments), tuple(homes), taps=taps)


def _names_of_rows(graph: Graph) -> Iterator[tuple[int, int]]:
    """Yield the nodes that read only some rows of a weight, and the operand of each that names the
    rows."""
    for number, node in enumerate(graph.nodes):
        if node.op in READS_ROWS and node.operands[0] < len(graph.leaves):
            place, dimensions = READS_ROWS[node.op]
            leaf = graph.leaves[node.operands[0]]
            if leaf.kind is LeafKind.WEIGHT and leaf.type.ndim == dimensions:
                yield number, node.operands[place]


@dataclass(slots=True)
class _Draft:
    """A split under construction; values are in the order of their first use."""

    device: int
    nodes: list[int] = field(default_factory=list)
    copies: dict[int, Copy] = field(default_factory=dict)
    inputs: dict[int, None] = field(default_factory=dict)
    outputs: dict[int, None] = field(default_factory=dict)


class _Drafts:
    """The splits so far."""

    def __init__(
        self,
        problem: Problem,
        homes: Sequence[int],
        assignments: Sequence[Assignment],
        taps: frozenset[int],
    ) -> None:
        self._graph = problem.graph
        self._leaves = len(homes)
        self._begins = problem.begins
        self._reads = [device.reads for device in problem.devices]
        #: The device in whose memory each value is made; -1: an input.
        self._devices = [*homes, *(found.device for found in assignments)]
        self._drafts: list[_Draft] = []
        #: The split of each node so far.
        self._split_of: list[int] = []
        #: Values that do not change, and the devices that they were copied to.
        self._copied: set[tuple[int, int]] = set()
        self._names = dict(_names_of_rows(problem.graph))
        self._taps = taps
        #: A graph without assignments changes no variable.
        self._assigns = any(node.op == "assign" for node in problem.graph.nodes)

    def add_all(self) -> None:
        """Add all nodes, in order."""
        leaves, split_of, names, taps = self._leaves, self._split_of, self._names, self._taps
        # Without any of these, a split begins only where the device changes, or has copies.
        may_begin, present, draft = bool(self._begins or taps or names), -1, _Draft(-1)
        for number, node in enumerate(self._graph.nodes):
            device = self._devices[leaves + number]
            is_other = present < 0 or device != draft.device
            if is_other or ((may_begin or draft.copies) and self._begins_split(number)):
                draft, present = _Draft(device), present + 1
                self._drafts.append(draft)
            for place, value in enumerate(node.operands):
                made_in = split_of[value - leaves] if value >= leaves else -1
                if made_in == present:
                    continue
                rows = self._rows(number) if names and place == 0 and number in names else ALL_ROWS
                if value not in draft.inputs:
                    self._read(draft, value, made_in, rows)
                elif draft.copies and value in draft.copies and draft.copies[value].rows != rows:
                    self._copy_all(draft, value)
            draft.nodes.append(number)
            split_of.append(present)
            if taps and number in taps:
                draft.outputs[leaves + number] = None

    def splits(self) -> tuple[Split, ...]:
        """Return all splits, with the values that the graph returns as outputs."""
        for output in self._graph.outputs:
            if output.value >= self._leaves:
                self._drafts[self._split_of[output.value - self._leaves]].outputs[output.value] = None
        return tuple(
            Split(
                one.device,
                tuple(one.nodes),
                tuple(one.copies.values()),
                tuple(one.inputs),
                tuple(sorted(one.outputs)),
            )
            for one in self._drafts
        )

    def _begins_split(self, number: int) -> bool:
        """True if a new split must begin with a node: the node before is observed, the problem
        requires it, the node needs another weight copied, or it needs rows of a weight that the
        present split names."""
        if number in self._begins:
            return True
        draft = self._drafts[-1]
        if number - 1 in self._taps:
            return True
        if not draft.copies and number not in self._names:
            return False
        operands = self._graph.nodes[number].operands
        if self._names_rows_now(number):
            weights = [operands[0]]
        else:
            weights = [value for value in operands if value < self._leaves and draft.copies]
        return any(value not in draft.inputs and self._must_copy(value, draft.device) for value in weights)

    def _names_rows_now(self, number: int) -> bool:
        """True if the present split computes the row numbers that a node reads of a weight."""
        names = self._names.get(number, -1)
        return names >= self._leaves and self._split_of[names - self._leaves] == len(self._drafts) - 1

    def _rows(self, number: int) -> int:
        """Return the value that names the rows to copy, if it is known before the split begins;
        else ALL_ROWS."""
        names = self._names[number]
        comes_with_run = names < self._leaves and self._graph.leaves[names].kind is LeafKind.INPUT
        is_made = names >= self._leaves and self._split_of[names - self._leaves] < len(self._drafts) - 1
        return names if comes_with_run or is_made else ALL_ROWS

    def _copy_all(self, draft: _Draft, value: int) -> None:
        """Copy all rows of a value of which only some were to be copied."""
        draft.copies[value] = replace(draft.copies[value], rows=ALL_ROWS)
        self._copied.add((value, draft.device))

    def _read(self, draft: _Draft, value: int, made_in: int, rows: int) -> None:
        draft.inputs[value] = None
        if made_in >= 0:
            self._drafts[made_in].outputs[value] = None
        if self._must_copy(value, draft.device):
            if rows == ALL_ROWS and not self._may_change(value):
                self._copied.add((value, draft.device))
            size_bytes = self._graph.type_of(value).nbytes
            draft.copies[value] = Copy(value, self._devices[value], draft.device, size_bytes, rows)

    def _must_copy(self, value: int, device: int) -> bool:
        home = self._devices[value]
        return home >= 0 and home not in self._reads[device] and (value, device) not in self._copied

    def _may_change(self, value: int) -> bool:
        """True if a value may change later in the run."""
        leaves = self._graph.leaves
        return self._assigns and value < self._leaves and leaves[value].kind is LeafKind.VARIABLE


@dataclass(frozen=True, slots=True)
class SplitGraph:
    """A split as a graph, and the whole graph's values of its inputs, outputs and bound leaves."""

    graph: Graph
    #: The value of each input, in order.
    inputs: tuple[int, ...]
    #: The value of each output, in order.
    outputs: tuple[int, ...]
    #: Weights and variables that its device reads in place: pairs of the part's leaf and the whole
    #: graph's value.
    bound: tuple[tuple[int, int], ...]
    #: The whole graph's number of each node.
    nodes: tuple[int, ...]


def cut(graph: Graph, schedule: Schedule) -> tuple[SplitGraph, ...]:
    """Return one part for each split."""
    devices = {split.device for split in schedule.splits}
    return tuple(part for _, part in parts_on(graph, schedule, devices))


def parts_on(graph: Graph, schedule: Schedule, devices: Container[int]) -> Iterator[tuple[int, SplitGraph]]:
    """Yield the parts of some devices, each with its device, in order."""
    # Copies made by earlier splits of the same device are read as well.
    copied: dict[int, set[int]] = {}
    for split in schedule.splits:
        if split.device in devices:
            here = copied.setdefault(split.device, set())
            here.update(copy.value for copy in split.copies)
            yield split.device, _part(graph, split, here)


def in_order(part: SplitGraph, order: Sequence[int]) -> SplitGraph:
    """Return the part with its nodes in the device's order, given as numbers of the part."""
    if list(order) == list(range(len(part.nodes))):
        return part
    nodes = tuple(part.nodes[number] for number in order)
    return replace(part, graph=reordered(part.graph, order), nodes=nodes)


def _part(graph: Graph, split: Split, copied: Set[int]) -> SplitGraph:
    leaves: list[Leaf] = []
    inputs: list[int] = []
    bound: list[tuple[int, int]] = []
    for place, value in enumerate(split.inputs):
        leaf = graph.leaves[value] if value < len(graph.leaves) else None
        if leaf is None or leaf.kind is LeafKind.INPUT or value in copied:
            inputs.append(value)
            leaves.append(Leaf(LeafKind.INPUT, f"value {value}", graph.type_of(value)))
        else:
            bound.append((place, value))
            leaves.append(Leaf(leaf.kind, f"leaf {value}", leaf.type, leaf.digest))
    renumbered = {value: number for number, value in enumerate(split.inputs)}
    nodes = _nodes(graph, split, renumbered)
    outputs = tuple(Output(f"value {value}", renumbered[value]) for value in split.outputs)
    made = Graph(tuple(leaves), nodes, outputs)
    return SplitGraph(made, tuple(inputs), split.outputs, tuple(bound), split.nodes)


def _nodes(graph: Graph, split: Split, renumbered: dict[int, int]) -> tuple[Node, ...]:
    """Return the split's nodes, and add their values to `renumbered`, which maps the whole graph's
    values to the part's."""
    nodes: list[Node] = []
    whole, leaves = graph.nodes, len(graph.leaves)
    for value, number in enumerate(split.nodes, len(split.inputs)):
        node = whole[number]
        renumbered[leaves + number] = value
        operands = tuple([renumbered[operand] for operand in node.operands])
        nodes.append(Node(node.op, operands, node.type, node.attributes, node.name))
    return tuple(nodes)


#: For each device the last of its splits that has ended; -1: none.
Clock: TypeAlias = tuple[int, ...]


def clocks(graph: Graph, schedule: Schedule) -> tuple[Clock, ...]:
    """Return the splits that have ended when each split begins.

    A split comes after the previous split of its device and after those that make the values that
    it reads or copies. A split that touches a variable comes after all earlier ones that assigned
    to any variable; one that assigns also comes after those that read any. Two variables may share
    memory, so all variables count as one here.
    """
    count = 1 + max((one.device for one in schedule.splits), default=0)
    split_of = schedule.split_of
    leaves = len(graph.leaves)
    last = [-1] * count
    variables = _Variables(graph)
    found: list[Clock] = []
    for number, split in enumerate(schedule.splits):
        before = {split_of[value - leaves] for value in split.inputs if value >= leaves}
        before.update(variables.before(number, split.inputs, split.nodes))
        before.add(last[split.device])
        before.discard(-1)
        clock = [-1] * count
        for other in before:
            clock = list(map(max, clock, found[other]))
            device = schedule.splits[other].device
            clock[device] = max(clock[device], other)
        found.append(tuple(clock))
        last[split.device] = number
    return tuple(found)


def is_serial(schedule: Schedule, ended: Sequence[Clock]) -> bool:
    """True if each split must wait for the one before it."""
    pairs = zip(range(len(ended) - 1), ended[1:], strict=True)
    return all(clock[schedule.splits[number].device] == number for number, clock in pairs)


class _Variables:
    """The splits that read and assigned variables so far."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._lasting = {n for n, leaf in enumerate(graph.leaves) if leaf.kind is LeafKind.VARIABLE}
        self._writer = -1
        self._readers: list[int] = []

    def before(self, number: int, inputs: Sequence[int], nodes: Sequence[int]) -> Sequence[int]:
        """Return the splits that this one comes after."""
        if self._lasting.isdisjoint(inputs):
            return ()
        found = [self._writer]
        if any(self._graph.nodes[node].op == "assign" for node in nodes):
            found += self._readers
            self._readers = []
            self._writer = number
        else:
            self._readers.append(number)
        return found
