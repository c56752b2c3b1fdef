"""From stored weights to float32 lanes: sixteen rows of weights, one after the other along k.

Every conversion is exact, or rounds where the definition's does, so the lanes are bit for bit the weights
that the definition dequantizes to.

Theory of operation. A lane stands for a row, while memory runs along k. So four bytes of each of sixteen
rows are brought into the sixteen lanes of one register: four registers are loaded with a piece of 16 bytes
from each row, four pieces to a register, and exchanged within their quarters (twelve insertions and eight
exchanges for 256 bytes). Four bytes are four quanta of eight bits, eight of four, or two halves.

A quantum becomes a float32 in one of three ways, whichever takes the fewest instructions: `small_numbers`
looks up to five bits up in a table; `power_and_quanta` leaves a quantum in the digits of a power of two that
the next multiply-add takes away; `top_byte` and a conversion give it its sign and 2**24 times its value,
for which the block's scale makes up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from .lanes import (
    F32_VECTOR,
    I32,
    I32_VECTOR,
    LANES,
    Lanes,
    has_feature,
    integer,
    intrinsic_function,
    local,
    pointer,
)

I8, I16 = ir.IntType(8), ir.IntType(16)
BYTES = ir.VectorType(I8, 4 * LANES)
SHORTS = ir.VectorType(I16, LANES)
SHORT_PAIRS = ir.VectorType(I16, 2 * LANES)
HALVES = ir.VectorType(ir.HalfType(), LANES)
PIECE = ir.VectorType(I32, 4)
PIECE_BYTES = 16


def shuffled(builder: Any, first: Any, second: Any, order: Sequence[int]) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(order)), list(order)))


def _joined(builder: Any, parts: Sequence[Any]) -> Any:
    """Four pieces as one vector."""
    low, high = (shuffled(builder, parts[at], parts[at + 1], range(8)) for at in (0, 2))
    return shuffled(builder, low, high, range(LANES))


def _exchange(builder: Any, first: Any, second: Any, order: Sequence[int]) -> Any:
    """The same choice of four from two vectors, in each quarter; from 4 on it means the second."""
    places = [
        quarter + place if place < 4 else LANES + quarter + place - 4
        for quarter in range(0, LANES, 4)
        for place in order
    ]
    return shuffled(builder, first, second, places)


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
            builder.bitcast(shuffled(builder, *pair, order), I32_VECTOR) for pair in ((a, b), (c, d))
        )
        for word in (0, 2):
            order = [
                quarter + word + second + side
                for second in (0, 1)
                for quarter in range(0, LANES, 4)
                for side in (0, LANES)
            ]
            found.append(builder.bitcast(shuffled(builder, left, right, order), SHORT_PAIRS))
    return found


def constant(value: int) -> ir.Constant:
    return ir.Constant(I32_VECTOR, [value] * LANES)


def top_byte(builder: Any, words: Any, byte: int) -> Any:
    """Return byte 0 to 3 of each lane as its top byte, above zeros."""
    zeros = ir.Constant(BYTES, [0] * (4 * LANES))
    none = 4 * LANES
    order = [place for lane in range(LANES) for place in (none, none, none, 4 * lane + byte)]
    moved = shuffled(builder, builder.bitcast(words, BYTES), zeros, order)
    return builder.bitcast(moved, I32_VECTOR)


def number(builder: Any, integers: Any) -> Lanes:
    return Lanes(builder, builder.sitofp(integers, F32_VECTOR))


def one_of_rows(builder: Any, rows: Sequence[Any], offset: int, kind: Any) -> Any:
    """Return a vector of this kind of what is at `offset` of each row."""
    found: Any = ir.Constant(kind, ir.Undefined)
    for lane, row in enumerate(rows):
        place = pointer(builder, builder.add(row, integer(offset)), kind.element)
        found = builder.insert_element(found, builder.load(place, align=1), ir.Constant(I32, lane))
    return found


def shorts_of_rows(builder: Any, rows: Sequence[Any], offset: int) -> Any:
    """Return the lanes of sixteen bits at `offset` of each row."""
    return one_of_rows(builder, rows, offset, SHORTS)


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
    size = builder.shl(builder.and_(bits, constant(0x7FFF)), constant(13))
    scaled = (Lanes.from_bits(builder, size) * 2.0**112).bits()
    special = builder.icmp_unsigned(">=", size, constant(0x7C00 << 13))
    found = builder.select(special, builder.or_(size, constant(0x7F800000)), scaled)
    sign = builder.shl(builder.and_(bits, constant(0x8000)), constant(16))
    return Lanes.from_bits(builder, builder.or_(found, sign))


def low_half(builder: Any, words: Any) -> Lanes:
    """Return the f16 in the low half of each lane."""
    return from_half(builder, builder.trunc(words, SHORTS))


def halves_of_words(builder: Any, words: Any) -> tuple[Lanes, Lanes]:
    """Return the f16 in the low and in the high half of each lane."""
    return low_half(builder, words), low_half(builder, shifted(builder, words, 16))


def from_bfloat(builder: Any, shorts: Any) -> Lanes:
    """Return the lanes of sixteen bf16."""
    return Lanes.from_bits(builder, builder.shl(builder.zext(shorts, I32_VECTOR), constant(16)))


class Shelf:
    """Vectors of float32 or int32 in the function's stack, numbered at run time."""

    def __init__(self, builder: Any, size: int) -> None:
        self._vectors = local(builder, ir.ArrayType(F32_VECTOR, max(1, size)))

    def _place(self, builder: Any, index: Any) -> Any:
        return builder.gep(self._vectors, [integer(0), index], inbounds=True)

    def put(self, builder: Any, index: int, value: Any) -> None:
        """Store a vector as number `index`."""
        builder.store(builder.bitcast(value, F32_VECTOR), self._place(builder, integer(index)))

    def lanes(self, builder: Any, index: Any) -> Lanes:
        """Return the float32 vector of number `index`, an int64."""
        return Lanes(builder, builder.load(self._place(builder, index)))

    def words(self, builder: Any, index: Any) -> Any:
        """Return the int32 vector of number `index`, an int64."""
        return self.lanes(builder, index).bits()


def small_numbers(builder: Any, words: Any, bits: int, zero: int) -> Lanes:
    """Return the lowest bits of each lane, five at most, less `zero`; what is above them does not matter."""
    if not has_feature("avx512f"):
        low = builder.and_(words, constant(2**bits - 1))
        return number(builder, builder.sub(low, constant(zero)) if zero else low)
    tables = [
        ir.Constant(F32_VECTOR, [float((first + lane) % 2**bits - zero) for lane in range(LANES)])
        for first in ((0, LANES) if bits > 4 else (0,))
    ]
    if len(tables) == 1:
        name, arguments = "permvar.sf.512", [tables[0], words]
    else:
        name, arguments = "vpermi2var.ps.512", [tables[0], words, tables[1]]
    kinds = [each.type for each in arguments]
    function = intrinsic_function(builder, f"llvm.x86.avx512.{name}", F32_VECTOR, *kinds)
    return Lanes(builder, builder.call(function, arguments))


def power_and_quanta(builder: Any, words: Any, bits: int, place: int) -> Lanes:
    """Return 2**(23 - place) plus the `bits` bits of each lane from bit `place` on.

    They are digits of a float32 with that exponent: place + bits <= 23.
    """
    quanta = builder.and_(words, constant((2**bits - 1) << place))
    return Lanes.from_bits(builder, builder.or_(quanta, constant((127 + 23 - place) << 23)))


def shifted(builder: Any, words: Any, right: int) -> Any:
    """Return the lanes `right` bits further right, or left where that is negative."""
    if right == 0:
        return words
    move = builder.lshr if right > 0 else builder.shl
    return move(words, constant(abs(right)))


def chosen(builder: Any, mask: int, yes: Any, no: Any) -> Any:
    """Return of each lane the bits of `mask` from `yes`, the others from `no`."""
    return builder.or_(builder.and_(yes, constant(mask)), builder.and_(no, constant(~mask & 0xFFFFFFFF)))
