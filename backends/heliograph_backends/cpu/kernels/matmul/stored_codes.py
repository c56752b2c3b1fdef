"""Lanes of weights whose quanta are places in a table of numbers, or digits in base three; see
`stored_words`.

With AVX-512 a table of floats is one register, from which a nibble takes its number. Elsewhere the
table is sixteen bytes, from which all nibbles of a vector take theirs at once, before they become
floats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir

from heliograph_backends.cpu.kernels.matmul.stored_blocks import nibbles, of_pairs
from heliograph_backends.cpu.kernels.matmul.stored_lanes import (
    BYTES,
    PERMUTES,
    bytes_at,
    chosen,
    constant,
    everywhere,
    looked_up,
    low_half,
    number,
    shifted,
    small_numbers,
    turned,
)
from heliograph_backends.cpu.kernels.matmul.stored_readings import Half, Reading, bits_of, each_byte, total
from heliograph_backends.cpu.kernels.matmul.stored_words import SHORTS, Shelf, shuffled
from heliograph_backends.cpu.kernels.vector.lanes import (
    I32_VECTOR,
    LANES,
    Lanes,
    has_feature,
    integer,
    intrinsic_function,
    loop,
)
from heliograph_proto.quantization.codebooks import CODES, FP4_CODES, NO_SCALE
from heliograph_proto.quantization.ternary import RUNS, digit

HALF_BYTES = ir.VectorType(ir.IntType(8), 2 * LANES)
#: The words of the quanta of a block of 32, and blocks that are read at a time.
QUANTA_WORDS, BLOCKS = 4, 8
#: Vectors that heads of tq1_0 and tq2_0 have at least, and words of tq1_0.
TERNARY_HEADS, TERNARY_WORDS = 1, sum(size for size, _ in RUNS) // 4


def bytes_of_codes(builder: Any, words: Any, codes: Sequence[int]) -> Any:
    """Replace each byte by the signed number at the place in its low nibble."""
    places = builder.bitcast(builder.and_(words, constant(0x0F0F0F0F)), BYTES)
    if has_feature("avx2"):
        table = ir.Constant(HALF_BYTES, [code & 0xFF for code in codes] * 2)
        function = intrinsic_function(builder, "llvm.x86.avx2.pshuf.b", HALF_BYTES, HALF_BYTES, HALF_BYTES)
        half = 2 * LANES
        low, high = (
            builder.call(function, [table, shuffled(builder, places, places, range(first, first + half))])
            for first in (0, half)
        )
        return builder.bitcast(shuffled(builder, low, high, range(2 * half)), I32_VECTOR)
    found = [ir.Constant(BYTES, [code & 0xFF] * (4 * LANES)) for code in codes]
    for bit in range(4):
        ones = ir.Constant(BYTES, [1 << bit] * (4 * LANES))
        is_set = builder.icmp_unsigned("==", builder.and_(places, ones), ones)
        pairs = zip(found[::2], found[1::2], strict=True)
        found = [builder.select(is_set, upper, lower) for lower, upper in pairs]
    return builder.bitcast(found[0], I32_VECTOR)


def coded(builder: Any, words: Any, codes: Sequence[int]) -> Iterator[Lanes]:
    """Yield the numbers of the low nibbles of the four bytes of each lane."""
    if has_feature("avx512f"):
        for moved in each_byte(builder, words):
            yield looked_up(builder, moved, [float(code) for code in codes])
        return
    signed = bytes_of_codes(builder, words, codes)
    for byte in range(4):
        yield number(builder, builder.ashr(shifted(builder, signed, 8 * byte - 24), constant(24)))


def _scaled(builder: Any, words: Shelf, codes: Sequence[int], factor: Lanes, run: Any) -> Iterator[Lanes]:
    for four in nibbles(builder, words, 0, run):
        for lanes in coded(builder, four, codes):
            yield lanes * factor


def iq4_nl(builder: Any, words: Shelf, factors: Sequence[Lanes], run: Any) -> Iterator[Lanes]:
    """Nibbles that are places in a table."""
    return _scaled(builder, words, CODES, factors[0], run)


def mxfp4(builder: Any, words: Shelf, factors: Sequence[Lanes], run: Any) -> Iterator[Lanes]:
    """Nibbles that are floats."""
    return _scaled(builder, words, FP4_CODES, factors[0], run)


def nvfp4(builder: Any, words: Shelf, scales: Any, run: Any) -> Iterator[Lanes]:
    """The lower nibbles of two words, then the upper ones; `scales` has the scale bytes of four
    runs."""
    factor = small_float_of(
        builder, builder.lshr(scales, everywhere(builder, bits_of(builder, run, 0, 2, 8)))
    )
    own = words.from_on(bits_of(builder, run, 0, 2, 2))
    for right in (0, 4):
        for place in range(2):
            for lanes in coded(builder, shifted(builder, own.words(place), right), FP4_CODES):
                yield lanes * factor


def small_float_of(builder: Any, words: Any) -> Lanes:
    """Return half of the floats of four exponent and three mantissa bits in the lowest byte of
    lanes, below a bit that means nothing; the byte 127 is 0."""
    low = builder.and_(words, constant(0x7F))
    found = Lanes.from_bits(builder, builder.shl(low, constant(20))) * 2.0**119
    is_none = builder.icmp_unsigned("==", builder.and_(words, constant(0xFF)), constant(NO_SCALE))
    return Lanes.from_bits(builder, builder.select(is_none, constant(0), found.bits()))


def _nvfp4(builder: Any, shelf: Shelf, _heads: Shelf, run: Any) -> Iterator[Lanes]:
    block = shelf.from_on(bits_of(builder, run, 2, 2, 9))
    return nvfp4(builder, block.from_on(1), block.words(0), run)


def power_of(builder: Any, exponents: Any) -> Lanes:
    """Return 2**(n - 128) for lanes of 0 to 255; the first two are smaller than normal floats."""
    small = builder.shl(constant(0x200000), builder.and_(exponents, constant(1)))
    usual = builder.shl(builder.sub(exponents, constant(1)), constant(23))
    is_small = builder.icmp_unsigned("<", exponents, constant(2))
    return Lanes.from_bits(builder, builder.select(is_small, small, usual))


def _mxfp4_head(builder: Any, shelf: Shelf, heads: Shelf, _half: Half) -> None:
    """Make the scales, and move the quanta of blocks of 17 bytes to whole words, in place."""
    for block in range(BLOCKS):
        start = QUANTA_WORDS * block
        first = shifted(builder, shelf.words(start + block // 4), 8 * (block % 4))
        heads.put(block, power_of(builder, builder.and_(first, constant(0xFF))).value)
        word, skew = start + (block + 1) // 4, (block + 1) % 4
        for place in range(QUANTA_WORDS):
            own = shelf.words(word + place)
            if skew:
                own = turned(builder, own, shelf.words(word + place + 1), constant(8 * skew))
            shelf.put(start + place, own)


def _mxfp4(builder: Any, shelf: Shelf, heads: Shelf, run: Any) -> Iterator[Lanes]:
    block = bits_of(builder, run, 1, 3)
    words = shelf.from_on(builder.mul(block, integer(QUANTA_WORDS)))
    return mxfp4(builder, words, [heads.lanes(block)], run)


def _iq4_xs_head(builder: Any, shelf: Shelf, heads: Shelf, _half: Half) -> None:
    """Factors of eight parts: four bits each in the second word, two above them in the first."""
    both, lower = shelf.words(0), shelf.words(1)
    size = low_half(builder, both)
    for part in range(8):
        upper = shifted(builder, both, 12 + 2 * part)
        scale = builder.and_(chosen(builder, 0x30, upper, shifted(builder, lower, 4 * part)), constant(0x3F))
        heads.put(part, ((number(builder, scale) - 32.0) * size).value)


def _iq4_xs(builder: Any, shelf: Shelf, heads: Shelf, run: Any) -> Iterator[Lanes]:
    part = bits_of(builder, run, 1, 3)
    words = shelf.from_on(total(builder, builder.mul(part, integer(QUANTA_WORDS)), 2))
    return _scaled(builder, words, CODES, heads.lanes(part), run)


def _ternary_head(_builder: Any, _shelf: Shelf, heads: Shelf, half: Half) -> None:
    heads.put(0, half().value)


def _ternary(builder: Any, heads: Shelf, words: Iterator[Any]) -> Iterator[Lanes]:
    """Yield the low two bits of each byte of words, less 1, times the scale."""
    scale = heads.lanes(0)
    for four in words:
        for moved in each_byte(builder, four):
            yield small_numbers(builder, moved, 2, 1) * scale


def _tq2_0(builder: Any, shelf: Shelf, heads: Shelf, run: Any) -> Iterator[Lanes]:
    return _ternary(builder, heads, tq2_0_words(builder, shelf, run))


def tq2_0_words(builder: Any, shelf: Shelf, run: Any) -> Iterator[Any]:
    """Yield words with a quantum in the low two bits of each byte: in each half of the block four
    runs of 32 elements are in the same bytes."""
    half, quarters = bits_of(builder, run, 3, 1, 8), bits_of(builder, run, 0, 1, 4)
    words = shelf.from_on(total(builder, half, quarters))
    shift = everywhere(builder, bits_of(builder, run, 1, 2, 2))
    for place in range(4):
        yield builder.lshr(words.words(place), shift)


def _digits(builder: Any, words: Any, power: int) -> Any:
    """Return the digit of each byte, in base three, that multiplication by `power` brings to the
    front."""
    three, low = ir.Constant(SHORTS, [3] * (2 * LANES)), ir.Constant(SHORTS, [0xFF] * (2 * LANES))
    factor, eight = ir.Constant(SHORTS, [power] * (2 * LANES)), ir.Constant(SHORTS, [8] * (2 * LANES))
    shorts = builder.bitcast(words, SHORTS)
    even, odd = (
        builder.lshr(builder.mul(builder.and_(builder.mul(each, factor), low), three), eight)
        for each in (shorts, builder.lshr(shorts, eight))
    )
    return builder.bitcast(builder.or_(even, builder.shl(odd, eight)), I32_VECTOR)


def _four_digits(builder: Any, words: Any) -> Any:
    """Return the first four digits of each byte, with two bits each."""
    if PERMUTES:
        return bytes_at(
            builder,
            [sum(digit(byte, place) << 2 * place for place in range(4)) for byte in range(256)],
            words,
        )
    found = _digits(builder, words, 1)
    for place in range(1, 4):
        found = builder.or_(found, shifted(builder, _digits(builder, words, 3**place), -2 * place))
    return found


def _fifth_digit(builder: Any, words: Any) -> Any:
    if PERMUTES:
        return bytes_at(builder, [digit(byte, 4) for byte in range(256)], words)
    return _digits(builder, words, 3**4)


def _tq1_0_head(builder: Any, shelf: Shelf, heads: Shelf, half: Half) -> None:
    """Digits with two bits: vectors of four of each word, then of the fifth ones."""
    _ternary_head(builder, shelf, heads, half)
    with loop(builder, integer(0), integer(TERNARY_WORDS), 1) as word:
        words, found = shelf.words(word), heads.from_on(builder.add(word, integer(TERNARY_HEADS)))
        found.put(0, _four_digits(builder, words))
        found.put(TERNARY_WORDS, _fifth_digit(builder, words))


def _tq1_0(builder: Any, _shelf: Shelf, heads: Shelf, run: Any) -> Iterator[Lanes]:
    return _ternary(builder, heads, tq1_0_words(builder, heads, run))


def tq1_0_words(builder: Any, heads: Shelf, run: Any) -> Iterator[Any]:
    """Yield words with a digit in the low two bits of each byte: five of 32 bytes, then five of 16
    bytes, then four of a word's bytes.

    A run has a digit of four words; the last run has each digit of the last word.
    """
    second = integer(2 * RUNS[0][1])
    is_early = builder.icmp_signed("<", run, second)
    is_last = builder.icmp_signed("==", run, integer(sum(size * count for size, count in RUNS) // LANES - 1))
    own = builder.select(is_early, bits_of(builder, run, 1, 3), builder.sub(run, second))
    start = builder.select(is_early, bits_of(builder, run, 0, 1, 4), integer(RUNS[0][0] // 4))
    for place in range(4):
        word = builder.select(is_last, integer(TERNARY_WORDS - 1), total(builder, start, place))
        number_of = builder.select(is_last, integer(place), own)
        word = total(builder, word, bits_of(builder, number_of, 2, 1, TERNARY_WORDS), TERNARY_HEADS)
        shift = everywhere(builder, bits_of(builder, number_of, 0, 2, 2))
        yield builder.lshr(heads.words(word), shift)


IQ4_NL = of_pairs(QUANTA_WORDS, iq4_nl)
IQ4_XS = Reading(256, 136, 34, 8, _iq4_xs, _iq4_xs_head)
MXFP4 = Reading(256, 136, 34, BLOCKS, _mxfp4, _mxfp4_head)
NVFP4 = Reading(256, 144, 36, 0, _nvfp4)
# Thirteen words, with room for a whole line.
TQ1_0 = Reading(256, 54, 16, TERNARY_HEADS + 2 * TERNARY_WORDS, _tq1_0, _tq1_0_head, half_at=52)
TQ2_0 = Reading(256, 66, 16, TERNARY_HEADS, _tq2_0, _ternary_head, half_at=64)
