"""High-bandwidth memory of the host: ggml's CPU_HBM buffer type.

It uses libmemkind's hbw interface (hbwmalloc(3)), which takes such memory first and then ordinary
memory. `why_no_hbm` has the reason if the machine lacks the library or such memory.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from functools import cache
from typing import Any

import numpy as np

from heliograph_backends.contract import Device, Usage
from heliograph_backends.host_memory.buffers import (
    ALIGNMENT,
    READ_BEYOND_BYTES,
    HostBuffer,
    HostBufferType,
    MemoryBudget,
    aligned_bytes,
)
from heliograph_proto.errors import OutOfMemoryError

LIBRARY = "libmemkind.so.0"


class HbmBufferType(HostBufferType):
    """High-bandwidth host memory, counted against the device's budget."""

    def __init__(self, device: Device, budget: MemoryBudget) -> None:
        super().__init__(device, budget)
        self.name = f"{device.name}_hbm"

    def allocate(self, size_bytes: int, usage: Usage = Usage.ANY) -> HostBuffer:
        self.budget.take(size_bytes)
        try:
            memory = _bytes(size_bytes) if size_bytes else aligned_bytes(0)
        except OutOfMemoryError:
            self.budget.give(size_bytes)
            raise
        return HostBuffer(self, memory, usage, on_free=lambda: self.budget.give(size_bytes), reorders=True)


def hbm_buffer_types(device: Device, budget: MemoryBudget) -> tuple[HbmBufferType, ...]:
    """Return one buffer type, or none: see `why_no_hbm`."""
    return () if why_no_hbm() else (HbmBufferType(device, budget),)


@cache
def why_no_hbm() -> str:
    """Return the reason why there is no high-bandwidth memory; empty if there is."""
    try:
        status = _library().hbw_check_available()
    except OSError:
        return f"{LIBRARY} is not installed"
    return f"the machine has no high-bandwidth memory: {os.strerror(status)}" if status else ""


@cache
def _library() -> Any:
    """Load the library. Raises OSError if it is missing."""
    library = ctypes.CDLL(LIBRARY)
    library.hbw_posix_memalign.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t)
    library.hbw_free.argtypes = (ctypes.c_void_p,)
    library.hbw_free.restype = None
    return library


def _bytes(size_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return aligned memory, freed with the last array over it. Raises OutOfMemoryError."""
    pointer = ctypes.c_void_p()
    status = _library().hbw_posix_memalign(ctypes.byref(pointer), ALIGNMENT, size_bytes + READ_BEYOND_BYTES)
    if status or pointer.value is None:
        raise OutOfMemoryError(
            f"the host refused {size_bytes:,} bytes of high-bandwidth memory: {os.strerror(status)}",
            advice="use a smaller tensor, or the default buffer type",
        )
    block = (ctypes.c_uint8 * size_bytes).from_address(pointer.value)
    # Views may outlive the buffer. At exit the system frees all memory anyway.
    weakref.finalize(block, _library().hbw_free, pointer.value).atexit = False
    return np.frombuffer(memoryview(block).cast("B"), np.uint8)
