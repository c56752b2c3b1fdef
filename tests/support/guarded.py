"""Memory of kernels that ends at a page without access: a kernel that reads or writes behind it ends
the process with a fault."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from heliograph_backends.cpu.kernels.runtime.memory import Scratch

Array: TypeAlias = np.ndarray[Any, Any]
_NO_ACCESS = 0


def guarded_bytes(size_bytes: int) -> NDArray[np.uint8]:
    """Return bytes whose last one is the last before a page without access."""
    inside = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = np.frombuffer(mmap.mmap(-1, inside + mmap.PAGESIZE), np.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    end = ctypes.c_void_p(int(whole.ctypes.data) + inside)
    assert protect(end, ctypes.c_size_t(mmap.PAGESIZE), _NO_ACCESS) == 0
    return whole[inside - size_bytes : inside]


def guarded(array: Array) -> Array:
    """Return a copy of an array whose last byte is the last before a page without access."""
    copy = guarded_bytes(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class GuardedScratch:
    """One block of scratch in front of a page without access."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.addresses: list[int] = []
        self._kept: list[Array] = []

    @classmethod
    def made(cls) -> Scratch:
        return cast(Scratch, cls())

    def require(self, size: int) -> None:
        self.size_bytes = max(size, self.size_bytes)

    def reserve(self, workers: int) -> int:
        assert workers == 1
        self._kept.append(guarded_bytes(self.size_bytes))
        self.addresses = [int(self._kept[-1].ctypes.data)]
        return 0
