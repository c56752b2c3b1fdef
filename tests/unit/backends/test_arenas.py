"""Plans that lie in one arena: the bits of plans with memory of their own, and no memory beside it."""

from __future__ import annotations

import numpy as np
import plan_fixtures
import pytest
from backend_graphs import Array, Loaded, nothing_left, same_bits, used_bytes
from random_graphs import RandomGraph, long_graph

from heliograph_backends.contract import Device, DeviceCompileOptions, LeafBindings
from heliograph_backends.cpu import CpuDevice
from heliograph_backends.fake import FakeDevice
from heliograph_proto.errors import OutOfMemoryError, UnsupportedError

device = plan_fixtures.device
UNFUSED = DeviceCompileOptions(fusion=False)


def blocks_of(device: Device, *makers: RandomGraph, fusion: bool) -> list[int]:
    """Blocks in which each of the graphs fits."""
    sizes = [device.estimate(one.graph(), DeviceCompileOptions(fusion=fusion)).arena_bytes for one in makers]
    assert all(len(one) <= 1 for one in sizes), "the arena of a small graph is one block"
    return [max(sum(one) for one in sizes)]


def constants_of(it: Loaded) -> int:
    return it.plan.compute_bytes - it.plan.arena_bytes


@pytest.mark.parametrize("fusion", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_random_plans_in_one_arena_run_in_any_order_as_in_memory_of_their_own(
    seed: int, fusion: bool, device: CpuDevice
) -> None:
    chance = np.random.default_rng(seed)
    makers = [RandomGraph(100 * seed + number) for number in range(4)]
    arena = device.arena(blocks_of(device, *makers, fusion=fusion))
    alone = [Loaded(device, made, fusion=fusion) for made in makers]
    before = used_bytes(device)
    there = [Loaded(device, made, fusion=fusion, arena=arena) for made in makers]
    leaves = sum(tensor.buffer.size_bytes for it in there for tensor in it.tensors)
    packed = used_bytes(device) - before - leaves - sum(map(constants_of, there))
    taken = used_bytes(device)
    for number in chance.integers(0, len(makers), 20):
        expected, found = alone[number].run(), there[number].run()
        assert all(map(same_bits, found, expected)), f"seed {seed}, plan {number}"
    assert used_bytes(device) == taken and packed >= 0, f"seed {seed}"
    assert any(it.plan.arena_bytes for it in there)
    for it in (*alone, *there):
        it.free()
    arena.free()


def test_what_does_not_fit_takes_memory_of_its_own_and_says_so(device: CpuDevice) -> None:
    small, large = long_graph(np.float64, nodes=5, size=100), long_graph(np.float64, nodes=5, size=1000)
    arena = device.arena(device.estimate(small.graph(), DeviceCompileOptions()).arena_bytes)
    fits, passes = Loaded(device, small, arena=arena), Loaded(device, large, arena=arena)
    assert fits.plan.arena_bytes == fits.plan.compute_bytes > 0 == fits.plan.held_bytes
    assert passes.plan.arena_bytes == 0 < passes.plan.held_bytes == passes.plan.compute_bytes
    own = Loaded(device, large)
    expected: list[Array | None] = own.run()
    assert all(map(same_bits, passes.run(), expected))  # type: ignore[arg-type]
    for it in (fits, passes, own):
        it.free()
    arena.free()


def test_an_update_of_a_plan_in_an_arena_stays_there_and_gives_nothing_of_it_away(device: CpuDevice) -> None:
    made = long_graph(np.float64, nodes=5, size=100)
    arena = device.arena(device.estimate(made.graph(), DeviceCompileOptions()).arena_bytes)
    it, before = Loaded(device, made, arena=arena), used_bytes(device)
    it.plan = it.plan.update(it.graph, LeafBindings({}, {}), DeviceCompileOptions())
    assert it.plan.arena_bytes == it.plan.compute_bytes and used_bytes(device) == before
    again = Loaded(device, made, arena=arena)
    assert all(map(same_bits, it.run(), again.run()))  # type: ignore[arg-type]
    it.free()
    again.free()
    arena.free()


def test_an_arena_that_does_not_fit_takes_nothing() -> None:
    small = CpuDevice(threads=1, memory_bytes=2**20)
    with nothing_left(small), pytest.raises(OutOfMemoryError, match="bytes free"):
        small.arena([2**19, 2**20])


def test_a_device_that_has_none_says_so() -> None:
    class Plain(FakeDevice):
        arena = Device.arena  # type: ignore[assignment]
        compile_in = Device.compile_in

    plain, far, made = Plain(), FakeDevice("far"), long_graph(np.float64, nodes=5, size=100)
    with pytest.raises(UnsupportedError, match="memory of their own"):
        plain.arena([64])
    other = far.arena([2**20])
    it = Loaded(plain, made, arena=other)
    assert it.plan.arena_bytes == 0
    it.free()
    other.free()
    plain.close()
    far.close()
