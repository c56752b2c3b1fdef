"""Tensors made from nothing: the array API's names and rules, with `graph=` to say where.

Data types default to f32 for floats, i64 for ints and bool for bools.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec

import numpy as np

from heliograph import _lowering as lowering
from heliograph._lowering import Operand
from heliograph._promotion import Scalar, default_dtype
from heliograph._source import invalid
from heliograph.builder import Graph
from heliograph.value import Value
from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.types import F32, DTypeArgument, dtype

#: Whole numbers up to here are exact in f32, the data type that the op "arange" counts in.
_EXACT_F32 = 2**24


_P = ParamSpec("_P")


def _with_graph(function: Callable[_P, Value]) -> Callable[_P, Value]:
    """Says how to name the graph, where Python would only say that `graph` is missing."""

    @wraps(function)
    def checked(*arguments: _P.args, **options: _P.kwargs) -> Value:
        if not isinstance(options.get("graph"), Graph):
            name = function.__name__
            shown = ", ".join(f"{argument!r:.40}" for argument in arguments)
            given = f"graph is {type(options['graph']).__name__}" if "graph" in options else "which graph?"
            raise invalid(
                f"hg.{name}: {given}",
                f"name it, hg.{name}({shown}, graph=g); or use a Python number or a NumPy array as the "
                "other operand: x + 1.0, x * np.ones(3, np.float32)",
                InvalidArgumentError,
            )
        return function(*arguments, **options)

    return checked


@_with_graph
def full(
    shape: Sequence[int] | int, value: Scalar, dtype: DTypeArgument | None = None, *, graph: Graph
) -> Value:
    """A tensor of one value."""
    return graph.full(shape, value, default_dtype(value) if dtype is None else dtype)


@_with_graph
def zeros(shape: Sequence[int] | int, dtype: DTypeArgument = F32, *, graph: Graph) -> Value:
    """A tensor of zeros."""
    return _of(graph, shape, 0, dtype)


@_with_graph
def ones(shape: Sequence[int] | int, dtype: DTypeArgument = F32, *, graph: Graph) -> Value:
    """A tensor of ones."""
    return _of(graph, shape, 1, dtype)


def full_like(x: Operand, value: Scalar, dtype: DTypeArgument | None = None) -> Value:
    """A tensor of one value with the shape of x, and its data type unless given."""
    like = lowering.one_value(x)
    return like.graph.full(like.shape, value, like.dtype if dtype is None else dtype)


def zeros_like(x: Operand, dtype: DTypeArgument | None = None) -> Value:
    """A tensor of zeros with the shape of x, and its data type unless given."""
    like = lowering.one_value(x)
    return _of(like.graph, like.shape, 0, like.dtype if dtype is None else dtype)


def ones_like(x: Operand, dtype: DTypeArgument | None = None) -> Value:
    """A tensor of ones with the shape of x, and its data type unless given."""
    like = lowering.one_value(x)
    return _of(like.graph, like.shape, 1, like.dtype if dtype is None else dtype)


def _of(graph: Graph, shape: Sequence[int] | int, number: int, of: DTypeArgument) -> Value:
    """A tensor of zeros or ones, which every data type has."""
    try:
        target = dtype(of)
    except TypeError as error:
        raise invalid(str(error)) from None
    return graph.full(shape, bool(number) if target.kind == "bool" else number, target)


@_with_graph
def arange(
    start: float,
    stop: float | None = None,
    step: float = 1,
    dtype: DTypeArgument | None = None,
    *,
    graph: Graph,
) -> Value:
    """start, start + step, ... below stop; arange(n) counts from 0. i64 when all are ints, else f32."""
    first, last = (0, start) if stop is None else (start, stop)
    whole = all(isinstance(one, int) for one in (first, last, step))
    of = dtype if dtype is not None else ("i64" if whole else F32)
    if step == 0:
        raise invalid("arange: step is 0")
    if whole and max(abs(first), abs(last)) > _EXACT_F32:
        return graph.constant(np.arange(first, last, step), of)
    counted = graph.apply("arange", (), {"start": float(first), "stop": float(last), "step": float(step)})
    return counted.astype(of)


def tril(x: Operand, /, *, k: int = 0) -> Value:
    """The last two dimensions, with zeros above the k-th diagonal."""
    return _triangle(lowering.one_value(x), k, "less_equal")


def triu(x: Operand, /, *, k: int = 0) -> Value:
    """The last two dimensions, with zeros below the k-th diagonal."""
    return _triangle(lowering.one_value(x), k, "greater_equal")


def _triangle(x: Value, k: int, comparison: str) -> Value:
    if x.ndim < 2:
        raise invalid(f"a triangle of {x.type}: two dimensions are needed")
    rows, columns = x.shape[-2:]
    row = lowering.reshape(arange(k, rows + k, dtype=F32, graph=x.graph), (rows, 1))
    column = arange(columns, dtype=F32, graph=x.graph)
    zero = x.graph.scalar(False if x.dtype.kind == "bool" else 0, x.dtype)
    return lowering.apply("where", lowering.apply(comparison, column, row), x, zero)
