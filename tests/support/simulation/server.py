"""The server's side of a simulated session: the real core, and devices that work in virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from heliograph_proto import commands as c
from heliograph_proto.errors import CancelledError, ComputeFailedError, HeliographError
from heliograph_proto.sessions import Limits
from heliograph_server.resources.handles import (
    NOTHING_BOUND,
    DeviceQueue,
    HandleStorage,
    PlanHandle,
    TensorHandle,
)
from heliograph_server.resources.run_slots import RunSlots
from heliograph_server.session.protocol import instructions
from heliograph_server.session.protocol.core import SessionCore
from heliograph_server.session.protocol.dependencies import CommandState
from simulation.plans import PLANS, PORTS, SIZE, TYPE
from simulation.serial import Report
from simulation.world import World, hold

#: A byte while it is being written.
TORN = -1


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes that work reads or writes."""

    storage: HandleStorage
    start: int
    size: int

    @property
    def bytes(self) -> list[int]:
        assert self.storage.buffer is not None, "work on bytes that do not exist"
        found: list[int] = self.storage.buffer[self.start : self.start + self.size]
        return found

    def fill(self, values: list[int]) -> None:
        self.storage.buffer[self.start : self.start + self.size] = values


def access(tensor: TensorHandle, offset: int = 0, size: int | None = None) -> Access:
    """The bytes of a tensor, or some of them."""
    assert tensor.storage is not None
    start = tensor.layout.offset_bytes + offset
    return Access(tensor.storage, start, tensor.type.nbytes - offset if size is None else size)


@dataclass(eq=False)
class Work:
    """A command in its queue."""

    state: CommandState
    is_aborted: bool = False
    #: Called when it is aborted, its upload changes, or its client took values.
    wake: Callable[[], None] | None = None
    reads: list[Access] = field(default_factory=list)
    writes: list[Access] = field(default_factory=list)
    before: list[list[int]] = field(default_factory=list)
    #: The value of the variable that it assigns, before it and after its last whole step.
    variable: bytes = bytes(SIZE)
    current: bytes = bytes(SIZE)

    def notify(self) -> None:
        wake, self.wake = self.wake, None
        if wake is not None:
            wake()


@dataclass
class Upload:
    """The bytes of a transfer on the server."""

    data: bytes
    #: None while the bytes come.
    error: HeliographError | None = None
    has_arrived: bool = False
    is_dropped: bool = False


class SimulatedServer:
    """`send` takes completions to the client, `deliver` the bytes of a read or its error."""

    def __init__(
        self,
        world: World,
        limits: Limits,
        send: Callable[[c.CompletionBatch], None],
        deliver: Callable[[int, bytes | HeliographError], None],
    ) -> None:
        self.world = world
        self.limits = limits
        self.core = SessionCore(limits, ("a", "b"))
        self._send = send
        self._deliver = deliver
        #: What was received, by sequence number, and the commands to which something happened.
        self.reports: dict[int, Report] = {}
        self.guilty: set[int] = set()
        self.uploads: dict[int, Upload] = {}
        #: Bytes that commands read for transfers: by sequence number, then by transfer.
        self._staged: dict[int, bytes] = {}
        self._delivered: dict[int, bytes] = {}
        self._lanes: dict[DeviceQueue, Lane] = {}
        self._released: set[int] = set()
        self._through = 0
        self._storages: list[HandleStorage] = []
        self.is_closed = False
        variable = HandleStorage(SIZE, "a", [0] * SIZE)
        self.core.plans.add_variable("v", TYPE, "a", variable.buffer)
        for plan in PLANS.values():
            named = [
                tuple(self.core.plans.variables[name][1] for name in (one,) if name)
                for one in (plan.reads, plan.assigns)
            ]
            queues = [DeviceQueue(plan.device) for _ in range(plan.copies)] if plan.copies > 1 else []
            names = (plan.assigns,) if plan.assigns else ()
            handle = PlanHandle(plan.device, *PORTS, *named, names, NOTHING_BOUND, plan, RunSlots(queues))
            self.core.plans.add_plan(plan.handle, handle)
        self.follow()

    @property
    def staged_bytes(self) -> int:
        """The bytes that the server holds for transfers."""
        coming = sum(len(one.data) for one in self.uploads.values())
        read = (*self._staged.values(), *self._delivered.values())
        return coming + sum(map(len, read))

    # Messages

    def receive(self, commands: list[c.Command]) -> None:
        """Receive a message of commands."""
        for command in commands:
            if self.core.closed is not None:
                return
            report = self.reports[command.sequence] = Report(command.sequence, command.kind)
            if isinstance(command.kind, c.RunCommand) and command.kind.loop is not None:
                report.steps = command.kind.loop.steps
            if isinstance(command.kind, c.Cancel):
                self.guilty.add(command.kind.sequence)
            self.core.receive(command)
            if command.timeout_ms:
                expire = partial(self._expire, command.sequence)
                self.world.after(command.timeout_ms / 1000, expire)
            self.follow()

    def _expire(self, sequence: int) -> None:
        if self.core.is_open(sequence):
            self.guilty.add(sequence)
        self.core.expire(sequence)
        self.follow()

    def upload(self, transfer: int, data: bytes) -> HeliographError | None:
        """Begin an upload. Returns the error that refuses it."""
        try:
            self.core.upload_started(transfer, len(data))
        except HeliographError as error:
            return error
        finally:
            self.follow()
        self.uploads[transfer] = Upload(data)
        return None

    def arrived(self, transfer: int) -> HeliographError | None:
        """End an upload well. Returns the error of a command that failed meanwhile."""
        upload = self.uploads.get(transfer)
        try:
            self.core.upload_arrived(transfer)
        except HeliographError as error:
            self.uploads.pop(transfer, None)
            return error
        if upload is not None:
            upload.has_arrived = True
            self._notify_uploads()
        self.follow()
        return None

    def broke(self, transfer: int, error: HeliographError) -> None:
        """End an upload early."""
        if (upload := self.uploads.get(transfer)) is not None:
            upload.error = error
        self.core.upload_broke(transfer, error)
        self._notify_uploads()
        self.follow()

    def _notify_uploads(self) -> None:
        for lane in self._lanes.values():
            if lane.current is not None:
                lane.current.notify()

    def took(self, transfer: int) -> None:
        """Record that the client received the bytes of a read."""
        self._delivered.pop(transfer, None)
        self.core.transfers.read_ended(transfer)

    def close(self, error: HeliographError) -> None:
        """End the session."""
        self.is_closed = True
        self.core.close(error)
        self.core.taps.end_of_commands()
        for transfer, upload in list(self.uploads.items()):
            if not upload.has_arrived and upload.error is None:
                self.broke(transfer, error)
        self.follow()

    # Instructions

    def follow(self) -> None:
        """Carry out the instructions, and send what is completed."""
        while taken := self.core.take_instructions():
            for one in taken:
                self._carry_out(one)
        batch = self.core.take_completions()
        if batch is not None:
            hold(batch.completed_through >= self._through, "completed_through goes back")
            self._through = batch.completed_through
            for completion in batch.completions:
                assert isinstance(completion, c.Completion)
                self.reports[completion.sequence].error = completion.error
            self._send(batch)

    def _carry_out(self, one: instructions.Instruction) -> None:
        match one:
            case instructions.OpenQueue(queue):
                self._lanes[queue] = Lane(self)
            case instructions.CloseQueue(queue):
                hold(not self._lanes[queue].is_busy, "a queue is closed while it works")
            case instructions.Start(state):
                assert state.queue is not None
                self._lanes[state.queue].submit(Work(state))
            case instructions.AbortWork(sequence, _):
                self._find(sequence, abort=True)
            case instructions.Proceed(sequence):
                self._find(sequence, abort=False)
            case instructions.ReleaseStorage(storage):
                hold(id(storage) not in self._released, "a storage is released twice")
                self._released.add(id(storage))
                self._storages.append(storage)  # its id is not used again
                users = [lane.current for lane in self._lanes.values() if lane.current is not None]
                used = {id(each.storage) for work in users for each in (*work.reads, *work.writes)}
                hold(id(storage) not in used, "a storage is released while work uses it")
                storage.buffer = None
            case instructions.DropUpload(transfer):
                if (upload := self.uploads.pop(transfer, None)) is not None:
                    upload.is_dropped = True
            case instructions.Deliver(transfer, sequence, error):
                data = self._staged.pop(sequence, None)
                if error is None:
                    hold(data is not None, f"command {sequence} delivers bytes that it did not read")
                    assert data is not None
                    self._delivered[transfer] = data
                    self._deliver(transfer, data)
                else:
                    self._deliver(transfer, error)
            case instructions.DropRead(sequence):
                self._staged.pop(sequence, None)

    def _find(self, sequence: int, *, abort: bool) -> None:
        for lane in self._lanes.values():
            work = lane.current
            if work is not None and work.state.sequence == sequence:
                work.is_aborted |= abort
                self.world.soon(work.notify, 0.1)

    def stage(self, sequence: int, data: bytes) -> None:
        self._staged[sequence] = data

    def seconds(self) -> float:
        """How long a piece of work takes: mostly short, at times a hundred times as long."""
        return self.world.random.random() ** 4 * self.world.random.choice((0.05, 0.05, 3.0))

    def close_at_last(self) -> None:
        """Release everything once nothing runs, and check that nothing is left."""
        hold(self.core.unretired == 0 and self.core.in_flight == 0, f"{self.core!r} did not end")
        self.core.release_all()
        self.follow()
        # The session itself drops what no command claimed.
        self.uploads = {number: one for number, one in self.uploads.items() if not one.has_arrived}
        hold(len(self.core.handles) == 0, "handles are left")
        hold(not self.core.resources.storages and not list(self.core.resources.queues), "resources are left")
        hold(not self.uploads and not self._staged, "staged bytes are left")


class Lane:
    """A device's queue. Work is computed one after the other, and reported at once or a little later."""

    def __init__(self, server: SimulatedServer) -> None:
        self._server = server
        self._world = server.world
        self._waiting: deque[Work] = deque()
        #: Computed work that the device has not reported yet, in order.
        self._unreported: deque[Callable[[], None]] = deque()
        self.current: Work | None = None

    @property
    def is_busy(self) -> bool:
        return self.current is not None or bool(self._waiting) or bool(self._unreported)

    def submit(self, work: Work) -> None:
        self._waiting.append(work)
        if self.current is None:
            self._world.soon(self._next, 0.02)

    def _next(self) -> None:
        if self.current is not None or not self._waiting:
            return
        work = self.current = self._waiting.popleft()
        core, state = self._server.core, work.state
        if not core.begin(state.sequence):
            self._report(work, None, c.Completion(state.sequence))
            return
        self._server.reports[state.sequence].began = True
        if state.takes_upload:
            self._await_upload(work)
        else:
            self._compute(work)

    def _await_upload(self, work: Work) -> None:
        task = work.state.task
        assert isinstance(task, instructions.WriteTask)
        upload = self._server.uploads.get(task.command.transfer)
        if work.is_aborted or upload is None:
            self._fail(work, CancelledError("aborted"))
        elif upload.error is not None:
            self._fail(work, upload.error)
        elif upload.has_arrived:
            self._server.reports[work.state.sequence].data = upload.data
            self._compute(work)
        else:
            work.wake = partial(self._await_upload, work)

    def _compute(self, work: Work) -> None:
        self._list_accesses(work)
        work.before = [one.bytes for one in work.reads]
        if isinstance(work.state.task, instructions.RunTask) and work.state.task.plan.assigned:
            work.variable = work.current = _solid(work.writes[0].bytes)
        for one in work.writes:
            one.fill([TORN] * one.size)
        if isinstance(work.state.task, instructions.RunTask) and work.state.task.command.loop is not None:
            self._loop(work, 0)
        else:
            self._world.after(self._server.seconds(), partial(self._computed, work))

    def _list_accesses(self, work: Work) -> None:
        match work.state.task:
            case instructions.AllocateTask(storages):
                for storage in storages:
                    storage.buffer = [0] * storage.size_bytes
            case instructions.WriteTask(tensor, command):
                size = command.size_bytes if command.data is None else len(command.data)
                work.writes = [access(tensor, command.offset_bytes, size)]
            case instructions.FillTask(tensor, command):
                work.writes = [access(tensor, command.offset_bytes, command.size_bytes)]
            case instructions.ReadTask(tensor, command):
                work.reads = [access(tensor, command.offset_bytes, command.size_bytes)]
            case instructions.CopyTask(source, destination):
                work.reads = [access(source)]
                work.writes = [access(destination)] if source is not destination else []
            case instructions.RunTask() as task:
                given = task.inputs[0]
                work.reads = [access(given)] if isinstance(given, TensorHandle) else []
                work.reads += [access(one) for one in task.plan.read]
                work.writes = [access(one) for one in task.plan.assigned]
                for wanted in task.outputs:
                    if wanted.tensor is not None and wanted.tensor.storage is not None:
                        wanted.tensor.storage.buffer = [0] * wanted.tensor.storage.size_bytes
                outputs = [one.tensor or one.into for one in task.outputs]
                work.writes += [access(one) for one in outputs if one is not None]
            case None:
                # The empty work that shows that a new queue works.
                pass
            case other:
                raise NotImplementedError(repr(other))

    def _loop(self, work: Work, step: int, x: bytes | None = None, v: bytes = b"") -> None:
        """Compute the next step of a loop, and send its value when the client has room."""
        task, report = work.state.task, self._server.reports[work.state.sequence]
        assert isinstance(task, instructions.RunTask) and task.progress is not None
        if work.is_aborted:
            self._fail(work, CancelledError("aborted"))
        elif step == report.steps:
            self._world.after(self._server.seconds(), partial(self._computed, work))
        else:
            if x is None:
                x, v = self._operands(work, task)
            x, v = task.plan.plan.step(x, v)
            assert task.command.loop is not None
            streams = bool(task.command.loop.taps)
            after = partial(self._stream if streams else self._loop_on, work, step, x, v)
            self._world.after(self._server.seconds(), after)

    def _stream(self, work: Work, step: int, x: bytes, v: bytes) -> None:
        core = self._server.core
        try:
            was_sent = core.taps.stream(work.state.sequence, step, 0, 0, memoryview(x))
        except HeliographError as error:
            self._fail(work, error)
            return
        finally:
            self._server.follow()
        if was_sent or work.is_aborted:
            self._server.reports[work.state.sequence].streamed.append(x)
            self._loop_on(work, step, x, v)
        else:
            work.wake = partial(self._stream, work, step, x, v)

    def _loop_on(self, work: Work, step: int, x: bytes, v: bytes) -> None:
        task = work.state.task
        assert isinstance(task, instructions.RunTask) and task.progress is not None
        task.progress.done = step + 1
        work.current = v
        self._loop(work, step + 1, x, v)

    # Its end

    def _check_stable(self, work: Work) -> None:
        """Nothing may have used the bytes meanwhile that the order of commands keeps apart."""
        for one, before in zip(work.reads, work.before, strict=True):
            hold(one.bytes == before, f"{work.state} read bytes that were written meanwhile")
        for one in work.writes:
            hold(one.bytes == [TORN] * one.size, f"{work.state} and other work wrote the same bytes")

    def _computed(self, work: Work) -> None:
        self._check_stable(work)
        sequence = work.state.sequence
        if self._world.chance(0.04):
            self._server.guilty.add(sequence)
            self._fail(work, ComputeFailedError("burnt"))
            return
        # A run that has begun to write its variables goes on to its end.
        if work.is_aborted and not (_assigns(work) and self._world.chance(0.5)):
            self._fail(work, CancelledError("aborted"))
            return
        report = self._server.reports[sequence]
        result = c.Completion(sequence)
        match work.state.task:
            case instructions.WriteTask(_, command):
                work.writes[0].fill(list(bytes(command.data or report.data)))
            case instructions.FillTask(_, command):
                work.writes[0].fill([command.value] * command.size_bytes)
            case instructions.CopyTask():
                for one in work.writes:
                    one.fill(work.before[0])
            case instructions.ReadTask(_, command):
                report.seen = _solid(work.before[0])
                if command.transfer:
                    self._server.stage(sequence, report.seen)
                else:
                    result = c.Completion(sequence, data=report.seen)
            case instructions.RunTask() as task:
                result = self._finish_run(work, task, report)
        self._report(work, None, result)

    def _finish_run(self, work: Work, task: instructions.RunTask, report: Report) -> c.Completion:
        x, v = self._operands(work, task)
        plan = task.plan.plan
        y = x
        for _ in range(report.steps):
            y, v = plan.step(x, v)
            x = y
        for place, one in enumerate(work.writes):
            one.fill(list(v if place < len(task.plan.assigned) else y))
        outputs: tuple[tuple[int, bytes], ...] = ()
        if task.outputs and task.outputs[0].fetch:
            report.seen = y
            outputs = ((0, y),)
        return c.Completion(report.sequence, outputs=outputs, steps=report.steps if task.progress else 0)

    def _operands(self, work: Work, task: instructions.RunTask) -> tuple[bytes, bytes]:
        given = task.inputs[0]
        values = [_solid(one) for one in work.before]
        x = values[0] if isinstance(given, TensorHandle) else bytes(given)
        if not task.plan.read:
            return x, work.variable
        return x, values[-1]

    def _fail(self, work: Work, error: HeliographError) -> None:
        """End work early. What it was to write is lost, but for variables after a whole step."""
        for one in work.writes:
            one.fill([self._world.random.randrange(256) for _ in range(one.size)])
        is_cancelled = isinstance(error, CancelledError)
        # Otherwise an asynchronous device, which reports the failure with the end.
        is_told = is_cancelled or self._world.chance(0.5)
        torn = not is_told or (not is_cancelled and self._world.chance(0.3))
        if _assigns(work) and not torn:
            work.writes[0].fill(list(work.current))
        report = self._server.reports[work.state.sequence]
        report.torn = torn
        if isinstance(work.state.task, instructions.RunTask) and work.state.task.progress is not None:
            report.done = work.state.task.progress.done
        if is_told:
            self._server.core.fail(work.state.sequence, error, torn=torn)
            self._server.follow()
        self._report(work, None if is_told else error, c.Completion(work.state.sequence))

    def _report(self, work: Work, error: HeliographError | None, result: c.Completion) -> None:
        work.reads, work.writes = [], []
        self._unreported.append(partial(self._finish, work, error, result))
        self.current = None
        if self._world.chance(0.2):
            self._world.soon(self._tell, 0.2)
        else:
            self._tell()
        if self._waiting:
            self._world.soon(self._next, 0.02)

    def _tell(self) -> None:
        while self._unreported:
            self._unreported.popleft()()

    def _finish(self, work: Work, error: HeliographError | None, result: c.Completion) -> None:
        was_told = work.state.error is not None
        self._server.core.finish(work.state.sequence, error, result)
        report = self._server.reports[work.state.sequence]
        if error is None and not was_told and report.began and work.state.error is not None:
            # It computed with bytes of which only now is known that they were lost.
            report.torn = True
        self._server.follow()


def _assigns(work: Work) -> bool:
    task = work.state.task
    return isinstance(task, instructions.RunTask) and bool(task.plan.assigned)


def _solid(values: list[int]) -> bytes:
    return bytes(value & 255 for value in values)
