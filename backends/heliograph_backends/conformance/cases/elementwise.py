"""Cases of elementwise ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from heliograph_backends.conformance.cases.forms import (
    EIGHT,
    EVERY_BLOCK,
    FLOATS,
    INTEGERS,
    LARGE,
    LAYOUTS,
    NARROW,
    NUMBERS,
    PLAIN,
    STRIDES,
    TAKEN,
    Cases,
    c,
    laid,
    width,
)
from heliograph_backends.conformance.harness.case import OpCase, t
from heliograph_proto.types import DTYPES

FLOAT_UNARY = (
    "sqrt", "rsqrt", "exp", "expm1", "log", "log1p", "sin", "cos", "tanh", "erf", "sigmoid", "relu", "elu",
    "silu", "gelu", "gelu_erf", "gelu_quick", "softplus", "hardswish", "hardsigmoid", "step", "floor",
    "ceil", "round", "trunc", "isnan", "isinf", "isfinite", "acos", "acosh", "asin", "asinh", "atan", "atanh",
    "signbit", "log2", "log10",
)  # fmt: skip
NUMBER_UNARY = ("neg", "abs", "sgn", "sqr")
#: Fills of operands for ops that are not defined for all numbers.
ORDINARY = {
    **dict.fromkeys(("sqrt", "rsqrt", "log", "log1p", "log2", "log10"), "positive"),
    **dict.fromkeys(("acos", "asin", "atanh"), "within_one"),
    "acosh": "above_one",
}
WITH_ATTRIBUTES: Mapping[str, tuple[dict[str, Any], ...]] = {
    "scale": ({"scale": -1.5, "bias": 0.25}, {"scale": 3.0}),
    "clamp": ({"min": -1.0, "max": 0.5}, {"min": float("-inf"), "max": 1.0}),
    "leaky_relu": ({"slope": 0.125}, {}),
    "xielu": (
        {"alpha_n": 0.7, "alpha_p": 1.1},
        {"alpha_n": -0.5, "alpha_p": 0.2, "beta": 0.25, "eps": -0.01},
    ),
}
#: Integers of 32 and of 64 bits, with and without a sign.
WHOLE = ("i32", "i64", "u32", "u64")
SHAPES = ((), (1,), (3, 0, 2), EIGHT, LARGE)


def unary(op: str) -> Iterator[OpCase]:
    """Every shape for f32, one for the other data types, and the special numbers."""
    fill = ORDINARY.get(op, "normal")
    attributes, *others = WITH_ATTRIBUTES.get(op, ({},))
    yield from laid(c(op, t("f32", 7, 33, fill=fill), **attributes), (*STRIDES, *TAKEN))
    for shape in SHAPES:
        yield c(op, t("f32", *shape, fill=fill), **attributes)
    for name in FLOATS[1:]:
        yield c(op, t(name, 7, 33, fill=fill), **attributes)
    for name in FLOATS:
        yield c(op, t(name, 13, fill="special"), **attributes)
    yield c(op, t("f32", 9000, fill="edges_above 4" if fill == "positive" else "edges 4"), **attributes)
    for other in others:
        yield c(op, t("f32", 7, 33), **other)
        yield c(op, t("f32", 13, fill="special"), **other)
    if op in NUMBER_UNARY:
        for name in INTEGERS:
            yield c(op, t(name, 7, 33))
        for name in WHOLE:
            yield c(op, t(name, 200, fill="wide"))


def logical_not(op: str) -> Iterator[OpCase]:
    """Booleans."""
    yield from laid(c(op, t("bool", 7, 33)), (*STRIDES, *TAKEN))
    for shape in SHAPES:
        yield c(op, t("bool", *shape))


ARITHMETIC = ("add", "sub", "mul", "maximum", "minimum", "floor_divide", "remainder")
FLOAT_BINARY = ("div", "pow", "atan2", "hypot", "logaddexp", "copysign", "nextafter")
#: Ops that take f32 beside narrow floats.
WITH_F32 = ("add", "sub", "mul", "div")
COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
LOGICAL = ("logical_and", "logical_or", "logical_xor")
PAIRS = (
    ((), ()), ((5,), ()), ((3, 1), (1, 4)), ((5,), (2, 3, 5)), ((1,), (0, 1)), ((2, 1, 7), (3, 1)),
    ((2, 1, 2, 1, 2, 1, 2, 3), (1, 3, 1, 2, 1, 2, 1, 3)), (LARGE, LARGE[1:]),
)  # fmt: skip


def binary(op: str) -> Iterator[OpCase]:
    """Broadcasting of f32, other data types, and every pair of special numbers."""
    first, second = _fills(op)
    plain = c(op, t("f32", 7, 33, fill=first), t("f32", 7, 33, fill=second))
    if op in WITH_F32:
        yield from laid(plain, LAYOUTS)
    else:
        yield from laid(plain, (*STRIDES, *TAKEN), (1,))
    for left, right in PAIRS if op in WITH_F32 else PAIRS[2:6]:
        yield c(op, t("f32", *left, fill=first), t("f32", *right, fill=second))
    for name in _others(op):
        yield c(op, t(name, 2, 1, 7, fill=first), t(name, 3, 1, fill=second))
    if op == "pow":
        for name in INTEGERS:
            yield c(op, t(name, 5, 40, fill="wide"), t(name, 40, fill="bits"))
            yield c(op, t(name, 40, fill="few"), t(name, 5, 40, fill="bits"))
    if op not in FLOAT_BINARY:
        # A float would lose digits of these; divisions meet 0, too.
        for name in WHOLE:
            yield c(op, t(name, 5, 40, fill="wide"), t(name, 40, fill="wide"))
    for name in FLOATS:
        yield c(op, t(name, 13, 1, fill="special"), t(name, 13, fill="special"))
    for name in NARROW if op in WITH_F32 else ():
        yield from laid(c(op, t(name, 7, 33, fill=first), t("f32", 7, 33, fill=second)), ("spaced", *TAKEN))
        yield c(op, t(name, 2, 1, 7, fill=first), t("f32", 3, 1, fill=second))
    for name in EVERY_BLOCK if op == "add" else ():
        for shape in ((3, width(name)), (width(name),)):
            yield c(op, t(name, 3, width(name)), t("f32", *shape))


def _fills(op: str) -> tuple[str, str]:
    if op in ("floor_divide", "remainder"):
        return "quarters", "quarters"
    if op in COMPARISONS:
        return "few", "few"
    return ("positive" if op == "pow" else "normal", "quarters" if op == "div" else "normal")


def _others(op: str) -> tuple[str, ...]:
    if op in FLOAT_BINARY:
        return FLOATS[1:]
    return (*NUMBERS[1:], "bool") if op in ("equal", "not_equal") else NUMBERS[1:]


def logical(op: str) -> Iterator[OpCase]:
    """Booleans that broadcast."""
    yield from laid(c(op, t("bool", 7, 33), t("bool", 7, 33)), STRIDES, (1,))
    for left, right in PAIRS[:5]:
        yield c(op, t("bool", *left), t("bool", *right))


BITWISE = ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift")


def bitwise_invert(op: str) -> Iterator[OpCase]:
    """Integers."""
    yield from laid(c(op, t("i32", 7, 33)), (*STRIDES, *TAKEN))
    for shape in SHAPES:
        yield c(op, t("i32", *shape))
    for name in INTEGERS:
        yield c(op, t(name, 200, fill="wide"))


def bitwise(op: str) -> Iterator[OpCase]:
    """Integers that broadcast; shifts also by negative counts, and by all bits or more."""
    second = "bits" if op.endswith("shift") else "wide"
    yield from laid(c(op, t("i32", 7, 33), t("i32", 7, 33, fill=second)), (*STRIDES, *TAKEN), (1,))
    for left, right in PAIRS[2:6]:
        yield c(op, t("i32", *left), t("i32", *right, fill=second))
    for name in INTEGERS:
        yield c(op, t(name, 5, 40, fill="wide"), t(name, 40, fill=second))


def where(op: str) -> Iterator[OpCase]:
    """A condition and two operands that broadcast; a NaN that is not chosen has no effect."""
    yield from laid(c(op, t("bool", 7, 33), t("f32", 7, 33), t("f32", 7, 33)), (*STRIDES, "repeated", *TAKEN))
    for left, right in PAIRS:
        yield c(op, t("bool", *right), t("f32", *left), t("f32", *right))
    for name in PLAIN[1:]:
        yield c(op, t("bool", 3, 1), t(name, 2, 1, 7), t(name, 3, 7))
    yield c(op, t("bool", 4, 13), t("f32", 13, fill="special"), t("f32", 4, 13))


def cast(op: str) -> Iterator[OpCase]:
    """f32 from and to everything, and some others; integers that the target can hold."""
    yield from laid(_cast("f32", "f16"), (*STRIDES, *TAKEN))
    for name in PLAIN[1:]:
        yield _cast("f32", name) if name != "f16" else _cast("f16", "bf16")
        yield _cast(name, "f32")
    others = (
        ("bf16", "f16"), ("f64", "bf16"), ("f16", "i32"), ("bf16", "u8"), ("i64", "i32"), ("i32", "i64"),
        ("u8", "i8"), ("i8", "f16"), ("u64", "f64"), ("bool", "i64"), ("i16", "bool"), ("f32", "f32"),
    )  # fmt: skip
    for source, target in others:
        yield _cast(source, target)
    for name in ("f16", "bf16", "f64", "bool"):
        yield c(op, t("f32", 13, fill="special"), dtype=DTYPES[name])
    for name in ("f16", "bf16", "f64"):
        yield c(op, t(name, 13, fill="special"), dtype=DTYPES["f32"])
    yield c(op, t("f32", 0, 3), dtype=DTYPES["i32"])
    yield c(op, t("f32", *LARGE), dtype=DTYPES["f16"])
    for name in EVERY_BLOCK:
        size = width(name)
        for other in FLOATS:
            yield c(op, t(other, 2, 3, size), dtype=DTYPES[name])
            yield c(op, t(name, 5, 2 * size), dtype=DTYPES[other])
        yield c(op, t("f32", 0, size), dtype=DTYPES[name])
        yield from laid(c(op, t("f32", 5, 3 * size), dtype=DTYPES[name]), ("spaced", "permute"))


def _cast(source: str, target: str) -> OpCase:
    unsigned = target[0] == "u" and source != "bool"
    fill = "normal" if not unsigned else "positive" if source in FLOATS else "below 100"
    return c("cast", t(source, 7, 33, fill=fill), dtype=DTYPES[target])


GATED = ("reglu", "geglu", "geglu_erf", "geglu_quick", "swiglu", "swiglu_oai", "swiglu_clamp")


def gated(op: str) -> Iterator[OpCase]:
    """Halves of a row, and two operands."""
    own = {"swiglu_oai": {"alpha": 0.5, "limit": 1.25}, "swiglu_clamp": {"limit": 1.25}}.get(op, {})
    yield from laid(c(op, t("f32", 7, 66), **own), (*STRIDES, *TAKEN))
    yield from laid(c(op, t("f32", 7, 33), t("f32", 7, 33), **own), STRIDES)
    for shape in ((2,), (0,), (0, 4), (2, 1, 3, 66), (2, 1, 2, 1, 3, 1, 2, 6), (129, 1034)):
        yield c(op, t("f32", *shape), swap=True, **own)
    for name in FLOATS[1:]:
        yield c(op, t(name, 7, 66), **own)
        yield c(op, t(name, 7, 33), t(name, 7, 33), swap=True, **own)
    yield c(op, t("f32", 13, fill="special"), t("f32", 13, fill="special 2"), **own)


def add1(op: str) -> Iterator[OpCase]:
    """A tensor and one number."""
    yield from laid(c(op, t("f32", 7, 33), t("f32", 1)), (*STRIDES, *TAKEN), (0,))
    for name in NUMBERS[1:]:
        yield c(op, t(name, 3, 5), t(name))
    for shape in SHAPES:
        yield c(op, t("f32", *shape), t("f32", 1, 1, 1))
    for name in (*NARROW, *EVERY_BLOCK):
        yield c(op, t(name, 3, width(name)), t("f32", 1))


CASES: Mapping[str, Cases] = {
    **dict.fromkeys((*NUMBER_UNARY, *FLOAT_UNARY, *WITH_ATTRIBUTES), unary),
    **dict.fromkeys((*ARITHMETIC, *FLOAT_BINARY, *COMPARISONS), binary),
    **dict.fromkeys(LOGICAL, logical),
    **dict.fromkeys(BITWISE, bitwise),
    **dict.fromkeys(GATED, gated),
    "logical_not": logical_not, "bitwise_invert": bitwise_invert, "where": where, "cast": cast, "add1": add1,
}  # fmt: skip
