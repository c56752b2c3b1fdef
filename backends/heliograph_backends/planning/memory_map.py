"""Reports of where a plan's intermediate results lie, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from heliograph_backends.contract.plan import MemoryMap, StoredResult
from heliograph_backends.planning.groups import Group
from heliograph_backends.planning.storage import StorageLayout
from heliograph_proto.graph import Graph


def memory_map(graph: Graph, groups: Sequence[Group], storage: StorageLayout) -> MemoryMap:
    """Return the results in the plan's own blocks. Takes time linear in the graph's size.

    A result that another takes over in place ends one step before the other begins. Constants, and
    results that are copied to an output after the last step, last to the end.
    """
    leaves, last_step = len(graph.leaves), max(storage.sets, default=0)
    last = _last_steps(graph, groups, storage)
    for place in storage.copied_outputs:
        last[storage.places[graph.outputs[place].value].root] = last_step
    found: list[StoredResult] = []
    newest: dict[tuple[int, int], int] = {}
    for step, group in zip(storage.sets, groups, strict=True):
        root = leaves + group.last
        if storage.places[root].root != root:
            continue
        slot, offset = storage.regions[root]
        block = slot - storage.arena_slot
        if block < 0:
            continue
        if block >= len(storage.arena):
            step, last[root] = 0, last_step
        before = newest.get((block, offset))
        if before is not None and found[before].last_step == step > found[before].first_step:
            found[before] = replace(found[before], last_step=step - 1)
        newest[block, offset] = len(found)
        size = graph.nodes[group.last].type.nbytes
        found.append(StoredResult(group.last, block, offset, size, step, max(step, last.get(root, step))))
    return MemoryMap(storage.own_bytes, len(storage.arena), tuple(found), last_step + 1 if groups else 0)


def _last_steps(graph: Graph, groups: Sequence[Group], storage: StorageLayout) -> dict[int, int]:
    """Return the last step that reads each root, also through views."""
    found: dict[int, int] = {}
    for step, group in zip(storage.sets, groups, strict=True):
        for number in group.nodes:
            for value in graph.nodes[number].operands:
                found[storage.places[value].root] = step
    return found
