"""Each pass of the scheduler by itself, and the errors of what cannot be kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from heliograph_proto.errors import InvalidArgumentError, UnsupportedError
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.plans import Cause
from heliograph_proto.types import tensor_type
from heliograph_server.scheduler.assignment import Table, complete, pre_assign, sweep, upgrade
from heliograph_server.scheduler.model import Assignment, Candidate, Problem, Schedule
from heliograph_server.scheduler.schedule import schedule
from heliograph_server.scheduler.splits import split
from heliograph_server.scheduler.weight_homes import leaf_roots, place_leaves

F4 = tensor_type("f32", (4,))
PLENTY = 2**30
KINDS = {"x": LeafKind.INPUT, "w": LeafKind.WEIGHT, "v": LeafKind.VARIABLE}


def graph_of(leaves: str, *nodes: tuple[str, ...]) -> Graph:
    """Leaves by the letters of their kinds, then nodes: an op and its operands, each the name of a leaf
    ("x0", "w1": by their places) or the number of a node."""
    made = tuple(
        Leaf(KINDS[kind], f"{kind}{place}", F4, bytes(32 * (kind == "w")))
        for place, kind in enumerate(leaves)
    )
    numbers = {leaf.name: place for place, leaf in enumerate(made)}
    found = tuple(
        Node(
            op,
            tuple(numbers[x] if x in numbers else len(made) + int(x) for x in operands),
            F4,
            {},
            f"{op}{n}",
        )
        for n, (op, *operands) in enumerate(nodes)
    )
    return Graph(made, found, (Output("y", len(made) + len(found) - 1),))


def devices_of(
    graph: Graph, *refused: Sequence[str], reads: Sequence[set[int]] = (), free: Sequence[int] = ()
) -> list[Candidate]:
    """Devices a, b, ... with the ops that each refuses; the last one's memory is the host's."""
    return [
        Candidate(
            name="abcd"[place],
            refusals=["no kernel" if node.op in ops else "" for node in graph.nodes],
            reads=frozenset(reads[place] if reads else {place}),
            free_bytes=free[place] if free else PLENTY,
            is_host=place == len(refused) - 1,
        )
        for place, ops in enumerate(refused)
    ]


def problem_of(
    graph: Graph,
    *refused: Sequence[str],
    reads: Sequence[set[int]] = (),
    placed: Mapping[int, int] | None = None,
) -> Problem:
    return Problem(graph, devices_of(graph, *refused, reads=reads), placed or {})


def after(problem: Problem, settled: Mapping[int, int], *passes: Callable[[Table], None]) -> str:
    """Devices of the nodes after passes over a table in which some are settled: "-" for none."""
    roots = leaf_roots(problem.graph)
    table = Table(problem, place_leaves(problem, roots), roots)
    for node, device in settled.items():
        table.put(node, device, Cause.WEIGHT)
    for one in passes:
        one(table)
    return "".join("-" if one is None else str(one.device) for one in table.found)


# Leaves


def test_a_leaf_goes_past_a_device_that_cannot_run_what_reads_it() -> None:
    graph = graph_of("xww", ("exp", "x0"), ("matmul", "0", "w1"), ("mul", "1", "w2"))
    problem = problem_of(graph, ("matmul",), ())
    assert place_leaves(problem, leaf_roots(graph)) == (-1, 1, 0)


def test_a_variable_goes_where_its_assignment_can_run() -> None:
    graph = graph_of("xv", ("add", "x0", "v1"), ("assign", "v1", "0"))
    assert place_leaves(problem_of(graph, ("assign",), ()), leaf_roots(graph)) == (-1, 1)


def test_a_leaf_that_no_device_can_use_in_place_still_lies_somewhere() -> None:
    graph = graph_of("xw", ("matmul", "x0", "w1"))
    assert place_leaves(problem_of(graph, ("matmul",), ("matmul",)), leaf_roots(graph)) == (-1, 0)


def test_a_pin_of_an_assignment_decides_before_one_of_a_reader() -> None:
    graph = graph_of("xv", ("add", "x0", "v1"), ("assign", "v1", "0"))
    problem = replace(problem_of(graph, (), ()), pins={0: 0, 1: 1})
    assert place_leaves(problem, leaf_roots(graph)) == (-1, 1)


def test_what_earlier_devices_have_left_is_used_before_memory_is_said_to_be_out() -> None:
    graph = graph_of("xwww", ("add", "x0", "w1"), ("add", "0", "w2"), ("add", "1", "w3"))
    wide = replace(graph.leaves[2], type=tensor_type("f32", (8,)))
    graph = replace(graph, leaves=(*graph.leaves[:2], wide, graph.leaves[3]))
    problem = Problem(graph, devices_of(graph, (), (), free=[32, 32]))
    assert place_leaves(problem, leaf_roots(graph)) == (-1, 0, 1, 0)


# Pre-assign


def test_a_node_goes_where_its_weight_lies_also_through_a_view() -> None:
    graph = graph_of("xw", ("permute", "w1"), ("matmul", "x0", "0"), ("exp", "1"))
    assert after(problem_of(graph, (), (), placed={1: 1}), {}, pre_assign) == "-1-"


@pytest.mark.parametrize("op", ["rope", "flash_attn_ext"])
def test_ops_with_a_light_weight_do_not_follow_it(op: str) -> None:
    graph = graph_of("xw", (op, "x0", "w1"))
    assert after(problem_of(graph, (), (), placed={1: 1}), {}, pre_assign) == "-"


def test_a_weight_on_a_device_that_cannot_run_the_node_is_read_in_place_by_another_or_copied() -> None:
    graph = graph_of("xw", ("matmul", "x0", "w1"))
    refused = (), (), ("matmul",)
    apart = problem_of(graph, *refused, placed={1: 2})
    shared = problem_of(graph, *refused, reads=[{0}, {1, 2}, {2}], placed={1: 2})
    assert after(apart, {}, pre_assign) == "-"
    assert after(shared, {}, pre_assign) == "1"


def offloading(graph: Graph, *, home: int, offload: bool = True) -> Problem:
    """Devices a and b fetch weights from the host, c is the host."""
    candidates = devices_of(graph, ("mul",), (), ())
    fetching = [replace(one, offloads=[True] * len(graph.nodes)) for one in candidates]
    return Problem(graph, fetching, {1: home}, offload=offload)


def test_offload_is_by_priority_and_only_from_host_memory() -> None:
    graph = graph_of("xw", ("matmul", "x0", "w1"), ("mul", "0", "w1"))
    assert after(offloading(graph, home=2), {}, pre_assign) == "01", "the first that can run each"
    assert after(offloading(graph, home=1), {}, pre_assign) == "11", "b's memory is not the host's"
    assert after(offloading(graph, home=2, offload=False), {}, pre_assign) == "22"


def test_an_assignment_is_never_offloaded() -> None:
    graph = graph_of("xv", ("add", "x0", "v1"), ("assign", "v1", "0"))
    assert after(offloading(graph, home=2), {}, pre_assign) == "02"


# Sweep


def chain(count: int) -> Graph:
    nodes = [("neg", "x0" if number == 0 else str(number - 1)) for number in range(count)]
    return graph_of("x", *nodes)


def test_devices_but_the_last_spread_down_then_up_and_never_over_the_last_ones_nodes() -> None:
    problem = problem_of(chain(7), (), (), ())
    assert after(problem, {2: 1, 4: 2}, sweep) == "1111222"
    assert after(problem, {1: 2, 4: 0}, sweep) == "2200000", "up comes before the last device's turn"
    assert after(problem, {1: 0, 3: 2, 5: 1}, sweep) == "0002111"


def test_a_sweep_goes_past_a_node_that_its_device_cannot_run() -> None:
    graph = graph_of("x", ("neg", "x0"), ("exp", "0"), ("neg", "1"))
    assert after(problem_of(graph, ("exp",), ()), {0: 0}, sweep) == "0-0"


def test_a_sweep_leaves_views_alone() -> None:
    graph = graph_of("x", ("neg", "x0"), ("reshape", "0"), ("neg", "1"))
    assert after(problem_of(graph, (), ()), {0: 0}, sweep) == "0-0"


# Upgrade and rescue


def test_only_a_device_that_helps_takes_nodes_over_and_only_in_the_same_memory() -> None:
    graph = chain(3)
    shared = problem_of(graph, ("exp",), (), reads=[{0, 1}, {0, 1}])
    helping = replace(shared, devices=[replace(shared.devices[0], helps=True), shared.devices[1]])
    one_sided = replace(
        helping, devices=[helping.devices[0], replace(shared.devices[1], reads=frozenset({1}))]
    )
    settled = {0: 1, 1: 1, 2: 1}
    assert after(shared, settled, upgrade) == "111"
    assert after(helping, settled, upgrade) == "000"
    assert after(one_sided, settled, upgrade) == "111"


def test_a_pin_is_not_upgraded() -> None:
    graph = chain(2)
    shared = problem_of(graph, (), (), reads=[{0, 1}, {0, 1}])
    problem = replace(
        shared, devices=[replace(shared.devices[0], helps=True), shared.devices[1]], pins={0: 1, 1: 1}
    )
    assert after(problem, {}, pre_assign, sweep, upgrade) == "11"


def test_an_unassigned_node_goes_where_most_of_its_operands_can_be_read() -> None:
    graph = graph_of("x", ("neg", "x0"), ("neg", "x0"), ("neg", "x0"), ("concat", "0", "1", "2"))
    problem = problem_of(graph, (), (), ())
    assert after(problem, {0: 0, 1: 2, 2: 2}, upgrade) == "0222"
    assert after(problem, {0: 0, 1: 1, 2: 2}, upgrade) == "0120", "of equal ones the first"


# The rest


def test_views_follow_their_source_else_their_consumer() -> None:
    graph = graph_of(
        "x", ("neg", "x0"), ("reshape", "0"), ("permute", "1"), ("reshape", "x0"), ("add", "3", "2")
    )
    assert after(problem_of(graph, (), ()), {0: 1, 4: 0}, complete) == "11100"


def test_a_view_that_its_sources_device_cannot_make_is_made_where_it_is_read() -> None:
    graph = graph_of("x", ("neg", "x0"), ("reshape", "0"), ("neg", "1"))
    assert after(problem_of(graph, ("reshape",), ()), {0: 0, 2: 1}, complete) == "011"


def test_a_view_that_nobody_reads_and_whose_source_lies_nowhere_goes_to_the_first_that_can() -> None:
    graph = graph_of("x", ("reshape", "x0"))
    assert after(problem_of(graph, ("reshape",), ()), {}, complete) == "1"


# Splits


def splits_of(problem: Problem, devices: str) -> Schedule:
    homes = place_leaves(problem, leaf_roots(problem.graph))
    return split(problem, homes, [Assignment(int(one), Cause.USER) for one in devices])


def test_each_weight_that_must_be_copied_begins_a_split_behind_other_copies() -> None:
    graph = graph_of("xww", ("matmul", "x0", "w1"), ("neg", "0"), ("matmul", "1", "w2"), ("add", "2", "w2"))
    found = splits_of(problem_of(graph, (), (), placed={1: 1, 2: 1}), "0000")
    assert [one.nodes for one in found.splits] == [(0, 1), (2, 3)]
    assert [[copy.value for copy in one.copies] for one in found.splits] == [[1], [2]]


def test_a_variable_that_is_assigned_to_is_copied_anew_and_one_that_is_not_is_copied_once() -> None:
    nodes = [("add", "x0", "v1"), ("neg", "0"), ("add", "1", "v1")]
    reading = graph_of("xv", *nodes)
    writing = graph_of("xv", *nodes, ("assign", "v1", "1"))
    for graph, count in ((reading, 1), (writing, 2)):
        problem = problem_of(graph, (), (), placed={1: 1})
        found = splits_of(problem, "010" + "1" * (len(graph.nodes) - 3))
        assert sum(copy.value == 1 for one in found.splits for copy in one.copies) == count


def test_a_graph_without_nodes_has_no_splits() -> None:
    graph = Graph(graph_of("xw").leaves, (), (Output("y", 0),))
    found = schedule(problem_of(graph, (), (), placed={1: 1}))
    assert not found.splits and found.main == 0 and found.only == 1


# What cannot be kept


def test_an_assignment_that_cannot_run_where_its_variable_lies_says_so() -> None:
    graph = graph_of("xv", ("neg", "x0"), ("assign", "v1", "0"))
    problem = problem_of(graph, ("assign",), (), placed={1: 0})
    with pytest.raises(UnsupportedError, match="variable 'v1' lies on a.*a: no kernel") as raised:
        schedule(problem)
    assert raised.value.origin.node_name == "assign1"


def test_an_assignment_runs_on_another_device_that_works_in_the_variables_memory() -> None:
    graph = graph_of("xv", ("neg", "x0"), ("assign", "v1", "0"))
    problem = problem_of(graph, ("assign",), (), reads=[{0, 1}, {0, 1}], placed={1: 0})
    assert schedule(problem).assignments[1].device == 1


def test_an_assignment_pinned_to_where_it_cannot_write_its_variable_says_so() -> None:
    graph = graph_of("xv", ("neg", "x0"), ("assign", "v1", "0"), ("assign", "v1", "1"))
    with pytest.raises(InvalidArgumentError, match="assign2.*pinned to b.*variable 'v1'.*lies on a"):
        schedule(replace(problem_of(graph, (), ()), pins={1: 0, 2: 1}))
