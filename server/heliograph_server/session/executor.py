"""Drives the pure core of a session against devices: events in, instructions out.

One lock guards the core. A thread with an event (the reader of the command stream, a device's
thread, a timer) takes the lock, passes the event to the core, carries out the instructions,
releases the lock, and then delivers completions. Work is submitted under the lock, so a queue has
the core's order. Callbacks are called without the lock, in order, by one thread at a time.

Any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from heliograph_backends.contract import Abort, BufferType
from heliograph_backends.host_memory.sealed import SealedMemory
from heliograph_proto.codec.inline_forms import InlineResult, InlineRun
from heliograph_proto.commands import Command, CompletionBatch, RunCommand
from heliograph_proto.devices import DeviceChange
from heliograph_proto.errors import (
    CancelledError,
    DeviceLostError,
    HandleExistsError,
    HeliographError,
    LimitExceededError,
    MemberLostError,
)
from heliograph_proto.trace_context import handing_on
from heliograph_server.compile.plan_cache import KnownPlans
from heliograph_server.compile.services import SessionServices
from heliograph_server.plans.loaded_plan import LoadedPlan, ShortRun
from heliograph_server.plans.stepwise import SteppedRun, Stepwise
from heliograph_server.resources.failures import typed
from heliograph_server.resources.handles import PlanHandle, TensorHandle
from heliograph_server.resources.log_fields import LogFields, run_fields
from heliograph_server.resources.memories import find_buffer_type
from heliograph_server.resources.quotas import QuotaKind
from heliograph_server.resources.timers import Timer
from heliograph_server.session.bulk import Downloads
from heliograph_server.session.handoff import TensorHandoff
from heliograph_server.session.observers import RunObservers
from heliograph_server.session.operations import Operations, tell_weights
from heliograph_server.session.parts.edges import Edges
from heliograph_server.session.parts.releases import Releases
from heliograph_server.session.parts.resumable_loops import ResumableLoops
from heliograph_server.session.parts.stillness import Stillness
from heliograph_server.session.protocol.core import SessionCore
from heliograph_server.session.protocol.instructions import (
    ABORTABLE,
    AbortWork,
    CloseEdge,
    CloseQueue,
    Deliver,
    Disarm,
    DropRead,
    DropUpload,
    ForgetVariable,
    FreeTask,
    HandOn,
    OpenEdge,
    OpenQueue,
    Proceed,
    ReleasePlan,
    ReleaseReservation,
    ReleaseStorage,
    ReleaseTensor,
    Resume,
    RunEnded,
    RunTask,
    SharedPlace,
    Start,
    StopLoop,
    Withdraw,
)
from heliograph_server.session.protocol.run_validation import InlineRunFit
from heliograph_server.session.run_timeline import RunBook
from heliograph_server.session.staging import StagedUpload, Staging
from heliograph_server.session.work import CommandWork, stepwise_of

logger = logging.getLogger(__name__)

#: The most memory that a session shares with its client; the system allocates it page by page.
SHARED_BYTES = 128 * 2**20

#: The time that a cancelled run has to finish a step that has begun to write variables.
STEP_SECONDS = 10.0


class Executor:
    """Carries out the instructions of a core, and its work on device queues. Thread-safe.

    `name` is the session's name in the log, and `log_fields` the fields of its lines. `book`
    records the times of its runs.
    """

    def __init__(self, services: SessionServices, book: RunBook, name: str, log_fields: LogFields) -> None:
        self._name, self._log_fields, self.book = name, log_fields, book
        self._limits = services.limits
        self._devices = services.devices
        self._device_locks = services.device_locks
        self._deadlines = services.deadlines
        self._found_lost = services.found_lost
        #: The session's share of its tenant's account.
        self._holding = services.holding
        #: Guards the core.
        self.lock = threading.RLock()
        held, names = services.holding, services.devices.names
        self.core = SessionCore(
            services.limits, tuple(services.devices), self._memory, book.under_way, held, names
        )
        self.staging = Staging(services.limits.in_flight_bytes, holding=services.holding)
        self.downloads = Downloads(self.core.transfers, self.lock, self.staging, is_kept=services.is_leased)
        #: Incoming bytes, by transfer.
        self.uploads: dict[int, StagedUpload] = {}
        #: Where loops are held between two steps; and those of a restored session.
        self.edges = Edges()
        self.resumable = ResumableLoops(self.core, self.lock)
        #: Of runs that have not ended.
        self._observers = RunObservers(
            self.core, self.lock, self.event, self.deliver, self._later, self.edges
        )
        self.plans = KnownPlans(services.room)
        services.holding.account.join(self.plans)
        self.releases = Releases(services.holding, self.plans)
        self._handoff = TensorHandoff(services.exchange)
        self._execution = self._operations(services)
        #: Bytes carried by writes and reads of tensors.
        self.traffic = self._execution.traffic
        #: Device changes not sent to the client yet.
        self._changes: list[DeviceChange] = []
        #: Fields of the next batch that its client was not told yet.
        self._untold: dict[str, Any] = {}
        #: The memory shared with the client, once it was requested.
        self.shared: SealedMemory | None = None
        self.aborts: dict[int, Abort] = {}
        self._timers: dict[int, Timer] = {}
        self._waiters: dict[int, Future[None]] = {}
        self._on_batch: Callable[[CompletionBatch], None] | None = None
        self._on_end: Callable[[HeliographError], None] | None = None
        self._on_quiet: Callable[[], None] | None = None
        self._at_once: Callable[[], bool] = lambda: False
        #: Receives work that the thread of `submit` does itself, while it has the lock.
        self._here: list[Callable[[], None]] | None = None
        #: Keeps commands while the session is held still.
        self.stillness = Stillness(self)
        #: Calls to make without the lock, and whether a thread is making them.
        self._calls: list[Callable[[], object]] = []
        self._delivering = self._carrying_out = False
        #: Set once the session has ended and no work is left.
        self.quiet = threading.Event()
        self._handlers = self._instruction_handlers()

    def _operations(self, services: SessionServices) -> Operations:
        return Operations(
            services,
            self.staging,
            self.uploads,
            self.downloads,
            self,
            self._observers.get,
            self._handoff,
            self.book,
            self.resumable.take,
        )

    def _instruction_handlers(self) -> dict[type, Callable[[Any], None]]:
        return {
            OpenQueue: self._open_queue,
            CloseQueue: self._close_queue,
            Start: self._start,
            OpenEdge: self._handoff.open,
            CloseEdge: self._close_edge,
            AbortWork: self._abort_work,
            Proceed: self._observers.proceed,
            StopLoop: self._observers.stop,
            HandOn: self._observers.hand_on,
            Withdraw: self._observers.withdraw,
            DropUpload: self.drop_upload,
            Deliver: self._deliver_read,
            DropRead: self.downloads.drop,
            Disarm: self._disarm,
            Resume: self._resume,
            RunEnded: self._run_ended,
            ReleaseTensor: self.releases.tensor,
            ReleaseStorage: self.releases.storage,
            ForgetVariable: self.releases.variable,
            ReleasePlan: self.releases.plan,
            ReleaseReservation: self.releases.reservation,
        }

    def __str__(self) -> str:
        return self._name

    # The command stream

    def attach(
        self,
        on_batch: Callable[[CompletionBatch], None],
        on_end: Callable[[HeliographError], None] | None = None,
        *,
        at_once: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begin the command stream.

        The callbacks are called from any thread, one at a time, and must not block or raise.
        `on_end` receives the error that closed the session, after the last batch. `submit` performs
        short runs itself where `at_once` says that nothing interrupts its thread.

        Raises HandleExistsError for a second stream, or the error that closed the session.
        """
        with self.lock:
            if self.core.closed is not None:
                raise self.core.closed.anew()
            if self._on_batch is not None:
                raise HandleExistsError("the session has its command stream already")
            self._on_batch, self._on_end, self._at_once = on_batch, on_end, at_once
        # Device changes since the session was opened.
        self.deliver()

    def submit(
        self, commands: Sequence[Command | InlineRun], here: list[Callable[[], None]] | None = None
    ) -> None:
        """Submit the next commands. `here` receives work that the caller is to do right after it.

        Raises ProtocolError for a gap, which must close the session, or the error that closed it.
        """
        try:
            with self.lock:
                self._here = here
                try:
                    for command in commands:
                        if self.stillness.keeps is None or not self.stillness.keep(command):
                            self.take(command)
                finally:
                    self._here = None
        finally:
            self.deliver()

    def take(self, command: Command | InlineRun) -> None:
        """Pass a command to the core. Lock held. Raises as `submit`."""
        if isinstance(command, InlineRun):
            if self._do_inline(command):
                return
            command = command.command()
        self.decide(partial(self._receive, command))

    def refuse(
        self, sequence: int, error: HeliographError, tensors: tuple[int, ...] = (), buffer: int = 0
    ) -> None:
        """As `SessionCore.refuse`."""
        refused = partial(self.core.refuse, sequence, error, tensors, buffer)
        try:
            with self.lock:
                if self.stillness.keeps is None or not self.stillness.keep(refused):
                    self.decide(refused)
        finally:
            self.deliver()

    def answer(
        self,
        run: InlineRun,
        give: Callable[[InlineResult], None],
        may_give: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Perform the next command, a short run, at once if every earlier completion was delivered
        and, after that, `may_give` is true.

        Return True if it was performed. Success is passed to `give`, which acknowledges every
        command up to this one; a failure is delivered as any other.
        """
        with self.lock:
            is_silent = self.core.is_silent and not (self._delivering or self._calls)
            if not is_silent or not may_give() or not self._do_inline(run):
                return False
            result = self.core.take_result()
            telling = self.book.take() if result is not None else None
        if result is None:
            self.deliver()
        else:
            give(result)
            if telling is not None:
                telling()
        return True

    def _receive(self, command: Command) -> None:
        if not isinstance(command.kind, RunCommand):
            self.core.receive(command)
        else:
            self.book.came(command.sequence, command.kind)
            refused: HeliographError | None = None
            try:
                self._holding.take(QuotaKind.RUNS)
            except LimitExceededError as error:
                refused = error
            try:
                # A run above the tenant's quota is refused; the stream goes on.
                self.core.receive(command, refused)
            except BaseException:
                if refused is None:
                    self._holding.give(QuotaKind.RUNS)
                raise
        # Armed last: a deadline that expired before the core knew the command would be lost.
        if command.timeout_ms and self.core.is_open(command.sequence):
            self.expire_after(command.timeout_ms / 1e3, command.sequence)

    def expire_after(self, seconds: float, sequence: int) -> None:
        """Fail a command unless it ends in time. Lock held."""
        expire = partial(self.event, partial(self.core.expire, sequence))
        self._timers[sequence] = self._deadlines.after(seconds, expire)

    @property
    def most_commands(self) -> int:
        """The most commands that a client may send unanswered."""
        return self._limits.in_flight_commands

    @property
    def is_at_rest(self) -> bool:
        """True if no command is under way, every completion was delivered, and no bytes wait for
        their reader. Lock held."""
        return self.core.unretired == 0 and self._is_told

    @property
    def lone_loop(self) -> int:
        """The number of the loop that is the last command, and the only one under way; else 0. Lock
        held."""
        return self.core.lone_loop if self._is_told else 0

    @property
    def _is_told(self) -> bool:
        is_told = self._on_batch is None or (self.core.is_silent and not (self._delivering or self._calls))
        return is_told and not self.downloads.are_open

    def watch(self, on_quiet: Callable[[], None]) -> None:
        """Call `on_quiet` whenever no work is left."""
        with self.lock:
            self._on_quiet = on_quiet

    def when_written(self, tensors: Collection[int]) -> Future[None]:
        """Return a future that is done when the earlier writes of these tensors have ended."""
        future: Future[None] = Future()
        with self.lock:
            waiter = self.core.await_writers(tensors)
            if waiter:
                self._waiters[waiter] = future
        if not waiter:
            future.set_result(None)
        return future

    def tell_devices(self, change: DeviceChange) -> None:
        """Send a device change to the client, with the next completions."""
        self._changes.append(change)

    def tell(self, **fields: Any) -> None:
        """Tell the client fields of a `CompletionBatch` with the next completions."""
        with self.lock:
            self._untold |= fields
        self.deliver()

    def lose_devices(self) -> None:
        """Fail the waiting runs of plans that have lost a device, all at once."""
        self.plans.forget_lost()
        self.event(partial(self.core.lose, _why_lost))

    def call_end(self, error: HeliographError) -> None:
        """Pass the error that closed the session to the command stream, once."""
        self.end_later(error)
        self.deliver()

    def end_later(self, error: HeliographError) -> None:
        """As `call_end`, at the next `deliver`."""
        with self.lock:
            if self._on_end is not None:
                self._calls.append(partial(self._on_end, error))
            self._on_end = None

    @property
    def is_attached(self) -> bool:
        """True if the command stream has begun."""
        return self._on_batch is not None

    # Shared memory

    def share_memory(self) -> SealedMemory:
        """Return the memory shared with the client, created at the first call. Lock held.

        Raises UnsupportedError, OutOfMemoryError.
        """
        if self.shared is None:
            self.shared = SealedMemory(min(SHARED_BYTES, self._limits.in_flight_bytes))
            self.core.share(self.shared.size_bytes)
        return self.shared

    def close_shared_memory(self) -> None:
        """Close the shared memory. Running work keeps the pages that it moves."""
        if self.shared is not None:
            self.shared.close()

    # Events in, instructions out

    def event(self, event: Callable[[], None]) -> None:
        """Pass an event to the core, carry out its instructions, and deliver completions."""
        try:
            self.decide(event)
        finally:
            self.deliver()

    def decide(self, event: Callable[[], None]) -> None:
        """Pass an event to the core, and carry out its instructions."""
        with self.lock:
            try:
                event()
            finally:
                self._carry_out()

    def _carry_out(self) -> None:
        # A device may report from within `submit`. The outer call then carries out what follows.
        if self._carrying_out:
            return
        self._carrying_out = True
        try:
            while instructions := self.core.take_instructions():
                for instruction in instructions:
                    try:
                        self._handlers[type(instruction)](instruction)
                    except Exception:
                        name = type(instruction).__name__
                        logger.exception("%s: %s failed", self, name, extra=self._log_fields)
        finally:
            self._carrying_out = False
        if self.core.ended_runs:
            ended, self.core.ended_runs = self.core.ended_runs, 0
            self._holding.give(QuotaKind.RUNS, ended)
        if self.core.unretired == 0:
            if self.stillness.keeps is not None:
                self.stillness.looked_at.set()
            if self.core.closed is not None:
                self.quiet.set()
            if self._on_quiet is not None:
                self._calls.append(self._on_quiet)

    def deliver(self) -> None:
        """Make the callbacks, without the lock, until there is nothing to deliver."""
        with self.lock:
            if self._delivering or self._carrying_out:
                return
            self._delivering = True
        while (calls := self._next_calls()) is not None:
            for call in calls:
                try:
                    call()
                except Exception:
                    logger.exception("%s: a callback failed", self, extra=self._log_fields)

    def _next_calls(self) -> list[Callable[[], object]] | None:
        with self.lock:
            calls, self._calls = self._calls, []
            if self._on_batch is not None:
                batch = self.core.take_completions()
                if self._untold:
                    untold, self._untold = self._untold, {}
                    batch = replace(batch or CompletionBatch(self.core.reported_through), **untold)
                if self._changes:
                    changes, self._changes = tuple(self._changes), []
                    batch = replace(batch or CompletionBatch(self.core.reported_through), changes=changes)
                if batch is not None:
                    calls.insert(0, partial(self._on_batch, batch))
            if (record_runs := self.book.take()) is not None:
                calls.append(record_runs)
            if not calls:
                self._delivering = False
                return None
            return calls

    # Device queues and work

    def _memory(self, device: str, buffer_type: str) -> BufferType:
        """A buffer type of a device. Raises UnknownDeviceError, InvalidArgumentError."""
        return find_buffer_type(self._devices.device(device), buffer_type)

    def _open_queue(self, instruction: OpenQueue) -> None:
        queue = instruction.queue
        try:
            queue.stream = self._devices.device(queue.device).stream()
        except Exception as error:
            self.core.queue_failed(queue, typed(error, f"making a stream of device {queue.device}"))

    def _close_queue(self, instruction: CloseQueue) -> None:
        # Closing waits for the queue's thread, which may wait for the lock.
        self._calls.append(instruction.queue.stream.close)

    def _start(self, instruction: Start) -> None:
        state = instruction.state
        assert state.queue is not None
        queue, task = state.queue, state.task
        work = CommandWork(self, state, queue, self._device_locks[queue.device])
        if isinstance(task, ABORTABLE) or state.waits_for_client:
            self.aborts[state.sequence] = work.abort
        queue.queued += 1
        try:
            if queue.error is not None:
                raise queue.error.anew()
            if isinstance(task, RunTask):
                self._observers.add(state.sequence, task, work.device_lock)
            if queue.queued == 1 and self._at_once() and self._start_at_once(work):
                return
            work.enqueue(self._here)
        except Exception as error:
            self.work_done(work, error)

    def _start_at_once(self, work: CommandWork) -> bool:
        """Perform short work, or begin a stepwise run. True if it takes no place in its queue."""
        task = work.state.task
        if work.done_at_once():
            return True
        if not isinstance(task, RunTask) or (partition := stepwise_of(task)) is None:
            return False
        # Without the lock, since it writes to other hosts.
        self._calls.append(partial(self._run_stepwise, work, partition))
        return True

    def _run_stepwise(self, work: CommandWork, partition: Stepwise) -> None:
        """Run a partition whose splits are all short, without occupying a thread while it waits."""
        if not self.begin_work(work):
            self.work_done(work, None)
            return
        task, began = work.state.task, time.perf_counter()
        assert isinstance(task, RunTask)
        loaded: LoadedPlan = task.plan.plan

        def done(error: BaseException | None) -> None:
            took_us = (time.perf_counter() - began) * 1e6
            if error is None:
                made = run.outputs()
                outputs = tuple((one.output, made[one.output]) for one in task.outputs)
                work.result = replace(work.result, outputs=outputs, device_us=took_us)
                self.book.computed(work.state.sequence, loaded.copies[task.slot].plan)
                self.book.gave(work.state.sequence, outputs)
            else:
                failure = self.failure_of(error, work.state.sequence)
                self.work_failed(work, loaded.explain(failure))
            loaded.note(task.slot, took_us)
            tell_weights(work.state)
            self.work_done(work, None)

        self.book.had_inputs(work.state.sequence)
        if task.plan.assigned:
            with suppress(CancelledError):
                work.abort.begin_writes()
        run = SteppedRun(partition, task.command.exchange_run, work.abort, work.queue.stream.submit, done)
        run.begin([one for one in task.inputs if not isinstance(one, TensorHandle)])

    def _do_inline(self, run: InlineRun) -> bool:
        """Perform a run at once if it is short and its device idle. False: it was not. Lock held."""
        if self.stillness.keeps is not None or (fit := self.core.fit(run)) is None:
            return False
        if not (self._holding.has_room(QuotaKind.RUNS) and self._at_once()):
            return False
        loaded: LoadedPlan = fit.plan.plan
        if (short := loaded.short_run()) is None:
            return False
        device_lock = self._device_locks[fit.plan.device]
        return device_lock.at_once(partial(self._do_short, run, fit, loaded, short))

    def _do_short(self, run: InlineRun, fit: InlineRunFit, loaded: LoadedPlan, short: ShortRun) -> None:
        # One clock for both uses: reading a second one costs as much as copying small inputs.
        sequence, began, book = run.sequence, time.monotonic(), self.book
        try:
            outputs = short(fit.inputs(run.inputs))
        except BaseException as error:  # it becomes the command's error
            failure = loaded.explain(self.failure_of(error, sequence))
            self.core.did(sequence, failure)
            if book.is_kept:
                book.did(sequence, loaded.device_names, began, (fit.carried[0], 0), run.trace_parent, failure)
            return
        took_us = (time.monotonic() - began) * 1e6
        short.note(took_us)
        loaded.took_us = took_us
        self.core.did(sequence, fit.result(sequence, outputs, took_us))
        if book.is_kept:
            book.did(sequence, short.device_names, began, fit.carried, run.trace_parent)

    def _close_edge(self, instruction: CloseEdge) -> None:
        # The daemons that still wait are answered without the lock.
        self._calls.append(self._handoff.close(instruction))

    def _abort_work(self, instruction: AbortWork) -> None:
        if (abort := self.aborts.get(instruction.sequence)) is not None:
            abort.set(now=instruction.now)
            if not abort.is_set:
                self._deadlines.after(STEP_SECONDS, partial(abort.set, now=True))

    def begin_work(self, work: CommandWork) -> bool:
        """Begin a command's work. False if the command has failed. Called by the queue."""
        state = work.state
        if state.sequence in self.book.under_way and isinstance(state.task, RunTask):
            loaded: LoadedPlan = state.task.plan.plan
            self.book.began(state.sequence, loaded.device_names)
        with self.lock:
            return self.core.begin(state.sequence)

    def do_work(self, work: CommandWork) -> None:
        """Perform a command's work after `begin_work`. A failure becomes the command's error."""
        state = work.state
        try:
            assert not isinstance(state.task, FreeTask)
            parent = state.task.command.trace_parent if isinstance(state.task, RunTask) else ""
            # The calls of a run to other daemons belong to its own span.
            with handing_on(self.book.below(parent, state.sequence)) if parent else nullcontext():
                work.result = self._execution.perform(state.sequence, state.task, work.abort)
        except BaseException as error:
            self.work_failed(work, error)
        tell_weights(state)

    def shared_part(self, place: SharedPlace) -> memoryview:
        """Bytes shared with the client. Raises UnknownHandleError once the session has ended."""
        assert self.shared is not None
        return self.shared.part(place.offset_bytes, place.size_bytes)

    def take_place(self, sequence: int) -> bool:
        """Claim a command's place in shared memory. False if it may no longer be used."""
        with self.lock:
            return self.core.take_place(sequence)

    def leave_place(self, sequence: int) -> None:
        """Release a command's place in shared memory."""
        self.event(partial(self.core.leave_place, sequence))

    def work_failed(self, work: CommandWork, error: BaseException) -> None:
        """Record the failure of work. Called by the queue, before the next command starts."""
        state = work.state
        computing = isinstance(state.task, RunTask)
        failure = self.failure_of(error, state.sequence, computing=computing)
        with self.lock:
            self.core.fail(state.sequence, failure, torn=work.abort.is_writing)

    def work_done(self, work: CommandWork, error: BaseException | None) -> None:
        """Finish a command whose work is computed, or did not run. Called by the queue."""
        sequence = work.state.sequence
        failure = None if error is None else self.failure_of(error, sequence)
        with self.lock:
            self.aborts.pop(sequence, None)
            self._observers.end(sequence)
            work.queue.queued -= 1
            if work.is_queued:
                work.is_queued = False
                work.device_lock.run_done()
            self.decide(partial(self.core.finish, sequence, failure, work.result))
        self.deliver()

    def failure_of(self, error: BaseException, sequence: int, *, computing: bool = True) -> HeliographError:
        """The error of a command as its client receives it. It is also logged."""
        fields = run_fields(self._log_fields, sequence, self.book.trace_of(sequence))
        if isinstance(error, HeliographError):
            logger.debug("command %d failed: %s", sequence, error.message, extra=fields)
        if isinstance(error, DeviceLostError) and not isinstance(error, MemberLostError):
            with self.lock:
                self._calls.append(self._found_lost)
        return typed(error, f"command {sequence}", computing=computing, fields=fields)

    # Releases

    def _later(self, call: Callable[[], object]) -> None:
        """Make a call without the lock, after those before it."""
        self._calls.append(call)

    # Bytes, waiters and deadlines

    def drop_upload(self, instruction: DropUpload) -> None:
        """Drop the bytes of a transfer. Further bytes are refused."""
        if (incoming := self.uploads.pop(instruction.transfer, None)) is not None:
            incoming.close(instruction.error)

    def _deliver_read(self, instruction: Deliver) -> None:
        call = self.downloads.settle(instruction.transfer, instruction.sequence, instruction.error)
        self._calls.append(call)

    def _run_ended(self, instruction: RunEnded) -> None:
        self.book.ended(instruction.sequence, instruction.error)

    def _resume(self, instruction: Resume) -> None:
        future = self._waiters.pop(instruction.waiter, None)
        if future is not None and future.set_running_or_notify_cancel():
            self._calls.append(partial(future.set_result, None))

    def _disarm(self, instruction: Disarm) -> None:
        if (timer := self._timers.pop(instruction.sequence, None)) is not None:
            self._deadlines.cancel(timer)


def _why_lost(plan: PlanHandle) -> HeliographError | None:
    loaded: LoadedPlan | None = plan.plan
    return loaded.lost if loaded is not None else None
