"""Packing the right side of a matrix product into panels `[N/32][K][32]`.

Panels in a worker's scratch are padded with zeros. A weight is packed in place instead: there the
last panel has only the columns that are left, so that the weight has the bytes that it had.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from heliograph_backends.cpu.kernels.program.words import PANEL_COLUMNS
from heliograph_backends.cpu.kernels.vector.atomics import load_f32, set_word, store_f32, word
from heliograph_backends.cpu.kernels.vector.lanes import (
    I32,
    I64,
    LANES,
    Lanes,
    emitted,
    integer,
    jit,
    loop,
    subroutine,
    tail_mask,
)
from heliograph_backends.cpu.kernels.vector.space import copy_row

PANEL_ROW_BYTES = 4 * PANEL_COLUMNS


def transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose sixteen vectors of sixteen lanes, in four rounds of exchanges between rows whose
    numbers differ in one bit.
    """
    for width in (8, 4, 2, 1):
        kind = ir.VectorType(I32, LANES)
        upper = [LANES + (lane ^ width) if lane & width else lane for lane in range(LANES)]
        lower = [LANES + lane if lane & width else lane ^ width for lane in range(LANES)]
        exchanged = list(rows)
        for row in (row for row in range(LANES) if not row & width):
            pair = rows[row], rows[row | width]
            exchanged[row] = builder.shuffle_vector(*pair, ir.Constant(kind, upper))
            exchanged[row | width] = builder.shuffle_vector(*pair, ir.Constant(kind, lower))
        rows = exchanged
    return rows


def _copy_rows(builder: Any, target: Any, source: Any, step: Any, depth: Any, columns: Any) -> None:
    with loop(builder, integer(0), depth, 1) as k:
        for half in range(PANEL_COLUMNS // LANES):
            mask = tail_mask(builder, builder.sub(columns, integer(half * LANES)))
            place = builder.add(source, builder.add(builder.mul(k, step), integer(4 * LANES * half)))
            lanes = Lanes.load_masked(builder, place, mask)
            row = builder.add(target, builder.mul(k, integer(PANEL_ROW_BYTES)))
            lanes.store(builder.add(row, integer(4 * LANES * half)))


def _transpose_rows(builder: Any, target: Any, source: Any, step: Any, depth: Any, columns: Any) -> None:
    """Write whole groups of sixteen k; the panel must have room for K rounded up.

    Absent columns have the address of the first one. Nothing is read of them, but if their own
    addresses were on a page that is not mapped, masking the fault would take the processor a
    hundred times as long as a load.
    """
    for half in range(PANEL_COLUMNS // LANES):
        with loop(builder, integer(0), depth, LANES) as k:
            mask = tail_mask(builder, builder.sub(depth, k))
            rows = []
            for lane in range(LANES):
                column = integer(half * LANES + lane)
                present = builder.icmp_signed("<", column, columns)
                nothing = ir.Constant(mask.type, [0] * LANES)
                distance = builder.select(present, builder.mul(step, column), integer(0))
                place = builder.add(source, builder.add(distance, builder.mul(k, integer(4))))
                rows.append(Lanes.load_masked(builder, place, builder.select(present, mask, nothing)).value)
            start = builder.add(target, builder.mul(k, integer(PANEL_ROW_BYTES)))
            for number, value in enumerate(transpose(builder, rows)):
                place = builder.add(start, integer(number * PANEL_ROW_BYTES + 4 * LANES * half))
                Lanes(builder, value).store(place)


@emitted(types.void, *[types.int64] * 5)
def pack_rows(builder: Any, target: Any, source: Any, step: Any, depth: Any, columns: Any) -> None:
    """Pack a panel from rows `step` bytes apart whose columns are contiguous."""
    function = subroutine(builder, "pack_rows", (I64,) * 5, _copy_rows)
    builder.call(function, [target, source, step, depth, columns])


@emitted(types.void, *[types.int64] * 5)
def pack_transposed(builder: Any, target: Any, source: Any, step: Any, depth: Any, columns: Any) -> None:
    """Pack a panel from columns `step` bytes apart whose rows are contiguous."""
    function = subroutine(builder, "pack_transposed", (I64,) * 5, _transpose_rows)
    builder.call(function, [target, source, step, depth, columns])


@jit
def pack_scattered(
    target: int, source: int, row_step: int, column_step: int, depth: int, columns: int
) -> None:
    """Pack a panel from any strides."""
    for k in range(depth):
        for column in range(PANEL_COLUMNS):
            value = load_f32(source + k * row_step + column * column_step) if column < columns else 0.0
            store_f32(target + (k * PANEL_COLUMNS + column) * 4, value)


@jit
def pack_panels(
    target: int,
    panel_bytes: int,
    source: int,
    row_step: int,
    column_step: int,
    depth: int,
    columns: int,
) -> None:
    """Pack depth by columns of float32 into panels `panel_bytes` apart.

    There must be room for 15 more rows after the last panel: transposed panels are written in whole
    groups of sixteen rows, and excess rows in the next panel are overwritten when that is packed.
    """
    for column in range(0, columns, PANEL_COLUMNS):
        start = source + column * column_step
        present = min(columns - column, PANEL_COLUMNS)
        if column_step == 4:
            pack_rows(target, start, row_step, depth, present)
        elif row_step == 4:
            pack_transposed(target, start, column_step, depth, present)
        else:
            pack_scattered(target, start, row_step, column_step, depth, present)
        target += panel_bytes


@jit
def pack_columns_in_place(matrix: int, depth: int, panels: int, scratch: int) -> None:
    """Turn columns that are contiguous rows of `depth` float32 into panels, 32 at a time.

    `scratch`: one panel, with `depth` rounded up to a multiple of sixteen.
    """
    for _ in range(panels):
        pack_transposed(scratch, matrix, 4 * depth, depth, PANEL_COLUMNS)
        copy_row(matrix, scratch, depth * PANEL_COLUMNS)
        matrix += depth * PANEL_ROW_BYTES


@jit
def transpose_rows_in_place(matrix: int, rows: int, columns: int, visited: int, spare: int) -> None:
    """Transpose a matrix of panels' rows, each of 32 float32, by its cycles.

    `visited`: a bit for each element, initially 0. `spare`: room for one element.
    """
    for first in range(1, rows * columns - 1):
        if word(visited, first >> 6) >> (first & 63) & 1:
            continue
        copy_row(spare, matrix + first * PANEL_ROW_BYTES, PANEL_COLUMNS)
        place = source = first
        while True:
            set_word(visited, place >> 6, word(visited, place >> 6) | 1 << (place & 63))
            source = place % rows * columns + place // rows
            if source == first:
                break
            copy_row(matrix + place * PANEL_ROW_BYTES, matrix + source * PANEL_ROW_BYTES, PANEL_COLUMNS)
            place = source
        copy_row(matrix + place * PANEL_ROW_BYTES, spare, PANEL_COLUMNS)
