"""Moves of rows with conversion: copies, gathers and scatters.

Indices are data of a run. The leader checks all indices of a step before any tile of it runs, and
ends the run at one out of range. Each move checks its index again, so a concurrent change of the
memory does no harm.
"""

from __future__ import annotations

from heliograph_backends.cpu.kernels.program.elements import PACK, RANDOM, UNPACK, Conversion
from heliograph_backends.cpu.kernels.program.words import (
    BLOCKS,
    BUFFERS_AT,
    CHOICES,
    COLUMN_STRIDE,
    CONVERSION,
    CONVERTED,
    CONVERTED_COUNT,
    CONVERTED_FROM,
    CONVERTED_FROM_ROW,
    CONVERTED_ROWS,
    CONVERTED_STEP,
    CONVERTED_TO,
    CONVERTED_TO_ROW,
    FAILED_INDEX,
    FROM_BYTES,
    FROM_ELEMENTS,
    MOVED_FROM,
    MOVED_TO,
    ROW_STRIDE,
    TO_BYTES,
    TO_ELEMENTS,
    WHICH,
    WHICH_BYTES,
    WHICH_COUNT,
    Kind,
)
from heliograph_backends.cpu.kernels.rows.convert_lanes import convert_plain
from heliograph_backends.cpu.kernels.rows.random_numbers import random_words
from heliograph_backends.cpu.kernels.rows.stored_rows import unpack_row
from heliograph_backends.cpu.kernels.vector.atomics import call_pack_row, load_i32, set_word, word
from heliograph_backends.cpu.kernels.vector.lanes import Entry, jit, jit_inline
from heliograph_backends.cpu.kernels.vector.space import locate, operand_address

F16_F32 = int(Conversion.F16_F32)
CONVERT, GATHER, SCATTER = int(Kind.CONVERT), int(Kind.GATHER), int(Kind.SCATTER)


@jit
def index_at(step: int, address: int) -> int:
    """Return the index at an address."""
    if word(step, WHICH_BYTES) == 4:
        narrow: int = load_i32(address)
        return narrow
    wide: int = word(address, 0)
    return wide


@jit
def has_outside(kind: int, step: int, slots: int, control: int, scratch: int) -> bool:
    """True if an index of a step is out of range; the first one is stored in the control block."""
    choices, stride = word(step, CHOICES), word(step + 8 * WHICH, ROW_STRIDE)
    for block in range(word(step, BLOCKS)):
        row, rows, column, _ = locate(step, block, scratch)
        if kind == SCATTER:
            rows = word(step, WHICH_COUNT) if column == 0 else 0
        address = operand_address(step + 8 * WHICH, slots, scratch, row, 0)
        for _ in range(rows):
            index = index_at(step, address)
            if index < 0 or index >= choices:
                set_word(control, FAILED_INDEX, index)
                return True
            address += stride
    return False


@jit_inline
def move_rows(
    step: int,
    target: int,
    source: int,
    columns: int,
    rows: int,
    target_row: int,
    source_row: int,
    scratch: int,
) -> None:
    """Convert rows; for blocks, a single row."""
    conversion = word(step, CONVERSION)
    if conversion >= PACK:
        call_pack_row(scratch, conversion - PACK, word(step, TO_BYTES), target, source, columns)
    elif conversion >= UNPACK:
        size, count = word(step, FROM_ELEMENTS), word(step, FROM_BYTES)
        unpack_row(scratch, conversion - UNPACK, size, count, target, source, columns, scratch + BUFFERS_AT)
    else:
        target_step, source_step = (
            word(step + 8 * MOVED_TO, COLUMN_STRIDE),
            word(step + 8 * MOVED_FROM, COLUMN_STRIDE),
        )
        convert_plain(
            conversion, target, target_step, source, source_step, columns, rows, target_row, source_row
        )


@jit_inline
def move_block(kind: int, step: int, block: int, slots: int, scratch: int) -> None:
    """Run one block of a step that moves rows."""
    row, rows, column, columns = locate(step, block, scratch)
    if kind == CONVERT and RANDOM <= word(step, CONVERSION) < UNPACK:
        seed = operand_address(step + 8 * MOVED_FROM, slots, scratch, 0, 0)
        counter = operand_address(step + 8 * WHICH, slots, scratch, 0, 0)
        target = operand_address(step + 8 * MOVED_TO, slots, scratch, 0, column)
        as_floats = word(step, CONVERSION) - RANDOM
        random_words(target, column // 4, columns, word(seed, 0), word(counter, 0), as_floats)
        return
    source_row, target_row = word(step + 8 * MOVED_FROM, ROW_STRIDE), word(step + 8 * MOVED_TO, ROW_STRIDE)
    which, which_row, choices = 0, 0, word(step, CHOICES)
    first = row
    if kind != CONVERT:
        which = operand_address(step + 8 * WHICH, slots, scratch, row, 0)
        which_row = word(step + 8 * WHICH, ROW_STRIDE)
        first = 0 if kind == GATHER else row
        rows = word(step, WHICH_COUNT) if kind == SCATTER else rows
    place = column // word(step, FROM_ELEMENTS)
    source = operand_address(step + 8 * MOVED_FROM, slots, scratch, first, place)
    target = operand_address(step + 8 * MOVED_TO, slots, scratch, row, column // word(step, TO_ELEMENTS))
    together = 1
    if kind == CONVERT and word(step, CONVERSION) < UNPACK:
        together, rows = rows, 1
    for _ in range(rows):
        here, there, index = source, target, 0
        if kind != CONVERT:
            index = index_at(step, which)
            which += which_row
        if kind == GATHER:
            here += index * source_row
        else:
            source += source_row
        if kind == SCATTER:
            there += index * target_row
        else:
            target += target_row
        if kind == CONVERT or 0 <= index < choices:
            move_rows(step, there, here, columns, together, target_row, source_row, scratch)


@jit_inline
def convert_staged(conversion: int, rows: int) -> None:
    """Convert the rows described by words."""
    widens, step = conversion >= F16_F32, word(rows, CONVERTED_STEP)
    convert_plain(
        conversion,
        word(rows, CONVERTED_TO),
        4 if widens else step,
        word(rows, CONVERTED_FROM),
        step if widens else 4,
        word(rows, CONVERTED_COUNT),
        word(rows, CONVERTED_ROWS),
        word(rows, CONVERTED_TO_ROW),
        word(rows, CONVERTED_FROM_ROW),
    )


@Entry
def moves_block(kind: int, step: int, block: int, slots: int, scratch: int) -> None:
    """Run one block of a step that moves rows.

    With CONVERTED + a conversion as the kind, convert rows between contiguous float32 and f16 or
    bf16; `step` is then the address of the words that describe them.
    """
    if kind >= CONVERTED:
        convert_staged(kind - CONVERTED, step)
    else:
        move_block(kind, step, block, slots, scratch)
