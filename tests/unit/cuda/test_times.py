"""The times of steps and the memory of results on the CUDA backend, whose kernels this host runs."""

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
        assert not any(it.plan.steps_and_times()[1])
        it.plan.measure(on=True)
        for _ in range(3):
            it.run()
        it.plan.measure(on=False)
        steps, times = it.plan.steps_and_times()
        assert all(took_us > 0 for took_us in times)
        assert len(set(times)) == len(set(steps)) == it.plan.steps > 1
        it.run()
        assert it.plan.steps_and_times() == (steps, times)
        it.plan.measure(on=True)
        assert not any(it.plan.steps_and_times()[1])


def test_measured_runs_have_the_bits_of_others(device: CudaDevice) -> None:
    made = layers()
    (expected,) = run(device, made)
    with loaded(device, made) as it:
        it.plan.measure(on=True)
        it.run()
        (found,) = it.run()
        assert found is not None and found.tobytes() == expected.tobytes()


def test_a_plan_tells_where_its_results_lie(device: CudaDevice) -> None:
    with loaded(device, layers()) as it:
        found = it.plan.memory_map()
        assert found.steps == it.plan.steps and 0 < sum(found.block_bytes) <= it.plan.compute_bytes
        kept = {it.graph.nodes[one.node].op for one in found.results}
        assert kept and "soft_max" not in kept
        for one in found.results:
            assert one.offset_bytes + one.size_bytes <= found.block_bytes[one.block]
            assert 0 <= one.first_step <= one.last_step < found.steps
