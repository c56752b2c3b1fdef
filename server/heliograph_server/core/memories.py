"""How a device makes memory, as far as the core must know before any is taken: alignment and sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import TypeAlias

from heliograph_backends.contract import Buffer, BufferType, Device
from heliograph_proto.description import BufferRole, Usage
from heliograph_proto.errors import InternalError, InvalidArgumentError

#: (device, buffer type or "" for the default) -> the buffer type. Raises InvalidArgumentError.
FindMemory: TypeAlias = Callable[[str, str], BufferType]


class _Plain(BufferType):
    """Sizes as they are, without any memory behind them."""

    name = "plain"

    def allocate(self, size_bytes: int, usage: Usage = Usage.ANY) -> Buffer:
        raise InternalError("a core without devices has no memory")


_PLAIN = _Plain()


def plain_memory(device: str, buffer_type: str) -> BufferType:
    """The memory of a core that has no devices."""
    return _PLAIN


def buffer_types(device: Device) -> Iterator[tuple[BufferType, BufferRole]]:
    """A device's buffer types and what they are, the default one first; none twice."""
    seen: list[BufferType] = [device.buffer_type]
    yield device.buffer_type, BufferRole.DEFAULT
    extras = [(one, BufferRole.EXTRA) for one in device.extra_buffer_types]
    host = device.host_buffer_type
    for found, role in ([(host, BufferRole.HOST)] if host is not None else []) + extras:
        if found not in seen:
            seen.append(found)
            yield found, role


def find_buffer_type(device: Device, name: str) -> BufferType:
    """A buffer type of a device by name; "" is the default one. Raises InvalidArgumentError."""
    known = [one for one, _ in buffer_types(device)]
    for found in known:
        if name in ("", found.name):
            return found
    names = [one.name for one in known]
    near = get_close_matches(name[:64], names, 1)
    raise InvalidArgumentError(
        f"device {device.name} has no buffer type {name[:64]!r}",
        advice=f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(names)}",
    )
