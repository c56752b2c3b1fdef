"""From assignments to splits: runs of nodes on one device, and what is copied before each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from heliograph_proto.graph import Graph, LeafKind
from heliograph_server.core.scheduling.model import ALL_ROWS, Assignment, Copy, Problem, Schedule, Split

#: Ops that read those rows, or experts, of their first operand that another one names: its place, and how
#: many dimensions the first one has if its rows are those of its first axis.
READS_ROWS = {"get_rows": (1, 2), "mul_mat_id": (2, 3)}


def split(
    problem: Problem,
    homes: Sequence[int],
    assignments: Sequence[Assignment],
    taps: frozenset[int] = frozenset(),
) -> Schedule:
    """A new split wherever the device changes, or the problem wants one. Copies are of values in memory that
    the device cannot read.

    As in ggml there is a new split, too, where a weight must be copied and the present split has copies
    already: so the copies of weights need not lie in memory all at once. And where only those rows, or
    experts, of a weight are read that an operand names, that operand is computed in an earlier split, so that
    no others need be copied. And one behind each node of `taps`, whose result is an output of its split.
    """
    drafts = _Drafts(problem, homes, assignments, taps)
    for number in range(len(problem.graph.nodes)):
        drafts.add(number)
    return Schedule(drafts.splits(), tuple(assignments), tuple(homes), taps=taps)


def _names_of_rows(graph: Graph) -> Iterator[tuple[int, int]]:
    """Nodes, and the operand of each that names rows of a weight, of which it reads no others."""
    for number, node in enumerate(graph.nodes):
        if node.op in READS_ROWS and node.operands[0] < len(graph.leaves):
            place, dimensions = READS_ROWS[node.op]
            leaf = graph.leaves[node.operands[0]]
            if leaf.kind is LeafKind.WEIGHT and leaf.type.ndim == dimensions:
                yield number, node.operands[place]


@dataclass(slots=True)
class _Draft:
    """A split that is being made; values in the order in which they are met."""

    device: int
    nodes: list[int] = field(default_factory=list)
    copies: dict[int, Copy] = field(default_factory=dict)
    inputs: dict[int, None] = field(default_factory=dict)
    outputs: dict[int, None] = field(default_factory=dict)


class _Drafts:
    """Splits so far."""

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
        #: The device in whose memory each value is made; -1: it comes with each run.
        self._devices = [*homes, *(found.device for found in assignments)]
        self._drafts: list[_Draft] = []
        #: The split of each node so far.
        self._split_of: list[int] = []
        #: Values and the devices that they were copied to; not of those that may change.
        self._there: set[tuple[int, int]] = set()
        self._names = dict(_names_of_rows(problem.graph))
        self._taps = taps
        #: A graph without assignments changes no variable.
        self._assigns = any(node.op == "assign" for node in problem.graph.nodes)

    def add(self, number: int) -> None:
        """The next node."""
        device = self._devices[self._leaves + number]
        if not self._drafts or device != self._drafts[-1].device or self._wants_new(number):
            self._drafts.append(_Draft(device))
        draft, present = self._drafts[-1], len(self._drafts) - 1
        for place, value in enumerate(self._graph.nodes[number].operands):
            made_in = self._split_of[value - self._leaves] if value >= self._leaves else -1
            if made_in == present:
                continue
            rows = self._rows(number) if place == 0 and number in self._names else ALL_ROWS
            if value not in draft.inputs:
                self._read(draft, value, made_in, rows)
            elif value in draft.copies and draft.copies[value].rows != rows:
                self._copy_all(draft, value)
        draft.nodes.append(number)
        self._split_of.append(present)
        if number in self._taps:
            draft.outputs[self._leaves + number] = None

    def splits(self) -> tuple[Split, ...]:
        """All of them, with what the graph returns."""
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

    def _wants_new(self, number: int) -> bool:
        """Whether the node before is observed, a split must begin with this one, or it needs a weight copied,
        behind others, or rows of it that the present split names."""
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
        """Whether what names the rows that a node reads of a weight is computed in the present split."""
        names = self._names.get(number, -1)
        return names >= self._leaves and self._split_of[names - self._leaves] == len(self._drafts) - 1

    def _rows(self, number: int) -> int:
        """The value that names the rows to be copied; it is known before the split begins."""
        names = self._names[number]
        comes_with_run = names < self._leaves and self._graph.leaves[names].kind is LeafKind.INPUT
        is_made = names >= self._leaves and self._split_of[names - self._leaves] < len(self._drafts) - 1
        return names if comes_with_run or is_made else ALL_ROWS

    def _copy_all(self, draft: _Draft, value: int) -> None:
        """Of a value of which only rows were to be copied."""
        draft.copies[value] = replace(draft.copies[value], rows=ALL_ROWS)
        self._there.add((value, draft.device))

    def _read(self, draft: _Draft, value: int, made_in: int, rows: int) -> None:
        draft.inputs[value] = None
        if made_in >= 0:
            self._drafts[made_in].outputs[value] = None
        if self._must_copy(value, draft.device):
            if rows == ALL_ROWS and not self._may_change(value):
                self._there.add((value, draft.device))
            size_bytes = self._graph.type_of(value).nbytes
            draft.copies[value] = Copy(value, self._devices[value], draft.device, size_bytes, rows)

    def _must_copy(self, value: int, device: int) -> bool:
        where = self._devices[value]
        return where >= 0 and where not in self._reads[device] and (value, device) not in self._there

    def _may_change(self, value: int) -> bool:
        """Whether a value may be another one later in the run."""
        leaves = self._graph.leaves
        return self._assigns and value < self._leaves and leaves[value].kind is LeafKind.VARIABLE
