"""Cases of softmax with ALiBi and sinks, of attention, and of group norm."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
from backend_graphs import Array
from op_cases import FLOATS, ROWS, Case, Cases, Refusal, data, t, wide

from heliograph_proto.types import TensorType


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


ATTENTION = [
    ((1, 1, 1, 1), 1, 1, 1), ((2, 4, 5, 8), 2, 7, 3), ((1, 6, 3, 16), 6, 3, 16), ((2, 3, 1, 4), 1, 33, 5),
    ((1, 2, 0, 4), 1, 3, 4), ((1, 2, 3, 4), 1, 0, 4), ((1, 8, 4, 2), 4, 4, 2),
]  # fmt: skip
VARIANTS: list[dict[str, float]] = [
    {"scale": 0.5}, {"scale": 0.25, "max_bias": 8.0}, {"scale": 0.7, "logit_softcap": 3.0},
]  # fmt: skip


def attention_row(
    q: Array, k: Array, v: Array, bias: Array, sink: float | None, attributes: dict[str, float]
) -> Array:
    """One row of one head."""
    scores = k @ q * attributes["scale"]
    if cap := attributes.get("logit_softcap"):
        scores = cap * np.tanh(scores / cap)
    scores = np.where(np.isneginf(bias), -np.inf, scores + bias)
    top = max([*scores, -np.inf if sink is None else sink])
    if top == -np.inf:
        return np.zeros(v.shape[-1])
    powers = np.exp(scores - top)
    return np.asarray(powers @ v / (powers.sum() + (0 if sink is None else np.exp(sink - top))))


def attention(
    q: Array, k: Array, v: Array, mask: Array | None, sinks: Array | None, attributes: dict[str, float]
) -> Array:
    batch, heads, rows, _ = q.shape
    result = np.zeros((batch, rows, heads, v.shape[-1]))
    for b, h, m in itertools.product(range(batch), range(heads), range(rows)):
        head = h * k.shape[1] // heads
        bias = np.zeros(k.shape[2])
        if mask is not None:
            tall = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
            bias = tall[b % tall.shape[0], h % tall.shape[1], m]
            bias = bias * slope(h, heads, attributes.get("max_bias", 0.0))
        sink = None if sinks is None else float(sinks[h])
        result[b, m, h] = attention_row(q[b, h, m], k[b, head], v[b, head], bias, sink, attributes)
    return result


def flash_attn_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    names = (("f32", "f32"), ("f32", "f16"), ("f16", "f16"), ("f64", "f64"))
    for (left, right), (shape, kv, n, dv), attributes in itertools.product(names, ATTENTION, VARIANTS):
        batch, heads, rows, width = shape
        q = data(random, left, shape)
        k, v = data(random, right, (batch, kv, n, width)), data(random, right, (batch, kv, n, dv))
        operands = [q, k, v]
        if "max_bias" not in attributes:
            yield Case(op, operands, attention(*map(wide, operands), None, None, attributes), attributes)
        sinks = data(random, "f32", (heads,))
        for lead in dict.fromkeys(((), (1, 1), (batch, 1), (1, heads), (batch, kv), (heads,))):
            mask = data(random, "f16", (*lead, rows, n))
            mask[random.random(mask.shape) < 0.4] = -np.inf
            mask[..., :1, :] = -np.inf
            expected = attention(*map(wide, operands), wide(mask), None, attributes)
            yield Case(op, [*operands, mask], expected, attributes)
            expected = attention(*map(wide, operands), wide(mask), wide(sinks), attributes)
            yield Case(op, [*operands, mask, sinks], expected, attributes)


#: Batch, heads, heads of the keys, rows, pages in all, positions of a page, pages of a row, width, width of
#: the values.
PAGES = [
    (1, 1, 1, 1, 1, 1, 1, 1, 1), (2, 4, 2, 5, 4, 3, 2, 8, 3), (3, 2, 1, 1, 7, 4, 5, 16, 16),
    (2, 6, 3, 3, 2, 16, 3, 16, 4), (1, 2, 1, 0, 3, 2, 2, 4, 4), (2, 2, 1, 3, 0, 2, 0, 4, 4),
]  # fmt: skip


def flash_attn_paged_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    names = (("f32", "f32"), ("f32", "f16"), ("f16", "f16"), ("f64", "f64"))
    for (left, right), form, attributes in itertools.product(names, PAGES, VARIANTS):
        batch, heads, kv, rows, count, page, used, width, dv = form
        q = data(random, left, (batch, heads, rows, width))
        k, v = (data(random, right, (count, kv, page, each)) for each in (width, dv))
        pages = random.integers(0, max(1, count), (batch, used)).astype(np.int32)
        shape = (batch, kv, used * page)
        gathered = [wide(each)[pages].swapaxes(1, 2).reshape(*shape, each.shape[-1]) for each in (k, v)]
        sinks = data(random, "f32", (heads,))
        for lead in dict.fromkeys(((), (1, 1), (batch, 1))):
            mask = data(random, "f16", (*lead, rows, used * page))
            mask[random.random(mask.shape) < 0.4] = -np.inf
            mask[..., :1, :] = -np.inf
            operands = [q, k, v, mask, pages]
            expected = attention(wide(q), *gathered, wide(mask), None, attributes)
            yield Case(op, operands, expected, attributes)
            expected = attention(wide(q), *gathered, wide(mask), wide(sinks), attributes)
            yield Case(op, [*operands, sinks], expected, attributes)


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


CASES: dict[str, Cases] = {
    "soft_max": soft_max_cases,
    "flash_attn_ext": flash_attn_cases,
    "flash_attn_paged": flash_attn_paged_cases,
    "group_norm": group_norm_cases,
}

F = "f32"
Q, K = t(F, 1, 4, 3, 8), t(F, 1, 2, 5, 8)


def refused(what: str, message: str, *types: TensorType, **attributes: float) -> Refusal:
    return (what, "flash_attn_ext", list(types or (Q, K, K)), attributes, message)


PAGED, SHOWN, TABLE = t(F, 9, 2, 5, 8), t(F, 3, 10), t("i32", 1, 2)


def refused_pages(what: str, message: str, *types: TensorType, **attributes: float) -> Refusal:
    return (what, "flash_attn_paged", list(types), attributes, message)


REFUSED: list[Refusal] = [
    refused_pages("pages as matrices", "four dimensions", Q, t(F, 5, 8), t(F, 5, 8), SHOWN, TABLE),
    refused_pages("pages of another width", "do not fit", Q, t(F, 9, 2, 5, 7), PAGED, SHOWN, TABLE),
    refused_pages("more pages of values", "do not fit", Q, PAGED, t(F, 8, 2, 5, 8), SHOWN, TABLE),
    refused_pages("a table of i64", "m] needed", Q, PAGED, PAGED, SHOWN, t("i64", 1, 2)),
    refused_pages("a table of floats", "takes int", Q, PAGED, PAGED, SHOWN, t(F, 1, 2)),
    refused_pages("a table too many", "m] needed", Q, PAGED, PAGED, SHOWN, t("i32", 2, 2)),
    refused_pages("pages without rows", "m] needed", Q, PAGED, PAGED, SHOWN, t("i32", 2)),
    refused_pages("a mask of fewer pages", "must be equal", Q, PAGED, PAGED, t(F, 3, 5), TABLE),
    refused_pages("heads that share no page", "do not divide", t(F, 1, 3, 3, 8), PAGED, PAGED, SHOWN, TABLE),
    refused_pages("sinks of pages", "each of 4 heads", Q, PAGED, PAGED, SHOWN, TABLE, t(F, 2)),
    refused("keys as matrices", "four dimensions", Q, t(F, 5, 8), t(F, 5, 8)),
    refused("keys of another width", "do not fit", Q, t(F, 1, 2, 5, 7), K),
    refused("values of another length", "do not fit", Q, K, t(F, 1, 2, 6, 8)),
    refused("heads that do not share", "do not divide", t(F, 1, 3, 3, 8), K, K),
    refused("batches that do not share", "do not divide", Q, t(F, 2, 2, 5, 8), t(F, 2, 2, 5, 8)),
    refused("queries of integers", "takes float", t("i32", 1, 4, 3, 8), K, K),
    refused("queries of f64", "one of them f64", t("f64", 1, 4, 3, 8), K, K),
    refused("an attention's scale NaN", "scale is nan", scale=math.nan),
    refused("a negative cap", "must not be negative", logit_softcap=-1.0),
    refused("an infinite cap", "logit_softcap is inf", logit_softcap=math.inf),
    refused("slopes without a mask", "without a mask", max_bias=1.0),
    refused("a mask of other rows", "must be equal", Q, K, K, t(F, 4, 5)),
    refused("a mask of other columns", "must be equal", Q, K, K, t(F, 3, 1)),
    refused("a mask of other heads", "do not divide", Q, K, K, t(F, 3, 3, 5)),
    refused("a mask of f64", "data types do not fit", Q, K, K, t("f64", 3, 5)),
    refused("a mask of bool", "takes float", Q, K, K, t("bool", 3, 5)),
    refused("a sink for each key head", "each of 4 heads", Q, K, K, t(F, 3, 5), t(F, 2)),
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
