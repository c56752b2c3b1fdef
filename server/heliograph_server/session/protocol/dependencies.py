"""Who waits for whom: commands as a graph.

Every command counts its blockers. Two on the same queue are in order as soon as the first was
*submitted*, since a queue starts its work in order; any other pair only when the first has
*retired*. So a chain on one queue is submitted ahead without a thread hop per command, and the
dependencies between queues, which cost one, are those that the client asked for.

All dependencies point to earlier commands, so there is no cycle and nothing can lock up. Their number
grows with that of the commands, not with its square: a crowd of readers that many commands wait for is
waited for once, by a *join*, and those commands wait for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from heliograph_proto.errors import HeliographError
from heliograph_server.resources.handles import DeviceQueue, HandleStorage, StreamHandle, TensorHandle
from heliograph_server.session.protocol.instructions import FreeTask, Task, WriteTask
from heliograph_server.session.protocol.loop_rules import Unread

#: More readers of a storage than this are waited for by way of a join.
FEW_READERS = 16


class CommandPhase(Enum):
    """How far a command is; it only goes forward."""

    QUEUED = "queued"
    #: In its queue.
    SUBMITTED = "submitted"
    RUNNING = "running"
    #: Gone: nobody waits for it any more.
    RETIRED = "retired"


@dataclass(slots=True, eq=False)
class CommandState:
    """A command that arrived.

    `reported` and RETIRED differ: a command that is cancelled is reported at once, but keeps its
    place, so that what comes after it still waits for what came before it, and for its own work.
    """

    sequence: int
    task: Task | FreeTask | None = None
    stream: StreamHandle | None = None
    #: None: the core settles it without a device.
    queue: DeviceQueue | None = None
    notify: bool = False
    timed: bool = False
    #: Whether it is a run that counts as one in flight until it retires.
    counts: bool = False
    #: Whether its stream's later commands may be done before it: those that do not use its tensors.
    overlaps: bool = False
    #: Tensors that must be healthy when it starts.
    uses: tuple[TensorHandle, ...] = ()
    #: Tensors that are poisoned when it fails.
    targets: tuple[TensorHandle, ...] = ()
    #: Whether it writes their bytes; else they are targets for the sake of order alone.
    writes: bool = True
    #: The targets of which it writes every byte, or every byte of `part`, and so heals.
    heals: tuple[TensorHandle, ...] = ()
    #: A range of the one target's storage, if it writes no more than that.
    part: tuple[int, int] | None = None
    #: The transfer that its bytes are read for; 0: none.
    reads_for: int = 0
    #: Whether it waits after an observed node, or until its client took more.
    is_paused: bool = False
    #: Of a loop: what its client did not take yet.
    unread: Unread | None = None
    #: Bytes that ride in it, in its completion, or before that.
    inline_bytes: int = 0
    #: How it failed; known before it starts if it can never start.
    error: HeliographError | None = None
    phase: CommandPhase = CommandPhase.QUEUED
    reported: bool = False
    #: Whether its work reads or writes its place in shared memory now, so that it cannot be reported yet.
    uses_place: bool = False
    #: What it is to be broken off with once it does not.
    interruption: HeliographError | None = None
    #: It takes no place in the order.
    is_refused: bool = False
    #: It is no command, but stands for others: it retires with the last of them.
    is_join: bool = False
    #: It is no command, but a number that somebody outside of the stream waits under; 0: it is one.
    waiter: int = 0
    blockers: int = 0
    dependents: list[CommandState] = field(default_factory=list)

    def __repr__(self) -> str:
        name = type(self.task).__name__ if self.task else "settled by the core"
        health = "failed" if self.error else f"{self.blockers} blockers"
        return f"<CommandState {self.sequence} {name}: {self.phase.value}, {health}>"

    @property
    def takes_upload(self) -> bool:
        """Whether its work waits for bytes that come."""
        return isinstance(self.task, WriteTask) and bool(self.task.command.transfer)

    def wait_for(self, earlier: CommandState | None) -> None:
        """Adds a blocker unless the order is given already."""
        if earlier is None or earlier.phase is CommandPhase.RETIRED:
            return
        same_queue = self.queue is not None and self.queue is earlier.queue
        if same_queue and earlier.phase is not CommandPhase.QUEUED:
            return
        self.blockers += 1
        earlier.dependents.append(self)


def enter_stream(
    state: CommandState,
    stream: StreamHandle,
    *,
    marks: bool = False,
    gates: bool = False,
    is_fence: bool = False,
) -> None:
    """Takes the next place in the stream. What needs no device is in nobody's way, but for a wait.

    A run that overlaps others has its place from its tensors alone, and from the stream's waits.
    """
    state.wait_for(stream.gate)
    if state.overlaps:
        stream.runs[state] = None
        return
    state.wait_for(stream.tail)
    if is_fence:
        for run in stream.runs:
            state.wait_for(run)
    if state.queue is not None:
        stream.tail = state
    if marks:
        stream.records[state] = None
        state.error, stream.failure = state.error or stream.failure, None
    if gates:
        stream.gate = state


def leave_stream(state: CommandState, stream: StreamHandle) -> None:
    """Forgets a retired state."""
    if stream.tail is state:
        stream.tail = None
    if stream.gate is state:
        stream.gate = None
    stream.records.pop(state, None)
    stream.runs.pop(state, None)


def note_failure(state: CommandState) -> None:
    """Gives the failure to the stream's next mark, unless an earlier one failed before it."""
    stream = state.stream
    if stream is None or state in stream.records:
        return
    following = (one for one in stream.records if one.sequence > state.sequence)
    if (mark := next(following, None)) is None:
        stream.failure = stream.failure or state.error
    elif mark.error is None:
        mark.error = state.error


def enter_storages(state: CommandState) -> None:
    """Waits for the earlier commands on the command's tensors, and lets later ones wait for it."""
    written = {one.storage: None for one in state.targets if one.storage is not None}
    read = {one.storage: None for one in state.uses if one.storage not in written}
    for storage in written:
        state.wait_for(storage.writer)
        for reader in storage.readers:
            state.wait_for(reader)
        storage.writer = state
        storage.readers.clear()
        storage.unjoined.clear()
    for source in read:
        if source is not None:
            state.wait_for(source.writer)
            source.readers[state] = source.unjoined[state] = None


def leave_storages(state: CommandState) -> None:
    """Forgets a retired state."""
    for tensor in (*state.targets, *state.uses):
        if tensor.storage is not None:
            tensor.storage.readers.pop(state, None)
            tensor.storage.unjoined.pop(state, None)
            if tensor.storage.writer is state:
                tensor.storage.writer = None


def wait_for_writers(state: CommandState, tensors: Iterable[TensorHandle]) -> None:
    """Waits until it is known whether tensors are healthy, without being in the way of later commands."""
    for tensor in tensors:
        if tensor.storage is not None:
            state.wait_for(tensor.storage.writer)


def wait_for_users(state: CommandState, storages: Iterable[HandleStorage]) -> None:
    """Waits for all earlier commands on storages, without being in the way of later ones."""
    for storage in storages:
        state.wait_for(storage.writer)
        if len(storage.readers) > FEW_READERS:
            state.wait_for(_join(storage))
        else:
            for reader in storage.readers:
                state.wait_for(reader)


def _join(storage: HandleStorage) -> CommandState:
    """A command that retires with the present readers; each of them blocks one join only."""
    if storage.unjoined or storage.join is None:
        join = CommandState(0, is_join=True)
        join.wait_for(storage.join)
        for reader in storage.unjoined:
            join.wait_for(reader)
        storage.unjoined.clear()
        storage.join = join
    return storage.join


def unblocked_by_submission(state: CommandState) -> Iterator[CommandState]:
    """Takes the command off those dependents for which its submission suffices; yields the free ones."""
    waiting = state.dependents
    state.dependents = [one for one in waiting if one.queue is not state.queue]
    return _unblock(one for one in waiting if one.queue is state.queue)


def unblocked_by_retirement(state: CommandState) -> Iterator[CommandState]:
    """Takes the command off all dependents that are left; yields the free ones."""
    waiting, state.dependents = state.dependents, []
    return _unblock(waiting)


def _unblock(waiting: Iterable[CommandState]) -> Iterator[CommandState]:
    pending = deque(waiting)
    while pending:
        one = pending.popleft()
        one.blockers -= 1
        if one.blockers == 0 and one.is_join:
            one.phase = CommandPhase.RETIRED
            pending.extend(one.dependents)
            one.dependents = []
        elif one.blockers == 0:
            yield one
