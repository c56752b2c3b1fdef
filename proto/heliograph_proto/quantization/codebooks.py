"""Blocks of ggml whose nibbles are places in a table of sixteen numbers: iq4_nl, iq4_xs, mxfp4 and
nvfp4.

Bit for bit as ggml, in both directions. For iq4_nl and iq4_xs the scale of each part is searched as
in `k_quants`; elements come first in that search. An mxfp4 scale is a power of two, stored as an
exponent in one byte; nvfp4 has a scale of eight bits for each sixteen elements.
"""

from __future__ import annotations

from typing import Any, Final

from heliograph_proto.quantization.k_quants import (
    BLOCK,
    F32,
    SMALLEST,
    clipped,
    fields,
    halves,
    head_bytes,
    largest,
    packed,
    parts_of,
    summed,
    unpacked,
)

Array = Any

#: The numbers of the nibbles of iq4_nl and iq4_xs, in rising order.
CODES: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
#: The numbers of the nibbles of mxfp4 and nvfp4: twice those of a float of one sign, two exponent
#: and one mantissa bit. ggml's minus zero is zero.
FP4_CODES: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
#: The inverse scales that are tried before and after the first one.
TRIES: Final = 7
#: The scale byte of a block with an element that is not finite; no finite element needs it.
NOT_FINITE: Final = 255
#: The same of a part of nvfp4, whose elements are zeros then; and the largest scale, 448.
NO_SCALE, LARGEST_SCALE = 0x7F, 0x7E


def power_of(xp: Any, exponents: Array) -> Array:
    """Convert scale bytes of mxfp4 to f32: 2**(byte - 128), since the codes are doubled."""
    wide = exponents.astype(xp.uint32)
    # The first two are smaller than the smallest normal float.
    small = xp.uint32(0x200000) << (wide & xp.uint32(1))
    usual = (wide - xp.uint32(1)) << xp.uint32(23)
    return xp.where(wide < 2, small, usual).astype(xp.uint32).view(xp.float32)


def small_float_of(xp: Any, bytes_: Array) -> Array:
    """Convert scale bytes of nvfp4 to f32: half of a float of four exponent and three mantissa
    bits, since the codes are doubled. The top bit means nothing."""
    # In an f32's places the bits are 2**-120 times that float.
    bits = (bytes_.astype(xp.uint32) & xp.uint32(0x7F)) << xp.uint32(20)
    return xp.where(bytes_ == NO_SCALE, F32(0), bits.view(xp.float32) * F32(2**119))


def _small_float_from(xp: Any, x: Array) -> Array:
    """Return the scale bytes nearest to numbers from 0 on. As in ggml, halves are rounded up, and
    numbers that round to 256 or more become the largest scale."""
    near = (xp.ascontiguousarray(x, xp.float32).view(xp.uint32) + xp.uint32(1 << 19)) >> xp.uint32(20)
    usual = near.astype(xp.int32) - (120 << 3)
    usual = xp.where(usual >= 15 << 3, LARGEST_SCALE, usual)
    small = xp.minimum(x * F32(512) + F32(0.5), F32(7)).astype(xp.int32)
    # The smallest normal float is 2**-6; ggml rounds what is below it to fewer bits.
    return xp.where(x < F32(2**-6), small, usual).astype(xp.uint8)


def _numbers(xp: Any, nibbles: Array, codes: tuple[int, ...]) -> Array:
    return xp.asarray(codes, xp.float32)[nibbles]


def from_iq4_nl(xp: Any, blocks: Array) -> Array:
    """Decode blocks [n, 18] to f32 [n, 32]."""
    scale, quanta = fields(blocks, 2, 16)
    return _numbers(xp, unpacked(xp, quanta, 4, 16), CODES) * halves(xp, scale)


def from_iq4_xs(xp: Any, blocks: Array) -> Array:
    """Decode blocks [n, 136] to f32 [n, 256]."""
    scale, upper, lower, quanta = fields(blocks, 2, 2, 4, 128)
    scales = unpacked(xp, lower, 4, 1) | (unpacked(xp, upper, 2, 1) << xp.uint8(4))
    factor = halves(xp, scale) * (scales.astype(xp.float32) - xp.float32(32))
    numbers = _numbers(xp, unpacked(xp, quanta, 4, 16), CODES)
    return (numbers.reshape(-1, 8, 32) * factor[..., None]).reshape(-1, BLOCK)


def from_mxfp4(xp: Any, blocks: Array) -> Array:
    """Decode blocks [n, 17] to f32 [n, 32]."""
    exponent, quanta = fields(blocks, 1, 16)
    return _numbers(xp, unpacked(xp, quanta, 4, 16), FP4_CODES) * power_of(xp, exponent)


def from_nvfp4(xp: Any, blocks: Array) -> Array:
    """Decode blocks [n, 36] to f32 [n, 64]."""
    scales, quanta = fields(blocks, 4, 32)
    numbers = _numbers(xp, unpacked(xp, quanta, 4, 8), FP4_CODES)
    return (numbers.reshape(-1, 4, 16) * small_float_of(xp, scales)[..., None]).reshape(-1, 64)


def _nearest_code(xp: Any, x: Array) -> Array:
    """Return the places of the nearest of CODES, the upper one of two as near."""
    codes = xp.asarray(CODES, xp.float32)
    upper = xp.clip(xp.searchsorted(codes, x, side="right"), 1, len(CODES) - 1)
    return upper - (x - codes[upper - 1] < codes[upper] - x)


def _best_scales(xp: Any, x: Array) -> Array:
    """Return the scales of parts [32, parts], the best of those tried around the extreme element's.

    Errors are weighted by the squares of the elements.
    """
    extreme, weights, codes = largest(xp, x, 0), x * x, xp.asarray(CODES, xp.float32)

    def sums(inverse: Array) -> tuple[Array, Array]:
        numbers = codes[_nearest_code(xp, inverse * x)]
        weighted = weights * numbers
        return summed(weighted * x), summed(weighted * numbers)

    products, squares = sums(F32(1) / (-extreme / F32(CODES[0])))
    scale = products / squares
    best = scale * products
    for step in range(-TRIES, TRIES + 1):
        products, squares = sums(F32(step + CODES[0]) / extreme)
        better = (squares > 0) & (products * products > best * squares)
        scale = xp.where(better, products / squares, scale)
        best = xp.where(better, scale * products, best)
    return xp.where(xp.abs(extreme) < SMALLEST, F32(0), scale)


def _inverse(xp: Any, scale: Array) -> Array:
    return xp.where(scale == 0, F32(0), F32(1) / scale)


def to_iq4_nl(xp: Any, x: Array) -> Array:
    """Encode blocks [n, 32] of f32 as bytes [n, 18]."""
    scale = _best_scales(xp, parts_of(xp, x, 32))
    quanta = _nearest_code(xp, _inverse(xp, scale)[:, None] * x).astype(xp.uint8)
    return xp.concatenate([head_bytes(xp, x, scale), packed(xp, quanta, 4, 16)], -1)


def converted_to_iq4_nl(xp: Any, x: Array) -> Array:
    """As `to_iq4_nl`, with the nibbles of the extreme element's scale, as ops of ggml convert."""
    parts, codes = parts_of(xp, x, 32), xp.asarray(CODES, xp.float32)
    extreme, weights = largest(xp, parts, 0), parts * parts
    places = _nearest_code(xp, F32(1) / (extreme / F32(CODES[0])) * parts)
    numbers = codes[places]
    products, squares = summed(weights * numbers * parts), summed(weights * numbers * numbers)
    # A scale that is not finite says so of the block's elements.
    scale = xp.where(squares == 0, F32(0), products / squares)
    scale = xp.where(xp.abs(extreme) < SMALLEST, F32(0), scale)
    quanta = places.T.astype(xp.uint8)
    return xp.concatenate([head_bytes(xp, x, scale), packed(xp, quanta, 4, 16)], -1)


def to_iq4_xs(xp: Any, x: Array) -> Array:
    """Encode blocks [n, 256] of f32 as bytes [n, 136]."""
    scales = _best_scales(xp, parts_of(xp, x, 32)).reshape(len(x), 8)
    scale = -largest(xp, scales, 1) / F32(32)
    whole = clipped(xp, _inverse(xp, scale)[:, None] * scales, -32, 31)
    inverse = _inverse(xp, scale[:, None] * whole)[..., None]
    quanta = _nearest_code(xp, inverse * x.reshape(-1, 8, 32)).astype(xp.uint8).reshape(len(x), BLOCK)
    stored = (whole + F32(32)).astype(xp.uint8)
    upper, lower = packed(xp, stored >> xp.uint8(4), 2, 1), packed(xp, stored & xp.uint8(15), 4, 1)
    return xp.concatenate([head_bytes(xp, x, scale), upper, lower, packed(xp, quanta, 4, 16)], -1)


def _nearest_fp4(xp: Any, x: Array, scale: Array) -> Array:
    """Return the places of the nearest of FP4_CODES times a scale, the lower one of two as near."""
    nearest, place = xp.abs(x), xp.zeros(x.shape, xp.uint8)
    for number, code in enumerate(FP4_CODES[1:], 1):
        error = xp.abs(F32(code) * scale - x)
        place = xp.where(error < nearest, xp.uint8(number), place)
        nearest = xp.minimum(error, nearest)
    return place


def to_mxfp4(xp: Any, x: Array) -> Array:
    """Encode blocks [n, 32] of f32 as bytes [n, 17]. The scale byte is NOT_FINITE if an element is
    not finite."""
    most = xp.abs(x).max(-1, keepdims=True)
    # In f64 and rounded to f32, as of a logarithm in f32.
    floor = xp.floor(xp.log2(most.astype(xp.float64)).astype(xp.float32))
    exponent = xp.clip(floor + F32(127 - 2), 0, 254)
    exponent = xp.where(most > 0, exponent, F32(0))
    exponent = xp.where(xp.isfinite(most), exponent, F32(NOT_FINITE)).astype(xp.uint8)
    place = _nearest_fp4(xp, x, power_of(xp, exponent))
    return xp.concatenate([exponent, packed(xp, place, 4, 16)], -1)


def to_nvfp4(xp: Any, x: Array) -> Array:
    """Encode blocks [n, 64] of f32 as bytes [n, 36]. A part's scale byte is NO_SCALE if an element
    of it is not finite; elements beyond the largest scale are clipped, as in ggml."""
    parts = x.reshape(len(x), 4, 16)
    most = xp.abs(parts).max(-1)
    scale = xp.where(xp.isfinite(most), _small_float_from(xp, most / F32(6)), xp.uint8(NO_SCALE))
    place = _nearest_fp4(xp, parts, small_float_of(xp, scale)[..., None])
    return xp.concatenate([scale, packed(xp, place.reshape(x.shape), 4, 8)], -1)
