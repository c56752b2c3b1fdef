"""Pinned host memory that is reused: copies between ordinary memory and the device pass through it.

A copy from ordinary memory would wait for the driver's own staging. With these pieces, the
processor fills one piece while the device reads another.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from heliograph_backends.cuda.driver.driver import Bytes, Driver, Mark, Queue

#: The size of a piece, and the most pieces: larger copies reuse them in turn.
PIECE_BYTES = 4 * 2**20
MOST_PIECES = 8
#: The time that a transfer waits for a piece that others hold. Each holds one for milliseconds.
WAIT_SECONDS = 60.0


@dataclass(eq=False)
class StagingPiece:
    """A piece, and the mark after which the device no longer uses it."""

    memory: Bytes
    mark: Mark = None
    address: int = field(init=False)

    def __post_init__(self) -> None:
        self.address = int(self.memory.ctypes.data)


class PinnedRanges:
    """Other pinned host memory, to and from which copies are direct."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}

    def add(self, memory: Bytes) -> Callable[[], None]:
        """Add memory. Returns a call that removes it."""
        start = int(memory.ctypes.data)
        self._ends[start] = start + memory.nbytes

        def forget() -> None:
            self._ends.pop(start, None)

        return forget

    def has(self, memory: Bytes) -> bool:
        """True if all of it is pinned."""
        start = int(memory.ctypes.data)
        end = start + memory.nbytes
        return any(first <= start and end <= last for first, last in list(self._ends.items()))


class PinnedStaging:
    """The pieces of one device, made when they are first needed."""

    def __init__(self, driver: Driver, wait: Callable[[Mark], None]) -> None:
        """Create the staging of a device. `wait` waits until the device has reached a mark."""
        self._driver = driver
        self._wait = wait
        self._free: deque[StagingPiece] = deque()
        self._made = 0
        self._condition = threading.Condition()
        #: Memory that needs no piece.
        self.pinned = PinnedRanges()

    def __repr__(self) -> str:
        return f"<Staging of {self._made} pieces, {len(self._free)} free>"

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the host's memory allocated so far."""
        return self._made * PIECE_BYTES

    def take(self) -> StagingPiece:
        """Take a piece that the device no longer uses. Raises DriverError, TimeoutError."""
        piece = self._take(WAIT_SECONDS)
        if piece is None:
            raise TimeoutError("no staging memory became free")
        return self._ready(piece)

    def take_another(self) -> StagingPiece | None:
        """Take a further piece without waiting; None if others hold the rest, who may wait for the
        caller's piece. Raises DriverError."""
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
            # Make another piece rather than wait for the device, up to the limit.
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
        """Give a piece back; with a queue, it is free when the device has reached the queue's
        present end."""
        if queue is not None:
            piece.mark = self._driver.mark(queue)
        with self._condition:
            self._free.append(piece)
            self._condition.notify()

    def to_device(self, address: int, data: Any, queue: Queue) -> None:
        """Put a copy of bytes on a queue; `data` may change when this returns."""
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
        """Copy bytes after the work on a queue, and wait for them; one piece is transferred while
        another is read."""
        target = _bytes(out)
        if self.pinned.has(target):
            self._straight(int(target.ctypes.data), address, target.nbytes, queue)
            return
        pending: deque[tuple[StagingPiece, int]] = deque()
        try:
            for start in range(0, target.nbytes, PIECE_BYTES):
                piece = self.take_another() if pending else self.take()
                if piece is None:
                    self._read(target, *pending.popleft())
                    piece = self.take()
                self._fetch(piece, address + start, min(PIECE_BYTES, target.nbytes - start), queue)
                pending.append((piece, start))
                if len(pending) > 1:
                    self._read(target, *pending.popleft())
            while pending:
                self._read(target, *pending.popleft())
        finally:
            for piece, _ in pending:
                self.give(piece)

    def _straight(self, target: int, source: int, size_bytes: int, queue: Queue) -> None:
        """Copy and wait, since the host's memory may change afterwards."""
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
