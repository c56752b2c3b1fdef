"""Rules of ops that compute element by element."""

from __future__ import annotations

from collections.abc import Callable

import heliograph as hg
from heliograph.lowerings.arrays import cast, is_integer
from heliograph.onnx.node import Node
from heliograph.onnx.rules import Rule, rule

#: Ops whose functions have their names in lower case.
_UNARY_WORDS = """
    Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor IsNaN Log Reciprocal Round Sign
    Sin Sinh Sqrt Tan
"""
_UNARY: dict[str, Callable[[hg.Value], hg.Value]] = {
    **{name: getattr(hg, name.lower()) for name in _UNARY_WORDS.split()},
    "BitwiseNot": hg.bitwise_invert,
    "Neg": hg.negative,
    "Not": hg.logical_not,
}
_BINARY: dict[str, Callable[[hg.Value, hg.Value], hg.Value]] = {
    **{name: getattr(hg, name.lower()) for name in ("Add", "Equal", "Greater", "Less")},
    **{name: getattr(hg, f"logical_{name.lower()}") for name in ("And", "Or", "Xor")},
    **{f"Bitwise{name}": getattr(hg, f"bitwise_{name.lower()}") for name in ("And", "Or", "Xor")},
    "GreaterOrEqual": hg.greater_equal,
    "LessOrEqual": hg.less_equal,
    "Mul": hg.multiply,
    "Sub": hg.subtract,
}


def _unary(function: Callable[[hg.Value], hg.Value]) -> Rule:
    return lambda node: function(node.value(0))


def _binary(function: Callable[[hg.Value, hg.Value], hg.Value]) -> Rule:
    return lambda node: function(*broadcasting(node))


def broadcasting(node: Node) -> tuple[hg.Value, hg.Value]:
    """Return two operands; before opset 7 the second one may begin at an axis of the first."""
    a, b = node.value(0), node.value(1)
    if node.opset < 7 and node.int("broadcast", 0) and node.given("axis"):
        after = a.ndim - node.axis(node.int("axis"), a.ndim) - b.ndim
        b = hg.reshape(b, b.shape + (1,) * after)
    return a, b


def _folded(function: Callable[[hg.Value, hg.Value], hg.Value]) -> Rule:
    def of_all(node: Node) -> hg.Value:
        first, *others = node.values()
        for one in others:
            first = function(first, one)
        return first

    return of_all


for _op, _one in _UNARY.items():
    rule(_op)(_unary(_one))
for _op, _two in _BINARY.items():
    rule(_op)(_binary(_two))
sum_of_all = rule("Sum")(_folded(hg.add))
rule("Max")(_folded(hg.maximum))
rule("Min")(_folded(hg.minimum))


@rule("Mean")
def _mean(node: Node) -> hg.Value:
    found = sum_of_all(node)
    assert isinstance(found, hg.Value)
    return found / float(len(node.items))


@rule("Div")
def _divide(node: Node) -> hg.Value:
    """Divide; integers round towards zero."""
    a, b = broadcasting(node)
    if not is_integer(a):
        return hg.divide(a, b)
    found = a // b
    if a.dtype.kind == "uint":
        return found
    rest = a - found * b
    return hg.where((rest != 0) & ((a < 0) != (b < 0)), found + 1, found)


@rule("Mod")
def _remainder(node: Node) -> hg.Value:
    """The remainder with the divisor's sign or, with fmod, the dividend's."""
    a, b = node.value(0), node.value(1)
    if not node.int("fmod", 0) or a.dtype.kind == "uint":
        return a % b
    if is_integer(a):
        found = hg.abs(a) % hg.abs(b)
        return hg.where(a < 0, -found, found)
    wide = (cast(a, "f32"), cast(b, "f32")) if a.dtype.name in ("f16", "bf16") else (a, b)
    return cast(hg.copysign(hg.abs(wide[0]) % hg.abs(wide[1]), wide[0]), a.dtype)


@rule("Pow")
def _power(node: Node) -> hg.Value:
    a, b = broadcasting(node)
    if a.dtype is b.dtype:
        return hg.pow(a, b)
    if is_integer(a) and not is_integer(b):
        return cast(hg.pow(cast(a, "f64"), cast(b, "f64")), a.dtype)
    return hg.pow(a, cast(b, a.dtype))


@rule("BitShift")
def _shift(node: Node) -> hg.Value:
    left = node.string("direction", "") == "LEFT"
    return (hg.bitwise_left_shift if left else hg.bitwise_right_shift)(node.value(0), node.value(1))


@rule("Where")
def _where(node: Node) -> hg.Value:
    return hg.where(node.value(0), node.value(1), node.value(2))


@rule("IsInf")
def _is_infinite(node: Node) -> hg.Value:
    x = node.value(0)
    found = hg.isinf(x)
    if not node.int("detect_negative", 1):
        found = found & (x > 0)
    if not node.int("detect_positive", 1):
        found = found & (x < 0)
    return found


@rule("Clip")
def _clip(node: Node) -> hg.Value:
    x = node.value(0)
    if node.opset < 11:
        low = node.float("min", -3.4028234663852886e38) if node.given("min") else None
        high = node.float("max", 3.4028234663852886e38) if node.given("max") else None
        return hg.clip(x, low, high)
    if (least := node.optional(1)) is not None:
        x = hg.maximum(x, least)
    if (most := node.optional(2)) is not None:
        x = hg.minimum(x, most)
    return x
