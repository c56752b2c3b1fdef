"""Buffer types of devices: alignment, sizes and queries, which are known before any allocation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from typing import TypeAlias

from heliograph_backends.contract import Buffer, BufferType, Device
from heliograph_backends.host_memory.buffers import HostBufferType, MemoryBudget
from heliograph_proto.devices import BufferRole, OpAnswer, OpPath, OpQuery, PlacementInfo, Usage
from heliograph_proto.errors import (
    InternalError,
    InvalidArgumentError,
)
from heliograph_proto.types import TensorType


def readable(memories: Sequence[BufferType], device: Device) -> frozenset[int]:
    """The indices of the devices whose memory a device reads in place."""
    return frozenset(place for place, one in enumerate(memories) if device.supports_buffer_type(one))


#: (device, buffer type or "" for the default) -> the buffer type. Raises InvalidArgumentError.
FindMemory: TypeAlias = Callable[[str, str], BufferType]


class _Plain(BufferType):
    """Unpadded sizes, without any memory."""

    name = "plain"

    def allocate(self, size_bytes: int, usage: Usage = Usage.ANY) -> Buffer:
        raise InternalError("a core without devices has no memory")


_PLAIN = _Plain()


def plain_memory(device: str, buffer_type: str) -> BufferType:
    """The memory of a core without devices."""
    return _PLAIN


def buffer_types(device: Device) -> Iterator[tuple[BufferType, BufferRole]]:
    """A device's buffer types and their roles, the default one first, without duplicates."""
    seen: list[BufferType] = [device.buffer_type]
    yield device.buffer_type, BufferRole.DEFAULT
    extras = [(one, BufferRole.EXTRA) for one in device.extra_buffer_types]
    host = device.host_buffer_type
    for found, role in ([(host, BufferRole.HOST)] if host is not None else []) + extras:
        if found not in seen:
            seen.append(found)
            yield found, role


def find_buffer_type(device: Device, name: str) -> BufferType:
    """A buffer type of a device by name; "" is the default. Raises InvalidArgumentError."""
    if not name:
        return device.buffer_type
    known = [one for one, _ in buffer_types(device)]
    for found in known:
        if name == found.name:
            return found
    names = [one.name for one in known]
    near = get_close_matches(name[:64], names, 1)
    raise InvalidArgumentError(
        f"device {device.name} has no buffer type {name[:64]!r}",
        advice=f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(names)}",
    )


def query_ops(device: Device, queries: Sequence[OpQuery]) -> tuple[OpAnswer, ...]:
    """For each node: whether the device supports it, whether offloading it pays, and its op path if
    the query asks for it."""
    return tuple(_answer(device, one) for one in queries)


def _answer(device: Device, query: OpQuery) -> OpAnswer:
    what = query.op, query.attributes, query.operands, query.result
    why_not = device.supports_op(*what)
    op_path = device.op_path(*what) if query.op_path and not why_not else OpPath.UNKNOWN
    return OpAnswer(why_not, device.offload_op(*what), op_path)


def query_placement(device: Device, buffer_type: str, tensors: Sequence[TensorType]) -> PlacementInfo:
    """The sizes of tensors in a buffer type. Raises InvalidArgumentError, OutOfMemoryError."""
    memory = find_buffer_type(device, buffer_type)
    sizes = tuple(memory.alloc_size(one) for one in tensors)
    return PlacementInfo(sizes, memory.place(tensors).buffer_bytes)


_UNBOUNDED = 2**62


def host_memory(device: Device) -> HostBufferType:
    """Host memory without a budget; `device` only names it. Raises OutOfMemoryError if the host
    refuses."""
    return HostBufferType(device, MemoryBudget("host", _UNBOUNDED))
