"""Windows over each channel by itself: depthwise convolutions, and pools.

Theory of operation. Some lines of a plane are *staged*: copied into the cache with their padding,
and with one plane for each phase of the step, so that a step of two has the even and the odd
elements in rows of their own. There the elements at one place of all windows lie side by side, at
an offset that only depends on the place in the window. A result is then a sum (or maximum) over the
window of vectors at these offsets. Short lines of the result are computed as one long line, with
the elements between them, and copied from there.

Products of 3 by 3 that move by one are computed from the image itself: masks and a line of zeros
are the padding. Staging took a third of their time.

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
    has_feature,
    integer,
    jit,
    local,
    loop,
    pointer,
    prefetch,
    splat,
    subroutine,
    tail_mask,
    workspace,
)
from heliograph_backends.cpu.kernels.vector.space import convert_rows, locate, operand_address
from heliograph_backends.cpu.kernels.windows.chains import is_by_lanes, write_lanes
from heliograph_backends.cpu.kernels.windows.channel_lanes import (
    clear_vectors,
    fetch,
    from_lanes,
    line_places,
    padded_size,
    sum_channels,
)

LEAST = -3.4028234663852886e38
PRODUCT, LARGEST = int(Windowing.PRODUCT), int(Windowing.LARGEST)
_EVEN, _ODD = list(range(0, 2 * LANES, 2)), list(range(1, 2 * LANES, 2))
#: Vectors of results that are computed together: side by side, and among each other.
TOGETHER, ROWS = 4, 4
#: Beyond the elements that are staged: images come from the third-level cache.
PREFETCH_BYTES = 2048
#: The side of square windows that have a loop of their own.
SIDE = 3
#: The kind of an epilogue that is a chain.
CHAIN = 2

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
                    prefetch(builder, builder.add(element(builder, start, at), integer(PREFETCH_BYTES)))
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


def _side_by_side(builder: Any, line: Any, cell: Any, index: Any, masks: list[Any]) -> list[Lanes]:
    """Return the vectors of a line at the places of a window, from the element `index` on.

    With AVX-512 an element is loaded once: the cell has the vector at the first place, and gets
    that of the next index. Elsewhere a load costs less than the shift of a vector of two registers.
    """
    start, step = line
    if not has_feature("avx512f"):
        here = builder.add(start, builder.mul(index, step))
        places = [builder.add(here, integer(4 * place)) for place in range(SIDE)]
        return [Lanes.load_masked(builder, *each) for each in zip(places, masks, strict=True)]
    behind = builder.add(start, builder.mul(builder.add(index, integer(LANES)), step))
    now, then = builder.load(cell), Lanes.load_masked(builder, behind, masks[0]).value
    builder.store(then, cell)
    orders = [ir.Constant(I32_VECTOR, list(range(place, place + LANES))) for place in range(SIDE)]
    return [Lanes(builder, builder.shuffle_vector(now, then, order)) for order in orders]


def _slide_squares(
    builder: Any, target: Any, target_line: Any, source: Any, source_line: Any, top: Any, height: Any,
    before: Any, width: Any, weights: Any, lines: Any, count: Any,
) -> None:  # fmt: skip
    """A vector that is read serves all of ROWS lines, and all weights are in registers."""
    taps = []
    for tap in range(SIDE * SIDE):
        place = builder.add(weights, integer(4 * tap))
        taps.append(Lanes.broadcast(builder, builder.load(pointer(builder, place, F32))))
    numbers = ir.Constant(I32_VECTOR, list(range(LANES)))
    edge = splat(builder, builder.trunc(width, I32), I32_VECTOR)
    # A line outside the image is a vector of zeros, at which no index moves.
    zeros = workspace(builder, 4 * (LANES + LANES))
    for part in range(2):
        Lanes.constant(builder, 0.0).store(builder.add(zeros, integer(4 * LANES * part)))

    def inside(index: Any) -> Any:
        first = splat(builder, builder.trunc(builder.add(before, index), I32), I32_VECTOR)
        return builder.icmp_unsigned("<", builder.add(first, numbers), edge)

    cells = [local(builder, F32_VECTOR) for _ in range(ROWS + SIDE - 1)]
    with loop(builder, integer(0), lines, ROWS) as first:
        starts = []
        for number, cell in enumerate(cells):
            row = builder.add(builder.add(top, first), integer(number))
            is_inside = builder.icmp_unsigned("<", row, height)
            here = element(builder, builder.add(source, builder.mul(row, source_line)), before)
            start = builder.select(is_inside, here, zeros)
            starts.append((start, builder.select(is_inside, integer(4), integer(0))))
            builder.store(Lanes.load_masked(builder, start, inside(integer(0))).value, cell)
        there, left = builder.add(target, builder.mul(first, target_line)), builder.sub(lines, first)
        with loop(builder, integer(0), count, LANES) as index:
            mask, totals = (
                tail_mask(builder, builder.sub(count, index)),
                [Lanes.constant(builder, 0.0)] * ROWS,
            )
            ahead = [LANES] if has_feature("avx512f") else range(SIDE)
            masks = [inside(builder.add(index, integer(place))) for place in ahead]
            for number, (line, cell) in enumerate(zip(starts, cells, strict=True)):
                for across, x in enumerate(_side_by_side(builder, line, cell, index, masks)):
                    for row in range(max(0, number - SIDE + 1), min(ROWS, number + 1)):
                        totals[row] = x.fma(taps[(number - row) * SIDE + across], totals[row])
            for row, total in enumerate(totals):
                place = builder.add(element(builder, there, index), builder.mul(target_line, integer(row)))
                with builder.if_then(builder.icmp_signed("<", integer(row), left)):
                    total.store_masked(place, mask)


@emitted(types.void, *[types.int64] * 11)
def slide_squares(
    builder: Any, target: Any, target_line: Any, source: Any, source_line: Any, top: Any, height: Any,
    before: Any, width: Any, weights: Any, lines: Any, count: Any,
) -> None:  # fmt: skip
    """Write `lines` lines of `count` products of windows of SIDE by SIDE that move by one.

    The first window begins at row `top` and column `before` of an image of height by width, whose
    elements are side by side. Elements outside count as 0. Strides in bytes.
    """
    function = subroutine(builder, "slide_squares", (I64,) * 11, _slide_squares)
    given = [target, target_line, source, source_line, top, height, before, width, weights, lines, count]
    builder.call(function, given)


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
def finishes_lanes(step: int) -> bool:
    """True if what follows the sums of channels is applied to vectors of them."""
    is_chain = word(step, WINDOWS_LANES_AT) != 0 and word(step, WINDOWS_HAS_EPILOGUE) == CHAIN
    found: bool = is_chain and is_by_lanes(step + 8 * WINDOWS_EPILOGUE)
    return found


@jit
def sum_by_channels(step: int, slots: int, scratch: int, row: int, rows: int, height: int) -> int:
    """Write the sums of as many channels as fill vectors, and return the first of the others."""
    geometry, area = step + 8 * WINDOWS_GEOMETRY, scratch + PACK_AT + word(step, WINDOWS_LANES_AT)
    clear_vectors(area, padded_size(geometry, height, line_places(geometry)))
    behind, places = row + rows // LANES * LANES, height * word(geometry, RESULT_WIDTH)
    finishes = finishes_lanes(step)
    source_row = word(step + 8 * WINDOWS_OF, ROW_STRIDE)
    weights_row = word(step + 8 * WINDOWS_WEIGHTS, ROW_STRIDE)
    target_row = word(step + 8 * WINDOWED, ROW_STRIDE)
    taps = 4 * word(geometry, WINDOW_HEIGHT) * word(geometry, WINDOW_WIDTH)
    for channel in range(row, behind, LANES):
        source = operand_address(step + 8 * WINDOWS_OF, slots, scratch, channel, 0)
        weights = operand_address(step + 8 * WINDOWS_WEIGHTS, slots, scratch, channel, 0)
        # Since they were used, the weights of other layers were in the cache.
        fetch(weights + LANES * weights_row, LANES * min(weights_row, taps))
        found = sum_channels(geometry, source, source_row, weights, weights_row, height, area)
        target = operand_address(step + 8 * WINDOWED, slots, scratch, channel, 0)
        if finishes:
            body = step + 8 * WINDOWS_EPILOGUE
            write_lanes(body, target, target_row, found, slots, scratch, channel, 0, places)
        else:
            from_lanes(target, found, target_row, places)
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
        if square and word(geometry, PIXEL_STRIDE) == 4 and not word(geometry, NARROW_IMAGE):
            left, have = -word(geometry, PADDING_LEFT), word(geometry, IMAGE_WIDTH)
            rows_of, line_step = word(geometry, IMAGE_HEIGHT), word(geometry, LINE_STRIDE)
            slide_squares(
                target, 4 * width, source, line_step, top, rows_of, left, have, weights, height, width
            )
            continue
        if word(geometry, NARROW_IMAGE):
            source = widen_lines(geometry, source, top, behind, 1, scratch)
            stage_lines(scratch + BUFFERS_AT, staged, source, top, lines, pitch, fill)
        else:
            stage_lines(geometry, staged, source, top, lines, pitch, fill)
        if square:
            slide_squares(target, 4 * width, staged, 4 * pitch, 0, lines, 0, pitch, weights, height, width)
        elif word(step, WINDOWS_LINE_AT):
            slide_line(kind, long, staged, offsets, weights, taps, (height - 1) * pitch + width)
            copy_lines(target, long, height, width, pitch)
        else:
            for line in range(height):
                here = staged + 4 * line * pitch
                slide_line(kind, target + 4 * line * width, here, offsets, weights, taps, width)
    epilogue, body = word(step, WINDOWS_HAS_EPILOGUE), step + 8 * WINDOWS_EPILOGUE
    done = first - row if finishes_lanes(step) else 0
    if epilogue == CHAIN:
        call_finish_rows(scratch, body, slots, scratch, row + done, rows - done, column, columns)
    elif epilogue:
        call_elementwise(scratch, body, slots, scratch, row, rows, column, columns)
