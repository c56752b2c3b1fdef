"""Something that will be known later: the answer to a command, a credit, the end of an upload.

An outcome is settled once, by whoever runs the protocol, and then fired outside of any lock: its
callbacks wake the threads or tasks that wait. It knows no thread and no event loop itself.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from heliograph_proto.commands import CommandKind, Completion
from heliograph_proto.errors import HeliographError
from heliograph_proto.inline_runs import InlineResult, InlineRun

if TYPE_CHECKING:
    from heliograph._feed import Feed

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
