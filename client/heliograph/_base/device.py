"""Devices, for both APIs: their properties, names and queries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from heliograph._base.tensor import checked_types
from heliograph.core.effects import Procedure, ask
from heliograph.core.methods import QUERY_OPS, QUERY_PLACEMENT, OpQueries, PlacementQuery
from heliograph.core.shell import Shell
from heliograph.core.watching import why_lost
from heliograph.graph.builder import Graph
from heliograph_proto import graph as contract
from heliograph_proto.devices import (
    BufferTypeInfo,
    Capabilities,
    DeviceInfo,
    DeviceType,
    OpAnswer,
    OpQuery,
    PlacementInfo,
)
from heliograph_proto.errors import InvalidArgumentError, UnknownDeviceError
from heliograph_proto.ops.table import infer
from heliograph_proto.types import DTypeArgument

#: The kinds of devices that run a whole graph, the best first.
_BEST = (DeviceType.GPU, DeviceType.INTEGRATED_GPU, DeviceType.CPU)


class DeviceBase:
    """A device of the server."""

    def __init__(self, shell: Shell, info: DeviceInfo) -> None:
        self._shell = shell
        self._info = info

    @property
    def name(self) -> str:
        """Its name, unique on the server, such as "cpu0"."""
        return self._info.name

    @property
    def description(self) -> str:
        """A description for people, such as the processor's model name."""
        return self._info.description

    @property
    def type(self) -> DeviceType:
        """The kind of hardware."""
        return self._info.type

    @property
    def id(self) -> str:
        """The location of the hardware, such as "0000:c1:00.0" on PCI; empty if it has none."""
        return self._info.id

    @property
    def backend(self) -> str:
        """The name of its backend, such as "cpu"."""
        return self._info.backend

    @property
    def capabilities(self) -> Capabilities:
        """Its optional capabilities."""
        return self._info.capabilities

    @property
    def buffer_types(self) -> tuple[BufferTypeInfo, ...]:
        """Its buffer types; the default one first."""
        return self._info.buffer_types

    @property
    def features(self) -> Mapping[str, str]:
        """Named facts, such as the instruction set."""
        return self._info.features

    @property
    def missing(self) -> Mapping[str, str]:
        """Optional parts that it does not offer, by name, with the reason."""
        return self._info.missing

    @property
    def lost(self) -> str:
        """The reason why it is lost, now, in words; empty while it is there.

        See `session.watch`.
        """
        return why_lost(self._shell.info.devices, self.name)

    def __repr__(self) -> str:
        lost = ", lost" if self.lost else ""
        return f"<Device {self.name} {self.type.name}{lost}: {self.description}>"

    def _repr_html_(self) -> str:
        """Return the view of it in a notebook."""
        from heliograph._base.views.objects import device_view

        return device_view(self)

    @property
    def _asked(self) -> str:
        return f"asking {self.name}"

    def _querying(self, queries: Sequence[OpQuery]) -> Procedure[tuple[OpAnswer, ...]]:
        return ask_ops(self.name, tuple(map(_checked_query, queries)))

    def _comparing(self, graph: Graph) -> Procedure[list[tuple[str, str]]]:
        if not isinstance(graph, Graph):
            raise InvalidArgumentError(f"{graph!r:.80} is not a graph", advice="device.unsupported(graph)")
        return ask_unsupported(self.name, graph._outline())

    def _placing(
        self,
        tensors: Iterable[tuple[Sequence[int] | int, DTypeArgument]],
        buffer_type: BufferTypeInfo | str | None,
    ) -> Procedure[PlacementInfo]:
        types = checked_types(tensors, self._shell.info.limits.tensors)
        request = PlacementQuery(self.name, buffer_type_name(self._info, buffer_type), types)
        return ask(QUERY_PLACEMENT, request)


DeviceArgument = DeviceBase | str | None
DevicesArgument = Sequence[DeviceBase | str] | DeviceBase | str | None


# Queries


def ask_ops(device: str, queries: tuple[OpQuery, ...]) -> Procedure[tuple[OpAnswer, ...]]:
    """Ask how a device runs nodes."""
    return ask(QUERY_OPS, OpQueries(device, queries))


def ask_unsupported(device: str, graph: contract.Graph) -> Procedure[list[tuple[str, str]]]:
    """Return the nodes that a device cannot run, as pairs of name and reason.

    Nodes that are alike are queried once.
    """
    queries: dict[object, OpQuery] = {}
    keys = []
    for number, node in enumerate(graph.nodes):
        operands = graph.origin(number).operands
        keys.append((node.op, operands, tuple(node.attributes.items())))
        queries.setdefault(keys[-1], OpQuery(node.op, operands, node.type, node.attributes))
    if not queries:
        return []
    answers = yield from ask_ops(device, tuple(queries.values()))
    found = dict(zip(queries, answers, strict=True))
    named = ((node.name, found[key].why_not) for node, key in zip(graph.nodes, keys, strict=True))
    return [(name, why) for name, why in named if why]


def _checked_query(query: OpQuery) -> OpQuery:
    """Return a query with all attributes.

    Raises the errors of `infer`, and InvalidArgumentError.
    """
    if not isinstance(query, OpQuery):
        raise InvalidArgumentError(
            f"{query!r:.80} is not a query", advice="for example hg.OpQuery('add', (type, type), type)"
        )
    result, attributes = infer(query.op, query.operands, query.attributes)
    if result != query.result:
        raise InvalidArgumentError(f"op {query.op} gives {result} here, not {query.result}")
    return replace(query, attributes=attributes)


# Names


def device_info(shell: Shell, device: DeviceArgument) -> DeviceInfo:
    """Return a device of the server; for None that of the URL, or the first.

    Raises UnknownDeviceError.
    """
    devices = shell.info.devices
    name = device.name if isinstance(device, DeviceBase) else device or shell.address.device
    if name is None or name == "":
        return devices[0]
    found = [one for one in devices if one.name == name]
    if not found:
        known = ", ".join(one.name for one in devices)
        raise UnknownDeviceError(f"no device is named {name!r}", advice=f"there are: {known}")
    return found[0]


def device_name(shell: Shell, device: DeviceArgument) -> str:
    """Return a device's name; for None that of the URL, or the server's first.

    Raises UnknownDeviceError. The head of a pool resolves names that are unknown here: it knows why
    a device is missing.
    """
    if isinstance(device, str) and device and shell.info.is_head:
        return device
    return device_info(shell, device).name


def device_names(shell: Shell, devices: DevicesArgument) -> tuple[str, ...]:
    """Return the names of the devices of a plan, by priority."""
    if devices is None or isinstance(devices, DeviceBase | str):
        return (device_name(shell, devices),)
    if not isinstance(devices, Iterable):
        raise UnknownDeviceError(
            f"{devices!r:.80} is not a device", advice="a device, its name, or a sequence of them by priority"
        )
    return tuple(device_name(shell, device) for device in devices)


def find_device(shell: Shell, name: str) -> DeviceInfo:
    """Return the device with a name, in any case. Raises UnknownDeviceError."""
    folded = name.casefold() if isinstance(name, str) else name
    found = [one for one in shell.info.devices if one.name.casefold() == folded]
    return found[0] if len(found) == 1 else device_info(shell, name or repr(name))


def best_device(shell: Shell) -> DeviceInfo:
    """Return the first GPU, else integrated GPU, else CPU, else the server's first device."""
    devices = [one for one in shell.info.devices if not one.lost] or shell.info.devices
    ranked = (one for kind in _BEST for one in devices if one.type is kind)
    return next(ranked, devices[0])


def buffer_type_name(info: DeviceInfo, buffer_type: BufferTypeInfo | str | None) -> str:
    """Return the name of a buffer type of the device; empty for its default.

    Raises InvalidArgumentError.
    """
    if buffer_type is None:
        return ""
    name = buffer_type.name if isinstance(buffer_type, BufferTypeInfo) else buffer_type
    known = [one.name for one in info.buffer_types]
    if name not in known:
        raise InvalidArgumentError(
            f"device {info.name} has no buffer type {name!r:.80}",
            advice=f"there are: {', '.join(known) or 'none but the default'}",
        )
    return name


def buffer_type_info(info: DeviceInfo, name: str) -> BufferTypeInfo | None:
    """Return the device's description of a buffer type ("" is its default), or None."""
    return next((one for one in info.buffer_types if name in ("", one.name)), None)
