"""The protocol of a session, pure: events in, instructions out.

`SessionCore` knows no clock, lock, thread, device or socket. Event methods change its state; what is
to be done about it collects, in order, in `take_instructions`, and what is done in
`take_completions`. The runtime carries the instructions out and reports back:

    receive, refuse ──▸ Start ──▸ (work begins) begin ──▸ (work fails) fail ──▸ (done) finish
    upload_started, upload_arrived, upload_broke
    cancel, expire, close

A command passes through these steps:

1. *Validation* looks up its handles and finds every static error (`validation.py`).
2. *Ordering* lets it wait: for its stream, for earlier commands on its tensors, for the runs of its
   plan, for its upload (`dependencies.py`). Nothing is decided from the health of its tensors yet.
3. Its *turn*: a device command is submitted to its device queue, also one that is known to fail, so that the
   order of the queue is the order of the failures; any other is settled here.
4. It *begins*: poison is looked at now, when everything before it is known.
5. It is *reported*, and *retires*; see `CommandState` for the difference.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain

from heliograph_proto import commands as c
from heliograph_proto.codec.inline_forms import InlineResult, InlineRun, RunForm
from heliograph_proto.errors import (
    CancelledError,
    DeadlineExceededError,
    HeliographError,
    LimitExceededError,
    ProtocolError,
)
from heliograph_proto.sessions import Limits
from heliograph_server.resources.handles import (
    BufferHandle,
    DeviceQueue,
    EventHandle,
    Handle,
    HandleStorage,
    HandleTable,
    PlanHandle,
    ReservationHandle,
    StreamHandle,
    TensorHandle,
)
from heliograph_server.resources.memories import FindMemory, plain_memory
from heliograph_server.session.protocol.dependencies import (
    CommandPhase,
    CommandState,
    enter_storages,
    enter_stream,
    leave_storages,
    leave_stream,
    note_failure,
    unblocked_by_retirement,
    unblocked_by_submission,
    wait_for_users,
    wait_for_writers,
)
from heliograph_server.session.protocol.instructions import (
    ABORTABLE,
    AbortWork,
    CloseEdge,
    Deliver,
    Disarm,
    DropRead,
    FreeTask,
    Instruction,
    OfferTask,
    OpenEdge,
    PlaceTask,
    ReadTask,
    Resume,
    RunEnded,
    RunTask,
    SharedPlace,
    Start,
    WriteTask,
)
from heliograph_server.session.protocol.plan_state import PlanState
from heliograph_server.session.protocol.resource_state import ResourceState
from heliograph_server.session.protocol.run_validation import InlineRunFit, fit_of
from heliograph_server.session.protocol.tap_state import TapState
from heliograph_server.session.protocol.transfer_state import TransferState
from heliograph_server.session.protocol.validation import CommandValidator
from heliograph_server.session.protocol.validation_context import ValidationContext

#: So many forms of inline runs are known to fit; beyond that the core begins anew.
MOST_FITS = 64


class SessionCore:
    """The state of one session. `devices` are names by priority; `recorded`: commands, by sequence number, of
    whose end an instruction tells.

    What is no order of commands is in its parts: `plans`, `transfers`, `taps` and `resources`. They share the
    lists of instructions and of tapped pieces with it, which are emptied and never replaced.
    """

    def __init__(
        self,
        limits: Limits,
        devices: Sequence[str],
        memory: FindMemory = plain_memory,
        recorded: Container[int] = (),
    ) -> None:
        self._limits = limits
        self._recorded = recorded
        #: Why the session ended.
        self.closed: HeliographError | None = None
        #: Commands that have not retired, and those of them that were not reported, by sequence number.
        self._commands: dict[int, CommandState] = {}
        self._open: dict[int, CommandState] = {}
        #: Commands that nothing is in the way of.
        self._ready: deque[CommandState] = deque()
        self._instructions: list[Instruction] = []
        self._tap_pieces: list[c.TapPiece] = []
        self.handles = HandleTable(limits)
        self.resources = ResourceState(self._instructions)
        self.plans = PlanState(self.handles, self.resources, self._instructions)
        self.transfers = TransferState(limits.in_flight_commands, self._instructions, self._ready)
        self.taps = TapState(self._open, self._tap_pieces, self._instructions, limits.inline_bytes)
        self._context = ValidationContext(
            self.handles, limits, tuple(devices), self.resources.open_queue, memory
        )
        self._validator = CommandValidator(self._context)
        self._last_sequence = 0
        self._completed_through = 0
        self._reported_through = 0
        self._completions: list[c.Completion | InlineResult] = []
        #: Runs that have retired since somebody looked.
        self.ended_runs = 0
        #: How many commands failed, by the reason of the error.
        self.failures: Counter[int] = Counter()
        #: How many from outside of the command stream have waited so far.
        self._waiters = 0
        #: Forms of inline runs, and how they fit the plans that they name.
        self._fits: dict[RunForm, InlineRunFit] = {}

    def __repr__(self) -> str:
        health = "closed" if self.closed else f"{len(self._open)} commands in flight"
        return f"<SessionCore {health}, {len(self.handles)} handles, completed {self._completed_through}>"

    # What can be asked

    @property
    def in_flight(self) -> int:
        """Commands that were not reported."""
        return len(self._open)

    @property
    def last_sequence(self) -> int:
        """The number of the last command that came."""
        return self._last_sequence

    def is_open(self, sequence: int) -> bool:
        """Whether the command came and was not reported."""
        return sequence in self._open

    @property
    def unretired(self) -> int:
        """Commands that something may still wait for; 0 once all is quiet."""
        return len(self._commands)

    @property
    def runs_in_flight(self) -> int:
        """Of these, runs of plans."""
        return sum(isinstance(one.task, RunTask) for one in self._commands.values())

    @property
    def completed_through(self) -> int:
        return self._completed_through

    def take_completions(self) -> c.CompletionBatch | None:
        """What was done since the last call; None if nothing."""
        found = self._completions or self._tap_pieces
        if not found and self._completed_through == self._reported_through:
            return None
        listed, self._completions = tuple(self._completions), []
        taps = tuple(self._tap_pieces)
        self._tap_pieces.clear()
        self._reported_through = self._completed_through
        return c.CompletionBatch(self._completed_through, listed, taps)

    @property
    def reported_through(self) -> int:
        """Up to which command `take_completions` has told."""
        return self._reported_through

    def add_devices(self, names: Iterable[str]) -> None:
        """From now on commands may name these devices, too."""
        for name in names:
            self._context.add_device(name)

    @property
    def is_silent(self) -> bool:
        """Whether `take_completions` would have nothing to give."""
        return (
            not self._completions
            and not self._tap_pieces
            and self._completed_through == self._reported_through
        )

    def take_result(self) -> InlineResult | None:
        """The completion of the run that was `did` last, after silence; None if it failed, which
        `take_completions` tells."""
        result = self._completions[0]
        if not isinstance(result, InlineResult):
            return None
        self._completions.clear()
        self._reported_through = self._completed_through
        return result

    def take_instructions(self) -> list[Instruction]:
        """What is to be done since the last call, in order."""
        taken = self._instructions.copy()
        self._instructions.clear()
        return taken

    # Commands arrive

    def receive(self, command: c.Command, refused: HeliographError | None = None) -> None:
        """The next command of the stream; `refused`: why somebody else refuses it. Raises ProtocolError for a
        gap: the session is over then."""
        self._expect(command.sequence)
        if (refusal := self._over_limit(command, refused)) is not None:
            refusal.counts = refused is None and isinstance(command.kind, c.RunCommand)
            self._add(refusal, command.kind)
            self._settle()
            return
        state = self._validator.validate(command)
        state.counts = isinstance(command.kind, c.RunCommand)
        if isinstance(command.kind, c.Continue):
            self.taps.proceed(state, command.kind)
        self._add(state, command.kind)
        if isinstance(command.kind, c.Cancel):
            self._interrupt(command.kind.sequence, CancelledError("the command was cancelled"))
        self._settle()

    def fit(self, run: InlineRun) -> InlineRunFit | None:
        """How an inline run fits its plan, if it is the next command and nothing is before it, so that
        whoever has it may do it now and report it by `did`. None: it goes the way of every command."""
        if self._commands or run.sequence != self._last_sequence + 1 or self.closed is not None:
            return None
        fit = self._fits.get(run.form)
        plan = self.handles.peek(run.form.plan, PlanHandle)
        if fit is None or fit.plan is not plan:
            if plan is None or (fit := fit_of(run.form, plan)) is None:
                return None
            if len(self._fits) >= MOST_FITS:
                self._fits.clear()
            self._fits[run.form] = fit
        return fit

    def did(self, sequence: int, result: InlineResult | HeliographError) -> None:
        """The next command was a run, and is done."""
        self._last_sequence = self._completed_through = sequence
        if isinstance(result, InlineResult):
            self._completions.append(result)
            return
        error = result.from_command(sequence)
        self.failures[error.reason] += 1
        self._completions.append(c.Completion(sequence, error))
        self._context.note_failure(error)

    def refuse(
        self, sequence: int, error: HeliographError, tensors: tuple[int, ...] = (), buffer: int = 0
    ) -> None:
        """A command that could not be read; `tensors` and `buffer` are the handles that it was to make."""
        self._expect(sequence)
        state = CommandState(sequence)
        produced = c.RunCommand(0, (), tuple(c.OutputBinding(0, number) for number in tensors))
        self._validator.refuse(state, produced, error.from_command(sequence))
        if buffer:
            self.handles.add_poisoned(buffer, BufferHandle((), error=error.from_command(sequence)))
        self._add(state, produced)
        self._settle()

    def _expect(self, sequence: int) -> None:
        if self.closed is not None:
            raise self.closed
        if sequence != self._last_sequence + 1:
            raise ProtocolError(
                f"command {sequence} came after command {self._last_sequence}; sequence numbers have no gaps"
            )
        self._last_sequence = sequence

    def _over_limit(self, command: c.Command, refused: HeliographError | None) -> CommandState | None:
        limit = self._limits.in_flight_commands
        if refused is None and len(self._open) < limit and len(self._commands) < 2 * limit:
            return None
        state = CommandState(command.sequence, notify=command.notify, timed=command.timeout_ms > 0)
        error = refused or LimitExceededError(
            f"{limit:,} commands are in flight, the most that this server takes",
            advice="wait for completions",
        )
        self._validator.refuse(state, command.kind, error.from_command(command.sequence))
        # It takes no place in the order, so it cannot spoil tensors in its turn.
        state.targets, state.queue, state.is_refused = (), None, True
        return state

    def _add(self, state: CommandState, kind: c.CommandKind) -> None:
        """Puts a command into the order; it is ready at once if nothing is in its way."""
        self._open[state.sequence] = self._commands[state.sequence] = state
        try:
            self.transfers.bind(state, kind)
        except HeliographError as error:
            self._validator.refuse(state, kind, error.from_command(state.sequence))
            state.task = None
        self._order(state, kind)
        if isinstance(state.task, OfferTask) and state.error is None:
            self._instructions.append(OpenEdge(state.sequence, state.task))
        if state.blockers == 0:
            self._ready.append(state)

    def _order(self, state: CommandState, kind: c.CommandKind) -> None:
        # What was refused for want of room waits for nothing, else it would be kept after all.
        if isinstance(kind, c.Cancel | c.Continue) or state.is_refused:
            return
        gates = isinstance(kind, c.WaitCommand) and self._wait_for_event(state, kind)
        if isinstance(state.task, FreeTask):
            self._wait_for_freed(state, state.task)
        elif isinstance(state.task, RunTask):
            state.task.plan.slots.enter(state.task.slot, state)
        if state.queue is None:
            wait_for_writers(state, state.uses)
        else:
            self.resources.storages.update((one.storage, None) for one in state.targets if one.storage)
            enter_storages(state)
        if state.stream is not None:
            marks, is_fence = isinstance(kind, c.Record), isinstance(kind, c.Record | c.Synchronize)
            enter_stream(state, state.stream, marks=marks, gates=gates, is_fence=is_fence)

    def _wait_for_event(self, state: CommandState, kind: c.WaitCommand) -> bool:
        """Whether there is something to wait for."""
        event = self.handles.peek(kind.event, EventHandle)
        if event is not None:
            state.wait_for(event.mark)
        return state.blockers > 0

    def _wait_for_freed(self, state: CommandState, task: FreeTask) -> None:
        wait_for_users(state, dict.fromkeys(_storages_of(task.handles)))
        earlier: list[CommandState | None] = []
        for handle in task.handles:
            match handle:
                case PlanHandle() | ReservationHandle():
                    earlier.extend(handle.slots.running())
                case StreamHandle():
                    earlier += [handle.tail, handle.gate, *handle.runs]
        for one in earlier:
            state.wait_for(one)

    # Their turn

    def _settle(self) -> None:
        """Lets everything that is ready have its turn."""
        while self._ready:
            state = self._ready.popleft()
            if state.waiter:
                state.phase = CommandPhase.RETIRED
                self._instructions.append(Resume(state.waiter))
            elif state.queue is not None and state.queue.error is None:
                state.phase = CommandPhase.SUBMITTED
                self._instructions.append(Start(state))
                self._ready.extend(unblocked_by_submission(state))
            else:
                self._pass(state)

    def _pass(self, state: CommandState) -> None:
        """The turn of a command that needs no device, or whose device has none for it."""
        if state.error is None and not state.reported:
            state.error = state.queue.error if state.queue is not None else self._problem(state)
        if isinstance(state.task, FreeTask):
            self.plans.release(state.task.handles)
        self._end(state, c.Completion(state.sequence))

    def begin(self, sequence: int) -> bool:
        """The command's work begins, on its queue. False: there is nothing to do any more."""
        state = self._commands[sequence]
        if state.error is None:
            state.error = self._problem(state)
        if state.error is not None:
            self._spoil(state)
            return False
        state.phase = CommandPhase.RUNNING
        # What is behind it on its queue may begin before the device has done with it.
        self._heal(state)
        state.uses_place = isinstance(state.task, WriteTask | ReadTask) and state.task.place is not None
        return True

    def fail(self, sequence: int, error: HeliographError) -> None:
        """Its work failed, but is not done yet: what was submitted after it must know now."""
        state = self._commands[sequence]
        state.error = state.error or error
        self._spoil(state)

    def finish(self, sequence: int, error: HeliographError | None, result: c.Completion) -> None:
        """Its work is done: computed, or failed with this error."""
        state = self._commands[sequence]
        if error is not None:
            self.fail(sequence, error)
        elif state.error is None:
            # A device that works asynchronously may tell only now that an earlier command failed.
            state.error = self._problem(state)
        self._end(state, result)
        self._settle()

    def _problem(self, state: CommandState) -> HeliographError | None:
        used = (one.problem() for one in state.uses)
        # Whatever is written, there must be bytes to write to.
        written = (one.failure or one.storage.error for one in state.targets if one.storage is not None)
        return next((found for found in chain(used, written) if found is not None), None)

    # Their end

    def _end(self, state: CommandState, result: c.Completion) -> None:
        if state.error is not None:
            self._spoil(state)
            note_failure(state)
        else:
            self._heal(state)
        if not state.reported:
            self._report(state, result)
        self._retire(state)

    @staticmethod
    def _heal(state: CommandState) -> None:
        for target in state.heals:
            target.heal(state.part)

    def _spoil(self, state: CommandState) -> None:
        assert state.error is not None
        state.error = state.error.from_command(state.sequence)
        if isinstance(state.task, PlaceTask):
            state.task.tensor.failure = state.error
        for target in state.targets if state.writes else ():
            if target.failure is None:
                target.poison(state.error, state.part)
            if target.storage is not None and target.storage.maker == state.sequence:
                target.storage.error = target.storage.error or state.error

    def _report(self, state: CommandState, result: c.Completion) -> None:
        state.reported = True
        del self._open[state.sequence]
        while self._completed_through < self._last_sequence and self._completed_through + 1 not in self._open:
            self._completed_through += 1
        if state.error is not None:
            self.failures[state.error.reason] += 1
            self._completions.append(c.Completion(state.sequence, state.error, steps=_steps_of(state)))
        elif state.notify or _has_data(state, result):
            self._completions.append(result)
        if state.unread is not None:
            # Of a loop that was interrupted no more is told, while its step may go on for long.
            self._context.give_back(state, state.unread.most_bytes)
        if state.timed:
            self._instructions.append(Disarm(state.sequence))
        if state.reads_for:
            self._instructions.append(Deliver(state.reads_for, state.sequence, state.error))
        if state.sequence in self._recorded:
            self._instructions.append(RunEnded(state.sequence, state.error))

    def _retire(self, state: CommandState) -> None:
        state.phase = CommandPhase.RETIRED
        del self._commands[state.sequence]
        self.ended_runs += state.counts
        self._context.give_back(state, state.inline_bytes)
        leave_storages(state)
        if isinstance(state.task, WriteTask):
            self.transfers.release(state.task.command.transfer, state)
        if state.reads_for:
            self._instructions.append(DropRead(state.sequence))
        if isinstance(state.task, OfferTask):
            self._instructions.append(CloseEdge(state.sequence, state.error))
        if state.stream is not None:
            leave_stream(state, state.stream)
        if isinstance(state.task, RunTask) and state.task.plan.slots.leave(state.task.slot, state):
            self.plans.runs_ended(state.task.plan.slots)
        self._ready.extend(unblocked_by_retirement(state))

    # What comes from outside of the command stream

    def upload_started(self, transfer: int, size_bytes: int) -> None:
        """Raises what the upload is to be refused with; a command that waits for it fails with it."""
        try:
            self.transfers.started(transfer, size_bytes)
        finally:
            self._settle()

    def upload_arrived(self, transfer: int) -> None:
        """All bytes are here. Raises why they are not wanted any more, if so."""
        self.transfers.arrived(transfer)

    def upload_broke(self, transfer: int, error: HeliographError) -> None:
        """The upload ended before its time; the command that it is for fails."""
        self.transfers.broke(transfer, error)
        self._settle()

    def await_writers(self, numbers: Iterable[int]) -> int:
        """Under which number `Resume` comes when the bytes of tensors are there; 0: they are, or never will.

        For bytes that exist already, commands that write them anew are waited for as well.
        """
        waiting = CommandState(0)
        found = (self.handles.peek(number, TensorHandle) for number in numbers)
        wait_for_writers(waiting, [one for one in found if one is not None])
        if waiting.blockers == 0:
            return 0
        self._waiters += 1
        waiting.waiter = self._waiters
        return waiting.waiter

    def may_exchange(self, may: bool) -> None:
        """Whether commands may name other daemons."""
        self._context.may_exchange = may

    # Shared memory

    def share(self, size_bytes: int) -> None:
        """From now on commands may name places in so many bytes of shared memory."""
        self._context.shared_bytes = size_bytes

    def shared_place(self, offset_bytes: int, size_bytes: int) -> SharedPlace:
        """A checked place there. Raises InvalidArgumentError, LimitExceededError, OutOfRangeError."""
        return self._validator.shared_place(offset_bytes, size_bytes)

    def take_place(self, sequence: int) -> bool:
        """Work is about to write at its place in shared memory; whether it may: once the command was reported
        the client uses the place for others."""
        state = self._open.get(sequence)
        if state is not None:
            state.uses_place = True
        return state is not None

    def leave_place(self, sequence: int) -> None:
        """Work does not need its place any more, and may take long from here: what was put off comes now."""
        state = self._commands[sequence]
        state.uses_place = False
        if state.interruption is not None:
            self._interrupt(sequence, state.interruption)
            self._settle()

    # Cancelling

    def cancel(self, sequence: int) -> None:
        """Ends a command early, as a Cancel command does."""
        self._interrupt(sequence, CancelledError("the command was cancelled"))
        self._settle()

    def expire(self, sequence: int) -> None:
        """The command's time is over."""
        self._interrupt(sequence, DeadlineExceededError("the command was not done in its time"))
        self._settle()

    def _interrupt(self, sequence: int, error: HeliographError) -> None:
        state = self._open.get(sequence)
        # What a Free command names is gone already; there is nothing to take back.
        if state is None or isinstance(state.task, FreeTask):
            return
        if state.phase is CommandPhase.RUNNING:
            if state.uses_place:
                # The client uses it again when it is told of the end. Soon the work ends, or leaves it.
                state.interruption = state.interruption or error
                return
            if isinstance(state.task, ABORTABLE) or state.takes_upload:
                self._instructions.append(AbortWork(sequence))
        state.error = state.error or error.from_command(sequence)
        if isinstance(state.task, OfferTask):
            # It is not done for long yet, perhaps, for what is before it on its stream.
            self._instructions.append(CloseEdge(sequence, state.error))
        if state.takes_upload:
            assert isinstance(state.task, WriteTask)
            self.transfers.stop_waiting(state.task.command.transfer, state, state.error)
        self._report(state, c.Completion(sequence))

    # Device queues, and the end

    def queue_failed(self, queue: DeviceQueue, error: HeliographError) -> None:
        """The device could not make the queue: its work fails."""
        # The command that needed the queue first is the one that came last.
        queue.error = error.from_command(self._last_sequence)
        self.resources.queues.pop(queue, None)

    def close(self, error: HeliographError) -> None:
        """Everything ends: running work is asked to, the rest fails with this error."""
        if self.closed is None:
            self.closed = self.plans.closed = self.transfers.closed = error
            for sequence in list(self._open):
                self._interrupt(sequence, error)
        self._settle()

    def release_all(self) -> None:
        """After `close`, once the queues are quiet: gives everything back."""
        self.plans.release_all()
        self.transfers.clear()


def _storages_of(handles: Iterable[Handle]) -> Iterator[HandleStorage]:
    for handle in handles:
        match handle:
            case TensorHandle(storage=HandleStorage() as storage):
                yield storage
            case BufferHandle(parts=parts):
                yield from _storages_of(parts)


def _has_data(state: CommandState, result: c.Completion) -> bool:
    """Whether the client waits for more than success."""
    task = state.task
    inline_read = isinstance(task, ReadTask) and not task.command.transfer and task.place is None
    return inline_read or bool(result.outputs) or result.steps > 0


def _steps_of(state: CommandState) -> int:
    """How many steps of a loop are done by now."""
    progress = state.task.progress if isinstance(state.task, RunTask) else None
    return 0 if progress is None else progress.done
