"""Splits from assignments: consecutive nodes on one device, and the copies before each.

It also decides which splits must have ended before one begins; the others may run at the same time.
Splits of one device run one after the other, so one number per device says which have ended: a
vector clock, after Fidge and Mattern (1988).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise
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
    #: The first node.
    begin: int = 0
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
        #: The split of each node before the present one's.
        self._split_of: list[int] = []
        #: Values that do not change, and the devices that they were copied to.
        self._copied: set[tuple[int, int]] = set()
        self._names = dict(_names_of_rows(problem.graph))
        self._taps = taps
        #: A graph without assignments changes no variable.
        self._assigns = any(node.op == "assign" for node in problem.graph.nodes)

    def add_all(self) -> None:
        """Add all nodes, in order."""
        leaves, names, taps = self._leaves, self._names, self._taps
        # Without any of these, a split begins only where the device changes, or where a node reads a
        # leaf and the split has copies.
        may_begin, draft = bool(self._begins or taps or names), _Draft(-1)
        nodes, devices = self._graph.nodes, self._devices[leaves:]
        for number, (node, device) in enumerate(zip(nodes, devices, strict=True)):
            operands = node.operands
            may_copy = draft.copies and operands and min(operands) < leaves
            if device != draft.device or ((may_begin or may_copy) and self._begins_split(draft, number)):
                draft = self._begin(device, number)
                # Values from this one on are made in the split.
                inputs, first = draft.inputs, leaves + number
            for place, value in enumerate(operands):
                if value < first and (draft.copies or value not in inputs):
                    rows = self._rows(draft, number) if names and not place and number in names else ALL_ROWS
                    self._read(draft, value, rows)
            if taps and number in taps:
                draft.outputs[leaves + number] = None
        self._begin(-1, len(nodes))

    def _begin(self, device: int, number: int) -> _Draft:
        """End the present split before a node, and return the one that begins with it."""
        self._split_of += [len(self._drafts) - 1] * (number - len(self._split_of))
        self._drafts.append(_Draft(device, number))
        return self._drafts[-1]

    def splits(self) -> tuple[Split, ...]:
        """Return all splits, with the values that the graph returns as outputs."""
        for output in self._graph.outputs:
            if output.value >= self._leaves:
                self._drafts[self._split_of[output.value - self._leaves]].outputs[output.value] = None
        return tuple(
            Split(
                one.device,
                tuple(range(one.begin, behind.begin)),
                tuple(one.copies.values()),
                tuple(one.inputs),
                tuple(sorted(one.outputs)),
            )
            for one, behind in pairwise(self._drafts)
        )

    def _begins_split(self, draft: _Draft, number: int) -> bool:
        """True if a new split must begin with a node: the node before is observed, the problem
        requires it, the node needs another weight copied, or it needs rows of a weight that the
        present split names."""
        if number in self._begins or number - 1 in self._taps:
            return True
        operands = self._graph.nodes[number].operands
        weights: Sequence[int] = ()
        # The present split computes the row numbers that the node reads.
        if self._names.get(number, -1) >= self._leaves + draft.begin:
            weights = operands[:1]
        elif draft.copies:
            weights = [value for value in operands if value < self._leaves]
        return any(value not in draft.inputs and self._must_copy(value, draft.device) for value in weights)

    def _rows(self, draft: _Draft, number: int) -> int:
        """Return the value that names the rows to copy, if it is known before the split begins;
        else ALL_ROWS."""
        names = self._names[number]
        comes_with_run = names < self._leaves and self._graph.leaves[names].kind is LeafKind.INPUT
        is_made = self._leaves <= names < self._leaves + draft.begin
        return names if comes_with_run or is_made else ALL_ROWS

    def _read(self, draft: _Draft, value: int, rows: int) -> None:
        """Read a value from outside in the present split, and copy it, or these rows of it, if
        needed."""
        if value in draft.inputs:
            found = draft.copies.get(value)
            if found is not None and found.rows != rows:
                # Of a value of which only some rows were to be copied, all are.
                draft.copies[value] = replace(found, rows=ALL_ROWS)
                self._copied.add((value, draft.device))
            return
        draft.inputs[value] = None
        if value >= self._leaves:
            self._drafts[self._split_of[value - self._leaves]].outputs[value] = None
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
    # The nodes follow each other as in the whole graph, so all their values are less by one number.
    first = len(graph.leaves) + split.nodes[0]
    less = first - len(leaves)
    number_of = {value: number for number, value in enumerate(split.inputs)}
    nodes: list[Node] = []
    for node in graph.nodes[split.nodes[0] : split.nodes[-1] + 1]:
        operands = [value - less if value >= first else number_of[value] for value in node.operands]
        nodes.append(Node(node.op, tuple(operands), node.type, node.attributes, node.name))
    outputs = tuple([Output(f"value {value}", value - less) for value in split.outputs])
    made = Graph(tuple(leaves), tuple(nodes), outputs)
    return SplitGraph(made, tuple(inputs), split.outputs, tuple(bound), split.nodes)


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
