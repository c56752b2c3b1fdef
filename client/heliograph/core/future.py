"""Outcomes that come later: the answer to a command, a credit, the end of an upload.

An outcome is settled once, by the code that runs the protocol, and then fired outside of any lock:
its callbacks wake the threads or tasks that wait. It does not depend on threads or an event loop.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
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
    """A result that is done or not, and its error."""

    __slots__ = ("_callbacks", "done", "error")

    def __init__(self) -> None:
        self.done = False
        self.error: HeliographError | None = None
        self._callbacks: deque[Callback] = deque()

    def settle(self, error: HeliographError | None = None) -> bool:
        """Mark it as done. Returns False if it was already. `fire` must follow."""
        if self.done:
            return False
        self.error = error
        self.done = True
        return True

    def fire(self) -> None:
        """Run the callbacks, each exactly once, even while callbacks are being added."""
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
        """Settle and fire, where no lock is held."""
        if self.settle(error):
            self.fire()

    def add_callback(self, callback: Callback) -> None:
        """Run the callback once the outcome is done; at once if it already is."""
        self._callbacks.append(callback)
        if self.done:
            self.fire()

    def raise_error(self) -> None:
        """Raise a copy of the error, if any: raising a shared error would extend its traceback."""
        if self.error is not None:
            raise self.error.at(self.error.origin)


class Pending(Outcome):
    """A command from its queueing to its completion."""

    __slots__ = (
        "completion",
        "credit_bytes",
        "feed",
        "kind",
        "notify",
        "observed",
        "on_steps",
        "sequence",
        "slot",
        "source_of",
        "steps",
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
        #: The bytes of credit to give back at its end.
        self.credit_bytes = 0
        #: True if the caller will look at the error.
        self.observed = False
        #: The slot of shared memory to give back at its end.
        self.slot: int | None = None
        #: The values of a run that is observed.
        self.feed: Feed | None = None
        #: For a loop: the complete steps that the server has told of, and what hears of them.
        self.steps = 0
        self.on_steps: Callable[[int], object] | None = None
        #: For a run: the source line that built a node of its plan, by the node's number.
        self.source_of: Callable[[int], str] | None = None
        #: A description for errors; None if it cannot be cancelled by itself.
        self.what: Callable[[], str] | None = None
        #: The error to report instead of the server's, if the client cancelled it for a reason.
        self.substitute: HeliographError | None = None

    def __repr__(self) -> str:
        state = "done" if self.done else "sent" if self.sequence else "queued"
        return f"<Pending {self.sequence} {type(self.kind).__name__} {state}>"

    def count(self, steps: int) -> Outcome | None:
        """Take in the number of a loop's complete steps. Return what is to be fired for it."""
        self.steps = steps
        if self.on_steps is None:
            return None
        told = Outcome()
        told.settle()
        told._callbacks.append(partial(self.on_steps, steps))
        return told

    def outputs(self) -> dict[int, Any]:
        """Return the bytes of a run's fetched outputs by their numbers."""
        return dict(self.completion.outputs) if self.completion else {}


class Transfer:
    """An upload in progress: when its bytes may be overwritten, and when it has ended."""

    __slots__ = ("_cancel", "ended", "taken")

    def __init__(self, cancel: Callable[[], object]) -> None:
        #: Done when all bytes were copied out of the caller's array, or never will be.
        self.taken = Outcome()
        #: Done when the server has answered.
        self.ended = Outcome()
        self._cancel = cancel

    def cancel(self) -> None:
        """Stop the upload. The caller's array is not read any more once `taken` is done."""
        self._cancel()


#: A description of what a caller waits for; or a function that returns it, if it costs time.
What = str | Callable[[], str]
#: The reason why `local:` shares no memory.
ALONE = "the server is this process"
ANSWER = "the answer"


def words_of(what: What) -> str:
    """Return the description."""
    return what if isinstance(what, str) else what()


def late(what: What, seconds: float) -> DeadlineExceededError:
    """Return the error of an operation that took too long."""
    return DeadlineExceededError(
        f"{words_of(what)} was not done within {seconds:g} s",
        advice="allow more time with timeout=, or None for as long as it takes",
    )


def cancelled(what: What) -> CancelledError:
    """Return the error of an operation that was cancelled."""
    return CancelledError(f"{words_of(what)} was cancelled")


def lost(what: What, cause: BaseException) -> CancelledError:
    """Return the error for later uses of a tensor after an interrupted write to it."""
    ended = cause if isinstance(cause, DeadlineExceededError) else cancelled(what)
    return CancelledError(
        f"{ended.message}; the tensor's contents were lost",
        advice="write all of it before using it again: tensor.set(array), or tensor.memset(0)",
    )


class Deadline:
    """A moment by which something must be done, or no limit for None."""

    __slots__ = ("_at", "_seconds", "_what")

    def __init__(self, seconds: float | None, what: What = ANSWER) -> None:
        self._seconds = checked_timeout(seconds)
        self._at = None if self._seconds is None else time.monotonic() + self._seconds
        self._what = what

    @property
    def what(self) -> What:
        """The thing to be done, in the words of its error."""
        return self._what

    def least(self, seconds: float) -> float:
        """Return the seconds left, or so many if these are fewer."""
        left = self.remaining()
        return seconds if left is None else min(seconds, left)

    def remaining(self) -> float | None:
        """Return the seconds left, 0 or more; None without a limit."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    def check(self) -> None:
        """Raise DeadlineExceededError if the moment has passed."""
        if self._at is not None and time.monotonic() >= self._at:
            raise self.error()

    def error(self) -> DeadlineExceededError:
        """Return the error of this deadline, worded the same wherever it is noticed."""
        return late(self._what, self._seconds or 0.0)

    def worded(self, error: BaseException) -> BaseException:
        """Return the error, reworded if this deadline caused it."""
        noticed = isinstance(error, DeadlineExceededError) and not error.origin.sequence
        return self.error() if noticed and self._seconds is not None else error
