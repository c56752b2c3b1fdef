"""Bytes of arrays in the map of a file, read so that a file that was truncated is an error.

A load from a page that the file no longer has raises SIGBUS, which ends the process. So the kernel
copies such bytes, with process_vm_readv(2) on this process, and reports those that are not there.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from functools import cache
from typing import Any

import numpy as np

from heliograph_proto import digests
from heliograph_proto.errors import InvalidArgumentError

#: The bytes that are hashed while they are in the caches.
_PIECE_BYTES = 2**20


def map_below(data: Any) -> mmap.mmap | None:
    """Return the map that an array's or a view's bytes lie in; None if they do not lie in a file."""
    base: Any = data
    while base is not None and not isinstance(base, mmap.mmap):
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    return base


def readable(data: memoryview) -> memoryview:
    """Return bytes, copied if they lie in a file. Raises InvalidArgumentError if they are gone."""
    if map_below(data) is None:
        return data
    copied = np.empty(data.nbytes, np.uint8)
    copy_into(copied, data)
    return copied.data


def copy_into(out: np.ndarray[Any, np.dtype[np.uint8]], data: memoryview) -> None:
    """Copy bytes; other threads run meanwhile.

    Raises InvalidArgumentError if they lie in a file that was truncated.
    """
    source, found = np.frombuffer(data, np.uint8), map_below(data)
    if found is None:
        np.copyto(out, source)
    elif not _copied_by_kernel(out, source):
        if _is_truncated(found):
            raise truncated()
        np.copyto(out, source)


def digest_of(data: memoryview, threads: int) -> bytes:
    """Return the digest of bytes. Raises InvalidArgumentError if they lie in a file that was
    truncated."""
    if map_below(data) is None:
        return digests.digest_of(data, threads)
    piece_bytes = _PIECE_BYTES * threads
    hasher, room = digests.hasher(threads), np.empty(min(piece_bytes, data.nbytes), np.uint8)
    for start in range(0, data.nbytes, piece_bytes):
        piece = data[start : start + piece_bytes]
        copy_into(room[: piece.nbytes], piece)
        hasher.update(room[: piece.nbytes].data)
    found: bytes = hasher.digest()
    return found


class _Range(ctypes.Structure):
    """A struct iovec."""

    _fields_ = (("start", ctypes.c_void_p), ("size_bytes", ctypes.c_size_t))


def _copied_by_kernel(
    out: np.ndarray[Any, np.dtype[np.uint8]], source: np.ndarray[Any, np.dtype[np.uint8]]
) -> bool:
    """Copy; False where the system has no such call, or does not allow it.

    Raises InvalidArgumentError if bytes are gone.
    """
    call = _process_vm_readv()
    done = 0
    while call is not None and done < source.nbytes:
        left = source.nbytes - done
        here, there = (_Range(array.ctypes.data + done, left) for array in (out, source))
        count = call(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            if ctypes.get_errno() == errno.EFAULT:
                raise truncated()
            return False
        done += count
    return call is not None


@cache
def _process_vm_readv() -> Any:
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError, TypeError):
        return None
    call.restype = ctypes.c_ssize_t
    ranges = (ctypes.c_void_p, ctypes.c_ulong)
    call.argtypes = (ctypes.c_int, *ranges, *ranges, ctypes.c_ulong)
    return call


def _is_truncated(found: mmap.mmap) -> bool:
    try:
        return found.size() < len(found)
    except OSError:
        # A map of no file.
        return False


def truncated() -> InvalidArgumentError:
    """Return the error for bytes that are gone."""
    return InvalidArgumentError(
        "the file that an array lies in was truncated while it was read",
        advice="write a new file and rename it over the old one",
    )
