"""What goes from node to node of a graph, and what nodes need in memory, as arrays.

Matrices of stretches of consecutive nodes have the first cut as their row, the last as column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from heliograph_proto.graph import Graph, LeafKind
from heliograph_server.core.scheduling.costs import Seconds
from heliograph_server.core.scheduling.homes import LIGHT_WEIGHTS, VIEWS, deciding, pin_of, uses_of
from heliograph_server.core.scheduling.model import Problem

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


def between(totals: Seconds) -> Seconds:
    """From sums up to each cut to sums between cuts; infinite where there is nothing between."""
    found = totals[None, :] - totals[:, None]
    found[np.tril_indices(len(totals))] = np.inf
    return found


class Flow:
    """What nodes read and hold, and what weights and variables come with them, as arrays by node."""

    def __init__(self, problem: Problem, roots: Sequence[int]) -> None:
        graph = problem.graph
        self._count = len(graph.nodes)
        self._leaves = len(graph.leaves)
        self.result_bytes = _result_bytes(graph)
        #: Of weights and variables, at the node that decides where they lie.
        self.leaf_bytes = np.zeros(self._count)
        #: Of inputs, at the first node that reads each, and of what is returned.
        self.input_bytes = np.zeros(self._count)
        self.output_bytes = self._note_ends(graph)
        #: By device, bytes of what lies there whatever is decided.
        self.settled = [0] * len(problem.devices)
        #: Of nodes that read what lies somewhere already: the device.
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
        #: What a node reads of others' results.
        self.read_bytes = np.bincount(readers, weights=sizes, minlength=self._count)

    def _place(self, problem: Problem, roots: Sequence[int]) -> dict[int, int]:
        """Where each weight and variable that is free counts; by leaf, the node with which it comes."""
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
        """Bytes of outputs that are results; those of inputs are noted."""
        read: set[int] = set()
        inputs = {value for value, leaf in enumerate(graph.leaves) if leaf.kind is LeafKind.INPUT}
        for number, node in enumerate(graph.nodes):
            for value in inputs.intersection(node.operands) - read:
                self.input_bytes[number] += graph.type_of(value).nbytes
                read.add(value)
        made = {port.value for port in graph.outputs if port.value >= self._leaves}
        return sum(graph.type_of(value).nbytes for value in made)

    def reading(self, cuts: Ints) -> Seconds:
        """Bytes of inputs that each stretch reads first."""
        sums = np.concatenate([[0.0], np.cumsum(self.input_bytes)])[cuts]
        found: Seconds = np.maximum(sums[None, :] - sums[:, None], 0.0)
        return found

    def needs(self, cuts: Ints, copies: int) -> Seconds:
        """Bytes that each stretch takes of its device."""
        leaves = between(np.concatenate([[0.0], np.cumsum(self.leaf_bytes)])[cuts])
        return leaves + copies * self._peaks(cuts)

    def _peaks(self, cuts: Ints) -> Seconds:
        found = np.zeros((len(cuts), len(cuts)))
        most = np.maximum.reduceat(self._live, cuts[:-1])
        for first in range(len(cuts) - 1):
            found[first, first + 1 :] = np.maximum.accumulate(most[first:])
        return found

    def crossing(self) -> Seconds:
        """Bytes of all that is made before each node and read by it or later."""
        order = np.lexsort((self._readers, self._values))
        values = self._values[order]
        # Of each value, the last one that reads it.
        lasts = order[np.append(values[1:] != values[:-1], True)] if len(order) else order
        change = np.zeros(self._count + 1)
        np.add.at(change, self._makers[lasts] + 1, self._sizes[lasts])
        np.add.at(change, self._readers[lasts] + 1, -self._sizes[lasts])
        return np.cumsum(change)

    def arriving(self, cuts: Ints) -> Seconds:
        """Bytes that each stretch reads from before it, each value once."""
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
            # Stretches that begin behind the maker and who read it before, and end behind this reader.
            change[first, reader + 1] += self._sizes[number]
            change[reader + 1, reader + 1] -= self._sizes[number]
        return np.maximum(np.cumsum(np.cumsum(change, axis=0), axis=1)[:count, :count], 0.0)


def _follows(graph: Graph, number: int) -> bool:
    """Whether a node runs where its weight lies."""
    op = graph.nodes[number].op
    return op == "assign" or (op not in VIEWS and op not in LIGHT_WEIGHTS)


def _result_bytes(graph: Graph) -> Seconds:
    # Types are few, and asking one costs more than to look it up.
    known: dict[int, int] = {}
    sizes = [
        known.get(id(node.type)) or known.setdefault(id(node.type), node.type.nbytes) for node in graph.nodes
    ]
    return np.array(sizes, dtype=np.float64)


def _edges(
    graph: Graph, made_by: Mapping[int, int], result_bytes: Seconds
) -> tuple[Ints, Ints, Ints, Seconds]:
    """Which value, who makes, who reads, and how many bytes. Of a weight that comes with an earlier node: no
    more than it costs to have the reader run there."""
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
