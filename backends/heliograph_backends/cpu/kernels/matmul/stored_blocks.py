"""Lanes of weights that are stored as f32, f16, bf16, or blocks of up to 128 elements that share a
scale; see `stored_words`.

Each type has a `Reading`. Blocks of 18, 22 and 34 bytes are read in pairs: the quanta of the first
one are not aligned to words, so the head shifts them by half a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from heliograph_backends.cpu.kernels.matmul.stored_lanes import (
    SHORTS,
    chosen,
    constant,
    everywhere,
    from_half,
    halves_of_words,
    low_half,
    number,
    shifted,
    small_numbers,
    top_byte,
    turned,
)
from heliograph_backends.cpu.kernels.matmul.stored_readings import Half, Reading, bits_of, each_byte, total
from heliograph_backends.cpu.kernels.matmul.stored_words import (
    LINE_BYTES,
    PIECE_BYTES,
    VECTOR_BYTES,
    Shelf,
    transpose_shorts,
)
from heliograph_backends.cpu.kernels.vector.lanes import I64, LANES, Lanes, integer, loop, pointer, subroutine

#: Blocks of 32 elements that are read at a time.
BLOCKS = 8
#: Makes the lanes of a run of a block from its words, its factors, and the number of the run, in the
#: lowest bits.
Convert: TypeAlias = Callable[[Any, Shelf, Sequence[Lanes], Any], Iterator[Lanes]]


def _f32(builder: Any, shelf: Shelf, _heads: Shelf, run: Any) -> Iterator[Lanes]:
    words = shelf.from_on(builder.mul(run, integer(16)))
    for place in range(16):
        yield words.lanes(place)


def _f16(builder: Any, shelf: Shelf, _heads: Shelf, run: Any) -> Iterator[Lanes]:
    words = shelf.from_on(builder.mul(run, integer(8)))
    for place in range(8):
        yield from halves_of_words(builder, words.words(place))


def _f16_of_shorts(builder: Any, shelf: Shelf, _heads: Shelf, run: Any) -> Iterator[Lanes]:
    """Read f16 from a shelf of shorts, see `transpose_shorts`; a conversion reads sixteen in a
    row."""
    shorts = shelf.from_on(builder.mul(run, integer(8))).address
    for element in range(16):
        place = builder.add(
            shorts, integer(VECTOR_BYTES * (element % 8) + VECTOR_BYTES // 2 * (element // 8))
        )
        yield from_half(builder, builder.load(pointer(builder, place, SHORTS), align=VECTOR_BYTES // 2))


def _bf16(builder: Any, shelf: Shelf, _heads: Shelf, run: Any) -> Iterator[Lanes]:
    words = shelf.from_on(builder.mul(run, integer(8)))
    for place in range(8):
        both = words.words(place)
        yield Lanes.from_bits(builder, builder.shl(both, constant(16)))
        yield Lanes.from_bits(builder, builder.and_(both, constant(0xFFFF0000)))


# Blocks


def _align(builder: Any, shelf: Any, words: Any, scales: Any) -> None:
    with loop(builder, integer(0), integer(BLOCKS // 2), 1) as pair:
        size = builder.add(builder.mul(words, integer(2)), integer(1))
        own = Shelf(builder, shelf).from_on(builder.mul(pair, size))
        found = Shelf(builder, shelf).from_on(builder.add(scales, builder.mul(pair, integer(2))))
        found.put(0, low_half(builder, own.words(0)).value)
        middle = own.words(words)
        found.put(1, low_half(builder, shifted(builder, middle, 16)).value)
        with loop(builder, integer(0), words, 1) as place:
            here = own.from_on(place)
            here.put(0, turned(builder, here.words(0), here.words(1), constant(16)))


def of_pairs(words: int, convert: Convert, size: int = 32) -> Reading:
    """Return the reading of blocks of a scale and words, with 2**n runs. The head aligns the first
    block of each pair and makes the scales."""
    runs = (size // LANES).bit_length() - 1
    all_words = BLOCKS // 2 * (2 * words + 1)

    def head(builder: Any, shelf: Shelf, heads: Shelf, _half: Half) -> None:
        function = subroutine(builder, "align_pairs", (I64,) * 3, _align)
        builder.call(function, [shelf.address, integer(words), integer(all_words)])

    def run(builder: Any, shelf: Shelf, heads: Shelf, run: Any) -> Iterator[Lanes]:
        pair = bits_of(builder, run, runs + 1, 2, 2 * words + 1)
        second = bits_of(builder, run, runs, 1, words + 1)
        scale = heads.lanes(bits_of(builder, run, runs, 3))
        return convert(builder, shelf.from_on(total(builder, pair, second)), [scale], run)

    return Reading(BLOCKS * size, BLOCKS * (4 * words + 2), all_words, BLOCKS, run, head)


def _wholes(words: int, convert: Convert) -> Reading:
    """Return the reading of blocks of words, the first of which has the scale and the least value.
    The head makes both."""

    def head(builder: Any, shelf: Shelf, heads: Shelf, _half: Half) -> None:
        with loop(builder, integer(0), integer(BLOCKS), 1) as block:
            first = shelf.words(builder.mul(block, integer(words)))
            for place, half in enumerate(halves_of_words(builder, first)):
                heads.put(total(builder, block, BLOCKS * place), half.value)

    def run(builder: Any, shelf: Shelf, heads: Shelf, run: Any) -> Iterator[Lanes]:
        block = bits_of(builder, run, 1, 3)
        factors = [heads.lanes(total(builder, block, BLOCKS * place)) for place in (0, 1)]
        return convert(
            builder, shelf.from_on(total(builder, builder.mul(block, integer(words)), 1)), factors, run
        )

    return Reading(256, BLOCKS * 4 * words, BLOCKS * words, 2 * BLOCKS, run, head)


def nibbles(builder: Any, words: Shelf, first: int, run: Any) -> Iterator[Any]:
    """Yield words with the run's nibbles in the low half of each byte: first all low ones, then the
    high."""
    shift = everywhere(builder, bits_of(builder, run, 0, 1, 4))
    for place in range(first, first + 4):
        yield builder.lshr(words.words(place), shift)


def q8_0(builder: Any, words: Shelf, factors: Sequence[Lanes], run: Any) -> Iterator[Lanes]:
    """Signed bytes."""
    scale = factors[0] * 2.0**-24
    words = words.from_on(bits_of(builder, run, 0, 1, 4))
    for place in range(4):
        for byte in range(4):
            yield number(builder, top_byte(builder, words.words(place), byte)) * scale


def q4_0(builder: Any, words: Shelf, factors: Sequence[Lanes], run: Any) -> Iterator[Lanes]:
    """Nibbles, less 8."""
    for four in nibbles(builder, words, 0, run):
        for moved in each_byte(builder, four):
            yield small_numbers(builder, moved, 4, 8) * factors[0]


def q4_1(builder: Any, words: Shelf, factors: Sequence[Lanes], run: Any) -> Iterator[Lanes]:
    """Nibbles above the least value."""
    for four in nibbles(builder, words, 0, run):
        for moved in each_byte(builder, four):
            yield small_numbers(builder, moved, 4, 0).fma(*factors)


def q5_0(builder: Any, words: Shelf, factors: Sequence[Lanes], run: Any) -> Iterator[Lanes]:
    """A word of fifth bits, and nibbles; less 16."""
    for four in fives(builder, words, run):
        for moved in each_byte(builder, four):
            yield small_numbers(builder, moved, 5, 16) * factors[0]


def q5_1(builder: Any, words: Shelf, factors: Sequence[Lanes], run: Any) -> Iterator[Lanes]:
    """A word of fifth bits, and nibbles, above the least value."""
    for four in fives(builder, words, run):
        for moved in each_byte(builder, four):
            yield small_numbers(builder, moved, 5, 0).fma(*factors)


def fives(builder: Any, block: Shelf, run: Any) -> Iterator[Any]:
    """Yield four quanta per lane, each in the low five bits of its byte.

    One multiplication spreads four bits over bit 4 of four bytes; its partial products do not
    overlap.
    """
    fifth = builder.lshr(block.words(0), everywhere(builder, bits_of(builder, run, 0, 1, 16)))
    for place, low in enumerate(nibbles(builder, block, 1, run)):
        bits = builder.and_(shifted(builder, fifth, 4 * place), constant(15))
        yield chosen(builder, 0x10101010, builder.mul(bits, constant(0x02040810)), low)


def q1_0(builder: Any, words: Shelf, factors: Sequence[Lanes], run: Any) -> Iterator[Lanes]:
    """Bits: the scale if one is set, else its opposite. A word has two runs."""
    shift = everywhere(builder, bits_of(builder, run, 0, 1, LANES))
    own = builder.lshr(builder.not_(words.words(bits_of(builder, run, 1, 2))), shift)
    for place in range(LANES):
        sign = builder.and_(shifted(builder, own, place - 31), constant(0x80000000))
        yield Lanes.from_bits(builder, builder.xor(factors[0].bits(), sign))


def q2_0(builder: Any, words: Shelf, factors: Sequence[Lanes], run: Any) -> Iterator[Lanes]:
    """Two bits, less 1. A word is a run."""
    own = words.words(bits_of(builder, run, 0, 2))
    for place in range(LANES):
        yield small_numbers(builder, shifted(builder, own, 2 * place), 2, 1) * factors[0]


def _q8_k_head(_builder: Any, shelf: Shelf, heads: Shelf, _half: Half) -> None:
    heads.put(0, shelf.words(0))


def _q8_k(builder: Any, shelf: Shelf, heads: Shelf, run: Any) -> Iterator[Lanes]:
    """Signed bytes; the scale may be as small as any float."""
    scale = heads.lanes(0)
    words = shelf.from_on(total(builder, builder.mul(run, integer(4)), 1))
    for place in range(4):
        for byte in range(4):
            signed = builder.ashr(shifted(builder, words.words(place), 8 * byte - 24), constant(24))
            yield number(builder, signed) * scale


F32 = Reading(64, 256, 64, 0, _f32)
if LINE_BYTES > PIECE_BYTES:
    F16 = Reading(64, 128, 32, 0, _f16_of_shorts, transpose=transpose_shorts, whole=32)
else:
    F16 = Reading(64, 128, 32, 0, _f16)
BF16 = Reading(64, 128, 32, 0, _bf16)
Q8_0 = of_pairs(8, q8_0)
Q4_0 = of_pairs(4, q4_0)
Q4_1 = _wholes(5, q4_1)
Q5_0 = of_pairs(5, q5_0)
Q5_1 = _wholes(6, q5_1)
Q8_1 = _wholes(9, q8_0)
Q1_0 = of_pairs(4, q1_0, 128)
Q2_0 = of_pairs(4, q2_0, 64)
Q8_K = Reading(256, 292, 73, 1, _q8_k, _q8_k_head)
