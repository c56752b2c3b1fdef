"""Lanes of weights that are stored as blocks of 256 elements, in parts with scales of their own; see
`stored_lanes`.

Of each type two functions. `head` reads, once for a block of sixteen rows, what all its units need: it
leaves on a shelf the parts' factors and offsets, and bits that belong to several units. `unit` makes the
lanes of one unit's elements, of which memory has the lowest bits of many bytes, then the next ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .lanes import I32, I32_VECTOR, Lanes, integer, splat
from .stored_lanes import (
    PIECE_BYTES,
    Shelf,
    chosen,
    constant,
    from_half,
    halves_of_words,
    number,
    power_and_quanta,
    shifted,
    shorts_of_rows,
    small_numbers,
    words_of_rows,
)

#: Of 16 parts the factors, and behind them offsets.
SIXTEEN = 16
#: Of 8 parts.
EIGHT = 8
#: Words of a lane that 32 bytes are.
WORDS = 8


def _moved(builder: Any, rows: Sequence[Any], index: Any, step: int) -> list[Any]:
    """The addresses `index` times `step` bytes further."""
    offset = builder.mul(index, integer(step))
    return [builder.add(row, offset) for row in rows]


def _words(builder: Any, rows: Sequence[Any], offset: int, pieces: int = 2) -> list[Any]:
    """The words of consecutive pieces of rows, 32 bytes unless told otherwise."""
    offsets = range(offset, offset + pieces * PIECE_BYTES, PIECE_BYTES)
    return [word for start in offsets for word in words_of_rows(builder, rows, start)]


def _unsigned(builder: Any, words: Any, shift: int, mask: int) -> Lanes:
    return number(builder, builder.and_(shifted(builder, words, shift), constant(mask)))


def _at(builder: Any, unit: Any, parts: int, part: int) -> Any:
    """The number of a unit's part in the block."""
    return builder.add(builder.mul(unit, integer(parts)), integer(part))


def _shifts(builder: Any, unit: Any, bits: int) -> Any:
    """Lanes of `bits` times the number of the unit."""
    return splat(builder, builder.trunc(builder.mul(unit, integer(bits)), I32), I32_VECTOR)


def q2_k_head(builder: Any, rows: Sequence[Any], shelf: Shelf) -> None:
    """Factors and offsets of 16 parts, four bits each."""
    scale, least = halves_of_words(builder, words_of_rows(builder, rows, 68)[3])
    for place, words in enumerate(words_of_rows(builder, rows, 0)):
        for byte in range(4):
            part = 4 * place + byte
            shelf.put(builder, part, (_unsigned(builder, words, 8 * byte, 15) * scale).value)
            offset = _unsigned(builder, words, 8 * byte + 4, 15) * least
            shelf.put(builder, SIXTEEN + part, offset.value)


def q2_k_unit(builder: Any, rows: Sequence[Any], half: Any, shelf: Shelf) -> Iterator[Lanes]:
    """Half a block: four runs of 32 elements, two bits each, with two factors and offsets."""
    quanta = _words(builder, _moved(builder, rows, half, 32), 16)
    for part in range(8):
        at = _at(builder, half, 8, part)
        factor = shelf.lanes(builder, at)
        offset = shelf.lanes(builder, builder.add(at, integer(SIXTEEN)))
        for words in quanta[4 * (part % 2) :][:4]:
            for byte in range(4):
                moved = shifted(builder, words, 8 * byte + part // 2 * 2)
                yield small_numbers(builder, moved, 2, 0).fma(factor, -offset)


def q3_k_head(builder: Any, rows: Sequence[Any], shelf: Shelf) -> None:
    """Scales are four bits in the first two words and two above them in the third, less 32."""
    size = from_half(builder, shorts_of_rows(builder, rows, 108))
    _, first, second, third = words_of_rows(builder, rows, 92)
    for quad in range(4):
        own = shifted(builder, (first, second)[quad % 2], quad // 2 * 4)
        above = shifted(builder, third, 2 * quad - 4)
        both = builder.and_(chosen(builder, 0x30303030, above, own), constant(0x3F3F3F3F))
        for byte in range(4):
            factor = (_unsigned(builder, both, 8 * byte, 63) - 32.0) * size
            shelf.put(builder, 4 * quad + byte, factor.value)
    for place, words in enumerate(_words(builder, rows, 0)):
        shelf.put(builder, SIXTEEN + place, words)


def q3_k_unit(builder: Any, rows: Sequence[Any], half: Any, shelf: Shelf) -> Iterator[Lanes]:
    """Two bits and, from bit 4 * half + part / 2 of the first 32 bytes, a third; less 4."""
    quanta = _words(builder, _moved(builder, rows, half, 32), 32)
    shifts = _shifts(builder, half, 4)
    high = [builder.lshr(shelf.words(builder, integer(SIXTEEN + place)), shifts) for place in range(WORDS)]
    for part in range(8):
        factor = shelf.lanes(builder, _at(builder, half, 8, part))
        run = part // 2
        for place in range(4 * (part % 2), 4 * (part % 2) + 4):
            low = shifted(builder, quanta[place], 2 * run)
            both = chosen(builder, 0x04040404, shifted(builder, high[place], run - 2), low)
            for byte in range(4):
                yield small_numbers(builder, shifted(builder, both, 8 * byte), 3, 4) * factor


def _eight_scales(builder: Any, rows: Sequence[Any], shelf: Shelf) -> None:
    """Factors and offsets of a block's eight parts: six bits each, those of the last four cut in two.

    In the third word are their low four bits; the two above those are above the ones of the first four.
    """
    head, *packed, third = words_of_rows(builder, rows, 0)
    for kind, (own, size) in enumerate(zip(packed, halves_of_words(builder, head), strict=True)):
        low = shifted(builder, third, 4 * kind)
        late = chosen(builder, 0x0F0F0F0F, low, shifted(builder, own, 2))
        for quad, words in enumerate((own, late)):
            for byte in range(4):
                scale = _unsigned(builder, words, 8 * byte, 63) * size
                shelf.put(builder, EIGHT * kind + 4 * quad + byte, scale.value)


def q4_k_head(builder: Any, rows: Sequence[Any], shelf: Shelf) -> None:
    """Factors and offsets of eight parts."""
    _eight_scales(builder, rows, shelf)


def q4_k_unit(builder: Any, rows: Sequence[Any], quarter: Any, shelf: Shelf) -> Iterator[Lanes]:
    """Two parts of 32 elements, the low and the high nibbles of 32 bytes."""
    quanta = _words(builder, _moved(builder, rows, quarter, 32), 16)
    for side in range(2):
        factor, offset = _factor_and_offset(builder, quarter, side, shelf)
        for words in quanta:
            for byte in range(4):
                moved = shifted(builder, words, 8 * byte + 4 * side)
                yield small_numbers(builder, moved, 4, 0).fma(factor, -offset)


def _factor_and_offset(builder: Any, quarter: Any, side: int, shelf: Shelf) -> tuple[Lanes, Lanes]:
    at = _at(builder, quarter, 2, side)
    return shelf.lanes(builder, at), shelf.lanes(builder, builder.add(at, integer(EIGHT)))


def q5_k_head(builder: Any, rows: Sequence[Any], shelf: Shelf) -> None:
    """As q4_k, and the fifth bits."""
    _eight_scales(builder, rows, shelf)
    for place, words in enumerate(_words(builder, rows, 16)):
        shelf.put(builder, 2 * EIGHT + place, words)


def q5_k_unit(builder: Any, rows: Sequence[Any], quarter: Any, shelf: Shelf) -> Iterator[Lanes]:
    """As q4_k; the fifth bit of a part is the bit of its number of the head's 32 bytes."""
    quanta = _words(builder, _moved(builder, rows, quarter, 32), 48)
    shifts = _shifts(builder, quarter, 2)
    fifth = [builder.lshr(shelf.words(builder, integer(2 * EIGHT + place)), shifts) for place in range(WORDS)]
    for side in range(2):
        factor, offset = _factor_and_offset(builder, quarter, side, shelf)
        for nibbles, bits in zip(quanta, fifth, strict=True):
            above = shifted(builder, bits, side - 4)
            both = chosen(builder, 0x10101010, above, shifted(builder, nibbles, 4 * side))
            for byte in range(4):
                moved = shifted(builder, both, 8 * byte)
                yield small_numbers(builder, moved, 5, 0).fma(factor, -offset)


def q6_k_head(builder: Any, rows: Sequence[Any], shelf: Shelf) -> None:
    """Factors of 16 parts, signed bytes."""
    size = from_half(builder, shorts_of_rows(builder, rows, 208))
    for place, words in enumerate(words_of_rows(builder, rows, 192)):
        for byte in range(4):
            signed = builder.ashr(shifted(builder, words, 8 * byte - 24), constant(24))
            shelf.put(builder, 4 * place + byte, (number(builder, signed) * size).value)


def q6_k_unit(builder: Any, rows: Sequence[Any], half: Any, shelf: Shelf) -> Iterator[Lanes]:
    """Four runs of 32 elements with two factors each: nibbles, and two bits above each; less 32.

    Runs 0 and 1 are low nibbles, 2 and 3 high ones; run i has bits 2 i and 2 i + 1 of the other bytes. At bit
    16 a number is added to 128; that and 32 times a factor, of 18 bits, is exact.
    """
    quanta = _words(builder, _moved(builder, rows, half, 64), 0, 4)
    high = _words(builder, _moved(builder, rows, half, 32), 128)
    for part in range(8):
        factor = shelf.lanes(builder, _at(builder, half, 8, part))
        base = factor * -(128.0 + 32.0)
        run = part // 2
        for place in range(4 * (part % 2), 4 * (part % 2) + 4):
            low = shifted(builder, quanta[WORDS * (run % 2) + place], run // 2 * 4)
            both = chosen(builder, 0x0F0F0F0F, low, shifted(builder, high[place], 2 * run - 4))
            for byte in range(4):
                moved = shifted(builder, both, 8 * byte - 16)
                yield power_and_quanta(builder, moved, 6, 16).fma(factor, base)
