"""Process set-up that must come before all other imports of the package.

gRPC's core reads its environment when it is imported, and importing everything takes most of a
second. A SIGTERM during that time should end `heliograph serve`; as process 1 of a container it
would not end by itself. `heliograph health`, which containers run every few seconds, needs none of
these imports and is answered here.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence


def is_command(name: str, arguments: Sequence[str]) -> bool:
    """True if these are the arguments of `heliograph NAME` or `python -m heliograph NAME`."""
    program = os.path.basename(arguments[0]) if arguments else ""
    return program in ("heliograph", "-m") and name in arguments[1:2]


def silence() -> None:
    """Silence gRPC's core, unless the user set its verbosity: Heliograph's errors say the same as
    gRPC's log lines."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def prepare() -> None:
    """Silence gRPC's core, and exit with 0 on SIGTERM. The daemon replaces the signal handler when
    it starts."""
    silence()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


if is_command("serve", sys.argv):
    prepare()
elif is_command("health", sys.argv):
    from heliograph import _probe

    sys.exit(_probe.main(sys.argv[2:]))
elif sys.argv and os.path.basename(sys.argv[0]) == "heliograph":
    silence()
