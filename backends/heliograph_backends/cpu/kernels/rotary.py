"""Rotary position embedding of rows of heads: the angles of a token once, then all its heads.

Angles are computed in float64, as is the length `size`; cosines and sines times size are rounded to
float32, and so is each operator of a * cosine - b * sine and a * sine + b * cosine. Rows of f16 and bf16
are turned in the scratch, and rounded once.
"""

from __future__ import annotations

import math

from .atomics import double_of_bits, load_f32, load_i32, store_f32, word
from .elementwise import KINDS
from .lanes import jit
from .layout import (
    ADJACENT,
    BIAS,
    BUFFERS_AT,
    COLUMNS,
    HEAVY_AT,
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
from .row_kernels import first_row
from .space import convert_rows, copy_row, locate

# Heads of f16 or bf16 that are staged together have about so many elements, for which the first-level cache
# has room.
STAGED_ELEMENTS = 4096


@jit
def prepare_angles(step: int, positions: int, factors: int, table: int) -> None:
    """Leave the cosines of a token's pairs at `table`, and the sines behind them."""
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


@jit
def turn_head(step: int, target: int, source: int, table: int) -> None:
    """Turn the pairs of one head, and copy what belongs to no pair."""
    pairs, start, width = word(step, PAIRS), word(step, START), word(step, WIDTH)
    if target != source:
        end = start + 2 * pairs
        copy_row(target, source, start)
        copy_row(target + 4 * end, source + 4 * end, width - end)
    adjacent = word(step, ADJACENT) != 0
    apart, along = (4, 8) if adjacent else (4 * pairs, 4)
    first = 4 * start
    for pair in range(pairs):
        cosine, sine = load_f32(table + 4 * pair), load_f32(table + 4 * (pairs + pair))
        a, b = load_f32(source + first), load_f32(source + first + apart)
        store_f32(target + first, a * cosine - b * sine)
        store_f32(target + first + apart, a * sine + b * cosine)
        first += along


@jit
def rotary_block(step: int, block: int, slots: int, scratch: int) -> None:
    """Run one block of tokens."""
    row, rows, _, _ = locate(step, block, scratch)
    target = first_row(step + 8 * TARGET, slots, scratch, row)
    source = first_row(step + 8 * SOURCE, slots, scratch, row)
    positions = first_row(step + 8 * WEIGHT, slots, scratch, row)
    factors = first_row(step + 8 * BIAS, slots, scratch, row)
    table, narrow, width = scratch + BUFFERS_AT, word(step, TURNED_AS), word(step, WIDTH)
    heavy, staged = word(scratch + HEAVY_AT, 0), scratch + STAGED_AT
    columns, together = word(step, COLUMNS), max(1, STAGED_ELEMENTS // width) * width
    for _ in range(rows):
        prepare_angles(step, positions, factors, table)
        if narrow:
            for first in range(0, columns, together):
                count = min(together, columns - first)
                convert_rows(heavy, narrow >> WIDENING & KINDS, staged, source + 2 * first, 0, 2, 1, count)
                for head in range(staged, staged + 4 * count, 4 * width):
                    turn_head(step, head, head, table)
                convert_rows(heavy, narrow >> ROUNDING, staged, target + 2 * first, 0, 2, 1, count)
        else:
            for head in range(0, 4 * columns, 4 * width):
                turn_head(step, target + head, source + head, table)
        target += word(step + 8 * TARGET, ROW_STRIDE)
        source += word(step + 8 * SOURCE, ROW_STRIDE)
        positions += word(step + 8 * WEIGHT, ROW_STRIDE)
