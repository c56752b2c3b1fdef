"""What plans on the CPU take of their device, and give back: arenas, constants, packed weights."""

from __future__ import annotations

import numpy as np
import plan_fixtures
import pytest
from backend_graphs import (
    Loaded,
    Maker,
    nothing_left,
    place,
    used_bytes,
)
from random_graphs import (
    RandomGraph,
    floats,
    interpret,
    long_graph,
    product_with,
)

from heliograph_backends.contract import DeviceCompileOptions, LeafBindings
from heliograph_backends.cpu import CpuDevice
from heliograph_proto.errors import OutOfMemoryError

device = plan_fixtures.device
fake = plan_fixtures.fake
needs_native = plan_fixtures.needs_native


def test_a_plan_gives_back_all_that_it_took(device: CpuDevice) -> None:
    made = RandomGraph(3)
    before = used_bytes(device)
    it = Loaded(device, made)
    it.run(wanted=[False] * len(made.outputs))
    it.run()
    it.free()
    assert used_bytes(device) == before


def test_compute_bytes_are_what_the_plan_takes(device: CpuDevice) -> None:
    made = long_graph(np.float64, nodes=5, size=1000)
    it = Loaded(device, made)
    leaves = sum(tensor.buffer.size_bytes for tensor in it.tensors)
    assert it.plan.compute_bytes == used_bytes(device) - leaves
    assert 8000 <= it.plan.compute_bytes <= 3 * 8064
    it.free()


def test_a_plan_that_does_not_fit_is_refused_before_memory_is_taken() -> None:
    made = Maker()
    x = made.input(np.zeros((1, 8), np.float32))
    huge = made.node("broadcast_to", x, shape=(2**40, 8))
    made.output(made.node("reduce_sum", made.node("exp", huge)))
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**20)) as small:
        with pytest.raises(OutOfMemoryError, match="bytes free"):
            small.compile(made.graph(), LeafBindings({}, {}), DeviceCompileOptions())
        assert used_bytes(small) == 0


def test_a_constant_that_does_not_fit_is_refused_before_memory_is_taken() -> None:
    made = Maker()
    made.output(made.node("arange", start=0, stop=2**50, step=1))
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**20)) as small:
        with pytest.raises(OutOfMemoryError):
            small.compile(made.graph(), LeafBindings({}, {}), DeviceCompileOptions())
        assert used_bytes(small) == 0


@needs_native
def test_a_packed_weight_is_counted_with_its_padding_and_freed_with_the_weight() -> None:
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**26)) as device:
        it = Loaded(device, product_with(floats(1000, 1)))
        others = it.plan.compute_bytes + sum(tensor.buffer.size_bytes for tensor in it.tensors)
        assert used_bytes(device) - others >= 1000 * 32 * 4
        it.free()
        assert used_bytes(device) == 0


@needs_native
def test_plans_share_a_packed_weight() -> None:
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**26)) as device:
        made = product_with(floats(64, 64))
        it = Loaded(device, made)
        one = used_bytes(device)
        bindings = LeafBindings({1: it.tensors[1]}, {})
        second = device.compile(it.graph, bindings, DeviceCompileOptions())
        assert used_bytes(device) == one + second.compute_bytes
        second.free()
        it.free()


@needs_native
def test_a_packed_weight_that_does_not_fit_is_refused_and_nothing_stays() -> None:
    weight = floats(512, 512)
    with nothing_left(CpuDevice(threads=1, memory_bytes=weight.nbytes + 200_000)) as device:
        tensor = place(device, weight)
        before = used_bytes(device)
        with pytest.raises(OutOfMemoryError):
            device.compile(
                product_with(weight).graph(), LeafBindings({1: tensor}, {}), DeviceCompileOptions()
            )
        assert used_bytes(device) == before
        tensor.buffer.free()


@needs_native
def test_a_weight_that_is_written_is_packed_again_for_the_next_plan() -> None:
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**26)) as device:
        made = product_with(floats(64, 64))
        it = Loaded(device, made)
        it.plan.free()
        other = floats(64, 64, seed=9)
        it.tensors[1].buffer.set(it.tensors[1].offset_bytes, memoryview(other.tobytes()))
        it.plan = device.compile(it.graph, LeafBindings({1: it.tensors[1]}, {}), DeviceCompileOptions())
        (found,) = it.run()
        it.free()
        made.arrays[1] = other
        np.testing.assert_allclose(found, interpret(made)[0][0], rtol=1e-3, atol=1e-4)
