"""Memory that other processes of the same host can map: an unnamed file of fixed size. Linux only.

It uses memfd_create(2). Only processes that received its descriptor can access the memory, and it
is freed when the last of them ends. Its size is sealed, so that no process can truncate it under a
reader, and it is not executable if the kernel supports that.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from heliograph_proto.errors import (
    HeliographError,
    LimitExceededError,
    OutOfMemoryError,
    UnknownHandleError,
    UnsupportedError,
)

if sys.platform == "linux":
    import fcntl
    import resource

#: From linux/memfd.h, since Linux 6.3. Required if vm.memfd_noexec is 2.
_MFD_NOEXEC_SEAL = 0x0008
#: The divisor of the process's descriptor and mapping limits; the other ones are for connections.
SHARE = 4
#: Temporary errors, which do not mean that the system lacks the feature.
_FOR_NOW = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@cache
def why_no_sealed() -> str:
    """Return the reason why this system has no such memory; empty if it has. Tried once."""
    if not hasattr(os, "memfd_create"):
        return f"{sys.platform} has no memfd_create"
    try:
        os.close(_new_file(1))
    except OSError as error:
        return "" if error.errno in _FOR_NOW else f"memfd_create: {error.strerror}"
    return ""


def whole_pages(size_bytes: int) -> int:
    """Return the memory that a file of this size takes once all of it was touched."""
    return -(-max(size_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


class Files:
    """A bounded counter of what the process shares, each of which takes a descriptor, and memory
    also a mapping."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def take(self) -> None:
        """Count a file. Raises LimitExceededError."""
        # Read each time: a process may raise its limit at any time.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        room = _most_mappings() if limit == resource.RLIM_INFINITY else min(limit, _most_mappings())
        with self._lock:
            if self._count >= max(1, room // SHARE):
                raise LimitExceededError(
                    f"this process shares {self._count:,} pieces of memory and sockets, the most that it can",
                    advice="put several tensors into one buffer, free some, or raise the limit (ulimit -n)",
                )
            self._count += 1

    def give(self) -> None:
        """Count one less."""
        with self._lock:
            self._count -= 1


#: Those of this process.
FILES = Files()


class SealedMemory:
    """Bytes, initially zero, at the start of a page. It takes one descriptor until `close`.

    After `close`, the pages stay as long as an array over them lives, here or in another process.
    """

    def __init__(self, size_bytes: int) -> None:
        """Raise UnsupportedError, OutOfMemoryError or LimitExceededError."""
        if why := why_no_sealed():
            raise UnsupportedError(f"memory that other processes can map is unavailable: {why}")
        self.size_bytes = size_bytes
        self._lock = threading.Lock()
        FILES.take()
        try:
            self._descriptor, whole = _mapped_file(size_bytes)
        except HeliographError:
            FILES.give()
            raise
        #: Empty after `close`.
        self.array: np.ndarray[Any, np.dtype[np.uint8]] = whole[:size_bytes]

    def __repr__(self) -> str:
        return f"<SealedMemory {self.size_bytes:,} bytes{'' if self._descriptor >= 0 else ', closed'}>"

    def descriptor(self) -> int:
        """Return a new descriptor, which the caller closes.

        Raises OutOfMemoryError if the process has no descriptor left, UnknownHandleError after
        `close`.
        """
        with self._lock:
            if self._descriptor < 0:
                raise _given_back()
            try:
                return os.dup(self._descriptor)
            except OSError as error:
                raise OutOfMemoryError(f"the memory cannot be shared: {error.strerror}") from None

    def part(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """Return a range of its bytes, in place. Raises UnknownHandleError after `close`."""
        array = self.array
        if array.nbytes < self.size_bytes:
            raise _given_back()
        return array[offset_bytes : offset_bytes + size_bytes].data

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self.array = np.empty(0, np.uint8)
            os.close(descriptor)
            FILES.give()


def _given_back() -> UnknownHandleError:
    return UnknownHandleError("the memory was freed", advice="use it while its tensor or session lives")


def _mapped_file(size_bytes: int) -> tuple[int, np.ndarray[Any, np.dtype[np.uint8]]]:
    """Return a descriptor and an array of all its bytes. Raises OutOfMemoryError."""
    # An empty mapping is an error.
    mapped_bytes = max(size_bytes, 1)
    try:
        descriptor = _new_file(mapped_bytes)
        try:
            return descriptor, np.asarray(_Mapping(descriptor, mapped_bytes))
        except BaseException:
            os.close(descriptor)
            raise
    except (OSError, ValueError, OverflowError) as error:
        raise OutOfMemoryError(
            f"the host refused {size_bytes:,} bytes of shareable memory: {error}"
        ) from None


def _new_file(size_bytes: int) -> int:
    """Return a descriptor of a new sealed file of zeros. Raises OSError, OverflowError."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        descriptor = os.memfd_create("heliograph", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        descriptor = os.memfd_create("heliograph", flags)
    try:
        os.ftruncate(descriptor, size_bytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class _Mapping:
    """A file's bytes for NumPy, mapped while an array over them lives.

    `mmap.mmap` would keep a descriptor of its own, at least before Python 3.13.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """Map the file. Raises OSError."""
        library, access = _library(), mmap.PROT_READ | mmap.PROT_WRITE
        address = library.mmap(None, size_bytes, access, mmap.MAP_SHARED, descriptor, 0)
        if address == ctypes.c_void_p(-1).value:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (size_bytes,),
            "typestr": "|u1",
            "version": 3,
        }
        # Not at process exit: threads may still use the memory.
        weakref.finalize(self, library.munmap, address, size_bytes).atexit = False


@cache
def _library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return library


@cache
def _most_mappings() -> int:
    """Return the maximum number of mappings of a process."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return 65_530
