"""Copies on the CUDA backend, emulated: items as wide as they can be, and tiles where dimensions change
places."""

from __future__ import annotations

from collections.abc import Sequence

import cuda_fixtures
import numpy as np
import pytest
from backend_graphs import Maker, run
from cuda_emulation import why_not

from heliograph_backends.contract import Abort, DeviceCompileOptions, LeafBindings, Tensor, access, host_bytes
from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cuda import CudaDevice
from heliograph_backends.cuda.lowering.launch import Located
from heliograph_backends.cuda.lowering.moves import MOST_SCATTERED, copy
from heliograph_proto.types import DTYPES, TensorType

if why_not():
    pytest.skip(why_not(), allow_module_level=True)

ELEMENTS, TRANSPOSED = "copy_elements", "copy_transposed"


rng = cuda_fixtures.rng
device = cuda_fixtures.device


def some(rng: np.random.Generator, dtype: str, shape: Sequence[int]) -> np.ndarray:
    return rng.integers(-100, 100, tuple(shape)).astype(dtype)


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "int64"])
@pytest.mark.parametrize(
    ("shape", "axes", "kernel"),
    [
        ((130, 70), (1, 0), TRANSPOSED),
        ((64, 128), (1, 0), TRANSPOSED),
        ((3, 33, 65), (0, 2, 1), TRANSPOSED),
        ((2, 5, 33, 24), (0, 2, 3, 1), ELEMENTS),
        ((2, 16, 33, 24), (2, 0, 3, 1), TRANSPOSED),
        ((3, 20, 4, 32), (0, 2, 1, 3), ELEMENTS),
        ((3, 5, 4, 7), (0, 2, 1, 3), ELEMENTS),
        ((40, 3), (1, 0), ELEMENTS),
    ],
)
def test_dimensions_change_places(
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    kernel: str,
    dtype: str,
    device: CudaDevice,
    rng: np.random.Generator,
) -> None:
    made = Maker()
    x = some(rng, dtype, shape)
    made.output(made.node("cont", made.node("permute", made.input(x), axes=axes)))
    (found,) = run(device, made)
    assert np.array_equal(found, x.transpose(axes))
    assert device.driver.launched == [kernel]


def test_small_items_side_by_side_are_rows_of_wide_ones_that_change_places(
    device: CudaDevice, rng: np.random.Generator
) -> None:
    """Pairs of f32 are moved as 8 bytes."""
    made = Maker()
    x = some(rng, "float32", (70, 66, 2))
    made.output(made.node("cont", made.node("permute", made.input(x), axes=(1, 0, 2))))
    (found,) = run(device, made)
    assert np.array_equal(found, x.transpose(1, 0, 2))
    assert device.driver.launched == [TRANSPOSED]


@pytest.mark.parametrize("columns", [(8, 4), (7, 4), (3, 1)])
def test_what_is_joined_lies_beside_each_other(
    columns: tuple[int, int], device: CudaDevice, rng: np.random.Generator
) -> None:
    made = Maker()
    parts = [some(rng, "float16", (5, count)) for count in columns]
    made.output(made.node("concat", *map(made.input, parts), axis=1))
    (found,) = run(device, made)
    assert np.array_equal(found, np.concatenate(parts, 1))


def widths(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> list[int]:
    """Of the items that a copy of f16 moves, and of those it moves where memory is not aligned."""
    type = TensorType(DTYPES["f16"], shape)
    (launch,) = copy(Located(type, 0, offset, strides), Located(type, 1, 0, type.strides))
    found = []
    while launch is not None:
        found.append(int(launch.parameters["item_bytes"][0]))
        launch = launch.instead
    return found


def test_items_are_as_wide_as_rows_strides_and_places_allow() -> None:
    assert widths((4, 24), (48, 2)) == [16, 2]
    assert widths((4, 24), (56, 2)) == [8, 2]
    assert widths((4, 24), (48, 2), offset=4) == [4, 2]
    assert widths((4, 23), (46, 2)) == [8, 2]  # one row of 92 elements
    assert widths((4, 23), (48, 2)) == [2]


def test_memory_that_is_not_aligned_is_copied_item_by_item(
    device: CudaDevice, rng: np.random.Generator
) -> None:
    made = Maker()
    x = some(rng, "float32", (8, 16))
    made.output(made.node("cont", made.weight(x)))
    graph, type = made.graph(), TensorType(DTYPES["f32"], x.shape)
    buffers = [device.buffer_type.allocate(4 + type.nbytes) for _ in range(2)]
    for offset in (4, 0):
        weight, output = Tensor(type, buffers[0], offset), Tensor(type, buffers[1])
        access.write(weight, 0, host_bytes(x))
        plan = device.compile(graph, LeafBindings({0: weight}, {}), DeviceCompileOptions())
        plan.compute([], [output], Abort())
        assert np.array_equal(output.array.get(), x)
        plan.free()
    for one in buffers:
        one.free()


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int32"])
@pytest.mark.parametrize("op", ["add_rows", "mul_rows", "max_rows", "min_rows"])
def test_rows_are_combined_in_the_order_of_their_indices(
    op: str, dtype: str, device: CudaDevice, rng: np.random.Generator
) -> None:
    """By the kernel, and by CuPy for data types without one: the bits are the definition's."""
    target, rows = (rng.uniform(0.5, 1.5, (2, count, 5)).astype(dtype) for count in (4, 60))
    made = Maker()
    indices = rng.integers(0, 4, (2, 60)).astype(np.int32)
    made.output(made.node(op, made.input(target), made.input(rows), made.input(indices)))
    (found,) = run(device, made)
    definition = CpuDevice(threads=1, memory_bytes=2**26, native=False)
    try:
        (wanted,) = run(definition, made)
    finally:
        definition.close()
    assert np.array_equal(np.asarray(found), wanted)


@pytest.mark.parametrize("op", ["set_rows", "add_rows"])
def test_more_rows_than_may_look_for_each_other_are_sorted(
    op: str, device: CudaDevice, rng: np.random.Generator
) -> None:
    count = MOST_SCATTERED + 3
    rows, indices = some(rng, "float32", (count, 1)), rng.integers(0, 7000, count)
    expected = np.zeros((7000, 1), np.float32)
    for index, row in zip(indices, rows, strict=True):
        expected[index] = row if op == "set_rows" else expected[index] + row
    made = Maker()
    made.output(made.node(op, made.input(np.zeros_like(expected)), made.input(rows), made.input(indices)))
    (found,) = run(device, made)
    assert np.array_equal(np.asarray(found), expected)
