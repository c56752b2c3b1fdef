"""Cases of reductions, norms, sorts, softmax and rotary embedding: ops along rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from heliograph_backends.conformance.cases.forms import (
    EIGHT,
    FLOATS,
    LARGE,
    NUMBERS,
    PLAIN,
    STRIDES,
    TAKEN,
    Cases,
    c,
    laid,
)
from heliograph_backends.conformance.harness.case import OpCase, t

#: Rows of one element, of odd lengths, of many; few and many rows.
ROWS: tuple[tuple[int, ...], ...] = ((1,), (5,), (3, 1), (0, 4), (2, 3, 64), EIGHT, LARGE, (1, 5000))


def reduction(op: str) -> Iterator[OpCase]:
    """Some axes or all of them."""
    fill = "near_one" if op == "reduce_prod" else "normal"
    some: tuple[tuple[int, ...], ...] = ((-1,), (0, 2), ())
    for axes in some:
        layouts = (*STRIDES, "repeated") if op in ("reduce_sum", "reduce_max") else ("spaced", "permute")
        yield from laid(c(op, t("f32", 4, 3, 65, fill=fill), axes=axes), layouts)
    forms: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((4, 1), (1,)), ((), ()), ((7,), (0,)), (EIGHT, (7, 0)), ((0, 5), (1,)), (LARGE, (1,)), (LARGE, (0,)),
        ((5000,), ()),
    ]  # fmt: skip
    forms += [((4, 0), (1,)), ((0,), ())] if op in ("reduce_sum", "reduce_prod") else []
    for shape, axes in forms:
        yield c(op, t("f32", *shape, fill=fill), axes=axes, keepdims=len(shape) % 2 == 1)
    for name in NUMBERS[1:]:
        yield c(op, t(name, 2, 3, 65, fill=fill), axes=(1, 2), keepdims=True)
    yield c(op, t("f32", 6, 37, fill="spoiled"), axes=(1,))
    if op in ("reduce_sum", "reduce_max", "reduce_min"):
        for name in ("i32", "i64", "u64"):
            yield c(op, t(name, 9, 33, fill="wide"), axes=(1,))


def argmax(op: str) -> Iterator[OpCase]:
    """The first of equal elements."""
    yield from laid(c(op, t("f32", 7, 33)), STRIDES)
    for shape in ROWS:
        yield c(op, t("f32", *shape, fill="quarters"))
    for name in NUMBERS[1:]:
        yield c(op, t(name, 5, 33, fill="quarters"))
    for name in ("i32", "i64", "u64"):
        yield c(op, t(name, 9, 33, fill="wide"))


def whole_rows(op: str) -> Iterator[OpCase]:
    """Sums and means of rows, running sums and products."""
    fill = "near_one" if op == "cumprod" else "normal"
    yield from laid(c(op, t("f32", 7, 33, fill=fill)), (*STRIDES, "repeated"))
    for shape in (*ROWS, (3, 0, 2)):
        yield c(op, t("f32", *shape, fill=fill))
    for name in FLOATS[1:] if op == "mean" else NUMBERS[1:]:
        yield c(op, t(name, 5, 33, fill=fill))
    if op != "mean":
        yield c(op, t("f32", 3, 0))


def total(op: str) -> Iterator[OpCase]:
    """Sums of all elements."""
    yield from laid(c(op, t("f32", 7, 33)), (*STRIDES, "repeated"))
    for shape in ((), (0,), *ROWS):
        yield c(op, t("f32", *shape))
    for name in NUMBERS[1:]:
        yield c(op, t(name, 5, 33))


def count_equal(op: str) -> Iterator[OpCase]:
    """Tensors with many equal elements."""
    yield from laid(c(op, t("f32", 7, 33, fill="few"), t("f32", 7, 33, fill="few")), STRIDES, (0,))
    for shape in ((), (0,), EIGHT, LARGE):
        yield c(op, t("i32", *shape, fill="few"), t("i32", *shape, fill="few"))
    for name in PLAIN[1:]:
        yield c(op, t(name, 5, 33, fill="few"), t(name, 5, 33, fill="few"))
    yield c(op, t("f32", 13, fill="special"), t("f32", 13, fill="special"))


def sort(op: str) -> Iterator[OpCase]:
    """Rows with equal elements, which stay in order."""
    options: tuple[dict[str, Any], ...] = ({"k": 3},) if op == "top_k" else ({}, {"descending": True})
    for attributes in options:
        for shape in ((7, 33), (5,), (0, 4), (2, 3, 64), EIGHT, LARGE, (1, 5000)):
            yield c(op, t("f32", *shape, fill="quarters"), **attributes)
        yield c(op, t("f32", 7, 33), **attributes)
    yield from laid(c(op, t("f32", 7, 33, fill="quarters"), **attributes), STRIDES)
    for name in NUMBERS[1:]:
        yield c(op, t(name, 5, 33, fill="quarters"), **attributes)
    for name in ("i32", "i64", "u64"):
        yield c(op, t(name, 5, 33, fill="wide"), **attributes)
    if op == "top_k":
        yield c(op, t("f32", 3, 1), k=1)
        yield c(op, t("f32", 4, 33), k=33)
    else:
        yield c(op, t("f32", 3, 0))


def searchsorted(op: str) -> Iterator[OpCase]:
    """Sorted vectors with equal elements; the values lie on, between and beyond them."""
    plain = c(op, t("f32", 7, fill="rising"), t("f32", 7, 33, fill="quarters"))
    yield from laid(plain, STRIDES, (1,))
    yield from laid(plain, ("spaced", "slice"), (0,))
    for attributes in ({}, {"right": True}):
        for count, shape in product((0, 1, 2, 37, 1000), ((), (5,), (7, 33))):
            yield c(op, t("f32", count, fill="rising"), t("f32", *shape, fill="quarters"), **attributes)
        for name in NUMBERS[1:]:
            yield c(op, t(name, 37, fill="rising"), t(name, 5, 33, fill="quarters"), **attributes)
        for name in ("i32", "i64", "u64"):
            yield c(op, t(name, 37, fill="rising_wide"), t(name, 5, 33, fill="wide"), **attributes)
        yield c(op, t("f32", 37, fill="rising"), t("f32", 13, fill="special"), **attributes)


def norm(op: str) -> Iterator[OpCase]:
    """Rows with small and large eps."""
    yield from laid(c(op, t("f32", 7, 33)), (*STRIDES, "repeated", *TAKEN))
    for shape in (*ROWS, (3, 0)):
        yield c(op, t("f32", *shape), eps=0.1)
    for name in FLOATS[1:]:
        yield c(op, t(name, 5, 33), eps=1e-6)
    yield c(op, t("f32", 6, 37, fill="spoiled"))
    yield c(op, t("f32", 3, 37, fill="zero"))


def group_norm(op: str) -> Iterator[OpCase]:
    """Groups that do and do not divide the channels."""
    yield from laid(c(op, t("f32", 6, 4, 5), groups=3), (*STRIDES, *TAKEN))
    forms = (((2, 5, 3, 3), 2), ((1, 1, 1), 1), ((0, 4, 2, 2), 2), ((2, 32, 16, 16), 8), ((4, 0, 3), 4))
    for shape, groups in forms:
        yield c(op, t("f32", *shape), groups=groups, eps=0.01)
    for name in FLOATS[1:]:
        yield c(op, t(name, 2, 6, 4, 5), groups=3)


def soft_max(op: str) -> Iterator[OpCase]:
    """With masks, slopes and sinks."""
    yield from laid(c(op, t("f32", 7, 33)), (*STRIDES, "repeated", *TAKEN))
    masked = c(op, t("f32", 2, 3, 4, 17), t("f32", 4, 17, fill="mask"), scale=0.5)
    yield from laid(masked, ("spaced", "permute", "repeated", *TAKEN))
    for shape in ROWS:
        yield c(op, t("f32", *shape), scale=0.3)
    for name, bias in product(FLOATS[1:], ("f32", "f16")):
        own = name if name == "f64" else bias
        yield c(op, t(name, 3, 5, 9), t(own, 5, 9, fill="bias"), max_bias=8.0)
    yield c(op, t("f32", 2, 12, 5, 9), t("f16", 2, 1, 5, 9, fill="bias"), scale=0.25, max_bias=8.0)
    yield c(op, t("f32", 2, 4, 5, 9), t("f32", 5, 9, fill="mask"), t("f32", 4), max_bias=2.0)
    yield c(op, t("f32", 5, 300, fill="large"))
    yield c(op, t("f32", 6, 37, fill="spoiled"))


#: Mode, width of a row, rotated dimensions, sections.
MODES = (
    (0, 8, 8, ()), (0, 12, 8, ()), (2, 8, 8, ()), (2, 12, 8, ()), (8, 16, 16, (2, 3, 3, 0)),
    (8, 20, 16, (1, 2, 1, 1)), (24, 16, 8, (4, 4, 4, 4)), (40, 16, 16, (3, 3, 2, 0)),
    (40, 32, 24, (4, 3, 2, 4)),
)  # fmt: skip
YARN: tuple[dict[str, Any], ...] = (
    {"freq_base": 500.0, "freq_scale": 0.25, "attn_factor": 1.5},
    {"freq_scale": 0.125, "ext_factor": 1.0, "n_ctx_orig": 64, "beta_fast": 8.0},
)


def rope(op: str) -> Iterator[OpCase]:
    """Every mode, frequency factors, YaRN."""
    at = t("i32", 5, fill="positions")
    yield from laid(c(op, t("f32", 5, 3, 8), at, n_dims=8), (*STRIDES, *TAKEN), (0,))
    yield from laid(c(op, t("f32", 5, 3, 8), at, n_dims=8, mode=2), ("spaced",), (1,))
    for name, (mode, width, dims, sections) in product(FLOATS, MODES):
        shape = (4, 5) if sections else (5,)
        own: dict[str, Any] = {"sections": sections} if sections else {}
        place = t("i32", *shape, fill="positions")
        if name == "f32" or width == dims:
            yield c(op, t(name, 2, 5, 3, width), place, n_dims=dims, mode=mode, **own)
        if name == "f32":
            for extra in YARN:
                yield c(op, t(name, 5, 3, width), place, n_dims=dims, mode=mode, **own, **extra)
    yield c(op, t("f32", 5, 3, 8), at, t("f32", 4, fill="positive"), n_dims=8, mode=2)
    for mode in (0, 2):
        yield c(op, t("f32", 5, 3, 16), at, n_dims=8, mode=mode, offset=6)
    yield c(op, t("f32", 0, 2, 4), t("i32", 0, fill="positions"), n_dims=4)
    yield c(op, t("f32", 33, 8, 64), t("i32", 33, fill="positions"), n_dims=64, mode=2)


def timestep_embedding(op: str) -> Iterator[OpCase]:
    """Even and odd numbers of dimensions."""
    yield from laid(c(op, t("f32", 5, fill="positive"), dim=32), ("spaced", "slice"))
    for dim, count in product((1, 2, 7, 320), (0, 1, 4)):
        yield c(op, t("f32", count, fill="positive"), dim=dim, max_period=1000)
    for name in FLOATS[1:]:
        yield c(op, t(name, 5, fill="positive"), dim=16)


CASES: Mapping[str, Cases] = {
    **dict.fromkeys(("reduce_sum", "reduce_mean", "reduce_prod", "reduce_max", "reduce_min"), reduction),
    **dict.fromkeys(("norm", "rms_norm", "l2_norm"), norm),
    **dict.fromkeys(("sum_rows", "mean", "cumsum", "cumprod"), whole_rows),
    **dict.fromkeys(("argsort", "top_k"), sort),
    "searchsorted": searchsorted, "argmax": argmax, "sum": total, "count_equal": count_equal,
    "group_norm": group_norm, "soft_max": soft_max, "rope": rope, "timestep_embedding": timestep_embedding,
}  # fmt: skip
