"""Something that will be known later: the answer to a command, a credit, the end of an upload.

An outcome is settled once, by whoever runs the protocol, and then fired outside of any lock: its
callbacks wake the threads or tasks that wait. It knows no thread and no event loop itself.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from heliograph.graph.arguments import checked_timeout
from heliograph_proto.codec.inline_forms import InlineResult, InlineRun
from heliograph_proto.commands import CommandKind, Completion
from heliograph_proto.errors import CancelledError, DeadlineExceededError, HeliographError

if TYPE_CHECKING:
    from heliograph.core.feed import Feed

logger = logging.getLogger("heliograph")

Callback = Callable[[], object]


class Outcome:
    """Done or not, and with which error."""

    __slots__ = ("_callbacks", "done", "error")

    def __init__(self) -> None:
        self.done = False
        self.error: HeliographError | None = None
        self._callbacks: deque[Callback] = deque()

    def settle(self, error: HeliographError | None = None) -> bool:
        """Makes it done; False if it was already. `fire` must follow."""
        if self.done:
            return False
        self.error = error
        self.done = True
        return True

    def fire(self) -> None:
        """Runs the callbacks, each exactly once, also against callbacks being added meanwhile."""
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                return
            try:
                callback()
            except Exception:
                logger.exception("a callback raised")

    def finish(self, error: HeliographError | None = None) -> None:
        """Settles and fires, where no lock is held."""
        if self.settle(error):
            self.fire()

    def add_callback(self, callback: Callback) -> None:
        """Runs it once the outcome is done; at once if it is."""
        self._callbacks.append(callback)
        if self.done:
            self.fire()

    def raise_error(self) -> None:
        """Raises the error, if any: a copy, since tracebacks of shared errors would grow together."""
        if self.error is not None:
            raise self.error.at(self.error.origin)


class Pending(Outcome):
    """A command on its way, until its completion."""

    __slots__ = (
        "completion",
        "credit_bytes",
        "feed",
        "kind",
        "notify",
        "observed",
        "sequence",
        "slot",
        "source_of",
        "stream",
        "substitute",
        "timeout_ms",
        "what",
    )

    def __init__(self, kind: CommandKind | InlineRun, stream: int, notify: bool, timeout_ms: int) -> None:
        super().__init__()
        self.kind = kind
        self.stream = stream
        self.notify = notify
        self.timeout_ms = timeout_ms
        #: 0 until it is sent.
        self.sequence = 0
        self.completion: Completion | InlineResult | None = None
        #: Bytes of credit that its end gives back.
        self.credit_bytes = 0
        #: Whether somebody will look at the error.
        self.observed = False
        #: Of shared memory, that its end gives back.
        self.slot: int | None = None
        #: For a run that is observed: its values.
        self.feed: Feed | None = None
        #: For a run: the line that built a node of its plan, by the node's number.
        self.source_of: Callable[[int], str] | None = None
        #: What it does, in words for an error; None where nobody can cancel it by itself.
        self.what: Callable[[], str] | None = None
        #: The error to report in place of the server's, when the client cancelled for a reason.
        self.substitute: HeliographError | None = None

    def __repr__(self) -> str:
        state = "done" if self.done else "sent" if self.sequence else "queued"
        return f"<Pending {self.sequence} {type(self.kind).__name__} {state}>"

    def outputs(self) -> dict[int, Any]:
        """The bytes of a run's fetched outputs by their places."""
        return dict(self.completion.outputs) if self.completion else {}


class Transfer:
    """An upload under way: when the caller may overwrite the bytes, and when it has ended."""

    __slots__ = ("_cancel", "ended", "taken")

    def __init__(self, cancel: Callable[[], object]) -> None:
        #: All bytes were copied out of the caller's array, or never will be.
        self.taken = Outcome()
        #: The server has answered.
        self.ended = Outcome()
        self._cancel = cancel

    def cancel(self) -> None:
        """Stops it. Afterwards the caller's array is not read any more once `taken` is done."""
        self._cancel()


#: What somebody waits for, in words; or what says it, where the words cost time.
What = str | Callable[[], str]
#: Why no memory is shared with `local:`.
ALONE = "the server is this process"
ANSWER = "the answer"


def words_of(what: What) -> str:
    """The words."""
    return what if isinstance(what, str) else what()


def late(what: What, seconds: float) -> DeadlineExceededError:
    """The error of something that took too long."""
    return DeadlineExceededError(
        f"{words_of(what)} was not done within {seconds:g} s",
        advice="allow more time with timeout=, or None for as long as it takes",
    )


def cancelled(what: What) -> CancelledError:
    """The error of something that was cancelled."""
    return CancelledError(f"{words_of(what)} was cancelled")


def lost(what: What, cause: BaseException) -> CancelledError:
    """What later uses of a tensor meet, after a write to it was broken off."""
    ended = cause if isinstance(cause, DeadlineExceededError) else cancelled(what)
    return CancelledError(
        f"{ended.message}; the tensor's contents were lost by that",
        advice="write it whole to use it again: tensor.set(array), or tensor.memset(0)",
    )


class Deadline:
    """A moment by which something must be done; with None, none."""

    __slots__ = ("_at", "_seconds", "_what")

    def __init__(self, seconds: float | None, what: What = ANSWER) -> None:
        self._seconds = checked_timeout(seconds)
        self._at = None if self._seconds is None else time.monotonic() + self._seconds
        self._what = what

    def remaining(self) -> float | None:
        """Seconds, 0 or more; None when there is no deadline."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    def check(self) -> None:
        """Raises DeadlineExceededError when the moment has passed."""
        if self._at is not None and time.monotonic() >= self._at:
            raise self.error()

    def error(self) -> DeadlineExceededError:
        """What was not done, and the limit: the same words whoever noticed."""
        return late(self._what, self._seconds or 0.0)

    def worded(self, error: BaseException) -> BaseException:
        """The error, in our words if it is that of this deadline, noticed by somebody else."""
        noticed = isinstance(error, DeadlineExceededError) and not error.origin.sequence
        return self.error() if noticed and self._seconds is not None else error
