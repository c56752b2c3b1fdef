"""Depthwise convolutions of sixteen channels at a time: the bits of each channel by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_graphs import Array, Maker, same_bits
from narrow_views import ENDS, SPECIAL, Devices, Operands

from heliograph_backends.cpu.kernels import Geometry
from heliograph_backends.cpu.kernels.program.encoding_windows import MOST_PLACES

LANES = 16


def part(made: Maker, value: int, axis: int, start: int, stop: int) -> int:
    shape = made.type(value).shape
    first = tuple(start if each == axis else 0 for each in range(4))
    last = tuple(stop if each == axis else size for each, size in enumerate(shape))
    return made.node("slice", value, start=first, stop=last, step=(1,) * 4)


def whole_and_parts(made: Maker, weights: int, x: int, attributes: dict[str, Any]) -> None:
    """Output a convolution, and those of its channels in groups that fill no vector."""
    made.output(made.node("conv_2d_dw", weights, x, **attributes))
    channels = made.type(x).shape[1]
    for start in range(0, channels, LANES - 1):
        stop = min(start + LANES - 1, channels)
        some = part(made, weights, 0, start, stop), part(made, x, 1, start, stop)
        made.output(made.node("conv_2d_dw", *some, **attributes))


def check(devices: Devices, made: Maker, channels: int) -> None:
    found = devices.found(made)
    each = 1 + -(-channels // (LANES - 1))
    for first in range(0, len(found), each):
        whole, *parts = found[first : first + each]
        assert same_bits(whole, np.ascontiguousarray(np.concatenate(parts, 1)))


@pytest.mark.parametrize("special", [(), SPECIAL, ENDS])
@pytest.mark.parametrize("channels", [16, 17, 31, 33, 80])
def test_channels_have_the_bits_that_each_has_alone(
    channels: int, special: tuple[float, ...], devices: Devices, random: np.random.Generator
) -> None:
    """Of windows of any sizes and steps, with the padding in their sums."""
    made = Maker()
    operands = Operands(made, random, special)
    for _ in range(12):
        sizes, window = random.integers(1, 20, 2), random.integers(1, 6, 2)
        stride, dilation = random.integers(1, 3, 2), random.integers(1, 3, 2)
        least = np.maximum(0, (window - 1) * dilation + 1 - sizes + 1) // 2
        attributes = {
            "stride": tuple(map(int, stride)), "dilation": tuple(map(int, dilation)),
            "padding": tuple(map(int, least + random.integers(0, 3, 2))),
        }  # fmt: skip
        weights = operands.leaf("f32", channels, 1, *map(int, window))
        x = operands.view("behind", "f32", int(random.integers(1, 3)), channels, *map(int, sizes))
        whole_and_parts(made, weights, x, attributes)
    check(devices, made, channels)


def normal(random: np.random.Generator, *shape: int) -> Array:
    return random.standard_normal(shape, np.float32)


def test_the_largest_image_with_channels_as_lanes_and_one_that_is_larger(
    devices: Devices, random: np.random.Generator
) -> None:
    made = Maker()
    sides = (32, MOST_PLACES // 32), (32, MOST_PLACES // 32 + 1)
    places = [Geometry(size, (1, 1), (1, 1), (1, 1), (0, 0), size).padded_places for size in sides]
    assert places[0] == MOST_PLACES < places[1]
    for size in sides:
        weights, x = made.input(normal(random, 40, 1, 1, 1)), made.input(normal(random, 1, 40, *size))
        whole_and_parts(made, weights, x, {})
    check(devices, made, 40)


def test_workers_share_channels_with_what_follows(devices: Devices, random: np.random.Generator) -> None:
    made = Maker()
    x, weights = made.input(normal(random, 4, 500, 7, 7)), made.input(normal(random, 500, 1, 5, 5))
    bias = made.input(normal(random, 500, 1, 1))
    y = made.node("conv_2d_dw", weights, x, padding=(2, 2))
    made.output(made.node("relu", made.node("add", y, bias)))
    devices.check_closely(made, shared=True)
