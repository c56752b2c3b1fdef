"""Products of rows with matrices selected by ids: mul_mat_id.

A block is some columns of one expert. If there are fewer ids than experts, it is some columns of
the expert of one id, unless an earlier id has the same expert. The block lists the rows of the
expert and multiplies them, so that an expert is read once for all its rows, and not at all without
rows. An element is the same chain as in `matmul`.

The leader checks all ids before any tile runs, and ends the run at one out of range. Each read of
an id checks it again, so a concurrent change of the memory does no harm.
"""

from __future__ import annotations

from heliograph_backends.cpu.kernels.matmul.matmul import multiply_panels
from heliograph_backends.cpu.kernels.matmul.packing import PANEL_ROW_BYTES
from heliograph_backends.cpu.kernels.program.stored_types import (
    INTEGERS,
    MOST_ROWS,
    STAGED_BLOCK,
    STAGED_BLOCK_BYTES,
)
from heliograph_backends.cpu.kernels.program.words import (
    BLOCKS,
    COLUMN_BLOCK,
    COLUMN_BLOCKS,
    COLUMN_STRIDE,
    EXPERT_BLOCK,
    EXPERT_BLOCK_BYTES,
    EXPERT_BY_ID,
    EXPERT_COUNT,
    EXPERT_DEPTH,
    EXPERT_FORM,
    EXPERT_ID_BYTES,
    EXPERT_IDS,
    EXPERT_LEFT_AT,
    EXPERT_OWN,
    EXPERT_PANELS_AT,
    EXPERT_PRODUCT_AT,
    EXPERT_RESULT,
    EXPERT_ROWS,
    EXPERT_ROWS_AT_ONCE,
    EXPERT_TOKENS,
    EXPERT_USED,
    EXPERT_WEIGHTS,
    FAILED_INDEX,
    INDEX_AT,
    OFFSET,
    OUTER_DIMENSIONS,
    OUTER_STRIDES,
    PACK_AT,
    ROW_STRIDE,
    SLOT,
    STRIP_GAP_BYTES,
    UNPACKED_DEPTH,
)
from heliograph_backends.cpu.kernels.vector.atomics import (
    call_multiply_few,
    call_multiply_integers,
    call_stage_integers,
    call_unpack_panels,
    load_i32,
    set_word,
    word,
)
from heliograph_backends.cpu.kernels.vector.lanes import Entry, jit, jit_inline
from heliograph_backends.cpu.kernels.vector.space import copy_block, copy_row, locate, next_block

OUTER_STRIDE = OUTER_STRIDES + OUTER_DIMENSIONS - 1


@jit
def start_of(operand: int, slots: int, outer: int, row: int) -> int:
    """Return the address of an operand's element (outer, row, 0)."""
    address: int = word(slots, word(operand, SLOT)) + word(operand, OFFSET)
    address += outer * word(operand, OUTER_STRIDE) + row * word(operand, ROW_STRIDE)
    return address


@jit
def id_at(step: int, slots: int, place: int) -> int:
    """Return the id of a place, counted over tokens and their ids."""
    used = word(step, EXPERT_USED)
    address = start_of(step + 8 * EXPERT_IDS, slots, 0, place // used)
    address += place % used * word(step + 8 * EXPERT_IDS, COLUMN_STRIDE)
    if word(step, EXPERT_ID_BYTES) == 4:
        narrow: int = load_i32(address)
        return narrow
    wide: int = word(address, 0)
    return wide


@jit
def names_no_expert(step: int, slots: int, control: int) -> bool:
    """True if an id is out of range; the first one is stored in the control block."""
    for place in range(word(step, EXPERT_TOKENS) * word(step, EXPERT_USED)):
        expert = id_at(step, slots, place)
        if expert < 0 or expert >= word(step, EXPERT_COUNT):
            set_word(control, FAILED_INDEX, expert)
            return True
    return False


@jit
def expert_of(step: int, slots: int, number: int) -> int:
    """Return the expert of a block's outer index; -1 if it is invalid or belongs to another
    block."""
    if word(step, EXPERT_BY_ID) == 0:
        return number
    expert = id_at(step, slots, number)
    if expert < 0 or expert >= word(step, EXPERT_COUNT):
        return -1
    for earlier in range(number):
        if id_at(step, slots, earlier) == expert:
            return -1
    return expert


@jit
def list_rows(step: int, slots: int, scratch: int, expert: int, place: int) -> tuple[int, int]:
    """List an expert's next rows from a place on: the addresses of each row and of its product.

    Returns their number and the place to continue from.
    """
    used, own = word(step, EXPERT_USED), word(step, EXPERT_OWN)
    places, most = word(step, EXPERT_TOKENS) * used, word(step, EXPERT_ROWS_AT_ONCE)
    count = 0
    while place < places and count < most:
        if id_at(step, slots, place) == expert:
            token, slot = place // used, place % used
            rows = scratch + PACK_AT + 16 * count
            set_word(rows, 0, start_of(step + 8 * EXPERT_ROWS, slots, token, slot % own))
            set_word(rows, 1, start_of(step + 8 * EXPERT_RESULT, slots, token, slot))
            count += 1
        place += 1
    return count, place


@jit
def gather_rows(
    step: int, scratch: int, target: int, target_row: int, count: int, start: int, depth: int
) -> None:
    """Copy a part of the listed rows into adjacent rows."""
    column = word(step + 8 * EXPERT_ROWS, COLUMN_STRIDE)
    for row in range(count):
        source = word(scratch + PACK_AT + 16 * row, 0) + start * column
        copy_block(target + row * target_row, 0, 4, source, 0, column, 1, depth)


@jit
def weights_ahead(step: int, block: int, slots: int, scratch: int, weights: int) -> int:
    """Return the probable address of the weights of this worker's next block; those of this block
    if there is none, or if another block has the expert.
    """
    following, column_blocks = next_block(step, block, scratch), word(step, COLUMN_BLOCKS)
    if following >= word(step, BLOCKS):
        return weights
    expert = expert_of(step, slots, following // column_blocks)
    if expert < 0:
        return weights
    column = following % column_blocks * word(step, COLUMN_BLOCK)
    found: int = start_of(step + 8 * EXPERT_WEIGHTS, slots, expert, column)
    return found


@jit
def write_listed(step: int, scratch: int, column: int, columns: int, count: int) -> None:
    """Copy the listed rows' products from the scratch to their places."""
    product, product_row = scratch + word(step, EXPERT_PRODUCT_AT), 4 * word(step, COLUMN_BLOCK)
    for row in range(count):
        target = word(scratch + PACK_AT + 16 * row, 1) + 4 * column
        copy_row(target, product + row * product_row, columns)


@jit
def multiply_staged(step: int, scratch: int, weights: int, column: int, columns: int, count: int) -> None:
    """Multiply the listed rows, which are q8_0, by some columns of an expert."""
    form, depth = word(step, EXPERT_FORM), word(step, EXPERT_DEPTH)
    staged = scratch + word(step, EXPERT_LEFT_AT)
    staged_row = depth // STAGED_BLOCK * STAGED_BLOCK_BYTES
    for row in range(count):
        source = word(scratch + PACK_AT + 16 * row, 0)
        call_stage_integers(scratch, form, staged + row * staged_row, 0, source, 0, 1, depth)
    call_multiply_integers(
        scratch,
        form,
        scratch + word(step, EXPERT_PRODUCT_AT),
        4 * word(step, COLUMN_BLOCK),
        staged,
        staged_row,
        weights,
        word(step + 8 * EXPERT_WEIGHTS, ROW_STRIDE),
        count,
        columns,
        depth,
        scratch + word(step, EXPERT_PANELS_AT),
    )
    write_listed(step, scratch, column, columns, count)


@jit_inline
def multiply_listed(
    step: int, scratch: int, weights: int, column: int, columns: int, count: int, ahead: int
) -> None:
    """Multiply the listed rows by some columns of an expert."""
    form, depth = word(step, EXPERT_FORM), word(step, EXPERT_DEPTH)
    column_step = word(step + 8 * EXPERT_WEIGHTS, ROW_STRIDE)
    if form >= INTEGERS:
        multiply_staged(step, scratch, weights, column, columns, count)
        return
    left, product = scratch + word(step, EXPERT_LEFT_AT), scratch + word(step, EXPERT_PRODUCT_AT)
    panels, product_row = scratch + word(step, EXPERT_PANELS_AT), 4 * word(step, COLUMN_BLOCK)
    few = count <= MOST_ROWS[form]
    # A single row is read and written in place.
    alone = count == 1 and word(step + 8 * EXPERT_ROWS, COLUMN_STRIDE) == 4
    if alone:
        left = word(scratch + PACK_AT, 0)
        product = word(scratch + PACK_AT, 1) + 4 * column
    part = depth if few else UNPACKED_DEPTH
    for start in range(0, max(depth, 1), max(part, 1)):
        size = min(part, depth - start)
        left_row = 4 * size + STRIP_GAP_BYTES
        if not alone:
            gather_rows(step, scratch, left, left_row, count, start, size)
        source = weights + start // word(step, EXPERT_BLOCK) * word(step, EXPERT_BLOCK_BYTES)
        first = 1 if start == 0 else 0
        if few:
            call_multiply_few(
                scratch,
                form,
                product,
                product_row,
                left,
                left_row,
                source,
                column_step,
                count,
                columns,
                size,
                first,
                ahead,
            )
        else:
            panel_bytes = (size + 15) // 16 * 16 * PANEL_ROW_BYTES
            call_unpack_panels(scratch, form, panels, panel_bytes, source, column_step, size, columns)
            multiply_panels(
                product, product_row, left, left_row, panels, panel_bytes, count, columns, size, first, 0, 0
            )
    if not alone:
        write_listed(step, scratch, column, columns, count)


@Entry
def experts_block(_kind: int, step: int, block: int, slots: int, scratch: int) -> None:
    """Run one block of a product with experts."""
    _, _, column, columns = locate(step, block, scratch)
    expert = expert_of(step, slots, word(scratch + INDEX_AT, OUTER_DIMENSIONS - 1))
    places = word(step, EXPERT_TOKENS) * word(step, EXPERT_USED)
    place = places if expert < 0 else 0
    while place < places:
        count, place = list_rows(step, slots, scratch, expert, place)
        if count > 0:
            weights = start_of(step + 8 * EXPERT_WEIGHTS, slots, expert, column)
            ahead = weights_ahead(step, block, slots, scratch, weights)
            multiply_listed(step, scratch, weights, column, columns, count, ahead)
