"""What commands are once their handles were looked up: tasks for a device, and instructions for
the runtime. Nothing here does anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from heliograph_proto.commands import (
    Bytes,
    FetchTensor,
    GetTensor,
    Memset,
    OfferTensor,
    RunCommand,
    SetTensor,
)
from heliograph_proto.devices import Usage
from heliograph_proto.errors import HeliographError
from heliograph_server.resources.handles import (
    DeviceQueue,
    Handle,
    HandleStorage,
    PlanHandle,
    ReservationHandle,
    TensorHandle,
)

if TYPE_CHECKING:
    from heliograph_server.session.protocol.dependencies import CommandState


@dataclass(frozen=True, slots=True, eq=False)
class AllocateTask:
    """Makes storages, fills them with zeros, and tells the device of the tensors that lie there."""

    storages: tuple[HandleStorage, ...]
    tensors: tuple[TensorHandle, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PlaceTask:
    """Tells the device of a tensor that lies in a storage from now on."""

    tensor: TensorHandle


@dataclass(frozen=True, slots=True, eq=False)
class UsageTask:
    """Tells the device what storages are for from now on."""

    storages: tuple[HandleStorage, ...]
    usage: Usage


@dataclass(frozen=True, slots=True, eq=False)
class ClearTask:
    """Fills storages with one value."""

    storages: tuple[HandleStorage, ...]
    value: int


@dataclass(frozen=True, slots=True, eq=False)
class ResetTask:
    """Drops what the device keeps beside the tensors of storages."""

    storages: tuple[HandleStorage, ...]


@dataclass(frozen=True, slots=True)
class SharedPlace:
    """Bytes in the memory that a session shares with its client."""

    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class WriteTask:
    """Writes the bytes that a command brings, a transfer carries, or that lie in shared memory."""

    tensor: TensorHandle
    command: SetTensor
    place: SharedPlace | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ReadTask:
    """Reads bytes into the completion, or for a transfer if it names one, or into shared memory."""

    tensor: TensorHandle
    command: GetTensor
    place: SharedPlace | None = None


@dataclass(frozen=True, slots=True, eq=False)
class FillTask:
    """Fills bytes with one value."""

    tensor: TensorHandle
    command: Memset


@dataclass(frozen=True, slots=True, eq=False)
class CopyTask:
    """Copies a whole tensor."""

    source: TensorHandle
    destination: TensorHandle


@dataclass(frozen=True, slots=True, eq=False)
class OfferTask:
    """Gives a whole tensor to the daemon that fetches it."""

    tensor: TensorHandle
    command: OfferTensor


@dataclass(frozen=True, slots=True, eq=False)
class FetchTask:
    """Writes a whole tensor with what another daemon gives."""

    tensor: TensorHandle
    command: FetchTensor


@dataclass(frozen=True, slots=True, eq=False)
class WantedOutput:
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
    """Runs a plan; inputs in the plan's order. `slot`: on which copy of its memory."""

    plan: PlanHandle
    command: RunCommand
    inputs: tuple[Bytes | TensorHandle, ...]
    outputs: tuple[WantedOutput, ...]
    slot: int = 0
    #: Of a loop.
    progress: Progress | None = None


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
class OpenQueue:
    """Make the device's stream; tell `SessionCore.queue_failed` if that fails."""

    queue: DeviceQueue


@dataclass(frozen=True, slots=True)
class CloseQueue:
    """Close the stream; nothing is queued there."""

    queue: DeviceQueue


@dataclass(frozen=True, slots=True)
class Start:
    """Submit the command's work to its queue now: the order of these is the order of the queue."""

    state: CommandState


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

    storage: HandleStorage


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
    OpenQueue
    | CloseQueue
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
