"""What is assigned to a variable is computed in it, where nothing tells the difference."""

from __future__ import annotations

import numpy as np
import pytest
from backend_graphs import Maker
from planned import planned, run


@pytest.fixture
def made() -> Maker:
    return Maker()


@pytest.fixture
def x(made: Maker) -> int:
    """A result of the plan's own that is not in place of anything."""
    return made.node("concat", made.input(np.zeros((4, 8), np.float32)), axis=0)


def variable(made: Maker) -> int:
    return made.variable(np.zeros((4, 8), np.float32))


def is_direct(made: Maker, result: int, target: int, *, fusion: bool = False) -> bool:
    """Whether a result is computed in the variable that it is assigned to."""
    graph = made.graph()
    groups, storage = planned(graph, fusion=fusion)
    run(graph, groups, storage)
    direct = storage.places[made.number(result)].root == target
    assigned = {graph.nodes[group.last].op == "assign" for group in groups}
    assert direct != (True in assigned)
    return direct


def test_what_is_assigned_is_computed_in_the_variable(made: Maker, x: int) -> None:
    v = variable(made)
    result = made.node("soft_max", x)
    made.output(made.node("norm", made.node("assign", v, result)))
    assert is_direct(made, result, v)


@pytest.mark.parametrize("op", ["add", "set", "set_rows"])
def test_an_op_that_may_changes_its_variable_in_place(op: str, made: Maker, x: int) -> None:
    v = variable(made)
    rows = (made.input(np.zeros(4, np.int32)),) if op == "set_rows" else ()
    result = made.node(op, v, x, *rows, **({"start": (0, 0)} if op == "set" else {}))
    made.node("assign", v, result)
    made.output(v)
    assert is_direct(made, result, v)
    assert not planned(made.graph(), fusion=False)[1].constants


def test_an_op_that_must_not_run_in_place_does_not_write_what_it_reads(made: Maker) -> None:
    v = made.variable(np.zeros((8, 8), np.float32))
    results = [made.node("matmul", v, v), made.node("add", v, made.node("permute", v, axes=(1, 0)))]
    for result in results:
        single = Maker(made.leaves, made.arrays, made.nodes, [])
        single.node("assign", v, result)
        single.output(v)
        assert not is_direct(single, result, v)
        made.nodes.pop()


def test_a_variable_that_is_read_before_its_assignment_is_not_written_before(made: Maker, x: int) -> None:
    v = variable(made)
    result = made.node("tanh", x)
    made.output(made.node("norm", made.node("reshape", v, shape=(8, 4))))
    made.node("assign", v, result)
    assert not is_direct(made, result, v)


def test_a_variable_that_was_read_before_is_written_directly_and_the_reads_stay_before(
    made: Maker, x: int
) -> None:
    v = variable(made)
    old = made.node("neg", v)
    result = made.node("tanh", x)
    made.node("assign", v, result)
    made.output(made.node("exp", old))
    assert is_direct(made, result, v, fusion=True)


def test_a_result_that_somebody_else_reads_or_that_is_an_output_has_memory_of_its_own(
    made: Maker, x: int
) -> None:
    v, w = variable(made), variable(made)
    read, output = made.node("tanh", x), made.node("norm", x)
    made.node("assign", v, read)
    made.node("assign", w, output)
    made.output(made.node("soft_max", read), output)
    assert not is_direct(made, read, v)
    assert not is_direct(made, output, w)


def test_a_variable_that_is_assigned_to_twice_is_not_written_directly(made: Maker, x: int) -> None:
    v = variable(made)
    results = [made.node("tanh", x), made.node("norm", x)]
    for result in results:
        made.node("assign", v, result)
    made.output(v)
    assert not any(is_direct(made, result, v) for result in results)


def test_a_view_or_a_leaf_is_assigned_by_a_copy(made: Maker, x: int) -> None:
    v, w = made.variable(np.zeros((8, 4), np.float32)), variable(made)
    turned = made.node("permute", x, axes=(1, 0))
    made.node("assign", v, turned)
    made.node("assign", w, 0)
    made.output(v)
    assert not is_direct(made, turned, v)


def test_a_chain_that_updates_a_variable_is_one_step_in_place(made: Maker, x: int) -> None:
    v = variable(made)
    result = made.node("sub", v, made.node("scale", made.node("tanh", x), scale=0.1))
    made.node("assign", v, result)
    made.output(v)
    assert is_direct(made, result, v, fusion=True)
    groups, _ = planned(made.graph())
    assert [len(group.nodes) for group in groups] == [1, 3]


def test_a_product_is_not_written_into_the_variable_to_which_it_is_added(made: Maker, x: int) -> None:
    v = variable(made)
    product = made.node("matmul", x, made.weight(np.zeros((8, 8), np.float32)))
    result = made.node("add", v, product)
    made.node("assign", v, result)
    made.output(v)
    assert is_direct(made, result, v, fusion=True)
    groups, _ = planned(made.graph())
    assert [len(group.nodes) for group in groups] == [1, 1, 1]


@pytest.mark.parametrize("shapes", [[(16, 2)], [(2, 16), (32, 1), (16, 2)]])
def test_rows_of_a_variable_in_another_shape_are_set_in_it(
    made: Maker, x: int, shapes: list[tuple[int, int]]
) -> None:
    v, whole = variable(made), variable(made)
    rows = made.node("reshape", x, shape=(16, 2))
    indices = made.input(np.arange(16, dtype=np.int32)[::-1].copy())
    target = v
    for shape in shapes:
        target = made.node("reshape", target, shape=shape)
    result = made.node("set_rows", target, rows, indices)
    made.node("assign", v, made.node("reshape", result, shape=(4, 8)))
    made.output(made.node("norm", v), whole)
    assert is_direct(made, result, v)
    assert planned(made.graph(), fusion=False)[1].places[made.number(target)].root == v


@pytest.mark.parametrize("who", ["before", "result", "after", "between"])
def test_a_variable_in_another_shape_that_others_read_is_not_written_before(
    made: Maker, x: int, who: str
) -> None:
    v = variable(made)
    before = made.node("reshape", v, shape=(16, 2))
    rows, indices = made.node("reshape", x, shape=(16, 2)), made.input(np.arange(16, dtype=np.int32))
    result = made.node("set_rows", before, rows, indices)
    after = made.node("reshape", result, shape=(4, 8))
    read = made.node("tanh", {"before": before, "result": result, "after": after, "between": v}[who])
    made.node("assign", v, after)
    made.output(v, read)
    assert not is_direct(made, result, v)


def test_a_result_in_another_shape_is_computed_in_the_variable(made: Maker, x: int) -> None:
    v = variable(made)
    result = made.node("soft_max", x)
    made.node("assign", v, made.node("reshape", result, shape=(4, 8)))
    made.output(v)
    assert is_direct(made, result, v)


def test_a_variable_is_not_written_from_its_own_rows_in_another_order(made: Maker) -> None:
    v = variable(made)
    turned = made.node("permute", made.node("reshape", v, shape=(8, 4)), axes=(1, 0))
    result = made.node(
        "add", turned, made.node("reshape", made.node("reshape", v, shape=(8, 4)), shape=(4, 8))
    )
    made.node("assign", v, result)
    made.output(v)
    assert not is_direct(made, result, v)
