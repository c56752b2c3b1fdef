"""Where the results of whole graphs lie: what lives is never written over, and what runs in place may."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import numpy as np
import pytest
from backend_graphs import Maker
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planned import DefinitionOnly, Memory, Versions, planned, run
from random_graphs import RandomGraph

from heliograph_backends.planning import storage as storing
from heliograph_backends.planning.fusion import group_nodes
from heliograph_backends.planning.groups import Group
from heliograph_backends.planning.layout import place_values
from heliograph_backends.planning.memory import UNBOUNDED, Lifetimes, live_blocks, padded
from heliograph_backends.planning.storage import StorageLayout, StorageRegion
from heliograph_proto.errors import OutOfMemoryError
from heliograph_proto.graph import Graph, LeafKind
from heliograph_proto.ops.table import OPS
from heliograph_proto.types import F32

steady = settings(derandomize=True, deadline=None, max_examples=150)
seeds = st.integers(0, 2**32 - 1)
#: No limit, and one that cuts the arena of a random graph into several chunks.
limits = st.sampled_from([UNBOUNDED, 1024])


def random_graph(seed: int, limit: int) -> Graph:
    """One each of whose values fits into a chunk."""
    graph = RandomGraph(seed).graph()
    assume(all(node.type.nbytes <= limit for node in graph.nodes))
    return graph


@steady
@given(seeds, st.booleans(), st.booleans(), limits)
def test_what_a_step_reads_is_what_was_written(seed: int, fusion: bool, native: bool, limit: int) -> None:
    graph = random_graph(seed, limit)
    run(graph, *planned(graph, fusion=fusion, native=native, max_size=limit))


@steady
@given(seeds, st.booleans(), limits, st.sampled_from([2, 3, 100]))
def test_steps_that_run_at_the_same_time_do_not_write_over_what_another_reads(
    seed: int, fusion: bool, limit: int, most: int
) -> None:
    graph = random_graph(seed, limit)
    # However much memory it takes.
    with patch.object(storing, "MOST_MORE", 1):
        groups, storage = planned(graph, fusion=fusion, max_size=limit, most=most)
    run(graph, groups, storage)
    sizes = Counter(storage.sets)
    assert max(sizes.values(), default=0) <= most + sum(1 for each in groups if is_constant(graph, each))


def test_products_of_one_operand_are_a_set_and_what_needs_them_is_another() -> None:
    made = Maker()
    x = made.input(np.ones((4, 8), np.float32))
    products = [made.node("matmul", x, made.weight(np.ones((8, 8), np.float32))) for _ in range(5)]
    scores = made.node("matmul", products[0], made.node("permute", products[1], axes=(1, 0)))
    made.output(made.node("matmul", scores, products[2]), *products[3:])
    assert list(planned(made.graph(), most=8)[1].sets) == [0, 0, 0, 0, 0, 1, 2]
    assert list(planned(made.graph(), most=3)[1].sets) == [0, 0, 0, 1, 1, 1, 2]
    assert list(planned(made.graph(), most=1)[1].sets) == [0, 1, 2, 3, 4, 5, 6]


def test_what_is_assigned_to_a_variable_runs_alone() -> None:
    made = Maker()
    x, v = made.input(np.ones(4, np.float32)), made.variable(np.ones(4, np.float32))
    first, second = made.node("neg", x), made.node("sqr", x)
    made.node("assign", v, x)
    made.output(first, second, made.node("exp", x))
    assert list(planned(made.graph(), most=8)[1].sets) == [0, 0, 1, 2]


def test_steps_wait_for_each_other_where_that_saves_much_memory() -> None:
    made = Maker()
    x = made.input(np.ones(1000, np.float32))
    total = x
    branches = [made.node("soft_max", made.node("scale", x, scale=float(n))) for n in range(8)]
    for branch in branches:
        total = made.node("add", total, made.node("reduce_sum", branch, axes=(0,), keepdims=False))
    made.output(total)
    groups, storage = planned(made.graph(), most=8)
    alone = sum(planned(made.graph(), most=1)[1].arena)
    assert sum(storage.arena) <= alone * 17 // 16


@steady
@given(seeds, st.booleans(), limits)
def test_inputs_weights_and_outputs_are_never_used_for_anything_else(
    seed: int, fusion: bool, limit: int
) -> None:
    graph = RandomGraph(seed).graph()
    groups, storage = planned(graph, fusion=fusion, max_size=limit)
    written = [(storage.places[len(graph.leaves) + group.last].root, group) for group in groups]
    outputs = {output.value for output in graph.outputs}
    for root, group in written:
        slot = storage.regions[root].slot
        if slot < len(graph.leaves):
            assert graph.leaves[slot].kind is LeafKind.VARIABLE
            assert Versions(graph).written(group.last)
        elif slot < storage.arena_slot:
            assert root in outputs


@steady
@given(seeds, st.booleans(), limits)
def test_the_arena_is_no_larger_than_all_results_and_no_smaller_than_those_that_live_at_once(
    seed: int, fusion: bool, limit: int
) -> None:
    graph = RandomGraph(seed).graph()
    groups, storage = planned(graph, fusion=fusion, max_size=limit)
    arena_slots = range(storage.arena_slot, storage.arena_slot + len(storage.arena))
    roots = [root for root, region in storage.regions.items() if region.slot in arena_slots]
    assert sum(storage.arena) <= sum(padded(graph.type_of(root).nbytes, 64) for root in roots)
    assert sum(storage.arena) >= live_bytes(graph, groups, storage, set(roots))
    assert all(size <= limit for size in storage.own_bytes)


def is_constant(graph: Graph, group: Group) -> bool:
    """Whether a step is made before the first one."""
    return OPS[graph.nodes[group.last].op].group == "source"


def live_bytes(graph: Graph, groups: tuple[Group, ...], storage: StorageLayout, roots: set[int]) -> int:
    """The most bytes, between two steps, of results that somebody still reads."""
    leaves, last, first = len(graph.leaves), {}, {}
    for step, group in enumerate(groups):
        first[storage.places[leaves + group.last].root] = step
        for number in group.nodes:
            last |= {storage.places[value].root: step for value in graph.nodes[number].operands}
    last |= {storage.places[output.value].root: len(groups) for output in graph.outputs}
    return max(
        sum(
            padded(graph.type_of(root).nbytes, 64)
            for root in roots
            if first[root] <= step < last.get(root, -1)
        )
        for step in range(len(groups))
    )


@steady
@given(seeds, st.booleans(), st.booleans())
def test_a_step_writes_over_an_operand_only_where_its_op_may(seed: int, fusion: bool, native: bool) -> None:
    graph = RandomGraph(seed).graph()
    groups, storage = planned(graph, fusion=fusion, native=native)
    memory, leaves = Memory(graph, storage), len(graph.leaves)
    for group in groups:
        root = storage.places[leaves + group.last].root
        inside = {root, *(leaves + number for number in group.nodes)}
        units = set(memory.units(root))
        for number in group.nodes:
            node = graph.nodes[number]
            for place, value in enumerate(node.operands):
                source = storage.places[value].root
                if source < leaves or source in inside or not units & set(memory.units(source)):
                    continue
                assert group.role != "matmul"
                assert storage.regions[source] == storage.regions[root]
                assert graph.type_of(value) == graph.type_of(root)
                assert (
                    group.role == "elementwise"
                    or (number, place) == (group.nodes[0], 0)
                    or (OPS[node.op].group == "elementwise")
                )


# In place


@pytest.fixture
def made() -> Maker:
    return Maker()


@pytest.fixture
def x(made: Maker) -> int:
    """A result of the plan's own that is not in place of anything."""
    return made.node("concat", made.input(np.zeros((4, 8), np.float32)), axis=0)


def regions(made: Maker, *values: int, fusion: bool = False) -> list[StorageRegion]:
    graph = made.graph()
    groups, storage = planned(graph, fusion=fusion)
    run(graph, groups, storage)
    return [storage.regions[made.number(value)] for value in values]


def in_place(made: Maker, source: int, result: int, *, fusion: bool = False) -> bool:
    """Whether a result has the memory of a value, where nobody needs the result but a copy."""
    made.output(made.node("cont", result))
    first, second = regions(made, source, result, fusion=fusion)
    return first == second


def test_a_result_takes_the_place_of_its_operand(made: Maker, x: int) -> None:
    assert in_place(made, x, made.node("soft_max", x))


def test_a_chain_of_results_has_one_place(made: Maker, x: int) -> None:
    value = x
    for op in ("tanh", "norm", "soft_max", "rms_norm"):
        value = made.node(op, value)
    assert in_place(made, x, value)
    assert sum(planned(made.graph(), fusion=False)[1].arena) == 128


def test_a_value_that_somebody_reads_later_keeps_its_memory(made: Maker, x: int) -> None:
    y = made.node("tanh", x)
    made.output(made.node("norm", x))
    assert not in_place(made, x, y)


def test_the_last_reader_of_several_takes_the_place(made: Maker, x: int) -> None:
    made.output(made.node("norm", x))
    assert in_place(made, x, made.node("tanh", x))


def test_a_value_whose_view_is_read_later_keeps_its_memory(made: Maker, x: int) -> None:
    turned = made.node("permute", made.node("reshape", x, shape=(8, 4)), axes=(1, 0))
    y = made.node("tanh", x)
    made.output(made.node("neg", turned))
    assert not in_place(made, x, y)


def test_an_output_keeps_its_memory(made: Maker, x: int) -> None:
    y = made.node("tanh", x)
    made.output(made.node("reshape", x, shape=(32,)))
    assert not in_place(made, x, y)


def test_a_reshape_of_all_of_a_value_can_be_written_over(made: Maker, x: int) -> None:
    flat = made.node("reshape", made.node("reshape", x, shape=(2, 16)), shape=(1, 32))
    assert in_place(made, x, made.node("tanh", flat))


@pytest.mark.parametrize("stop", [(4, 8), (2, 8)])
def test_a_part_or_a_permutation_of_a_value_cannot(stop: tuple[int, int], made: Maker, x: int) -> None:
    if stop == (4, 8):
        y = made.node("permute", x, axes=(1, 0))
    else:
        y = made.node("slice", x, start=(0, 0), stop=stop, step=(1, 1))
    assert not in_place(made, x, made.node("tanh", y))


def test_an_operand_that_broadcasts_keeps_its_memory(made: Maker, x: int) -> None:
    row = made.node("concat", made.input(np.zeros(8, np.float32)), axis=0)
    result = made.node("add", row, x)
    made.output(made.node("cont", result))
    small, large, found = regions(made, row, x, result)
    assert found == large != small


def test_an_op_of_another_data_type_does_not_run_in_place(made: Maker, x: int) -> None:
    assert not in_place(made, x, made.node("cast", x, dtype=F32))
    whole = made.node("concat", made.input(np.zeros((4, 8), bool)), axis=0)
    result = made.node("equal", whole, whole)
    made.output(made.node("cont", result))
    first, second = regions(made, whole, result)
    assert first != second


def test_an_elementwise_op_may_read_an_operand_twice_in_place(made: Maker, x: int) -> None:
    assert in_place(made, x, made.node("mul", x, x))


def test_an_op_does_not_run_in_place_of_what_it_also_reads_elsewhere(made: Maker) -> None:
    square = made.node("concat", made.input(np.zeros((8, 8), np.float32)), axis=0)
    turned = made.node("permute", square, axes=(1, 0))
    assert not in_place(made, square, made.node("add", square, turned))


def test_an_op_on_rows_does_not_run_in_place_of_its_mask(made: Maker, x: int) -> None:
    assert not in_place(made, x, made.node("soft_max", x, x))


def test_what_follows_a_product_does_not_run_in_place(made: Maker, x: int) -> None:
    product = made.node("matmul", x, made.weight(np.zeros((8, 8), np.float32)))
    other = made.node("concat", made.input(np.zeros((4, 8), np.float32)), axis=0)
    result = made.node("add", other, product)
    made.output(made.node("reduce_sum", result))
    left, right, found = regions(made, x, other, result, fusion=True)
    assert found not in (left, right)


def test_a_fused_chain_runs_in_place_of_an_operand_of_any_of_its_nodes(made: Maker, x: int) -> None:
    chain = made.node("exp", made.node("add", made.node("tanh", x), made.input(np.zeros(8, np.float32))))
    made.output(made.node("reduce_sum", chain))
    first, second = regions(made, x, chain, fusion=True)
    assert first == second


def test_a_norm_with_its_weight_runs_in_place_of_what_it_norms(made: Maker, x: int) -> None:
    row = made.weight(np.zeros(8, np.float32))
    result = made.node("mul", made.node("norm", x), row)
    made.output(made.node("reduce_sum", result))
    first, second = regions(made, x, result, fusion=True)
    assert first == second


@pytest.mark.parametrize("kind", ["input", "weight", "variable"])
def test_leaves_are_never_written_over(kind: str, made: Maker) -> None:
    leaf = getattr(made, kind)(np.zeros((4, 8), np.float32))
    assert not in_place(made, leaf, made.node("tanh", leaf))


def test_constants_are_never_written_over(made: Maker) -> None:
    ones = made.node("fill", shape=(4, 8), value=1.0, dtype=F32)
    assert not in_place(made, ones, made.node("tanh", ones))


def test_a_block_lives_as_long_as_all_that_take_it_over(made: Maker, x: int) -> None:
    y = made.node("tanh", x)
    made.output(made.node("reduce_sum", made.node("norm", y)))
    graph = made.graph()
    places = place_values(graph)
    groups = group_nodes(graph, places, DefinitionOnly(), fusion=False)
    live = live_blocks(graph, places, groups, {0, made.number(-4)}, ())
    assert live.blocks == {made.number(value): 0 for value in (x, y, -3)}
    assert live.lifetimes == Lifetimes([128], [0], [3])


# Chunks


def test_results_that_one_buffer_cannot_hold_have_a_slot_for_each_chunk(made: Maker, x: int) -> None:
    parts = [made.node("tanh", x) for _ in range(3)]
    made.output(made.node("concat", *parts, axis=0))
    _, storage = planned(made.graph(), fusion=False, max_size=256)
    assert storage.arena == (256, 128)
    slots = [storage.locate(made.number(value))[0] - storage.arena_slot for value in (x, *parts)]
    # The last one takes the place of x.
    assert slots == [0, 0, 1, 0]


def test_constants_that_one_buffer_cannot_hold_have_several(made: Maker) -> None:
    fills = [made.node("fill", shape=(4, 8), value=float(n), dtype=F32) for n in range(3)]
    made.output(*fills)
    _, storage = planned(made.graph(), max_size=256)
    assert storage.constants == (256, 128)
    assert [storage.regions[made.number(value)].offset_bytes for value in fills] == [0, 128, 0]


def test_a_result_or_constant_that_no_buffer_holds_is_refused(made: Maker, x: int) -> None:
    made.output(made.node("reduce_sum", made.node("tanh", x)))
    with pytest.raises(OutOfMemoryError, match="an intermediate result of 128 bytes"):
        planned(made.graph(), max_size=64)
    constant = Maker()
    constant.output(constant.node("fill", shape=(4, 8), value=1.0, dtype=F32))
    with pytest.raises(OutOfMemoryError, match="a tensor of 128 bytes"):
        planned(constant.graph(), max_size=64)
