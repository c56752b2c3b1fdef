"""Lowering of the array API to the op table: operands, promotion, axes.

`Value`'s operators and the functions under `hg.` both end here. An operand is a Value, a Python
scalar (weak), or a NumPy array (which becomes a constant of the graph).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np

from heliograph.graph.arguments import sizes_of
from heliograph.graph.promotion import default_dtype, is_scalar, named_dtype, promote_all
from heliograph.graph.source_lines import invalid
from heliograph.graph.symbol import Symbol
from heliograph.graph.torch_tensors import host_array, is_torch_tensor
from heliograph_proto.errors import InvalidArgumentError, InvalidGraphError
from heliograph_proto.ops.rules import normalize_axes
from heliograph_proto.types import BOOL, I64, DType, DTypeArgument, dtype

if TYPE_CHECKING:
    from heliograph.graph.builder import Graph
    from heliograph.graph.value import Value

Operand: TypeAlias = "Value | bool | int | float | np.ndarray[Any, Any] | np.generic"
Axis: TypeAlias = int | Sequence[int] | None


def is_value(operand: object) -> TypeGuard[Value]:
    """True for a value of a graph."""
    return isinstance(operand, Symbol)


def graph_of(*operands: object) -> Graph:
    """Return the graph of the operands. Raises InvalidArgumentError."""
    found: Graph | None = None
    for operand in operands:
        if isinstance(operand, Symbol):
            if found is not None and operand.graph is not found:
                raise invalid(
                    f"{operand!r} belongs to another graph", "build both in one graph", InvalidArgumentError
                )
            found = operand.graph
    if found is None:
        kinds = ", ".join(type(operand).__name__ for operand in operands)
        raise invalid(
            f"none of the operands ({kinds}) is a value of a graph",
            "one must come from g.input, g.weight, g.constant or an op",
            InvalidArgumentError,
        )
    return found


def lift(graph: Graph, operand: Operand, weak: DType | None = None) -> Value:
    """Return the operand as a value of the graph; a Python scalar takes the data type `weak`."""
    if is_value(operand):
        return operand
    if is_scalar(operand):
        scalar: Any = operand
        return graph._scalar(scalar, weak or default_dtype(scalar))
    if isinstance(operand, (np.ndarray, np.generic)) or is_torch_tensor(operand):
        return graph.constant(host_array(operand))
    advice = "operands are values of a graph, Python scalars and NumPy arrays"
    if type(operand).__name__ == "Tensor":
        advice += "; a tensor on the server is given to runs as an input, or is named by g.bound_weight"
    raise invalid(
        f"{type(operand).__name__} is no operand",
        advice,
        InvalidArgumentError,
    )


def apply(op: str, *operands: Value, **attributes: Any) -> Value:
    """Add a node."""
    return operands[0].graph.apply(op, operands, attributes)


def cast(x: Value, target: DType) -> Value:
    """Return x as another data type; x itself if it has that type."""
    return x if x.dtype is target else apply("cast", x, dtype=target)


def promoted(*operands: Operand) -> list[Value]:
    """Return the operands as values of their common data type."""
    graph = graph_of(*operands)
    strong = [operand if is_scalar(operand) else lift(graph, operand) for operand in operands]
    common = promote_all(one.dtype for one in strong if is_value(one))
    return [cast(lift(graph, one, common), common) for one in strong]


def elementwise(op: str, *operands: Operand) -> Value:
    """An elementwise op on promoted operands."""
    return apply(op, *promoted(*operands))


def bitwise(name: str, a: Operand, b: Operand) -> Value:
    """ "and", "or" or "xor" of the bits of integers, or of booleans."""
    left, right = promoted(a, b)
    return apply(f"logical_{name}" if left.dtype is BOOL else f"bitwise_{name}", left, right)


def invert(x: Value) -> Value:
    """Invert each bit of integers, or each boolean."""
    return apply("logical_not" if x.dtype is BOOL else "bitwise_invert", x)


def unary(op: str, x: Operand) -> Value:
    """An op of one operand."""
    return apply(op, one_value(x))


def one_value(operand: Operand) -> Value:
    """Return the operand as a value. Raises InvalidArgumentError unless it is one."""
    return lift(graph_of(operand), operand)


def axes_of(x: Symbol, axis: Axis) -> tuple[int, ...]:
    """The axes, counted from the front; None is all. Raises InvalidGraphError."""
    if axis is None:
        return tuple(range(x.ndim))
    try:
        listed = [index(one) for one in axis] if isinstance(axis, Sequence) else [index(axis)]
    except TypeError:
        raise invalid(f"{axis!r:.80} is no axis", "an axis is an int; several are axis=(0, 1)") from None
    return checked(lambda: normalize_axes(listed, x.ndim))


def axis_of(x: Symbol, axis: int) -> int:
    """One axis, counted from the front. Raises InvalidGraphError."""
    return axes_of(x, axis)[0]


def checked(rule: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
    """Apply a rule of the contract; its error gets the user's line."""
    try:
        return rule()
    except InvalidGraphError as error:
        raise invalid(error.message, error.advice) from None


def reduce(op: str, x: Value, axis: Axis, keepdims: bool) -> Value:
    """A reduction of the op table over the axes; over no axis at all (axis=()) it is x."""
    axes = axes_of(x, axis)
    if not axes and x.ndim:
        return x
    return apply(op, x, axes=axes, keepdims=bool(keepdims))


def mean(x: Value, axis: Axis, keepdims: bool) -> Value:
    """The mean; of floats only, as the array API says, and NaN of nothing."""
    if not x.dtype.is_float:
        raise invalid(f"the mean of {x.type}", "convert it first: hg.astype(x, 'f32')")
    return reduce("reduce_mean", x, axis, keepdims) if count_of(x, axis) else nan(x, axis, keepdims)


def count_of(x: Symbol, axis: Axis) -> int:
    """The number of elements that are reduced to one."""
    return math.prod(x.shape[place] for place in axes_of(x, axis))


def nan(x: Value, axis: Axis, keepdims: bool) -> Value:
    """NaN in the shape that a reduction has."""
    shape = reduce("reduce_sum", x, axis, keepdims).shape
    return x.graph.full(shape, math.nan, x.dtype)


def accumulator(x: Value, target: DTypeArgument | None = None) -> Value:
    """Return x in the data type of its sums and products.

    That is `target`, else 64 bits for integers and bool, as the array API says.
    """
    if target is not None:
        return cast(x, named_dtype(target))
    if x.dtype.kind in ("int", "bool"):
        return cast(x, I64)
    return cast(x, dtype("u64")) if x.dtype.kind == "uint" else x


def sizes(shape: Sequence[int] | int) -> tuple[int, ...]:
    """A shape as ints; an int is one size, as NumPy has it. Raises InvalidGraphError."""
    try:
        return sizes_of(shape)
    except InvalidArgumentError as error:
        raise invalid(error.message, error.advice) from None


def several(arrays: Sequence[Operand], function: str) -> list[Operand]:
    """Check the arrays of a function that joins them. Raises InvalidGraphError unless they are a
    list."""
    if is_value(arrays) or isinstance(arrays, np.ndarray) or not np.iterable(arrays):
        raise invalid(f"{function} takes a list of arrays", f"hg.{function}([x, y])")
    if not (found := list(arrays)):
        raise invalid(f"{function} of nothing")
    return found


def reshape(x: Value, shape: Sequence[int] | int) -> Value:
    """The same elements in another shape, at most one size of which is -1."""
    target = sizes(shape)
    return x if target == x.shape else apply("reshape", x, shape=target)


def permute(x: Value, axes: Sequence[int]) -> Value:
    """The dimensions in another order."""
    order = axes_of(x, tuple(axes))
    return x if order == tuple(range(x.ndim)) else apply("permute", x, axes=order)


def swap_axes(x: Value, first: int, second: int) -> Value:
    """Two dimensions exchanged."""
    order = list(range(x.ndim))
    order[first], order[second] = order[second], order[first]
    return permute(x, order)


def gather(x: Value, places: Value, axis: int) -> Value:
    """Return the elements at the places (i32 or i64) along an axis.

    By rows: the axis goes first, the others become the row.
    """
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    first = permute(x, [axis, *range(axis), *range(axis + 1, x.ndim)])
    rows = reshape(first, (x.shape[axis], math.prod(before + after)))
    found = apply("get_rows", rows, reshape(places, (places.size,)))
    # Rows of blocks come out as f32, and stay so.
    kept = found if x.dtype.kind == "quantized" else cast(found, x.dtype)
    wide = reshape(kept, (*places.shape, *before, *after))
    new, old = range(places.ndim), range(places.ndim, wide.ndim)
    return permute(wide, [*old[:axis], *new, *old[axis:]])


def reverse(x: Value, axes: Sequence[int]) -> Value:
    """Return the elements in the opposite order along axes."""
    for axis in axes:
        if x.shape[axis] > 1:
            places = np.arange(x.shape[axis], dtype=np.int32)[::-1].copy()
            x = gather(x, x.graph.constant(places), axis)
    return x


def on_last_axis(x: Value, axis: int, function: Callable[[Value], Value]) -> Value:
    """A function of rows, applied along another axis."""
    place = axis_of(x, axis)
    last = x.ndim - 1
    return swap_axes(function(swap_axes(x, place, last)), place, last)


def matmul(a: Operand, b: Operand) -> Value:
    """The array API's matmul: vectors count as one row on the left, one column on the right."""
    left, right = promoted(a, b)
    if not left.ndim or not right.ndim:
        raise invalid(f"matmul of {left.type} and {right.type}: scalars have no rows", "use *")
    wide_left = reshape(left, (1, *left.shape)) if left.ndim == 1 else left
    wide_right = reshape(right, (*right.shape, 1)) if right.ndim == 1 else right
    result = apply("matmul", wide_left, wide_right)
    shape = list(result.shape)
    if right.ndim == 1:
        del shape[-1]
    if left.ndim == 1:
        del shape[-1 if right.ndim == 1 else -2]
    return reshape(result, shape)


def power(a: Operand, b: Operand) -> Value:
    """a ** b; integers are multiplied when the exponent is a Python int."""
    if is_value(a) and type(b) is int:
        if b == 2:
            return apply("sqr", a)
        if a.dtype.is_integer:
            return _integer_power(a, b)
    return elementwise("pow", a, b)


def _integer_power(x: Value, exponent: int) -> Value:
    """By squaring: at most two products for each bit of the exponent."""
    if not 0 <= exponent < 2**16:
        raise invalid(f"{x.dtype} to the power of {exponent}", "convert it first: hg.astype(x, 'f32')")
    if exponent == 0:
        return apply("broadcast_to", x.graph._scalar(1, x.dtype), shape=x.shape)
    result: Value | None = None
    while exponent:
        if exponent & 1:
            result = x if result is None else apply("mul", result, x)
        exponent >>= 1
        x = apply("sqr", x) if exponent else x
    assert result is not None
    return result
