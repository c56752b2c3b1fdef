"""Validation of graphs: what came from the wire is refused in words, quickly, and without recursion."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from heliograph_proto.errors import InvalidGraphError, LimitExceededError, UnknownOpError
from heliograph_proto.graph import MAX_NAME, Graph, Leaf, LeafKind, Node, Output, validate
from heliograph_proto.sessions import Limits
from heliograph_proto.types import BOOL, DTYPES, F32, TensorType

VECTOR = TensorType(F32, (4,))
LIMITS = Limits()
ENDLESS = LIMITS.graph_nodes + 1
X = Leaf(LeafKind.INPUT, "x", VECTOR)
V = Leaf(LeafKind.VARIABLE, "v", VECTOR)
W = Leaf(LeafKind.WEIGHT, "w", VECTOR, bytes(32))


def node(op: str, *operands: int, type: TensorType = VECTOR, name: str = "", **attributes: Any) -> Node:
    return Node(op, operands, type, attributes, name)


def graph(*nodes: Node, leaves: tuple[Leaf, ...] = (X,), outputs: tuple[Output, ...] | None = None) -> Graph:
    """A graph that returns its last value."""
    last = Output("y", len(leaves) + len(nodes) - 1)
    return Graph(leaves, nodes, (last,) if outputs is None else outputs)


def chain(length: int) -> Graph:
    """x -> neg -> neg -> ..."""
    return graph(*(node("neg", number) for number in range(length)))


def refused(found: Graph, limits: Limits = LIMITS) -> InvalidGraphError:
    with pytest.raises(InvalidGraphError) as caught:
        validate(found, limits)
    return caught.value


def test_a_valid_graph_comes_back_with_its_attributes_complete() -> None:
    found = validate(graph(node("norm", 0), node("leaky_relu", 1, slope=0.5)), LIMITS)
    assert [dict(each.attributes) for each in found.nodes] == [{"eps": 1e-5}, {"slope": 0.5}]


def test_a_validated_graph_is_valid_again() -> None:
    found = validate(graph(node("norm", 0), leaves=(X, V, W)), LIMITS)
    assert validate(found, LIMITS) == found


def test_a_graph_of_a_leaf_alone_is_valid() -> None:
    assert validate(graph(), LIMITS).outputs == (Output("y", 0),)


@pytest.mark.parametrize("operand", [1, 2, 99, -1, 2**63])
def test_a_node_that_reads_itself_a_later_value_or_none_is_refused(operand: int) -> None:
    error = refused(graph(node("add", 0, operand), node("neg", 1)))
    assert f"value {operand}, which does not come before" in error.message
    assert "no cycles" in error.advice


def test_the_origin_of_an_error_is_the_node_with_its_operands() -> None:
    error = refused(graph(node("neg", 0), node("matmul", 0, 1, name="layer3.product")))
    assert (error.origin.op, error.origin.node, error.origin.node_name) == ("matmul", 1, "layer3.product")
    assert error.origin.operands == (VECTOR, VECTOR)
    assert "op matmul 'layer3.product'(f32[4], f32[4])" in str(error)


def test_the_origin_names_operands_that_exist_alone() -> None:
    assert refused(graph(node("add", 0, 7))).origin.operands == (VECTOR,)


def test_an_unknown_op_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownOpError) as caught:
        validate(graph(node("gelu_err", 0)), LIMITS)
    assert caught.value.advice == "did you mean 'gelu_erf'?"
    assert caught.value.origin.op == "gelu_err"


@pytest.mark.parametrize(
    "declared", [TensorType(F32, (5,)), TensorType(F32, (1, 4)), TensorType(DTYPES["f64"], (4,))]
)
def test_a_node_whose_declared_result_is_wrong_is_refused_with_both(declared: TensorType) -> None:
    error = refused(graph(node("neg", 0, type=declared)))
    assert f"the result is f32[4], but the graph says {declared}" in error.message


def test_an_unknown_attribute_is_refused() -> None:
    assert "no attribute 'axis'" in refused(graph(node("neg", 0, axis=1))).message


def test_two_leaves_of_a_kind_have_different_names() -> None:
    assert "two inputs are named 'x'" in refused(graph(leaves=(X, X))).message


def test_leaves_of_different_kinds_may_share_a_name() -> None:
    validate(graph(leaves=(X, replace(V, name="x"), replace(W, name="x"))), LIMITS)


def test_nodes_may_share_a_name_or_have_none() -> None:
    validate(graph(node("neg", 0, name="a"), node("neg", 1, name="a"), node("neg", 2)), LIMITS)


def test_two_outputs_have_different_names() -> None:
    assert "two outputs are named 'y'" in refused(graph(outputs=(Output("y", 0),) * 2)).message


def test_one_value_may_be_several_outputs() -> None:
    validate(graph(outputs=(Output("y", 0), Output("z", 0))), LIMITS)


BAD_NAMES = ["", "a" * (MAX_NAME + 1), "a\nb", "\x1b[31m", "a\0", "\u202eevil", "\ud800"]


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_a_leaf_or_output_with_a_bad_name_is_refused(name: str) -> None:
    assert "the name" in refused(graph(leaves=(replace(X, name=name),))).message
    assert "the name" in refused(graph(outputs=(Output(name, 0),))).message


@pytest.mark.parametrize("name", BAD_NAMES[1:], ids=ascii)
def test_a_node_with_a_bad_name_is_refused(name: str) -> None:
    error = refused(graph(node("neg", 0, name=name)))
    assert "the name" in error.message
    assert len(str(error)) < 1000


def test_names_may_have_spaces_and_any_script() -> None:
    validate(graph(leaves=(replace(X, name="Schicht 3 · 層"),)), LIMITS)


def test_a_graph_without_outputs_is_refused() -> None:
    assert "no outputs" in refused(graph(outputs=())).message


@pytest.mark.parametrize("value", [-1, 1, 2**40])
def test_an_output_that_is_no_value_is_refused(value: int) -> None:
    assert f"is value {value} of 1" in refused(graph(outputs=(Output("y", value),))).message


@pytest.mark.parametrize("operand", [0, 2, 3], ids=["input", "weight", "node"])
def test_an_assignment_to_what_is_no_variable_is_refused(operand: int) -> None:
    error = refused(graph(node("neg", 0), node("assign", operand, 0), leaves=(X, V, W)))
    assert "the first operand is not a variable" in error.message


def test_an_assignment_to_a_variable_is_valid() -> None:
    validate(graph(node("assign", 1, 0), leaves=(X, V)), LIMITS)


def test_an_assignment_to_the_result_of_one_is_refused() -> None:
    error = refused(graph(node("assign", 1, 0), node("assign", 2, 0), leaves=(X, V)))
    assert "not a variable" in error.message


def test_a_weight_without_a_digest_is_refused() -> None:
    assert "only weights have a digest" in refused(graph(leaves=(replace(W, digest=b""),))).message


def test_an_input_with_a_digest_is_refused() -> None:
    assert "only weights have a digest" in refused(graph(leaves=(replace(X, digest=bytes(32)),))).message


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((1,) * 9, "f32", "at most 8"),
        ((-1,), "f32", "cannot be negative"),
        ((2**61,), "f32", "passes 2**63 bytes"),
        ((0, 2**62), "f32", "passes 2**63 bytes"),
        ((33,), "q8_0", "whole blocks of 32"),
        ((), "q4_0", "whole blocks of 32"),
    ],
)
def test_a_leaf_that_no_tensor_can_be_is_refused(shape: tuple[int, ...], dtype: str, message: str) -> None:
    leaf = replace(X, type=TensorType(DTYPES[dtype], shape))
    assert message in refused(graph(leaves=(leaf,))).message


def test_a_graph_with_more_nodes_than_the_limit_is_refused_with_both_numbers() -> None:
    with pytest.raises(LimitExceededError, match="has 4 nodes; the server's limit is 3"):
        validate(chain(4), replace(LIMITS, graph_nodes=3))


def test_a_graph_deeper_than_the_limit_is_refused_with_both_numbers() -> None:
    with pytest.raises(LimitExceededError, match="is 4 nodes deep; the server's limit is 3"):
        validate(chain(4), replace(LIMITS, graph_depth=3))


def test_depth_is_that_of_the_longest_path_and_not_the_number_of_nodes() -> None:
    wide = graph(*(node("neg", 0) for _ in range(9)), node("add", 1, 9))
    validate(wide, replace(LIMITS, graph_depth=2))


@pytest.fixture(scope="module")
def endless() -> Graph:
    """A chain of more nodes than a server takes."""
    return chain(ENDLESS)


def test_more_nodes_than_the_limit_are_refused_before_any_is_looked_at(endless: Graph) -> None:
    started = time.perf_counter()
    with pytest.raises(LimitExceededError, match=f"{ENDLESS:,} nodes"):
        validate(endless, LIMITS)
    assert time.perf_counter() - started < 0.1


@pytest.mark.slow
def test_more_nodes_in_a_row_validate_where_limits_allow(endless: Graph) -> None:
    limits = replace(LIMITS, graph_nodes=ENDLESS, graph_depth=ENDLESS)
    assert len(validate(endless, limits).nodes) == ENDLESS


@pytest.mark.slow
def test_more_nodes_deep_are_refused_by_depth_alone(endless: Graph) -> None:
    with pytest.raises(LimitExceededError, match=f"{ENDLESS:,} nodes deep"):
        validate(endless, replace(LIMITS, graph_nodes=ENDLESS))


def test_a_graph_describes_itself_by_counts() -> None:
    assert repr(graph(node("neg", 0))) == "<Graph 1 leaves, 1 nodes, 1 outputs>"


def test_the_type_of_a_value_is_its_leafs_or_its_nodes() -> None:
    found = graph(node("isnan", 0, type=TensorType(BOOL, (4,))))
    assert [found.type_of(value).dtype.name for value in (0, 1)] == ["f32", "bool"]


def test_leaves_are_listed_by_kind_in_order() -> None:
    found = graph(leaves=(W, X, V, replace(X, name="z")))
    assert [leaf.name for leaf in found.inputs] == ["x", "z"]
    assert (found.weights, found.variables) == ((W,), (V,))


def test_nodes_of_one_form_share_their_type_and_attributes_and_no_others_do() -> None:
    scales = [0.0, 0.0, -0.0, 1.0]
    nodes = [node("scale", 0, type=TensorType(F32, (4,)), scale=one, bias=0.0) for one in scales]
    leaf = replace(X, name="other", type=TensorType(F32, (4,)))
    found = validate(graph(*nodes, leaves=(X, leaf)), LIMITS)
    types = [*(one.type for one in found.leaves), *(one.type for one in found.nodes)]
    assert all(one is types[0] for one in types)
    shared = {id(one.attributes) for one in found.nodes}
    assert found.nodes[0].attributes is found.nodes[1].attributes and len(shared) == len(scales) - 1
    assert [repr(one.attributes["scale"]) for one in found.nodes] == [repr(one) for one in scales]


def test_a_later_node_of_a_known_form_with_another_result_is_refused() -> None:
    error = refused(graph(node("neg", 0), node("neg", 0, type=TensorType(F32, (3,)))))
    assert error.origin.node == 1 and "the graph says f32[3]" in error.message


def test_a_later_assignment_of_a_known_form_must_name_a_variable() -> None:
    error = refused(graph(node("assign", 1, 0), node("assign", 0, 0), leaves=(X, V)))
    assert error.origin.node == 1 and "not a variable" in error.message
