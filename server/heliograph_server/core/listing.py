"""What a host tells of its devices."""

from __future__ import annotations

from collections.abc import Sequence

from heliograph_backends.contract import BufferType, Device
from heliograph_proto.description import BufferRole, BufferTypeInfo, DeviceInfo
from heliograph_server.core.memories import buffer_types


def describe(devices: Sequence[Device]) -> tuple[DeviceInfo, ...]:
    """All that there is to know of each device, now."""
    return tuple(_describe_one(one, devices) for one in devices)


def _describe_one(device: Device, devices: Sequence[Device]) -> DeviceInfo:
    return DeviceInfo(
        name=device.name,
        description=device.description,
        type=device.type,
        backend=device.backend,
        capabilities=device.capabilities,
        memory=device.memory(),
        id=device.id,
        buffer_types=tuple(_describe_type(one, role, devices) for one, role in buffer_types(device)),
        features=dict(device.features()),
        missing=dict(device.why_missing()),
    )


def _describe_type(type: BufferType, role: BufferRole, devices: Sequence[Device]) -> BufferTypeInfo:
    return BufferTypeInfo(
        name=type.name,
        role=role,
        alignment_bytes=type.alignment,
        max_size_bytes=type.max_size,
        is_host=type.is_host,
        readable_by=tuple(one.name for one in devices if one.supports_buffer_type(type)),
    )
