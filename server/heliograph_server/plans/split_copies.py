"""Copies between the splits of a run: ahead in threads of their own, or rows alone.

Device threads, and those of its own.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np

from heliograph_backends.contract import Buffer, BufferType, Tensor, Usage, access, host_bytes
from heliograph_proto.graph import Graph
from heliograph_proto.types import TensorType
from heliograph_server.plans.reservation import ReservationShare
from heliograph_server.scheduler.split_memory import Moves, Place, Span, Spans, SplitMove, plan_between


class CopyAhead:
    """A thread for each of some devices that copies what its next split needs while one computes."""

    def __init__(self, devices: int) -> None:
        self._threads = ThreadPoolExecutor(devices, "heliograph-copy")

    def __repr__(self) -> str:
        return "<CopyAhead>"

    def run(self, tensors: Mapping[Place, Tensor]) -> RunCopies:
        """The copies of one run, which is to be closed."""
        return RunCopies(tensors, self._threads)

    def close(self) -> None:
        """Ends the thread. Never during a run."""
        self._threads.shutdown()


class RunCopies:
    """The copies of one run. As a context, it waits at the end for those that were begun."""

    def __init__(self, tensors: Mapping[Place, Tensor], threads: ThreadPoolExecutor | None = None) -> None:
        self._tensors = tensors
        self._threads = threads
        self._begun: dict[Place, Future[None]] = {}
        self._is_over = False

    def __enter__(self) -> RunCopies:
        return self

    def __exit__(self, *_: object) -> None:
        wait(self._begun.values())
        # What could not get a thread may still be queued, and its memory holds other values by then.
        self._is_over = True

    def before(self, moves: Moves) -> None:
        """Makes the copies of a split, and begins those that may be made while it runs."""
        for place in moves.reads if self._begun else ():
            # If one was begun, then by the split before this one on its device, or an earlier one.
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
    """Copies those rows, along the first axis, of a contiguous tensor that the elements of `names` say.

    Numbers that are no rows are left to the op that reads them, whose error they are.
    """
    numbers = np.empty(names.type.shape, names.type.dtype.numpy)
    access.read(names, 0, host_bytes(numbers))
    for first, behind in runs_of(numbers, source.type.shape[0]):
        access.copy(_rows(source, first, behind), _rows(target, first, behind))


def runs_of(numbers: np.ndarray[Any, Any], rows: int) -> list[tuple[int, int]]:
    """Rows as ranges that do not touch: the first of each, and the one behind its last."""
    wanted = np.unique(numbers[(numbers >= 0) & (numbers < rows)])
    if not wanted.size:
        return []
    edges = [0, *(np.flatnonzero(np.diff(wanted) != 1) + 1), wanted.size]
    return [(int(wanted[start]), int(wanted[end - 1]) + 1) for start, end in pairwise(edges)]


def _rows(tensor: Tensor, first: int, behind: int) -> Tensor:
    """Some rows of a contiguous tensor."""
    sizes = tensor.type.shape
    type = TensorType(tensor.type.dtype, (behind - first, *sizes[1:]))
    one = TensorType(tensor.type.dtype, (1, *sizes[1:])).nbytes if math.prod(sizes) else 0
    return Tensor(type, tensor.buffer, tensor.offset_bytes + first * one)


_SIZE = attrgetter("size_bytes")


class SplitMemoryMap:
    """Of one plan. `memories`: of each device, in the schedule's order; `reserved`: what was reserved, by a
    device's name.
    """

    def __init__(
        self, graph: Graph, memories: Sequence[BufferType], reserved: Callable[[str], ReservationShare]
    ) -> None:
        self._graph = graph
        self._memories = memories
        self._reserved = reserved
        self._buffers: list[Buffer] = []
        #: Bytes by device that lie in what was reserved.
        self.lent = dict.fromkeys((one.device.name for one in memories), 0)

    def __repr__(self) -> str:
        return f"<Between {self.size_bytes:,} bytes>"

    @property
    def own_bytes(self) -> dict[str, int]:
        """Bytes by device that it took itself."""
        found = dict.fromkeys(self.lent, 0)
        for buffer in self._buffers:
            found[buffer.buffer_type.device.name] += buffer.size_bytes
        return found

    @property
    def lent_bytes(self) -> int:
        """What lies in what was reserved, of all devices."""
        return sum(self.lent.values())

    @property
    def size_bytes(self) -> int:
        """Of all devices."""
        return self.lent_bytes + sum(self.own_bytes.values())

    def place(self, spans: Spans) -> dict[Place, Tensor]:
        """Tensors for values, by device; those whose spans do not meet share bytes. Raises OutOfMemoryError,
        and keeps what it took until `free`."""
        return {
            (value, device): tensor
            for device, here in spans.items()
            for value, tensor in self._place(self._memories[device], here).items()
        }

    def place_arrivals(self, places: Sequence[Place]) -> dict[Place, Tensor]:
        """Tensors that share bytes with nothing, since nobody knows when they are written. As `place`."""
        found: dict[Place, Tensor] = {}
        for value, device in places:
            type, memory = self._graph.type_of(value), self._memories[device]
            self._buffers.append(memory.allocate(memory.alloc_size(type), Usage.COMPUTE))
            found[value, device] = Tensor(type, self._buffers[-1])
        return found

    def _place(self, memory: BufferType, spans: Mapping[int, Span]) -> dict[int, Tensor]:
        arena = plan_between(self._graph, spans, memory)
        chunks = self._chunks(memory, arena.chunk_bytes)
        placed = zip(spans, arena.chunks, arena.offsets, strict=True)
        return {
            value: Tensor(self._graph.type_of(value), chunks[chunk], offset)
            for value, chunk, offset in placed
        }

    def _chunks(self, memory: BufferType, sizes: Sequence[int]) -> list[Buffer]:
        """Buffers of such sizes: the smallest that suffices of what was reserved, or else a new one."""
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
        """Gives its own memory back. Idempotent."""
        for buffer in self._buffers:
            buffer.free()
        self._buffers.clear()
