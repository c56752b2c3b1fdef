"""The protocol of a session, pure: events in, instructions out.

`SessionCore` has no clock, lock, thread, device or socket. Event methods change its state. They
queue instructions, in order, for `take_instructions`, and completions for `take_completions`. The
runtime carries the instructions out and reports back:

    receive, refuse ──▸ Start ──▸ (work begins) begin ──▸ (work fails) fail ──▸ (done) finish
    upload_started, upload_arrived, upload_broke
    cancel, expire, lose, close

A command passes through these steps:

1. *Validation* looks up its handles and finds every static error (`validation.py`).
2. *Ordering* blocks it on its stream, on earlier commands on its tensors, on the runs of its plan
   and on its upload (`dependencies.py`). The health of its tensors decides nothing yet.
3. In its *turn*, a device command is submitted to its device queue, even one that is known to fail,
   so that failures have the order of the queue. The core settles any other command itself.
4. When it *begins*, every earlier command is known, and poison is checked.
5. It is *reported*, and *retires*; `CommandState` explains the difference.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Sequence

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
from heliograph_server.resources.device_names import DeviceNames
from heliograph_server.resources.handles import (
    BufferHandle,
    DeviceQueue,
    EventHandle,
    HandleTable,
    PlanHandle,
)
from heliograph_server.resources.memories import FindMemory, plain_memory
from heliograph_server.resources.quotas import Holding
from heliograph_server.session.protocol.command_rules import is_of_partition, torn_variable
from heliograph_server.session.protocol.dependencies import (
    CommandPhase,
    CommandState,
    enter_storages,
    enter_stream,
    leave_storages,
    leave_stream,
    note_failure,
    unblocked_by,
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
    StopLoop,
    WriteTask,
)
from heliograph_server.session.protocol.loop_edges import RunUnderWay, leaves_nothing, lone_loop, under_way
from heliograph_server.session.protocol.loop_feeds import LoopFeeds
from heliograph_server.session.protocol.plan_state import PlanState
from heliograph_server.session.protocol.resource_state import ResourceState
from heliograph_server.session.protocol.run_validation import InlineRunFit, fit_of
from heliograph_server.session.protocol.tap_state import TapState
from heliograph_server.session.protocol.transfer_state import TransferState
from heliograph_server.session.protocol.validation import CommandValidator
from heliograph_server.session.protocol.validation_context import ValidationContext
from heliograph_server.session.protocol.waits import wait_for_freed, waiter_for_writers

#: The most forms of inline runs in the cache of fits. A full cache is emptied.
MOST_FITS = 64


class SessionCore:
    """The state of one session: the order of its commands.

    `devices` are names by priority, `names` what others stand for. `recorded` contains the sequence
    numbers of the runs for which a `RunEnded` instruction is issued.

    `plans`, `transfers`, `taps`, `feeds` and `resources` hold the rest of the state. They share the
    core's lists of instructions and of tapped pieces, which are emptied and never replaced.
    """

    def __init__(
        self,
        limits: Limits,
        devices: Sequence[str],
        memory: FindMemory = plain_memory,
        recorded: Container[int] = (),
        holding: Holding | None = None,
        names: DeviceNames | None = None,
    ) -> None:
        self._limits = limits
        self._recorded = recorded
        #: The error that closed the session.
        self.closed: HeliographError | None = None
        #: Commands that have not retired, and those of them not reported yet, by sequence number.
        self._commands: dict[int, CommandState] = {}
        self._open: dict[int, CommandState] = {}
        #: Commands without blockers, whose turn has come.
        self._ready: deque[CommandState] = deque()
        self._instructions: list[Instruction] = []
        self._tap_pieces: list[c.TapPiece] = []
        self.handles = HandleTable(limits)
        self.resources = ResourceState(self._instructions)
        self.plans = PlanState(self.handles, self.resources, self._instructions)
        self.transfers = TransferState(limits.in_flight_commands, self._instructions, self._ready)
        self.taps = TapState(self._open, self._tap_pieces, self._instructions, limits.inline_bytes)
        self.feeds = LoopFeeds(self._commands, self._end, self._instructions, limits.inline_bytes)
        self._context = ValidationContext(
            self.handles, limits, tuple(devices), self.resources.open_queue, memory, holding, names
        )
        self._context.take_variable = self.plans.take_variable
        self._validator = CommandValidator(self._context)
        self._last_sequence = 0
        #: The last command that may leave something.
        self._lasting = 0
        self._completed_through = 0
        self._reported_through = 0
        self._completions: list[c.Completion | InlineResult] = []
        #: Commands that are passed over: the first, and the last of each series.
        self._skipped: dict[int, int] = {}
        #: Runs that have retired since the executor last reset this count.
        self.ended_runs = 0
        #: Failed commands, by the reason of the error.
        self.failures: Counter[int] = Counter()
        #: Waiters from outside the command stream so far.
        self._waiters = 0
        #: Forms of inline runs, and their fit to the plans that they name.
        self._fits: dict[RunForm, InlineRunFit] = {}

    def __repr__(self) -> str:
        health = "closed" if self.closed else f"{len(self._open)} commands in flight"
        return f"<SessionCore {health}, {len(self.handles)} handles, completed {self._completed_through}>"

    # State

    @property
    def in_flight(self) -> int:
        """The number of commands that have not been reported."""
        return len(self._open)

    @property
    def last_sequence(self) -> int:
        """The sequence number of the last command received."""
        return self._last_sequence

    def is_open(self, sequence: int) -> bool:
        """True if the command was received and has not been reported."""
        return sequence in self._open

    @property
    def unretired(self) -> int:
        """The number of commands that others may still wait for; 0 when the session is quiet."""
        return len(self._commands)

    @property
    def lone_loop(self) -> int:
        """The number of a loop that is under way alone, if no command came after it that leaves
        something; else 0."""
        return lone_loop(self._commands, self._lasting)

    def run_under_way(self, sequence: int) -> RunUnderWay:
        """Return what an unretired run makes and writes."""
        return under_way(self._commands[sequence])

    @property
    def runs_in_flight(self) -> int:
        """The number of unretired commands that are runs of plans."""
        return len(self.runs)

    @property
    def runs(self) -> list[CommandState]:
        """The unretired commands that are runs of plans."""
        return [one for one in self._commands.values() if isinstance(one.task, RunTask)]

    @property
    def completed_through(self) -> int:
        """The sequence number up to which every command is done."""
        return self._completed_through

    def take_completions(self) -> c.CompletionBatch | None:
        """Return what was completed since the last call; None if nothing was."""
        if self.is_silent:
            return None
        listed, self._completions = tuple(self._completions), []
        taps = tuple(self._tap_pieces)
        self._tap_pieces.clear()
        self._reported_through = self._completed_through
        return c.CompletionBatch(self._completed_through, listed, taps, steps=self.taps.take_steps())

    @property
    def reported_through(self) -> int:
        """The sequence number through which `take_completions` has reported."""
        return self._reported_through

    def add_devices(self, names: Iterable[str]) -> None:
        """Allow commands to name these devices."""
        for name in names:
            self._context.add_device(name)

    @property
    def is_silent(self) -> bool:
        """True if `take_completions` would return None."""
        found = self._completions or self._tap_pieces or self.taps.steps
        return not found and self._completed_through == self._reported_through

    def take_result(self) -> InlineResult | None:
        """Take the completion of the run last recorded by `did`, before which nothing was pending.

        Return None if the run failed; `take_completions` then returns its completion.
        """
        result = self._completions[0]
        if not isinstance(result, InlineResult):
            return None
        self._completions.clear()
        self._reported_through = self._completed_through
        return result

    def take_instructions(self) -> list[Instruction]:
        """Return the instructions issued since the last call, in order."""
        taken = self._instructions.copy()
        self._instructions.clear()
        return taken

    # Commands arrive

    def receive(self, command: c.Command, refused: HeliographError | None = None) -> None:
        """Receive the next command of the stream.

        `refused` is an error of the caller, such as a quota's, with which the command fails. Raises
        ProtocolError for a gap in the sequence numbers, which ends the session.
        """
        kind, limit, lasting = command.kind, self._limits.in_flight_commands, self._lasting
        self._expect(command.sequence)
        if leaves_nothing(kind):
            self._lasting = lasting
        counts = refused is None and isinstance(kind, c.RunCommand)
        if refused is not None or len(self._open) >= limit or len(self._commands) >= 2 * limit:
            state = self._refused(command, refused)
        else:
            state = self._validator.validate(command)
            if isinstance(kind, c.Continue):
                self.taps.proceed(state, kind)
            elif isinstance(kind, c.FeedLoop):
                self.feeds.receive(state, kind)
        state.counts = counts
        self._add(state, kind)
        if isinstance(kind, c.Skip) and kind.through > command.sequence and not state.is_refused:
            self._last_sequence = self._skipped[command.sequence + 1] = kind.through
        if isinstance(kind, c.Cancel) and not state.is_refused:
            if kind.after_step:
                self._stop(kind.sequence)
            else:
                self._interrupt(kind.sequence, CancelledError("the command was cancelled"))
        self._settle()

    def fit(self, run: InlineRun) -> InlineRunFit | None:
        """Return the fit of an inline run to its plan if the run can be performed at once.

        It can if it is the next command and no earlier command is left. The caller then performs it
        and reports it with `did`. None: the run takes the path of every command.
        """
        if self._commands or run.sequence != self._last_sequence + 1 or self.closed is not None:
            return None
        fit = self._fits.get(run.form)
        plan = self.handles.peek(run.form.plan, PlanHandle)
        if fit is None or fit.plan is not plan:
            if plan is None or (fit := fit_of(run.form, plan, self._context)) is None:
                return None
            if len(self._fits) >= MOST_FITS:
                self._fits.clear()
            self._fits[run.form] = fit
        return None if any(one.problem() for one in fit.plan.weights) else fit

    def did(self, sequence: int, result: InlineResult | HeliographError) -> None:
        """Record the next command, a run for which `fit` returned a fit, as done."""
        self._last_sequence = self._completed_through = self._lasting = sequence
        if isinstance(result, InlineResult):
            self._completions.append(result)
            return
        error = result.from_command(sequence)
        self.failures[error.reason] += 1
        self._completions.append(c.Completion(sequence, error))
        self._context.note_failure(error)

    def begin_alone(self, state: CommandState) -> None:
        """Begin the next command, a run while no other is left; `finish` ends it."""
        self._last_sequence = self._lasting = state.sequence
        self._open[state.sequence] = self._commands[state.sequence] = state

    def refuse(
        self, sequence: int, error: HeliographError, tensors: tuple[int, ...] = (), buffer: int = 0
    ) -> None:
        """Fail the next command, which could not be decoded.

        `tensors` and `buffer` are the handles that it would have created; they are poisoned.
        """
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
        self._last_sequence = self._lasting = sequence

    def _refused(self, command: c.Command, error: HeliographError | None) -> CommandState:
        """Refuse a command with `error`, or else for the limit of commands in flight."""
        state = CommandState(command.sequence, notify=command.notify, timed=command.timeout_ms > 0)
        error = error or LimitExceededError(
            f"{self._limits.in_flight_commands:,} commands are in flight, the most that this server accepts",
            advice="wait for completions",
        )
        self._validator.refuse(state, command.kind, error.from_command(command.sequence))
        # It has no place in the order, so it cannot poison tensors in its turn.
        state.targets, state.queue, state.is_refused = (), None, True
        return state

    def _add(self, state: CommandState, kind: c.CommandKind) -> None:
        """Put a command into the order. It is ready at once if nothing blocks it."""
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
        # A refused command waits for nothing: keeping it would take the room that it was refused.
        if isinstance(kind, c.Cancel | c.Continue | c.FeedLoop) or state.is_refused:
            return
        gates = isinstance(kind, c.WaitCommand) and self._wait_for_event(state, kind)
        if isinstance(state.task, FreeTask):
            wait_for_freed(state, state.task)
        elif isinstance(state.task, RunTask):
            state.task.plan.slots.enter(state.task.slot, state)
        if state.queue is None:
            wait_for_writers(state, state.uses)
        else:
            for target in state.targets:
                if target.storage is not None:
                    self.resources.storages[target.storage] = None
            enter_storages(state)
        if state.stream is not None:
            marks, is_fence = isinstance(kind, c.Record), isinstance(kind, c.Record | c.Synchronize)
            enter_stream(state, state.stream, marks=marks, gates=gates, is_fence=is_fence)

    def _wait_for_event(self, state: CommandState, kind: c.WaitCommand) -> bool:
        """Block the command on the event's mark. True if something blocks the command."""
        event = self.handles.peek(kind.event, EventHandle)
        if event is not None:
            state.wait_for(event.mark)
        return state.blockers > 0

    # Their turn

    def _settle(self) -> None:
        """Give every ready command its turn."""
        while self._ready:
            state = self._ready.popleft()
            if state.waiter:
                state.phase = CommandPhase.RETIRED
                self._instructions.append(Resume(state.waiter))
            elif state.queue is not None and state.queue.error is None:
                state.phase = CommandPhase.SUBMITTED
                self._instructions.append(Start(state))
                self._ready.extend(unblocked_by(state))
            else:
                # It needs no device, or its device has no queue for it.
                if state.error is None and not state.reported:
                    state.error = state.queue.error if state.queue is not None else self._problem(state)
                if isinstance(state.task, FreeTask):
                    self.plans.release(state.task.handles)
                self._end(state, c.Completion(state.sequence))

    def begin(self, sequence: int) -> bool:
        """Begin the command's work on its queue. False if it has failed and does no work."""
        state = self._commands[sequence]
        if state.error is None:
            state.error = self._problem(state)
        if state.error is not None:
            self._spoil(state)
            return False
        state.phase = CommandPhase.RUNNING
        for target in state.targets:
            if target.storage is not None:
                target.storage.version += 1
        # The next command of the queue may begin before the device is done with this one.
        for target in state.heals:
            target.heal(state.part)
        state.uses_place = isinstance(state.task, WriteTask | ReadTask) and state.task.place is not None
        return True

    def fail(self, sequence: int, error: HeliographError, *, torn: bool = False) -> None:
        """Record failed work. It is not done yet, but later commands must know of it now.

        `torn`: variables that it assigns may have a part of their new values.
        """
        state = self._commands[sequence]
        if isinstance(error, CancelledError) and state.interruption is not None:
            error = state.interruption
        state.error, state.torn = state.error or error, state.torn or torn
        self._spoil(state)

    def finish(self, sequence: int, error: HeliographError | None, result: c.Completion) -> None:
        """Record that work is done: computed, or failed with this error."""
        state = self._commands[sequence]
        if error is not None:
            self.fail(sequence, error, torn=state.phase is CommandPhase.RUNNING)
        elif state.error is None and (problem := self._problem(state)) is not None:
            # An asynchronous device may report only now that an earlier command failed.
            state.error, state.torn = problem, state.phase is CommandPhase.RUNNING
        self._end(state, result)
        self._settle()

    def _problem(self, state: CommandState) -> HeliographError | None:
        """The error of the first tensor that the command cannot use or write."""
        for used in state.uses:
            if (problem := used.problem(state.sequence)) is not None:
                return problem
        for target in state.targets:
            # A tensor that is written may be poisoned, but its storage must exist.
            if target.storage is not None and (problem := target.failure or target.storage.error):
                return problem
        return None

    # Their end

    def _end(self, state: CommandState, result: c.Completion) -> None:
        """Report a command, unless that was done early, and retire it."""
        if state.error is not None:
            self._spoil(state)
            note_failure(state)
        else:
            for target in state.heals:
                target.heal(state.part)
        if not state.reported:
            self._report(state, result)
        state.phase = CommandPhase.RETIRED
        del self._commands[state.sequence]
        self.ended_runs += state.counts
        if state.inline_bytes:
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
        self._ready.extend(unblocked_by(state, is_retired=True))

    def _spoil(self, state: CommandState) -> None:
        """Poison what a failed command would have written."""
        assert state.error is not None
        state.error = state.error.from_command(state.sequence)
        if isinstance(state.task, PlaceTask):
            state.task.tensor.failure = state.error
        for target in state.targets if state.writes else ():
            error, name = state.error, state.in_place.get(target)
            if name is not None:
                if not state.torn:
                    continue
                error = torn_variable(name, state.error)
            if target.failure is None:
                target.poison(error, state.sequence, state.part)
            if target.storage is not None and target.storage.maker == state.sequence:
                target.storage.error = target.storage.error or state.error

    def _report(self, state: CommandState, result: c.Completion) -> None:
        state.reported = True
        del self._open[state.sequence]
        while self._completed_through < self._last_sequence and self._completed_through + 1 not in self._open:
            self._completed_through += 1
            if self._skipped:
                skipped = self._skipped.pop(self._completed_through + 1, self._completed_through)
                self._completed_through = skipped
        if state.error is not None:
            progress = state.task.progress if isinstance(state.task, RunTask) else None
            steps = 0 if progress is None else progress.done
            self.failures[state.error.reason] += 1
            self._completions.append(c.Completion(state.sequence, state.error, steps=steps))
        elif state.notify or result.outputs or result.steps > 0:
            self._completions.append(result)
        if state.unread is not None:
            # An interrupted loop sends and takes no more values, while its step may go on for long.
            self.feeds.end(state.task, state.error)
            self._context.give_back(state, state.unread.most_bytes)
        if state.timed:
            self._instructions.append(Disarm(state.sequence))
        if state.reads_for:
            self._instructions.append(Deliver(state.reads_for, state.sequence, state.error))
        if state.sequence in self._recorded:
            self._instructions.append(RunEnded(state.sequence, state.error))

    # Events from outside the command stream

    def upload_started(self, transfer: int, size_bytes: int) -> None:
        """Record that an upload began. Raises its refusal, with which a waiting command fails."""
        try:
            self.transfers.started(transfer, size_bytes)
        finally:
            self._settle()

    def upload_arrived(self, transfer: int) -> None:
        """Record that an upload is complete. Raises the error of a command that has failed."""
        self.transfers.arrived(transfer)

    def upload_broke(self, transfer: int, error: HeliographError) -> None:
        """Record that an upload ended early. Its command fails."""
        self.transfers.broke(transfer, error)
        self._settle()

    def drop_unmatched_transfers(self, error: HeliographError) -> None:
        """Fail the commands whose upload has not begun since the last call, and drop the uploads
        that no command has named since then."""
        for state in self.transfers.drop_unmatched(error):
            self._interrupt(state.sequence, error)
        self._settle()

    def await_writers(self, numbers: Iterable[int]) -> int:
        """Wait for the commands received so far that write these tensors.

        Return the waiter's number, which `Resume` names when they have retired, or 0.
        """
        waiting = waiter_for_writers(self.handles, numbers)
        if waiting.blockers == 0:
            return 0
        self._waiters += 1
        waiting.waiter = self._waiters
        return waiting.waiter

    def use_peer_check(self, check: Callable[[str], None]) -> None:
        """Set the check of the addresses of other daemons that commands name."""
        self._context.check_peer = check

    # Snapshots

    @property
    def default_failure(self) -> HeliographError | None:
        """The first error on the default stream after its last mark."""
        return self._context.default_failure

    def go_on_after(self, sequence: int, default_failure: HeliographError | None) -> None:
        """Expect the command after this one, all of whose predecessors are done and reported.

        Called before the first command of a restored session."""
        assert not self._commands, "a session with commands cannot be restored"
        self._last_sequence = self._completed_through = self._reported_through = sequence
        self._context.default_failure = default_failure

    # Shared memory

    def share(self, size_bytes: int) -> None:
        """Allow commands to name places in this many bytes of shared memory."""
        self._context.shared_bytes = size_bytes

    def shared_place(self, offset_bytes: int, size_bytes: int) -> SharedPlace:
        """Return a checked place in shared memory. Raises InvalidArgumentError, LimitExceededError,
        OutOfRangeError."""
        return self._validator.shared_place(offset_bytes, size_bytes)

    def take_place(self, sequence: int) -> bool:
        """Claim a command's place in shared memory for its work.

        False if the command was reported: the client may then use the place for another command.
        """
        state = self._open.get(sequence)
        if state is not None:
            state.uses_place = True
        return state is not None

    def leave_place(self, sequence: int) -> None:
        """Release the place in shared memory. A deferred interruption takes effect now."""
        state = self._commands[sequence]
        state.uses_place = False
        if state.interruption is not None:
            self._interrupt(sequence, state.interruption)
            self._settle()

    # Cancelling

    def cancel(self, sequence: int) -> None:
        """End a command early, as a Cancel command does."""
        self._interrupt(sequence, CancelledError("the command was cancelled"))
        self._settle()

    def expire(self, sequence: int) -> None:
        """End a command whose deadline has passed."""
        self._interrupt(sequence, DeadlineExceededError("the command was not done in its time"))
        self._settle()

    def lose(self, why_lost: Callable[[PlanHandle], HeliographError | None]) -> None:
        """Fail the runs of lost plans that have not begun; one that has begun fails by itself.

        `why_lost` returns the error of a plan that has lost a device.
        """
        for state in list(self._open.values()):
            if not isinstance(state.task, RunTask) or state.phase is CommandPhase.RUNNING:
                continue
            if (error := why_lost(state.task.plan)) is not None:
                self._interrupt(state.sequence, error)
        self._settle()

    def _stop(self, sequence: int) -> None:
        """End a loop after its present step."""
        state = self._open.get(sequence)
        if state is not None and isinstance(state.task, RunTask) and state.task.progress is not None:
            state.task.progress.stops = True
            self._instructions.append(StopLoop(sequence))

    def _interrupt(self, sequence: int, error: HeliographError) -> None:
        state = self._open.get(sequence)
        # The handles of a Free command are gone already; it cannot be undone.
        if state is None or isinstance(state.task, FreeTask):
            return
        if self.closed is None and self.feeds.withdraw(state, error):
            return
        if state.phase is CommandPhase.RUNNING:
            if state.uses_place:
                # The client reuses the place once the command is reported. The work leaves it soon.
                state.interruption = state.interruption or error
                return
            if state.in_place and self.closed is None and not is_of_partition(state):
                # It is reported when its variables are known to be whole.
                state.interruption = state.interruption or error.from_command(sequence)
                self._instructions.append(AbortWork(sequence, now=False))
                return
            if isinstance(state.task, ABORTABLE) or state.waits_for_client:
                self._instructions.append(AbortWork(sequence))
        state.error = state.error or error.from_command(sequence)
        if isinstance(state.task, OfferTask):
            # Earlier commands of its stream may delay its end for long.
            self._instructions.append(CloseEdge(sequence, state.error))
        if state.takes_upload:
            assert isinstance(state.task, WriteTask)
            self.transfers.stop_waiting(state.task.command.transfer, state, state.error)
        self._report(state, c.Completion(sequence))

    # Device queues, and the end

    def queue_failed(self, queue: DeviceQueue, error: HeliographError) -> None:
        """Record that the device could not create the queue. Its work fails."""
        # The last command received is the one that needed the queue first.
        queue.error = error.from_command(self._last_sequence)
        self.resources.queues.pop(queue, None)

    def close(self, error: HeliographError) -> None:
        """End the session: abort running work and fail every other command with this error."""
        if self.closed is None:
            self.closed = self.plans.closed = self.transfers.closed = error
            for sequence in list(self._open):
                self._interrupt(sequence, error)
        self._settle()

    def release_all(self) -> None:
        """Release everything. Called after `close`, once the queues are quiet."""
        self.plans.release_all()
        self.transfers.clear()
