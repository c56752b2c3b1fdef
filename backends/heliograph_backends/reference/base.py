"""Helpers that the formulas share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from heliograph_proto.errors import OutOfRangeError
from heliograph_proto.graph import Graph, Node

Array: TypeAlias = Any
#: kernel(*operands, out); the returned value is ignored.
Kernel: TypeAlias = Callable[..., Any]
Attributes: TypeAlias = Mapping[str, Any]
#: (xp, attributes, *operands) -> result; written into `out` by `define`.
Formula: TypeAlias = Callable[..., Array]
#: (xp, attributes, out, *operands); writes the result into `out`, which may share operand 0's
#: memory.
Writer: TypeAlias = Callable[..., None]


def wide(xp: Any, x: Array) -> Array:
    """Convert f16 to f32, since its sums overflow and its rounding adds up; leave other types."""
    return x.astype(xp.float32) if x.dtype == xp.float16 else x


def accumulator(xp: Any, x: Array) -> Any:
    """Return the data type of sums: f32 for f16, else that of x. Integers keep their width, as if
    NumPy's wider sum were cast back."""
    return xp.float32 if x.dtype == xp.float16 else x.dtype


def in_wide(formula: Formula) -> Formula:
    """Return the formula applied to wide operands."""

    def widened(xp: Any, attributes: Attributes, *operands: Array) -> Array:
        return formula(xp, attributes, *(wide(xp, x) for x in operands))

    return widened


def constant(x: Array, value: float) -> Any:
    """Convert a number to the data type of x, so that nothing is promoted."""
    return x.dtype.type(value)


def accumulated(xp: Any, *operands: Array) -> tuple[Array, ...]:
    """Convert the operands to the precision of sums of products: f64 if the first is f64, else
    f32."""
    target = xp.float64 if operands[0].dtype == xp.float64 else xp.float32
    return tuple(x.astype(target, copy=False) for x in operands)


def check_indices(op: str, indices: Array, count: int, what: str) -> None:
    """Raise OutOfRangeError unless all indices are in [0, count): indices are data of a run."""
    if indices.size and not (indices.min() >= 0 and indices.max() < count):
        first = ((indices < 0) | (indices >= count)).argmax()
        place = np.unravel_index(int(first), indices.shape)
        raise OutOfRangeError(index_message(op, int(indices[place]), f"{count} {what}", place))


def index_message(op: str, index: int, choices: str, place: Sequence[Any] | None) -> str:
    """Return the message for an index out of range, at a place of the tensor of indices if that is
    known."""
    message = f"{op}: index {index} is not one of {choices}"
    return message if place is None else f"{message}, at {list(map(int, place))} of the indices"


def indices_of(node: Node) -> int:
    """Return the operand of a node that holds its indices: the last one, but for sinks."""
    return node.operands[4 if node.op == "flash_attn_paged" else -1]


def index_error(
    graph: Graph, number: int, index: int, indices: np.ndarray[Any, Any] | None
) -> OutOfRangeError:
    """Return the error of a kernel for an index out of range, as the definition raises it.

    `indices`: the tensor of indices, which may be overwritten; None if it is not known.
    """
    node = graph.nodes[number]
    *leading, rows, _ = graph.type_of(node.operands[0]).shape
    # The gradient of a gather names the rows of its result.
    rows = node.attributes.get("rows", rows)
    choices = f"{leading[0]} experts" if node.op == "mul_mat_id" else f"{rows} rows"
    if node.op == "flash_attn_paged":
        choices = f"{graph.type_of(node.operands[1]).shape[0]} pages"
    place = None if indices is None else next(map(tuple, np.argwhere(indices == index)), None)
    return OutOfRangeError(index_message(node.op, index, choices, place), origin=graph.origin(number))


def cycled(xp: Any, x: Array, shape: tuple[int, ...]) -> Array:
    """Repeat x up to `shape`, aligned at the last dimension; sizes divide each other."""
    x = x.reshape((1,) * (len(shape) - x.ndim) + x.shape)
    for axis, size in enumerate(shape):
        if x.shape[axis] not in (1, size):
            x = xp.take(x, xp.arange(size) % x.shape[axis], axis=axis)
    return xp.broadcast_to(x, shape)
