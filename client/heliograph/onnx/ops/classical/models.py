"""Linear models, and the scores and labels that all classifiers give."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from onnx import TensorProto

import heliograph as hg
from heliograph.lowerings.arrays import cast
from heliograph.onnx.elements import Array, Coded, Item
from heliograph.onnx.node import Node
from heliograph.onnx.rules import Result, rule


def numbers_of(node: Node, name: str) -> Array | None:
    """Return an attribute of numbers that may be a list or a tensor, or None."""
    found = node.attribute(f"{name}_as_tensor")
    if found is not None:
        return node.level.tensor(found)
    floats = node.floats(name)
    return None if floats is None else np.array(floats, np.float32)


def features_of(node: Node) -> hg.Value:
    """Return the rows of features: floats, of which integers become f32."""
    x = node.value(0)
    x = x if x.dtype.name in ("f32", "f64") else cast(x, "f32")
    return x if x.ndim == 2 else hg.reshape(x, (1, x.size) if x.ndim < 2 else (x.shape[0], -1))


def _softmax_zero(x: hg.Value) -> hg.Value:
    """A softmax in which zeros stay zeros, but for the shift."""
    top = hg.max(x, axis=-1, keepdims=True)
    powers = hg.where(hg.abs(x) > 1e-7, hg.exp(x - top), x * hg.exp(-top))
    total = hg.sum(powers, axis=-1, keepdims=True)
    return hg.where(total == 0, 0.5, powers / hg.where(total == 0, 1.0, total))


def _probit(x: hg.Value) -> hg.Value:
    """The approximation of the inverse of the normal distribution that ONNX's reference has."""
    y = x * 2.0 - 1.0
    log = hg.log((1.0 - y) * (1.0 + y))
    half = 2.0 / (math.pi * 0.147) + 0.5 * log
    return hg.sign(y) * hg.sqrt(hg.sqrt(half * half - log / 0.147) - half) * math.sqrt(2)


_TRANSFORMS: dict[str, Callable[[hg.Value], hg.Value]] = {
    "NONE": lambda x: x,
    "SOFTMAX": lambda x: hg.softmax(x, axis=-1),
    "LOGISTIC": hg.sigmoid,
    "SOFTMAX_ZERO": _softmax_zero,
    "PROBIT": _probit,
}


def transformed(node: Node, scores: hg.Value) -> hg.Value:
    """Return scores after the attribute post_transform, a name or its number."""
    name = node.attribute("post_transform")
    name = list(_TRANSFORMS)[name] if isinstance(name, int) else node.string("post_transform", "NONE")
    if name not in _TRANSFORMS:
        raise node.broken(f"post_transform is {name!r:.80}")
    return _TRANSFORMS[name](scores)


def labelled(node: Node, scores: hg.Value, names: str) -> tuple[Item, ...]:
    """Return the labels of the largest scores [n, classes], and the scores. `names`: the attribute
    with the classes that are integers."""
    integers, strings = node.ints(names), node.strings("classlabels_strings")
    labels = integers or strings or []
    if len(labels) < scores.shape[1]:
        raise node.broken(f"it has {len(labels)} labels of {scores.shape[1]} classes")
    best = cast(hg.argmax(scores, axis=1), "i64")
    if not integers:
        return Coded(best, TensorProto.STRING, np.array(labels, object)), scores
    return hg.take(node.graph.constant(np.array(labels, np.int64)), best, axis=0), scores


@rule("LinearRegressor")
def _linear_regressor(node: Node) -> Result:
    return transformed(node, _linear(node, node.int("targets", 1)))


def _linear(node: Node, rows: int) -> hg.Value:
    x = features_of(node)
    weights = np.array(node.floats("coefficients") or [], x.dtype.numpy)
    if rows < 1 or weights.size != rows * x.shape[1]:
        raise node.broken(f"it has {weights.size} coefficients of {x.shape[1]} features")
    scores = x @ np.ascontiguousarray(weights.reshape(rows, -1).T)
    intercepts = node.floats("intercepts")
    return scores + np.array(intercepts, x.dtype.numpy) if intercepts else scores


@rule("LinearClassifier")
def _linear_classifier(node: Node) -> Result:
    x = features_of(node)
    scores = _linear(node, len(node.floats("coefficients") or []) // max(x.shape[1], 1))
    labels = node.ints("classlabels_ints") or node.strings("classlabels_strings") or []
    if scores.shape[1] == 1 and len(labels) == 2:
        scores = hg.concat([-scores, scores], axis=1)
    elif scores.shape[1] == 1:
        raise node.refuse("it gives one score of one class")
    return labelled(node, cast(transformed(node, scores), "f32"), "classlabels_ints")
