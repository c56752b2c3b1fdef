"""Devices, backends and sessions as messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields

from heliograph_proto.description import (
    BackendInfo,
    BufferRole,
    BufferTypeInfo,
    Capabilities,
    DeviceInfo,
    DeviceList,
    DeviceType,
    Memory,
    OpAnswer,
    OpQuery,
    OpRoad,
    PeerTraffic,
    PlacementInfo,
    Probed,
    SessionInfo,
    SharedMemoryOffer,
    Traffic,
)
from heliograph_proto.limits import Limits
from heliograph_proto.membership import DeviceChange, MemberInfo, MemberState, Way
from heliograph_proto.messages.graphs import decode_attributes, encode_attributes
from heliograph_proto.messages.types import decode_error, decode_type, encode_error, encode_type
from heliograph_proto.ops import infer
from heliograph_proto.v1 import device_pb2, peer_pb2, session_pb2


def encode_device(device: DeviceInfo) -> device_pb2.Device:
    return device_pb2.Device(
        name=device.name,
        description=device.description,
        type=device_pb2.DeviceType.ValueType(device.type.value),
        backend=device.backend,
        capabilities=device_pb2.Capabilities(
            **{"async": device.capabilities.async_},  # a keyword in Python
            host_buffer=device.capabilities.host_buffer,
            buffer_from_host=device.capabilities.buffer_from_host,
            events=device.capabilities.events,
        ),
        memory=encode_memory(device.memory),
        id=device.id,
        buffer_types=map(_encode_buffer_type, device.buffer_types),
        features=device.features,
        missing=device.missing,
        lost=device.lost,
    )


def _encode_buffer_type(found: BufferTypeInfo) -> device_pb2.BufferType:
    return device_pb2.BufferType(
        name=found.name,
        role=device_pb2.BufferRole.ValueType(found.role.value),
        alignment_bytes=found.alignment_bytes,
        max_size_bytes=found.max_size_bytes,
        is_host=found.is_host,
        readable_by=found.readable_by,
        pads=found.pads,
    )


def _decode_buffer_type(message: device_pb2.BufferType) -> BufferTypeInfo:
    known = {role.value for role in BufferRole}
    return BufferTypeInfo(
        name=message.name,
        role=BufferRole(message.role) if message.role in known else BufferRole.EXTRA,
        alignment_bytes=message.alignment_bytes,
        max_size_bytes=message.max_size_bytes,
        is_host=message.is_host,
        readable_by=tuple(message.readable_by),
        pads=message.pads,
    )


def encode_memory(memory: Memory) -> device_pb2.Memory:
    return device_pb2.Memory(free_bytes=memory.free_bytes, total_bytes=memory.total_bytes)


def decode_memory(message: device_pb2.Memory) -> Memory:
    return Memory(message.free_bytes, message.total_bytes)


def decode_device(message: device_pb2.Device) -> DeviceInfo:
    known = {kind.value for kind in DeviceType}
    can = message.capabilities
    return DeviceInfo(
        name=message.name,
        description=message.description,
        type=DeviceType(message.type) if message.type in known else DeviceType.ACCELERATOR,
        backend=message.backend,
        capabilities=Capabilities(getattr(can, "async"), can.host_buffer, can.buffer_from_host, can.events),
        memory=decode_memory(message.memory),
        id=message.id,
        buffer_types=tuple(map(_decode_buffer_type, message.buffer_types)),
        features=dict(message.features),
        missing=dict(message.missing),
        lost=message.lost,
    )


def encode_device_list(found: DeviceList) -> device_pb2.ListDevicesResponse:
    return device_pb2.ListDevicesResponse(
        devices=map(encode_device, found.devices),
        backends=[
            device_pb2.Backend(
                name=one.name,
                origin=one.origin,
                contract_version=one.contract_version,
                devices=one.devices,
                why=one.why,
                features=one.features,
            )
            for one in found.backends
        ],
        server=found.server,
        facts=found.facts,
        members=map(encode_member, found.members),
    )


def decode_device_list(message: device_pb2.ListDevicesResponse) -> DeviceList:
    return DeviceList(
        devices=tuple(map(decode_device, message.devices)),
        backends=tuple(
            BackendInfo(
                name=one.name,
                origin=one.origin,
                contract_version=one.contract_version,
                devices=tuple(one.devices),
                why=one.why,
                features=dict(one.features),
            )
            for one in message.backends
        ),
        server=message.server,
        facts=dict(message.facts),
        members=tuple(map(decode_member, message.members)),
    )


def encode_member(found: MemberInfo) -> device_pb2.Member:
    return device_pb2.Member(
        name=found.name,
        address=found.address,
        state=device_pb2.MemberState.ValueType(found.state.value),
        why=found.why,
        devices=found.devices,
        server=found.server,
        advice=found.advice,
    )


def decode_member(message: device_pb2.Member) -> MemberInfo:
    state = _STATES.get(message.state, MemberState.JOINING)
    devices = tuple(message.devices)
    return MemberInfo(
        message.name, message.address, state, message.why, devices, message.server, message.advice
    )


#: By whether one can reach the other, if that is known.
_REACHABILITY = {
    None: device_pb2.REACHABILITY_UNSPECIFIED,
    True: device_pb2.REACHABILITY_REACHABLE,
    False: device_pb2.REACHABILITY_UNREACHABLE,
}
_REACHABLE = {number: reachable for reachable, number in _REACHABILITY.items()}


def encode_ways(ways: Iterable[Way]) -> device_pb2.ListWaysResponse:
    return device_pb2.ListWaysResponse(
        ways=[
            device_pb2.MemberWay(
                source=one.a,
                destination=one.b,
                round_trip_seconds=one.round_trip_seconds,
                bytes_per_second=one.bytes_per_second,
                round_trip_measured=one.round_trip_measured,
                bandwidth_measured=one.bandwidth_measured,
                reachability=_REACHABILITY[one.reachable],
                why=one.why,
            )
            for one in ways
        ]
    )


def decode_ways(message: device_pb2.ListWaysResponse) -> tuple[Way, ...]:
    return tuple(
        Way(
            a=one.source,
            b=one.destination,
            round_trip_seconds=one.round_trip_seconds,
            bytes_per_second=one.bytes_per_second,
            round_trip_measured=one.round_trip_measured,
            bandwidth_measured=one.bandwidth_measured,
            reachable=_REACHABLE.get(one.reachability),
            why=one.why,
        )
        for one in message.ways
    )


def encode_change(change: DeviceChange) -> device_pb2.DeviceChange:
    return device_pb2.DeviceChange(
        member=change.member,
        appeared=map(encode_device, change.appeared),
        lost=change.lost,
        why=change.why,
        daemons=change.daemons,
    )


def decode_change(message: device_pb2.DeviceChange) -> DeviceChange:
    return DeviceChange(
        member=message.member,
        appeared=tuple(map(decode_device, message.appeared)),
        lost=tuple(message.lost),
        why=message.why,
        daemons=tuple(message.daemons),
    )


def encode_queries(device: str, queries: Sequence[OpQuery]) -> device_pb2.QueryOpsRequest:
    return device_pb2.QueryOpsRequest(
        device=device,
        queries=[
            device_pb2.OpQuery(
                op=one.op,
                attributes=encode_attributes(one.attributes),
                operands=map(encode_type, one.operands),
                road=one.road,
            )
            for one in queries
        ],
    )


def decode_query(message: device_pb2.OpQuery) -> OpQuery:
    """Raises what `infer` does: the result is inferred here."""
    operands = tuple(map(decode_type, message.operands))
    attributes = decode_attributes(message.op, message.attributes)
    result, complete = infer(message.op, operands, attributes)
    return OpQuery(message.op, operands, result, complete, message.road)


def encode_answers(answers: Sequence[OpAnswer]) -> device_pb2.QueryOpsResponse:
    return device_pb2.QueryOpsResponse(
        answers=[
            device_pb2.OpAnswer(
                why_not=one.why_not, offload=one.offload, road=device_pb2.OpRoad.ValueType(one.road.value)
            )
            for one in answers
        ]
    )


def decode_answers(message: device_pb2.QueryOpsResponse) -> tuple[OpAnswer, ...]:
    return tuple(
        OpAnswer(one.why_not, one.offload, _ROADS.get(one.road, OpRoad.UNKNOWN)) for one in message.answers
    )


def encode_placement(info: PlacementInfo) -> device_pb2.QueryPlacementResponse:
    return device_pb2.QueryPlacementResponse(tensor_bytes=info.tensor_bytes, buffer_bytes=info.buffer_bytes)


def decode_placement(message: device_pb2.QueryPlacementResponse) -> PlacementInfo:
    return PlacementInfo(tuple(message.tensor_bytes), tuple(message.buffer_bytes))


#: A newer server may know roads that there are not here.
_ROADS = {one.value: one for one in OpRoad}
_STATES = {one.value: one for one in MemberState}
_LIMITS = tuple(Limits.__dataclass_fields__)


def encode_session(info: SessionInfo) -> session_pb2.OpenResponse:
    return session_pb2.OpenResponse(
        session=info.session,
        version=info.version,
        features=info.features,
        limits=session_pb2.Limits(**{name: getattr(info.limits, name) for name in _LIMITS}),
        incarnation=info.incarnation,
        server=info.server,
        devices=map(encode_device, info.devices),
        lease_ms=info.lease_ms,
        shared_memory=_encode_offer(info.shared_memory),
        is_head=info.is_head,
        daemons=info.daemons,
    )


def _encode_offer(offer: SharedMemoryOffer | None) -> session_pb2.SharedMemory | None:
    if offer is None:
        return None
    return session_pb2.SharedMemory(abstract_name=offer.abstract_name, path_suffix=offer.path_suffix)


def decode_session(message: session_pb2.OpenResponse) -> SessionInfo:
    return SessionInfo(
        session=message.session,
        version=message.version,
        features=tuple(message.features),
        limits=Limits(**{name: getattr(message.limits, name) for name in _LIMITS}),
        incarnation=message.incarnation,
        server=message.server,
        devices=tuple(map(decode_device, message.devices)),
        lease_ms=message.lease_ms,
        shared_memory=_decode_offer(message),
        is_head=message.is_head,
        daemons=tuple(message.daemons),
    )


def _decode_offer(message: session_pb2.OpenResponse) -> SharedMemoryOffer | None:
    if not message.HasField("shared_memory"):
        return None
    offer = message.shared_memory
    return SharedMemoryOffer(offer.abstract_name, offer.path_suffix)


def encode_probed(found: Probed) -> peer_pb2.ProbeResponse:
    return peer_pb2.ProbeResponse(
        error=encode_error(found.error) if found.error is not None else None,
        incarnation=found.incarnation,
        round_trip_seconds=found.round_trip_seconds,
        bytes_per_second=found.bytes_per_second,
    )


def decode_probed(message: peer_pb2.ProbeResponse) -> Probed:
    error = decode_error(message.error) if message.HasField("error") else None
    return Probed(error, message.incarnation, message.round_trip_seconds, message.bytes_per_second)


def encode_traffic(found: Traffic) -> session_pb2.GetStatisticsResponse:
    return session_pb2.GetStatisticsResponse(
        received_bytes=found.written_bytes,
        sent_bytes=found.read_bytes,
        copied_in_bytes=found.copied_in_bytes,
        copied_out_bytes=found.copied_out_bytes,
        content_bytes=found.content_bytes,
        relayed_bytes=found.relayed_bytes,
        peers=session_pb2.PeerTraffic(**asdict(found.peers)),
    )


def decode_traffic(message: session_pb2.GetStatisticsResponse) -> Traffic:
    peers = PeerTraffic(*(getattr(message.peers, one.name) for one in fields(PeerTraffic)))
    return Traffic(
        message.received_bytes,
        message.sent_bytes,
        message.copied_in_bytes,
        message.copied_out_bytes,
        message.content_bytes,
        message.relayed_bytes,
        peers,
    )
