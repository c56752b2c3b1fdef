"""Pins and memory limits, arguments of `compile`, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import TypeAlias

from heliograph._base.device import DeviceBase, device_name
from heliograph.core.shell import Shell
from heliograph.graph.arguments import near_names, pattern_words
from heliograph.graph.builder import Graph
from heliograph.graph.value import Value
from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.types import MOST, parse_size

#: Node names as in fnmatch, or a function that is True for the nodes to pin.
NodePattern: TypeAlias = str | Callable[[Value], bool]
#: Devices by node pattern. (Type checkers require exact key types of a mapping.)
Pins: TypeAlias = Mapping[str, DeviceBase | str] | Mapping[NodePattern, DeviceBase | str] | None
#: The most memory that a plan may take, by device: 1024, "512MiB".
MemoryLimits: TypeAlias = Mapping[str, int | str] | Mapping[DeviceBase | str, int | str] | None

#: Device names, with the numbers of the nodes that must run there.
PinnedNodes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]


def pinned_nodes(shell: Shell, graph: Graph, devices: Sequence[str], pins: Pins) -> PinnedNodes:
    """Return the pinned nodes by device. Raises InvalidArgumentError and UnknownDeviceError."""
    if pins is None:
        return ()
    if not isinstance(pins, Mapping):
        raise InvalidArgumentError(
            f"pins is {type(pins).__name__}", advice="devices by pattern: pins={'layer0/*': 'cpu0'}"
        )
    found: dict[int, tuple[str, NodePattern]] = {}
    for pattern, given in pins.items():
        device = among(shell, devices, given, f"pins[{pattern_words(pattern)}]")
        for node in _matching(graph, pattern):
            other, first = found.setdefault(node.reference, (device, pattern))
            if other != device:
                raise _twice(node, (other, first), (device, pattern))
    by_device: dict[str, list[int]] = {}
    for number, (device, _) in sorted(found.items(), key=lambda item: item[0]):
        by_device.setdefault(device, []).append(number)
    return tuple((device, tuple(numbers)) for device, numbers in by_device.items())


def memory_limits(shell: Shell, devices: Sequence[str], memory: MemoryLimits) -> tuple[tuple[str, int], ...]:
    """Return bytes by device. Raises InvalidArgumentError and UnknownDeviceError."""
    if memory is None:
        return ()
    if not isinstance(memory, Mapping):
        raise InvalidArgumentError(
            f"memory is {type(memory).__name__}", advice="sizes by device: memory={'cpu0': '2GiB'}"
        )
    found: dict[str, int] = {}
    for device, size in memory.items():
        name = among(shell, devices, device, "a key of memory")
        if name in found:
            raise InvalidArgumentError(f"memory names {name} twice")
        found[name] = _bytes(size, f"memory[{name!r}]")
    return tuple(sorted(found.items()))


def _twice(node: Value, *pins: tuple[str, NodePattern]) -> InvalidArgumentError:
    where = " and ".join(f"to {device} by {pattern_words(pattern)}" for device, pattern in pins)
    return InvalidArgumentError(
        f"node {node.name!r} is pinned {where}", advice="write patterns that have no node in common"
    )


def _matching(graph: Graph, pattern: NodePattern) -> list[Value]:
    """Return the nodes that a pattern selects, at least one."""
    if not isinstance(pattern, str) and not callable(pattern):
        raise InvalidArgumentError(
            f"a key of pins is a pattern, not {pattern!r:.80}",
            advice="names as in fnmatch, 'layer0/*', or a function of a node",
        )
    values = graph.find(pattern if isinstance(pattern, str) else "*")
    nodes = [value for value in values if value.reference >= 0]
    chosen = nodes if isinstance(pattern, str) else [node for node in nodes if pattern(node)]
    if not chosen:
        advice = _advice(graph, pattern, bool(values)) if isinstance(pattern, str) else ""
        raise InvalidArgumentError(
            f"no node matches {pattern_words(pattern)}, which is pinned", advice=advice
        )
    return chosen


def _advice(graph: Graph, pattern: str, matches_leaves: bool) -> str:
    if matches_leaves:
        return "it matches only leaves; pin the nodes that read them: their weights follow"
    names = dict.fromkeys(value.name for value in graph.find("*") if value.reference >= 0)
    return near_names(pattern, names)


def among(shell: Shell, devices: Sequence[str], given: DeviceBase | str, what: str) -> str:
    """Return the name of one of the plan's devices."""
    if not isinstance(given, DeviceBase | str) or not given:
        raise InvalidArgumentError(f"{what} is {given!r:.80}", advice="a device of the session, or its name")
    name = device_name(shell, given)
    if name not in devices:
        raise InvalidArgumentError(
            f"{what} is {name}, which is not among the devices of the plan: {', '.join(devices) or 'none'}",
            advice=f"name it there too: devices={[*devices, name]}, or --device {name}",
        )
    return name


def _bytes(size: int | str, what: str) -> int:
    found = parse_size(size) if isinstance(size, str) else None
    if not isinstance(size, str | bool) and hasattr(size, "__index__") and 0 <= index(size) <= MOST:
        found = index(size)
    if found is None:
        raise InvalidArgumentError(f"{what} is {size!r:.80}", advice="bytes, or a size such as '512MiB'")
    return found
