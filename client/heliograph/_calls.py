"""Unary calls as messages: the one place where effects meet protobuf."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from heliograph._effects import (
    Call,
    Compile,
    DescribeModel,
    Estimate,
    Explain,
    FindMissing,
    GetMemory,
    GetStatistics,
    ListDevices,
    ListModels,
    ListWays,
    PlaceContents,
    Probe,
    QueryOps,
    QueryPlacement,
    Reserve,
)
from heliograph_proto.errors import LimitExceededError
from heliograph_proto.messages import (
    decode_answers,
    decode_device_list,
    decode_estimate,
    decode_memory,
    decode_model,
    decode_offers,
    decode_placement,
    decode_plan,
    decode_probed,
    decode_report,
    decode_reserved,
    decode_traffic,
    decode_ways,
    encode_graph,
    encode_portion,
    encode_queries,
    encode_type,
)
from heliograph_proto.rows import RowSplit
from heliograph_proto.v1 import bulk_pb2, device_pb2, model_pb2, peer_pb2, plan_pb2, session_pb2

_PACKAGE = "heliograph.v1"


@dataclass(frozen=True, slots=True)
class Unary:
    """A call ready to be made: its path, its encoded request, and how to read the answer."""

    path: str
    request: bytes
    decode: Callable[[bytes], Any]


def unary(call: Call, session: bytes, message_bytes: int) -> Unary:
    """The call of an effect. Raises LimitExceededError when it passes the largest message."""
    made = _encode(call, session)
    if len(made.request) > message_bytes:
        raise LimitExceededError(
            f"the request has {len(made.request):,} bytes; this server takes {message_bytes:,}",
            advice="split the graph, or raise message_bytes in the server's configuration",
        )
    return made


def _encode(call: Call, session: bytes) -> Unary:
    match call:
        case FindMissing(digests, sent):
            request = bulk_pb2.FindMissingContentsRequest(session=session, digests=digests, sent_digests=sent)
            return Unary(_path("BulkService", "FindMissingContents"), request.SerializeToString(), _missing)
        case Compile():
            compiling = _encode_compile(call, session).SerializeToString()
            return Unary(_path("PlanService", "Compile"), compiling, _plan)
        case PlaceContents(compile_, missing):
            place = plan_pb2.PlaceContentsRequest(
                compile=_encode_compile(compile_, session), missing_digests=missing
            )
            return Unary(_path("PlanService", "PlaceContents"), place.SerializeToString(), _offers)
        case Reserve():
            return Unary(_path("PlanService", "Reserve"), _encode_reserve(call, session), _reserved)
        case Estimate():
            return Unary(_path("PlanService", "Estimate"), _encode_estimate(call, session), _estimate)
        case Explain(plan):
            explain = plan_pb2.ExplainRequest(session=session, plan=plan)
            return Unary(_path("PlanService", "Explain"), explain.SerializeToString(), _report)
        case GetMemory(device):
            memory = device_pb2.GetMemoryRequest(device=device)
            return Unary(_path("DeviceService", "GetMemory"), memory.SerializeToString(), _memory)
        case ListDevices():
            return Unary(_path("DeviceService", "ListDevices"), b"", _devices)
        case ListWays():
            return Unary(_path("DeviceService", "ListWays"), b"", _ways)
        case GetStatistics():
            statistics = session_pb2.GetStatisticsRequest(session=session)
            return Unary(_path("SessionService", "GetStatistics"), statistics.SerializeToString(), _traffic)
        case Probe(address, size_bytes, timeout_ms):
            probe = peer_pb2.ProbeRequest(
                session=session, address=address, bandwidth_bytes=size_bytes, timeout_ms=timeout_ms
            )
            return Unary(_path("PeerService", "Probe"), probe.SerializeToString(), _probed)
        case ListModels():
            models = model_pb2.ListModelsRequest(session=session)
            return Unary(_path("ModelService", "ListModels"), models.SerializeToString(), _models)
        case DescribeModel(name):
            model = model_pb2.DescribeModelRequest(session=session, name=name)
            return Unary(_path("ModelService", "DescribeModel"), model.SerializeToString(), _model)
        case QueryOps(device, queries):
            ops = encode_queries(device, queries)
            return Unary(_path("DeviceService", "QueryOps"), ops.SerializeToString(), _answers)
        case QueryPlacement():
            return Unary(_path("DeviceService", "QueryPlacement"), _encode_placement(call), _placement)


def _encode_compile(call: Compile, session: bytes) -> plan_pb2.CompileRequest:
    return plan_pb2.CompileRequest(
        session=session,
        plan=call.plan,
        graph=encode_graph(call.graph),
        devices=call.devices,
        fusion=_fusion(call.fusion),
        threads=call.threads,
        portion=encode_portion(call.portion) if call.portion is not None else None,
        bindings=[plan_pb2.LeafBinding(leaf=leaf, tensor=tensor) for leaf, tensor in call.bindings],
        updates=call.updates,
        pins=[plan_pb2.Pin(device=device, nodes=nodes) for device, nodes in call.pins],
        memory_bytes=dict(call.memory),
        pipeline=call.pipeline,
        row_splits=[_row_split(split, leaves) for split, leaves in call.splits],
        buffer_types=dict(call.buffer_types),
        taps=call.taps,
        reservation=call.reservation,
        renews_lost=call.renews_lost,
    )


def _encode_reserve(call: Reserve, session: bytes) -> bytes:
    return plan_pb2.ReserveRequest(
        session=session,
        reservation=call.reservation,
        graph=None if call.graph is None else encode_graph(call.graph),
        devices=call.devices,
        fusion=_fusion(call.fusion),
        threads=call.threads,
        pins=[plan_pb2.Pin(device=device, nodes=nodes) for device, nodes in call.pins],
        memory_bytes=dict(call.memory),
        block_bytes=call.block_bytes,
    ).SerializeToString()


def _row_split(split: RowSplit, leaves: Sequence[int]) -> plan_pb2.RowSplit:
    fractions = [plan_pb2.RowFraction(device=device, fraction=part) for device, part in split.fractions]
    return plan_pb2.RowSplit(leaves=leaves, main=split.main, fractions=fractions)


def _encode_estimate(call: Estimate, session: bytes) -> bytes:
    return plan_pb2.EstimateRequest(
        session=session,
        graph=encode_graph(call.graph),
        devices=call.devices,
        fusion=_fusion(call.fusion),
        pins=[plan_pb2.Pin(device=device, nodes=nodes) for device, nodes in call.pins],
        memory_bytes=dict(call.memory),
        pipeline=call.pipeline,
    ).SerializeToString()


def _encode_placement(call: QueryPlacement) -> bytes:
    return device_pb2.QueryPlacementRequest(
        device=call.device, buffer_type=call.buffer_type, tensors=map(encode_type, call.tensors)
    ).SerializeToString()


def _fusion(fusion: bool) -> plan_pb2.Fusion.ValueType:
    return plan_pb2.FUSION_ON if fusion else plan_pb2.FUSION_OFF


def _path(service: str, method: str) -> str:
    return f"/{_PACKAGE}.{service}/{method}"


def _missing(answer: bytes) -> tuple[tuple[bytes, int], ...]:
    found = bulk_pb2.FindMissingContentsResponse.FromString(answer)
    received = found.received_bytes or [0] * len(found.missing_digests)
    return tuple(zip(found.missing_digests, received, strict=True))


def _plan(answer: bytes) -> Any:
    return decode_plan(plan_pb2.CompileResponse.FromString(answer))


def _offers(answer: bytes) -> Any:
    return decode_offers(plan_pb2.PlaceContentsResponse.FromString(answer))


def _reserved(answer: bytes) -> Any:
    return decode_reserved(plan_pb2.ReserveResponse.FromString(answer))


def _memory(answer: bytes) -> Any:
    return decode_memory(device_pb2.GetMemoryResponse.FromString(answer).memory)


def _ways(answer: bytes) -> Any:
    return decode_ways(device_pb2.ListWaysResponse.FromString(answer))


def _devices(answer: bytes) -> Any:
    return decode_device_list(device_pb2.ListDevicesResponse.FromString(answer))


def _traffic(answer: bytes) -> Any:
    return decode_traffic(session_pb2.GetStatisticsResponse.FromString(answer))


def _probed(answer: bytes) -> Any:
    return decode_probed(peer_pb2.ProbeResponse.FromString(answer))


def _models(answer: bytes) -> tuple[str, ...]:
    return tuple(model_pb2.ListModelsResponse.FromString(answer).names)


def _model(answer: bytes) -> Any:
    return decode_model(model_pb2.DescribeModelResponse.FromString(answer))


def _estimate(answer: bytes) -> Any:
    return decode_estimate(plan_pb2.EstimateResponse.FromString(answer))


def _report(answer: bytes) -> Any:
    return decode_report(plan_pb2.ExplainResponse.FromString(answer))


def _answers(answer: bytes) -> Any:
    return decode_answers(device_pb2.QueryOpsResponse.FromString(answer))


def _placement(answer: bytes) -> Any:
    return decode_placement(device_pb2.QueryPlacementResponse.FromString(answer))
