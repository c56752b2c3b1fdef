"""Plans: what is asked of a server that compiles, and what it answers, the same on both sides.

Among it the parts of a graph that run on several daemons at once, and the edges by which values go between
them. plan.proto has the meaning of every field.
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


class Route(Enum):
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
    route: Route = Route.WITHIN
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
class RowSplit:
    """Names of devices and what each has of the rows, in their order. The fractions need not add up to 1:
    each counts against their sum."""

    #: Where the parts of a product are joined.
    main: str
    fractions: tuple[tuple[str, float], ...]


def check_fractions(fractions: Sequence[tuple[str, float]]) -> None:
    """Raises InvalidArgumentError unless they are 0 or more, finite, not all 0, and each device has one."""
    names: set[str] = set()
    for name, fraction in fractions:
        if not (math.isfinite(fraction) and fraction >= 0):
            raise InvalidArgumentError(
                f"device {name[:64]!r} is to have the fraction {fraction} of a weight's rows",
                advice="fractions are finite and 0 or more, such as 0.6 and 0.4",
            )
        if name in names:
            raise InvalidArgumentError(f"device {name[:64]!r} has two fractions of a weight's rows")
        names.add(name)
    if not 0 < sum(fraction for _, fraction in fractions) < math.inf:
        raise InvalidArgumentError(
            "the fractions of a weight's rows add up to no finite number above 0",
            advice="say what each device is to have, such as {'cpu0': 0.6, 'cpu1': 0.4}",
        )


EDGE_BYTES = 16
SECRET_BYTES = 32
CAPABILITY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Edge:
    """The way of a value from one daemon to another, as both ends know it."""

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
        """What whoever gets or brings the value of a run shows, once."""
        message = self.name + run.to_bytes(8, "little")
        return blake2b(message, digest_size=CAPABILITY_BYTES, key=self.secret).digest()

    def allows(self, run: int, capability: bytes) -> bool:
        """Whether this is the capability of a run; takes the same time for any."""
        return compare_digest(self.capability(run), capability)


@dataclass(frozen=True, slots=True)
class PeerSource:
    """A daemon that values are pulled from, in one of its lives."""

    address: str
    incarnation: bytes


def lost(source: PeerSource, why: str) -> MemberLostError:
    """Whoever exchanges values with a daemon found it gone."""
    return MemberLostError(
        f"{_loss_of(source)}: {why}", advice="compile for the members that are left, or wait until it is back"
    )


def is_loss(error: HeliographError, source: PeerSource) -> bool:
    """Whether an error, perhaps from another daemon, is that it found this one gone (`lost`)."""
    return isinstance(error, MemberLostError) and error.message.startswith(_loss_of(source))


def _loss_of(source: PeerSource) -> str:
    return f"the member at {source.address} is lost"


@dataclass(frozen=True, slots=True)
class Arrival:
    """An input of a partition, by its value number, that another daemon makes during the run."""

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
class Partition:
    """How a part of a graph exchanges values with the other parts while it runs."""

    arrivals: tuple[Arrival, ...] = ()
    departures: tuple[Departure, ...] = ()
    #: Nodes with which a split begins.
    begins: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How a graph is compiled: what compiling, estimating and reserving share. Hashable."""

    #: Names of devices by priority; empty: the server's first.
    devices: tuple[str, ...] = ()
    #: Whether nodes may share kernels.
    fusion: bool = True
    #: The most that a run uses; 0: all.
    threads: int = 0
    #: Devices and the numbers of the nodes that must run there.
    pins: tuple[tuple[str, tuple[int, ...]], ...] = ()
    #: Devices and the most bytes of each.
    memory: tuple[tuple[str, int], ...] = ()
    #: How many runs may be under way at once.
    pipeline: int = 1
    #: How the rows of weights lie over devices, and the numbers of these weights.
    splits: tuple[tuple[RowSplit, tuple[int, ...]], ...] = ()
    #: Devices and the names of their buffer types.
    buffer_types: tuple[tuple[str, str], ...] = ()
    #: Numbers of the nodes that are observed.
    taps: tuple[int, ...] = ()
    #: How it exchanges values with other parts of a graph, if it is one.
    partition: Partition | None = None


@dataclass(frozen=True, slots=True)
class ReceivedGraph:
    """A graph as it came: the digest of its bytes, how many there were, and how to make it of them."""

    digest: bytes
    size_bytes: int
    #: Raises what is wrong with it.
    decode: Callable[[], Graph]


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """A graph, and what is to become of it."""

    #: The handle that the plan is to have.
    plan: int
    graph: Graph | ReceivedGraph
    options: PlanOptions = PlanOptions()
    #: Handles of tensors by the numbers of the leaves that they are.
    bindings: Mapping[int, int] = field(default_factory=dict)
    #: The handle of a plan whose memory is taken over; 0: none.
    updates: int = 0
    #: The handle of the reservation in whose memory it is to lie; 0: none.
    reservation: int = 0
    #: Whether variables that lay on a device that is lost begin anew.
    renews_lost: bool = False


@dataclass(frozen=True, slots=True)
class PlaceContentsRequest:
    """For what contents are needed."""

    compile: CompileRequest
    missing_digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class EstimateRequest:
    """What to estimate: a graph whose weights need not be there."""

    graph: Graph
    options: PlanOptions = PlanOptions()


@dataclass(frozen=True, slots=True)
class ReserveRequest:
    """For what to take memory: a graph, or blocks of the first device."""

    #: The handle that the reservation is to have.
    reservation: int
    graph: Graph | None = None
    options: PlanOptions = PlanOptions()
    block_bytes: tuple[int, ...] = ()
