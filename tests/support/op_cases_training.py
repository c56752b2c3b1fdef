"""Cases of the ops of training: gradients are derivatives of the op's plain formula by complex steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from backend_graphs import Array
from op_cases import FLOATS, SHAPES, Case, Cases, Refusal, data, t, wide
from op_cases_rope import MODES, YARN, rope

STEP = 1e-30
#: In a row of one element, nothing but rounding would be left.
ROWS = ((5,), (4, 33), (2, 3, 64), (0, 4), (2, 1, 1, 1, 2, 1, 3, 17))
MIXED = ("f16", "f32", "f64")


def derivatives(formula: Callable[[Array], Array], row: Array) -> Array:
    """[results, elements]: how each result of the formula changes with each element of a row."""
    columns = [formula(row + 1j * STEP * unit).imag / STEP for unit in np.eye(row.size)]
    return np.stack([np.atleast_1d(column) for column in columns], -1)


def by_rows(formula: Callable[[Array], Array], gradient: Array, x: Array) -> Array:
    """The gradient with respect to each row of x."""
    result = np.zeros(x.shape)
    for at in np.ndindex(x.shape[:-1]):
        result[at] = gradient[at] @ derivatives(formula, x[at])
    return result


def silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


def repeat_back_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    forms: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((6, 4), (3, 2)), ((6, 4), (2,)), ((2, 3), (2, 3)), ((4,), ()), ((), ()), ((2, 6, 1, 5), (6, 1, 1)),
        ((0, 4), (3, 2)), ((3, 0), (3, 0)), ((2, 1, 2, 1, 3, 1, 2, 6), (1, 1, 2, 1, 1, 1, 1, 3)),
    ]  # fmt: skip
    for name, (have, shape) in itertools.product(FLOATS, forms):
        x, expected = data(random, name, have), np.zeros(shape)
        for at in np.ndindex(have):
            own = at[len(have) - len(shape) :]
            expected[tuple(i % size for i, size in zip(own, shape, strict=True))] += wide(x)[at]
        yield Case(op, [x], expected, {"shape": shape})


def relu_back_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, shape in itertools.product(FLOATS, SHAPES):
        gradient, x = data(random, name, shape), data(random, name, shape)
        yield Case(op, [gradient, x], np.where(wide(x) > 0, wide(gradient), 0.0))
    edges = np.array([-1, -0.0, 0, 1e-45, np.nan, np.inf, -np.inf], np.float32)
    for number in (np.inf, np.nan, -2.0):
        gradient = np.full(edges.shape, number, np.float32)
        yield Case(op, [gradient, edges], np.array([0, 0, 0, *[number] * 3, 0]))


def silu_back_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, shape in itertools.product(FLOATS, SHAPES):
        gradient, x = data(random, name, shape), data(random, name, shape)
        expected = wide(gradient) * silu(wide(x) + 1j * STEP).imag / STEP
        yield Case(op, [gradient, x], expected)


def rms_norm_back_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, shape, eps in itertools.product(FLOATS, ROWS, (1e-5, 0.5)):
        gradient, x = data(random, name, shape), data(random, name, shape) + np.asarray(0.125, name_of(name))

        def forward(row: Array, eps: float = eps) -> Array:
            return np.asarray(row / np.sqrt((row * row).mean() + eps))

        yield Case(op, [gradient, x], by_rows(forward, wide(gradient), wide(x)), {"eps": eps})


def name_of(name: str) -> str:
    return {"f16": "f2", "f32": "f4", "f64": "f8"}[name]


def soft_max_back_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, shape, scale in itertools.product(FLOATS, ROWS, (1.0, 0.3)):
        powers = np.exp(data(random, "f64", shape))
        y = (powers / powers.sum(-1, keepdims=True)).astype(name_of(name))
        gradient, expected = data(random, name, shape), np.zeros(shape)
        for at in np.ndindex(shape[:-1]):
            row = wide(y)[at]
            expected[at] = scale * (np.diag(row) - np.outer(row, row)) @ wide(gradient)[at]
        yield Case(op, [gradient, y], expected, {"scale": scale})


def rope_back_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    """The gradient is what the rotation of every unit vector has in common with the result's gradient."""
    for name, (mode, width, dims, sections), extra in itertools.product(FLOATS, MODES, YARN):
        attributes = {"n_dims": dims, "mode": mode, "sections": sections, **extra}
        shape = (3, 2, width)
        positions = random.integers(-3, 60, (4, 3) if sections else (3,)).astype(np.int32)
        units = np.eye(math.prod(shape)).reshape(-1, *shape)
        for factors in (None, random.uniform(0.5, 2, width).astype(np.float32)):
            gradient = data(random, name, shape)
            turned = rope(units, positions, None if factors is None else wide(factors), attributes)
            expected = np.einsum("nthd,thd->n", turned, wide(gradient)).reshape(shape)
            more = [] if factors is None else [factors]
            yield Case(op, [gradient, positions, *more], expected, attributes)


def get_rows_back_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, kind in itertools.product(FLOATS, ("i32", "i64")):
        for lead, count, rows, width in (((), 7, 4, 5), ((2, 3), 4, 3, 1), ((), 0, 3, 2), ((2,), 3, 9, 65)):
            gradient = data(random, name, (*lead, count, width))
            indices = random.integers(0, rows, (*lead, count)).astype("i4" if kind == "i32" else "i8")
            expected = np.zeros((*lead, rows, width))
            for at in np.ndindex(indices.shape):
                expected[(*at[:-1], indices[at])] += wide(gradient)[at]
            yield Case(op, [gradient, indices], expected, {"rows": rows})


def loss(labels: Array, row: Array) -> Array:
    """Without taking the largest off first: the numbers are small."""
    return np.asarray(-(labels * (row - np.log(np.exp(row).sum()))).sum())


LOSSES = ((5,), (4, 33), (2, 3, 64), (1, 2))


def loss_operands(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> list[Array]:
    labels = np.abs(data(random, "f64", shape)) + 0.125
    labels /= labels.sum(-1, keepdims=True)
    return [data(random, name, shape), labels.astype(name_of(name))]


def cross_entropy_loss_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, shape in itertools.product(MIXED, LOSSES):
        logits, labels = loss_operands(random, name, shape)
        losses = [loss(wide(labels)[at], wide(logits)[at]) for at in np.ndindex(shape[:-1])]
        yield Case(op, [logits, labels], np.asarray(np.mean(losses)))


def cross_entropy_loss_back_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    """ggml's formula takes labels that add up to 1; so do these, but for the rounding of f16."""
    for name, shape, whole in itertools.product(MIXED, LOSSES, ((), (1,))):
        logits, labels = loss_operands(random, name, shape)
        gradient, expected = np.full(whole, 1.5, logits.dtype), np.zeros(shape)
        for at in np.ndindex(shape[:-1]):
            powers = np.exp(wide(logits)[at])
            expected[at] = 1.5 * (powers / powers.sum() - wide(labels)[at]) / math.prod(shape[:-1])
            if name == "f64":
                exact = derivatives(partial(loss, wide(labels)[at]), wide(logits)[at])[0]
                np.testing.assert_allclose(expected[at], 1.5 * exact / math.prod(shape[:-1]), 1e-9, 1e-12)
        yield Case(op, [gradient, logits, labels], expected)


STEPS: tuple[tuple[int, ...], ...] = ((5,), (4, 33), (), (0, 3), (2, 1, 3))


def opt_step_adamw_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, shape, turn in itertools.product(FLOATS, STEPS, (1, 10)):
        w, g, m, v = (data(random, name, shape) for _ in range(4))
        v = np.abs(v)
        numbers = [0.01, 0.9, 0.99, 1e-6, 0.1, 1 / (1 - 0.9**turn), 1 / (1 - 0.99**turn)]
        parameters = np.array(numbers, np.float64 if name == "f64" else np.float32)
        alpha, beta1, beta2, eps, decay, first, second = map(float, parameters)
        expected = np.zeros((3, *shape))
        for at in np.ndindex(shape):
            slope = wide(g)[at]
            mean = beta1 * wide(m)[at] + (1 - beta1) * slope
            square = beta2 * wide(v)[at] + (1 - beta2) * slope**2
            decayed = wide(w)[at] * (1 - alpha * decay)
            new = decayed - alpha * mean * first / (math.sqrt(square * second) + eps)
            expected[(slice(None), *at)] = new, mean, square
        yield Case(op, [w, g, m, v, parameters], expected)


def opt_step_sgd_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, shape in itertools.product(FLOATS, STEPS):
        w, g = data(random, name, shape), data(random, name, shape)
        parameters = np.array([0.05, 0.25], np.float64 if name == "f64" else np.float32)
        alpha, decay = map(float, parameters)
        yield Case(op, [w, g, parameters], wide(w) - alpha * (wide(g) + decay * wide(w)))


CASES: dict[str, Cases] = {
    "repeat_back": repeat_back_cases, "relu_back": relu_back_cases, "silu_back": silu_back_cases,
    "rms_norm_back": rms_norm_back_cases,
    "soft_max_back": soft_max_back_cases, "rope_back": rope_back_cases, "get_rows_back": get_rows_back_cases,
    "cross_entropy_loss": cross_entropy_loss_cases, "cross_entropy_loss_back": cross_entropy_loss_back_cases,
    "opt_step_adamw": opt_step_adamw_cases, "opt_step_sgd": opt_step_sgd_cases,
}  # fmt: skip

X, Y = t("f32", 3, 4), t("f32", 4, 3)
ADAM = [X] * 4


def refused(what: str, op: str, message: str, *types: Any, **attributes: Any) -> Refusal:
    return (what, op, list(types), attributes, message)


REFUSED: list[Refusal] = [
    refused("tiles that do not fill", "repeat_back", "sizes must divide", X, shape=(2, 4)),
    refused("tiles of more dimensions", "repeat_back", "sizes must divide", X, shape=(1, 3, 4)),
    refused("tiles of a negative size", "repeat_back", "sizes must divide", X, shape=(-3, 4)),
    refused("tiles of integers", "repeat_back", "takes float", t("i32", 4), shape=(2,)),
    refused("a gradient of another shape", "silu_back", "shapes must be equal", X, Y),
    refused("a gradient of another type", "silu_back", "different data types", X, t("f16", 3, 4)),
    refused("a gradient of one row", "rms_norm_back", "shapes must be equal", X, t("f32", 4)),
    refused("rms_norm_back of a negative eps", "rms_norm_back", "eps is -1", X, X, eps=-1.0),
    refused("rms_norm_back of no rows", "rms_norm_back", "at least 1", t("f32"), t("f32")),
    refused("soft_max_back with an infinite scale", "soft_max_back", "scale is inf", X, X, scale=math.inf),
    refused("soft_max_back of another shape", "soft_max_back", "shapes must be equal", X, Y),
    refused("rope_back of a mode of no model", "rope_back", "mode is 1", t("f32", 3, 2, 8), t("i32", 3),
            n_dims=8, mode=1),
    refused("rows of fewer gradients", "get_rows_back", "one index for each row", X, t("i32", 4), rows=5),
    refused("rows at floats", "get_rows_back", "must be i32 or i64", X, t("f32", 3), rows=5),
    refused("fewer rows than none", "get_rows_back", "rows is -1", X, t("i32", 3), rows=-1),
    refused("labels of another shape", "cross_entropy_loss", "shapes must be equal", X, Y),
    refused("a loss of nothing", "cross_entropy_loss", "mean of an empty", t("f32", 0, 4), t("f32", 0, 4)),
    refused("a loss of a number", "cross_entropy_loss", "at least 1", t("f32"), t("f32")),
    refused("the gradient of many losses", "cross_entropy_loss_back", "must be one element", X, X, X),
    refused("six numbers of AdamW", "opt_step_adamw", "7 numbers needed", *ADAM, t("f32", 6)),
    refused("AdamW's numbers as integers", "opt_step_adamw", "takes float", *ADAM, t("i32", 7)),
    refused("moments of another shape", "opt_step_adamw", "shapes must be equal", *ADAM[:3], Y, t("f32", 7)),
    refused("moments of another type", "opt_step_adamw", "different data types", *ADAM[:3], t("f16", 3, 4),
            t("f32", 7)),
    refused("AdamW of nine dimensions", "opt_step_adamw", "9 dimensions", *[t("f32", *[1] * 8)] * 4,
            t("f32", 7)),
    refused("three numbers of SGD", "opt_step_sgd", "2 numbers needed", X, X, t("f32", 3)),
]  # fmt: skip
