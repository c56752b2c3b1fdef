"""Elementwise ops between types on the CUDA backend, emulated: every pair of types has the
definition's bits."""

from __future__ import annotations

import cuda_fixtures
import numpy as np
import pytest
from backend_graphs import Loaded, Maker, run
from cuda_emulation import why_not

from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cuda import CudaDevice
from heliograph_backends.cuda.lowering import typed
from heliograph_proto.quantization import blocks
from heliograph_proto.types import DTYPES

if why_not():
    pytest.skip(why_not(), allow_module_level=True)

device = cuda_fixtures.device
definition = cuda_fixtures.definition
rng = cuda_fixtures.rng

INTEGERS = [name for name in typed.NUMBERS if DTYPES[name].kind in ("int", "uint")]


def same_bits(device: CudaDevice, definition: CpuDevice, made: Maker) -> bool:
    found, wanted = run(device, made), run(definition, made)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(found, wanted, strict=True))


def some(made: Maker, rng: np.random.Generator, name: str, *shape: int) -> int:
    """An input of numbers from 0 to 3, which all types have."""
    array = rng.integers(0, 4, shape)
    if name == "bf16":
        return made.input(blocks.to_bits(array.astype(np.float32)), "bf16")
    return made.input(array.astype(DTYPES[name].numpy))


@pytest.mark.parametrize("name", typed.NUMBERS)
def test_every_type_is_converted_to_every_other(
    name: str, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    made = Maker()
    x = made.node("permute", some(made, rng, name, 5, 7, 3), axes=(2, 0, 1))
    for other in typed.NUMBERS:
        made.output(made.node("cast", x, dtype=DTYPES[other]))
    assert same_bits(device, definition, made)


@pytest.mark.parametrize("name", typed.NUMBERS)
def test_operands_of_every_type_are_compared_and_chosen_from(
    name: str, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    made = Maker()
    a, b = some(made, rng, name, 3, 1, 7), some(made, rng, name, 5, 1)
    for op in typed.COMPARISONS[: 2 if name == "bool" else None]:
        made.output(made.node(op, a, b))
    made.output(made.node("where", some(made, rng, "bool", 3, 5, 1), a, b))
    assert same_bits(device, definition, made)
    assert set(device.driver.launched) == {"typed"}


@pytest.mark.parametrize("name", INTEGERS)
def test_whole_numbers_wrap_around_and_keep_their_order(
    name: str, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    """Those of 64 bits without a sign too, half of which would be below 0 with one."""
    made = Maker()
    limits = np.iinfo(DTYPES[name].numpy)
    a, b = (made.input(rng.integers(limits.min, limits.max, (4, 33), limits.dtype)) for _ in range(2))
    for op in typed.WHOLE:
        one = op in ("neg", "abs", "sgn", "sqr", "bitwise_invert")
        made.output(made.node(op, a) if one else made.node(op, a, b))
    for op in ("less", "greater_equal"):
        made.output(made.node(op, a, b))
    assert same_bits(device, definition, made)
    assert set(device.driver.launched) == {"typed"}


def test_questions_about_floats_look_at_their_bits(device: CudaDevice, definition: CpuDevice) -> None:
    """Of the smallest numbers too, which kernels count as 0."""
    made = Maker()
    values = [0.0, -0.0, 1e-45, -1e-45, 1e-39, np.inf, -np.inf, np.nan, -np.nan, 3.4e38, 1.0]
    x = made.input(np.array(values, np.float32))
    for op in typed.QUESTIONS:
        made.output(made.node(op, x))
    made.output(made.node("cast", x, dtype=DTYPES["bool"]))
    assert same_bits(device, definition, made)


def test_a_plan_with_a_mask_is_captured_as_a_whole(device: CudaDevice, rng: np.random.Generator) -> None:
    made = Maker()
    scores = made.input(rng.standard_normal((4, 6, 6), np.float32))
    rows, columns = (
        made.input(np.arange(6, dtype=np.int32)[:, None]),
        made.input(np.arange(6, dtype=np.int32)),
    )
    low = made.input(np.full((), -1e9, np.float32))
    hidden = made.node("where", made.node("less_equal", columns, rows), scores, low)
    made.output(made.node("argmax", made.node("soft_max", hidden)))
    it = Loaded(device, made)
    for _ in range(3):
        (found,) = it.run()
        kept = np.where(np.tri(6, dtype=bool), made.arrays[0], -1e9)
        assert np.array_equal(found, kept.argmax(-1))
    assert "4 of 4 steps replayed as 1 CUDA graph(s)" in it.plan.note
    it.free()


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_rarer_ops_of_floats_are_within_a_rounding_of_the_definition(
    name: str, device: CudaDevice, definition: CpuDevice, rng: np.random.Generator
) -> None:
    made = Maker()
    a, b = some(made, rng, name, 3, 1, 7), some(made, rng, name, 5, 1)
    for op in typed.FLOATING:
        made.output(made.node(op, a, b) if op in ("pow", "atan2", "hypot", "copysign") else made.node(op, a))
    for found, wanted in zip(run(device, made), run(definition, made), strict=True):
        one, other = (widened(np.asarray(values), name) for values in (found, wanted))
        assert np.allclose(one, other, rtol={"f32": 1e-6, "f16": 1e-3, "bf16": 1e-2}[name], equal_nan=True)
    assert set(device.driver.launched) == {"typed"}


def widened(array: np.ndarray, name: str) -> np.ndarray:
    return blocks.from_bits(array) if name == "bf16" else array.astype(np.float32)
