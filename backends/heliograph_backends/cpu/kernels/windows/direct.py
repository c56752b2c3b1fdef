"""Convolutions whose channels out are the lanes of vectors.

Theory of operation. A constant kernel lies in panels of 32 channels out, as the right side of a
matrix product does (`packing`). Two vectors of a panel are the columns of a tile in registers,
whose rows are places of the result: for each element of the window, two loads of the kernel and a
broadcast of the image for each place. Windows are not packed. Some lines of all channels are
*staged*: copied into the cache with their padding, and with one plane for each phase of the step
(as in `planes`), where an element of the window is at one offset for all places of a line. So a
line of 7 or of 28 places fills its tiles, where panels of 32 places would be filled in part.

The tile of all channels is transposed as it becomes the result. That takes as long as ten elements
of windows, so windows of few elements are better packed, see `lowering.windows`.

Contract. An element is the chain `acc = fma(kernel[k], image[k], acc)` over channels, then over the
window, from +0, with the padding: the one of `matmul`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from heliograph_backends.cpu.kernels.program.convolution_words import (
    CONVOLVED,
    CONVOLVED_CHANNELS,
    CONVOLVED_EPILOGUE,
    CONVOLVED_GEOMETRY,
    CONVOLVED_HAS_EPILOGUE,
    CONVOLVED_OF,
    CONVOLVED_PLANES_AT,
    CONVOLVED_SUMS_AT,
    CONVOLVED_TOGETHER,
    CONVOLVED_WEIGHTS,
)
from heliograph_backends.cpu.kernels.program.words import (
    IMAGE_HEIGHT,
    IMAGE_WIDTH,
    LINE_STRIDE,
    PACK_AT,
    PADDING_ABOVE,
    PADDING_LEFT,
    PANEL_COLUMNS,
    PLANE_STRIDE,
    RESULT_WIDTH,
    ROW_STRIDE,
    ROWS,
    SPREAD_ACROSS,
    SPREAD_DOWN,
    STEP_ACROSS,
    STEP_DOWN,
    WINDOW_HEIGHT,
    WINDOW_WIDTH,
)
from heliograph_backends.cpu.kernels.vector.atomics import call_elementwise, call_finish_rows, word
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
    loop,
    pointer,
    prefetch,
    splat,
    subroutine,
    tail_mask,
)
from heliograph_backends.cpu.kernels.vector.space import copy_block, locate, operand_address, operand_base
from heliograph_backends.cpu.kernels.windows.chains import is_by_lanes, write_lanes
from heliograph_backends.cpu.kernels.windows.channel_lanes import from_lanes
from heliograph_backends.cpu.kernels.windows.planes import (
    CHAIN,
    find_offsets,
    phases_across,
    plane_elements,
    reach,
)

#: The tile in registers: vectors of channels by places.
VECTORS, PLACES = (2, 14) if has_feature("avx512f") else (1, 6)
VECTOR = 4 * LANES
#: Beyond the kernel's elements that are read, to be in the first-level cache in time.
PREFETCH_BYTES = 512
#: Channels whose lines are fetched before they are staged.
CHANNELS_AHEAD = 2
_ARGUMENTS = (I64,) * 13


def _sums(places: int) -> Callable[..., None]:
    """Return the body of a function that continues the sums of so many places."""
    before = (places + 1) // 2

    def body(
        builder: Any, sums: Any, half: Any, image: Any, second: Any, weights: Any, weights_row: Any,
        offsets: Any, taps: Any, channels: Any, plane: Any, first: Any, ahead: Any, ahead_step: Any,
    ) -> None:  # fmt: skip
        cells = [[builder.alloca(F32_VECTOR) for _ in range(VECTORS)] for _ in range(places)]
        marks = [
            [
                builder.add(sums, builder.add(builder.mul(half, integer(v)), integer(VECTOR * place)))
                for v in range(VECTORS)
            ]
            for place in range(places)
        ]
        for cell in sum(cells, []):
            builder.store(ir.Constant(F32_VECTOR, [0.0] * LANES), cell)
        with builder.if_then(builder.icmp_signed("==", first, integer(0))):
            for cell, mark in zip(sum(cells, []), sum(marks, []), strict=True):
                builder.store(Lanes.load(builder, mark).value, cell)
        row, line = builder.alloca(I64), builder.alloca(I64)
        builder.store(weights, row)
        builder.store(ahead, line)
        apart = builder.sub(second, image)
        with loop(builder, integer(0), channels, 1) as channel:
            base = builder.add(image, builder.mul(channel, plane))
            with loop(builder, integer(0), taps, 1) as tap:
                offset = builder.load(pointer(builder, element(builder, offsets, tap, I64), I64))
                here = builder.add(base, offset)
                there = builder.add(here, apart)
                own, next_line = builder.load(row), builder.load(line)
                kernel = [
                    Lanes.load(builder, builder.add(own, integer(VECTOR * number)))
                    for number in range(VECTORS)
                ]
                for number in range(VECTORS):
                    prefetch(builder, builder.add(own, integer(PREFETCH_BYTES + VECTOR * number)))
                prefetch(builder, next_line, 2)
                builder.store(builder.add(own, weights_row), row)
                builder.store(builder.add(next_line, ahead_step), line)
                for place, vectors in enumerate(cells):
                    start, index = (here, place) if place < before else (there, place - before)
                    address = builder.add(start, integer(4 * index))
                    x = Lanes.broadcast(builder, builder.load(pointer(builder, address, F32)))
                    for vector, cell in zip(kernel, vectors, strict=True):
                        total = Lanes(builder, builder.load(cell))
                        builder.store(x.fma(vector, total).value, cell)
        for cell, mark in zip(sum(cells, []), sum(marks, []), strict=True):
            Lanes(builder, builder.load(cell)).store(mark)

    return body


@emitted(types.void, *[types.int64] * 14)
def sum_places(
    builder: Any, places: Any, sums: Any, half: Any, image: Any, second: Any, weights: Any, weights_row: Any,
    offsets: Any, taps: Any, channels: Any, plane: Any, first: Any, ahead: Any, ahead_step: Any,
) -> None:  # fmt: skip
    """Continue the sums of at most PLACES places over some channels.

    `sums`: a vector for each place, and `half` bytes on the next vectors. `image`: the staged
    element of the first place, `second` that of the first one of the second half of them. `ahead`:
    what is read later, of which `ahead_step` bytes are prefetched for each element of a window.
    """
    done = builder.append_basic_block("places.done")
    switch = builder.switch(places, done)
    given = [
        sums, half, image, second, weights, weights_row, offsets, taps, channels, plane, first, ahead,
        ahead_step,
    ]  # fmt: skip
    for number in range(1, PLACES + 1):
        with builder.goto_block(builder.append_basic_block(f"places.{number}")):
            function = subroutine(builder, f"sum_{number}_places", _ARGUMENTS, _sums(number))
            builder.call(function, given)
            switch.add_case(integer(number), builder.block)
            builder.branch(done)
    builder.position_at_end(done)


def _stage(across: int) -> Callable[..., None]:
    """Return the body of a function that stages lines of many channels; see `planes`."""

    def body(
        builder: Any, target: Any, other: Any, plane: Any, source: Any, source_plane: Any, channels: Any,
        row: Any, down: Any, lines: Any, line_step: Any, height: Any, pitch: Any, before: Any, width: Any,
    ) -> None:  # fmt: skip
        numbers = ir.Constant(I32_VECTOR, list(range(LANES)))
        edge = splat(builder, builder.trunc(width, I32), I32_VECTOR)
        orders = [ir.Constant(I32_VECTOR, list(range(odd, 2 * LANES, 2))) for odd in (0, 1)]
        nothing = ir.Constant(MASK, [0] * LANES)
        with loop(builder, integer(0), channels, 1) as channel:
            image = builder.add(source, builder.mul(channel, source_plane))
            apart = builder.mul(channel, plane)
            # Lines of a page that is not mapped would take long.
            follows = builder.icmp_signed("<", builder.add(channel, integer(CHANNELS_AHEAD)), channels)
            ahead = builder.select(follows, builder.mul(source_plane, integer(CHANNELS_AHEAD)), integer(0))
            with loop(builder, integer(0), pitch, LANES) as index:
                first = builder.add(before, builder.mul(index, integer(across)))
                masks, starts = [], []
                for part in range(across):
                    at = builder.add(first, integer(LANES * part))
                    found = builder.add(splat(builder, builder.trunc(at, I32), I32_VECTOR), numbers)
                    masks.append(builder.icmp_unsigned("<", found, edge))
                    starts.append(element(builder, image, at))
                own = tail_mask(builder, builder.sub(pitch, index))
                with loop(builder, integer(0), lines, 1) as line:
                    y = builder.add(row, builder.mul(line, down))
                    is_inside, here = builder.icmp_unsigned("<", y, height), builder.mul(y, line_step)
                    parts = [
                        Lanes.load_masked(
                            builder, builder.add(start, here), builder.select(is_inside, mask, nothing)
                        ).value
                        for start, mask in zip(starts, masks, strict=True)
                    ]
                    for start in starts:
                        prefetch(builder, builder.add(start, builder.add(here, ahead)))
                    there = builder.add(builder.mul(line, pitch), index)
                    there = builder.add(apart, builder.mul(there, integer(4)))
                    if across == 2:
                        odd = builder.shuffle_vector(*parts, orders[1])
                        Lanes(builder, odd).store_masked(builder.add(other, there), own)
                        parts = [builder.shuffle_vector(*parts, orders[0])]
                    Lanes(builder, parts[0]).store_masked(builder.add(target, there), own)

    return body


def _stager(name: str, across: int) -> Any:
    def emit(
        builder: Any, target: Any, other: Any, plane: Any, source: Any, source_plane: Any, channels: Any,
        row: Any, down: Any, lines: Any, line_step: Any, height: Any, pitch: Any, before: Any, width: Any,
    ) -> None:  # fmt: skip
        function = subroutine(builder, name, (I64,) * 14, _stage(across))
        given = [
            target, other, plane, source, source_plane, channels, row, down, lines, line_step, height,
            pitch, before, width,
        ]  # fmt: skip
        builder.call(function, given)

    emit.__name__ = name
    return emitted(types.void, *[types.int64] * 14)(emit)


stage_all = _stager("stage_all", 1)
stage_all_pairs = _stager("stage_all_pairs", 2)


@jit
def stage_channels(
    geometry: int,
    staged: int,
    plane: int,
    source: int,
    channels: int,
    top: int,
    before: int,
    lines: int,
    pitch: int,
) -> None:
    """Stage `lines` lines of each phase of all channels, `plane` bytes apart; the windows of the
    first line begin at row `top` and column `before` of the image."""
    down, across = word(geometry, STEP_DOWN), word(geometry, STEP_ACROSS)
    height, width = word(geometry, IMAGE_HEIGHT), word(geometry, IMAGE_WIDTH)
    line_step, source_plane = word(geometry, LINE_STRIDE), word(geometry, PLANE_STRIDE)
    parts, each = phases_across(geometry), 4 * plane_elements(lines, pitch)
    for phase in range(min(down, reach(geometry, WINDOW_HEIGHT, SPREAD_DOWN) + 1)):
        target, row = staged + each * phase * parts, top + phase
        if across == 1:
            stage_all(
                target, target, plane, source, source_plane, channels, row, down, lines, line_step, height,
                pitch, before, width,
            )  # fmt: skip
        else:
            # The odd elements that no window reads are written over.
            other = target + each * (parts - 1)
            stage_all_pairs(
                target, other, plane, source, source_plane, channels, row, down, lines, line_step, height,
                pitch, before, width,
            )  # fmt: skip


@emitted(types.void, *[types.int64] * 3)
def fetch_rows(builder: Any, address: Any, row: Any, rows: Any) -> None:
    """Prefetch a cache line of each row, which will be written."""
    with loop(builder, integer(0), rows, 1) as index:
        prefetch(builder, builder.add(address, builder.mul(index, row)), 2)


@jit
def strip_places(count: int, height: int) -> int:
    """Return the places of a strip: an even part of a line, or two lines if they fit."""
    if 2 * count <= PLACES and height > 1:
        return 2 * count
    strips = (count + PLACES - 1) // PLACES
    found: int = (count + strips - 1) // strips
    return found


@jit
def sum_lines(
    sums: int, half: int, staged: int, plane: int, weights: int, weights_row: int, offsets: int, taps: int,
    channels: int, first: int, count: int, height: int, pitch: int, result: int, result_row: int, rows: int,
    behind: int,
) -> None:  # fmt: skip
    """Continue the sums of `height` lines of `count` places over some channels.

    `behind`: the end of the kernel.
    """
    most = strip_places(count, height)
    strips = (height + 1) // 2 if most > count else height * ((count + most - 1) // most)
    ahead, step = weights + channels * taps * weights_row, (weights_row + strips - 1) // strips
    if ahead >= behind:
        ahead, step = weights, 0
    share = channels * taps * step
    y = 0
    while y < height:
        lines = min(2, height - y) if most > count else 1
        for x in range(0, count, most):
            places = min(lines * count, most) if most > count else min(most, count - x)
            image = staged + 4 * (y * pitch + x)
            second = image + 4 * (pitch if lines == 2 else (places + 1) // 2)
            here = sums + VECTOR * (y * count + x)
            if first:
                fetch_rows(result + 4 * (y * count + x), result_row, rows)
            sum_places(
                places, here, half, image, second, weights, weights_row, offsets, taps, channels, plane,
                first, ahead, step,
            )  # fmt: skip
            ahead += share
        y += lines


@jit
def finish_panel(
    step: int, slots: int, scratch: int, sums: int, half: int, row: int, rows: int, column: int, columns: int
) -> None:
    """Write the sums of the channels of a panel to the result, and run the epilogue."""
    epilogue, body = word(step, CONVOLVED_HAS_EPILOGUE), step + 8 * CONVOLVED_EPILOGUE
    by_lanes, done = epilogue == CHAIN and is_by_lanes(body), 0
    for first in range(0, rows, LANES):
        vectors = sums + first // LANES * half
        target = operand_address(step + 8 * CONVOLVED, slots, scratch, row + first, column)
        target_row = word(step + 8 * CONVOLVED, ROW_STRIDE)
        if first + LANES > rows:
            # A vector that channels fill in part: its other lanes have no place in the result.
            some = vectors + half
            from_lanes(some, vectors, 4 * columns, columns)
            copy_block(target, target_row, 4, some, 4 * columns, 4, rows - first, columns)
            break
        if by_lanes:
            write_lanes(body, target, target_row, vectors, slots, scratch, row + first, column, columns)
            done += LANES
        else:
            from_lanes(target, vectors, target_row, columns)
    if not epilogue or done == rows:
        return
    if epilogue == CHAIN:
        call_finish_rows(scratch, body, slots, scratch, row + done, rows - done, column, columns)
    else:
        call_elementwise(scratch, body, slots, scratch, row, rows, column, columns)


@Entry
def convolve_block(_kind: int, step: int, block: int, slots: int, scratch: int) -> None:
    """Run one block of a convolution and its epilogue: some channels of whole lines, or of a part
    of one."""
    row, rows, column, columns = locate(step, block, scratch)
    geometry, channels = step + 8 * CONVOLVED_GEOMETRY, word(step, CONVOLVED_CHANNELS)
    width, down = word(geometry, RESULT_WIDTH), word(geometry, STEP_DOWN)
    across = word(geometry, STEP_ACROSS)
    taps = word(geometry, WINDOW_HEIGHT) * word(geometry, WINDOW_WIDTH)
    count = min(columns, width)
    height = columns // count
    pitch = count + reach(geometry, WINDOW_WIDTH, SPREAD_ACROSS) // across
    lines = height + reach(geometry, WINDOW_HEIGHT, SPREAD_DOWN) // down
    offsets = scratch + PACK_AT
    staged, sums = offsets + word(step, CONVOLVED_PLANES_AT), offsets + word(step, CONVOLVED_SUMS_AT)
    find_offsets(geometry, offsets, lines, pitch)
    phases = min(down, reach(geometry, WINDOW_HEIGHT, SPREAD_DOWN) + 1) * phases_across(geometry)
    plane = 4 * phases * plane_elements(lines, pitch)
    top = column // width * down - word(geometry, PADDING_ABOVE)
    before = column % width * across - word(geometry, PADDING_LEFT)
    source = operand_base(step + 8 * CONVOLVED_OF, slots, scratch)
    stage_channels(geometry, staged, plane, source, channels, top, before, lines, pitch)
    half = (columns + LANES - 1) // LANES * LANES * VECTOR
    together = word(step, CONVOLVED_TOGETHER)
    base = operand_base(step + 8 * CONVOLVED_WEIGHTS, slots, scratch)
    behind = base + 4 * word(step, ROWS) * channels * taps
    result_row = word(step + 8 * CONVOLVED, ROW_STRIDE)
    for first in range(row, row + rows, PANEL_COLUMNS):
        some = min(PANEL_COLUMNS, word(step, ROWS) - first)
        result = operand_address(step + 8 * CONVOLVED, slots, scratch, first, column)
        for start in range(0, channels, together):
            for part in range(0, some, VECTORS * LANES):
                weights = base + 4 * (first * channels + start * some) * taps + 4 * part
                sum_lines(
                    sums + part // LANES * half, half, staged + start * plane, plane, weights, 4 * some,
                    offsets, taps, min(together, channels - start), int(start == 0), count, height, pitch,
                    result + part * result_row, result_row, min(some - part, VECTORS * LANES), behind,
                )  # fmt: skip
        finish_panel(step, slots, scratch, sums, half, first, some, column, columns)
