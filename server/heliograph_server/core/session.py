"""A session at work: the pure core, driven against devices.

One lock guards the core. Whoever brings an event (the reader of the command stream, a device's
thread, a timer) takes it, lets the core decide, carries the instructions out, lets it go, and then
delivers what is done. Submitting happens under the lock, so that the order of a lane is the core's;
callbacks are called without it, by one thread at a time, in order.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from heliograph_backends.contract import Abort, BufferType, CompileOptions, Device
from heliograph_proto.commands import Command, Completion, CompletionBatch
from heliograph_proto.description import DeviceType, PlanEstimate, PlanInfo, PlanReport
from heliograph_proto.errors import HandleExistsError, HeliographError, SessionClosedError
from heliograph_proto.graph import Graph
from heliograph_proto.limits import Limits
from heliograph_server.core.bulk import ContentUpload, TransferUpload, Upload
from heliograph_server.core.checks import unknown_device
from heliograph_server.core.compiling import Compiler, CompileRequest
from heliograph_server.core.contents import Contents
from heliograph_server.core.deadlines import Deadlines, Timer
from heliograph_server.core.downloads import Download, Downloads
from heliograph_server.core.execution import Execution, typed
from heliograph_server.core.handles import (
    BufferHandle,
    EventHandle,
    PlanHandle,
    StreamHandle,
    TensorHandle,
)
from heliograph_server.core.loaded import LoadedPlan
from heliograph_server.core.memories import find_buffer_type
from heliograph_server.core.occupancy import SHORT_US, Occupancy
from heliograph_server.core.protocol import SessionCore
from heliograph_server.core.staging import Staging
from heliograph_server.core.tasks import (
    AbortWork,
    CloseLane,
    Deliver,
    Disarm,
    DropRead,
    DropUpload,
    FreeTask,
    Instruction,
    OpenLane,
    ReleasePlan,
    ReleaseStorage,
    ReleaseTensor,
    Resume,
    RunTask,
    Start,
)
from heliograph_server.core.work import Work

logger = logging.getLogger(__name__)

#: How long closing waits for work that was asked to end.
CLOSE_SECONDS = 30.0
ANY_OPTIONS = CompileOptions()


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """What a session holds now. All zero once it has ended."""

    tensors: int = 0
    buffers: int = 0
    plans: int = 0
    streams: int = 0
    events: int = 0
    storages: int = 0
    staged_bytes: int = 0
    content_bytes: int = 0
    commands_in_flight: int = 0


class Session:
    """One client's handles and work. Thread-safe. Made by `Host.open_session`."""

    def __init__(
        self,
        number: int,
        client: str,
        limits: Limits,
        devices: Sequence[Device],
        occupancies: Mapping[str, Occupancy],
        deadlines: Deadlines,
        on_closed: Callable[[Session], None],
    ) -> None:
        #: Counts the sessions of the host: a name for logs, not the secret that names it to clients.
        self.number = number
        self.client = client or "somebody"
        self.limits = limits
        self._devices = {device.name: device for device in devices}
        self._first = devices[0]
        self._occupancies = occupancies
        self._deadlines = deadlines
        self._on_closed = on_closed
        self._lock = threading.RLock()
        self._core = SessionCore(limits, tuple(self._devices), self._memory)
        self._staging = Staging(limits.in_flight_bytes)
        #: Graphs that wait to be compiled. One message may always wait, however low the limit.
        self.requests = Staging(max(limits.in_flight_bytes, limits.message_bytes), "graphs")
        self._contents = Contents(devices)
        self._compiler = Compiler(
            self._core, self._lock, limits, self._device, self._contents, occupancies, devices
        )
        self._downloads = Downloads(self._core, self._lock, self._staging)
        self._uploads: dict[int, memoryview] = {}
        self._open_uploads: set[Upload] = set()
        self._execution = Execution(self._device, self._staging, self._uploads, self._downloads.stage)
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
        self._closing = False
        self._released = threading.Event()
        self._carry_out: dict[type, Callable[[Any], None]] = {
            OpenLane: self._open_lane,
            CloseLane: self._close_lane,
            Start: self._start,
            AbortWork: self._abort_work,
            ReleaseTensor: self._release_tensor,
            ReleaseStorage: self._release_storage,
            ReleasePlan: self._release_plan,
            DropUpload: self._drop_upload,
            Deliver: self._deliver_read,
            DropRead: self._drop_read,
            Disarm: self._disarm,
            Resume: self._resume,
        }

    def __repr__(self) -> str:
        counts = f"{self._core.in_flight} commands in flight, {len(self._core.handles)} handles"
        return f"<Session {self.number} of {self.client}: {counts}>"

    def __str__(self) -> str:
        return f"session {self.number} of {self.client}"

    def statistics(self) -> SessionStatistics:
        with self._lock:
            count = self._core.handles.count
            return SessionStatistics(
                tensors=count(TensorHandle),
                buffers=count(BufferHandle),
                plans=count(PlanHandle),
                streams=count(StreamHandle),
                events=count(EventHandle),
                storages=self._core.storages,
                staged_bytes=self._staging.used_bytes,
                content_bytes=self._contents.size_bytes,
                commands_in_flight=self._core.unretired,
            )

    @property
    def is_attached(self) -> bool:
        return self._on_batch is not None

    @property
    def commands(self) -> int:
        """How many came so far."""
        return self._core.last_sequence

    @property
    def is_quiet(self) -> bool:
        """Whether no work is queued or running."""
        with self._lock:
            return self._core.unretired == 0

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
        with self._lock:
            if self._core.closed is not None:
                raise self._core.closed
            if self._on_batch is not None:
                raise HandleExistsError("the session has its command stream already")
            self._on_batch, self._on_end, self._at_once = on_batch, on_end, at_once

    def submit(self, commands: Sequence[Command]) -> None:
        """The next commands. Raises ProtocolError for a gap (close the session then), or why it closed."""
        try:
            for command in commands:
                self._decide(partial(self._receive, command))
        finally:
            self._deliver()

    def _receive(self, command: Command) -> None:
        self._core.receive(command)
        # Not before: a time that passed while the core did not know the command would be lost.
        if command.timeout_ms and self._core.is_open(command.sequence):
            self._arm(command)

    def refuse(self, sequence: int, error: HeliographError, tensors: tuple[int, ...] = ()) -> None:
        """A command that could not be read fails with this error; so do the tensors it was to make."""
        self._event(partial(self._core.refuse, sequence, error, tensors))

    def watch(self, on_quiet: Callable[[], None]) -> None:
        """From now on, tells whenever no work is left."""
        with self._lock:
            self._on_quiet = on_quiet

    # Plans and contents

    def when_written(self, tensors: Collection[int]) -> Future[None]:
        """Done when what was sent before to write these tensors has been done, well or not."""
        future: Future[None] = Future()
        with self._lock:
            waiter = self._core.await_writers(tensors)
            if waiter:
                self._waiters[waiter] = future
        if not waiter:
            future.set_result(None)
        return future

    def compile(self, request: CompileRequest) -> PlanInfo:
        """Compiles a graph that nobody has checked yet; blocks. Raises what Compile is refused with."""
        try:
            return self._compiler.compile(request)
        finally:
            # An update may have let go of the plan before.
            self._event(lambda: None)

    def estimate(
        self, graph: Graph, devices: Sequence[str] = (), options: CompileOptions = ANY_OPTIONS
    ) -> PlanEstimate:
        """What compiling would take of a device's memory. Raises what Estimate is refused with."""
        self._check_open()
        return self._compiler.estimate(graph, devices, options)

    def explain(self, plan: int) -> PlanReport:
        """Where the nodes of a plan run and why. Raises UnknownHandleError."""
        with self._lock:
            self._check_open()
            loaded: LoadedPlan = self._core.handles.get(plan, PlanHandle).plan
            return loaded.report()

    def discard_plan(self, handle: int) -> None:
        """Undoes a compile whose client left before it learned of it."""
        self._event(partial(self._core.discard_plan, handle))

    def missing_contents(self, digests: Sequence[bytes]) -> tuple[bytes, ...]:
        """Which of the contents the session does not hold."""
        self._check_open()
        return self._contents.missing(tuple(digests))

    # Bulk

    def begin_upload(self, target: int | bytes, size_bytes: int) -> Upload:
        """Bytes for a transfer (a number) or of a content (its digest).

        Raises LimitExceededError or OutOfMemoryError before any memory is taken, ProtocolError, or
        the error of the command that was to use them.
        """
        self._check_open()
        upload: Upload
        if isinstance(target, int):
            upload = self._begin_transfer(target, size_bytes)
        else:
            upload = ContentUpload(target, size_bytes, self._contents, self._forget_upload)
        with self._lock:
            self._open_uploads.add(upload)
            closed = self._core.closed
        if closed is not None:
            upload.abort(closed)
            raise closed
        return upload

    def _begin_transfer(self, transfer: int, size_bytes: int) -> Upload:
        self._event(partial(self._core.upload_started, transfer, size_bytes))
        broke = partial(self._upload_broke, transfer)
        arrived = partial(self._upload_arrived, transfer)
        try:
            return TransferUpload(size_bytes, self._staging, arrived, broke, self._forget_upload)
        except BaseException as error:
            broke(typed(error, "staging an upload"))
            raise

    def _upload_arrived(self, transfer: int, staged: memoryview) -> None:
        with self._lock:
            self._uploads[transfer] = staged
            try:
                self._decide(partial(self._core.upload_arrived, transfer))
            except BaseException:
                self._uploads.pop(transfer, None)
                raise
        self._deliver()

    def _upload_broke(self, transfer: int, error: HeliographError) -> None:
        self._event(partial(self._core.upload_broke, transfer, error))

    def _forget_upload(self, upload: Upload) -> None:
        with self._lock:
            self._open_uploads.discard(upload)

    def open_download(self, transfer: int) -> Download:
        """The bytes of a transfer, once they are read; the caller closes it. Raises ProtocolError."""
        self._check_open()
        return self._downloads.open(transfer)

    # The end

    def close(self, error: HeliographError | None = None) -> None:
        """Ends the session and frees everything: running work is aborted, the rest fails with `error`.

        Blocks until that is done, for CLOSE_SECONDS at most. Idempotent.
        """
        with self._lock:
            first, self._closing = not self._closing, True
        if not first:
            self._released.wait(CLOSE_SECONDS)
            return
        error = error or SessionClosedError("the session was closed", advice="open another")
        self._event(partial(self._core.close, error))
        with self._lock:
            uploads = list(self._open_uploads)
        for upload in uploads:
            upload.abort(error)
        try:
            self._release_everything(error)
        finally:
            self._released.set()
            self._on_closed(self)
            self._call_end(error)

    def _release_everything(self, error: HeliographError) -> None:
        if not self._quiet.wait(CLOSE_SECONDS) or not self._compiler.busy.acquire(timeout=CLOSE_SECONDS):
            # Memory that work may still touch is better lost than given away.
            logger.error("%s: work did not end within %.0f s; its memory is lost", self, CLOSE_SECONDS)
            return
        try:
            self._event(self._core.release_all)
            for transfer in list(self._uploads):
                self._drop_upload(DropUpload(transfer))
            self._downloads.close(error)
            self._contents.close(error)
        finally:
            self._compiler.busy.release()

    def _call_end(self, error: HeliographError) -> None:
        with self._lock:
            if self._on_end is not None:
                self._calls.append(partial(self._on_end, error))
            self._on_end = None
        self._deliver()

    def _check_open(self) -> None:
        with self._lock:
            if self._core.closed is not None:
                raise self._core.closed

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
        if self._core.unretired == 0:
            self._note_quiet()

    def _carry_out_one(self, instruction: Instruction) -> None:
        try:
            self._carry_out[type(instruction)](instruction)
        except Exception:
            logger.exception("%s: %s failed", self, type(instruction).__name__)

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
                    logger.exception("%s: a callback failed", self)

    def _next_calls(self) -> list[Callable[[], object]] | None:
        with self._lock:
            calls, self._calls = self._calls, []
            on_batch = self._on_batch
            batch = self._core.take_completions() if on_batch is not None else None
            if batch is not None and on_batch is not None:
                calls.insert(0, partial(on_batch, batch))
            if not calls:
                self._delivering = False
                return None
            return calls

    # Lanes and work

    def _device(self, name: str) -> Device:
        """By name; "" is the first. Raises UnknownDeviceError."""
        if name and name not in self._devices:
            raise unknown_device(name, self._devices)
        return self._devices[name] if name else self._first

    def _memory(self, device: str, buffer_type: str) -> BufferType:
        """How a device makes memory. Raises UnknownDeviceError, InvalidArgumentError."""
        return find_buffer_type(self._device(device), buffer_type)

    def _open_lane(self, instruction: OpenLane) -> None:
        lane = instruction.lane
        try:
            lane.stream = self._devices[lane.device].stream()
        except Exception as error:
            self._core.lane_failed(lane, typed(error, f"making a stream of device {lane.device}"))

    def _close_lane(self, instruction: CloseLane) -> None:
        # Closing waits for the lane's thread, which may wait for our lock.
        self._calls.append(instruction.lane.stream.close)

    def _start(self, instruction: Start) -> None:
        entry = instruction.entry
        assert entry.lane is not None
        work = Work(self, entry, entry.lane, self._occupancies[entry.lane.device])
        if isinstance(entry.task, RunTask):
            self._aborts[entry.sequence] = work.abort
        work.lane.queued += 1
        try:
            self._submit(work)
        except Exception as error:
            self.work_done(work, error)

    def _submit(self, work: Work) -> None:
        if work.lane.error is not None:
            raise work.lane.error
        if self._is_short(work) and work.occupancy.at_once(work.run_at_once):
            self.work_done(work, None)
        else:
            work.lane.stream.submit(work.run, partial(self.work_done, work))

    def _is_short(self, work: Work) -> bool:
        """Whether it is best done here and now: a quick run on an idle lane, done when it returns."""
        task = work.entry.task
        if not self._at_once or work.lane.queued > 1 or not isinstance(task, RunTask):
            return False
        loaded: LoadedPlan = task.plan.plan
        return loaded.expected_us < SHORT_US and loaded.device.type is DeviceType.CPU

    def _abort_work(self, instruction: AbortWork) -> None:
        if (abort := self._aborts.get(instruction.sequence)) is not None:
            abort.set()

    def begin_work(self, work: Work) -> bool:
        """Called by the lane: whether there is something to do."""
        with self._lock:
            return self._core.begin(work.entry.sequence)

    def do_work(self, work: Work) -> Completion:
        """Called by the lane, after `begin_work` said so. Raises anything."""
        entry = work.entry
        assert not isinstance(entry.task, FreeTask)
        return self._execution.perform(entry.sequence, entry.task, work.abort)

    def work_failed(self, work: Work, error: BaseException) -> None:
        """Called by the lane, before it starts what comes next."""
        entry = work.entry
        computing = isinstance(entry.task, RunTask)
        failure = typed(error, f"command {entry.sequence}", computing=computing)
        with self._lock:
            self._core.fail(entry.sequence, failure)

    def work_done(self, work: Work, error: BaseException | None) -> None:
        """Called by the lane: the work is computed, or did not run."""
        sequence = work.entry.sequence
        failure = None if error is None else typed(error, f"command {sequence}", computing=True)
        with self._lock:
            self._aborts.pop(sequence, None)
            work.lane.queued -= 1
            self._decide(partial(self._core.finish, sequence, failure, work.result))
        self._deliver()

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

    def _release_plan(self, instruction: ReleasePlan) -> None:
        loaded: LoadedPlan = instruction.plan.plan
        loaded.free()

    def _drop_upload(self, instruction: DropUpload) -> None:
        staged = self._uploads.pop(instruction.transfer, None)
        if staged is not None:
            self._staging.give(staged.nbytes)

    def _deliver_read(self, instruction: Deliver) -> None:
        call = self._downloads.settle(instruction.transfer, instruction.sequence, instruction.error)
        self._calls.append(call)

    def _drop_read(self, instruction: DropRead) -> None:
        self._downloads.drop(instruction.sequence)

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
