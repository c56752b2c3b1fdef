"""Devices, backends, the members of a pool and the links between them, as frozen dataclasses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, TypeAlias

from heliograph_proto.errors import HeliographError
from heliograph_proto.types import TensorType


class DeviceType(Enum):
    """The kind of hardware behind a device. The values are those of device.proto."""

    CPU = 1
    GPU = 2
    INTEGRATED_GPU = 3
    ACCELERATOR = 4


#: The precision of rows in products with quantized weights: "f32", or "q8", which rounds them to
#: q8_0, as ggml does on CPUs; "auto" is "q8" where CPUs alone compute, else "f32".
Activations: TypeAlias = Literal["auto", "f32", "q8"]


def rounds_rows(activations: str, types: Iterable[DeviceType]) -> bool:
    """Return True if rows are rounded where devices of these types compute."""
    return activations == "q8" or (activations == "auto" and all(one is DeviceType.CPU for one in types))


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The optional capabilities of a device."""

    async_: bool = True
    host_buffer: bool = False
    #: True if `session.wrap` works: the device uses this process's memory in place.
    buffer_from_host: bool = False
    events: bool = True


@dataclass(frozen=True, slots=True)
class Memory:
    """The bytes of a device that Heliograph may use. Both 0: unknown."""

    free_bytes: int = 0
    total_bytes: int = 0


class Usage(Enum):
    """The use of a buffer: a hint to backends and the scheduler. The values are command.proto's."""

    ANY = 0
    WEIGHTS = 1
    COMPUTE = 2


class CopyPath(Enum):
    """The way in which a tensor was copied to another. The values are those of command.proto."""

    #: The destination's device fetched the bytes.
    DESTINATION = 1
    #: The source's device sent them.
    SOURCE = 2
    #: Neither could: they went through host memory.
    HOST = 3


class BufferRole(Enum):
    """The role of a buffer type on its device. The values are those of device.proto."""

    DEFAULT = 1
    #: Host memory to which the device has fast access.
    HOST = 2
    EXTRA = 3


@dataclass(frozen=True, slots=True)
class BufferTypeInfo:
    """The properties of a device's buffer type."""

    name: str
    role: BufferRole
    alignment_bytes: int
    max_size_bytes: int
    is_host: bool
    #: Names of the devices whose kernels read this memory in place.
    readable_by: tuple[str, ...] = ()
    #: True if a tensor may take more than its own bytes.
    pads: bool = False


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device."""

    name: str
    description: str
    type: DeviceType
    backend: str
    capabilities: Capabilities
    memory: Memory
    #: The bus address of the hardware, such as "0000:c1:00.0"; empty if it has none.
    id: str = ""
    #: The default one first.
    buffer_types: tuple[BufferTypeInfo, ...] = ()
    #: Named facts, such as the instruction set.
    features: Mapping[str, str] = field(default_factory=dict)
    #: Optional parts that are unavailable, by name, and the reasons.
    missing: Mapping[str, str] = field(default_factory=dict)
    #: The reason why the device is lost; empty unless it is.
    lost: str = ""


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """A backend of a server's registry."""

    name: str
    #: Its source: "built in", "entry point of PACKAGE", "module NAME", or a file's path.
    origin: str = "built in"
    contract_version: int = 0
    #: Names of its devices.
    devices: tuple[str, ...] = ()
    #: The reason why it has none.
    why: str = ""
    features: Mapping[str, str] = field(default_factory=dict)
    #: The version of its package, or of its module; empty if it has none.
    version: str = ""


@dataclass(frozen=True, slots=True)
class BackendUse:
    """A backend, and the number of sessions that use its devices."""

    backend: BackendInfo
    sessions: int = 0


@dataclass(frozen=True, slots=True)
class DeviceList:
    """All devices of a server, by priority, and the backends behind them."""

    devices: tuple[DeviceInfo, ...]
    backends: tuple[BackendInfo, ...] = ()
    server: str = ""
    #: Facts of the server's process, as ListDevicesResponse.facts names them; may be empty.
    facts: Mapping[str, str] = field(default_factory=dict)
    #: The members of its pool, if it is a head.
    members: tuple[MemberInfo, ...] = ()

    @property
    def unavailable(self) -> tuple[BackendInfo, ...]:
        """The backends that could not start."""
        return tuple(one for one in self.backends if one.why)


class OpPath(Enum):
    """The way in which a device computes a node. The values are those of device.proto."""

    #: Not requested, or unknown.
    UNKNOWN = 0
    #: It computes nothing: the result is a view.
    VIEW = 1
    #: By the op's definition.
    DEFINITION = 2
    #: By the op's definition, with the matrix products of a BLAS library.
    BLAS = 3
    #: By a kernel of its own.
    KERNEL = 4


@dataclass(frozen=True, slots=True)
class OpQuery:
    """A node in a query about a device's support. Attributes are complete."""

    op: str
    operands: tuple[TensorType, ...]
    result: TensorType
    attributes: Mapping[str, Any] = field(default_factory=dict)
    #: True if the answer must include the op path.
    op_path: bool = False


@dataclass(frozen=True, slots=True)
class OpAnswer:
    """A device's answer to an `OpQuery`."""

    #: The reason why the device cannot run the node; empty if it can.
    why_not: str = ""
    #: True if the node is worth fetching its weights from host memory.
    offload: bool = False
    #: The op path, if it was requested and the device can run the node.
    op_path: OpPath = OpPath.UNKNOWN


@dataclass(frozen=True, slots=True)
class PlacementInfo:
    """The memory that a list of tensors needs in a buffer type."""

    #: The size of each tensor, padding included.
    tensor_bytes: tuple[int, ...]
    #: The size of each buffer.
    buffer_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """A daemon's measurement of its link to another daemon."""

    #: The reason why it is unreachable; None if it is reachable.
    error: HeliographError | None = None
    #: The incarnation of the daemon that answered.
    incarnation: bytes = b""
    #: 0: no answer.
    round_trip_seconds: float = 0.0
    #: In each direction, while as much goes the other way; 0: not measured.
    bytes_per_second: float = 0.0


class MemberState(Enum):
    """The state of a member of a pool."""

    #: It has not answered yet, or not as a member must; the head retries.
    JOINING = 1
    #: Its devices are available.
    READY = 2
    #: It was ready and no longer answers; the head retries.
    LOST = 3
    #: It drains: plans that use its devices go on, and new ones avoid them.
    DRAINING = 4
    #: Its connection broke, and the head connects again: work that needs it waits, and new plans avoid
    #: it.
    AWAY = 5


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """A member of a pool."""

    #: The prefix of its devices' names: NAME/DEVICE.
    name: str
    #: The address at which the head reaches it.
    address: str
    state: MemberState
    #: Unless it is ready: the reason.
    why: str = ""
    #: Names of its devices; none while it is joining or lost.
    devices: tuple[str, ...] = ()
    #: Its program and version; empty unless it is ready and the head reports it.
    server: str = ""
    #: Unless it is ready: what to do about it; may be empty.
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """The link by which daemon `a` of a pool fetches values from `b`; placement uses its costs."""

    #: The member that fetches; empty: the head itself.
    a: str
    #: The member that it fetches from.
    b: str
    #: Of an empty message.
    round_trip_seconds: float
    #: Of payload.
    bytes_per_second: float
    #: True if measured; an assumed value otherwise.
    round_trip_measured: bool = False
    bandwidth_measured: bool = False
    #: True if `a` can fetch values from `b`; if not, the head relays them. None: not known yet.
    reachable: bool | None = None
    #: If it cannot: the reason, and the time for which that has been so (0: not known).
    why: str = ""
    unreachable_seconds: float = 0.0

    @property
    def measured(self) -> bool:
        """True if both the round trip and the bandwidth are measured."""
        return self.round_trip_measured and self.bandwidth_measured


@dataclass(frozen=True, slots=True)
class ReplacedDevice:
    """A device that left, and the one that has its place in a session."""

    name: str
    device: str


@dataclass(frozen=True, slots=True)
class DeviceChange:
    """Devices of a member that a head gained or lost, or the begin or end of the server's drain."""

    member: str
    appeared: tuple[DeviceInfo, ...] = ()
    #: Names of lost devices, and the reason.
    lost: tuple[str, ...] = ()
    why: str = ""
    #: The incarnations of all daemons behind the head after the change.
    daemons: tuple[bytes, ...] = ()
    #: True while the server drains.
    draining: bool = False
    #: Devices whose place in the session others have taken.
    replaced: tuple[ReplacedDevice, ...] = ()
