"""Sums of windows over small images with sixteen channels as the lanes of a vector.

The lines of a small image fill vectors badly, and each vector of a window is loaded for one
product. With channels as lanes, every vector is full, and a weight serves several results. Images
are transposed to a padded area in the cache, and results back. An element is the same chain of
fused multiply-adds as in `planes`, with the padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types

from heliograph_backends.cpu.kernels.matmul.stored_words import transposed
from heliograph_backends.cpu.kernels.program.words import (
    IMAGE_HEIGHT,
    IMAGE_WIDTH,
    PADDING_ABOVE,
    PADDING_LEFT,
    RESULT_WIDTH,
    SPREAD_ACROSS,
    SPREAD_DOWN,
    STEP_ACROSS,
    STEP_DOWN,
    WINDOW_HEIGHT,
    WINDOW_WIDTH,
)
from heliograph_backends.cpu.kernels.vector.atomics import word
from heliograph_backends.cpu.kernels.vector.lanes import (
    F32_VECTOR,
    I64,
    LANES,
    Lanes,
    emitted,
    has_feature,
    integer,
    jit,
    local,
    loop,
    prefetch,
    subroutine,
    tail_mask,
)

#: The bytes of a vector, and the results that are computed together.
VECTOR, TOGETHER = 4 * LANES, 8
#: Windows of these widths, of elements side by side that move by one, have sums whose results share
#: what they read: so many results, where there are registers for them.
SHARED_WIDTHS, MANY, FEW = (3, 5), 14, 7
SHARES = has_feature("avx512f")


def _to_lanes(builder: Any, target: Any, source: Any, step: Any, count: Any) -> None:
    with loop(builder, integer(0), count, LANES) as index:
        mask = tail_mask(builder, builder.sub(count, index))
        here = builder.add(source, builder.mul(index, integer(4)))
        rows = []
        for _ in range(LANES):
            rows.append(Lanes.load_masked(builder, here, mask).bits())
            here = builder.add(here, step)
        there = builder.add(target, builder.mul(index, integer(VECTOR)))
        for number, vector in enumerate(transposed(builder, rows)):
            place = builder.add(there, integer(VECTOR * number))
            Lanes.from_bits(builder, vector).store(place)


def _from_lanes(builder: Any, target: Any, source: Any, step: Any, count: Any) -> None:
    with loop(builder, integer(0), count, LANES) as index:
        mask = tail_mask(builder, builder.sub(count, index))
        here = builder.add(source, builder.mul(index, integer(VECTOR)))
        rows = [
            Lanes.load(builder, builder.add(here, integer(VECTOR * number))).bits() for number in range(LANES)
        ]
        there = builder.add(target, builder.mul(index, integer(4)))
        for vector in transposed(builder, rows):
            Lanes.from_bits(builder, vector).store_masked(there, mask)
            there = builder.add(there, step)


@emitted(types.void, *[types.int64] * 4)
def to_lanes(builder: Any, target: Any, source: Any, step: Any, count: Any) -> None:
    """Write vector i of the elements i of sixteen rows, `step` bytes apart; whole groups of sixteen
    vectors are written."""
    function = subroutine(builder, "to_lanes", (I64,) * 4, _to_lanes)
    builder.call(function, [target, source, step, count])


@emitted(types.void, *[types.int64] * 4)
def from_lanes(builder: Any, target: Any, source: Any, step: Any, count: Any) -> None:
    """Write the lanes of vectors as sixteen rows; whole groups of sixteen vectors are read."""
    function = subroutine(builder, "from_lanes", (I64,) * 4, _from_lanes)
    builder.call(function, [target, source, step, count])


def _copy_vectors(builder: Any, target: Any, source: Any, count: Any) -> None:
    with loop(builder, integer(0), count, 1) as index:
        place = builder.mul(index, integer(VECTOR))
        Lanes.load(builder, builder.add(source, place)).store(builder.add(target, place))


@emitted(types.void, *[types.int64] * 3)
def copy_vectors(builder: Any, target: Any, source: Any, count: Any) -> None:
    """Copy vectors that lie side by side."""
    function = subroutine(builder, "copy_vectors", (I64,) * 3, _copy_vectors)
    builder.call(function, [target, source, count])


@emitted(types.void, types.int64, types.int64)
def clear_vectors(builder: Any, target: Any, count: Any) -> None:
    """Clear vectors that lie side by side."""
    with loop(builder, integer(0), count, 1) as index:
        zero = Lanes.constant(builder, 0.0)
        zero.store(builder.add(target, builder.mul(index, integer(VECTOR))))


@emitted(types.void, types.int64, types.int64)
def fetch(builder: Any, address: Any, size: Any) -> None:
    """Prefetch bytes, which may be no memory."""
    with loop(builder, integer(0), size, VECTOR) as index:
        prefetch(builder, builder.add(address, index))


def _sums(results: int, step: int) -> Callable[..., None]:
    """Return the body of a function that computes so many results of windows that move by `step`."""

    def body(
        builder: Any, target: Any, source: Any, weights: Any, height: Any, width: Any, down: Any, across: Any
    ) -> None:
        cells = [local(builder, Lanes.constant(builder, 0.0).value.type) for _ in range(results)]
        for cell in cells:
            builder.store(Lanes.constant(builder, 0.0).value, cell)
        with loop(builder, integer(0), height, 1) as y:
            line = builder.add(source, builder.mul(y, down))
            taps = builder.add(weights, builder.mul(builder.mul(y, width), integer(VECTOR)))
            with loop(builder, integer(0), width, 1) as x:
                here = builder.add(line, builder.mul(x, across))
                weight = Lanes.load(builder, builder.add(taps, builder.mul(x, integer(VECTOR))))
                for number, cell in enumerate(cells):
                    one = Lanes.load(builder, builder.add(here, integer(VECTOR * step * number)))
                    total = one.fma(weight, Lanes(builder, builder.load(cell)))
                    builder.store(total.value, cell)
        for number, cell in enumerate(cells):
            Lanes(builder, builder.load(cell)).store(builder.add(target, integer(VECTOR * number)))

    return body


@emitted(types.void, *[types.int64] * 9)
def sums(
    builder: Any, step: Any, results: Any, target: Any, source: Any, weights: Any, height: Any, width: Any,
    down: Any, across: Any,
) -> None:  # fmt: skip
    """Write at most TOGETHER results of one line, of windows that move by one or two; strides in
    bytes."""
    done = builder.append_basic_block("sums.done")
    switch = builder.switch(builder.add(builder.mul(step, integer(TOGETHER + 1)), results), done)
    for each in (1, 2):
        for number in range(1, TOGETHER + 1):
            name = f"sums_{each}_{number}"
            with builder.goto_block(builder.append_basic_block(name)):
                function = subroutine(builder, name, (I64,) * 7, _sums(number, each))
                builder.call(function, [target, source, weights, height, width, down, across])
                switch.add_case(integer(each * (TOGETHER + 1) + number), builder.block)
                builder.branch(done)
    builder.position_at_end(done)


def _shared_sums(results: int, width: int) -> Callable[..., None]:
    """Return the body of a function that computes so many results of windows of a width."""

    def body(builder: Any, target: Any, source: Any, weights: Any, height: Any, down: Any) -> None:
        cells = [local(builder, F32_VECTOR) for _ in range(results)]
        for cell in cells:
            builder.store(Lanes.constant(builder, 0.0).value, cell)
        with loop(builder, integer(0), height, 1) as y:
            line = builder.add(source, builder.mul(y, down))
            taps = builder.add(weights, builder.mul(y, integer(VECTOR * width)))
            read = [
                Lanes.load(builder, builder.add(line, integer(VECTOR * number)))
                for number in range(results + width - 1)
            ]
            for across in range(width):
                weight = Lanes.load(builder, builder.add(taps, integer(VECTOR * across)))
                for number, cell in enumerate(cells):
                    total = Lanes(builder, builder.load(cell))
                    builder.store(read[number + across].fma(weight, total).value, cell)
        for number, cell in enumerate(cells):
            Lanes(builder, builder.load(cell)).store(builder.add(target, integer(VECTOR * number)))

    return body


@emitted(types.void, *[types.int64] * 7)
def shared_sums(
    builder: Any, width: Any, results: Any, target: Any, source: Any, weights: Any, height: Any, down: Any
) -> None:
    """Write MANY or FEW results of one line, of windows of one of SHARED_WIDTHS; a stride in
    bytes."""
    done = builder.append_basic_block("shared_sums.done")
    switch = builder.switch(builder.add(builder.mul(width, integer(MANY + 1)), results), done)
    for each in SHARED_WIDTHS if SHARES else ():
        for number in (MANY, FEW):
            name = f"shared_sums_{each}_{number}"
            with builder.goto_block(builder.append_basic_block(name)):
                function = subroutine(builder, name, (I64,) * 5, _shared_sums(number, each))
                builder.call(function, [target, source, weights, height, down])
                switch.add_case(integer(each * (MANY + 1) + number), builder.block)
                builder.branch(done)
    builder.position_at_end(done)


@jit
def padded_size(geometry: int, height: int, width: int) -> int:
    """Return the places that windows read of an image with its padding; `width`: of each line."""
    lines = (height - 1) * word(geometry, STEP_DOWN)
    lines += (word(geometry, WINDOW_HEIGHT) - 1) * word(geometry, SPREAD_DOWN) + 1
    found: int = lines * width
    return found


@jit
def line_places(geometry: int) -> int:
    """Return the places of a line that windows read, with its padding."""
    found: int = (word(geometry, RESULT_WIDTH) - 1) * word(geometry, STEP_ACROSS)
    found += (word(geometry, WINDOW_WIDTH) - 1) * word(geometry, SPREAD_ACROSS) + 1
    return found


@jit
def put_in_padding(geometry: int, padded: int, image: int, places: int, width: int) -> None:
    """Copy the places of an image that windows read into the padded area."""
    above, left = word(geometry, PADDING_ABOVE), word(geometry, PADDING_LEFT)
    have, lines = word(geometry, IMAGE_WIDTH), places // width
    count = min(have, width - left)
    for y in range(min(word(geometry, IMAGE_HEIGHT), lines - above)):
        there = padded + VECTOR * ((y + above) * width + left)
        if count > 0:
            copy_vectors(there, image + VECTOR * y * have, count)


@jit
def sum_channels(
    geometry: int, source: int, source_row: int, weights: int, weights_row: int, height: int, area: int
) -> int:
    """Return the place of the sums of the windows of sixteen channels. The area has the padded
    image, whose padding is 0, then the weights, then the image, which becomes the results."""
    width, across = word(geometry, RESULT_WIDTH), word(geometry, STEP_ACROSS)
    rows, columns = word(geometry, WINDOW_HEIGHT), word(geometry, WINDOW_WIDTH)
    line = line_places(geometry)
    places = padded_size(geometry, height, line)
    own = area + VECTOR * places
    flat: int = own + VECTOR * ((rows * columns + LANES - 1) // LANES * LANES)
    to_lanes(own, weights, weights_row, rows * columns)
    to_lanes(flat, source, source_row, word(geometry, IMAGE_HEIGHT) * word(geometry, IMAGE_WIDTH))
    put_in_padding(geometry, area, flat, places, line)
    down = word(geometry, STEP_DOWN) * line * VECTOR
    tap_down, tap_across = word(geometry, SPREAD_DOWN) * line * VECTOR, word(geometry, SPREAD_ACROSS) * VECTOR
    shares = SHARES and across == 1 and tap_across == VECTOR and columns in SHARED_WIDTHS
    for y in range(height):
        x = 0
        while x < width:
            here, left = area + y * down + x * across * VECTOR, width - x
            there = flat + VECTOR * (y * width + x)
            if shares and (left >= MANY or left == FEW):
                some = MANY if left >= MANY else FEW
                shared_sums(columns, some, there, here, own, rows, tap_down)
            else:
                some = min(TOGETHER, left)
                sums(across, some, there, here, own, rows, columns, tap_down, tap_across)
            x += some
    return flat
