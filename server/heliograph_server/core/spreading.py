"""Spreading a graph over devices so that it fits: the scheduler's decisions against what devices estimate.

The scheduler counts weights; what a device keeps beside them, and intermediate results, it learns from the
device's estimate of each split. Where that passes what the device has, its budget shrinks, and the scheduler
decides again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from heliograph_backends.contract import CompileOptions, Device
from heliograph_proto.errors import UnsupportedError
from heliograph_server.core.scheduling import Problem, Schedule, schedule
from heliograph_server.core.scheduling.between import values_between
from heliograph_server.core.scheduling.parts import cut

#: How often budgets shrink before the devices themselves say what does not fit.
ROUNDS = 8


def spread(problem: Problem, devices: Sequence[Device], options: CompileOptions) -> Schedule:
    """A schedule that fits. Raises what `schedule` does."""
    budgets = [one.free_bytes for one in problem.devices]
    found = schedule(problem)
    for _ in range(ROUNDS):
        over = _overshoot(problem, found, devices, options)
        if not any(over):
            break
        budgets = [max(0, budget - more) for budget, more in zip(budgets, over, strict=True)]
        pairs = zip(problem.devices, budgets, strict=True)
        found = schedule(replace(problem, devices=[replace(one, free_bytes=size) for one, size in pairs]))
    return found


def _overshoot(
    problem: Problem, found: Schedule, devices: Sequence[Device], options: CompileOptions
) -> list[int]:
    """By how many bytes a schedule passes what each device has."""
    needs = [0] * len(devices)
    for leaf, home in zip(problem.graph.leaves, found.homes, strict=True):
        if home >= 0:
            needs[home] += devices[home].buffer_type.alloc_size(leaf.type)
    for place, spans in values_between(problem.graph, found).items():
        memory = devices[place].buffer_type
        needs[place] += sum(memory.alloc_size(problem.graph.type_of(value)) for value in spans)
    for part, split in zip(cut(problem.graph, found), found.splits, strict=True):
        try:
            estimate = devices[split.device].estimate(part.graph, options)
        except UnsupportedError:
            continue
        needs[split.device] += sum(estimate.compute_bytes) + estimate.extra_bytes
    return [max(0, need - one.free_bytes) for need, one in zip(needs, problem.devices, strict=True)]
