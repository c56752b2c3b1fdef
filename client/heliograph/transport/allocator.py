"""Settings of this process's memory allocator for the pieces of tensors.

For a large allocation, glibc maps new memory and unmaps it when it is freed, so each message of a
transfer touches pages that the kernel must first create. With other thresholds it keeps and reuses
memory, which makes transfers over TCP up to twice as fast (see malloc(3), mallopt(3)).
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

from heliograph_proto.process_facts import process_facts
from heliograph_proto.sessions import MIB

# Of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
#: Larger allocations get their own mapping: messages are smaller, most tensors are not.
MMAP_BYTES = 4 * MIB
#: The most free memory that stays with the process.
KEPT_BYTES = 128 * MIB
#: The settings of `tune_allocator`, if it was called.
_settings: list[str] = []
VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def tune_allocator() -> bool:
    """Make the C library keep up to 128 MiB of freed memory, for the messages of transfers.

    Use it in processes that move large tensors over TCP; it affects the whole process. A daemon
    does it by itself. It changes nothing if glibc's own variables (`MALLOC_MMAP_THRESHOLD_`,
    `MALLOC_TRIM_THRESHOLD_`) are set.

    Returns False if the C library is not glibc.
    """
    if any(name in os.environ for name in VARIABLES):
        return True
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    found = bool(mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
    if found:
        _settings[:] = [f"mmap_threshold={MMAP_BYTES} trim_threshold={KEPT_BYTES}"]
    return found


def use_one_arena() -> None:
    """Make all threads allocate from one arena, so that `give_back` reaches all free memory.

    `malloc_trim` leaves the end of every other arena as it is, up to 64 MiB of each. Call it before
    other threads start. It changes nothing if glibc's own variable (`MALLOC_ARENA_MAX`) is set.
    """
    if "MALLOC_ARENA_MAX" in os.environ:
        return
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


#: The fields of glibc's struct mallinfo2.
_INFORMATION = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks"),
    *("fordblks", "keepcost"),
)


class _Information(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _INFORMATION)


def give_back(kept_bytes: int = KEPT_BYTES) -> int:
    """Return free memory beyond `kept_bytes` to the system; may take some milliseconds.

    glibc alone does so only at the end of its heaps. Returns the number of bytes that were free if
    it did something, else 0.
    """
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
    """Return the facts of this process, with the allocator's settings."""
    return process_facts(os.environ, _settings[-1] if _settings else "")
