"""What an operator sees of a daemon, as messages."""

from __future__ import annotations

from dataclasses import asdict, fields

from heliograph_proto.administration import (
    DeviceStatus,
    DrainState,
    DrainStatus,
    SessionStatus,
    Snapshot,
)
from heliograph_proto.messages.devices import decode_member, decode_memory, encode_member, encode_memory
from heliograph_proto.quotas import Quota, TenantUsage
from heliograph_proto.v1 import admin_pb2

_STATES = {one.value: one for one in DrainState}


def encode_snapshot(found: Snapshot) -> admin_pb2.Snapshot:
    return admin_pb2.Snapshot(
        server=found.server,
        incarnation=found.incarnation,
        uptime_seconds=found.uptime_seconds,
        drain=encode_drain(found.drain),
        devices=map(_encode_device, found.devices),
        sessions=map(encode_session_status, found.sessions),
        tenants=map(_encode_tenant, found.tenants),
        members=map(encode_member, found.members),
        log_level=found.log_level,
    )


def decode_snapshot(message: admin_pb2.Snapshot) -> Snapshot:
    return Snapshot(
        server=message.server,
        incarnation=message.incarnation,
        uptime_seconds=message.uptime_seconds,
        drain=decode_drain(message.drain),
        devices=tuple(map(_decode_device, message.devices)),
        sessions=tuple(map(decode_session_status, message.sessions)),
        tenants=tuple(map(_decode_tenant, message.tenants)),
        members=tuple(map(decode_member, message.members)),
        log_level=message.log_level,
    )


def encode_drain(found: DrainStatus) -> admin_pb2.DrainStatus:
    return admin_pb2.DrainStatus(
        state=admin_pb2.DrainState.ValueType(found.state.value),
        remaining_ms=round(found.remaining_seconds * 1e3),
        stay=found.stay,
        busy_sessions=found.busy_sessions,
    )


def decode_drain(message: admin_pb2.DrainStatus) -> DrainStatus:
    """A state that this side does not know yet is none in which there could be new sessions."""
    state = _STATES.get(message.state, DrainState.DRAINING)
    return DrainStatus(state, message.remaining_ms / 1e3, message.stay, message.busy_sessions)


def encode_session_status(found: SessionStatus) -> admin_pb2.SessionStatus:
    return admin_pb2.SessionStatus(**asdict(found))


def decode_session_status(message: admin_pb2.SessionStatus) -> SessionStatus:
    return SessionStatus(**{one.name: getattr(message, one.name) for one in fields(SessionStatus)})


def _encode_device(found: DeviceStatus) -> admin_pb2.DeviceStatus:
    return admin_pb2.DeviceStatus(
        name=found.name,
        description=found.description,
        memory=encode_memory(found.memory),
        busy_seconds=found.busy_seconds,
        busy_share=found.busy_share,
        lost=found.lost,
    )


def _decode_device(message: admin_pb2.DeviceStatus) -> DeviceStatus:
    return DeviceStatus(
        name=message.name,
        description=message.description,
        memory=decode_memory(message.memory),
        busy_seconds=message.busy_seconds,
        busy_share=message.busy_share,
        lost=message.lost,
    )


def _encode_tenant(found: TenantUsage) -> admin_pb2.TenantStatus:
    values = asdict(found)
    return admin_pb2.TenantStatus(**values | {"quota": admin_pb2.QuotaStatus(**values["quota"])})


def _decode_tenant(message: admin_pb2.TenantStatus) -> TenantUsage:
    values = {one.name: getattr(message, one.name) for one in fields(TenantUsage)}
    quota = {one.name: getattr(message.quota, one.name) for one in fields(Quota)}
    return TenantUsage(**values | {"quota": Quota(**quota)})
