"""The pure core of a session, driven against devices: events in, instructions out.

One lock guards the core. Whoever brings an event (the reader of the command stream, a device's
thread, a timer) takes it, lets the core decide, carries the instructions out, lets it go, and then
delivers what is done. Submitting happens under the lock, so that the order of a queue is the core's;
callbacks are called without it, by one thread at a time, in order.

Any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from heliograph_backends.contract import Abort, BufferType
from heliograph_backends.host_memory.sealed import SealedMemory
from heliograph_proto.codec.inline_forms import InlineResult, InlineRun
from heliograph_proto.commands import Command, Completion, CompletionBatch, RunCommand
from heliograph_proto.devices import DeviceChange
from heliograph_proto.errors import HandleExistsError, HeliographError, LimitExceededError
from heliograph_proto.trace_context import handing_on
from heliograph_server.compile.plan_cache import KnownPlans
from heliograph_server.compile.services import SessionServices
from heliograph_server.plans.loaded_plan import LoadedPlan, ShortRun
from heliograph_server.plans.stepwise import SteppedRun, Stepwise
from heliograph_server.resources.device_queue import SHORT_US, DeviceLock
from heliograph_server.resources.failures import typed
from heliograph_server.resources.handles import TensorHandle
from heliograph_server.resources.log_fields import LogFields, run_fields
from heliograph_server.resources.memories import find_buffer_type
from heliograph_server.resources.quotas import QuotaKind
from heliograph_server.resources.timers import Timer
from heliograph_server.session.bulk import Downloads
from heliograph_server.session.handoff import TensorHandoff
from heliograph_server.session.operations import Operations
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
    FreeTask,
    Instruction,
    OpenEdge,
    OpenQueue,
    Proceed,
    Resume,
    RunEnded,
    RunTask,
    SharedPlace,
    Start,
)
from heliograph_server.session.protocol.run_validation import InlineRunFit
from heliograph_server.session.releases import Releases
from heliograph_server.session.run_timeline import RunBook
from heliograph_server.session.staging import StagedUpload, Staging
from heliograph_server.session.taps import LoopObserver, Observer
from heliograph_server.session.work import CommandWork

logger = logging.getLogger(__name__)

#: The most memory of a session by which commands carry bytes; taken from the system page by page.
SHARED_BYTES = 128 * 2**20


class Executor:
    """Drives the core of one session: its instructions, and the work on device queues. Thread-safe.

    `name` is the session's in the log, whose lines have `log_fields`; `book` knows when its runs were where.
    """

    def __init__(self, services: SessionServices, book: RunBook, name: str, log_fields: LogFields) -> None:
        self._name = name
        self._log_fields = log_fields
        self._book = book
        self._limits = services.limits
        self._devices = services.devices
        self._device_locks = services.device_locks
        self._deadlines = services.deadlines
        #: What the session has of its tenant's account.
        self._holding = services.holding
        #: Guards the core.
        self.lock = threading.RLock()
        self.core = SessionCore(services.limits, tuple(services.devices), self._memory, book.under_way)
        self.staging = Staging(services.limits.in_flight_bytes, holding=services.holding)
        self.downloads = Downloads(self.core.transfers, self.lock, self.staging)
        #: Bytes that come, by the transfer that carries them.
        self.uploads: dict[int, StagedUpload] = {}
        #: Of runs that are observed and have not ended, by sequence number.
        self._observers: dict[int, Observer] = {}
        self.plans = KnownPlans(services.room)
        services.holding.account.join(self.plans)
        self._handoff = TensorHandoff(services.exchange)
        self._execution = Operations(
            services,
            self.staging,
            self.uploads,
            self.downloads.stage,
            self,
            self._observers.get,
            self._handoff,
            book,
        )
        #: What was carried by writes and reads of tensors.
        self.traffic = self._execution.traffic
        #: What of devices the client was not told yet.
        self._changes: list[DeviceChange] = []
        #: What the client maps as well, once it has asked for it.
        self._shared: SealedMemory | None = None
        self._aborts: dict[int, Abort] = {}
        self._timers: dict[int, Timer] = {}
        self._waiters: dict[int, Future[None]] = {}
        self._on_batch: Callable[[CompletionBatch], None] | None = None
        self._on_end: Callable[[HeliographError], None] | None = None
        self._on_quiet: Callable[[], None] | None = None
        self._at_once = False
        #: Calls to make without the lock, and whether some thread is making them.
        self._calls: list[Callable[[], object]] = []
        self._delivering = False
        self._carrying_out = False
        #: Set once the session has ended and no work is left.
        self.quiet = threading.Event()
        self._carry_out = self._handlers()

    def _handlers(self) -> dict[type, Callable[[Any], None]]:
        """How each instruction of the core is carried out."""
        return {
            OpenQueue: self._open_queue,
            CloseQueue: self._close_queue,
            Start: self._start,
            OpenEdge: self._handoff.open,
            CloseEdge: self._close_edge,
            AbortWork: self._abort_work,
            Proceed: self._proceed,
            DropUpload: self.drop_upload,
            Deliver: self._deliver_read,
            DropRead: self._drop_read,
            Disarm: self._disarm,
            Resume: self._resume,
            RunEnded: self._run_ended,
            **Releases(self.plans, self._holding).by_instruction,
        }

    def __str__(self) -> str:
        return self._name

    # The command stream

    def attach(
        self,
        on_batch: Callable[[CompletionBatch], None],
        on_end: Callable[[HeliographError], None] | None = None,
        *,
        at_once: bool = False,
    ) -> None:
        """Begins the command stream. The callbacks come from any thread, one at a time, and must not
        block or raise; `on_end` tells why the session closed, after the last batch. With `at_once`,
        `submit` itself does runs that are short; its thread must be one that no KeyboardInterrupt ends.

        Raises HandleExistsError for a second stream, or why the session was closed.
        """
        with self.lock:
            if self.core.closed is not None:
                raise self.core.closed.anew()
            if self._on_batch is not None:
                raise HandleExistsError("the session has its command stream already")
            self._on_batch, self._on_end, self._at_once = on_batch, on_end, at_once
        # What happened to devices since the session was opened.
        self.deliver()

    def submit(self, commands: Sequence[Command | InlineRun]) -> None:
        """The next commands. Raises ProtocolError for a gap (close the session then), or why it closed."""
        try:
            with self.lock:
                for command in commands:
                    if isinstance(command, InlineRun):
                        if self._do_inline(command):
                            continue
                        command = command.command()
                    self.decide(partial(self._receive, command))
        finally:
            self.deliver()

    def answer(self, run: InlineRun, give: Callable[[InlineResult], None]) -> bool:
        """Does the next command, a run, here and now, if that is best and all that was done before has been
        delivered; whether it did. A good end is given to `give`, which acknowledges with it everything up to
        there; a bad one is delivered as any."""
        with self.lock:
            is_silent = self.core.is_silent and not (self._delivering or self._calls)
            if not is_silent or not self._do_inline(run):
                return False
            result = self.core.take_result()
            telling = self._book.take() if result is not None else None
        if result is None:
            self.deliver()
        else:
            give(result)
            if telling is not None:
                telling()
        return True

    def _receive(self, command: Command) -> None:
        if isinstance(command.kind, RunCommand):
            self._book.came(command.sequence, command.kind)
            self._receive_run(command)
        else:
            self.core.receive(command)
        # Not before: a time that passed while the core did not know the command would be lost.
        if command.timeout_ms and self.core.is_open(command.sequence):
            self._arm(command)

    def watch(self, on_quiet: Callable[[], None]) -> None:
        """From now on, tells whenever no work is left."""
        with self.lock:
            self._on_quiet = on_quiet

    def when_written(self, tensors: Collection[int]) -> Future[None]:
        """Done when what was sent before to write these tensors has been done, well or not."""
        future: Future[None] = Future()
        with self.lock:
            waiter = self.core.await_writers(tensors)
            if waiter:
                self._waiters[waiter] = future
        if not waiter:
            future.set_result(None)
        return future

    def tell_devices(self, change: DeviceChange) -> None:
        """The client is told of this with what is done next."""
        self._changes.append(change)

    def call_end(self, error: HeliographError) -> None:
        """Tells the command stream, once, why the session closed."""
        with self.lock:
            if self._on_end is not None:
                self._calls.append(partial(self._on_end, error))
            self._on_end = None
        self.deliver()

    @property
    def is_attached(self) -> bool:
        return self._on_batch is not None

    # Shared memory

    def share_memory(self) -> SealedMemory:
        """The memory by which commands may carry bytes, made the first time; under the lock. Raises
        UnsupportedError, OutOfMemoryError."""
        if self._shared is None:
            self._shared = SealedMemory(min(SHARED_BYTES, self._limits.in_flight_bytes))
            self.core.share(self._shared.size_bytes)
        return self._shared

    def close_shared_memory(self) -> None:
        """Work that is still under way keeps the pages that it moves."""
        if self._shared is not None:
            self._shared.close()

    # Events in, instructions out

    def event(self, event: Callable[[], None]) -> None:
        """Gives the core an event, carries out what follows, and delivers what is done."""
        try:
            self.decide(event)
        finally:
            self.deliver()

    def decide(self, event: Callable[[], None]) -> None:
        """Gives the core an event and carries out what follows."""
        with self.lock:
            try:
                event()
            finally:
                self._carry_out_all()

    def _carry_out_all(self) -> None:
        # A device may report from within `submit`; the outer call goes on with what follows.
        if self._carrying_out:
            return
        self._carrying_out = True
        try:
            while instructions := self.core.take_instructions():
                for instruction in instructions:
                    self._carry_out_one(instruction)
        finally:
            self._carrying_out = False
        if self.core.ended_runs:
            ended, self.core.ended_runs = self.core.ended_runs, 0
            self._holding.give(QuotaKind.RUNS, ended)
        if self.core.unretired == 0:
            self._note_quiet()

    def _carry_out_one(self, instruction: Instruction) -> None:
        try:
            self._carry_out[type(instruction)](instruction)
        except Exception:
            logger.exception("%s: %s failed", self, type(instruction).__name__, extra=self._log_fields)

    def _note_quiet(self) -> None:
        if self.core.closed is not None:
            self.quiet.set()
        if self._on_quiet is not None:
            self._calls.append(self._on_quiet)

    def deliver(self) -> None:
        """Calls back with what is done, without the lock; what comes meanwhile, goes along."""
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
            on_batch = self._on_batch
            batch = self._next_batch() if on_batch is not None else None
            if batch is not None and on_batch is not None:
                calls.insert(0, partial(on_batch, batch))
            if (telling := self._book.take()) is not None:
                calls.append(telling)
            if not calls:
                self._delivering = False
                return None
            return calls

    def _next_batch(self) -> CompletionBatch | None:
        """What is done, and before it what happened to devices."""
        batch = self.core.take_completions()
        if not self._changes:
            return batch
        changes, self._changes = tuple(self._changes), []
        return replace(batch or CompletionBatch(self.core.reported_through), changes=changes)

    # Device queues and work

    def _memory(self, device: str, buffer_type: str) -> BufferType:
        """How a device makes memory. Raises UnknownDeviceError, InvalidArgumentError."""
        return find_buffer_type(self._devices.device(device), buffer_type)

    def _open_queue(self, instruction: OpenQueue) -> None:
        queue = instruction.queue
        try:
            queue.stream = self._devices.device(queue.device).stream()
        except Exception as error:
            self.core.queue_failed(queue, typed(error, f"making a stream of device {queue.device}"))

    def _close_queue(self, instruction: CloseQueue) -> None:
        # Closing waits for the queue's thread, which may wait for our lock.
        self._calls.append(instruction.queue.stream.close)

    def _start(self, instruction: Start) -> None:
        state = instruction.state
        assert state.queue is not None
        work = CommandWork(self, state, state.queue, self._device_locks[state.queue.device])
        if isinstance(state.task, ABORTABLE) or state.takes_upload:
            self._aborts[state.sequence] = work.abort
        if isinstance(state.task, RunTask):
            self._observe(state.sequence, state.task, work.device_lock)
        work.queue.queued += 1
        try:
            self._submit(work)
        except Exception as error:
            self.work_done(work, error)

    def _observe(self, sequence: int, task: RunTask, device_lock: DeviceLock) -> None:
        """Sees to it that a run can tell of what is to be observed."""
        loaded: LoadedPlan = task.plan.plan
        if task.command.loop is not None:
            stream = partial(self._stream, sequence)
            self._observers[sequence] = LoopObserver(stream, device_lock)
        elif loaded.is_observed:
            self._observers[sequence] = Observer(partial(self._tell, sequence), device_lock)

    def _submit(self, work: CommandWork) -> None:
        if work.queue.error is not None:
            raise work.queue.error.anew()
        if self._is_short(work) and work.device_lock.at_once(work.run_at_once):
            self.work_done(work, None)
        elif (partition := self._stepwise(work)) is not None:
            # Not under the lock: it writes to other hosts.
            self._calls.append(partial(self._run_stepwise, work, partition))
        else:
            work.note_queued()
            work.queue.stream.submit(work.run, partial(self.work_done, work))

    def _stepwise(self, work: CommandWork) -> Stepwise | None:
        """How a partition runs whose splits are all short, if this run's inputs and outputs ride with it."""
        task = work.state.task
        if (
            not self._at_once
            or work.queue.queued > 1
            or not isinstance(task, RunTask)
            or not task.command.exchange_run
        ):
            return None
        stays = any(isinstance(one, TensorHandle) for one in task.inputs)
        if stays or any(one.tensor is not None or one.into is not None for one in task.outputs):
            return None
        loaded: LoadedPlan = task.plan.plan
        return loaded.copies[task.slot].stepwise()

    def _run_stepwise(self, work: CommandWork, partition: Stepwise) -> None:
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
                self._book.computed(work.state.sequence, loaded.copies[task.slot].plan)
                self._book.gave(work.state.sequence, outputs)
            else:
                failure = self._typed(error, work.state.sequence)
                self.work_failed(work, loaded.explain(failure))
            loaded.note(task.slot, took_us)
            self.work_done(work, None)

        self._book.had_inputs(work.state.sequence)
        run = SteppedRun(partition, task.command.exchange_run, work.abort, work.queue.stream.submit, done)
        run.begin([one for one in task.inputs if not isinstance(one, TensorHandle)])

    def _do_inline(self, run: InlineRun) -> bool:
        """Does a run here and now if it is short, stands behind nothing, and nobody computes on its device;
        whether it did. Under the lock."""
        if not self._at_once or (fit := self.core.fit(run)) is None:
            return False
        if not self._holding.has_room(QuotaKind.RUNS):
            return False
        loaded: LoadedPlan = fit.plan.plan
        if (short := loaded.short_run()) is None:
            return False
        device_lock = self._device_locks[fit.plan.device]
        return device_lock.at_once(partial(self._do_short, run, fit, loaded, short))

    def _do_short(self, run: InlineRun, fit: InlineRunFit, loaded: LoadedPlan, short: ShortRun) -> None:
        # One clock for both: reading two would take as long as a small plan's copy of its inputs.
        sequence, began, book = run.sequence, time.monotonic(), self._book
        try:
            outputs = short(fit.inputs(run.inputs))
        except BaseException as error:  # it becomes the command's error
            failure = loaded.explain(self._typed(error, sequence))
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

    def _is_short(self, work: CommandWork) -> bool:
        """Whether it is best done here and now: a quick run on an idle queue, done when it returns."""
        task = work.state.task
        if not self._at_once or work.queue.queued > 1 or not isinstance(task, RunTask):
            return False
        # However short its steps are, nobody knows how many it will do.
        if task.command.loop is not None:
            return False
        loaded: LoadedPlan = task.plan.plan
        if loaded.expected_us >= SHORT_US or not loaded.is_on_host:
            return False
        # Its tensors too: copying from another device may take as long as that likes.
        bound = (*task.inputs, *(one.into for one in task.outputs))
        storages = (one.storage for one in bound if isinstance(one, TensorHandle))
        return all(one is None or one.device == work.queue.device for one in storages)

    def _close_edge(self, instruction: CloseEdge) -> None:
        # Whoever waits there is told without the lock.
        self._calls.append(self._handoff.close(instruction))

    def _abort_work(self, instruction: AbortWork) -> None:
        if (abort := self._aborts.get(instruction.sequence)) is not None:
            abort.set()

    def _tell(self, sequence: int, node: int, data: memoryview) -> bool:
        """Called by a run that is observed: whether it is to wait."""
        with self.lock:
            waits = self.core.taps.tapped(sequence, node, data)
        self.deliver()
        return waits

    def _stream(self, sequence: int, step: int, node: int, output: int | None, data: memoryview) -> bool:
        """Called by a loop that has a value for its client: False if it is to wait, and ask again."""
        with self.lock:
            told = self.core.taps.stream(sequence, step, node, output, data)
        self.deliver()
        return told

    def _proceed(self, instruction: Proceed) -> None:
        if (observer := self._observers.get(instruction.sequence)) is not None:
            observer.proceed()

    def begin_work(self, work: CommandWork) -> bool:
        """Called by the queue: whether there is something to do."""
        state = work.state
        if state.sequence in self._book.under_way and isinstance(state.task, RunTask):
            loaded: LoadedPlan = state.task.plan.plan
            self._book.began(state.sequence, loaded.device_names)
        with self.lock:
            return self.core.begin(state.sequence)

    def do_work(self, work: CommandWork) -> Completion:
        """Called by the queue, after `begin_work` said so. Raises anything."""
        state = work.state
        assert not isinstance(state.task, FreeTask)
        if isinstance(state.task, RunTask) and state.task.command.trace_parent:
            # What it asks of other daemons belongs to its own span.
            with handing_on(self._book.below(state.task.command.trace_parent, state.sequence)):
                return self._execution.perform(state.sequence, state.task, work.abort)
        return self._execution.perform(state.sequence, state.task, work.abort)

    def shared_part(self, place: SharedPlace) -> memoryview:
        """Bytes that the client maps as well. Raises UnknownHandleError once the session is over."""
        assert self._shared is not None
        return self._shared.part(place.offset_bytes, place.size_bytes)

    def take_place(self, sequence: int) -> bool:
        """Called by the queue: whether the command's work may use its place in shared memory, from now on."""
        with self.lock:
            return self.core.take_place(sequence)

    def leave_place(self, sequence: int) -> None:
        """Called by the queue: the work does not use its place any more."""
        self.event(partial(self.core.leave_place, sequence))

    def work_failed(self, work: CommandWork, error: BaseException) -> None:
        """Called by the queue, before it starts what comes next."""
        state = work.state
        computing = isinstance(state.task, RunTask)
        failure = self._typed(error, state.sequence, computing=computing)
        with self.lock:
            self.core.fail(state.sequence, failure)

    def work_done(self, work: CommandWork, error: BaseException | None) -> None:
        """Called by the queue: the work is computed, or did not run."""
        sequence = work.state.sequence
        failure = None if error is None else self._typed(error, sequence)
        with self.lock:
            self._aborts.pop(sequence, None)
            self._observers.pop(sequence, None)
            work.queue.queued -= 1
            work.note_done()
            self.decide(partial(self.core.finish, sequence, failure, work.result))
        self.deliver()

    def _typed(self, error: BaseException, sequence: int, *, computing: bool = True) -> HeliographError:
        """What a command failed with, as its client is told; the log tells it too."""
        fields = run_fields(self._log_fields, sequence, self._book.trace_of(sequence))
        if isinstance(error, HeliographError):
            logger.debug("command %d failed: %s", sequence, error.message, extra=fields)
        return typed(error, f"command {sequence}", computing=computing, fields=fields)

    def _receive_run(self, command: Command) -> None:
        """One that the tenant's quota has no room for is refused; the stream lives on."""
        refused: HeliographError | None = None
        try:
            self._holding.take(QuotaKind.RUNS)
        except LimitExceededError as error:
            refused = error
        try:
            self.core.receive(command, refused)
        except BaseException:
            if refused is None:
                self._holding.give(QuotaKind.RUNS)
            raise

    # Bytes, and others who wait

    def drop_upload(self, instruction: DropUpload) -> None:
        incoming = self.uploads.pop(instruction.transfer, None)
        if incoming is not None:
            incoming.close(instruction.error)

    def _deliver_read(self, instruction: Deliver) -> None:
        call = self.downloads.settle(instruction.transfer, instruction.sequence, instruction.error)
        self._calls.append(call)

    def _drop_read(self, instruction: DropRead) -> None:
        self.downloads.drop(instruction.sequence)

    def _run_ended(self, instruction: RunEnded) -> None:
        self._book.ended(instruction.sequence, instruction.error)

    def _resume(self, instruction: Resume) -> None:
        future = self._waiters.pop(instruction.waiter, None)
        if future is not None and future.set_running_or_notify_cancel():
            self._calls.append(partial(future.set_result, None))

    # Deadlines

    def _arm(self, command: Command) -> None:
        expire = partial(self.event, partial(self.core.expire, command.sequence))
        self._timers[command.sequence] = self._deadlines.after(command.timeout_ms / 1e3, expire)

    def _disarm(self, instruction: Disarm) -> None:
        timer = self._timers.pop(instruction.sequence, None)
        if timer is not None:
            self._deadlines.cancel(timer)
