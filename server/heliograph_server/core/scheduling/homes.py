"""Where weights and variables live: on the devices by priority, as far as their memory goes.

As llama.cpp spreads layers: nodes are walked in order, and what each needs is put on the present device;
when that is full, the next one follows. So a model that fits the first device lies there alone, and one
that does not is cut between layers.
"""

from __future__ import annotations

from heliograph_proto.errors import OutOfMemoryError
from heliograph_proto.graph import Graph, LeafKind
from heliograph_server.core.scheduling.model import Problem

#: An input: it comes with each run.
NOWHERE = -1


def place_leaves(problem: Problem) -> tuple[int, ...]:
    """The device of each leaf. Raises OutOfMemoryError, saying by how much."""
    graph = problem.graph
    homes = [NOWHERE] * len(graph.leaves)
    room = _Room(problem)
    for value, device in problem.placed.items():
        homes[value] = device
        room.note(device, graph.type_of(value).nbytes)
    for number in range(len(graph.nodes)):
        pinned = problem.pins.get(number)
        for value in graph.nodes[number].operands:
            if value < len(graph.leaves) and homes[value] == NOWHERE and _lasts(graph, value):
                homes[value] = room.take(graph.type_of(value).nbytes, pinned)
    for value in range(len(graph.leaves)):
        if homes[value] == NOWHERE and _lasts(graph, value):
            homes[value] = room.take(graph.type_of(value).nbytes, None)
    return tuple(homes)


def _lasts(graph: Graph, value: int) -> bool:
    return graph.leaves[value].kind is not LeafKind.INPUT


class _Room:
    """What is left of each device's memory for leaves."""

    def __init__(self, problem: Problem) -> None:
        self._names = [device.name for device in problem.devices]
        self._left = [device.free_bytes for device in problem.devices]
        self._present = 0

    def take(self, size_bytes: int, pinned: int | None) -> int:
        if pinned is not None:
            self._use(pinned, size_bytes)
            return pinned
        while size_bytes > self._left[self._present]:
            if self._present + 1 == len(self._left):
                raise OutOfMemoryError(
                    f"the graph's weights and variables do not fit: {size_bytes:,} bytes more are needed, "
                    f"and {self._names[-1]}, the last of these devices, has {self._left[-1]:,} left",
                    advice="name more devices, or give these more memory",
                )
            self._present += 1
        self._use(self._present, size_bytes)
        return self._present

    def note(self, device: int, size_bytes: int) -> None:
        """What lies there already."""
        self._left[device] = max(0, self._left[device] - size_bytes)

    def _use(self, device: int, size_bytes: int) -> None:
        if size_bytes > self._left[device]:
            raise OutOfMemoryError(
                f"what is pinned to {self._names[device]} needs {size_bytes - self._left[device]:,} bytes "
                "more than it has",
                advice="pin less to it, or give it more memory",
            )
        self._left[device] -= size_bytes
