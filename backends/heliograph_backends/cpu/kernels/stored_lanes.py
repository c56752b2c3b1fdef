"""From stored weights to float32 lanes: sixteen rows of weights, one after the other along k.

Every conversion is exact, or rounds where the definition's does, so the lanes are bit for bit the weights
that the definition dequantizes to.

Theory of operation. A lane stands for a row, while memory runs along k. So four bytes of each of sixteen
rows are brought into the sixteen lanes of one register: four registers are loaded with a piece of 16 bytes
from each row, four pieces to a register, and exchanged within their quarters (twelve insertions and eight
exchanges for 256 bytes). Four bytes are four quanta of eight bits, eight of four, or two halves. A
quantum moves to the top byte of its lane, which gives it its sign and 2**24 times its value; the block's
scale makes up for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llvmlite import ir

from .lanes import F32_VECTOR, I32, I32_VECTOR, LANES, Lanes, has_feature, integer, pointer, splat
from .stored_types import Stored

I8, I16 = ir.IntType(8), ir.IntType(16)
BYTES = ir.VectorType(I8, 4 * LANES)
SHORTS = ir.VectorType(I16, LANES)
SHORT_PAIRS = ir.VectorType(I16, 2 * LANES)
HALVES = ir.VectorType(ir.HalfType(), LANES)
PIECE = ir.VectorType(I32, 4)
PIECE_BYTES = 16


def _shuffle(builder: Any, first: Any, second: Any, order: Sequence[int]) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(order)), list(order)))


def _joined(builder: Any, parts: Sequence[Any]) -> Any:
    """Four pieces as one vector."""
    low, high = (_shuffle(builder, parts[at], parts[at + 1], range(8)) for at in (0, 2))
    return _shuffle(builder, low, high, range(LANES))


def _exchange(builder: Any, first: Any, second: Any, order: Sequence[int]) -> Any:
    """The same choice of four from two vectors, in each quarter; from 4 on it means the second."""
    places = [
        quarter + place if place < 4 else LANES + quarter + place - 4
        for quarter in range(0, LANES, 4)
        for place in order
    ]
    return _shuffle(builder, first, second, places)


def _quarters(builder: Any, rows: Sequence[Any], offset: int) -> list[Any]:
    """Return 16 bytes of each row; vector i has in its quarter j those of row 4 * j + i."""
    pieces = [
        builder.load(pointer(builder, builder.add(row, integer(offset)), PIECE), align=1) for row in rows
    ]
    return [_joined(builder, pieces[first::4]) for first in range(4)]


def words_of_rows(builder: Any, rows: Sequence[Any], offset: int) -> list[Any]:
    """Return four vectors: of each the lanes are one word of sixteen rows; the words follow each other."""
    a, b, c, d = _quarters(builder, rows, offset)
    low, high = (0, 4, 1, 5), (2, 6, 3, 7)
    first, third = _exchange(builder, a, b, low), _exchange(builder, a, b, high)
    second, fourth = _exchange(builder, c, d, low), _exchange(builder, c, d, high)
    low, high = (0, 1, 4, 5), (2, 3, 6, 7)
    pairs = ((first, second), (third, fourth))
    return [_exchange(builder, one, other, order) for one, other in pairs for order in (low, high)]


def short_columns(builder: Any, rows: Sequence[Any], offset: int) -> list[Any]:
    """Return four vectors of 32 shorts: one short of each of sixteen rows, then the next one of each."""
    a, b, c, d = (builder.bitcast(each, SHORT_PAIRS) for each in _quarters(builder, rows, offset))
    found = []
    for half in (0, 4):
        order = [
            quarter + half + place + side
            for quarter in range(0, 2 * LANES, 8)
            for place in range(4)
            for side in (0, 2 * LANES)
        ]
        left, right = (
            builder.bitcast(_shuffle(builder, *pair, order), I32_VECTOR) for pair in ((a, b), (c, d))
        )
        for word in (0, 2):
            order = [
                quarter + word + second + side
                for second in (0, 1)
                for quarter in range(0, LANES, 4)
                for side in (0, LANES)
            ]
            found.append(builder.bitcast(_shuffle(builder, left, right, order), SHORT_PAIRS))
    return found


def _constant(value: int) -> ir.Constant:
    return ir.Constant(I32_VECTOR, [value] * LANES)


def _top_byte(builder: Any, words: Any, byte: int) -> Any:
    """Return byte 0 to 3 of each lane as its top byte, above zeros."""
    zeros = ir.Constant(BYTES, [0] * (4 * LANES))
    none = 4 * LANES
    order = [place for lane in range(LANES) for place in (none, none, none, 4 * lane + byte)]
    moved = _shuffle(builder, builder.bitcast(words, BYTES), zeros, order)
    return builder.bitcast(moved, I32_VECTOR)


def _number(builder: Any, integers: Any) -> Lanes:
    return Lanes(builder, builder.sitofp(integers, F32_VECTOR))


def shorts_of_rows(builder: Any, rows: Sequence[Any], offset: int) -> Any:
    """Return the lanes of sixteen bits at `offset` of each row."""
    found: Any = ir.Constant(SHORTS, ir.Undefined)
    for lane, row in enumerate(rows):
        short = builder.load(pointer(builder, builder.add(row, integer(offset)), I16), align=1)
        found = builder.insert_element(found, short, ir.Constant(I32, lane))
    return found


def from_half(builder: Any, shorts: Any) -> Lanes:
    """Return the lanes of sixteen f16."""
    if builder.module.triple.startswith("x86_64") and not has_feature("f16c"):
        return half_by_hand(builder, shorts)
    return Lanes(builder, builder.fpext(builder.bitcast(shorts, HALVES), F32_VECTOR))


def half_by_hand(builder: Any, shorts: Any) -> Lanes:
    """Without an instruction for it LLVM would call a function that may not be there.

    An f16's exponent and digits in an f32's places are 2**-112 of it, but for infinities and NaN.
    """
    bits = builder.zext(shorts, I32_VECTOR)
    size = builder.shl(builder.and_(bits, _constant(0x7FFF)), _constant(13))
    scaled = (Lanes.from_bits(builder, size) * 2.0**112).bits()
    special = builder.icmp_unsigned(">=", size, _constant(0x7C00 << 13))
    found = builder.select(special, builder.or_(size, _constant(0x7F800000)), scaled)
    sign = builder.shl(builder.and_(bits, _constant(0x8000)), _constant(16))
    return Lanes.from_bits(builder, builder.or_(found, sign))


def from_bfloat(builder: Any, shorts: Any) -> Lanes:
    """Return the lanes of sixteen bf16."""
    return Lanes.from_bits(builder, builder.shl(builder.zext(shorts, I32_VECTOR), _constant(16)))


def _quanta(builder: Any, words: Any, scale: Lanes) -> Iterator[Lanes]:
    """The four signed bytes of each lane times 2**24 * scale."""
    for byte in range(4):
        yield _number(builder, _top_byte(builder, words, byte)) * scale


def _f16(builder: Any, rows: Sequence[Any], _: Any) -> Iterator[Lanes]:
    for shorts in short_columns(builder, rows, 0):
        for first in (0, LANES):
            yield from_half(builder, _shuffle(builder, shorts, shorts, range(first, first + LANES)))


def _bf16(builder: Any, rows: Sequence[Any], _: Any) -> Iterator[Lanes]:
    for words in words_of_rows(builder, rows, 0):
        yield Lanes.from_bits(builder, builder.shl(words, _constant(16)))
        yield Lanes.from_bits(builder, builder.and_(words, _constant(0xFFFF0000)))


def _q8_0(builder: Any, rows: Sequence[Any], _: Any) -> Iterator[Lanes]:
    scale = from_half(builder, shorts_of_rows(builder, rows, 0)) * 2.0**-24
    for offset in (2, 2 + PIECE_BYTES):
        for words in words_of_rows(builder, rows, offset):
            yield from _quanta(builder, words, scale)


def _q4_0(builder: Any, rows: Sequence[Any], _: Any) -> Iterator[Lanes]:
    """A nibble at bit p of a float32 whose exponent says 2**(23 - p) adds itself to that power.

    One multiply-add takes the power away, and 8, and multiplies: exact for bits 8, 12 and 16, since 13 bits
    times the scale's 11 fit. Two shifts bring all eight nibbles there. A scale that is not finite makes its
    whole block NaN.
    """
    scale = from_half(builder, shorts_of_rows(builder, rows, 0))
    bases = {bit: scale * -(2.0 ** (23 - bit) + 8.0) for bit in (8, 12, 16)}
    found = []
    for words in words_of_rows(builder, rows, 2):
        left, right = builder.shl(words, _constant(8)), builder.lshr(words, _constant(12))
        found.append(((left, 8), (words, 8), (words, 16), (right, 12)))
        found.append(((left, 12), (words, 12), (right, 8), (right, 16)))
    for places in found[0::2] + found[1::2]:
        for moved, bit in places:
            nibble = builder.and_(moved, _constant(15 << bit))
            number = builder.or_(nibble, _constant((127 + 23 - bit) << 23))
            yield Lanes.from_bits(builder, number).fma(scale, bases[bit])


def _q4_k(builder: Any, rows: Sequence[Any], quarter: Any) -> Iterator[Lanes]:
    """Two parts of 32 elements, the low and the high nibbles of 32 bytes."""
    head, *packed = words_of_rows(builder, rows, 0)
    scale = from_half(builder, builder.trunc(head, SHORTS)) * 2.0**-24
    least = from_half(builder, builder.trunc(builder.lshr(head, _constant(16)), SHORTS))
    bits = _six_bits(builder, packed, quarter)
    moved = [builder.add(row, builder.mul(quarter, integer(2 * PIECE_BYTES))) for row in rows]
    quanta = [word for piece in (1, 2) for word in words_of_rows(builder, moved, piece * PIECE_BYTES)]
    for part in range(2):
        factor, offset = (
            _number(builder, builder.and_(builder.lshr(each, _constant(8 * part)), _constant(63))) * size
            for each, size in zip(bits, (scale, least), strict=True)
        )
        for words in quanta:
            nibbles = builder.and_(builder.lshr(words, _constant(4 * part)), _constant(0x0F0F0F0F))
            for byte in range(4):
                yield _number(builder, _top_byte(builder, nibbles, byte)).fma(factor, -offset)


def _six_bits(builder: Any, packed: Sequence[Any], quarter: Any) -> list[Any]:
    """The scales and the offsets of a quarter's two parts, in the low six bits of the lowest two bytes.

    Those of the second half of a block are cut: four bits in the third word, two above those of the first.
    """
    late = builder.icmp_signed(">=", quarter, integer(2))
    shift = builder.mul(builder.and_(quarter, integer(1)), integer(16))
    shifts = splat(builder, builder.trunc(shift, I32), I32_VECTOR)
    found = []
    for own, side in ((packed[0], 0), (packed[1], 4)):
        low = builder.and_(builder.lshr(packed[2], _constant(side)), _constant(0x0F0F0F0F))
        high = builder.and_(builder.lshr(own, _constant(2)), _constant(0x30303030))
        found.append(builder.lshr(builder.select(late, builder.or_(low, high), own), shifts))
    return found


def _q6_k(builder: Any, rows: Sequence[Any], part: Any) -> Iterator[Lanes]:
    """32 elements with two scales: nibbles, and two bits above each.

    Of half a block, parts 0 and 1 are low nibbles, 2 and 3 high ones; part i has bits 2 i and 2 i + 1.
    """
    half, place = builder.lshr(part, integer(2)), builder.and_(part, integer(3))
    side = builder.and_(place, integer(1))
    low_at = builder.add(builder.mul(half, integer(64)), builder.mul(side, integer(32)))
    high_at = builder.add(builder.mul(half, integer(32)), integer(128))
    shifts = [
        splat(builder, builder.trunc(shift, I32), I32_VECTOR)
        for shift in (
            builder.mul(builder.lshr(place, integer(1)), integer(4)),
            builder.mul(place, integer(2)),
        )
    ]
    size = from_half(builder, shorts_of_rows(builder, rows, 208)) * 2.0**-26
    scale_at = builder.mul(part, integer(2))
    scales = shorts_of_rows(builder, [builder.add(row, scale_at) for row in rows], 192)
    low_rows, high_rows = ([builder.add(row, at) for row in rows] for at in (low_at, high_at))
    for piece in range(2):
        moved = builder.shl(builder.zext(scales, I32_VECTOR), _constant(24 - 8 * piece))
        factor = _number(builder, builder.ashr(moved, _constant(24))) * size
        pairs = zip(
            words_of_rows(builder, low_rows, piece * PIECE_BYTES),
            words_of_rows(builder, high_rows, piece * PIECE_BYTES),
            strict=True,
        )
        for low, high in pairs:
            nibbles = builder.and_(builder.lshr(low, shifts[0]), _constant(0x0F0F0F0F))
            above = builder.and_(builder.lshr(high, shifts[1]), _constant(0x03030303))
            both = builder.or_(builder.shl(nibbles, _constant(2)), builder.shl(above, _constant(6)))
            yield from _quanta(builder, builder.xor(both, _constant(0x80808080)), factor)


#: From the addresses of a block in sixteen rows, and the number of a unit in it, the lanes of its elements.
UNITS: dict[Stored, Callable[[Any, Sequence[Any], Any], Iterator[Lanes]]] = {
    Stored.F16: _f16,
    Stored.BF16: _bf16,
    Stored.Q8_0: _q8_0,
    Stored.Q4_0: _q4_0,
    Stored.Q4_K: _q4_k,
    Stored.Q6_K: _q6_k,
}
#: Of types whose blocks are single elements, which may be fewer than a unit at a row's end.
SINGLES: dict[Stored, Callable[[Any, Any], Lanes]] = {Stored.F16: from_half, Stored.BF16: from_bfloat}
