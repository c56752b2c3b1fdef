"""Follows the addresses of a graph, and says which nodes read the results of others. Pure.

ggml's nodes read and write memory at addresses, and a graph's memory is used several times. Here
each node is followed in order. A node reads one of three things: memory as it was before the graph,
the result of an earlier node, or a *kept region*, which is memory that nodes change in place, such
as a cache of keys. Where a read is none of these, the graph is cut in two, and the second part
reads memory again. So the graph leaves the bytes that one node after the other would leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from heliograph_proto.pace import in_turns
from heliograph_proto.types import DType
from heliograph_server.gateways.ggml_rpc import wire
from heliograph_server.gateways.ggml_rpc.buffers import Place, RefusedError, Spans

#: How often the nodes of a part are followed anew, since a kept region was found; how many nodes
#: are followed in all, for each node of the graph.
MOST_ROUNDS = 64
MOST_FOLLOWED = 128


@dataclass(frozen=True, slots=True)
class Step:
    """A node to compute."""

    tensor: wire.Tensor
    #: The places that it reads, by source; None: no such source, or it is not read.
    reads: tuple[Place | None, ...]
    writes: Place
    #: True if it changes what lies at its place already.
    updates: bool = False
    #: The number of the result, of an op that writes several.
    result: int = 0


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes of a buffer as elements of one type."""

    buffer: int
    start: int
    end: int
    dtype: DType

    @property
    def units(self) -> int:
        """Its elements, or blocks."""
        return (self.end - self.start) // self.dtype.block_bytes

    @property
    def size(self) -> int:
        return self.units * self.dtype.block_size

    def has(self, place: Place) -> bool:
        """True if a tensor of its type lies in it."""
        return (
            self.buffer == place.buffer.handle
            and self.start <= place.offset
            and place.end <= self.end
            and self.dtype is place.dtype
            and (place.offset - self.start) % self.dtype.block_bytes == 0
        )

    def overlaps(self, buffer: int, start: int, end: int) -> bool:
        return self.buffer == buffer and self.start < end and start < self.end


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive steps that run as one graph of ours."""

    steps: tuple[Step, ...]
    #: For each step, what each read is: a step's number, a region, or None.
    sources: tuple[tuple[int | Region | None, ...], ...]
    #: Regions that steps change in place.
    kept: tuple[Region, ...]
    #: (region, step) of each result that is in memory at the end.
    results: tuple[tuple[Region, int], ...]


@dataclass(slots=True)
class _State:
    """The state while the steps of a part are followed."""

    kept: list[Region]
    spans: dict[int, Spans] = field(default_factory=dict)
    sources: list[tuple[int | Region | None, ...]] = field(default_factory=list)
    #: Memory that was read as it was before.
    memory: list[Region] = field(default_factory=list)


class _CutError(Exception):
    """The part ends before this step."""


class _KeepError(Exception):
    """A region must be kept, and the steps followed anew."""

    def __init__(self, region: Region) -> None:
        self.region = region


class _Budget:
    """The number of steps that may still be followed."""

    def __init__(self, steps: int) -> None:
        self._left = MOST_FOLLOWED * (steps + 1)

    def take(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise RefusedError("a graph whose nodes overlap in memory in too many ways")


def parts_of(steps: Sequence[Step]) -> list[Part]:
    """Cut the steps of a graph into parts. Raises RefusedError."""
    found: list[Part] = []
    first, budget = 0, _Budget(len(steps))
    while first < len(steps):
        part = _part(steps, first, budget)
        found.append(part)
        first += len(part.steps)
    return found


def _part(steps: Sequence[Step], first: int, budget: _Budget) -> Part:
    kept: list[Region] = []
    last = len(steps)
    for _ in range(MOST_ROUNDS):
        state = _State(kept)
        try:
            for number in in_turns(range(first, last)):
                budget.take()
                try:
                    _follow(state, steps[number], number - first)
                except _CutError:
                    if number == first:
                        return _alone(steps, first, budget)
                    last = number
                    break
        except _KeepError as found:
            kept = _joined(kept, found.region)
            continue
        return _finished(steps[first:last], state)
    return _alone(steps, first, budget)


def _alone(steps: Sequence[Step], first: int, budget: _Budget) -> Part:
    """Follow one step by itself, which needs the fewest regions. Raises RefusedError."""
    if len(steps) - first == 1:
        raise RefusedError(f"{_named(steps[first])} reads and writes in ways that cannot be followed")
    return _part(steps[: first + 1], first, budget)


def _named(step: Step) -> str:
    return f"node {step.tensor.name!r} (op {step.tensor.op})"


def _follow(state: _State, step: Step, number: int) -> None:
    sources = tuple(None if one is None else _source(state, one) for one in step.reads)
    place = step.writes
    handle = place.buffer.handle
    inside = [one for one in state.kept if one.overlaps(handle, place.offset, place.end)]
    if inside:
        if len(inside) > 1 or not inside[0].has(place):
            raise _CutError
    elif step.updates or not _is_dense(place):
        _keep(state, place)
    else:
        state.spans.setdefault(handle, Spans()).set(place.offset, place.end, number)
    state.sources.append(sources)


def _source(state: _State, place: Place) -> int | Region:
    handle, start, end = place.buffer.handle, place.offset, place.end
    for region in state.kept:
        if region.overlaps(handle, start, end):
            if not region.has(place):
                raise _CutError
            return region
    spans = state.spans.get(handle)
    found = spans.overlapping(start, end) if spans is not None else []
    if not found:
        region = Region(handle, start, end, place.dtype)
        state.memory.append(region)
        return region
    begin, stop, number = found[0]
    if len(found) == 1 and begin <= start and end <= stop:
        return number
    _keep(state, place)
    raise AssertionError


def _keep(state: _State, place: Place) -> None:
    """Keep the region of a place. Raises _KeepError, or _CutError where results lie there that are
    no part of it."""
    handle, start, end = place.buffer.handle, place.offset, place.end
    spans = state.spans.get(handle)
    for begin, stop, _ in spans.overlapping(start, end) if spans is not None else ():
        if begin < start or stop > end:
            raise _CutError
    for one in state.memory:
        if one.overlaps(handle, start, end) and not (start <= one.start and one.end <= end):
            start, end = min(start, one.start), max(end, one.end)
        if one.overlaps(handle, start, end) and one.dtype is not place.dtype:
            raise _CutError
    raise _KeepError(Region(handle, start, end, place.dtype))


def _joined(kept: Sequence[Region], new: Region) -> list[Region]:
    """Return the kept regions with a new one, joined with those that it overlaps."""
    rest = []
    for one in kept:
        if not one.overlaps(new.buffer, new.start, new.end):
            rest.append(one)
        elif one.dtype is new.dtype:
            new = Region(new.buffer, min(one.start, new.start), max(one.end, new.end), new.dtype)
    return [*rest, new]


def _is_dense(place: Place) -> bool:
    """True if a place has no gaps, in whatever order of its dimensions."""
    step = place.dtype.block_bytes
    for stride, size in sorted(zip(place.nb, place.blocks, strict=True)):
        if size != 1 and stride != step:
            return False
        step *= size
    return place.dtype.block_size == 1 or place.blocks[0] == 1 or place.nb[0] == place.dtype.block_bytes


def _finished(steps: Sequence[Step], state: _State) -> Part:
    results = []
    for handle, spans in state.spans.items():
        for start, end, number in spans:
            results.append((Region(handle, start, end, steps[number].writes.dtype), number))
    return Part(tuple(steps), tuple(state.sources), tuple(state.kept), tuple(results))
