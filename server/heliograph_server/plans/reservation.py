"""Memory that is allocated once, for the largest graph, and then holds the plans of a session.

It has an arena for each device, which holds the plans of splits one after the other, and buffers
for the values between splits. One `RunSlots` runs all plans in it, so that no plan overwrites
memory that another one still uses.

Any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import zip_longest

from heliograph_backends.contract import Arena, Buffer, Device, DeviceCompileOptions, Usage
from heliograph_proto.errors import UnsupportedError
from heliograph_proto.graph import Graph, reordered
from heliograph_server.scheduler.model import Schedule
from heliograph_server.scheduler.split_memory import plan_between, values_between
from heliograph_server.scheduler.splits import clocks, cut


def ordered(device: Device, graph: Graph) -> tuple[Graph, tuple[int, ...] | None]:
    """Return the graph in the order that the device prefers, and that order; None if it is
    unchanged."""
    order = tuple(device.optimize(graph))
    if order == tuple(range(len(graph.nodes))):
        return graph, None
    return reordered(graph, order), order


@dataclass(frozen=True, slots=True)
class Need:
    """The memory that a graph needs on a device, in bytes: blocks of an arena, and buffers for
    values between splits."""

    blocks: tuple[int, ...] = ()
    between: tuple[int, ...] = ()

    def and_split(self, blocks: Sequence[int]) -> Need:
        """Return the need with one more split, which uses the same blocks."""
        pairs = zip_longest(self.blocks, sorted(blocks, reverse=True), fillvalue=0)
        return Need(tuple(map(max, pairs)), self.between)


@dataclass(frozen=True, slots=True)
class ReservationShare:
    """A reservation's memory on one device."""

    size_bytes: int = 0
    arena: Arena | None = None
    between: tuple[Buffer, ...] = ()


class MemoryReservation:
    """Reserved memory of devices, by their names. Raises OutOfMemoryError, and then keeps
    nothing."""

    def __init__(self, needs: Mapping[Device, Need]) -> None:
        self.shares: dict[str, ReservationShare] = {}
        self._lock = threading.Lock()
        #: The number of compiles that are about to use it.
        self._users = 0
        #: True if it was freed, or will be when these have ended.
        self.is_over = False
        with ExitStack() as stack:
            for device, need in needs.items():
                self.shares[device.name] = _share(device, need, stack)
            # All allocations succeeded: keep them.
            self._taken = stack.pop_all()

    def __repr__(self) -> str:
        state = "over" if self.is_over else f"{sum(self.sizes.values()):,} bytes"
        return f"<Reservation {state} on {', '.join(self.shares)}>"

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes by device; 0 for one whose plans take memory of their own."""
        return {name: one.size_bytes for name, one in self.shares.items()}

    def share(self, device: str) -> ReservationShare:
        """Return the reserved memory of a device."""
        return self.shares.get(device, NOTHING)

    def when_freed(self, call: Callable[[], None]) -> None:
        """Register a callback for the end of the reservation."""
        self._taken.callback(call)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the memory while the context is active."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                ends = self.is_over and not self._users
            if ends:
                self._taken.close()

    def free(self) -> None:
        """Give the memory back as soon as no compile is about to use it. Idempotent."""
        with self._lock:
            ends, self.is_over = not self.is_over and not self._users, True
        if ends:
            self._taken.close()


NOTHING = ReservationShare()


def _share(device: Device, need: Need, stack: ExitStack) -> ReservationShare:
    arena = device.arena(need.blocks) if need.blocks else None
    if arena is not None:
        stack.callback(arena.free)
    between = []
    for size_bytes in need.between:
        between.append(device.buffer_type.allocate(size_bytes, Usage.COMPUTE))
        stack.callback(between[-1].free)
    size_bytes = sum(need.between) + (arena.size_bytes if arena is not None else 0)
    return ReservationShare(size_bytes, arena, tuple(between))


def needs_of(
    graph: Graph, devices: Sequence[Device], schedule: Schedule | None, options: DeviceCompileOptions
) -> dict[Device, Need]:
    """Return the memory that a graph needs for its intermediate results: on the first device if
    there is no schedule."""
    if schedule is None:
        return {devices[0]: Need().and_split(_blocks(devices[0], graph, options))}
    found = {devices[one.device]: Need() for one in schedule.splits}
    for place, spans in values_between(graph, schedule, clocks(graph, schedule)).items():
        found[devices[place]] = Need((), plan_between(graph, spans, devices[place].buffer_type).chunk_bytes)
    for part, split in zip(cut(graph, schedule), schedule.splits, strict=True):
        device = devices[split.device]
        found[device] = found[device].and_split(_blocks(device, part.graph, options))
    return found


def _blocks(device: Device, graph: Graph, options: DeviceCompileOptions) -> tuple[int, ...]:
    """Return the arena blocks that the plan of a graph needs; none if the device cannot
    estimate."""
    try:
        return device.estimate(ordered(device, graph)[0], options).arena_bytes
    except UnsupportedError:
        return ()
