"""Functions under `hg.` against NumPy's of the same name, where numbers end: infinities, NaN, zeros of both
signs, denormals, the largest and the smallest, and what lies between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from array_api import FUNCTIONS, SIGNATURES

import heliograph as hg
from heliograph_proto.types import DTYPES

Array = np.ndarray[Any, Any]

FLOATS = ("f64", "f32", "f16", "bf16")
INTEGERS = tuple(name for name, row in DTYPES.items() if row.is_integer)
OF_INTEGERS = (
    "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift", "bitwise_invert",
)  # fmt: skip
OF_BOOL = ("logical_and", "logical_not", "logical_or", "logical_xor")
#: Of floats alone, as the standard has it, or of which NumPy makes floats.
OF_FLOATS = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "copysign", "cos", "cosh", "divide", "exp",
    "expm1", "hypot", "log", "log10", "log1p", "log2", "logaddexp", "nextafter", "reciprocal", "signbit",
    "sin", "sinh", "sqrt", "tan", "tanh",
)  # fmt: skip
#: How far from NumPy's result, in units of the last place, unless 2: NumPy itself is up to 3 from the truth.
UNITS = {"tan": 4, "sinh": 4, "cosh": 4, "log1p": 3, "log10": 3}
#: Of which zero of two that are equal IEEE 754 says nothing; NumPy's own slip for f16 in nextafter.
ANY_ZERO = ("maximum", "minimum", "nextafter")


def edges(name: str) -> Array:
    """Where the numbers of a data type end, and some between."""
    if name == "bool":
        return np.array([False, True])
    if name in INTEGERS:
        info = hg.iinfo(name)
        own = [
            info.min,
            info.min + 1,
            -100,
            -8,
            -2,
            -1,
            0,
            1,
            2,
            3,
            7,
            8,
            31,
            64,
            100,
            info.max - 1,
            info.max,
        ]
        return np.array(sorted({one for one in own if info.min <= one <= info.max}), DTYPES[name].numpy)
    info = hg.finfo(name)
    least = 2.0 ** -{"f64": 1074, "f32": 149, "f16": 24, "bf16": 133}[name]
    near_one = [1 - info.eps / 2, 1, 1 + info.eps]
    sizes = [
        least, 3 * least, info.smallest_normal - least, info.smallest_normal, 1e-5, 2.0**-13, 0.1, 0.25, 0.5,
        *near_one, 1.5, np.pi / 2, 2, 2.5, 3, np.pi, 8, 10, 11.5, 20, 88, 89, 100, 1000, 709.5, 710, 30000,
        1e10, 2.0**100, info.max / 2, info.max, np.inf, np.nan, 0.0,
    ]  # fmt: skip
    with np.errstate(all="ignore"):
        both = np.array([sign * size for size in sizes for sign in (1, -1)])
        return both.astype(DTYPES[name].numpy)


def operands(function: str, name: str) -> tuple[Array, ...]:
    """Each edge, or each with each."""
    x = edges(name)
    if SIGNATURES[function] == "x, /":
        return (x,)
    second = x
    if function in ("bitwise_left_shift", "bitwise_right_shift"):
        second = np.arange(DTYPES[name].itemsize * 8 + 2).astype(x.dtype)
    elif function == "pow" and name in INTEGERS:
        second = x[x >= 0]
    return (x[:, None], second[None, :])


def by_numpy(function: str, arrays: tuple[Array, ...]) -> Array:
    """What NumPy gives, of bf16 in f32 and rounded once."""
    own = arrays[0].dtype
    wide = [one.astype(np.float32) if own == ml_dtypes.bfloat16 else one for one in arrays]
    if own == ml_dtypes.bfloat16 and function == "nextafter":
        wide = list(arrays)
    with np.errstate(all="ignore"):
        found = np.asarray(getattr(np, function)(*wide))
        return found.astype(own) if found.dtype == np.float32 else found


def computed(session: hg.Session, function: Callable[..., Any], arrays: tuple[Array, ...]) -> Array:
    g = hg.Graph()
    inputs = [g.input(f"x{place}", one.shape, one.dtype) for place, one in enumerate(arrays)]
    g.output("y", function(*inputs))
    found: Array = session.compile(g).run({f"x{place}": one for place, one in enumerate(arrays)})["y"]
    return found


def assert_same(function: str, found: Array, expected: Array, arrays: tuple[Array, ...]) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    shown = np.broadcast_arrays(*arrays)

    def none_of(wrong: Any, what: str) -> None:
        where = [tuple(one[wrong][:4].tolist()) for one in shown]
        assert not wrong.any(), (
            f"{function}: {what} at {where}: {found[wrong][:4]}, not {expected[wrong][:4]}"
        )

    if expected.dtype.kind in "biu":
        none_of(found != expected, "other results")
        return
    info = hg.finfo(expected.dtype)
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    none_of(np.isnan(found) != np.isnan(expected), "NaN on one side")
    with np.errstate(all="ignore"):
        # What logaddexp adds to the larger operand, up to log(2), may cancel it.
        terms = np.abs(np.maximum(*shown)).astype(float) + 0.7 if function == "logaddexp" else 0.0
        scale = np.maximum(np.maximum(np.abs(expected), info.smallest_normal), terms)
        allowed = UNITS.get(function, 2) * info.eps * scale
        near = (found == expected) | (np.abs(found - expected) <= allowed) | np.isnan(expected)
        none_of(~near | (np.isinf(found) & np.isfinite(expected)), "further away")
    zero = (found == 0) & (expected == 0)
    if function not in ANY_ZERO:
        none_of(zero & (np.signbit(found) != np.signbit(expected)), "the other zero")


def data_types(function: str) -> tuple[str, ...]:
    if function in OF_BOOL:
        return ("bool",)
    if function in OF_INTEGERS:
        return (*INTEGERS, "bool") if "shift" not in function else INTEGERS
    return FLOATS if function in OF_FLOATS else (*FLOATS, *INTEGERS)


CASES = [
    (function, name)
    for function in FUNCTIONS["elementwise"].split()
    if hasattr(hg, function) and function != "clip"
    for name in data_types(function)
]


@pytest.mark.parametrize(("function", "name"), CASES)
def test_a_function_equals_numpys_where_numbers_end(local: hg.Session, function: str, name: str) -> None:
    arrays = operands(function, name)
    found = computed(local, getattr(hg, function), arrays)
    assert_same(function, found, by_numpy(function, arrays), arrays)


NUMBERS = (*FLOATS, *INTEGERS)
#: Of rows of edges: what data types, ours, NumPy's.
OF_ROWS: dict[str, tuple[tuple[str, ...], Callable[..., Any], Callable[..., Any]]] = {
    "sort": (NUMBERS, hg.sort, partial(np.sort, kind="stable")),
    "argsort": (NUMBERS, hg.argsort, partial(np.argsort, kind="stable")),
    "argmax": (NUMBERS, partial(hg.argmax, axis=1), partial(np.argmax, axis=1)),
    "argmin": (NUMBERS, partial(hg.argmin, axis=1), partial(np.argmin, axis=1)),
    "max": (NUMBERS, partial(hg.max, axis=1), partial(np.max, axis=1)),
    "min": (NUMBERS, partial(hg.min, axis=1), partial(np.min, axis=1)),
    "searchsorted": (
        NUMBERS,
        lambda x: hg.searchsorted(hg.sort(hg.flatten(x)), x),
        lambda x: np.searchsorted(np.sort(x.ravel()), x),
    ),
    "searchsorted on the right": (
        NUMBERS,
        lambda x: hg.searchsorted(hg.sort(hg.flatten(x)), x, side="right"),
        lambda x: np.searchsorted(np.sort(x.ravel()), x, side="right"),
    ),
    "any": ((*NUMBERS, "bool"), partial(hg.any, axis=0), partial(np.any, axis=0)),
    "all": ((*NUMBERS, "bool"), partial(hg.all, axis=0), partial(np.all, axis=0)),
    "count_nonzero": (
        (*NUMBERS, "bool"),
        partial(hg.count_nonzero, axis=1),
        partial(np.count_nonzero, axis=1),
    ),
    "sum": ((*INTEGERS, "bool"), partial(hg.sum, axis=1), partial(np.sum, axis=1)),
    "prod": ((*INTEGERS, "bool"), partial(hg.prod, axis=1), partial(np.prod, axis=1)),
    "cumulative_sum": (INTEGERS, partial(hg.cumulative_sum, axis=0), partial(np.cumsum, axis=0)),
    "cumulative_prod": (INTEGERS, partial(hg.cumulative_prod, axis=0), partial(np.cumprod, axis=0)),
    "diff": (NUMBERS, hg.diff, np.diff),
    "where": (NUMBERS, lambda x: hg.where(x > 1, x, -x), lambda x: np.where(x > 1, x, -x)),
    "clip": (NUMBERS, lambda x: hg.clip(x, 1, 2), lambda x: np.clip(x, 1, 2)),
    "matmul": (INTEGERS, lambda x: x @ x.T, lambda x: x @ x.T),
    "take": ((*NUMBERS, "bool"), lambda x: hg.take(x, np.array([-1, 0]), axis=1), lambda x: x[:, [-1, 0]]),
    "roll": ((*NUMBERS, "bool"), lambda x: hg.roll(x, 1, axis=1), lambda x: np.roll(x, 1, 1)),
}


@pytest.mark.parametrize(("function", "name"), [(one, name) for one in OF_ROWS for name in OF_ROWS[one][0]])
def test_a_function_of_rows_equals_numpys_where_numbers_end(
    local: hg.Session, function: str, name: str
) -> None:
    _, ours, numpys = OF_ROWS[function]
    x = edges(name)
    x = x[: x.size // 2 * 2].reshape(2, -1)
    wide = x.astype(np.float32) if x.dtype == ml_dtypes.bfloat16 else x
    with np.errstate(all="ignore"):
        expected = np.asarray(numpys(wide))
    if expected.dtype == np.float32:
        expected = expected.astype(x.dtype)
    assert_same(function, computed(local, ours, (x,)), expected, ())


@pytest.mark.parametrize("source", [*NUMBERS, "bool"])
@pytest.mark.parametrize("target", [*NUMBERS, "bool"])
def test_astype_equals_numpys_where_the_target_has_the_number(
    local: hg.Session, source: str, target: str
) -> None:
    """Elsewhere the standard leaves it open."""
    x = edges(source)
    if target in INTEGERS and source not in ("bool", *INTEGERS):
        info = hg.iinfo(target)
        with np.errstate(all="ignore"):
            x = x[np.isfinite(x) & (x.astype(np.float64) > info.min) & (x.astype(np.float64) < info.max // 2)]
    with np.errstate(all="ignore"):
        expected = x.astype(DTYPES[target].numpy)
    assert_same("astype", computed(local, lambda value: hg.astype(value, target), (x,)), expected, (x,))
