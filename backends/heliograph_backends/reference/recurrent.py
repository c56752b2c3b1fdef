"""Formulas: state space models and linear attention, token by token, and solve_tri.

States are updated as in the papers, one token after the other: parallel forms round differently.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from heliograph_backends.reference.base import (
    Array,
    Attributes,
    Formula,
    accumulated,
    check_indices,
    constant,
    in_wide,
)

#: (state, the token's part of each operand) -> the next state, the token's row.
Step: TypeAlias = Callable[..., tuple[Array, Array]]


def ssm_conv(xp: Any, attributes: Attributes, x: Array, kernel: Array) -> Array:
    x, kernel = accumulated(xp, x, kernel)
    count = x.shape[-1] - kernel.shape[-1] + 1
    result = xp.zeros((*x.shape[:-1], count), x.dtype)
    for tap in range(kernel.shape[-1]):
        result += x[..., tap : tap + count] * kernel[:, tap, None]
    return result.swapaxes(-1, -2)


def scanned(
    xp: Any, step: Step, state: Array, operands: Iterable[Array], tokens: int, kept: int = 1
) -> Array:
    """Return the rows of tokens [n, t, ...], then the `kept` newest states, latest first, all flat.

    The state before the first token is the given one; older ones are 0.
    """
    operands, rows, states = list(operands), [], deque([state], maxlen=kept)
    for token in range(tokens):
        state, row = step(state, *(x[:, token] for x in operands))
        rows.append(row)
        states.append(state)
    made = xp.stack(rows, 1).ravel() if rows else xp.empty(0, state.dtype)
    older = xp.zeros((kept - len(states)) * state.size, state.dtype)
    return xp.concatenate([made, *(one.ravel() for one in reversed(states)), older])


def ssm_scan(
    xp: Any,
    attributes: Attributes,
    states: Array,
    x: Array,
    dt: Array,
    a: Array,
    b: Array,
    c: Array,
    ids: Array,
) -> Array:
    """Mamba (Gu and Dao, 2023), and Mamba 2 with one decay per head (Dao and Gu, 2024)."""
    check_indices("ssm_scan", ids, states.shape[0], "states")
    states, x, dt, a, b, c = accumulated(xp, states, x, dt, a, b, c)
    b, c = (xp.repeat(one, x.shape[2] // max(1, one.shape[2]), axis=2) for one in (b, c))

    def step(state: Array, x: Array, dt: Array, b: Array, c: Array) -> tuple[Array, Array]:
        pace = xp.logaddexp(constant(dt, 0), dt)[..., None, None]
        state = xp.exp(pace * a[:, None]) * state + pace * x[..., None] * b[:, :, None]
        return state, (state * c[:, :, None]).sum(-1)

    return scanned(xp, step, states[ids], (x, dt, b, c), x.shape[1], attributes["snapshots"])


def _packed(xp: Any, step: Step, state: Array, *operands: Array) -> Array:
    """Scan rows of tokens [t, h, s] with states [n, h s s] and return rows [t + n s, h s]."""
    state, *tokenwise = accumulated(xp, state, *operands)
    tokens, heads, width = tokenwise[0].shape
    count = state.shape[0]
    split = [x.reshape(count, tokens // count, heads, width) for x in tokenwise]
    start = state.reshape(count, heads, width, width)
    return scanned(xp, step, start, split, tokens // count).reshape(-1, heads * width)


def rwkv_wkv6(
    xp: Any,
    attributes: Attributes,
    k: Array,
    v: Array,
    r: Array,
    first: Array,
    decay: Array,
    state: Array,
) -> Array:
    """RWKV 6 (Peng et al., 2024): states are [keys, values]; a token's own product counts `first`
    times."""
    (first,) = accumulated(xp, first)

    def step(state: Array, k: Array, v: Array, r: Array, decay: Array) -> tuple[Array, Array]:
        product = k[..., None] * v[..., None, :]
        row = ((first[..., None] * product + state) * r[..., None]).sum(-2)
        return decay[..., None] * state + product, row

    return _packed(xp, step, state, k, v, r, decay)


def rwkv_wkv7(
    xp: Any,
    attributes: Attributes,
    r: Array,
    w: Array,
    k: Array,
    v: Array,
    a: Array,
    b: Array,
    state: Array,
) -> Array:
    """RWKV 7 (Peng et al., 2025): states are [values, keys]."""

    def step(state: Array, r: Array, w: Array, k: Array, v: Array, a: Array, b: Array) -> tuple[Array, Array]:
        removed = (state * a[..., None, :]).sum(-1)
        state = (
            state * w[..., None, :] + v[..., None] * k[..., None, :] + removed[..., None] * b[..., None, :]
        )
        return state, (state * r[..., None, :]).sum(-1)

    return _packed(xp, step, state, r, w, k, v, a, b)


def gated_linear_attn(
    xp: Any, attributes: Attributes, k: Array, v: Array, q: Array, g: Array, state: Array
) -> Array:
    """Gated linear attention (Yang et al., 2023): states are [keys, values]."""

    def step(state: Array, k: Array, v: Array, q: Array, g: Array) -> tuple[Array, Array]:
        state = g[..., None] * state + k[..., None] * v[..., None, :]
        return state, (state * (q * constant(q, attributes["scale"]))[..., None]).sum(-2)

    return _packed(xp, step, state, k, v, q, g)


def gated_delta_net(
    xp: Any,
    attributes: Attributes,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    state: Array,
) -> Array:
    """Gated DeltaNet (Yang et al., 2024): states are [values, keys]."""
    q, k, v, g, beta, state = accumulated(xp, q, k, v, g, beta, state)
    count, tokens, heads, width = v.shape
    scale = constant(v, 1 / math.sqrt(max(1, width)))

    def step(state: Array, q: Array, k: Array, v: Array, g: Array, beta: Array) -> tuple[Array, Array]:
        state = state * xp.exp(g)[..., None, :]
        change = (v - (state * k[..., None, :]).sum(-1)) * beta
        state = state + change[..., None] * k[..., None, :]
        return state, (state * q[..., None, :]).sum(-1) * scale

    q, k = (_shared(xp, one, count, heads) for one in (q, k))
    found = scanned(xp, step, state, (q, k, v, g, beta), tokens, attributes["snapshots"])
    return found.reshape(-1, heads * width)


def _shared(xp: Any, x: Array, count: int, heads: int) -> Array:
    """Repeat each sequence for consecutive ones, and cycle through the heads."""
    x = xp.repeat(x, count // max(1, x.shape[0]), axis=0)
    return xp.take(x, xp.arange(heads) % max(1, x.shape[2]), axis=2)


def solve_tri(xp: Any, attributes: Attributes, a: Array, b: Array) -> Array:
    """Forward substitution; elements above the diagonal are not read."""
    result = xp.empty(b.shape, b.dtype)
    for row in range(a.shape[-1]):
        known = (a[..., row, :row, None] * result[..., :row, :]).sum(-2)
        result[..., row, :] = (b[..., row, :] - known) / a[..., row, row, None]
    return result


FORMULAS: Mapping[str, Formula] = {
    "ssm_conv": ssm_conv,
    "ssm_scan": ssm_scan,
    "rwkv_wkv6": rwkv_wkv6,
    "rwkv_wkv7": rwkv_wkv7,
    "gated_linear_attn": gated_linear_attn,
    "gated_delta_net": gated_delta_net,
    "solve_tri": in_wide(solve_tri),
}
