"""The CPU kernels: values against float64, and bits that depend on nothing but the inputs."""

from __future__ import annotations

import math
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from heliograph_backends.cpu.kernels import (
    BoundProgram,
    Elementwise,
    Input,
    Instruction,
    Operand,
    Operation,
    PackedOperand,
    ProgramBuilder,
    Refusal,
    Register,
    Status,
    WorkerPool,
    available,
    pack_weight,
    warmup,
)
from heliograph_backends.cpu.kernels.geometry import coalesce
from heliograph_backends.cpu.kernels.native import open_cache

if not available():
    pytest.skip("numba is not installed", allow_module_level=True)

SEED = 20240521
Array = NDArray[np.float32]
Op = Operation
erf64 = np.vectorize(math.erf, otypes=[np.float64])


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile or load once, so that no test's time contains it."""
    warmup()


@pytest.fixture
def random() -> np.random.Generator:
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


@pytest.fixture(scope="module")
def pools() -> Iterator[list[WorkerPool | None]]:
    """No pool, then pools of two and three threads."""
    two, three = WorkerPool(2), WorkerPool(3)
    yield [None, two, three]
    two.close()
    three.close()


def normal(random: np.random.Generator, *shape: int) -> Array:
    return random.standard_normal(shape, dtype=np.float32)


def over(slot: int, array: Array) -> Operand:
    """Return the operand that is all of `array`."""
    return Operand(slot, 0, array.strides)


def addresses(arrays: Sequence[Any]) -> list[int]:
    return [each.address if hasattr(each, "address") else each.ctypes.data for each in arrays]


def run(builder: ProgramBuilder, arrays: Sequence[Any], pool: WorkerPool | None = None) -> None:
    assert builder.build().bind(addresses(arrays)).run(pool) is Status.OK


def same_bits(first: Array, second: Array) -> bool:
    return first.tobytes() == second.tobytes()


def nmse(value: Array, reference: NDArray[np.float64]) -> float:
    return float(((value - reference) ** 2).sum() / max(float((reference**2).sum()), 1e-300))


def ulps(value: Array, reference: NDArray[np.float64]) -> float:
    """Return the largest error in units of the rounded reference's last place."""
    with np.errstate(over="ignore"):
        rounded = reference.astype(np.float32)
    finite = np.isfinite(rounded)
    assert np.array_equal(value[~finite], rounded[~finite], equal_nan=True)
    spacing = np.spacing(np.abs(rounded[finite])).astype(np.float64)
    return float((np.abs(value[finite] - reference[finite]) / spacing).max(initial=0.0))


def apply(operation: Operation, *sources: Array, immediates: tuple[float, ...] = ()) -> Array:
    """Run one instruction over arrays of one shape."""
    result = np.empty(np.broadcast_shapes(*(each.shape for each in sources)), np.float32)
    arrays = [*(np.broadcast_to(each, result.shape) for each in sources), result]
    inputs = tuple(Input(number) for number in range(len(sources)))
    instruction = Instruction(operation, Input(len(sources)), inputs, immediates)
    operands = tuple(over(slot, array) for slot, array in enumerate(arrays))
    builder = ProgramBuilder()
    builder.elementwise(result.shape, Elementwise(operands, (instruction,)))
    run(builder, arrays)
    return result


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
}
FUNCTIONS: dict[Operation, tuple[Callable[..., Any], float]] = {
    Op.EXP: (np.exp, 1.1),
    Op.LOG: (np.log, 1.0),
    Op.ERF: (erf64, 1.0),
    Op.TANH: (np.tanh, 1.5),
    Op.SIGMOID: (lambda x: 1 / (1 + np.exp(-x)), 2.5),
}
COMPOSITES: dict[Operation, Callable[..., Any]] = {
    Op.GELU_ERF: lambda x: 0.5 * x * (1 + erf64(x / math.sqrt(2))),
    Op.GELU: lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    Op.GELU_QUICK: lambda x: x / (1 + np.exp(-1.702 * x)),
    Op.SILU: lambda x: x / (1 + np.exp(-x)),
}
IMMEDIATE = {Op.SCALE_BIAS, Op.CLAMP}
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
    assert {*EXACT, *FUNCTIONS, *COMPOSITES, *IMMEDIATE} == set(Operation)


@pytest.mark.parametrize("operation", EXACT)
def test_ieee_operations_equal_numpy_bit_for_bit(operation: Operation, random: np.random.Generator) -> None:
    arity = 2 if operation in {Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.MAXIMUM, Op.MINIMUM} else 1
    sources = [np.concatenate([normal(random, 3001), random.permutation(SPECIAL)]) for _ in range(arity)]
    with np.errstate(all="ignore"):
        expected = EXACT[operation](*sources)
    assert np.array_equal(apply(operation, *sources), expected, equal_nan=True)


@pytest.mark.parametrize("operation", FUNCTIONS)
def test_functions_are_within_their_bound_over_all_magnitudes(operation: Operation) -> None:
    function, bound = FUNCTIONS[operation]
    patterns = np.arange(0, 2**32, 16411, dtype=np.uint64).astype(np.uint32)
    dense = np.linspace(-20, 20, 200_001, dtype=np.float32)
    points = np.concatenate([patterns.view(np.float32), dense, SPECIAL])
    with np.errstate(all="ignore"):
        reference = function(points.astype(np.float64))
        # 1 / (1 + exp(-x)) in float32 is zero where the reference is about to be a denormal.
        normal_range = (
            ~(np.abs(reference) < 1.2e-38) if operation is Op.SIGMOID else np.full(points.shape, True)
        )
    assert ulps(apply(operation, points)[normal_range], reference[normal_range]) <= bound


@pytest.mark.parametrize("operation", COMPOSITES)
def test_activations_are_close_to_float64(operation: Operation, random: np.random.Generator) -> None:
    x = 4 * normal(random, 20_000)
    assert nmse(apply(operation, x), COMPOSITES[operation](x.astype(np.float64))) <= 1e-13


@pytest.mark.parametrize("operation", [*FUNCTIONS, *COMPOSITES])
def test_nan_stays_nan(operation: Operation) -> None:
    assert np.isnan(apply(operation, np.full(37, np.nan, np.float32))).all()


def test_scale_bias_rounds_twice_and_clamp_passes_nan(random: np.random.Generator) -> None:
    x = normal(random, 1000)
    scaled = x * np.float32(1.7) + np.float32(0.3)
    assert same_bits(apply(Op.SCALE_BIAS, x, immediates=(1.7, 0.3)), scaled)
    assert same_bits(apply(Op.CLAMP, x, immediates=(-0.5, 0.5)), np.clip(x, -0.5, 0.5))
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


def test_merging_axes_keeps_the_walk() -> None:
    assert coalesce((4, 1, 5, 6), [(120, 7, 24, 4), (0, 0, 0, 4)]) == ((20, 6), [(24, 4), (0, 4)])


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


# Matrix products


def multiply(
    left: Array,
    right: Array,
    packed: bool = False,
    pool: WorkerPool | None = None,
    rows: int | None = None,
) -> Array:
    """Return left @ right by one step."""
    batch = left.shape[:-2]
    product = np.full((*batch, left.shape[-2], right.shape[-1]), 7, np.float32)
    weight = pack_weight(right) if packed else right
    side = PackedOperand(1) if packed else over(1, right)
    builder = ProgramBuilder()
    builder.gemm(*product.shape[-2:], left.shape[-1], over(0, left), side, over(2, product), batch)
    run(builder, [left, weight, product], pool)
    return product


SHAPES = [
    (1, 1, 1),
    (3, 5, 7),
    (16, 64, 96),
    (13, 33, 100),
    (50, 3000, 70),
    (61, 20, 33),
    (4, 0, 3),
    (200, 70, 400),
]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_close_to_float64(
    shape: tuple[int, int, int], packed: bool, random: np.random.Generator
) -> None:
    rows, depth, columns = shape
    left, right = normal(random, rows, depth), normal(random, depth, columns)
    assert nmse(multiply(left, right, packed), left.astype(np.float64) @ right) <= 2e-12


def test_every_way_to_lay_out_the_sides_gives_the_same_bits(random: np.random.Generator) -> None:
    left, right = normal(random, 45, 83), normal(random, 83, 77)
    expected = multiply(left, right, packed=True)
    wide = np.zeros((83, 3 * 77), np.float32)
    wide[:, ::3] = right
    for other in (
        right,
        np.asfortranarray(right),
        wide[:, ::3],
        np.ascontiguousarray(right[::-1])[::-1],
    ):
        for packed in (True, False):
            assert same_bits(multiply(left, other, packed), expected)
            assert same_bits(multiply(np.asfortranarray(left), other, packed), expected)


def test_a_row_has_the_bits_it_has_alone(random: np.random.Generator) -> None:
    left, right = normal(random, 512, 200), normal(random, 200, 130)
    whole = multiply(left, right, packed=True)
    for row in (0, 11, 12, 47, 48, 300, 511):
        assert same_bits(multiply(left[row : row + 1], right, packed=True)[0], whole[row])


def test_an_element_is_one_chain_of_fused_multiply_adds(random: np.random.Generator) -> None:
    """Rounding exact sums of products in float64 emulates fma, but for rare double roundings."""
    left, right = normal(random, 9, 40), normal(random, 40, 35)
    chain = np.zeros((9, 35), np.float32)
    for k in range(40):
        chain = (chain + np.multiply.outer(left[:, k].astype(np.float64), right[k])).astype(np.float32)
    assert (multiply(left, right, packed=True) == chain).mean() > 0.99


def test_batches_broadcast_by_stride_zero(random: np.random.Generator) -> None:
    left, right = normal(random, 3, 4, 9, 32), normal(random, 3, 9, 4, 32)
    keys = right.transpose(0, 2, 3, 1)
    assert nmse(multiply(left, keys), left.astype(np.float64) @ keys) <= 1e-12
    shared = np.broadcast_to(normal(random, 32, 20), (3, 4, 32, 20))
    assert nmse(multiply(left, shared), left.astype(np.float64) @ shared) <= 1e-12
    assert same_bits(multiply(left, shared), multiply(left, np.ascontiguousarray(shared)))
    assert same_bits(multiply(left, shared[0, 0], packed=True), multiply(left, shared))


@pytest.mark.parametrize("shape", [(5, 30, 16), (130, 50, 400), (1, 700, 90)])
def test_an_epilogue_has_the_bits_of_a_separate_step(
    shape: tuple[int, int, int], random: np.random.Generator
) -> None:
    rows, depth, columns = shape
    left, bias, residual = (
        normal(random, rows, depth),
        normal(random, columns),
        normal(random, rows, columns),
    )
    weight = pack_weight(normal(random, depth, columns))
    results = []
    for fused in (True, False):
        product, extra = (
            np.empty((rows, columns), np.float32),
            np.empty((rows, columns), np.float32),
        )
        arrays = [left, weight, product, bias, residual, extra]
        operands = (over(2, product), over(3, bias), over(4, residual), over(5, extra))
        r = Register(0)
        body = Elementwise(
            operands,
            (
                Instruction(Op.ADD, r, (Input(0), Input(1))),
                Instruction(Op.GELU_ERF, r, (r,)),
                Instruction(Op.ADD, Input(0), (r, Input(2))),
                Instruction(Op.SQUARE, Input(3), (Input(0),)),
            ),
        )
        builder = ProgramBuilder()
        epilogue = body if fused else None
        builder.gemm(
            rows,
            columns,
            depth,
            over(0, left),
            PackedOperand(1),
            over(2, product),
            epilogue=epilogue,
        )
        if not fused:
            builder.elementwise((rows, columns), body)
        run(builder, arrays)
        results += [product, extra]
    assert same_bits(results[0], results[2]) and same_bits(results[1], results[3])


# Row kernels


def by_rows(method: str, x: Array, *extra: Array, **parameters: float) -> Array:
    """Run a row kernel over one source, perhaps further operands, and a new target."""
    reduces = method.endswith("_rows")
    target = np.empty(x.shape[:-1] if reduces else x.shape, np.float32)
    builder = ProgramBuilder()
    operands = [over(2 + number, each) for number, each in enumerate(extra)]
    getattr(builder, method)(x.shape, over(0, x), over(1, target), *operands, **parameters)
    run(builder, [x, target, *extra])
    return target


def soft_max64(x: NDArray[np.float64]) -> NDArray[np.float64]:
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 31, 32, 33, 47, 49, 384, 1000])
def test_row_kernels_are_close_to_float64(columns: int, random: np.random.Generator) -> None:
    x, weight, bias = (
        3 + normal(random, 4, 7, columns),
        normal(random, columns),
        normal(random, columns),
    )
    mask = normal(random, 7, columns)
    wide = x.astype(np.float64)
    deviation = wide - wide.mean(-1, keepdims=True)
    unit = deviation / np.sqrt((deviation**2).mean(-1, keepdims=True) + 1e-5)
    rms = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    pairs = [
        (by_rows("layer_norm", x, weight, bias, epsilon=1e-5), unit * weight + bias),
        (by_rows("layer_norm", x, weight, epsilon=1e-5), unit * weight),
        (by_rows("layer_norm", x, epsilon=1e-5), unit),
        (by_rows("rms_norm", x, weight, epsilon=1e-5), rms * weight),
        (by_rows("rms_norm", x, epsilon=1e-5), rms),
        (by_rows("l2_norm", x), wide / np.sqrt((wide**2).sum(-1, keepdims=True))),
        (by_rows("soft_max", x, scale=0.7), soft_max64(wide * 0.7)),
        (by_rows("soft_max", x, mask, scale=0.7), soft_max64(wide * 0.7 + mask)),
        (by_rows("sum_rows", x), wide.sum(-1)),
        (by_rows("mean_rows", x), wide.mean(-1)),
        (by_rows("max_rows", x), wide.max(-1)),
    ]
    for number, (value, reference) in enumerate(pairs):
        assert nmse(value, reference) <= 1e-12, number


def test_row_kernels_take_strided_rows(random: np.random.Generator) -> None:
    x = normal(random, 5, 6, 40)[::-1, ::2, 4:].transpose(1, 0, 2)
    assert same_bits(by_rows("soft_max", x), by_rows("soft_max", np.ascontiguousarray(x)))
    assert same_bits(by_rows("layer_norm", x), by_rows("layer_norm", np.ascontiguousarray(x)))


def test_soft_max_of_infinite_and_nan_rows_follows_its_definition() -> None:
    x = np.zeros((4, 21), np.float32)
    x[0], x[1, 20], x[2, :20], x[3, 3] = -np.inf, np.nan, -np.inf, np.inf
    result = by_rows("soft_max", x)
    assert np.isnan(result[:2]).all() and np.isnan(result[3, 3])
    assert result[2].tolist() == [0.0] * 20 + [1.0]
    assert np.isnan(by_rows("max_rows", x)).tolist() == [False, True, False, False]


def test_a_reduction_of_empty_rows_is_as_in_numpy() -> None:
    x = np.empty((3, 0), np.float32)
    assert by_rows("sum_rows", x).tolist() == [0, 0, 0]
    assert np.isnan(by_rows("mean_rows", x)).all()
    with pytest.raises(ValueError, match="empty row"):
        by_rows("max_rows", x)


def test_l2_norm_of_zeros_is_zero() -> None:
    assert not by_rows("l2_norm", np.zeros((2, 9), np.float32)).any()


# The builder refuses what the runner cannot do


def test_what_the_runner_cannot_do_is_refused() -> None:
    flat, column = Operand(0, 0, (40, 4)), Operand(0, 0, (4, 40))
    row = Operand(1, 0, (0, 4))
    builder = ProgramBuilder()
    with pytest.raises(ValueError, match="contiguous columns"):
        builder.gemm(4, 4, 4, flat, flat, column)
    with pytest.raises(ValueError, match="contiguous rows"):
        builder.soft_max((4, 10), column, flat)
    with pytest.raises(ValueError, match="broadcast axis"):
        builder.elementwise((4, 10), Elementwise((flat, row), (Instruction(Op.COPY, Input(1), (Input(0),)),)))
    with pytest.raises(ValueError, match="takes 2 sources"):
        builder.elementwise((4, 10), Elementwise((flat,), (Instruction(Op.ADD, Input(0), (Input(0),)),)))
    with pytest.raises(ValueError, match="nothing wrote"):
        builder.elementwise((4, 10), Elementwise((flat,), (Instruction(Op.NEG, Input(0), (Register(0),)),)))
    with pytest.raises(ValueError, match="slots"):
        builder.elementwise((4, 10), Elementwise((flat,), (Instruction(Op.NEG, Input(0), (Input(0),)),)))
        builder.build().bind([])


# Whole programs on workers


class Layer:
    """Product with epilogue, scores, soft_max, product, layer_norm: most steps are shared."""

    def __init__(self, random: np.random.Generator, tokens: int = 150, width: int = 192) -> None:
        self.x = normal(random, tokens, width)
        self.weight, self.bias = (
            pack_weight(normal(random, width, 2 * width)),
            normal(random, 2 * width),
        )
        self.hidden, self.scores = (
            np.empty((tokens, 2 * width), np.float32),
            np.empty((tokens, tokens), np.float32),
        )
        self.mixed, self.result = (
            np.empty((tokens, width), np.float32),
            np.empty((tokens, width), np.float32),
        )
        self.bound = self.program(tokens, width).build().bind(addresses(self.arrays))

    @property
    def arrays(self) -> list[Any]:
        return [self.x, self.weight, self.bias, self.hidden, self.scores, self.mixed, self.result]

    def program(self, tokens: int, width: int) -> ProgramBuilder:
        builder = ProgramBuilder()
        hidden = over(3, self.hidden)
        queries, keys = hidden, Operand(3, 4 * width, self.hidden.T.strides)
        activate = Instruction(Op.ADD, Register(0), (Input(0), Input(1)))
        body = Elementwise(
            (hidden, over(2, self.bias)),
            (activate, Instruction(Op.GELU_ERF, Input(0), (Register(0),))),
        )
        builder.gemm(tokens, 2 * width, width, over(0, self.x), PackedOperand(1), hidden, epilogue=body)
        builder.gemm(tokens, tokens, width, queries, keys, over(4, self.scores))
        builder.soft_max((tokens, tokens), over(4, self.scores), over(4, self.scores), scale=0.05)
        builder.gemm(tokens, width, tokens, over(4, self.scores), over(0, self.x), over(5, self.mixed))
        builder.layer_norm((tokens, width), over(5, self.mixed), over(6, self.result))
        return builder

    def run(self, pool: WorkerPool | None) -> bytes:
        for each in (self.hidden, self.scores, self.mixed, self.result):
            each.fill(np.nan)
        assert self.bound.run(pool) is Status.OK
        return self.result.tobytes()


def test_bits_do_not_depend_on_the_number_of_workers(
    random: np.random.Generator, pools: list[WorkerPool | None]
) -> None:
    layer = Layer(random)
    assert layer.bound.program.shared_steps >= 3
    expected = layer.run(None)
    assert not np.isnan(layer.result).any()
    for _ in range(30):
        for pool in pools:
            assert layer.run(pool) == expected


def test_one_program_runs_on_other_memory(random: np.random.Generator) -> None:
    x, target = normal(random, 10), np.empty(10, np.float32)
    builder = ProgramBuilder()
    body = Elementwise((over(0, x), over(1, target)), (Instruction(Op.NEG, Input(1), (Input(0),)),))
    builder.elementwise((10,), body)
    bound = builder.build().bind(addresses([x, target]))
    assert bound.run() is Status.OK
    other, elsewhere = normal(random, 10), np.empty(10, np.float32)
    bound.rebind(addresses([other, elsewhere]))
    assert bound.run() is Status.OK
    assert np.array_equal(target, -x) and np.array_equal(elsewhere, -other)


def test_an_aborted_run_says_so_and_the_next_one_can_succeed(
    random: np.random.Generator, pools: list[WorkerPool | None]
) -> None:
    layer = Layer(random)
    expected = layer.run(None)
    for pool in pools:
        layer.bound.abort()
        assert layer.bound.run(pool) is Status.ABORTED
        assert layer.bound.failed_step == 0
        layer.bound.clear_abort()
        assert layer.run(pool) == expected


def test_abort_stops_a_run_in_progress(random: np.random.Generator, pools: list[WorkerPool | None]) -> None:
    x = normal(random, 200, 256)
    weight, product, mark = (
        pack_weight(normal(random, 256, 256)),
        np.empty((200, 256), np.float32),
        np.zeros(1, np.float32),
    )
    builder = ProgramBuilder()
    count = Elementwise((over(3, mark),), (Instruction(Op.SCALE_BIAS, Input(0), (Input(0),), (1.0, 1.0)),))
    for _ in range(20_000):
        builder.elementwise((1,), count)
        builder.gemm(200, 256, 256, over(0, x), PackedOperand(1), over(2, product))
    bound = builder.build().bind(addresses([x, weight, product, mark]))
    for pool in pools:
        mark[0] = 0
        statuses: list[Status] = []
        thread = threading.Thread(target=lambda pool=pool, into=statuses: into.append(bound.run(pool)))
        thread.start()
        while mark[0] == 0:
            assert thread.is_alive()
        bound.abort()
        thread.join()
        assert statuses == [Status.ABORTED]
        assert 0 < bound.failed_step < bound.program.steps
        bound.clear_abort()


def test_a_helper_that_comes_before_or_after_a_run_does_nothing(
    random: np.random.Generator,
) -> None:
    layer = Layer(random)
    layer.bound._reserve(2)
    layer.bound.help(1)
    expected = layer.run(None)
    layer.result.fill(0)
    layer.bound.help(1)
    assert not layer.result.any()
    assert layer.run(None) == expected


def test_helpers_that_come_at_any_moment_change_nothing(
    random: np.random.Generator, pools: list[WorkerPool | None]
) -> None:
    """Stray threads enter and leave all the time, beside a pool's own helper."""
    layer = Layer(random, tokens=100, width=96)
    expected = layer.run(None)
    layer.bound._reserve(4)
    stop = threading.Event()

    def intrude(bound: BoundProgram, worker: int) -> None:
        while not stop.is_set():
            bound.help(worker)

    strays = [threading.Thread(target=intrude, args=(layer.bound, worker)) for worker in (2, 3)]
    for each in strays:
        each.start()
    try:
        for _ in range(100):
            assert layer.run(pools[1]) == expected
    finally:
        stop.set()
        for each in strays:
            each.join()


def test_programs_take_turns_on_one_pool(random: np.random.Generator, pools: list[WorkerPool | None]) -> None:
    layers = [Layer(random), Layer(random, tokens=97)]
    expected = [layer.run(None) for layer in layers]
    for turn in range(60):
        assert layers[turn % 2].run(pools[2]) == expected[turn % 2]


def test_a_closed_pool_has_no_threads_left() -> None:
    before = threading.active_count()
    with WorkerPool(3) as pool:
        assert pool.helpers == 2 and threading.active_count() == before + 2
    assert threading.active_count() == before


# Compiling


def test_the_package_imports_no_numba() -> None:
    code = (
        "import sys, heliograph_backends.cpu.kernels as k;"
        "k.ProgramBuilder().build(); sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=_environment(), check=False).returncode == 0


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def test_a_missing_cache_folder_is_made_private(tmp_path: Path) -> None:
    state = open_cache(tmp_path / "deep" / "kernels")
    assert state.refusal is None and state.folder is not None
    assert stat.S_IMODE(state.folder.parent.stat().st_mode) == 0o700


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert open_cache(shared).refusal is Refusal.WRITABLE_BY_OTHERS


def test_a_folder_below_one_that_others_can_change_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shared" / "ours").mkdir(parents=True, mode=0o700)
    (tmp_path / "shared").chmod(0o777)
    assert open_cache(tmp_path / "shared" / "ours").refusal is Refusal.UNSAFE_PARENT


def test_what_is_not_a_folder_is_refused(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to(tmp_path)
    assert open_cache(file).refusal is Refusal.NOT_A_DIRECTORY
    assert open_cache(link).refusal is Refusal.NOT_A_DIRECTORY
