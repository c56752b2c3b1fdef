"""Convolutions and pools of f16 and bf16 as native steps: converted piece by piece, computed in
float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_graphs import Maker, op_path, run, same_bits
from guarded import GuardedScratch
from kernel_runs import addresses, over
from narrow_views import FLOATS, NARROW, WAYS, Devices, Operands

from heliograph_backends.cpu.kernels import (
    BoundProgram,
    Geometry,
    ProgramBuilder,
    Status,
    Windowing,
)
from heliograph_backends.cpu.kernels.program.elements import HALF
from heliograph_proto.devices import OpPath
from heliograph_proto.types import DTYPES

F32 = DTYPES["f32"]
KINDS = [(kernel, data) for kernel in FLOATS for data in FLOATS if (kernel, data) != ("f32", "f32")]


def windows(random: np.random.Generator, sizes: tuple[int, ...], most: int = 4) -> tuple[Any, dict[str, Any]]:
    """A window that fits into padded images of these sizes, and its steps."""
    while True:
        window = tuple(int(each) for each in random.integers(1, most, 2))
        found = {
            "stride": tuple(int(each) for each in random.integers(1, 4, 2)),
            "padding": tuple(int(each) for each in random.integers(0, 3, 2)),
            "dilation": tuple(int(each) for each in random.integers(1, 3, 2)),
        }
        spans = zip(sizes, window, found["padding"], found["dilation"], strict=True)
        if all(size + 2 * pad > (width - 1) * spread for size, width, pad, spread in spans):
            return window, found


def wide(made: Maker, value: int) -> int:
    return value if made.type(value).dtype is F32 else made.node("cast", value, dtype=F32)


def check_pairs(devices: Devices, made: Maker, values: list[int]) -> None:
    """Check that the values of a pair have the same bits, and that all are the definition's."""
    made.output(*values)
    found = devices.found(made)
    for narrow, plain in zip(found[::2], found[1::2], strict=True):
        assert same_bits(narrow, plain)
    devices.check_closely(made)


@pytest.mark.parametrize("kernel", FLOATS)
@pytest.mark.parametrize("data", FLOATS)
def test_narrow_convolutions_have_the_bits_of_wide_ones(
    kernel: str, data: str, devices: Devices, random: np.random.Generator
) -> None:
    """Of any windows, groups, and views of the data, on any number of threads."""
    made, same = Maker(), []
    operands = Operands(made, random)
    for _ in range(25):
        groups, inner, outer = (int(each) for each in random.integers(1, 5, 3))
        sizes = tuple(int(each) for each in random.integers(1, 40, 2))
        window, attributes = windows(random, sizes)
        weights = operands.leaf(kernel, groups * outer, inner, *window)
        x = operands.any_view(data, int(random.integers(1, 3)), groups * inner, *sizes)
        attributes["groups"] = groups
        for first, second in ((weights, x), (wide(made, weights), wide(made, x))):
            same.append(made.node("conv_2d", first, second, **attributes))
    check_pairs(devices, made, same)


@pytest.mark.parametrize("kernel", FLOATS)
@pytest.mark.parametrize("data", FLOATS)
def test_narrow_depthwise_convolutions_have_the_bits_of_wide_ones(
    kernel: str, data: str, devices: Devices, random: np.random.Generator
) -> None:
    made, same = Maker(), []
    operands = Operands(made, random)
    for _ in range(25):
        channels, sizes = int(random.integers(1, 8)), tuple(int(each) for each in random.integers(1, 40, 2))
        window, attributes = windows(random, sizes, 6)
        weights = operands.leaf(kernel, channels, 1, *window)
        x = operands.any_view(data, int(random.integers(1, 3)), channels, *sizes)
        for first, second in ((weights, x), (wide(made, weights), wide(made, x))):
            same.append(made.node("conv_2d_dw", first, second, **attributes))
    check_pairs(devices, made, same)


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("way", WAYS)
def test_narrow_pools_read_any_view(
    way: str, name: str, devices: Devices, random: np.random.Generator
) -> None:
    made = Maker()
    operands = Operands(made, random)
    for average in (False, True):
        for _ in range(12):
            sizes = tuple(int(each) for each in random.integers(4, 30, 2))
            kernel = tuple(int(each) for each in random.integers(1, 5, 2))
            stride = tuple(int(each) for each in random.integers(1, 4, 2))
            x = operands.view(way, name, 2, 3, *sizes)
            attributes = {"kernel": kernel, "stride": stride, "average": average}
            padding = tuple(width // 2 for width in kernel)
            made.output(made.node("pool_2d", x, padding=padding, **attributes))
    devices.check_closely(made)


@pytest.mark.parametrize("kernel,data", KINDS)
def test_large_narrow_convolutions_are_shared_with_what_follows(
    kernel: str, data: str, devices: Devices, random: np.random.Generator
) -> None:
    """More channels than a block has of k, more rows than it has, lines longer than it has
    columns."""
    made = Maker()
    operands = Operands(made, random)
    for channels, size in ((200, 30), (4, 300)):
        weights = operands.leaf(kernel, 210, channels, 3, 3)
        x = operands.leaf(data, 1, channels, size, size)
        y = made.node("conv_2d", weights, x, padding=(1, 1), stride=(2, 1))
        bias = made.input(random.standard_normal((210, 1, 1), np.float32))
        made.output(made.node("relu", made.node("add", y, bias)))
    found = devices.found(made, shared=True)
    plain = run(devices.with_kernels[1], made, fusion=False)
    assert all(map(same_bits, found, plain))
    devices.check_closely(made, shared=True)


def test_narrow_windows_that_need_too_much_scratch_run_on_the_definition(devices: Devices) -> None:
    """Of lines, a worker holds some as float32."""
    made = Maker()
    kernel = made.input(np.zeros((1, 100, 3, 3), np.float16))
    made.output(made.node("conv_2d", kernel, made.input(np.zeros((1, 100, 3, 5000), np.float16))))
    assert op_path(devices.with_kernels[0], made) is OpPath.BLAS


@pytest.mark.parametrize("kind", Windowing)
def test_narrow_windows_touch_no_memory_behind_a_worker_s_own(
    kind: Windowing, random: np.random.Generator
) -> None:
    """Lines behind the last window are staged with those of the other phases, but not converted."""
    for step, spread, taps in ((3, 3, 4), (5, 1, 7), (2, 1, 2), (7, 4, 3), (4, 9, 2)):
        sizes, window = (16 * step + 5, 700), (taps, 1)
        lines = (sizes[0] - (taps - 1) * spread - 1) // step + 1
        image = random.standard_normal((1, 2, *sizes)).astype(np.float16)
        weights, target = np.ones((1, 2, taps), np.float32), np.empty((1, 2, lines, 700), np.float32)
        given = over(1, weights) if kind is Windowing.PRODUCT else None
        geometry = Geometry(sizes, window, (step, 1), (spread, 1), (0, 0), (lines, 700), (HALF, 0))
        builder = ProgramBuilder()
        builder.windows(kind, (1,), 2, geometry, (over(0, image), given, over(2, target)))
        bound = BoundProgram(builder.build(), addresses([image, weights, target]), GuardedScratch.made())
        assert bound.run() is Status.OK
        last = image[:, :, (lines - 1) * step :: spread].astype(np.float32)[:, :, :taps]
        if kind is Windowing.LARGEST:
            assert np.array_equal(target[:, :, -1], last.max(2))
