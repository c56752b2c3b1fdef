"""Plans on the CPU: random graphs against an interpreter, variables, aborts, memory, threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import plan_fixtures
import pytest
from backend_graphs import (
    Array,
    Loaded,
    Maker,
    loaded,
    place,
    remove,
    run,
    same_bits,
    type_of,
)
from random_graphs import (
    RandomGraph,
    all_of_a_run,
    error_of,
    floats,
    interpret,
    some_outputs,
)

from heliograph_backends.contract import Abort, Tensor
from heliograph_backends.cpu import CpuDevice
from heliograph_backends.fake import FakeDevice
from heliograph_proto.errors import InvalidInputError
from heliograph_proto.types import F32, TensorType

device = plan_fixtures.device
fake = plan_fixtures.fake
needs_native = plan_fixtures.needs_native


# Random graphs


@pytest.fixture(scope="module")
def devices() -> Iterator[list[CpuDevice]]:
    """Native devices of one, two and three threads."""
    made = [CpuDevice(f"cpu{n}", threads=n, memory_bytes=2**28) for n in (1, 2, 3)]
    yield made
    for device in made:
        device.close()


@needs_native
@pytest.mark.parametrize("block", range(10))
def test_random_graphs_have_the_same_bits_for_any_threads_and_fusion_and_the_right_values(
    block: int, devices: list[CpuDevice]
) -> None:
    for seed in range(30 * block, 30 * block + 30):
        made = RandomGraph(seed)
        outputs, leaves = interpret(made)
        reference = all_of_a_run(devices[0], made)
        for found, expected in zip(reference, outputs + leaves, strict=True):
            assert found.shape == expected.shape
            assert error_of(found, expected) < 1e-4, f"seed {seed}"
        for device in devices:
            for fusion in (True, False):
                again = all_of_a_run(device, made, fusion=fusion)
                assert all(map(same_bits, reference, again)), f"seed {seed}, {device}, fusion={fusion}"


def test_random_graphs_have_the_right_values_on_the_definition(fake: FakeDevice) -> None:
    for seed in range(60):
        made = RandomGraph(seed)
        outputs, leaves = interpret(made)
        for found, expected in zip(all_of_a_run(fake, made), outputs + leaves, strict=True):
            assert error_of(found, expected) < 1e-4, f"seed {seed}"


@needs_native
def test_large_steps_that_workers_share_have_the_same_bits_for_any_threads(devices: list[CpuDevice]) -> None:
    made = Maker()
    x, w, b = made.input(floats(300, 384)), made.weight(floats(384, 500)), made.weight(floats(500))
    product = made.node("gelu_erf", made.node("add", made.node("matmul", x, w), b))
    scores = made.node("soft_max", made.node("matmul", product, made.node("permute", product, axes=(1, 0))))
    made.output(made.node("norm", product), made.node("reduce_sum", scores, axes=(-1,)))
    reference = run(devices[0], made)
    for device in devices:
        for fusion in (True, False):
            assert all(map(same_bits, reference, run(device, made, fusion=fusion)))


def test_a_sum_of_a_norm_and_another_product_is_not_taken_for_its_weight_and_bias(device: CpuDevice) -> None:
    made = Maker()
    x, a, b = (made.input(floats(8, seed=seed)) for seed in range(3))
    made.output(made.node("add", made.node("mul", a, b), made.node("norm", x)))
    swapped = Maker()
    x, a, b = (swapped.input(floats(8, seed=seed)) for seed in range(3))
    normal = swapped.node("norm", x)
    swapped.output(swapped.node("add", swapped.node("mul", a, b), normal))
    for each in (made, swapped):
        (found,), ((expected,), _) = run(device, each), interpret(each)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


# Variables


def test_reads_before_an_assignment_see_the_old_value_and_later_ones_the_new(device: CpuDevice) -> None:
    made = Maker()
    v, x = made.variable(floats(4, 8)), made.input(floats(4, 8, seed=1))
    before = made.node("neg", v)
    made.node("assign", v, x)
    made.output(before, made.node("neg", v))
    old, new = run(device, made)
    np.testing.assert_array_equal(old, -made.arrays[v])
    np.testing.assert_array_equal(new, -made.arrays[x])


def test_views_taken_before_an_assignment_keep_the_old_value(device: CpuDevice) -> None:
    made = Maker()
    v, x = made.variable(floats(4, 8)), made.input(floats(4, 8, seed=1))
    views = [
        made.node("permute", v, axes=(1, 0)),
        made.node("reshape", v, shape=(32,)),
        made.node("slice", v, start=(1, 0), stop=(4, 8), step=(2, 3)),
        made.node("broadcast_to", v, shape=(2, 4, 8)),
    ]
    made.node("assign", v, x)
    made.output(*views)
    outputs, _ = interpret(made)
    for found, expected in zip(run(device, made), outputs, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_read_that_fuses_with_a_later_node_still_sees_the_old_value(device: CpuDevice) -> None:
    made = Maker()
    v, x = made.variable(floats(8)), made.input(floats(8, seed=1))
    before = made.node("neg", v)
    made.node("assign", v, x)
    made.output(made.node("add", made.node("neg", before), x))
    (found,) = run(device, made)
    np.testing.assert_array_equal(found, made.arrays[v] + made.arrays[x])


def test_the_result_of_an_assignment_stays_when_the_variable_is_assigned_to_again(device: CpuDevice) -> None:
    made = Maker()
    v = made.variable(floats(8))
    x, y = made.input(floats(8, seed=1)), made.input(floats(8, seed=2))
    first = made.node("assign", v, x)
    made.node("assign", v, y)
    made.output(first, made.node("neg", first), v)
    found = run(device, made)
    for array, expected in zip(found, (made.arrays[x], -made.arrays[x], made.arrays[y]), strict=True):
        np.testing.assert_array_equal(array, expected)


def test_a_variable_can_be_assigned_its_own_transpose(device: CpuDevice) -> None:
    made = Maker()
    v = made.variable(floats(8, 8))
    made.node("assign", v, made.node("permute", v, axes=(1, 0)))
    made.output(v)
    (found,) = run(device, made)
    np.testing.assert_array_equal(found, made.arrays[v].T)


def test_two_variables_can_change_places(device: CpuDevice) -> None:
    made = Maker()
    a, b = made.variable(floats(8)), made.variable(floats(8, seed=1))
    old = made.node("reshape", a, shape=(8,))
    made.node("assign", a, b)
    made.node("assign", b, old)
    made.output(a, b)
    found = run(device, made)
    np.testing.assert_array_equal(found, [made.arrays[b], made.arrays[a]])


def test_a_variable_keeps_its_value_from_run_to_run(device: CpuDevice) -> None:
    made = Maker()
    v = made.variable(np.zeros(4, np.float32))
    made.node("assign", v, made.node("add", v, made.input(np.ones(4, np.float32))))
    made.output(v)
    with loaded(device, made) as it:
        values = [float(it.run()[0][0]) for _ in range(3)]
    assert values == [1, 2, 3]


def test_an_assignment_happens_though_no_output_depends_on_it(device: CpuDevice) -> None:
    made = Maker()
    v, x = made.variable(floats(4)), made.input(floats(4, seed=1))
    made.node("assign", v, x)
    made.output(x)
    it = Loaded(device, made)
    it.run()
    np.testing.assert_array_equal(it.free()[v], made.arrays[x])


# Outputs and inputs


@pytest.mark.parametrize("wanted", [[False] * 4, [True, False, True, False], [False, True, False, True]])
def test_an_output_that_is_not_wanted_is_left_out_and_the_others_are_right(
    wanted: list[bool], device: CpuDevice
) -> None:
    made = some_outputs()
    expected = run(device, made)
    with loaded(device, made) as it:
        for _ in range(2):
            for want, found, right in zip(wanted, it.run(wanted=wanted), expected, strict=True):
                assert (found is None) == (not want)
                assert found is None or same_bits(found, right)


def strided(device: CpuDevice, array: Array) -> Tensor:
    """A tensor with the array's elements and gaps between them."""
    tensor = place(device, np.zeros((*array.shape[:-1], array.shape[-1] * 3), array.dtype))
    *outer, last = tensor.byte_strides
    made = tensor.view(type_of(array), 0, (*outer, last * 3))
    made.array[...] = array
    return made


def test_inputs_may_have_gaps_or_be_unaligned(device: CpuDevice) -> None:
    made = some_outputs()
    expected = run(device, made)
    array = made.arrays[0]
    odd = device.buffer_type.allocate(array.nbytes + 1)
    unaligned = Tensor(type_of(array), odd, 1)
    odd.set(1, memoryview(array.tobytes()))
    with loaded(device, made) as it:
        for tensor in (strided(device, array), unaligned):
            outputs = [place(device, np.zeros_like(right)) for right in expected]
            it.plan.compute([tensor], outputs, Abort())
            assert all(same_bits(remove(one), right) for one, right in zip(outputs, expected, strict=True))
            tensor.buffer.free()


def test_outputs_may_have_gaps_and_what_lies_between_stays(device: CpuDevice) -> None:
    made = some_outputs()
    expected = run(device, made)
    with loaded(device, made) as it:
        outputs = [strided(device, np.zeros_like(right)) for right in expected]
        it.plan.compute(it.inputs, outputs, Abort())
        for tensor, right in zip(outputs, expected, strict=True):
            assert same_bits(np.array(tensor.array), right)
            raw = np.zeros(tensor.buffer.size_bytes, np.uint8)
            tensor.buffer.get(0, memoryview(raw))
            gaps = raw[64:-64].view(np.float32).reshape(-1, 3)[:, 1:]
            assert not gaps.any()
            tensor.buffer.free()


def test_an_input_can_be_host_memory_in_place(device: CpuDevice) -> None:
    made = some_outputs()
    expected = run(device, made)
    data = b"\0" + made.arrays[0].tobytes()
    for offset in (0, 1):
        memory = memoryview(data[1:]) if offset == 0 else memoryview(data)[1:]
        with loaded(device, made) as it:
            tensor = Tensor(type_of(made.arrays[0]), device.buffer_from_host(memory))
            outputs = [place(device, np.zeros_like(right)) for right in expected]
            it.plan.compute([tensor], outputs, Abort())
            assert all(same_bits(remove(one), right) for one, right in zip(outputs, expected, strict=True))


def test_a_tensor_of_another_type_is_refused(device: CpuDevice) -> None:
    with loaded(device, some_outputs()) as it:
        small = place(device, np.zeros((4, 5), np.float32))
        with pytest.raises(InvalidInputError, match=r"f32\[4, 5\] where the plan has f32\[4, 6\]"):
            it.plan.compute([small], [None] * 4, Abort())
        small.buffer.free()
        it.run()


def test_a_tensor_whose_memory_was_freed_is_refused(device: CpuDevice) -> None:
    with loaded(device, some_outputs()) as it:
        gone = place(device, np.zeros((4, 6), np.float32))
        gone.buffer.free()
        with pytest.raises(InvalidInputError, match="freed"):
            it.plan.compute([gone], [None] * 4, Abort())


def test_a_weight_that_is_freed_early_stays_readable_for_its_plan(device: CpuDevice) -> None:
    made = Maker()
    x, w = made.input(floats(5, 8)), made.weight(floats(8, 40))
    made.output(made.node("matmul", x, w), made.node("neg", w))
    expected = run(device, made)
    it = Loaded(device, made)
    it.tensors[w].buffer.free()
    assert all(map(same_bits, it.run(), expected))
    it.plan.free()
    it.tensors[x].buffer.free()


def test_a_plan_of_nothing_but_leaves_returns_them(device: CpuDevice) -> None:
    made = Maker()
    made.output(made.input(floats(3)), made.weight(floats(2)), made.variable(floats(0, 4)))
    assert all(map(same_bits, run(device, made), made.arrays))


def test_no_warning_leaks_from_compiling_or_running(device: CpuDevice) -> None:
    made = Maker()
    made.node("fill", shape=(2,), value=1e300, dtype=F32)
    zero = made.input(np.zeros(4))
    made.output(-1, made.node("div", zero, zero), made.node("log", zero), made.node("cast", zero, dtype=F32))
    run(device, made)


def test_a_plan_describes_itself(device: CpuDevice) -> None:
    with loaded(device, some_outputs()) as it:
        assert repr(it.plan).startswith("<CpuPlan of 2 nodes in ") or "FakePlan" in repr(it.plan)


def test_an_empty_type_has_a_place_of_its_own(device: CpuDevice) -> None:
    made = Maker()
    x = made.input(np.zeros((0, 8), np.float32))
    made.output(made.node("exp", x), made.node("reduce_sum", x, axes=(0,)))
    empty, zeros = run(device, made)
    assert empty.shape == (0, 8)
    assert type_of(zeros) == TensorType(F32, (8,))
    assert not zeros.any()
