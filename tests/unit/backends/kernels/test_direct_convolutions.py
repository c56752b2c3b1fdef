"""Convolutions with packed kernels: the bits of kernels in their own order, whose windows are packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_graphs import Array, Maker, loaded, same_bits
from narrow_views import ENDS, SPECIAL, Devices, Operands

from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cpu.plan import CpuPlan


def normal(random: np.random.Generator, *shape: int) -> Array:
    return random.standard_normal(shape, np.float32)


def both(made: Maker, kernel: Array, x: int, attributes: dict[str, Any], after: str = "") -> None:
    """Output a convolution with a kernel that can be packed, and with one that cannot."""
    outer = kernel.shape[0]
    for weights in (made.weight(kernel), made.input(kernel)):
        y = made.node("conv_2d", weights, x, **attributes)
        if "bias" in after:
            bias = np.linspace(-1, 1, outer, dtype=np.float32).reshape(outer, 1, 1)
            y = made.node("add", y, made.weight(bias))
        if "residual" in after:
            shape = made.type(y).shape
            y = made.node(
                "add", y, made.input(np.sin(np.arange(np.prod(shape), dtype=np.float32)).reshape(shape))
            )
        if "relu" in after:
            y = made.node("relu", y)
        if "exp" in after:
            y = made.node("exp", made.node("neg", made.node("abs", y)))
        made.output(y)


def check(devices: Devices, made: Maker, *, shared: bool = False) -> None:
    found = devices.found(made, shared=shared)
    for packed, own in zip(found[::2], found[1::2], strict=True):
        assert same_bits(packed, own)


@pytest.mark.parametrize("special", [(), SPECIAL, ENDS])
@pytest.mark.parametrize("channels", [5, 16, 27, 32, 50, 96])
def test_a_packed_kernel_gives_the_bits_of_one_in_its_own_order(
    channels: int, special: tuple[float, ...], devices: Devices, random: np.random.Generator
) -> None:
    """Of windows of any sizes, steps and distances, with the padding in their sums."""
    made = Maker()
    operands = Operands(made, random, special)
    for _ in range(8):
        sizes, window = random.integers(2, 34, 2), random.integers(1, 5, 2)
        stride, dilation = random.integers(1, 4, 2), random.integers(1, 3, 2)
        least = np.maximum(0, (window - 1) * dilation + 1 - sizes + 1) // 2
        attributes = {
            "stride": tuple(map(int, stride)), "dilation": tuple(map(int, dilation)),
            "padding": tuple(map(int, least + random.integers(0, 3, 2))), "groups": 1,
        }  # fmt: skip
        inner, images = int(random.integers(1, 20)), int(random.integers(1, 4))
        kernel = normal(random, channels, inner, *map(int, window))
        if special:
            kernel = np.where(random.random(kernel.shape) < 0.1, random.choice(special, kernel.shape), kernel)
        x = operands.view("behind", "f32", images, inner, *map(int, sizes))
        both(made, kernel.astype(np.float32), x, attributes)
    check(devices, made)


@pytest.mark.parametrize("after", ["bias", "bias relu", "bias residual", "bias residual relu", "relu", "exp"])
@pytest.mark.parametrize("channels", [48, 50])
def test_what_follows_has_the_same_bits(
    after: str, channels: int, devices: Devices, random: np.random.Generator
) -> None:
    made = Maker()
    for side, taps in ((7, 3), (15, 3), (7, 1)):
        x, kernel = made.input(normal(random, 2, 9, side, side)), normal(random, channels, 9, taps, taps)
        both(made, kernel, x, {"padding": (taps // 2,) * 2}, after)
    check(devices, made)


@pytest.mark.parametrize(
    "shape",
    [
        (64, 300, 7, 7, 3),
        (256, 160, 14, 14, 3),
        (64, 3, 112, 112, 7),
        (128, 40, 2, 300, 3),
        (640, 32, 1, 700, 1),
    ],
    ids=str,
)
def test_workers_share_blocks_of_large_ones(
    shape: tuple[int, ...], devices: Devices, random: np.random.Generator
) -> None:
    """Sums over more channels than are added at once, lines that are cut, and panels of a part."""
    outer, inner, height, width, taps = shape
    made = Maker()
    kernel, x = normal(random, outer, inner, taps, taps), normal(random, 2, inner, height, width)
    both(made, kernel, made.input(x), {"padding": (taps // 2, taps // 2)}, "bias relu")
    check(devices, made, shared=True)


def packed(device: CpuDevice, kernel: tuple[int, ...], data: tuple[int, ...], **attributes: Any) -> bool:
    made = Maker()
    weights, x = made.weight(np.ones(kernel, np.float32)), made.input(np.ones(data, np.float32))
    made.output(made.node("conv_2d", weights, x, **attributes))
    with loaded(device, made) as it:
        assert isinstance(it.plan, CpuPlan)
        it.run()
        return bool(it.plan.memory.packed)


def test_kernels_are_packed_where_that_fills_more_of_vectors(device: CpuDevice) -> None:
    assert packed(device, (64, 64, 3, 3), (1, 64, 14, 14), padding=(1, 1))
    assert packed(device, (96, 64, 1, 1), (1, 64, 7, 7))
    # Its places fill panels, and its windows cost nothing.
    assert not packed(device, (64, 64, 1, 1), (1, 64, 28, 28))
    # 8 channels would fill a quarter.
    assert not packed(device, (8, 64, 3, 3), (1, 64, 16, 16), padding=(1, 1))
    assert not packed(device, (64, 32, 3, 3), (1, 64, 14, 14), padding=(1, 1), groups=2)
    # Every third element is no vector.
    assert not packed(device, (64, 64, 3, 3), (1, 64, 24, 24), stride=(1, 3))
