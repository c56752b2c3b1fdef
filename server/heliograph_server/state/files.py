"""Files of the state folder, written and read past the cache of the system.

Bytes of a snapshot are read again by another daemon, if ever. In the cache they would take memory
from programs, and fresh memory of the cache is often slower than the disk. So whole blocks go
straight between memory and disk, where the file system has that (`O_DIRECT`), by several threads:
one request at a time leaves a disk idle. Elsewhere, and for what is left of a block, the cache is
used. A file is flushed before it counts as written.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from heliograph_backends.contract import host_bytes

#: The threads that write a snapshot, and those that read one.
THREADS = 4
#: The size of a block, and the alignment of its memory: what every usual disk asks for, or more.
BLOCK_BYTES = 4096
#: Fewer bytes go through the cache.
LEAST_DIRECT_BYTES = 2**16
#: The size of one read.
READ_BYTES = 4 * 2**20
#: The time for which memory waits for the next snapshot.
COPIES_SECONDS = 60.0
_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC

T = TypeVar("T")
Memory: TypeAlias = "np.ndarray[Any, Any]"


def aligned_bytes(size_bytes: int) -> memoryview:
    """Return new memory that begins at a block, and is not zeroed. Raises MemoryError."""
    space = np.empty(size_bytes + BLOCK_BYTES, np.uint8)
    start = -space.ctypes.data % BLOCK_BYTES
    return host_bytes(space[start : start + size_bytes])


def lent(memory: Memory, give: Callable[[], None]) -> memoryview:
    """Return all bytes of memory. `give` is called when nothing has a part of them any more, but
    not at the end of the process."""
    space = memory[:]
    weakref.finalize(space, give).atexit = False
    return space.data


class Copies:
    """Memory of copies, which waits for the next snapshot: memory that is new to the process is
    slow, above all in a virtual machine whose host took it back. Thread-safe.

    No more waits than the last snapshot took, so a daemon's peak stays as it is.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        #: The memory that waits, and the part that waited when the snapshot began.
        self._free: list[Memory] = []
        self._older: list[Memory] = []
        self._ended_at = 0.0

    @property
    def waiting_bytes(self) -> int:
        """The bytes that wait."""
        with self._lock:
            return sum(one.nbytes for one in (*self._free, *self._older))

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """The context of a snapshot."""
        with self._lock:
            free, self._free = self._free, []
            self._older.extend(free)
        try:
            yield
        finally:
            with self._lock:
                self._older, self._ended_at = [], self._clock()

    def take(self, size_bytes: int) -> memoryview:
        """As `aligned_bytes`. The memory comes back when nothing has a part of it any more."""
        with self._lock:
            place = next((n for n, one in enumerate(self._older) if one.nbytes == size_bytes), None)
            memory = None if place is None else self._older.pop(place)
            # New memory takes the room of some that waits.
            missing = size_bytes if memory is None and size_bytes >= LEAST_DIRECT_BYTES else 0
            while missing > 0 and self._older:
                missing -= self._older.pop().nbytes
        if memory is None:
            memory = np.frombuffer(aligned_bytes(size_bytes), np.uint8)
        return lent(memory, partial(self._give, memory))

    def _give(self, memory: Memory) -> None:
        # Without the lock, which this thread may have.
        if memory.nbytes >= LEAST_DIRECT_BYTES:
            self._free.append(memory)

    def rest(self) -> None:
        """Give what has waited for long back to the system."""
        with self._lock:
            if self._free and self._clock() - self._ended_at > COPIES_SECONDS:
                self._free = []


def touch(space: memoryview) -> None:
    """Have the system provide the memory of a space now, and not when it is first written."""
    # NumPy lets other threads run meanwhile.
    np.frombuffer(space, np.uint8)[::BLOCK_BYTES] = 0


def write_new(path: Path, pieces: Iterable[memoryview]) -> None:
    """Write a new file, for this user alone, and flush it.

    Raises OSError, and the errors of `pieces`; the file then stays, as far as it was written."""
    file = os.open(path, _NEW, 0o600)
    try:
        for piece in pieces:
            whole = piece.nbytes // BLOCK_BYTES * BLOCK_BYTES
            if whole >= LEAST_DIRECT_BYTES and _set_direct(file, True):
                _write_all(file, piece[:whole])
                _set_direct(file, False)
                piece = piece[whole:]
            _write_all(file, piece)
        os.fsync(file)
    finally:
        os.close(file)


def _write_all(file: int, piece: memoryview) -> None:
    while piece.nbytes:
        try:
            piece = piece[os.write(file, piece) :]
        except OSError as error:
            # Not aligned as this file system wants it.
            if error.errno != errno.EINVAL or not _set_direct(file, False):
                raise


class ReadSpace:
    """Memory of reads, which is used again: fresh memory is slow. Thread-safe."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self, size_bytes: int) -> memoryview:
        """Return space for so many bytes, and the rest of their last block."""
        if size_bytes <= READ_BYTES // 2:
            return aligned_bytes(-(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES)
        try:
            return self._free.pop()
        except IndexError:
            return aligned_bytes(READ_BYTES)

    def give(self, space: memoryview) -> None:
        """Take space back, whose bytes are not needed any more."""
        if space.nbytes == READ_BYTES:
            self._free.append(space)


def read_blocks(path: Path) -> Iterator[Callable[[ReadSpace], tuple[memoryview, memoryview]]]:
    """Return functions that read a file, a block each, for any threads: the bytes, and the space
    that they are in. They raise OSError, as this does."""
    size_bytes = os.lstat(path).st_size
    for offset in range(0, max(1, size_bytes), READ_BYTES):
        yield partial(_read_block, path, offset, min(READ_BYTES, size_bytes - offset))


def _read_block(path: Path, offset: int, size_bytes: int, spaces: ReadSpace) -> tuple[memoryview, memoryview]:
    space = spaces.take(size_bytes)
    file = os.open(path, _READ)
    try:
        if size_bytes >= LEAST_DIRECT_BYTES:
            _set_direct(file, True)
        read = 0
        while read < size_bytes:
            try:
                count = os.preadv(file, [space[read:]], offset + read)
            except OSError as error:
                if error.errno != errno.EINVAL or not _set_direct(file, False):
                    raise
                continue
            if not count:
                break
            read += count
        return space[: min(read, size_bytes)], space
    finally:
        os.close(file)


def _set_direct(file: int, wanted: bool) -> bool:
    """Pass the cache of the system, or not. False if that is so already, or cannot be."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    if bool(flags & os.O_DIRECT) == wanted:
        return False
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags ^ os.O_DIRECT)
    except OSError:
        return False
    return True


def ahead(calls: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Return the results of calls in their order, while threads make the next ones.

    Raises the errors of calls."""
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(THREADS, "heliograph-state") as threads:
        try:
            for call in calls:
                waiting.append(threads.submit(call))
                if len(waiting) > THREADS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            threads.shutdown(cancel_futures=True)


def flush(path: Path) -> None:
    """Flush a file, or a folder, so that a rename in it is durable. Raises OSError."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
