"""Images that are resampled, windows that become rows, and the gradients of windows.

A resampled line is a sum over its taps, line by line and in each of them column by column. A weight
is the product of two float64, rounded, and each product and sum is rounded too. Gradients are added
in the order of the taps, or of the pool's windows. So each element has the bits of the definition.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from heliograph_backends.cpu.kernels.elementwise.interpreter import KINDS
from heliograph_backends.cpu.kernels.program.words import (
    ABORT,
    BUFFERS_AT,
    COLUMN_STRIDE,
    CONTROL_AT,
    IMAGE_HEIGHT,
    IMAGE_WIDTH,
    LINE_STRIDE,
    PADDING_ABOVE,
    PADDING_LEFT,
    PIXEL_STRIDE,
    PLANE_STRIDE,
    RESAMPLED,
    RESAMPLED_PITCH,
    RESAMPLED_TABLE,
    RESAMPLED_TAPS,
    RESAMPLED_TO,
    RESULT_WIDTH,
    ROUNDING,
    ROW_STRIDE,
    ROWS,
    SPREAD_ACROSS,
    SPREAD_DOWN,
    STEP_ACROSS,
    STEP_DOWN,
    UNFOLDED,
    UNFOLDED_AS,
    UNFOLDED_BYTES,
    UNFOLDED_CHANNELS,
    UNFOLDED_GEOMETRY,
    UNFOLDED_LINES,
    UNFOLDED_OF,
    UNFOLDED_ROUNDED,
    UNFOLDED_TO,
    WINDOW_HEIGHT,
    WINDOW_WIDTH,
    Kind,
    Unfolding,
)
from heliograph_backends.cpu.kernels.vector.atomics import atomic_load, load_f32, store_f32, word
from heliograph_backends.cpu.kernels.vector.lanes import (
    F32,
    F32_VECTOR,
    F64,
    F64_VECTOR,
    I32,
    I64,
    LANES,
    MASK,
    Entry,
    Lanes,
    element,
    emitted,
    integer,
    intrinsic_function,
    jit,
    local,
    loop,
    pointer,
    splat,
    subroutine,
    tail_mask,
)
from heliograph_backends.cpu.kernels.vector.space import (
    convert_rows,
    fill_row,
    locate,
    operand_address,
    operand_base,
)

RESAMPLE = int(Kind.RESAMPLE)
TO_ROWS, FROM_ROWS = int(Unfolding.ROWS), int(Unfolding.ROWS_BACK)
MEAN_BACK = int(Unfolding.MEAN_BACK)
ZERO = np.float32(0)
_PLACES = ir.VectorType(I64, LANES)
_POINTERS = ir.VectorType(F32.as_pointer(), LANES)


# Resampling


def _gathered(builder: Any, base: Any, places: Any) -> Lanes:
    """Load sixteen float32 at byte offsets from an address."""
    offsets = builder.load(pointer(builder, places, _PLACES), align=8)
    pointers = builder.inttoptr(builder.add(splat(builder, base, _PLACES), offsets), _POINTERS)
    gather = intrinsic_function(
        builder, "llvm.masked.gather.v16f32.v16p0", F32_VECTOR, _POINTERS, I32, MASK, F32_VECTOR
    )
    every, nothing = ir.Constant(MASK, [1] * LANES), ir.Constant(F32_VECTOR, ir.Undefined)
    return Lanes(builder, builder.call(gather, [pointers, ir.Constant(I32, 4), every, nothing]))


def _resampled_line(
    builder: Any, target: Any, source: Any, down: Any, across: Any, taps: Any, pitch: Any, columns: Any
) -> None:
    cell = local(builder, F32_VECTOR)
    pair, words = integer(16), builder.mul(pitch, integer(8))
    with loop(builder, integer(0), columns, LANES) as column:
        builder.store(Lanes.constant(builder, 0.0).value, cell)
        with loop(builder, integer(0), taps, 1) as above:
            row = builder.add(down, builder.mul(above, pair))
            line = builder.add(source, builder.load(pointer(builder, row, I64)))
            weight = builder.load(pointer(builder, builder.add(row, integer(8)), F64))
            wide = splat(builder, weight, F64_VECTOR)
            with loop(builder, integer(0), taps, 1) as beside:
                own = builder.add(across, builder.mul(builder.mul(beside, integer(2)), words))
                places = element(builder, own, column, I64)
                weights = pointer(builder, builder.add(places, words), F64_VECTOR)
                factor = builder.fmul(wide, builder.load(weights, align=8))
                term = _gathered(builder, line, places) * Lanes.narrow(builder, factor)
                builder.store((Lanes(builder, builder.load(cell)) + term).value, cell)
        mask = tail_mask(builder, builder.sub(columns, column))
        Lanes(builder, builder.load(cell)).store_masked(element(builder, target, column), mask)


def _copied_line(builder: Any, target: Any, source: Any, across: Any, columns: Any) -> None:
    with loop(builder, integer(0), columns, LANES) as column:
        found = _gathered(builder, source, element(builder, across, column, I64))
        mask = tail_mask(builder, builder.sub(columns, column))
        found.store_masked(element(builder, target, column), mask)


@emitted(types.void, *[types.int64] * 7)
def resampled_line(
    builder: Any, target: Any, source: Any, down: Any, across: Any, taps: Any, pitch: Any, columns: Any
) -> None:
    """Write a line of a resampled image; `down` and `across` are its tables."""
    function = subroutine(builder, "resampled_line", (I64,) * 7, _resampled_line)
    builder.call(function, [target, source, down, across, taps, pitch, columns])


@emitted(types.void, *[types.int64] * 4)
def copied_line(builder: Any, target: Any, source: Any, across: Any, columns: Any) -> None:
    """Write the elements of a line at the places of a table."""
    function = subroutine(builder, "copied_line", (I64,) * 4, _copied_line)
    builder.call(function, [target, source, across, columns])


@jit
def resample(step: int, block: int, slots: int, scratch: int) -> None:
    """Run one block of a resampled image."""
    row, rows, _, columns = locate(step, block, scratch)
    source = operand_base(step + 8 * RESAMPLED, slots, scratch)
    target = operand_address(step + 8 * RESAMPLED_TO, slots, scratch, row, 0)
    taps, pitch = word(step, RESAMPLED_TAPS), word(step, RESAMPLED_PITCH)
    each = max(1, taps)
    down = step + 8 * RESAMPLED_TABLE
    across = down + 16 * each * word(step, ROWS)
    for number in range(row, row + rows):
        own = down + 16 * each * number
        if taps == 0:
            copied_line(target, source + word(own, 0), across, columns)
        else:
            resampled_line(target, source, own, across, taps, pitch, columns)
        target += word(step + 8 * RESAMPLED_TO, ROW_STRIDE)


# Windows as rows


@emitted(types.void, types.int64, types.int64)
def copy_i16(builder: Any, target: Any, source: Any) -> None:
    """Copy two bytes."""
    short = ir.IntType(16)
    builder.store(builder.load(pointer(builder, source, short)), pointer(builder, target, short))


@emitted(types.void, types.int64, types.int64)
def copy_i32(builder: Any, target: Any, source: Any) -> None:
    """Copy four bytes."""
    builder.store(builder.load(pointer(builder, source, I32)), pointer(builder, target, I32))


@emitted(types.void, types.int64)
def clear_i16(builder: Any, target: Any) -> None:
    """Clear two bytes."""
    short = ir.IntType(16)
    builder.store(ir.Constant(short, 0), pointer(builder, target, short))


@jit
def copy_window(geometry: int, channels: int, size: int, target: int, source: int, y: int, x: int) -> None:
    """Write the window at (y, x) of each channel, one after the other; 0 is outside of the
    image."""
    height, width = word(geometry, IMAGE_HEIGHT), word(geometry, IMAGE_WIDTH)
    top = y * word(geometry, STEP_DOWN) - word(geometry, PADDING_ABOVE)
    left = x * word(geometry, STEP_ACROSS) - word(geometry, PADDING_LEFT)
    spread, pixel = word(geometry, SPREAD_ACROSS), word(geometry, PIXEL_STRIDE)
    taps, rows = word(geometry, WINDOW_WIDTH), word(geometry, WINDOW_HEIGHT)
    for channel in range(channels):
        plane = source + channel * word(geometry, PLANE_STRIDE)
        for down in range(rows):
            line = top + down * word(geometry, SPREAD_DOWN)
            inside = 0 <= line < height
            place = plane + line * word(geometry, LINE_STRIDE) + left * pixel
            if size == 4:
                for across in range(taps):
                    column = left + across * spread
                    if inside and 0 <= column < width:
                        copy_i32(target, place)
                    else:
                        store_f32(target, ZERO)
                    place += spread * pixel
                    target += 4
            else:
                for across in range(taps):
                    column = left + across * spread
                    if inside and 0 <= column < width:
                        copy_i16(target, place)
                    else:
                        clear_i16(target)
                    place += spread * pixel
                    target += 2


@jit
def windows_as_rows(step: int, block: int, slots: int, scratch: int) -> None:
    """Run one block of windows that become rows."""
    row, rows, _, columns = locate(step, block, scratch)
    geometry = step + 8 * UNFOLDED_GEOMETRY
    source = operand_base(step + 8 * UNFOLDED, slots, scratch)
    target = operand_address(step + 8 * UNFOLDED_TO, slots, scratch, row, 0)
    channels, size, rounded = (
        word(step, UNFOLDED_CHANNELS),
        word(step, UNFOLDED_BYTES),
        word(step, UNFOLDED_ROUNDED),
    )
    across, buffer = word(geometry, RESULT_WIDTH), scratch + BUFFERS_AT
    for number in range(row, row + rows):
        there = buffer if rounded else target
        copy_window(geometry, channels, size, there, source, number // across, number % across)
        if rounded:
            convert_rows(scratch, rounded >> ROUNDING & KINDS, buffer, target, 0, 2, 1, columns)
        target += word(step + 8 * UNFOLDED_TO, ROW_STRIDE)


@jit
def is_aborted(scratch: int) -> bool:
    """True if the run was aborted; a block that takes long then ends, as nothing reads its
    results."""
    found: bool = atomic_load(word(scratch + CONTROL_AT, 0), ABORT) != 0
    return found


@jit
def add_taps(geometry: int, target: int, tap: int, row: int, beside: int, column: int, columns: int) -> None:
    """Add the elements of a line of windows, `row` bytes apart, at one place of them, to some
    columns of a line of the image."""
    step = word(geometry, STEP_ACROSS)
    left = beside * word(geometry, SPREAD_ACROSS) - word(geometry, PADDING_LEFT)
    first = max(0, (step - 1 + column - left) // step)
    behind = min(word(geometry, RESULT_WIDTH), (column + columns - 1 - left) // step + 1)
    tap += first * row
    target += 4 * (first * step + left)
    for _ in range(first, behind):
        store_f32(target, load_f32(target) + load_f32(tap))
        tap += row
        target += 4 * step


@jit
def add_line(step: int, target: int, source: int, line: int, above: int, column: int, columns: int) -> None:
    """Add row `above` of a line of windows to some columns of a line of the image."""
    geometry = step + 8 * UNFOLDED_GEOMETRY
    each, apart = word(step + 8 * UNFOLDED, ROW_STRIDE), word(step + 8 * UNFOLDED, COLUMN_STRIDE)
    taps = word(geometry, WINDOW_WIDTH)
    here = source + line * word(geometry, RESULT_WIDTH) * each
    for beside in range(taps):
        tap = here + (above * taps + beside) * apart
        add_taps(geometry, target, tap, each, beside, column, columns)


@jit
def rows_as_image(step: int, block: int, slots: int, scratch: int) -> None:
    """Run one block of an image's lines, whose outer dimensions are images and channels. Each adds
    the rows of windows that lie there, from the first row of windows on: it goes along the rows, or
    along the lines of windows, whichever are fewer."""
    row, rows, column, columns = locate(step, block, scratch)
    geometry, lines = step + 8 * UNFOLDED_GEOMETRY, word(step, UNFOLDED_LINES)
    source = operand_base(step + 8 * UNFOLDED, slots, scratch)
    down, spread = word(geometry, STEP_DOWN), word(geometry, SPREAD_DOWN)
    height = word(geometry, WINDOW_HEIGHT)
    for y in range(row, row + rows):
        if is_aborted(scratch):
            return
        target = operand_address(step + 8 * UNFOLDED_TO, slots, scratch, y, 0)
        fill_row(target + 4 * column, ZERO, columns)
        reach = y + word(geometry, PADDING_ABOVE)
        first = max(0, (reach - (lines - 1) * down + spread - 1) // spread)
        behind = min(height, reach // spread + 1)
        if behind - first <= lines:
            for above in range(first, behind):
                line = (reach - above * spread) // down
                if line * down == reach - above * spread:
                    add_line(step, target, source, line, above, column, columns)
        else:
            for line in range(min(lines - 1, reach // down), -1, -1):
                above = (reach - line * down) // spread
                if above < height and above * spread == reach - line * down:
                    add_line(step, target, source, line, above, column, columns)


@jit
def largest_of(image: int, line: int, pixel: int, top: int, bottom: int, left: int, right: int) -> int:
    """Return the place of the first largest element of a part of an image, or of the first NaN, as
    its line's number times 2**32 plus its column."""
    best, place = load_f32(image + top * line + left * pixel), top << 32 | left
    for y in range(top, bottom):
        for x in range(left, right):
            value = load_f32(image + y * line + x * pixel)
            if best == best and not value <= best:
                best, place = value, y << 32 | x
    return place


@jit
def spread_gradient(
    kind: int, step: int, image: int, target: int, gradient: Any, lines: int, top: int, left: int
) -> None:
    """Add the gradient of the window at (top, left) of an image to those lines of it that the block
    has: `lines` is the first one times 2**32 plus the one behind."""
    geometry = step + 8 * UNFOLDED_GEOMETRY
    height, width = word(geometry, IMAGE_HEIGHT), word(geometry, IMAGE_WIDTH)
    bottom = min(height, top + word(geometry, WINDOW_HEIGHT))
    right = min(width, left + word(geometry, WINDOW_WIDTH))
    top, left = max(0, top), max(0, left)
    begin, behind = lines >> 32, lines & 0xFFFFFFFF
    line = word(step + 8 * UNFOLDED_TO, ROW_STRIDE)
    if top >= bottom or left >= right:
        return
    if kind != MEAN_BACK:
        place = largest_of(
            image, word(geometry, LINE_STRIDE), word(geometry, PIXEL_STRIDE), top, bottom, left, right
        )
        y, x = place >> 32, place & 0xFFFFFFFF
        if begin <= y < behind:
            there = target + y * line + 4 * x
            store_f32(there, load_f32(there) + gradient)
        return
    for y in range(max(top, begin), min(bottom, behind)):
        for x in range(left, right):
            there = target + y * line + 4 * x
            store_f32(there, load_f32(there) + gradient)


@jit
def pool_gradients(kind: int, step: int, block: int, slots: int, scratch: int) -> None:
    """Run one block of the lines of a pool's gradient; the windows that reach into it add theirs in
    their order."""
    row, rows, _, columns = locate(step, block, scratch)
    geometry = step + 8 * UNFOLDED_GEOMETRY
    source = operand_base(step + 8 * UNFOLDED, slots, scratch)
    target = operand_base(step + 8 * UNFOLDED_TO, slots, scratch)
    image = operand_base(step + 8 * UNFOLDED_OF, slots, scratch) if kind != MEAN_BACK else 0
    for y in range(row, row + rows):
        fill_row(target + y * word(step + 8 * UNFOLDED_TO, ROW_STRIDE), ZERO, columns)
    down, padding = word(geometry, STEP_DOWN), word(geometry, PADDING_ABOVE)
    height, width = word(geometry, WINDOW_HEIGHT), word(geometry, WINDOW_WIDTH)
    first = max(0, (row + padding - height) // down + 1)
    behind = min(word(step, UNFOLDED_LINES), (row + rows - 1 + padding) // down + 1)
    count = np.float32(height * width)
    for window in range(first, behind):
        top = window * down - padding
        for across in range(word(geometry, RESULT_WIDTH)):
            if is_aborted(scratch):
                return
            left = across * word(geometry, STEP_ACROSS) - word(geometry, PADDING_LEFT)
            given = source + window * word(step + 8 * UNFOLDED, ROW_STRIDE)
            gradient = load_f32(given + across * word(step + 8 * UNFOLDED, COLUMN_STRIDE))
            if kind == MEAN_BACK:
                gradient = gradient / count
            spread_gradient(kind, step, image, target, gradient, row << 32 | row + rows, top, left)


@Entry
def images_block(kind: int, step: int, block: int, slots: int, scratch: int) -> None:
    """Run one block of a step on images."""
    unfolding = word(step, UNFOLDED_AS)
    if kind == RESAMPLE:
        resample(step, block, slots, scratch)
    elif unfolding == TO_ROWS:
        windows_as_rows(step, block, slots, scratch)
    elif unfolding == FROM_ROWS:
        rows_as_image(step, block, slots, scratch)
    else:
        pool_gradients(unfolding, step, block, slots, scratch)
