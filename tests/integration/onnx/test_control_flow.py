"""Branches, loops, scans and functions of ONNX models, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import GraphProto, ModelProto, TensorProto, helper
from onnx_models import constant, model, node, tensor

import heliograph as hg

X = np.array([1.0, -2.0, 3.0], np.float32)


def branches() -> dict[str, GraphProto]:
    """-x, or its absolute value."""
    return {
        f"{name}_branch": helper.make_graph([node(op, "x", "z")], name, [], [tensor("z", [3])])
        for name, op in (("then", "Neg"), ("else", "Abs"))
    }


def test_a_branch_is_taken_by_a_condition_of_the_run(here: hg.Session) -> None:
    """Both are computed, in one plan."""
    made = model(
        [node("If", "c", "y", **branches())],
        [tensor("x", [3]), tensor("c", [], TensorProto.BOOL)],
        [tensor("y", [3])],
    )
    plan = hg.onnx.load(made.SerializeToString()).compile(here)
    assert plan.run(x=X, c=np.array(True))["y"].tolist() == (-X).tolist()
    assert plan.run(x=X, c=np.array(False))["y"].tolist() == abs(X).tolist()
    assert len(plan.plans) == 1


def test_a_constant_condition_leaves_one_branch(here: hg.Session) -> None:
    made = model(
        [node("If", "c", "y", "if", **branches())],
        [tensor("x", [3])],
        [tensor("y", [3])],
        [constant("c", np.array(False))],
    )
    loaded = hg.onnx.load(made.SerializeToString())
    assert {one.op for one in loaded.graph().find("if/*")} == {"abs"}
    assert loaded.compile(here).run(x=X)["y"].tolist() == abs(X).tolist()


def doubling_below_a_limit() -> GraphProto:
    """The body of a loop that doubles x, and goes on by the sum of its elements."""
    return helper.make_graph(
        [node("Add", "v v", "w"), node("ReduceSum", "w", "s", keepdims=0), node("Less", "s limit", "go")],
        "body",
        [tensor("i", [], TensorProto.INT64), tensor("c", [], TensorProto.BOOL), tensor("v", [3])],
        [tensor("go", [], TensorProto.BOOL), tensor("w", [3]), tensor("s", [])],
    )


def test_a_loop_of_known_length_is_unrolled(here: hg.Session) -> None:
    body = helper.make_graph(
        [node("Add", "v v", "w"), node("Identity", "c", "go"), node("Identity", "w", "each")],
        "body",
        [tensor("i", [], TensorProto.INT64), tensor("c", [], TensorProto.BOOL), tensor("v", [3])],
        [tensor("go", [], TensorProto.BOOL), tensor("w", [3]), tensor("each", [3])],
    )
    made = model(
        [node("Loop", "n _ x", "last all", body=body)],
        [tensor("x", [3]), tensor("n", [], TensorProto.INT64)],
        [tensor("last", [3]), tensor("all", None)],
    )
    plan = hg.onnx.load(made.SerializeToString()).compile(here)
    for count in (1, 4, 0):
        found = plan.run(x=X, n=np.array(count))
        assert found["last"].tolist() == (X * 2**count).tolist()
        assert found["all"].shape == (count, 3)


def test_results_of_no_turn_need_a_declared_shape(here: hg.Session) -> None:
    body = helper.make_graph(
        [node("Identity", "c", "go"), node("Identity", "x", "each")],
        "body",
        [tensor("i", [], TensorProto.INT64), tensor("c", [], TensorProto.BOOL)],
        [tensor("go", [], TensorProto.BOOL), tensor("each", ["n"])],
    )
    made = model(
        [node("Loop", "turns _", "all", "never", body=body)],
        [tensor("x", [3])],
        [tensor("all", None)],
        [constant("turns", np.array(0))],
    )
    with pytest.raises(hg.UnsupportedError, match=r"'never' .*no turn.*does not declare"):
        hg.onnx.load(made.SerializeToString()).compile(here)


def endless(constants: list[TensorProto]) -> ModelProto:
    """A loop over that body, which begins if c is true."""
    return model(
        [
            node(
                "Loop",
                "n c x" if constants else "_ _ x",
                "last sums",
                "endless",
                body=doubling_below_a_limit(),
            )
        ],
        [tensor("x", [3]), tensor("c", [], TensorProto.BOOL)],
        [tensor("last", [3]), tensor("sums", None)],
        [constant("limit", np.array(50, np.float32)), *constants],
    )


@pytest.mark.parametrize("begins", [True, False])
def test_a_run_ends_a_loop_of_bounded_length(begins: bool, here: hg.Session) -> None:
    """All turns are computed, and those after the end are left out."""
    made = endless([constant("n", np.array(9))])
    plan = hg.onnx.load(made.SerializeToString()).compile(here)
    for factor in (1, 3, -1):
        x = factor * abs(X)
        last, sums = x, []
        while begins and len(sums) < 9 and (not sums or sums[-1] < 50):
            last = 2 * last
            sums.append(float(last.sum()))
        found = plan.run(x=x, c=np.array(begins))
        assert found["last"].tolist() == last.tolist() and found["sums"].tolist() == sums
    assert len(plan.plans) == 1


def test_a_loop_without_a_bound_is_refused(here: hg.Session) -> None:
    with pytest.raises(hg.UnsupportedError, match=r"'endless' \(Loop\): its condition is computed by a run"):
        hg.onnx.load(endless([]).SerializeToString()).compile(here)


def test_a_scan_gives_sums_so_far(here: hg.Session) -> None:
    body = helper.make_graph(
        [node("Add", "s v", "t"), node("Identity", "t", "u")],
        "body",
        [tensor("s", [2]), tensor("v", [2])],
        [tensor("t", [2]), tensor("u", [2])],
    )
    made = model(
        [node("Scan", "start rows", "end sums", body=body, num_scan_inputs=1)],
        [tensor("start", [2]), tensor("rows", [4, 2])],
        [tensor("end", [2]), tensor("sums", [4, 2])],
    )
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    plan = hg.onnx.load(made.SerializeToString()).compile(here)
    found = plan.run(start=np.zeros(2, np.float32), rows=rows)
    assert found["sums"].tolist() == rows.cumsum(axis=0).tolist()


def test_functions_of_a_model_are_replaced_by_their_bodies(here: hg.Session) -> None:
    """With attributes of the call, and the default of the function."""
    scaled = helper.make_node("LeakyRelu", ["a"], ["b"])
    attribute = scaled.attribute.add()
    attribute.name, attribute.ref_attr_name, attribute.type = "alpha", "slope", 1
    function = helper.make_function(
        "own", "Bend", ["a"], ["b"], [scaled], [helper.make_opsetid("", 20)],
        attribute_protos=[helper.make_attribute("slope", 0.5)],
    )  # fmt: skip
    made = model(
        [
            helper.make_node("Bend", ["x"], ["h"], domain="own"),
            helper.make_node("Bend", ["h"], ["y"], domain="own", slope=0.25),
        ],
        [tensor("x", [3])],
        [tensor("y", [3])],
        functions=[function],
    )
    made.opset_import.append(helper.make_opsetid("own", 1))
    found = hg.onnx.load(made.SerializeToString()).compile(here).run(x=X)["y"]
    assert found.tolist() == [1, -0.25, 3]
