"""The protocol of a session, pure: events in, instructions out.

`SessionCore` knows no clock, lock, thread, device or socket. Event methods change its state; what is
to be done about it collects, in order, in `take_instructions`, and what is done in
`take_completions`. The runtime carries the instructions out and reports back:

    receive, refuse ──▸ Start ──▸ (work begins) begin ──▸ (work fails) fail ──▸ (done) finish
    upload_started, upload_arrived, upload_broke, read_ended
    tapped, stream (while it runs), end_of_commands
    cancel, expire, close

A command passes through these steps:

1. *Arrival* looks up its handles and finds every static error (`arrival.py`).
2. *Ordering* lets it wait: for its stream, for earlier commands on its tensors, for the runs of its
   plan, for its upload (`ordering.py`). Nothing is decided from the health of its tensors yet.
3. Its *turn*: a device command is submitted to its lane, also one that is known to fail, so that the
   order of the lane is the order of the failures; any other is settled here.
4. It *begins*: poison is looked at now, when everything before it is known.
5. It is *reported*, and *retires*; see `Entry` for the difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from heliograph_proto import commands as c
from heliograph_proto.errors import (
    CancelledError,
    DeadlineExceededError,
    HeliographError,
    LimitExceededError,
    ProtocolError,
)
from heliograph_proto.inline_runs import InlineResult, InlineRun, RunForm
from heliograph_proto.limits import Limits
from heliograph_server.core.arrival import Arrivals
from heliograph_server.core.fitting import Fit, fit_of
from heliograph_server.core.handles import (
    BufferHandle,
    EventHandle,
    Handle,
    Lane,
    PlanHandle,
    ReservationHandle,
    Storage,
    StreamHandle,
    TensorHandle,
)
from heliograph_server.core.memories import FindMemory, plain_memory
from heliograph_server.core.observing_core import ObservingCore
from heliograph_server.core.ordering import (
    Entry,
    Phase,
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
from heliograph_server.core.tasks import (
    ABORTABLE,
    AbortWork,
    CloseEdge,
    Deliver,
    Disarm,
    DropRead,
    DropUpload,
    FreeTask,
    Instruction,
    OfferTask,
    OpenEdge,
    Place,
    PlaceTask,
    ReadTask,
    Resume,
    RunEnded,
    RunTask,
    Start,
    WriteTask,
)

#: So many forms of inline runs are known to fit; beyond that the core begins anew.
MOST_FITS = 64


class SessionCore(ObservingCore):
    """The state of one session. `devices` are names by priority; `recorded`: commands, by sequence number, of
    whose end an instruction tells."""

    def __init__(
        self,
        limits: Limits,
        devices: Sequence[str],
        memory: FindMemory = plain_memory,
        recorded: Container[int] = (),
    ) -> None:
        super().__init__(limits)
        self._recorded = recorded
        self._arrivals = Arrivals(self.handles, limits, tuple(devices), self._open_lane, memory)
        #: Commands that have not retired, by sequence number.
        self._entries: dict[int, Entry] = {}
        self._last_sequence = 0
        self._completed_through = 0
        self._reported_through = 0
        self._completions: list[c.Completion | InlineResult] = []
        #: Runs that have retired since somebody looked.
        self.ended_runs = 0
        #: How many commands failed, by the reason of the error.
        self.failures: Counter[int] = Counter()
        #: Forms of inline runs, and how they fit the plans that they name.
        self._fits: dict[RunForm, Fit] = {}

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self._open)} commands in flight"
        return f"<SessionCore {state}, {len(self.handles)} handles, completed {self._completed_through}>"

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
        return len(self._entries)

    @property
    def runs_in_flight(self) -> int:
        """Of these, runs of plans."""
        return sum(isinstance(one.task, RunTask) for one in self._entries.values())

    @property
    def lanes(self) -> list[Lane]:
        return list(self._lanes)

    @property
    def completed_through(self) -> int:
        return self._completed_through

    @property
    def storages(self) -> int:
        return len(self._storages)

    @property
    def storage_bytes(self) -> int:
        """Of devices, by tensors and variables."""
        return sum(one.size_bytes for one in self._storages)

    @property
    def plans(self) -> list[Any]:
        """What the runtime knows of plans that have a handle, or are being run."""
        return [one.plan for one in self._plans]

    def is_reading(self, transfer: int) -> bool:
        """Whether a command that reads for this transfer came, and its bytes were not taken."""
        return transfer in self._reading

    def take_completions(self) -> c.CompletionBatch | None:
        """What was done since the last call; None if nothing."""
        found = self._completions or self._taps
        if not found and self._completed_through == self._reported_through:
            return None
        listed, self._completions = tuple(self._completions), []
        taps, self._taps = tuple(self._taps), []
        self._reported_through = self._completed_through
        return c.CompletionBatch(self._completed_through, listed, taps)

    @property
    def reported_through(self) -> int:
        """Up to which command `take_completions` has told."""
        return self._reported_through

    def add_devices(self, names: Iterable[str]) -> None:
        """From now on commands may name these devices, too."""
        for name in names:
            self._arrivals.add_device(name)

    @property
    def is_silent(self) -> bool:
        """Whether `take_completions` would have nothing to give."""
        return not self._completions and not self._taps and self._completed_through == self._reported_through

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
        taken, self._instructions = self._instructions, []
        return taken

    # Commands arrive

    def receive(self, command: c.Command, refused: HeliographError | None = None) -> None:
        """The next command of the stream; `refused`: why somebody else refuses it. Raises ProtocolError for a
        gap: the session is over then."""
        self._expect(command.sequence)
        if (refusal := self._over_limit(command, refused)) is not None:
            refusal.counts = refused is None and isinstance(command.kind, c.Run)
            self._add(refusal, command.kind)
            self._settle()
            return
        entry = self._arrivals.admit(command)
        entry.counts = isinstance(command.kind, c.Run)
        if isinstance(command.kind, c.Continue):
            self._proceed(entry, command.kind)
        self._add(entry, command.kind)
        if isinstance(command.kind, c.Cancel):
            self._interrupt(command.kind.sequence, CancelledError("the command was cancelled"))
        self._settle()

    def fit(self, run: InlineRun) -> Fit | None:
        """How an inline run fits its plan, if it is the next command and nothing is before it, so that
        whoever has it may do it now and report it by `did`. None: it goes the way of every command."""
        if self._entries or run.sequence != self._last_sequence + 1 or self.closed is not None:
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
        self._arrivals.note_failure(error)

    def refuse(
        self, sequence: int, error: HeliographError, tensors: tuple[int, ...] = (), buffer: int = 0
    ) -> None:
        """A command that could not be read; `tensors` and `buffer` are the handles that it was to make."""
        self._expect(sequence)
        entry = Entry(sequence)
        produced = c.Run(0, (), tuple(c.OutputBinding(0, number) for number in tensors))
        self._arrivals.refuse(entry, produced, error.from_command(sequence))
        if buffer:
            self.handles.add_poisoned(buffer, BufferHandle((), error=error.from_command(sequence)))
        self._add(entry, produced)
        self._settle()

    def _expect(self, sequence: int) -> None:
        if self.closed is not None:
            raise self.closed
        if sequence != self._last_sequence + 1:
            raise ProtocolError(
                f"command {sequence} came after command {self._last_sequence}; sequence numbers have no gaps"
            )
        self._last_sequence = sequence

    def _over_limit(self, command: c.Command, refused: HeliographError | None) -> Entry | None:
        limit = self._limits.in_flight_commands
        if refused is None and len(self._open) < limit and len(self._entries) < 2 * limit:
            return None
        entry = Entry(command.sequence, notify=command.notify, timed=command.timeout_ms > 0)
        error = refused or LimitExceededError(
            f"{limit:,} commands are in flight, the most that this server takes",
            advice="wait for completions",
        )
        self._arrivals.refuse(entry, command.kind, error.from_command(command.sequence))
        # It takes no place in the order, so it cannot spoil tensors in its turn.
        entry.targets, entry.lane, entry.is_refused = (), None, True
        return entry

    def _add(self, entry: Entry, kind: c.CommandKind) -> None:
        """Puts an entry into the order; it is ready at once if nothing is in its way."""
        self._open[entry.sequence] = self._entries[entry.sequence] = entry
        self._bind_transfer(entry, kind)
        self._order(entry, kind)
        if isinstance(entry.task, OfferTask) and entry.error is None:
            self._instructions.append(OpenEdge(entry.sequence, entry.task))
        if entry.blockers == 0:
            self._ready.append(entry)

    def _order(self, entry: Entry, kind: c.CommandKind) -> None:
        # What was refused for want of room waits for nothing, else it would be kept after all.
        if isinstance(kind, c.Cancel | c.Continue) or entry.is_refused:
            return
        gates = isinstance(kind, c.Wait) and self._wait_for_event(entry, kind)
        if isinstance(entry.task, FreeTask):
            self._wait_for_freed(entry, entry.task)
        elif isinstance(entry.task, RunTask):
            entry.task.plan.turns.enter(entry.task.turn, entry)
        if entry.lane is None:
            wait_for_writers(entry, entry.uses)
        else:
            self._storages.update((one.storage, None) for one in entry.targets if one.storage)
            enter_storages(entry)
        if entry.stream is not None:
            marks, is_fence = isinstance(kind, c.Record), isinstance(kind, c.Record | c.Synchronize)
            enter_stream(entry, entry.stream, marks=marks, gates=gates, is_fence=is_fence)

    def _wait_for_event(self, entry: Entry, kind: c.Wait) -> bool:
        """Whether there is something to wait for."""
        event = self.handles.peek(kind.event, EventHandle)
        if event is not None:
            entry.wait_for(event.mark)
        return entry.blockers > 0

    def _wait_for_freed(self, entry: Entry, task: FreeTask) -> None:
        wait_for_users(entry, dict.fromkeys(_storages_of(task.handles)))
        earlier: list[Entry | None] = []
        for handle in task.handles:
            match handle:
                case PlanHandle() | ReservationHandle():
                    earlier.extend(handle.turns.running())
                case StreamHandle():
                    earlier += [handle.tail, handle.gate, *handle.runs]
        for one in earlier:
            entry.wait_for(one)

    def _refuse(self, entry: Entry, kind: c.CommandKind, error: HeliographError) -> None:
        self._arrivals.refuse(entry, kind, error)

    # Their turn

    def _settle(self) -> None:
        """Lets everything that is ready have its turn."""
        while self._ready:
            entry = self._ready.popleft()
            if entry.waiter:
                entry.phase = Phase.RETIRED
                self._instructions.append(Resume(entry.waiter))
            elif entry.lane is not None and entry.lane.error is None:
                entry.phase = Phase.SUBMITTED
                self._instructions.append(Start(entry))
                self._ready.extend(unblocked_by_submission(entry))
            else:
                self._pass(entry)

    def _pass(self, entry: Entry) -> None:
        """The turn of an entry that needs no device, or whose device has none for it."""
        if entry.error is None and not entry.reported:
            entry.error = entry.lane.error if entry.lane is not None else self._problem(entry)
        if isinstance(entry.task, FreeTask):
            self._release_handles(entry.task.handles)
        self._end(entry, c.Completion(entry.sequence))

    def begin(self, sequence: int) -> bool:
        """The entry's work begins, on its lane. False: there is nothing to do any more."""
        entry = self._entries[sequence]
        if entry.error is None:
            entry.error = self._problem(entry)
        if entry.error is not None:
            self._spoil(entry)
            return False
        entry.phase = Phase.RUNNING
        # What is behind it on its lane may begin before the device has done with it.
        self._heal(entry)
        entry.uses_place = isinstance(entry.task, WriteTask | ReadTask) and entry.task.shared is not None
        return True

    def fail(self, sequence: int, error: HeliographError) -> None:
        """Its work failed, but is not done yet: what was submitted after it must know now."""
        entry = self._entries[sequence]
        entry.error = entry.error or error
        self._spoil(entry)

    def finish(self, sequence: int, error: HeliographError | None, result: c.Completion) -> None:
        """Its work is done: computed, or failed with this error."""
        entry = self._entries[sequence]
        if error is not None:
            self.fail(sequence, error)
        elif entry.error is None:
            # A device that works asynchronously may tell only now that an earlier command failed.
            entry.error = self._problem(entry)
        self._end(entry, result)
        self._settle()

    def _problem(self, entry: Entry) -> HeliographError | None:
        used = (one.problem() for one in entry.uses)
        # Whatever is written, there must be bytes to write to.
        written = (one.failure or one.storage.error for one in entry.targets if one.storage is not None)
        return next((found for found in chain(used, written) if found is not None), None)

    # Their end

    def _end(self, entry: Entry, result: c.Completion) -> None:
        if entry.error is not None:
            self._spoil(entry)
            note_failure(entry)
        else:
            self._heal(entry)
        if not entry.reported:
            self._report(entry, result)
        self._retire(entry)

    @staticmethod
    def _heal(entry: Entry) -> None:
        for target in entry.heals:
            target.heal(entry.part)

    def _spoil(self, entry: Entry) -> None:
        assert entry.error is not None
        entry.error = entry.error.from_command(entry.sequence)
        if isinstance(entry.task, PlaceTask):
            entry.task.tensor.failure = entry.error
        for target in entry.targets if entry.writes else ():
            if target.failure is None:
                target.poison(entry.error, entry.part)
            if target.storage is not None and target.storage.maker == entry.sequence:
                target.storage.error = target.storage.error or entry.error

    def _report(self, entry: Entry, result: c.Completion) -> None:
        entry.reported = True
        del self._open[entry.sequence]
        while self._completed_through < self._last_sequence and self._completed_through + 1 not in self._open:
            self._completed_through += 1
        if entry.error is not None:
            self.failures[entry.error.reason] += 1
            self._completions.append(c.Completion(entry.sequence, entry.error, steps=_steps_of(entry)))
        elif entry.notify or _has_data(entry, result):
            self._completions.append(result)
        if entry.unread is not None:
            # Of a loop that was interrupted no more is told, while its step may go on for long.
            self._arrivals.give_back(entry, entry.unread.most_bytes)
        if entry.timed:
            self._instructions.append(Disarm(entry.sequence))
        if entry.reads_for:
            self._instructions.append(Deliver(entry.reads_for, entry.sequence, entry.error))
        if entry.sequence in self._recorded:
            self._instructions.append(RunEnded(entry.sequence, entry.error))

    def _retire(self, entry: Entry) -> None:
        entry.phase = Phase.RETIRED
        del self._entries[entry.sequence]
        self.ended_runs += entry.counts
        self._arrivals.give_back(entry, entry.inline_bytes)
        leave_storages(entry)
        if isinstance(entry.task, WriteTask) and self._uploads.release(entry.task.transfer, entry):
            self._instructions.append(DropUpload(entry.task.transfer, entry.error))
        if entry.reads_for:
            self._instructions.append(DropRead(entry.sequence))
        if isinstance(entry.task, OfferTask):
            self._instructions.append(CloseEdge(entry.sequence, entry.error))
        if entry.stream is not None:
            leave_stream(entry, entry.stream)
        if isinstance(entry.task, RunTask) and entry.task.plan.turns.leave(entry.task.turn, entry):
            self.runs_ended(entry.task.plan.turns)
        self._ready.extend(unblocked_by_retirement(entry))

    def may_exchange(self, may: bool) -> None:
        """Whether commands may name other daemons."""
        self._arrivals.may_exchange = may

    # Shared memory

    def share(self, size_bytes: int) -> None:
        """From now on commands may name places in so many bytes of shared memory."""
        self._arrivals.shared_bytes = size_bytes

    def shared_place(self, offset_bytes: int, size_bytes: int) -> Place:
        """A checked place there. Raises InvalidArgumentError, LimitExceededError, OutOfRangeError."""
        return self._arrivals.shared_place(offset_bytes, size_bytes)

    def take_place(self, sequence: int) -> bool:
        """Work is about to write at its place in shared memory; whether it may: once the command was reported
        the client uses the place for others."""
        entry = self._open.get(sequence)
        if entry is not None:
            entry.uses_place = True
        return entry is not None

    def leave_place(self, sequence: int) -> None:
        """Work does not need its place any more, and may take long from here: what was put off comes now."""
        entry = self._entries[sequence]
        entry.uses_place = False
        if entry.interruption is not None:
            self._interrupt(sequence, entry.interruption)
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
        entry = self._open.get(sequence)
        # What a Free command names is gone already; there is nothing to take back.
        if entry is None or isinstance(entry.task, FreeTask):
            return
        if entry.phase is Phase.RUNNING:
            if entry.uses_place:
                # The client uses it again when it is told of the end. Soon the work ends, or leaves it.
                entry.interruption = entry.interruption or error
                return
            if isinstance(entry.task, ABORTABLE) or entry.takes_upload:
                self._instructions.append(AbortWork(sequence))
        entry.error = entry.error or error.from_command(sequence)
        if isinstance(entry.task, OfferTask):
            # It is not done for long yet, perhaps, for what is before it on its stream.
            self._instructions.append(CloseEdge(sequence, entry.error))
        self._stop_waiting(entry, entry.error)
        self._report(entry, c.Completion(sequence))

    def _stop_waiting(self, entry: Entry, error: HeliographError) -> None:
        if not isinstance(entry.task, WriteTask) or not entry.task.transfer:
            return
        stopped = self._uploads.stop_waiting(entry.task.transfer, entry, error)
        if stopped and entry.blockers == 0:
            self._ready.append(entry)

    # Lanes, and the end

    def lane_failed(self, lane: Lane, error: HeliographError) -> None:
        """The device could not make the lane: its work fails."""
        # The command that needed the lane first is the one that came last.
        lane.error = error.from_command(self._last_sequence)
        self._lanes.pop(lane, None)

    def close(self, error: HeliographError) -> None:
        """Everything ends: running work is asked to, the rest fails with this error."""
        if self.closed is None:
            self.closed = error
            for sequence in list(self._open):
                self._interrupt(sequence, error)
        self._settle()

    def release_all(self) -> None:
        """After `close`, once the lanes are quiet: gives everything back."""
        self._release_everything()
        self._reading.clear()
        self._uploads.clear()


def _storages_of(handles: Iterable[Handle]) -> Iterator[Storage]:
    for handle in handles:
        match handle:
            case TensorHandle(storage=Storage() as storage):
                yield storage
            case BufferHandle(parts=parts):
                yield from _storages_of(parts)


def _has_data(entry: Entry, result: c.Completion) -> bool:
    """Whether the client waits for more than success."""
    inline_read = isinstance(entry.task, ReadTask) and not entry.task.transfer and not entry.task.shared
    return inline_read or bool(result.outputs) or result.steps > 0


def _steps_of(entry: Entry) -> int:
    """How many steps of a loop are done by now."""
    progress = entry.task.progress if isinstance(entry.task, RunTask) else None
    return 0 if progress is None else progress.done
