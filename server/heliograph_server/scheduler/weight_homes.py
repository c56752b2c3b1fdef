"""Place weights and variables: on the devices by priority, as far as their memory goes.

As llama.cpp distributes layers: nodes are walked in order, and their weights go to the present
device; when that is full, the next device follows. So a model that fits the first device lies there
alone, and a larger one is cut between layers. A leaf skips a device that cannot run its reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from heliograph_proto.errors import OutOfMemoryError
from heliograph_proto.graph import Graph, LeafKind
from heliograph_proto.ops.table import OPS
from heliograph_server.scheduler.model import Problem

#: The home of an input, which comes with each run.
NOWHERE = -1
#: Ops whose weight is too small to follow: rope's factors, attention's sinks.
LIGHT_WEIGHTS = frozenset({"rope", "flash_attn_ext", "flash_attn_paged"})
VIEWS = frozenset(name for name, row in OPS.items() if row.is_view)


def leaf_roots(graph: Graph) -> list[int]:
    """Return for each value the leaf that it is, or is a view of; -1 for none."""
    roots = list(range(len(graph.leaves)))
    for node in graph.nodes:
        roots.append(roots[node.operands[0]] if node.op in VIEWS else -1)
    return roots


def place_leaves(problem: Problem, roots: Sequence[int], wishes: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the device of each leaf.

    `roots` is `leaf_roots` of the graph; `wishes` is the preferred device of each node, and so of
    the leaves that it reads. Raises OutOfMemoryError, which says how many bytes are missing.
    """
    graph = problem.graph
    homes = [NOWHERE] * len(graph.leaves)
    room = _Room(problem)
    for value, device in problem.placed.items():
        homes[value] = device
        room.note(device, graph.type_of(value).nbytes)
    for value, uses in uses_of(graph, roots).items():
        if homes[value] == NOWHERE:
            pin = pin_of(problem, uses)
            size_bytes = graph.type_of(value).nbytes
            if pin is None:
                wish = wishes[deciding(graph, uses)[0]] if wishes and uses else None
                homes[value] = room.take(size_bytes, _able(problem, uses), wish)
            else:
                homes[value] = pin
                room.use(pin, size_bytes)
    return tuple(homes)


def uses_of(graph: Graph, roots: Sequence[int]) -> dict[int, list[int]]:
    """Return for each weight and variable the nodes that read it, directly or through views,
    ordered by first use."""
    lasting = [leaf.kind is not LeafKind.INPUT for leaf in graph.leaves]
    found: dict[int, list[int]] = {}
    for number, node in enumerate(graph.nodes):
        for value in node.operands:
            leaf = roots[value]
            if leaf >= 0 and lasting[leaf]:
                uses = found.get(leaf)
                if uses is None:
                    found[leaf] = [number]
                else:
                    uses.append(number)
    for leaf, lasts in enumerate(lasting):
        if lasts:
            found.setdefault(leaf, [])
    return found


def pin_of(problem: Problem, uses: Sequence[int]) -> int | None:
    """Return the pinned device of a leaf's users: assignments decide, then the first pinned
    node."""
    if not problem.pins:
        return None
    nodes, pins = problem.graph.nodes, problem.pins
    assignments = (number for number in uses if nodes[number].op == "assign")
    return next((pins[number] for number in chain(assignments, uses) if number in pins), None)


def _able(problem: Problem, uses: Sequence[int]) -> Callable[[int], bool]:
    """Return a test whether a device can run the nodes that decide a leaf's home: its assignments,
    or its first reader."""
    numbers = _deciding(problem.graph, uses)
    return lambda device: not any(problem.devices[device].refusals[number] for number in numbers)


def _deciding(graph: Graph, uses: Sequence[int]) -> Sequence[int]:
    nodes = graph.nodes
    if len(uses) == 1:
        op = nodes[uses[0]].op
        return () if op in VIEWS or op in LIGHT_WEIGHTS else uses
    return [number for number in uses if nodes[number].op == "assign"] or [
        number for number in uses if nodes[number].op not in VIEWS and nodes[number].op not in LIGHT_WEIGHTS
    ][:1]


def deciding(graph: Graph, uses: Sequence[int]) -> Sequence[int]:
    """Return the nodes, of those that use a leaf, that decide its home: at least one."""
    return _deciding(graph, uses) or uses[:1]


class _Room:
    """The memory of each device that is left for leaves."""

    def __init__(self, problem: Problem) -> None:
        self._names = [device.name for device in problem.devices]
        self._left = [device.free_bytes for device in problem.devices]
        self._present = 0

    def take(self, size_bytes: int, able: Callable[[int], bool], wish: int | None = None) -> int:
        """Reserve room on the preferred device if it has enough, else on the first one that has,
        from the present one on; if no able device has room, on any. Return the device. Raises
        OutOfMemoryError."""
        if wish is not None and able(wish) and size_bytes <= self._left[wish]:
            self._left[wish] -= size_bytes
            return wish
        present = self._present
        if size_bytes <= self._left[present] and able(present):
            self._left[present] -= size_bytes
            return present
        for device in self._candidates(size_bytes, able):
            self._left[device] -= size_bytes
            return device
        raise OutOfMemoryError(
            f"the graph's weights and variables do not fit: {size_bytes:,} bytes more are needed, "
            f"and {self._names[-1]}, the last of these devices, has {self._left[-1]:,} left",
            advice="name more devices, or give these more memory",
        )

    def _candidates(self, size_bytes: int, able: Callable[[int], bool]) -> Iterator[int]:
        count = len(self._left)
        for device in range(self._present, count):
            if able(device):
                if size_bytes <= self._left[device]:
                    yield device
                elif device == self._present < count - 1:
                    self._present += 1
        fitting = [device for device in range(count) if size_bytes <= self._left[device]]
        yield from sorted(fitting, key=lambda device: not able(device))

    def note(self, device: int, size_bytes: int) -> None:
        """Account for a leaf that already lies on a device."""
        self._left[device] = max(0, self._left[device] - size_bytes)

    def use(self, device: int, size_bytes: int) -> None:
        """Account for a leaf that must lie on a device. Raises OutOfMemoryError."""
        if size_bytes > self._left[device]:
            raise OutOfMemoryError(
                f"the nodes pinned to {self._names[device]} need {size_bytes - self._left[device]:,} bytes "
                "more than it has",
                advice="pin fewer nodes to it, or give it more memory",
            )
        self._left[device] -= size_bytes
