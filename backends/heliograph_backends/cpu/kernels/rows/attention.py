"""Attention in one step: for some rows of queries, over keys and values block by block.

Theory of operation. A row's scores never exist all at once. The kernel keeps the largest score so
far, the sum of the powers and the sums of values, and scales them down when it finds a larger score
(Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al.,
"FlashAttention", 2022). Blocks have KEY_BLOCK keys, whatever the rows are. With few rows, stored
keys and values stream through registers; with more, a block of them becomes float32 panels in the
cache for the kernels of the matrix product. The numbers are the same, see `attention_lanes`.

Keys and values may lie in pages that a table of each row names. A block of keys is then several
pieces, each of one page; else it is one piece. A piece is read where it lies, so that the numbers
are those of contiguous keys and values.

Blocks and pieces of keys that the mask hides from all rows are not read: their scores are 0 before
the mask, so that their powers are 0.
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
    KEY_BYTES,
    KEY_COUNT,
    KEY_FORM,
    KEY_PAGE_BYTES,
    KEY_WIDTH,
    KEYS,
    LARGEST_SCORE,
    MASK,
    MASK_CONVERSION,
    OUTER_DIMENSIONS,
    OUTER_STRIDES,
    PACK_AT,
    PAGE_KEYS,
    PAGES,
    PANEL_COLUMNS,
    PANELS_AT,
    PIECE_BYTES,
    PIECE_COUNT,
    PIECE_FIRST,
    PIECE_KEYS,
    PIECE_VALUES,
    PIECES_AT,
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
    VALUE_PAGE_BYTES,
    VALUES,
    WIDE_VALUES_AT,
)
from heliograph_backends.cpu.kernels.rows.attention_lanes import (
    add_values,
    fetch_rows,
    pack_values,
    scale_row,
    weigh_row,
)
from heliograph_backends.cpu.kernels.rows.convert_lanes import convert_plain
from heliograph_backends.cpu.kernels.rows.pages import page_at
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
    set_word,
    store_double,
    store_f32,
    word,
)
from heliograph_backends.cpu.kernels.vector.lanes import Entry, jit, jit_inline
from heliograph_backends.cpu.kernels.vector.space import fill_row, locate, operand_address, operand_base

F16_F32 = int(Conversion.F16_F32)
BF16, F32 = int(Stored.BF16), int(Stored.F32)
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


@jit
def place_piece(step: int, piece: int, table: int, keys: int, values: int, number: int) -> None:
    """Set the addresses of a piece that begins with this key of a row."""
    size = word(step, PAGE_KEYS)
    page, first = page_at(step, table, number // size), number % size
    keys += page * word(step, KEY_PAGE_BYTES) + first * word(step + 8 * KEYS, ROW_STRIDE)
    values += page * word(step, VALUE_PAGE_BYTES) + first * word(step + 8 * VALUES, ROW_STRIDE)
    set_word(piece, PIECE_KEYS, keys)
    set_word(piece, PIECE_VALUES, values)


@jit
def cut_block(
    step: int,
    pieces: int,
    table: int,
    keys: int,
    values: int,
    start: int,
    count: int,
    mask: int,
    mask_row: int,
    rows: int,
) -> int:
    """List the pieces of a block of keys, and return the place behind the last one, where the next
    block's first one is."""
    size, mask_size = word(step, PAGE_KEYS), 2 if word(step, MASK_CONVERSION) == F16_F32 else 4
    at = 0
    while at < count:
        some = min(count - at, size - (start + at) % size)
        set_word(pieces, PIECE_FIRST, at)
        set_word(pieces, PIECE_COUNT, some)
        set_word(pieces, PIECE_KEYS, 0)
        set_word(pieces, PIECE_VALUES, 0)
        whole = some == count or mask == 0
        if whole or not all_hidden(step, mask + at * mask_size, mask_row, rows, some):
            place_piece(step, pieces, table, keys, values, start + at)
        at += some
        pieces += PIECE_BYTES
    following = start + count if start + count < word(step, KEY_COUNT) else start
    place_piece(step, pieces, table, keys, values, following)
    return pieces


@jit
def after(piece: int, which: int) -> int:
    """Return the address of the keys or values that are read after those of a piece."""
    own: int = word(piece, which)
    following: int = word(piece + PIECE_BYTES, which)
    return following if following != 0 else own


@jit
def pack_keys(step: int, scratch: int, piece: int, panel: int, panel_bytes: int) -> None:
    """Pack a piece's keys into panels, and prefetch those of the next panel meanwhile."""
    form, depth = word(step, KEY_FORM), word(step, KEY_WIDTH)
    row, size = word(step + 8 * KEYS, ROW_STRIDE), word(step, KEY_BYTES)
    source, some = word(piece, PIECE_KEYS), word(piece, PIECE_COUNT)
    for column in range(0, some, PANEL_COLUMNS):
        left = some - column
        following = source + PANEL_COLUMNS * row if left > PANEL_COLUMNS else after(piece, PIECE_KEYS)
        fetch_rows(following, row, PANEL_COLUMNS, size)
        if form == F32:
            pack_panels(panel, panel_bytes, source, 4, row, depth, min(left, PANEL_COLUMNS))
        else:
            call_unpack_panels(
                scratch, form, panel, panel_bytes, source, row, depth, min(left, PANEL_COLUMNS)
            )
        source = following
        panel += panel_bytes


@jit_inline
def multiply_keys(
    step: int,
    scratch: int,
    pieces: int,
    behind: int,
    queries: int,
    query_row: int,
    rows: int,
    count: int,
    area: int,
) -> None:
    """Write the products of rows of queries with a block of keys to the scores."""
    form, depth = word(step, KEY_FORM), word(step, KEY_WIDTH)
    key_row = word(step + 8 * KEYS, ROW_STRIDE)
    scores, panels = area + word(step, SCORES_AT), area + word(step, PANELS_AT)
    panel_bytes = (depth + 15) // 16 * 16 * PANEL_ROW_BYTES
    # Panels have keys of one page each.
    packs = rows > FEW_ROWS and word(step, PAGE_KEYS) % PANEL_COLUMNS == 0
    for piece in range(pieces, behind, PIECE_BYTES):
        first, some, keys = word(piece, PIECE_FIRST), word(piece, PIECE_COUNT), word(piece, PIECE_KEYS)
        if keys == 0:
            continue
        if packs:
            pack_keys(step, scratch, piece, panels + first // PANEL_COLUMNS * panel_bytes, panel_bytes)
        else:
            for row in range(0, rows, FEW_ROWS):
                call_multiply_few(
                    scratch,
                    form,
                    scores + row * SCORE_ROW_BYTES + 4 * first,
                    SCORE_ROW_BYTES,
                    queries + row * query_row,
                    query_row,
                    keys,
                    key_row,
                    min(rows - row, FEW_ROWS),
                    some,
                    depth,
                    1,
                    after(piece, PIECE_KEYS),
                )
    if packs:
        multiply_panels(
            scores, SCORE_ROW_BYTES, queries, query_row, panels, panel_bytes, rows, count, depth, 1, 0, 0
        )
    for piece in range(pieces, behind, PIECE_BYTES):
        if word(piece, PIECE_KEYS) == 0:
            place = scores + 4 * word(piece, PIECE_FIRST)
            for row in range(rows):
                fill_row(place + row * SCORE_ROW_BYTES, ZERO, word(piece, PIECE_COUNT))


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


@jit
def widen_values(step: int, scratch: int, piece: int, area: int) -> int:
    """Convert a piece's values in blocks to float32, and return their address."""
    columns, row = word(step, COLUMNS), word(step + 8 * VALUES, ROW_STRIDE)
    target: int = area + word(step, WIDE_VALUES_AT) + 4 * word(piece, PIECE_FIRST) * columns
    source, place = word(piece, PIECE_VALUES), target
    for _ in range(word(piece, PIECE_COUNT)):
        unpack_row(
            scratch,
            word(step, VALUE_FORM),
            word(step, VALUE_ELEMENTS),
            word(step, VALUE_BYTES),
            place,
            source,
            columns,
            area + word(step, PANELS_AT),
        )
        source += row
        place += 4 * columns
    return target


@jit
def pack_piece(step: int, form: int, piece: int, values: int, value_row: int, panels: int) -> None:
    """Pack a piece's values into its rows of the panels; hidden ones are zeros."""
    columns, some = word(step, COLUMNS), word(piece, PIECE_COUNT)
    size = 4 if form == FLOAT32 else 2
    panels += word(piece, PIECE_FIRST) * PANEL_ROW_BYTES
    for column in range(0, columns, PANEL_COLUMNS):
        if values == 0:
            fill_row(panels, ZERO, some * PANEL_COLUMNS)
        else:
            place = values + size * column
            following = after(piece, PIECE_VALUES) + size * column
            pack_values(form, panels, place, value_row, some, columns - column, following)
        panels += KEY_BLOCK * PANEL_ROW_BYTES


@jit_inline
def add_block(
    step: int,
    scratch: int,
    pieces: int,
    behind: int,
    target: int,
    target_row: int,
    rows: int,
    count: int,
    first: int,
    area: int,
) -> None:
    """Add the block's powers times its values to the target."""
    form, columns = word(step, VALUE_FORM), word(step, COLUMNS)
    value_row, scores = word(step + 8 * VALUES, ROW_STRIDE), area + word(step, SCORES_AT)
    panels, is_wide = area + word(step, PANELS_AT), form > BF16
    if is_wide:
        form, value_row = FLOAT32, 4 * columns
        for piece in range(pieces, behind, PIECE_BYTES):
            if word(piece, PIECE_VALUES) != 0:
                set_word(piece, PIECE_VALUES, widen_values(step, scratch, piece, area))
    for piece in range(pieces, behind, PIECE_BYTES):
        values = word(piece, PIECE_VALUES)
        if rows > FEW_ROWS:
            pack_piece(step, form, piece, values, value_row, panels)
        elif values != 0:
            place = scores + 4 * word(piece, PIECE_FIRST)
            add_values(
                form,
                rows,
                target,
                target_row,
                place,
                SCORE_ROW_BYTES,
                values,
                value_row,
                word(piece, PIECE_COUNT),
                columns,
                first,
                after(piece, PIECE_VALUES),
            )
            first = 0
    if rows > FEW_ROWS:
        panel_bytes = KEY_BLOCK * PANEL_ROW_BYTES
        multiply_panels(
            target,
            target_row,
            scores,
            SCORE_ROW_BYTES,
            panels,
            panel_bytes,
            rows,
            columns,
            count,
            first,
            0,
            0,
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
    keys = operand_base(step + 8 * KEYS, slots, scratch)
    values = operand_base(step + 8 * VALUES, slots, scratch)
    table = first_row(step + 8 * PAGES, slots, scratch, 0)
    pieces = area + word(step, PIECES_AT)
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
        behind = cut_block(step, pieces, table, keys, values, start, count, shown, mask_row, rows)
        multiply_keys(step, scratch, pieces, behind, queries, query_row, rows, count, area)
        weigh_rows(step, scratch, row, rows, shown, mask_row, count, area)
        if first == 0:
            scale_rows(step, target, target_row, rows, area)
        add_block(step, scratch, pieces, behind, target, target_row, rows, count, first, area)
        first = 0
    finish_rows(step, target, target_row, rows, first == 0, area)
