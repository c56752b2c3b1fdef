"""Devices as candidates of the scheduler, which asks each once for every kind of node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from heliograph_backends.contract import BufferType, Device
from heliograph_proto.devices import DeviceType
from heliograph_proto.graph import Graph
from heliograph_proto.pace import in_turns
from heliograph_server.resources.measurements import TenantTimes, kind_key
from heliograph_server.resources.memories import readable
from heliograph_server.scheduler.model import Candidate, Problem


@dataclass(frozen=True, slots=True)
class NodeKinds:
    """The nodes of a graph by kind: op, attributes, and types of operands and result."""

    #: One node of each kind.
    examples: tuple[int, ...]
    #: The kind of each node.
    of: tuple[int, ...]


def kinds_of(graph: Graph) -> NodeKinds:
    """Find the kinds of nodes, so that a device is asked once for all layers of a model."""
    # Equal types of a validated graph are one object, so none is hashed or compared.
    types = [*[id(leaf.type) for leaf in graph.leaves], *[id(node.type) for node in graph.nodes]]
    known: dict[tuple[Any, ...], int] = {}
    found: list[int] = []
    examples: list[int] = []
    for number, node in enumerate(in_turns(graph.nodes)):
        # Clients choose attributes, and could choose many with one hash.
        attributes = id(node.attributes) if node.attributes else 0
        key = (node.op, attributes, *map(types.__getitem__, node.operands))
        kind = known.setdefault(key, len(examples))
        if kind == len(examples):
            examples.append(number)
        found.append(kind)
    return NodeKinds(tuple(examples), tuple(found))


def candidates(
    graph: Graph,
    devices: Sequence[Device],
    own: Mapping[str, int],
    memory: Mapping[str, int],
    memories: Sequence[BufferType] = (),
    kinds: NodeKinds | None = None,
) -> tuple[Candidate, ...]:
    """Ask each device about a graph.

    By device, in bytes: `own` is the size of the graph's leaves that are there already, and
    `memory` the most that the graph may use. `memories` are the buffer types for weights, by
    default each device's own default. `kinds` are the `kinds_of` the graph, if known.
    """
    kinds = kinds or kinds_of(graph)
    found = memories or [one.buffer_type for one in devices]
    return tuple(
        _candidate(graph, kinds, found, place, usable_bytes(one, own.get(one.name, 0), memory.get(one.name)))
        for place, one in enumerate(devices)
    )


def _candidate(
    graph: Graph, kinds: NodeKinds, memories: Sequence[BufferType], place: int, free_bytes: int
) -> Candidate:
    device = memories[place].device
    answers = [_answer(graph, number, device) for number in kinds.examples]
    return Candidate(
        name=device.name,
        refusals=[answers[kind][0] for kind in kinds.of],
        offloads=[answers[kind][1] for kind in kinds.of] if any(one for _, one in answers) else (),
        reads=readable(memories, device),
        free_bytes=free_bytes,
        is_host=memories[place].is_host,
        helps=device.type is DeviceType.ACCELERATOR,
    )


def usable_bytes(device: Device, own_bytes: int, most_bytes: int | None) -> int:
    """The memory that a graph may use on a device; unlimited if the device does not report.

    The arguments are as in `candidates`.
    """
    free = device.memory()
    free_bytes = free.free_bytes + own_bytes if free.total_bytes else 2**63 - 1
    return free_bytes if most_bytes is None else min(free_bytes, most_bytes)


def _answer(graph: Graph, number: int, device: Device) -> tuple[str, bool]:
    """The device's refusal of a node, or "", and whether it would fetch the node's weights."""
    node = graph.nodes[number]
    operands = [graph.type_of(value) for value in node.operands]
    why_not = device.supports_op(node.op, node.attributes, operands, node.type)
    return why_not, device.offload_op(node.op, node.attributes, operands, node.type)


def timed(problem: Problem, kinds: NodeKinds, devices: Sequence[Device], times: TenantTimes) -> Problem:
    """Add measured times to a problem, if there are any, so that memory alone does not decide."""
    links = times.host.links([one.site_name for one in devices])
    if not links:
        return problem
    keys = [kind_key(problem.graph, number) for number in kinds.examples]
    asked = [
        replace(found, rates=times.host.rates(one.name), times=times.times(one.name, keys))
        for found, one in zip(problem.devices, devices, strict=True)
    ]
    origins = {
        place: times.host.link("", one.site_name) for place, one in enumerate(devices) if one.site_name
    }
    return replace(problem, devices=asked, links=links, origins=origins, kinds=kinds.of)


def with_host(devices: Sequence[Device], everyone: Sequence[Device]) -> tuple[Device, ...]:
    """Append a processor of this host if there is none, for nodes that no other can run."""
    if any(one.type is DeviceType.CPU for one in devices):
        return tuple(devices)
    hosts = (one for one in everyone if one.type is DeviceType.CPU and one.buffer_type.is_host)
    host = next((one for one in hosts if one.lost is None), None)
    return (*devices, host) if host is not None else tuple(devices)
