"""`heliograph drain`: end the work of a daemon, then stop it or keep it drained."""

from __future__ import annotations

import argparse

from heliograph import admin
from heliograph.admin import DrainState, DrainStatus, SessionOutcome, StayingSession
from heliograph.cli.common.arguments import add_server_argument
from heliograph.cli.common.text import plain
from heliograph_proto.errors import InvalidArgumentError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --server, --seconds, --stay, --wait, --move-to, --undo."""
    parser.epilog = (
        "The daemon refuses new sessions, and its health is NOT_SERVING. When running work has ended, or its "
        "time is over, the daemon ends all sessions and stops. A member of a pool first hands over what it "
        "has for the sessions of heads; --wait tells what stays, and why."
    )
    add_server_argument(parser)
    add = parser.add_argument
    add(
        "--seconds",
        type=float,
        metavar="N",
        help="time limit for running work (default: the daemon's drain_seconds)",
    )
    add("--stay", action="store_true", help="keep the drained daemon running, until --undo")
    add("--wait", action="store_true", help="wait for the end of the drain")
    add(
        "--move-to",
        metavar="URL",
        default="",
        help="first hand the sessions that have a lease to this daemon, whose clients follow; wait, and "
        "report each session",
    )
    add("--undo", action="store_true", help="take new sessions again, unless the daemon is stopping already")


def run(arguments: argparse.Namespace) -> int:
    """Drain a daemon. Returns 1 if the drain that it waits for is undone.

    Raises DrainingError, InvalidArgumentError.
    """
    others = arguments.stay or arguments.wait or arguments.move_to or arguments.seconds is not None
    if arguments.undo and others:
        raise InvalidArgumentError("--undo starts no drain", advice="omit the other options")
    with admin.connect(arguments.server) as daemon:
        if arguments.undo:
            daemon.undo_drain()
            print("the daemon takes new sessions")
            return 0
        begun = daemon.drain(arguments.seconds, stay=arguments.stay, move_to=arguments.move_to)
        print(_words(begun), flush=True)
        if not (arguments.wait or arguments.move_to):
            return 0
        found = daemon.wait_drained(progress=_Progress().tell)
    for line in map(_outcome, found.moves):
        print(line)
    print(_end(found))
    return 1 if found.state is DrainState.SERVING else 0


def _outcome(found: SessionOutcome) -> str:
    who = f"session {found.number} of {plain(found.client)}"
    return f"{who} moved" if found.moved else f"{who} did not move: {plain(found.why)}"


class _Progress:
    """Tells once of each session that keeps values here, and why."""

    def __init__(self) -> None:
        self._told: set[StayingSession] = set()

    def tell(self, status: DrainStatus) -> None:
        """Print what was not told so far."""
        for one in status.staying:
            if one not in self._told:
                self._told.add(one)
                print(_staying(one), flush=True)


def _staying(found: StayingSession) -> str:
    """A session of a pool that has values here."""
    who = f"session {found.number} of {plain(found.client)} at the pool's head"
    return f"{who} keeps values here: {plain(found.why)}"


def _end(found: DrainStatus) -> str:
    if found.state is DrainState.SERVING:
        return "the drain was undone"
    stopped = "drained, waiting for --undo" if found.state is DrainState.DRAINED else "drained and stopped"
    if not (count := found.interrupted_sessions):
        return stopped
    work = "1 session" if count == 1 else f"{count} sessions"
    return f"{stopped}; the work of {work} did not end in time and was interrupted"


def _words(status: DrainStatus) -> str:
    busy, after = status.busy_sessions, "stay" if status.stay else "stop"
    work = f"{busy} session{'s'[: busy != 1]} at work"
    return f"draining: {work}, {status.remaining_seconds:.0f} s left at most; then the daemon will {after}"
