"""Small ONNX models for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper, save_model

Size = int | str | None


def tensor(name: str, shape: Sequence[Size] | None, element: int = TensorProto.FLOAT) -> ValueInfoProto:
    """A tensor's name, type and shape."""
    return helper.make_tensor_value_info(name, element, None if shape is None else list(shape))


def constant(name: str, array: Any) -> TensorProto:
    """A constant of a model."""
    return numpy_helper.from_array(np.asarray(array), name)


def node(op: str, inputs: str, outputs: str, name: str = "", **attributes: Any) -> NodeProto:
    """A node; inputs and outputs are names with spaces between them, "_" for none."""
    return helper.make_node(op, _names(inputs), _names(outputs), name=name or op.lower(), **attributes)


def _names(text: str) -> list[str]:
    return ["" if one == "_" else one for one in text.split()]


def model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    constants: Sequence[TensorProto] = (),
    *,
    opset: int = 20,
    **options: Any,
) -> ModelProto:
    """A model of these nodes."""
    graph = helper.make_graph(list(nodes), "graph", list(inputs), list(outputs), list(constants))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], **options)


def perceptron(batch: Size = "batch", seed: int = 3) -> ModelProto:
    """Two layers over rows of 8: relu(x w + b) v."""
    rng = np.random.default_rng(seed)
    return model(
        [
            node("Gemm", "x w b", "h", "first"),
            node("Relu", "h", "r", "active"),
            node("MatMul", "r v", "y", "second"),
        ],
        [tensor("x", [batch, 8])],
        [tensor("y", [batch, 4])],
        [
            constant("w", rng.normal(size=(8, 64)).astype(np.float32)),
            constant("b", rng.normal(size=64).astype(np.float32)),
            constant("v", rng.normal(size=(64, 4)).astype(np.float32)),
        ],
    )


def perceptron_result(made: ModelProto, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The output of `perceptron`, by NumPy."""
    w, b, v = (numpy_helper.to_array(one) for one in made.graph.initializer)
    found: np.ndarray[Any, Any] = np.maximum(x @ w + b, 0) @ v
    return found


def saved_outside(made: ModelProto, folder: Path) -> Path:
    """Save a model with its weights in a file beside it, and return its path."""
    path, copy = folder / "model.onnx", ModelProto()
    copy.CopyFrom(made)
    save_model(copy, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path
