"""One block of a matrix product: pack the sides if needed, multiply strip by strip, run the
epilogue while C is in the cache.
"""

from __future__ import annotations

from heliograph_backends.cpu.kernels.elementwise.interpreter import KINDS
from heliograph_backends.cpu.kernels.matmul.inner_loop import KERNEL_COLUMNS, KERNEL_ROWS, multiply_strip
from heliograph_backends.cpu.kernels.matmul.packing import PANEL_ROW_BYTES, pack_panels
from heliograph_backends.cpu.kernels.matmul.widening import widen_lines
from heliograph_backends.cpu.kernels.program.stored_types import (
    INTEGERS,
    MOST_ROWS,
    STAGED_BLOCK,
    STAGED_BLOCK_BYTES,
)
from heliograph_backends.cpu.kernels.program.words import (
    BLOCKS,
    BUFFERS_AT,
    COLUMN_BLOCK,
    COLUMN_BLOCKS,
    COLUMN_STRIDE,
    COLUMNS,
    DEPTH,
    DEPTH_BLOCK,
    EPILOGUE,
    GEOMETRY_AT,
    HAS_EPILOGUE,
    LEFT,
    NARROW_IMAGE,
    PACK_AT,
    PACK_LEFT,
    PACK_RIGHT,
    PADDING_ABOVE,
    PANEL_COLUMNS,
    PATCHES,
    PLANE_STRIDE,
    PRODUCT,
    RESULT_WIDTH,
    RIGHT,
    RIGHT_BLOCK,
    ROW_STRIDE,
    SPREAD_DOWN,
    STEP_DOWN,
    STRIP_GAP_BYTES,
    WIDENING,
    WINDOW_HEIGHT,
    WINDOW_WIDTH,
)
from heliograph_backends.cpu.kernels.vector.atomics import (
    call_elementwise,
    call_finish_rows,
    call_multiply_few,
    call_multiply_integers,
    call_pack_patches,
    call_stage_integers,
    call_unpack_panels,
    word,
)
from heliograph_backends.cpu.kernels.vector.lanes import Entry, jit, jit_inline
from heliograph_backends.cpu.kernels.vector.space import (
    convert_rows,
    copy_block,
    locate,
    next_block,
    operand_address,
    operand_base,
)


@jit_inline
def multiply_panels(
    product: int,
    product_row: int,
    left: int,
    left_row: int,
    right: int,
    panel_bytes: int,
    rows: int,
    columns: int,
    depth: int,
    first: int,
    start: int,
    last_columns: int,
) -> None:
    """Multiply rows of a by consecutive panels, from their row `start`; a panel stays in cache for
    all rows.

    The last panel has rows of `last_columns` if that is not 0, the others of PANEL_COLUMNS.
    """
    whole = columns - last_columns
    strips = (rows + KERNEL_ROWS - 1) // KERNEL_ROWS
    height = (rows + strips - 1) // strips
    for column in range(0, columns, KERNEL_COLUMNS):
        panel_row = PANEL_ROW_BYTES if column < whole else 4 * last_columns
        panel = right + column // PANEL_COLUMNS * panel_bytes + start * panel_row
        panel += column % PANEL_COLUMNS * 4
        for row in range(0, rows, height):
            multiply_strip(
                min(height, rows - row),
                product + row * product_row + column * 4,
                product_row,
                left + row * left_row,
                left_row,
                panel,
                panel_row,
                depth,
                columns - column,
                first,
            )


@jit
def widen_rows(
    step: int,
    target: int,
    target_row: int,
    source: int,
    source_row: int,
    source_column: int,
    rows: int,
    columns: int,
    scratch: int,
) -> None:
    """Convert rows of the left side, f16 or bf16, to float32."""
    kind = word(step, PACK_LEFT) >> WIDENING & KINDS
    for _ in range(rows):
        convert_rows(scratch, kind, target, source, 0, source_column, 1, columns)
        target += target_row
        source += source_row


@jit
def widen_windows(
    geometry: int, source: int, start: int, depth: int, column: int, columns: int, scratch: int
) -> int:
    """Convert what some windows read of the channels from element `start` of windows on to float32,
    and return the address of element (0, 0) of the first of these channels, see `widen_lines`."""
    height = word(geometry, WINDOW_HEIGHT)
    taps, width = height * word(geometry, WINDOW_WIDTH), word(geometry, RESULT_WIDTH)
    down, padding = word(geometry, STEP_DOWN), word(geometry, PADDING_ABOVE)
    top = column // width * down - padding
    last = (column + columns - 1) // width * down - padding
    behind = last + (height - 1) * word(geometry, SPREAD_DOWN) + 1
    source += start // taps * word(geometry, PLANE_STRIDE)
    found: int = widen_lines(geometry, source, top, behind, depth // taps, scratch)
    return found


@jit
def pack_left(
    step: int, packed: int, packed_row: int, left: int, left_row: int, rows: int, depth: int, scratch: int
) -> None:
    """Copy rows of the left side, f16 and bf16 as f32."""
    column = word(step + 8 * LEFT, COLUMN_STRIDE)
    if word(step, PACK_LEFT) == 1:
        copy_block(packed, packed_row, 4, left, left_row, column, rows, depth)
    else:
        widen_rows(step, packed, packed_row, left, left_row, column, rows, depth, scratch)


@jit
def pack_windows(
    step: int,
    panels: int,
    panel_bytes: int,
    image: int,
    start: int,
    depth: int,
    column: int,
    columns: int,
    scratch: int,
) -> None:
    """Write windows of an image as panels, f16 and bf16 as f32."""
    geometry, first_tap = step + 8 * word(step, GEOMETRY_AT), start
    if word(geometry, NARROW_IMAGE):
        image = widen_windows(geometry, image, start, depth, column, columns, scratch)
        geometry, first_tap = scratch + BUFFERS_AT, 0
    call_pack_patches(scratch, geometry, panels, panel_bytes, image, first_tap, depth, column, columns)


@jit_inline
def multiply_slice(
    step: int,
    slots: int,
    scratch: int,
    row: int,
    rows: int,
    column: int,
    columns: int,
    start: int,
    depth: int,
    ahead: int,
) -> None:
    """Continue sums over `depth` of k from `start`; the next block is probably `ahead` columns on."""
    packed = scratch + PACK_AT
    left = operand_address(step + 8 * LEFT, slots, scratch, row, start)
    left_row = word(step + 8 * LEFT, ROW_STRIDE)
    if word(step, PACK_LEFT):
        packed_row = 4 * depth + STRIP_GAP_BYTES
        pack_left(step, packed, packed_row, left, left_row, rows, depth, scratch)
        left, left_row = packed, packed_row
        packed += (rows * packed_row + 63) // 64 * 64
    product = operand_address(step + 8 * PRODUCT, slots, scratch, row, column)
    product_row = word(step + 8 * PRODUCT, ROW_STRIDE)
    form, begin, last, first = word(step, PACK_RIGHT), 0, 0, 1 if start == 0 else 0
    if form:
        right, panel_bytes = packed, (depth + 15) // 16 * 16 * PANEL_ROW_BYTES
        source = operand_address(step + 8 * RIGHT, slots, scratch, start // word(step, RIGHT_BLOCK), column)
        row_step, column_step = word(step + 8 * RIGHT, ROW_STRIDE), word(step + 8 * RIGHT, COLUMN_STRIDE)
        if form == 1:
            pack_panels(right, panel_bytes, source, row_step, column_step, depth, columns)
        elif form == PATCHES:
            pack_windows(step, right, panel_bytes, source, start, depth, column, columns, scratch)
        elif rows <= MOST_ROWS[form]:
            call_multiply_few(
                scratch,
                form,
                product,
                product_row,
                left,
                left_row,
                source,
                column_step,
                rows,
                columns,
                depth,
                first,
                source + ahead * column_step,
            )
            return
        else:
            call_unpack_panels(scratch, form, right, panel_bytes, source, column_step, depth, columns)
    else:
        panel_bytes, begin = word(step, DEPTH) * PANEL_ROW_BYTES, start
        right = operand_base(step + 8 * RIGHT, slots, scratch) + column // PANEL_COLUMNS * panel_bytes
        if column + columns == word(step, COLUMNS):
            last = columns % PANEL_COLUMNS
    multiply_panels(
        product, product_row, left, left_row, right, panel_bytes, rows, columns, depth, first, begin, last
    )


@jit_inline
def multiply_staged(
    step: int, slots: int, scratch: int, row: int, rows: int, column: int, columns: int
) -> None:
    """Multiply rows of q8_0."""
    form, depth = word(step, PACK_RIGHT), word(step, DEPTH)
    staged_row = depth // STAGED_BLOCK * STAGED_BLOCK_BYTES
    staged = scratch + PACK_AT
    left = operand_address(step + 8 * LEFT, slots, scratch, row, 0)
    left_row = word(step + 8 * LEFT, ROW_STRIDE)
    call_stage_integers(scratch, form, staged, staged_row, left, left_row, rows, depth)
    call_multiply_integers(
        scratch,
        form,
        operand_address(step + 8 * PRODUCT, slots, scratch, row, column),
        word(step + 8 * PRODUCT, ROW_STRIDE),
        staged,
        staged_row,
        operand_address(step + 8 * RIGHT, slots, scratch, 0, column),
        word(step + 8 * RIGHT, COLUMN_STRIDE),
        rows,
        columns,
        depth,
        staged + (rows * staged_row + 63) // 64 * 64,
    )


@jit
def columns_ahead(step: int, block: int, scratch: int) -> int:
    """Return the probable distance in columns to the worker's next block; 0 if it has another row
    or matrix."""
    following, column_blocks = next_block(step, block, scratch), word(step, COLUMN_BLOCKS)
    if following >= word(step, BLOCKS) or following // column_blocks != block // column_blocks:
        return 0
    distance: int = (following - block) * word(step, COLUMN_BLOCK)
    return distance


@Entry
def matmul_block(_kind: int, step: int, block: int, slots: int, scratch: int) -> None:
    """Run one block of a matrix product and its epilogue."""
    row, rows, column, columns = locate(step, block, scratch)
    depth, depth_block = word(step, DEPTH), word(step, DEPTH_BLOCK)
    ahead = columns_ahead(step, block, scratch)
    if word(step, PACK_RIGHT) >= INTEGERS:
        multiply_staged(step, slots, scratch, row, rows, column, columns)
    else:
        for start in range(0, max(depth, 1), depth_block):
            part = min(depth_block, depth - start)
            multiply_slice(step, slots, scratch, row, rows, column, columns, start, part, ahead)
    if word(step, HAS_EPILOGUE) == 1:
        call_elementwise(scratch, step + 8 * EPILOGUE, slots, scratch, row, rows, column, columns)
    elif word(step, HAS_EPILOGUE):
        call_finish_rows(scratch, step + 8 * EPILOGUE, slots, scratch, row, rows, column, columns)
