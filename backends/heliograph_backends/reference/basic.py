"""Formulas: elementwise ops, reductions, norms, moves, views, sources and variables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from heliograph_backends.reference.base import (
    Array,
    Attributes,
    Formula,
    accumulator,
    check_indices,
    constant,
    in_wide,
)
from heliograph_backends.reference.elementary import erf

# Elementwise


def sigmoid(xp: Any, attributes: Attributes, x: Array) -> Array:
    one = constant(x, 1)
    return one / (one + xp.exp(-x))


def silu(xp: Any, attributes: Attributes, x: Array) -> Array:
    return x / (constant(x, 1) + xp.exp(-x))


def gelu(xp: Any, attributes: Attributes, x: Array) -> Array:
    inner = constant(x, 0.7978845608028654) * (x + constant(x, 0.044715) * x**3)
    return constant(x, 0.5) * x * (constant(x, 1) + xp.tanh(inner))


def gelu_erf(xp: Any, attributes: Attributes, x: Array) -> Array:
    half = constant(x, 0.5) * x
    return half * (constant(x, 1) + erf(xp, x * constant(x, 0.7071067811865476)))


def gelu_quick(xp: Any, attributes: Attributes, x: Array) -> Array:
    return x / (constant(x, 1) + xp.exp(constant(x, -1.702) * x))


def relu(xp: Any, attributes: Attributes, x: Array) -> Array:
    return xp.maximum(x, constant(x, 0))


def softplus(xp: Any, attributes: Attributes, x: Array) -> Array:
    return xp.logaddexp(x, constant(x, 0))


def elu(xp: Any, attributes: Attributes, x: Array) -> Array:
    return xp.where(x > 0, x, xp.expm1(xp.minimum(x, constant(x, 0))))


def hardsigmoid(xp: Any, attributes: Attributes, x: Array) -> Array:
    return xp.clip(x + constant(x, 3), constant(x, 0), constant(x, 6)) / constant(x, 6)


def hardswish(xp: Any, attributes: Attributes, x: Array) -> Array:
    return x * hardsigmoid(xp, attributes, x)


def scale(xp: Any, attributes: Attributes, x: Array) -> Array:
    return x * constant(x, attributes["scale"]) + constant(x, attributes["bias"])


def clamp(xp: Any, attributes: Attributes, x: Array) -> Array:
    return xp.clip(x, constant(x, attributes["min"]), constant(x, attributes["max"]))


def leaky_relu(xp: Any, attributes: Attributes, x: Array) -> Array:
    return xp.where(x > 0, x, x * constant(x, attributes["slope"]))


def floor_divide(xp: Any, attributes: Attributes, a: Array, b: Array) -> Array:
    """NumPy's floor division, by way of fmod, whose rest is exact; other libraries round a / b
    down."""
    if a.dtype.kind != "f":
        return xp.floor_divide(a, b)
    quotient, _ = _divided(xp, a, b)
    floor = xp.floor(quotient)
    floor = xp.where(quotient - floor > constant(a, 0.5), floor + constant(a, 1), floor)
    whole = xp.where(quotient == 0, xp.copysign(constant(a, 0), a / b), floor)
    return xp.where(b == 0, a / b, whole)


def remainder(xp: Any, attributes: Attributes, a: Array, b: Array) -> Array:
    """NumPy's remainder; see floor_divide."""
    return _divided(xp, a, b)[1] if a.dtype.kind == "f" else xp.remainder(a, b)


def _divided(xp: Any, a: Array, b: Array) -> tuple[Array, Array]:
    """Return the quotient without the rest, not yet rounded to an integer, and the rest with b's
    sign."""
    rest = xp.fmod(a, b)
    quotient = (a - rest) / b
    other_sign = (rest != 0) & ((b < 0) != (rest < 0))
    signed = xp.where(rest == 0, xp.copysign(constant(a, 0), b), rest)
    return (
        xp.where(other_sign, quotient - constant(a, 1), quotient),
        xp.where(other_sign, rest + b, signed),
    )


def cast(xp: Any, attributes: Attributes, x: Array) -> Array:
    return x.astype(attributes["dtype"].numpy)


def bitcast(xp: Any, attributes: Attributes, x: Array) -> Array:
    return x.view(attributes["dtype"].storage)


# Reductions


def _axes(attributes: Attributes, x: Array) -> tuple[int, ...]:
    return tuple(attributes["axes"]) or tuple(range(x.ndim))


def reducing(name: str) -> Formula:
    """Return the reduction of this name over `axes`."""

    def formula(xp: Any, attributes: Attributes, x: Array) -> Array:
        function = getattr(xp, name)
        options = {} if name in ("max", "min") else {"dtype": accumulator(xp, x)}
        if x.ndim == 0:
            return x
        return function(x, axis=_axes(attributes, x), keepdims=attributes["keepdims"], **options)

    return formula


def mean(xp: Any, attributes: Attributes, x: Array) -> Array:
    """The mean; for integers the sum in 64 bits, divided towards zero."""
    if x.ndim == 0:
        return x
    if x.dtype.kind == "f":
        return reducing("mean")(xp, attributes, x)
    total = x.sum(axis=_axes(attributes, x), keepdims=attributes["keepdims"])
    count = total.dtype.type(x.size // max(1, total.size))
    # fmod has the sign of the sum, so the difference divides without a rest.
    return (total - xp.fmod(total, count)) // count


def argmax(xp: Any, attributes: Attributes, x: Array) -> Array:
    return xp.argmax(x, axis=-1)


# Rows


def row_mean(x: Array) -> Array:
    """Return the mean of each row; 0 for empty rows, without NumPy's warning."""
    return x.sum(-1, keepdims=True) / constant(x, max(1, x.shape[-1]))


def norm(xp: Any, attributes: Attributes, x: Array) -> Array:
    centered = x - row_mean(x)
    variance = row_mean(centered * centered)
    return centered / xp.sqrt(variance + constant(x, attributes["eps"]))


def rms_norm(xp: Any, attributes: Attributes, x: Array) -> Array:
    return x / xp.sqrt(row_mean(x * x) + constant(x, attributes["eps"]))


def l2_norm(xp: Any, attributes: Attributes, x: Array) -> Array:
    length = xp.sqrt((x * x).sum(-1, keepdims=True))
    return x / xp.maximum(length, constant(x, attributes["eps"]))


# Gather, moves, views, sources


def get_rows(xp: Any, attributes: Attributes, rows: Array, indices: Array) -> Array:
    check_indices("get_rows", indices, rows.shape[-2], "rows")
    if indices.ndim == 1:
        return rows[indices]
    return xp.take_along_axis(rows, indices[..., None], axis=-2)


def concat(xp: Any, attributes: Attributes, *operands: Array) -> Array:
    return xp.concatenate(operands, axis=attributes["axis"])


def reshape(xp: Any, attributes: Attributes, x: Array) -> Array:
    return x.reshape(attributes["shape"])


def permute(xp: Any, attributes: Attributes, x: Array) -> Array:
    return x.transpose(attributes["axes"])


def broadcast_to(xp: Any, attributes: Attributes, x: Array) -> Array:
    return xp.broadcast_to(x, attributes["shape"])


def slice_(xp: Any, attributes: Attributes, x: Array) -> Array:
    triples = zip(attributes["start"], attributes["stop"], attributes["step"], strict=True)
    return x[tuple(slice(*triple) for triple in triples)]


def fill(xp: Any, attributes: Attributes) -> Array:
    return attributes["value"]


def arange(xp: Any, attributes: Attributes) -> Array:
    start, stop, step = (attributes[name] for name in ("start", "stop", "step"))
    count = max(0, math.ceil((stop - start) / step))
    # NumPy's arange(start, stop, step) uses (start + step) - start, which rounds for a large start.
    return start + step * xp.arange(count, dtype=xp.float64)


#: Ops that are more than one ufunc.
FORMULAS: Mapping[str, Formula] = {
    "rsqrt": in_wide(lambda xp, attributes, x: constant(x, 1) / xp.sqrt(x)),
    "erf": lambda xp, attributes, x: erf(xp, x),
    "sigmoid": in_wide(sigmoid),
    "relu": relu,
    "elu": in_wide(elu),
    "silu": in_wide(silu),
    "gelu": in_wide(gelu),
    "gelu_erf": in_wide(gelu_erf),
    "gelu_quick": in_wide(gelu_quick),
    "softplus": in_wide(softplus),
    "hardswish": in_wide(hardswish),
    "hardsigmoid": in_wide(hardsigmoid),
    "step": lambda xp, attributes, x: x > 0,
    "scale": in_wide(scale),
    "clamp": clamp,
    "floor_divide": in_wide(floor_divide),
    "remainder": in_wide(remainder),
    "leaky_relu": in_wide(leaky_relu),
    "cast": cast,
    "bitcast": bitcast,
    "cpy": lambda xp, attributes, x, target: x.reshape(target.shape),
    "where": lambda xp, attributes, condition, a, b: xp.where(condition, a, b),
    "reduce_sum": reducing("sum"),
    "reduce_mean": mean,
    "reduce_prod": reducing("prod"),
    "reduce_max": reducing("max"),
    "reduce_min": reducing("min"),
    "argmax": argmax,
    "norm": in_wide(norm),
    "rms_norm": in_wide(rms_norm),
    "l2_norm": in_wide(l2_norm),
    "get_rows": get_rows,
    "cont": lambda xp, attributes, x: x,
    "concat": concat,
    "reshape": reshape,
    "permute": permute,
    "broadcast_to": broadcast_to,
    "slice": slice_,
    "fill": fill,
    "arange": arange,
    "assign": lambda xp, attributes, variable, value: value,
}
