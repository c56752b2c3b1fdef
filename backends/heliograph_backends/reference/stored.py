"""Kernels on types that array libraries lack: bf16 as its bits, blocks as bytes.

Such a stored array has elements of `dtype.storage` and the shape `TensorType.storage_shape`. Moves
copy the stored elements. All other ops compute in f32 and round once, at the end: operands are
widened, whole or only the parts that an op reads, and the result is narrowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from heliograph_backends.reference.base import Array, Attributes, Kernel
from heliograph_backends.reference.elementary import bf16_after
from heliograph_proto.quantization import blocks
from heliograph_proto.types import DType

#: (op, attributes, xp) -> kernel for plain arrays.
Define: TypeAlias = Callable[[str, Attributes, Any], Kernel]
#: (define, op, attributes, xp, operands, result) -> kernel for stored arrays.
DefineStored: TypeAlias = Callable[[Define, str, Attributes, Any, Sequence[DType], DType], Kernel]

#: Ops whose result has the operands' elements, or zeros, in other places.
MOVES = frozenset(
    (
        "cont", "concat", "reshape", "permute", "broadcast_to", "slice", "assign", "where", "set", "diag",
        "tri", "diag_mask_zero", "repeat", "pad", "pad_reflect_1d", "roll",
    )
)  # fmt: skip


def is_stored(dtype: DType) -> bool:
    """True for data types whose arrays hold bits or bytes instead of numbers."""
    return dtype.name == "bf16" or dtype.kind == "quantized"


def widened(xp: Any, x: Array, dtype: DType) -> Array:
    """Convert a stored array to f32; return arrays of other data types unchanged."""
    if dtype.name == "bf16":
        return blocks.from_bits(x, xp)
    return blocks.from_blocks(x, dtype, xp) if dtype.kind == "quantized" else x


def narrowed(xp: Any, x: Array, dtype: DType) -> Array:
    """Convert numbers to the stored form of bf16 or blocks; return those of other data types
    unchanged."""
    if dtype.name == "bf16":
        return blocks.to_bits(x if x.dtype.kind == "f" else x.astype(xp.float64), xp)
    return blocks.converted_to_blocks(x, dtype, xp) if dtype.kind == "quantized" else x


class Widening:
    """A stored array whose parts are widened when they are read, with an array's shape and
    indexing."""

    def __init__(self, xp: Any, stored: Array, dtype: DType) -> None:
        self._xp, self._stored, self._dtype = xp, stored, dtype
        self.shape = _elements_of(stored, dtype)
        self.ndim = len(self.shape)
        self.dtype = xp.dtype(xp.float32)

    def __getitem__(self, index: Any) -> Array:
        return widened(self._xp, self._stored[index], self._dtype)


def define_stored(
    define: Define, op: str, attributes: Attributes, xp: Any, operands: Sequence[DType], result: DType
) -> Kernel:
    """Return the kernel of an op with a stored operand or result."""
    if op in MOVES and all(dtype is result for dtype in operands if is_stored(dtype) or dtype.is_float):
        return _moving(define, op, attributes, xp, result)
    make = _SPECIAL.get(op, _computing)
    return make(define, op, attributes, xp, operands, result)


def _moving(define: Define, op: str, attributes: Attributes, xp: Any, dtype: DType) -> Kernel:
    if dtype.kind != "quantized":
        return define(op, attributes, xp)
    if op == "slice":
        return define(op, _in_bytes(attributes, dtype), xp)
    move = _BLOCK_MOVES.get(op)
    if move is None:
        return define(op, attributes, xp)

    def kernel(x: Array, out: Array) -> None:
        out[...] = move(xp, x, out.shape)

    return kernel


def _in_bytes(attributes: Attributes, dtype: DType) -> Attributes:
    """Convert a slice of rows of blocks, whose ends lie between blocks, to one of bytes."""

    def scaled(numbers: Sequence[int]) -> tuple[int, ...]:
        return (*numbers[:-1], numbers[-1] // dtype.block_size * dtype.block_bytes)

    return {**attributes, **{name: scaled(attributes[name]) for name in ("start", "stop")}}


#: Moves whose attributes give a shape in elements: here they take the stored shape, in bytes.
_BLOCK_MOVES: Mapping[str, Callable[[Any, Array, tuple[int, ...]], Array]] = {
    "reshape": lambda xp, x, shape: x.reshape(shape),
    "broadcast_to": lambda xp, x, shape: xp.broadcast_to(x, shape),
}


def _computing(
    define: Define, op: str, attributes: Attributes, xp: Any, operands: Sequence[DType], result: DType
) -> Kernel:
    """Any other op: on widened operands, into f32 if the result is stored."""
    inner = define(op, attributes, xp)

    def kernel(*operands_and_out: Array) -> None:
        *arrays, out = operands_and_out
        wide = [widened(xp, x, dtype) for x, dtype in zip(arrays, operands, strict=True)]
        if not is_stored(result):
            inner(*wide, out)
            return
        values = xp.empty(_elements_of(out, result), xp.float32)
        inner(*wide, values)
        out[...] = narrowed(xp, values, result)

    return kernel


def _elements_of(out: Array, dtype: DType) -> tuple[int, ...]:
    if dtype.kind != "quantized":
        shape: tuple[int, ...] = out.shape
        return shape
    return (*out.shape[:-1], out.shape[-1] // dtype.block_bytes * dtype.block_size)


def _converting(
    define: Define, op: str, attributes: Attributes, xp: Any, operands: Sequence[DType], result: DType
) -> Kernel:
    """cast and cpy: from the operand's own precision, so that values are rounded once."""
    source = operands[0]

    def kernel(x: Array, *rest: Array) -> None:
        out = rest[-1]
        if source is result:
            out[...] = x.reshape(out.shape)
            return
        values = widened(xp, x, source).reshape(_elements_of(out, result))
        out[...] = narrowed(xp, values, result)

    return kernel


def _gathering(
    define: Define, op: str, attributes: Attributes, xp: Any, operands: Sequence[DType], result: DType
) -> Kernel:
    """get_rows: gather stored rows, then widen them."""
    inner, rows_dtype = define(op, attributes, xp), operands[0]

    def kernel(rows: Array, indices: Array, out: Array) -> None:
        found = xp.empty((*out.shape[:-1], rows.shape[-1]), rows.dtype)
        inner(rows, indices, found)
        out[...] = widened(xp, found, rows_dtype)

    return kernel


def _scattering(
    define: Define, op: str, attributes: Attributes, xp: Any, operands: Sequence[DType], result: DType
) -> Kernel:
    """set_rows: convert the rows to the target's stored form; its other rows stay as they are."""
    inner, rows_dtype = define(op, attributes, xp), operands[1]

    def kernel(target: Array, rows: Array, indices: Array, out: Array) -> None:
        if rows_dtype is not result:
            rows = narrowed(xp, widened(xp, rows, rows_dtype), result)
        inner(target, rows, indices, out)

    return kernel


def _reading_parts(
    define: Define, op: str, attributes: Attributes, xp: Any, operands: Sequence[DType], result: DType
) -> Kernel:
    """Products: the formula reads and widens the stored weights in parts."""
    inner = define(op, attributes, xp)

    def kernel(weights: Array, *others_and_out: Array) -> None:
        *others, out = others_and_out
        wide = [widened(xp, x, dtype) for x, dtype in zip(others, operands[1:], strict=True)]
        parts = Widening(xp, weights, operands[0]) if is_stored(operands[0]) else weights
        inner(parts, *wide, out)

    return kernel


def _stepping(
    define: Define, op: str, attributes: Attributes, xp: Any, operands: Sequence[DType], result: DType
) -> Kernel:
    """nextafter of bf16: the next f32 would be rounded back."""

    def kernel(a: Array, b: Array, out: Array) -> None:
        out[...] = bf16_after(xp, a, b)

    return kernel


def _kept(
    define: Define, op: str, attributes: Attributes, xp: Any, operands: Sequence[DType], result: DType
) -> Kernel:
    """An op that takes elements as they are stored."""
    return define(op, attributes, xp)


_SPECIAL: Mapping[str, DefineStored] = {
    "cast": _converting,
    "cpy": _converting,
    "get_rows": _gathering,
    "set_rows": _scattering,
    "mul_mat": _reading_parts,
    "mul_mat_id": _reading_parts,
    "nextafter": _stepping,
    "bitcast": _kept,
}
