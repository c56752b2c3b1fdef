"""Memory of intermediate results: lifetimes, the arena that holds them, and the headroom under its
peak.

All lifetimes are known in advance, so the packing is offline, with two strategies:

- best fit, after ggml's graph allocator: walk the steps in order; a result takes the smallest free
  block that holds it; after its last reader its block is free again and joins its neighbours;
- by size, after Pisarchyk and Lee ("Efficient memory management for deep neural net inference",
  2020): the largest first, each in the smallest gap between the results that are live with it.

The second runs only if best fit is larger than the peak of live bytes. An arena that does not fit
one buffer is cut into chunks, as in ggml, and packed by best fit.

A view keeps its source's memory alive. A result is computed in place, as in ggml's graph allocator,
if its op allows it, the step is the last that needs the operand, and the operand lies in the plan's
own memory, whole and with the result's layout. Inputs, weights, variables and outputs are never
overwritten, nor is a value that another step of the same set reads, since these run at the same
time.

A step in place must read each element before it writes it and not read it again. So no other
operand of the step may lie in that memory, except at the same place in an elementwise step. A
matrix product writes sums before its epilogue reads the epilogue's operands, so it never runs in
place.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from heliograph_backends.planning.groups import PlainGroup
from heliograph_backends.planning.layout import SOURCES, ValuePlace, value_types
from heliograph_proto.errors import OutOfMemoryError
from heliograph_proto.graph import Graph
from heliograph_proto.ops.table import OPS
from heliograph_proto.types import TensorType

#: The most steps and pairs of lifetimes that packing by size visits: about 0.1 s.
MOST_WORK = 500_000
UNBOUNDED = 2**63 - 1


class Lifetime(NamedTuple):
    """A result: its size, the step that writes it, and the last step that needs it."""

    size_bytes: int
    first_step: int
    last_step: int


class Lifetimes(NamedTuple):
    """Many lifetimes, in columns."""

    sizes: list[int]
    firsts: list[int]
    lasts: list[int]

    @classmethod
    def of(cls, lifetimes: Sequence[Lifetime]) -> Lifetimes:
        sizes, firsts, lasts = zip(*lifetimes, strict=True) if lifetimes else ((), (), ())
        return cls(list(sizes), list(firsts), list(lasts))


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """The sizes of the chunks, and for each lifetime the number of its chunk and its offset
    there."""

    chunk_bytes: tuple[int, ...]
    chunks: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return sum(self.chunk_bytes)


def plan_arena(
    lifetimes: Lifetimes | Sequence[Lifetime], alignment: int = 64, max_size: int = UNBOUNDED
) -> ArenaLayout:
    """Pack lifetimes so that no two that overlap in time overlap in memory, into chunks of at most
    `max_size` bytes, rounded down to a multiple of the alignment.

    Takes O(n log n). Raises OutOfMemoryError for a result that no chunk can hold.
    """
    given = lifetimes if isinstance(lifetimes, Lifetimes) else Lifetimes.of(lifetimes)
    aligned = _aligned(given, alignment)
    limit = max_size // alignment * alignment
    if max(aligned.sizes, default=0) > limit:
        raise OutOfMemoryError(
            f"an intermediate result of {max(given.sizes):,} bytes; "
            f"one buffer of the device has {limit:,} at most",
            advice="split the tensor",
        )
    arena, peak = _best_fit(aligned, UNBOUNDED)
    if arena.size_bytes > peak and _work(aligned) <= MOST_WORK:
        arena = min(arena, _by_size(aligned), key=lambda each: each.size_bytes)
    return arena if arena.size_bytes <= limit else _best_fit(aligned, limit)[0]


def padded(size: int, alignment: int) -> int:
    """Return the size rounded up to a multiple of the alignment; at least one unit."""
    return (size + alignment - 1) // alignment * alignment or alignment


def peak_bytes(lifetimes: Lifetimes, alignment: int) -> int:
    """Return the most bytes that live at once, a lower bound for every packing."""
    more = [0] * (max(lifetimes.lasts, default=-1) + 2)
    for size, first, last in zip(*_aligned(lifetimes, alignment), strict=True):
        more[first] += size
        more[last + 1] -= size
    return max(accumulate(more), default=0)


def _aligned(lifetimes: Lifetimes, alignment: int) -> Lifetimes:
    sizes, firsts, lasts = lifetimes
    # An empty result takes one unit, so that it has an address of its own.
    more = alignment - 1
    return Lifetimes([(size + more) // alignment * alignment or alignment for size in sizes], firsts, lasts)


def _work(lifetimes: Lifetimes) -> int:
    """Return the work of packing by size: the steps of each lifetime and the lifetimes that begin
    there."""
    firsts, ends = np.array(lifetimes.firsts, np.int64), np.array(lifetimes.lasts, np.int64) + 1
    begun = np.zeros(int(ends.max(initial=0)) + 1, np.int64)
    np.cumsum(np.bincount(firsts, minlength=len(begun) - 1), out=begun[1:])
    return int((ends - firsts + 2 * (begun[ends] - begun[firsts])).sum())


# Best fit


def _best_fit(lifetimes: Lifetimes, limit: int) -> tuple[ArenaLayout, int]:
    """Pack in the order of the steps, into chunks of at most `limit` bytes; return also the most
    bytes that live at once."""
    sizes, firsts, lasts = lifetimes
    count = len(sizes)
    offsets, chunks = [0] * count, [0] * count
    ends = _in_order(lasts)
    spaces: list[_Space] = []
    ended = live = peak = 0
    for index in _in_order(firsts):
        size, first = sizes[index], firsts[index]
        while lasts[gone := ends[ended]] < first:
            spaces[chunks[gone]].release(offsets[gone], sizes[gone])
            live -= sizes[gone]
            ended += 1
        live += size
        peak = max(peak, live)
        chunks[index], offsets[index] = _take(spaces, size, limit)
    return ArenaLayout(tuple(space.top for space in spaces), tuple(chunks), tuple(offsets)), peak


def _in_order(keys: list[int]) -> list[int]:
    """Return the places of keys in ascending order; of equal keys the first comes first."""
    found: list[int] = np.argsort(np.array(keys, np.int64), kind="stable").tolist()
    return found


def _take(spaces: list[_Space], size: int, limit: int) -> tuple[int, int]:
    """Return the chunk and offset of the smallest free block that holds `size` bytes; else grow a
    chunk."""
    if spaces and limit == UNBOUNDED:
        return 0, spaces[0].take(size)
    fitting = [(space.smallest(size), number) for number, space in enumerate(spaces)]
    best, number = min(fitting, default=(UNBOUNDED, 0))
    if best == UNBOUNDED:
        growing = (n for n, space in enumerate(spaces) if space.end_of_used + size <= limit)
        number = next(growing, len(spaces))
        if number == len(spaces):
            spaces.append(_Space())
    return number, spaces[number].take(size)


class _Space:
    """Memory from 0 to a growing `top`, and its free blocks; adjacent free blocks are joined."""

    def __init__(self) -> None:
        self.top = 0
        #: (size, offset), sorted, for best fit; of equal sizes the lowest offset first.
        self._by_size: list[tuple[int, int]] = []
        self._size_at: dict[int, int] = {}
        self._offset_before: dict[int, int] = {}

    @property
    def end_of_used(self) -> int:
        """The offset of a block that fits nowhere else; the last free block may grow."""
        return self._offset_before.get(self.top, self.top)

    def smallest(self, size: int) -> int:
        """Return the size of the smallest free block that holds `size` bytes, or UNBOUNDED."""
        place = bisect_left(self._by_size, (size, 0))
        return self._by_size[place][0] if place < len(self._by_size) else UNBOUNDED

    def take(self, size: int) -> int:
        """Take `size` bytes and return their offset."""
        place = bisect_left(self._by_size, (size, 0))
        if place < len(self._by_size):
            found, offset = self._by_size[place]
            self._remove(offset)
            if found > size:
                self._add(offset + size, found - size)
            return offset
        offset = self.end_of_used
        if offset < self.top:
            self._remove(offset)
        self.top = offset + size
        return offset

    def release(self, offset: int, size: int) -> None:
        """Free a block and join it with its free neighbours."""
        end = offset + size
        if end in self._size_at:
            end += self._remove(end)
        if offset in self._offset_before:
            offset = self._offset_before[offset]
            self._remove(offset)
        self._add(offset, end - offset)

    def _add(self, offset: int, size: int) -> None:
        insort(self._by_size, (size, offset))
        self._size_at[offset] = size
        self._offset_before[offset + size] = offset

    def _remove(self, offset: int) -> int:
        size = self._size_at.pop(offset)
        del self._offset_before[offset + size]
        del self._by_size[bisect_left(self._by_size, (size, offset))]
        return size


# By size

#: The bytes of a result, from its offset to its end.
_Span = tuple[int, int]


def _by_size(lifetimes: Lifetimes) -> ArenaLayout:
    """Pack the largest first, into one chunk; of equal sizes the longest-lived, then the
    earliest."""
    sizes, firsts_of, lasts_of = lifetimes
    offsets = [0] * len(sizes)
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], firsts_of[i] - lasts_of[i], firsts_of[i]))
    alive: list[list[_Span]] = [[] for _ in range(max(lasts_of, default=0) + 1)]
    #: The first steps of the placed lifetimes, in order, and their spans.
    firsts: list[int] = []
    begun: list[_Span] = []
    top = 0
    for index in order:
        size, first, last = sizes[index], firsts_of[index], lasts_of[index]
        # A lifetime that overlaps it is alive at its first step, or begins in a later one of its steps.
        low = bisect_right(firsts, first)
        taken = alive[first] + begun[low : bisect_right(firsts, last, low)]
        offset = offsets[index] = _smallest_gap(sorted(taken), size)
        span = (offset, offset + size)
        top = max(top, offset + size)
        firsts.insert(low, first)
        begun.insert(low, span)
        for step in range(first, last + 1):
            alive[step].append(span)
    return ArenaLayout((top,) if sizes else (), (0,) * len(sizes), tuple(offsets))


def _smallest_gap(taken: list[_Span], size: int) -> int:
    """Return the offset of the smallest gap between sorted spans that holds `size`; else their
    end."""
    end, best, found = 0, UNBOUNDED, -1
    for start, stop in taken:
        if size <= start - end < best:
            best, found = start - end, end
        end = max(end, stop)
    return found if found >= 0 else end


_IN_PLACE = {name: row.in_place for name, row in OPS.items() if row.in_place}
_ELEMENTWISE = frozenset(name for name, row in OPS.items() if row.group == "elementwise")


@dataclass(frozen=True, slots=True)
class Liveness:
    """The lifetimes of the blocks of memory, and the number of each root's block."""

    lifetimes: Lifetimes
    blocks: dict[int, int]


def live_blocks(
    graph: Graph,
    places: Sequence[ValuePlace],
    groups: Sequence[PlainGroup],
    elsewhere: Container[int],
    lasting: Iterable[int],
    sets: Sequence[int] | None = None,
) -> Liveness:
    """Return blocks for the roots that groups write. A step is a group's number; lifetimes count
    sets.

    `elsewhere`: roots that lie in other memory. `lasting`: values that are read after the last
    step. `sets`: see `concurrency.side_by_side`; None: every step is a set of its own.
    """
    return _Blocks(graph, places, groups, elsewhere, lasting, sets).found()


class _Blocks:
    """Blocks under construction."""

    def __init__(
        self,
        graph: Graph,
        places: Sequence[ValuePlace],
        groups: Sequence[PlainGroup],
        elsewhere: Container[int],
        lasting: Iterable[int],
        sets: Sequence[int] | None,
    ) -> None:
        #: None: every step is a set of its own.
        self.sets = sets or None
        self.nodes = graph.nodes
        self.places = places
        self.groups = groups
        self.roots = [place[0] for place in places]
        #: The roots that have views.
        self.viewed = {root for value, root in enumerate(self.roots) if value != root}
        self.types = value_types(graph)
        self.leaves = len(graph.leaves)
        self.elsewhere = elsewhere
        #: The last step that reads each root, or -1; in `before`, the step that reads it before
        #: that.
        self.before: dict[int, int] = {}
        self.last = self._last_steps(lasting)
        self.blocks: dict[int, int] = {}

    def _last_steps(self, lasting: Iterable[int]) -> list[int]:
        nodes, roots, before, last = self.nodes, self.roots, self.before, [-1] * len(self.places)
        is_serial = self.sets is None
        for step, (_, numbers) in enumerate(self.groups):
            for number in numbers:
                for value in nodes[number].operands:
                    root = roots[value]
                    if not is_serial and 0 <= last[root] < step:
                        before[root] = last[root]
                    last[root] = step
        for value in lasting:
            last[roots[value]] = len(self.groups)
        return last

    def found(self) -> Liveness:
        roots, leaves, elsewhere, last = self.roots, self.leaves, self.elsewhere, self.last
        blocks, types = self.blocks, self.types
        sizes, firsts, lasts = list[int](), list[int](), list[int]()
        # The set of each step; behind the last one, a set after all others.
        sets: Sequence[int] = range(len(self.groups) + 1)
        if self.sets is not None:
            sets = [*self.sets, self.sets[-1] + 1]
        # The steps after which memory is free that a result may take over.
        frees = [False] * (len(self.groups) + 1)
        for step in last[leaves:]:
            frees[step] = True
        for step, group in enumerate(self.groups):
            role, numbers = group
            root = leaves + numbers[-1]
            if roots[root] != root or root in elsewhere:
                continue
            now, source = sets[step], None
            if frees[step] and role != "matmul" and role != "windows":
                source = self._taken_over(root, step, group)
            if source is None:
                block = len(sizes)
                sizes.append(types[root].nbytes)
                firsts.append(now)
                lasts.append(now)
            else:
                block = blocks[source]
            blocks[root] = block
            # A result that no step reads ends where it is made.
            lasts[block] = sets[last[root]] if last[root] > step else now
        return Liveness(Lifetimes(sizes, firsts, lasts), blocks)

    def _taken_over(self, root: int, step: int, group: PlainGroup) -> int | None:
        """Return the root whose memory the group's result takes over: that of the first suitable
        operand."""
        role, numbers = group
        nodes, roots, last, blocks, types = self.nodes, self.roots, self.last, self.blocks, self.types
        is_elementwise, type = role == "elementwise", types[root]
        for number in numbers if is_elementwise else numbers[:1]:
            node = nodes[number]
            operands = node.operands
            for place in _IN_PLACE.get(node.op, ()):
                if place >= len(operands):
                    continue
                value = operands[place]
                source = roots[value]
                if (
                    last[source] != step
                    or source not in blocks
                    or (self.sets is not None and not self._is_last(source, step))
                ):
                    continue
                # Without views, all operands that lie there are the value itself.
                if is_elementwise and types[value] is type and source not in self.viewed:
                    return source
                if self._is_whole(value, type) and self._is_alone(value, group):
                    return source
        return None

    def _is_last(self, root: int, step: int) -> bool:
        """True if no step of the set of a root's last reader reads the root before."""
        before, sets = self.before.get(root, -1), self.sets
        return sets is None or before < 0 or sets[before] < sets[step]

    def _is_whole(self, value: int, type: TensorType) -> bool:
        """True if a value has this type, is contiguous, and fills its root's memory."""
        mine = self.types[value]
        # Equal types are mostly one object.
        if mine is type and self.roots[value] == value:
            return True
        source, offset, strides = self.places[value]
        if offset or (mine is not type and mine != type) or self.types[source].nbytes != type.nbytes:
            return False
        return strides == type.strides or _same_walk(type.shape, strides, type.strides)

    def _is_alone(self, value: int, group: PlainGroup) -> bool:
        """True if no other operand of the group lies in the value's memory, or the group is
        elementwise and all of them lie at the value's own place."""
        role, numbers = group
        if len(numbers) == len(self.nodes[numbers[0]].operands) == 1:
            return True
        places, types, roots = self.places, self.types, self.roots
        place, type, root = places[value], types[value], roots[value]
        found = 0
        for number in numbers:
            for other in self.nodes[number].operands:
                if roots[other] == root:
                    found += 1
                    if other != value and (places[other] != place or types[other] != type):
                        return False
        if found == 1 or role == "elementwise":
            return True
        return self.nodes[numbers[-1]].op in _ELEMENTWISE


def _same_walk(shape: tuple[int, ...], strides: tuple[int, ...], plain: tuple[int, ...]) -> bool:
    """True if strides differ only where a dimension has one element."""
    return all(size == 1 or a == b for size, a, b in zip(shape, strides, plain, strict=True))


#: The most steps over which a producer's operands may be kept; bounds the work for each producer.
MOST_STEPS = 4096


class Headroom:
    """The bytes that may be added at each step of a graph without raising the peak of live bytes.

    Steps are those without fusion. Bytes are counted in float64: they are only compared with each
    other, and no sizes of a graph overflow it.
    """

    def __init__(self, graph: Graph, places: Sequence[ValuePlace], groups: Sequence[PlainGroup]) -> None:
        leaves = len(graph.leaves)
        elsewhere = {*range(leaves), *(output.value for output in graph.outputs)}
        elsewhere.update([value for value, node in enumerate(graph.nodes, leaves) if node.op in SOURCES])
        sizes, firsts, lasts = live_blocks(graph, places, groups, elsewhere, ()).lifetimes
        steps = len(groups) + 2
        begun = np.bincount(np.array(firsts, np.int64), sizes, steps)
        live = np.cumsum(begun - np.bincount(np.array(lasts, np.int64) + 1, sizes, steps))
        self._room = live.max() - live
        #: Sizes as arrays, which NumPy subtracts sooner than Python's numbers.
        self._arrays: dict[int, np.ndarray[Any, Any]] = {}

    def take(self, first: int, last: int, size_bytes: int) -> bool:
        """Reserve bytes from step `first` to `last`; False if they do not fit. Negative sizes give
        room."""
        if not size_bytes:
            return True
        if last - first > MOST_STEPS:
            return size_bytes <= 0
        part = self._room[first : last + 1]
        # There is room for 0 bytes everywhere. `argmin` takes a third of the time of `min`.
        if size_bytes > 0 and size_bytes > part[part.argmin()]:
            return False
        size = self._arrays.get(size_bytes)
        if size is None:
            size = self._arrays[size_bytes] = np.array(float(size_bytes))
        np.subtract(part, size, part)
        return True
