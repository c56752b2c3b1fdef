"""The graph of dependencies between commands.

Every command counts its blockers. Two commands on the same queue are in order once the first was
*submitted*, since a queue starts its work in order; any other pair only when the first has
*retired*. So a chain on one queue is submitted ahead without a thread hop per command. Dependencies
between queues cost a hop, and exist only where the client asked for them.

All dependencies point to earlier commands, so there are no cycles and no deadlocks. Their number
grows linearly with the commands: where many commands wait for many readers, one *join* waits for
the readers and the commands wait for the join.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from heliograph_proto.errors import HeliographError
from heliograph_server.resources.handles import DeviceQueue, HandleStorage, StreamHandle, TensorHandle
from heliograph_server.session.protocol.instructions import FreeTask, ReadTask, Task, WriteTask
from heliograph_server.session.protocol.loop_rules import Unread

#: A command that waits for more readers of a storage than this waits for a join of them.
FEW_READERS = 16


class CommandPhase(Enum):
    """The progress of a command. It only moves forward."""

    QUEUED = "queued"
    #: In its device queue.
    SUBMITTED = "submitted"
    RUNNING = "running"
    #: Gone: no command waits for it.
    RETIRED = "retired"


@dataclass(slots=True, eq=False)
class CommandState:
    """A command that was received.

    `reported` and RETIRED differ: a cancelled command is reported at once, but keeps its place.
    Later commands still wait for its work and for the commands before it.
    """

    sequence: int
    task: Task | FreeTask | None = None
    stream: StreamHandle | None = None
    #: None if the core settles the command without a device.
    queue: DeviceQueue | None = None
    #: True if its success has a completion of its own.
    notify: bool = False
    #: True if it has a deadline.
    timed: bool = False
    #: True if it is a run that counts against the quota of runs until it retires.
    counts: bool = False
    #: True if later commands of its stream that do not use its tensors may finish before it.
    overlaps: bool = False
    #: Tensors that must be healthy when it starts.
    uses: tuple[TensorHandle, ...] = ()
    #: Tensors that are poisoned when it fails.
    targets: tuple[TensorHandle, ...] = ()
    #: True if it writes their bytes; otherwise they are targets only for the sake of order.
    writes: bool = True
    #: The targets that it heals, since it writes every byte of them, or of `part`.
    heals: tuple[TensorHandle, ...] = ()
    #: The targets that keep their bytes if it fails, with their names: variables. They are poisoned
    #: only if it is `torn`, that is, if it failed while it wrote them.
    in_place: Mapping[TensorHandle, str] = field(default_factory=dict)
    torn: bool = False
    #: The range of the one target's storage that it writes, if that is not all.
    part: tuple[int, int] | None = None
    #: The transfer for which it reads bytes; 0: none.
    reads_for: int = 0
    #: True while it waits after an observed node, or for its client to take values.
    is_paused: bool = False
    #: Values of a loop that its client has not taken yet.
    unread: Unread | None = None
    #: Bytes carried by the command, its completion and its tap pieces.
    inline_bytes: int = 0
    #: The error with which it failed; set before its turn if it can never start.
    error: HeliographError | None = None
    phase: CommandPhase = CommandPhase.QUEUED
    reported: bool = False
    #: True while its work uses its place in shared memory. It cannot be reported then.
    uses_place: bool = False
    #: An interruption deferred until `uses_place` is False, or until a run that may write variables
    #: has ended.
    interruption: HeliographError | None = None
    #: True if it has no place in the order.
    is_refused: bool = False
    #: True for a join, which is no command: it retires with the last command that it waits for.
    is_join: bool = False
    #: The number of a waiter outside the command stream, which is no command; 0: a command.
    waiter: int = 0
    blockers: int = 0
    dependents: list[CommandState] = field(default_factory=list)

    def __repr__(self) -> str:
        name = type(self.task).__name__ if self.task else "settled by the core"
        health = "failed" if self.error else f"{self.blockers} blockers"
        return f"<CommandState {self.sequence} {name}: {self.phase.value}, {health}>"

    @property
    def takes_upload(self) -> bool:
        """True if its work waits for the bytes of an upload."""
        return isinstance(self.task, WriteTask) and bool(self.task.command.transfer)

    @property
    def waits_for_client(self) -> bool:
        """True if its work may wait for the bytes of an upload, or for the reader of a download."""
        return isinstance(self.task, WriteTask | ReadTask) and bool(self.task.command.transfer)

    def wait_for(self, earlier: CommandState | None) -> None:
        """Add a blocker, unless the order is already guaranteed."""
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
    """Take the next place in the stream. Without a queue, a command blocks only if it `gates`.

    A run that overlaps others is ordered by its tensors and by the stream's gate alone.
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
    """Remove a retired command from its stream."""
    if stream.tail is state:
        stream.tail = None
    if stream.gate is state:
        stream.gate = None
    stream.records.pop(state, None)
    stream.runs.pop(state, None)


def note_failure(state: CommandState) -> None:
    """Pass a failure to the stream's next mark, unless an earlier failure reached that first."""
    stream = state.stream
    if stream is None or state in stream.records:
        return
    following = (one for one in stream.records if one.sequence > state.sequence)
    if (mark := next(following, None)) is None:
        stream.failure = stream.failure or state.error
    elif mark.error is None:
        mark.error = state.error


def enter_storages(state: CommandState) -> None:
    """Wait for the earlier commands on the command's tensors, and block later ones."""
    for target in state.targets:
        storage = target.storage
        if storage is None or storage.writer is state:
            continue
        state.wait_for(storage.writer)
        for reader in storage.readers:
            state.wait_for(reader)
        storage.writer = state
        storage.readers.clear()
        storage.unjoined.clear()
    for source in state.uses:
        storage = source.storage
        if storage is None or storage.writer is state or state in storage.readers:
            continue
        state.wait_for(storage.writer)
        storage.readers[state] = storage.unjoined[state] = None


def leave_storages(state: CommandState) -> None:
    """Remove a retired command from the storages of its tensors."""
    # Tensors of a plan are many, and lie in few storages.
    for storage in {tensor.storage for tensor in (*state.targets, *state.uses)}:
        if storage is not None:
            storage.readers.pop(state, None)
            storage.unjoined.pop(state, None)
            if storage.writer is state:
                storage.writer = None


def wait_for_writers(state: CommandState, tensors: Iterable[TensorHandle]) -> None:
    """Wait until the health of tensors is known, without blocking later commands."""
    for tensor in tensors:
        if tensor.storage is not None:
            state.wait_for(tensor.storage.writer)


def wait_for_users(state: CommandState, storages: Iterable[HandleStorage]) -> None:
    """Wait for all earlier commands on storages, without blocking later ones."""
    for storage in storages:
        state.wait_for(storage.writer)
        if len(storage.readers) > FEW_READERS:
            state.wait_for(_join(storage))
        else:
            for reader in storage.readers:
                state.wait_for(reader)


def _join(storage: HandleStorage) -> CommandState:
    """A join of the present readers. Each reader blocks one join only."""
    if storage.unjoined or storage.join is None:
        join = CommandState(0, is_join=True)
        join.wait_for(storage.join)
        for reader in storage.unjoined:
            join.wait_for(reader)
        storage.unjoined.clear()
        storage.join = join
    return storage.join


def unblocked_by(state: CommandState, *, is_retired: bool = False) -> Iterator[CommandState]:
    """Remove the command from the blockers of its dependents, and yield those without blockers.

    Submission suffices for the dependents on its queue; the others stay until it has retired.
    """
    pending, state.dependents = deque(state.dependents), []
    while pending:
        one = pending.popleft()
        if not is_retired and one.queue is not state.queue:
            state.dependents.append(one)
            continue
        one.blockers -= 1
        if one.blockers == 0 and one.is_join:
            one.phase = CommandPhase.RETIRED
            pending.extend(one.dependents)
            one.dependents = []
        elif one.blockers == 0:
            yield one
