"""Runs a module in a process that does not outlive the process that started it.

    python -m heliograph_server.launchers.child_process PARENT_PID MODULE ARGUMENTS...

The kernel kills it (PR_SET_PDEATHSIG) when the thread that started it ends, also by SIGKILL. Linux
only; on other systems it refuses to start.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Sequence

#: From <sys/prctl.h>.
PR_SET_PDEATHSIG = 1


def command(module: str, arguments: Sequence[str]) -> list[str]:
    """The command line of a child. The thread that starts it must live as long as the child."""
    return [sys.executable, "-m", __name__, str(os.getpid()), module, *arguments]


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent's thread ends. Exits if that has
    happened."""
    if not sys.platform.startswith("linux"):
        raise SystemExit("only Linux ends a process with its parent")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise SystemExit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        # The parent ended before the call of prctl.
        raise SystemExit(1)


def main() -> None:
    """Run the module, which sees its arguments as if it were run directly."""
    parent, module, *arguments = sys.argv[1:]
    die_with(int(parent))
    # The thread that started this process may have blocked signals.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
