"""The unary methods of the server: questions that have one answer each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from heliograph_proto.devices import DeviceList, Link, Memory, OpAnswer, OpQuery, PlacementInfo, ProbeResult
from heliograph_proto.models import ModelInfo
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
from heliograph_proto.sessions import Traffic
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
    """Which contents must be uploaded."""

    digests: tuple[bytes, ...]
    #: Those that were brought to other daemons, of which the server is just hearing.
    sent: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class OpQueries:
    """What a device says of nodes."""

    device: str
    queries: tuple[OpQuery, ...]


@dataclass(frozen=True, slots=True)
class PlacementQuery:
    """What tensors would take of a buffer type."""

    device: str
    #: Empty: the device's default.
    buffer_type: str
    tensors: tuple[TensorType, ...]


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """How the server's way to another one is to be measured."""

    address: str
    bandwidth_bytes: int
    timeout_ms: int


#: Digests of contents that must be uploaded, and how many bytes of each are there.
Missing: TypeAlias = tuple[tuple[bytes, int], ...]

FIND_MISSING: Method[FindMissing, Missing] = Method("BulkService", "FindMissingContents")
COMPILE: Method[CompileRequest, PlanInfo] = Method("PlanService", "Compile")
PLACE_CONTENTS: Method[PlaceContentsRequest, tuple[ContentOffer, ...]] = Method(
    "PlanService", "PlaceContents"
)
#: Bytes by device.
RESERVE: Method[ReserveRequest, dict[str, int]] = Method("PlanService", "Reserve")
ESTIMATE: Method[EstimateRequest, PlanEstimate] = Method("PlanService", "Estimate")
#: Of a plan's handle.
EXPLAIN: Method[int, PlanReport] = Method("PlanService", "Explain")
#: Of a device's name.
GET_MEMORY: Method[str, Memory] = Method("DeviceService", "GetMemory")
LIST_DEVICES: Method[None, DeviceList] = Method("DeviceService", "ListDevices")
#: Between the members of the server's pool.
LIST_LINKS: Method[None, tuple[Link, ...]] = Method("DeviceService", "ListLinks")
QUERY_OPS: Method[OpQueries, tuple[OpAnswer, ...]] = Method("DeviceService", "QueryOps")
QUERY_PLACEMENT: Method[PlacementQuery, PlacementInfo] = Method("DeviceService", "QueryPlacement")
#: What the server has carried for the session.
GET_STATISTICS: Method[None, Traffic] = Method("SessionService", "GetStatistics")
PROBE: Method[ProbeRequest, ProbeResult] = Method("PeerService", "Probe")
LIST_MODELS: Method[None, tuple[str, ...]] = Method("ModelService", "ListModels")
#: Of a file's name.
DESCRIBE_MODEL: Method[str, ModelInfo] = Method("ModelService", "DescribeModel")
