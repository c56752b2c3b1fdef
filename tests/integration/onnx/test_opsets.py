"""Ops as they were in older opsets: attributes that became inputs, and other meanings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import NodeProto
from onnx_models import model, node, tensor

import heliograph as hg

X = np.random.default_rng(2).normal(size=(2, 3, 4)).astype(np.float32)
IMAGE = X[None]


def flat_softmax(x: np.ndarray) -> np.ndarray:
    """Over all dimensions from the second on."""
    powers = np.exp(x.reshape(len(x), -1))
    return (powers / powers.sum(1, keepdims=True)).reshape(x.shape)


OLD: list[tuple[int, NodeProto, np.ndarray, Any]] = [
    (7, node("Softmax", "x", "y", axis=1), X, flat_softmax(X)),
    (12, node("LogSoftmax", "x", "y", axis=1), X, np.log(flat_softmax(X))),
    (12, node("Hardmax", "x", "y", axis=1), X[:, 0], np.eye(4)[X[:, 0].argmax(1)]),
    (7, node("ReduceSum", "x", "y", axes=[1], keepdims=0), X, X.sum(1)),
    (12, node("ReduceMax", "x", "y", axes=[-1]), X, X.max(-1, keepdims=True)),
    (12, node("ReduceMean", "x", "y", axes=[1]), X[:, :0], np.zeros((X.shape[0], 1, X.shape[2]))),
    (8, node("Squeeze", "x", "y", axes=[0]), IMAGE, X),
    (8, node("Unsqueeze", "x", "y", axes=[1]), X, X[:, None]),
    (9, node("Slice", "x", "y", starts=[1, 0], ends=[3, 2], axes=[1, 2]), X, X[:, 1:3, :2]),
    (8, node("Clip", "x", "y", min=-0.5, max=0.25), X, X.clip(-0.5, 0.25)),
    (10, node("Pad", "x", "y", pads=[0, 1, 0, 0, 0, 2], value=3.0), X,
     np.pad(X, [(0, 0), (1, 0), (0, 2)], constant_values=3)),
    (8, node("Split", "x", "y z", axis=2, split=[1, 3]), X, X[..., :1]),
    (7, node("Upsample", "x", "y", scales=[1.0, 1.0, 2.0, 2.0]), IMAGE, IMAGE.repeat(2, 2).repeat(2, 3)),
    (9, node("TopK", "x", "y i", k=2), X, -np.sort(-X, -1)[..., :2]),
    (10, node("Dropout", "x", "y", ratio=0.9), X, X),
    (7, node("Dropout", "x", "y"), X, X),
    (7, node("Gemm", "x x", "y", transB=1), X[0], X[0] @ X[0].T),
    (8, node("Flatten", "x", "y", axis=2), X, X.reshape(6, 4)),
    (7, node("Cast", "x", "y", to=7), X, X.astype(np.int64)),
    (8, node("ArgMax", "x", "y", axis=1, keepdims=0), X, X.argmax(1)),
    (7, node("Mul", "x x", "y"), X, X * X),
]  # fmt: skip


@pytest.mark.parametrize(
    ("opset", "made", "x", "wanted"), OLD, ids=[f"{one[1].op_type}-{one[0]}" for one in OLD]
)
def test_an_op_has_the_meaning_of_its_opset(
    opset: int, made: NodeProto, x: np.ndarray, wanted: np.ndarray, here: hg.Session
) -> None:
    outputs = [tensor(name, None, 0) for name in made.output]
    proto = model([made], [tensor("x", x.shape)], outputs, opset=opset)
    found = hg.onnx.load(proto.SerializeToString()).compile(here).run(x=x)
    np.testing.assert_allclose(found["y"], wanted, rtol=1e-5, atol=1e-6)
