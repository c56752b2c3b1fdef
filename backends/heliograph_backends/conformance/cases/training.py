"""Cases of gradients, losses and steps of optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from heliograph_backends.conformance.cases.forms import (
    EIGHT,
    FLOATS,
    LARGE,
    STRIDES,
    TAKEN,
    Cases,
    c,
    laid,
    outside,
)
from heliograph_backends.conformance.cases.rows import MODES, YARN
from heliograph_backends.conformance.harness.case import OpCase, t

#: Shapes without rows of one element, in which most gradients would be only rounding errors.
ROWS: tuple[tuple[int, ...], ...] = ((5,), (0, 4), (2, 3, 64), EIGHT, LARGE)


def repeat_back(op: str) -> Iterator[OpCase]:
    """Tiles along some dimensions, or in new ones."""
    yield from laid(c(op, t("f32", 6, 4), shape=(3, 2)), STRIDES)
    for shape, target in (((6,), ()), ((2, 6, 4), (4,)), ((0, 4), (3, 2)), ((129, 517), (43, 11)), ((), ())):
        yield c(op, t("f32", *shape), shape=target)
    for name in FLOATS[1:]:
        yield c(op, t(name, 2, 6, 4), shape=(3, 4))


def pair(op: str) -> Iterator[OpCase]:
    """Two operands of one shape."""
    yield from laid(c(op, t("f32", 7, 33), t("f32", 7, 33)), (*STRIDES, *TAKEN))
    for shape in ROWS:
        yield c(op, t("f32", *shape), t("f32", *shape))
    for name in FLOATS[1:]:
        yield c(op, t(name, 5, 33), t(name, 5, 33))
    options: dict[str, dict[str, Any]] = {"rms_norm_back": {"eps": 0.5}, "soft_max_back": {"scale": 0.3}}
    if op in options:
        yield c(op, t("f32", 5, 33), t("f32", 5, 33), **options[op])


def rope_back(op: str) -> Iterator[OpCase]:
    """Every mode."""
    at = t("i32", 5, fill="positions")
    yield from laid(c(op, t("f32", 5, 3, 8), at, n_dims=8), (*STRIDES, *TAKEN), (0,))
    for mode, width, dims, sections in MODES:
        place = t("i32", *((4, 5) if sections else (5,)), fill="positions")
        own: dict[str, Any] = {"n_dims": dims, "mode": mode} | ({"sections": sections} if sections else {})
        for extra in ({}, *YARN):
            yield c(op, t("f32", 2, 5, 3, width), place, **own, **extra)
    for name in FLOATS[1:]:
        yield c(op, t(name, 5, 3, 8), at, n_dims=8, mode=2)
    yield c(op, t("f32", 5, 3, 8), at, t("f32", 4, fill="positive"), n_dims=8)


def get_rows_back(op: str) -> Iterator[OpCase]:
    """Indices that occur often, once or never."""
    first = c(op, t("f32", 7, 33), t("i32", 7, fill="below 5"), rows=5)
    yield from laid(first, STRIDES)
    for shape, rows in (((1, 1), 1), ((2, 3, 9, 5), 4), ((0, 3), 2), (LARGE, 60)):
        yield c(op, t("f32", *shape), t("i64", *shape[:-1], fill=f"below {rows}"), rows=rows)
    for name in FLOATS[1:]:
        yield c(op, t(name, 7, 5), t("i32", 7, fill="below 9"), rows=9)
    for number in (5, -1):
        yield from outside(c(op, t("f32", 3, 4), t("i32", 3, fill=f"outside {number}"), rows=5))


def loss(op: str) -> Iterator[OpCase]:
    """Labels with arbitrary sums."""
    before = [t("f32", 1)] if op == "cross_entropy_loss_back" else []
    yield from laid(c(op, *before, t("f32", 7, 33), t("f32", 7, 33, fill="positive")), STRIDES)
    for shape in ((5,), (2, 3, 64), LARGE):
        yield c(op, *before, t("f32", *shape), t("f32", *shape, fill="fraction"))
    for name in FLOATS[1:]:
        own = [t(name)] if before else []
        yield c(op, *own, t(name, 5, 33), t(name, 5, 33, fill="positive"))
    yield c(op, *before, t("f32", 5, 33, fill="large"), t("f32", 5, 33, fill="positive"))


def step(op: str) -> Iterator[OpCase]:
    """A step of an optimizer; second moments are positive."""
    adam = op == "opt_step_adamw"

    def case(name: str, shape: tuple[int, ...], numbers: str) -> OpCase:
        moments = [t(name, *shape), t(name, *shape, fill="positive")] if adam else []
        parameters = t(numbers, 7 if adam else 2, fill="fraction")
        return c(op, t(name, *shape), t(name, *shape), *moments, parameters)

    yield from laid(case("f32", (7, 33), "f32"), (*STRIDES, *TAKEN))
    for shape in ((), (0, 3), (65,), (2, 3, 4), LARGE):
        yield case("f32", shape, "f32")
    for name in FLOATS[1:]:
        yield case(name, (5, 9), "f64" if name == "f64" else "f32")


CASES: Mapping[str, Cases] = {
    "repeat_back": repeat_back,
    **dict.fromkeys(("relu_back", "silu_back", "rms_norm_back", "soft_max_back"), pair),
    "rope_back": rope_back, "get_rows_back": get_rows_back,
    **dict.fromkeys(("cross_entropy_loss", "cross_entropy_loss_back"), loss),
    **dict.fromkeys(("opt_step_adamw", "opt_step_sgd"), step),
}  # fmt: skip
