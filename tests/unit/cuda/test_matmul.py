"""Products of floats on the CUDA backend, as calls of cuBLAS: the emulated one, beside the definition."""

from __future__ import annotations

import cuda_fixtures
import numpy as np
import pytest
from backend_graphs import Array, Loaded, Maker, normalised_error, run
from cuda_emulation import EmulatedDriver, why_not

from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cuda import CudaDevice
from heliograph_backends.cuda.lowering.products import MOST_CALLS

if why_not():
    pytest.skip(why_not(), allow_module_level=True)

device = cuda_fixtures.device
definition = cuda_fixtures.definition
rng = cuda_fixtures.rng


def batches(device: CudaDevice) -> list[int]:
    """Of each call so far."""
    assert isinstance(device.driver, EmulatedDriver)
    return [gemm.batch for gemm in device.driver.multiplied]


def agrees(device: CudaDevice, definition: CpuDevice, made: Maker) -> bool:
    """Whether both find the same."""
    (found,), (wanted,) = run(device, made), run(definition, made)
    return bool(normalised_error(np.asarray(found), np.asarray(wanted)) < 1e-12)


def values(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, np.float32)


@pytest.mark.parametrize(("batch", "heads", "calls"), [(100, 3, [100] * 3), (3, 100, [100] * 3)])
def test_the_longest_dimension_of_a_batch_is_that_of_each_call(
    batch: int, heads: int, calls: list[int], device: CudaDevice, definition: CpuDevice,
    rng: np.random.Generator,
) -> None:  # fmt: skip
    """Of heads that lie within rows, so that batch and heads are no one dimension."""
    made = Maker()
    left, right = made.input(values(rng, batch, 4, heads, 5)), made.input(values(rng, batch, 5, heads, 6))
    turned = [made.node("permute", one, axes=(0, 2, 1, 3)) for one in (left, right)]
    made.output(made.node("matmul", *turned))
    assert agrees(device, definition, made)
    assert batches(device) == calls


@pytest.mark.parametrize(
    ("left", "right", "calls"),
    [((80, 1), (1, 70), [80] * 70), ((80, 70), (1, 70), [80] * 70), ((1, 70), (80, 1), [80])],
    ids=["either in one dimension", "the right in one", "rows that all meet the same matrix"],
)
def test_what_repeats_over_some_of_a_batch_is_read_where_it_lies(
    left: tuple[int, int], right: tuple[int, int], calls: list[int], device: CudaDevice,
    definition: CpuDevice, rng: np.random.Generator,
) -> None:  # fmt: skip
    made = Maker()
    operands = [values(rng, *left, 3, 2), values(rng, *right, 2, 4)]
    made.output(made.node("matmul", *map(made.input, operands)))
    assert agrees(device, definition, made)
    assert batches(device) == calls


def test_three_dimensions_that_are_no_one_are_a_call_for_each_index_of_two(
    device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    made = Maker()
    left, right = made.input(values(rng, 2, 4, 9, 3, 5)), made.input(values(rng, 9, 5, 2, 3, 6))
    left = made.node("permute", left, axes=(0, 2, 3, 1, 4))
    made.output(made.node("matmul", left, made.node("permute", right, axes=(2, 0, 3, 1, 4))))
    assert agrees(device, definition, made)
    assert batches(device) == [9] * 6


def test_the_calls_of_one_product_are_captured_as_one_graph(
    device: CudaDevice, rng: np.random.Generator
) -> None:
    made = Maker()
    left, right = made.input(values(rng, 5, 1, 2, 2)), made.input(values(rng, 1, 3, 2, 2))
    made.output(made.node("matmul", left, right))
    it = Loaded(device, made)
    assert it.plan.note == "1 of 1 steps replayed as 1 CUDA graph(s), captured with the second run"
    first, second, third = (it.run()[0] for _ in range(3))
    assert batches(device) == [5] * 3 * 2, "of the first run, and of the capture"
    assert np.array_equal(first, second) and np.array_equal(first, third)
    it.free()


def test_more_calls_than_a_graph_is_good_for_are_the_definitions(
    device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    size = MOST_CALLS + 1
    made = Maker()
    left, right = made.input(values(rng, size, 1, 1, 1)), made.input(values(rng, 1, size, 1, 1))
    made.output(made.node("matmul", left, right))
    assert agrees(device, definition, made)
    assert batches(device) == []
