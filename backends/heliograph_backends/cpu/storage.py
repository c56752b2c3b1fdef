"""Which memory each value of a plan lies in.

Memory is named by slots: the arena of intermediate results, the constants, each weight and variable,
and each run's inputs and outputs. Slots of the last two get other memory with every run; the steps
name (slot, offset, strides) and stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heliograph_backends.planning.fusion import Group
from heliograph_backends.planning.layout import Place
from heliograph_backends.planning.memory import Lifetime, padded, plan_arena
from heliograph_proto.graph import Graph, LeafKind
from heliograph_proto.ops import OPS

ARENA, CONSTANTS = 0, 1
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Region:
    """Where a root's storage begins."""

    slot: int
    offset_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Storage:
    """Regions of all roots, and the sizes of what the plan itself must allocate."""

    places: tuple[Place, ...]
    regions: dict[int, Region]
    arena_bytes: int
    constant_bytes: int
    #: Slot of each leaf, by value number, and of each output, by its place.
    leaf_slots: tuple[int, ...]
    output_slots: tuple[int, ...]
    #: Outputs that are not written where they are computed, and so are copied at the end.
    copied_outputs: tuple[int, ...]

    def locate(self, value: int) -> tuple[int, int, tuple[int, ...]]:
        """Slot, offset and strides of a value."""
        place = self.places[value]
        region = self.regions[place.root]
        return region.slot, region.offset_bytes + place.offset_bytes, place.strides


def plan_storage(graph: Graph, places: tuple[Place, ...], groups: Sequence[Group]) -> Storage:
    """Gives every root that a step writes or reads a region."""
    leaves = len(graph.leaves)
    leaf_slots = tuple(range(2, 2 + leaves))
    output_slots = tuple(range(2 + leaves, 2 + leaves + len(graph.outputs)))
    regions = {value: Region(slot) for value, slot in enumerate(leaf_slots)}
    constant_bytes = _place_constants(graph, places, groups, regions)
    copied = []
    for place, output in enumerate(graph.outputs):
        if output.value in regions or places[output.value].root != output.value:
            copied.append(place)
        else:
            regions[output.value] = Region(output_slots[place])
    arena_bytes = _place_in_arena(graph, places, groups, regions, copied)
    return Storage(places, regions, arena_bytes, constant_bytes, leaf_slots, output_slots, tuple(copied))


def _place_constants(
    graph: Graph, places: tuple[Place, ...], groups: Sequence[Group], regions: dict[int, Region]
) -> int:
    """Results of ops without operands are computed once, when the plan is made."""
    offset = 0
    for group in groups:
        node = graph.nodes[group.last]
        if OPS[node.op].group == "source":
            regions[len(graph.leaves) + group.last] = Region(CONSTANTS, offset)
            offset += padded(node.type.nbytes, ALIGNMENT)
    return offset


def _place_in_arena(
    graph: Graph,
    places: tuple[Place, ...],
    groups: Sequence[Group],
    regions: dict[int, Region],
    copied_outputs: Sequence[int],
) -> int:
    """Gives the roots that have no region yet one in the arena; the arena's bytes."""
    lifetimes = _lifetimes(graph, places, groups, regions, copied_outputs)
    arena = plan_arena(list(lifetimes.values()), ALIGNMENT)
    for root, offset in zip(lifetimes, arena.offsets, strict=True):
        regions[root] = Region(ARENA, offset)
    return arena.size_bytes


def _lifetimes(
    graph: Graph,
    places: tuple[Place, ...],
    groups: Sequence[Group],
    regions: dict[int, Region],
    copied_outputs: Sequence[int],
) -> dict[int, Lifetime]:
    """Liveness over the steps, by root; a view keeps the storage of its source alive."""
    leaves = len(graph.leaves)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for step, group in enumerate(groups):
        root = leaves + group.last
        if root not in regions and places[root].root == root:
            first[root] = last[root] = step
        for number in group.nodes:
            for value in graph.nodes[number].operands:
                last[places[value].root] = step
    for output in copied_outputs:
        last[places[graph.outputs[output].value].root] = len(groups)
    return {root: Lifetime(graph.type_of(root).nbytes, step, last[root]) for root, step in first.items()}


def is_weight(graph: Graph, value: int) -> bool:
    """Whether a value is a weight leaf."""
    return value < len(graph.leaves) and graph.leaves[value].kind is LeafKind.WEIGHT
