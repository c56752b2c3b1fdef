"""ONNX models as graphs, without a server: names, constants, refusals, and the import of the extra."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx_models import constant, model, node, perceptron, tensor

import heliograph as hg
from heliograph.onnx.folding import MOST_ELEMENTS


def test_the_package_onnx_is_imported_on_first_use_alone() -> None:
    code = "import heliograph, sys; heliograph.onnx; assert 'onnx' not in sys.modules; heliograph.onnx.load; "
    code += "assert 'onnx' in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_without_the_extra_an_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['onnx'] = None\nimport heliograph as hg\n"
    code += "try: hg.onnx.load\nexcept hg.ConfigurationError as error: print(error)"
    found = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert "the package 'onnx' is not installed" in found.stdout
    assert "pip install 'heliograph[onnx]'" in found.stdout


def test_nodes_and_weights_keep_their_names() -> None:
    g = hg.onnx.load(perceptron().SerializeToString()).graph({"batch": 2})
    assert g.inputs["x"].shape == (2, 8) and g.outputs["y"].shape == (2, 4)
    assert g.find("second/*") and {one.name for one in g.find("*w")} == {"first/w"}


def test_weights_are_not_copied() -> None:
    """All graphs share the arrays, and the model's message does not have their bytes."""
    made = model(
        [node("MatMul", "x w", "y")],
        [tensor("x", ["batch", 8], TensorProto.DOUBLE)],
        [tensor("y", None)],
        [constant("w", np.random.default_rng(1).normal(size=(8, 256)))],
    )
    loaded = hg.onnx.load(made.SerializeToString())
    assert loaded._proto.ByteSize() < 1000 < made.ByteSize()
    graphs = [loaded.graph({"batch": batch}) for batch in (2, 3)]
    arrays = [[one for one in g._arrays.values() if one.shape == (8, 256)] for g in graphs]
    assert all(len(one) == 1 and not one[0].flags.owndata for one in arrays)
    assert np.shares_memory(arrays[0][0], arrays[1][0])


def test_arguments_are_as_declared() -> None:
    made = model(
        [node("Identity", "x", "y")],
        [tensor("x", ["n", None, 3], TensorProto.FLOAT16)],
        [tensor("y", None, TensorProto.FLOAT16)],
        [constant("unused", np.zeros(3))],
    )
    made.graph.input.append(tensor("unused", [3]))
    loaded = hg.onnx.load(made.SerializeToString())
    assert loaded.inputs == (hg.onnx.Argument("x", "tensor(float16)", ("n", None, 3)),)
    assert loaded.outputs == (hg.onnx.Argument("y", "tensor(float16)", ()),)


def test_shapes_that_nothing_has_are_refused() -> None:
    loaded = hg.onnx.load(perceptron().SerializeToString())
    with pytest.raises(hg.InvalidArgumentError, match="no input or symbol 'bach'"):
        loaded.graph({"bach": 2})
    with pytest.raises(hg.InvalidArgumentError, match="the shape of input 'x' is not known"):
        loaded.graph()


def test_missing_ops_are_named_before_anything_is_sent() -> None:
    inner = helper.make_graph([node("ImageDecoder", "x", "z", "deep")], "inner", [], [tensor("z", None)])
    made = model(
        [
            node("If", "c", "a", "branch", then_branch=inner, else_branch=inner),
            node("StringNormalizer", "s", "b", "text"),
            node("Unheard", "x", "d", "odd"),
            node("Relu", "x", "e", "fine"),
        ],
        [tensor("x", [2]), tensor("c", [], TensorProto.BOOL), tensor("s", [1], TensorProto.STRING)],
        [tensor("e", [2])],
    )
    found = hg.onnx.supported(made.SerializeToString())
    assert [(one.node, one.op) for one in found] == [
        ("deep", "ImageDecoder"),
        ("deep", "ImageDecoder"),
        ("text", "StringNormalizer"),
        ("odd", "Unheard"),
    ]
    assert "there is no rule for this op" in str(found[3])


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            model([node("ImageDecoder", "x", "y", "here")], [tensor("x", [3])], [tensor("y", None)]),
            r"node 'here' \(ImageDecoder\): it decodes images",
        ),
        (
            model([node("Identity", "x", "y")], [tensor("x", [3], TensorProto.STRING)], [tensor("y", None)]),
            "the shape of input 'x' is not known|no data type for string",
        ),
        (
            model(
                [node("Reshape", "x s", "y", "here")],
                [tensor("x", [3]), tensor("s", [1], TensorProto.INT64)],
                [tensor("y", None)],
            ),
            r"node 'here' \(Reshape\) needs the elements of 's' before a run",
        ),
    ],
    ids=["image", "string", "undecided"],
)  # fmt: skip
def test_what_cannot_be_expressed_is_refused_by_name(made: object, message: str) -> None:
    with pytest.raises((hg.UnsupportedError, hg.InvalidArgumentError), match=message):
        hg.onnx.load(made.SerializeToString()).graph()  # type: ignore[attr-defined]


def test_large_constants_are_left_to_the_device() -> None:
    """A small one is computed by the client, and only its result is in the graph."""
    for count, ops in ((16, set()), (2 * MOST_ELEMENTS, {"broadcast_to"})):
        made = model(
            [node("Expand", "one s", "wide"), node("ReduceSum", "wide _", "t"), node("Add", "x t", "y")],
            [tensor("x", [1])],
            [tensor("y", [1])],
            [constant("one", np.ones(1, np.float32)), constant("s", np.array([count]))],
        )
        made.graph.node[1].input[:] = ["wide"]
        g = hg.onnx.load(made.SerializeToString()).graph()
        assert {one.op for one in g.find("*")} & {"broadcast_to", "reduce_sum"} >= ops
        assert bool(ops) == bool(g.find("reducesum/*"))
