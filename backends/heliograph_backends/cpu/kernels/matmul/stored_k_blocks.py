"""Lanes of weights that are stored as blocks of 256 elements, in parts with scales of their own;
see `stored_words`.

A word has the lowest bits of several elements in its bytes, with the next bits above them or in
other words; a run of sixteen elements is in four words. Heads put the parts' factors and offsets on
the shelf.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from heliograph_backends.cpu.kernels.matmul.stored_lanes import (
    chosen,
    constant,
    everywhere,
    halves_of_words,
    number,
    power_and_quanta,
    shifted,
    small_numbers,
    turned,
)
from heliograph_backends.cpu.kernels.matmul.stored_readings import Half, Reading, bits_of, each_byte, total
from heliograph_backends.cpu.kernels.matmul.stored_words import Shelf
from heliograph_backends.cpu.kernels.vector.lanes import Lanes, integer, loop

#: Heads have the factors of 16 or 8 parts, then their offsets.
SIXTEEN, EIGHT = 16, 8


def _unsigned(builder: Any, words: Any, shift: int, mask: int) -> Lanes:
    return number(builder, builder.and_(shifted(builder, words, shift), constant(mask)))


def _turned_right(builder: Any, words: Any, bits: Any) -> Any:
    """Rotate lanes by an int64, which may be negative."""
    return turned(builder, words, words, everywhere(builder, builder.and_(bits, integer(31))))


def _quarters(builder: Any, run: Any) -> Any:
    """Return the first of the run's four words among the eight of a part's bytes: 0 or 4."""
    return bits_of(builder, run, 0, 1, 4)


def _q2_k_head(builder: Any, shelf: Shelf, heads: Shelf, _half: Half) -> None:
    """Factors and offsets of 16 parts, four bits each."""
    scale, least = halves_of_words(builder, shelf.words(20))
    with loop(builder, integer(0), integer(4), 1) as place:
        words = shelf.words(place)
        found = heads.from_on(builder.mul(place, integer(4)))
        for byte in range(4):
            found.put(byte, (_unsigned(builder, words, 8 * byte, 15) * scale).value)
            offset = _unsigned(builder, words, 8 * byte + 4, 15) * least
            found.put(SIXTEEN + byte, (-offset).value)


def _q2_k(builder: Any, shelf: Shelf, heads: Shelf, run: Any) -> Iterator[Lanes]:
    """Two bits: in each half of the block four runs of 32 elements are in the same bytes."""
    factor, offset = heads.lanes(run), heads.lanes(total(builder, run, SIXTEEN))
    for four in q2_k_words(builder, shelf, run):
        for moved in each_byte(builder, four):
            yield small_numbers(builder, moved, 2, 0).fma(factor, offset)


def q2_k_words(builder: Any, shelf: Shelf, run: Any) -> Iterator[Any]:
    """Yield words with a quantum in the low bits of each byte."""
    half = bits_of(builder, run, 3, 1, 8)
    words = shelf.from_on(total(builder, half, _quarters(builder, run), 4))
    shift = everywhere(builder, bits_of(builder, run, 1, 2, 2))
    for place in range(4):
        yield builder.lshr(words.words(place), shift)


def _q3_k_head(builder: Any, shelf: Shelf, heads: Shelf, half: Half) -> None:
    """Scales are four bits in the first two words and two above them in the third, less 32."""
    size = half()
    first, second, third = (shelf.words(place) for place in (24, 25, 26))
    for quad in range(4):
        own = shifted(builder, (first, second)[quad % 2], quad // 2 * 4)
        above = shifted(builder, third, 2 * quad - 4)
        both = builder.and_(chosen(builder, 0x30303030, above, own), constant(0x3F3F3F3F))
        for byte in range(4):
            factor = (_unsigned(builder, both, 8 * byte, 63) - 32.0) * size
            heads.put(4 * quad + byte, factor.value)


def _q3_k(builder: Any, shelf: Shelf, heads: Shelf, run: Any) -> Iterator[Lanes]:
    """Two bits and, from bit 4 * half + part / 2 of the first 32 bytes, a third; less 4."""
    factor = heads.lanes(run)
    for four in q3_k_words(builder, shelf, run):
        for moved in each_byte(builder, four):
            yield small_numbers(builder, moved, 3, 4) * factor


def q3_k_words(builder: Any, shelf: Shelf, run: Any) -> Iterator[Any]:
    """Yield words with a quantum in the low bits of each byte."""
    quarters, part = _quarters(builder, run), bits_of(builder, run, 1, 2)
    words = shelf.from_on(total(builder, bits_of(builder, run, 3, 1, 8), quarters, 8))
    high = shelf.from_on(quarters)
    shift = everywhere(builder, builder.mul(part, integer(2)))
    turn = total(builder, bits_of(builder, run, 3, 1, 4), part, -2)
    for place in range(4):
        third = _turned_right(builder, high.words(place), turn)
        yield chosen(builder, 0x04040404, third, builder.lshr(words.words(place), shift))


def _eight_scales(builder: Any, shelf: Shelf, heads: Shelf, _half: Half) -> None:
    """Factors and offsets of a block's eight parts.

    Each has six bits. Those of the last four parts are split: their low four bits are in the fourth
    word, the two above them are above the bits of the first four parts.
    """
    sizes = halves_of_words(builder, shelf.words(0))
    last = shelf.words(3)
    for kind, size in enumerate(sizes):
        own, low = shelf.words(1 + kind), shifted(builder, last, 4 * kind)
        late = chosen(builder, 0x0F0F0F0F, low, shifted(builder, own, 2))
        for quad, scales in enumerate((own, late)):
            for byte in range(4):
                scale = _unsigned(builder, scales, 8 * byte, 63) * size
                value = -scale if kind else scale
                heads.put(EIGHT * kind + 4 * quad + byte, value.value)


def _part(builder: Any, heads: Shelf, run: Any) -> tuple[Lanes, Lanes]:
    """Return a run's factor and offset."""
    part = bits_of(builder, run, 1, 3)
    factor, offset = (heads.lanes(total(builder, part, behind)) for behind in (0, EIGHT))
    return factor, offset


def _shifted_words(builder: Any, shelf: Shelf, run: Any, first: int) -> Iterator[Any]:
    """Yield words with a nibble in the low half of each byte."""
    quanta = shelf.from_on(total(builder, bits_of(builder, run, 2, 2, 8), _quarters(builder, run), first))
    shift = everywhere(builder, bits_of(builder, run, 1, 1, 4))
    for place in range(4):
        yield builder.lshr(quanta.words(place), shift)


def _q4_k(builder: Any, shelf: Shelf, heads: Shelf, run: Any) -> Iterator[Lanes]:
    """Two parts of 32 elements are the low and the high nibbles of 32 bytes."""
    factor, offset = _part(builder, heads, run)
    for four in q4_k_words(builder, shelf, run):
        for moved in each_byte(builder, four):
            yield small_numbers(builder, moved, 4, 0).fma(factor, offset)


def q4_k_words(builder: Any, shelf: Shelf, run: Any) -> Iterator[Any]:
    """Yield words with a quantum in the low bits of each byte."""
    return _shifted_words(builder, shelf, run, 4)


def _q5_k(builder: Any, shelf: Shelf, heads: Shelf, run: Any) -> Iterator[Lanes]:
    """As q4_k; the fifth bits of part i are bit i of the 32 bytes in front."""
    factor, offset = _part(builder, heads, run)
    for four in q5_k_words(builder, shelf, run):
        for moved in each_byte(builder, four):
            yield small_numbers(builder, moved, 5, 0).fma(factor, offset)


def q5_k_words(builder: Any, shelf: Shelf, run: Any) -> Iterator[Any]:
    """Yield words with a quantum in the low bits of each byte."""
    high = shelf.from_on(total(builder, _quarters(builder, run), 4))
    turn = total(builder, bits_of(builder, run, 1, 3), -4)
    for place, low in enumerate(_shifted_words(builder, shelf, run, 12)):
        fifth = _turned_right(builder, high.words(place), turn)
        yield chosen(builder, 0x10101010, fifth, low)


def _q6_k_head(builder: Any, shelf: Shelf, heads: Shelf, half: Half) -> None:
    """Factors of 16 parts, signed bytes."""
    size = half()
    with loop(builder, integer(0), integer(4), 1) as place:
        words = shelf.words(total(builder, place, 48))
        found = heads.from_on(builder.mul(place, integer(4)))
        for byte in range(4):
            signed = builder.ashr(shifted(builder, words, 8 * byte - 24), constant(24))
            found.put(byte, (number(builder, signed) * size).value)


def _q6_k(builder: Any, shelf: Shelf, heads: Shelf, run: Any) -> Iterator[Lanes]:
    """In each half of the block, four parts of 32 elements: nibbles with two bits above each; less
    32.

    Parts 0 and 1 are low nibbles, 2 and 3 high ones; part i has bits 2 i and 2 i + 1 of the other
    bytes. Quanta at bit 16 are added to 128; the sum of 128 and 32 times a factor, of 18 bits, is
    exact.
    """
    factor = heads.lanes(run)
    base = factor * -(128.0 + 32.0)
    for four in q6_k_words(builder, shelf, run):
        for byte in range(4):
            moved = shifted(builder, four, 8 * byte - 16)
            yield power_and_quanta(builder, moved, 6, 16).fma(factor, base)


def q6_k_words(builder: Any, shelf: Shelf, run: Any) -> Iterator[Any]:
    """Yield words with a quantum in the low bits of each byte."""
    quarters, part = _quarters(builder, run), bits_of(builder, run, 1, 2)
    lows = total(builder, bits_of(builder, run, 3, 1, 16), bits_of(builder, run, 1, 1, 8), quarters)
    low = shelf.from_on(lows)
    high = shelf.from_on(total(builder, bits_of(builder, run, 3, 1, 8), quarters, 32))
    shift = everywhere(builder, bits_of(builder, run, 2, 1, 4))
    turn = total(builder, builder.mul(part, integer(2)), -4)
    for place in range(4):
        above = _turned_right(builder, high.words(place), turn)
        yield chosen(builder, 0x0F0F0F0F, builder.lshr(low.words(place), shift), above)


Q2_K = Reading(256, 84, 21, 32, _q2_k, _q2_k_head)
Q3_K = Reading(256, 110, 27, 16, _q3_k, _q3_k_head, half_at=108)
Q4_K = Reading(256, 144, 36, 16, _q4_k, _eight_scales)
Q5_K = Reading(256, 176, 44, 16, _q5_k, _eight_scales)
Q6_K = Reading(256, 210, 52, 16, _q6_k, _q6_k_head, half_at=208)
