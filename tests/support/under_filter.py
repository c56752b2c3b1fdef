"""Starts a program under a filter of system calls, as systemd's SystemCallFilter= does: what is not among
those named fails with EPERM.

    python under_filter.py CALLS PROGRAM [ARGUMENT ...]

CALLS: a file with one name in each line; names that this processor does not have are passed over.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import os
import sys
from pathlib import Path

ALLOW = 0x7FFF0000
FAIL = 0x00050000 | errno.EPERM


def restrict(calls: list[str]) -> None:
    """From now on this process may make these system calls alone. Raises OSError."""
    library = ctypes.CDLL(ctypes.util.find_library("seccomp"))
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_rule_add.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint]
    library.seccomp_load.argtypes = [ctypes.c_void_p]
    found = library.seccomp_init(FAIL)
    for name in calls:
        if (number := library.seccomp_syscall_resolve_name(name.encode())) >= 0:
            library.seccomp_rule_add(found, ALLOW, number, 0)
    # It also gives up new privileges, as NoNewPrivileges= does.
    if failed := library.seccomp_load(found):
        raise OSError(-failed, os.strerror(-failed))


if __name__ == "__main__":
    restrict(Path(sys.argv[1]).read_text().split())
    os.execvp(sys.argv[2], sys.argv[2:])
