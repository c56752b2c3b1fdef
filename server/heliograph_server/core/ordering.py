"""Who waits for whom: commands as a graph of entries.

Every entry counts its blockers. Two on the same lane are in order as soon as the first was
*submitted*, since a lane starts its work in order; any other pair only when the first has
*retired*. So a chain on one lane is submitted ahead without a thread hop per command, and the
dependencies between lanes, which cost one, are those that the client asked for.

All dependencies point to earlier commands, so there is no cycle and nothing can lock up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from heliograph_proto.errors import HeliographError
from heliograph_server.core.handles import Lane, StreamHandle, TensorHandle
from heliograph_server.core.tasks import FreeTask, Task


class Phase(Enum):
    """How far a command is; it only goes forward."""

    QUEUED = "queued"
    #: In its lane's queue.
    SUBMITTED = "submitted"
    RUNNING = "running"
    #: Gone: nobody waits for it any more.
    RETIRED = "retired"


@dataclass(slots=True, eq=False)
class Entry:
    """A command that arrived.

    `reported` and RETIRED differ: a command that is cancelled is reported at once, but keeps its
    place, so that what comes after it still waits for what came before it, and for its own work.
    """

    sequence: int
    task: Task | FreeTask | None = None
    stream: StreamHandle | None = None
    #: None: the core settles it without a device.
    lane: Lane | None = None
    notify: bool = False
    timed: bool = False
    #: Tensors that must be healthy when it starts.
    uses: tuple[TensorHandle, ...] = ()
    #: Tensors that are poisoned when it fails.
    targets: tuple[TensorHandle, ...] = ()
    #: The target that it writes wholly, and so heals.
    heals: TensorHandle | None = None
    #: The transfer that its bytes are read for; 0: none.
    reads_for: int = 0
    #: Bytes that ride in it or in its completion.
    inline_bytes: int = 0
    #: How it failed; known before it starts if it can never start.
    error: HeliographError | None = None
    phase: Phase = Phase.QUEUED
    reported: bool = False
    blockers: int = 0
    dependents: list[Entry] = field(default_factory=list)

    def __repr__(self) -> str:
        name = type(self.task).__name__ if self.task else "settled by the core"
        state = "failed" if self.error else f"{self.blockers} blockers"
        return f"<Entry {self.sequence} {name}: {self.phase.value}, {state}>"

    def wait_for(self, earlier: Entry | None) -> None:
        """Adds a blocker unless the order is given already."""
        if earlier is None or earlier.phase is Phase.RETIRED:
            return
        same_lane = self.lane is not None and self.lane is earlier.lane
        if same_lane and earlier.phase is not Phase.QUEUED:
            return
        self.blockers += 1
        earlier.dependents.append(self)


def enter_storages(entry: Entry) -> None:
    """Waits for the earlier commands on the entry's tensors, and lets later ones wait for it."""
    written = {one.storage: None for one in entry.targets if one.storage is not None}
    read = {one.storage: None for one in entry.uses if one.storage not in written}
    for storage in written:
        entry.wait_for(storage.writer)
        for reader in storage.readers:
            entry.wait_for(reader)
        storage.writer = entry
        storage.readers.clear()
    for source in read:
        if source is not None:
            entry.wait_for(source.writer)
            source.readers[entry] = None


def leave_storages(entry: Entry) -> None:
    """Forgets a retired entry."""
    for tensor in (*entry.targets, *entry.uses):
        if tensor.storage is not None:
            tensor.storage.readers.pop(entry, None)
            if tensor.storage.writer is entry:
                tensor.storage.writer = None


def wait_for_users(entry: Entry, tensors: Iterable[TensorHandle]) -> None:
    """Waits for all earlier commands on tensors, without being in the way of later ones."""
    for tensor in tensors:
        if tensor.storage is not None:
            entry.wait_for(tensor.storage.writer)
            for reader in tensor.storage.readers:
                entry.wait_for(reader)


def unblocked_by_submission(entry: Entry) -> Iterator[Entry]:
    """Takes the entry off those dependents for which its submission suffices; yields the free ones."""
    waiting = entry.dependents
    entry.dependents = [one for one in waiting if one.lane is not entry.lane]
    return _unblock(one for one in waiting if one.lane is entry.lane)


def unblocked_by_retirement(entry: Entry) -> Iterator[Entry]:
    """Takes the entry off all dependents that are left; yields the free ones."""
    waiting, entry.dependents = entry.dependents, []
    return _unblock(waiting)


def _unblock(waiting: Iterable[Entry]) -> Iterator[Entry]:
    for one in waiting:
        one.blockers -= 1
        if one.blockers == 0:
            yield one
