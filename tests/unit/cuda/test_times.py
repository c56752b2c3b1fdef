"""The times of steps on the CUDA backend, whose kernels this host runs."""

from __future__ import annotations

import cuda_fixtures
import numpy as np
import pytest
from backend_graphs import Maker, loaded, run
from cuda_emulation import why_not

from heliograph_backends.cuda import CudaDevice

if why_not():
    pytest.skip(why_not(), allow_module_level=True)

device = cuda_fixtures.device


def layers() -> Maker:
    """A product, a chain after it, and an op without a kernel."""
    made = Maker()
    x = made.input(np.ones((8, 32), np.float32))
    product = made.node("matmul", x, made.input(np.ones((32, 16), np.float32)))
    chain = made.node("silu", made.node("neg", product))
    made.output(made.node("soft_max", made.node("asinh", chain)))
    return made


def test_each_step_has_its_time_and_later_runs_are_replayed_again(device: CudaDevice) -> None:
    made = layers()
    with loaded(device, made) as it:
        it.run()
        assert not any(it.plan.times_of_nodes())
        it.plan.measure(on=True)
        for _ in range(3):
            it.run()
        it.plan.measure(on=False)
        times, steps = it.plan.times_of_nodes(), it.plan.steps_of_nodes()
        assert all(took_us > 0 for took_us in times)
        assert len(set(times)) == len(set(steps)) == it.plan.steps > 1
        it.run()
        assert it.plan.times_of_nodes() == times
        it.plan.measure(on=True)
        assert not any(it.plan.times_of_nodes())


def test_measured_runs_have_the_bits_of_others(device: CudaDevice) -> None:
    made = layers()
    (expected,) = run(device, made)
    with loaded(device, made) as it:
        it.plan.measure(on=True)
        it.run()
        (found,) = it.run()
        assert found is not None and found.tobytes() == expected.tobytes()
