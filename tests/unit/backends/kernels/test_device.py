"""The native kernels under a CPU device: threads of plans and of the device, and what runs
natively."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from backend_graphs import Maker, loaded, normalised_error, nothing_left, place, remove, run, same_bits

from heliograph_backends.contract import Abort, DeviceCompileOptions, LeafBindings
from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cpu.plan import CpuPlan
from heliograph_backends.planning.fusion import MAX_NODES
from heliograph_proto.errors import InvalidArgumentError

UNARY = (
    "abs", "sgn", "neg", "step", "tanh", "elu", "relu", "sigmoid", "gelu", "gelu_quick", "silu",
    "hardswish", "hardsigmoid", "exp", "gelu_erf", "floor", "ceil", "round", "trunc", "softplus", "expm1",
    "sqr", "sqrt", "rsqrt", "log", "erf",
)  # fmt: skip
GATED = ("reglu", "geglu", "swiglu", "geglu_erf", "geglu_quick", "swiglu_clamp", "swiglu_oai")


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    with nothing_left(CpuDevice(threads=3, memory_bytes=2**28)) as made:
        yield made


def layer(random: np.random.Generator) -> Maker:
    """Enough work for several threads."""
    made = Maker()
    x = made.input(random.standard_normal((300, 256), np.float32))
    w = made.weight(random.standard_normal((256, 512), np.float32) / 16)
    made.output(made.node("soft_max", made.node("swiglu", made.node("matmul", x, w))))
    return made


def halves(op: str, random: np.random.Generator, *, swap: bool) -> Maker:
    """A gated unit of one operand, in a chain with what comes behind it."""
    made = Maker()
    x = made.input(2 * random.standard_normal((7, 5, 66), np.float32))
    y = made.input(random.standard_normal((33,), np.float32))
    limit = {"limit": 1.5} if op == "swiglu_clamp" else {}
    gated = made.node(op, x, swap=swap, **limit)
    made.output(made.node("add", made.node("mul", gated, y), y))
    return made


# Native steps


def test_unary_ops_of_f32_share_one_native_program(device: CpuDevice, random: np.random.Generator) -> None:
    made = Maker()
    x = made.input(random.standard_normal((3, 70), np.float32))
    made.output(*(made.node(op, x) for op in UNARY))
    with loaded(device, made) as it:
        assert isinstance(it.plan, CpuPlan)
        assert [step.count for step in it.plan._steps] == [len(UNARY)]


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("op", GATED)
def test_gated_units_of_halves_are_as_defined_fused_and_unfused(
    op: str, swap: bool, device: CpuDevice, definition: CpuDevice, random: np.random.Generator
) -> None:
    made = halves(op, random, swap=swap)
    (fused,), (unfused,) = run(device, made), run(device, made, fusion=False)
    assert same_bits(fused, unfused)
    assert normalised_error(fused, run(definition, made)[0]) < 1e-12
    with loaded(device, made) as it:
        assert it.plan.steps == 1


def test_a_gated_unit_follows_the_product_that_it_gates(
    device: CpuDevice, random: np.random.Generator
) -> None:
    made = Maker()
    x = made.input(random.standard_normal((40, 64), np.float32))
    gate, up = (made.weight(random.standard_normal((64, 96), np.float32) / 8) for _ in range(2))
    made.output(made.node("swiglu", made.node("matmul", x, gate), made.node("matmul", x, up)))
    with loaded(device, made) as it:
        assert it.plan.steps == 2
    assert same_bits(*run(device, made), *run(device, made, fusion=False))


def test_the_longest_chain_of_gated_units_is_one_step(
    device: CpuDevice, definition: CpuDevice, random: np.random.Generator
) -> None:
    """Each is seven instructions; their registers are used again."""
    made = Maker()
    x = made.input(random.standard_normal((4, 50), np.float32))
    for number in range(MAX_NODES):
        gate = made.input(random.standard_normal((4, 50), np.float32))
        x = made.node("swiglu_oai", x, gate, limit=1.0 + number, alpha=1.0 + number / 8)
    made.output(x)
    (fused,), (unfused,) = run(device, made), run(device, made, fusion=False)
    assert same_bits(fused, unfused)
    assert normalised_error(fused, run(definition, made)[0]) < 1e-10
    with loaded(device, made) as it:
        assert it.plan.steps == 1


ROPES = (
    ({"mode": 0, "n_dims": 16}, False),
    ({"mode": 2, "n_dims": 16, "freq_base": 500.0}, True),
    ({"mode": 2, "n_dims": 10, "offset": 4, "freq_scale": 0.25}, False),
    ({"mode": 0, "n_dims": 12, "ext_factor": 1.0, "n_ctx_orig": 64, "freq_scale": 0.5}, True),
)


def turned(
    attributes: dict[str, object], x: np.ndarray, positions: np.ndarray, *factors: np.ndarray
) -> Maker:
    """A rope between two elementwise ops."""
    made = Maker()
    operands = [made.input(each) for each in (positions, *factors)]
    scaled = made.node("scale", made.input(x), scale=0.5, bias=0.0)
    made.output(made.node("neg", made.node("rope", scaled, *operands, **attributes)))
    return made


@pytest.mark.parametrize(("attributes", "with_factors"), ROPES)
def test_rotary_embedding_is_as_defined_and_stays_in_the_program(
    attributes: dict[str, object],
    with_factors: bool,
    device: CpuDevice,
    definition: CpuDevice,
    random: np.random.Generator,
) -> None:
    x = random.standard_normal((2, 9, 3, 16), np.float32)
    positions = random.integers(0, 4000, 9, np.int32)
    factors = [random.uniform(0.5, 2.0, 8).astype(np.float32)] * with_factors
    made = turned(attributes, x, positions, *factors)
    (found,) = run(device, made)
    assert normalised_error(found, run(definition, made)[0]) < 1e-12
    with loaded(device, made) as it:
        assert isinstance(it.plan, CpuPlan)
        assert [step.count for step in it.plan._steps] == [3]
    alone = turned(attributes, x[:, 4:5], positions[4:5], *factors)
    assert same_bits(run(device, alone)[0], np.ascontiguousarray(found[:, 4:5]))


def test_rotary_embedding_takes_slices_of_rows(
    device: CpuDevice, definition: CpuDevice, random: np.random.Generator
) -> None:
    """As where one product makes queries, keys and values: heads lie side by side, tokens do
    not."""
    made = Maker()
    x = made.input(random.standard_normal((7, 8, 16), np.float32))
    part = made.node("slice", x, start=(0, 2, 0), stop=(7, 6, 16), step=(1, 1, 1))
    positions = made.input(np.arange(7, dtype=np.int32))
    made.output(made.node("rope", part, positions, n_dims=16, mode=2))
    assert normalised_error(run(device, made)[0], run(definition, made)[0]) < 1e-12


# Threads


@pytest.mark.parametrize("threads", [0, 1, 2, 3, 9])
def test_a_plan_runs_on_no_more_threads_than_it_was_compiled_for(
    threads: int, device: CpuDevice, random: np.random.Generator
) -> None:
    """Each helper that takes part has a block of scratch."""
    made = layer(random)
    tensors = [place(device, array) for array in made.arrays]
    bindings = LeafBindings({1: tensors[1]}, {})
    plan = device.compile(made.graph(), bindings, DeviceCompileOptions(threads=threads))
    type = made.type(made.outputs[0])
    output = place(device, np.zeros(type.shape, np.float32))
    for _ in range(3):
        plan.compute([tensors[0]], [output], Abort())
    assert isinstance(plan, CpuPlan)
    assert len(plan.scratch.addresses) == 1
    assert len(device._workers.scratch.addresses) == min(threads or 3, 3) - 1
    plan.free()
    for tensor in tensors:
        remove(tensor)
    (expected,) = run(device, made)
    assert same_bits(remove(output), expected)


def test_a_device_can_have_another_number_of_threads_while_plans_exist(
    device: CpuDevice, random: np.random.Generator
) -> None:
    before = threading.active_count()
    with loaded(device, layer(random)) as it:
        (expected,) = it.run()
        assert expected is not None
        for count in (1, 4, 2):
            device.set_threads(count)
            named = "1 thread" if count == 1 else f"{count} threads"
            assert device.threads == count and device.description.endswith(named)
            assert threading.active_count() == before + count - 3
            (found,) = it.run()
            assert found is not None and same_bits(found, expected)


def test_threads_change_between_the_programs_of_runs_in_progress(
    device: CpuDevice, random: np.random.Generator
) -> None:
    with loaded(device, layer(random)) as it:
        (expected,) = it.run()
        assert expected is not None
        changer = threading.Thread(target=lambda: [device.set_threads(1 + n % 4) for n in range(40)])
        changer.start()
        while changer.is_alive():
            (found,) = it.run()
            assert found is not None and same_bits(found, expected)
        changer.join()


@pytest.mark.parametrize("count", [-1, 10**6])
def test_a_number_of_threads_that_makes_no_sense_is_refused(count: int, device: CpuDevice) -> None:
    with pytest.raises(InvalidArgumentError, match="threads"):
        device.set_threads(count)
    assert device.threads == 3
