"""The quanta of stored blocks as bytes, for products with rows of q8_0.

A run of sixteen elements of sixteen rows is four vectors of words, whose bytes are quanta plus
`zero`: numbers from 0 to 255. An element is factor * (byte - zero) + offset, where a part of 32 or
16 elements shares factor and offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from heliograph_backends.cpu.kernels.matmul import stored_blocks as blocks
from heliograph_backends.cpu.kernels.matmul import stored_codes as codes
from heliograph_backends.cpu.kernels.matmul import stored_k_blocks as k_blocks
from heliograph_backends.cpu.kernels.matmul.grouped_matmul import Block
from heliograph_backends.cpu.kernels.matmul.stored_lanes import constant
from heliograph_backends.cpu.kernels.matmul.stored_readings import bits_of, total
from heliograph_backends.cpu.kernels.program.stored_types import Stored
from heliograph_backends.cpu.kernels.vector.lanes import Lanes, integer
from heliograph_proto.quantization.codebooks import CODES, FP4_CODES

#: Added to signed bytes.
SIGNED: Final = 128

Words = Iterator[Any]


class Integers(NamedTuple):
    """The quanta of a data type."""

    zero: int
    words: Callable[[Block, Any], Words]
    """Makes the four vectors of a run."""
    factors: Callable[[Block, Any], tuple[Lanes, Lanes | None]]
    """Makes the factor and the offset of a run; types with offsets have a zero of 0."""
    parts: int = 1
    """The parts of 32 elements."""


def _masked(builder: Any, words: Words, bits: int) -> Words:
    for each in words:
        yield builder.and_(each, constant((2**bits - 1) * 0x01010101))


def _unsigned(builder: Any, words: Any) -> Any:
    """Add 128 to signed bytes."""
    return builder.xor(words, constant(0x80808080))


def _nibbles(kind: Stored) -> Callable[[Block, Any], Words]:
    return lambda block, run: _masked(
        block.builder, blocks.nibbles(block.builder, block.words(kind), 0, run), 4
    )


def _fives(kind: Stored) -> Callable[[Block, Any], Words]:
    return lambda block, run: _masked(block.builder, blocks.fives(block.builder, block.words(kind), run), 5)


def _q8_0(block: Block, run: Any) -> Words:
    words = block.words(Stored.Q8_0).from_on(bits_of(block.builder, run, 0, 1, 4))
    for place in range(4):
        yield _unsigned(block.builder, words.words(place))


def _coded(kind: Stored, table: tuple[int, ...]) -> Callable[[Block, Any], Words]:
    def words(block: Block, run: Any) -> Words:
        for four in blocks.nibbles(block.builder, block.words(kind), 0, run):
            yield _unsigned(block.builder, codes.bytes_of_codes(block.builder, four, table))

    return words


def _scale(kind: Stored) -> Callable[[Block, Any], tuple[Lanes, Lanes | None]]:
    return lambda block, _run: (block.factors(kind)[0], None)


def _scale_and_least(kind: Stored) -> Callable[[Block, Any], tuple[Lanes, Lanes | None]]:
    def factors(block: Block, _run: Any) -> tuple[Lanes, Lanes | None]:
        scale, least = block.factors(kind)
        return scale, least

    return factors


# Blocks of 256, whose heads have the factors and offsets of parts


def _sixteenths(offset: bool) -> Callable[[Block, Any], tuple[Lanes, Lanes | None]]:
    def factors(block: Block, run: Any) -> tuple[Lanes, Lanes | None]:
        behind = total(block.builder, run, k_blocks.SIXTEEN)
        return block.heads.lanes(run), block.heads.lanes(behind) if offset else None

    return factors


def _eighths(offset: bool) -> Callable[[Block, Any], tuple[Lanes, Lanes | None]]:
    def factors(block: Block, run: Any) -> tuple[Lanes, Lanes | None]:
        part = bits_of(block.builder, run, 1, 3)
        behind = total(block.builder, part, k_blocks.EIGHT)
        return block.heads.lanes(part), block.heads.lanes(behind) if offset else None

    return factors


def _whole(block: Block, _run: Any) -> tuple[Lanes, Lanes | None]:
    return block.heads.lanes(0), None


def _of_k(kind: Stored, words: Callable[..., Words], bits: int) -> Callable[[Block, Any], Words]:
    return lambda block, run: _masked(block.builder, words(block.builder, block.words(kind), run), bits)


def _iq4_xs(block: Block, run: Any) -> Words:
    part = bits_of(block.builder, run, 1, 3)
    first = total(block.builder, block.builder.mul(part, integer(codes.QUANTA_WORDS)), 2)
    words = block.words(Stored.IQ4_XS).from_on(first)
    for four in blocks.nibbles(block.builder, words, 0, run):
        yield _unsigned(block.builder, codes.bytes_of_codes(block.builder, four, CODES))


def _tq1_0(block: Block, run: Any) -> Words:
    """The head has put the digits into words of two bits."""
    return _masked(block.builder, codes.tq1_0_words(block.builder, block.heads, run), 2)


READINGS: Final[dict[Stored, Integers]] = {
    Stored.Q8_0: Integers(SIGNED, _q8_0, _scale(Stored.Q8_0)),
    Stored.Q4_0: Integers(8, _nibbles(Stored.Q4_0), _scale(Stored.Q4_0)),
    Stored.Q4_1: Integers(0, _nibbles(Stored.Q4_1), _scale_and_least(Stored.Q4_1)),
    Stored.Q5_0: Integers(16, _fives(Stored.Q5_0), _scale(Stored.Q5_0)),
    Stored.Q5_1: Integers(0, _fives(Stored.Q5_1), _scale_and_least(Stored.Q5_1)),
    Stored.Q2_K: Integers(0, _of_k(Stored.Q2_K, k_blocks.q2_k_words, 2), _sixteenths(True), 2),
    Stored.Q3_K: Integers(4, _of_k(Stored.Q3_K, k_blocks.q3_k_words, 3), _sixteenths(False), 2),
    Stored.Q4_K: Integers(0, _of_k(Stored.Q4_K, k_blocks.q4_k_words, 4), _eighths(True)),
    Stored.Q5_K: Integers(0, _of_k(Stored.Q5_K, k_blocks.q5_k_words, 5), _eighths(True)),
    Stored.Q6_K: Integers(32, _of_k(Stored.Q6_K, k_blocks.q6_k_words, 6), _sixteenths(False), 2),
    Stored.IQ4_NL: Integers(SIGNED, _coded(Stored.IQ4_NL, CODES), _scale(Stored.IQ4_NL)),
    Stored.IQ4_XS: Integers(SIGNED, _iq4_xs, _eighths(False)),
    Stored.MXFP4: Integers(SIGNED, _coded(Stored.MXFP4, FP4_CODES), _scale(Stored.MXFP4)),
    Stored.TQ1_0: Integers(1, _tq1_0, _whole),
    Stored.TQ2_0: Integers(1, _of_k(Stored.TQ2_0, codes.tq2_0_words, 2), _whole),
}
