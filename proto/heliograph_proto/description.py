"""What servers, devices and plans say of themselves: frozen dataclasses without protobuf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from heliograph_proto.errors import HeliographError
from heliograph_proto.limits import Limits
from heliograph_proto.types import TensorType

if TYPE_CHECKING:
    from heliograph_proto.membership import MemberInfo


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


class CopyRoad(Enum):
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


class OpRoad(Enum):
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
    #: Whether the answer is to say by which road the device computes it.
    road: bool = False


@dataclass(frozen=True, slots=True)
class OpAnswer:
    """What a device says of it."""

    #: Why it cannot run it, in words; empty if it can.
    why_not: str = ""
    #: Whether fetching weights from host memory for it pays.
    offload: bool = False
    #: How it computes it, where that was asked for and it can.
    road: OpRoad = OpRoad.UNKNOWN


@dataclass(frozen=True, slots=True)
class PlacementInfo:
    """What a list of tensors would take of a buffer type."""

    #: Of each tensor, padding included.
    tensor_bytes: tuple[int, ...]
    #: Of each buffer.
    buffer_bytes: tuple[int, ...]


class Cause(Enum):
    """Why a node runs where it runs; after ggml's causes. The values are those of plan.proto."""

    USER = 1
    PLACED_RESULT = 2
    PLACED_VIEW_SOURCE = 3
    INPUT = 4
    WEIGHT = 5
    OFFLOAD = 6
    SWEPT = 7
    BEST_INPUTS = 8
    UPGRADED = 9
    FROM_VIEW = 10
    FROM_CONSUMER = 11
    FIRST_THAT_CAN = 12
    DIVIDED_WEIGHT = 13
    PREDICTED = 14

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """Where a node runs."""

    split: int
    cause: Cause
    #: Where `names_operand`: the place of the operand.
    operand: int = 0
    #: The number, from 1, of the set of its split's nodes that run at the same time; 0: it runs alone.
    concurrent: int = 0

    @property
    def names_operand(self) -> bool:
        """Whether an operand is the cause."""
        return self.cause in (Cause.WEIGHT, Cause.OFFLOAD, Cause.DIVIDED_WEIGHT)

    @property
    def why(self) -> str:
        """The cause in words."""
        return f"{self.cause} of operand {self.operand}" if self.names_operand else str(self.cause)


@dataclass(frozen=True, slots=True)
class WeightShare:
    """Rows of a weight that lie on a device; all of them where something reads it as a whole."""

    #: The weight's number.
    leaf: int
    #: The place of the device.
    device: int
    first: int
    count: int
    size_bytes: int
    #: Whether they are columns: those of a weight that `matmul` reads.
    are_columns: bool = False


@dataclass(frozen=True, slots=True)
class NodePart:
    """A product with some rows of a weight."""

    #: The product's number.
    node: int
    split: int
    #: The place of the rows among the report's weights.
    share: int


class Way(Enum):
    """How a value gets from a device of one daemon to one of another. The values are those of plan.proto."""

    #: Both are of one host, or the server does not tell.
    WITHIN = 0
    DIRECT = 1
    #: The head fetches and brings it, since they cannot reach each other.
    RELAYED = 2
    #: The head copies it between two splits.
    THROUGH_HEAD = 3

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class CopyReport:
    """A value that is copied before a split runs."""

    value: int
    #: The place of the device that it comes from.
    source: int
    size_bytes: int
    #: Whether no other rows of it are copied than those that the run reads.
    rows_only: bool = False
    #: Whether it is copied while the split before on its device computes.
    ahead: bool = False
    #: How it travels between hosts.
    way: Way = Way.WITHIN
    #: By itself, as it was expected; 0: nobody knew.
    predicted_us: float = 0.0


@dataclass(frozen=True, slots=True)
class SplitReport:
    """Consecutive nodes on one device."""

    device: int
    copies: tuple[CopyReport, ...]
    steps: int
    compute_bytes: int
    #: Of the last run, in microseconds; 0 before the first.
    copy_us: float = 0.0
    compute_us: float = 0.0
    #: After the run did. Splits of different devices may overlap.
    began_us: float = 0.0
    #: What the device says of how it runs, in words.
    note: str = ""
    #: As they were expected when the plan was made; 0: nobody knew.
    predicted_copy_us: float = 0.0
    predicted_compute_us: float = 0.0
    predicted_began_us: float = 0.0


@dataclass(frozen=True, slots=True)
class LinkReport:
    """The way between two hosts, by which values are copied."""

    #: Names of hosts; empty: the server's own.
    source: str
    destination: str
    round_trip_us: float
    bytes_per_s: float
    #: Whether both were measured; else what was not is assumed.
    is_measured: bool = False


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """What a plan takes of a device."""

    name: str
    weights_bytes: int = 0
    variables_bytes: int = 0
    #: Intermediate results, and values that lie between splits.
    compute_bytes: int = 0
    #: What those would take if each had memory of its own.
    results_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan, explained: its nodes in the graph's order, its splits in theirs, its devices by priority."""

    nodes: tuple[NodePlacement, ...]
    splits: tuple[SplitReport, ...]
    devices: tuple[DeviceShare, ...]
    #: Where the rows of divided weights lie, and the products with them.
    weights: tuple[WeightShare, ...] = ()
    parts: tuple[NodePart, ...] = ()
    #: Of a run that is alone, as it was expected when the plan was made; 0: nobody knew.
    predicted_us: float = 0.0
    #: The ways that its copies take, as they were known then.
    links: tuple[LinkReport, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceEstimate:
    """What a graph would take of one device, in bytes."""

    name: str
    #: Of each buffer for intermediate results, and for values between splits.
    compute_bytes: tuple[int, ...]
    weights_bytes: int
    variables_bytes: int
    #: What is kept beside weights, such as their packed form.
    extra_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.compute_bytes) + self.weights_bytes + self.variables_bytes + self.extra_bytes


@dataclass(frozen=True, slots=True)
class PlanEstimate:
    """What a graph would take of devices, in bytes: all together, and of each."""

    #: That of the last split.
    device: str
    #: Of each buffer for intermediate results.
    compute_bytes: tuple[int, ...]
    weights_bytes: int
    variables_bytes: int
    #: What is kept beside weights, such as their packed form.
    extra_bytes: int
    #: Blocks that could be reserved; empty: its plans take memory of their own.
    arena_bytes: tuple[int, ...] = ()
    #: By priority, of those that take part.
    devices: tuple[DeviceEstimate, ...] = ()

    @property
    def total_bytes(self) -> int:
        return sum(self.compute_bytes) + self.weights_bytes + self.variables_bytes + self.extra_bytes


@dataclass(frozen=True, slots=True)
class SharedMemoryOffer:
    """Where a client asks for memory that both sides map: one of the two is set."""

    #: A name in Linux's abstract namespace.
    abstract_name: str = ""
    #: Appended to the path of the socket by which the client came.
    path_suffix: str = ""


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
    #: None: the server shares no memory with this client.
    shared_memory: SharedMemoryOffer | None = None
    #: Whether devices may come and go: the server is the head of a pool.
    is_head: bool = False
    #: The incarnations of all daemons whose devices are among these, through other heads too.
    daemons: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerTraffic:
    """What has gone between a daemon and others since it started, as it counts it."""

    #: Bytes of tensors that other daemons pulled from it, or that it pushed.
    sent_bytes: int = 0
    #: That it pulled from others, or was pushed.
    received_bytes: int = 0
    sent_values: int = 0
    received_values: int = 0
    #: That it took from one daemon to another, which cannot reach each other.
    relayed_bytes: int = 0
    relayed_values: int = 0
    #: Capabilities that it did not accept.
    refused: int = 0


@dataclass(frozen=True, slots=True)
class Probed:
    """What a daemon has measured of its way to another one."""

    #: Why it cannot be reached; None: it can.
    error: HeliographError | None = None
    #: Who answered there.
    incarnation: bytes = b""
    #: 0: there was no answer.
    round_trip_seconds: float = 0.0
    #: Each way, while as many go the other way; 0: not measured.
    bytes_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of tensors that a session has carried by `set` and `get`, as one side of it counts them."""

    #: Into tensors.
    written_bytes: int = 0
    #: Out of tensors.
    read_bytes: int = 0
    #: Every copy that this side's code made of a byte on its way in, and out; those that gRPC and the kernel
    #: make are not among them.
    copied_in_bytes: int = 0
    copied_out_bytes: int = 0
    #: Of contents, such as weights, that came to this side; and what of them was passed on as it came.
    content_bytes: int = 0
    relayed_bytes: int = 0
    #: What has gone between the server and other daemons, for all sessions together, if it says that.
    peers: PeerTraffic = PeerTraffic()

    def plus(self, other: Traffic) -> Traffic:
        """Both together."""
        return Traffic(
            self.written_bytes + other.written_bytes,
            self.read_bytes + other.read_bytes,
            self.copied_in_bytes + other.copied_in_bytes,
            self.copied_out_bytes + other.copied_out_bytes,
            self.content_bytes + other.content_bytes,
            self.relayed_bytes + other.relayed_bytes,
            self.peers,
        )


@dataclass(frozen=True, slots=True)
class ContentOffer:
    """A daemon that takes a content from whoever shows the ticket; see ContentOffer in plan.proto."""

    digest: bytes
    address: str
    incarnation: bytes
    ticket: bytes

    def __repr__(self) -> str:
        # Not the ticket, which is a secret.
        return f"<ContentOffer of {self.digest.hex()[:8]} at {self.address}>"


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
    device: str = ""


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
    #: All that run a part of it, by priority.
    devices: tuple[str, ...] = ()
    splits: int = 1
    #: Of one run, between devices.
    copied_bytes: int = 0
    #: How many of its runs may be under way at once.
    pipeline: int = 1
    #: Of `compute_bytes`, those that lie in the reservation.
    reserved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor in a model's file on the server."""

    name: str
    type: TensorType
    #: Of its bytes: what a graph's weight names.
    digest: bytes


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model's file on the server."""

    #: Its path in the models' folder.
    name: str
    tensors: tuple[ModelTensor, ...]
    #: Tensors of types that Heliograph has not, or without elements: "name: type shape".
    left_out: tuple[str, ...] = ()
