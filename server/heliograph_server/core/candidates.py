"""Devices as the scheduler sees them: asked once for every kind of node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from heliograph_backends.contract import Device
from heliograph_proto.description import DeviceType
from heliograph_proto.graph import Graph
from heliograph_proto.types import TensorType
from heliograph_server.core.scheduling import Candidate

_Kind: TypeAlias = tuple[str, tuple[tuple[str, Any], ...], tuple[TensorType, ...]]


def candidates(
    graph: Graph, devices: Sequence[Device], own: Mapping[str, int], memory: Mapping[str, int]
) -> tuple[Candidate, ...]:
    """What each device says of the graph. By name of device, in bytes: `own`, the graph's leaves that lie
    there already; `memory`, the most that it may use for the graph."""
    return tuple(
        _candidate(graph, devices, one, own.get(one.name, 0), memory.get(one.name)) for one in devices
    )


def _candidate(
    graph: Graph, devices: Sequence[Device], device: Device, own_bytes: int, most_bytes: int | None
) -> Candidate:
    refusals, offloads = _answers(graph, device)
    free = device.memory()
    # A device that does not tell is taken to have enough.
    free_bytes = free.free_bytes + own_bytes if free.total_bytes else 2**63 - 1
    return Candidate(
        name=device.name,
        refusals=refusals,
        offloads=offloads,
        reads=frozenset(
            place for place, one in enumerate(devices) if device.supports_buffer_type(one.buffer_type)
        ),
        free_bytes=free_bytes if most_bytes is None else min(free_bytes, most_bytes),
        is_host=device.buffer_type.is_host,
        helps=device.type is DeviceType.ACCELERATOR,
    )


def _answers(graph: Graph, device: Device) -> tuple[list[str], list[bool]]:
    """For each node why the device cannot run it, and whether it would fetch its weights."""
    known: dict[_Kind, tuple[str, bool]] = {}
    refusals, offloads = [], []
    for node in graph.nodes:
        operands = tuple(graph.type_of(value) for value in node.operands)
        kind = node.op, tuple(node.attributes.items()), operands
        if kind not in known:
            what = node.op, node.attributes, operands, node.type
            known[kind] = device.supports_op(*what), device.offload_op(*what)
        refusal, offload = known[kind]
        refusals.append(refusal)
        offloads.append(offload)
    return refusals, offloads


def with_host(devices: Sequence[Device], everyone: Sequence[Device]) -> tuple[Device, ...]:
    """The devices, and behind them a processor of this host if there is none among them: what no other
    device can run, it does."""
    if any(one.type is DeviceType.CPU for one in devices):
        return tuple(devices)
    host = next((one for one in everyone if one.type is DeviceType.CPU and one.buffer_type.is_host), None)
    return (*devices, host) if host is not None else tuple(devices)
