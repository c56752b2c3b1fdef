"""Packing windows of an image as the right side of a matrix product.

A convolution is a product of the kernel [channels out, k] with the windows [k, places], where k
runs over channels, then over the elements of a window. The windows are never in memory as a whole:
they are packed into panels of 32 places, for some channels at a time, when a block of the product
needs them.

Theory of operation. Sixteen places are the lanes of a vector. For one element of the window, lanes
of one row of the result lie side by side in the image (every other one with a step of two). A *run*
is the lanes of one row; a mask has those of them that lie inside of the image. Masks are made once
for an element of the window and serve all channels. If a row of the result is as long as one of the
image, all runs are one load.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from heliograph_backends.cpu.kernels.matmul.packing import PANEL_ROW_BYTES
from heliograph_backends.cpu.kernels.program.words import (
    IMAGE_HEIGHT,
    IMAGE_WIDTH,
    LINE_STRIDE,
    PADDING_ABOVE,
    PADDING_LEFT,
    PANEL_COLUMNS,
    PIXEL_STRIDE,
    PLANE_STRIDE,
    RESULT_WIDTH,
    SPREAD_ACROSS,
    SPREAD_DOWN,
    STEP_ACROSS,
    STEP_DOWN,
    WINDOW_HEIGHT,
    WINDOW_WIDTH,
)
from heliograph_backends.cpu.kernels.vector.atomics import load_f32, store_f32, word
from heliograph_backends.cpu.kernels.vector.lanes import (
    I32,
    I32_VECTOR,
    I64,
    LANES,
    MASK,
    Entry,
    Lanes,
    emitted,
    integer,
    jit,
    local,
    loop,
    splat,
    subroutine,
)

_EVEN = list(range(0, 2 * LANES, 2))


def _numbers(builder: Any, value: Any) -> Any:
    """Return an int64 in each lane, as int32."""
    return splat(builder, builder.trunc(value, I32), I32_VECTOR)


class _Run:
    """The lanes of one row of the result, for one element of the window."""

    def __init__(self, builder: Any, first: Any, run: Any, width: Any, row: Any, height: Any) -> None:
        """`first`: the place of lane 0 in its row; `run`: the rows after that one; `row`: the row
        of the image."""
        self._builder = builder
        self._start = builder.sub(first, builder.mul(run, width))
        self._width = width
        self._is_inside = builder.icmp_unsigned("<", row, height)

    def own(self, lanes: Any) -> Any:
        """Return the mask of the run among these lanes."""
        return self._below(self._places(lanes), self._width)

    def inside(self, lanes: Any, count: Any, step: int, column: Any, image_width: Any) -> Any:
        """Return the mask of the run's lanes that are below `count` and inside of the image."""
        builder = self._builder
        places = self._places(lanes)
        factor = ir.Constant(I32_VECTOR, [step] * LANES)
        columns = builder.add(builder.mul(places, factor), _numbers(builder, column))
        found = builder.and_(self._below(places, self._width), self._below(columns, image_width))
        found = builder.and_(found, builder.icmp_signed("<", lanes, _numbers(builder, count)))
        return builder.and_(found, splat(builder, self._is_inside, MASK))

    def _places(self, lanes: Any) -> Any:
        return self._builder.add(lanes, _numbers(self._builder, self._start))

    def _below(self, values: Any, limit: Any) -> Any:
        return self._builder.icmp_unsigned("<", values, _numbers(self._builder, limit))


_LANES_OF = {
    1: [list(range(LANES))],
    2: [[lane // 2 for lane in range(LANES)], [(LANES + lane) // 2 for lane in range(LANES)]],
}


def _masks(builder: Any, run: _Run, step: int, count: Any, column: Any, image_width: Any) -> list[Any]:
    """Return the masks of the elements that are loaded for a run: one vector for each step."""
    found = []
    for lanes in _LANES_OF[step]:
        mask = run.inside(ir.Constant(I32_VECTOR, lanes), count, step, column, image_width)
        if step == 2:
            even = ir.Constant(MASK, [1 - lane % 2 for lane in range(LANES)])
            mask = builder.and_(mask, even)
        found.append(mask)
    return found


def _load(builder: Any, place: Any, masks: list[Any]) -> Any:
    parts = [
        Lanes.load_masked(builder, builder.add(place, integer(4 * LANES * number)), mask).value
        for number, mask in enumerate(masks)
    ]
    if len(parts) == 1:
        return parts[0]
    return builder.shuffle_vector(*parts, ir.Constant(I32_VECTOR, _EVEN))


def _pack(step: int, is_joined: bool) -> Any:
    """Return the body of a function that packs sixteen places for one element of the window."""

    def body(
        builder: Any, target: Any, target_row: Any, source: Any, plane: Any, channels: Any, run_step: Any,
        row: Any, down: Any, height: Any, column: Any, image_width: Any, first: Any, width: Any, count: Any,
    ) -> None:  # fmt: skip
        last = builder.add(first, integer(LANES - 1))
        runs = builder.add(builder.sdiv(last, width), integer(1))
        joined = local(builder, MASK)
        builder.store(ir.Constant(MASK, [0] * LANES), joined)
        with loop(builder, integer(0), runs, 1) as number:
            run = _Run(builder, first, number, width, builder.add(row, builder.mul(number, down)), height)
            masks = _masks(builder, run, step, count, column, image_width)
            if is_joined:
                builder.store(builder.or_(builder.load(joined), masks[0]), joined)
            else:
                own = run.own(ir.Constant(I32_VECTOR, list(range(LANES))))
                place = builder.add(source, builder.mul(number, run_step))
                with loop(builder, integer(0), channels, 1) as channel:
                    here = builder.add(place, builder.mul(channel, plane))
                    there = builder.add(target, builder.mul(channel, target_row))
                    Lanes(builder, _load(builder, here, masks)).store_masked(there, own)
        if is_joined:
            mask = builder.load(joined)
            with loop(builder, integer(0), channels, 1) as channel:
                here = builder.add(source, builder.mul(channel, plane))
                there = builder.add(target, builder.mul(channel, target_row))
                Lanes(builder, _load(builder, here, [mask])).store(there)

    return body


def _packer(name: str, step: int, is_joined: bool) -> Any:
    def emit(
        builder: Any, target: Any, target_row: Any, source: Any, plane: Any, channels: Any, run_step: Any,
        row: Any, down: Any, height: Any, column: Any, image_width: Any, first: Any, width: Any, count: Any,
    ) -> None:  # fmt: skip
        function = subroutine(builder, name, (I64,) * 14, _pack(step, is_joined))
        builder.call(
            function,
            [
                target, target_row, source, plane, channels, run_step, row, down, height, column,
                image_width, first, width, count,
            ],
        )  # fmt: skip

    emit.__name__ = name
    return emitted(types.void, *[types.int64] * 14)(emit)


pack_joined = _packer("pack_joined", 1, True)
pack_runs = _packer("pack_runs", 1, False)
pack_runs_of_two = _packer("pack_runs_of_two", 2, False)


@jit
def pack_element(
    geometry: int, target: int, source: int, channels: int, row: int, column: int, place: int, count: int
) -> None:
    """Pack sixteen places from any strides, for one element of the window; `row` and `column`: its
    place in the image in window 0."""
    width, taps = word(geometry, RESULT_WIDTH), word(geometry, WINDOW_HEIGHT) * word(geometry, WINDOW_WIDTH)
    for lane in range(LANES):
        y = row + (place + lane) // width * word(geometry, STEP_DOWN)
        x = column + (place + lane) % width * word(geometry, STEP_ACROSS)
        inside = 0 <= y < word(geometry, IMAGE_HEIGHT) and 0 <= x < word(geometry, IMAGE_WIDTH)
        here = source + y * word(geometry, LINE_STRIDE) + x * word(geometry, PIXEL_STRIDE)
        there = target + 4 * lane
        for _ in range(channels):
            store_f32(there, load_f32(here) if inside and lane < count else 0.0)
            here += word(geometry, PLANE_STRIDE)
            there += taps * PANEL_ROW_BYTES


@jit
def pack_places(geometry: int, target: int, source: int, channels: int, place: int, count: int) -> None:
    """Pack sixteen places of a panel, `count` of which exist, for some channels."""
    line, plane = word(geometry, LINE_STRIDE), word(geometry, PLANE_STRIDE)
    height, image_width = word(geometry, IMAGE_HEIGHT), word(geometry, IMAGE_WIDTH)
    down, across = word(geometry, STEP_DOWN), word(geometry, STEP_ACROSS)
    width, pixel = word(geometry, RESULT_WIDTH), word(geometry, PIXEL_STRIDE)
    window_width = word(geometry, WINDOW_WIDTH)
    target_row = word(geometry, WINDOW_HEIGHT) * window_width * PANEL_ROW_BYTES
    first_row, first = place // width, place % width
    run_step = down * line - 4 * across * width
    for y in range(word(geometry, WINDOW_HEIGHT)):
        top = y * word(geometry, SPREAD_DOWN) - word(geometry, PADDING_ABOVE)
        row = top + first_row * down
        for x in range(window_width):
            column = x * word(geometry, SPREAD_ACROSS) - word(geometry, PADDING_LEFT)
            there = target + (y * window_width + x) * PANEL_ROW_BYTES
            here = source + row * line + 4 * (column + first * across)
            if pixel != 4 or across > 2:
                pack_element(geometry, there, source, channels, top, column, place, count)
            elif across == 2:
                pack_runs_of_two(
                    there, target_row, here, plane, channels, run_step, row, down, height, column,
                    image_width, first, width, count,
                )  # fmt: skip
            elif run_step == 0:
                pack_joined(
                    there, target_row, here, plane, channels, run_step, row, down, height, column,
                    image_width, first, width, count,
                )  # fmt: skip
            else:
                pack_runs(
                    there, target_row, here, plane, channels, run_step, row, down, height, column,
                    image_width, first, width, count,
                )  # fmt: skip


@Entry
def pack_patches(
    geometry: int,
    target: int,
    panel_bytes: int,
    source: int,
    start: int,
    depth: int,
    column: int,
    columns: int,
) -> None:
    """Pack the elements from `start` of windows into panels `panel_bytes` apart; whole channels.

    Places beyond the last window become 0. `source`: element (0, 0) of the image's first channel.
    """
    taps = word(geometry, WINDOW_HEIGHT) * word(geometry, WINDOW_WIDTH)
    source += start // taps * word(geometry, PLANE_STRIDE)
    for first in range(0, columns, PANEL_COLUMNS):
        for half in range(0, PANEL_COLUMNS, LANES):
            count = min(columns - first - half, LANES)
            there = target + 4 * half
            pack_places(geometry, there, source, depth // taps, column + first + half, count)
        target += panel_bytes
