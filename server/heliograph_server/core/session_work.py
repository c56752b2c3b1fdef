"""The pure core of a session, driven against devices: events in, instructions out.

One lock guards the core. Whoever brings an event (the reader of the command stream, a device's
thread, a timer) takes it, lets the core decide, carries the instructions out, lets it go, and then
delivers what is done. Submitting happens under the lock, so that the order of a lane is the core's;
callbacks are called without it, by one thread at a time, in order.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from heliograph_backends.contract import Abort, BufferType, Device
from heliograph_backends.sealed import SealedMemory
from heliograph_proto.commands import Command, Completion, CompletionBatch
from heliograph_proto.errors import HeliographError, LimitExceededError
from heliograph_proto.inline_runs import InlineRun
from heliograph_proto.limits import Limits
from heliograph_proto.membership import DeviceChange
from heliograph_proto.traces import handing_on
from heliograph_server.core.deadlines import Deadlines, Timer
from heliograph_server.core.downloads import Downloads
from heliograph_server.core.exchanging import LiveExchange
from heliograph_server.core.execution import Execution, typed
from heliograph_server.core.fitting import Fit
from heliograph_server.core.handing import Handing
from heliograph_server.core.handles import TensorHandle
from heliograph_server.core.known_plans import KnownPlans
from heliograph_server.core.loaded import LoadedPlan, ShortRun
from heliograph_server.core.log_fields import LogFields, run_fields
from heliograph_server.core.membership import SessionDevices
from heliograph_server.core.memories import find_buffer_type
from heliograph_server.core.observing import LoopObserver, Observer
from heliograph_server.core.occupancy import SHORT_US, Occupancy
from heliograph_server.core.protocol import SessionCore
from heliograph_server.core.reservation import Reservation
from heliograph_server.core.room import Room
from heliograph_server.core.run_book import RunBook
from heliograph_server.core.staged import Incoming
from heliograph_server.core.staging import Staging
from heliograph_server.core.stepwise import SteppedRun, Stepwise
from heliograph_server.core.tasks import (
    ABORTABLE,
    AbortWork,
    CloseEdge,
    CloseLane,
    Deliver,
    Disarm,
    DropRead,
    DropUpload,
    FreeTask,
    Instruction,
    OpenEdge,
    OpenLane,
    Place,
    Proceed,
    ReleasePlan,
    ReleaseReservation,
    ReleaseStorage,
    ReleaseTensor,
    Resume,
    RunEnded,
    RunTask,
    Start,
)
from heliograph_server.core.tenants import Holding, Kind
from heliograph_server.core.work import Work

logger = logging.getLogger(__name__)


class SessionWork:
    """What of a session moves: the core, its instructions, and the work on lanes."""

    def __init__(
        self,
        limits: Limits,
        devices: SessionDevices,
        occupancies: Mapping[str, Occupancy],
        deadlines: Deadlines,
        room: Room,
        exchange: LiveExchange,
        holding: Holding,
        book: RunBook,
        log_fields: LogFields,
    ) -> None:
        self.limits = limits
        #: When it was opened, by `time.monotonic()`.
        self.opened = time.monotonic()
        #: What the session has of its tenant's account.
        self._holding = holding
        self._devices = devices
        #: What of them the client was not told yet.
        self._changes: list[DeviceChange] = []
        self._occupancies = occupancies
        self._deadlines = deadlines
        self._lock = threading.RLock()
        #: Whose its lines of the log are.
        self.log_fields = log_fields
        #: When its runs were where.
        self._book = book
        self._core = SessionCore(limits, tuple(self._devices), self._memory, book.under_way)
        self._staging = Staging(limits.in_flight_bytes, holding=holding)
        self._downloads = Downloads(self._core, self._lock, self._staging)
        self._uploads: dict[int, Incoming] = {}
        #: Of runs that are observed and have not ended, by sequence number.
        self._observers: dict[int, Observer] = {}
        self._plans = KnownPlans(room)
        holding.account.join(self._plans)
        self._handing = Handing(exchange)
        staged = self._staging, limits.chunk_bytes, self._uploads, self._downloads.stage
        observer = self._observers.get
        more = room, self._handing, holding, book
        self._execution = Execution(self._device, *staged, self, observer, *more)
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
        self._quiet = threading.Event()
        self._carry_out = self._ways_to_carry_out()

    def _ways_to_carry_out(self) -> dict[type, Callable[[Any], None]]:
        """How each instruction of the core is carried out."""
        return {
            OpenLane: self._open_lane,
            CloseLane: self._close_lane,
            Start: self._start,
            OpenEdge: self._handing.open,
            CloseEdge: self._close_edge,
            AbortWork: self._abort_work,
            Proceed: self._proceed,
            ReleaseTensor: self._release_tensor,
            ReleaseStorage: self._release_storage,
            ReleasePlan: self._release_plan,
            ReleaseReservation: self._release_reservation,
            DropUpload: self._drop_upload,
            Deliver: self._deliver_read,
            DropRead: self._drop_read,
            Disarm: self._disarm,
            Resume: self._resume,
            RunEnded: self._run_ended,
        }

    @property
    def plan_bytes(self) -> int:
        """Of devices, by plans that have a handle, as long as they do not run; not of lost devices."""
        with self._lock:
            plans: list[LoadedPlan] = [one for one in self._core.plans if one is not None]
        return sum(sum(one.kept_bytes().values()) for one in plans if not one.is_lost)

    # Events in, instructions out

    def _event(self, event: Callable[[], None]) -> None:
        try:
            self._decide(event)
        finally:
            self._deliver()

    def _decide(self, event: Callable[[], None]) -> None:
        """Gives the core an event and carries out what follows."""
        with self._lock:
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
            while instructions := self._core.take_instructions():
                for instruction in instructions:
                    self._carry_out_one(instruction)
        finally:
            self._carrying_out = False
        if self._core.ended_runs:
            ended, self._core.ended_runs = self._core.ended_runs, 0
            self._holding.give(Kind.RUNS, ended)
        if self._core.unretired == 0:
            self._note_quiet()

    def _carry_out_one(self, instruction: Instruction) -> None:
        try:
            self._carry_out[type(instruction)](instruction)
        except Exception:
            logger.exception("%s: %s failed", self, type(instruction).__name__, extra=self.log_fields)

    def _note_quiet(self) -> None:
        if self._core.closed is not None:
            self._quiet.set()
        if self._on_quiet is not None:
            self._calls.append(self._on_quiet)

    def _deliver(self) -> None:
        """Calls back with what is done, without the lock; what comes meanwhile, goes along."""
        with self._lock:
            if self._delivering or self._carrying_out:
                return
            self._delivering = True
        while (calls := self._next_calls()) is not None:
            for call in calls:
                try:
                    call()
                except Exception:
                    logger.exception("%s: a callback failed", self, extra=self.log_fields)

    def _next_calls(self) -> list[Callable[[], object]] | None:
        with self._lock:
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
        batch = self._core.take_completions()
        if not self._changes:
            return batch
        changes, self._changes = tuple(self._changes), []
        return replace(batch or CompletionBatch(self._core.reported_through), changes=changes)

    # Lanes and work

    def _device(self, name: str) -> Device:
        """By name; "" is the first. Raises what `SessionDevices.device` does."""
        return self._devices.device(name)

    def _memory(self, device: str, buffer_type: str) -> BufferType:
        """How a device makes memory. Raises UnknownDeviceError, InvalidArgumentError."""
        return find_buffer_type(self._device(device), buffer_type)

    def _open_lane(self, instruction: OpenLane) -> None:
        lane = instruction.lane
        try:
            lane.stream = self._device(lane.device).stream()
        except Exception as error:
            self._core.lane_failed(lane, typed(error, f"making a stream of device {lane.device}"))

    def _close_lane(self, instruction: CloseLane) -> None:
        # Closing waits for the lane's thread, which may wait for our lock.
        self._calls.append(instruction.lane.stream.close)

    def _start(self, instruction: Start) -> None:
        entry = instruction.entry
        assert entry.lane is not None
        work = Work(self, entry, entry.lane, self._occupancies[entry.lane.device])
        if isinstance(entry.task, ABORTABLE) or entry.takes_upload:
            self._aborts[entry.sequence] = work.abort
        if isinstance(entry.task, RunTask):
            self._observe(entry.sequence, entry.task, work.occupancy)
        work.lane.queued += 1
        try:
            self._submit(work)
        except Exception as error:
            self.work_done(work, error)

    def _observe(self, sequence: int, task: RunTask, occupancy: Occupancy) -> None:
        """Sees to it that a run can tell of what is to be observed."""
        loaded: LoadedPlan = task.plan.plan
        if task.loop is not None:
            stream = partial(self._stream, sequence)
            self._observers[sequence] = LoopObserver(stream, occupancy)
        elif loaded.is_observed:
            self._observers[sequence] = Observer(partial(self._tell, sequence), occupancy)

    def _submit(self, work: Work) -> None:
        if work.lane.error is not None:
            raise work.lane.error.anew()
        if self._is_short(work) and work.occupancy.at_once(work.run_at_once):
            self.work_done(work, None)
        elif (portion := self._stepwise(work)) is not None:
            # Not under the lock: it writes to other hosts.
            self._calls.append(partial(self._run_stepwise, work, portion))
        else:
            work.note_queued()
            work.lane.stream.submit(work.run, partial(self.work_done, work))

    def _stepwise(self, work: Work) -> Stepwise | None:
        """How a portion runs whose splits are all short, if this run's inputs and outputs ride with it."""
        task = work.entry.task
        if (
            not self._at_once
            or work.lane.queued > 1
            or not isinstance(task, RunTask)
            or not task.exchange_run
        ):
            return None
        stays = any(isinstance(one, TensorHandle) for one in task.inputs)
        if stays or any(one.tensor is not None or one.into is not None for one in task.outputs):
            return None
        loaded: LoadedPlan = task.plan.plan
        return loaded.copies[task.turn].stepwise()

    def _run_stepwise(self, work: Work, portion: Stepwise) -> None:
        if not self.begin_work(work):
            self.work_done(work, None)
            return
        task, began = work.entry.task, time.perf_counter()
        assert isinstance(task, RunTask)
        loaded: LoadedPlan = task.plan.plan

        def done(error: BaseException | None) -> None:
            took_us = (time.perf_counter() - began) * 1e6
            if error is None:
                made = run.outputs()
                outputs = tuple((one.output, made[one.output]) for one in task.outputs)
                work.result = replace(work.result, outputs=outputs, device_us=took_us)
                self._book.computed(work.entry.sequence, loaded.copies[task.turn].plan)
                self._book.gave(work.entry.sequence, outputs)
            else:
                failure = self._typed(error, work.entry.sequence)
                self.work_failed(work, loaded.explain(failure))
            loaded.note(task.turn, took_us)
            self.work_done(work, None)

        self._book.had_inputs(work.entry.sequence)
        run = SteppedRun(portion, task.exchange_run, work.abort, work.lane.stream.submit, done)
        run.begin([one for one in task.inputs if not isinstance(one, TensorHandle)])

    def _do_inline(self, run: InlineRun) -> bool:
        """Does a run here and now if it is short, stands behind nothing, and nobody computes on its device;
        whether it did. Under the lock."""
        if not self._at_once or (fit := self._core.fit(run)) is None:
            return False
        if not self._holding.has_room(Kind.RUNS):
            return False
        loaded: LoadedPlan = fit.plan.plan
        if (short := loaded.short_run()) is None:
            return False
        occupancy = self._occupancies[fit.plan.device]
        return occupancy.at_once(partial(self._do_short, run, fit, loaded, short))

    def _do_short(self, run: InlineRun, fit: Fit, loaded: LoadedPlan, short: ShortRun) -> None:
        # One clock for both: reading two would take as long as a small plan's copy of its inputs.
        sequence, began, book = run.sequence, time.monotonic(), self._book
        try:
            outputs = short(fit.inputs(run.inputs))
        except BaseException as error:  # it becomes the command's error
            failure = loaded.explain(self._typed(error, sequence))
            self._core.did(sequence, failure)
            if book.is_kept:
                book.did(sequence, loaded.device_names, began, (fit.carried[0], 0), run.trace_parent, failure)
            return
        took_us = (time.monotonic() - began) * 1e6
        short.note(took_us)
        loaded.took_us = took_us
        self._core.did(sequence, fit.result(sequence, outputs, took_us))
        if book.is_kept:
            book.did(sequence, short.device_names, began, fit.carried, run.trace_parent)

    def _is_short(self, work: Work) -> bool:
        """Whether it is best done here and now: a quick run on an idle lane, done when it returns."""
        task = work.entry.task
        if not self._at_once or work.lane.queued > 1 or not isinstance(task, RunTask):
            return False
        # However short its steps are, nobody knows how many it will do.
        if task.loop is not None:
            return False
        loaded: LoadedPlan = task.plan.plan
        if loaded.expected_us >= SHORT_US or not loaded.is_on_host:
            return False
        # Its tensors too: copying from another device may take as long as that likes.
        bound = (*task.inputs, *(one.into for one in task.outputs))
        storages = (one.storage for one in bound if isinstance(one, TensorHandle))
        return all(one is None or one.device == work.lane.device for one in storages)

    def _close_edge(self, instruction: CloseEdge) -> None:
        # Whoever waits there is told without the lock.
        self._calls.append(self._handing.close(instruction))

    def _abort_work(self, instruction: AbortWork) -> None:
        if (abort := self._aborts.get(instruction.sequence)) is not None:
            abort.set()

    def _tell(self, sequence: int, node: int, data: memoryview) -> bool:
        """Called by a run that is observed: whether it is to wait."""
        with self._lock:
            waits = self._core.tapped(sequence, node, data)
        self._deliver()
        return waits

    def _stream(self, sequence: int, step: int, node: int, output: int | None, data: memoryview) -> bool:
        """Called by a loop that has a value for its client: False if it is to wait, and ask again."""
        with self._lock:
            told = self._core.stream(sequence, step, node, output, data)
        self._deliver()
        return told

    def _proceed(self, instruction: Proceed) -> None:
        if (observer := self._observers.get(instruction.sequence)) is not None:
            observer.proceed()

    def begin_work(self, work: Work) -> bool:
        """Called by the lane: whether there is something to do."""
        entry = work.entry
        if entry.sequence in self._book.under_way and isinstance(entry.task, RunTask):
            loaded: LoadedPlan = entry.task.plan.plan
            self._book.began(entry.sequence, loaded.device_names)
        with self._lock:
            return self._core.begin(entry.sequence)

    def do_work(self, work: Work) -> Completion:
        """Called by the lane, after `begin_work` said so. Raises anything."""
        entry = work.entry
        assert not isinstance(entry.task, FreeTask)
        if isinstance(entry.task, RunTask) and entry.task.trace_parent:
            # What it asks of other daemons belongs to its own span.
            with handing_on(self._book.below(entry.task.trace_parent, entry.sequence)):
                return self._execution.perform(entry.sequence, entry.task, work.abort)
        return self._execution.perform(entry.sequence, entry.task, work.abort)

    def shared_part(self, place: Place) -> memoryview:
        """Bytes that the client maps as well. Raises UnknownHandleError once the session is over."""
        assert self._shared is not None
        return self._shared.part(place.offset_bytes, place.size_bytes)

    def take_place(self, sequence: int) -> bool:
        """Called by the lane: whether the command's work may use its place in shared memory, from now on."""
        with self._lock:
            return self._core.take_place(sequence)

    def leave_place(self, sequence: int) -> None:
        """Called by the lane: the work does not use its place any more."""
        self._event(partial(self._core.leave_place, sequence))

    def work_failed(self, work: Work, error: BaseException) -> None:
        """Called by the lane, before it starts what comes next."""
        entry = work.entry
        computing = isinstance(entry.task, RunTask)
        failure = self._typed(error, entry.sequence, computing=computing)
        with self._lock:
            self._core.fail(entry.sequence, failure)

    def work_done(self, work: Work, error: BaseException | None) -> None:
        """Called by the lane: the work is computed, or did not run."""
        sequence = work.entry.sequence
        failure = None if error is None else self._typed(error, sequence)
        with self._lock:
            self._aborts.pop(sequence, None)
            self._observers.pop(sequence, None)
            work.lane.queued -= 1
            work.note_done()
            self._decide(partial(self._core.finish, sequence, failure, work.result))
        self._deliver()

    def _typed(self, error: BaseException, sequence: int, *, computing: bool = True) -> HeliographError:
        """What a command failed with, as its client is told; the log tells it too."""
        fields = run_fields(self.log_fields, sequence, self._book.trace_of(sequence))
        if isinstance(error, HeliographError):
            logger.debug("command %d failed: %s", sequence, error.message, extra=fields)
        return typed(error, f"command {sequence}", computing=computing, fields=fields)

    def _receive_run(self, command: Command) -> None:
        """One that the tenant's quota has no room for is refused; the stream lives on."""
        refused: HeliographError | None = None
        try:
            self._holding.take(Kind.RUNS)
        except LimitExceededError as error:
            refused = error
        try:
            self._core.receive(command, refused)
        except BaseException:
            if refused is None:
                self._holding.give(Kind.RUNS)
            raise

    # Giving things back

    def _release_tensor(self, instruction: ReleaseTensor) -> None:
        tensor = instruction.tensor
        if tensor.storage is not None and tensor.storage.buffer is not None:
            placed = tensor.placed
            placed.buffer.free_tensor(placed)

    def _release_storage(self, instruction: ReleaseStorage) -> None:
        storage = instruction.storage
        buffer, storage.buffer = storage.buffer, None
        if buffer is not None:
            buffer.free()
        if storage.is_charged:
            storage.is_charged = False
            self._holding.give(Kind.MEMORY, storage.size_bytes)

    def _release_plan(self, instruction: ReleasePlan) -> None:
        self._holding.give(Kind.PLANS)
        self._plans.release(instruction.plan.plan)

    def _release_reservation(self, instruction: ReleaseReservation) -> None:
        reservation: Reservation = instruction.reservation.reservation
        self._plans.end(reservation)
        reservation.free()

    def _drop_upload(self, instruction: DropUpload) -> None:
        incoming = self._uploads.pop(instruction.transfer, None)
        if incoming is not None:
            incoming.close(instruction.error)

    def _deliver_read(self, instruction: Deliver) -> None:
        call = self._downloads.settle(instruction.transfer, instruction.sequence, instruction.error)
        self._calls.append(call)

    def _drop_read(self, instruction: DropRead) -> None:
        self._downloads.drop(instruction.sequence)

    def _run_ended(self, instruction: RunEnded) -> None:
        self._book.ended(instruction.sequence, instruction.error)

    def _resume(self, instruction: Resume) -> None:
        future = self._waiters.pop(instruction.waiter, None)
        if future is not None and future.set_running_or_notify_cancel():
            self._calls.append(partial(future.set_result, None))

    # Deadlines

    def _arm(self, command: Command) -> None:
        expire = partial(self._event, partial(self._core.expire, command.sequence))
        self._timers[command.sequence] = self._deadlines.after(command.timeout_ms / 1e3, expire)

    def _disarm(self, instruction: Disarm) -> None:
        timer = self._timers.pop(instruction.sequence, None)
        if timer is not None:
            self._deadlines.cancel(timer)
