"""Unary calls as messages: the one place where effects meet protobuf."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from heliograph._effects import Call, Compile, FindMissing, GetMemory, ListDevices
from heliograph_proto.errors import LimitExceededError
from heliograph_proto.messages import decode_device_list, decode_memory, decode_plan, encode_graph
from heliograph_proto.v1 import bulk_pb2, device_pb2, plan_pb2

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
        case FindMissing(digests):
            request = bulk_pb2.FindMissingContentsRequest(session=session, digests=digests)
            return Unary(_path("BulkService", "FindMissingContents"), request.SerializeToString(), _missing)
        case Compile():
            return Unary(_path("PlanService", "Compile"), _encode_compile(call, session), _plan)
        case GetMemory(device):
            memory = device_pb2.GetMemoryRequest(device=device)
            return Unary(_path("DeviceService", "GetMemory"), memory.SerializeToString(), _memory)
        case ListDevices():
            return Unary(_path("DeviceService", "ListDevices"), b"", _devices)


def _encode_compile(call: Compile, session: bytes) -> bytes:
    return plan_pb2.CompileRequest(
        session=session,
        plan=call.plan,
        graph=encode_graph(call.graph),
        devices=call.devices,
        fusion=plan_pb2.FUSION_ON if call.fusion else plan_pb2.FUSION_OFF,
    ).SerializeToString()


def _path(service: str, method: str) -> str:
    return f"/{_PACKAGE}.{service}/{method}"


def _missing(answer: bytes) -> tuple[bytes, ...]:
    return tuple(bulk_pb2.FindMissingContentsResponse.FromString(answer).missing_digests)


def _plan(answer: bytes) -> Any:
    return decode_plan(plan_pb2.CompileResponse.FromString(answer))


def _memory(answer: bytes) -> Any:
    return decode_memory(device_pb2.GetMemoryResponse.FromString(answer).memory)


def _devices(answer: bytes) -> Any:
    return decode_device_list(device_pb2.ListDevicesResponse.FromString(answer))
