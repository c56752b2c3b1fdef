"""The codec of cold messages: values are kept, and different names and units are translated."""

from __future__ import annotations

from dataclasses import fields, replace
from enum import Enum
from functools import cache
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st

from heliograph_proto import devices, models, plans, sessions
from heliograph_proto.codec import decode, encode
from heliograph_proto.codec.fields import DIFFERENT, NEWER
from heliograph_proto.errors import InvalidArgumentError, OutOfMemoryError
from heliograph_proto.types import DTYPES, TensorType
from heliograph_proto.v1 import admin_pb2, device_pb2, model_pb2, peer_pb2, plan_pb2, session_pb2, tensor_pb2

#: Every dataclass that is told by its fields; those in them are told with them.
PAIRS: dict[type, type[Message]] = {
    devices.DeviceChange: device_pb2.DeviceChange,
    devices.DeviceList: device_pb2.ListDevicesResponse,
    devices.OpAnswer: device_pb2.OpAnswer,
    devices.PlacementInfo: device_pb2.QueryPlacementResponse,
    devices.Link: device_pb2.MemberLink,
    models.ModelFile: model_pb2.ModelFile,
    models.ModelInfo: model_pb2.DescribeModelResponse,
    plans.ContentOffer: plan_pb2.ContentOffer,
    plans.PlanEstimate: plan_pb2.EstimateResponse,
    plans.PlanInfo: plan_pb2.CompileResponse,
    plans.PlanReport: plan_pb2.ExplainResponse,
    sessions.LogLine: session_pb2.LogLine,
    sessions.SessionInfo: session_pb2.OpenResponse,
    sessions.Snapshot: admin_pb2.Snapshot,
    sessions.Traffic: session_pb2.GetStatisticsResponse,
}
#: The least and the greatest number of a type; milliseconds up to here are exact in seconds.
NUMBERS = {
    Field.TYPE_INT32: (-(2**31), 2**31 - 1),
    Field.TYPE_INT64: (-(2**50), 2**50),
    Field.TYPE_UINT32: (0, 2**32 - 1),
    Field.TYPE_UINT64: (0, 2**50),
}
DATA_TYPES = [row.number for row in DTYPES.values()]


def values(field: Any) -> st.SearchStrategy[Any]:
    """Elements that a field may have; enums have also numbers without a name."""
    if field.message_type is not None:
        return messages(GetMessageClass(field.message_type))
    if field.type in NUMBERS:
        return st.integers(*NUMBERS[field.type])
    plain = {
        Field.TYPE_BOOL: st.booleans(),
        Field.TYPE_BYTES: st.binary(max_size=4),
        Field.TYPE_DOUBLE: st.floats(allow_nan=False),
        Field.TYPE_ENUM: st.sampled_from(DATA_TYPES) if field.name == "data_type" else st.integers(0, 20),
        Field.TYPE_FLOAT: st.floats(allow_nan=False, width=32),
        Field.TYPE_STRING: st.text(max_size=4),
    }
    return plain[field.type]


@cache
def messages(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Messages of a type, with fields that are absent."""
    if kind is tensor_pb2.TensorType:
        return st.sampled_from(DATA_TYPES).map(lambda number: kind(data_type=number, shape=[256]))
    found = {}
    for field in kind.DESCRIPTOR.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            found[field.name] = st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2)
        elif field.is_repeated:
            found[field.name] = st.lists(values(field), max_size=2)
        else:
            # A tensor always has a type.
            is_typed = field.message_type in (plan_pb2.Port.DESCRIPTOR, tensor_pb2.TensorType.DESCRIPTOR)
            found[field.name] = values(field) if is_typed else st.none() | values(field)
    return st.fixed_dictionaries(found).map(lambda given: kind(**given))


@pytest.mark.parametrize("kind", PAIRS, ids=lambda kind: kind.__name__)
@settings(deadline=None, max_examples=25)
@given(st.data())
def test_what_a_message_says_is_kept(kind: type, data: st.DataObject) -> None:
    message = data.draw(messages(PAIRS[kind]))
    if isinstance(message, session_pb2.LogLine):
        message.time_us = 1_500_000  # microseconds are not exact in seconds
    found = decode(message, kind)
    again = encode(found, PAIRS[kind])
    assert decode(PAIRS[kind].FromString(again.SerializeToString()), kind) == found


def test_names_and_units_are_translated() -> None:
    way = encode(devices.Link("a", "b", 1.5, 2.0, reachable=False), device_pb2.MemberLink)
    assert (way.source, way.destination, way.reachability) == ("a", "b", device_pb2.REACHABILITY_UNREACHABLE)
    assert encode(
        devices.Capabilities(async_=True, events=False), device_pb2.Capabilities
    ) == device_pb2.Capabilities(**{"async": True})
    drain = sessions.DrainStatus(sessions.DrainState.DRAINING, 1.2346)
    assert encode(drain, admin_pb2.DrainStatus).remaining_ms == 1235
    line = sessions.LogLine(1.5, "warning", "part", "said", dropped=3)
    told = encode(line, session_pb2.LogLine)
    assert told.time_us == 1_500_000 and decode(told, sessions.LogLine) == replace(line, dropped=0)
    traffic = encode(sessions.Traffic(written_bytes=1, read_bytes=2), session_pb2.GetStatisticsResponse)
    assert (traffic.received_bytes, traffic.sent_bytes) == (1, 2)


def test_numbers_of_a_newer_peer_are_the_least_that_can_be_said() -> None:
    for kind, least in NEWER.items():
        assert isinstance(least, kind) and issubclass(kind, Enum)
    device = device_pb2.Device(type=device_pb2.DeviceType.ValueType(99))
    assert decode(device, devices.DeviceInfo).type is devices.DeviceType.ACCELERATOR
    assert decode(session_pb2.LogLine(level="shout"), sessions.LogLine).level == "info"
    assert decode(plan_pb2.CompileResponse(), plans.PlanInfo).pipeline == 1


def test_types_that_are_none_are_refused() -> None:
    port = plan_pb2.Port(name="x", type=tensor_pb2.TensorType(data_type=tensor_pb2.DataType.ValueType(99)))
    with pytest.raises(InvalidArgumentError, match="data type number 99 is unknown"):
        decode(plan_pb2.CompileResponse(inputs=[port]), plans.PlanInfo)
    tensor = model_pb2.ModelTensor(type=tensor_pb2.TensorType(data_type=DATA_TYPES[0], shape=[-1]))
    with pytest.raises(InvalidArgumentError):
        decode(model_pb2.DescribeModelResponse(tensors=[tensor]), models.ModelInfo)


def test_an_error_travels_whole_and_its_absence_too() -> None:
    error = OutOfMemoryError("full", advice="free some")
    told = encode(devices.ProbeResult(error, b"i"), peer_pb2.ProbeResponse)
    back = decode(told, devices.ProbeResult).error
    assert type(back) is OutOfMemoryError and (back.message, back.advice) == ("full", "free some")
    assert decode(peer_pb2.ProbeResponse(), devices.ProbeResult).error is None


def test_what_differs_is_a_field() -> None:
    for kind, different in DIFFERENT.items():
        assert different.keys() <= {one.name for one in fields(kind)}


def test_a_type_in_a_port_is_kept() -> None:
    port = plans.Port("x", TensorType(DTYPES["f32"], (2, 3)))
    assert decode(encode(port, plan_pb2.Port), plans.Port) == port
