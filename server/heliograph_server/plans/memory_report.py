"""Reports of the memory that a plan computes in. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from heliograph_backends.contract import MemoryMap, StoredResult
from heliograph_proto.plans import MemoryBlock, MemoryUse, PlanReport, StoredValue
from heliograph_server.plans.split_copies import StoredBetween
from heliograph_server.scheduler.partitions import PartitionGraph, Partitions

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


@dataclass(frozen=True, slots=True)
class HostsMemory:
    """The memory of a plan over several hosts, and the steps of each of its splits."""

    blocks: tuple[MemoryBlock, ...]
    stored: tuple[StoredValue, ...]
    steps: Mapping[int, int]

    def between(self, devices: Sequence[str]) -> dict[str, int]:
        """The bytes between splits, by device."""
        found: Counter[str] = Counter()
        for one in self.blocks:
            if one.use is MemoryUse.BETWEEN:
                found[devices[one.device]] += one.size_bytes
        return found


def memory_of_hosts(
    leaves: int, partitions: Partitions, reports: Mapping[int, PlanReport], split_of: Mapping[int, int]
) -> HostsMemory:
    """Return the memory of all partitions, by their reports, with the whole graph's numbers.

    The steps of the whole plan are those of the partitions' splits, in the order of the splits that
    they were made of. Hosts that do not tell have no blocks.
    """
    told = {place: one for place, one in reports.items() if any(it.memory_steps for it in one.splits)}
    splits = sorted(
        (whole, place, number, max(1, told[place].splits[number].memory_steps))
        for place in told
        for number, whole in enumerate(_wholes(partitions.pieces[place], told[place], split_of))
    )
    begins = [0, *accumulate(steps for *_, steps in splits)]
    begin_of = {(place, split): begin for (_, place, split, _), begin in zip(splits, begins, strict=False)}
    blocks: list[MemoryBlock] = []
    stored: list[StoredValue] = []
    for place, report in told.items():
        piece, first_block = partitions.pieces[place], len(blocks)
        devices, values = _devices(piece, report), _values(leaves, place, partitions)
        # The step of the whole plan of each step of the partition.
        steps = [
            begin_of[place, number] + step
            for number, one in enumerate(report.splits)
            for step in range(max(1, one.memory_steps))
        ]
        blocks += [replace(one, device=devices[one.device]) for one in report.blocks]
        stored += [
            replace(
                one,
                value=values[one.value],
                block=first_block + one.block,
                first_step=steps[one.first_step],
                last_step=steps[one.last_step],
            )
            for one in report.stored
        ]
    counts: Counter[int] = Counter()
    for whole, _, _, steps_of_split in splits:
        counts[whole] += steps_of_split
    return HostsMemory(tuple(blocks), tuple(stored), counts)


def _wholes(piece: PartitionGraph, report: PlanReport, split_of: Mapping[int, int]) -> Iterator[int]:
    """Yield the whole plan's split of each split of a partition, in ascending order: that of its
    first node that is in no other partition."""
    firsts: dict[int, int] = {}
    for node, one in enumerate(report.nodes):
        if node not in piece.inserted and node not in piece.repeated:
            firsts.setdefault(one.split, split_of[piece.nodes[node]])
    whole = min(firsts.values(), default=0)
    for number in range(len(report.splits)):
        whole = max(whole, firsts.get(number, whole))
        yield whole


def _devices(piece: PartitionGraph, report: PlanReport) -> list[int]:
    """Return the whole plan's device of each device of a partition."""
    found = [piece.devices[-1]] * len(report.devices)
    for node, one in enumerate(report.nodes):
        found[report.splits[one.split].device] = piece.devices[node]
    return found


def _values(leaves: int, place: int, partitions: Partitions) -> list[int]:
    """Return the whole graph's value of each value of a partition."""
    piece = partitions.pieces[place]
    arriving = {one.leaf: one.value for one in partitions.crossings if one.target == place}
    known = arriving | dict(piece.bound)
    given = iter(piece.inputs)
    found = [known[leaf] if leaf in known else next(given) for leaf in range(len(piece.graph.leaves))]
    return found + [leaves + node for node in piece.nodes]
