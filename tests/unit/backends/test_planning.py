"""The pure passes of a plan: strides of views, and what fuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_graphs import Maker
from hypothesis import example, given, settings
from hypothesis import strategies as st

from heliograph_backends.planning.fusion import MAX_NODES, group_nodes, needed_nodes
from heliograph_backends.planning.groups import Group
from heliograph_backends.planning.layout import (
    ValuePlace,
    broadcast_strides,
    place_values,
    reshape_strides,
    view,
)
from heliograph_proto.graph import Graph
from heliograph_proto.types import F32, TensorType

steady = settings(derandomize=True, deadline=None, max_examples=200)

# Strides


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """A view of some memory: permuted, sliced, broadcast."""
    shape = draw(st.lists(st.sampled_from([1, 1, 2, 3, 4, 6]), max_size=5))
    array = np.arange(np.prod([2 * size for size in shape], dtype=int), dtype=np.float32)
    array = array.reshape([2 * size for size in shape])
    array = array[tuple(slice(None, None, 2) if draw(st.booleans()) else slice(size) for size in shape)]
    array = array.transpose(draw(st.permutations(range(len(shape)))))
    if draw(st.booleans()):
        array = np.broadcast_to(array, (draw(st.sampled_from([1, 2])), *array.shape))
    return array


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], tuple[int, ...]]:
    """A view, and another shape of its size: factors of it in any order, with ones."""
    array = draw(arrays())
    factors = [f for size in array.shape for f in {4: [2, 2], 6: [2, 3]}.get(size, [size])]
    factors = list(draw(st.permutations(factors))) if draw(st.booleans()) else factors
    shape: list[int] = []
    for factor in factors:
        if shape and draw(st.booleans()):
            shape[-1] *= factor
        else:
            shape.append(factor)
    return array, tuple(shape)


@steady
@given(reshapes())
def test_a_reshape_without_a_copy_reads_what_numpy_reads(
    given: tuple[np.ndarray[Any, Any], tuple[int, ...]],
) -> None:
    array, shape = given
    strides = reshape_strides(array.shape, array.strides, shape)
    expected = array.reshape(shape)
    if strides is None:
        # It is a copy to NumPy too.
        assert not np.shares_memory(expected, array)
        return
    found = np.lib.stride_tricks.as_strided(array, shape, strides)
    np.testing.assert_array_equal(found, expected)


@steady
@given(reshapes())
def test_a_reshape_that_numpy_does_in_place_is_in_place(
    given: tuple[np.ndarray[Any, Any], tuple[int, ...]],
) -> None:
    array, shape = given
    if np.shares_memory(array.reshape(shape), array):
        assert reshape_strides(array.shape, array.strides, shape) is not None


@pytest.mark.parametrize(("shape", "target"), [((0, 3), (3, 0)), ((0,), (0, 7)), ((2, 0, 5), (0,))])
def test_a_reshape_of_nothing_is_in_place(shape: tuple[int, ...], target: tuple[int, ...]) -> None:
    assert reshape_strides(shape, (4,) * len(shape), target) == (0,) * len(target)


@pytest.mark.parametrize("target", [(), (1,), (1, 1, 1)])
def test_a_single_element_reshapes_to_any_number_of_ones(target: tuple[int, ...]) -> None:
    assert reshape_strides((1, 1), (400, 4), target) == (0,) * len(target)


@steady
@given(arrays(), st.lists(st.integers(1, 3), max_size=3))
def test_a_broadcast_reads_what_numpy_reads(array: np.ndarray[Any, Any], front: list[int]) -> None:
    target = (*front, *(3 if size == 1 else size for size in array.shape))
    strides = broadcast_strides(array.shape, array.strides, target)
    found = np.lib.stride_tricks.as_strided(array, target, strides)
    np.testing.assert_array_equal(found, np.broadcast_to(array, target))


MATRIX = TensorType(F32, (4, 6))
AT = ValuePlace(7, 100, MATRIX.strides)


def test_a_permutation_permutes_the_strides() -> None:
    found = view("permute", {"axes": (-1, 0)}, MATRIX, TensorType(F32, (6, 4)), AT)
    assert found == ValuePlace(7, 100, (4, 24))


def test_a_slice_moves_the_start_and_multiplies_the_strides() -> None:
    attributes = {"start": (1, 2), "stop": (4, 6), "step": (2, 3)}
    found = view("slice", attributes, MATRIX, TensorType(F32, (2, 2)), AT)
    assert found == ValuePlace(7, 100 + 24 + 8, (48, 12))


def test_a_slice_of_nothing_stays_at_the_start_of_its_memory() -> None:
    attributes = {"start": (4, 0), "stop": (4, 6), "step": (1, 1)}
    found = view("slice", attributes, MATRIX, TensorType(F32, (0, 6)), AT)
    assert found is not None
    assert found.offset_bytes == 0


def test_a_broadcast_repeats_with_stride_0() -> None:
    row = TensorType(F32, (1, 6))
    found = view("broadcast_to", {}, row, TensorType(F32, (2, 5, 6)), ValuePlace(7, 0, row.strides))
    assert found == ValuePlace(7, 0, (0, 0, 4))


def test_a_reshape_that_strides_cannot_express_is_no_view() -> None:
    transposed = ValuePlace(7, 0, (4, 24))
    assert view("reshape", {}, TensorType(F32, (6, 4)), TensorType(F32, (24,)), transposed) is None


def test_a_view_of_a_view_lies_in_the_first_ones_memory() -> None:
    made = Maker()
    x = made.input(np.zeros((4, 6), np.float32))
    turned = made.node("permute", x, axes=(1, 0))
    part = made.node("slice", turned, start=(1, 1), stop=(6, 4), step=(1, 1))
    made.output(made.node("reshape", part, shape=(15,)))
    places = place_values(made.graph())
    assert places[1:3] == (ValuePlace(0, 0, (4, 24)), ValuePlace(0, 28, (4, 24)))
    assert places[3].root == 3


def variable_graph(*, assign_last: bool) -> Graph:
    made = Maker()
    v, x = made.variable(np.zeros((2, 3), np.float32)), made.input(np.zeros((2, 3), np.float32))
    if not assign_last:
        made.node("assign", v, x)
    turned = made.node("permute", v, axes=(1, 0))
    if assign_last:
        made.node("assign", v, x)
    made.output(turned)
    return made.graph()


def test_a_view_of_a_variable_is_a_copy_if_the_variable_is_assigned_to_later() -> None:
    assert place_values(variable_graph(assign_last=True))[2].root == 2
    assert place_values(variable_graph(assign_last=False))[3].root == 0


# Fusion


class Kernels:
    """All f32, and whatever can be in a group has a kernel."""

    ROLES = {"matmul": "matmul", "norm": "norm", "rms_norm": "norm"}
    ELEMENTWISE = ("add", "mul", "neg", "exp", "tanh")

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def role(self, number: int) -> Any:
        op = self.graph.nodes[number].op
        return "elementwise" if op in self.ELEMENTWISE else self.ROLES.get(op, "other")

    def is_row_operand(self, value: int) -> bool:
        return True


def groups(made: Maker, *, fusion: bool = True) -> tuple[Group, ...]:
    graph = made.graph()
    return group_nodes(graph, place_values(graph), Kernels(graph), fusion=fusion)


def shape_of_groups(made: Maker, *, fusion: bool = True) -> list[tuple[int, ...]]:
    return [group.nodes for group in groups(made, fusion=fusion)]


@pytest.fixture
def made() -> Maker:
    return Maker()


@pytest.fixture
def x(made: Maker) -> int:
    return made.input(np.zeros((4, 8), np.float32))


@pytest.fixture
def w(made: Maker) -> int:
    return made.weight(np.zeros((8, 8), np.float32))


@pytest.fixture
def row(made: Maker) -> int:
    return made.weight(np.zeros(8, np.float32))


def test_a_chain_of_elementwise_nodes_is_one_step(made: Maker, x: int) -> None:
    made.output(made.node("exp", made.node("neg", made.node("tanh", x))))
    assert groups(made) == (Group("elementwise", (0, 1, 2)),)


def test_without_fusion_every_node_is_a_step(made: Maker, x: int) -> None:
    made.output(made.node("exp", made.node("neg", x)))
    assert shape_of_groups(made, fusion=False) == [(0,), (1,)]


def test_two_chains_that_meet_are_one_step(made: Maker, x: int) -> None:
    made.output(made.node("add", made.node("neg", x), made.node("exp", x)))
    assert shape_of_groups(made) == [(0, 1, 2)]


def test_a_value_that_two_nodes_read_is_not_fused_away(made: Maker, x: int) -> None:
    y = made.node("neg", x)
    made.output(made.node("add", made.node("exp", y), made.node("tanh", y)))
    assert shape_of_groups(made) == [(0,), (1, 2, 3)]


def test_a_value_that_one_node_reads_twice_is_fused(made: Maker, x: int) -> None:
    y = made.node("neg", x)
    made.output(made.node("mul", y, y))
    assert shape_of_groups(made) == [(0, 1)]


def test_a_value_that_is_an_output_is_not_fused_away(made: Maker, x: int) -> None:
    y = made.node("neg", x)
    made.output(y, made.node("exp", y))
    assert shape_of_groups(made) == [(0,), (1,)]


def test_a_value_that_broadcasts_is_a_step_of_its_own(made: Maker, x: int, row: int) -> None:
    made.output(made.node("add", x, made.node("neg", row)))
    assert shape_of_groups(made) == [(0,), (1,)]


def test_a_view_in_between_parts_two_steps(made: Maker, x: int) -> None:
    turned = made.node("permute", made.node("neg", x), axes=(1, 0))
    made.output(made.node("exp", turned))
    assert shape_of_groups(made) == [(0,), (2,)]


def test_a_product_takes_what_follows_it(made: Maker, x: int, w: int, row: int) -> None:
    made.output(made.node("tanh", made.node("add", made.node("matmul", x, w), row)))
    assert groups(made) == (Group("matmul", (0, 1, 2)),)


def test_two_products_are_two_steps(made: Maker, x: int, w: int) -> None:
    made.output(made.node("add", made.node("matmul", x, w), made.node("matmul", x, w)))
    assert [group.role for group in groups(made)] == ["matmul", "matmul"]


def test_of_two_products_the_later_takes_what_follows_both(made: Maker, x: int, w: int) -> None:
    first, second = made.node("matmul", x, w), made.node("matmul", x, w)
    made.output(made.node("add", first, second))
    assert shape_of_groups(made) == [(0,), (1, 2)]


def sum_of_results(made: Maker, x: int, count: int) -> int:
    """Each is added as soon as it is there, so that two live at once."""
    total = made.node("soft_max", x)
    for _ in range(count - 1):
        total = made.node("add", total, made.node("soft_max", x))
    return total


def test_a_node_does_not_wait_where_its_operands_would_then_raise_the_peak(made: Maker, x: int) -> None:
    made.output(sum_of_results(made, x, 4))
    assert shape_of_groups(made) == [(number,) for number in range(7)]


def test_a_node_waits_for_those_that_it_fuses_with_where_there_is_room(made: Maker, x: int) -> None:
    many = [made.node("soft_max", x) for _ in range(6)]
    made.output(made.node("concat", *many, axis=0))
    made.output(sum_of_results(made, x, 4))
    assert shape_of_groups(made)[7:] == [(7,), (8,), (10,), (12,), (9, 11, 13)]


def test_what_comes_before_a_product_is_not_part_of_it(made: Maker, x: int, w: int) -> None:
    made.output(made.node("matmul", made.node("neg", x), w))
    assert shape_of_groups(made) == [(0,), (1,)]


def test_a_norm_takes_its_weight_and_bias(made: Maker, x: int, row: int) -> None:
    scaled = made.node("mul", made.node("norm", x), row)
    made.output(made.node("add", row, scaled))
    assert groups(made) == (Group("norm", (0, 1, 2)),)


def test_a_norm_takes_nothing_else(made: Maker, x: int) -> None:
    made.output(made.node("exp", made.node("norm", x)))
    assert shape_of_groups(made) == [(0,), (1,)]


def test_rms_norm_has_no_bias(made: Maker, x: int, row: int) -> None:
    scaled = made.node("mul", made.node("rms_norm", x), row)
    made.output(made.node("add", scaled, row))
    assert shape_of_groups(made) == [(0, 1), (2,)]


def test_a_norm_takes_no_weight_that_is_a_whole_matrix(made: Maker, x: int) -> None:
    made.output(made.node("mul", made.node("norm", x), x))
    assert shape_of_groups(made) == [(0,), (1,)]


def test_a_sum_of_a_norm_and_a_product_without_it_is_no_affine_norm(made: Maker, row: int) -> None:
    normal = made.node("norm", row)
    made.output(made.node("add", made.node("mul", row, row), normal))
    assert shape_of_groups(made) == [(0,), (1, 2)]


def test_nothing_moves_behind_an_assignment(made: Maker, x: int) -> None:
    v = made.variable(np.zeros((4, 8), np.float32))
    old = made.node("neg", v)
    made.node("assign", v, x)
    made.output(made.node("exp", old))
    assert shape_of_groups(made) == [(0,), (1,), (2,)]


def test_a_group_has_a_bound(made: Maker, x: int) -> None:
    value = x
    for _ in range(3 * MAX_NODES):
        value = made.node("neg", value)
    made.output(value)
    assert [len(nodes) for nodes in shape_of_groups(made)] == [MAX_NODES] * 3


def test_nodes_that_nothing_needs_are_no_steps(made: Maker, x: int) -> None:
    made.node("exp", made.node("neg", x))
    made.output(made.node("tanh", x))
    assert needed_nodes(made.graph()) == [False, False, True]
    assert shape_of_groups(made) == [(2,)]


def test_an_assignment_and_what_it_needs_are_steps(made: Maker, x: int) -> None:
    v = made.variable(np.zeros((4, 8), np.float32))
    made.node("assign", v, made.node("neg", x))
    made.output(x)
    assert needed_nodes(made.graph()) == [True, True]


@steady
@given(st.integers(0, 10_000))
@example(0)
def test_every_needed_node_that_moves_something_is_in_one_group(seed: int) -> None:
    random = np.random.default_rng(seed)
    made = Maker()
    values = [made.input(np.zeros((4, 8), np.float32)), made.weight(np.zeros((8, 8), np.float32))]
    for _ in range(25):
        op = str(random.choice(["add", "mul", "neg", "norm", "matmul"]))
        first = values[0] if len(values) == 2 else int(random.choice([values[0], *values[2:]]))
        other = values[1] if op == "matmul" else int(random.choice([values[0], *values[2:]]))
        values.append(made.node(op, *((first,) if op in ("neg", "norm") else (first, other))))
    made.output(values[-1], int(random.choice(values)))
    found = [number for nodes in shape_of_groups(made) for number in nodes]
    assert sorted(found) == [number for number, needed in enumerate(needed_nodes(made.graph())) if needed]
