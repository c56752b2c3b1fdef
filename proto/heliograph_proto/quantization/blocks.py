"""Conversion of rows of floats to rows of ggml's blocks and to bf16, and back.

A row of n elements is n / block_size blocks, each of `block_bytes` bytes: scales in f16, and quanta
of a few bits. Layouts and rounding match ggml's reference (ggml-quants.c) bit for bit. Arrays of
blocks are uint8 [.., row_bytes].

bf16, the upper half of an f32, is stored as its bits in uint16. `xp` is the array library, NumPy or
CuPy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy

from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.quantization import codebooks, eights, few_bits, grid_blocks, k_quants, ternary
from heliograph_proto.quantization.k_quants import fields, half_bytes, halves, packed, unpacked
from heliograph_proto.types import DType, DTypeArgument
from heliograph_proto.types import dtype as dtype_of

Array = Any

#: The number of elements converted at once; it keeps temporaries small.
TILE_ELEMENTS = 2**17


def quantize(array: Array, dtype: DTypeArgument) -> numpy.ndarray[Any, numpy.dtype[numpy.uint8]]:
    """Convert floats [.., n] to rows of blocks, uint8 [.., row_bytes].

    Raises InvalidArgumentError for a type that is not quantized, for rows that are not whole
    blocks, and for elements that are not finite or too large for the f16 scale of a block.
    """
    target, values = _quantized(dtype), numpy.asarray(array)
    if values.dtype.kind != "f" and values.dtype.name != "bfloat16":
        raise InvalidArgumentError(f"an array of {values.dtype} to {target}; floats needed")
    if not values.ndim or values.shape[-1] % target.block_size:
        raise InvalidArgumentError(
            f"an array of shape {values.shape}: rows of {target} are whole blocks of {target.block_size}",
            advice="pad the rows with zeros, or "
            + ("use q8_0 or q4_0, with blocks of 32" if target.block_size > 32 else "use f16 instead"),
        )
    rows: numpy.ndarray[Any, numpy.dtype[numpy.uint8]] = to_blocks(values, target)
    _require_finite_scales(rows, target)
    return rows


def dequantize(rows: Array, dtype: DTypeArgument) -> numpy.ndarray[Any, numpy.dtype[numpy.float32]]:
    """Convert rows of blocks, uint8 [.., row_bytes] (or one row as bytes), to f32 [.., n].

    Raises InvalidArgumentError for a type that is not quantized, and for rows that are not whole
    blocks.
    """
    source = _quantized(dtype)
    is_bytes = isinstance(rows, bytes | bytearray | memoryview)
    found = numpy.frombuffer(rows, numpy.uint8) if is_bytes else numpy.asarray(rows)
    if found.dtype != numpy.uint8 or not found.ndim or found.shape[-1] % source.block_bytes:
        raise InvalidArgumentError(
            f"an array of {found.dtype} and shape {found.shape}: rows of {source} are uint8, whole blocks "
            f"of {source.block_bytes} bytes"
        )
    values: numpy.ndarray[Any, numpy.dtype[numpy.float32]] = from_blocks(found, source)
    return values


def converted_to_blocks(x: Array, dtype: DType, xp: Any = numpy) -> Array:
    """As `to_blocks`, for ops: where ggml's ops convert in less time than its files are made, so do
    these."""
    return _encoded(x, dtype, xp, _CONVERTED.get(dtype.name, _TO_BLOCKS[dtype.name]))


def to_blocks(x: Array, dtype: DType, xp: Any = numpy) -> Array:
    """`quantize` without checks. A block with NaN or infinity gets a scale that is not finite."""
    return _encoded(x, dtype, xp, _TO_BLOCKS[dtype.name])


def _encoded(x: Array, dtype: DType, xp: Any, encode: Callable[[Any, Array], Array]) -> Array:
    count = x.size // dtype.block_size
    blocks = x.reshape(count, dtype.block_size)
    result = xp.empty((count, dtype.block_bytes), xp.uint8)
    for part in _tiles(count, dtype):
        with numpy.errstate(all="ignore"):
            result[part] = encode(xp, blocks[part].astype(xp.float32))
    row_bytes = x.shape[-1] // dtype.block_size * dtype.block_bytes
    return result.reshape(*x.shape[:-1], row_bytes)


def from_blocks(rows: Array, dtype: DType, xp: Any = numpy) -> Array:
    """`dequantize` without checks."""
    blocks_in_row = rows.shape[-1] // dtype.block_bytes
    count = rows.size // dtype.block_bytes
    blocks = rows.reshape(count, dtype.block_bytes)
    result = xp.empty((count, dtype.block_size), xp.float32)
    for part in _tiles(count, dtype):
        # Scales may have any bits: infinity times 0 is NaN, without a warning.
        with numpy.errstate(all="ignore"):
            result[part] = _FROM_BLOCKS[dtype.name](xp, blocks[part])
    return result.reshape(*rows.shape[:-1], blocks_in_row * dtype.block_size)


def _tiles(count: int, dtype: DType) -> list[slice]:
    step = max(1, TILE_ELEMENTS // dtype.block_size)
    return [slice(start, start + step) for start in range(0, count, step)]


def _quantized(dtype: DTypeArgument) -> DType:
    try:
        found = dtype_of(dtype)
    except TypeError:
        found = None
    if found is None or found.kind != "quantized":
        name = dtype if found is None else found
        raise InvalidArgumentError(
            f"{name!s:.80} is not a quantized type", advice=f"use one of {', '.join(_FROM_BLOCKS)}"
        )
    return found


def _require_finite_scales(rows: Array, dtype: DType) -> None:
    blocks = rows.reshape(rows.size // dtype.block_bytes, dtype.block_bytes)
    if dtype.name in _HEADS:
        is_finite = numpy.isfinite(halves(numpy, blocks[:, _HEADS[dtype.name]])).all()
    else:
        is_finite = _ARE_FINITE[dtype.name](blocks).all()
    if not is_finite:
        raise InvalidArgumentError(
            f"{dtype} cannot hold some elements: not finite, or out of the range of a block's scale",
            advice="clip the elements first",
        )


# Blocks of 32


def _to_signed(bits: int) -> Callable[[Any, Array], Array]:
    """Return the encoder of q4_0 or q5_0: the largest element by size has quantum -2**(bits -
    1)."""
    half = 2 ** (bits - 1)

    def to_blocks(xp: Any, x: Array) -> Array:
        place = xp.abs(x).argmax(-1)[:, None]
        scale = xp.take_along_axis(x, place, -1) / xp.float32(-half)
        quanta = _quanta(xp, x * eights.inverse_of(xp, scale) + xp.float32(half + 0.5), bits)
        return xp.concatenate([half_bytes(xp, scale), _quanta_bytes(xp, quanta, bits)], -1)

    return to_blocks


def _from_signed(bits: int) -> Callable[[Any, Array], Array]:
    half = 2 ** (bits - 1)

    def from_blocks(xp: Any, blocks: Array) -> Array:
        scale, rest = fields(blocks, 2, blocks.shape[-1] - 2)
        return (_quanta_of(xp, rest, bits).astype(xp.float32) - xp.float32(half)) * halves(xp, scale)

    return from_blocks


def _to_unsigned(bits: int) -> Callable[[Any, Array], Array]:
    """Return the encoder of q4_1 or q5_1: quanta span a block's smallest to its largest element."""

    def to_blocks(xp: Any, x: Array) -> Array:
        least = x.min(-1, keepdims=True)
        scale = (x.max(-1, keepdims=True) - least) / xp.float32(2**bits - 1)
        quanta = _quanta(xp, (x - least) * eights.inverse_of(xp, scale) + xp.float32(0.5), bits)
        heads = [half_bytes(xp, scale), half_bytes(xp, least)]
        return xp.concatenate([*heads, _quanta_bytes(xp, quanta, bits)], -1)

    return to_blocks


def _from_unsigned(bits: int) -> Callable[[Any, Array], Array]:
    def from_blocks(xp: Any, blocks: Array) -> Array:
        scale, least, rest = fields(blocks, 2, 2, blocks.shape[-1] - 4)
        return _quanta_of(xp, rest, bits).astype(xp.float32) * halves(xp, scale) + halves(xp, least)

    return from_blocks


def _quanta(xp: Any, x: Array, bits: int) -> Array:
    """Truncate numbers to integers of `bits` bits."""
    return xp.minimum(x, xp.float32(2**bits - 1)).astype(xp.uint8)


def _quanta_bytes(xp: Any, quanta: Array, bits: int) -> Array:
    """Pack 32 quanta as nibbles, after their fifth bits if there are any."""
    nibbles = packed(xp, quanta & xp.uint8(15), 4, 16)
    if bits == 4:
        return nibbles
    return xp.concatenate([packed(xp, quanta >> xp.uint8(4), 1, 1), nibbles], -1)


def _quanta_of(xp: Any, field: Array, bits: int) -> Array:
    if bits == 4:
        return unpacked(xp, field, 4, 16)
    fifth, nibbles = fields(field, 4, 16)
    return unpacked(xp, nibbles, 4, 16) | (unpacked(xp, fifth, 1, 1) << xp.uint8(4))


# Blocks of 256, in 16 or 8 parts with scales of their own


def _from_q2_k(xp: Any, blocks: Array) -> Array:
    scales, quanta, scale, least = fields(blocks, 16, 64, 2, 2)
    factor = halves(xp, scale) * (scales & xp.uint8(15)).astype(xp.float32)
    offset = halves(xp, least) * (scales >> xp.uint8(4)).astype(xp.float32)
    return _parts(xp, factor, unpacked(xp, quanta, 2, 32), offset)


def _from_q3_k(xp: Any, blocks: Array) -> Array:
    high, low, scales, scale = fields(blocks, 32, 64, 12, 2)
    lower, upper = fields(scales, 8, 4)
    part_scales = unpacked(xp, lower, 4, 8) | (unpacked(xp, upper, 2, 4) << xp.uint8(4))
    factor = halves(xp, scale) * (part_scales.astype(xp.float32) - xp.float32(32))
    # A clear high bit subtracts 4.
    numbers = unpacked(xp, low, 2, 32) | (unpacked(xp, high, 1, 32) << xp.uint8(2))
    return _parts(xp, factor, numbers.astype(xp.float32) - xp.float32(4), None)


def _from_q4_k(xp: Any, blocks: Array) -> Array:
    scale, least, scales, quanta = fields(blocks, 2, 2, 12, 128)
    factor, offset = _scales_of_eight(xp, scale, least, scales)
    return _parts(xp, factor, unpacked(xp, quanta, 4, 32), offset)


def _from_q5_k(xp: Any, blocks: Array) -> Array:
    scale, least, scales, fifth, nibbles = fields(blocks, 2, 2, 12, 32, 128)
    factor, offset = _scales_of_eight(xp, scale, least, scales)
    numbers = unpacked(xp, nibbles, 4, 32) | (unpacked(xp, fifth, 1, 32) << xp.uint8(4))
    return _parts(xp, factor, numbers, offset)


def _from_q6_k(xp: Any, blocks: Array) -> Array:
    low, high, scales, scale = fields(blocks, 128, 64, 16, 2)
    factor = halves(xp, scale) * scales.astype(xp.int8).astype(xp.float32)
    numbers = unpacked(xp, low, 4, 64) | (unpacked(xp, high, 2, 32) << xp.uint8(4))
    return _parts(xp, factor, numbers.astype(xp.float32) - xp.float32(32), None)


def _scales_of_eight(xp: Any, scale: Array, least: Array, packed: Array) -> tuple[Array, Array]:
    """Return the scales and offsets of a block's eight parts.

    Each has 6 bits; those of the last four parts are split in two.
    """
    first, second, third = fields(packed, 4, 4, 4)
    found = []
    for head, own, rest in (
        (scale, first, third & xp.uint8(15)),
        (least, second, third >> xp.uint8(4)),
    ):
        upper = (own >> xp.uint8(2)) & xp.uint8(0x30)
        numbers = xp.concatenate([own & xp.uint8(63), rest | upper], -1)
        found.append(halves(xp, head) * numbers.astype(xp.float32))
    return found[0], found[1]


def _parts(xp: Any, factor: Array, quanta: Array, offset: Array | None) -> Array:
    """Return each part's factor times its quanta, minus its offset: [n, 256]."""
    numbers = quanta.astype(xp.float32).reshape(*factor.shape, -1) * factor[..., None]
    if offset is not None:
        numbers = numbers - offset[..., None]
    return numbers.reshape(len(quanta), -1)


_TO_BLOCKS: Mapping[str, Callable[[Any, Array], Array]] = {
    "q4_0": _to_signed(4),
    "q4_1": _to_unsigned(4),
    "q5_0": _to_signed(5),
    "q5_1": _to_unsigned(5),
    "q8_0": eights.to_q8_0,
    "q8_1": eights.to_q8_1,
    "q8_k": eights.to_q8_k,
    "q2_k": k_quants.to_q2_k,
    "q3_k": k_quants.to_q3_k,
    "q4_k": k_quants.to_q4_k,
    "q5_k": k_quants.to_q5_k,
    "q6_k": k_quants.to_q6_k,
    "iq4_nl": codebooks.to_iq4_nl,
    "iq4_xs": codebooks.to_iq4_xs,
    "mxfp4": codebooks.to_mxfp4,
    "nvfp4": codebooks.to_nvfp4,
    "iq1_s": grid_blocks.to_iq1_s,
    "iq1_m": grid_blocks.to_iq1_m,
    "iq2_xxs": grid_blocks.to_iq2_xxs,
    "iq2_xs": grid_blocks.to_iq2_xs,
    "iq2_s": grid_blocks.to_iq2_s,
    "iq3_xxs": grid_blocks.to_iq3_xxs,
    "iq3_s": grid_blocks.to_iq3_s,
    "tq1_0": ternary.to_tq1_0,
    "tq2_0": ternary.to_tq2_0,
    "q1_0": few_bits.to_q1_0,
    "q2_0": few_bits.to_q2_0,
}
_CONVERTED: Mapping[str, Callable[[Any, Array], Array]] = {"iq4_nl": codebooks.converted_to_iq4_nl}
#: The places of the f16 scales in a block.
_HEADS: Mapping[str, slice] = {
    "q4_0": slice(0, 2),
    "q4_1": slice(0, 4),
    "q5_0": slice(0, 2),
    "q5_1": slice(0, 4),
    "q8_0": slice(0, 2),
    "q2_k": slice(80, 84),
    "q3_k": slice(108, 110),
    "q4_k": slice(0, 4),
    "q5_k": slice(0, 4),
    "q6_k": slice(208, 210),
    "iq4_nl": slice(0, 2),
    "iq4_xs": slice(0, 2),
    "q8_1": slice(0, 4),
    "q1_0": slice(0, 2),
    "q2_0": slice(0, 2),
    **dict.fromkeys(("iq1_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"), slice(0, 2)),
    "tq1_0": slice(52, 54),
    "tq2_0": slice(64, 66),
}
#: Of the other types: which of the blocks have finite scales.
_ARE_FINITE: Mapping[str, Callable[[Array], Array]] = {
    "mxfp4": lambda blocks: blocks[:, 0] != codebooks.NOT_FINITE,
    "nvfp4": lambda blocks: blocks[:, :4] != codebooks.NO_SCALE,
    "iq1_m": lambda blocks: numpy.isfinite(grid_blocks.scale_of_iq1_m(numpy, blocks)),
    "q8_k": lambda blocks: numpy.isfinite(blocks[:, :4].copy().view(numpy.float32)),
}
_FROM_BLOCKS: Mapping[str, Callable[[Any, Array], Array]] = {
    "q4_0": _from_signed(4),
    "q4_1": _from_unsigned(4),
    "q5_0": _from_signed(5),
    "q5_1": _from_unsigned(5),
    "q8_0": eights.from_q8_0,
    "q8_1": eights.from_q8_1,
    "q8_k": eights.from_q8_k,
    "q2_k": _from_q2_k,
    "q3_k": _from_q3_k,
    "q4_k": _from_q4_k,
    "q5_k": _from_q5_k,
    "q6_k": _from_q6_k,
    "iq4_nl": codebooks.from_iq4_nl,
    "iq4_xs": codebooks.from_iq4_xs,
    "mxfp4": codebooks.from_mxfp4,
    "nvfp4": codebooks.from_nvfp4,
    "iq1_s": grid_blocks.from_iq1_s,
    "iq1_m": grid_blocks.from_iq1_m,
    "iq2_xxs": grid_blocks.from_iq2_xxs,
    "iq2_xs": grid_blocks.from_iq2_xs,
    "iq2_s": grid_blocks.from_iq2_s,
    "iq3_xxs": grid_blocks.from_iq3_xxs,
    "iq3_s": grid_blocks.from_iq3_s,
    "tq1_0": ternary.from_tq1_0,
    "tq2_0": ternary.from_tq2_0,
    "q1_0": few_bits.from_q1_0,
    "q2_0": few_bits.from_q2_0,
}


def from_bits(bits: Array, xp: Any = numpy) -> Array:
    """Convert bf16 bits (uint16) to f32, exactly."""
    wide = bits.astype(xp.uint32)
    # In place, so that an array of no dimensions stays an array.
    wide <<= xp.uint32(16)
    return wide.view(xp.float32)


def to_bits(x: Array, xp: Any = numpy) -> Array:
    """Convert floats of any width to bf16 bits (uint16).

    Rounds once to the nearest, halves to even; NaN stays NaN.
    """
    wide = _to_odd(xp, x) if x.dtype == xp.float64 else xp.ascontiguousarray(x, xp.float32)
    bits = wide.reshape(x.shape).view(xp.uint32)
    upper = bits >> xp.uint32(16)
    rounded = (bits + (upper & xp.uint32(1)) + xp.uint32(0x7FFF)) >> xp.uint32(16)
    # Rounding could carry a NaN into infinity; a quiet bit set here survives the truncation.
    return xp.where(xp.isnan(wide.reshape(x.shape)), upper | xp.uint32(0x40), rounded).astype(xp.uint16)


def _to_odd(xp: Any, x: Array) -> Array:
    """Round f64 to f32, inexact values to the odd neighbour, so that a second rounding is exact.

    See Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums" (2008).
    """
    near = xp.ascontiguousarray(x.astype(xp.float32))
    bits = near.view(xp.uint32)
    too_far = xp.abs(near.astype(xp.float64)) > xp.abs(x)
    inexact = near.astype(xp.float64) != x
    return ((bits - too_far.astype(xp.uint32)) | inexact.astype(xp.uint32)).view(xp.float32)
