"""What plans on the CPU take of their device, and give back: arenas, constants, packed weights."""

from __future__ import annotations

import numpy as np
import plan_fixtures
import pytest
from backend_graphs import (
    Loaded,
    Maker,
    nothing_left,
    used_bytes,
)
from random_graphs import (
    RandomGraph,
    long_graph,
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
