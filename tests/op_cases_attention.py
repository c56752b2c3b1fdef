"""Cases of softmax with ALiBi and sinks, and of group norm."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
from backend_graphs import Array
from op_cases import FLOATS, ROWS, Case, Cases, Refusal, data, t, wide


def soft_max(x: Array, mask: Array | float = 0.0, scale: float = 1.0) -> Array:
    scores = x * scale + mask
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def slope(head: int, heads: int, max_bias: float) -> float:
    """As ggml computes it for one head."""
    power = 2 ** math.floor(math.log2(heads))
    if head < power:
        return float((2 ** (-max_bias / power)) ** (head + 1))
    return float((2 ** (-(max_bias / 2) / power)) ** (2 * (head - power) + 1))


def soft_max_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, shape in itertools.product(FLOATS, ROWS):
        x = data(random, name, shape)
        yield Case(op, [x], soft_max(wide(x)))
        for mask_shape in dict.fromkeys((shape, shape[-1:], (1,), (), (*shape[:-1], 1))):
            mask = data(random, name, mask_shape)
            yield Case(op, [x, mask], soft_max(wide(x), wide(mask), 0.5), {"scale": 0.5})
        causal = np.where(np.arange(shape[-1]) < 1, 0, -np.inf).astype(x.dtype)
        yield Case(op, [x, causal], soft_max(wide(x), wide(causal)))
        half = data(random, "f16", shape[-1:])
        yield Case(op, [x, half], soft_max(wide(x), wide(half)))
    yield from biased_soft_max_cases(op, random)


def biased_soft_max_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    shapes = ((7,), (3, 5), (1, 2, 9), (6, 4, 17), (2, 8, 3, 5), (2, 3, 1, 4))
    for name, shape, max_bias in itertools.product(FLOATS, shapes, (0.0, 8.0, 2.5)):
        heads = shape[-3] if len(shape) > 2 else 1
        x, mask = data(random, name, shape), data(random, name, shape[-2:])
        slopes = np.array([slope(head, heads, max_bias) for head in range(heads)])
        tall = slopes.reshape(-1, 1, 1) if len(shape) > 2 else slopes
        scores = wide(x) * 0.25 + tall * wide(mask)
        attributes = {"scale": 0.25, "max_bias": max_bias}
        yield Case(op, [x, mask], soft_max(scores), attributes)
        sinks = data(random, "f32", (heads,))
        sink = wide(sinks).reshape(-1, 1, 1) if len(shape) > 2 else wide(sinks)
        extended = np.concatenate([scores, np.broadcast_to(sink, (*shape[:-1], 1))], -1)
        yield Case(op, [x, mask, sinks], soft_max(extended)[..., :-1], attributes)


def group_norm_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    forms = [((4, 3, 5), 2), ((1, 1, 1), 1), ((2, 6, 4, 4), 3), ((2, 6, 4, 4), 1), ((2, 5, 3, 2), 5),
             ((7, 2, 3), 3), ((2, 7, 2, 3), 4), ((0, 4, 2, 2), 2), ((0, 2, 2), 1)]  # fmt: skip
    for name, (shape, groups), eps in itertools.product(FLOATS, forms, (1e-5, 0.1)):
        x = data(random, name, shape)
        expected = wide(x).copy()
        step = -(-shape[-3] // groups)
        for start in range(0, shape[-3], max(1, step)):
            part = wide(x)[..., start : start + step, :, :]
            axes = (-3, -2, -1)
            centered = part - part.mean(axes, keepdims=True)
            scaled = centered / np.sqrt(part.var(axes, keepdims=True) + eps)
            expected[..., start : start + step, :, :] = scaled
        yield Case(op, [x], expected, {"groups": groups, "eps": eps})


CASES: dict[str, Cases] = {"soft_max": soft_max_cases, "group_norm": group_norm_cases}

F = "f32"
REFUSED: list[Refusal] = [
    ("ALiBi without a mask", "soft_max", [t(F, 2)], {"max_bias": 1.0}, "without a mask"),
    ("a negative bias", "soft_max", [t(F, 2), t(F, 2)], {"max_bias": -1.0}, "must not be negative"),
    ("a bias that is NaN", "soft_max", [t(F, 2), t(F, 2)], {"max_bias": math.nan}, "max_bias is nan"),
    ("a sink too many", "soft_max", [t(F, 3, 2, 2), t(F, 2), t(F, 4)], {}, "each of 3 heads"),
    ("sinks of another type", "soft_max", [t(F, 1, 2, 2), t(F, 2), t("f64", 1)], {}, "data types"),
    ("no groups", "group_norm", [t(F, 4, 2, 2)], {"groups": 0}, "groups is 0"),
    ("more groups than channels", "group_norm", [t(F, 4, 2, 2)], {"groups": 5}, "groups is 5"),
    ("groups of a matrix", "group_norm", [t(F, 4, 2)], {"groups": 1}, "at least 3"),
    ("a group's eps", "group_norm", [t(F, 4, 2, 2)], {"groups": 1, "eps": math.nan}, "eps is nan"),
]
