"""The CPU kernels, elementwise: values against float64, and bits that depend on the inputs
alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_runs import (
    Array,
    apply,
    nmse,
    normal,
    over,
    run,
    same_bits,
    ulps,
)

import heliograph as hg
from heliograph_backends.cpu.kernels import (
    Elementwise,
    Input,
    Instruction,
    Operand,
    Operation,
    ProgramBuilder,
    Register,
    WorkerPool,
)
from heliograph_backends.cpu.kernels.program.tiles import STREAM_BYTES, coalesce, with_long_rows
from heliograph_backends.cpu.kernels.program.words import BINARY, TYPED

Op = Operation
erf64 = np.vectorize(math.erf, otypes=[np.float64])
# Elementwise instructions

EXACT: dict[Operation, Callable[..., Any]] = {
    Op.COPY: lambda x: x,
    Op.ADD: np.add,
    Op.SUB: np.subtract,
    Op.MUL: np.multiply,
    Op.DIV: np.divide,
    Op.MAXIMUM: np.maximum,
    Op.MINIMUM: np.minimum,
    Op.NEG: np.negative,
    Op.ABS: np.abs,
    Op.SQRT: np.sqrt,
    Op.RSQRT: lambda x: np.float32(1) / np.sqrt(x),
    Op.SQUARE: np.square,
    Op.RELU: lambda x: np.maximum(x, np.float32(0)),
    Op.SGN: np.sign,
    Op.STEP: lambda x: (x > 0).astype(np.float32),
    Op.FLOOR: np.floor,
    Op.CEIL: np.ceil,
    Op.ROUND: np.rint,
    Op.TRUNC: np.trunc,
    Op.HARDSIGMOID: lambda x: np.clip(x + np.float32(3), np.float32(0), np.float32(6)) / np.float32(6),
    Op.HARDSWISH: lambda x: x * EXACT[Op.HARDSIGMOID](x),
    Op.COPYSIGN: np.copysign,
    Op.RELU_BACK: lambda x, y: np.where(y <= 0, np.float32(0), x),
}
FUNCTIONS: dict[Operation, tuple[Callable[..., Any], float]] = {
    Op.EXP: (np.exp, 0.9),
    Op.EXPM1: (np.expm1, 2.0),
    Op.ELU: (lambda x: np.where(x > 0, x, np.expm1(x)), 2.0),
    Op.LOG: (np.log, 1.0),
    Op.ERF: (erf64, 0.9),
    Op.TANH: (np.tanh, 1.5),
    Op.SIGMOID: (lambda x: 1 / (1 + np.exp(-x)), 2.5),
    Op.SOFTPLUS: (lambda x: np.logaddexp(x, 0), 4.0),
}
COMPOSITES: dict[Operation, Callable[..., Any]] = {
    Op.GELU_ERF: lambda x: 0.5 * x * (1 + erf64(x / math.sqrt(2))),
    Op.GELU: lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    Op.GELU_QUICK: lambda x: x / (1 + np.exp(-1.702 * x)),
    Op.SILU: lambda x: x / (1 + np.exp(-x)),
}
IMMEDIATE = {Op.SCALE_BIAS, Op.CLAMP, Op.LEAKY_RELU}
SPECIAL = np.array(
    [
        0.0,
        -0.0,
        1.0,
        -1.0,
        np.inf,
        -np.inf,
        np.nan,
        1e-45,
        -1e-45,
        1e-39,
        3e38,
        -3e38,
        88.7,
        89.0,
        -103.9,
    ],
    dtype=np.float32,
)


def test_every_operation_is_tested() -> None:
    """Those of integers are in the tests of typed nodes."""
    assert {*EXACT, *FUNCTIONS, *COMPOSITES, *IMMEDIATE} == set(Operation) - TYPED


@pytest.mark.parametrize("operation", EXACT)
def test_ieee_operations_equal_numpy_bit_for_bit(operation: Operation, random: np.random.Generator) -> None:
    arity = 2 if operation in BINARY else 1
    sources = [np.concatenate([normal(random, 3001), random.permutation(SPECIAL)]) for _ in range(arity)]
    with np.errstate(all="ignore"):
        expected = EXACT[operation](*sources)
    assert np.array_equal(apply(operation, *sources), expected, equal_nan=True)


@pytest.mark.parametrize("operation", FUNCTIONS)
def test_functions_are_within_their_bound_over_all_magnitudes(operation: Operation) -> None:
    function, bound = FUNCTIONS[operation]
    patterns = np.arange(0, 2**32, 16411, dtype=np.uint64).astype(np.uint32)
    dense = np.linspace(-20, 20, 200_001, dtype=np.float32)
    # Where formulas change: the neighbours of whole and half numbers.
    edges = np.arange(0.5, 20, 0.5, dtype=np.float32).view(np.int32)[:, None] + np.arange(
        -40, 41, dtype=np.int32
    )
    near = edges.view(np.float32).ravel()
    points = np.concatenate([patterns.view(np.float32), dense, near, -near, SPECIAL])
    with np.errstate(all="ignore"):
        reference = function(points.astype(np.float64))
        # 1 / (1 + exp(-x)) in float32 is zero where the reference is about to be a denormal.
        normal_range = (
            ~(np.abs(reference) < 1.2e-38) if operation is Op.SIGMOID else np.full(points.shape, True)
        )
    found = apply(operation, points)
    assert ulps(found[normal_range], reference[normal_range]) <= bound
    zeros = points == 0
    assert np.array_equal(np.signbit(found[zeros]), np.signbit(reference[zeros])), "-0 is not 0"


@pytest.mark.parametrize("operation", COMPOSITES)
def test_activations_are_close_to_float64(operation: Operation, random: np.random.Generator) -> None:
    x = 4 * normal(random, 20_000)
    assert nmse(apply(operation, x), COMPOSITES[operation](x.astype(np.float64))) <= 1e-13


@pytest.mark.parametrize("operation", [*FUNCTIONS, *COMPOSITES])
def test_nan_stays_nan(operation: Operation) -> None:
    assert np.isnan(apply(operation, np.full(37, np.nan, np.float32))).all()


def test_operations_with_immediates_equal_numpy_and_clamp_passes_nan(random: np.random.Generator) -> None:
    x = normal(random, 1000)
    scaled = x * np.float32(1.7) + np.float32(0.3)
    assert same_bits(apply(Op.SCALE_BIAS, x, immediates=(1.7, 0.3)), scaled)
    assert same_bits(apply(Op.CLAMP, x, immediates=(-0.5, 0.5)), np.clip(x, -0.5, 0.5))
    leaky = np.where(x > 0, x, x * np.float32(0.01))
    assert same_bits(apply(Op.LEAKY_RELU, x, immediates=(0.01,)), leaky)
    assert np.isnan(apply(Op.CLAMP, np.full(3, np.nan, np.float32), immediates=(0.0, 1.0))).all()


# Iteration spaces


def strided_cases(random: np.random.Generator) -> list[tuple[Array, Array]]:
    base = normal(random, 6, 5, 40, 33)
    return [
        (base, normal(random, 33)),
        (base.transpose(3, 1, 0, 2), normal(random, 5, 1, 1)),
        (base[::2, ::-1, 3:, ::3], normal(random, 37, 1)),
        (normal(random, 500, 16), normal(random, 16)),
        (normal(random, 16, 500).T, normal(random, 500, 1)),
        (normal(random, 70_000), normal(random, 1)),
        (normal(random, 3, 70_000)[:, ::2], normal(random, 3, 1)),
        (
            normal(random, 2, 3, 2, 3, 2, 3, 2, 3).transpose(1, 0, 3, 2, 5, 4, 7, 6),
            normal(random, 2),
        ),
        (normal(random, 1, 1, 1), normal(random, 1)),
        (normal(random, 4, 0, 3), normal(random, 3)),
        (np.array(2.5, np.float32), np.array(0.5, np.float32)),
    ]


def test_operands_broadcast_and_stride_as_in_numpy(random: np.random.Generator) -> None:
    for x, y in strided_cases(random):
        assert same_bits(apply(Op.SUB, x, y), x - y), (x.shape, x.strides)


def test_results_may_be_strided(random: np.random.Generator) -> None:
    x, target = normal(random, 30, 20, 10), np.zeros((10, 40, 30), np.float32)
    view = target[:, ::2].transpose(2, 1, 0)
    builder = ProgramBuilder()
    body = Elementwise((over(0, x), over(1, view)), (Instruction(Op.NEG, Input(1), (Input(0),)),))
    builder.elementwise(x.shape, body)
    run(builder, [x, target])
    assert np.array_equal(view, -x) and not target[:, 1::2].any()


def test_an_operation_may_run_in_place(random: np.random.Generator) -> None:
    x = normal(random, 5003)
    expected = apply(Op.EXP, x)
    builder = ProgramBuilder()
    builder.elementwise(x.shape, Elementwise((over(0, x),), (Instruction(Op.EXP, Input(0), (Input(0),)),)))
    run(builder, [x])
    assert same_bits(x, expected)


@pytest.mark.parametrize("operation", [*FUNCTIONS, *COMPOSITES])
def test_an_element_has_the_bits_it_has_alone(operation: Operation, random: np.random.Generator) -> None:
    x = np.abs(normal(random, 70_001))
    whole = apply(operation, x)
    for start, stop in ((0, 1), (1023, 1025), (32_767, 32_769), (69_990, 70_001), (17, 5000)):
        assert same_bits(apply(operation, x[start:stop]), whole[start:stop])


def test_constants_that_compare_equal_stay_apart() -> None:
    target = np.empty((2, 5), np.float32)
    parts = [Operand(0, 20 * number, (4,)) for number in range(2)]
    body = Elementwise(
        tuple(parts), (Instruction(Op.COPY, Input(0), (0.0,)), Instruction(Op.COPY, Input(1), (-0.0,)))
    )
    builder = ProgramBuilder()
    builder.elementwise((5,), body)
    run(builder, [target])
    assert np.signbit(target).tolist() == [[False] * 5, [True] * 5]


def test_merging_axes_keeps_the_walk() -> None:
    assert coalesce((4, 1, 5, 6), [(120, 7, 24, 4), (0, 0, 0, 4)]) == ((20, 6), [(24, 4), (0, 4)])


def test_short_rows_are_walked_along_longer_axes() -> None:
    strides = [(36, 4, 18, 2, 1), (36, 9, 1, 0, 3)]
    found = with_long_rows((32, 9, 2, 9, 2), strides)
    assert found == ((32, 2, 2, 9, 9), [(36, 18, 1, 4, 2), (36, 1, 3, 9, 0)])
    for plain in ((32, 2, 9, 8), (2, 2), (2, 3, 2, 2)):
        strides = [tuple(range(len(plain)))]
        assert with_long_rows(plain, strides) == (plain, strides)


@pytest.mark.parametrize(
    "order",
    [(0, 1, 2, 4, 3, 5), (0, 4, 2, 1, 3, 5), (5, 4, 3, 2, 1, 0), (3, 5, 0, 1, 2, 4)],
)
def test_elements_of_short_rows_reach_their_places(
    order: tuple[int, ...], random: np.random.Generator
) -> None:
    shape = (3, 9, 2, 11, 2, 2)
    x, bias = normal(random, math.prod(shape)).reshape(shape), normal(random, shape[order[0]])
    graph = hg.Graph()
    moved = hg.permute_dims(graph.input("x", shape, "f32"), order)
    graph.output("copy", hg.ops.cont(moved))
    sizes = (-1, *(1,) * (len(shape) - 1))
    graph.output("sum", hg.exp(moved + hg.reshape(graph.input("b", bias.shape, "f32"), sizes)))
    with hg.connect("local:") as session:
        found = session.compute(graph, x=x, b=bias)
        assert np.array_equal(found["copy"], x.transpose(order))
        plain = hg.Graph()
        plain.output("sum", hg.exp(plain.input("x", (x.size,), "f32")))
        wanted = session.compute(plain, x=(x.transpose(order) + bias.reshape(sizes)).ravel())["sum"]
    assert np.array_equal(found["sum"].ravel(), wanted)


def chain() -> tuple[Instruction, ...]:
    """y0 = gelu_erf(x + b); y1 = (y0 * x) * 1.3 + tanh(y0)."""
    r = [Register(number) for number in range(3)]
    return (
        Instruction(Op.ADD, r[0], (Input(0), Input(1))),
        Instruction(Op.GELU_ERF, Input(2), (r[0],)),
        Instruction(Op.MUL, r[1], (Input(2), Input(0))),
        Instruction(Op.MUL, r[1], (r[1], 1.3)),
        Instruction(Op.TANH, r[2], (Input(2),)),
        Instruction(Op.ADD, Input(3), (r[1], r[2])),
    )


def test_a_fused_chain_has_the_bits_of_its_parts(random: np.random.Generator) -> None:
    for shape in ((300, 16), (7, 1500), (70_001,)):
        x, bias = normal(random, *shape), normal(random, shape[-1])
        first, second = np.empty_like(x), np.empty_like(x)
        arrays = [x, bias, first, second]
        builder = ProgramBuilder()
        builder.elementwise(shape, Elementwise(tuple(over(*each) for each in enumerate(arrays)), chain()))
        run(builder, arrays)
        gelu = apply(Op.GELU_ERF, apply(Op.ADD, x, bias))
        scaled = apply(Op.MUL, apply(Op.MUL, gelu, x), np.full(x.shape, 1.3, np.float32))
        assert same_bits(first, gelu)
        assert same_bits(second, apply(Op.ADD, scaled, apply(Op.TANH, gelu)))


# Results that go past the caches


def large(random: np.random.Generator, elements: int, first: int = 0) -> Array:
    """Return a large array whose address is `first` elements behind a multiple of 64 bytes."""
    raw = np.empty(elements + 16 + first, np.float32)
    start = -raw.ctypes.data % 64 // 4 + first
    return random.standard_normal(out=raw, dtype=np.float32)[start : start + elements]


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("operation", [Op.ADD, Op.GELU_ERF])
def test_large_results_have_the_bits_of_small_ones(
    operation: Operation, first: int, random: np.random.Generator
) -> None:
    x, target = (large(random, STREAM_BYTES // 4 + 1000, first) for _ in range(2))
    sources = (Input(0), Input(0)) if operation is Op.ADD else (Input(0),)
    builder = ProgramBuilder()
    operands = (over(0, x), over(1, target))
    builder.elementwise(x.shape, Elementwise(operands, (Instruction(operation, Input(1), sources),)))
    with WorkerPool(2) as pool:
        run(builder, [x, target], pool)
    arguments = (x, x) if operation is Op.ADD else (x,)
    step = 1_000_003
    for start in range(0, x.size, step):
        part = apply(operation, *(each[start : start + step] for each in arguments))
        assert same_bits(target[start : start + step], part)


def test_a_large_result_may_overwrite_its_source(random: np.random.Generator) -> None:
    x = large(random, STREAM_BYTES // 4)
    expected = np.concatenate([apply(Op.SQUARE, part) for part in np.array_split(x, 3)])
    builder = ProgramBuilder()
    operands = (over(0, x), over(1, x))
    builder.elementwise(x.shape, Elementwise(operands, (Instruction(Op.SQUARE, Input(1), (Input(0),)),)))
    run(builder, [x, x])
    assert same_bits(x, expected)
