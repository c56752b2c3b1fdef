"""Kernels on elements that array libraries have no type for: bf16 as its bits, blocks as bytes.

Such an array has `dtype.storage` for its elements and `TensorType.storage_shape` for its shape. Moves
move what is stored. Everything else computes on f32 and is rounded once, at the end: operands are
widened, whole or as far as an op reads them, and the result is narrowed.
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
#: (define, op, attributes, xp, operands, result) -> kernel for stored ones.
DefineStored: TypeAlias = Callable[[Define, str, Attributes, Any, Sequence[DType], DType], Kernel]

#: Ops whose result has the operands' elements, or zeros, in other places.
MOVES = frozenset(
    (
        "cont", "concat", "reshape", "permute", "broadcast_to", "slice", "assign", "where", "set", "diag",
        "tri", "diag_mask_zero", "repeat", "pad", "pad_reflect_1d", "roll",
    )
)  # fmt: skip


def is_stored(dtype: DType) -> bool:
    """Whether arrays of this type hold something else than its elements."""
    return dtype.name == "bf16" or dtype.kind == "quantized"


def widened(xp: Any, x: Array, dtype: DType) -> Array:
    """What is stored as f32; other data types as they are."""
    if dtype.name == "bf16":
        return blocks.from_bits(x, xp)
    return blocks.from_blocks(x, dtype, xp) if dtype.kind == "quantized" else x


def narrowed(xp: Any, x: Array, dtype: DType) -> Array:
    """Numbers in the form in which the data type is stored; others than bf16 and blocks as they are."""
    if dtype.name == "bf16":
        return blocks.to_bits(x if x.dtype.kind == "f" else x.astype(xp.float64), xp)
    return blocks.to_blocks(x, dtype, xp) if dtype.kind == "quantized" else x


class Widening:
    """A stored array whose parts are widened when they are read: the shape and the indexing of an array."""

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
    """The kernel of an op some of whose operands, or whose result, are stored."""
    if op in MOVES and all(dtype is result for dtype in operands if is_stored(dtype) or dtype.is_float):
        return _moving(define, op, attributes, xp, result)
    make = _SPECIAL.get(op, _computing)
    return make(define, op, attributes, xp, operands, result)


def _moving(define: Define, op: str, attributes: Attributes, xp: Any, dtype: DType) -> Kernel:
    if dtype.kind != "quantized":
        return define(op, attributes, xp)
    if op == "slice":
        return define(op, _in_bytes(attributes, dtype), xp)
    # Shapes in attributes count elements, where the result counts bytes.
    return _BLOCK_MOVES[op](xp) if op in _BLOCK_MOVES else define(op, attributes, xp)


def _in_bytes(attributes: Attributes, dtype: DType) -> Attributes:
    """A slice of rows of blocks, whose ends lie between blocks, as one of bytes."""

    def scaled(numbers: Sequence[int]) -> tuple[int, ...]:
        return (*numbers[:-1], numbers[-1] // dtype.block_size * dtype.block_bytes)

    return {**attributes, **{name: scaled(attributes[name]) for name in ("start", "stop")}}


def _reshaping(xp: Any) -> Kernel:
    def kernel(x: Array, out: Array) -> None:
        out[...] = x.reshape(out.shape)

    return kernel


def _broadcasting(xp: Any) -> Kernel:
    def kernel(x: Array, out: Array) -> None:
        out[...] = xp.broadcast_to(x, out.shape)

    return kernel


_BLOCK_MOVES: Mapping[str, Callable[[Any], Kernel]] = {"reshape": _reshaping, "broadcast_to": _broadcasting}


def _computing(
    define: Define, op: str, attributes: Attributes, xp: Any, operands: Sequence[DType], result: DType
) -> Kernel:
    """On widened operands, into f32 where the result is stored."""
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
    """cast and cpy: from the operand's own precision, so that it is rounded once."""
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
    """get_rows: rows as they are stored, of which those that were asked for are widened."""
    inner, rows_dtype = define(op, attributes, xp), operands[0]

    def kernel(rows: Array, indices: Array, out: Array) -> None:
        found = xp.empty((*out.shape[:-1], rows.shape[-1]), rows.dtype)
        inner(rows, indices, found)
        out[...] = widened(xp, found, rows_dtype)

    return kernel


def _scattering(
    define: Define, op: str, attributes: Attributes, xp: Any, operands: Sequence[DType], result: DType
) -> Kernel:
    """set_rows: the rows are converted to what the target stores; the rest of it stays as it is."""
    inner, rows_dtype = define(op, attributes, xp), operands[1]

    def kernel(target: Array, rows: Array, indices: Array, out: Array) -> None:
        if rows_dtype is not result:
            rows = narrowed(xp, widened(xp, rows, rows_dtype), result)
        inner(target, rows, indices, out)

    return kernel


def _reading_parts(
    define: Define, op: str, attributes: Attributes, xp: Any, operands: Sequence[DType], result: DType
) -> Kernel:
    """Products: the weights stay as they are stored, and the formula reads them by parts."""
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
    """nextafter: the next one of f32 would be rounded back."""

    def kernel(a: Array, b: Array, out: Array) -> None:
        out[...] = bf16_after(xp, a, b)

    return kernel


_SPECIAL: Mapping[str, DefineStored] = {
    "cast": _converting,
    "cpy": _converting,
    "get_rows": _gathering,
    "set_rows": _scattering,
    "mul_mat": _reading_parts,
    "mul_mat_id": _reading_parts,
    "nextafter": _stepping,
}
