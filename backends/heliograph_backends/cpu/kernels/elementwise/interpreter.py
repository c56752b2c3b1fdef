"""The interpreter of elementwise programs, over one block of rows by columns.

Theory of operation (as in numexpr: Cooke, Hochberg, Alted). A program runs over chunks of about a
thousand elements, so that its registers stay in the L1 cache and the dispatch of an instruction is
paid once per chunk. A chunk is a piece of one row, or several whole short rows. If an operand's
part of the chunk is contiguous, instructions read and write it in place. If it is broadcast,
strided, or of elements that are not of four bytes, it is staged in a buffer: gathered before the
first instruction, scattered after the last. Chunks do not change bits, since every instruction
treats each element by itself.
"""

from __future__ import annotations

from heliograph_backends.cpu.kernels.elementwise.operations import apply_operation
from heliograph_backends.cpu.kernels.program.words import (
    ACCESS,
    AS_THEY_LIE,
    BASES_AT,
    BODY_HEADER_WORDS,
    BODY_OPERAND_WORDS,
    BUFFERS_AT,
    CHUNK,
    COLUMN_STRIDE,
    CONSTANTS,
    FIRST,
    IMMEDIATES,
    INSTRUCTION_WORDS,
    INSTRUCTIONS,
    OPERANDS,
    OPERATION,
    READ,
    REGISTERS,
    RESULT,
    ROUNDING,
    ROW_STRIDE,
    SECOND,
    STREAMED,
    TABLE_AT,
    THIRD,
    WIDE_ROW,
    WIDENING,
    WRITTEN,
)
from heliograph_backends.cpu.kernels.vector.atomics import float_of_bits, set_word, word
from heliograph_backends.cpu.kernels.vector.lanes import Entry, jit, jit_inline
from heliograph_backends.cpu.kernels.vector.space import (
    convert_rows,
    copy_block,
    fill_row,
    operand_base,
)

KINDS = (1 << ROUNDING - WIDENING) - 1


@jit
def buffer_of(body: int, scratch: int, value: int) -> int:
    """Return the address of a value's own buffer."""
    address: int = scratch + BUFFERS_AT + value * word(body, CHUNK) * 4
    return address


@jit
def prepare(body: int, slots: int, scratch: int, elements: int) -> None:
    """Fill the table: operands' bases for this block, registers' buffers, constants spread over a
    chunk."""
    operands, registers = word(body, OPERANDS), word(body, REGISTERS)
    for number in range(operands):
        operand = body + 8 * (BODY_HEADER_WORDS + number * BODY_OPERAND_WORDS)
        set_word(scratch + BASES_AT, number, operand_base(operand, slots, scratch))
    for number in range(operands, operands + registers):
        set_word(scratch + TABLE_AT, number, buffer_of(body, scratch, number))
    constants = body + 8 * (BODY_HEADER_WORDS + operands * BODY_OPERAND_WORDS)
    for number in range(word(body, CONSTANTS)):
        buffer = buffer_of(body, scratch, operands + registers + number)
        set_word(scratch + TABLE_AT, operands + registers + number, buffer)
        fill_row(buffer, float_of_bits(word(constants, number)), elements)


@jit
def is_direct(operand: int, rows: int, columns: int) -> bool:
    """True if an operand's part of a chunk has four bytes for each element, and is contiguous, or
    is read as it lies."""
    if word(operand, ACCESS) & AS_THEY_LIE:
        return True
    if word(operand, ACCESS) >> WIDENING or (word(operand, COLUMN_STRIDE) != 4 and columns > 1):
        return False
    contiguous: bool = rows == 1 or word(operand, ROW_STRIDE) == 4 * columns
    return contiguous


@jit
def gather(
    body: int,
    scratch: int,
    row: int,
    rows: int,
    column: int,
    columns: int,
    whole_rows: bool,
    again: bool,
) -> None:
    """Point the table at each operand's part of the chunk, and stage the read ones that are not of
    four bytes for each element or not contiguous.
    """
    for number in range(word(body, OPERANDS)):
        operand = body + 8 * (BODY_HEADER_WORDS + number * BODY_OPERAND_WORDS)
        row_stride, column_stride = word(operand, ROW_STRIDE), word(operand, COLUMN_STRIDE)
        place = word(scratch + BASES_AT, number) + row * row_stride + column * column_stride
        if is_direct(operand, rows, columns):
            set_word(scratch + TABLE_AT, number, place)
            continue
        buffer = buffer_of(body, scratch, number)
        set_word(scratch + TABLE_AT, number, buffer)
        # An operand that is the same for all chunks was staged with the first, which is the
        # largest.
        same = again and row_stride == 0 and (column_stride == 0 or whole_rows)
        access = word(operand, ACCESS)
        if access & READ == 0 or same:
            continue
        if access >> WIDENING:
            kind = access >> WIDENING & KINDS
            convert_rows(scratch, kind, buffer, place, row_stride, column_stride, rows, columns)
        else:
            copy_block(buffer, 4 * columns, 4, place, row_stride, column_stride, rows, columns)


@jit_inline
def interpret(body: int, scratch: int, elements: int) -> None:
    """Run the instructions on the values in the table."""
    operands, constants = word(body, OPERANDS), word(body, CONSTANTS)
    instruction = body + 8 * (BODY_HEADER_WORDS + operands * BODY_OPERAND_WORDS + constants)
    table = scratch + TABLE_AT
    for _ in range(word(body, INSTRUCTIONS)):
        immediates = word(instruction, IMMEDIATES)
        operation = word(instruction, OPERATION)
        apply_operation(
            operation & (STREAMED - 1),
            word(table, word(instruction, RESULT)),
            word(table, word(instruction, FIRST)),
            word(table, word(instruction, SECOND)),
            word(table, word(instruction, THIRD)),
            float_of_bits(immediates),
            float_of_bits(immediates >> 32),
            elements,
            operation,
        )
        instruction += 8 * INSTRUCTION_WORDS


@jit
def scatter(body: int, scratch: int, row: int, rows: int, column: int, columns: int) -> None:
    """Write the staged results to their places."""
    for number in range(word(body, OPERANDS)):
        operand = body + 8 * (BODY_HEADER_WORDS + number * BODY_OPERAND_WORDS)
        if word(operand, ACCESS) & WRITTEN and not is_direct(operand, rows, columns):
            row_stride, column_stride = word(operand, ROW_STRIDE), word(operand, COLUMN_STRIDE)
            place = word(scratch + BASES_AT, number) + row * row_stride + column * column_stride
            buffer, access = buffer_of(body, scratch, number), word(operand, ACCESS)
            if access >> ROUNDING:
                kind = access >> ROUNDING
                convert_rows(scratch, kind, buffer, place, row_stride, column_stride, rows, columns)
            else:
                copy_block(place, row_stride, column_stride, buffer, 4 * columns, 4, rows, columns)


@Entry
def elementwise_body(
    body: int, slots: int, scratch: int, row: int, rows: int, column: int, columns: int
) -> None:
    """Run an elementwise program over rows by columns at the block's outer indices."""
    chunk = word(body, CHUNK)
    height, width = 1, min(columns, chunk)
    if columns < WIDE_ROW:
        height = min(rows, chunk // columns)
    prepare(body, slots, scratch, height * width)
    again = False
    for top in range(row, row + rows, height):
        chunk_rows = min(height, row + rows - top)
        for left in range(column, column + columns, width):
            chunk_columns = min(width, column + columns - left)
            gather(body, scratch, top, chunk_rows, left, chunk_columns, width == columns, again)
            interpret(body, scratch, chunk_rows * chunk_columns)
            scatter(body, scratch, top, chunk_rows, left, chunk_columns)
            again = True
