"""Layers of one form are lowered once, and each still computes with its own values."""

from __future__ import annotations

import numpy as np
import pytest
from backend_graphs import Maker, run, same_bits

from heliograph_backends.cpu import CpuDevice
from heliograph_proto.types import F32

RNG = np.random.default_rng(7)
X = RNG.normal(size=(6, 32)).astype(np.float32)


@pytest.fixture(scope="module", params=[1, 2], ids=["one thread", "two threads"])
def device(request: pytest.FixtureRequest) -> CpuDevice:
    made = CpuDevice("cpu", threads=request.param)
    request.addfinalizer(made.close)
    return made


def layers(made: Maker, chosen: range, x: int) -> int:
    """Append layers that differ in form or in the places of their values, and return the result."""
    for number in chosen:
        weights = np.random.default_rng(number)
        row, matrix = (weights.normal(size=size).astype(np.float32) for size in ((32,), (32, 32)))
        normal = made.node("rms_norm", x, eps=[1e-5, 1e-5, 1e-2][number % 3])
        normal = made.node("mul", normal, made.weight(row))
        # A weight that products alone read is packed, another one is not.
        weight = made.weight(matrix)
        product = made.node("mul_mat", weight, normal)
        if number % 4 == 3:
            product = made.node("add", product, made.node("reduce_sum", weight, axes=(0,), keepdims=False))
        half = made.node("fill", shape=(), value=[0.5, -0.5][number % 2], dtype=F32)
        gate = made.node("mul", product, [half, product][number % 5 == 4])
        turned = made.node("permute", gate, axes=(1, 0))
        gate = made.node("permute", made.node("cont", turned), axes=(1, 0)) if number % 2 else gate
        x = made.node("add", made.node("soft_max", gate, scale=[1.0, 0.25][number % 2]), x)
    return x


@pytest.mark.parametrize("fusion", [True, False])
def test_many_layers_have_the_bits_of_the_layers_one_by_one(device: CpuDevice, fusion: bool) -> None:
    whole, alone = Maker(), X
    whole.output(layers(whole, range(12), whole.input(X)))
    for number in range(12):
        one = Maker()
        one.output(layers(one, range(number, number + 1), one.input(alone)))
        (alone,) = run(device, one, fusion=fusion)
    (together,) = run(device, whole, fusion=fusion)
    assert same_bits(together, alone)
