"""Matrix products of rows of q8_0 with weights of blocks, in integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_graphs import Maker, normalised_error, nothing_left, op_path, run, same_bits
from kernel_runs import normal
from stored_weights import KINDS, blocks, stored, stored_name

from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cpu.kernels import Stored
from heliograph_backends.cpu.kernels.program.stored_types import INTEGER_KINDS
from heliograph_proto.devices import OpPath
from heliograph_proto.quantization.blocks import dequantize, quantize

Array = np.ndarray[Any, Any]
#: Blocks of small whole numbers.
BLOCKS = tuple(kind for kind in KINDS if kind in INTEGER_KINDS)
DEPTH = 512


def product(device: CpuDevice, kind: Stored, rows: Array, x: Array) -> Array:
    """Return the product of a weight's rows with rows of q8_0."""
    made = Maker()
    weight, left = made.weight(rows, stored_name(kind)), made.input(x, "q8_0")
    made.output(made.node("mul_mat", weight, left))
    assert op_path(device, made) is OpPath.KERNEL
    (found,) = run(device, made)
    return np.asarray(found)


# The definition of the bits


def fma(a: Array, b: Array, c: Array) -> Array:
    """A product of two f32 is exact in f64."""
    return (a.astype(np.float64) * b.astype(np.float64) + c).astype(np.float32)


def halves(field: Array) -> Array:
    return np.ascontiguousarray(field).view(np.float16).astype(np.float32)


def q8_0_parts(rows: Array) -> tuple[Array, Array, Array | None]:
    found = rows.reshape(len(rows), -1, 34)
    return found[..., 2:].view(np.int8).astype(np.int64), halves(found[..., :2]), None


def q4_0_parts(rows: Array) -> tuple[Array, Array, Array | None]:
    found = rows.reshape(len(rows), -1, 18)
    quanta = np.concatenate([found[..., 2:] & 15, found[..., 2:] >> 4], -1).astype(np.int64) - 8
    return quanta, halves(found[..., :2]), None


def q4_k_parts(rows: Array) -> tuple[Array, Array, Array | None]:
    """Scales and least values of eight parts have six bits each, those of the last four in two
    pieces."""
    found = rows.reshape(len(rows), -1, 144)
    first, second, third = (found[..., begin : begin + 4] for begin in (4, 8, 12))
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], -1).astype(np.float32)
    least = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], -1).astype(np.float32)
    both = found[..., 16:].reshape(*found.shape[:-1], 4, 1, 32)
    quanta = np.concatenate([both & 15, both >> 4], -2).astype(np.int64)
    factors, offsets = scales * halves(found[..., :2]), -(least * halves(found[..., 2:4]))
    return (
        quanta.reshape(len(rows), -1, 32),
        factors.reshape(len(rows), -1, 1),
        offsets.reshape(len(rows), -1, 1),
    )


def q6_k_parts(rows: Array) -> tuple[Array, Array, Array | None]:
    """Sixteen parts; in each half of a block nibbles of 64 bytes, and two more bits of 32 bytes."""
    found = rows.reshape(len(rows), -1, 210)
    low = found[..., :128].reshape(*found.shape[:-1], 2, 1, 64)
    high = found[..., 128:192].reshape(*found.shape[:-1], 2, 1, 32)
    nibbles = np.concatenate([low & 15, low >> 4], -2).reshape(*found.shape[:-1], 2, 4, 32)
    pairs = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], -2)
    quanta = (nibbles | pairs << 4).astype(np.int64) - 32
    factors = found[..., 192:208].view(np.int8).astype(np.float32) * halves(found[..., 208:])
    return quanta.reshape(len(rows), -1, 16), factors.reshape(len(rows), -1, 1), None


PARTS = {
    Stored.Q8_0: q8_0_parts,
    Stored.Q4_0: q4_0_parts,
    Stored.Q4_K: q4_k_parts,
    Stored.Q6_K: q6_k_parts,
}


def defined(kind: Stored, rows: Array, x: Array) -> Array:
    """The sums in the order in which the documentation has them."""
    quanta, factors, offsets = PARTS[kind](rows)
    numbers, scales, _ = q8_0_parts(x)
    size = quanta.shape[-1]
    numbers = numbers.reshape(len(x), -1, size)
    total = np.zeros((len(x), len(rows)), np.float32)
    for part in range(quanta.shape[1]):
        scale = scales[:, part * size // 32]
        sums = (numbers[:, None, part] * quanta[None, :, part]).sum(-1).astype(np.float32)
        total = fma(factors[None, :, part, 0] * scale, sums, total)
        if offsets is not None:
            whole = numbers[:, part].sum(-1, keepdims=True).astype(np.float32)
            total = fma(offsets[None, :, part, 0] * scale, whole, total)
    return total


@pytest.mark.parametrize("kind", PARTS)
def test_a_product_has_the_bits_that_the_documentation_says(
    kind: Stored, device: CpuDevice, random: np.random.Generator
) -> None:
    rows, x = blocks(kind, (48, DEPTH), random), quantize(normal(random, 9, DEPTH), "q8_0")
    assert same_bits(product(device, kind, rows, x), defined(kind, rows, x))


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_product_is_that_of_the_numbers_that_both_sides_stand_for(
    kind: Stored, device: CpuDevice, random: np.random.Generator
) -> None:
    rows, x = stored(kind, (53, DEPTH), random), quantize(normal(random, 7, DEPTH), "q8_0")
    expected = dequantize(x, "q8_0").astype(np.float64) @ dequantize(rows, stored_name(kind)).T
    assert normalised_error(product(device, kind, rows, x), expected) < 1e-11


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_row_has_the_bits_it_has_alone_in_either_order_of_the_weight(
    kind: Stored, device: CpuDevice, random: np.random.Generator
) -> None:
    rows, x = stored(kind, (64, DEPTH), random), quantize(normal(random, 33, DEPTH), "q8_0")
    whole = product(device, kind, rows, x)
    for count in (1, 2, 3, 5, 8, 13, 32):
        assert same_bits(product(device, kind, rows, x[:count]), whole[:count])
    # 53 rows are no groups of sixteen.
    assert same_bits(product(device, kind, rows[:53], x), np.ascontiguousarray(whole[:, :53]))


@pytest.mark.parametrize("kind", [Stored.Q4_0, Stored.Q6_K])
def test_threads_change_no_bits(kind: Stored, random: np.random.Generator) -> None:
    rows, x = stored(kind, (1024, DEPTH), random), quantize(normal(random, 40, DEPTH), "q8_0")
    found = []
    for threads in (1, 2, 4):
        with nothing_left(CpuDevice(threads=threads, memory_bytes=2**28)) as device:
            found.append(product(device, kind, rows, x))
    assert same_bits(found[0], found[1]) and same_bits(found[0], found[2])


@pytest.mark.parametrize("kind", [Stored.Q4_0, Stored.Q4_K, Stored.MXFP4])
@pytest.mark.parametrize("columns", [32, 37])
def test_experts_have_the_bits_of_their_matrices(
    kind: Stored, columns: int, device: CpuDevice, random: np.random.Generator
) -> None:
    rows = stored(kind, (5, columns, DEPTH), random)
    x = quantize(normal(random, 40, 1, DEPTH), "q8_0")
    chosen = np.array([random.permutation(5)[:2] for _ in range(len(x))], np.int32)
    made = Maker()
    weight, left = made.weight(rows, stored_name(kind)), made.input(x, "q8_0")
    made.output(made.node("mul_mat_id", weight, left, made.input(chosen)))
    assert op_path(device, made) is OpPath.KERNEL
    (found,) = run(device, made)
    for expert in range(5):
        alone = product(device, kind, np.ascontiguousarray(rows[expert]), x[:, 0])
        tokens, places = np.nonzero(chosen == expert)
        assert same_bits(found[tokens, places], alone[tokens])


def test_what_follows_a_product_shares_its_step(device: CpuDevice, random: np.random.Generator) -> None:
    rows, x = blocks(Stored.Q4_0, (32, DEPTH), random), quantize(normal(random, 3, DEPTH), "q8_0")
    bias, made = normal(random, 32), Maker()
    y = made.node("mul_mat", made.weight(rows, "q4_0"), made.input(x, "q8_0"))
    made.output(made.node("add", y, made.input(bias)))
    (found,) = run(device, made)
    assert same_bits(found, product(device, Stored.Q4_0, rows, x) + bias)
