"""Rules of activations; recurrent layers name the same ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import heliograph as hg
from heliograph.lowerings.arrays import along, cast
from heliograph.onnx.node import Node
from heliograph.onnx.rules import Rule, rule


def _hard_sigmoid(x: hg.Value, alpha: float, beta: float) -> hg.Value:
    if abs(alpha - 1 / 6) < 1e-7 and beta == 0.5:
        return hg.ops.hardsigmoid(x)
    return hg.clip(x * alpha + beta, 0.0, 1.0)


#: A function of x, alpha and beta, and the defaults of these two.
Activation: TypeAlias = tuple[Callable[[hg.Value, float, float], hg.Value], float, float]
ACTIVATIONS: dict[str, Activation] = {
    "Affine": (lambda x, a, b: x * a + b, 1.0, 0.0),
    "Celu": (lambda x, a, b: hg.maximum(x, 0.0) + hg.minimum(hg.expm1(x / a) * a, 0.0), 1.0, 0.0),
    "Elu": (lambda x, a, b: hg.where(x < 0, hg.expm1(x) * a, x), 1.0, 0.0),
    "HardSigmoid": (_hard_sigmoid, 0.2, 0.5),
    "HardSwish": (lambda x, a, b: hg.ops.hardswish(x), 0.0, 0.0),
    "LeakyRelu": (lambda x, a, b: hg.where(x < 0, x * a, x), 0.01, 0.0),
    "Relu": (lambda x, a, b: hg.relu(x), 0.0, 0.0),
    "ScaledTanh": (lambda x, a, b: hg.tanh(x * b) * a, 1.0, 1.0),
    "Sigmoid": (lambda x, a, b: hg.sigmoid(x), 0.0, 0.0),
    "Softplus": (lambda x, a, b: hg.softplus(x), 0.0, 0.0),
    "Softsign": (lambda x, a, b: x / (hg.abs(x) + 1.0), 0.0, 0.0),
    "Swish": (lambda x, a, b: x * hg.sigmoid(x * a), 1.0, 0.0),
    "Tanh": (lambda x, a, b: hg.tanh(x), 0.0, 0.0),
    "ThresholdedRelu": (lambda x, a, b: hg.where(x > a, x, 0.0), 1.0, 0.0),
}


def _activation(of: Activation) -> Rule:
    function, alpha, beta = of
    return lambda node: function(node.value(0), node.float("alpha", alpha), node.float("beta", beta))


for _name, _one in ACTIVATIONS.items():
    rule(_name)(_activation(_one))


@rule("PRelu")
def _parametric_relu(node: Node) -> hg.Value:
    x, slope = node.value(0), node.value(1)
    if node.opset < 7 and slope.ndim == 1 and slope.shape[0] > 1:
        slope = hg.reshape(slope, along(1, x.ndim))
    return hg.where(x < 0, x * slope, x)


@rule("Selu")
def _selu(node: Node) -> hg.Value:
    x, alpha = node.value(0), node.float("alpha", 1.6732632423543772)
    return hg.where(x <= 0, hg.exp(x) * alpha - alpha, x) * node.float("gamma", 1.0507009873554805)


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
