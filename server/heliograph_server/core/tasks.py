"""What commands are once their handles were looked up: tasks for a device, and instructions for
the runtime. Nothing here does anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from heliograph_proto.commands import Bytes
from heliograph_proto.errors import HeliographError
from heliograph_server.core.handles import Handle, Lane, PlanHandle, Storage, TensorHandle

if TYPE_CHECKING:
    from heliograph_server.core.ordering import Entry


@dataclass(frozen=True, slots=True, eq=False)
class AllocateTask:
    """Makes the storage of a tensor and fills it with zeros."""

    tensor: TensorHandle


@dataclass(frozen=True, slots=True, eq=False)
class WriteTask:
    """Writes bytes; `data` is None when a transfer carries them."""

    tensor: TensorHandle
    offset_bytes: int
    data: Bytes | None
    transfer: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ReadTask:
    """Reads bytes into the completion, or for a transfer if that is not 0."""

    tensor: TensorHandle
    offset_bytes: int
    size_bytes: int
    transfer: int = 0


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
class Wanted:
    """An output of a run that somebody wants."""

    output: int
    tensor: TensorHandle | None
    fetch: bool


@dataclass(frozen=True, slots=True, eq=False)
class RunTask:
    """Runs a plan; inputs in the plan's order."""

    plan: PlanHandle
    inputs: tuple[Bytes | TensorHandle, ...]
    outputs: tuple[Wanted, ...]


#: Work for a device. Everything else is settled by the core alone.
Task: TypeAlias = AllocateTask | WriteTask | ReadTask | FillTask | CopyTask | RunTask


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
class AbortWork:
    """Ask running work to end early."""

    sequence: int


@dataclass(frozen=True, slots=True)
class ReleaseStorage:
    """Free the buffer, if there is one."""

    storage: Storage


@dataclass(frozen=True, slots=True)
class ReleasePlan:
    """Free the plan."""

    plan: PlanHandle


@dataclass(frozen=True, slots=True)
class DropUpload:
    """Forget the staged bytes of a transfer."""

    transfer: int


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
class Disarm:
    """The command's deadline no longer matters."""

    sequence: int


Instruction: TypeAlias = (
    OpenLane
    | CloseLane
    | Start
    | AbortWork
    | ReleaseStorage
    | ReleasePlan
    | DropUpload
    | Deliver
    | DropRead
    | Disarm
)
