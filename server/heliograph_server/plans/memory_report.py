"""Reports of the memory that a plan computes in. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from heliograph_backends.contract import MemoryMap, StoredResult
from heliograph_proto.plans import MemoryBlock, MemoryUse, PlanReport, StoredValue
from heliograph_server.plans.split_copies import StoredBetween

#: Of a split: its device, its nodes by their numbers in the whole graph, and its memory.
SplitMap = tuple[int, Sequence[int], MemoryMap]


def blocks_of(found: MemoryMap, device: int) -> tuple[MemoryBlock, ...]:
    """Return the blocks of a plan on one device."""
    return tuple(
        MemoryBlock(device, size, MemoryUse.RESULTS if place < found.constants else MemoryUse.CONSTANTS)
        for place, size in enumerate(found.block_bytes)
    )


def stored_of(
    found: MemoryMap, values: Sequence[int], first_block: int, first_step: int
) -> tuple[StoredValue, ...]:
    """Return the results of a plan on one device; `values` has the value of each of its nodes."""
    return tuple(
        StoredValue(
            values[one.node],
            first_block + one.block,
            one.offset_bytes,
            one.size_bytes,
            first_step + one.first_step,
            first_step + one.last_step,
        )
        for one in found.results
    )


def memory_of_splits(
    leaves: int,
    splits: Sequence[SplitMap],
    between: Mapping[int, Sequence[tuple[int, Sequence[StoredBetween]]]],
) -> tuple[tuple[MemoryBlock, ...], tuple[StoredValue, ...]]:
    """Return the blocks of splits and between them, by device, and the values there.

    The steps of a split follow those of the split before. A split without steps counts as one.
    """
    begins = [0, *accumulate(max(1, found.steps) for _, _, found in splits)]
    blocks: list[MemoryBlock] = []
    stored: list[StoredValue] = []
    for (device, nodes, found), begin in zip(splits, begins, strict=False):
        stored += stored_of(found, [leaves + node for node in nodes], len(blocks), begin)
        blocks += blocks_of(found, device)
    for device, those in between.items():
        for size, values in those:
            for one in values:
                # A span that ends behind the last split is that of an output.
                last = begins[min(one.last_split + 1, len(splits))] - 1
                stored.append(
                    StoredValue(
                        one.value,
                        len(blocks),
                        one.offset_bytes,
                        one.size_bytes,
                        begins[one.first_split],
                        last,
                    )
                )
            blocks.append(MemoryBlock(device, size, MemoryUse.BETWEEN))
    return tuple(blocks), tuple(stored)


def map_of(report: PlanReport, leaves: int) -> MemoryMap:
    """Return the memory of a reported plan, as that of a plan on one device."""
    sizes = tuple(one.size_bytes for one in report.blocks)
    fixed = (place for place, one in enumerate(report.blocks) if one.use is MemoryUse.CONSTANTS)
    results = tuple(
        StoredResult(
            one.value - leaves, one.block, one.offset_bytes, one.size_bytes, one.first_step, one.last_step
        )
        for one in report.stored
        if one.value >= leaves
    )
    return MemoryMap(sizes, next(fixed, len(sizes)), results, sum(one.memory_steps for one in report.splits))
