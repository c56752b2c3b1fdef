"""What servers, devices and plans say of themselves: frozen dataclasses without protobuf."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from heliograph_proto.limits import Limits
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


class CopyRoad(Enum):
    """Who copied the bytes of a tensor to another. The values are those of command.proto."""

    #: The destination's device fetched them.
    DESTINATION = 1
    #: The source's device brought them.
    SOURCE = 2
    #: Neither knew how: they went through host memory.
    HOST = 3


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device."""

    name: str
    description: str
    type: DeviceType
    backend: str
    capabilities: Capabilities
    memory: Memory


@dataclass(frozen=True, slots=True)
class UnavailableBackend:
    """A backend that could not start, and why."""

    backend: str
    why: str


@dataclass(frozen=True, slots=True)
class DeviceList:
    """All devices of a server, by priority."""

    devices: tuple[DeviceInfo, ...]
    unavailable_backends: tuple[UnavailableBackend, ...] = ()
    server: str = ""


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What the handshake agreed on."""

    #: The secret that names the session: not for logs.
    session: bytes = field(repr=False)
    version: int
    features: tuple[str, ...]
    limits: Limits
    incarnation: bytes
    server: str
    devices: tuple[DeviceInfo, ...]
    lease_ms: int = 0


@dataclass(frozen=True, slots=True)
class Port:
    """A name and the type of what is bound to it."""

    name: str
    type: TensorType


@dataclass(frozen=True, slots=True)
class VariablePort:
    """A variable and the handle of its tensor."""

    port: Port
    tensor: int


@dataclass(frozen=True, slots=True)
class PlanInfo:
    """What a compiled plan is; inputs and outputs are numbered by their places here."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    variables: tuple[VariablePort, ...]
    device: str
    compute_bytes: int
    steps: int
    duration_ms: float = 0.0
