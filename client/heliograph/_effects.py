"""What a procedure may ask of the shell that runs it.

A procedure is a generator: it changes the core (`ClientCore`) and yields effects; the shell performs
each and sends back its result, or throws its error in. So everything that waits is written once, and
the blocking and the asyncio shell differ in a few lines. While a procedure runs between two yields
nobody else touches the core.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from heliograph._outcome import Outcome, Pending
from heliograph_proto.description import (
    ContentOffer,
    DeviceList,
    Memory,
    ModelInfo,
    OpAnswer,
    OpQuery,
    PlacementInfo,
    PlanEstimate,
    PlanInfo,
    PlanReport,
    Probed,
    Traffic,
)
from heliograph_proto.graph import Graph
from heliograph_proto.membership import Way
from heliograph_proto.portions import Portion
from heliograph_proto.rows import RowSplit
from heliograph_proto.types import TensorType


@dataclass(frozen=True, slots=True)
class Wait:
    """Until an outcome is done. Gives None; does not raise the outcome's error."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Compute:
    """Work for the processor that is too long for an event loop. Gives what the function returns."""

    function: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Move:
    """Moves bytes in memory: short, and never left behind half done. Gives None."""

    function: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Upload:
    """Starts carrying bytes to the server. Gives a `Transfer` at once."""

    #: A number that a command names, or the digest of a content.
    target: int | bytes
    data: memoryview
    #: The bytes before this one are on the server already; contents alone.
    offset_bytes: int = 0
    #: The command that waits for the bytes; it is cancelled if the upload breaks.
    pending: Pending | None = None
    #: Told the number of bytes that were taken each time.
    progress: Callable[[int], None] | None = None
    #: The daemon to which a content goes, if that is not the server.
    offer: ContentOffer | None = None


@dataclass(frozen=True, slots=True)
class Download:
    """Receives a transfer's bytes into `out`. Gives None when all have come."""

    transfer: int
    out: memoryview


@dataclass(frozen=True, slots=True)
class MapMemory:
    """Maps the memory of a tensor's buffer. Gives its bytes, and where in them the tensor begins."""

    tensor: int


@dataclass(frozen=True, slots=True)
class FindMissing:
    """Asks which contents must be uploaded. Gives pairs: a digest, and how many bytes of it are there."""

    digests: tuple[bytes, ...]
    #: Those that were brought to other daemons, of which the server is just hearing.
    sent: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class ListModels:
    """Asks which files of tensors there are. Gives a tuple of names."""


@dataclass(frozen=True, slots=True)
class DescribeModel:
    """Asks for the tensors of a file. Gives a ModelInfo."""

    name: str


@dataclass(frozen=True, slots=True)
class Compile:
    """Compiles a graph under a handle. Gives a PlanInfo."""

    plan: int
    graph: Graph
    devices: tuple[str, ...]
    fusion: bool
    #: The most threads; 0: all.
    threads: int = 0
    #: Numbers of leaves and the handles of the tensors that they are.
    bindings: tuple[tuple[int, int], ...] = ()
    #: The handle of a plan whose memory is taken over; 0: none.
    updates: int = 0
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
    #: The handle of the reservation in whose memory it is to lie; 0: none.
    reservation: int = 0
    #: Whether variables that lay on a device that is lost begin anew.
    renews_lost: bool = False
    #: How it exchanges values with other parts of a graph, if it is one.
    portion: Portion | None = None


@dataclass(frozen=True, slots=True)
class PlaceContents:
    """Asks where missing contents will lie. Gives a tuple of ContentOffers."""

    compile: Compile
    missing: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Reserve:
    """Takes memory for plans under a handle. Gives the bytes by device."""

    reservation: int
    #: None: for blocks of these sizes instead.
    graph: Graph | None
    devices: tuple[str, ...]
    fusion: bool = True
    threads: int = 0
    pins: tuple[tuple[str, tuple[int, ...]], ...] = ()
    memory: tuple[tuple[str, int], ...] = ()
    block_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Estimate:
    """Asks what compiling would take. Gives a PlanEstimate."""

    graph: Graph
    devices: tuple[str, ...]
    fusion: bool
    pins: tuple[tuple[str, tuple[int, ...]], ...] = ()
    memory: tuple[tuple[str, int], ...] = ()
    pipeline: int = 1


@dataclass(frozen=True, slots=True)
class Explain:
    """Asks where the nodes of a plan run and why. Gives a PlanReport."""

    plan: int


@dataclass(frozen=True, slots=True)
class GetMemory:
    """Asks for a device's memory. Gives a Memory."""

    device: str


@dataclass(frozen=True, slots=True)
class ListDevices:
    """Asks for all devices. Gives a DeviceList."""


@dataclass(frozen=True, slots=True)
class ListWays:
    """Asks for the ways between the members of the server's pool. Gives a tuple of Ways."""


@dataclass(frozen=True, slots=True)
class GetStatistics:
    """Asks what the server has carried for the session. Gives its Traffic."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Has the server measure its way to another one. Gives a Probed."""

    address: str
    bandwidth_bytes: int
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class QueryOps:
    """Asks a device about nodes. Gives a tuple of OpAnswers."""

    device: str
    queries: tuple[OpQuery, ...]


@dataclass(frozen=True, slots=True)
class QueryPlacement:
    """Asks what tensors would take of a buffer type. Gives a PlacementInfo."""

    device: str
    #: Empty: the device's default.
    buffer_type: str
    tensors: tuple[TensorType, ...]


#: Questions to the server that have one answer.
Call: TypeAlias = (
    FindMissing
    | Compile
    | PlaceContents
    | Reserve
    | Estimate
    | Explain
    | GetMemory
    | ListDevices
    | ListWays
    | GetStatistics
    | Probe
    | ListModels
    | DescribeModel
    | QueryOps
    | QueryPlacement
)
Answer: TypeAlias = (
    tuple[tuple[bytes, int], ...]
    | tuple[str, ...]
    | ModelInfo
    | PlanInfo
    | tuple[ContentOffer, ...]
    | dict[str, int]
    | PlanEstimate
    | PlanReport
    | Memory
    | DeviceList
    | tuple[Way, ...]
    | Traffic
    | Probed
    | tuple[OpAnswer, ...]
    | PlacementInfo
)
Effect: TypeAlias = Wait | Compute | Move | Upload | Download | MapMemory | Call

T = TypeVar("T")
Procedure: TypeAlias = Generator[Effect, Any, T]
