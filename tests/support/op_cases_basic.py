"""Cases of elementwise ops, reductions, norms, moves, views, sources and variables."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
from backend_graphs import Array
from op_cases import FLOATS, NUMBERS, PAIRS, PLAIN, ROWS, SHAPES, Case, Cases, data, wide

from heliograph_proto.types import DTYPES

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


def power(a: Array, b: Array) -> Array:
    """Integers: where the exponent is below 0, towards 0, and 0 for what divides by 0."""
    if a.dtype != object:
        return np.asarray(a**b)
    return np.frompyfunc(lambda x, y: x**y if y >= 0 else int(Fraction(x) ** y) if x else 0, 2, 1)(a, b)


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
    "pow": (NUMBERS, power),
    "floor_divide": (NUMBERS, floor_divide),
    "remainder": (NUMBERS, remainder),
    "atan2": (FLOATS, np.arctan2),
    "hypot": (FLOATS, np.hypot),
    "logaddexp": (FLOATS, np.logaddexp),
    "copysign": (FLOATS, np.copysign),
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
        if op == "pow" and name in FLOATS:
            a = np.abs(a)
        yield Case(op, [a, b], formula(wide(a), wide(b)))
    for left, right in PAIRS if op in ("add", "sub", "mul", "div") else ():
        a, b = data(random, "f16", left), data(random, "f32", right)
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


def bitcast_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, other in itertools.permutations(NUMBERS, 2):
        if DTYPES[name].itemsize != DTYPES[other].itemsize:
            continue
        for shape in ((), (0, 2), (3, 5)):
            x = data(random, name, shape)
            yield Case(op, [x], wide(np.asarray(x).view(DTYPES[other].numpy)), {"dtype": DTYPES[other]})


def cpy_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for source, target in itertools.product(("f16", "f32", "f64", "i32", "bool"), ("f16", "f32", "i32")):
        x = data(random, source, (6, 5))
        expected = x.astype(DTYPES[target].numpy).reshape(3, 10)
        yield Case(op, [x, np.zeros((3, 10), expected.dtype)], wide(expected))


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
    for name, (left, right) in itertools.product(NUMBERS, forms):
        a, b = data(random, name, left), data(random, name, right)
        expected = np.matmul(wide(a), wide(b))
        yield Case(op, [a, b], expected if a.shape[-1] else np.zeros(expected.shape, expected.dtype))


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


def philox_words(seed: int, counter: int, number: int) -> list[int]:
    """The four words of a block, as the paper writes them, in Python's integers."""
    word = 2**32 - 1
    words = [number & word, number >> 32, counter & word, counter >> 32]
    key = [seed & word, seed >> 32]
    for _ in range(10):
        left, right = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [right >> 32 ^ words[1] ^ key[0], right & word, left >> 32 ^ words[3] ^ key[1], left & word]
        key = [(key[0] + 0x9E3779B9) & word, (key[1] + 0xBB67AE85) & word]
    return words


def philox_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    shapes: tuple[tuple[int, ...], ...] = ((), (0, 3), (1,), (4,), (7,), (3, 5), (2, 3, 65))
    for name, shape in itertools.product(("u32", "f32"), shapes):
        seed, counter = (np.asarray(random.integers(-(2**63), 2**63 - 1, at)) for at in ((), (1, 1)))
        count = math.prod(shape)
        names = seed.item() % 2**64, counter.item() % 2**64
        words = [word for j in range(-(-count // 4)) for word in philox_words(*names, j)][:count]
        numbers = words if name == "u32" else [(word >> 8) / 2**24 for word in words]
        expected = np.array(numbers, object if name == "u32" else np.float64).reshape(shape)
        yield Case(op, [seed, counter], expected, {"shape": shape, "dtype": DTYPES[name]})


def assign_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, shape in itertools.product(PLAIN, ((), (0, 2), (3, 5))):
        value = data(random, name, shape)
        yield Case(op, [np.zeros_like(value), value], wide(value))


CASES: dict[str, Cases] = {
    **dict.fromkeys((*UNARY_OF_FLOATS, *UNARY_OF_NUMBERS), unary_cases),
    **dict.fromkeys(WITH_ATTRIBUTES, attribute_cases),
    **dict.fromkeys(BINARY, binary_cases),
    **dict.fromkeys(REDUCTIONS, reduction_cases),
    **dict.fromkeys(("norm", "rms_norm", "l2_norm"), norm_cases),
    **dict.fromkeys(("cont", "reshape", "permute", "broadcast_to", "slice"), view_cases),
    "logical_not": logical_not_cases,
    "cast": cast_cases,
    "bitcast": bitcast_cases,
    "cpy": cpy_cases,
    "where": where_cases,
    "argmax": argmax_cases,
    "matmul": matmul_cases,
    "get_rows": get_rows_cases,
    "concat": concat_cases,
    "fill": fill_cases,
    "arange": arange_cases,
    "philox": philox_cases,
    "assign": assign_cases,
}
