"""Rotary position embedding of rows of heads: the angles of a token once, then all its heads.

Angles are computed in float64, as is the length `size`; cosines and sines times size are rounded to
float32, and so is each operator of a * cosine - b * sine and a * sine + b * cosine.
"""

from __future__ import annotations

import math

from .atomics import double_of_bits, load_f32, load_i32, store_f32, word
from .lanes import jit
from .layout import (
    ADJACENT,
    BIAS,
    BUFFERS_AT,
    COLUMNS,
    PAIR_WORDS,
    PAIRS,
    ROTATIONS,
    ROW_STRIDE,
    SIZE,
    SOURCE,
    START,
    TARGET,
    WEIGHT,
    WIDTH,
)
from .row_kernels import first_row
from .space import copy_row, locate


@jit
def prepare_angles(step: int, position: int, factors: int, table: int) -> None:
    """Leave the cosines of a token's pairs at `table`, and the sines behind them."""
    pairs, size = word(step, PAIRS), double_of_bits(word(step, SIZE))
    rotation = step + 8 * ROTATIONS
    for pair in range(pairs):
        angle = position * double_of_bits(word(rotation, 0))
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
    position = first_row(step + 8 * WEIGHT, slots, scratch, row)
    factors = first_row(step + 8 * BIAS, slots, scratch, row)
    table = scratch + BUFFERS_AT
    for _ in range(rows):
        prepare_angles(step, load_i32(position), factors, table)
        for head in range(0, 4 * word(step, COLUMNS), 4 * word(step, WIDTH)):
            turn_head(step, target + head, source + head, table)
        target += word(step + 8 * TARGET, ROW_STRIDE)
        source += word(step + 8 * SOURCE, ROW_STRIDE)
        position += word(step + 8 * WEIGHT, ROW_STRIDE)
