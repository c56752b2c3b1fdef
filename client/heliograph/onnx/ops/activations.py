"""Rules of activations."""

from __future__ import annotations

from typing import Literal

import heliograph as hg
from heliograph.lowerings.arrays import along, cast
from heliograph.onnx.node import Node
from heliograph.onnx.rules import rule

rule("Relu")(lambda node: hg.relu(node.value(0)))
rule("Sigmoid")(lambda node: hg.sigmoid(node.value(0)))
rule("Softplus")(lambda node: hg.softplus(node.value(0)))
rule("Tanh")(lambda node: hg.tanh(node.value(0)))


@rule("LeakyRelu")
def _leaky_relu(node: Node) -> hg.Value:
    x = node.value(0)
    return hg.where(x < 0, x * node.float("alpha", 0.01), x)


@rule("PRelu")
def _parametric_relu(node: Node) -> hg.Value:
    x, slope = node.value(0), node.value(1)
    if node.opset < 7 and slope.ndim == 1 and slope.shape[0] > 1:
        slope = hg.reshape(slope, along(1, x.ndim))
    return hg.where(x < 0, x * slope, x)


@rule("Elu")
def _elu(node: Node) -> hg.Value:
    x = node.value(0)
    return hg.where(x < 0, hg.expm1(x) * node.float("alpha", 1.0), x)


@rule("Selu")
def _selu(node: Node) -> hg.Value:
    x, alpha = node.value(0), node.float("alpha", 1.6732632423543772)
    return hg.where(x <= 0, hg.exp(x) * alpha - alpha, x) * node.float("gamma", 1.0507009873554805)


@rule("Celu")
def _celu(node: Node) -> hg.Value:
    x, alpha = node.value(0), node.float("alpha", 1.0)
    return hg.maximum(x, 0.0) + hg.minimum(hg.expm1(x / alpha) * alpha, 0.0)


@rule("HardSigmoid")
def _hard_sigmoid(node: Node) -> hg.Value:
    return hg.clip(node.value(0) * node.float("alpha", 0.2) + node.float("beta", 0.5), 0.0, 1.0)


@rule("HardSwish")
def _hard_swish(node: Node) -> hg.Value:
    x = node.value(0)
    return x * hg.clip(x * (1 / 6) + 0.5, 0.0, 1.0)


@rule("ThresholdedRelu")
def _thresholded_relu(node: Node) -> hg.Value:
    x = node.value(0)
    return hg.where(x > node.float("alpha", 1.0), x, 0.0)


@rule("Softsign")
def _softsign(node: Node) -> hg.Value:
    x = node.value(0)
    return x / (hg.abs(x) + 1.0)


@rule("Shrink")
def _shrink(node: Node) -> hg.Value:
    x = node.value(0)
    wide = cast(x, "f32") if x.dtype.is_integer else x
    limit, bias = node.float("lambd", 0.5), node.float("bias", 0.0)
    found = hg.where(wide < -limit, wide + bias, hg.where(wide > limit, wide - bias, 0.0))
    return cast(found, x.dtype)


@rule("Gelu")
def _gelu(node: Node) -> hg.Value:
    kind: Literal["none", "tanh"] = "tanh" if node.string("approximate", "none") == "tanh" else "none"
    return hg.gelu(node.value(0), kind)


@rule("Mish")
def _mish(node: Node) -> hg.Value:
    x = node.value(0)
    return x * hg.tanh(hg.softplus(x))


@rule("Swish")
def _swish(node: Node) -> hg.Value:
    x = node.value(0)
    return x * hg.sigmoid(x * node.float("alpha", 1.0))


@rule("Binarizer")
def _binarize(node: Node) -> hg.Value:
    x = node.value(0)
    return cast(x > node.float("threshold", 0.0), x.dtype)
