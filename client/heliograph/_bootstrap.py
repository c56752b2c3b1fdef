"""What is done before anything else is loaded; imported first of all by the package.

gRPC's core reads its environment when it is imported, and loading everything takes most of a second. In it a
SIGTERM should end `heliograph serve`: as process 1 of a container it would not do so by itself. And
`heliograph health`, which containers run every few seconds, needs nothing of it: it is answered here.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence


def is_command(name: str, arguments: Sequence[str]) -> bool:
    """Whether a process with these arguments is `heliograph NAME`, or `python -m heliograph NAME`."""
    program = os.path.basename(arguments[0]) if arguments else ""
    return program in ("heliograph", "-m") and name in arguments[1:2]


def prepare() -> None:
    """Hushes gRPC's core, whose lines our errors say better, unless the user asked for them; SIGTERM exits
    with 0 until the daemon, which has handlers of its own, takes over."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


if is_command("serve", sys.argv):
    prepare()
elif is_command("health", sys.argv):
    from heliograph import _probe

    sys.exit(_probe.main(sys.argv[2:]))
