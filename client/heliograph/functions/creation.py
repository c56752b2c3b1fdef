"""Functions that create tensors: the array API's names and rules, with `graph=` for the graph.

Data types default to f32 for floats, i64 for ints and bool for bools.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from operator import index
from typing import Any, Literal, ParamSpec

import numpy as np

from heliograph.functions.manipulation import broadcast_arrays
from heliograph.graph import lowering as lowering
from heliograph.graph.builder import Graph
from heliograph.graph.lowering import Operand
from heliograph.graph.promotion import Scalar, default_dtype, named_dtype
from heliograph.graph.source_lines import invalid
from heliograph.graph.value import Value
from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.types import F32, F64, DTypeArgument

__all__ = [
    "arange",
    "asarray",
    "empty",
    "empty_like",
    "eye",
    "from_dlpack",
    "full",
    "full_like",
    "linspace",
    "meshgrid",
    "ones",
    "ones_like",
    "tril",
    "triu",
    "zeros",
    "zeros_like",
]

#: Whole numbers up to here are exact in f32, the data type that the op "arange" counts in.
_EXACT_F32 = 2**24


_P = ParamSpec("_P")


def _with_graph(function: Callable[_P, Value]) -> Callable[_P, Value]:
    """Advise on a missing `graph=`, where Python would only name the argument."""

    @wraps(function)
    def checked(*arguments: _P.args, **options: _P.kwargs) -> Value:
        _check_graph(function.__name__, arguments, options.get("graph"))
        return function(*arguments, **options)

    return checked


def _check_graph(name: str, arguments: Sequence[object], graph: object) -> Graph:
    if isinstance(graph, Graph):
        return graph
    shown = ", ".join(f"{argument!r:.40}" for argument in arguments)
    given = "which graph?" if graph is None else f"graph is {type(graph).__name__}"
    raise invalid(
        f"hg.{name}: {given}",
        f"name it, hg.{name}({shown}, graph=g); or use a Python number or a NumPy array as the "
        "other operand: x + 1.0, x * np.ones(3, np.float32)",
        InvalidArgumentError,
    )


@_with_graph
def full(
    shape: Sequence[int] | int, fill_value: Scalar, dtype: DTypeArgument | None = None, *, graph: Graph
) -> Value:
    """A tensor of one value."""
    return graph.full(shape, fill_value, default_dtype(fill_value) if dtype is None else dtype)


@_with_graph
def zeros(shape: Sequence[int] | int, dtype: DTypeArgument | None = None, *, graph: Graph) -> Value:
    """A tensor of zeros."""
    return _of(graph, shape, 0, F32 if dtype is None else dtype)


@_with_graph
def ones(shape: Sequence[int] | int, dtype: DTypeArgument | None = None, *, graph: Graph) -> Value:
    """A tensor of ones."""
    return _of(graph, shape, 1, F32 if dtype is None else dtype)


@_with_graph
def empty(shape: Sequence[int] | int, dtype: DTypeArgument | None = None, *, graph: Graph) -> Value:
    """A tensor of zeros: values are never written, so uninitialized elements would be of no use."""
    return _of(graph, shape, 0, F32 if dtype is None else dtype)


def full_like(x: Operand, /, fill_value: Scalar, dtype: DTypeArgument | None = None) -> Value:
    """A tensor of one value with the shape of x, and its data type unless given."""
    like = lowering.one_value(x)
    return like.graph.full(like.shape, fill_value, like.dtype if dtype is None else dtype)


def zeros_like(x: Operand, /, dtype: DTypeArgument | None = None) -> Value:
    """A tensor of zeros with the shape of x, and its data type unless given."""
    like = lowering.one_value(x)
    return _of(like.graph, like.shape, 0, like.dtype if dtype is None else dtype)


def ones_like(x: Operand, /, dtype: DTypeArgument | None = None) -> Value:
    """A tensor of ones with the shape of x, and its data type unless given."""
    like = lowering.one_value(x)
    return _of(like.graph, like.shape, 1, like.dtype if dtype is None else dtype)


def empty_like(x: Operand, /, dtype: DTypeArgument | None = None) -> Value:
    """As zeros_like; see `empty`."""
    return zeros_like(x, dtype)


def _of(graph: Graph, shape: Sequence[int] | int, number: int, of: DTypeArgument) -> Value:
    """A tensor of zeros or ones, which every data type has."""
    target = named_dtype(of)
    return graph.full(shape, bool(number) if target.kind == "bool" else number, target)


def asarray(
    obj: Any,
    /,
    dtype: DTypeArgument | None = None,
    *,
    copy: bool | None = None,
    graph: Graph | None = None,
) -> Value:
    """Elements as a constant of a graph, which is a copy, and a value as it is; `dtype` converts.
    For large arrays there is `g.weight(name, array)`."""
    if lowering.is_value(obj):
        return obj if dtype is None else lowering.cast(obj, named_dtype(dtype))
    found = _check_graph("asarray", [obj], graph)
    _refuse_sharing("asarray", copy)
    return found.constant(obj, dtype)


@_with_graph
def from_dlpack(x: Any, /, *, copy: bool | None = None, graph: Graph) -> Value:
    """A constant with a copy of another library's array in host memory.

    Errors of the other library pass through.
    """
    _refuse_sharing("from_dlpack", copy)
    if not hasattr(x, "__dlpack__"):
        raise invalid(
            f"from_dlpack: {type(x).__name__} has no __dlpack__", "use hg.asarray", InvalidArgumentError
        )
    return graph.constant(np.from_dlpack(x))


def _refuse_sharing(name: str, copy: bool | None) -> None:
    if copy is not None and not copy:
        raise invalid(
            f"{name} without a copy: a constant is one",
            "g.weight(name, array) makes none",
            InvalidArgumentError,
        )


@_with_graph
def arange(
    start: float,
    /,
    stop: float | None = None,
    step: float = 1,
    dtype: DTypeArgument | None = None,
    *,
    graph: Graph,
) -> Value:
    """start, start + step, ... below stop; arange(n) counts from 0. i64 when all are ints, else
    f32."""
    first, last = (0, start) if stop is None else (start, stop)
    whole = all(isinstance(one, int) for one in (first, last, step))
    of = named_dtype(dtype if dtype is not None else ("i64" if whole else F32))
    if step == 0:
        raise invalid("arange: step is 0")
    is_exact = whole and max(abs(first), abs(last)) <= _EXACT_F32
    if not is_exact and (whole or of is F64):
        return graph.constant(np.arange(first, last, step), of)
    counted = graph.apply("arange", (), {"start": float(first), "stop": float(last), "step": float(step)})
    return counted.astype(of)


@_with_graph
def linspace(
    start: float,
    stop: float,
    /,
    num: int,
    dtype: DTypeArgument | None = None,
    *,
    endpoint: bool = True,
    graph: Graph,
) -> Value:
    """So many numbers at equal distances from start to stop, with it or up to it: a constant."""
    of, count = named_dtype(F32 if dtype is None else dtype), index(num)
    if count < 0:
        raise invalid(f"linspace: {count} numbers")
    with np.errstate(all="ignore"):
        found = np.linspace(float(start), float(stop), count, endpoint=endpoint)
        if of.is_integer:
            return graph.constant(np.floor(found), of)
        # To a narrower type it is rounded in the graph: NumPy need not have that.
        return graph.constant(found, F64 if of is F64 else F32).astype(of)


@_with_graph
def eye(
    n_rows: int,
    n_cols: int | None = None,
    /,
    k: int = 0,
    dtype: DTypeArgument | None = None,
    *,
    graph: Graph,
) -> Value:
    """A matrix with ones on the k-th diagonal and zeros elsewhere."""
    row, column = _places(n_rows, n_rows if n_cols is None else n_cols, k, graph)
    return lowering.apply("equal", column, row).astype(named_dtype(F32 if dtype is None else dtype))


def meshgrid(*arrays: Operand, indexing: Literal["xy", "ij"] = "xy") -> list[Value]:
    """The coordinates of all points of a grid, whose coordinates along each axis are a vector: one
    value for each, whose dimensions are in the order of the vectors ("ij") or with the first two
    exchanged ("xy")."""
    if indexing not in ("xy", "ij"):
        raise invalid(f"meshgrid: indexing is {indexing!r:.40}", "it is 'xy' or 'ij'")
    if not arrays:
        return []
    graph = lowering.graph_of(*arrays)
    values = [lowering.lift(graph, one) for one in arrays]
    if wrong := [value for value in values if value.ndim != 1]:
        raise invalid(f"meshgrid of {wrong[0].type}: the coordinates along an axis are a vector")
    order = list(range(len(values)))
    if indexing == "xy":
        order[:2] = order[1::-1]
    return broadcast_arrays(
        *(
            lowering.reshape(value, [value.size if other == place else 1 for other in range(len(values))])
            for place, value in zip(order, values, strict=True)
        )
    )


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
    row, column = _places(rows, columns, k, x.graph)
    zero = x.graph._scalar(False if x.dtype.kind == "bool" else 0, x.dtype)
    return lowering.apply("where", lowering.apply(comparison, column, row), x, zero)


def _places(rows: int, columns: int, k: int, graph: Graph) -> tuple[Value, Value]:
    """The column of the k-th diagonal in each row, [rows, 1], and the number of each column."""
    row = lowering.reshape(arange(k, rows + k, dtype=F32, graph=graph), (rows, 1))
    return row, arange(columns, dtype=F32, graph=graph)
