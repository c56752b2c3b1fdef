"""Working memory of kernels that ends at a page without access."""

from __future__ import annotations

import ctypes
import mmap
from typing import cast

import numpy as np

from heliograph_backends.cpu.kernels.runtime.memory import Scratch

_NO_ACCESS = 0


class GuardedScratch:
    """One block of scratch in front of a page without access: a kernel that reads or writes behind
    the block ends the process with a fault."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.addresses: list[int] = []
        self._kept: list[mmap.mmap] = []

    @classmethod
    def made(cls) -> Scratch:
        return cast(Scratch, cls())

    def require(self, size: int) -> None:
        self.size_bytes = max(size, self.size_bytes)

    def reserve(self, workers: int) -> int:
        assert workers == 1
        inside = -(-self.size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, inside + mmap.PAGESIZE)
        self._kept.append(memory)
        end = int(np.frombuffer(memory, np.uint8).ctypes.data) + inside
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        assert protect(ctypes.c_void_p(end), ctypes.c_size_t(mmap.PAGESIZE), _NO_ACCESS) == 0
        self.addresses = [end - self.size_bytes]
        return 0
