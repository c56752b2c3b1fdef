"""Pinned host memory, made once and used again: what goes between ordinary memory and the device passes
through it.

A copy from ordinary memory would wait for the driver's own staging; through ours the processor fills one
piece while the device fetches another.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from heliograph_backends.cuda.driver.driver import Bytes, Driver, Mark, Queue

#: Of a piece, and how many there are at most: copies larger than all of them take turns.
PIECE_BYTES = 4 * 2**20
MOST_PIECES = 8
#: How long a transfer waits for a piece that others hold. Each holds one for milliseconds.
WAIT_SECONDS = 60.0


@dataclass(eq=False)
class StagingPiece:
    """A piece, and where the device is when it has done with it."""

    memory: Bytes
    mark: Mark = None
    address: int = field(init=False)

    def __post_init__(self) -> None:
        self.address = int(self.memory.ctypes.data)


class PinnedRanges:
    """Host memory beside the pieces that is pinned: copies to and from it go straight."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}

    def add(self, memory: Bytes) -> Callable[[], None]:
        """Notes memory; the call returned forgets it."""
        start = int(memory.ctypes.data)
        self._ends[start] = start + memory.nbytes

        def forget() -> None:
            self._ends.pop(start, None)

        return forget

    def has(self, memory: Bytes) -> bool:
        """Whether all of it is pinned."""
        start = int(memory.ctypes.data)
        end = start + memory.nbytes
        return any(first <= start and end <= last for first, last in list(self._ends.items()))


class PinnedStaging:
    """The pieces of one device. They are made when they are first needed."""

    def __init__(self, driver: Driver, wait: Callable[[Mark], None]) -> None:
        """`wait` does so until the device got to a mark."""
        self._driver = driver
        self._wait = wait
        self._free: deque[StagingPiece] = deque()
        self._made = 0
        self._condition = threading.Condition()
        #: What needs no piece.
        self.pinned = PinnedRanges()

    def __repr__(self) -> str:
        return f"<Staging of {self._made} pieces, {len(self._free)} free>"

    @property
    def pinned_bytes(self) -> int:
        """Taken of the host's memory so far."""
        return self._made * PIECE_BYTES

    def take(self) -> StagingPiece:
        """A piece that the device has done with. Raises DriverError, TimeoutError."""
        piece = self._take(WAIT_SECONDS)
        if piece is None:
            raise TimeoutError("no staging memory became free")
        return self._ready(piece)

    def take_another(self) -> StagingPiece | None:
        """A piece for who holds one already: None if others hold the rest, who may wait for that one. Raises
        DriverError."""
        piece = self._take(0)
        return None if piece is None else self._ready(piece)

    def _ready(self, piece: StagingPiece) -> StagingPiece:
        mark, piece.mark = piece.mark, None
        if mark is not None:
            try:
                self._wait(mark)
            except BaseException:
                self.give(piece)
                raise
        return piece

    def _take(self, seconds: float) -> StagingPiece | None:
        with self._condition:
            # Another one rather than waiting for the device, as long as there may be one.
            if not (self._free and self._is_ready(self._free[0])) and self._made < MOST_PIECES:
                self._made += 1
                try:
                    return StagingPiece(self._driver.allocate_pinned(PIECE_BYTES))
                except BaseException:
                    self._made -= 1
                    raise
            self._condition.wait_for(lambda: self._free, seconds)
            return self._free.popleft() if self._free else None

    def _is_ready(self, piece: StagingPiece) -> bool:
        return piece.mark is None or self._driver.is_reached(piece.mark)

    def give(self, piece: StagingPiece, queue: Queue = None) -> None:
        """Gives a piece back; with a queue, it is free when the device has come so far."""
        if queue is not None:
            piece.mark = self._driver.mark(queue)
        with self._condition:
            self._free.append(piece)
            self._condition.notify()

    def to_device(self, address: int, data: Any, queue: Queue) -> None:
        """Puts a copy of bytes on a queue; `data` may change when it returns."""
        source = _bytes(data)
        if self.pinned.has(source):
            self._straight(address, int(source.ctypes.data), source.nbytes, queue)
            return
        for start in range(0, source.nbytes, PIECE_BYTES):
            part = source[start : start + PIECE_BYTES]
            piece = self.take()
            try:
                piece.memory[: part.nbytes] = part
                self._driver.copy(address + start, piece.address, part.nbytes, queue)
            finally:
                self.give(piece, queue)

    def to_host(self, out: Any, address: int, queue: Queue) -> None:
        """Copies bytes behind what is on a queue, and waits for them; one piece comes while another is
        read."""
        target = _bytes(out)
        if self.pinned.has(target):
            self._straight(int(target.ctypes.data), address, target.nbytes, queue)
            return
        coming: deque[tuple[StagingPiece, int]] = deque()
        try:
            for start in range(0, target.nbytes, PIECE_BYTES):
                piece = self.take_another() if coming else self.take()
                if piece is None:
                    self._read(target, *coming.popleft())
                    piece = self.take()
                self._fetch(piece, address + start, min(PIECE_BYTES, target.nbytes - start), queue)
                coming.append((piece, start))
                if len(coming) > 1:
                    self._read(target, *coming.popleft())
            while coming:
                self._read(target, *coming.popleft())
        finally:
            for piece, _ in coming:
                self.give(piece)

    def _straight(self, target: int, source: int, size_bytes: int, queue: Queue) -> None:
        """Copies, and waits: the host's memory may change afterwards."""
        self._driver.copy(target, source, size_bytes, queue)
        self._wait(self._driver.mark(queue))

    def _fetch(self, piece: StagingPiece, address: int, size_bytes: int, queue: Queue) -> None:
        try:
            self._driver.copy(piece.address, address, size_bytes, queue)
            piece.mark = self._driver.mark(queue)
        except BaseException:
            self.give(piece)
            raise

    def _read(self, target: Bytes, piece: StagingPiece, start: int) -> None:
        size = min(PIECE_BYTES, target.nbytes - start)
        try:
            self._wait(piece.mark)
            piece.mark = None
            target[start : start + size] = piece.memory[:size]
        finally:
            self.give(piece)


def _bytes(data: Any) -> Bytes:
    return np.frombuffer(data, np.uint8)
