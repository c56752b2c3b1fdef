"""Memory of weights in huge pages, which several weights share.

New pages of 4 KiB take most of the time in which a file is read into memory. A huge page is made 20
times as fast as 512 of these, but a weight of a few MiB alone has no place for one. So weights are
taken from blocks, one behind the other. A part of a block is used once: the system has its pages
again once nothing refers to its bytes, and the block once nothing refers to any of them.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from contextlib import suppress

import numpy as np

from heliograph_backends.host_memory.order import Bytes

#: The size of a block. Its end, which no weight needs, takes no memory but the rest of a huge page.
BLOCK_BYTES = 32 * 2**20
#: The sizes that are taken from blocks. The pages at the ends of smaller ones would remain, and
#: NumPy asks for huge pages itself for larger ones.
LEAST_BYTES, MOST_BYTES = 128 * 2**10, 4 * 2**20
#: Whether the system has huge pages for those who ask.
IS_SUPPORTED = hasattr(mmap, "MADV_HUGEPAGE")


class HugePages:
    """Blocks of huge pages. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._block: mmap.mmap | None = None
        self._used_bytes = 0

    def fits(self, size_bytes: int) -> bool:
        """True if `take` has memory of this size."""
        return IS_SUPPORTED and LEAST_BYTES <= size_bytes < MOST_BYTES

    def take(self, size_bytes: int) -> Bytes:
        """Return bytes that are zero, at a multiple of 64 or more. Raises MemoryError."""
        with self._lock:
            if self._block is None or self._used_bytes + size_bytes > BLOCK_BYTES:
                self._block, self._used_bytes = _new_block(), 0
            block, start = self._block, self._used_bytes
            self._used_bytes += -(-size_bytes // 64) * 64
        found = np.frombuffer(block, np.uint8, size_bytes, start)
        # Views of this array, and views of views, refer to it.
        weakref.finalize(found, _give, block, start, start + size_bytes).atexit = False
        return found


def _new_block() -> mmap.mmap:
    try:
        made = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(str(error)) from None
    with suppress(OSError):  # a kernel without huge pages: small ones do
        made.madvise(mmap.MADV_HUGEPAGE)
    return made


def _give(block: mmap.mmap, start: int, end: int) -> None:
    """Give the whole pages of a range back to the system."""
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        with suppress(OSError):
            block.madvise(mmap.MADV_DONTNEED, first, last - first)
