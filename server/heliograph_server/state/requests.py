"""Requests of plans and reservations as files: the message without its graph, and the graph as it
came, so that its digest stays."""

from __future__ import annotations

import struct
from typing import TypeAlias

from google.protobuf.message import DecodeError

from heliograph_proto import codec
from heliograph_proto.errors import HeliographError, SnapshotFailedError
from heliograph_proto.graph import Graph
from heliograph_proto.plans import CompileRequest, ReceivedGraph, ReserveRequest
from heliograph_proto.sessions import Limits
from heliograph_proto.v1 import plan_pb2

Request: TypeAlias = CompileRequest | ReserveRequest

_LENGTH = struct.Struct("<Q")


def encode_request(request: Request) -> bytes:
    """Return the file of a request."""
    if isinstance(request, ReserveRequest):
        message = codec.encode_reserve_request(request, b"").SerializeToString(deterministic=True)
        return _LENGTH.pack(len(message)) + message
    graph = request.graph
    encoded = codec.graph_bytes(graph) if isinstance(graph, Graph) else graph.encoded
    options = plan_pb2.CompileRequest(
        plan=request.plan,
        options=codec.encode_options(request.options),
        bindings=[plan_pb2.LeafBinding(leaf=leaf, tensor=one) for leaf, one in request.bindings.items()],
        reservation=request.reservation,
    ).SerializeToString(deterministic=True)
    return _LENGTH.pack(len(options)) + options + encoded


def decode_compile(data: bytes, limits: Limits) -> CompileRequest:
    """Return the request of a plan, which updates no other. Raises SnapshotFailedError."""
    try:
        message, graph = _parts(data)
        received: ReceivedGraph = codec.received_graph(graph, limits)
        return codec.decode_compile_request(plan_pb2.CompileRequest.FromString(message), received)
    except (DecodeError, HeliographError, struct.error) as error:
        raise _damaged(error) from None


def decode_reserve(data: bytes, limits: Limits) -> ReserveRequest:
    """Return the request of a reservation. Raises SnapshotFailedError."""
    try:
        message = plan_pb2.ReserveRequest.FromString(_parts(data)[0])
        graph = None
        if message.HasField("graph"):
            graph = codec.received_graph(message.graph.SerializeToString(), limits)
            message.ClearField("graph")
        return codec.decode_reserve_request(message, graph)
    except (DecodeError, HeliographError, struct.error) as error:
        raise _damaged(error) from None


def _parts(data: bytes) -> tuple[bytes, bytes]:
    (size_bytes,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + size_bytes
    return data[_LENGTH.size : end], data[end:]


def _damaged(error: Exception) -> SnapshotFailedError:
    return SnapshotFailedError(f"a request in the state folder cannot be read: {error}")
