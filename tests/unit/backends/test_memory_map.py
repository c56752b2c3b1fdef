"""Where plans tell that their results lie: never two at one place and time, in all of their memory."""

from __future__ import annotations

import plan_fixtures
import pytest
from backend_graphs import Loaded, Maker
from random_graphs import RandomGraph, floats

from heliograph_backends.contract import MemoryMap, StoredResult
from heliograph_backends.cpu import CpuDevice
from heliograph_proto.types import F32

device = plan_fixtures.device


def share(one: StoredResult, other: StoredResult) -> bool:
    """True if two results lie on common bytes in a common step."""
    return (
        one.block == other.block
        and one.offset_bytes < other.offset_bytes + other.size_bytes
        and other.offset_bytes < one.offset_bytes + one.size_bytes
        and one.first_step <= other.last_step
        and other.first_step <= one.last_step
    )


@pytest.mark.parametrize("fusion", [True, False], ids=["fused", "single"])
@pytest.mark.parametrize("seed", range(12))
def test_results_never_share_bytes_and_steps(device: CpuDevice, seed: int, fusion: bool) -> None:
    loaded = Loaded(device, RandomGraph(seed, 60), fusion=fusion)
    found = loaded.plan.memory_map()
    assert sum(found.block_bytes) == loaded.plan.compute_bytes
    for place, one in enumerate(found.results):
        assert 0 <= one.first_step <= one.last_step < found.steps
        assert one.offset_bytes + one.size_bytes <= found.block_bytes[one.block]
        assert not any(
            share(one, other) for other in found.results[:place] if other.size_bytes and one.size_bytes
        )
    assert len({one.node for one in found.results}) == len(found.results)
    loaded.free()


def test_a_result_lives_until_its_last_reader(device: CpuDevice) -> None:
    made = Maker()
    x = made.input(floats(8, 8))
    first = made.node("sin", x)
    turned = made.node("permute", first, axes=(1, 0))
    second = made.node("soft_max", x)
    made.output(made.node("matmul", made.node("matmul", second, second), turned))
    loaded = Loaded(device, made, fusion=False)
    found = {loaded.graph.nodes[one.node].op: one for one in loaded.plan.memory_map().results}
    # The view keeps what it views until the last step; the last result is an output.
    last = loaded.plan.memory_map().steps - 1
    assert found["sin"].last_step == last and found["soft_max"].last_step < last
    assert set(found) == {"sin", "soft_max", "matmul"}
    loaded.free()


def test_what_is_computed_in_place_ends_where_its_result_begins(device: CpuDevice) -> None:
    made = Maker()
    first = made.node("concat", made.input(floats(64)), axis=0)
    second = made.node("sin", first)
    made.output(made.node("concat", second, axis=0))
    loaded = Loaded(device, made, fusion=False)
    concat, sine = loaded.plan.memory_map().results
    assert (concat.offset_bytes, concat.last_step + 1) == (sine.offset_bytes, sine.first_step)
    loaded.free()


def test_constants_have_blocks_of_their_own_and_last(device: CpuDevice) -> None:
    made = Maker()
    one = made.node("fill", shape=(8,), value=2.0, dtype=F32)
    made.output(made.node("add", made.node("sin", made.input(floats(8))), one))
    loaded = Loaded(device, made, fusion=False)
    found = loaded.plan.memory_map()
    (constant,) = (one for one in found.results if one.block >= found.constants)
    assert loaded.graph.nodes[constant.node].op == "fill"
    assert (constant.first_step, constant.last_step) == (0, found.steps - 1)
    loaded.free()


def test_a_plan_that_tells_nothing_has_an_empty_map() -> None:
    assert MemoryMap() == MemoryMap((), 0, (), 0)
