"""Draws of uniform, normal and true-or-false numbers, from `hg.ops.philox`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from heliograph.graph.builder import Graph
from heliograph.graph.lowering import apply, cast, is_value, lift, reshape, sizes
from heliograph.graph.promotion import named_dtype
from heliograph.graph.source_lines import invalid
from heliograph.graph.value import Value
from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.types import F32, F64, I64, DType, DTypeArgument, dtype

#: A whole number, or a value of one: the seed or the counter of a draw.
Number: TypeAlias = "int | Value"
#: A float, or a value that broadcasts to the draw.
Parameter: TypeAlias = "float | Value"


def uniform(
    shape: Sequence[int] | int,
    seed: Number,
    counter: Number,
    *,
    low: Parameter = 0.0,
    high: Parameter = 1.0,
    dtype: DTypeArgument = "f32",
    graph: Graph | None = None,
) -> Value:
    """Draw numbers that are equally likely from `low` to below `high`.

    Args:
        shape: The shape of the draw.
        seed: An int, or a value of one integer. Two draws of one graph have different seeds.
        counter: An int, or a value of one integer. Each counter names another draw.
        low: The least number; a float, or a value that broadcasts to `shape`.
        high: The number above all, up to rounding; likewise.
        dtype: A float type. Numbers have 24 random bits, in f64 32.
        graph: The graph, needed if no argument is a value.
    """
    target, where = _float(dtype), _graph(graph, seed, counter, low, high)
    unit = _unit(where, sizes(shape), seed, counter, target)
    low, high = (_parameter(one, unit) for one in (low, high))
    return cast(_same_shape(unit * (high - low) + low, unit), target)


def normal(
    shape: Sequence[int] | int,
    seed: Number,
    counter: Number,
    *,
    mean: Parameter = 0.0,
    std: Parameter = 1.0,
    dtype: DTypeArgument = "f32",
    graph: Graph | None = None,
) -> Value:
    """Draw numbers of the normal distribution with this mean and standard deviation.

    They are made by pairs (Box and Muller, 1958), and lie within 6.8 standard deviations. The other
    arguments are those of `uniform`.
    """
    target, where, wanted = _float(dtype), _graph(graph, seed, counter, mean, std), sizes(shape)
    count = math.prod(wanted)
    half = (count + 1) // 2
    bits = _draw(where, (2, half), seed, counter, "u32")
    wide = F64 if target is F64 else F32
    # Above 0, so that its logarithm is finite.
    units = (cast(bits, wide) + 0.5) * 2.0**-32
    length, angle = apply("sqrt", apply("log", units[0]) * -2.0), units[1] * (2 * math.pi)
    pairs = apply("concat", length * apply("cos", angle), length * apply("sin", angle), axis=0)
    found = reshape(pairs[:count], wanted)
    mean, std = (_parameter(one, found) for one in (mean, std))
    return cast(_same_shape(found * std + mean, found), target)


def bernoulli(
    shape: Sequence[int] | int,
    seed: Number,
    counter: Number,
    *,
    p: Parameter = 0.5,
    graph: Graph | None = None,
) -> Value:
    """Draw bools that are true with the probability `p`.

    `p` is a float, or a value that broadcasts to `shape`. The other arguments are those of
    `uniform`. Dropout is `hg.where(kept, x / 0.9, 0.0)` with
    `kept = hg.random.bernoulli(x.shape, seed, counter, p=0.9)`.
    """
    if isinstance(p, (int, float)) and not 0 <= p <= 1:
        raise invalid(f"bernoulli: p is {p!r:.40}", "a probability, from 0 to 1", InvalidArgumentError)
    unit = _unit(_graph(graph, seed, counter, p), sizes(shape), seed, counter, F32)
    return _same_shape(unit < _parameter(p, unit), unit)


def _unit(graph: Graph, shape: Sequence[int], seed: Number, counter: Number, target: DType) -> Value:
    """Numbers from 0 to below 1, in f32, or for f64 in that."""
    if target is F64:
        return cast(_draw(graph, shape, seed, counter, "u32"), F64) * 2.0**-32
    return _draw(graph, shape, seed, counter, "f32")


def _draw(graph: Graph, shape: Sequence[int], seed: Number, counter: Number, kind: str) -> Value:
    operands = [_number(graph, "seed", seed), _number(graph, "counter", counter)]
    return graph.apply("philox", operands, {"shape": tuple(shape), "dtype": dtype(kind)})


def _number(graph: Graph, name: str, given: Number) -> Value:
    is_number = isinstance(given, int) and not isinstance(given, bool)
    if not is_number and not (is_value(given) and given.size == 1 and given.dtype.is_integer):
        raise invalid(
            f"the {name} is {given!r:.80}",
            f"an int, or a value of one integer: g.input('{name}', (), 'i64')",
            InvalidArgumentError,
        )
    return cast(lift(graph, given, I64), I64)


def _graph(given: Graph | None, *others: Number | Parameter) -> Graph:
    for one in others:
        if is_value(one):
            return one.graph
    if isinstance(given, Graph):
        return given
    raise invalid(
        "a draw of two plain numbers: which graph?",
        "name it, graph=g; a counter that is an input or a variable makes each run another draw",
        InvalidArgumentError,
    )


def _float(argument: DTypeArgument) -> DType:
    found = named_dtype(argument)
    if not found.is_float:
        raise invalid(f"random numbers of {found}", "f16, bf16, f32 or f64; hg.astype(x, 'i32') rounds them")
    return found


def _parameter(given: Parameter, like: Value) -> Parameter:
    return cast(given, like.dtype) if is_value(given) else given


def _same_shape(found: Value, like: Value) -> Value:
    if found.shape != like.shape:
        raise invalid(f"parameters that broadcast to {found.shape}, for a draw of {like.shape}")
    return found
