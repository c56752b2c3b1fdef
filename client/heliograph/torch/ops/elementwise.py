"""Rules of ops that compute element by element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import heliograph as hg
from heliograph.lowerings.arrays import cast, is_integer
from heliograph.torch.node import Node, Number, as_float, common_dtype, in_dtype, in_f32, promoted
from heliograph.torch.rules import rule

Unary = Callable[[hg.Value], hg.Value]
Binary = Callable[[hg.Value, hg.Value], hg.Value]

#: Of integers these give floats.
_OF_FLOATS: dict[str, Unary] = {
    "acos": hg.acos,
    "acosh": hg.acosh,
    "asin": hg.asin,
    "asinh": hg.asinh,
    "atan": hg.atan,
    "atanh": hg.atanh,
    "cos": hg.cos,
    "cosh": hg.cosh,
    "erf": hg.erf,
    "exp": hg.exp,
    "expm1": hg.expm1,
    "log": hg.log,
    "log10": hg.log10,
    "log1p": hg.log1p,
    "log2": hg.log2,
    "rsqrt": hg.rsqrt,
    "sin": hg.sin,
    "sinh": hg.sinh,
    "sqrt": hg.sqrt,
    "tan": hg.tan,
    "tanh": hg.tanh,
    "sigmoid": hg.sigmoid,
    "reciprocal": hg.reciprocal,
}
#: These keep their data type.
_OF_NUMBERS: dict[str, Unary] = {
    "bitwise_not": hg.bitwise_invert,
    "ceil": hg.ceil,
    "floor": hg.floor,
    "neg": hg.negative,
    "trunc": hg.trunc,
}
_ARITHMETIC: dict[str, Binary] = {
    "maximum": hg.maximum,
    "minimum": hg.minimum,
    "mul": hg.multiply,
}
_COMPARISONS: dict[str, Binary] = {
    "eq": hg.equal,
    "ge": hg.greater_equal,
    "gt": hg.greater,
    "le": hg.less_equal,
    "lt": hg.less,
    "ne": hg.not_equal,
}
_OF_TWO_FLOATS: dict[str, Binary] = {
    "atan2": hg.atan2,
    "copysign": hg.copysign,
    "hypot": hg.hypot,
    "nextafter": hg.nextafter,
}
_LOGICAL: dict[str, Binary] = {
    "logical_and": hg.logical_and,
    "logical_or": hg.logical_or,
    "logical_xor": hg.logical_xor,
}
_BITWISE: dict[str, Binary] = {
    "bitwise_and": hg.bitwise_and,
    "bitwise_or": hg.bitwise_or,
    "bitwise_xor": hg.bitwise_xor,
    **dict.fromkeys(("bitwise_left_shift", "__lshift__"), hg.bitwise_left_shift),
    **dict.fromkeys(("bitwise_right_shift", "__rshift__"), hg.bitwise_right_shift),
}


def _of_floats(function: Unary) -> Callable[..., hg.Value]:
    return lambda node, x: function(as_float(x))


def _of_numbers(function: Unary) -> Callable[..., hg.Value]:
    return lambda node, x: function(x)


def _arithmetic(function: Binary) -> Callable[..., hg.Value]:
    return lambda node, a, b: function(*_numbers(node, a, b))


def _number_dtype(*operands: Any) -> str:
    """The data type that torch computes in, i32 for bool."""
    common = common_dtype(*operands)
    return "i32" if common == "bool" else common


def _numbers(node: Node, *operands: Any) -> list[hg.Value]:
    return in_dtype(node, _number_dtype(*operands), *operands)


def _comparison(function: Binary) -> Callable[..., hg.Value]:
    def compare(node: Node, a: hg.Value, b: hg.Value | Number) -> hg.Value:
        common = common_dtype(a, b)
        if common == "bool" and function not in (hg.equal, hg.not_equal):
            common = "i32"
        return function(*in_dtype(node, common, a, b))

    return compare


def _logical(function: Binary) -> Callable[..., hg.Value]:
    return lambda node, a, b: function(cast(a, "bool"), cast(b, "bool"))


def _bitwise(function: Binary) -> Callable[..., hg.Value]:
    return lambda node, a, b: function(*promoted(node, a, b))


def _of_two_floats(function: Binary) -> Callable[..., hg.Value]:
    return lambda node, a, b, *_: function(*map(as_float, promoted(node, a, b)))


def _first_number(function: Binary) -> Callable[..., hg.Value]:
    """The larger or smaller one; NaN only where both are."""

    def choose(node: Node, a: hg.Value, b: hg.Value) -> hg.Value:
        a, b = _numbers(node, a, b)
        if not a.dtype.is_float:
            return function(a, b)
        return function(hg.where(hg.isnan(a), b, a), hg.where(hg.isnan(b), a, b))

    return choose


def _question(function: Unary) -> Callable[..., hg.Value]:
    return lambda node, x: function(x) if x.dtype.is_float else node.full(x.shape, False, "bool")


_TABLES: tuple[tuple[Callable[[Any], Callable[..., hg.Value]], dict[str, Any]], ...] = (
    (_of_floats, _OF_FLOATS),
    (_of_numbers, _OF_NUMBERS),
    (_arithmetic, _ARITHMETIC),
    (_comparison, _COMPARISONS),
    (_logical, _LOGICAL),
    (_bitwise, _BITWISE),
    (_of_two_floats, _OF_TWO_FLOATS),
    (_first_number, {"fmax": hg.maximum, "fmin": hg.minimum}),
    (_question, {"isinf": hg.isinf, "isnan": hg.isnan}),
)
for _make, _table in _TABLES:
    for _op, _function in _table.items():
        rule(_op)(_make(_function))


@rule("add")
def _add(node: Node, a: hg.Value, b: hg.Value | Number, alpha: Number) -> hg.Value:
    return hg.add(*_numbers(node, a, _times(node, b, alpha, a)))


@rule("sub")
def _subtract(node: Node, a: hg.Value, b: hg.Value | Number, alpha: Number) -> hg.Value:
    return hg.subtract(*_numbers(node, a, _times(node, b, alpha, a)))


def _times(node: Node, b: hg.Value | Number, alpha: Number, a: hg.Value) -> hg.Value | Number:
    """The second operand times its factor, in the data type of the result."""
    if alpha == 1:
        return b
    if not isinstance(b, hg.Value):
        return b * alpha
    return hg.multiply(*in_dtype(node, _number_dtype(a, b), b, alpha))


@rule("div", "true_divide")
def _divide(node: Node, a: hg.Value, b: hg.Value | Number, mode: str | None = None) -> hg.Value:
    left, right = _numbers(node, a, b)
    if mode is None:
        return hg.divide(as_float(left), as_float(right))
    if is_integer(left):
        return _divide_integers(left, right, mode)
    left, right = in_f32(left), in_f32(right)
    return hg.floor_divide(left, right) if mode == "floor" else hg.trunc(hg.divide(left, right))


def _divide_integers(a: hg.Value, b: hg.Value, mode: str) -> hg.Value:
    found = hg.floor_divide(a, b)
    if mode == "floor" or a.dtype.kind == "uint":
        return found
    rest = a - found * b
    return hg.where((rest != 0) & ((a < 0) != (b < 0)), found + 1, found)


@rule("remainder")
def _remainder(node: Node, a: hg.Value | Number, b: hg.Value | Number) -> hg.Value:
    return hg.remainder(*(in_f32(one) for one in _numbers(node, a, b)))


@rule("fmod")
def _fmod(node: Node, a: hg.Value, b: hg.Value | Number) -> hg.Value:
    """The remainder with the dividend's sign."""
    left, right = (in_f32(one) for one in _numbers(node, a, b))
    if left.dtype.kind == "uint":
        return left % right
    if is_integer(left):
        found = hg.abs(left) % hg.abs(right)
        return hg.where(left < 0, -found, found)
    return hg.copysign(hg.abs(left) % hg.abs(right), left)


@rule("pow")
def _power(node: Node, a: hg.Value | Number, b: hg.Value | Number) -> hg.Value:
    common = _number_dtype(a, b)
    if isinstance(b, hg.Value):
        return hg.pow(*in_dtype(node, common, a, b))
    (base,) = in_dtype(node, common, a)
    return _power_of(node, base, b)


def _power_of(node: Node, x: hg.Value, exponent: Number) -> hg.Value:
    if is_integer(x):
        if exponent < 0:
            raise node.refuse("integers to a negative power")
        return hg.pow(x, int(exponent))
    if exponent == 2:
        return hg.square(x)
    if exponent == 3:
        return x * x * x
    if exponent == 0.5:
        return hg.sqrt(x)
    if exponent == 1:
        return x
    return hg.pow(x, node.full((), exponent, x.dtype))


@rule("exp2")
def _exp2(node: Node, x: hg.Value) -> hg.Value:
    return hg.pow(node.full((), 2, as_float(x).dtype), as_float(x))


@rule("erfc")
def _erfc(node: Node, x: hg.Value) -> hg.Value:
    return 1 - hg.erf(in_f32(as_float(x)))


@rule("signbit")
def _signbit(node: Node, x: hg.Value) -> hg.Value:
    return hg.signbit(x) if x.dtype.is_float else cast(x, "i64") < 0


@rule("abs")
def _abs(node: Node, x: hg.Value) -> hg.Value:
    return x if x.dtype.kind in ("uint", "bool") else hg.abs(x)


@rule("sign")
def _sign(node: Node, x: hg.Value) -> hg.Value:
    return x if x.dtype.kind == "bool" else hg.sign(x)


@rule("round")
def _round(node: Node, x: hg.Value, decimals: int = 0) -> hg.Value:
    if not decimals or is_integer(x):
        return hg.round(x)
    factor = 10.0 ** abs(decimals)
    return hg.round(x * factor) / factor if decimals > 0 else hg.round(x / factor) * factor


@rule("logical_not")
def _not(node: Node, x: hg.Value) -> hg.Value:
    return hg.logical_not(cast(x, "bool"))


@rule("where")
def _where(node: Node, condition: hg.Value, a: hg.Value, b: hg.Value) -> hg.Value:
    left, right = promoted(node, a, b)
    return hg.where(cast(condition, "bool"), left, right)


@rule("clamp")
def _clamp(
    node: Node, x: hg.Value, low: hg.Value | Number | None, high: hg.Value | Number | None
) -> hg.Value:
    given = [one for one in (low, high) if one is not None]
    common = _number_dtype(x, *given)
    plain = not any(isinstance(one, hg.Value) for one in given)
    (found,) = in_dtype(node, common, x)
    if plain and found.dtype.is_float and not any(math.isnan(float(one)) for one in given):
        bounds = [None if one is None else float(one) for one in (low, high)]
        # Where they contradict each other, the upper bound counts.
        if None not in bounds and bounds[0] > bounds[1]:  # type: ignore[operator]
            bounds[0] = bounds[1]
        return hg.clip(found, *bounds)
    if low is not None:
        found = hg.maximum(found, *in_dtype(node, common, low))
    return found if high is None else hg.minimum(found, *in_dtype(node, common, high))


@rule("prims.fma")
def _fma(node: Node, a: hg.Value, b: hg.Value, c: hg.Value) -> hg.Value:
    return a * b + c


@rule("_to_copy", "prims.convert_element_type")
def _to_copy(node: Node, x: hg.Value, *_: Any) -> hg.Value:
    return cast(x, node.dtype())


@rule("alias", "clone", "lift_fresh_copy", "_conj", "view_as_real_copy")
def _same(node: Node, x: hg.Value, *_: Any) -> hg.Value:
    return x


@rule("copy")
def _copy(node: Node, x: hg.Value, source: hg.Value, *_: Any) -> hg.Value:
    return hg.broadcast_to(cast(source, x.dtype), x.shape)


@rule("_local_scalar_dense")
def _item(node: Node, x: hg.Value) -> hg.Value:
    """The only element, which stays a value: other ops compute with it, but no size can be it."""
    return hg.reshape(x, ())
