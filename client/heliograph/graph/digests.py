"""BLAKE3 digests of weights, by which servers know their contents."""

from __future__ import annotations

import math
import mmap
import os
import threading
import weakref
from typing import Any

import numpy as np

from heliograph.graph.files import mapped_files
from heliograph_proto import digests

#: Fewer threads than this already hash one content faster than memory delivers it.
_MOST_THREADS = 8


class _Digests:
    """Digests of read-only arrays, by identity while they live.

    Each graph hashes other arrays once, since their owner may write to them between graphs.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], bytes]] = {}
        self._lock = threading.Lock()

    def of(self, array: np.ndarray[Any, Any]) -> bytes:
        known = self._known.get(id(array))
        if known is not None and known[0]() is array:
            return known[1]
        data: Any = array.reshape(-1).view(np.uint8)
        digest = mapped_files.digest_of(memoryview(data), threads())
        if is_frozen(array):
            with self._lock:
                self._known = {key: item for key, item in self._known.items() if item[0]() is not None}
                self._known[id(array)] = (weakref.ref(array), digest)
        return digest


def is_frozen(array: np.ndarray[Any, Any]) -> bool:
    """True if neither the array nor any array below it is writeable, nor the map of a file that it
    lies in."""
    base: Any = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return False
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj if base.readonly else base
    return base is None or isinstance(base, bytes) or _is_map_to_read(base)


def _is_map_to_read(base: Any) -> bool:
    """True for a file's map that this process cannot write. The server checks its bytes against the
    digest, should another process write the file."""
    return isinstance(base, mmap.mmap) and memoryview(base).readonly


def processors() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads() -> int:
    """The number of threads that may hash one content."""
    return min(_MOST_THREADS, processors())


_DIGESTS = _Digests()


def digest_of(array: np.ndarray[Any, Any]) -> bytes:
    """The digest of a contiguous array's bytes."""
    return _DIGESTS.of(array) if math.prod(array.shape) else digests.digest_of(b"")
