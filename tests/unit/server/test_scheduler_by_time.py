"""Placement by predicted time: where stretches of a graph run on devices of several sites."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import product
from random import Random

import pytest
from placed_by_time import (
    WEIGHT_BYTES,
    candidate,
    fits,
    layers,
    links,
    placed_at,
    predicted,
    stretched,
    where,
)
from scheduling_graphs import Checker, random_problem

from heliograph_proto.errors import HeliographError, OutOfMemoryError
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.plans import Cause
from heliograph_proto.types import tensor_type
from heliograph_server.scheduler.costs import NodeWork, costs_of, mean_rates, work_of
from heliograph_server.scheduler.model import Problem, Rates, SiteLink
from heliograph_server.scheduler.pipeline_stages import MOST_ALL_ORDERS, MOST_CUTS
from heliograph_server.scheduler.schedule import schedule

#: Room for so many weights, and a little for results.
ROOM_FOR = [number * WEIGHT_BYTES + WEIGHT_BYTES // 2 for number in range(10)]


def test_one_device_that_has_room_and_is_the_fastest_has_everything() -> None:
    graph = layers([4000] * 6)
    devices = [candidate(graph, place, [seconds] * 6) for place, seconds in enumerate((0.2, 0.1, 0.3))]
    problem = Problem(graph, devices, links=links(3, 1e-3, 1e8))
    found = schedule(problem)
    assert where(found) == [1] * 6 and not found.copied_bytes
    assert predicted(problem, found).seconds == pytest.approx(0.6)


def test_two_equal_boxes_that_are_too_small_are_cut_where_the_least_crosses() -> None:
    graph = layers([40_000, 40_000, 400, 40_000, 40_000])
    devices = [candidate(graph, place, [0.1] * 5, ROOM_FOR[3]) for place in range(2)]
    problem = Problem(graph, devices, links=links(2, 2e-3, 1e6))
    found = schedule(problem)
    assert where(found) == [0, 0, 0, 1, 1]
    # Five nodes, half a round trip, and 400 bytes at one megabyte a second.
    assert predicted(problem, found).seconds == pytest.approx(0.5 + 1e-3 + 4e-4)


def test_memory_alone_would_have_cut_where_the_first_box_is_full() -> None:
    graph = layers([40_000, 400, 40_000, 40_000])
    devices = [candidate(graph, place, [0.1] * 4, ROOM_FOR[3]) for place in range(2)]
    problem = Problem(graph, devices)
    assert where(schedule(problem)) == [0, 0, 0, 1]
    assert where(schedule(replace(problem, links=links(2, 2e-3, 1e6)))) == [0, 0, 1, 1]


@pytest.mark.parametrize(("bytes_per_s", "crossings"), [(1e9, 1), (1e3, 0)])
def test_a_slow_link_is_crossed_less(bytes_per_s: float, crossings: int) -> None:
    """Over a fast one the second half goes where it takes a third of the time."""
    graph = layers([4000] * 4)
    devices = [candidate(graph, 0, [0.1, 0.1, 0.3, 0.3]), candidate(graph, 1, [0.3, 0.3, 0.1, 0.1])]
    found = schedule(Problem(graph, devices, links=links(2, 1e-3, bytes_per_s)))
    assert len(found.splits) - 1 == crossings


def test_a_slow_box_gets_less() -> None:
    """Both have room for six of eight."""
    graph = layers([4000] * 8)
    devices = [candidate(graph, 0, [0.3] * 8, ROOM_FOR[6]), candidate(graph, 1, [0.1] * 8, ROOM_FOR[6])]
    found = where(schedule(Problem(graph, devices, links=links(2, 1e-3, 1e8))))
    assert found.count(0) == 2 and found.count(1) == 6


def test_a_slow_box_between_two_fast_ones_is_the_last_choice() -> None:
    graph = layers([4000] * 4)
    devices = [candidate(graph, n, [one] * 4, ROOM_FOR[2]) for n, one in enumerate((0.1, 0.9, 0.1))]
    assert set(where(schedule(Problem(graph, devices, links=links(3, 1e-3, 1e8))))) == {0, 2}


def test_the_box_that_is_near_is_taken_before_one_that_is_far() -> None:
    graph = layers([4000] * 4)
    devices = [candidate(graph, place, [0.1] * 4, ROOM_FOR[2]) for place in range(3)]
    found = links(3, 0.5, 1e8)
    found[0, 2] = found[2, 0] = SiteLink(1e-3, 1e8, is_measured=True)
    assert set(where(schedule(Problem(graph, devices, links=found)))) == {0, 2}


def test_with_runs_under_way_at_once_it_is_the_slowest_stage_that_counts() -> None:
    """One device runs all in 0.6 s; three, a third each, end a run every 0.2 s."""
    graph = layers([4000] * 6)
    devices = [candidate(graph, place, [0.1] * 6) for place in range(3)]
    alone = Problem(graph, devices, links=links(3, 1e-3, 1e8))
    assert where(schedule(alone)) == [0] * 6
    many = replace(alone, pipeline=4)
    found = schedule(many)
    assert sorted(where(found).count(place) for place in range(3)) == [2, 2, 2]
    assert predicted(many, found).every_s(4) == pytest.approx(0.2)


def test_results_of_all_runs_that_are_under_way_need_room() -> None:
    """A result has 0.4 of a weight's bytes, and there is room for a weight and a half beside three."""
    graph = layers([WEIGHT_BYTES * 2 // 5] * 4)
    devices = [candidate(graph, place, [0.1] * 4, ROOM_FOR[4]) for place in range(2)]
    problem = Problem(graph, devices, links=links(2, 1e-3, 1e12))
    assert where(schedule(problem)).count(0) in (0, 4) or len(schedule(problem).splits) == 2
    found = schedule(replace(problem, pipeline=2))
    assert sorted(where(found).count(place) for place in range(2)) == [2, 2]


def test_what_takes_less_than_the_way_there_and_back_stays_here() -> None:
    """Two nodes of 2 ms each here, of 0.1 ms there; 4000 bytes go there and back, at 4 MB/s 1 ms each way."""
    graph = layers([4000] * 2)
    devices = [candidate(graph, 0, [2e-3] * 2), candidate(graph, 1, [1e-4] * 2)]
    problem = Problem(graph, devices, links=links(2, 1e-3, 4e6))
    far = replace(problem, origins={1: SiteLink(6e-3, 4e6)})
    near = replace(problem, origins={1: SiteLink(1e-3, 4e6)})
    assert where(schedule(far)) == [0, 0] and where(schedule(near)) == [1, 1]
    assert predicted(far, schedule(far)).seconds == pytest.approx(4e-3)
    assert predicted(near, schedule(near)).seconds == pytest.approx(2 * (0.5e-3 + 1e-3) + 2e-4)


def test_inputs_are_on_their_way_while_others_compute() -> None:
    """The second node, elsewhere, reads an input of its own."""
    type = tensor_type("f32", (1000,))
    leaves = (Leaf(LeafKind.INPUT, "x", type), Leaf(LeafKind.INPUT, "z", type))
    nodes = (Node("neg", (0,), type), Node("add", (2, 1), type))
    graph = Graph(leaves, nodes, (Output("y", 3),))
    devices = [candidate(graph, 0, [0.1, 9.0]), candidate(graph, 1, [9.0, 0.1])]
    problem = Problem(graph, devices, links=links(2, 2e-3, 4e6), origins={1: SiteLink(4e-3, 4e6)})
    found = predicted(problem, placed_at(problem, [0, 1]))
    assert found.splits[1].copy_s == pytest.approx(2e-3)
    assert found.seconds == pytest.approx(0.1 + 2e-3 + 0.1 + 2e-3 + 1e-3)


def test_pins_always_win() -> None:
    graph = layers([4000] * 4)
    devices = [candidate(graph, 0, [0.1] * 4), candidate(graph, 1, [0.9] * 4)]
    found = schedule(Problem(graph, devices, pins={2: 1}, links=links(2, 1e-3, 1e8)))
    assert where(found)[2] == 1 and found.assignments[2].cause is Cause.USER
    assert where(found)[:2] == [0, 0] and where(found)[3] == 0


def test_what_lies_somewhere_already_is_used_there() -> None:
    graph = layers([4000] * 3)
    devices = [candidate(graph, 0, [0.1] * 3), candidate(graph, 1, [0.2] * 3)]
    found = schedule(Problem(graph, devices, placed={1: 1, 2: 1, 3: 1}, links=links(2, 1e-3, 1e8)))
    assert where(found) == [1, 1, 1] and found.homes == (-1, 1, 1, 1)


def test_what_a_device_cannot_run_goes_elsewhere() -> None:
    graph = layers([4000] * 4)
    fast = candidate(graph, 0, [0.1] * 4, lacks=[1])
    found = schedule(Problem(graph, [fast, candidate(graph, 1, [0.3] * 4)], links=links(2, 1e-3, 1e8)))
    assert where(found)[1] == 1 and where(found)[2:] == [0, 0]


def test_who_was_not_asked_for_runs_only_what_the_others_cannot() -> None:
    graph = layers([4000] * 3)
    devices = [candidate(graph, place, [seconds] * 3) for place, seconds in enumerate((0.5, 0.5, 0.1))]
    assert 2 not in where(schedule(Problem(graph, devices, links=links(3, 1e-3, 1e8), chosen=2)))


def test_nodes_without_weights_follow_the_prediction_and_say_so() -> None:
    type = tensor_type("f32", (1000,))
    leaves = (Leaf(LeafKind.INPUT, "x", type),)
    graph = Graph(leaves, tuple(Node("neg", (n,), type) for n in range(4)), (Output("y", 4),))
    devices = [candidate(graph, place, [seconds] * 4) for place, seconds in enumerate((0.3, 0.1))]
    found = schedule(Problem(graph, devices, links=links(2, 1e-3, 1e8)))
    assert where(found) == [1] * 4 and {one.cause for one in found.assignments} == {Cause.PREDICTED}


def test_equal_ways_to_place_a_graph_always_give_the_same_one() -> None:
    graph = layers([4000] * 7)
    devices = [candidate(graph, place, [0.1] * 7, ROOM_FOR[3]) for place in range(4)]
    problem = Problem(graph, devices, links=links(4, 1e-3, 1e8))
    assert len({schedule(problem).assignments for _ in range(5)}) == 1


# Against all placements


def random_chain(seed: int) -> tuple[Problem, dict[int, int]]:
    """Up to seven nodes over up to three devices, and how many weights each of these holds."""
    random = Random(seed)
    count, devices = random.randint(2, 7), random.randint(2, 3)
    graph = layers([4 * random.randint(1, 2000) for _ in range(count)])
    most = {place: random.randint((count + devices - 1) // devices, count) for place in range(devices)}
    found = [
        candidate(graph, place, [random.uniform(0.01, 0.1) for _ in range(count)], ROOM_FOR[most[place]])
        for place in range(devices)
    ]
    ways = {
        there: SiteLink(random.uniform(1e-4, 0.1), random.uniform(1e5, 1e8), is_measured=True)
        for there in links(devices, 0.0, 1.0)
    }
    away = {
        place: SiteLink(random.uniform(1e-4, 0.1), random.uniform(1e5, 1e8)) for place in range(1, devices)
    }
    return Problem(graph, found, links=ways, pipeline=random.choice((1, 1, 2, 8)), origins=away), most


@pytest.mark.parametrize("seed", range(40))
def test_of_all_ways_to_cut_a_chain_into_stretches_it_finds_the_fastest(seed: int) -> None:
    problem, most = random_chain(seed)
    problem = replace(problem, pipeline=1)
    ways = (
        one for one in stretched(len(problem.graph.nodes), len(problem.devices)) if fits(problem, one, most)
    )
    fastest = min(predicted(problem, placed_at(problem, one)).seconds for one in ways)
    assert predicted(problem, schedule(problem)).seconds <= fastest * (1 + 1e-9), f"seed {seed}"


@pytest.mark.parametrize("seed", range(20))
def test_no_placement_at_all_is_faster_than_the_fastest_of_all(seed: int) -> None:
    """What it finds is one of all placements, predicted as these are; and never slower than memory's."""
    problem, most = random_chain(seed)
    nodes, devices = len(problem.graph.nodes), len(problem.devices)
    everything = (one for one in product(range(devices), repeat=nodes) if fits(problem, one, most))
    fastest = min(predicted(problem, placed_at(problem, one)).every_s(problem.pipeline) for one in everything)
    found = predicted(problem, schedule(problem)).every_s(problem.pipeline)
    by_memory = predicted(problem, schedule(replace(problem, links={}))).every_s(problem.pipeline)
    assert fastest * (1 - 1e-9) <= found <= by_memory, f"seed {seed}"


@pytest.mark.parametrize("seed", range(150))
def test_any_graph_runs_as_it_would_on_one_device(seed: int) -> None:
    """Gaps, shared memories, pins, placed leaves, variables: whatever times say, the results are the same."""
    problem, random = random_problem(seed), Random(seed)
    problem = replace(
        problem,
        links=links(len(problem.devices), random.uniform(0, 1e-2), random.uniform(1e3, 1e9)),
        pipeline=random.choice((1, 4)),
        devices=[
            replace(one, rates=Rates().slowed(random.uniform(0.1, 10)) if random.random() < 0.5 else None)
            for one in problem.devices
        ],
    )
    try:
        found = schedule(problem)
    except HeliographError as error:
        with pytest.raises(type(error)):
            schedule(replace(problem, links={}))
        return
    Checker(problem, found).check(random)
    with suppress(OutOfMemoryError):
        slowest = predicted(problem, schedule(replace(problem, links={}))).every_s(problem.pipeline)
        assert predicted(problem, found).every_s(problem.pipeline) <= slowest, f"seed {seed}"


def test_more_devices_than_orders_can_be_tried_of_and_more_nodes_than_cuts() -> None:
    devices, nodes = MOST_ALL_ORDERS + 2, 3 * MOST_CUTS[0]
    graph = layers([4000] * nodes)
    free_bytes = (nodes // devices + 5) * WEIGHT_BYTES
    found = [replace(candidate(graph, 0, [0.01] * nodes, free_bytes), name=str(n)) for n in range(devices)]
    found = [replace(one, reads=frozenset((n,))) for n, one in enumerate(found)]
    ways = links(devices, 0.5, 1e8)
    for one, other in zip((0, 3, 1, 5, 2, 6), (3, 1, 5, 2, 6, 4), strict=True):
        ways[one, other] = ways[other, one] = SiteLink(1e-3, 1e8, is_measured=True)
    made = schedule(Problem(graph, found, links=ways))
    order = [split.device for split in made.splits]
    assert order in ([0, 3, 1, 5, 2, 6, 4], [4, 6, 2, 5, 1, 3, 0])


# What is estimated


def test_a_node_takes_as_long_as_its_arithmetic_or_its_bytes() -> None:
    rates = Rates(flops_per_s=1e9, bytes_per_s=1e8, node_s=0.0)
    assert NodeWork(2e9, 1e8).seconds(rates) == 2.0 and NodeWork(1e9, 3e8).seconds(rates) == 3.0
    square = tensor_type("f32", (100, 100))
    assert work_of("matmul", [square, square], square) == NodeWork(2e6, 120_000)
    table = tensor_type("f32", (10_000, 100))
    few = tensor_type("i32", (5,))
    assert work_of("get_rows", [table, few], tensor_type("f32", (5, 100))).size_bytes == 2 * 2000 + 20
    assert work_of("reshape", [square], square).seconds(rates) == 0.0


def test_a_device_of_which_nothing_is_known_counts_as_the_others_do() -> None:
    graph = layers([4000] * 2)
    devices = [replace(candidate(graph, place, []), times={}) for place in range(3)]
    known = [Rates().slowed(2.0), None, Rates().slowed(8.0)]
    devices = [replace(one, rates=rates) for one, rates in zip(devices, known, strict=True)]
    fast, unknown, slow = costs_of(Problem(graph, devices)).nodes[:, 0]
    assert unknown == pytest.approx(2 * fast) and slow == pytest.approx(4 * fast)
    assert mean_rates([]) == Rates()


def test_a_copy_takes_half_a_round_trip_and_its_bytes() -> None:
    graph = layers([4000] * 2)
    problem = Problem(graph, [candidate(graph, place, [0.1] * 2) for place in range(3)])
    costs = costs_of(replace(problem, links={(0, 1): SiteLink(2e-3, 1e6, is_measured=True)}))
    assert costs.copy(0, 1, 1000) == pytest.approx(2e-3)
    assert costs.copy(0, 0, 1000) == 0.0
    assert 0.0 < costs.copy(0, 2, 1000) < 1e-6


def test_devices_overlap_as_far_as_their_splits_do() -> None:
    """Two branches of 0.3 s and 0.2 s, joined by 0.1 s on the first one's device."""
    type = tensor_type("f32", (1000,))
    nodes = (Node("neg", (0,), type), Node("sqr", (0,), type), Node("add", (1, 2), type))
    graph = Graph((Leaf(LeafKind.INPUT, "x", type),), nodes, (Output("y", 3),))
    devices = [candidate(graph, 0, [0.3, 9.0, 0.1]), candidate(graph, 1, [9.0, 0.2, 9.0])]
    problem = Problem(graph, devices, links=links(2, 0.2, 1e6))
    found = predicted(problem, placed_at(problem, [0, 1, 0]))
    # The second branch has come at 0.2 + 0.1 + 0.004.
    assert [one.began_s for one in found.splits] == pytest.approx([0.0, 0.0, 0.3])
    assert found.splits[2].copy_s == pytest.approx(0.104) and found.seconds == pytest.approx(0.504)
