"""Rules of elementwise ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from heliograph.autodiff.step import Part, Rule, Step, composed, each, zeros
from heliograph.functions.elementwise import where
from heliograph.graph.lowering import apply
from heliograph.graph.value import Value

#: The derivatives of functions of one operand, from the operand and the result.
_DERIVATIVES: Mapping[str, Callable[[Value, Value], Value]] = {
    "abs": lambda x, y: apply("sgn", x),
    "sqr": lambda x, y: x * 2.0,
    "sqrt": lambda x, y: 0.5 / y,
    "rsqrt": lambda x, y: y * y * y * -0.5,
    "exp": lambda x, y: y,
    "expm1": lambda x, y: y + 1.0,
    "log": lambda x, y: 1.0 / x,
    "log1p": lambda x, y: 1.0 / (x + 1.0),
    "log2": lambda x, y: 1.0 / (x * math.log(2)),
    "log10": lambda x, y: 1.0 / (x * math.log(10)),
    "sin": lambda x, y: apply("cos", x),
    "cos": lambda x, y: -apply("sin", x),
    "tanh": lambda x, y: 1.0 - y * y,
    "erf": lambda x, y: apply("exp", -(x * x)) * (2 / math.sqrt(math.pi)),
    "sigmoid": lambda x, y: y * (1.0 - y),
    "gelu": lambda x, y: _gelu_slope(x),
    "gelu_erf": lambda x, y: (
        (apply("erf", x * math.sqrt(0.5)) + 1.0) * 0.5
        + x * apply("exp", x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
    ),
    "gelu_quick": lambda x, y: _swish_slope(x, 1.702),
    "softplus": lambda x, y: apply("sigmoid", x),
    "acos": lambda x, y: -apply("rsqrt", 1.0 - x * x),
    "asin": lambda x, y: apply("rsqrt", 1.0 - x * x),
    "atan": lambda x, y: 1.0 / (x * x + 1.0),
    "acosh": lambda x, y: apply("rsqrt", x * x - 1.0),
    "asinh": lambda x, y: apply("rsqrt", x * x + 1.0),
    "atanh": lambda x, y: 1.0 / (1.0 - x * x),
}


def _gelu_slope(x: Value) -> Value:
    a, b = math.sqrt(2 / math.pi), 0.044715
    t = apply("tanh", (x + x * x * x * b) * a)
    return (t + 1.0) * 0.5 + x * (1.0 - t * t) * (x * x * (3 * b) + 1.0) * (0.5 * a)


def _swish_slope(x: Value, steepness: float) -> Value:
    s = apply("sigmoid", x * steepness)
    return s * (x * (1.0 - s) * steepness + 1.0)


def _times(derivative: Callable[[Value, Value], Value]) -> Rule:
    return each(lambda step, g: g * derivative(step[0], step.result))


def _pow_base(step: Step, g: Value) -> Value:
    a, b = step.operands
    slope = b * apply("pow", a, b - 1.0)
    return where(b == 0.0, 0.0, g * slope)


def _pow_exponent(step: Step, g: Value) -> Value:
    a = step[0]
    return g * step.result * apply("log", where(a > 0.0, a, 1.0))


def _larger(first: int) -> Part:
    """The gradient of the larger operand; equal ones share it."""
    return lambda step, g: where(
        step[first] > step[1 - first], g, where(step[first] == step[1 - first], g * 0.5, 0.0)
    )


def _smaller(first: int) -> Part:
    return lambda step, g: where(
        step[first] < step[1 - first], g, where(step[first] == step[1 - first], g * 0.5, 0.0)
    )


def _hypot(place: int) -> Part:
    return lambda step, g: where(step.result == 0.0, 0.0, g * step[place] / step.result)


def _clamp(step: Step, g: Value) -> Value:
    x = step[0]
    inside = (x >= step.attributes["min"]) & (x <= step.attributes["max"])
    return where(inside, g, 0.0)


def _xielu(attributes: Mapping[str, Any], x: Value) -> Value:
    positive, negative = (math.log1p(math.exp(attributes[name])) for name in ("alpha_p", "alpha_n"))
    beta = attributes["beta"]
    below = apply("expm1", apply("clamp", x, min=-math.inf, max=attributes["eps"])) - x
    return where(x > 0.0, x * x * positive, below * (beta + negative)) + apply("scale", x, scale=beta)


def _gated(gate: Callable[[Mapping[str, Any], Value, Value], Value]) -> Rule:
    """The rule of a gated linear unit, from its two halves."""

    def forward(attributes: Mapping[str, Any], x: Value, *others: Value) -> Value:
        half = x.shape[-1] // 2
        first, second = (x, others[0]) if others else (x[..., :half], x[..., half:])
        return gate(attributes, second, first) if attributes["swap"] else gate(attributes, first, second)

    return composed(forward)


def _plain_gate(op: str) -> Rule:
    return _gated(lambda attributes, a, b: apply(op, a) * b)


def _most(attributes: Mapping[str, Any], a: Value) -> Value:
    return apply("clamp", a, min=-math.inf, max=attributes["limit"])


def _within(attributes: Mapping[str, Any], b: Value) -> Value:
    return apply("clamp", b, min=-attributes["limit"], max=attributes["limit"])


def _oai_gate(attributes: Mapping[str, Any], a: Value, b: Value) -> Value:
    a = _most(attributes, a)
    gate = apply("sigmoid", apply("scale", a, scale=attributes["alpha"]))
    return a * gate * (_within(attributes, b) + 1.0)


RULES: Mapping[str, Rule] = {
    **{op: _times(derivative) for op, derivative in _DERIVATIVES.items()},
    "neg": each(lambda step, g: -g),
    "relu": each(lambda step, g: apply("relu_back", g, step[0])),
    "relu_back": each(lambda step, g: apply("relu_back", g, step[1]), lambda step, g: zeros(step[1])),
    "elu": each(lambda step, g: where(step[0] > 0.0, g, g * (step.result + 1.0))),
    "silu": each(lambda step, g: apply("silu_back", g, step[0])),
    "hardswish": each(
        lambda step, g: where(step[0] >= 3.0, g, where(step[0] <= -3.0, 0.0, g * (step[0] * 2.0 + 3.0) / 6.0))
    ),
    "hardsigmoid": each(lambda step, g: where(apply("abs", step[0]) < 3.0, g / 6.0, 0.0)),
    "scale": each(lambda step, g: g * step.attributes["scale"]),
    "clamp": each(_clamp),
    "leaky_relu": each(lambda step, g: where(step[0] > 0.0, g, g * step.attributes["slope"])),
    "xielu": composed(_xielu),
    "cast": each(lambda step, g: g),
    "add": each(lambda step, g: g, lambda step, g: g),
    "sub": each(lambda step, g: g, lambda step, g: -g),
    "mul": each(lambda step, g: g * step[1], lambda step, g: g * step[0]),
    "div": each(lambda step, g: g / step[1], lambda step, g: -(g * step.result / step[1])),
    "pow": each(_pow_base, _pow_exponent),
    "remainder": each(lambda step, g: g, lambda step, g: -(g * (step[0] // step[1]))),
    "maximum": each(_larger(0), _larger(1)),
    "minimum": each(_smaller(0), _smaller(1)),
    "atan2": each(
        lambda step, g: g * step[1] / (step[0] * step[0] + step[1] * step[1]),
        lambda step, g: -(g * step[0]) / (step[0] * step[0] + step[1] * step[1]),
    ),
    "hypot": each(_hypot(0), _hypot(1)),
    "logaddexp": each(
        lambda step, g: g * apply("exp", step[0] - step.result),
        lambda step, g: g * apply("exp", step[1] - step.result),
    ),
    "copysign": each(lambda step, g: g * apply("sgn", step[0]) * apply("sgn", step.result)),
    "where": each(None, lambda step, g: where(step[0], g, 0.0), lambda step, g: where(step[0], 0.0, g)),
    "reglu": _plain_gate("relu"),
    "geglu": _plain_gate("gelu"),
    "geglu_erf": _plain_gate("gelu_erf"),
    "geglu_quick": _plain_gate("gelu_quick"),
    "swiglu": _plain_gate("silu"),
    "swiglu_clamp": _gated(
        lambda attributes, a, b: apply("silu", _most(attributes, a)) * _within(attributes, b)
    ),
    "swiglu_oai": _gated(_oai_gate),
}
