"""Windows over each channel by itself: depthwise convolutions, and pools.

Theory of operation. Some lines of a plane are *staged*: copied into the cache with their padding,
and with one plane for each phase of the step, so that a step of two has the even and the odd
elements in rows of their own. There the elements at one place of all windows lie side by side, at
an offset that only depends on the place in the window. A result is then a sum (or maximum) over the
window of vectors at these offsets. Short lines of the result are computed as one long line, with
the elements between them, and copied from there.

Contract. An element of a convolution is one chain `acc = fma(x, w, acc)` over the window, row by
row, from +0; that of a mean is the sum in the same order, divided by the window's size. Padding
counts as 0, or as the least finite number in a maximum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from heliograph_backends.cpu.kernels.elementwise.interpreter import KINDS
from heliograph_backends.cpu.kernels.matmul.widening import widen_lines
from heliograph_backends.cpu.kernels.program.words import (
    BUFFERS_AT,
    IMAGE_HEIGHT,
    IMAGE_WIDTH,
    LINE_STRIDE,
    NARROW_IMAGE,
    NARROW_KERNEL,
    PACK_AT,
    PADDING_ABOVE,
    PADDING_LEFT,
    PIXEL_STRIDE,
    RESULT_WIDTH,
    ROW_STRIDE,
    SPREAD_ACROSS,
    SPREAD_DOWN,
    STAGED_AT,
    STEP_ACROSS,
    STEP_DOWN,
    WIDENING,
    WINDOW_HEIGHT,
    WINDOW_WIDTH,
    WINDOWED,
    WINDOWS_AS,
    WINDOWS_EPILOGUE,
    WINDOWS_GEOMETRY,
    WINDOWS_HAS_EPILOGUE,
    WINDOWS_LANES_AT,
    WINDOWS_LINE_AT,
    WINDOWS_OF,
    WINDOWS_PITCH,
    WINDOWS_PLANES_AT,
    WINDOWS_WEIGHTS,
    Windowing,
)
from heliograph_backends.cpu.kernels.vector.atomics import (
    call_elementwise,
    call_finish_rows,
    load_f32,
    set_word,
    store_f32,
    word,
)
from heliograph_backends.cpu.kernels.vector.lanes import (
    F32,
    F32_VECTOR,
    I32,
    I32_VECTOR,
    I64,
    LANES,
    MASK,
    Entry,
    Lanes,
    element,
    emitted,
    integer,
    jit,
    loop,
    pointer,
    splat,
    subroutine,
    tail_mask,
)
from heliograph_backends.cpu.kernels.vector.space import convert_rows, locate, operand_address
from heliograph_backends.cpu.kernels.windows.channel_lanes import (
    clear_vectors,
    line_places,
    padded_size,
    sum_channels,
)

LEAST = -3.4028234663852886e38
PRODUCT, LARGEST = int(Windowing.PRODUCT), int(Windowing.LARGEST)
_EVEN, _ODD = list(range(0, 2 * LANES, 2)), list(range(1, 2 * LANES, 2))
#: Vectors of results that are computed together, side by side and among each other.
TOGETHER, ROWS = 4, 4
#: The side of square windows that have a loop of their own.
SIDE = 3

_Combine = Callable[[Lanes, Lanes, Lanes], Lanes]
_START = {Windowing.PRODUCT: 0.0, Windowing.LARGEST: float("-inf"), Windowing.MEAN: 0.0}
_COMBINE: dict[Windowing, _Combine] = {
    Windowing.PRODUCT: lambda total, x, weight: x.fma(weight, total),
    Windowing.LARGEST: lambda total, x, _: total.maximum(x),
    Windowing.MEAN: lambda total, x, _: total + x,
}


def _slide(kind: Windowing, vectors: int) -> Callable[..., None]:
    """Return the body of a function that computes so many vectors, the last one up to `count`."""

    def body(
        builder: Any, target: Any, source: Any, offsets: Any, weights: Any, taps: Any, count: Any
    ) -> None:
        cells = [builder.alloca(F32_VECTOR) for _ in range(vectors)]
        for cell in cells:
            builder.store(ir.Constant(F32_VECTOR, [_START[kind]] * LANES), cell)
        with loop(builder, integer(0), taps, 1) as tap:
            offset = builder.load(pointer(builder, element(builder, offsets, tap, I64), I64))
            here = builder.add(source, offset)
            weight = Lanes.constant(builder, 0.0)
            if kind is Windowing.PRODUCT:
                place = element(builder, weights, tap)
                weight = Lanes.broadcast(builder, builder.load(pointer(builder, place, F32)))
            for number, cell in enumerate(cells):
                x = Lanes.load(builder, builder.add(here, integer(4 * LANES * number)))
                total = _COMBINE[kind](Lanes(builder, builder.load(cell)), x, weight)
                builder.store(total.value, cell)
        for number, cell in enumerate(cells):
            found = Lanes(builder, builder.load(cell))
            if kind is Windowing.MEAN:
                found = found / Lanes.broadcast(builder, builder.sitofp(taps, F32))
            place = builder.add(target, integer(4 * LANES * number))
            if number < vectors - 1:
                found.store(place)
            else:
                rest = builder.sub(count, integer(LANES * number))
                found.store_masked(place, tail_mask(builder, rest))

    return body


@emitted(types.void, *[types.int64] * 7)
def slide(
    builder: Any, kind: Any, target: Any, source: Any, offsets: Any, weights: Any, taps: Any, count: Any
) -> None:
    """Write `count` results side by side, at most TOGETHER vectors; whole vectors are read."""
    done = builder.append_basic_block("slide.done")
    vectors = builder.sdiv(builder.add(count, integer(LANES - 1)), integer(LANES))
    switch = builder.switch(builder.add(builder.mul(kind, integer(TOGETHER + 1)), vectors), done)
    for each in Windowing:
        for number in range(1, TOGETHER + 1):
            name = f"slide_{each.name.lower()}_{number}"
            with builder.goto_block(builder.append_basic_block(name)):
                function = subroutine(builder, name, (I64,) * 6, _slide(each, number))
                builder.call(function, [target, source, offsets, weights, taps, count])
                switch.add_case(integer(each * (TOGETHER + 1) + number), builder.block)
                builder.branch(done)
    builder.position_at_end(done)


def _stage(across: int) -> Callable[..., None]:
    """Return the body of a function that stages lines by whole vectors: each line is written over
    the end of the one before. Of a step of two, both phases are staged."""

    def body(
        builder: Any, target: Any, other: Any, source: Any, top: Any, down: Any, lines: Any, line_step: Any,
        height: Any, pitch: Any, before: Any, width: Any, fill: Any,
    ) -> None:  # fmt: skip
        numbers, fills = ir.Constant(I32_VECTOR, list(range(LANES))), splat(builder, fill, F32_VECTOR)
        edge = splat(builder, builder.trunc(width, I32), I32_VECTOR)
        with loop(builder, integer(0), lines, 1) as line:
            row = builder.add(top, builder.mul(line, down))
            is_inside = splat(builder, builder.icmp_unsigned("<", row, height), MASK)
            start = builder.add(source, builder.mul(row, line_step))
            skipped = builder.mul(line, pitch)
            with loop(builder, integer(0), pitch, LANES) as index:
                first = builder.add(before, builder.mul(index, integer(across)))
                parts = []
                for part in range(across):
                    at = builder.add(first, integer(LANES * part))
                    places = builder.add(splat(builder, builder.trunc(at, I32), I32_VECTOR), numbers)
                    mask = builder.and_(builder.icmp_unsigned("<", places, edge), is_inside)
                    loaded = Lanes.load_masked(builder, element(builder, start, at), mask).value
                    parts.append(builder.select(mask, loaded, fills))
                place = builder.add(skipped, index)
                found = parts
                if across == 2:
                    orders = (ir.Constant(I32_VECTOR, order) for order in (_EVEN, _ODD))
                    found = [builder.shuffle_vector(*parts, order) for order in orders]
                for base, vector in zip((target, other), found, strict=False):
                    Lanes(builder, vector).store(element(builder, base, place))

    return body


def _stager(name: str, across: int) -> Any:
    def emit(
        builder: Any, target: Any, other: Any, source: Any, top: Any, down: Any, lines: Any, line_step: Any,
        height: Any, pitch: Any, before: Any, width: Any, fill: Any,
    ) -> None:  # fmt: skip
        function = subroutine(builder, name, (*(I64,) * 11, F32), _stage(across))
        given = [target, other, source, top, down, lines, line_step, height, pitch, before, width, fill]
        builder.call(function, given)

    emit.__name__ = name
    return emitted(types.void, *[types.int64] * 11, types.float32)(emit)


stage_each = _stager("stage_each", 1)
stage_pairs = _stager("stage_pairs", 2)


def _copy_lines(builder: Any, target: Any, source: Any, lines: Any, width: Any, pitch: Any) -> None:
    whole = builder.mul(lines, width)
    with loop(builder, integer(0), lines, 1) as line:
        start = builder.mul(line, width)
        here = element(builder, source, builder.mul(line, pitch))
        with loop(builder, integer(0), width, LANES) as index:
            place = builder.add(start, index)
            lanes = Lanes.load(builder, element(builder, here, index))
            # The elements behind the line are those of the next lines, which are written later.
            mask = tail_mask(builder, builder.sub(whole, place))
            lanes.store_masked(element(builder, target, place), mask)


@emitted(types.void, *[types.int64] * 5)
def copy_lines(builder: Any, target: Any, source: Any, lines: Any, width: Any, pitch: Any) -> None:
    """Copy lines of `width` float32, `pitch` apart, side by side."""
    function = subroutine(builder, "copy_lines", (I64,) * 5, _copy_lines)
    builder.call(function, [target, source, lines, width, pitch])


@jit
def stage_scattered(
    geometry: int, target: int, source: int, top: int, lines: int, pitch: int, fill: float
) -> None:
    """Stage lines from any strides, phase by phase."""
    across, pixel = word(geometry, STEP_ACROSS), word(geometry, PIXEL_STRIDE)
    for part in range(phases_across(geometry)):
        there = target + 4 * part * plane_elements(lines, pitch)
        for line in range(lines):
            row = top + line * word(geometry, STEP_DOWN)
            here = source + row * word(geometry, LINE_STRIDE)
            is_inside = 0 <= row < word(geometry, IMAGE_HEIGHT)
            for place in range(pitch):
                x = part - word(geometry, PADDING_LEFT) + place * across
                present = is_inside and 0 <= x < word(geometry, IMAGE_WIDTH)
                store_f32(there, load_f32(here + x * pixel) if present else fill)
                there += 4


@jit
def stage_lines(
    geometry: int, staged: int, source: int, top: int, lines: int, pitch: int, fill: float
) -> None:
    """Stage `lines` lines of each phase of a plane; the windows of the first line begin at row
    `top` of the image."""
    down, across = word(geometry, STEP_DOWN), word(geometry, STEP_ACROSS)
    height, width = word(geometry, IMAGE_HEIGHT), word(geometry, IMAGE_WIDTH)
    line_step = word(geometry, LINE_STRIDE)
    parts, plane = phases_across(geometry), 4 * plane_elements(lines, pitch)
    before = -word(geometry, PADDING_LEFT)
    for phase in range(min(down, reach(geometry, WINDOW_HEIGHT, SPREAD_DOWN) + 1)):
        target, first = staged + plane * phase * parts, top + phase
        if word(geometry, PIXEL_STRIDE) == 4 and across == 1:
            stage_each(
                target, target, source, first, down, lines, line_step, height, pitch, before, width, fill
            )
        elif word(geometry, PIXEL_STRIDE) == 4 and across == 2 and parts == 2:
            other = target + plane
            stage_pairs(
                target, other, source, first, down, lines, line_step, height, pitch, before, width, fill
            )
        else:
            stage_scattered(geometry, target, source, first, lines, pitch, fill)


@jit
def reach(geometry: int, size: int, spread: int) -> int:
    """Return the distance from the first element of a window to the last."""
    found: int = (word(geometry, size) - 1) * word(geometry, spread)
    return found


@jit
def plane_elements(lines: int, pitch: int) -> int:
    """Return the distance from a staged plane to the next: the end of one may be written over."""
    return lines * pitch + LANES


@jit
def phases_across(geometry: int) -> int:
    """Return the number of phases of a line that windows read."""
    found: int = min(word(geometry, STEP_ACROSS), reach(geometry, WINDOW_WIDTH, SPREAD_ACROSS) + 1)
    return found


@jit
def find_offsets(geometry: int, offsets: int, lines: int, pitch: int) -> None:
    """Write for each element of the window the offset of its first place among the staged ones."""
    down, across = word(geometry, STEP_DOWN), word(geometry, STEP_ACROSS)
    width = word(geometry, WINDOW_WIDTH)
    for y in range(word(geometry, WINDOW_HEIGHT)):
        for x in range(width):
            below, right = y * word(geometry, SPREAD_DOWN), x * word(geometry, SPREAD_ACROSS)
            plane = below % down * phases_across(geometry) + right % across
            first = plane * plane_elements(lines, pitch) + below // down * pitch
            set_word(offsets, y * width + x, 4 * (first + right // across))


def _slide_rows(
    builder: Any, target: Any, target_line: Any, source: Any, pitch: Any, weights: Any, lines: Any, width: Any
) -> None:
    """A vector that is read serves all lines, and all weights are in registers."""
    taps = []
    for tap in range(SIDE * SIDE):
        place = builder.add(weights, integer(4 * tap))
        taps.append(Lanes.broadcast(builder, builder.load(pointer(builder, place, F32))))
    present = [builder.icmp_signed("<", integer(row), lines) for row in range(ROWS)]
    with loop(builder, integer(0), width, LANES) as index:
        mask = tail_mask(builder, builder.sub(width, index))
        here, totals = element(builder, source, index), [Lanes.constant(builder, 0.0)] * ROWS
        for line in range(ROWS + SIDE - 1):
            start = builder.add(here, builder.mul(pitch, integer(line)))
            for across in range(SIDE):
                x = Lanes.load(builder, builder.add(start, integer(4 * across)))
                for row in range(max(0, line - SIDE + 1), min(ROWS, line + 1)):
                    totals[row] = x.fma(taps[(line - row) * SIDE + across], totals[row])
        for row, (total, is_present) in enumerate(zip(totals, present, strict=True)):
            there = builder.add(element(builder, target, index), builder.mul(target_line, integer(row)))
            with builder.if_then(is_present):
                total.store_masked(there, mask)


@emitted(types.void, *[types.int64] * 7)
def slide_some_rows(
    builder: Any, target: Any, target_line: Any, source: Any, pitch: Any, weights: Any, lines: Any, width: Any
) -> None:
    """Write `lines` lines of products of 3 by 3, at most ROWS; strides in bytes."""
    function = subroutine(builder, "slide_some_rows", (I64,) * 7, _slide_rows)
    builder.call(function, [target, target_line, source, pitch, weights, lines, width])


@jit
def slide_rows(target: int, source: int, pitch: int, weights: int, height: int, width: int) -> None:
    """Write the products of windows of SIDE by SIDE that move by one."""
    for first in range(0, height, ROWS):
        there, here = target + 4 * first * width, source + 4 * first * pitch
        lines = min(ROWS, height - first)
        slide_some_rows(there, 4 * width, here, 4 * pitch, weights, lines, width)


@jit
def is_square(geometry: int) -> bool:
    """True for windows of SIDE by SIDE that move by one."""
    steps = word(geometry, STEP_DOWN) * word(geometry, STEP_ACROSS)
    steps *= word(geometry, SPREAD_DOWN) * word(geometry, SPREAD_ACROSS)
    found: bool = steps == 1 and word(geometry, WINDOW_HEIGHT) == SIDE == word(geometry, WINDOW_WIDTH)
    return found


@jit
def slide_line(
    kind: int, target: int, source: int, offsets: int, weights: int, taps: int, count: int
) -> None:
    """Write `count` results side by side."""
    for first in range(0, count, TOGETHER * LANES):
        some = min(count - first, TOGETHER * LANES)
        slide(kind, target + 4 * first, source + 4 * first, offsets, weights, taps, some)


@jit
def sum_by_channels(step: int, slots: int, scratch: int, row: int, rows: int, height: int) -> int:
    """Write the sums of as many channels as fill vectors, and return the first of the others."""
    geometry, area = step + 8 * WINDOWS_GEOMETRY, scratch + PACK_AT + word(step, WINDOWS_LANES_AT)
    clear_vectors(area, padded_size(geometry, height, line_places(geometry)))
    behind = row + rows // LANES * LANES
    for channel in range(row, behind, LANES):
        sum_channels(
            geometry,
            operand_address(step + 8 * WINDOWED, slots, scratch, channel, 0),
            word(step + 8 * WINDOWED, ROW_STRIDE),
            operand_address(step + 8 * WINDOWS_OF, slots, scratch, channel, 0),
            word(step + 8 * WINDOWS_OF, ROW_STRIDE),
            operand_address(step + 8 * WINDOWS_WEIGHTS, slots, scratch, channel, 0),
            word(step + 8 * WINDOWS_WEIGHTS, ROW_STRIDE),
            height,
            area,
        )
    return behind


@Entry
def windows_block(_kind: int, step: int, block: int, slots: int, scratch: int) -> None:
    """Run one block of windows, and its epilogue: some channels, or lines of one."""
    row, rows, column, columns = locate(step, block, scratch)
    geometry, kind = step + 8 * WINDOWS_GEOMETRY, word(step, WINDOWS_AS)
    width, pitch = word(geometry, RESULT_WIDTH), word(step, WINDOWS_PITCH)
    taps = word(geometry, WINDOW_HEIGHT) * word(geometry, WINDOW_WIDTH)
    height, down = columns // width, word(geometry, STEP_DOWN)
    lines = height + reach(geometry, WINDOW_HEIGHT, SPREAD_DOWN) // down
    offsets = scratch + PACK_AT
    long, staged = offsets + word(step, WINDOWS_LINE_AT), offsets + word(step, WINDOWS_PLANES_AT)
    find_offsets(geometry, offsets, lines, pitch)
    top = column // width * down - word(geometry, PADDING_ABOVE)
    square = kind == PRODUCT and is_square(geometry)
    behind = top + (height - 1) * down + reach(geometry, WINDOW_HEIGHT, SPREAD_DOWN) + 1
    fill = LEAST if kind == LARGEST else 0.0
    first = row
    if word(step, WINDOWS_LANES_AT):
        first = sum_by_channels(step, slots, scratch, row, rows, height)
    for channel in range(first, row + rows):
        source = operand_address(step + 8 * WINDOWS_OF, slots, scratch, channel, 0)
        weights = 0
        if kind == PRODUCT:
            weights = operand_address(step + 8 * WINDOWS_WEIGHTS, slots, scratch, channel, 0)
            if word(geometry, NARROW_KERNEL):
                narrow = word(geometry, NARROW_KERNEL) >> WIDENING & KINDS
                convert_rows(scratch, narrow, scratch + STAGED_AT, weights, 0, 2, 1, taps)
                weights = scratch + STAGED_AT
        target = operand_address(step + 8 * WINDOWED, slots, scratch, channel, column)
        if word(geometry, NARROW_IMAGE):
            source = widen_lines(geometry, source, top, behind, 1, scratch)
            stage_lines(scratch + BUFFERS_AT, staged, source, top, lines, pitch, fill)
        else:
            stage_lines(geometry, staged, source, top, lines, pitch, fill)
        if square:
            slide_rows(target, staged, pitch, weights, height, width)
        elif word(step, WINDOWS_LINE_AT):
            slide_line(kind, long, staged, offsets, weights, taps, (height - 1) * pitch + width)
            copy_lines(target, long, height, width, pitch)
        else:
            for line in range(height):
                here = staged + 4 * line * pitch
                slide_line(kind, target + 4 * line * width, here, offsets, weights, taps, width)
    epilogue, body = word(step, WINDOWS_HAS_EPILOGUE), step + 8 * WINDOWS_EPILOGUE
    if epilogue == 1:
        call_elementwise(scratch, body, slots, scratch, row, rows, column, columns)
    elif epilogue:
        call_finish_rows(scratch, body, slots, scratch, row, rows, column, columns)
