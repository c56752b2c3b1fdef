"""Memory of plans on the CPU: results in place have the bits of results in memory of their own, arenas in
chunks, plans that take over another one's memory, and what a plan takes, told beforehand.
"""

from __future__ import annotations

import numpy as np
import plan_fixtures
import pytest
from backend_graphs import Array, Loaded, Maker, nothing_left, place, remove, run, same_bits, used_bytes
from op_cases import SEED, Case
from op_cases_all import cases_of
from random_graphs import RandomGraph, all_of_a_run, floats

from heliograph_backends.contract import Abort, DeviceCompileOptions, LeafBindings, Tensor
from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cpu.plan import CpuPlan
from heliograph_proto.errors import HeliographError, OutOfMemoryError, UnknownHandleError
from heliograph_proto.ops.table import OPS

device = plan_fixtures.device
needs_native = plan_fixtures.needs_native


# In place

IN_PLACE = [(op, place) for op, row in OPS.items() for place in row.in_place]


def copied(made: Maker, array: Array) -> int:
    """The elements in memory of the plan's own, which nothing else needs."""
    return made.node("concat", made.input(array), axis=0)


def graph_of(case: Case, place: int, *, kept: bool) -> tuple[Maker, int, int]:
    """The case's node, whose operand at the place is a result that it may write over, unless it is kept."""
    made = Maker()
    operands = [made.input(array) for array in case.operands]
    source = operands[place] = copied(made, case.operands[place])
    result = made.node(case.op, *operands, **case.attributes)
    made.output(made.node("reshape", result, shape=(made.type(result).size,)))
    if kept:
        made.output(made.node("reshape", source, shape=(made.type(source).size,)))
    return made, source, result


def is_in_place(it: Loaded, made: Maker, source: int, result: int) -> bool:
    assert isinstance(it.plan, CpuPlan)
    regions = it.plan.storage.regions
    return regions[made.number(source)] == regions[made.number(result)]


@pytest.mark.parametrize(("op", "place"), IN_PLACE)
def test_an_op_in_place_gives_the_bits_that_it_gives_in_other_memory(
    op: str, place: int, device: CpuDevice
) -> None:
    found = 0
    for case in cases_of(op, np.random.default_rng(SEED)):
        if place >= len(case.operands) or np.ndim(case.operands[place]) == 0:
            continue
        made, source, result = graph_of(case, place, kept=False)
        it = Loaded(device, made)
        in_place = is_in_place(it, made, source, result)
        outputs = it.run()
        it.free()
        if in_place:
            found += 1
            other, *_ = run(device, graph_of(case, place, kept=True)[0])
            assert outputs[0] is not None
            assert same_bits(outputs[0], other), f"{op} of {[each.shape for each in case.operands]}"
    assert found, "no case of this op ran in place"


def without_sharing(device: CpuDevice, made: Maker) -> list[Array]:
    """What a run gives, and what the leaves hold at last, where no two results share memory."""
    every = Maker(made.leaves, made.arrays, made.nodes, [*made.outputs])
    every.output(*(-1 - number for number in range(len(made.nodes))))
    found = all_of_a_run(device, every)
    return found[: len(made.outputs)] + found[-len(made.leaves) :]


@pytest.mark.parametrize("max_size", [2**63 - 1, 3072])
def test_a_plan_has_the_bits_of_one_whose_results_share_no_memory(max_size: int, device: CpuDevice) -> None:
    device.buffer_type.max_size = max_size
    for seed in range(1000, 1040):
        made = RandomGraph(seed)
        expected = without_sharing(device, made)
        for fusion in (True, False):
            found = all_of_a_run(device, made, fusion=fusion)
            assert all(map(same_bits, found, expected)), f"seed {seed}, fusion={fusion}"


@needs_native
def test_large_steps_in_place_that_workers_share_have_the_bits_of_those_that_are_not() -> None:
    made = Maker()
    value = copied(made, floats(300, 700))
    for op in ("gelu_erf", "norm", "soft_max", "rms_norm", "sqr", "l2_norm"):
        value = made.node("add", made.node(op, value), made.weight(floats(700, seed=len(op))))
    made.output(made.node("reduce_sum", value, axes=(0,)))
    with nothing_left(CpuDevice(threads=3, memory_bytes=2**28)) as device:
        expected = without_sharing(device, made)
        for fusion in (True, False):
            assert all(map(same_bits, all_of_a_run(device, made, fusion=fusion), expected))
        it = Loaded(device, made, fusion=False)
        assert it.plan.compute_bytes < 1.1 * 300 * 700 * 4
        it.free()


def test_a_cache_into_which_rows_are_set_is_neither_copied_nor_held_twice(device: CpuDevice) -> None:
    made = Maker()
    v = made.variable(floats(1000, 64))
    rows, at = made.input(floats(2, 64, seed=1)), made.input(np.array([7, 999], np.int32))
    cache = made.node("assign", v, made.node("set_rows", v, rows, at))
    made.output(made.node("reduce_sum", cache, axes=(0,)))
    it = Loaded(device, made)
    assert it.plan.compute_bytes == 0
    for _ in range(2):
        expected = made.arrays[v].copy()
        expected[[7, 999]] = made.arrays[rows]
        (found,) = it.run()
        assert found is not None
        np.testing.assert_allclose(found, expected.sum(0), rtol=1e-4)
        assert same_bits(np.array(it.tensors[v].array), expected)
    it.free()


@pytest.mark.parametrize("shift", [0, 2])
def test_an_input_in_a_variables_memory_is_read_before_the_variable_is_written(
    shift: int, device: CpuDevice
) -> None:
    made = Maker()
    x, w, v = made.input(floats(100, 64)), made.weight(floats(64, 64)), made.variable(floats(100, 64))
    made.node("assign", v, made.node("matmul", x, w))
    made.output(v)
    it = Loaded(device, made)
    assert isinstance(it.plan, CpuPlan)
    assert it.plan.storage.written == {v}
    memory = device.buffer_type.allocate(102 * 64 * 4)
    type = it.graph.type_of(v)
    state = Tensor(type, memory, 2 * 64 * 4)
    bindings = LeafBindings({w: it.tensors[w]}, {v: state})
    plan = device.compile(it.graph, bindings, DeviceCompileOptions())
    overlapping = Tensor(type, memory, (2 - shift) * 64 * 4)
    overlapping.array[...] = made.arrays[x]
    plan.compute([overlapping], [None], Abort())
    (expected,) = it.run()
    assert expected is not None and same_bits(np.array(state.array), expected)
    plan.free()
    memory.free()
    it.free()


def test_two_variables_in_the_same_memory_are_written_in_the_order_of_their_assignments(
    device: CpuDevice,
) -> None:
    made = Maker()
    x, v, u = made.input(floats(4, 8)), made.variable(floats(4, 8)), made.variable(floats(4, 8))
    result = made.node("sin", x)
    old = made.node("cos", u)
    made.node("assign", v, result)
    made.output(old, made.node("cont", u))
    it = Loaded(device, made)
    bindings = LeafBindings({}, {v: it.tensors[v], u: it.tensors[v]})
    plan = device.compile(it.graph, bindings, DeviceCompileOptions())
    outputs = [place(device, np.zeros((4, 8), np.float32)) for _ in range(2)]
    plan.compute(it.inputs, outputs, Abort())
    before, after = (remove(each) for each in outputs)
    np.testing.assert_allclose(before, np.cos(made.arrays[v]), rtol=1e-5)
    np.testing.assert_allclose(after, np.sin(made.arrays[x]), rtol=1e-5)
    plan.free()
    it.free()


# Chunks


def test_an_arena_of_several_chunks_is_several_buffers_of_at_most_the_largest_size(device: CpuDevice) -> None:
    device.buffer_type.max_size = 1024
    made = RandomGraph(12)
    it = Loaded(device, made)
    assert isinstance(it.plan, CpuPlan)
    chunks = it.plan.storage.own_bytes
    assert len(chunks) > 1
    assert max(chunks) <= 1024
    assert sum(chunks) == it.plan.compute_bytes
    it.run()
    it.free()


def test_a_result_that_no_buffer_holds_is_refused_and_takes_nothing(device: CpuDevice) -> None:
    device.buffer_type.max_size = 2**20
    made = Maker()
    made.output(made.node("reduce_sum", made.node("soft_max", made.input(floats(600, 600)))))
    before = used_bytes(device)
    with pytest.raises(OutOfMemoryError, match="an intermediate result of 1,440,000 bytes"):
        device.compile(made.graph(), LeafBindings({}, {}), DeviceCompileOptions())
    assert used_bytes(device) == before


# Estimates


@pytest.mark.parametrize("fusion", [True, False])
def test_an_estimate_is_what_compiling_takes_and_takes_nothing(fusion: bool, device: CpuDevice) -> None:
    options = DeviceCompileOptions(fusion=fusion)
    for seed in range(40):
        made = RandomGraph(seed)
        before = used_bytes(device)
        estimate = device.estimate(made.graph(), options)
        assert used_bytes(device) == before
        it = Loaded(device, made, fusion=fusion)
        assert sum(estimate.compute_bytes) == it.plan.compute_bytes, f"seed {seed}"
        leaves = sum(tensor.buffer.size_bytes for tensor in it.tensors)
        assert used_bytes(device) - before == leaves + it.plan.compute_bytes + estimate.extra_bytes, seed
        it.free()


def test_an_estimate_tells_the_chunks(device: CpuDevice) -> None:
    device.buffer_type.max_size = 1024
    estimate = device.estimate(RandomGraph(12).graph(), DeviceCompileOptions())
    assert len(estimate.compute_bytes) > 1
    assert max(estimate.compute_bytes) <= 1024


@needs_native
def test_an_estimate_counts_nothing_beside_weights() -> None:
    made = Maker()
    w = made.weight(floats(8, 40))
    for rows in (3, 5):
        x = made.input(floats(rows, 8))
        made.output(made.node("matmul", x, w), made.node("mul_mat", made.node("permute", w, axes=(1, 0)), x))
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**24)) as device:
        extra_bytes = device.estimate(made.graph(), DeviceCompileOptions()).extra_bytes
        it = Loaded(device, made)
        leaves = sum(tensor.buffer.size_bytes for tensor in it.tensors)
        assert extra_bytes == used_bytes(device) - leaves - it.plan.compute_bytes == 0
        it.free()


def test_what_does_not_fit_can_be_estimated() -> None:
    made = Maker()
    huge = made.node("broadcast_to", made.input(np.zeros((1, 8), np.float32)), shape=(2**40, 8))
    made.output(made.node("reduce_sum", made.node("sin", huge)))
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**20)) as small:
        assert sum(small.estimate(made.graph(), DeviceCompileOptions()).compute_bytes) == 2**45


# Updates


def layers(rows: int, count: int = 3) -> Maker:
    """Steps that need two results at once."""
    made = Maker()
    x = made.input(floats(rows, 64))
    for _ in range(count):
        x = made.node("mul", made.node("soft_max", x), made.node("norm", x))
    made.output(made.node("reduce_sum", x, axes=(0,)))
    return made


def updated(it: Loaded, made: Maker) -> Loaded:
    """The same device and leaves' memory, with the plan of another graph."""
    other = Loaded.__new__(Loaded)
    other.device, other.graph = it.device, made.graph()
    other.tensors = [place(it.device, array) for array in made.arrays]
    other.plan = it.plan.update(other.graph, LeafBindings({}, {}), DeviceCompileOptions())
    for tensor in it.tensors:
        remove(tensor)
    return other


def test_a_smaller_graph_takes_over_the_memory_of_a_larger_one(device: CpuDevice) -> None:
    it = Loaded(device, layers(64))
    taken = it.plan.compute_bytes
    for rows in (10, 64, 1, 33):
        made = layers(rows)
        it = updated(it, made)
        assert it.plan.compute_bytes == taken
        assert used_bytes(device) == taken + sum(tensor.buffer.size_bytes for tensor in it.tensors)
        found, expected = it.run(), run(device, made)
        assert all(
            each is not None and same_bits(each, right) for each, right in zip(found, expected, strict=True)
        )
    it.free()


def test_a_larger_graph_takes_new_memory_and_gives_back_the_old(device: CpuDevice) -> None:
    it = Loaded(device, layers(8))
    made = layers(64)
    it = updated(it, made)
    assert it.plan.compute_bytes == sum(device.estimate(it.graph, DeviceCompileOptions()).compute_bytes)
    assert used_bytes(device) == it.plan.compute_bytes + sum(
        tensor.buffer.size_bytes for tensor in it.tensors
    )
    assert all(each is not None for each in it.run())
    it.free()


def test_chunks_that_suffice_are_taken_over_and_others_are_not(device: CpuDevice) -> None:
    device.buffer_type.max_size = 64 * 64 * 4
    it = Loaded(device, layers(64))
    chunks = it.plan.compute_bytes
    it = updated(it, layers(50))
    assert it.plan.compute_bytes == chunks
    assert all(each is not None for each in it.run())
    it.free()


def test_a_plan_that_was_updated_does_not_run_and_can_still_be_freed(device: CpuDevice) -> None:
    it = Loaded(device, layers(8))
    old = it.plan
    it = updated(it, layers(4))
    old.free()
    with pytest.raises(UnknownHandleError, match="freed"):
        old.compute([], [], Abort())
    with pytest.raises(UnknownHandleError, match="freed"):
        old.update(it.graph, LeafBindings({}, {}), DeviceCompileOptions())
    assert all(each is not None for each in it.run())
    it.free()


def test_an_update_that_fails_leaves_the_plan_as_it_was(device: CpuDevice) -> None:
    made = layers(64)
    it = Loaded(device, made)
    expected, before = it.run(), used_bytes(device)
    constant = Maker()
    constant.output(constant.node("arange", start=0, stop=2**40, step=1))
    with pytest.raises(HeliographError) as caught:
        it.plan.update(constant.graph(), LeafBindings({}, {}), DeviceCompileOptions())
    assert isinstance(caught.value, OutOfMemoryError)
    assert used_bytes(device) == before
    again = it.run()
    assert all(
        a is not None and b is not None and same_bits(a, b) for a, b in zip(again, expected, strict=True)
    )
    it.free()
