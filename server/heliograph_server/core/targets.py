"""Where a graph is to run: one device that can run all of it, or several with a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from heliograph_backends.contract import CompileOptions, Device
from heliograph_proto.errors import UnsupportedError
from heliograph_proto.graph import Graph
from heliograph_server.core.candidates import candidates, usable_bytes, with_host
from heliograph_server.core.checks import unknown_device
from heliograph_server.core.contents import Contents
from heliograph_server.core.known_graphs import KnownGraph
from heliograph_server.core.room import Room
from heliograph_server.core.scheduling import Problem, Schedule
from heliograph_server.core.spreading import spread


@dataclass(frozen=True, slots=True)
class Target:
    """Where a graph is to run: one device, or several with a schedule."""

    devices: tuple[Device, ...]
    schedule: Schedule | None = None

    @property
    def main(self) -> Device:
        """The device whose streams run the plan, and on which its outputs are made."""
        return self.devices[self.schedule.main if self.schedule else 0]

    def home(self, value: int) -> Device:
        """The device of a leaf."""
        return self.devices[self.schedule.homes[value] if self.schedule else 0]


@dataclass(frozen=True, slots=True)
class Wish:
    """What a client says of where its graph is to run: names of devices, pins by node, limits by name."""

    devices: tuple[str, ...]
    pins: Mapping[int, str]
    memory: Mapping[str, int]
    options: CompileOptions
    #: How many copies of what is between nodes there are to be.
    pipeline: int = 1


class Targets:
    """Decides for one session. `device` looks a device up by name; "" is the first."""

    def __init__(
        self, device: Callable[[str], Device], everyone: Sequence[Device], contents: Contents, room: Room
    ) -> None:
        self._device = device
        self._everyone = everyone
        self._contents = contents
        self._room = room

    def find(
        self,
        known: KnownGraph,
        wish: Wish,
        lies: Mapping[int, str],
        reserved: Mapping[str, int] = MappingProxyType({}),
    ) -> Target:
        """`lies`: names of the devices of leaves that lie somewhere already; `reserved`: bytes of devices
        that are there for the plan. Raises UnsupportedError, OutOfMemoryError, UnknownDeviceError,
        InvalidArgumentError."""
        named = [self._device(name) for name in dict.fromkeys(wish.devices or ("",))]
        if len(named) == 1 and not wish.pins and not wish.memory:
            refusal = first_unsupported(known.graph, named[0])
            if refusal is None:
                return Target(tuple(named))
            if len(with_host(named, self._everyone)) == 1:
                raise refusal
        devices = with_host(named, self._everyone)
        found = self._schedule(known, wish, devices, lies, reserved)
        if found.only is not None:
            return Target((devices[found.only],))
        return Target(devices, found)

    def _schedule(
        self,
        known: KnownGraph,
        wish: Wish,
        devices: tuple[Device, ...],
        lies: Mapping[int, str],
        reserved: Mapping[str, int],
    ) -> Schedule:
        """As it was found before, or else found now and kept."""
        places = {device.name: place for place, device in enumerate(devices)}
        for name in (*wish.memory, *wish.pins.values()):
            if name not in places:
                raise unknown_device(name, places)
        placed = _placed(known.graph, lies, places)
        pins = {node: places[name] for node, name in wish.pins.items()}
        key = (*places,), frozenset(placed.items()), frozenset(pins.items()), wish.options, wish.pipeline
        spare = {one.name: self._room.idle_on(one.name) + reserved.get(one.name, 0) for one in devices}
        free = [usable_bytes(one, spare[one.name], wish.memory.get(one.name)) for one in devices]
        found = known.schedule(key, free)
        if found is None:
            own = self._own_bytes(known.graph, devices, placed, spare)
            asked = candidates(known.graph, devices, own, wish.memory)
            problem = Problem(known.graph, asked, placed, pins)
            found = spread(problem, devices, wish.options, wish.pipeline)
            known.keep(key, found, free, wish.pipeline)
        return found

    def _own_bytes(
        self, graph: Graph, devices: Sequence[Device], placed: Mapping[int, int], spare: Mapping[str, int]
    ) -> dict[str, int]:
        """By device: bytes of the graph's leaves that lie there, and so take nothing more of it, and those
        that are as good as free."""
        found = {one.name: self._contents.bytes_on(one.name, graph.weights) for one in devices}
        for value, place in placed.items():
            found[devices[place].name] += graph.type_of(value).nbytes
        return {name: size_bytes + spare[name] for name, size_bytes in found.items()}


def _placed(graph: Graph, lies: Mapping[int, str], places: Mapping[str, int]) -> dict[int, int]:
    """The places of devices of leaves that lie somewhere. Raises UnsupportedError."""
    for value, name in lies.items():
        if name not in places:
            leaf = graph.leaves[value]
            raise UnsupportedError(
                f"{leaf.kind.value} {leaf.name!r} of this session lies on device {name}, "
                f"which is not among the plan's devices: {', '.join(places)}",
                advice=f"add {name}, or compile in another session",
            )
    return {value: places[name] for value, name in lies.items()}


def first_unsupported(graph: Graph, device: Device) -> UnsupportedError | None:
    """Why the device cannot run the first node that it cannot run."""
    for number, node in enumerate(graph.nodes):
        operands = [graph.type_of(value) for value in node.operands]
        if why := device.supports_op(node.op, node.attributes, operands, node.type):
            return UnsupportedError(
                f"device {device.name} cannot run op {node.op}: {why}", origin=graph.origin(number)
            )
    return None
