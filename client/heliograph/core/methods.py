"""The unary methods of the server: one request, one answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from heliograph_proto.devices import DeviceList, Link, Memory, OpAnswer, OpQuery, PlacementInfo, ProbeResult
from heliograph_proto.models import ModelFile, ModelInfo
from heliograph_proto.plans import (
    CompileRequest,
    ContentOffer,
    EstimateRequest,
    PlaceContentsRequest,
    PlanEstimate,
    PlanInfo,
    PlanReport,
    ReserveRequest,
)
from heliograph_proto.sessions import (
    SessionMove,
    SessionSnapshot,
    StayingSession,
    TakenBytes,
    Traffic,
    WantedBytes,
)
from heliograph_proto.types import TensorType

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, eq=False)
class Method(Generic[RequestT, AnswerT]):
    """A method of a service, and the types of its request and answer."""

    service: str
    name: str


@dataclass(frozen=True, slots=True)
class FindMissing:
    """A query for the contents that must be uploaded."""

    digests: tuple[bytes, ...]
    #: Contents that were sent to other daemons, which the server learns from this.
    sent: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class OpQueries:
    """A query for whether and how a device runs nodes."""

    device: str
    queries: tuple[OpQuery, ...]


@dataclass(frozen=True, slots=True)
class ExplainQuery:
    """A query for the report of a plan."""

    plan: int
    #: Whether to measure steps from now on; None: as before.
    measure: bool | None = None


@dataclass(frozen=True, slots=True)
class PlacementQuery:
    """A query for the memory that tensors would take in a buffer type."""

    device: str
    #: Empty: the device's default.
    buffer_type: str
    tensors: tuple[TensorType, ...]


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """A measurement of the server's link to another daemon."""

    address: str
    bandwidth_bytes: int
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class MoveQuery:
    """A request to hand the session to another daemon."""

    address: str
    #: The time for commands under way to end, in seconds; 0: the server's.
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class TakeUpRequest:
    """A request for the memory of an earlier session, by its secret."""

    earlier: bytes
    wanted: tuple[WantedBytes, ...]


#: Digests of contents to upload, with the number of bytes of each that the server has.
Missing: TypeAlias = tuple[tuple[bytes, int], ...]

FIND_MISSING: Method[FindMissing, Missing] = Method("BulkService", "FindMissingContents")
#: The request is a transfer whose upload broke off, and the number of the next attempt; the answer
#: its bytes on the server.
FIND_TRANSFER: Method[tuple[int, int], int] = Method("BulkService", "FindMissingContents")
COMPILE: Method[CompileRequest, PlanInfo] = Method("PlanService", "Compile")
PLACE_CONTENTS: Method[PlaceContentsRequest, tuple[ContentOffer, ...]] = Method(
    "PlanService", "PlaceContents"
)
#: The answer is bytes by device.
RESERVE: Method[ReserveRequest, dict[str, int]] = Method("PlanService", "Reserve")
ESTIMATE: Method[EstimateRequest, PlanEstimate] = Method("PlanService", "Estimate")
EXPLAIN: Method[ExplainQuery, PlanReport] = Method("PlanService", "Explain")
#: The request is a device's name.
GET_MEMORY: Method[str, Memory] = Method("DeviceService", "GetMemory")
LIST_DEVICES: Method[None, DeviceList] = Method("DeviceService", "ListDevices")
#: Links between the members of the server's pool.
LIST_LINKS: Method[None, tuple[Link, ...]] = Method("DeviceService", "ListLinks")
QUERY_OPS: Method[OpQueries, tuple[OpAnswer, ...]] = Method("DeviceService", "QueryOps")
QUERY_PLACEMENT: Method[PlacementQuery, PlacementInfo] = Method("DeviceService", "QueryPlacement")
#: The bytes that the server has carried for the session.
GET_STATISTICS: Method[None, Traffic] = Method("SessionService", "GetStatistics")
#: The request is the time for commands under way to end, in seconds; 0: the server's.
SNAPSHOT: Method[float, SessionSnapshot] = Method("SessionService", "Snapshot")
#: The request is the other daemon's address, the answer the bytes that were sent.
PREPARE_MOVE: Method[str, int] = Method("SessionService", "PrepareMove")
MOVE: Method[MoveQuery, SessionMove] = Method("SessionService", "Move")
#: The request are the sessions whose values stay on the server.
TELL_HANDOVER: Method[tuple[StayingSession, ...], None] = Method("SessionService", "TellHandover")
TAKE_UP: Method[TakeUpRequest, tuple[TakenBytes, ...]] = Method("SessionService", "TakeUp")
PROBE: Method[ProbeRequest, ProbeResult] = Method("PeerService", "Probe")
LIST_MODELS: Method[None, tuple[ModelFile, ...]] = Method("ModelService", "ListModels")
#: The request is a file's name.
DESCRIBE_MODEL: Method[str, ModelInfo] = Method("ModelService", "DescribeModel")
