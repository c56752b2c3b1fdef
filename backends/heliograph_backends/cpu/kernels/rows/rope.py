"""Rotary position embedding of rows of heads: the angles of a token are computed once for all its
heads.

Angles and the length `size` are computed in float64. Cosines and sines times size are rounded to
float32, and so is each operation of a * cosine - b * sine and a * sine + b * cosine. Rows of f16
and bf16 are rotated in the scratch, and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types

from heliograph_backends.cpu.kernels.elementwise.interpreter import KINDS
from heliograph_backends.cpu.kernels.program.words import (
    ADJACENT,
    BIAS,
    BUFFERS_AT,
    COLUMNS,
    PAIR_WORDS,
    PAIRS,
    ROTATIONS,
    ROUNDING,
    ROW_STRIDE,
    SIZE,
    SOURCE,
    STAGED_AT,
    START,
    TARGET,
    TURNED_AS,
    WEIGHT,
    WIDENING,
    WIDTH,
)
from heliograph_backends.cpu.kernels.rows.reductions import first_row
from heliograph_backends.cpu.kernels.vector.atomics import double_of_bits, load_f32, load_i32, store_f32, word
from heliograph_backends.cpu.kernels.vector.lanes import (
    I32_VECTOR,
    LANES,
    Entry,
    Lanes,
    element,
    emitted,
    integer,
    jit,
    loop,
    tail_mask,
)
from heliograph_backends.cpu.kernels.vector.space import convert_rows, copy_row, locate

# Elements of the f16 or bf16 heads that are staged together; they fit into the first-level cache.
STAGED_ELEMENTS = 4096


@jit
def prepare_angles(step: int, positions: int, factors: int, table: int) -> None:
    """Write the cosines of a token's pairs to `table`, followed by the sines."""
    pairs, size = word(step, PAIRS), double_of_bits(word(step, SIZE))
    rotation = step + 8 * ROTATIONS
    for pair in range(pairs):
        angle = load_i32(positions + word(rotation, 2)) * double_of_bits(word(rotation, 0))
        if factors:
            angle /= load_f32(factors + 4 * pair)
        angle *= double_of_bits(word(rotation, 1))
        store_f32(table + 4 * pair, size * math.cos(angle))
        store_f32(table + 4 * (pairs + pair), size * math.sin(angle))
        rotation += 8 * PAIR_WORDS


def _turned(a: Lanes, b: Lanes, cosine: Lanes, sine: Lanes) -> tuple[Lanes, Lanes]:
    return a * cosine - b * sine, a * sine + b * cosine


def _shuffled(first: Lanes, second: Lanes, order: Sequence[int]) -> Lanes:
    """Return lanes of both; the second's are numbered after the first's."""
    mask = ir.Constant(I32_VECTOR, list(order))
    return Lanes(first.builder, first.builder.shuffle_vector(first.value, second.value, mask))


@emitted(types.void, *[types.int64] * 4)
def turn_halves(builder: Any, target: Any, source: Any, table: Any, pairs: Any) -> None:
    """Rotate pairs of one element of each half, possibly in place."""
    with loop(builder, integer(0), pairs, LANES) as index:
        mask = tail_mask(builder, builder.sub(pairs, index))
        behind = builder.add(index, pairs)
        values = [
            Lanes.load_masked(builder, element(builder, base, place), mask)
            for base, place in ((source, index), (source, behind), (table, index), (table, behind))
        ]
        for lanes, place in zip(_turned(*values), (index, behind), strict=True):
            lanes.store_masked(element(builder, target, place), mask)


@emitted(types.void, *[types.int64] * 4)
def turn_neighbours(builder: Any, target: Any, source: Any, table: Any, pairs: Any) -> None:
    """Rotate pairs of adjacent elements, possibly in place."""
    order = range(2 * LANES)
    mixed = [LANES * (lane % 2) + lane // 2 for lane in order]
    with loop(builder, integer(0), pairs, LANES) as index:
        rest = builder.sub(pairs, index)
        mask, first = tail_mask(builder, rest), builder.mul(index, integer(2))
        elements = builder.mul(rest, integer(2))
        halves = [
            (
                builder.add(first, integer(skipped)),
                tail_mask(builder, builder.sub(elements, integer(skipped))),
            )
            for skipped in (0, LANES)
        ]
        both = [Lanes.load_masked(builder, element(builder, source, at), some) for at, some in halves]
        cosine, sine = (
            Lanes.load_masked(builder, element(builder, table, place), mask)
            for place in (index, builder.add(index, pairs))
        )
        even, odd = (_shuffled(both[0], both[1], order[part::2]) for part in (0, 1))
        a, b = _turned(even, odd, cosine, sine)
        for (at, some), lanes in zip(halves, (mixed[:LANES], mixed[LANES:]), strict=True):
            _shuffled(a, b, lanes).store_masked(element(builder, target, at), some)


@jit
def turn_head(step: int, target: int, source: int, table: int) -> None:
    """Rotate the pairs of one head, and copy the other elements."""
    pairs, start, width = word(step, PAIRS), word(step, START), word(step, WIDTH)
    if target != source:
        end = start + 2 * pairs
        copy_row(target, source, start)
        copy_row(target + 4 * end, source + 4 * end, width - end)
    if word(step, ADJACENT):
        turn_neighbours(target + 4 * start, source + 4 * start, table, pairs)
    else:
        turn_halves(target + 4 * start, source + 4 * start, table, pairs)


@Entry
def rotary_block(_kind: int, step: int, block: int, slots: int, scratch: int) -> None:
    """Run one block of tokens."""
    row, rows, _, _ = locate(step, block, scratch)
    target = first_row(step + 8 * TARGET, slots, scratch, row)
    source = first_row(step + 8 * SOURCE, slots, scratch, row)
    positions = first_row(step + 8 * WEIGHT, slots, scratch, row)
    factors = first_row(step + 8 * BIAS, slots, scratch, row)
    table, narrow, width = scratch + BUFFERS_AT, word(step, TURNED_AS), word(step, WIDTH)
    staged = scratch + STAGED_AT
    columns, together = word(step, COLUMNS), max(1, STAGED_ELEMENTS // width) * width
    for _ in range(rows):
        prepare_angles(step, positions, factors, table)
        if narrow:
            for first in range(0, columns, together):
                count = min(together, columns - first)
                convert_rows(scratch, narrow >> WIDENING & KINDS, staged, source + 2 * first, 0, 2, 1, count)
                for head in range(staged, staged + 4 * count, 4 * width):
                    turn_head(step, head, head, table)
                convert_rows(scratch, narrow >> ROUNDING, staged, target + 2 * first, 0, 2, 1, count)
        else:
            for head in range(0, 4 * columns, 4 * width):
                turn_head(step, target + head, source + head, table)
        target += word(step + 8 * TARGET, ROW_STRIDE)
        source += word(step + 8 * SOURCE, ROW_STRIDE)
        positions += word(step + 8 * WEIGHT, ROW_STRIDE)
