"""Stored weights whose rows lie in groups: in place, read and written in their own order, with the
bits of weights in their own order."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from backend_graphs import Array, Loaded, Maker, place, place_weight, run, same_bits, used_bytes
from kernel_runs import normal
from stored_weights import KINDS, SCALES, blocks, stored, stored_name, times

from heliograph_backends.contract import access
from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cpu.kernels import RowGroups, Stored
from heliograph_backends.cpu.kernels.program.stored_types import FORMS
from heliograph_backends.host_memory.buffers import aligned_bytes

#: Rows of the left side: one, a few, more than are multiplied at once, and as many as take panels.
LEFT_ROWS = (1, 3, 4, 5, 13, 70)


def of_any_bytes(kind: Stored, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray[Any, Any]:
    """Weights that have every value of a quantum."""
    return blocks(kind, shape, random) if kind in SCALES else stored(kind, shape, random)


def product(kind: Stored, weight: np.ndarray[Any, Any], *inputs: Array, op: str = "mul_mat") -> Maker:
    made = Maker()
    made.output(made.node(op, made.weight(weight, stored_name(kind)), *map(made.input, inputs)))
    return made


def in_groups(it: Loaded) -> bool:
    """True if the plan reads its weight, which is the first leaf, in groups of rows."""
    forms: frozenset[int] = it.plan.memory.packed  # type: ignore[attr-defined]
    return 0 in forms


def assert_the_order_changes_no_bits(device: CpuDevice, made: Maker) -> None:
    """Run a graph on a weight that may change its order, and on one that may not."""
    own = Loaded(device, made, weights={0: place(device, made.arrays[0], made.leaves[0].type)})
    it = Loaded(device, made)
    assert in_groups(it)
    assert not in_groups(own)
    assert all(map(same_bits, it.run(), own.run()))
    before = np.ascontiguousarray(made.arrays[0]).tobytes()
    assert access.read_whole(it.tensors[0]) == before
    it.free()
    own.free()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_grouped_read_written_and_restored_in_their_place(
    kind: Stored, random: np.random.Generator
) -> None:
    form, shape = FORMS[kind], (48, 96 * times(kind))
    own = np.ascontiguousarray(of_any_bytes(kind, shape, random)).tobytes()
    memory, groups = aligned_bytes(len(own)), RowGroups(kind, shape[0], shape[1] // form.block_size)
    memory[:] = np.frombuffer(own, np.uint8)
    assert groups.size_bytes == len(own)

    groups.pack(memory)
    assert memory.tobytes() != own
    now = bytearray(own)
    for _ in range(10):
        first, last = sorted(random.integers(0, len(own) + 1, 2))
        new = random.bytes(int(last - first))
        now[first:last] = new
        groups.write(memory, int(first), memoryview(new))
        start, stop = sorted(random.integers(0, len(own) + 1, 2))
        found = bytearray(int(stop - start))
        groups.read(memory, int(start), memoryview(found))
        assert found == now[start:stop]

    groups.unpack(memory)
    assert memory.tobytes() == now


@pytest.mark.parametrize("kind", KINDS)
def test_short_rows_are_reordered_many_at_a_time(kind: Stored, random: np.random.Generator) -> None:
    """A weight of a gibibyte may have millions of groups."""
    blocks = max(1, 16 // FORMS[kind].block_size)
    count = 2 * 2**18 // (16 * blocks * FORMS[kind].block_bytes) + 3
    groups = RowGroups(kind, 16 * count, blocks)
    memory = aligned_bytes(groups.size_bytes)
    memory[:] = np.frombuffer(random.bytes(groups.size_bytes), np.uint8)
    own, calls = memory.tobytes(), 0

    def called(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(called)
    try:
        groups.pack(memory)
    finally:
        sys.setprofile(None)
    assert calls < 2 * count

    one = RowGroups(kind, 16, blocks)
    for number in (0, count // 2, count - 1):
        place = slice(number * one.size_bytes, (number + 1) * one.size_bytes)
        alone = np.frombuffer(bytearray(own[place]), np.uint8)
        one.pack(alone)
        assert alone.tobytes() == memory[place].tobytes()
    start, stop = one.size_bytes // 2, groups.size_bytes - 5
    found = bytearray(stop - start)
    groups.read(memory, start, memoryview(found))
    assert found == own[start:stop]
    groups.write(memory, start, memoryview(bytes(stop - start)))
    groups.unpack(memory)
    assert memory.tobytes() == own[:start] + bytes(stop - start) + own[stop:]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not Stored.F32])
@pytest.mark.parametrize("columns", [16, 112])
def test_a_product_has_the_bits_of_the_weight_in_its_own_order(
    kind: Stored, columns: int, device: CpuDevice, random: np.random.Generator
) -> None:
    depth = 96 * times(kind)
    weight = of_any_bytes(kind, (columns, depth), random)
    for rows in LEFT_ROWS:
        assert_the_order_changes_no_bits(device, product(kind, weight, normal(random, rows, depth)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_with_experts_has_the_bits_of_the_weight_in_its_own_order(
    kind: Stored, device: CpuDevice, random: np.random.Generator
) -> None:
    depth = 64 * times(kind)
    weight = of_any_bytes(kind, (5, 80, depth), random)
    for tokens in (1, 3, 40):
        ids = np.array([random.permutation(5)[:2] for _ in range(tokens)], np.int32)
        made = product(kind, weight, normal(random, tokens, 1, depth), ids, op="mul_mat_id")
        assert_the_order_changes_no_bits(device, made)


@pytest.mark.parametrize("kind", [Stored.F16, Stored.Q4_0, Stored.Q6_K])
def test_matrices_of_one_weight_repeat_with_the_bits_of_the_weight_in_its_own_order(
    kind: Stored, device: CpuDevice, random: np.random.Generator
) -> None:
    depth = 64 * times(kind)
    weight = of_any_bytes(kind, (2, 32, depth), random)
    for rows in (1, 6):
        assert_the_order_changes_no_bits(device, product(kind, weight, normal(random, 4, rows, depth)))


@pytest.mark.parametrize("shape", [(40, 64), (33, 64), (32, 40)])
def test_rows_that_fill_no_groups_keep_their_own_order(
    shape: tuple[int, int], device: CpuDevice, random: np.random.Generator
) -> None:
    made = product(Stored.F16, stored(Stored.F16, shape, random), normal(random, 2, shape[1]))
    it = Loaded(device, made)
    assert not in_groups(it)
    it.free()


def test_a_weight_whose_rows_are_also_looked_up_keeps_its_own_order(
    device: CpuDevice, random: np.random.Generator
) -> None:
    made = Maker()
    weight = made.weight(stored(Stored.Q8_0, (64, 64), random), "q8_0")
    rows = made.node("get_rows", weight, made.input(np.array([3, 60], np.int32)))
    made.output(made.node("mul_mat", weight, rows))
    it = Loaded(device, made)
    assert not in_groups(it)
    it.run()
    it.free()


def test_plans_that_read_a_weight_in_two_orders_see_what_is_written_to_it(
    device: CpuDevice, random: np.random.Generator
) -> None:
    old, new = (stored(Stored.Q4_K, (64, 512), random) for _ in range(2))
    made = product(Stored.Q4_K, old, normal(random, 2, 512))
    looked_up = Maker()
    places = looked_up.input(np.array([63, 0], np.int32))
    looked_up.output(looked_up.node("get_rows", looked_up.weight(old, "q4_k"), places))
    shared = place_weight(device, old, made.leaves[0].type)
    it = Loaded(device, made, weights={0: shared})
    used = used_bytes(device)
    other = Loaded(device, looked_up, weights={1: shared})
    assert in_groups(it)
    assert used_bytes(device) >= used + old.nbytes, "the other plan reads a copy"
    for first, last in ((0, 1000), (1000, 1003), (1003, new.nbytes)):
        shared.buffer.set(first, memoryview(new.tobytes()[first:last]))
    made.arrays[0] = looked_up.arrays[1] = new
    assert all(map(same_bits, it.run(), run(device, made)))
    assert all(map(same_bits, other.run(), run(device, looked_up)))
    assert access.read_whole(shared) == new.tobytes()
    other.tensors.pop()
    other.free()
    it.free()
