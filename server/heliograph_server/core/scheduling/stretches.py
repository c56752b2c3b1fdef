"""Where stretches of a graph run, by predicted time: for devices of several sites, with ways between them.

The nodes in their order are cut into stretches of consecutive ones, at most one for each device, and the
cheapest way to do so is found by dynamic programming over cut points, after the partitioning of pipelines in
PipeDream (Narayanan et al., 2019) and Alpa (Zheng et al., 2022). A state is the set of devices used so far,
the last of them, and where its stretch ends; so all orders of the devices are looked at. Beyond
`MOST_ALL_ORDERS` devices it is some orders alone: from each device along the fastest ways.

A stretch takes what its nodes compute and what is copied to it: what it reads and was made before, as if all
of that came from the device before it. To the first one inputs are sent, and from the last outputs come back.
A node that cannot run on its stretch's device, or must run elsewhere (a pin, a weight that lies there), costs
the way there and back. What a device has must hold the weights and variables of its stretch and the most
bytes of results that live at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

import numpy as np

from heliograph_server.core.scheduling.costs import Costs, Seconds
from heliograph_server.core.scheduling.flow import Flow, Ints, between
from heliograph_server.core.scheduling.model import Problem

#: Up to so many devices all orders are looked at.
MOST_ALL_ORDERS = 5
#: At so many places a graph may be cut; of longer ones, at the cheapest places at about equal distances. The
#: second number counts where not all orders are looked at.
MOST_CUTS = 96, 48
#: What differs by less is equal: sums of the same times in another order are not.
SAME = 1 - 1e-9
#: Of the bytes by which ways are compared where orders are guessed.
_GUESS_BYTES = 2**20

_Bools: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"


def stretches(problem: Problem, roots: Sequence[int], costs: Costs) -> list[tuple[int, ...]]:
    """Devices of all nodes, found in one way or several; none where nothing fits. `roots`: `leaf_roots`.

    With one run at a time that of the least time; with several also that whose slowest stage is the fastest.
    """
    count = len(problem.graph.nodes)
    devices = len(problem.devices) if problem.chosen is None else problem.chosen
    if not count or not devices:
        return []
    table = _Table.of(problem, roots, costs, range(devices))
    states = list(_states(devices, costs, table))
    found = [_solve(table, states, _latencies(table), np.add)]
    if problem.pipeline > 1:
        stages = _stages(table)
        slowest = _solve(table, states, stages, np.maximum)
        if slowest is not None:
            # Of all that are no slower, the one that takes the least time.
            bound = slowest[0] * (1 + 1e-9)
            fast = [
                [np.where(stage <= bound, one, np.inf) for stage, one in zip(*rows, strict=True)]
                for rows in zip(stages, _latencies(table), strict=True)
            ]
            found.append(_solve(table, states, fast, np.add))
    made = (_spelled(table, one[1]) for one in found if one is not None)
    return list(dict.fromkeys(made))


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """What stretches between cut points take. Matrices have the first cut as row, the last as column."""

    #: Node numbers before which may be cut; the first is 0, the last the number of nodes.
    cuts: Ints
    #: By device.
    computing: list[Seconds]
    fits: list[_Bools]
    #: Bytes that a stretch reads from before.
    arriving: Seconds
    #: Bytes of inputs, and of all outputs.
    reading: Seconds
    output_bytes: int
    costs: Costs

    @classmethod
    def of(cls, problem: Problem, roots: Sequence[int], costs: Costs, devices: Iterable[int]) -> _Table:
        flow = Flow(problem, roots)
        seconds = _node_seconds(problem, costs, flow)
        few = len(problem.devices) <= MOST_ALL_ORDERS
        cuts = _cuts(flow, seconds.mean(axis=0), MOST_CUTS[0 if few else 1])
        totals = [np.concatenate([[0.0], np.cumsum(seconds[device])])[cuts] for device in devices]
        needs = flow.needs(cuts, problem.pipeline)
        fits = [needs <= problem.devices[device].free_bytes - flow.settled[device] for device in devices]
        computing, outside = [between(one) for one in totals], (flow.reading(cuts), flow.output_bytes)
        return cls(cuts, computing, fits, flow.arriving(cuts), *outside, costs)


def _node_seconds(problem: Problem, costs: Costs, flow: Flow) -> Seconds:
    """By device and node: of one that cannot run there, elsewhere, with the way there and back."""
    able = np.array([[not why for why in one.refusals] for one in problem.devices], dtype=bool)
    for bound in (flow.bound, problem.pins):
        for number, device in bound.items():
            able[:, number] &= np.arange(len(able)) == device
    found = np.where(able, costs.nodes, np.inf)
    for device in np.flatnonzero(~able.all(axis=1)).tolist():
        for other in range(len(able)):
            if other != device:
                there, back = (device, other), (other, device)
                ways = costs.latency(*there) + costs.latency(*back)
                bytes_s = flow.read_bytes * costs.seconds_per_byte(*there)
                bytes_s = bytes_s + flow.result_bytes * costs.seconds_per_byte(*back)
                elsewhere = np.where(able[other], costs.nodes[other] + ways + bytes_s, np.inf)
                found[device] = np.where(able[device], found[device], np.minimum(found[device], elsewhere))
    # What nobody can run is somebody else's to refuse.
    return np.where(np.isfinite(found), found, costs.nodes)


def _cuts(flow: Flow, seconds: Seconds, most: int) -> Ints:
    """Where may be cut: everywhere, or in each of many parts of equal time and weight where least crosses."""
    count = len(seconds)
    if count <= most:
        return np.arange(count + 1)
    share = np.cumsum(_shares(seconds) + _shares(flow.leaf_bytes) + 1 / count)
    part = np.minimum((share / share[-1] * most).astype(np.int64), most - 1)
    crossing = flow.crossing()[:count]
    order = np.lexsort((np.arange(count), crossing, part))
    firsts = order[np.unique(part[order], return_index=True)[1]]
    return np.unique(np.concatenate([[0], firsts, [count]]))


def _shares(values: Seconds) -> Seconds:
    total = values.sum()
    return values / total if total else values


# The search


#: A device, and the states that may come before: their numbers.
_State: TypeAlias = tuple[int, tuple[int, ...]]


def _states(devices: int, costs: Costs, table: _Table) -> Iterator[_State]:
    """In an order in which those before come first, and of equal ones those of devices by priority."""
    if devices <= MOST_ALL_ORDERS:
        yield from _all_orders(devices)
    else:
        number = 0
        for order in _likely_orders(devices, costs, table):
            yield from ((device, tuple(range(number, number + place))) for place, device in enumerate(order))
            number += devices


def _all_orders(devices: int) -> Iterator[_State]:
    numbers: dict[tuple[frozenset[int], int], int] = {}
    for size in range(1, devices + 1):
        for used in combinations(range(devices), size):
            for device in reversed(used):
                rest = frozenset(used) - {device}
                numbers[rest | {device}, device] = len(numbers)
                yield device, tuple(numbers[rest, one] for one in sorted(rest, reverse=True))


def _likely_orders(devices: int, costs: Costs, table: _Table) -> Iterator[list[int]]:
    """From each device on, always to the nearest that is left; of equally near ones to the fastest."""
    seconds = [float(one[0, -1]) for one in table.computing]
    orders: dict[tuple[int, ...], None] = {
        tuple(sorted(range(devices), key=lambda one: (seconds[one], one))): None
    }
    for first in range(devices):
        order, left = [first], set(range(devices)) - {first}
        while left:
            last = order[-1]
            nearest = min(left, key=lambda one: (costs.copy(last, one, _GUESS_BYTES), seconds[one], one))
            order.append(nearest)
            left.remove(nearest)
        orders[tuple(order)] = None
    return map(list, orders)


def _latencies(table: _Table) -> list[list[Seconds]]:
    """By the device before, and that of the stretch: its seconds. The device itself: nothing is before."""
    return [
        [_latency(table, one, other) for other in range(len(table.fits))] for one in range(len(table.fits))
    ]


def _latency(table: _Table, before: int, device: int) -> Seconds:
    costs, taken = table.costs, table.computing[device].copy()
    if before != device:
        arrives = table.arriving > 0
        ways = arrives * costs.latency(before, device)
        taken = taken + ways + table.arriving * costs.seconds_per_byte(before, device)
    elif device in costs.origins:
        sent = table.reading * costs.origin_seconds_per_byte(device)
        taken = taken + sent + (table.reading > 0) * costs.comes(device, 0)
    taken[:, -1] = taken[:, -1] + costs.comes(device, table.output_bytes)
    return np.where(table.fits[device], taken, np.inf)


def _stages(table: _Table) -> list[list[Seconds]]:
    """As `_latencies`: what keeps a device, or the way to it, busy in each run."""
    return [[_stage(table, one, other) for other in range(len(table.fits))] for one in range(len(table.fits))]


def _stage(table: _Table, before: int, device: int) -> Seconds:
    bytes_s = table.costs.origin_seconds_per_byte(device)
    copying = table.arriving * table.costs.seconds_per_byte(before, device)
    copying = np.maximum(copying, table.reading * bytes_s)
    copying[:, -1] = np.maximum(copying[:, -1], table.output_bytes * bytes_s)
    return np.where(table.fits[device], np.maximum(table.computing[device], copying), np.inf)


def _solve(
    table: _Table, states: Sequence[_State], taken: Sequence[Sequence[Seconds]], join: np.ufunc
) -> tuple[float, list[tuple[int, int]]] | None:
    """The best total, and stretches as device and first cut, in order; None where nothing fits. `join` of
    what came before and of the stretch is what counts. Of equal ones the first, so that it is always the
    same."""
    best: list[Seconds] = []
    parents: list[tuple[Ints, Ints]] = []
    every = np.arange(len(table.cuts))
    for device, befores in states:
        value = taken[device][device][0].copy()
        state, cut = np.full(len(every), -1), np.zeros(len(every), dtype=np.int64)
        for before in befores:
            joined = join(best[before][:, None], taken[states[before][0]][device])
            at = joined.argmin(axis=0)
            least = joined[at, every]
            better = least < value * SAME
            value[better], state[better], cut[better] = least[better], before, at[better]
        best.append(value)
        parents.append((state, cut))
    ends = [float(one[-1]) for one in best]
    least_end = min(ends)
    if not math.isfinite(least_end):
        return None
    first = next(number for number, end in enumerate(ends) if end * SAME <= least_end)
    return ends[first], _back(states, parents, first, len(every) - 1)


def _back(
    states: Sequence[_State], parents: Sequence[tuple[Ints, Ints]], state: int, cut: int
) -> list[tuple[int, int]]:
    found = []
    while state >= 0:
        before, first = (int(one[cut]) for one in parents[state])
        found.append((states[state][0], first))
        state, cut = before, first
    return found[::-1]


def _spelled(table: _Table, found: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """The device of every node."""
    ends = [first for _, first in found[1:]] + [len(table.cuts) - 1]
    spans = (
        (device, table.cuts[end] - table.cuts[first])
        for (device, first), end in zip(found, ends, strict=True)
    )
    return tuple(device for device, count in spans for _ in range(int(count)))
