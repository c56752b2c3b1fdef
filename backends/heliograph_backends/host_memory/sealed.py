"""Memory that another process of the same host may map: a file without a name whose size cannot change.

Linux alone has it (memfd_create(2)). Nobody can find it who was not handed its descriptor, and when the
last process that has it ends, however it ends, the memory is free. Its size is sealed, so that nobody can
take pages away under somebody who reads them, and it can never be executed where the kernel knows how.
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

#: Of linux/memfd.h, since Linux 6.3. Where vm.memfd_noexec is 2, nothing else is allowed.
_MFD_NOEXEC_SEAL = 0x0008
#: One in so many of the descriptors and mappings that the process may have; the others are for connections.
SHARE = 4
#: Refusals of the moment, which say nothing about the system.
_FOR_NOW = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@cache
def why_no_sealed() -> str:
    """Why this system has no such memory; empty if it has. Found out by making some, once."""
    if not hasattr(os, "memfd_create"):
        return f"{sys.platform} has no memfd_create"
    try:
        os.close(_new_file(1))
    except OSError as error:
        return "" if error.errno in _FOR_NOW else f"memfd_create: {error.strerror}"
    return ""


def whole_pages(size_bytes: int) -> int:
    """What a file of so many bytes takes of memory when all of it was touched."""
    return -(-max(size_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


class _Files:
    """Counts those of the process, each of which takes a descriptor and a mapping, and bounds them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def take(self) -> None:
        """Raises LimitExceededError."""
        # Asked each time: a process may raise its limit at any time.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        room = _most_mappings() if limit == resource.RLIM_INFINITY else min(limit, _most_mappings())
        with self._lock:
            if self._count >= max(1, room // SHARE):
                raise LimitExceededError(
                    f"{self._count:,} pieces of memory are shared; this process has room for no more",
                    advice="put several tensors into one buffer, free some, or raise the limit (ulimit -n)",
                )
            self._count += 1

    def give(self) -> None:
        with self._lock:
            self._count -= 1


_FILES = _Files()


class SealedMemory:
    """Bytes, all zero at first; at the beginning of a page. It takes one descriptor until `close`.

    `close` lets go of the pages too, which stay as long as somebody, here or in another process, has an array
    over them.
    """

    def __init__(self, size_bytes: int) -> None:
        """Raises UnsupportedError, OutOfMemoryError, LimitExceededError."""
        if why := why_no_sealed():
            raise UnsupportedError(f"no memory that other processes can map: {why}")
        self.size_bytes = size_bytes
        self._lock = threading.Lock()
        _FILES.take()
        try:
            self._descriptor, whole = _mapped_file(size_bytes)
        except HeliographError:
            _FILES.give()
            raise
        #: Empty once it is closed.
        self.array: np.ndarray[Any, np.dtype[np.uint8]] = whole[:size_bytes]

    def __repr__(self) -> str:
        return f"<SealedMemory {self.size_bytes:,} bytes{'' if self._descriptor >= 0 else ', closed'}>"

    def descriptor(self) -> int:
        """A new descriptor of it, which the caller closes. Raises OutOfMemoryError if none is left,
        UnknownHandleError after `close`."""
        with self._lock:
            if self._descriptor < 0:
                raise _given_back()
            try:
                return os.dup(self._descriptor)
            except OSError as error:
                raise OutOfMemoryError(f"the memory cannot be shared: {error.strerror}") from None

    def part(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """Bytes of it, in place. Raises UnknownHandleError after `close`."""
        array = self.array
        if array.nbytes < self.size_bytes:
            raise _given_back()
        return array[offset_bytes : offset_bytes + size_bytes].data

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self.array = np.empty(0, np.uint8)
            os.close(descriptor)
            _FILES.give()


def _given_back() -> UnknownHandleError:
    return UnknownHandleError(
        "the memory was given back", advice="ask for it while its tensor or session lives"
    )


def _mapped_file(size_bytes: int) -> tuple[int, np.ndarray[Any, np.dtype[np.uint8]]]:
    """A descriptor, and all bytes of it. Raises OutOfMemoryError."""
    # A mapping of nothing is an error.
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
            f"the host refused {size_bytes:,} bytes of memory that can be shared: {error}"
        ) from None


def _new_file(size_bytes: int) -> int:
    """A descriptor of a sealed file of zeros. Raises OSError, OverflowError."""
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
    """A file's bytes for NumPy, mapped as long as an array over them lives.

    `mmap.mmap` would keep a descriptor of its own, before Python 3.13 at any rate.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """Raises OSError."""
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
        # Not at the end of the process: threads may still be at work there.
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
    """That a process may have."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return 65_530
