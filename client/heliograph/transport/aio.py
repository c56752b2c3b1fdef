"""The asyncio shell: one session over grpc.aio on one event loop.

The core and the procedures are those of the blocking shell; only the waiting for effects differs.
The core is used only on the loop's thread, so there is no lock. Destructors in other threads only
append to the core's garbage and ring. The tasks are a writer, a reader, and one for each upload and
each submission that must wait for credit; all of them end with the session.
"""

# ruff: noqa: ASYNC109

from __future__ import annotations

import asyncio
import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Protocol, TypeVar

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
from heliograph.core.progress.displays import in_notebook
from heliograph.core.protocol import ClientCore
from heliograph.core.shell import forked, local_stays
from heliograph.core.watching import Watchers
from heliograph.transport.bulk.aio import moved
from heliograph.transport.channels import (
    FORKED,
)
from heliograph_proto import DIRECT_WEIGHTS
from heliograph_proto.addresses import Address
from heliograph_proto.codec.inline_forms import InlineRun
from heliograph_proto.commands import CompletionBatch
from heliograph_proto.errors import HeliographError, SessionClosedError
from heliograph_proto.sessions import LogLine, SessionInfo, SessionMove

T = TypeVar("T")


#: How often a notebook's event loop turns while a cell waits.
TURN_SECONDS = 0.1


@contextlib.contextmanager
def _turning(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Let the loop of a notebook's kernel turn now and then: it sees an interrupt only when it
    does."""
    if not in_notebook():
        yield
        return
    ended = False

    def turn() -> None:
        if not ended:
            loop.call_later(TURN_SECONDS, turn)

    turn()
    try:
        yield
    finally:
        ended = True


class AsyncLogSource(Protocol):
    """The source of a server's log lines."""

    async def take(self) -> list[LogLine] | None:
        """Wait for more lines; None at the end."""

    def close(self) -> None:
        """End the source. Idempotent; `take` is not called any more."""


class AioShell(ABC):
    """A shell that runs procedures as coroutines; subclasses carry the bytes."""

    can_wait = False

    def __init__(self, address: Address, info: SessionInfo) -> None:
        self.address = address
        self.info = info
        self.core = ClientCore(info.limits)
        self.core.places_contents = DIRECT_WEIGHTS in info.features
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._process = os.getpid()
        self.watchers = Watchers()
        #: Functions to call with the error whenever the connection breaks.
        self.when_disconnected: list[Callable[[HeliographError], None]] = []
        FORKED.add(self)

    async def drive(self, procedure: Procedure[T], timeout: float | None = None, what: What = ANSWER) -> T:
        """Run a procedure to its end. Raises DeadlineExceededError, with the words of `what`."""
        return await self.resume(procedure, lambda: next(procedure), Deadline(timeout, what))

    async def resume(self, procedure: Procedure[T], step: Callable[[], Effect], deadline: Deadline) -> T:
        """Continue a procedure with a step."""
        try:
            while True:
                step = await self._performed(procedure, self.advance(step), deadline)
        except StopIteration as stop:
            value: T = stop.value
        return value

    async def _performed(
        self, procedure: Procedure[T], effect: Effect, deadline: Deadline
    ) -> Callable[[], Effect]:
        """Perform an effect.

        Returns the step that continues the procedure with its result or error.
        """
        try:
            result = await self._perform(effect, deadline)
        except BaseException as error:
            # The error has the same words wherever the end of the time is noticed.
            raised = deadline.worded(error)
            return lambda: procedure.throw(raised)
        return lambda: procedure.send(result)

    def advance(self, step: Callable[[], T]) -> T:
        """Perform a step of the core, fire what it settled, and send what it queued."""
        try:
            return step()
        finally:
            for outcome in self.core.take_settled():
                outcome.fire()
            if self.core.has_output:
                self._ring()

    async def _perform(self, effect: Effect, deadline: Deadline) -> Any:
        match effect:
            case WaitFor(outcome):
                return await self.wait(outcome, deadline)
            case Compute(function):
                return await asyncio.to_thread(function)
            case MoveBytes(function):
                await moved(function)
                return deadline.check()
            case StartUpload():
                return self._start_upload(effect)
            case ReceiveDownload():
                return await self._download(effect, deadline)
            case MapMemory(tensor):
                return await moved(partial(self._map_memory, tensor, deadline.remaining()))
        return await self._call(effect, deadline)

    async def move(self, url: str, wait_seconds: float | None, deadline: Deadline) -> SessionMove:
        """Have another daemon take the session. Raises the errors of `Session.move`."""
        raise local_stays()

    @abstractmethod
    async def follow_log(self, level: str) -> AsyncLogSource:
        """Follow the server's log of this session. Raises the errors of `Session.log`."""

    async def wait(self, outcome: Outcome, deadline: Deadline) -> None:
        """Wait until an outcome is done. Raises DeadlineExceededError."""
        if outcome.done:
            return
        done = self.done(outcome)
        with _turning(self._loop):
            if (seconds := deadline.remaining()) is None:
                await done
                return
            try:
                async with asyncio.timeout(seconds):
                    await done
            except TimeoutError:
                raise deadline.error() from None

    def done(self, outcome: Outcome) -> asyncio.Future[None]:
        """Return a future that is done when the outcome is, which is not done yet."""
        done = self._loop.create_future()
        outcome.add_callback(partial(_wake, done))
        return done

    def send_inline(self, run: InlineRun, plan: InlinePlan, waits: bool) -> Pending | None:
        """Send an inline run: at once if the caller `waits`, else later in this loop iteration.

        Returns None if it must take the general path.
        """
        pending = self.core.send_inline(run, plan.size_bytes, plan.spec)
        if pending is None:
            return None
        if waits or self.core.is_full:
            self.flush()
        else:
            self._ring()
        return pending

    def flush(self) -> None:
        """Send the queued commands as soon as possible, since a caller waits."""
        self._ring()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task that ends with the session at the latest."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def release(self, handle: int) -> None:
        """Free a handle soon. Safe in destructors and in other threads."""
        had_garbage = self.core.has_garbage
        self.core.release(handle)
        if not had_garbage and self.core.lost is None:
            self.on_loop(self._ring)

    def let_go(self, pending: Pending) -> None:
        """Let a run go on at observed nodes without waiting.

        Safe in destructors and in other threads.
        """
        self.core.flow(pending)
        if self.core.lost is None:
            self.on_loop(self._ring)

    def on_loop(self, callback: Callable[..., object], *arguments: Any) -> None:
        """Call a function on the loop's thread; not at all if the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            pass

    @property
    def connection_state(self) -> ConnectionState:
        """The state of the connection."""
        return ConnectionState.CONNECTED if self.core.lost is None else ConnectionState.LOST

    def apply(self, batch: CompletionBatch, size_bytes: int = 0) -> None:
        """Apply completions that arrived in a message of this size."""
        if batch.changes:
            self.info = self.watchers.apply(self.info, batch.changes)
            self.watchers.announce(batch.changes)
        self.core.apply(batch, size_bytes)
        for outcome in self.core.take_settled():
            outcome.fire()
        if self.core.has_output:
            self._ring()

    def _lose(self, error: HeliographError) -> bool:
        """Fail everything pending. Returns False if the session had already ended."""
        if self.core.lost is not None:
            return False
        self.advance(lambda: self.core.connection_lost(error))
        self.watchers.end(error.message or type(error).__name__)
        return True

    def abandon(self) -> None:
        """Give up the session in the child of a fork. It stays with the parent."""
        self._closed = True
        self._lose(forked())

    def upload_ended(self, upload: StartUpload, transfer: Transfer, error: HeliographError | None) -> None:
        """Record that an upload has ended, complete or not."""
        self.advance(lambda: self.core.upload_ended(upload.pending, transfer, error))

    async def close(self) -> None:
        """End the session; pending work fails with SessionClosedError.

        Idempotent, and bounded in time.
        """
        if self._closed:
            return
        self._closed = True
        await self._disconnect(self._lose(SessionClosedError("the session was closed")))
        for task in list(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @abstractmethod
    def _ring(self) -> None:
        """Wake the writer: there may be something to send. On the loop's thread."""

    @abstractmethod
    def _start_upload(self, upload: StartUpload) -> Transfer: ...

    @abstractmethod
    async def _download(self, download: ReceiveDownload, deadline: Deadline) -> None: ...

    @abstractmethod
    def _map_memory(self, tensor: int, seconds: float | None) -> tuple[Any, int]:
        """Map memory; runs on a thread."""

    @abstractmethod
    async def _call(self, call: Call, deadline: Deadline) -> Any: ...

    @abstractmethod
    async def _disconnect(self, was_open: bool) -> None:
        """Free connections, in bounded time. The core is closed already.

        `was_open` is True if the server does not know of it yet.
        """


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
