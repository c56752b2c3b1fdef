"""From assignments to splits: runs of nodes on one device, and what is copied before each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from heliograph_proto.graph import LeafKind
from heliograph_server.core.scheduling.model import Assignment, Copy, Problem, Schedule, Split


def split(problem: Problem, homes: Sequence[int], assignments: Sequence[Assignment]) -> Schedule:
    """A new split wherever the device changes. Copies are of values in memory that the device cannot read.

    As in ggml there is a new split, too, where a weight must be copied and the present split has copies
    already: so the copies of weights need not lie in memory all at once.
    """
    drafts = _Drafts(problem, homes, assignments)
    for number in range(len(problem.graph.nodes)):
        drafts.add(number)
    return Schedule(drafts.splits(), tuple(assignments), tuple(homes))


@dataclass(slots=True)
class _Draft:
    """A split that is being made; values in the order in which they are met."""

    device: int
    nodes: list[int] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    inputs: dict[int, None] = field(default_factory=dict)
    outputs: dict[int, None] = field(default_factory=dict)


class _Drafts:
    """Splits so far."""

    def __init__(self, problem: Problem, homes: Sequence[int], assignments: Sequence[Assignment]) -> None:
        self._graph = problem.graph
        self._leaves = len(homes)
        self._reads = [device.reads for device in problem.devices]
        #: The device in whose memory each value is made; -1: it comes with each run.
        self._devices = [*homes, *(found.device for found in assignments)]
        self._drafts: list[_Draft] = []
        #: The split of each node so far.
        self._split_of: list[int] = []
        #: Values and the devices that they were copied to; not of those that may change.
        self._there: set[tuple[int, int]] = set()
        #: A graph without assignments changes no variable.
        self._assigns = any(node.op == "assign" for node in problem.graph.nodes)

    def add(self, number: int) -> None:
        """The next node."""
        device = self._devices[self._leaves + number]
        if not self._drafts or device != self._drafts[-1].device or self._wants_new(number):
            self._drafts.append(_Draft(device))
        draft, present = self._drafts[-1], len(self._drafts) - 1
        for value in self._graph.nodes[number].operands:
            made_in = self._split_of[value - self._leaves] if value >= self._leaves else -1
            if made_in != present and value not in draft.inputs:
                self._read(draft, value, made_in)
        draft.nodes.append(number)
        self._split_of.append(present)

    def splits(self) -> tuple[Split, ...]:
        """All of them, with what the graph returns."""
        for output in self._graph.outputs:
            if output.value >= self._leaves:
                self._drafts[self._split_of[output.value - self._leaves]].outputs[output.value] = None
        return tuple(
            Split(
                one.device, tuple(one.nodes), tuple(one.copies), tuple(one.inputs), tuple(sorted(one.outputs))
            )
            for one in self._drafts
        )

    def _wants_new(self, number: int) -> bool:
        """Whether a node needs a weight copied, behind others."""
        draft = self._drafts[-1]
        if not draft.copies:
            return False
        weights = [value for value in self._graph.nodes[number].operands if value < self._leaves]
        return any(value not in draft.inputs and self._must_copy(value, draft.device) for value in weights)

    def _read(self, draft: _Draft, value: int, made_in: int) -> None:
        draft.inputs[value] = None
        if made_in >= 0:
            self._drafts[made_in].outputs[value] = None
        if self._must_copy(value, draft.device):
            if not self._may_change(value):
                self._there.add((value, draft.device))
            size_bytes = self._graph.type_of(value).nbytes
            draft.copies.append(Copy(value, self._devices[value], draft.device, size_bytes))

    def _must_copy(self, value: int, device: int) -> bool:
        where = self._devices[value]
        return where >= 0 and where not in self._reads[device] and (value, device) not in self._there

    def _may_change(self, value: int) -> bool:
        """Whether a value may be another one later in the run."""
        leaves = self._graph.leaves
        return self._assigns and value < self._leaves and leaves[value].kind is LeafKind.VARIABLE
