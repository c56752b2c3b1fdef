"""ggml's blocks of 256 elements that are points of grids: iq1_s, iq1_m, iq2_xxs, iq2_xs, iq2_s,
iq3_xxs and iq3_s.

Decoded bit for bit as ggml does. A block has the places of its points in a grid, and a scale for
each part. Points of iq2 and iq3 are sizes, with signs beside them; those of iq1 are -1, 0 and 1,
all shifted up or down by an eighth.

Encoding is simpler than ggml's, and its bytes differ: the scale of a part is the best of a few for
elements that are rounded to the levels, then once more for the nearest points; with it the nearest
points are taken again. Where a block has seven bits for eight signs and they do not fit, the
smallest element changes its sign.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy

from heliograph_proto.quantization import grids
from heliograph_proto.quantization.grids import Grid, even_signs
from heliograph_proto.quantization.k_quants import (
    BLOCK,
    F32,
    fields,
    halves,
    head_bytes,
    packed,
    stored_half,
    summed,
    unpacked,
)

Array = Any

#: By how much the points of iq1 are shifted.
SHIFT: Final = 0.125
#: Groups of eight elements in a block; each has a byte of signs.
GROUPS: Final = BLOCK // 8
#: The scales that are tried, as shares of the one that makes the largest element the highest level.
SHARES: Final = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
#: The numbers in a table of errors.
_TABLE: Final = 2**22


def _words(xp: Any, field: Array) -> Array:
    """Return the words of bytes [n, 4 k]: uint32 [n, k]."""
    return xp.ascontiguousarray(field).view(xp.uint32)


def _shorts(xp: Any, field: Array) -> Array:
    return xp.ascontiguousarray(field).view(xp.uint16)


def _bits(xp: Any, numbers: Array, starts: tuple[int, ...], count: int) -> Array:
    """Return `count` bits of numbers [n, k] from each start on: [n, k * starts]."""
    found = numbers[..., None] >> xp.asarray(starts, numbers.dtype)
    return (found & numbers.dtype.type(2**count - 1)).reshape(len(numbers), numbers.shape[1] * len(starts))


def _of_bits(xp: Any, numbers: Array, starts: tuple[int, ...], kind: str) -> Array:
    """The inverse of `_bits`, as integers of a kind."""
    apart = numbers.reshape(len(numbers), numbers.shape[1] // len(starts), len(starts)).astype(kind)
    return (apart << xp.asarray(starts, kind)).sum(-1, dtype=kind)


def _wide(low: Array, high: Array) -> Array:
    """Return places whose lowest eight bits are apart from the others."""
    return low.astype("uint16") | high.astype("uint16") << 8


# Decoding


class Rule(NamedTuple):
    """The factor of a part: the block's scale times `first + step * n`, with n up to `most`."""

    first: float
    step: float
    most: int


#: ggml's rules multiply in another order; all these products are exact.
IQ1: Final = Rule(1.0, 2.0, 7)
IQ2: Final = Rule(0.125, 0.25, 15)
IQ3_XXS: Final = Rule(0.25, 0.5, 15)
IQ3_S: Final = Rule(1.0, 2.0, 15)


def _factors(scale: Array, small: Array, rule: Rule) -> Array:
    """Return the factors of parts [n, parts]."""
    return scale * (F32(rule.first) + small.astype(F32) * F32(rule.step))


def _signed(xp: Any, grid: Grid, places: Array, signs: Array, factors: Array) -> Array:
    """Return the points at places [n, points], with signs [n, 32], times factors [n, parts]."""
    numbers = xp.asarray(grid.numbers)[places].reshape(-1, GROUPS, 8)
    numbers = numbers * (F32(1) - F32(2) * unpacked(xp, signs, 1, 1).reshape(numbers.shape).astype(F32))
    return (numbers.reshape(*factors.shape, -1) * factors[..., None]).reshape(-1, BLOCK)


def _shifted(xp: Any, places: Array, are_down: Array, factors: Array) -> Array:
    """Return the points of iq1 at places [n, 32], shifted, times factors [n, parts]."""
    shifts = F32(SHIFT) - F32(2 * SHIFT) * are_down.reshape(-1, GROUPS, 1).astype(F32)
    numbers = xp.asarray(grids.IQ1.numbers)[places] + shifts
    return (numbers.reshape(*factors.shape, -1) * factors[..., None]).reshape(-1, BLOCK)


def from_iq2_xxs(xp: Any, blocks: Array) -> Array:
    """Decode blocks [n, 66] to f32 [n, 256]."""
    scale, rest = fields(blocks, 2, 64)
    words = _words(xp, rest)
    places = words[:, ::2].copy().view(xp.uint8)
    signs = even_signs(_bits(xp, words[:, 1::2], (0, 7, 14, 21), 7).astype(xp.uint8))
    factors = _factors(halves(xp, scale), words[:, 1::2] >> xp.uint32(28), IQ2)
    return _signed(xp, grids.IQ2_XXS, places, signs, factors)


def from_iq2_xs(xp: Any, blocks: Array) -> Array:
    """Decode blocks [n, 74] to f32 [n, 256]."""
    scale, both, scales = fields(blocks, 2, 64, 8)
    numbers = _shorts(xp, both)
    signs = even_signs((numbers >> xp.uint16(9)).astype(xp.uint8))
    factors = _factors(halves(xp, scale), unpacked(xp, scales, 4, 1), IQ2)
    return _signed(xp, grids.IQ2_XS, numbers & xp.uint16(511), signs, factors)


def from_iq2_s(xp: Any, blocks: Array) -> Array:
    """Decode blocks [n, 82] to f32 [n, 256]."""
    scale, low, signs, high, scales = fields(blocks, 2, 32, 32, 8, 8)
    factors = _factors(halves(xp, scale), unpacked(xp, scales, 4, 1), IQ2)
    return _signed(xp, grids.IQ2_S, _wide(low, unpacked(xp, high, 2, 1)), signs, factors)


def from_iq3_xxs(xp: Any, blocks: Array) -> Array:
    """Decode blocks [n, 98] to f32 [n, 256]."""
    scale, places, rest = fields(blocks, 2, 64, 32)
    words = _words(xp, rest)
    signs = even_signs(_bits(xp, words, (0, 7, 14, 21), 7).astype(xp.uint8))
    factors = _factors(halves(xp, scale), words >> xp.uint32(28), IQ3_XXS)
    return _signed(xp, grids.IQ3_XXS, places, signs, factors)


def from_iq3_s(xp: Any, blocks: Array) -> Array:
    """Decode blocks [n, 110] to f32 [n, 256]."""
    scale, low, high, signs, scales = fields(blocks, 2, 64, 8, 32, 4)
    factors = _factors(halves(xp, scale), unpacked(xp, scales, 4, 1), IQ3_S)
    return _signed(xp, grids.IQ3_S, _wide(low, unpacked(xp, high, 1, 1)), signs, factors)


def from_iq1_s(xp: Any, blocks: Array) -> Array:
    """Decode blocks [n, 50] to f32 [n, 256]."""
    scale, low, rest = fields(blocks, 2, 32, 16)
    numbers = _shorts(xp, rest)
    places = _wide(low, _bits(xp, numbers, (0, 3, 6, 9), 3))
    factors = _factors(halves(xp, scale), _bits(xp, numbers, (12,), 3), IQ1)
    return _shifted(xp, places, (numbers >> xp.uint16(15)).repeat(4, axis=-1), factors)


def scale_of_iq1_m(xp: Any, blocks: Array) -> Array:
    """Return the scales of blocks [n, 56] as f32 [n, 1]: four bits each lie above those of
    parts."""
    quarters = _shorts(xp, blocks[:, 48:]) >> xp.uint16(12)
    return _of_bits(xp, quarters, (0, 4, 8, 12), "uint16").view(xp.float16).astype(xp.float32)


def from_iq1_m(xp: Any, blocks: Array) -> Array:
    """Decode blocks [n, 56] to f32 [n, 256]."""
    low, high, scales = fields(blocks, 32, 16, 8)
    above = unpacked(xp, high, 4, 1)
    factors = _factors(scale_of_iq1_m(xp, blocks), _bits(xp, _shorts(xp, scales), (0, 3, 6, 9), 3), IQ1)
    return _shifted(xp, _wide(low, above & xp.uint8(7)), above >> xp.uint8(3), factors)


# Encoding


def _rounded(xp: Any, sizes: Array, factors: Array, levels: tuple[int, ...]) -> Array:
    """Round sizes [elements, parts] to levels times the factors of parts; return the levels."""
    place = xp.zeros(sizes.shape, xp.uint8)
    for lower, upper in zip(levels, levels[1:], strict=False):
        place += sizes > F32((lower + upper) / 2) * factors
    return xp.asarray(levels, xp.float32)[place]


def _first_factors(xp: Any, x: Array, levels: tuple[int, ...], parts: int) -> Array:
    """Return the best factors of parts [n, parts] of those tried, with elements at any levels."""
    sizes = xp.ascontiguousarray(xp.abs(x).reshape(len(x) * parts, -1).T)
    top, best = sizes.max(0) / F32(levels[-1]), xp.full(sizes.shape[1], -1, xp.float32)
    found = xp.zeros_like(best)
    for share in SHARES:
        numbers = _rounded(xp, sizes, top * F32(share), levels)
        factors, gains = _fitted(xp, sizes, numbers)
        found, best = xp.where(gains > best, factors, found), xp.maximum(gains, best)
    return found.reshape(len(x), parts)


def _fitted(xp: Any, x: Array, numbers: Array) -> tuple[Array, Array]:
    """Return the least squares factors of numbers [elements, parts], and by how much of the
    elements' squares they lower the errors."""
    products, squares = summed(numbers * x), summed(numbers * numbers)
    factors = xp.where(squares > 0, products / squares, F32(0))
    return factors, factors * products


def _nearest(xp: Any, grid: Grid, x: Array, factors: Array, shift: float = 0.0) -> tuple[Array, Array]:
    """Return the places of the points that are nearest to x [n, 256], and the squares of their
    distances: [n, points]."""
    coordinates = grid.places.shape[1]
    apart = x.reshape(-1, coordinates)
    wide = factors.repeat(len(apart) // factors.size)[:, None]
    step = max(1, _TABLE // len(grid.places))
    found = [
        _nearest_of(xp, grid, apart[start : start + step], wide[start : start + step], shift)
        for start in range(0, len(apart), step)
    ]
    places, errors = (xp.concatenate(each).reshape(len(x), -1) for each in zip(*found, strict=True))
    return places, errors


def _nearest_of(xp: Any, grid: Grid, x: Array, factors: Array, shift: float) -> tuple[Array, Array]:
    """Sum the errors of all first and of all second halves of points; then each point has the sum
    of two of them."""
    half, which = grid.places.shape[1] // 2, grid.places.astype(numpy.int32)
    powers = len(grid.levels) ** numpy.arange(half)
    numbers = [F32(level + shift) * factors for level in grid.levels]
    errors = xp.zeros((len(x), len(which)), xp.float32)
    for first in (0, half):
        own = xp.zeros((len(x), 1), xp.float32)
        for coordinate in range(first, first + half):
            each = [(number - x[:, coordinate : coordinate + 1]) ** 2 for number in numbers]
            own = (xp.stack(each, 1) + own[:, None]).reshape(len(x), -1)
        errors += own[:, xp.asarray(which[:, first : first + half] @ powers)]
    best = errors.argmin(-1)
    return best, xp.take_along_axis(errors, best[:, None], -1)


class _Encoded(NamedTuple):
    """The fields of blocks: bytes of the scale, numbers of parts, places of points, and signs or
    shifts of groups of eight."""

    head: Array
    small: Array
    places: Array
    signs: Array


def _scales(xp: Any, x: Array, factors: Array, rule: Rule) -> tuple[Array, Array, Array]:
    """Return the bytes of blocks' scales, the numbers of parts, and the factors that they make."""
    head = head_bytes(xp, x, factors.max(-1) / F32(rule.first + rule.step * rule.most))
    scale = stored_half(head)
    inverse = xp.where(scale == 0, F32(0), F32(1) / scale)
    small = xp.rint((factors * inverse - F32(rule.first)) / F32(rule.step))
    small = xp.clip(small, 0, rule.most).astype(xp.uint8)
    return head, small, _factors(scale, small, rule)


def _signs_of(xp: Any, x: Array, *, even: bool) -> Array:
    """Return which elements [n, 32, 8] are negative; if `even`, an even number in each group."""
    negative, sizes = x < 0, xp.abs(x)
    if even:
        is_smallest = xp.arange(8) == sizes.argmin(-1)[..., None]
        negative = negative ^ (is_smallest & (negative.sum(-1, keepdims=True) % 2 == 1))
    return negative


def _encoded(xp: Any, x: Array, grid: Grid, rule: Rule, parts: int, *, even: bool) -> _Encoded:
    """Encode blocks [n, 256] as points with signs."""
    apart = x.reshape(-1, GROUPS, 8)
    negative = _signs_of(xp, apart, even=even)
    sizes = xp.where(negative, -apart, apart).reshape(x.shape)
    factors = _first_factors(xp, sizes, grid.levels, parts)
    places, _ = _nearest(xp, grid, sizes, factors)
    numbers = xp.asarray(grid.numbers)[places].reshape(factors.size, -1).T
    factors, _ = _fitted(xp, sizes.reshape(factors.size, -1).T, numbers)
    head, small, factors = _scales(xp, x, factors.reshape(len(x), parts), rule)
    places, _ = _nearest(xp, grid, sizes, factors)
    return _Encoded(head, small, places, packed(xp, negative.reshape(x.shape).astype(xp.uint8), 1, 1))


def _encoded_shifted(xp: Any, x: Array, parts: int, groups: int) -> _Encoded:
    """Encode blocks [n, 256] as shifted points; so many groups of eight have the same shift."""
    head, small, factors = _scales(xp, x, _first_factors(xp, x, (0, 1), parts), IQ1)
    (up, above), (down, below) = (_nearest(xp, grids.IQ1, x, factors, shift) for shift in (SHIFT, -SHIFT))
    above, below = (each.reshape(-1, groups).sum(-1).reshape(len(x), -1) for each in (above, below))
    are_down = (below < above).repeat(groups, axis=-1)
    return _Encoded(head, small, xp.where(are_down, down, up), are_down.astype(xp.uint8))


def to_iq2_xxs(xp: Any, x: Array) -> Array:
    """Encode blocks [n, 256] of f32 as bytes [n, 66]."""
    found = _encoded(xp, x, grids.IQ2_XXS, IQ2, 8, even=True)
    words = xp.empty((len(x), 16), xp.uint32)
    words[:, ::2] = found.places.astype(xp.uint8).view(xp.uint32)
    signs = _of_bits(xp, found.signs & xp.uint8(127), (0, 7, 14, 21), "uint32")
    words[:, 1::2] = signs | found.small.astype(xp.uint32) << xp.uint32(28)
    return xp.concatenate([found.head, words.view(xp.uint8)], -1)


def to_iq2_xs(xp: Any, x: Array) -> Array:
    """Encode blocks [n, 256] of f32 as bytes [n, 74]."""
    found = _encoded(xp, x, grids.IQ2_XS, IQ2, 16, even=True)
    both = found.places.astype(xp.uint16) | (found.signs & xp.uint8(127)).astype(xp.uint16) << xp.uint16(9)
    return xp.concatenate([found.head, both.view(xp.uint8), packed(xp, found.small, 4, 1)], -1)


def to_iq2_s(xp: Any, x: Array) -> Array:
    """Encode blocks [n, 256] of f32 as bytes [n, 82]."""
    found = _encoded(xp, x, grids.IQ2_S, IQ2, 16, even=False)
    low, high = _apart(xp, found.places)
    rest = packed(xp, high, 2, 1), packed(xp, found.small, 4, 1)
    return xp.concatenate([found.head, low, found.signs, *rest], -1)


def to_iq3_xxs(xp: Any, x: Array) -> Array:
    """Encode blocks [n, 256] of f32 as bytes [n, 98]."""
    found = _encoded(xp, x, grids.IQ3_XXS, IQ3_XXS, 8, even=True)
    signs = _of_bits(xp, found.signs & xp.uint8(127), (0, 7, 14, 21), "uint32")
    words = signs | found.small.astype(xp.uint32) << xp.uint32(28)
    return xp.concatenate([found.head, found.places.astype(xp.uint8), words.view(xp.uint8)], -1)


def to_iq3_s(xp: Any, x: Array) -> Array:
    """Encode blocks [n, 256] of f32 as bytes [n, 110]."""
    found = _encoded(xp, x, grids.IQ3_S, IQ3_S, 8, even=False)
    low, high = _apart(xp, found.places)
    rest = packed(xp, high, 1, 1), found.signs, packed(xp, found.small, 4, 1)
    return xp.concatenate([found.head, low, *rest], -1)


def to_iq1_s(xp: Any, x: Array) -> Array:
    """Encode blocks [n, 256] of f32 as bytes [n, 50]."""
    found = _encoded_shifted(xp, x, 8, 4)
    low, high = _apart(xp, found.places)
    numbers = _of_bits(xp, high, (0, 3, 6, 9), "uint16") | found.small.astype(xp.uint16) << xp.uint16(12)
    numbers = numbers | found.signs[:, ::4].astype(xp.uint16) << xp.uint16(15)
    return xp.concatenate([found.head, low, numbers.view(xp.uint8)], -1)


def to_iq1_m(xp: Any, x: Array) -> Array:
    """Encode blocks [n, 256] of f32 as bytes [n, 56]."""
    found = _encoded_shifted(xp, x, 16, 1)
    low, high = _apart(xp, found.places)
    above = packed(xp, high | found.signs << xp.uint8(3), 4, 1)
    quarters = _bits(xp, _shorts(xp, found.head), (0, 4, 8, 12), 4) << xp.uint16(12)
    scales = _of_bits(xp, found.small, (0, 3, 6, 9), "uint16") | quarters
    return xp.concatenate([low, above, scales.view(xp.uint8)], -1)


def _apart(xp: Any, places: Array) -> tuple[Array, Array]:
    """Return the lowest eight bits of places, and those above."""
    return (places & 255).astype(xp.uint8), (places >> 8).astype(xp.uint8)
