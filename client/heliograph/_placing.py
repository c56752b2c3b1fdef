"""Where a graph is to run and to lie: arguments of `compile`, checked, as options that can be sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from heliograph._common import Shell
from heliograph._compiling import CompileOptions
from heliograph._devices import DeviceBase, buffer_type_name, device_info
from heliograph._pins import MemoryLimits, Pins, among, memory_limits, pinned_nodes
from heliograph._split_buffer_type import Splits, row_splits
from heliograph.builder import Graph
from heliograph_proto.description import BufferTypeInfo
from heliograph_proto.errors import InvalidArgumentError

#: The buffer type in which a device has weights and the like. (Type checkers take a mapping's keys exactly.)
BufferTypes: TypeAlias = (
    Mapping[str, BufferTypeInfo | str]
    | Mapping[str, str]
    | Mapping[str, BufferTypeInfo]
    | Mapping[DeviceBase | str, BufferTypeInfo | str]
    | None
)


@dataclass(frozen=True, slots=True)
class Placing:
    """What a user says of where a graph is to run and to lie."""

    pins: Pins = None
    memory: MemoryLimits = None
    split: Splits = None
    buffer_types: BufferTypes = None


def placed(shell: Shell, graph: Graph, options: CompileOptions, placing: Placing) -> CompileOptions:
    """The options with it. Raises InvalidArgumentError, UnknownDeviceError."""
    devices = options.devices
    return replace(
        options,
        pins=pinned_nodes(shell, graph, devices, placing.pins),
        memory=memory_limits(shell, devices, placing.memory),
        splits=row_splits(shell, graph, devices, placing.split, dict(options.bindings)),
        buffer_types=_buffer_types(shell, devices, placing.buffer_types),
    )


def _buffer_types(shell: Shell, devices: tuple[str, ...], given: BufferTypes) -> tuple[tuple[str, str], ...]:
    """Names of buffer types by device. Raises InvalidArgumentError, UnknownDeviceError."""
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        raise InvalidArgumentError(
            f"buffer_types is {type(given).__name__}",
            advice="buffer types by device: buffer_types={'cpu0': 'NAME'}",
        )
    found: dict[str, str] = {}
    for device, wanted in given.items():
        name = among(shell, devices, device, "a key of buffer_types")
        if name in found:
            raise InvalidArgumentError(f"buffer_types names {name} twice")
        if not isinstance(wanted, BufferTypeInfo | str) or not wanted:
            raise InvalidArgumentError(
                f"buffer_types[{name!r}] is {wanted!r:.80}",
                advice="one of device.buffer_types, or its name",
            )
        found[name] = buffer_type_name(device_info(shell, name), wanted)
    return tuple(found.items())
