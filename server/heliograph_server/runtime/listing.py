"""Descriptions and status of a host's devices. Any thread may call them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from heliograph_backends.contract import BufferType, Device
from heliograph_proto.devices import BufferRole, BufferTypeInfo, DeviceInfo, Memory
from heliograph_proto.errors import HeliographError
from heliograph_proto.sessions import DeviceStatus
from heliograph_server.resources.device_queue import DeviceLock
from heliograph_server.resources.memories import buffer_types
from heliograph_server.resources.reclaim import MemoryReclaim


def describe(devices: Sequence[Device], room: MemoryReclaim) -> tuple[DeviceInfo, ...]:
    """Describe the devices as they are now."""
    return tuple(_describe_one(one, devices, room) for one in devices)


def memory_of(device: Device, room: MemoryReclaim) -> Memory:
    """A device's memory. Idle memory counts as free, since it is reclaimed on demand."""
    found = device.memory()
    idle_bytes = room.idle_on(device.name) if found.total_bytes else 0
    return replace(found, free_bytes=found.free_bytes + idle_bytes)


def status_of(device: Device, room: MemoryReclaim, device_lock: DeviceLock | None) -> DeviceStatus:
    """A device's memory now, and its total busy time."""
    memory, _ = _query_memory(device, room)
    return DeviceStatus(
        name=device.name,
        description=device.description,
        memory=memory,
        busy_seconds=device_lock.busy_seconds if device_lock is not None else 0.0,
        lost=device.lost.message if device.lost is not None else "",
    )


def _describe_one(device: Device, devices: Sequence[Device], room: MemoryReclaim) -> DeviceInfo:
    memory, missing = _query_memory(device, room)
    return DeviceInfo(
        name=device.name,
        description=device.description,
        type=device.type,
        backend=device.backend,
        capabilities=device.capabilities,
        memory=memory,
        id=device.id,
        buffer_types=tuple(_describe_type(one, role, devices) for one, role in buffer_types(device)),
        features=dict(device.features()),
        missing=missing,
        lost=device.lost.message if device.lost is not None else "",
    )


def _query_memory(device: Device, room: MemoryReclaim) -> tuple[Memory, dict[str, str]]:
    """The memory of a device, and reasons for what it does not offer. A lost device must not make
    the others fail."""
    missing = dict(device.why_missing())
    if device.lost is not None:
        return Memory(), missing
    try:
        return memory_of(device, room), missing
    except HeliographError as error:
        return Memory(), {**missing, "memory": error.message}


def _describe_type(type: BufferType, role: BufferRole, devices: Sequence[Device]) -> BufferTypeInfo:
    return BufferTypeInfo(
        name=type.name,
        role=role,
        alignment_bytes=type.alignment,
        max_size_bytes=type.max_size,
        is_host=type.is_host,
        readable_by=tuple(one.name for one in devices if one.supports_buffer_type(type)),
        pads=type.pads,
    )
