"""Rules of state space models and linear attention, as one step after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from heliograph.autodiff.step import Rule, composed, picked
from heliograph.graph.lowering import apply, reshape
from heliograph.graph.source_lines import invalid
from heliograph.graph.value import Value

#: The most steps that are unrolled: a gradient has about 40 nodes for each.
MOST_STEPS = 4096

#: The next state and the step's row, from the state and the step's part of each operand.
_Next = Callable[..., tuple[Value, Value]]


def _sum(x: Value, axis: int) -> Value:
    return apply("reduce_sum", x, axes=(axis,), keepdims=False)


def _last(x: Value) -> Value:
    """A new dimension of 1 at the end."""
    return reshape(x, (*x.shape, 1))


def _before_last(x: Value) -> Value:
    """A new dimension of 1 before the last."""
    return reshape(x, (*x.shape[:-1], 1, x.shape[-1]))


def _scanned(advance: _Next, state: Value, operands: Sequence[Value], kept: int = 1) -> Value:
    """Rows of steps [n, t, ...], then the `kept` newest states, the latest first, all flat."""
    steps = operands[0].shape[1]
    if steps > MOST_STEPS:
        raise invalid(
            f"the gradient of a recurrence of {steps} steps; at most {MOST_STEPS} are unrolled",
            "cut the sequence, and carry the state from part to part",
        )
    rows, states = [], [state]
    for number in range(steps):
        state, row = advance(state, *(one[:, number] for one in operands))
        rows.append(reshape(row, (row.shape[0], 1, *row.shape[1:])))
        states.append(state)
    parts = [_flat(apply("concat", *rows, axis=1))] if rows else []
    parts += [_flat(one) for one in states[::-1][:kept]]
    if kept > len(states):
        size = (kept - len(states)) * state.size
        parts.append(state.graph.full((size,), 0.0, state.dtype))
    return apply("concat", *parts, axis=0) if len(parts) > 1 else parts[0]


def _flat(x: Value) -> Value:
    return reshape(x, (x.size,))


def _ssm_scan(
    attributes: Mapping[str, Any],
    states: Value,
    x: Value,
    dt: Value,
    a: Value,
    b: Value,
    c: Value,
    ids: Value,
) -> Value:
    heads, group = x.shape[2], b.shape[2]
    shared = [number // (heads // group) for number in range(heads)] if heads else []
    b, c = (picked(one, shared, 2) for one in (b, c))
    flat = reshape(states, (states.shape[0], math.prod(states.shape[1:])))
    start = reshape(apply("get_rows", flat, ids), (ids.size, *states.shape[1:]))
    decay = _before_last(a)

    def advance(state: Value, x: Value, dt: Value, b: Value, c: Value) -> tuple[Value, Value]:
        pace = _last(_last(apply("softplus", dt)))
        state = apply("exp", pace * decay) * state + pace * _last(x) * _before_last(b)
        return state, _sum(state * _before_last(c), -1)

    return _scanned(advance, start, (x, dt, b, c), int(attributes["snapshots"]))


def _packed(advance: _Next, state: Value, *operands: Value) -> Value:
    """Scan rows [t, h, s] with states [n, h s s] and return rows [t + n s, h s]."""
    tokens, heads, width = operands[0].shape
    count = state.shape[0]
    split = [reshape(one, (count, tokens // count, heads, width)) for one in operands]
    start = reshape(state, (count, heads, width, width))
    return reshape(_scanned(advance, start, split), (tokens + count * width, heads * width))


def _rwkv_wkv6(
    attributes: Mapping[str, Any], k: Value, v: Value, r: Value, first: Value, decay: Value, state: Value
) -> Value:
    def advance(state: Value, k: Value, v: Value, r: Value, decay: Value) -> tuple[Value, Value]:
        product = _last(k) * _before_last(v)
        row = _sum((_last(first) * product + state) * _last(r), -2)
        return _last(decay) * state + product, row

    return _packed(advance, state, k, v, r, decay)


def _rwkv_wkv7(attributes: Mapping[str, Any], *operands: Value) -> Value:
    def advance(
        state: Value, r: Value, w: Value, k: Value, v: Value, a: Value, b: Value
    ) -> tuple[Value, Value]:
        removed = _sum(state * _before_last(a), -1)
        added = _last(v) * _before_last(k) + _last(removed) * _before_last(b)
        state = state * _before_last(w) + added
        return state, _sum(state * _before_last(r), -1)

    *tokenwise, state = operands
    return _packed(advance, state, *tokenwise)


def _gated_linear_attn(
    attributes: Mapping[str, Any], k: Value, v: Value, q: Value, g: Value, state: Value
) -> Value:
    scaled = apply("scale", q, scale=attributes["scale"])

    def advance(state: Value, k: Value, v: Value, q: Value, g: Value) -> tuple[Value, Value]:
        state = _last(g) * state + _last(k) * _before_last(v)
        return state, _sum(state * _last(q), -2)

    return _packed(advance, state, k, v, scaled, g)


def _gated_delta_net(
    attributes: Mapping[str, Any], q: Value, k: Value, v: Value, g: Value, beta: Value, state: Value
) -> Value:
    count, _, heads, width = v.shape
    q, k = (_shared(one, count, heads) for one in (q, k))
    scale = 1 / math.sqrt(max(1, width))

    def advance(state: Value, q: Value, k: Value, v: Value, g: Value, beta: Value) -> tuple[Value, Value]:
        state = state * _before_last(apply("exp", g))
        change = (v - _sum(state * _before_last(k), -1)) * beta
        state = state + _last(change) * _before_last(k)
        return state, _sum(state * _before_last(q), -1) * scale

    found = _scanned(advance, state, (q, k, v, g, beta), int(attributes["snapshots"]))
    return reshape(found, (-1, heads * width))


def _shared(x: Value, count: int, heads: int) -> Value:
    """Repeat each sequence for consecutive ones, and cycle through the heads."""
    times = count // max(1, x.shape[0])
    x = picked(x, np.repeat(np.arange(x.shape[0]), times).tolist(), 0) if times != 1 else x
    return picked(x, [head % x.shape[2] for head in range(heads)], 2) if heads != x.shape[2] else x


RULES: Mapping[str, Rule] = {
    "ssm_scan": composed(_ssm_scan),
    "rwkv_wkv6": composed(_rwkv_wkv6),
    "rwkv_wkv7": composed(_rwkv_wkv7),
    "gated_linear_attn": composed(_gated_linear_attn),
    "gated_delta_net": composed(_gated_delta_net),
}
