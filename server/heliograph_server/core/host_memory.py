"""Memory of this process that belongs to no device: where values are on their way from and to clients."""

from __future__ import annotations

from heliograph_backends.contract import Device
from heliograph_backends.cpu.memory import Budget, HostBufferType

_UNBOUNDED = 2**62


def host_memory(device: Device) -> HostBufferType:
    """Counted nowhere; `device` only gives it a name. Raises OutOfMemoryError where the host refuses."""
    return HostBufferType(device, Budget("host", _UNBOUNDED))
