"""The memory that a schedule needs of each device, counted once: for the fit and for estimates."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from heliograph_backends.contract import BufferType, DeviceCompileOptions
from heliograph_proto.graph import Graph, LeafKind
from heliograph_server.scheduler.model import Schedule
from heliograph_server.scheduler.split_memory import plan_between, values_between
from heliograph_server.scheduler.splits import clocks, in_order, parts_on


@dataclass(frozen=True, slots=True)
class LastingNeed:
    """The bytes of a device for what lies there between splits: leaves, and the blocks of
    values."""

    weights_bytes: int = 0
    variables_bytes: int = 0
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SplitsNeed:
    """The bytes of a device for computing its splits: their blocks, and data beside weights."""

    blocks: tuple[int, ...] = ()
    extra_bytes: int = 0


def lasting_needs(
    graph: Graph, found: Schedule, memories: Sequence[BufferType], places: Collection[int]
) -> dict[int, LastingNeed]:
    """Return the needs of these devices; `memories` are the devices' memories for leaves and values
    between splits."""
    sizes = {place: dict.fromkeys(LeafKind, 0) for place in places}
    for leaf, home in zip(graph.leaves, found.homes, strict=True):
        if home in sizes:
            sizes[home][leaf.kind] += memories[home].alloc_size(leaf.type)
    spans = values_between(graph, found, clocks(graph, found))
    return {
        place: LastingNeed(
            size[LeafKind.WEIGHT],
            size[LeafKind.VARIABLE],
            plan_between(graph, spans.get(place, {}), memories[place]).chunk_bytes,
        )
        for place, size in sizes.items()
    }


def splits_needs(
    graph: Graph,
    found: Schedule,
    memories: Sequence[BufferType],
    options: DeviceCompileOptions,
    places: Collection[int],
) -> dict[int, SplitsNeed]:
    """Return the needs of these devices, by their own estimates.

    Raises UnsupportedError for a device that cannot estimate.
    """
    needs = dict.fromkeys(places, SplitsNeed())
    for place, part in parts_on(graph, found, places):
        device = memories[place].device
        one = device.estimate(in_order(part, device.optimize(part.graph)).graph, options)
        before = needs[place]
        needs[place] = SplitsNeed(before.blocks + one.compute_bytes, before.extra_bytes + one.extra_bytes)
    return needs
