"""Reserving memory as no client of ours would: over the wire, with nothing checked before it is sent."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest
from plan_options import divided_fields
from raw_client import RawSession, f32, graph_of, node

import heliograph as hg
from heliograph_proto.codec.status import error_from_metadata
from heliograph_proto.v1 import command_pb2, plan_pb2

OPTIONS = plan_pb2.PlanOptions(devices=["cpu0"])
#: Both results need memory between the nodes.
GRAPH = graph_of(node("soft_max", 0), node("soft_max", 1))


def reserve(raw: RawSession, **fields: Any) -> plan_pb2.ReserveResponse:
    """Raises the typed error of a refusal."""
    request = plan_pb2.ReserveRequest(session=raw.token, **{"reservation": 9, **divided_fields(fields)})
    return called(raw.plans.Reserve, request)


def called(method: Any, request: Any) -> Any:
    try:
        return method(request, timeout=20)
    except grpc.RpcError as refusal:
        error = error_from_metadata(tuple(refusal.trailing_metadata() or ()))
        raise error or refusal from None


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({}, hg.InvalidArgumentError),
        ({"graph": GRAPH, "block_bytes": [64]}, hg.InvalidArgumentError),
        ({"block_bytes": [1] * 1025}, hg.LimitExceededError),
        ({"block_bytes": [2**64 - 1]}, hg.OutOfMemoryError),
        ({"block_bytes": [2**20, 2**63, 2**63]}, hg.OutOfMemoryError),
        ({"block_bytes": [64], "devices": ["nowhere"]}, hg.UnknownDeviceError),
        ({"block_bytes": [64], "reservation": 0}, hg.InvalidArgumentError),
        ({"block_bytes": [64], "reservation": 2**63}, hg.InvalidArgumentError),
        ({"graph": graph_of(node("frobnicate", 0))}, hg.UnknownOpError),
        ({"graph": graph_of(node("exp", 7))}, hg.InvalidGraphError),
        ({"graph": graph_of(node("exp", 0, shape=(2**40, 2**20)))}, hg.HeliographError),
        ({"graph": GRAPH, "devices": ["cpu0"] * 1025}, hg.LimitExceededError),
        ({"graph": GRAPH, "pins": [plan_pb2.Pin(device="cpu0", nodes=[5])]}, hg.InvalidArgumentError),
        ({"graph": GRAPH, "pins": [plan_pb2.Pin(device="nowhere", nodes=[0])]}, hg.UnknownDeviceError),
        ({"graph": GRAPH, "memory_bytes": {"nowhere": 1}}, hg.UnknownDeviceError),
    ],
)
def test_a_request_without_sense_is_refused_and_takes_nothing(
    raw: RawSession, fields: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        reserve(raw, **fields)
    assert [one.name for one in reserve(raw, graph=GRAPH).devices] == ["cpu0"]


def test_a_foreign_session_reserves_nothing(raw: RawSession) -> None:
    for token in (b"", b"x" * 16, raw.token[:-1]):
        with pytest.raises(hg.SessionClosedError):
            called(raw.plans.Reserve, plan_pb2.ReserveRequest(session=token, reservation=9, graph=GRAPH))


def test_a_plan_lies_in_blocks_that_were_reserved_by_their_sizes(raw: RawSession) -> None:
    assert reserve(raw, block_bytes=[0, 1, 2**20]).devices[0].size_bytes == 2**20 + 1
    request = plan_pb2.CompileRequest(session=raw.token, plan=1, graph=GRAPH, reservation=9)
    request.options.fusion = plan_pb2.FUSION_OFF
    info = called(raw.plans.Compile, request)
    assert info.reserved_bytes == info.compute_bytes > 0
    raw.answer(raw.send(free=command_pb2.Free(handles=[9])))
    data = np.zeros((4, 3), np.float32).tobytes()
    bound = [command_pb2.InputBinding(input=0, data=data)]
    found = raw.failure(run=command_pb2.Run(plan=1, inputs=bound))
    assert isinstance(found, hg.UnknownHandleError) and "reset" in found.message
    assert isinstance(raw.failure(free=command_pb2.Free(handles=[9])), hg.UnknownHandleError)


def test_what_is_no_reservation_is_none(raw: RawSession) -> None:
    raw.answer(raw.allocate(7, 4))
    for number, error in ((7, hg.InvalidArgumentError), (8, hg.UnknownHandleError)):
        request = plan_pb2.CompileRequest(session=raw.token, plan=1, graph=GRAPH, reservation=number)
        with pytest.raises(error):
            called(raw.plans.Compile, request)
    raw.compile(GRAPH)


def test_a_reservation_is_nothing_else(raw: RawSession) -> None:
    reserve(raw, graph=GRAPH)
    with pytest.raises(hg.HandleExistsError):
        reserve(raw, graph=GRAPH)
    with pytest.raises(hg.HandleExistsError):
        raw.compile(GRAPH, plan=9)
    for kind in (
        {"get_tensor": command_pb2.GetTensor(tensor=9, size_bytes=4)},
        {"memset": command_pb2.Memset(tensor=9, size_bytes=4)},
        {"view": command_pb2.View(tensor=10, source=9, type=f32(1))},
        {"run": command_pb2.Run(plan=9)},
    ):
        assert isinstance(raw.failure(**kind), hg.InvalidArgumentError)


@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_for_a_request_end_in_an_answer_or_a_refusal(raw: RawSession, seed: int) -> None:
    random = np.random.default_rng(seed)
    whole = plan_pb2.ReserveRequest(session=raw.token, reservation=9, graph=GRAPH, options=OPTIONS)
    data = bytearray(whole.SerializeToString())
    start = len(plan_pb2.ReserveRequest(session=raw.token).SerializeToString())
    channel_call = raw.plans.Reserve
    answered = 0
    for _ in range(150):
        spoilt = bytearray(data)
        for place in random.integers(start, len(data), 1):
            spoilt[place] = int(random.integers(0, 256))
        try:
            request = plan_pb2.ReserveRequest.FromString(bytes(spoilt))
        except Exception:
            continue
        try:
            called(channel_call, request)
            raw.answer(raw.send(free=command_pb2.Free(handles=[request.reservation])))
        except (hg.HeliographError, grpc.RpcError) as error:
            code = error.code() if isinstance(error, grpc.RpcError) else None  # type: ignore[attr-defined]
            assert code is not grpc.StatusCode.UNKNOWN and not isinstance(error, hg.InternalError), seed
        answered += 1
    assert answered > 30, seed
