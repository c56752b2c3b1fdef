"""A session that leaves its daemon: the things that keep it, and its messages meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from heliograph_proto.errors import SnapshotFailedError

if TYPE_CHECKING:
    from heliograph_server.session.session import Session


@contextmanager
def messages_held(session: Session) -> Iterator[tuple[int, tuple[bytes, ...]]]:
    """A context in which no further message to the client comes into being: the number of those
    that it has acknowledged, and all after them."""
    hold, keep = session.hold_messages, session.keep_messages
    if hold is None or keep is None:
        yield session.kept_messages
        return
    hold(True)
    try:
        yield keep()
    finally:
        if session.closed is None:
            hold(False)


def check_between_commands(session: Session) -> None:
    """Raise SnapshotFailedError for a session that is held still between two steps of a loop, or
    that goes on with one soon: loops stay where they are."""
    executor = session.inside.executor
    with session.inside.lock:
        has_loop = bool(executor.stillness.held or executor.resumable.states())
    if has_loop:
        raise loop_stays()


def loop_stays() -> SnapshotFailedError:
    """Return the error of a session with a loop."""
    return SnapshotFailedError(
        "a loop is under way, and stays where it is", advice="wait for its end, or stop it"
    )


def why_bound(session: Session) -> str:
    """The reason why a session without a connection cannot leave its daemon; empty if it can.

    Its client may have sent commands that did not come, whose bytes are in this daemon.
    """
    executor = session.inside.executor
    with session.inside.lock:
        if executor.shared is not None:
            return "its client has no connection, and shares memory with this daemon"
        if executor.downloads.are_open or executor.uploads or session.uploads_now:
            return "its client has no connection, and bytes are on their way"
    return ""
