"""Schedules cut into partitions: random ones, run in any order, give the unsplit graph's results."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from scheduling_graphs import Symbols, interpret, random_problem

from heliograph_proto.errors import HeliographError, UnsupportedError
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.plans import Cause
from heliograph_proto.types import tensor_type
from heliograph_server.scheduler.model import Assignment, Candidate, Problem, Schedule
from heliograph_server.scheduler.partitions import PartitionGraph, Partitions, cut_partitions
from heliograph_server.scheduler.schedule import schedule
from heliograph_server.scheduler.splits import split

BATCHES, BATCH = 4, 500
F4 = tensor_type("f32", (4,))


def sites_of(problem: Problem, random: Random) -> list[int]:
    """Random hosts: devices that read each other's memory are of one."""
    sites = list(range(len(problem.devices)))
    random.shuffle(sites)
    for place, device in enumerate(problem.devices):
        for other in device.reads:
            gone, stays = sites[other], sites[place]
            sites = [stays if site == gone else site for site in sites]
    return sites


class Symbolic:
    """Partitions that run on symbols, a split at a time."""

    def __init__(self, graph: Graph, partitions: Partitions, symbols: Symbols) -> None:
        self.graph, self.partitions, self.symbols = graph, partitions, symbols
        self.leaves = [symbols.of("leaf", value) for value in range(len(graph.leaves))]
        self.values: list[list[int | None]] = [self._leaves(one) for one in partitions.pieces]

    def _leaves(self, piece: PartitionGraph) -> list[int | None]:
        found: list[int | None] = [None] * len(piece.graph.leaves)
        given = (n for n, leaf in enumerate(piece.graph.leaves) if leaf.kind is LeafKind.INPUT)
        arriving = {one.leaf for one in self.partitions.crossings if self.piece(one.target) is piece}
        own = (n for n in given if n not in arriving)
        for leaf, value in zip(own, piece.inputs, strict=True):
            found[leaf] = self.leaves[value]
        return found

    def piece(self, place: int) -> PartitionGraph:
        return self.partitions.pieces[place]

    def step(self, place: int) -> bool:
        """Runs the next node of a partition, if what it reads has arrived."""
        piece, values = self.piece(place), self.values[place]
        number = len(values) - len(piece.graph.leaves)
        if number == len(piece.graph.nodes):
            return False
        bound, node = dict(piece.bound), piece.graph.nodes[number]
        read = [self.leaves[bound[one]] if one in bound else values[one] for one in node.operands]
        if None in read:
            return False
        if number in piece.inserted:
            made = read[0]
        else:
            made = read[1] if node.op == "assign" else self.symbols.of(piece.nodes[number], *read)
        if node.op == "assign":
            assert read[1] is not None
            self.leaves[bound[node.operands[0]]] = read[1]
        values.append(made)
        for one in self.partitions.crossings:
            if one.source == place and one.node == number:
                assert self.values[one.target][one.leaf] is None, "a value arrives twice"
                self.values[one.target][one.leaf] = made
        return True

    def run(self, random: Random) -> list[int | None]:
        places = list(range(len(self.partitions.pieces)))
        while places:
            random.shuffle(places)
            moved = [self.step(place) for place in places]
            places = [
                place
                for place in places
                if len(self.values[place])
                < len(self.piece(place).graph.leaves + self.piece(place).graph.nodes)
            ]
            assert any(moved) or not places, "partitions wait for each other"
        found = [
            self.leaves[one.value] if one.value < len(self.leaves) else None for one in self.graph.outputs
        ]
        for piece, values in zip(self.partitions.pieces, self.values, strict=True):
            for place, port in zip(piece.outputs, piece.graph.outputs, strict=False):
                assert found[place] is None, "an output is made twice"
                found[place] = values[port.value]
        return found


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_partitions_have_the_results_of_the_unsplit_graph_in_any_order(batch: int) -> None:
    met: Counter[str] = Counter()
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        problem, random = random_problem(seed), Random(seed)
        try:
            found = schedule(problem)
            partitions = cut_partitions(problem.graph, found, sites_of(problem, random))
        except HeliographError:
            continue
        symbols = Symbols()
        expected, _ = interpret(problem.graph, symbols)
        try:
            assert Symbolic(problem.graph, partitions, symbols).run(random) == expected
            check_pieces(found, partitions)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        met["crossings"] += bool(partitions.crossings)
        met["inserted"] += any(one.inserted for one in partitions.pieces)
        met["repeated"] += any(one.repeated for one in partitions.pieces)
    least = min(met["inserted"], 2 * met["repeated"])
    assert met["crossings"] > BATCH / 10 and least > BATCH / 20, f"too few have what is checked: {met}"


def check_pieces(found: Schedule, partitions: Partitions) -> None:
    """Every node runs once, on its device, and splits begin where they did."""
    numbers = sorted(
        number
        for piece in partitions.pieces
        for place, number in enumerate(piece.nodes)
        if place not in piece.inserted | piece.repeated
    )
    assert numbers == list(range(len(found.assignments)))
    for piece in partitions.pieces:
        for place, number in enumerate(piece.nodes):
            if place not in piece.inserted | piece.repeated:
                assert piece.devices[place] == found.assignments[number].device
        # A split may begin with what its first node reads and another partition computes too.
        own = [n for n in range(len(piece.nodes)) if n not in piece.repeated]
        begins = {piece.nodes[next(n for n in own if n >= place)] for place in piece.begins}
        assert begins <= {one.nodes[0] for one in found.splits}
    names = [(one.source, one.node, one.target) for one in partitions.crossings]
    assert len(set(names)) == len(names), "a value goes to a partition twice"


def alternating(*devices: int) -> tuple[Graph, Schedule]:
    """A chain on these devices, each node in a split of its own."""
    nodes = tuple(Node("neg", (n,), F4) for n in range(len(devices)))
    graph = Graph((Leaf(LeafKind.INPUT, "x", F4),), nodes, (Output("y", len(devices)),))
    return graph, scheduled(graph, [-1], devices)


def scheduled(graph: Graph, homes: list[int], devices: tuple[int, ...]) -> Schedule:
    count = max((*homes, *devices)) + 1
    asked = [Candidate(str(n), (), frozenset((n,)), 0) for n in range(count)]
    return split(Problem(graph, asked), homes, [Assignment(one, Cause.USER) for one in devices])


def test_a_chain_over_two_hosts_is_two_partitions_whose_values_cross_each_time() -> None:
    graph, found = alternating(0, 1, 0, 1)
    partitions = cut_partitions(graph, found, [0, 1])
    assert [one.nodes for one in partitions.pieces] == [(0, 2), (1, 3)]
    assert [(one.value, one.source, one.target) for one in partitions.crossings] == [
        (1, 0, 1),
        (2, 1, 0),
        (3, 0, 1),
    ]
    assert partitions.pieces[1].outputs == (0,) and partitions.pieces[0].outputs == ()


def test_a_mask_is_computed_where_it_is_read_from_positions_that_cross() -> None:
    """Its bytes do not cross, nor does what it alone is made of."""
    places, few, many = tensor_type("i32", (4,)), tensor_type("f32", (4, 1)), tensor_type("f32", (4, 512))
    leaves = Leaf(LeafKind.INPUT, "start", places), Leaf(LeafKind.WEIGHT, "steps", places)
    seen = tensor_type("bool", (4, 512))
    nodes = (
        Node("mul", (0, 1), places),
        Node("cast", (2,), tensor_type("f32", (4,)), {"dtype": "f32"}),
        Node("reshape", (3,), few, {"shape": (4, 1)}),
        Node("arange", (), tensor_type("f32", (512,))),
        Node("sub", (4, 5), many),
        Node("greater_equal", (6, 5), seen),
        Node("where", (7, 6, 6), many),
        Node("exp", (8,), many),
        Node("exp", (8,), many),
    )
    graph = Graph(leaves, nodes, (Output("here", 9), Output("there", 10)))
    found = scheduled(graph, [-1, 0], (0,) * 8 + (1,))
    partitions = cut_partitions(graph, found, [0, 1])
    assert [(one.value, one.target) for one in partitions.crossings] == [(2, 1)]
    there = partitions.pieces[1]
    assert [one.op for one in there.graph.nodes] == [one.op for one in nodes[1:7]] + ["exp"]
    assert there.repeated == set(range(6)) and not partitions.pieces[0].repeated
    without = cut_partitions(graph, found, [0, 1], repeats=False)
    assert [(one.value, one.target) for one in without.crossings] == [(8, 1)]


def test_devices_of_one_host_are_one_partition_without_edges() -> None:
    graph, found = alternating(0, 1, 0)
    (piece,) = (partitions := cut_partitions(graph, found, [4, 4])).pieces
    assert piece.nodes == (0, 1, 2) and piece.devices == (0, 1, 0) and not partitions.crossings
    assert piece.begins == {0, 1, 2}


def test_a_variable_goes_to_another_host_as_it_is_before_and_after_an_assignment() -> None:
    leaves = Leaf(LeafKind.VARIABLE, "v", F4), Leaf(LeafKind.INPUT, "x", F4)
    nodes = (
        Node("add", (0, 1), F4),
        Node("assign", (0, 1), F4),
        Node("add", (0, 2), F4),
        Node("mul", (0, 4), F4),
    )
    graph = Graph(leaves, nodes, (Output("y", 5),))
    partitions = cut_partitions(graph, scheduled(graph, [0, -1], (1, 0, 1, 1)), [0, 1])
    home, reader = partitions.pieces
    assert [one.op for one in home.graph.nodes] == ["cont", "assign", "cont"]
    assert home.inserted == {0, 2} and home.nodes == (0, 1, 2)
    assert [(one.node, one.leaf) for one in partitions.crossings] == [(0, 0), (2, 2)]
    assert len(reader.graph.leaves) == 3


def test_a_schedule_whose_nodes_are_observed_is_not_cut() -> None:
    graph, found = alternating(0, 1)
    with pytest.raises(UnsupportedError, match="observed"):
        cut_partitions(graph, replace(found, taps=frozenset((0,))), [0, 1])
