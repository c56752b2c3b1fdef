"""Choose by predicted time where stretches of a graph run, for devices of several sites with links
between them.

The nodes in their order are cut into stretches of consecutive nodes, at most one for each device.
Dynamic programming over cut points finds the cheapest cut, after the partitioning of pipelines in
PipeDream (Narayanan et al., 2019) and Alpa (Zheng et al., 2022). A state is the set of devices used
so far, the last of them, and the end of its stretch, so all orders of the devices are tried. Beyond
`MOST_ALL_ORDERS` devices only some orders are tried: from each device along the fastest links.

The cost of a stretch is its computing time plus the time of the copies to it: all values that it
reads from before, as if they came from the previous device. The first stretch also receives the
inputs, and the last one returns the outputs. A node that cannot run on its stretch's device, or
that must run elsewhere (a pin, a weight that lies there), costs a transfer there and back. A device
must hold the weights and variables of its stretch and the peak of the results that live at a time.

Matrices of stretches have the first cut as row and the last one as column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

import numpy as np

from heliograph_proto.graph import Graph, LeafKind
from heliograph_server.scheduler.costs import Costs, Seconds
from heliograph_server.scheduler.model import Problem
from heliograph_server.scheduler.weight_homes import LIGHT_WEIGHTS, VIEWS, deciding, pin_of, uses_of

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


def between(totals: Seconds) -> Seconds:
    """Return the sums between cuts from the sums up to each cut; infinite for empty stretches."""
    found = totals[None, :] - totals[:, None]
    found[np.tril_indices(len(totals))] = np.inf
    return found


class GraphFlow:
    """The reads and results of nodes, and the weights and variables that they bring, as arrays by
    node."""

    def __init__(self, problem: Problem, roots: Sequence[int]) -> None:
        graph = problem.graph
        self._count = len(graph.nodes)
        self._leaves = len(graph.leaves)
        self.result_bytes = _result_bytes(graph)
        #: Bytes of weights and variables, at the node that decides their home.
        self.leaf_bytes = np.zeros(self._count)
        #: Bytes of inputs, at the first node that reads each; and of outputs.
        self.input_bytes = np.zeros(self._count)
        self.output_bytes = self._note_ends(graph)
        #: Bytes by device of the leaves whose home is already decided.
        self.settled = [0] * len(problem.devices)
        #: The device of nodes that read a leaf with a decided home.
        self.bound: dict[int, int] = {}
        made_by = self._place(problem, roots)
        self._values, makers, readers, sizes = _edges(graph, made_by, self.result_bytes)
        self._makers, self._readers, self._sizes = makers, readers, sizes
        last = np.arange(self._count)
        np.maximum.at(last, makers, readers)
        lives = np.where([node.op in VIEWS for node in graph.nodes], 0.0, self.result_bytes)
        change = np.zeros(self._count + 1)
        np.add.at(change, np.arange(self._count), lives)
        np.add.at(change, last + 1, -lives)
        self._live = np.cumsum(change)[:-1]
        #: Bytes that a node reads of other nodes' results.
        self.read_bytes = np.bincount(readers, weights=sizes, minlength=self._count)

    def _place(self, problem: Problem, roots: Sequence[int]) -> dict[int, int]:
        """Attribute each free weight and variable to a node; return that node by leaf."""
        graph, found = problem.graph, dict[int, int]()
        for value, place in problem.placed.items():
            self.settled[place] += graph.type_of(value).nbytes
        for value, uses in uses_of(graph, roots).items():
            home = problem.placed.get(value)
            if home is None and (home := pin_of(problem, uses)) is not None:
                self.settled[home] += graph.type_of(value).nbytes
            if home is not None:
                self.bound.update((number, home) for number in uses if _follows(graph, number))
            elif uses:
                found[value] = deciding(graph, uses)[0]
                self.leaf_bytes[found[value]] += graph.type_of(value).nbytes
        return found

    def _note_ends(self, graph: Graph) -> int:
        """Fill `input_bytes`, and return the bytes of outputs that are results."""
        read: set[int] = set()
        inputs = {value for value, leaf in enumerate(graph.leaves) if leaf.kind is LeafKind.INPUT}
        for number, node in enumerate(graph.nodes):
            for value in inputs.intersection(node.operands) - read:
                self.input_bytes[number] += graph.type_of(value).nbytes
                read.add(value)
        made = {port.value for port in graph.outputs if port.value >= self._leaves}
        return sum(graph.type_of(value).nbytes for value in made)

    def reading(self, cuts: Ints) -> Seconds:
        """Return the bytes of inputs that each stretch is the first to read."""
        sums = np.concatenate([[0.0], np.cumsum(self.input_bytes)])[cuts]
        found: Seconds = np.maximum(sums[None, :] - sums[:, None], 0.0)
        return found

    def needs(self, cuts: Ints, copies: int) -> Seconds:
        """Return the bytes that each stretch takes of its device."""
        leaves = between(np.concatenate([[0.0], np.cumsum(self.leaf_bytes)])[cuts])
        return leaves + copies * self._peaks(cuts)

    def _peaks(self, cuts: Ints) -> Seconds:
        found = np.zeros((len(cuts), len(cuts)))
        most = np.maximum.reduceat(self._live, cuts[:-1])
        for first in range(len(cuts) - 1):
            found[first, first + 1 :] = np.maximum.accumulate(most[first:])
        return found

    def crossing(self) -> Seconds:
        """Return the bytes of all values made before each node and read by it or later."""
        order = np.lexsort((self._readers, self._values))
        values = self._values[order]
        # The last reader of each value.
        lasts = order[np.append(values[1:] != values[:-1], True)] if len(order) else order
        change = np.zeros(self._count + 1)
        np.add.at(change, self._makers[lasts] + 1, self._sizes[lasts])
        np.add.at(change, self._readers[lasts] + 1, -self._sizes[lasts])
        return np.cumsum(change)

    def arriving(self, cuts: Ints) -> Seconds:
        """Return the bytes that each stretch reads from before it, each value once."""
        count = len(cuts)
        change = np.zeros((count + 1, count + 1))
        makers = np.searchsorted(cuts, self._makers, "right") - 1
        readers = np.searchsorted(cuts, self._readers, "right") - 1
        crosses = np.flatnonzero(makers < readers)
        order = crosses[np.lexsort((readers[crosses], self._values[crosses]))]
        before = (-1, -1)
        for number in order.tolist():
            value, maker, reader = int(self._values[number]), int(makers[number]), int(readers[number])
            first = (before[1] if before[0] == value else maker) + 1
            before = value, reader
            # Stretches that begin after the maker and the previous reader, and end after this
            # reader.
            change[first, reader + 1] += self._sizes[number]
            change[reader + 1, reader + 1] -= self._sizes[number]
        return np.maximum(np.cumsum(np.cumsum(change, axis=0), axis=1)[:count, :count], 0.0)


def _follows(graph: Graph, number: int) -> bool:
    """True if a node runs where its weight lies."""
    op = graph.nodes[number].op
    return op == "assign" or (op not in VIEWS and op not in LIGHT_WEIGHTS)


def _result_bytes(graph: Graph) -> Seconds:
    # There are few types, and a lookup is cheaper than `nbytes`.
    known: dict[int, int] = {}
    sizes = [
        known.get(id(node.type)) or known.setdefault(id(node.type), node.type.nbytes) for node in graph.nodes
    ]
    return np.array(sizes, dtype=np.float64)


def _edges(
    graph: Graph, made_by: Mapping[int, int], result_bytes: Seconds
) -> tuple[Ints, Ints, Ints, Seconds]:
    """Return arrays of values, their makers, their readers, and bytes.

    A weight that belongs to an earlier node costs at most the transfer of the reader's operands and
    result, as if the reader ran there.
    """
    leaves = len(graph.leaves)
    found: list[tuple[int, int, int]] = []
    sizes: list[float] = []
    known = result_bytes.tolist()
    for number, node in enumerate(graph.nodes):
        for value in node.operands:
            if value >= leaves:
                found.append((value, value - leaves, number))
                sizes.append(known[value - leaves])
            elif (maker := made_by.get(value, number)) < number:
                others = sum([known[one - leaves] for one in node.operands if one >= leaves])
                found.append((value, maker, number))
                sizes.append(min(graph.type_of(value).nbytes, others + known[number]))
    values, makers, readers = np.array(found, dtype=np.int64).reshape(-1, 3).T
    return values, makers, readers, np.array(sizes)


#: Up to this number of devices, all orders are tried.
MOST_ALL_ORDERS = 5
#: The most cut points of a graph; a longer graph is cut at the cheapest points at about equal
#: distances. The second number applies where only some orders are tried.
MOST_CUTS = 96, 48
#: A relative difference below this counts as equal: sums of the same times in another order differ.
SAME = 1 - 1e-9
#: The size of copy by which links are compared for the choice of orders.
_GUESS_BYTES = 2**20

_Bools: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"


def stretches(problem: Problem, roots: Sequence[int], costs: Costs) -> list[tuple[int, ...]]:
    """Return candidate placements: the device of each node; empty if nothing fits. `roots` is
    `leaf_roots`.

    The first has the least time for one run. With several runs at a time, the second has the
    shortest slowest stage.
    """
    count = len(problem.graph.nodes)
    devices = len(problem.devices) if problem.chosen is None else problem.chosen
    if not count or not devices:
        return []
    table = _Table.of(problem, roots, costs, range(devices))
    states = list(_states(devices, costs, table))
    latencies = _by_devices(table, _latency)
    found = [_solve(table, states, latencies, np.add)]
    if problem.pipeline > 1:
        stages = _by_devices(table, _stage)
        slowest = _solve(table, states, stages, np.maximum)
        if slowest is not None:
            # Of all placements that are no slower, the one with the least time.
            bound = slowest[0] * (1 + 1e-9)
            fast = [
                [np.where(stage <= bound, one, np.inf) for stage, one in zip(*rows, strict=True)]
                for rows in zip(stages, latencies, strict=True)
            ]
            found.append(_solve(table, states, fast, np.add))
    made = (_node_devices(table, one[1]) for one in found if one is not None)
    return list(dict.fromkeys(made))


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """The costs of stretches between cut points. Matrices have the first cut as row, the last as
    column."""

    #: Node numbers before which the graph may be cut; the first is 0, the last the number of nodes.
    cuts: Ints
    #: By device.
    computing: list[Seconds]
    fits: list[_Bools]
    #: Bytes that a stretch reads from before it.
    arriving: Seconds
    #: Bytes of the inputs of a stretch, and of all outputs.
    reading: Seconds
    output_bytes: int
    costs: Costs

    @classmethod
    def of(cls, problem: Problem, roots: Sequence[int], costs: Costs, devices: Iterable[int]) -> _Table:
        flow = GraphFlow(problem, roots)
        seconds = _node_seconds(problem, costs, flow)
        few = len(problem.devices) <= MOST_ALL_ORDERS
        cuts = _cuts(flow, seconds.mean(axis=0), MOST_CUTS[0 if few else 1])
        totals = [np.concatenate([[0.0], np.cumsum(seconds[device])])[cuts] for device in devices]
        needs = flow.needs(cuts, problem.pipeline)
        fits = [needs <= problem.devices[device].free_bytes - flow.settled[device] for device in devices]
        computing, outside = [between(one) for one in totals], (flow.reading(cuts), flow.output_bytes)
        return cls(cuts, computing, fits, flow.arriving(cuts), *outside, costs)


def _node_seconds(problem: Problem, costs: Costs, flow: GraphFlow) -> Seconds:
    """Return the seconds by device and node. A node that cannot run on a device counts with its
    time elsewhere and the transfer there and back."""
    able = np.array([[not why for why in one.refusals] for one in problem.devices], dtype=bool)
    for bound in (flow.bound, problem.pins):
        for number, device in bound.items():
            able[:, number] &= np.arange(len(able)) == device
    found = np.where(able, costs.nodes, np.inf)
    for device in np.flatnonzero(~able.all(axis=1)).tolist():
        for other in range(len(able)):
            if other != device:
                there, back = (device, other), (other, device)
                latency_s = costs.latency(*there) + costs.latency(*back)
                bytes_s = flow.read_bytes * costs.seconds_per_byte(*there)
                bytes_s = bytes_s + flow.result_bytes * costs.seconds_per_byte(*back)
                elsewhere = np.where(able[other], costs.nodes[other] + latency_s + bytes_s, np.inf)
                found[device] = np.where(able[device], found[device], np.minimum(found[device], elsewhere))
    # A later pass refuses nodes that no device can run.
    return np.where(np.isfinite(found), found, costs.nodes)


def _cuts(flow: GraphFlow, seconds: Seconds, most: int) -> Ints:
    """Return the cut points: all, or the one with the least crossing bytes in each of `most` parts
    of equal time and weight."""
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


#: A device, and the numbers of the states that may come before it.
_State: TypeAlias = tuple[int, tuple[int, ...]]


def _states(devices: int, costs: Costs, table: _Table) -> Iterator[_State]:
    """Yield the states, predecessors first; of equal ones in the devices' order of priority."""
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
    """Yield orders that begin at each device and always continue with the nearest one left, or the
    fastest of equally near ones."""
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


def _by_devices(table: _Table, measure: Callable[[_Table, int, int], Seconds]) -> list[list[Seconds]]:
    """Return a measure by the previous device and the stretch's device.

    If both are the same, no stretch comes before.
    """
    devices = range(len(table.fits))
    return [[measure(table, before, device) for device in devices] for before in devices]


def _latency(table: _Table, before: int, device: int) -> Seconds:
    """Return the seconds of each stretch."""
    costs, taken = table.costs, table.computing[device].copy()
    if before != device:
        latency_s = (table.arriving > 0) * costs.latency(before, device)
        taken = taken + latency_s + table.arriving * costs.seconds_per_byte(before, device)
    elif device in costs.origins:
        sent = table.reading * costs.origin_seconds_per_byte(device)
        taken = taken + sent + (table.reading > 0) * costs.origin_seconds(device, 0)
    taken[:, -1] = taken[:, -1] + costs.origin_seconds(device, table.output_bytes)
    return np.where(table.fits[device], taken, np.inf)


def _stage(table: _Table, before: int, device: int) -> Seconds:
    """Return how long each stretch keeps its device, or the link to it, busy in each run."""
    bytes_s = table.costs.origin_seconds_per_byte(device)
    copying = table.arriving * table.costs.seconds_per_byte(before, device)
    copying = np.maximum(copying, table.reading * bytes_s)
    copying[:, -1] = np.maximum(copying[:, -1], table.output_bytes * bytes_s)
    return np.where(table.fits[device], np.maximum(table.computing[device], copying), np.inf)


def _solve(
    table: _Table, states: Sequence[_State], taken: Sequence[Sequence[Seconds]], join: np.ufunc
) -> tuple[float, list[tuple[int, int]]] | None:
    """Return the best total and its stretches as (device, first cut), in order; None if nothing
    fits.

    `join` combines the cost before with that of a stretch. Of equal results the first one counts,
    so that the choice is deterministic.
    """
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
    return ends[first], _trace_back(states, parents, first, len(every) - 1)


def _trace_back(
    states: Sequence[_State], parents: Sequence[tuple[Ints, Ints]], state: int, cut: int
) -> list[tuple[int, int]]:
    found = []
    while state >= 0:
        before, first = (int(one[cut]) for one in parents[state])
        found.append((states[state][0], first))
        state, cut = before, first
    return found[::-1]


def _node_devices(table: _Table, found: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return the device of each node."""
    ends = [first for _, first in found[1:]] + [len(table.cuts) - 1]
    spans = (
        (device, table.cuts[end] - table.cuts[first])
        for (device, first), end in zip(found, ends, strict=True)
    )
    return tuple(device for device, count in spans for _ in range(int(count)))
