"""Lanes of weights that are stored as f32, f16, bf16, or blocks of 32 elements; see `stored_lanes`.

Of each type a function that from the addresses of a unit in sixteen rows makes the lanes of its elements,
and of those without blocks one for a single element.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .lanes import F32_VECTOR, LANES, Lanes
from .stored_lanes import (
    PIECE_BYTES,
    chosen,
    constant,
    from_bfloat,
    from_half,
    halves_of_words,
    low_half,
    number,
    one_of_rows,
    power_and_quanta,
    shifted,
    short_columns,
    shorts_of_rows,
    shuffled,
    small_numbers,
    top_byte,
    words_of_rows,
)

#: Where the pieces of a line begin.
PIECES = range(0, 4 * PIECE_BYTES, PIECE_BYTES)


def f16(builder: Any, rows: Sequence[Any]) -> Iterator[Lanes]:
    """32 halves."""
    for shorts in (each for offset in PIECES for each in short_columns(builder, rows, offset)):
        for first in (0, LANES):
            yield from_half(builder, shuffled(builder, shorts, shorts, range(first, first + LANES)))


def bf16(builder: Any, rows: Sequence[Any]) -> Iterator[Lanes]:
    """32 upper halves of float32."""
    for words in (each for offset in PIECES for each in words_of_rows(builder, rows, offset)):
        yield Lanes.from_bits(builder, builder.shl(words, constant(16)))
        yield Lanes.from_bits(builder, builder.and_(words, constant(0xFFFF0000)))


def f32(builder: Any, rows: Sequence[Any]) -> Iterator[Lanes]:
    """16 float32."""
    for words in (each for offset in PIECES for each in words_of_rows(builder, rows, offset)):
        yield Lanes.from_bits(builder, words)


def single_f16(builder: Any, rows: Sequence[Any]) -> Lanes:
    """One half of each row."""
    return from_half(builder, shorts_of_rows(builder, rows, 0))


def single_bf16(builder: Any, rows: Sequence[Any]) -> Lanes:
    """One upper half of each row."""
    return from_bfloat(builder, shorts_of_rows(builder, rows, 0))


def single_f32(builder: Any, rows: Sequence[Any]) -> Lanes:
    """One float32 of each row."""
    return Lanes(builder, one_of_rows(builder, rows, 0, F32_VECTOR))


def q8_0(builder: Any, rows: Sequence[Any]) -> Iterator[Lanes]:
    """A scale and 32 signed bytes."""
    scale = from_half(builder, shorts_of_rows(builder, rows, 0)) * 2.0**-24
    for offset in (2, 2 + PIECE_BYTES):
        for words in words_of_rows(builder, rows, offset):
            for byte in range(4):
                yield number(builder, top_byte(builder, words, byte)) * scale


def q4_0(builder: Any, rows: Sequence[Any]) -> Iterator[Lanes]:
    """A scale and 32 nibbles, less 8.

    A multiply-add takes the power, and 8, away and multiplies: exact for bits 8, 12 and 16, since 13 bits
    times the scale's 11 fit. Two shifts bring all eight nibbles there. A scale that is not finite makes its
    whole block NaN.
    """
    scale = from_half(builder, shorts_of_rows(builder, rows, 0))
    bases = {bit: scale * -(2.0 ** (23 - bit) + 8.0) for bit in (8, 12, 16)}
    found = []
    for words in words_of_rows(builder, rows, 2):
        left, right = shifted(builder, words, -8), shifted(builder, words, 12)
        found.append(((left, 8), (words, 8), (words, 16), (right, 12)))
        found.append(((left, 12), (words, 12), (right, 8), (right, 16)))
    for places in found[0::2] + found[1::2]:
        for moved, bit in places:
            yield power_and_quanta(builder, moved, 4, bit).fma(scale, bases[bit])


def q4_1(builder: Any, rows: Sequence[Any]) -> Iterator[Lanes]:
    """A scale, the least value, and 32 nibbles."""
    scale, least = halves_of_words(builder, words_of_rows(builder, rows, 0)[0])
    quanta = words_of_rows(builder, rows, 4)
    for side in range(2):
        for words in quanta:
            for byte in range(4):
                moved = shifted(builder, words, 8 * byte + 4 * side)
                yield small_numbers(builder, moved, 4, 0).fma(scale, least)


def q5_0(builder: Any, rows: Sequence[Any]) -> Iterator[Lanes]:
    """A scale, 32 fifth bits and 32 nibbles, less 16."""
    first, second, *_ = words_of_rows(builder, rows, 0)
    scale = low_half(builder, first)
    fifth = builder.or_(shifted(builder, first, 16), shifted(builder, second, -16))
    for words in _fives(builder, rows, 6, fifth):
        for byte in range(4):
            yield small_numbers(builder, shifted(builder, words, 8 * byte), 5, 16) * scale


def q5_1(builder: Any, rows: Sequence[Any]) -> Iterator[Lanes]:
    """A scale, the least value, 32 fifth bits and 32 nibbles."""
    first, fifth, *_ = words_of_rows(builder, rows, 0)
    scale, least = halves_of_words(builder, first)
    for words in _fives(builder, rows, 8, fifth):
        for byte in range(4):
            yield small_numbers(builder, shifted(builder, words, 8 * byte), 5, 0).fma(scale, least)


def _fives(builder: Any, rows: Sequence[Any], offset: int, fifth: Any) -> Iterator[Any]:
    """Four quanta to a lane, each in the low five bits of its byte: nibbles from `offset`, and fifth bits.

    One multiplication spreads four bits over the fourth bits of four bytes: no two of its products meet.
    """
    nibbles = words_of_rows(builder, rows, offset)
    for side in range(2):
        for place, words in enumerate(nibbles):
            bits = builder.and_(shifted(builder, fifth, 16 * side + 4 * place), constant(15))
            spread = builder.mul(bits, constant(0x02040810))
            yield chosen(builder, 0x10101010, spread, shifted(builder, words, 4 * side))
