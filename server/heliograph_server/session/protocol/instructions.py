"""Tasks for devices, made of validated commands, and instructions for the runtime.

Data alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from heliograph_proto.commands import (
    Bytes,
    FeedLoop,
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
    from heliograph_server.session.protocol.loop_feeds import Mailbox


@dataclass(frozen=True, slots=True, eq=False)
class AllocateTask:
    """Allocate storages filled with zeros, and initialize the tensors in them."""

    storages: tuple[HandleStorage, ...]
    tensors: tuple[TensorHandle, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PlaceTask:
    """Initialize a tensor placed in an existing storage."""

    tensor: TensorHandle


@dataclass(frozen=True, slots=True, eq=False)
class UsageTask:
    """Change the usage of storages."""

    storages: tuple[HandleStorage, ...]
    usage: Usage


@dataclass(frozen=True, slots=True, eq=False)
class ClearTask:
    """Fill storages with one value."""

    storages: tuple[HandleStorage, ...]
    value: int


@dataclass(frozen=True, slots=True, eq=False)
class ResetTask:
    """Drop what the device keeps beside the tensors of storages."""

    storages: tuple[HandleStorage, ...]


@dataclass(frozen=True, slots=True)
class SharedPlace:
    """Bytes in the memory that a session shares with its client."""

    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class WriteTask:
    """Write bytes carried by the command or by a transfer, or in shared memory."""

    tensor: TensorHandle
    command: SetTensor
    place: SharedPlace | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ReadTask:
    """Read bytes into the completion, for a transfer, or into shared memory."""

    tensor: TensorHandle
    command: GetTensor
    place: SharedPlace | None = None


@dataclass(frozen=True, slots=True, eq=False)
class FillTask:
    """Fill bytes with one value."""

    tensor: TensorHandle
    command: Memset


@dataclass(frozen=True, slots=True, eq=False)
class CopyTask:
    """Copy a whole tensor."""

    source: TensorHandle
    destination: TensorHandle


@dataclass(frozen=True, slots=True, eq=False)
class OfferTask:
    """Give a whole tensor to the daemon that fetches it."""

    tensor: TensorHandle
    command: OfferTensor


@dataclass(frozen=True, slots=True, eq=False)
class FetchTask:
    """Write a whole tensor with the bytes that another daemon gives."""

    tensor: TensorHandle
    command: FetchTensor


@dataclass(frozen=True, slots=True, eq=False)
class WantedOutput:
    """An output of a run that its client requested."""

    output: int
    #: A new tensor, created by the run.
    tensor: TensorHandle | None
    #: True if the completion carries its bytes.
    fetch: bool
    #: An existing tensor that the run writes.
    into: TensorHandle | None = None


@dataclass(slots=True, eq=False)
class Progress:
    """The progress of a loop. Written by the thread that runs it, read by any."""

    #: Completed steps.
    done: int = 0
    #: For a loop at other hosts: the steps that they told of meanwhile. More may be complete.
    told: int = 0
    #: True if the loop is to end after the present step.
    stops: bool = False
    #: The feeds that wait; None for a loop that takes none.
    mailbox: Mailbox | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RunTask:
    """Run a plan. Inputs are in the plan's order; `slot` is the copy of its memory."""

    plan: PlanHandle
    command: RunCommand
    inputs: tuple[Bytes | TensorHandle, ...]
    outputs: tuple[WantedOutput, ...]
    slot: int = 0
    #: None for a run that is no loop.
    progress: Progress | None = None


#: Work for a device. The core settles everything else itself.
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
#: Work that an abort ends early.
ABORTABLE = (AllocateTask, ClearTask, FillTask, CopyTask, RunTask, OfferTask, FetchTask)


@dataclass(frozen=True, slots=True, eq=False)
class FreeTask:
    """Release the objects of handles, which left the handle table when the command was received."""

    handles: tuple[Handle, ...]


@dataclass(frozen=True, slots=True)
class ForgetVariable:
    """Forget the plans without a handle that use a variable, since it will be freed."""

    name: str


@dataclass(frozen=True, slots=True)
class OpenQueue:
    """Create the device's stream. A failure is reported to `SessionCore.queue_failed`."""

    queue: DeviceQueue


@dataclass(frozen=True, slots=True)
class CloseQueue:
    """Close the stream, which is empty."""

    queue: DeviceQueue


@dataclass(frozen=True, slots=True)
class Start:
    """Submit work to its queue. The order of these instructions is the order of the queue."""

    state: CommandState


@dataclass(frozen=True, slots=True)
class OpenEdge:
    """Offer the command's tensor under its edge. A daemon that asks early waits."""

    sequence: int
    task: OfferTask


@dataclass(frozen=True, slots=True)
class CloseEdge:
    """End the offer of the command's tensor. A daemon that still waits gets the error."""

    sequence: int
    error: HeliographError | None


@dataclass(frozen=True, slots=True)
class AbortWork:
    """Abort running work."""

    sequence: int
    #: False if work that writes variables may go on to the end of its step.
    now: bool = True


@dataclass(frozen=True, slots=True)
class Proceed:
    """Resume a run that waits after an observed node."""

    sequence: int


@dataclass(frozen=True, slots=True)
class StopLoop:
    """End a loop at other hosts after its present step. A loop that runs here sees it by itself."""

    sequence: int


@dataclass(frozen=True, slots=True)
class HandOn:
    """Send a feed to the hosts of its loop."""

    #: Of the feed.
    sequence: int
    loop: int
    feed: FeedLoop


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Withdraw a feed from the hosts of its loop. They still report its end."""

    sequence: int


@dataclass(frozen=True, slots=True)
class ReleaseTensor:
    """Free the device's state of a tensor, if its storage was allocated."""

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
    """Free the memory, and the plans in it, none of which runs."""

    reservation: ReservationHandle


@dataclass(frozen=True, slots=True)
class DropUpload:
    """Drop the bytes of a transfer. Further bytes are refused, with this error if there is one."""

    transfer: int
    error: HeliographError | None = None


@dataclass(frozen=True, slots=True)
class Deliver:
    """Give the reader of a transfer the bytes that its command staged, or the error."""

    transfer: int
    sequence: int
    error: HeliographError | None


@dataclass(frozen=True, slots=True)
class DropRead:
    """Drop the bytes that the command staged, unless they were delivered."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Resume a waiter outside the command stream."""

    waiter: int


@dataclass(frozen=True, slots=True)
class Disarm:
    """Cancel the command's deadline."""

    sequence: int


@dataclass(frozen=True, slots=True)
class RunEnded:
    """Record the end of a run for the observers of runs."""

    sequence: int
    error: HeliographError | None


Instruction: TypeAlias = (
    OpenQueue
    | CloseQueue
    | Start
    | AbortWork
    | Proceed
    | StopLoop
    | HandOn
    | Withdraw
    | ReleaseTensor
    | ReleaseStorage
    | ForgetVariable
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
