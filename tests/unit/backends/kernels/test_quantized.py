"""Matrix products with weights that are stored as f16, bf16 or blocks: the kernels, and graphs on
the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_graphs import Maker, normalised_error, run
from kernel_runs import Array, multiply, normal, over, same_bits
from kernel_runs import run as run_steps
from stored_weights import KINDS, SCALES, blocks, native_steps, stored, stored_name, times

from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cpu.kernels import ProgramBuilder, Stored, StoredOperand, WorkerPool
from heliograph_proto.quantization import blocks as bfloat16
from heliograph_proto.quantization.blocks import dequantize

#: n, k, m, where k is for blocks of 32: few rows and many, parts of panels, sums of several slices.
SHAPES = [(1, 32, 1), (45, 96, 2), (33, 2080, 3), (70, 1056, 4), (37, 64, 5), (31, 1120, 17), (130, 160, 70)]


def read(kind: Stored, rows: np.ndarray[Any, Any]) -> Array:
    """Return the elements of stored rows."""
    if kind is Stored.BF16:
        return np.asarray(bfloat16.from_bits(rows))
    return (
        rows.astype(np.float32) if kind in (Stored.F32, Stored.F16) else dequantize(rows, kind.name.lower())
    )


def multiply_stored(
    kind: Stored, x: Array, rows: np.ndarray[Any, Any], pool: WorkerPool | None = None
) -> Array:
    """Return x @ rows^T by one step; a product is nothing but what the step writes."""
    product = np.full((len(x), len(rows)), 7, np.float32)
    builder = ProgramBuilder()
    right = StoredOperand(1, 0, rows.strides[:1], kind)
    builder.gemm(*product.shape, x.shape[1], over(0, x), right, over(2, product))
    run_steps(builder, [x, rows, product], pool)
    return product


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_has_the_bits_of_that_with_the_dequantized_weight(
    kind: Stored, shape: tuple[int, int, int], random: np.random.Generator
) -> None:
    n, k, m = shape
    k *= times(kind)
    rows, x = stored(kind, (n, k), random), normal(random, m, k)
    found = multiply_stored(kind, x, rows)
    wide = np.ascontiguousarray(read(kind, rows).T)
    assert same_bits(found, multiply(x, wide, packed=True))
    assert normalised_error(found, x.astype(np.float64) @ wide) < 2e-11


@pytest.mark.parametrize("kind", [Stored.F32, Stored.F16, Stored.BF16])
@pytest.mark.parametrize("depth", [0, 1, 7, 9, 23, 33, 1031])
def test_rows_without_blocks_have_any_length(kind: Stored, depth: int, random: np.random.Generator) -> None:
    rows, x = stored(kind, (35, depth), random), normal(random, 6, depth)
    wide = np.ascontiguousarray(read(kind, rows).T)
    expected = multiply(x, wide, packed=True)
    assert same_bits(multiply_stored(kind, x, rows), expected)
    assert same_bits(multiply_stored(kind, x[:1], rows), expected[:1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_bits_it_has_alone(kind: Stored, random: np.random.Generator) -> None:
    rows, x = stored(kind, (75, 1280), random), normal(random, 70, 1280)
    whole = multiply_stored(kind, x, rows)
    for count in range(1, 71, 3):
        assert same_bits(multiply_stored(kind, x[:count], rows), whole[:count])
    for row in (0, 1, 33, 69):
        assert same_bits(multiply_stored(kind, x[row : row + 1], rows)[0], whole[row])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 3, 64])
def test_threads_change_no_bits(kind: Stored, m: int, random: np.random.Generator) -> None:
    rows, x = stored(kind, (1000, 512), random), normal(random, m, 512)
    expected = multiply_stored(kind, x, rows)
    for threads in (2, 4):
        with WorkerPool(threads) as pool:
            assert same_bits(multiply_stored(kind, x, rows, pool), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_that_a_weight_can_hold_is_read_as_it_is(
    kind: Stored, random: np.random.Generator
) -> None:
    """Single activations of 1 pick the columns of weights made of all bytes, with finite scales."""
    if kind in SCALES:
        rows = blocks(kind, (64, 512), random)
    else:
        rows = np.arange(2**16, dtype=np.uint16).reshape(64, -1)
        rows = {Stored.F32: rows.view(np.float32), Stored.F16: rows.view(np.float16)}.get(kind, rows)
    wide = read(kind, rows)
    for some in (3, 8):
        x = np.zeros((some, wide.shape[1]), np.float32)
        places = random.integers(0, wide.shape[1], some)
        x[np.arange(some), places] = 1
        finite = np.isfinite(wide).all(1)
        found = multiply_stored(kind, x, rows)
        np.testing.assert_array_equal(found[:, finite], wide[finite][:, places].T)
        expected = multiply(x, np.ascontiguousarray(wide.T), packed=True)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))


def test_halves_are_read_without_an_instruction_for_it_too() -> None:
    """Some machines have none; all f16 but the payloads of NaN."""
    from numba import types

    from heliograph_backends.cpu.kernels.matmul.stored_lanes import SHORTS, half_by_hand
    from heliograph_backends.cpu.kernels.vector.lanes import LANES, emitted, jit, pointer

    @emitted(types.void, types.int64, types.int64)
    def widen(builder: Any, target: Any, source: Any) -> None:
        half_by_hand(builder, builder.load(pointer(builder, source, SHORTS), align=2)).store(target)

    @jit
    def widen_all(target: int, source: int, count: int) -> None:
        for start in range(0, count, LANES):
            widen(target + 4 * start, source + 2 * start)

    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    found = np.empty(len(halves), np.float32)
    widen_all(found.ctypes.data, halves.ctypes.data, len(halves))
    np.testing.assert_array_equal(found, halves.astype(np.float32))
    number = ~np.isnan(halves)
    np.testing.assert_array_equal(np.signbit(found[number]), np.signbit(halves[number]))


# Graphs


def product(kind: Stored, w: tuple[int, ...], x: tuple[int, ...], random: np.random.Generator) -> Maker:
    """mul_mat of weights and activations of these shapes."""
    made = Maker()
    w, x = ((*shape[:-1], shape[-1] * times(kind)) for shape in (w, x))
    rows = stored(kind, w, random)
    of_blocks = stored_name(kind)
    made.output(made.node("mul_mat", made.weight(rows, of_blocks), made.input(normal(random, *x))))
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("w", "x"),
    [
        ((40, 64), (5, 64)),
        ((40, 64), (3, 2, 64)),
        ((1, 40, 64), (6, 5, 64)),
        ((3, 40, 64), (3, 5, 64)),
        ((2, 40, 64), (8, 1, 64)),
        ((2, 40, 64), (8, 7, 64)),
        ((2, 1, 9, 32), (4, 3, 6, 32)),
        ((2, 3, 9, 32), (4, 6, 2, 32)),
        ((5, 32), (0, 32)),
        ((0, 32), (2, 32)),
    ],
)
def test_matrices_of_weights_serve_as_many_matrices_as_they_must(
    kind: Stored,
    w: tuple[int, ...],
    x: tuple[int, ...],
    device: CpuDevice,
    definition: CpuDevice,
    random: np.random.Generator,
) -> None:
    made = product(kind, w, x, random)
    (found,), (expected,) = run(device, made), run(definition, made)
    assert found.shape == expected.shape and normalised_error(found, expected) < 1e-11
    assert 0 in found.shape or native_steps(device, made) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_weights_may_be_inputs_and_both_sides_views(
    kind: Stored, device: CpuDevice, definition: CpuDevice, random: np.random.Generator
) -> None:
    """Rows of every other weight from a block on, and activations whose rows lie apart or run
    across."""
    made = Maker()
    of_blocks = stored_name(kind)
    block = 32 * times(kind)
    w = made.input(stored(kind, (50, 4 * block), random), of_blocks)
    part = made.node("slice", w, start=(3, block), stop=(50, 4 * block), step=(2, 1))
    x = made.input(normal(random, 3 * block, 11))
    across = made.node("permute", x, axes=(1, 0))
    wide = made.input(normal(random, 9, 5 * block))
    apart = made.node("slice", wide, start=(1, 5), stop=(9, 5 + 3 * block), step=(3, 1))
    made.output(made.node("mul_mat", part, across), made.node("mul_mat", part, apart))
    for found, expected in zip(run(device, made), run(definition, made), strict=True):
        assert normalised_error(found, expected) < 1e-11
    assert native_steps(device, made) == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 30])
def test_what_follows_a_product_shares_its_step(
    kind: Stored, m: int, device: CpuDevice, definition: CpuDevice, random: np.random.Generator
) -> None:
    """A bias, an activation and a residual, where one matrix serves two."""
    made = Maker()
    of_blocks = stored_name(kind)
    k = 64 * times(kind)
    w = made.weight(stored(kind, (2, 40, k), random), of_blocks)
    y = made.node("mul_mat", w, made.input(normal(random, 4, m, k)))
    y = made.node("silu", made.node("add", y, made.weight(normal(random, 40))))
    made.output(made.node("add", y, made.input(normal(random, 4, m, 40))))
    (found,) = run(device, made)
    assert normalised_error(found, run(definition, made)[0]) < 1e-11
    assert np.array_equal(found, run(device, made, fusion=False)[0])
    assert native_steps(device, made) == 1


@pytest.mark.parametrize(("w", "x"), [((2, 40, 64), (8, 1, 64)), ((2, 1, 9, 32), (4, 3, 6, 32))])
def test_f32_matrices_serve_several_too(
    w: tuple[int, ...],
    x: tuple[int, ...],
    device: CpuDevice,
    definition: CpuDevice,
    random: np.random.Generator,
) -> None:
    made = Maker()
    made.output(made.node("mul_mat", made.input(normal(random, *w)), made.input(normal(random, *x))))
    assert native_steps(device, made) == 1
    assert normalised_error(run(device, made)[0], run(definition, made)[0]) < 1e-12


def test_weights_that_run_across_stay_with_the_definition(
    device: CpuDevice, definition: CpuDevice, random: np.random.Generator
) -> None:
    made = Maker()
    w = made.node("permute", made.input(normal(random, 32, 10).astype(np.float16)), axes=(1, 0))
    made.output(made.node("mul_mat", w, made.input(normal(random, 4, 32))))
    assert native_steps(device, made) == 0
    assert normalised_error(run(device, made)[0], run(definition, made)[0]) < 1e-12
