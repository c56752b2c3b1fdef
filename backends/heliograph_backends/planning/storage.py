"""The memory of each value of a plan.

Memory is named by slots: one for each leaf, each output, and each of the plan's own blocks, which
are the chunks of the arena of intermediate results and of the constants. The slots of inputs and
outputs get other memory in every run; the steps name (slot, offset, strides) and do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from heliograph_backends.contract.placement import place as place_in_order
from heliograph_backends.planning.groups import Group
from heliograph_backends.planning.layout import SOURCES, ValuePlace, is_direct
from heliograph_backends.planning.memory import (
    UNBOUNDED,
    ArenaLayout,
    Liveness,
    live_blocks,
    padded,
    peak_bytes,
    plan_arena,
)
from heliograph_proto.graph import Graph, LeafKind

ALIGNMENT = 64
#: Concurrent steps may take at most a MOST_MORE-th more memory than sequential ones.
MOST_MORE = 16


class StorageRegion(NamedTuple):
    """The start of a root's storage."""

    slot: int
    offset_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StorageLayout:
    """Regions of all roots, and the sizes of the blocks that the plan itself allocates."""

    places: tuple[ValuePlace, ...]
    regions: dict[int, StorageRegion]
    #: Slot of each leaf, by value number, and of each output, in order.
    leaf_slots: tuple[int, ...]
    output_slots: tuple[int, ...]
    #: Outputs that are computed in other memory and copied at the end.
    copied_outputs: tuple[int, ...]
    #: Bytes of the chunks of the arena and of the constants; their slots follow the outputs', in
    #: this order.
    arena: tuple[int, ...]
    constants: tuple[int, ...]
    #: Variables, by value number, that are written before the last input is read.
    written: frozenset[int] = frozenset()
    #: The set of each step: steps with the same number may run at the same time.
    sets: Sequence[int] = ()

    @property
    def arena_slot(self) -> int:
        """The slot of the arena's first chunk."""
        return len(self.leaf_slots) + len(self.output_slots)

    @property
    def own_bytes(self) -> tuple[int, ...]:
        """Bytes of each of the plan's own blocks."""
        return self.arena + self.constants

    @property
    def slots(self) -> int:
        """The number of slots."""
        return self.arena_slot + len(self.own_bytes)

    def locate(self, value: int) -> tuple[int, int, tuple[int, ...]]:
        """Return the slot, offset and strides of a value."""
        root, offset, strides = self.places[value]
        slot, start = self.regions[root]
        return slot, start + offset, strides


def plan_storage(
    graph: Graph,
    places: tuple[ValuePlace, ...],
    groups: Sequence[Group],
    max_size: int = UNBOUNDED,
    sets: Sequence[int] | None = None,
    alignment: int = ALIGNMENT,
) -> StorageLayout:
    """Give every root that a step writes or reads a region whose offset is a multiple of the
    alignment.

    `sets` are the sets of steps that may run at the same time. All steps run one after the other
    instead if concurrency takes more than a `MOST_MORE`-th more memory.

    Raises OutOfMemoryError for a value that is larger than `max_size`, the most bytes of one
    buffer.
    """
    leaf_slots = tuple(range(len(graph.leaves)))
    output_slots = tuple(range(len(leaf_slots), len(leaf_slots) + len(graph.outputs)))
    regions = {value: StorageRegion(slot) for value, slot in enumerate(leaf_slots)}
    constants = _constants(graph, groups)
    elsewhere = set(regions).union(constants)
    copied = []
    for place, output in enumerate(graph.outputs):
        if output.value in elsewhere or places[output.value].root != output.value:
            copied.append(place)
        else:
            regions[output.value] = StorageRegion(output_slots[place])
            elsewhere.add(output.value)
    lasting = [graph.outputs[place].value for place in copied]
    chosen: Sequence[int] = range(len(groups))
    live = live_blocks(graph, places, groups, elsewhere, lasting)
    if sets and sets[-1] + 1 < len(groups):
        together = live_blocks(graph, places, groups, elsewhere, lasting, sets)
        arena = plan_arena(together.lifetimes, alignment, max_size)
        # Sequential steps take at least the peak of their live bytes, and seldom more.
        peak = peak_bytes(live.lifetimes, alignment)
        if arena.size_bytes > peak + peak // MOST_MORE:
            peak = plan_arena(live.lifetimes, alignment, max_size).size_bytes
        if arena.size_bytes <= peak + peak // MOST_MORE:
            chosen, live = sets, together
    if chosen is not sets:
        arena = plan_arena(live.lifetimes, alignment, max_size)
    chunks = _place_in_arena(graph, live, arena, regions)
    first = len(leaf_slots) + len(output_slots) + len(chunks)
    constant_bytes = _place_constants(graph, constants, regions, first, max_size, alignment)
    results = [len(leaf_slots) + nodes[-1] for _, nodes in groups]
    # Only a value that lies in another one, or a copied reshape of such a value, is a direct write.
    maybe = [v for v in results if places[v][0] != v or graph.nodes[v - len(leaf_slots)].op == "reshape"]
    written = frozenset(places[value].root for value in maybe if is_direct(graph, places, value))
    slots = leaf_slots, output_slots
    return StorageLayout(places, regions, *slots, tuple(copied), chunks, constant_bytes, written, chosen)


def _constants(graph: Graph, groups: Sequence[Group]) -> list[int]:
    """Return the results of ops without operands, which are computed once, when the plan is
    made."""
    leaves = len(graph.leaves)
    return [leaves + nodes[-1] for _, nodes in groups if graph.nodes[nodes[-1]].op in SOURCES]


def _place_constants(
    graph: Graph,
    constants: list[int],
    regions: dict[int, StorageRegion],
    first_slot: int,
    max_size: int,
    alignment: int,
) -> tuple[int, ...]:
    """Give constants consecutive regions and return the sizes of their chunks."""
    if not constants:
        return ()
    sizes = [max(1, graph.type_of(value).nbytes) for value in constants]
    placement = place_in_order(sizes, alignment, max_size)
    for value, found in zip(constants, placement.places, strict=True):
        regions[value] = StorageRegion(first_slot + found.buffer, found.offset_bytes)
    return tuple(min(padded(size, alignment), max_size) for size in placement.buffer_bytes)


def _place_in_arena(
    graph: Graph, live: Liveness, arena: ArenaLayout, regions: dict[int, StorageRegion]
) -> tuple[int, ...]:
    """Give the remaining roots regions in the arena and return the sizes of its chunks."""
    first_slot = len(graph.leaves) + len(graph.outputs)
    slots = [first_slot + chunk for chunk in arena.chunks]
    for root, block in live.blocks.items():
        regions[root] = StorageRegion(slots[block], arena.offsets[block])
    return arena.chunk_bytes


def is_weight(graph: Graph, value: int) -> bool:
    """True if a value is a weight leaf."""
    return value < len(graph.leaves) and graph.leaves[value].kind is LeafKind.WEIGHT
