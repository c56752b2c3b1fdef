"""Weights on the CPU: packed in place for products, and read in their own order by everyone else."""

from __future__ import annotations

import numpy as np
import plan_fixtures
import pytest
from backend_graphs import (
    Array,
    Loaded,
    Maker,
    nothing_left,
    place,
    place_weight,
    remove,
    same_bits,
    used_bytes,
)
from random_graphs import (
    floats,
    product_with,
)

from heliograph_backends.contract import Abort, DeviceCompileOptions, LeafBindings, access
from heliograph_backends.cpu import CpuDevice
from heliograph_proto.errors import OutOfMemoryError
from heliograph_proto.graph import LeafKind
from heliograph_proto.types import tensor_type

needs_native = plan_fixtures.needs_native


def leaf_bytes(it: Loaded) -> int:
    return sum(tensor.buffer.size_bytes for tensor in it.tensors)


def bits_of_own_order(device: CpuDevice, made: Maker) -> list[Array | None]:
    """The outputs of a graph whose weights lie where nothing is packed."""
    weights = {
        value: place(device, made.arrays[value])
        for value, leaf in enumerate(made.leaves)
        if leaf.kind is LeafKind.WEIGHT
    }
    it = Loaded(device, made, weights=weights)
    found = it.run()
    it.free()
    return found


@needs_native
@pytest.mark.parametrize("shape", [(1000, 1), (64, 64), (33, 45), (45, 320)])
def test_a_weight_that_only_products_read_takes_its_own_bytes(shape: tuple[int, int]) -> None:
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**26)) as device:
        it = Loaded(device, product_with(floats(*shape)))
        assert used_bytes(device) == it.plan.compute_bytes + leaf_bytes(it)
        it.free()
        assert used_bytes(device) == 0


@needs_native
def test_a_weight_is_read_and_copied_in_its_own_order_while_it_lies_packed() -> None:
    weight = floats(45, 70)
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**26)) as device:
        it = Loaded(device, product_with(weight))
        tensor, copy = it.tensors[1], place(device, np.zeros_like(weight))
        assert tensor.buffer.memory.tobytes() != weight.tobytes()  # type: ignore[attr-defined]
        part = bytearray(1003)
        tensor.buffer.get(517, memoryview(part))
        assert bytes(part) == weight.tobytes()[517 : 517 + 1003]
        access.copy(tensor, copy)
        np.testing.assert_array_equal(remove(copy), weight)
        rows = tensor.view(tensor_type("f32", (45, 3)), 16, (280, 4))
        assert access.read_whole(rows) == np.ascontiguousarray(weight[:, 4:7]).tobytes()
        it.free()


@needs_native
def test_a_weight_that_another_op_reads_too_lies_once_in_its_own_order() -> None:
    made = Maker()
    x, w = made.input(floats(3, 64)), made.weight(floats(64, 48))
    made.output(made.node("matmul", x, w), made.node("exp", w))
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**26)) as device:
        it = Loaded(device, made)
        assert used_bytes(device) == it.plan.compute_bytes + leaf_bytes(it)
        assert all(map(same_bits, it.run(), bits_of_own_order(device, made)))
        it.free()


@needs_native
def test_a_weight_that_a_plan_multiplies_in_two_ways_lies_once() -> None:
    made = Maker()
    x, w = made.input(floats(3, 64)), made.weight(floats(64, 64))
    made.output(made.node("matmul", x, w), made.node("mul_mat", w, x))
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**26)) as device:
        it = Loaded(device, made)
        assert used_bytes(device) == it.plan.compute_bytes + leaf_bytes(it)
        assert all(map(same_bits, it.run(), bits_of_own_order(device, made)))
        it.free()


@needs_native
def test_a_plan_that_reads_a_packed_weight_in_its_own_order_has_a_copy_until_it_is_freed() -> None:
    weight = floats(64, 48)
    other = Maker()
    other.output(other.node("exp", other.weight(weight)))
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**26)) as device:
        it = Loaded(device, product_with(weight))
        before, expected = used_bytes(device), it.run()
        bindings = LeafBindings({0: it.tensors[1]}, {})
        plans = [device.compile(other.graph(), bindings, DeviceCompileOptions()) for _ in range(2)]
        own = sum(plan.compute_bytes for plan in plans)
        assert used_bytes(device) == before + own + weight.nbytes
        result = place(device, np.zeros_like(weight))
        plans[0].compute([], [result], Abort())
        np.testing.assert_allclose(remove(result), np.exp(weight), rtol=1e-5)
        assert all(map(same_bits, it.run(), expected))
        for plan in plans:
            plan.free()
        assert used_bytes(device) == before
        it.free()


@needs_native
def test_a_copy_of_a_packed_weight_that_does_not_fit_is_refused_and_nothing_stays() -> None:
    weight = floats(512, 512)
    other = Maker()
    other.output(other.node("reduce_sum", other.weight(weight)))
    with nothing_left(CpuDevice(threads=1, memory_bytes=2 * weight.nbytes)) as device:
        it = Loaded(device, product_with(weight))
        before, expected = used_bytes(device), it.run()
        with pytest.raises(OutOfMemoryError, match="other plans read packed"):
            device.compile(other.graph(), LeafBindings({0: it.tensors[1]}, {}), DeviceCompileOptions())
        assert used_bytes(device) == before
        assert all(map(same_bits, it.run(), expected))
        it.free()


@needs_native
def test_plans_come_and_go_and_each_finds_the_weight_in_the_order_that_it_reads() -> None:
    """Random plans that read one weight in four orders; never more memory than one copy beside it."""
    weight, x = floats(65, 65), floats(5, 65)
    makers: list[Maker] = []
    for op in ("matmul", "mul_mat", "exp", "both"):
        made = Maker()
        rows, w = made.input(x), made.weight(weight)
        if op in ("matmul", "both"):
            made.output(made.node("matmul", rows, w))
        if op in ("mul_mat", "both"):
            made.output(made.node("mul_mat", w, rows))
        if op == "exp":
            made.output(made.node("add", made.node("exp", w), made.node("reduce_sum", rows)))
        makers.append(made)
    seed = int(np.random.default_rng().integers(2**31))
    chance = np.random.default_rng(seed)
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**26)) as device:
        expected = [bits_of_own_order(device, made) for made in makers]
        shared = place_weight(device, weight)
        living: list[tuple[Loaded, int]] = []
        for _ in range(60):
            if living and chance.random() < 0.5:
                it, _ = living.pop(int(chance.integers(len(living))))
                it.tensors.pop()
                it.free()
            else:
                kind = int(chance.integers(len(makers)))
                living.append((Loaded(device, makers[kind], weights={1: shared}), kind))
            for it, kind in living[-2:]:
                assert all(map(same_bits, it.run(), expected[kind])), f"seed {seed}"
            own = sum(it.plan.compute_bytes + it.tensors[0].buffer.size_bytes for it, _ in living)
            assert used_bytes(device) - own <= 2 * weight.nbytes, f"seed {seed}"
            assert access.read_whole(shared) == weight.tobytes(), f"seed {seed}"
        for it, _ in living:
            it.tensors.pop()
            it.free()
        assert used_bytes(device) == weight.nbytes
        remove(shared)


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
@pytest.mark.parametrize("columns", [64, 70, 20])
def test_plans_read_what_is_written_to_a_weight_whatever_order_it_has(columns: int) -> None:
    """One plan reads it packed, another one a copy in its own order."""
    weight, new = floats(64, columns), floats(64, columns, seed=9)
    other = Maker()
    other.output(other.node("exp", other.weight(weight)))
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**26)) as device:
        it = Loaded(device, product_with(weight))
        copied = Loaded(device, other, weights={0: it.tensors[1]})
        for first, last in ((0, 1000), (1000, 1003), (1003, weight.nbytes)):
            it.tensors[1].buffer.set(first, memoryview(new.tobytes()[first:last]))
        made = product_with(new)
        assert all(map(same_bits, it.run(), bits_of_own_order(device, made)))
        other.arrays[0] = new
        assert all(map(same_bits, copied.run(), bits_of_own_order(device, other)))
        assert access.read_whole(it.tensors[1]) == new.tobytes()
        it.tensors[1].buffer.clear()
        assert not np.any(it.run()[0])
        copied.plan.free()
        it.free()
