"""The blocking shell: a session driven by the threads that call it, whatever carries its bytes.

The core is used only under `_lock`; outcomes are fired, and threads woken, outside of it.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from heliograph.core.connection_state import ConnectionState
from heliograph.core.effects import (
    Call,
    Compute,
    Effect,
    MapMemory,
    MoveBytes,
    Procedure,
    ReceiveDownload,
    StartUpload,
    WaitFor,
)
from heliograph.core.future import ANSWER, Deadline, Outcome, Pending, Transfer, What
from heliograph.core.inline_run import InlinePlan
from heliograph.core.interrupts import raise_ignored, undisturbed
from heliograph.core.protocol import ClientCore
from heliograph.core.shell import forked, local_stays
from heliograph.core.watching import Watchers
from heliograph.transport.bulk.tickets import Announcement, Tell, TicketUpload
from heliograph.transport.channels import FORKED
from heliograph.transport.log_lines import LogSource
from heliograph_proto import DIRECT_WEIGHTS
from heliograph_proto.addresses import Address
from heliograph_proto.codec.inline_forms import InlineRun
from heliograph_proto.commands import CompletionBatch
from heliograph_proto.errors import HeliographError, SessionClosedError, UnsupportedError
from heliograph_proto.plans import ContentOffer
from heliograph_proto.sessions import SessionInfo, SessionMove

T = TypeVar("T")


class BlockingShell(ABC):
    """A shell that runs procedures in the caller's thread; subclasses carry the bytes."""

    #: True if the server is another process.
    is_remote = False
    can_wait = True

    def __init__(self, address: Address, info: SessionInfo) -> None:
        self.address = address
        self.info = info
        self.core = ClientCore(info.limits)
        self.core.places_contents = DIRECT_WEIGHTS in info.features
        # Reentrant: a destructor may run, and use the session, while this thread holds it.
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._closed = False
        self.watchers = Watchers()
        self._when_lost: list[Callable[[HeliographError], None]] = []
        #: Functions to call with the error whenever the connection breaks.
        self.when_disconnected: list[Callable[[HeliographError], None]] = []
        _SHELLS.add(self)
        FORKED.add(self)
        raise_ignored()

    def drive(self, procedure: Procedure[T], timeout: float | None = None, what: What = ANSWER) -> T:
        """Run a procedure to its end. Raises DeadlineExceededError, with the words of `what`."""
        deadline = Deadline(timeout, what)
        step: Callable[[], Effect] = lambda: next(procedure)  # noqa: E731
        try:
            while True:
                step = self._performed(procedure, self.advance(step), deadline)
        except StopIteration as stop:
            value: T = stop.value
            return value
        except BaseException:
            # Also for Ctrl-C between two effects: the procedure cleans up, under the lock.
            self.advance(procedure.close)
            raise

    def _performed(self, procedure: Procedure[T], effect: Effect, deadline: Deadline) -> Callable[[], Effect]:
        """Perform an effect.

        Returns the step that continues the procedure with its result or error.
        """
        try:
            result = self._perform(effect, deadline)
        except BaseException as error:
            # The error has the same words wherever the end of the time is noticed.
            raised = deadline.worded(error)
            return lambda: procedure.throw(raised)
        return lambda: procedure.send(result)

    def advance(self, step: Callable[[], T]) -> T:
        """Perform a step of the core under the lock, fire what it settled, send what it queued."""
        return undisturbed(partial(self._advance, step))

    def _advance(self, step: Callable[[], T]) -> T:
        settled: list[Outcome] = []
        try:
            with self._lock:
                try:
                    return step()
                finally:
                    settled = self.core.take_settled()
                    output = self.core.has_output
        finally:
            for outcome in settled:
                outcome.fire()
            if output:
                self._ring()

    def _perform(self, effect: Effect, deadline: Deadline) -> Any:
        match effect:
            case WaitFor(outcome):
                return self.wait(outcome, deadline)
            case Compute(function):
                return function()
            case MoveBytes(function):
                function()
                return deadline.check()
            case StartUpload():
                return self._start_upload(effect)
            case ReceiveDownload():
                return self._download(effect, deadline)
            case MapMemory(tensor):
                return self._map_memory(tensor, deadline.remaining())
        return self._call(effect, deadline)

    def wait(self, outcome: Outcome, deadline: Deadline) -> None:
        """Block until an outcome is done. Raises DeadlineExceededError."""
        wait(outcome, deadline)

    def send_inline(self, run: InlineRun, plan: InlinePlan, waits: bool) -> Pending | None:
        """Send an inline run. Returns None if it must take the general path."""
        with self._lock:
            pending = self.core.send_inline(run, plan.size_bytes, plan.spec)
        if pending is not None:
            self._ring_once(waits)
        return pending

    def _ring_once(self, waits: bool) -> None:
        """Ring for a run that its caller may wait for, unless an earlier ring was not heard yet."""
        self._ring()

    def release(self, handle: int) -> None:
        """Free a handle soon. Safe in destructors: takes no lock."""
        had_garbage = self.core.has_garbage
        self.core.release(handle)
        if not had_garbage:
            self._ring()

    def let_go(self, pending: Pending) -> None:
        """Let a run go on at observed nodes without waiting. Safe in destructors: takes no lock."""
        self.core.flow(pending)
        self._ring()

    def close(self) -> None:
        """End the session; pending work fails with SessionClosedError.

        Idempotent, and bounded in time.
        """
        undisturbed(self._close)

    def _close(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed and self._process == os.getpid():
            self._disconnect(self._lose(SessionClosedError("the session was closed")))

    def abandon(self) -> None:
        """Give up the session in the child of a fork.

        It stays with the parent; nothing may wait.
        """
        self._lock = threading.RLock()
        self._lose(forked())

    @property
    def connection_state(self) -> ConnectionState:
        """The state of the connection."""
        return ConnectionState.CONNECTED if self.core.lost is None else ConnectionState.LOST

    def apply(self, batch: CompletionBatch, size_bytes: int = 0) -> None:
        """Apply completions that arrived in a message of this size."""
        if batch.changes:
            self.info = self.watchers.apply(self.info, batch.changes)
            self.watchers.announce(batch.changes)
        self.advance(partial(self.core.apply, batch, size_bytes))

    def _lose(self, error: HeliographError) -> bool:
        """Fail everything pending. Returns False if the session had already ended."""
        if self.core.lost is not None:
            return False
        self.advance(lambda: self.core.connection_lost(error))
        self.watchers.end(error.message or type(error).__name__)
        for callback in self._take_callbacks():
            callback(error)
        return True

    def when_lost(self, callback: Callable[[HeliographError], None]) -> None:
        """Call a function once, with the reason, when the session ends; at once if it has ended.

        It is called from any thread, and must not block or raise.
        """
        with self._lock:
            self._when_lost.append(callback)
        if self.core.lost is not None:
            for one in self._take_callbacks():
                one(self.core.lost)

    def _take_callbacks(self) -> list[Callable[[HeliographError], None]]:
        with self._lock:
            taken, self._when_lost = self._when_lost, []
        return taken

    def move(self, url: str, wait_seconds: float | None, deadline: Deadline) -> SessionMove:
        """Have another daemon take the session. Raises the errors of `Session.move`."""
        raise local_stays()

    def announce(self, contents: Sequence[tuple[bytes, int, int]], tell: Tell) -> Announcement:
        """Announce contents by digest, handle of the tensor, and size.

        Raises UnsupportedError in one process.
        """
        raise UnsupportedError("within one process no other client sends contents")

    def bring(self, offer: ContentOffer, size_bytes: int) -> TicketUpload:
        """Return an upload by a ticket of this session's server, to begin.

        Raises UnsupportedError likewise.
        """
        raise UnsupportedError("within one process there are no tickets")

    def follow_log(self, level: str) -> LogSource:
        """Follow the server's log of this session. Raises the errors of `Session.log`."""
        self.advance(self.core.check)
        made = self._log_source(level)
        self.when_lost(lambda _: made.close())
        return made

    @abstractmethod
    def _log_source(self, level: str) -> LogSource: ...

    @abstractmethod
    def _ring(self) -> None:
        """Wake the writer: there may be something to send. Safe in destructors."""

    @abstractmethod
    def _start_upload(self, upload: StartUpload) -> Transfer: ...

    @abstractmethod
    def _download(self, download: ReceiveDownload, deadline: Deadline) -> None: ...

    @abstractmethod
    def _map_memory(self, tensor: int, seconds: float | None) -> tuple[Any, int]: ...

    @abstractmethod
    def _call(self, call: Call, deadline: Deadline) -> Any: ...

    @abstractmethod
    def _disconnect(self, was_open: bool) -> None:
        """Free threads and connections, in bounded time. The core is closed already.

        `was_open` is True if the server does not know of it yet.
        """


def wait(outcome: Outcome, deadline: Deadline) -> None:
    """Block until an outcome is done. Raises DeadlineExceededError."""
    if outcome.done:
        return
    # A lock that is held until then. An Event takes several locks, and several times as long.
    done = threading.Lock()
    done.acquire()
    outcome.add_callback(done.release)
    seconds = deadline.remaining()
    if not done.acquire(timeout=-1 if seconds is None else seconds):
        raise deadline.error()


#: Sessions to close when the interpreter ends.
_SHELLS: weakref.WeakSet[BlockingShell] = weakref.WeakSet()


def _close_all() -> None:
    # Pools of this process first: otherwise they would log the end of their members' sessions as
    # losses.
    for shell in sorted(_SHELLS, key=lambda one: one.is_remote):
        shell.close()


atexit.register(_close_all)
