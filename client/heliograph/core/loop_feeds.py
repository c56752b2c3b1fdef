"""Feeds of running loops on their way to the server."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from heliograph.core.future import Outcome, Pending
from heliograph_proto import commands as c
from heliograph_proto.commands import loop_ended
from heliograph_proto.errors import HeliographError, LimitExceededError, LoopEndedError

#: The most feeds of a loop that wait here for room on the server.
MOST_UNSENT = 1024


@dataclass(slots=True)
class _Mailbox:
    """The feeds of one loop that no step has taken."""

    #: As in `Loop.fed_bytes`.
    most_bytes: int
    unsent: deque[Pending] = field(default_factory=deque)
    sent_bytes: int = 0
    #: The error with which the loop ended.
    why: HeliographError | None = None
    #: Settled when a feed was answered or the loop has ended, and then replaced.
    changed: Outcome = field(default_factory=Outcome)

    @property
    def has_room(self) -> bool:
        """True if the next feed may be sent. A feed above the limit is sent alone."""
        kind = self.unsent[0].kind
        assert isinstance(kind, c.FeedLoop)
        return not self.sent_bytes or self.sent_bytes + kind.waiting_bytes <= self.most_bytes


class LoopFeeds:
    """The feeds of a session's loops. It belongs to the core and is used where the core is.

    A feed leaves when its loop was sent and has room for it, whatever else waits in the outbox:
    commands there may wait for the loop. `settle` makes an outcome done; the shell fires it later.
    """

    def __init__(self, settle: Callable[[Outcome, HeliographError | None], None]) -> None:
        self._settle = settle
        #: The mailboxes of loops that run, and of feeds that were sent and not answered.
        self.known: dict[Pending, _Mailbox] = {}
        #: The mailboxes of loops that have unsent feeds.
        self.unsent: dict[Pending, _Mailbox] = {}

    def __repr__(self) -> str:
        return f"<LoopFeeds: {len(self.known)} loops and unanswered feeds>"

    def open(self, run: Pending, most_bytes: int) -> None:
        """Take feeds for a loop until it ends."""
        if not run.done:
            self.known[run] = _Mailbox(most_bytes)

    def add(self, run: Pending, feed: Pending) -> None:
        """Queue a feed. It fails at once if the loop has ended.

        Raises LimitExceededError.
        """
        box = self.known.get(run)
        if box is None:
            self._settle(feed, loop_ended(run.error))
            return
        if len(box.unsent) >= MOST_UNSENT:
            raise LimitExceededError(
                f"{len(box.unsent):,} feeds of the loop wait to be sent",
                advice="wait for the steps of some, feed.result(), before sending more",
            )
        box.unsent.append(feed)
        self.unsent[run] = box

    def blocking(self, run: Pending) -> Outcome | None:
        """Return what to wait for while the server has no room for a loop's feeds; None: nothing."""
        box = self.unsent.get(run)
        return None if box is None or box.has_room else box.changed

    @property
    def is_ready(self) -> bool:
        """True if `next` would return a feed."""
        return any(run.sequence and box.has_room for run, box in self.unsent.items())

    def next(self) -> Pending | None:
        """Return a feed that can be sent now."""
        for run, box in self.unsent.items():
            if run.sequence and box.has_room:
                break
        else:
            return None
        feed = box.unsent.popleft()
        assert isinstance(feed.kind, c.FeedLoop)
        feed.kind = replace(feed.kind, sequence=run.sequence)
        box.sent_bytes += feed.kind.waiting_bytes
        self.known[feed] = box
        if not box.unsent:
            del self.unsent[run]
        return feed

    def ended(self, pending: Pending) -> None:
        """Record the end of a command, which may be a loop or a feed."""
        if (box := self.known.pop(pending, None)) is None:
            return
        if isinstance(pending.kind, c.FeedLoop):
            box.sent_bytes -= pending.kind.waiting_bytes
            if box.unsent:
                self._wake(box)
            return
        self.unsent.pop(pending, None)
        box.why = pending.error
        for feed in box.unsent:
            self._settle(feed, loop_ended(box.why))
        self._wake(box)

    def explain(self, feed: Pending, error: LoopEndedError) -> HeliographError:
        """Return the error of a feed that reached the server after its loop's end, whose reason the
        server does not know any more."""
        box = self.known.get(feed)
        return error if box is None or box.why is None else loop_ended(box.why).from_command(feed.sequence)

    def _wake(self, box: _Mailbox) -> None:
        changed, box.changed = box.changed, Outcome()
        self._settle(changed, None)

    def end(self, error: HeliographError) -> None:
        """End the session: feeds that were not sent fail with this error."""
        for box in self.unsent.values():
            for feed in box.unsent:
                self._settle(feed, error)
            self._wake(box)
        self.known.clear()
        self.unsent.clear()
