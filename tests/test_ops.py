"""The op table: every op against NumPy in float64 or Python's integers, and every rule's refusals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import op_cases_activations
import op_cases_attention
import op_cases_products
import op_cases_reductions
import op_cases_rope
import op_cases_windows
import pytest
from backend_graphs import Array, Maker, normalised_error, nothing_left, run, same_bits
from op_cases import (
    FLOATS,
    INTEGERS,
    NUMBERS,
    PAIRS,
    PLAIN,
    ROWS,
    SEED,
    SHAPES,
    Case,
    Cases,
    Refusal,
    data,
    narrow,
    t,
    wide,
)
from op_cases_attention import soft_max

from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cpu.kernels import available
from heliograph_backends.definition import attention, windows
from heliograph_proto.errors import HeliographError, InvalidGraphError, OutOfRangeError, UnknownOpError
from heliograph_proto.ops import EXACT, MAX_OPERANDS, OPS, infer
from heliograph_proto.types import DTYPES, TensorType, dtype

#: The CPU stays within this even where a row allows other devices more.
TIGHT = 1e-6

# References, on what `wide` gives

erf = np.vectorize(math.erf, otypes=[np.float64])


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def divide_integers(a: Array, b: Array) -> Array:
    return np.frompyfunc(lambda x, y: x // y if y else 0, 2, 1)(a, b)


def remainder_of_integers(a: Array, b: Array) -> Array:
    return np.frompyfunc(lambda x, y: x % y if y else 0, 2, 1)(a, b)


def floor_divide(a: Array, b: Array) -> Array:
    return divide_integers(a, b) if a.dtype == object else np.floor_divide(a, b)


def remainder(a: Array, b: Array) -> Array:
    return remainder_of_integers(a, b) if a.dtype == object else np.remainder(a, b)


UNARY_OF_FLOATS: dict[str, Callable[..., Array]] = {
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "exp": np.exp,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "erf": erf,
    "sigmoid": sigmoid,
    "relu": lambda x: np.where(np.isnan(x), x, np.where(x > 0, x, 0)),
    "elu": lambda x: np.where(x > 0, x, np.expm1(x)),
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_erf": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    "gelu_quick": lambda x: x * sigmoid(1.702 * x),
    "softplus": lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
    "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "hardsigmoid": lambda x: np.clip(x + 3, 0, 6) / 6,
    "step": lambda x: np.where(x > 0, 1.0, 0.0),
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
    "trunc": np.trunc,
    "isnan": lambda x: x != x,
    "isinf": lambda x: np.abs(x) == np.inf,
    "isfinite": lambda x: np.abs(x) < np.inf,
}
UNARY_OF_NUMBERS: dict[str, Callable[..., Array]] = {
    "neg": lambda x: -x,
    "abs": np.abs,
    "sgn": lambda x: x * 0 + (x > 0) - (x < 0) if x.dtype == object else np.sign(x),
    "sqr": lambda x: x * x,
}
#: Unary ops with attributes: the attributes, and the reference.
WITH_ATTRIBUTES: dict[str, list[tuple[dict[str, float], Callable[[Array], Array]]]] = {
    "scale": [
        ({"scale": -1.5, "bias": 0.25}, lambda x: -1.5 * x + 0.25),
        ({"scale": 3}, lambda x: 3 * x),
    ],
    "clamp": [
        ({"min": -1, "max": 0.5}, lambda x: np.clip(x, -1, 0.5)),
        ({"min": -math.inf, "max": 1}, lambda x: np.minimum(x, 1)),
    ],
    "xielu": [
        (
            {"alpha_n": 0.7, "alpha_p": 1.1, "beta": 0.5, "eps": -1e-6},
            lambda x: np.where(
                x > 0,
                math.log1p(math.exp(1.1)) * x * x + 0.5 * x,
                (np.expm1(np.minimum(x, -1e-6)) - x) * (0.5 + math.log1p(math.exp(0.7))) + 0.5 * x,
            ),
        ),
    ],
    "leaky_relu": [
        ({"slope": 0.125}, lambda x: np.where(x > 0, x, 0.125 * x)),
        ({}, lambda x: np.where(x > 0, x, 0.01 * x)),
    ],
}
BINARY: dict[str, tuple[tuple[str, ...], Callable[[Array, Array], Array]]] = {
    "add": (NUMBERS, lambda a, b: a + b),
    "sub": (NUMBERS, lambda a, b: a - b),
    "mul": (NUMBERS, lambda a, b: a * b),
    "div": (FLOATS, lambda a, b: a / b),
    "pow": (FLOATS, lambda a, b: a**b),
    "floor_divide": (NUMBERS, floor_divide),
    "remainder": (NUMBERS, remainder),
    "maximum": (NUMBERS, np.maximum),
    "minimum": (NUMBERS, np.minimum),
    "equal": (PLAIN, lambda a, b: a == b),
    "not_equal": (PLAIN, lambda a, b: a != b),
    "less": (NUMBERS, lambda a, b: a < b),
    "less_equal": (NUMBERS, lambda a, b: a <= b),
    "greater": (NUMBERS, lambda a, b: a > b),
    "greater_equal": (NUMBERS, lambda a, b: a >= b),
    "logical_and": (("bool",), lambda a, b: a & b),
    "logical_or": (("bool",), lambda a, b: a | b),
    "logical_xor": (("bool",), lambda a, b: a ^ b),
}


def mean(x: Array, axis: Any, keepdims: bool) -> Array:
    """Of integers: the exact mean, towards zero."""
    total = np.asarray(np.sum(x, axis=axis, keepdims=keepdims))
    count = x.size // max(1, total.size)
    if x.dtype != object:
        return total / count
    return np.asarray(np.frompyfunc(lambda one: abs(one) // count * (1 if one > 0 else -1), 1, 1)(total))


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "reduce_sum": np.sum,
    "reduce_mean": mean,
    "reduce_prod": np.prod,
    "reduce_max": np.max,
    "reduce_min": np.min,
}


def norm(x: Array, eps: float) -> Array:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)


def rms_norm(x: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def l2_norm(x: Array, eps: float) -> Array:
    return x / np.maximum(np.sqrt((x * x).sum(-1, keepdims=True)), eps)


# Cases


def unary_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    of_numbers = op in UNARY_OF_NUMBERS
    formula = UNARY_OF_NUMBERS[op] if of_numbers else UNARY_OF_FLOATS[op]
    for name, shape in itertools.product(NUMBERS if of_numbers else FLOATS, SHAPES):
        x = data(random, name, shape)
        if op in ("sqrt", "rsqrt", "log", "log1p"):
            x = np.abs(x) + x.dtype.type(0.0625)
        yield Case(op, [x], formula(wide(x)))


def attribute_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for (attributes, formula), name, shape in itertools.product(WITH_ATTRIBUTES[op], FLOATS, SHAPES):
        x = data(random, name, shape)
        yield Case(op, [x], formula(wide(x)), attributes)


def binary_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    names, formula = BINARY[op]
    for name, (left, right) in itertools.product(names, PAIRS):
        a, b = data(random, name, left), data(random, name, right)
        if op == "pow":
            a = np.abs(a)
        yield Case(op, [a, b], formula(wide(a), wide(b)))


def logical_not_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for shape in SHAPES:
        x = data(random, "bool", shape)
        yield Case(op, [x], ~x)


def cast_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for source, target in itertools.product(PLAIN, PLAIN):
        x = data(random, source, (9, 5))
        if target[0] == "u" and source != "bool":
            x = np.abs(x)
        if source == "bool":
            expected = x.astype(object)
        elif target == "bool":
            expected = x != 0
        else:
            # A float to an integer: towards zero.
            expected = wide(x) if target in FLOATS else np.frompyfunc(int, 1, 1)(x.astype(object))
        yield Case(op, [x], expected, {"dtype": DTYPES[target]})


def where_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, (left, right) in itertools.product(PLAIN, PAIRS):
        condition = data(random, "bool", right)
        a, b = data(random, name, left), data(random, name, right)
        yield Case(op, [condition, a, b], np.where(condition, wide(a), wide(b)))


def reduction_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    forms = [
        ((2, 3, 65), (-1,)), ((2, 3, 65), (0, 2)), ((2, 3, 65), ()), ((4, 1), (1,)), ((), ()), ((7,), (0,)),
        ((2, 1, 2, 1, 3, 1, 2, 5), (7, 0)), ((0, 5), (1,)), ((300,), ()),
    ]  # fmt: skip
    forms += [((4, 0), (1,)), ((0,), ())] if op in ("reduce_sum", "reduce_prod") else []
    for name, (shape, axes), keepdims in itertools.product(NUMBERS, forms, (False, True)):
        x = data(random, name, shape)
        if op == "reduce_prod" and name in FLOATS:
            x = (1 + x / 64).astype(x.dtype)
        axis = axes or tuple(range(x.ndim))
        expected = REDUCTIONS[op](wide(x), axis=axis, keepdims=keepdims)
        yield Case(op, [x], np.asarray(expected), {"axes": axes, "keepdims": keepdims})


def argmax_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, shape in itertools.product(NUMBERS, ROWS):
        x = data(random, name, shape)
        first = [max(range(shape[-1]), key=list(row).__getitem__) for row in x.reshape(-1, shape[-1])]
        yield Case(op, [x], np.array(first, object).reshape(shape[:-1]))


def matmul_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    forms = [
        ((1, 1), (1, 1)), ((3, 5), (5, 7)), ((65, 33), (33, 70)), ((1, 129), (129, 1)), ((2, 0), (0, 3)),
        ((0, 4), (4, 3)), ((2, 1, 4, 8), (3, 8, 5)), ((3, 4, 1), (1, 6)), ((2, 3), (4, 3, 40)),
        ((2, 1, 2, 1, 2, 1, 3, 4), (2, 1, 2, 1, 3, 4, 5)),
    ]  # fmt: skip
    for name, (left, right) in itertools.product(FLOATS, forms):
        a, b = data(random, name, left), data(random, name, right)
        yield Case(op, [a, b], np.matmul(wide(a), wide(b)))


def norm_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    formula = {"norm": norm, "rms_norm": rms_norm, "l2_norm": l2_norm}[op]
    for name, shape, eps in itertools.product(FLOATS, ROWS, (1e-5, 0.1)):
        x = data(random, name, shape)
        yield Case(op, [x], formula(wide(x), eps), {"eps": eps})
    yield Case(op, [np.zeros((3, 0), np.float32)], np.zeros((3, 0)), {"eps": 1e-5})


def get_rows_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, index in itertools.product(PLAIN, ("i32", "i64")):
        rows = data(random, name, (9, 5))
        for shape in ((4,), (0,), (1,)):
            at = random.integers(0, 9, shape).astype(DTYPES[index].numpy)
            yield Case(op, [rows, at], np.stack([*wide(rows)[at]]) if at.size else np.zeros((0, 5)))
        batched = data(random, name, (2, 3, 4, 5))
        at = random.integers(0, 4, (2, 3, 6)).astype(DTYPES[index].numpy)
        picked = [[wide(batched)[i, j][at[i, j]] for j in range(3)] for i in range(2)]
        yield Case(op, [batched, at], np.array(picked))
    yield Case(op, [np.zeros((0, 5), np.float32), np.zeros(0, np.int32)], np.zeros((0, 5)))


def concat_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name in PLAIN:
        a, b, c = (data(random, name, (2, n, 3)) for n in (4, 0, 1))
        expected = np.concatenate([wide(a), wide(b), wide(c)], 1)
        yield Case(op, [a, b, c], expected, {"axis": -2})
        yield Case(op, [a], wide(a))
        yield Case(op, [a, a], np.concatenate([wide(a), wide(a)]), {"axis": 0})


def view_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name in PLAIN:
        x = data(random, name, (4, 1, 6))
        yield from {
            "cont": lambda x: [Case(op, [x], wide(x))],
            "reshape": lambda x: [
                Case(op, [x], wide(x).reshape(shape), {"shape": shape})
                for shape in ((24,), (2, -1, 3), (4, 6), (1, 2, 1, 2, 1, 3, 2, 1))
            ],
            "permute": lambda x: [
                Case(op, [x], wide(x).transpose(axes), {"axes": axes})
                for axes in ((0, 1, 2), (2, 0, 1), (-1, -2, -3))
            ],
            "broadcast_to": lambda x: [
                Case(op, [x], np.broadcast_to(wide(x), shape), {"shape": shape})
                for shape in ((4, 1, 6), (4, 3, 6), (2, 2, 1, 1, 1, 4, 5, 6), (0, 4, 1, 6))
            ],
            "slice": lambda x: [
                Case(op, [x], wide(x)[1:4:2, :, 2:6:3], slicing((1, 0, 2), (4, 1, 6), (2, 1, 3))),
                Case(op, [x], wide(x)[4:4], slicing((4, 0, 0), (4, 1, 6), (1, 1, 1))),
                Case(op, [x], wide(x)[:, :, ::7], slicing((0, 0, 0), (4, 1, 6), (1, 1, 7))),
            ],
        }[op](x)


def slicing(start: tuple[int, ...], stop: tuple[int, ...], step: tuple[int, ...]) -> dict[str, Any]:
    return {"start": start, "stop": stop, "step": step}


def fill_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, shape in itertools.product(PLAIN, ((), (3, 4), (0, 2))):
        value = True if name == "bool" else 7
        attributes = {"shape": shape, "value": int(value), "dtype": DTYPES[name]}
        yield Case(op, [], np.full(shape, value, object), attributes)
    for value in (math.inf, -0.5, math.nan, 1e300):
        attributes = {"shape": (2,), "value": value, "dtype": DTYPES["f32"]}
        yield Case(op, [], np.full((2,), value), attributes)
    least = {"shape": (2,), "value": -(2**63), "dtype": DTYPES["i64"]}
    yield Case(op, [], np.full((2,), -(2**63), object), least)


def arange_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for start, stop, step in ((0, 5, 1), (5, 0, -2), (0.5, 2, 0.25), (3, 3, 1), (1, 0, 1), (0, 1e3, 7.5)):
        count = max(0, math.ceil((stop - start) / step))
        values = [start + i * step for i in range(count)]
        yield Case(op, [], np.array(values, np.float64), {"start": start, "stop": stop, "step": step})
    far = [2.0**53 + 0.0, 2.0**53 + 64.0]
    attributes = {"start": far[0], "stop": far[0] + 128, "step": 64}
    yield Case(op, [], np.array(far), attributes)


def assign_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, shape in itertools.product(PLAIN, ((), (0, 2), (3, 5))):
        value = data(random, name, shape)
        yield Case(op, [np.zeros_like(value), value], wide(value))


CASES: dict[str, Cases] = {
    **op_cases_activations.CASES,
    **op_cases_attention.CASES,
    **op_cases_products.CASES,
    **op_cases_reductions.CASES,
    **op_cases_rope.CASES,
    **op_cases_windows.CASES,
    **dict.fromkeys((*UNARY_OF_FLOATS, *UNARY_OF_NUMBERS), unary_cases),
    **dict.fromkeys(WITH_ATTRIBUTES, attribute_cases),
    **dict.fromkeys(BINARY, binary_cases),
    **dict.fromkeys(REDUCTIONS, reduction_cases),
    **dict.fromkeys(("norm", "rms_norm", "l2_norm"), norm_cases),
    **dict.fromkeys(("cont", "reshape", "permute", "broadcast_to", "slice"), view_cases),
    "logical_not": logical_not_cases,
    "cast": cast_cases,
    "where": where_cases,
    "argmax": argmax_cases,
    "matmul": matmul_cases,
    "get_rows": get_rows_cases,
    "concat": concat_cases,
    "fill": fill_cases,
    "arange": arange_cases,
    "assign": assign_cases,
}


# Runs


@pytest.fixture(scope="module")
def definition() -> Iterator[CpuDevice]:
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**30, native=False)) as device:
        yield device


@pytest.fixture(scope="module")
def native() -> Iterator[CpuDevice]:
    if not available():
        pytest.skip("numba is not installed")
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**30, native=True)) as device:
        yield device


@pytest.fixture
def random() -> np.random.Generator:
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


def as_it_is(made: Maker, array: Array) -> int:
    return made.input(array)


def permuted(made: Maker, array: Array) -> int:
    """The array, as a view of its transpose."""
    axes = tuple(reversed(range(array.ndim)))
    return made.node("permute", made.input(array.transpose(axes).copy()), axes=axes)


def sliced(made: Maker, array: Array) -> int:
    """The array, as every second element along every dimension of a larger one."""
    larger = np.ones(tuple(2 * size + 1 for size in array.shape), array.dtype)
    larger[tuple(slice(1, None, 2) for _ in array.shape)] = array
    attributes = slicing((1,) * array.ndim, larger.shape, (2,) * array.ndim)
    return made.node("slice", made.input(larger), **attributes)


LAYOUTS = (as_it_is, permuted, sliced)


def made_of(case: Case, layout: Callable[[Maker, Array], int], *, chain: bool = False) -> Maker:
    """The graph of one node, its operands laid out so; `chain` puts two more nodes behind it."""
    made = Maker()
    operands = [layout(made, array) for array in case.operands]
    if case.op == "assign":
        operands[0] = made.variable(case.operands[0])
    value = made.node(case.op, *operands, **case.attributes)
    if chain:
        value = made.node("neg", made.node("neg", value))
    made.output(value)
    return made


def check(case: Case, found: Array) -> None:
    """Compares with the reference as the op's row says."""
    expected = narrow(case.expected, found.dtype)
    about = f"{case.op}{[(str(a.dtype), a.shape) for a in case.operands]} {dict(case.attributes)}"
    assert found.shape == expected.shape, about
    if found.dtype.kind != "f" or OPS[case.op].tolerance == EXACT:
        np.testing.assert_array_equal(found, expected, err_msg=about)
        return
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected), err_msg=f"NaN: {about}")
    infinite = np.isinf(expected)
    np.testing.assert_array_equal(np.where(np.isinf(found), found, 0), np.where(infinite, expected, 0), about)
    reference = np.where(infinite, expected, case.expected)
    error = normalised_error(found, reference)
    # A float16 cannot be nearer than its own rounding, which is more than most rows allow.
    rounding = normalised_error(expected, reference) if found.dtype == np.float16 else 0.0
    assert error <= min(OPS[case.op].tolerance, TIGHT) + 2 * rounding, f"error {error}: {about}"


def layouts_of(number: int) -> Callable[[Maker, Array], int]:
    return LAYOUTS[number % len(LAYOUTS)]


def cases_of(op: str, random: np.random.Generator) -> Iterator[Case]:
    # The references divide by zero and overflow where they should.
    with np.errstate(all="ignore"):
        yield from CASES[op](op, random)


def test_every_op_has_cases() -> None:
    assert set(CASES) == set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_the_definition_of_an_op_is_what_numpy_says(
    op: str, definition: CpuDevice, random: np.random.Generator
) -> None:
    for number, case in enumerate(cases_of(op, random)):
        (found,) = run(definition, made_of(case, layouts_of(number)))
        check(case, found)


@pytest.mark.parametrize("op", OPS)
def test_native_kernels_give_what_numpy_says_and_the_same_bits_when_fused(
    op: str, native: CpuDevice, random: np.random.Generator
) -> None:
    for number, case in enumerate(cases_of(op, random)):
        if any(array.dtype != np.float32 for array in case.operands):
            continue
        chain = OPS[op].rule(*rule_arguments(case)).dtype.name == "f32"
        for layout in LAYOUTS if number % 4 == 0 else (layouts_of(number),):
            (fused,) = run(native, made_of(case, layout, chain=chain))
            (unfused,) = run(native, made_of(case, layout, chain=chain), fusion=False)
            check(case, fused)
            assert same_bits(fused, unfused), f"{op}: bits depend on fusion"


def rule_arguments(case: Case) -> tuple[list[TensorType], dict[str, Any]]:
    types = [TensorType(dtype(array.dtype), array.shape) for array in case.operands]
    return types, infer(case.op, types, case.attributes)[1]


SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 20.0, -20.0, 1e-4, 3e4]


@pytest.mark.parametrize("device", ["definition", "native"])
@pytest.mark.parametrize("op", [*UNARY_OF_FLOATS, *UNARY_OF_NUMBERS, *WITH_ATTRIBUTES])
def test_nan_infinity_and_zero_go_through_one_operand_as_in_float64(
    op: str, device: str, request: pytest.FixtureRequest
) -> None:
    for name in FLOATS:
        x = np.array(SPECIAL, DTYPES[name].numpy)
        attributes: Mapping[str, Any] = {}
        formula = {**UNARY_OF_FLOATS, **UNARY_OF_NUMBERS}.get(op)
        if formula is None:
            attributes, formula = WITH_ATTRIBUTES[op][0]
        with np.errstate(all="ignore"):
            case = Case(op, [x], formula(wide(x)), attributes)
        (found,) = run(request.getfixturevalue(device), made_of(case, as_it_is))
        check(case, found)


@pytest.mark.parametrize("device", ["definition", "native"])
@pytest.mark.parametrize("op", BINARY)
def test_nan_infinity_and_zero_go_through_two_operands_as_in_float64(
    op: str, device: str, request: pytest.FixtureRequest
) -> None:
    names, formula = BINARY[op]
    for name in (n for n in FLOATS if n in names):
        values = np.array(SPECIAL[:-1], DTYPES[name].numpy)
        a, b = values[:, None], values[None, :]
        with np.errstate(all="ignore"):
            case = Case(op, [a, b], np.asarray(formula(wide(a), wide(b))))
        (found,) = run(request.getfixturevalue(device), made_of(case, as_it_is))
        check(case, found)


@pytest.mark.parametrize("device", ["definition", "native"])
@pytest.mark.parametrize(
    ("op", "formula"),
    [
        ("reduce_sum", lambda x: x.sum(-1)),
        ("reduce_mean", lambda x: x.mean(-1)),
        ("reduce_max", lambda x: x.max(-1)),
        ("reduce_min", lambda x: x.min(-1)),
        ("soft_max", soft_max),
        ("norm", lambda x: norm(x, 1e-5)),
        ("rms_norm", lambda x: rms_norm(x, 1e-5)),
        ("l2_norm", lambda x: l2_norm(x, 1e-5)),
    ],
)
def test_nan_and_infinity_spoil_their_own_row_alone(
    op: str, formula: Callable[[Array], Array], device: str, request: pytest.FixtureRequest
) -> None:
    for name in FLOATS:
        x = np.random.default_rng(SEED).standard_normal((6, 37)).astype(DTYPES[name].numpy)
        x[1, 5], x[2, 7], x[3, 36] = math.nan, math.inf, -math.inf
        x[4, 3], x[4, 4] = math.inf, -math.inf
        attributes = {"axes": (-1,)} if op.startswith("reduce") else {}
        with np.errstate(all="ignore"):
            case = Case(op, [x], formula(wide(x)), attributes)
        (found,) = run(request.getfixturevalue(device), made_of(case, as_it_is))
        check(case, found)


def test_integers_at_their_bounds_wrap(definition: CpuDevice) -> None:
    for name, op in itertools.product(INTEGERS, ("add", "sub", "mul", "floor_divide", "remainder")):
        bounds = np.iinfo(DTYPES[name].numpy)
        values = np.array([bounds.min, bounds.max, 0, 1, bounds.max // 2], bounds.dtype)
        if bounds.min:
            values = np.append(values, bounds.dtype.type(-1))
        case = Case(op, [values[:, None], values[None, :]], np.zeros(()))
        case.expected = BINARY[op][1](wide(case.operands[0]), wide(case.operands[1]))
        (found,) = run(definition, made_of(case, as_it_is))
        check(case, found)


def test_the_mean_of_small_integers_does_not_wrap(definition: CpuDevice) -> None:
    case = Case("reduce_mean", [np.full(300, 100, np.int8)], np.array(100, object))
    (found,) = run(definition, made_of(case, as_it_is))
    check(case, found)


# Refusals

REFUSED: list[Refusal] = [
    *op_cases_activations.REFUSED,
    *op_cases_attention.REFUSED,
    *op_cases_products.REFUSED,
    *op_cases_reductions.REFUSED,
    *op_cases_rope.REFUSED,
    *op_cases_windows.REFUSED,
    ("no operand", "exp", [], {}, "takes the operands"),
    ("too many operands", "exp", [t("f32"), t("f32")], {}, "takes the operands"),
    ("one operand of two", "add", [t("f32")], {}, "takes the operands"),
    ("four for soft_max", "soft_max", [t("f32", 1)] * 4, {}, "takes the operands"),
    ("operands of a source", "fill", [t("f32")], {}, "takes the operands"),
    ("more than a variadic op takes", "concat", [t("f32", 1)] * (MAX_OPERANDS + 1), {}, "takes the operands"),
    ("nothing to join", "concat", [], {}, "takes the operands"),
    ("an unknown attribute", "exp", [t("f32")], {"speed": 1}, "no attribute 'speed'"),
    ("a missing attribute", "reshape", [t("f32")], {}, "needs the attribute 'shape'"),
    ("None for an attribute", "scale", [t("f32")], {"scale": None}, "needs the attribute"),
    ("text for a number", "scale", [t("f32")], {"scale": "2"}, "is real, not str"),
    ("a boolean for a number", "scale", [t("f32")], {"scale": True}, "is real, not bool"),
    ("a boolean for an integer", "concat", [t("f32", 1)], {"axis": True}, "is integer, not bool"),
    ("a float for an integer", "concat", [t("f32", 1)], {"axis": 0.0}, "is integer, not float"),
    ("a number for a boolean", "reduce_sum", [t("f32", 1)], {"keepdims": 1}, "is boolean"),
    ("a number for integers", "reshape", [t("f32")], {"shape": 1}, "is integers"),
    ("floats for integers", "reshape", [t("f32")], {"shape": (1.0,)}, "is integers"),
    ("booleans for integers", "reshape", [t("f32")], {"shape": (True,)}, "is integers"),
    ("a name for a dtype", "cast", [t("f32")], {"dtype": "f16"}, "is dtype"),
    ("an integer of 64 bits", "concat", [t("f32", 1)], {"axis": 2**63}, "passes 64 bits"),
    ("a number of 64 bits", "scale", [t("f32")], {"scale": 2**63}, "passes 64 bits"),
    ("integers of 64 bits", "reshape", [t("f32")], {"shape": (2**63,)}, "passes 64 bits"),
    ("a million dimensions", "reshape", [t("f32")], {"shape": (2**62,) * 10**6}, "at most 8 dimensions"),
    ("a million axes", "permute", [t("f32")], {"axes": (0,) * 10**6}, "at most 8 dimensions"),
    ("integers for floats", "exp", [t("i32", 2)], {}, "takes float elements"),
    ("booleans for numbers", "neg", [t("bool", 2)], {}, "takes float or int or uint"),
    ("numbers for booleans", "logical_not", [t("f32", 2)], {}, "takes bool"),
    ("blocks", "add", [t("q8_0", 32), t("q8_0", 32)], {}, "takes float or int or uint"),
    ("two data types", "add", [t("f32"), t("f64")], {}, "different data types"),
    ("shapes that do not broadcast", "add", [t("f32", 2, 3), t("f32", 2)], {}, "do not broadcast"),
    ("no condition", "where", [t("f32"), t("f32"), t("f32")], {}, "takes bool"),
    ("branches of two types", "where", [t("bool"), t("f32"), t("f16")], {}, "different data types"),
    ("a cast to blocks", "cast", [t("f32", 32)], {"dtype": DTYPES["q8_0"]}, "is not offered"),
    ("a cast of blocks", "cast", [t("q8_0", 32)], {"dtype": DTYPES["f32"]}, "takes float"),
    ("bounds out of order", "clamp", [t("f32")], {"min": 1, "max": 0}, "is not <="),
    ("a bound that is NaN", "clamp", [t("f32")], {"min": math.nan, "max": 0}, "is not <="),
    ("eps NaN", "norm", [t("f32", 4)], {"eps": math.nan}, "eps is nan"),
    ("eps infinite", "rms_norm", [t("f32", 4)], {"eps": math.inf}, "eps is inf"),
    ("eps negative", "l2_norm", [t("f32", 4)], {"eps": -1e-9}, "not negative"),
    ("no row", "norm", [t("f32")], {}, "at least 1 needed"),
    ("an axis too high", "reduce_sum", [t("f32", 2, 3)], {"axes": (2,)}, "axis 2 does not exist"),
    ("an axis too low", "reduce_sum", [t("f32", 2, 3)], {"axes": (-3,)}, "axis -3 does not exist"),
    ("an axis twice", "reduce_sum", [t("f32", 2, 3)], {"axes": (1, -1)}, "twice"),
    ("an axis of a scalar", "reduce_sum", [t("f32")], {"axes": (0,)}, "does not exist"),
    ("the largest of nothing", "reduce_max", [t("f32", 0)], {}, "nothing to reduce"),
    ("the mean of nothing", "reduce_mean", [t("f32", 2, 0)], {"axes": (1,)}, "nothing to reduce"),
    ("the place in nothing", "argmax", [t("f32", 2, 0)], {}, "empty rows"),
    ("the place in a scalar", "argmax", [t("f32")], {}, "at least 1 needed"),
    ("a vector", "matmul", [t("f32", 3), t("f32", 3, 2)], {}, "at least 2 needed"),
    ("sides that do not meet", "matmul", [t("f32", 2, 3), t("f32", 2, 3)], {}, "the left rows have 3"),
    ("batches that differ", "matmul", [t("f32", 2, 1, 1), t("f32", 3, 1, 1)], {}, "do not broadcast"),
    ("a product of integers", "matmul", [t("i32", 1, 1)] * 2, {}, "takes float"),
    ("an empty soft_max", "soft_max", [t("f32", 2, 0)], {}, "empty rows"),
    ("a scale that is NaN", "soft_max", [t("f32", 2)], {"scale": math.nan}, "must be finite"),
    ("a mask of another type", "soft_max", [t("f32", 2), t("f64", 2)], {}, "data types"),
    ("a mask too large", "soft_max", [t("f32", 2), t("f32", 3, 2)], {}, "does not broadcast to"),
    ("an index that is a float", "get_rows", [t("f32", 2, 2), t("f32", 1)], {}, "must be i32 or i64"),
    ("an index that is unsigned", "get_rows", [t("f32", 2, 2), t("u32", 1)], {}, "must be i32 or i64"),
    ("one row", "get_rows", [t("f32", 2), t("i32", 1)], {}, "at least 2 needed"),
    ("batches of indices", "get_rows", [t("f32", 2, 2, 2), t("i32", 3, 1)], {}, "leading dimensions"),
    ("another size", "reshape", [t("f32", 6)], {"shape": (4,)}, "6 elements"),
    ("two unknown sizes", "reshape", [t("f32", 6)], {"shape": (-1, -1)}, "at most one -1"),
    ("a negative size", "reshape", [t("f32", 6)], {"shape": (-2, -3)}, "at most one -1"),
    ("no whole rest", "reshape", [t("f32", 6)], {"shape": (4, -1)}, "6 elements"),
    ("an unknown beside zero", "reshape", [t("f32", 0)], {"shape": (0, -1)}, "0 elements"),
    ("an axis missing", "permute", [t("f32", 2, 3)], {"axes": (0,)}, "every axis exactly once"),
    ("an axis named twice", "permute", [t("f32", 2, 3)], {"axes": (0, 0)}, "twice"),
    ("an axis outside", "permute", [t("f32", 2, 3)], {"axes": (0, 2)}, "does not exist"),
    ("a size that cannot repeat", "broadcast_to", [t("f32", 2)], {"shape": (3,)}, "do not broadcast"),
    ("fewer dimensions", "broadcast_to", [t("f32", 1, 2)], {"shape": (2,)}, "does not broadcast to"),
    ("a negative repeat", "broadcast_to", [t("f32", 1)], {"shape": (-1,)}, "none < 0"),
    ("a start before", "slice", [t("f32", 4)], slicing((-1,), (2,), (1,)), "is not within"),
    ("a stop behind", "slice", [t("f32", 4)], slicing((0,), (5,), (1,)), "is not within"),
    ("a stop before the start", "slice", [t("f32", 4)], slicing((3,), (2,), (1,)), "is not within"),
    ("a step of 0", "slice", [t("f32", 4)], slicing((0,), (4,), (0,)), "is not within"),
    ("a step back", "slice", [t("f32", 4)], slicing((0,), (4,), (-1,)), "is not within"),
    ("a dimension too few", "slice", [t("f32", 4, 4)], slicing((0,), (4,), (1,)), "name every dimension"),
    ("scalars joined", "concat", [t("f32")] * 2, {}, "at least 1 needed"),
    ("ranks that differ", "concat", [t("f32", 2), t("f32", 2, 1)], {}, "may differ in dimension 0"),
    ("sides that differ", "concat", [t("f32", 2, 3), t("f32", 2, 4)], {}, "may differ in dimension 0"),
    ("joined along nothing", "concat", [t("f32", 2)], {"axis": 1}, "axis 1 does not exist"),
    ("types joined", "concat", [t("f32", 2), t("f64", 2)], {}, "different data types"),
    ("a byte of 256", "fill", [], {"shape": (), "value": 256, "dtype": DTYPES["u8"]}, "is no u8"),
    ("a byte of -1", "fill", [], {"shape": (), "value": -1, "dtype": DTYPES["u8"]}, "is no u8"),
    ("half an integer", "fill", [], {"shape": (), "value": 0.5, "dtype": DTYPES["i8"]}, "is no i8"),
    ("infinite integers", "fill", [], {"shape": (), "value": math.inf, "dtype": DTYPES["i64"]}, "is no i64"),
    ("2**63 as i64", "fill", [], {"shape": (), "value": 2.0**63, "dtype": DTYPES["i64"]}, "is no i64"),
    ("filled blocks", "fill", [], {"shape": (32,), "value": 0, "dtype": DTYPES["q8_0"]}, "is not offered"),
    ("a negative fill", "fill", [], {"shape": (-1,), "value": 0, "dtype": DTYPES["f32"]}, "negative"),
    ("2**63 bytes", "fill", [], {"shape": (2**61,), "value": 0, "dtype": DTYPES["f32"]}, "passes 2**63"),
    ("2**63 beside zero", "fill", [], {"shape": (0, 2**62), "value": 0, "dtype": DTYPES["f32"]}, "2**63"),
    ("nine dimensions", "broadcast_to", [t("f32")], {"shape": (1,) * 9}, "at most 8 dimensions"),
    ("a product of nine", "matmul", [t("f32", *(1,) * 9), t("f32", 1, 1)], {}, "9 dimensions"),
    ("a step of nothing", "arange", [], {"start": 0, "stop": 1, "step": 0}, "step not 0"),
    ("an endless range", "arange", [], {"start": 0, "stop": math.inf, "step": 1}, "finite numbers"),
    ("a range too long", "arange", [], {"start": 0, "stop": 1e300, "step": 1}, "passes 2**63"),
    ("a range past numbers", "arange", [], {"start": 0, "stop": 1e308, "step": 1e-308}, "arange"),
    ("a repeat past 2**63", "broadcast_to", [t("f32", 1)], {"shape": (2**62,)}, "passes 2**63"),
    ("an assignment of another type", "assign", [t("f32", 2), t("f32", 3)], {}, "must be equal"),
]


@pytest.mark.parametrize(
    ("op", "types", "attributes", "message"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED]
)
def test_a_node_that_breaks_a_rule_is_refused_with_what_was_wrong(
    op: str, types: list[TensorType], attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidGraphError) as caught:
        infer(op, types, attributes)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 100_000


@pytest.mark.parametrize("op", [name for name, row in OPS.items() if row.operands and name != "assign"])
def test_no_op_computes_on_blocks(op: str) -> None:
    values = {"real": 1.0, "integer": 0, "integers": (0,), "boolean": False, "dtype": DTYPES["f32"]}
    attributes = {attribute.name: values[attribute.kind] for attribute in OPS[op].attributes}
    with pytest.raises(InvalidGraphError, match="takes|data types"):
        infer(op, [t("q8_0", 32)] * OPS[op].least_operands, attributes)


def test_an_unknown_op_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownOpError, match="did you mean 'soft_max'"):
        infer("softmax", [t("f32", 2)], {})


def test_an_unknown_op_that_resembles_none_names_the_table() -> None:
    with pytest.raises(UnknownOpError, match="heliograph ops"):
        infer("#" * 10_000, [], {})


def test_huge_but_legal_shapes_are_inferred_without_memory() -> None:
    found, _ = infer("matmul", [t("f32", 2**40, 1), t("f32", 1, 2**20)], {})
    assert found.shape == (2**40, 2**20)


def test_errors_of_rules_are_heliograph_errors_whatever_the_numbers() -> None:
    random = np.random.default_rng(SEED)
    edge = [-(2**63), -1, 0, 1, 2, 7, 2**31, 2**62, 2**63 - 1]
    for name, row in OPS.items():
        for _ in range(30):
            attributes: dict[str, Any] = {}
            for attribute in row.attributes:
                numbers = [int(random.choice(edge)) for _ in range(int(random.integers(0, 4)))]
                real = float(random.choice([-math.inf, math.nan, 0.0, 1e308, -1e-308, 3.0]))
                attributes[attribute.name] = {
                    "integers": numbers, "integer": (numbers or [0])[0], "real": real,
                    "boolean": True, "dtype": DTYPES["i8"],
                }[attribute.kind]  # fmt: skip
            types = [t("f32", *([2, 0, 3][: int(random.integers(0, 4))])) for _ in range(row.least_operands)]
            try:
                infer(name, types, attributes)
            except HeliographError:
                pass


OUTSIDE: list[tuple[str, list[Array]]] = [
    ("get_rows", [np.zeros((3, 2), np.float32), np.array([0, 3])]),
    ("set_rows", [np.zeros((3, 2), np.float32), np.zeros((2, 2), np.float32), np.array([0, 3])]),
    ("set_rows", [np.zeros((3, 2), np.float32), np.zeros((2, 2), np.float32), np.array([-1, 2])]),
    ("mul_mat_id", [np.zeros((2, 3, 4), np.float32), np.zeros((1, 1, 4), np.float32), np.array([[0, 2]])]),
    ("mul_mat_id", [np.zeros((0, 3, 4), np.float32), np.zeros((1, 1, 4), np.float32), np.array([[0]])]),
    ("add_id", [np.zeros((1, 4), np.float32), np.zeros((2, 4), np.float32), np.array([-(2**62)])]),
]


@pytest.mark.parametrize("device", ["definition", "native"])
@pytest.mark.parametrize(("op", "operands"), OUTSIDE)
def test_an_index_outside_is_an_error_of_its_node(
    op: str, operands: list[Array], device: str, request: pytest.FixtureRequest
) -> None:
    made = made_of(Case(op, operands, np.zeros(())), as_it_is)
    with pytest.raises(OutOfRangeError, match=f"{op}: index") as caught:
        run(request.getfixturevalue(device), made)
    assert caught.value.origin is not None and caught.value.origin.op == op


@pytest.mark.parametrize("op", ["conv_2d", "conv_2d_dw", "pool_1d", "pool_2d", "flash_attn_ext"])
def test_results_that_are_computed_in_parts_are_the_same(
    op: str, definition: CpuDevice, random: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "TILE_ELEMENTS", 40)
    monkeypatch.setattr(attention, "BLOCK_SCORES", 20)
    for case in itertools.islice(cases_of(op, random), 40):
        (found,) = run(definition, made_of(case, as_it_is))
        check(case, found)


HUGE = 2**40
EMPTY: list[tuple[str, list[tuple[int, ...]], dict[str, Any]]] = [
    ("repeat", [(0, 2)], {"shape": (0, HUGE)}),
    ("diag", [(0, 1, 2**24)], {}),
    ("diag_mask_inf", [(0, 2**24, HUGE // 2**24)], {}),
    ("tri", [(0, 2**19, 2**19)], {"type": 0}),
    ("timestep_embedding", [(0,)], {"dim": 2**31 - 1}),
    ("pad", [(0, 3)], {"left": (0, 2**31 - 1), "right": (0, 0), "circular": True}),
    ("pool_2d", [(0, 3, 3)], {"kernel": (2, 2), "padding": (2**30, 1)}),
    ("conv_2d", [(2, 1, 1, 1), (0, 1, 3, 3)], {"padding": (2**30, 1)}),
    ("im2col", [(2, 1, 1, 1), (0, 1, 3, 3)], {"padding": (2**30, 1)}),
]


@pytest.mark.parametrize(("op", "shapes", "attributes"), EMPTY, ids=[case[0] for case in EMPTY])
def test_an_empty_result_takes_no_memory_however_long_its_other_sides_are(
    op: str, shapes: list[tuple[int, ...]], attributes: dict[str, Any], definition: CpuDevice
) -> None:
    operands = [np.zeros(shape, np.float32) for shape in shapes]
    (found,) = run(definition, made_of(Case(op, operands, np.zeros(0), attributes), as_it_is))
    assert found.size == 0
