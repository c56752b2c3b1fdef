"""Lanes of weights that are points of a grid: iq1, iq2 and iq3; see `stored_words`.

Theory of operation. The head looks the points of a block up and leaves a nibble for each element:
the place of a number in a table of sixteen, of which the upper half is for elements whose sign is
negative, or that are shifted down. So a run takes as long as one of iq4_nl.

Points are of eight elements, in iq3 of four. The places of a part's four points of eight, or of the
halves of such, are the bytes of a lane. With AVX-512's byte permutation 64 bytes are looked up at
once, in tables of two elements, and vectors on the shelf have elements k and k + 4 of all four
points; elsewhere a vector has all of one point, gathered from a table of words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from llvmlite import ir

from heliograph_backends.cpu.kernels.matmul.stored_codes import coded
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
)
from heliograph_backends.cpu.kernels.matmul.stored_readings import Half, Reading, bits_of, total
from heliograph_backends.cpu.kernels.matmul.stored_words import Shelf, shuffled
from heliograph_backends.cpu.kernels.vector.lanes import (
    I32,
    I32_VECTOR,
    I64,
    LANES,
    MASK,
    Lanes,
    integer,
    intrinsic_function,
    loop,
    splat,
)
from heliograph_proto.quantization import grid_blocks as rules
from heliograph_proto.quantization import grids
from heliograph_proto.quantization.grids import Grid, Numbers, even_signs

#: Parts of a block, and the vectors of their elements; the factors come after these.
PARTS, ELEMENTS = 8, 32
_PLACES: Final = ir.VectorType(I64, LANES)
_POINTERS: Final = ir.VectorType(I32.as_pointer(), LANES)


class Part(NamedTuple):
    """The fields of a part of 32 elements, in lanes of rows."""

    places: Sequence[tuple[Any, Any]]
    """The lowest eight bits of the places of points, and those above or None, as bytes. Of iq3 first
    those of the first halves of eight elements."""
    signs: Any
    """The signs of eight elements as the bits of a byte."""
    scales: Sequence[Any]
    """The numbers of the scales of its one or two parts."""


#: Reads a part: its number is known at run time.
Read: TypeAlias = Callable[[Any, Shelf, Any], Part]


# Fields


def _byte_of(builder: Any, shelf: Shelf, first: int, part: Any) -> Any:
    """Return a part's byte of those from word `first` on; the bits above it are of others."""
    words = shelf.words(total(builder, bits_of(builder, part, 2, 1), first))
    return builder.lshr(words, everywhere(builder, bits_of(builder, part, 0, 2, 8)))


def _short_of(builder: Any, shelf: Shelf, first: int, part: Any) -> Any:
    """As `_byte_of`, 16 bits."""
    words = shelf.words(total(builder, bits_of(builder, part, 1, 2), first))
    return builder.lshr(words, everywhere(builder, bits_of(builder, part, 0, 1, 16)))


def _masked(builder: Any, words: Any, mask: int) -> Any:
    return builder.and_(words, constant(mask))


def _spread(builder: Any, words: Any, count: int) -> Any:
    """Put `count` bits each of the words, from the lowest on, into their four bytes; the bits above
    them are of others."""
    found = shifted(builder, words, -3 * (8 - count))
    for byte in (2, 1, 0):
        mask = (1 << 8 * (byte + 1)) - 1
        found = chosen(builder, mask, shifted(builder, words, -byte * (8 - count)), found)
    return found


def _even_signs(builder: Any, sevens: Any) -> Any:
    """Return bytes of signs of the lowest seven bits of bytes."""
    if PERMUTES:
        return bytes_at(builder, even_signs(np.arange(128, dtype=np.uint8)).tolist(), sevens)
    low = _masked(builder, sevens, 0x7F7F7F7F)
    folded = low
    for places in (4, 2, 1):
        folded = builder.xor(folded, shifted(builder, folded, places))
    return builder.or_(low, shifted(builder, _masked(builder, folded, 0x01010101), -7))


def _pairs(builder: Any, shelf: Shelf, first: Any) -> tuple[Any, Any]:
    """Return the first, and the second bytes of pairs of two words."""
    low, high = (builder.bitcast(shelf.words(total(builder, first, place)), BYTES) for place in (0, 1))
    found = []
    for odd in (0, 1):
        order = [
            4 * lane + side + 2 * place + odd
            for lane in range(LANES)
            for side in (0, 4 * LANES)
            for place in (0, 1)
        ]
        found.append(builder.bitcast(shuffled(builder, low, high, order), I32_VECTOR))
    return found[0], found[1]


# Points


def _words_at(builder: Any, name: str, table: Numbers, places: Any) -> Any:
    """Return the words of a table at places."""
    module = builder.module
    if name not in module.globals:
        kind = ir.ArrayType(I32, len(table))
        made = ir.GlobalVariable(module, kind, name)
        made.linkage, made.global_constant = "internal", True
        made.initializer = ir.Constant(kind, table.tolist())
    base = builder.ptrtoint(module.globals[name], I64)
    offsets = builder.mul(builder.zext(places, _PLACES), ir.Constant(_PLACES, [4] * LANES))
    pointers = builder.inttoptr(builder.add(splat(builder, base, _PLACES), offsets), _POINTERS)
    gather = intrinsic_function(
        builder, "llvm.masked.gather.v16i32.v16p0", I32_VECTOR, _POINTERS, I32, MASK, I32_VECTOR
    )
    every, nothing = ir.Constant(MASK, [1] * LANES), ir.Constant(I32_VECTOR, ir.Undefined)
    return builder.call(gather, [pointers, ir.Constant(I32, 4), every, nothing])


def _points_of_eight(builder: Any, grid: Grid, part: Part) -> list[Any]:
    """Return vectors k of elements k and k + 4, by permutations: two such vectors from one table,
    whose numbers have two bits."""
    ((low, high),) = part.places
    found = []
    for first in (0, 2):
        own = [grid.places[:, first + place] << shift for place, shift in ((0, 0), (4, 4), (1, 2), (5, 6))]
        four = bytes_at(builder, np.bitwise_or.reduce(own).tolist(), low, high)
        found += [_masked(builder, shifted(builder, four, right), 0x33333333) for right in (0, 2)]
    return found


def _points_of_four(builder: Any, grid: Grid, part: Part) -> list[Any]:
    """As `_points_of_eight`: points of four, whose numbers have four bits, are half of such."""
    found = []
    for first in (0, 2):
        own = grid.places[:, first] | grid.places[:, first + 1] << 4
        one, other = (bytes_at(builder, own.tolist(), low, high) for low, high in part.places)
        found.append(chosen(builder, 0x0F0F0F0F, one, shifted(builder, other, -4)))
        found.append(chosen(builder, 0x0F0F0F0F, shifted(builder, one, 4), other))
    return found


def _gathered_points(builder: Any, grid: Grid, part: Part) -> list[Any]:
    """Return vectors of points: byte k has elements k and k + 4."""
    size = grid.places.shape[1]
    shifts = [8 * (place % 4) + 4 * (place // 4) for place in range(size)]
    table: Numbers = (grid.places.astype(np.int64) << shifts).sum(1)
    name = f"grid_{size}_{len(table)}_{len(grid.levels)}"
    found = []
    for byte in range(4):
        whole = constant(0)
        for side, (low, high) in enumerate(part.places):
            place = _masked(builder, shifted(builder, low, 8 * byte), 0xFF)
            if high is not None:
                above = _masked(builder, shifted(builder, high, 8 * byte), (len(table) >> 8) - 1)
                place = builder.or_(place, shifted(builder, above, -8))
            point = _words_at(builder, name, table, place)
            whole = builder.or_(whole, shifted(builder, point, -4 * side))
        found.append(whole)
    return found


def _signs_by_element(builder: Any, signs: Any, place: int) -> Any:
    """Return the signs of elements k and k + 4 of four points."""
    return _masked(builder, shifted(builder, signs, place - 3), 0x88888888)


def _signs_by_point(builder: Any, signs: Any, place: int) -> Any:
    """Return the signs of a point's eight elements."""
    found = _masked(builder, shifted(builder, signs, 8 * place), 0xFF)
    for mask, step in ((0x00330033, 14), (0x11111111, 7)):
        found = _masked(builder, builder.or_(found, shifted(builder, found, -step)), mask)
    return shifted(builder, found, -3)


# Readings


def _made(
    grid: Grid, rule: rules.Rule, read: Read, size_of: Callable[[Any, Shelf, Half], Lanes], shift: int
) -> Callable[[Any, Shelf, Shelf, Half], None]:
    """Return the code of a head. The numbers of shifted points are whole: eight times theirs."""

    def head(builder: Any, shelf: Shelf, heads: Shelf, half: Half) -> None:
        size = size_of(builder, shelf, half) * (1 / 8 if shift else 1.0)
        with loop(builder, integer(0), integer(PARTS), 1) as number_of_part:
            part = read(builder, shelf, number_of_part)
            if not PERMUTES:
                points, signs = _gathered_points(builder, grid, part), _signs_by_point
            else:
                make = _points_of_eight if len(part.places) == 1 else _points_of_four
                points, signs = make(builder, grid, part), _signs_by_element
            own = heads.from_on(builder.mul(number_of_part, integer(4)))
            for place, point in enumerate(points):
                own.put(place, builder.or_(point, signs(builder, part.signs, place)))
            first = builder.mul(number_of_part, integer(len(part.scales)))
            for place, scale in enumerate(part.scales):
                factor = (number(builder, scale) * rule.step + rule.first) * size
                heads.put(total(builder, first, ELEMENTS + place), factor.value)

    return head


def _codes(grid: Grid, shift: int) -> list[int]:
    """Return the numbers of nibbles: places in the levels, and the others."""
    levels = [*grid.levels, *[0] * (8 - len(grid.levels))]
    if shift:
        return [8 * level + shift for level in levels] + [8 * level - shift for level in levels]
    return levels + [-level for level in levels]


def _run_of(codes: Sequence[int], count: int) -> Callable[[Any, Shelf, Shelf, Any], Iterator[Lanes]]:
    """Return the code of a run, of blocks of so many factors."""

    def by_element(builder: Any, shelf: Shelf, heads: Shelf, run: Any) -> Iterator[Lanes]:
        factor, table = factor_of(builder, heads, run), [float(code) for code in codes]
        own = heads.from_on(bits_of(builder, run, 1, 3, 4))
        half = everywhere(builder, bits_of(builder, run, 0, 1, 16))
        vectors = [builder.lshr(own.words(place), half) for place in range(4)]
        for point in range(2):
            for place in range(8):
                moved = shifted(builder, vectors[place % 4], 8 * point + place // 4 * 4)
                yield looked_up(builder, moved, table) * factor

    def by_point(builder: Any, shelf: Shelf, heads: Shelf, run: Any) -> Iterator[Lanes]:
        factor = factor_of(builder, heads, run)
        own = heads.from_on(builder.mul(run, integer(2)))
        for point in range(2):
            for right in (0, 4):
                for lanes in coded(builder, shifted(builder, own.words(point), right), codes):
                    yield lanes * factor

    def factor_of(builder: Any, heads: Shelf, run: Any) -> Lanes:
        place = run if count > PARTS else bits_of(builder, run, 1, 3)
        return heads.lanes(total(builder, place, ELEMENTS))

    return by_element if PERMUTES else by_point


def _size(_builder: Any, _shelf: Shelf, half: Half) -> Lanes:
    return half()


def _reading(
    grid: Grid,
    rule: rules.Rule,
    read: Read,
    bytes_: int,
    factors: int,
    *,
    shift: int = 0,
    size_of: Callable[[Any, Shelf, Half], Lanes] = _size,
) -> Reading:
    lead = 2 if size_of is _size else 0
    # With room for a whole line.
    words = max((bytes_ - lead) // 4, 16)
    head = _made(grid, rule, read, size_of, shift)
    run = _run_of(_codes(grid, shift), factors)
    return Reading(256, bytes_, words, ELEMENTS + factors, run, head, words_at=lead)


def _iq2_xxs(builder: Any, shelf: Shelf, part: Any) -> Part:
    """Four places, then four times seven bits of signs and a scale."""
    own = shelf.from_on(builder.mul(part, integer(2)))
    last = own.words(1)
    signs = _even_signs(builder, _spread(builder, last, 7))
    return Part([(own.words(0), None)], signs, [shifted(builder, last, 28)])


def _two_scales(builder: Any, shelf: Shelf, first: int, part: Any) -> list[Any]:
    both = _byte_of(builder, shelf, first, part)
    return [_masked(builder, shifted(builder, both, right), 15) for right in (0, 4)]


def _iq2_xs(builder: Any, shelf: Shelf, part: Any) -> Part:
    """Nine bits of a place and seven of signs, four times."""
    low, rest = _pairs(builder, shelf, builder.mul(part, integer(2)))
    signs = _even_signs(builder, shifted(builder, rest, 1))
    return Part([(low, rest)], signs, _two_scales(builder, shelf, 16, part))


def _iq2_s(builder: Any, shelf: Shelf, part: Any) -> Part:
    """The upper two bits of places are in a byte."""
    low, signs = (shelf.words(total(builder, part, first)) for first in (0, 8))
    high = _spread(builder, _masked(builder, _byte_of(builder, shelf, 16, part), 0xFF), 2)
    return Part([(low, high)], signs, _two_scales(builder, shelf, 18, part))


def _iq3_xxs(builder: Any, shelf: Shelf, part: Any) -> Part:
    """Eight places, and as in iq2_xxs signs and a scale."""
    first, second = _pairs(builder, shelf, builder.mul(part, integer(2)))
    last = shelf.words(total(builder, part, 16))
    signs = _even_signs(builder, _spread(builder, last, 7))
    return Part([(first, None), (second, None)], signs, [shifted(builder, last, 28)])


def _iq3_s(builder: Any, shelf: Shelf, part: Any) -> Part:
    """The ninth bits of places are in a byte; scales are nibbles of the last word."""
    first, second = _pairs(builder, shelf, builder.mul(part, integer(2)))
    ninth = _masked(builder, _byte_of(builder, shelf, 16, part), 0xFF)
    even = _spread(builder, ninth, 2)
    signs = shelf.words(total(builder, part, 18))
    scale = builder.lshr(shelf.words(26), everywhere(builder, builder.mul(part, integer(4))))
    places = [(first, even), (second, shifted(builder, even, 1))]
    return Part(places, signs, [_masked(builder, scale, 15)])


def _iq1_s(builder: Any, shelf: Shelf, part: Any) -> Part:
    """The upper three bits of places, a scale and the shift are in a short."""
    short = _short_of(builder, shelf, 8, part)
    high = _spread(builder, short, 3)
    are_down = builder.ashr(shifted(builder, short, -16), constant(31))
    scale = _masked(builder, shifted(builder, short, 12), 7)
    return Part([(shelf.words(part), high)], are_down, [scale])


def _iq1_m(builder: Any, shelf: Shelf, part: Any) -> Part:
    """The upper three bits of a place and its shift are a nibble; scales have three bits."""
    high = _masked(builder, _short_of(builder, shelf, 8, part), 0xFFFF)
    for mask, step in ((0x00FF00FF, 8), (0x0F0F0F0F, 4)):
        high = _masked(builder, builder.or_(high, shifted(builder, high, -step)), mask)
    ones = _masked(builder, shifted(builder, high, 3), 0x01010101)
    are_down = builder.sub(shifted(builder, ones, -8), ones)
    words = shelf.words(total(builder, bits_of(builder, part, 2, 1), 12))
    right = total(builder, bits_of(builder, part, 1, 1, 16), bits_of(builder, part, 0, 1, 6))
    both = builder.lshr(words, everywhere(builder, right))
    scales = [_masked(builder, shifted(builder, both, right), 7) for right in (0, 3)]
    return Part([(shelf.words(part), high)], are_down, scales)


def _size_of_iq1_m(builder: Any, shelf: Shelf, _half: Half) -> Lanes:
    """Return the f16 whose nibbles are the uppermost of four shorts."""
    found = constant(0)
    for place in range(4):
        nibble = shifted(builder, shelf.words(12 + place // 2), 12 + place % 2 * 16)
        nibble = _masked(builder, nibble, 15)
        found = builder.or_(found, shifted(builder, nibble, -4 * place))
    return low_half(builder, found)


IQ2_XXS = _reading(grids.IQ2_XXS, rules.IQ2, _iq2_xxs, 66, 8)
IQ2_XS = _reading(grids.IQ2_XS, rules.IQ2, _iq2_xs, 74, 16)
IQ2_S = _reading(grids.IQ2_S, rules.IQ2, _iq2_s, 82, 16)
IQ3_XXS = _reading(grids.IQ3_XXS, rules.IQ3_XXS, _iq3_xxs, 98, 8)
IQ3_S = _reading(grids.IQ3_S, rules.IQ3_S, _iq3_s, 110, 8)
IQ1_S = _reading(grids.IQ1, rules.IQ1, _iq1_s, 50, 8, shift=1)
IQ1_M = _reading(grids.IQ1, rules.IQ1, _iq1_m, 56, 16, shift=1, size_of=_size_of_iq1_m)
