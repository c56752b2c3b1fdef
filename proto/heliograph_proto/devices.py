"""Daemons of a pool, and what happens to their devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from heliograph_proto.errors import HeliographError
from heliograph_proto.types import TensorType


class DeviceType(Enum):
    """The kind of hardware behind a device. The values are those of device.proto."""

    CPU = 1
    GPU = 2
    INTEGRATED_GPU = 3
    ACCELERATOR = 4


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a device can do beyond the minimum."""

    async_: bool = True
    host_buffer: bool = False
    buffer_from_host: bool = False
    events: bool = True


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a device that Heliograph may use. Both 0: the device does not tell."""

    free_bytes: int = 0
    total_bytes: int = 0


class Usage(Enum):
    """What a buffer is for; a hint to backends and the scheduler. The values are those of command.proto."""

    ANY = 0
    WEIGHTS = 1
    COMPUTE = 2


class CopyPath(Enum):
    """Who copied the bytes of a tensor to another. The values are those of command.proto."""

    #: The destination's device fetched them.
    DESTINATION = 1
    #: The source's device brought them.
    SOURCE = 2
    #: Neither knew how: they went through host memory.
    HOST = 3


class BufferRole(Enum):
    """Which of a device's buffer types one is. The values are those of device.proto."""

    DEFAULT = 1
    #: Host memory that the device reaches fast.
    HOST = 2
    EXTRA = 3


@dataclass(frozen=True, slots=True)
class BufferTypeInfo:
    """How and where a device makes memory."""

    name: str
    role: BufferRole
    alignment_bytes: int
    max_size_bytes: int
    is_host: bool
    #: Names of the devices whose kernels read such memory in place.
    readable_by: tuple[str, ...] = ()
    #: Whether a tensor may take more than its own bytes.
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
    #: Where the hardware is, such as "0000:c1:00.0"; empty where it has no such place.
    id: str = ""
    #: The default one first.
    buffer_types: tuple[BufferTypeInfo, ...] = ()
    #: Named facts, such as the instruction set.
    features: Mapping[str, str] = field(default_factory=dict)
    #: Optional parts that it does not offer here, by name, and why.
    missing: Mapping[str, str] = field(default_factory=dict)
    #: Why the device is gone, in words; empty while it is there.
    lost: str = ""


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """A backend of a server's registry."""

    name: str
    #: Where it comes from: "built in", "entry point of PACKAGE", "module NAME", or a file's path.
    origin: str = "built in"
    contract_version: int = 0
    #: Names of its devices.
    devices: tuple[str, ...] = ()
    #: Why it has none, in words.
    why: str = ""
    features: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeviceList:
    """All devices of a server, by priority, and the backends behind them."""

    devices: tuple[DeviceInfo, ...]
    backends: tuple[BackendInfo, ...] = ()
    server: str = ""
    #: Of the server's process, as ListDevicesResponse.facts names them; empty where it tells none.
    facts: Mapping[str, str] = field(default_factory=dict)
    #: Of its pool, if it is the head of one.
    members: tuple[MemberInfo, ...] = ()

    @property
    def unavailable(self) -> tuple[BackendInfo, ...]:
        """The backends that could not start."""
        return tuple(one for one in self.backends if one.why)


class OpPath(Enum):
    """How a device computes a node. The values are those of device.proto."""

    #: Not asked for, or the device does not tell.
    UNKNOWN = 0
    #: It computes nothing: the result is a view.
    VIEW = 1
    #: The op's definition.
    DEFINITION = 2
    #: The op's definition, whose matrix products are those of a BLAS library.
    BLAS = 3
    #: A kernel of its own.
    KERNEL = 4


@dataclass(frozen=True, slots=True)
class OpQuery:
    """A node about which a device is asked. Attributes are complete."""

    op: str
    operands: tuple[TensorType, ...]
    result: TensorType
    attributes: Mapping[str, Any] = field(default_factory=dict)
    #: Whether the answer is to say by which path the device computes it.
    op_path: bool = False


@dataclass(frozen=True, slots=True)
class OpAnswer:
    """What a device says of it."""

    #: Why it cannot run it, in words; empty if it can.
    why_not: str = ""
    #: Whether fetching weights from host memory for it pays.
    offload: bool = False
    #: How it computes it, where that was asked for and it can.
    op_path: OpPath = OpPath.UNKNOWN


@dataclass(frozen=True, slots=True)
class PlacementInfo:
    """What a list of tensors would take of a buffer type."""

    #: Of each tensor, padding included.
    tensor_bytes: tuple[int, ...]
    #: Of each buffer.
    buffer_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a daemon has measured of its way to another one."""

    #: Why it cannot be reached; None: it can.
    error: HeliographError | None = None
    #: Who answered there.
    incarnation: bytes = b""
    #: 0: there was no answer.
    round_trip_seconds: float = 0.0
    #: Each way, while as many go the other way; 0: not measured.
    bytes_per_second: float = 0.0


class MemberState(Enum):
    """Where a daemon of a pool is in its life."""

    #: It has not answered yet, or not as a member must; it is tried again.
    JOINING = 1
    #: Its devices are there.
    READY = 2
    #: It was ready, and does not answer any more; it is tried again.
    LOST = 3


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """A daemon whose devices are, or were to be, among a head's."""

    #: Its devices are named NAME/DEVICE.
    name: str
    #: Where the head reaches it.
    address: str
    state: MemberState
    #: Unless it is ready: why not, in words.
    why: str = ""
    #: Names of its devices; none unless it is ready.
    devices: tuple[str, ...] = ()
    #: Its program and version; empty unless it is ready, and where the head does not tell.
    server: str = ""
    #: Unless it is ready: what to do about that, in words; may be empty.
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """From one daemon of a pool to another one, which it fetches values from; what placement goes by."""

    #: The member that fetches; empty: the head itself.
    a: str
    #: The member from which it does.
    b: str
    #: Of an empty message, there and back.
    round_trip_seconds: float
    #: Of payload.
    bytes_per_second: float
    #: Whether these two were measured; else they are assumed.
    round_trip_measured: bool = False
    bandwidth_measured: bool = False
    #: Whether `a` can fetch values from `b`; if not, they go through the head. None: nobody knows yet.
    reachable: bool | None = None
    #: If it cannot: why, in words.
    why: str = ""

    @property
    def measured(self) -> bool:
        """Whether nothing of it is assumed."""
        return self.round_trip_measured and self.bandwidth_measured


@dataclass(frozen=True, slots=True)
class DeviceChange:
    """Devices of a member came to a head, or are gone from it."""

    member: str
    appeared: tuple[DeviceInfo, ...] = ()
    #: Names of those that are gone, and why, in words.
    lost: tuple[str, ...] = ()
    why: str = ""
    #: The incarnations of all daemons behind the head, from now on.
    daemons: tuple[bytes, ...] = ()
