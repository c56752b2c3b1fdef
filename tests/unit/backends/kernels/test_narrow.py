"""Elementwise ops and gated units on f16 and bf16 on kernels, however their operands lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_graphs import Array, Loaded, Maker
from kernel_runs import over
from kernel_runs import run as run_program
from narrow_views import ENDS, LENGTHS, NARROW, SPECIAL, WAYS, Devices, Operands, stored

from heliograph_backends.cpu.kernels import (
    Elementwise,
    Input,
    Instruction,
    Operand,
    Operation,
    ProgramBuilder,
    WorkerPool,
)
from heliograph_backends.cpu.kernels.program.elements import BRAIN, HALF
from heliograph_backends.cpu.kernels.program.words import BINARY, TRANSCENDENTAL
from heliograph_backends.cpu.lowering.elementwise import ELEMENTWISE, GATED, INSTRUCTIONS
from heliograph_backends.cpu.plan import CpuPlan

#: Ops that compute in f32 as the definition does, and so have its bits once they are rounded.
EXACT = sorted({"reglu", *(op for op, own in INSTRUCTIONS.items() if own not in TRANSCENDENTAL)})
CLOSE = sorted(ELEMENTWISE - set(EXACT))
MIXED = ("add", "sub", "mul", "div")
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "scale": {"scale": 1.7, "bias": -0.3},
    "clamp": {"min": -0.7, "max": 1.1},
    "leaky_relu": {"slope": 0.1},
    "swiglu_clamp": {"limit": 1.5},
    "swiglu_oai": {"limit": 1.5, "alpha": 1.702},
}
FORMS = {"f16": HALF, "bf16": BRAIN}


def results(operands: Operands, op: str, name: str, way: str, shape: tuple[int, ...]) -> list[int]:
    """Values of an op over operands of this result's shape, the first of which lies so."""
    node, attributes = operands.made.node, ATTRIBUTES.get(op, {})
    if op in GATED:
        rows = operands.view(way, name, *shape[:-1], 2 * shape[-1])
        pair = operands.view(way, name, *shape), operands.any_view(name, *shape)
        return [node(op, *pair, swap=True, **attributes), node(op, rows, swap=False, **attributes)]
    if INSTRUCTIONS[op] not in BINARY:
        return [node(op, operands.view(way, name, *shape), **attributes)]
    if op == "relu_back":
        return [node(op, operands.view(way, name, *shape), operands.any_view(name, *shape))]
    some = tuple(int(operands.random.choice([1, size])) for size in shape)
    other = some[int(operands.random.integers(0, len(shape))) :]
    x, second = operands.view(way, name, *shape), operands.any_view(name, *other)
    found = [node(op, x, second), node(op, second, x)]
    return [*found, node(op, x, operands.any_view("f32", *other))] if op in MIXED else found


def check(devices: Devices, made: Maker, op: str, *, shared: bool = False) -> None:
    (devices.check_exactly if op in EXACT else devices.check_closely)(made, shared=shared)


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("op", sorted(ELEMENTWISE))
def test_ops_read_any_view(op: str, name: str, devices: Devices, random: np.random.Generator) -> None:
    made = Maker()
    # An infinity times what is nearly nothing is nothing or NaN, as the last bit has it.
    operands = Operands(made, random, ENDS if op in EXACT else SPECIAL)
    for dimensions in range(1, 7):
        for way in WAYS:
            shape = operands.shape(dimensions, int(random.choice([1, 2, 15, 16, 17, 40, 97])))
            made.output(*results(operands, op, name, way, shape))
    check(devices, made, op)


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("op", ["neg", "add", "reglu", "exp", "swiglu"])
def test_ops_end_where_rows_do(op: str, name: str, devices: Devices, random: np.random.Generator) -> None:
    made = Maker()
    operands = Operands(made, random, SPECIAL)
    for columns in LENGTHS:
        for way in ("whole", "sliced", "behind"):
            made.output(*results(operands, op, name, way, (3, columns)))
    check(devices, made, op)


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("op", ["neg", "mul", "reglu", "log", "swiglu_oai"])
def test_threads_share_ops_and_change_no_bits(
    op: str, name: str, devices: Devices, random: np.random.Generator
) -> None:
    """Rows of several chunks, and chunks of several rows."""
    made = Maker()
    operands = Operands(made, random, SPECIAL)
    for shape in ((3, 17, 1301), (1301, 3, 17)):
        for way in ("sliced", "turned"):
            made.output(*results(operands, op, name, way, shape))
    check(devices, made, op, shared=True)


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("shape", [(3000, 16), (70, 95), (70, 96), (9, 1023), (9, 1025), (2, 40_000)])
def test_rows_columns_and_single_elements_repeat(
    shape: tuple[int, int], name: str, devices: Devices, random: np.random.Generator
) -> None:
    """In chunks of any form, where elements may be staged once for several chunks."""
    made = Maker()
    operands = Operands(made, random, SPECIAL)
    rows, columns = shape
    for x in (operands.leaf(name, *shape), operands.view("sliced", name, *shape)):
        for other in ((columns,), (rows, 1), (1, 1), ()):
            for form in (name, "f32"):
                made.output(made.node("mul", x, operands.leaf(form, *other)))
    stretched = made.node("add", operands.leaf(name, rows, 1), operands.leaf(name, columns))
    made.output(stretched, made.node("sqr", operands.view("repeated", name, *shape)))
    devices.check_exactly(made)


@pytest.mark.parametrize("name", NARROW)
def test_a_chain_takes_over_memory_and_rounds_after_each_op(
    name: str, devices: Devices, random: np.random.Generator
) -> None:
    made = Maker()
    operands = Operands(made, random, SPECIAL)
    first = made.node("sqr", operands.view("sliced", name, 7, 333))
    value = made.node("add", first, operands.any_view("f32", 333))
    value = made.node("sub", made.node("sqrt", value), operands.any_view(name, 7, 1))
    last = made.node("mul", value, value)
    made.output(made.node("concat", last, last, axis=0))
    with_one = Loaded(devices.with_kernels[0], made)
    assert isinstance(with_one.plan, CpuPlan)
    regions = with_one.plan.storage.regions
    assert regions[made.number(first)] == regions[made.number(last)]
    with_one.free()
    devices.check_exactly(made)


@pytest.mark.parametrize("name", NARROW)
def test_a_variable_is_computed_in_its_own_memory(
    name: str, devices: Devices, random: np.random.Generator
) -> None:
    made = Maker()
    operands = Operands(made, random, SPECIAL)
    start = stored(random.standard_normal((5, 70), np.float32), name)
    kept = made.variable(start, "bf16" if name == "bf16" else "")
    written = made.node("assign", kept, made.node("add", kept, operands.view("turned", name, 5, 70)))
    made.output(made.node("cont", written))
    devices.check_exactly(made)


def test_scalars_are_computed(devices: Devices, random: np.random.Generator) -> None:
    made = Maker()
    operands = Operands(made, random)
    for name in NARROW:
        made.output(made.node("neg", operands.leaf(name)))
        made.output(made.node("add", operands.leaf(name), operands.leaf(name, 1, 1)))
    devices.check_exactly(made)


# The kernels themselves: strides that no graph has


def negated(x: Array, target: Array, name: str, pool: WorkerPool | None = None) -> None:
    """One step that writes -x into the target; both hold 16 bits an element."""
    builder = ProgramBuilder()
    body = Elementwise(
        (over(0, x), over(1, target)),
        (Instruction(Operation.NEG, Input(1), (Input(0),)),),
        (FORMS[name],) * 2,
    )
    builder.elementwise(x.shape, body)
    run_program(builder, [x, target], pool)


@pytest.mark.parametrize("name", NARROW)
def test_rows_lie_backwards_and_results_between_others(name: str, random: np.random.Generator) -> None:
    given = stored(random.standard_normal((6, 40, 67), np.float32), name).view(np.uint16)
    memory = np.full((23, 80, 6), 0xABCD, np.uint16)
    x, target = given[::-1, ::-2, ::-3], memory[:, 1::4].T
    negated(x, target, name)
    assert np.array_equal(target, x ^ np.uint16(0x8000))
    memory[:, 1::4] = 0xABCD
    assert (memory == 0xABCD).all()


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("start", [0, 1, 31])
def test_memory_is_negated_in_place_from_any_start(
    name: str, start: int, random: np.random.Generator
) -> None:
    for size in (*LENGTHS, 1023, 1025, 70_001):
        whole = stored(random.standard_normal(start + size + 40, np.float32), name).view(np.uint16)
        before = whole.copy()
        x = whole[start : start + size]
        with WorkerPool(2) as pool:
            negated(x, x, name, pool)
        before[start : start + size] ^= 0x8000
        assert np.array_equal(whole, before)


@pytest.mark.parametrize("name", NARROW)
def test_one_element_fills_a_block(name: str, random: np.random.Generator) -> None:
    """Strides of 0 along rows, along columns, and along both, at the last bytes of an array."""
    given = stored(random.standard_normal(50, np.float32), name).view(np.uint16)
    for shape, strides in (((50, 33), (2, 0)), ((33, 50), (0, 2)), ((50, 33), (0, 0)), ((50, 1), (2, 0))):
        target = np.zeros(shape, np.uint16)
        builder = ProgramBuilder()
        operands = Operand(0, 0, strides), over(1, target)
        instruction = Instruction(Operation.NEG, Input(1), (Input(0),))
        builder.elementwise(shape, Elementwise(operands, (instruction,), (FORMS[name],) * 2))
        run_program(builder, [given, target])
        expected = np.lib.stride_tricks.as_strided(given, shape, strides) ^ np.uint16(0x8000)
        assert np.array_equal(target, expected)
