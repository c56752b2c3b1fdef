"""Places of blocks, addresses of operands, and copies between strided blocks."""

from __future__ import annotations

from typing import Any

from numba import types

from heliograph_backends.cpu.kernels.program.elements import Conversion
from heliograph_backends.cpu.kernels.program.words import (
    BLOCKS_PER_TILE,
    COLUMN_BLOCK,
    COLUMN_BLOCKS,
    COLUMN_STRIDE,
    COLUMNS,
    CONVERTED,
    CONVERTED_WORDS,
    ENTRIES_AT,
    INDEX_AT,
    NEXT_AT,
    OFFSET,
    OUTER_DIMENSIONS,
    OUTER_SIZES,
    OUTER_STRIDES,
    ROW_BLOCK,
    ROW_BLOCKS,
    ROW_STRIDE,
    ROWS,
    SLOT,
    WORD_BYTES,
    Kind,
)
from heliograph_backends.cpu.kernels.vector.atomics import load_f32, set_word, store_f32, word
from heliograph_backends.cpu.kernels.vector.lanes import (
    F32,
    I64,
    LANES,
    Lanes,
    call_address,
    element,
    emitted,
    integer,
    jit,
    loop,
    pointer,
    subroutine,
    tail_mask,
    workspace,
)

FIRST_WIDENING = CONVERTED + int(Conversion.F16_F32)


@jit
def locate(step: int, block: int, scratch: int) -> tuple[int, int, int, int]:
    """Return (first row, rows, first column, columns) of a block and put its outer indices into
    scratch."""
    column_blocks, row_blocks = word(step, COLUMN_BLOCKS), word(step, ROW_BLOCKS)
    column = block % column_blocks * word(step, COLUMN_BLOCK)
    rest = block // column_blocks
    row = rest % row_blocks * word(step, ROW_BLOCK)
    rest = rest // row_blocks
    for dimension in range(OUTER_DIMENSIONS - 1, -1, -1):
        size = word(step, OUTER_SIZES + dimension)
        if size == 1:
            set_word(scratch + INDEX_AT, dimension, 0)
        else:
            set_word(scratch + INDEX_AT, dimension, rest % size)
            rest = rest // size
    rows = min(word(step, ROW_BLOCK), word(step, ROWS) - row)
    columns = min(word(step, COLUMN_BLOCK), word(step, COLUMNS) - column)
    return row, rows, column, columns


@jit
def next_block(step: int, block: int, scratch: int) -> int:
    """Return the block that this worker probably runs next; it may be after the step's last one."""
    following, per_tile = block + 1, word(step, BLOCKS_PER_TILE)
    if following % per_tile == 0:
        following = word(scratch + NEXT_AT, 0) * per_tile
    return following


@jit
def operand_base(operand: int, slots: int, scratch: int) -> int:
    """Return the address of an operand's element (0, 0) at the block's outer indices."""
    address: int = word(slots, word(operand, SLOT)) + word(operand, OFFSET)
    for dimension in range(OUTER_DIMENSIONS):
        address += word(scratch + INDEX_AT, dimension) * word(operand, OUTER_STRIDES + dimension)
    return address


@jit
def operand_address(operand: int, slots: int, scratch: int, row: int, column: int) -> int:
    """Return the address of an operand's element (row, column) at the block's outer indices."""
    address: int = operand_base(operand, slots, scratch)
    address += row * word(operand, ROW_STRIDE) + column * word(operand, COLUMN_STRIDE)
    return address


@emitted(types.void, types.int64, types.int64, types.int64)
def copy_row(builder: Any, target: Any, source: Any, count: Any) -> None:
    """Copy `count` contiguous float32."""
    with loop(builder, integer(0), count, LANES) as index:
        mask = tail_mask(builder, builder.sub(count, index))
        lanes = Lanes.load_masked(builder, element(builder, source, index), mask)
        lanes.store_masked(element(builder, target, index), mask)


def _fill(builder: Any, target: Any, value: Any, count: Any) -> None:
    lanes = Lanes.broadcast(builder, value)
    with loop(builder, integer(0), count, LANES) as index:
        mask = tail_mask(builder, builder.sub(count, index))
        lanes.store_masked(element(builder, target, index), mask)


@emitted(types.void, types.int64, types.float32, types.int64)
def fill_row(builder: Any, target: Any, value: Any, count: Any) -> None:
    """Store `count` contiguous float32 of one value."""
    _fill(builder, target, value, count)


@jit
def copy_scattered(target: int, target_step: int, source: int, source_step: int, count: int) -> None:
    """Copy `count` float32 between any strides."""
    for _ in range(count):
        store_f32(target, load_f32(source))
        target += target_step
        source += source_step


@jit
def copy_block(
    target: int,
    target_row: int,
    target_column: int,
    source: int,
    source_row: int,
    source_column: int,
    rows: int,
    columns: int,
) -> None:
    """Copy rows by columns of float32 between any byte strides."""
    for _ in range(rows):
        if target_column == 4 and source_column == 4:
            copy_row(target, source, columns)
        elif target_column == 4 and source_column == 0:
            fill_row(target, load_f32(source), columns)
        else:
            copy_scattered(target, target_column, source, source_column, columns)
        target += target_row
        source += source_row


def _convert_rows(
    builder: Any,
    scratch: Any,
    kind: Any,
    buffer: Any,
    place: Any,
    row: Any,
    column: Any,
    rows: Any,
    columns: Any,
) -> None:
    zero, one = integer(0), integer(1)
    widens = builder.icmp_signed(">=", kind, integer(FIRST_WIDENING))
    words = workspace(builder, WORD_BYTES * CONVERTED_WORDS)
    table = builder.load(pointer(builder, builder.add(scratch, integer(ENTRIES_AT)), I64))
    moves = builder.load(pointer(builder, element(builder, table, integer(Kind.CONVERT), I64), I64))

    def convert(*described: Any) -> None:
        for number, value in enumerate(described):
            place = builder.add(words, integer(WORD_BYTES * number))
            builder.store(value, pointer(builder, place, I64))
        call_address(builder, moves, kind, words, zero, zero, zero)

    repeats = builder.and_(builder.icmp_signed("==", column, zero), builder.icmp_signed(">", columns, one))
    with builder.if_else(builder.and_(widens, repeats)) as (spread, each):
        with spread:
            # Convert the elements of all rows at once, to the end of the buffer, where each is read
            # before it is overwritten.
            ones = element(builder, buffer, builder.mul(rows, builder.sub(columns, one)))
            convert(ones, place, row, rows, one, zero, zero)
            with loop(builder, zero, rows, 1) as index:
                value = builder.load(pointer(builder, element(builder, ones, index), F32))
                _fill(builder, element(builder, buffer, builder.mul(index, columns)), value, columns)
        with each:
            # Adjacent rows are converted as one row.
            joined = builder.icmp_signed("==", row, builder.mul(columns, column))
            lines = builder.select(joined, one, rows)
            length = builder.select(joined, builder.mul(rows, columns), columns)
            staged_row = builder.mul(columns, integer(4))
            pairs = [(buffer, place), (place, buffer)], [(staged_row, row), (row, staged_row)]
            (target, source), (target_row, source_row) = (
                [builder.select(widens, *pair) for pair in zip(*both, strict=True)] for both in pairs
            )
            convert(target, source, column, length, lines, target_row, source_row)


@emitted(types.void, *[types.int64] * 8)
def convert_rows(
    builder: Any,
    scratch: Any,
    kind: Any,
    buffer: Any,
    place: Any,
    row: Any,
    column: Any,
    rows: Any,
    columns: Any,
) -> None:
    """Convert rows of other elements with these strides to four bytes each in a buffer, or back, by
    the entry of moves.

    It is a separate function, which does not enlarge its callers.
    """
    function = subroutine(builder, "convert_rows", (I64,) * 8, _convert_rows)
    builder.call(function, [scratch, kind, buffer, place, row, column, rows, columns])
