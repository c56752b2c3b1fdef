"""Attention in one step: for some rows of queries, over keys and values block by block.

Theory of operation. A row's scores never exist all at once. The kernel keeps the largest score so
far, the sum of the powers and the sums of values, and scales them down when it finds a larger score
(Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al.,
"FlashAttention", 2022). Blocks have KEY_BLOCK keys, whatever the rows are. With few rows, stored
keys and values stream through registers; with more, a block of them becomes float32 panels in the
cache for the kernels of the matrix product. The numbers are the same, see `attention_lanes`.

Blocks of keys that the mask hides from all rows are not read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from heliograph_backends.cpu.kernels.matmul.matmul import multiply_panels
from heliograph_backends.cpu.kernels.matmul.packing import PANEL_ROW_BYTES, pack_panels
from heliograph_backends.cpu.kernels.program.elements import FLOAT32, Conversion
from heliograph_backends.cpu.kernels.program.stored_types import FEW_ROWS, Stored
from heliograph_backends.cpu.kernels.program.words import (
    ATTENDED,
    BIASES_AT,
    COLUMNS,
    HEADS,
    INDEX_AT,
    KEY_BLOCK,
    KEY_COUNT,
    KEY_FORM,
    KEY_WIDTH,
    KEYS,
    LARGEST_SCORE,
    MASK,
    MASK_CONVERSION,
    OUTER_DIMENSIONS,
    OUTER_STRIDES,
    PACK_AT,
    PANEL_COLUMNS,
    PANELS_AT,
    QUERIES,
    RESCALED,
    ROW_STRIDE,
    SCORE_CAP,
    SCORE_SCALE,
    SCORES_AT,
    SINKS,
    SLOPE_COUNT,
    SLOPES,
    SLOT,
    STATE_BYTES,
    STATES_AT,
    TOTAL,
    VALUE_BYTES,
    VALUE_ELEMENTS,
    VALUE_FORM,
    VALUES,
    WIDE_VALUES_AT,
)
from heliograph_backends.cpu.kernels.rows.attention_lanes import add_values, pack_values, scale_row, weigh_row
from heliograph_backends.cpu.kernels.rows.convert_lanes import convert_plain
from heliograph_backends.cpu.kernels.rows.reductions import first_row
from heliograph_backends.cpu.kernels.rows.stored_rows import unpack_row
from heliograph_backends.cpu.kernels.vector.atomics import (
    call_multiply_few,
    call_unpack_panels,
    float_of_bits,
    load_bits,
    load_double,
    load_f32,
    load_i16,
    load_i32,
    store_double,
    store_f32,
    word,
)
from heliograph_backends.cpu.kernels.vector.lanes import Entry, jit, jit_inline
from heliograph_backends.cpu.kernels.vector.space import locate, operand_address, operand_base

F16_F32 = int(Conversion.F16_F32)
BF16 = int(Stored.BF16)
# The patterns of -inf in a mask: one, and as many as fill a word.
HIDING_HALF, HIDING_SINGLE = -0x0400, -0x00800000
HIDING_HALVES, HIDING_SINGLES = -0x03FF03FF03FF0400, -0x007FFFFF00800000
INFINITY, ONE, ZERO = np.float32(np.inf), np.float32(1), np.float32(0)
SCORE_ROW_BYTES = 4 * KEY_BLOCK


@jit
def is_hidden(conversion: int, mask: int, count: int) -> bool:
    """True if a row of a mask is -inf everywhere."""
    half = conversion == F16_F32
    size, hiding = (2, HIDING_HALVES) if half else (4, HIDING_SINGLES)
    end = mask + size * count
    while mask + 8 <= end:
        if load_bits(mask) != hiding:
            return False
        mask += 8
    while mask < end:
        if (load_i16(mask) if half else load_i32(mask)) != (HIDING_HALF if half else HIDING_SINGLE):
            return False
        mask += size
    return True


@jit
def all_hidden(step: int, mask: int, mask_row: int, rows: int, count: int) -> bool:
    """True if a mask hides a block of keys from all rows."""
    for _ in range(rows):
        if not is_hidden(word(step, MASK_CONVERSION), mask, count):
            return False
        mask += mask_row
    return True


@jit
def slope_of(step: int, scratch: int, row: int) -> Any:
    """Return the slope of the head of a row of queries."""
    if word(step, SLOPE_COUNT) == 0:
        return ONE
    heads = step + 8 * HEADS
    place = step + 8 * SLOPES + row * word(heads, ROW_STRIDE)
    for dimension in range(OUTER_DIMENSIONS):
        place += word(scratch + INDEX_AT, dimension) * word(heads, OUTER_STRIDES + dimension)
    return float_of_bits(word(place, 0))


@jit
def open_rows(step: int, slots: int, scratch: int, row: int, rows: int, states: int) -> None:
    """Initialise the states of rows: empty, or with a sink."""
    has_sinks = word(step + 8 * SINKS, SLOT) >= 0
    sink = first_row(step + 8 * SINKS, slots, scratch, row)
    for _ in range(rows):
        largest = load_f32(sink) if has_sinks else -INFINITY
        # NaN for a sink that is infinite or NaN itself.
        total = 0.0 if largest == -INFINITY else largest - largest + 1.0
        store_f32(states + LARGEST_SCORE, largest if largest == largest else -INFINITY)
        store_double(states + TOTAL, total)
        states += STATE_BYTES
        sink += word(step + 8 * SINKS, ROW_STRIDE)


@jit_inline
def multiply_keys(
    step: int,
    scratch: int,
    keys: int,
    count: int,
    queries: int,
    query_row: int,
    rows: int,
    scores: int,
    panels: int,
) -> None:
    """Write the products of rows of queries with a block of keys to `scores`."""
    form, depth = word(step, KEY_FORM), word(step, KEY_WIDTH)
    key_row = word(step + 8 * KEYS, ROW_STRIDE)
    panel_bytes = (depth + 15) // 16 * 16 * PANEL_ROW_BYTES
    if form != FLOAT32 and rows <= FEW_ROWS:
        call_multiply_few(
            scratch,
            form,
            scores,
            SCORE_ROW_BYTES,
            queries,
            query_row,
            keys,
            key_row,
            rows,
            count,
            depth,
            1,
            keys,
        )
        return
    if form == FLOAT32:
        pack_panels(panels, panel_bytes, keys, 4, key_row, depth, count)
    else:
        call_unpack_panels(scratch, form, panels, panel_bytes, keys, key_row, depth, count)
    multiply_panels(
        scores, SCORE_ROW_BYTES, queries, query_row, panels, panel_bytes, rows, count, depth, 1, 0, 0
    )


@jit_inline
def weigh_rows(
    step: int, scratch: int, row: int, rows: int, mask: int, mask_row: int, count: int, area: int
) -> None:
    """Turn the block's products into powers."""
    scale, cap = float_of_bits(word(step, SCORE_SCALE)), float_of_bits(word(step, SCORE_CAP))
    states, scores = area + word(step, STATES_AT), area + word(step, SCORES_AT)
    conversion, wide = word(step, MASK_CONVERSION), area + word(step, BIASES_AT)
    for place in range(rows):
        biases = mask
        if mask and conversion == F16_F32:
            convert_plain(conversion, wide, 4, mask, 2, count, 1, 0, 0)
            biases = wide
        slope = slope_of(step, scratch, row + place)
        weigh_row(scores, count, biases, slope, scale, cap, states)
        scores += SCORE_ROW_BYTES
        states += STATE_BYTES
        mask += mask_row


@jit_inline
def add_block(
    step: int,
    scratch: int,
    values: int,
    count: int,
    target: int,
    target_row: int,
    rows: int,
    first: int,
    area: int,
) -> None:
    """Add the block's powers times its values to the target."""
    form, columns = word(step, VALUE_FORM), word(step, COLUMNS)
    value_row, scores = word(step + 8 * VALUES, ROW_STRIDE), area + word(step, SCORES_AT)
    if form > BF16:
        wide, panel = area + word(step, WIDE_VALUES_AT), area + word(step, PANELS_AT)
        size, bytes_ = word(step, VALUE_ELEMENTS), word(step, VALUE_BYTES)
        for key in range(count):
            source = values + key * value_row
            unpack_row(scratch, form, size, bytes_, wide + 4 * key * columns, source, columns, panel)
        form, values, value_row = FLOAT32, wide, 4 * columns
    if rows <= FEW_ROWS:
        add_values(
            form,
            rows,
            target,
            target_row,
            scores,
            SCORE_ROW_BYTES,
            values,
            value_row,
            count,
            columns,
            first,
        )
        return
    panels, panel_bytes = area + word(step, PANELS_AT), KEY_BLOCK * PANEL_ROW_BYTES
    size = 4 if form == FLOAT32 else 2
    for column in range(0, columns, PANEL_COLUMNS):
        panel = panels + column // PANEL_COLUMNS * panel_bytes
        pack_values(form, panel, values + size * column, value_row, count, columns - column)
    multiply_panels(
        target, target_row, scores, SCORE_ROW_BYTES, panels, panel_bytes, rows, columns, count, first, 0, 0
    )


@jit
def scale_rows(step: int, target: int, target_row: int, rows: int, area: int) -> None:
    """Scale the sums of values down in rows with a new largest score."""
    states = area + word(step, STATES_AT)
    for _ in range(rows):
        factor = load_f32(states + RESCALED)
        if factor != ONE:
            scale_row(target, word(step, COLUMNS), factor)
        target += target_row
        states += STATE_BYTES


@jit
def finish_rows(step: int, target: int, target_row: int, rows: int, seen: bool, area: int) -> None:
    """Divide the sums of values by the sums of powers; rows without visible keys are zeros."""
    states, columns = area + word(step, STATES_AT), word(step, COLUMNS)
    for _ in range(rows):
        total = load_double(states + TOTAL)
        if not seen:
            for column in range(columns):
                store_f32(target + 4 * column, total - total)
        else:
            scale_row(target, columns, np.float32(1.0 / total) if total != 0.0 else ONE)
        target += target_row
        states += STATE_BYTES


@Entry
def attention_block(_kind: int, step: int, block: int, slots: int, scratch: int) -> None:
    """Run one block of rows of queries."""
    row, rows, _, _ = locate(step, block, scratch)
    area = scratch + PACK_AT
    queries = operand_address(step + 8 * QUERIES, slots, scratch, row, 0)
    query_row = word(step + 8 * QUERIES, ROW_STRIDE)
    target = operand_address(step + 8 * ATTENDED, slots, scratch, row, 0)
    target_row = word(step + 8 * ATTENDED, ROW_STRIDE)
    keys, key_row = operand_base(step + 8 * KEYS, slots, scratch), word(step + 8 * KEYS, ROW_STRIDE)
    values, value_row = operand_base(step + 8 * VALUES, slots, scratch), word(step + 8 * VALUES, ROW_STRIDE)
    mask, mask_row = (
        first_row(step + 8 * MASK, slots, scratch, row),
        word(step + 8 * MASK, ROW_STRIDE),
    )
    mask_size = 2 if word(step, MASK_CONVERSION) == F16_F32 else 4
    open_rows(step, slots, scratch, row, rows, area + word(step, STATES_AT))
    key_count, first = word(step, KEY_COUNT), 1
    for start in range(0, key_count, KEY_BLOCK):
        count = min(KEY_BLOCK, key_count - start)
        shown = mask + start * mask_size if mask else 0
        if mask and all_hidden(step, shown, mask_row, rows, count):
            continue
        scores, panels = area + word(step, SCORES_AT), area + word(step, PANELS_AT)
        multiply_keys(step, scratch, keys + start * key_row, count, queries, query_row, rows, scores, panels)
        weigh_rows(step, scratch, row, rows, shown, mask_row, count, area)
        if first == 0:
            scale_rows(step, target, target_row, rows, area)
        add_block(step, scratch, values + start * value_row, count, target, target_row, rows, first, area)
        first = 0
    finish_rows(step, target, target_row, rows, first == 0, area)
