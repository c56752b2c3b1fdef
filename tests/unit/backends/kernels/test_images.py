"""Resampled images, windows as rows, gradients of windows, and copies of parts as native steps: the
definition's elements for random shapes, views, and numbers of threads."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
from backend_graphs import Maker, op_path, run
from kernel_runs import addresses, over
from narrow_views import ENDS, FLOATS, SPECIAL, Devices, Operands

from heliograph_backends.cpu.kernels import (
    BoundProgram,
    Elementwise,
    Geometry,
    Input,
    Instruction,
    Operation,
    ProgramBuilder,
    Status,
)
from heliograph_proto.devices import OpPath
from heliograph_proto.ops.windows import window_sizes
from heliograph_proto.types import DTYPES, dtype

ROUNDS = 30


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_images_are_resampled_to_any_size(
    mode: int, corners: bool, devices: Devices, random: np.random.Generator
) -> None:
    made = Maker()
    operands = Operands(made, random, ENDS)
    for _ in range(ROUNDS):
        leading = tuple(int(size) for size in random.integers(1, 4, int(random.integers(0, 4))))
        have, size = (tuple(int(each) for each in random.integers(1, 40, 2)) for _ in range(2))
        x = operands.any_view("f32", *leading, *have)
        made.output(made.node("upscale", x, shape=(*leading, *size), mode=mode, align_corners=corners))
    devices.check_exactly(made)


def test_large_images_are_resampled_by_several_workers(devices: Devices, random: np.random.Generator) -> None:
    made = Maker()
    x = Operands(made, random).view("turned", "f32", 3, 300, 200)
    for mode in (1, 2):
        made.output(made.node("upscale", x, shape=(3, 512, 512), mode=mode))
    devices.check_exactly(made, shared=True)


def geometry(random: np.random.Generator, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], dict[str, Any]]:
    """A window and its steps, of which at least one lies inside of the padded image."""
    while True:
        window = tuple(int(each) for each in random.integers(1, 5, len(sizes)))
        found = {
            "stride": tuple(int(each) for each in random.integers(1, 4, len(sizes))),
            "padding": tuple(int(each) for each in random.integers(0, 4, len(sizes))),
            "dilation": tuple(int(each) for each in random.integers(1, 4, len(sizes))),
        }
        spans = zip(sizes, window, found["padding"], found["dilation"], strict=True)
        if all(size + 2 * pad > (width - 1) * spread for size, width, pad, spread in spans):
            return window, found


@pytest.mark.parametrize("dimensions", [1, 2])
@pytest.mark.parametrize("source", FLOATS)
def test_windows_become_rows(
    source: str, dimensions: int, devices: Devices, random: np.random.Generator
) -> None:
    made = Maker()
    operands = Operands(made, random, ENDS)
    targets = FLOATS if source == "f32" else (source,)
    for _ in range(ROUNDS):
        batch, channels = (int(each) for each in random.integers(1, 4, 2))
        sizes = tuple(int(each) for each in random.integers(1, 12, dimensions))
        window, attributes = geometry(random, sizes)
        kernel = made.input(np.zeros((2, channels, *window), np.float32))
        data = operands.any_view(source, batch, channels, *sizes)
        for target in targets:
            made.output(made.node("im2col", kernel, data, dtype=DTYPES[target], **attributes))
    devices.check_exactly(made)


@pytest.mark.parametrize("dimensions", [1, 2])
def test_rows_are_added_up_at_the_places_of_their_elements(
    dimensions: int, devices: Devices, random: np.random.Generator
) -> None:
    made = Maker()
    operands = Operands(made, random, ENDS)
    for _ in range(ROUNDS):
        batch, channels = (int(each) for each in random.integers(1, 4, 2))
        sizes = tuple(int(each) for each in random.integers(1, 12, dimensions))
        window, attributes = geometry(random, sizes)
        kernel = made.input(np.zeros((2, channels, *window), np.float32))
        windows = window_sizes(dict(attributes), sizes, window)
        rows = operands.view("behind", "f32", batch, *windows, channels * math.prod(window))
        shape = (batch, channels, *sizes)
        made.output(made.node("im2col_back", rows, kernel, shape=shape, **attributes))
    devices.check_exactly(made)


@pytest.mark.parametrize("average", [False, True])
def test_the_gradients_of_pools_are_added_up_in_the_order_of_the_windows(
    average: bool, devices: Devices, random: np.random.Generator
) -> None:
    """Windows overlap; the first of equal elements, or of NaN, is the largest."""
    made = Maker()
    operands = Operands(made, random, SPECIAL)
    for _ in range(2 * ROUNDS):
        leading = tuple(int(size) for size in random.integers(1, 4, int(random.integers(0, 3))))
        sizes = tuple(int(each) for each in random.integers(1, 14, 2))
        window, found = geometry(random, sizes)
        attributes = {"kernel": window, "stride": found["stride"], "average": average}
        attributes["padding"] = tuple(
            min(pad, width // 2) for pad, width in zip(found["padding"], window, strict=True)
        )
        if any(
            size + 2 * pad < width
            for size, pad, width in zip(sizes, attributes["padding"], window, strict=True)
        ):
            continue
        x = operands.any_view("f32", *leading, *sizes)
        if random.random() < 0.3:
            x = made.node("round", x)
        windows = window_sizes(dict(attributes), sizes, window)
        gradient = operands.any_view("f32", *leading, *windows)
        made.output(made.node("pool_2d_back", gradient, x, **attributes))
    devices.check_exactly(made)


def test_a_large_gradient_of_a_pool_is_cut_between_windows(
    devices: Devices, random: np.random.Generator
) -> None:
    made = Maker()
    operands = Operands(made, random)
    x, gradient = operands.leaf("f32", 2, 600, 300), operands.leaf("f32", 2, 300, 150)
    for average in (False, True):
        attributes = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1), "average": average}
        made.output(made.node("pool_2d_back", gradient, x, **attributes))
    devices.check_exactly(made, shared=True)


def test_an_abort_ends_the_gradient_of_large_windows() -> None:
    """A block reads windows of hundreds of millions of elements; it looks for an abort after
    each."""
    x, gradient = np.zeros((1000, 1000), np.float32), np.zeros((501, 501), np.float32)
    target, mark = np.empty_like(x), np.zeros(1, np.float32)
    count = Instruction(Operation.SCALE_BIAS, Input(0), (Input(0),), (1.0, 1.0))
    windows = Geometry(x.shape, (500, 500), (1, 1), (1, 1), (0, 0), gradient.shape)
    builder = ProgramBuilder()
    builder.elementwise((1,), Elementwise((over(3, mark),), (count,)))
    builder.pool_back((), windows, (over(0, gradient), over(1, x), over(2, target)), average=False)
    bound = BoundProgram(builder.build(), addresses([gradient, x, target, mark]))
    statuses: list[Status] = []
    thread = threading.Thread(target=lambda: statuses.append(bound.run(None)), daemon=True)
    thread.start()
    while mark[0] == 0:
        assert thread.is_alive()
    bound.abort()
    thread.join(20)
    assert statuses == [Status.ABORTED]


def test_a_window_as_tall_as_its_image_is_added_in_one_pass(devices: Devices) -> None:
    """The search for the rows of a window that reach a line does not go along the whole window."""
    size = 10**6
    column = np.arange(size, dtype=np.float32)
    made = Maker()
    kernel = made.node("broadcast_to", made.input(np.zeros((1, 1, 1, 1), np.float32)), shape=(1, 1, size, 1))
    rows = made.input(column.reshape(1, 1, 1, size))
    made.output(made.node("im2col_back", rows, kernel, shape=(1, 1, size, 1)))
    (found,) = run(devices.with_kernels[0], made)
    assert np.array_equal(found[0, 0, :, 0], column)


def test_rows_with_far_steps_are_added_up(devices: Devices, random: np.random.Generator) -> None:
    """Windows that are taller than the distance between them, and the other way around; lines that
    several blocks share."""
    made = Maker()
    operands = Operands(made, random, ENDS)
    for sizes, window, steps, spread in (
        ((97, 3), (60, 2), (11, 1), (1, 1)),
        ((97, 3), (3, 2), (2, 1), (31, 1)),
        ((1, 70_000), (1, 3), (1, 1), (1, 1)),
        ((2, 700), (1, 300), (1, 1), (1, 1)),
        ((20, 20), (20, 20), (1, 1), (1, 1)),
    ):
        attributes = {"stride": steps, "dilation": spread, "padding": tuple(each // 2 for each in window)}
        kernel = made.input(np.zeros((1, 1, *window), np.float32))
        windows = window_sizes(dict(attributes), sizes, window)
        rows = operands.leaf("f32", 2, *windows, math.prod(window))
        made.output(made.node("im2col_back", rows, kernel, shape=(2, 1, *sizes), **attributes))
    devices.check_exactly(made)


PLAIN = [name for name, found in DTYPES.items() if found.kind != "quantized"]


def operand(made: Maker, random: np.random.Generator, name: str, *shape: int) -> int:
    """An operand of any type; its elements have any bits but NaN's."""
    found = dtype(name)
    if name in FLOATS:
        return Operands(made, random, SPECIAL).any_view(name, *shape)
    if found.is_float:
        return made.input(random.standard_normal(shape).astype(found.numpy))
    return made.input(random.integers(0, 2 if name == "bool" else 100, shape).astype(found.numpy))


def some_of(shape: tuple[int, ...], random: np.random.Generator) -> tuple[int, ...]:
    """At most two elements of each dimension."""
    return tuple(min(int(random.integers(0, 3)), size) for size in shape)


@pytest.mark.parametrize("name", PLAIN)
def test_parts_are_moved(name: str, devices: Devices, random: np.random.Generator) -> None:
    made = Maker()
    for dimensions in range(1, 5):
        for _ in range(6):
            shape = tuple(int(size) for size in random.integers(1, 7, dimensions))
            x = operand(made, random, name, *shape)
            shifts = tuple(int(each) for each in random.integers(-9, 9, dimensions))
            made.output(made.node("roll", x, shifts=shifts))
            left, right = (int(each) for each in random.integers(0, shape[-1], 2))
            made.output(made.node("pad_reflect_1d", x, left=left, right=right))
            pads: dict[str, Any] = {
                side: tuple(
                    int(min(each, size))
                    for each, size in zip(random.integers(0, 3, dimensions), shape, strict=True)
                )
                for side in ("left", "right")
            }
            if sum(map(bool, (*pads["left"], *pads["right"]))) <= 4:
                made.output(made.node("pad", x, circular=True, **pads))
            if dtype(name).block_bytes > 1:
                made.output(made.node("pad", x, circular=False, **pads))
    devices.check_exactly(made)


def test_parts_that_repeat_too_often_are_moved_by_the_definition(devices: Devices) -> None:
    made = Maker()
    made.output(made.node("pad", made.input(np.zeros(2, np.float32)), left=(40,), right=(2,), circular=True))
    assert op_path(devices.with_kernels[0], made) is OpPath.DEFINITION
