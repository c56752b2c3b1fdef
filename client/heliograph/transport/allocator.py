"""How this process's memory allocator treats pieces of tensors.

glibc maps memory anew for large allocations and gives it back when they are freed, so that each message of
a transfer touches pages that the kernel must first make. Told otherwise, it keeps some and uses them again,
which makes transfers over TCP up to twice as fast (see malloc(3), mallopt(3)).
"""

from __future__ import annotations

import ctypes
import os

from heliograph_proto.process_facts import process_facts
from heliograph_proto.sessions import MIB

# Of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: From here on memory is mapped by itself: messages are smaller, most tensors are not.
MMAP_BYTES = 4 * MIB
#: What stays with the process when it is free.
KEPT_BYTES = 128 * MIB
#: What `tune_allocator` has told it, if it was called.
_told: list[str] = []
VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def tune_allocator() -> bool:
    """Has the C library keep up to 128 MiB of freed memory, from which messages of transfers are made.
    Whether it could be told: glibc alone can.

    For processes that move large tensors over TCP; it concerns all of the process. A daemon does it by
    itself. Who has set glibc's own variables (MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_) has decided.
    """
    if any(name in os.environ for name in VARIABLES):
        return True
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    found = bool(mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
    if found:
        _told[:] = [f"mmap_threshold={MMAP_BYTES} trim_threshold={KEPT_BYTES}"]
    return found


#: The fields of glibc's struct mallinfo2.
_INFORMATION = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks"),
    *("fordblks", "keepcost"),
)


class _Information(ctypes.Structure):
    """What glibc's allocator has."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _INFORMATION)


def give_back(kept_bytes: int = KEPT_BYTES) -> int:
    """Gives memory back to the system if more is free here than `kept_bytes`, which glibc by itself does only
    at the end of its heaps; how many bytes were free then, else 0. May take some milliseconds."""
    try:
        library = ctypes.CDLL(None)
        ask, trim = library.mallinfo2, library.malloc_trim
    except (AttributeError, OSError, TypeError):
        return 0
    ask.restype = _Information
    free_bytes: int = ask().fordblks
    if free_bytes <= kept_bytes:
        return 0
    trim(ctypes.c_size_t(0))
    return free_bytes


def facts_here() -> dict[str, str]:
    """The facts of this process (`heliograph_proto.process_facts`), with what its allocator was told."""
    return process_facts(os.environ, _told[-1] if _told else "")
