"""Plans: the requests and results of compiling, estimating and reserving, as frozen dataclasses.

They include the partitions of a graph that runs on several daemons, and the edges between them.
plan.proto documents every field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from hmac import compare_digest

from heliograph_proto.errors import HeliographError, InvalidArgumentError, MemberLostError
from heliograph_proto.graph import Graph
from heliograph_proto.types import TensorType


class Cause(Enum):
    """The reason for a node's placement, after ggml's causes. The values are plan.proto's."""

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

    #: Each is one object, so its identity is a hash, and a quick one.
    __hash__ = object.__hash__

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """The placement of a node."""

    split: int
    cause: Cause
    #: The place of the operand if `names_operand`.
    operand: int = 0
    #: The number, from 1, of its set of nodes in the split that run concurrently; 0: it runs alone.
    concurrent: int = 0
    #: The number, from 1, of its step in the split: nodes of one step are computed together. 0:
    #: before the first run, or the device does not tell.
    step: int = 0
    #: The mean time of that step in the last measured runs, in microseconds; 0: unknown.
    step_us: float = 0.0

    @property
    def names_operand(self) -> bool:
        """True if an operand is the cause."""
        return self.cause in (Cause.WEIGHT, Cause.OFFLOAD, Cause.DIVIDED_WEIGHT)

    @property
    def why(self) -> str:
        """The cause in words."""
        return f"{self.cause} of operand {self.operand}" if self.names_operand else str(self.cause)


@dataclass(frozen=True, slots=True)
class WeightShare:
    """Rows of a weight on a device; all of them if some node reads the whole weight."""

    #: The weight's number.
    leaf: int
    #: The place of the device.
    device: int
    first: int
    count: int
    size_bytes: int
    #: True if they are columns: those of a weight that `matmul` reads.
    are_columns: bool = False


@dataclass(frozen=True, slots=True)
class NodePart:
    """A product with some rows of a weight."""

    #: The product's number.
    node: int
    split: int
    #: The place of the rows among the report's weights.
    share: int


class Route(Enum):
    """The route of a value between devices of two daemons. The values are those of plan.proto."""

    #: Both devices belong to one host, or the server does not report routes.
    WITHIN = 0
    DIRECT = 1
    #: The head carries it, since the two cannot reach each other.
    RELAYED = 2
    #: The head copies it between two splits.
    THROUGH_HEAD = 3

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class CopyReport:
    """A value to copy before a split runs."""

    value: int
    #: The place of the device that it comes from.
    source: int
    size_bytes: int
    #: True if only the rows that the run reads are copied.
    rows_only: bool = False
    #: True if it is copied while the previous split on its device computes.
    ahead: bool = False
    #: The route between hosts.
    route: Route = Route.WITHIN
    #: The predicted time of this copy alone; 0: unknown.
    predicted_us: float = 0.0


@dataclass(frozen=True, slots=True)
class SplitReport:
    """Consecutive nodes on one device."""

    device: int
    copies: tuple[CopyReport, ...]
    steps: int
    compute_bytes: int
    #: The times of the last run, in microseconds; 0 before the first.
    copy_us: float = 0.0
    compute_us: float = 0.0
    #: The start, relative to the start of the run. Splits of different devices may overlap.
    began_us: float = 0.0
    #: The device's note on how it runs the split.
    note: str = ""
    #: The predictions made with the plan; 0: unknown.
    predicted_copy_us: float = 0.0
    predicted_compute_us: float = 0.0
    predicted_began_us: float = 0.0
    #: The number of steps by which `StoredValue` counts; 0: the server does not tell.
    memory_steps: int = 0


@dataclass(frozen=True, slots=True)
class LinkReport:
    """The link between two hosts by which values are copied."""

    #: Names of hosts; empty: the server's own.
    source: str
    destination: str
    round_trip_us: float
    bytes_per_s: float
    #: True if both were measured; else at least one is assumed.
    is_measured: bool = False


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """The memory that a plan takes of a device."""

    name: str
    weights_bytes: int = 0
    variables_bytes: int = 0
    #: Intermediate results, and values between splits.
    compute_bytes: int = 0
    #: The bytes that those would take without sharing memory; a view takes none.
    results_bytes: int = 0


class MemoryUse(Enum):
    """The use of a block of a plan's memory. The values are those of plan.proto."""

    RESULTS = 1
    CONSTANTS = 2
    BETWEEN = 3

    def __str__(self) -> str:
        return {1: "results", 2: "constants", 3: "between splits"}[self.value]


@dataclass(frozen=True, slots=True)
class MemoryBlock:
    """A block of memory that a plan computes in."""

    #: The place of the device.
    device: int
    size_bytes: int
    use: MemoryUse = MemoryUse.RESULTS


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A value in a block; values that share bytes live in different steps.

    Steps are counted from 0 over all splits, in their order; steps that run at the same time have
    one number.
    """

    value: int
    #: The place of the block.
    block: int
    offset_bytes: int
    size_bytes: int
    #: The first and the last step that need it.
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class PlanReport:
    """An explained plan: nodes in graph order, splits in run order, devices by priority."""

    nodes: tuple[NodePlacement, ...]
    splits: tuple[SplitReport, ...]
    devices: tuple[DeviceShare, ...]
    #: The shares of divided weights, and the products with them.
    weights: tuple[WeightShare, ...] = ()
    parts: tuple[NodePart, ...] = ()
    #: The prediction, made with the plan, for a run that has the devices to itself; 0: unknown.
    predicted_us: float = 0.0
    #: The links of its copies, as known when the plan was made.
    links: tuple[LinkReport, ...] = ()
    #: The memory that a run computes in, and the values in it; empty: the server does not tell.
    blocks: tuple[MemoryBlock, ...] = ()
    stored: tuple[StoredValue, ...] = ()


@dataclass(frozen=True, slots=True)
class RunTime:
    """Runs that took about as long."""

    took_us: float
    runs: int


@dataclass(frozen=True, slots=True)
class PlanStatus:
    """The status of a plan at one moment. Totals are since it was compiled."""

    session_number: int
    plan: int
    devices: tuple[str, ...] = ()
    nodes: int = 0
    splits: int = 0
    #: Runs so far; each step of a loop is one.
    runs: int = 0
    #: How many of them took how long, in ascending order.
    times: tuple[RunTime, ...] = ()
    took_us: float = 0.0
    predicted_us: float = 0.0
    #: The time that runs waited in the queue of their device, and for their turn there.
    waited_us: float = 0.0
    waiting: int = 0
    running: int = 0
    #: Of a loop under way: complete steps, and the most that it may have; 0: there is none.
    loop_step: int = 0
    loop_steps: int = 0
    #: Device memory between runs, without weights and variables.
    kept_bytes: int = 0
    #: The reason why it cannot run; empty otherwise.
    lost: str = ""
    #: If asked for: where it runs and the times of the last run, without nodes.
    report: PlanReport | None = None


@dataclass(frozen=True, slots=True)
class PlanList:
    """The plans of a daemon, or some of them, at one moment."""

    server: str
    incarnation: bytes
    uptime_seconds: float
    plans: tuple[PlanStatus, ...] = ()
    #: The number of plans that are left out.
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class DeviceEstimate:
    """The bytes that a graph would take of one device."""

    name: str
    #: The size of each buffer for intermediate results and values between splits.
    compute_bytes: tuple[int, ...]
    weights_bytes: int
    variables_bytes: int
    #: Data that devices keep beside weights.
    extra_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.compute_bytes) + self.weights_bytes + self.variables_bytes + self.extra_bytes


@dataclass(frozen=True, slots=True)
class SplitEstimate:
    """Consecutive nodes of a graph that would run on one device."""

    device: str
    #: The numbers of its nodes, in order.
    nodes: tuple[int, ...]
    #: The bytes that would be copied to it in each run before it begins.
    copied_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PlanEstimate:
    """The bytes that a graph would take of devices, in total and of each, and its splits."""

    #: The device of the last split.
    device: str
    #: The size of each buffer for intermediate results.
    compute_bytes: tuple[int, ...]
    weights_bytes: int
    variables_bytes: int
    #: Data that devices keep beside weights.
    extra_bytes: int
    #: The sizes of blocks to reserve; empty: its plans take memory of their own.
    arena_bytes: tuple[int, ...] = ()
    #: The devices that take part, by priority.
    devices: tuple[DeviceEstimate, ...] = ()
    #: The splits, in the order of their runs.
    splits: tuple[SplitEstimate, ...] = ()

    @property
    def total_bytes(self) -> int:
        return sum(self.compute_bytes) + self.weights_bytes + self.variables_bytes + self.extra_bytes


@dataclass(frozen=True, slots=True)
class ContentOffer:
    """A daemon that accepts a content with this ticket; see ContentOffer in plan.proto."""

    digest: bytes
    address: str
    incarnation: bytes
    ticket: bytes

    def __repr__(self) -> str:
        # The ticket is a secret.
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
    #: True if this compile created it, with zeros.
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class PlanInfo:
    """A compiled plan; inputs and outputs are numbered by their places here."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    variables: tuple[VariablePort, ...]
    device: str
    compute_bytes: int
    steps: int
    duration_ms: float = 0.0
    #: All devices that run a part of it, by priority.
    devices: tuple[str, ...] = ()
    splits: int = 1
    #: Copied between devices in one run.
    copied_bytes: int = 0
    #: The number of its runs that may be in flight at once.
    pipeline: int = 1
    #: The part of `compute_bytes` that lies in the reservation.
    reserved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RowSplit:
    """Names of devices and the fraction of the rows that each holds, in their order.

    The fractions are relative to their sum, which need not be 1.
    """

    #: The device that joins the parts of a product.
    main: str
    fractions: tuple[tuple[str, float], ...]


def check_fractions(fractions: Sequence[tuple[str, float]]) -> None:
    """Check that fractions are finite, 0 or more, not all 0, and one a device.

    Raises InvalidArgumentError.
    """
    names: set[str] = set()
    for name, fraction in fractions:
        if not (math.isfinite(fraction) and fraction >= 0):
            raise InvalidArgumentError(
                f"device {name[:64]!r} has the fraction {fraction} of a weight's rows",
                advice="fractions are finite and 0 or more, such as 0.6 and 0.4",
            )
        if name in names:
            raise InvalidArgumentError(f"device {name[:64]!r} has two fractions of a weight's rows")
        names.add(name)
    if not 0 < sum(fraction for _, fraction in fractions) < math.inf:
        raise InvalidArgumentError(
            "the sum of the fractions of a weight's rows is 0 or not finite",
            advice="give each device its fraction, such as {'cpu0': 0.6, 'cpu1': 0.4}",
        )


EDGE_BYTES = 16
SECRET_BYTES = 32
CAPABILITY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Edge:
    """The name and the secret of an edge, known to both daemons."""

    name: bytes
    secret: bytes

    def __post_init__(self) -> None:
        if len(self.name) != EDGE_BYTES or len(self.secret) != SECRET_BYTES:
            raise InvalidArgumentError(
                f"an edge has a name of {EDGE_BYTES} bytes and a secret of {SECRET_BYTES}, "
                f"not {len(self.name)} and {len(self.secret)}"
            )

    def __repr__(self) -> str:
        return f"<Edge {self.name.hex()[:8]}>"

    def capability(self, run: int) -> bytes:
        """Return the capability, valid once, to pull or push the value of a run."""
        message = self.name + run.to_bytes(8, "little")
        return blake2b(message, digest_size=CAPABILITY_BYTES, key=self.secret).digest()

    def allows(self, run: int, capability: bytes) -> bool:
        """True if this is the capability of the run. Takes constant time."""
        return compare_digest(self.capability(run), capability)


@dataclass(frozen=True, slots=True)
class PeerSource:
    """A daemon to pull values from, in one of its incarnations."""

    address: str
    incarnation: bytes


def lost(source: PeerSource, why: str) -> MemberLostError:
    """Return the error for a daemon found lost in an exchange of values."""
    return MemberLostError(
        f"{_loss_of(source)}: {why}",
        advice="compile for the remaining members, or wait until it is back",
    )


def is_loss(error: HeliographError, source: PeerSource) -> bool:
    """True if an error, perhaps from another daemon, is a `lost` error of this daemon."""
    return isinstance(error, MemberLostError) and _loss_of(source) in error.message


def _loss_of(source: PeerSource) -> str:
    return f"the member at {source.address} is lost"


@dataclass(frozen=True, slots=True)
class Arrival:
    """An input of a partition, by its value number, that another daemon computes during the run."""

    leaf: int
    edge: Edge
    #: None: the value is pushed here.
    source: PeerSource | None = None


@dataclass(frozen=True, slots=True)
class Departure:
    """A node of a partition whose result another daemon reads during the run."""

    node: int
    edge: Edge


@dataclass(frozen=True, slots=True)
class LoopArrival:
    """A value that another daemon's step of a loop makes for the next step here."""

    edge: Edge
    source: PeerSource


@dataclass(frozen=True, slots=True)
class Partition:
    """The values that a partition exchanges with other partitions during a run."""

    arrivals: tuple[Arrival, ...] = ()
    departures: tuple[Departure, ...] = ()
    #: Nodes with which a split begins.
    begins: frozenset[int] = frozenset()
    #: Edges for values between two steps of a loop, which the loop names by their places.
    loop_arrivals: tuple[LoopArrival, ...] = ()
    loop_departures: tuple[Edge, ...] = ()

    @property
    def loop_edges(self) -> tuple[int, int]:
        """The numbers of arrivals and of departures between two steps of a loop."""
        return len(self.loop_arrivals), len(self.loop_departures)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options that compiling, estimating and reserving share. Hashable."""

    #: Names of devices by priority; empty: the server's first.
    devices: tuple[str, ...] = ()
    #: True if nodes may share kernels.
    fusion: bool = True
    #: The maximum threads of a run; 0: all.
    threads: int = 0
    #: (device, numbers of the nodes that must run there).
    pins: tuple[tuple[str, tuple[int, ...]], ...] = ()
    #: (device, maximum bytes).
    memory: tuple[tuple[str, int], ...] = ()
    #: The number of runs that may be in flight at once.
    pipeline: int = 1
    #: (division of rows over devices, numbers of the weights divided so).
    splits: tuple[tuple[RowSplit, tuple[int, ...]], ...] = ()
    #: (device, name of its buffer type).
    buffer_types: tuple[tuple[str, str], ...] = ()
    #: Numbers of observed nodes.
    taps: tuple[int, ...] = ()
    #: The exchange of values with other partitions, if the graph is a partition.
    partition: Partition | None = None


@dataclass(frozen=True, slots=True)
class ReceivedGraph:
    """An encoded graph: its digest, its size, and a function that decodes it."""

    digest: bytes
    size_bytes: int
    #: Raises the decoding error.
    decode: Callable[[], Graph]
    #: As it came.
    encoded: bytes = b""


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """A graph to compile, and the handles that the plan uses."""

    #: The handle for the plan.
    plan: int
    graph: Graph | ReceivedGraph
    options: PlanOptions = PlanOptions()
    #: Handles of tensors by the numbers of the leaves bound to them.
    bindings: Mapping[int, int] = field(default_factory=dict)
    #: The handle of a plan whose memory the new one takes over; 0: none.
    updates: int = 0
    #: The handle of the reservation to place it in; 0: none.
    reservation: int = 0
    #: True if variables on a lost device start afresh.
    renews_lost: bool = False


@dataclass(frozen=True, slots=True)
class PlaceContentsRequest:
    """A compile request and the contents it lacks."""

    compile: CompileRequest
    missing_digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class EstimateRequest:
    """A graph to estimate; its weights need not be uploaded."""

    graph: Graph
    options: PlanOptions = PlanOptions()


@dataclass(frozen=True, slots=True)
class ReserveRequest:
    """Memory to reserve: for a graph, or blocks of the first device."""

    #: The handle for the reservation.
    reservation: int
    graph: Graph | None = None
    options: PlanOptions = PlanOptions()
    block_bytes: tuple[int, ...] = ()
