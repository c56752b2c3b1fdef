"""Copies between the splits of a run: ahead on separate threads, or of some rows alone.

Device threads, and threads of its own.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from heliograph_backends.contract import Buffer, BufferType, Tensor, Usage, access, host_bytes
from heliograph_proto.graph import Graph
from heliograph_proto.types import TensorType
from heliograph_server.plans.reservation import ReservationShare
from heliograph_server.scheduler.split_memory import Moves, Place, Spans, SplitMove, plan_between


class RunCopies:
    """The copies of one run, with threads for those that are made ahead.

    As a context, it waits at the end for those that have begun.
    """

    def __init__(self, tensors: Mapping[Place, Tensor], threads: ThreadPoolExecutor | None) -> None:
        self._tensors = tensors
        self._threads = threads
        self._begun: dict[Place, Future[None]] = {}
        self._is_over = False

    def __enter__(self) -> RunCopies:
        return self

    def __exit__(self, *_: object) -> None:
        wait(self._begun.values())
        # Copies without a thread may still be queued, and later their memory holds other values.
        self._is_over = True

    def before(self, moves: Moves) -> None:
        """Make the copies of a split, and start those that may be made while it runs."""
        for place in moves.reads if self._begun else ():
            # A copy that has begun was started by an earlier split on the same device.
            if (begun := self._begun.get(place)) is not None:
                begun.result()
        for move in moves.copies:
            self._copy(move)
        for move in moves.ahead:
            assert self._threads is not None
            self._begun[move.target] = self._threads.submit(self._copy_ahead, move)

    def _copy_ahead(self, move: SplitMove) -> None:
        if not self._is_over:
            self._copy(move)

    def _copy(self, move: SplitMove) -> None:
        source, target = self._tensors[move.source], self._tensors[move.target]
        if move.rows is None:
            access.copy(source, target)
        else:
            copy_rows(source, target, self._tensors[move.rows])


def copy_rows(source: Tensor, target: Tensor, names: Tensor) -> None:
    """Copy the rows, along the first axis, of a contiguous tensor that the elements of `names`
    select.

    Numbers out of range are ignored; the op that reads them raises the error.
    """
    numbers = np.empty(names.type.shape, names.type.dtype.numpy)
    access.read(names, 0, host_bytes(numbers))
    for first, behind in runs_of(numbers, source.type.shape[0]):
        access.copy(_rows(source, first, behind), _rows(target, first, behind))


def runs_of(numbers: np.ndarray[Any, Any], rows: int) -> list[tuple[int, int]]:
    """Return the rows as disjoint ranges: the first row of each, and the one after its last."""
    found = np.unique(numbers[(numbers >= 0) & (numbers < rows)])
    if not found.size:
        return []
    edges = [0, *(np.flatnonzero(np.diff(found) != 1) + 1), found.size]
    return [(int(found[start]), int(found[end - 1]) + 1) for start, end in pairwise(edges)]


def _rows(tensor: Tensor, first: int, behind: int) -> Tensor:
    """Return some rows of a contiguous tensor."""
    sizes = tensor.type.shape
    type = TensorType(tensor.type.dtype, (behind - first, *sizes[1:]))
    one = TensorType(tensor.type.dtype, (1, *sizes[1:])).nbytes if math.prod(sizes) else 0
    return Tensor(type, tensor.buffer, tensor.offset_bytes + first * one)


_SIZE = attrgetter("size_bytes")

#: The last split of a value that stays: behind that of every plan.
ALWAYS = 2**31


class StoredBetween(NamedTuple):
    """A value in a block between splits, from its first to its last split."""

    value: int
    offset_bytes: int
    size_bytes: int
    first_split: int
    last_split: int


class SplitMemoryMap:
    """The memory of one plan between splits.

    `memories` is the buffer type of each device, in the schedule's order; `reserved` returns the
    reserved memory of a device, by name.
    """

    def __init__(
        self, graph: Graph, memories: Sequence[BufferType], reserved: Callable[[str], ReservationShare]
    ) -> None:
        self._graph = graph
        self._memories = memories
        self._reserved = reserved
        self._buffers: list[Buffer] = []
        #: By device, by the place of its block: its size, and values with their offsets and spans.
        self.stored: dict[int, list[tuple[int, list[StoredBetween]]]] = {}
        #: Bytes by device that lie in reserved memory.
        self.lent = dict.fromkeys((one.device.name for one in memories), 0)

    def __repr__(self) -> str:
        return f"<Between {self.size_bytes:,} bytes>"

    @property
    def own_bytes(self) -> dict[str, int]:
        """The bytes by device that it allocated itself."""
        found = dict.fromkeys(self.lent, 0)
        for buffer in self._buffers:
            found[buffer.buffer_type.device.name] += buffer.size_bytes
        return found

    @property
    def lent_bytes(self) -> int:
        """The bytes in reserved memory, over all devices."""
        return sum(self.lent.values())

    @property
    def size_bytes(self) -> int:
        """The bytes over all devices."""
        return self.lent_bytes + sum(self.own_bytes.values())

    def place(self, spans: Spans) -> dict[Place, Tensor]:
        """Allocate tensors for values, by device; values with disjoint spans share bytes. Raises
        OutOfMemoryError, and keeps the buffers allocated so far until `free`."""
        found: dict[Place, Tensor] = {}
        for device, here in spans.items():
            memory = self._memories[device]
            arena = plan_between(self._graph, here, memory)
            chunks = self._chunks(memory, arena.chunk_bytes)
            told = self.stored[device] = [(size, []) for size in arena.chunk_bytes]
            for (value, span), chunk, offset in zip(here.items(), arena.chunks, arena.offsets, strict=True):
                type = self._graph.type_of(value)
                found[value, device] = Tensor(type, chunks[chunk], offset)
                told[chunk][1].append(StoredBetween(value, offset, type.nbytes, *span))
        return found

    def place_arrivals(self, places: Sequence[Place]) -> dict[Place, Tensor]:
        """Allocate tensors that share no bytes, since they may be written at any time. Raises as
        `place`.

        Reports have those of a device as one block.
        """
        found: dict[Place, Tensor] = {}
        told: dict[int, list[StoredBetween]] = {}
        for value, device in places:
            type, memory = self._graph.type_of(value), self._memories[device]
            self._buffers.append(memory.allocate(memory.alloc_size(type), Usage.COMPUTE))
            found[value, device] = Tensor(type, self._buffers[-1])
            those = told.setdefault(device, [])
            offset = those[-1].offset_bytes + those[-1].size_bytes if those else 0
            those.append(StoredBetween(value, offset, self._buffers[-1].size_bytes, 0, ALWAYS))
        for device, those in told.items():
            size = those[-1].offset_bytes + those[-1].size_bytes
            self.stored.setdefault(device, []).append((size, those))
        return found

    def _chunks(self, memory: BufferType, sizes: Sequence[int]) -> list[Buffer]:
        """Return buffers of the given sizes: the smallest reserved one that suffices, or a new
        one."""
        device, found = memory.device.name, list[Buffer]()
        fitting = (one for one in self._reserved(device).between if one.buffer_type.name == memory.name)
        offered = sorted(fitting, key=_SIZE)
        for size_bytes in sizes:
            place = bisect_left(offered, size_bytes, key=_SIZE)
            if place < len(offered):
                found.append(offered.pop(place))
                self.lent[device] += size_bytes
            else:
                found.append(memory.allocate(size_bytes, Usage.COMPUTE))
                self._buffers.append(found[-1])
        return found

    def free(self) -> None:
        """Give its own memory back. Idempotent."""
        for buffer in self._buffers:
            buffer.free()
        self._buffers.clear()
