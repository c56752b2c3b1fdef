"""Calls with one answer as messages: the one table of methods and protobuf messages.

A request that is too large for one message goes in several, if its method takes that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from google.protobuf import descriptor_pool
from google.protobuf.message import Message

from heliograph.core import methods as m
from heliograph.core.effects import Call
from heliograph_proto import codec
from heliograph_proto.codec import wire
from heliograph_proto.devices import DeviceList, Link, Memory, OpAnswer, PlacementInfo, ProbeResult
from heliograph_proto.errors import HeliographError, LimitExceededError, ProtocolError
from heliograph_proto.models import ModelFile, ModelInfo
from heliograph_proto.plans import ContentOffer, PlanEstimate, PlanInfo, PlanReport
from heliograph_proto.sessions import Limits, SessionMove, SessionSnapshot, TakenBytes, Traffic
from heliograph_proto.v1 import bulk_pb2, device_pb2, model_pb2, peer_pb2, plan_pb2, session_pb2

_PACKAGE = "heliograph.v1"
#: The size of the messages of a large request. The server decodes each without a pause.
_PIECE_BYTES = 2**20

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")
MessageT = TypeVar("MessageT", bound=Message)


@dataclass(frozen=True, slots=True)
class Unary:
    """A call ready to be made: its path, its request, and a decoder of the answer."""

    path: str
    #: The encoded request, in one or several messages.
    messages: list[bytes]
    decode: Callable[[bytes | None], Any]
    #: To be called when the request is on its way.
    sent: Callable[[], object]


@dataclass(frozen=True, slots=True)
class _Codec:
    """The messages of a method."""

    #: Returns the message of a request in a session.
    encode: Callable[[Any, bytes], Message]
    decode: Callable[[bytes | None], Any]


def unary(call: Call, session: bytes, limits: Limits) -> Unary:
    """Encode a call. Raises LimitExceededError if it exceeds the largest request."""
    method, found = call.method, _CODECS[call.method]
    message = found.encode(call.request, session)
    request = message.SerializeToString()
    takes_several = _takes_several(method)
    setting = "graph_bytes" if takes_several else "message_bytes"
    if len(request) > (most_bytes := getattr(limits, setting)):
        raise LimitExceededError(
            f"the request has {len(request):,} bytes; this server takes {most_bytes:,}",
            advice=f"split the graph, or raise {setting} in the server's configuration",
        )
    messages = [request]
    kind: Any = message.DESCRIPTOR
    if takes_several:
        messages = wire.split(request, kind, min(_PIECE_BYTES, limits.message_bytes))
    return Unary(f"/{_PACKAGE}.{method.service}/{method.name}", messages, found.decode, call.sent)


def _takes_several(method: m.Method[Any, Any]) -> bool:
    """True if the contract has a stream of requests, which protobuf joins to one."""
    service = descriptor_pool.Default().FindServiceByName(f"{_PACKAGE}.{method.service}")
    return bool(service.methods_by_name[method.name].client_streaming)


def _row(
    method: m.Method[RequestT, AnswerT],
    encode: Callable[[RequestT, bytes], Message],
    response: type[MessageT],
    decode: Callable[[MessageT], AnswerT],
) -> tuple[m.Method[Any, Any], _Codec]:
    def read(answer: bytes | None) -> AnswerT:
        try:
            if answer is not None:
                return decode(response.FromString(answer))
            why = "the call succeeded without one"
        except HeliographError:
            raise
        except Exception as error:  # DecodeError, or values that no server sends
            why = str(error)
        # gRPC passes on what comes, and plain TCP does not notice every damaged byte.
        raise ProtocolError(
            f"the answer to {method.name} cannot be read: {why}",
            advice="is the connection damaged? try again, or use grpcs://",
        )

    return method, _Codec(encode, read)


def _as(kind: type[AnswerT]) -> Callable[[Message], AnswerT]:
    """Return the decoder of messages that are dataclasses of this kind."""
    return partial(codec.decode, kind=kind)


def _encode_find(request: m.FindMissing, session: bytes) -> Message:
    return bulk_pb2.FindMissingContentsRequest(
        session=session, digests=request.digests, sent_digests=request.sent
    )


def _encode_transfer(asked: tuple[int, int], session: bytes) -> Message:
    transfer, attempt = asked
    return bulk_pb2.FindMissingContentsRequest(session=session, transfers=[transfer], attempts=[attempt])


def _decode_missing(found: bulk_pb2.FindMissingContentsResponse) -> m.Missing:
    received = found.received_bytes or [0] * len(found.missing_digests)
    return tuple(zip(found.missing_digests, received, strict=True))


def _decode_reserved(found: plan_pb2.ReserveResponse) -> dict[str, int]:
    return {one.name: one.size_bytes for one in found.devices}


def _encode_explain(query: m.ExplainQuery, session: bytes) -> Message:
    return plan_pb2.ExplainRequest(session=session, plan=query.plan, measure=query.measure)


def _encode_placement(query: m.PlacementQuery, _: bytes) -> Message:
    return device_pb2.QueryPlacementRequest(
        device=query.device,
        buffer_type=query.buffer_type,
        tensors=map(codec.encode_type, query.tensors),
    )


def _encode_probe(request: m.ProbeRequest, session: bytes) -> Message:
    return peer_pb2.ProbeRequest(
        session=session,
        address=request.address,
        bandwidth_bytes=request.bandwidth_bytes,
        timeout_ms=request.timeout_ms,
    )


def _encode_move(query: m.MoveQuery, session: bytes) -> Message:
    return session_pb2.MoveRequest(
        session=session, address=query.address, wait_ms=round(query.wait_seconds * 1e3)
    )


def _encode_take_up(request: m.TakeUpRequest, session: bytes) -> Message:
    return session_pb2.TakeUpRequest(
        session=session,
        earlier=request.earlier,
        wanted=codec.encode_all(request.wanted, session_pb2.WantedBytes),
    )


def _encode_describe(name: str, session: bytes) -> Message:
    return model_pb2.DescribeModelRequest(session=session, name=name)


_CODECS = dict(
    (
        _row(m.FIND_MISSING, _encode_find, bulk_pb2.FindMissingContentsResponse, _decode_missing),
        _row(
            m.FIND_TRANSFER,
            _encode_transfer,
            bulk_pb2.FindMissingContentsResponse,
            lambda found: int(found.transfer_bytes[0]),
        ),
        _row(m.COMPILE, codec.encode_compile_request, plan_pb2.CompileResponse, _as(PlanInfo)),
        _row(
            m.PLACE_CONTENTS,
            codec.encode_place_contents_request,
            plan_pb2.PlaceContentsResponse,
            lambda found: codec.decode_all(found.offers, ContentOffer),
        ),
        _row(m.RESERVE, codec.encode_reserve_request, plan_pb2.ReserveResponse, _decode_reserved),
        _row(m.ESTIMATE, codec.encode_estimate_request, plan_pb2.EstimateResponse, _as(PlanEstimate)),
        _row(m.EXPLAIN, _encode_explain, plan_pb2.ExplainResponse, _as(PlanReport)),
        _row(
            m.GET_MEMORY,
            lambda device, _: device_pb2.GetMemoryRequest(device=device),
            device_pb2.GetMemoryResponse,
            lambda found: codec.decode(found.memory, Memory),
        ),
        _row(
            m.LIST_DEVICES,
            lambda _, session: device_pb2.ListDevicesRequest(),
            device_pb2.ListDevicesResponse,
            _as(DeviceList),
        ),
        _row(
            m.LIST_LINKS,
            lambda _, session: device_pb2.ListLinksRequest(),
            device_pb2.ListLinksResponse,
            lambda found: codec.decode_all(found.links, Link),
        ),
        _row(
            m.QUERY_OPS,
            lambda request, _: codec.encode_queries(request.device, request.queries),
            device_pb2.QueryOpsResponse,
            lambda found: codec.decode_all(found.answers, OpAnswer),
        ),
        _row(m.QUERY_PLACEMENT, _encode_placement, device_pb2.QueryPlacementResponse, _as(PlacementInfo)),
        _row(
            m.GET_STATISTICS,
            lambda _, session: session_pb2.GetStatisticsRequest(session=session),
            session_pb2.GetStatisticsResponse,
            _as(Traffic),
        ),
        _row(
            m.SNAPSHOT,
            lambda seconds, session: session_pb2.SnapshotRequest(
                session=session, wait_ms=round(seconds * 1e3)
            ),
            session_pb2.SnapshotResponse,
            _as(SessionSnapshot),
        ),
        _row(
            m.PREPARE_MOVE,
            lambda address, session: session_pb2.PrepareMoveRequest(session=session, address=address),
            session_pb2.PrepareMoveResponse,
            lambda answer: int(answer.sent_bytes),
        ),
        _row(m.MOVE, _encode_move, session_pb2.MoveResponse, _as(SessionMove)),
        _row(
            m.TELL_HANDOVER,
            lambda staying, session: session_pb2.TellHandoverRequest(
                session=session, staying=codec.encode_all(staying, session_pb2.StayingSession)
            ),
            session_pb2.TellHandoverResponse,
            lambda _: None,
        ),
        _row(
            m.TAKE_UP,
            _encode_take_up,
            session_pb2.TakeUpResponse,
            lambda found: codec.decode_all(found.taken, TakenBytes),
        ),
        _row(m.PROBE, _encode_probe, peer_pb2.ProbeResponse, _as(ProbeResult)),
        _row(
            m.LIST_MODELS,
            lambda _, session: model_pb2.ListModelsRequest(session=session),
            model_pb2.ListModelsResponse,
            lambda found: codec.decode_all(found.models, ModelFile),
        ),
        _row(m.DESCRIBE_MODEL, _encode_describe, model_pb2.DescribeModelResponse, _as(ModelInfo)),
    )
)
