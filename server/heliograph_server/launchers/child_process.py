"""Runs a module in a process that does not outlive the one that started it.

    python -m heliograph_server.launchers.child_process PARENT_PID MODULE ARGUMENTS...

The kernel kills it (PR_SET_PDEATHSIG) when the thread that started it has ended, whatever ended it: SIGKILL
leaves nobody time to clean up. Linux's; elsewhere it refuses to start.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Sequence

#: Of <sys/prctl.h>.
PR_SET_PDEATHSIG = 1


def command(module: str, arguments: Sequence[str]) -> list[str]:
    """What to start, from a thread that lasts as long as the child is to."""
    return [sys.executable, "-m", __name__, str(os.getpid()), module, *arguments]


def die_with(parent: int) -> None:
    """From now on this process is killed when its parent's thread ends. Ends it if that has happened."""
    if not sys.platform.startswith("linux"):
        raise SystemExit("only Linux ends a process with its parent")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise SystemExit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        # It ended before the kernel was told.
        raise SystemExit(1)


def main() -> None:
    """The module's own `__main__` sees its arguments as if it had been run directly."""
    parent, module, *arguments = sys.argv[1:]
    die_with(int(parent))
    # Who starts children from a thread of its own may have blocked signals there.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
