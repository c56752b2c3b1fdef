"""What commands are once their handles were looked up: tasks for a device, and instructions for
the runtime. Nothing here does anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from heliograph_proto.commands import Bytes, Chunks, Loop
from heliograph_proto.description import Usage
from heliograph_proto.errors import HeliographError
from heliograph_proto.portions import Edge, Source
from heliograph_server.core.handles import Handle, Lane, PlanHandle, ReservationHandle, Storage, TensorHandle

if TYPE_CHECKING:
    from heliograph_server.core.ordering import Entry


@dataclass(frozen=True, slots=True, eq=False)
class AllocateTask:
    """Makes storages, fills them with zeros, and tells the device of the tensors that lie there."""

    storages: tuple[Storage, ...]
    tensors: tuple[TensorHandle, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PlaceTask:
    """Tells the device of a tensor that lies in a storage from now on."""

    tensor: TensorHandle


@dataclass(frozen=True, slots=True, eq=False)
class UsageTask:
    """Tells the device what storages are for from now on."""

    storages: tuple[Storage, ...]
    usage: Usage


@dataclass(frozen=True, slots=True, eq=False)
class ClearTask:
    """Fills storages with one value."""

    storages: tuple[Storage, ...]
    value: int


@dataclass(frozen=True, slots=True, eq=False)
class ResetTask:
    """Drops what the device keeps beside the tensors of storages."""

    storages: tuple[Storage, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes in the memory that a session shares with its client."""

    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class WriteTask:
    """Writes bytes; `data` is None when a transfer carries them, or they lie in shared memory."""

    tensor: TensorHandle
    offset_bytes: int
    data: Bytes | None
    transfer: int = 0
    chunks: Chunks | None = None
    shared: Place | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ReadTask:
    """Reads bytes into the completion, or for a transfer if that is not 0, or into shared memory."""

    tensor: TensorHandle
    offset_bytes: int
    size_bytes: int
    transfer: int = 0
    chunks: Chunks | None = None
    shared: Place | None = None


@dataclass(frozen=True, slots=True, eq=False)
class FillTask:
    """Fills bytes with one value."""

    tensor: TensorHandle
    offset_bytes: int
    size_bytes: int
    value: int


@dataclass(frozen=True, slots=True, eq=False)
class CopyTask:
    """Copies a whole tensor."""

    source: TensorHandle
    destination: TensorHandle


@dataclass(frozen=True, slots=True, eq=False)
class OfferTask:
    """Gives a whole tensor to the daemon that fetches it."""

    tensor: TensorHandle
    edge: Edge
    run: int


@dataclass(frozen=True, slots=True, eq=False)
class FetchTask:
    """Writes a whole tensor with what another daemon gives."""

    tensor: TensorHandle
    edge: Edge
    run: int
    source: Source


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """An output of a run that somebody wants."""

    output: int
    #: New, made by the run.
    tensor: TensorHandle | None
    fetch: bool
    #: Existing, to be written.
    into: TensorHandle | None = None


@dataclass(slots=True, eq=False)
class Progress:
    """How far a loop is. Only the thread that runs it writes; any may read."""

    #: Steps, with all that they stream.
    done: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class RunTask:
    """Runs a plan; inputs in the plan's order. `turn`: on which copy of its memory."""

    plan: PlanHandle
    inputs: tuple[Bytes | TensorHandle, ...]
    outputs: tuple[Wanted, ...]
    turn: int = 0
    #: Whether it waits after each observed node.
    pauses: bool = False
    #: If it runs again and again: checked against the plan.
    loop: Loop | None = None
    #: Of a loop.
    progress: Progress | None = None
    #: Of a portion: which run of the whole it is.
    exchange_run: int = 0
    #: Which span it belongs to; "": none.
    trace_parent: str = ""


#: Work for a device. Everything else is settled by the core alone.
Task: TypeAlias = (
    AllocateTask
    | PlaceTask
    | UsageTask
    | ClearTask
    | ResetTask
    | WriteTask
    | ReadTask
    | FillTask
    | CopyTask
    | OfferTask
    | FetchTask
    | RunTask
)
#: Work that ends early when it is asked to.
ABORTABLE = (RunTask, OfferTask, FetchTask)


@dataclass(frozen=True, slots=True, eq=False)
class FreeTask:
    """Releases what handles stood for; the handles themselves went when the command arrived."""

    handles: tuple[Handle, ...]


@dataclass(frozen=True, slots=True)
class OpenLane:
    """Make the device's stream; tell `SessionCore.lane_failed` if that fails."""

    lane: Lane


@dataclass(frozen=True, slots=True)
class CloseLane:
    """Close the stream; nothing is queued there."""

    lane: Lane


@dataclass(frozen=True, slots=True)
class Start:
    """Submit the entry's work to its lane now: the order of these is the order of the lane."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class OpenEdge:
    """The command's tensor is to be had by the edge that it names: whoever comes for it waits."""

    sequence: int
    task: OfferTask


@dataclass(frozen=True, slots=True)
class CloseEdge:
    """Whoever still waits for the command's tensor is told so, or how it failed."""

    sequence: int
    error: HeliographError | None


@dataclass(frozen=True, slots=True)
class AbortWork:
    """Ask running work to end early."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Proceed:
    """Let a run go on that waits after an observed node."""

    sequence: int


@dataclass(frozen=True, slots=True)
class ReleaseTensor:
    """Tell the device that a tensor goes, if its storage was ever made."""

    tensor: TensorHandle


@dataclass(frozen=True, slots=True)
class ReleaseStorage:
    """Free the buffer, if there is one."""

    storage: Storage


@dataclass(frozen=True, slots=True)
class ReleasePlan:
    """Free the plan."""

    plan: PlanHandle


@dataclass(frozen=True, slots=True)
class ReleaseReservation:
    """Free the memory, and the plans that lie there: nothing of them runs any more."""

    reservation: ReservationHandle


@dataclass(frozen=True, slots=True)
class DropUpload:
    """Forget the bytes of a transfer; such as still come are refused, with this error if there is one."""

    transfer: int
    error: HeliographError | None = None


@dataclass(frozen=True, slots=True)
class Deliver:
    """The command that reads for a transfer is done: hand its staged bytes to the reader, or the error."""

    transfer: int
    sequence: int
    error: HeliographError | None


@dataclass(frozen=True, slots=True)
class DropRead:
    """Forget what the command staged, unless it was delivered."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Resume:
    """What somebody outside of the command stream waits for has happened; its number."""

    waiter: int


@dataclass(frozen=True, slots=True)
class Disarm:
    """The command's deadline no longer matters."""

    sequence: int


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The client is told of a run's end, and so are those who want to know of all."""

    sequence: int
    error: HeliographError | None


Instruction: TypeAlias = (
    OpenLane
    | CloseLane
    | Start
    | AbortWork
    | Proceed
    | ReleaseTensor
    | ReleaseStorage
    | ReleasePlan
    | ReleaseReservation
    | DropUpload
    | Deliver
    | DropRead
    | Disarm
    | OpenEdge
    | CloseEdge
    | Resume
    | RunEnded
)
