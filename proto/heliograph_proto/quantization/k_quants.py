"""Encoders of ggml's blocks of 256, in 8 or 16 parts with scales, bit for bit as ggml's reference.

The scale of each part is searched: several candidates are tried, and the one with the least error,
weighted by the elements' sizes, wins. A block's scales become integers of a few bits, and the
elements are rounded relative to these. Sums are in f32 and in element order, since the last bit
decides between candidates: so elements come first here, [elements, parts], and all parts are
computed at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy

Array = Any


def fields(blocks: Array, *sizes: int) -> list[Array]:
    """Split the bytes of blocks [n, sum(sizes)] into fields."""
    ends = numpy.cumsum(sizes)
    return [blocks[:, end - size : end] for size, end in zip(sizes, ends.tolist(), strict=True)]


def halves(xp: Any, field: Array) -> Array:
    """Convert bytes [n, 2 k] of f16 to f32 [n, k]."""
    return xp.ascontiguousarray(field).view(xp.float16).astype(xp.float32)


def half_bytes(xp: Any, scale: Array) -> Array:
    return scale.astype(xp.float16).view(xp.uint8)


def unpacked(xp: Any, packed: Array, width: int, run: int) -> Array:
    """Unpack bytes [n, m] of 8 / width numbers each to numbers [n, m * 8 / width].

    Within every `run` bytes, the lowest bits of each come first, then the next ones, and so on.
    """
    shifts = xp.arange(0, 8, width, dtype=xp.uint8)[:, None]
    numbers = packed.reshape(len(packed), -1, 1, run) >> shifts
    return (numbers & xp.uint8(2**width - 1)).reshape(len(packed), -1)


def packed(xp: Any, numbers: Array, width: int, run: int) -> Array:
    """The inverse of `unpacked`."""
    shifts = xp.arange(0, 8, width, dtype=xp.uint8)[:, None]
    parts = numbers.reshape(len(numbers), -1, 8 // width, run) << shifts
    return parts.sum(2, dtype=xp.uint8).reshape(len(numbers), -1)


BLOCK = 256
#: Parts with only smaller elements become zeros.
SMALLEST = numpy.float32(1e-15)
F32 = numpy.float32
#: Adding MAGIC to a float32 rounds it to an integer, halves to even, in its last 23 bits.
MAGIC, MAGIC_BITS, MAGIC_ZERO = F32(12582912), 0x7FFFFF, 0x400000


class BlockFit(NamedTuple):
    """The fit of elements by integers from 0, times a scale, minus an offset."""

    most: int
    """The largest integer."""
    first: float
    """The first candidate scale stretches the integers by this much."""
    steps: int
    """The number of further candidates, each a tenth more."""
    by_size: bool
    """True if errors count by their size, not by their square."""


def _nearest(x: Array) -> Array:
    """Round to int32."""
    return ((x + MAGIC).view(numpy.int32) & MAGIC_BITS) - MAGIC_ZERO


def clipped(xp: Any, x: Array, least: int, most: int) -> Array:
    """Round to integers in a range, as f32."""
    return xp.clip(_nearest(x), least, most).astype(F32)


def summed(terms: Array) -> Array:
    """Sum over elements, in their order."""
    total = terms[0].copy()
    for term in terms[1:]:
        total += term
    return total


def parts_of(xp: Any, x: Array, size: int) -> Array:
    """Reshape blocks [n, 256] to [size, n * parts]."""
    return xp.ascontiguousarray(x.reshape(-1, size).T)


def largest(xp: Any, x: Array, axis: int) -> Array:
    """Return the first element of the largest size."""
    place = xp.expand_dims(xp.abs(x).argmax(axis), axis)
    return xp.take_along_axis(x, place, axis).squeeze(axis)


def _by_part(numbers: Array, blocks: int) -> Array:
    """Reshape [elements, parts] to [n, parts of a block, elements]."""
    return numbers.T.reshape(blocks, -1, len(numbers))


def head_bytes(xp: Any, x: Array, scale: Array) -> Array:
    """Return the bytes of a block's scale; NaN if the block has an element that is not finite."""
    return half_bytes(xp, xp.where(xp.isfinite(x).all(-1), scale, F32("nan"))[:, None])


# Integers around zero: q3_k and q6_k


class _Around(NamedTuple):
    """Integers for the elements of parts, and the sums for a least squares fit of their scale."""

    numbers: Array
    products: Array
    squares: Array


def _around(xp: Any, x: Array, inverse: Array, half: int) -> _Around:
    """Round to -half .. half - 1, with errors weighted by the squares of the elements."""
    numbers, weights = clipped(xp, inverse * x, -half, half - 1), x * x
    return _Around(numbers, summed(weights * x * numbers), summed(weights * numbers * numbers))


def _ratio(xp: Any, dividend: Array, divisor: Array) -> Array:
    return xp.where(divisor > 0, dividend / divisor, F32(0))


def _search(xp: Any, x: Array, half: int) -> tuple[Array, Array]:
    """Return integers and scales of parts, the best of nineteen around the largest element's."""
    extreme = largest(xp, x, 0)
    found = _around(xp, x, F32(-half) / extreme, half)
    scale = _ratio(xp, found.products, found.squares)
    numbers, best = found.numbers, scale * found.products
    for step in (*range(-9, 0), *range(1, 10)):
        inverse = -(F32(half) + F32(0.1) * F32(step)) / extreme
        tried = _around(xp, x, inverse, half)
        better = (tried.squares > 0) & (tried.products * tried.products > best * tried.squares)
        numbers = xp.where(better, tried.numbers, numbers)
        scale = xp.where(better, tried.products / tried.squares, scale)
        best = xp.where(better, scale * tried.products, best)
    none = xp.abs(extreme) < SMALLEST
    return xp.where(none, F32(0), numbers + F32(half)), xp.where(none, F32(0), scale)


def _refine(xp: Any, x: Array, half: int) -> tuple[Array, Array]:
    """Return integers and scales of parts; five passes move integers where the fit improves."""
    extreme = largest(xp, x, 0)
    numbers, products, squares = _around(xp, x, F32(-half) / extreme, half)
    weights = x * x
    for place in (*range(len(x)),) * 5:
        value, weight, number = x[place], weights[place], numbers[place]
        without = products - weight * value * number
        rest = squares - weight * number * number
        moved = clipped(xp, value * rest / without, -half, half - 1)
        more, larger = without + weight * value * moved, rest + weight * moved * moved
        better = (without > 0) & (moved != number) & (larger > 0)
        better &= more * more * squares > products * products * larger
        numbers[place] = xp.where(better, moved, number)
        products, squares = xp.where(better, more, products), xp.where(better, larger, squares)
    none = xp.abs(extreme) < SMALLEST
    scale = xp.where(none, F32(0), _ratio(xp, products, squares))
    return xp.where(none, F32(0), numbers + F32(half)), scale


def _rounded_around(xp: Any, x: Array, numbers: Array, factor: Array, half: int) -> Array:
    """Round elements [n, parts, elements] by their factor; keep the numbers where it is 0."""
    wide = factor[..., None]
    found = clipped(xp, x.reshape(numbers.shape) / wide, -half, half - 1) + F32(half)
    return xp.where(wide == 0, numbers, found).reshape(len(x), BLOCK).astype(xp.uint8)


def stored_half(head: Array) -> Array:
    """Convert bytes of f16 to f32."""
    return head.view(numpy.float16).astype(F32)


def to_q3_k(xp: Any, x: Array) -> Array:
    """Encode blocks [n, 256] of f32 as bytes [n, 110]."""
    numbers, found = _refine(xp, parts_of(xp, x, 16), 4)
    found = found.reshape(len(x), -1)
    extreme = largest(xp, found, 1)
    inverse = xp.where(extreme == 0, F32(0), F32(-32) / extreme)
    head = head_bytes(xp, x, xp.where(extreme == 0, F32(0), F32(1) / inverse))
    scales = clipped(xp, inverse[:, None] * found, -32, 31)
    # A block without a scale has only zero bits.
    stored = xp.where(extreme[:, None] == 0, F32(0), scales + F32(32)).astype(xp.uint8)
    quanta = _rounded_around(xp, x, _by_part(numbers, len(x)), stored_half(head) * scales, 4)
    lower = packed(xp, stored & xp.uint8(15), 4, 8)
    upper = packed(xp, stored >> xp.uint8(4), 2, 4)
    high, low = packed(xp, quanta >> xp.uint8(2), 1, 32), packed(xp, quanta & xp.uint8(3), 2, 32)
    return xp.concatenate([high, low, lower, upper, head], -1)


def to_q6_k(xp: Any, x: Array) -> Array:
    """Encode blocks [n, 256] of f32 as bytes [n, 210]."""
    numbers, found = _search(xp, parts_of(xp, x, 16), 32)
    found = found.reshape(len(x), -1)
    extreme = largest(xp, found, 1)
    empty = xp.abs(extreme) < SMALLEST
    inverse = F32(-128) / extreme
    head = head_bytes(xp, x, xp.where(empty, F32(0), F32(1) / inverse))
    scales = xp.minimum(_nearest(inverse[:, None] * found), 127)
    scales = xp.where(empty[:, None], 0, scales).astype(xp.int8)
    quanta = _rounded_around(xp, x, _by_part(numbers, len(x)), stored_half(head) * scales.astype(F32), 32)
    quanta = xp.where(empty[:, None], xp.uint8(0), quanta)
    low, high = packed(xp, quanta & xp.uint8(15), 4, 64), packed(xp, quanta >> xp.uint8(4), 2, 32)
    return xp.concatenate([low, high, scales.view(xp.uint8), head], -1)


# Integers from an offset: q2_k, q4_k and q5_k


def _fitted(xp: Any, x: Array, weights: Array, fit: BlockFit) -> tuple[Array, Array, Array]:
    """Return integers, scales and subtracted offsets; each try starts from the best offset."""
    least, most = xp.minimum(x.min(0), F32(0)), x.max(0)
    total, weighted = summed(weights), summed(weights * x)
    inverse = F32(fit.most) / (most - least)
    scale, offset = F32(1) / inverse, least
    numbers = clipped(xp, inverse * (x - least), 0, fit.most)
    best = _error(xp, x, weights, numbers, scale, offset, fit)
    for step in range(fit.steps + 1):
        inverse = (F32(fit.first) + F32(0.1) * F32(step) + F32(fit.most)) / (most - offset)
        tried = clipped(xp, inverse * (x - offset), 0, fit.most)
        this_scale, this_offset, solved = _solved(xp, x, weights, tried, total, weighted)
        error = _error(xp, x, weights, tried, this_scale, this_offset, fit)
        better = solved & (error < best)
        numbers, best = xp.where(better, tried, numbers), xp.where(better, error, best)
        scale, offset = xp.where(better, this_scale, scale), xp.where(better, this_offset, offset)
    flat = most == least
    return xp.where(flat, F32(0), numbers), xp.where(flat, F32(0), scale), -xp.where(flat, least, offset)


def _solved(
    xp: Any, x: Array, weights: Array, numbers: Array, total: Array, weighted: Array
) -> tuple[Array, Array, Array]:
    """Return the least squares scale and offset (at most 0) of integers, and where they exist."""
    products = weights * numbers
    first, squares, mixed = summed(products), summed(products * numbers), summed(products * x)
    divisor = total * squares - first * first
    scale = (total * mixed - weighted * first) / divisor
    offset = (squares * weighted - first * mixed) / divisor
    above = offset > 0
    scale, offset = xp.where(above, mixed / squares, scale), xp.where(above, F32(0), offset)
    return scale, offset, divisor > 0


def _error(
    xp: Any, x: Array, weights: Array, numbers: Array, scale: Array, offset: Array, fit: BlockFit
) -> Array:
    difference = scale * numbers + offset - x
    return summed(weights * (xp.abs(difference) if fit.by_size else difference * difference))


def _scales_from(xp: Any, found: Array, most: int) -> tuple[Array, Array]:
    """Return integers up to `most` for scales [n, parts], and the block's scale of them [n]."""
    top = xp.maximum(found.max(1), F32(0))
    inverse = xp.where(top > 0, F32(most) / top, F32(0))
    numbers = xp.minimum(_nearest(inverse[:, None] * found).astype(xp.uint8), xp.uint8(most))
    return numbers, top / F32(most)


def _rounded_from(xp: Any, x: Array, numbers: Array, factor: Array, offset: Array, most: int) -> Array:
    """Round elements [n, parts, elements] by their factor; keep the numbers where it is 0."""
    wide = factor[..., None]
    found = clipped(xp, (x.reshape(numbers.shape) + offset[..., None]) / wide, 0, most)
    return xp.where(wide == 0, numbers, found).reshape(len(x), BLOCK).astype(xp.uint8)


class _From(NamedTuple):
    """The stored fields of blocks: the bytes of heads, scales and offsets of parts, and quanta."""

    scale: Array
    offset: Array
    scales: Array
    offsets: Array
    quanta: Array


def _from(xp: Any, x: Array, parts: Array, weights: Array, fit: BlockFit, most: int) -> _From:
    numbers, scales, offsets = _fitted(xp, parts, weights, fit)
    small, scale = _scales_from(xp, scales.reshape(len(x), -1), most)
    small_offsets, offset = _scales_from(xp, offsets.reshape(len(x), -1), most)
    heads = head_bytes(xp, x, scale), head_bytes(xp, x, offset)
    factor = stored_half(heads[0]) * small.astype(F32)
    taken = stored_half(heads[1]) * small_offsets.astype(F32)
    quanta = _rounded_from(xp, x, _by_part(numbers, len(x)), factor, taken, fit.most)
    return _From(*heads, small, small_offsets, quanta)


def to_q2_k(xp: Any, x: Array) -> Array:
    """Encode blocks [n, 256] of f32 as bytes [n, 84]."""
    parts = parts_of(xp, x, 16)
    found = _from(xp, x, parts, xp.abs(parts), BlockFit(3, -0.5, 15, by_size=True), 15)
    scales = found.scales | (found.offsets << xp.uint8(4))
    return xp.concatenate([scales, packed(xp, found.quanta, 2, 32), found.scale, found.offset], -1)


def _from_eight(xp: Any, x: Array, fit: BlockFit) -> tuple[Array, Array]:
    """Return the first 16 bytes of q4_k and q5_k, and the elements' quanta."""
    parts = parts_of(xp, x, 32)
    weights = xp.sqrt(summed(parts * parts) / F32(32)) + xp.abs(parts)
    found = _from(xp, x, parts, weights, fit, 63)
    own, late = zip(*((each[:, :4], each[:, 4:]) for each in (found.scales, found.offsets)), strict=True)
    above = [first | ((last >> xp.uint8(4)) << xp.uint8(6)) for first, last in zip(own, late, strict=True)]
    low = (late[0] & xp.uint8(15)) | ((late[1] & xp.uint8(15)) << xp.uint8(4))
    return xp.concatenate([found.scale, found.offset, *above, low], -1), found.quanta


def to_q4_k(xp: Any, x: Array) -> Array:
    """Encode blocks [n, 256] of f32 as bytes [n, 144]."""
    head, quanta = _from_eight(xp, x, BlockFit(15, -1.0, 20, by_size=False))
    return xp.concatenate([head, packed(xp, quanta, 4, 32)], -1)


def to_q5_k(xp: Any, x: Array) -> Array:
    """Encode blocks [n, 256] of f32 as bytes [n, 176]."""
    head, quanta = _from_eight(xp, x, BlockFit(31, -0.5, 15, by_size=False))
    fifth, nibbles = packed(xp, quanta >> xp.uint8(4), 1, 32), packed(xp, quanta & xp.uint8(15), 4, 32)
    return xp.concatenate([head, fifth, nibbles], -1)
