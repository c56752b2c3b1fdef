"""Places graphs: on one device that can run all of it, or on several with a schedule."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from heliograph_backends.contract import BufferType, Device, DeviceCompileOptions
from heliograph_proto.errors import InvalidArgumentError, OutOfMemoryError, UnsupportedError
from heliograph_proto.graph import Graph
from heliograph_proto.plans import PlanOptions, RowSplit, check_fractions
from heliograph_server.compile.candidates import candidates, kinds_of, timed, usable_bytes, with_host
from heliograph_server.compile.memory_fit import spread
from heliograph_server.compile.plan_cache import KnownGraph
from heliograph_server.compile.plan_memory import check_limits, refused_by_limits
from heliograph_server.plans.partitions import partitioned
from heliograph_server.plans.taps import tapped
from heliograph_server.resources.checks import check_living, unknown_device
from heliograph_server.resources.measurements import TenantTimes
from heliograph_server.resources.memories import find_buffer_type
from heliograph_server.resources.reclaim import MemoryReclaim
from heliograph_server.scheduler.model import Problem, Schedule
from heliograph_server.scheduler.prediction import predict
from heliograph_server.scheduler.tensor_split import check_able
from heliograph_server.weights.session_weights import SessionWeights


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of a graph: one device, or several with a schedule."""

    devices: tuple[Device, ...]
    #: The buffer type of each device for weights, variables, and values between splits.
    memories: tuple[BufferType, ...]
    schedule: Schedule | None = None
    #: The expected time of a run on the one device; 0: unknown, or there are several.
    predicted_s: float = 0.0

    @property
    def main(self) -> Device:
        """The device whose streams run the plan, and on which its outputs are made."""
        return self.devices[self.schedule.main if self.schedule else 0]

    def home(self, value: int) -> BufferType:
        """The memory of a leaf."""
        return self.memories[self.schedule.homes[value] if self.schedule else 0]


class Placer:
    """Places the graphs of one session. `device` looks a device up by name; "" is the first."""

    def __init__(
        self,
        device: Callable[[str], Device],
        all_devices: Callable[[], Sequence[Device]],
        contents: SessionWeights,
        room: MemoryReclaim,
        times: TenantTimes,
    ) -> None:
        self._device = device
        self._all_devices = all_devices
        self._contents = contents
        self._room = room
        self._times = times

    def stamp(self, names: Sequence[str]) -> Hashable:
        """A stamp of the measurements of a plan's devices. If it changes, the plan is placed again.

        Raises UnknownDeviceError.
        """
        named = [self._device(name) for name in dict.fromkeys(names or ("",))]
        found = self._stamp(with_host(named, self._all_devices()))
        draining = tuple(one.name for one in named if one.is_draining)
        return (found, draining) if draining else found

    def _stamp(self, devices: Sequence[Device]) -> Hashable:
        sites = [one.site_name for one in devices]
        return self._times.stamp([one.name for one in devices], sites) if any(sites) else None

    def find(
        self,
        known: KnownGraph,
        options: PlanOptions,
        lies: Mapping[int, str],
        taps: frozenset[int] = frozenset(),
        reserved: Mapping[str, int] = MappingProxyType({}),
    ) -> Placement:
        """Place a graph.

        `lies` are the devices, by name, of leaves with memory, `taps` the observed nodes, and
        `reserved` the bytes of each device reserved for the plan. Raises UnsupportedError,
        OutOfMemoryError, UnknownDeviceError, InvalidArgumentError.
        """
        found = self._find(known, options, lies, reserved)
        if options.partition is not None:
            shared = partitioned(known.graph, found.memories, found.schedule, options.partition)
            return Placement(found.devices, found.memories, shared)
        if not taps:
            return found
        # Observing a run does not change where its nodes run.
        begins = known.divided.begins if known.divided is not None else frozenset()
        made = tapped(known.graph, found.memories, found.schedule, taps, begins)
        return Placement(found.devices, found.memories, made)

    def _find(
        self, known: KnownGraph, options: PlanOptions, lies: Mapping[int, str], reserved: Mapping[str, int]
    ) -> Placement:
        named = self._named(known, options, lies)
        devices = with_host(named, self._all_devices())
        memories = _memories(devices, dict(options.buffer_types))
        pins = _pins_by_node(known, options) if options.pins else {}
        if len(named) == 1 and not pins and not options.memory and known.divided is None:
            refusal = first_unsupported(known.graph, named[0])
            if refusal is None:
                return Placement(tuple(named), memories[:1])
            if len(devices) == 1:
                raise refusal
        try:
            found = self._schedule(known, options, pins, memories, lies, reserved, len(named))
        except OutOfMemoryError as refusal:
            raise self._within_limits(known.graph, devices, memories, options) or refusal from None
        if found.only is not None:
            seconds = predict(known.graph, found, found.costs).seconds if found.costs is not None else 0.0
            made = Placement((devices[found.only],), (memories[found.only],), predicted_s=seconds)
        else:
            made = Placement(devices, memories, found)
        if options.memory and options.partition is None:
            how = device_options(options)
            check_limits(known.graph, made, dict(options.memory), lies, how, options.pipeline)
        return made

    def _within_limits(
        self,
        graph: Graph,
        devices: tuple[Device, ...],
        memories: tuple[BufferType, ...],
        options: PlanOptions,
    ) -> OutOfMemoryError | None:
        """The error of a graph that cannot be placed; None if no limit applies."""
        limits = dict(options.memory)
        if not limits:
            return None
        rooms = {
            one.name: usable_bytes(one, self._room.idle_on(one.name), limits.get(one.name)) for one in devices
        }
        first = Placement(devices[:1], memories[:1])
        return refused_by_limits(graph, first, limits, rooms, device_options(options))

    def _named(self, known: KnownGraph, options: PlanOptions, lies: Mapping[int, str]) -> list[Device]:
        """The devices for a plan: those that are asked for, without those that drain and that
        nothing needs, unless all of them drain."""
        named = [check_living(self._device(name)) for name in dict.fromkeys(options.devices or ("",))]
        if not any(one.is_draining for one in named) or known.divided is not None:
            return named
        needed = {name for name, _ in (*options.pins, *options.memory, *options.buffer_types)}
        needed.update(lies.values())
        kept = [one for one in named if not one.is_draining or one.name in needed]
        return kept if any(not one.is_draining for one in kept) else named

    def check_split(self, split: RowSplit, names: Sequence[str]) -> None:
        """Check a split against the plan's devices. Raises UnknownDeviceError,
        InvalidArgumentError."""
        named = [self._device(name) for name in dict.fromkeys(names or ("",))]
        known = [device.name for device in with_host(named, self._all_devices())]
        for name in (split.main, *(name for name, _ in split.fractions)):
            if name not in known:
                raise unknown_device(name, known)
        check_fractions(split.fractions)

    def _schedule(
        self,
        known: KnownGraph,
        options: PlanOptions,
        pinned: Mapping[int, str],
        memories: Sequence[BufferType],
        lies: Mapping[int, str],
        reserved: Mapping[str, int],
        named: int,
    ) -> Schedule:
        """The schedule of a graph, from the cache or new.

        `pinned` are names of devices by node; `named` is the number of named devices.
        """
        most = dict(options.memory)
        devices = [one.device for one in memories]
        places = {device.name: place for place, device in enumerate(devices)}
        pinned = pinned if known.divided is None else known.divided.with_pins(pinned)
        for name in (*most, *pinned.values()):
            if name not in places:
                raise unknown_device(name, places)
        placed = _placed(known.graph, lies, places)
        pins = {node: places[name] for node, name in pinned.items()}
        types = tuple(one.name for one in memories)
        how = device_options(options)
        asks = how, options.pipeline, self._stamp(devices)
        # By identity, not by name: a device that came back is another one.
        key = (*map(weakref.ref, devices),), types, frozenset(placed.items()), frozenset(pins.items()), *asks
        spare = {one.name: self._room.idle_on(one.name) + reserved.get(one.name, 0) for one in devices}
        free = [usable_bytes(one, spare[one.name], most.get(one.name)) for one in devices]
        found = known.schedule(key, free)
        if found is None:
            own = self._own_bytes(known.graph, devices, placed, spare)
            kinds = kinds_of(known.graph)
            asked = candidates(known.graph, devices, own, most, memories, kinds)
            problem = Problem(known.graph, asked, placed, pins, pipeline=options.pipeline, chosen=named)
            problem = timed(problem, kinds, devices, self._times)
            if known.divided is not None:
                check_able(known.divided, asked, pins)
                problem = replace(problem, begins=known.divided.begins)
            found = spread(problem, devices, how, options.pipeline, memories)
            known.keep(key, found, free, options.pipeline)
        return found

    def _own_bytes(
        self, graph: Graph, devices: Sequence[Device], placed: Mapping[int, int], spare: Mapping[str, int]
    ) -> dict[str, int]:
        """Bytes by device that count as free for the graph: its own leaves, and spare memory."""
        found = {one.name: self._contents.bytes_on(one.name, graph.weights) for one in devices}
        for value, place in placed.items():
            found[devices[place].name] += graph.type_of(value).nbytes
        return {name: size_bytes + spare[name] for name, size_bytes in found.items()}


def device_options(options: PlanOptions) -> DeviceCompileOptions:
    """Return the options for devices."""
    return DeviceCompileOptions(options.fusion, options.threads)


def _memories(devices: Sequence[Device], buffer_types: Mapping[str, str]) -> tuple[BufferType, ...]:
    """The buffer type of each device. Raises UnknownDeviceError, InvalidArgumentError,
    UnsupportedError."""
    names = [device.name for device in devices]
    for name in buffer_types:
        if name not in names:
            raise unknown_device(name, names)
    memories = []
    for device in devices:
        name = buffer_types.get(device.name, "")
        found = find_buffer_type(device, name)
        if name and not device.supports_buffer_type(found):
            raise UnsupportedError(
                f"device {device.name} does not compute in memory of its buffer type {found.name}",
                advice="use another: device.buffer_types lists them, and readable_by their readers",
            )
        memories.append(found)
    return tuple(memories)


def _placed(graph: Graph, lies: Mapping[int, str], places: Mapping[str, int]) -> dict[int, int]:
    """The devices, by index, of leaves with memory. Raises UnsupportedError."""
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
    """Return the error of the first node that the device cannot run; None if it can run all."""
    for number in kinds_of(graph).examples:
        node = graph.nodes[number]
        operands = [graph.type_of(value) for value in node.operands]
        if why := device.supports_op(node.op, node.attributes, operands, node.type):
            return UnsupportedError(
                f"device {device.name} cannot run op {node.op}: {why}", origin=graph.origin(number)
            )
    return None


def _pins_by_node(known: KnownGraph, options: PlanOptions) -> dict[int, str]:
    """The pinned devices, by node of the client's graph.

    Raises InvalidArgumentError for a node that is pinned to two devices, or is not in the graph.
    """
    graph = known.graph if known.divided is None else known.divided.client
    pins: dict[int, str] = {}
    for device, nodes in options.pins:
        for node in nodes:
            if pins.setdefault(node, device) != device:
                raise InvalidArgumentError(f"node {node} is pinned to {pins[node]} and to {device}")
            if node >= len(graph.nodes):
                raise InvalidArgumentError(f"node {node} is pinned; the graph has {len(graph.nodes)} nodes")
    return pins
