"""`heliograph drain`: a daemon takes no new sessions, ends its work, and stops or stays."""

from __future__ import annotations

import argparse

from heliograph import admin
from heliograph.admin import DrainState, DrainStatus
from heliograph.cli.common.arguments import add_server_argument
from heliograph_proto.errors import InvalidArgumentError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--server, --seconds, --stay, --wait, --undo."""
    parser.epilog = (
        "New sessions are refused from now on, and health says NOT_SERVING. Running work may end; then, or "
        "when its time is over, all sessions are ended and the daemon stops."
    )
    add_server_argument(parser)
    add = parser.add_argument
    add(
        "--seconds",
        type=float,
        metavar="N",
        help="how long running work may go on (as the daemon's drain_seconds says)",
    )
    add("--stay", action="store_true", help="do not stop it: it waits, drained, for --undo")
    add("--wait", action="store_true", help="return when the drain is over")
    add("--undo", action="store_true", help="take new sessions again, unless it is stopping already")


def run(arguments: argparse.Namespace) -> int:
    """1 if somebody undid the drain that is waited for. Raises DrainingError, InvalidArgumentError."""
    if arguments.undo and (arguments.stay or arguments.wait or arguments.seconds is not None):
        raise InvalidArgumentError("--undo begins no drain", advice="leave the other options out")
    with admin.connect(arguments.server) as daemon:
        if arguments.undo:
            daemon.undo_drain()
            print("the daemon takes new sessions")
            return 0
        print(_words(daemon.drain(arguments.seconds, stay=arguments.stay)), flush=True)
        if not arguments.wait:
            return 0
        state = daemon.wait_drained()
    if state is DrainState.SERVING:
        print("the drain was undone")
        return 1
    print("drained, and waiting for --undo" if state is DrainState.DRAINED else "drained and stopped")
    return 0


def _words(status: DrainStatus) -> str:
    busy, after = status.busy_sessions, "stay" if status.stay else "stop"
    work = f"{busy} session{'s'[: busy != 1]} at work"
    return f"draining: {work}, {status.remaining_seconds:.0f} s left at most; then the daemon will {after}"
