"""Cases of state space models and linear attention, whose references walk over tokens and elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from backend_graphs import Array
from op_cases import FLOATS, Case, Cases, Refusal, data, t, wide

MIXED = (("f32", "f32"), ("f16", "f32"), ("f16", "f16"), ("f64", "f64"))


def gates(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    """Numbers between 0 and 1."""
    return random.uniform(0.25, 0.9, shape).astype({"f16": "f2", "f32": "f4", "f64": "f8"}[name])


def ssm_conv_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for left, right in MIXED:
        for n, c, tokens, taps in ((1, 1, 1, 1), (2, 5, 7, 4), (2, 3, 0, 3), (1, 65, 3, 2)):
            x, kernel = data(random, left, (n, c, tokens + taps - 1)), data(random, right, (c, taps))
            expected = np.zeros((n, tokens, c))
            for i, token, channel, tap in itertools.product(range(n), range(tokens), range(c), range(taps)):
                expected[i, token, channel] += wide(x)[i, channel, token + tap] * wide(kernel)[channel, tap]
            yield Case(op, [x, kernel], expected)


def ssm_scan(
    kept: int, ids: Array, states: Array, x: Array, dt: Array, a: Array, b: Array, c: Array
) -> Array:
    """Element by element, in float64."""
    n, tokens, heads, width = x.shape
    y, snapshots = np.zeros(x.shape), np.zeros((kept, n, *states.shape[1:]))
    for i, h in itertools.product(range(n), range(heads)):
        group = h // (heads // b.shape[2])
        state = states[ids[i], h].copy()
        for token in range(-1, tokens):
            for d in range(width if token >= 0 else 0):
                pace, total = math.log1p(math.exp(dt[i, token, h])), 0.0
                for s in range(state.shape[1]):
                    decay = math.exp(pace * a[h, s % a.shape[1]])
                    state[d, s] = decay * state[d, s] + pace * x[i, token, h, d] * b[i, token, group, s]
                    total += state[d, s] * c[i, token, group, s]
                y[i, token, h, d] = total
            if tokens - 1 - token < kept:
                snapshots[tokens - 1 - token, i, h] = state
    return np.concatenate([y.ravel(), snapshots.ravel()])


SCANS = (  # States, sequences, tokens, heads, their width, groups, state size, decays, snapshots.
    (1, 1, 1, 1, 1, 1, 1, 1, 1), (3, 2, 3, 4, 3, 2, 5, 1, 1), (2, 2, 2, 4, 1, 1, 16, 16, 1),
    (2, 2, 4, 2, 3, 2, 4, 1, 3), (2, 1, 2, 2, 1, 2, 3, 1, 5), (2, 2, 0, 1, 2, 1, 3, 1, 1),
)  # fmt: skip


def ssm_scan_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, kind, form in itertools.product(FLOATS, ("i4", "i8"), SCANS):
        m, n, tokens, heads, width, groups, size, decays, kept = form
        states, x = (data(random, name, s) for s in ((m, heads, width, size), (n, tokens, heads, width)))
        dt, a = data(random, name, (n, tokens, heads)), -gates(random, name, (heads, decays))
        b, c = (data(random, name, (n, tokens, groups, size)) for _ in range(2))
        ids = random.integers(0, m, n).astype(kind)
        operands = [states, x, dt, a, b, c]
        expected = ssm_scan(kept, ids, *map(wide, operands))
        yield Case(op, [*operands, ids], expected, {} if kept == 1 else {"snapshots": kept})


#: Sequences, tokens of each, heads, width.
TOKENS = ((1, 1, 1, 1), (2, 3, 2, 4), (1, 5, 3, 1), (3, 1, 1, 5), (2, 0, 2, 3))


def states_of(form: Sequence[int], state: Array) -> Iterator[tuple[int, Array, range]]:
    """For each sequence and head the head, its state, and the sequence's tokens."""
    n, tokens, heads, width = form
    split = state.reshape(n, heads, width, width)
    for i, h in itertools.product(range(n), range(heads)):
        yield h, split[i, h], range(i * tokens, (i + 1) * tokens)


def wkv(form: Sequence[int], state: Array, step: Callable[..., Array], *operands: Array) -> Array:
    """The rows that step(state, a token's and head's operands) gives as it changes states, then these."""
    n, tokens, heads, width = form
    rows, after = np.zeros((n * tokens, heads, width)), wide(state).copy()
    for h, own, places in states_of(form, after):
        for token in places:
            rows[token, h] = step(own, *(wide(x)[token, h] for x in operands))
    return np.concatenate([rows.ravel(), after.ravel()]).reshape(-1, heads * width)


def wkv6(own: Array, k: Array, v: Array, r: Array, first: Array, decay: Array) -> Array:
    row = np.zeros(own.shape[0])
    for i, j in np.ndindex(own.shape):
        product = k[i] * v[j]
        row[j] += r[i] * (first[i] * product + own[i, j])
        own[i, j] = decay[i] * own[i, j] + product
    return row


def rwkv_wkv6_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, form in itertools.product(FLOATS, TOKENS):
        n, tokens, heads, width = form
        k, v, r = (data(random, name, (n * tokens, heads, width)) for _ in range(3))
        first, decay = data(random, name, (heads, width)), gates(random, name, k.shape)
        state = data(random, name, (n, heads * width * width))
        expected = wkv(form, state, wkv6, k, v, r, np.broadcast_to(first, k.shape), decay)
        yield Case(op, [k, v, r, first, decay, state], expected)


def wkv7(own: Array, r: Array, w: Array, k: Array, v: Array, a: Array, b: Array) -> Array:
    row = np.zeros(own.shape[0])
    for i in range(own.shape[0]):
        removed = sum(a[j] * own[i, j] for j in range(own.shape[1]))
        for j in range(own.shape[1]):
            own[i, j] = own[i, j] * w[j] + v[i] * k[j] + removed * b[j]
            row[i] += own[i, j] * r[j]
    return row


def rwkv_wkv7_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, form in itertools.product(FLOATS, TOKENS):
        n, tokens, heads, width = form
        shape = (n * tokens, heads, width)
        r, k, v = (data(random, name, shape) for _ in range(3))
        w, b, a = gates(random, name, shape), gates(random, name, shape), -gates(random, name, shape)
        state = data(random, name, (n, heads * width * width))
        yield Case(op, [r, w, k, v, a, b, state], wkv(form, state, wkv7, r, w, k, v, a, b))


def linear(own: Array, k: Array, v: Array, q: Array, g: Array) -> Array:
    row = np.zeros(own.shape[0])
    for i, j in np.ndindex(own.shape):
        own[i, j] = g[i] * own[i, j] + k[i] * v[j]
        row[j] += own[i, j] * q[i]
    return row


def gated_linear_attn_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, form, scale in itertools.product(FLOATS, TOKENS, (1.0, 0.3)):
        n, tokens, heads, width = form
        k, v, q = (data(random, name, (n * tokens, heads, width)) for _ in range(3))
        g, state = gates(random, name, k.shape), data(random, name, (n, heads * width * width))
        expected = wkv(form, state, linear, k, v, wide(q) * scale, g)
        yield Case(op, [k, v, q, g, state], expected, {"scale": scale})


#: Sequences, tokens, heads, width; sequences and heads of q and k; gates of a head; snapshots.
DELTAS = (
    (1, 1, 1, 1, 1, 1, 1, 1), (2, 3, 4, 5, 2, 4, 1, 1), (2, 3, 4, 3, 1, 2, 3, 1), (2, 4, 2, 3, 2, 1, 1, 3),
    (1, 2, 2, 4, 1, 2, 4, 4), (4, 1, 6, 2, 2, 3, 2, 1), (1, 0, 2, 3, 1, 1, 1, 1),
)  # fmt: skip


def gated_delta_net_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, form in itertools.product(FLOATS, DELTAS):
        n, tokens, heads, width, own_n, own_heads, own_gates, kept = form
        shape = (own_n, tokens, own_heads, width)
        q, k = (data(random, name, shape) / np.asarray(4, name_of(name)) for _ in range(2))
        v, g = (
            data(random, name, (n, tokens, heads, width)),
            -gates(random, name, (n, tokens, heads, own_gates)),
        )
        beta, state = gates(random, name, (n, tokens, heads, 1)), data(random, name, (n, heads, width, width))
        operands = [q, k, v, g, beta, state]
        expected = gated_delta_net(kept, *map(wide, operands))
        yield Case(op, operands, expected, {} if kept == 1 else {"snapshots": kept})


def name_of(name: str) -> str:
    return {"f16": "f2", "f32": "f4", "f64": "f8"}[name]


def gated_delta_net(kept: int, q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array) -> Array:
    """S of [keys, values], the transpose of what is stored, as the paper writes it."""
    n, tokens, heads, width = v.shape
    rows, states = np.zeros(v.shape), np.zeros((kept, *state.shape))
    for i, h in itertools.product(range(n), range(heads)):
        s, at = state[i, h].T.copy(), (i // (n // q.shape[0]), h % q.shape[2])
        for token in range(-1, tokens):
            if token >= 0:
                key, query = k[at[0], token, at[1]], q[at[0], token, at[1]]
                s = np.diag(np.exp(np.broadcast_to(g[i, token, h], width))) @ s
                s = s + np.outer(key, beta[i, token, h] * (v[i, token, h] - s.T @ key))
                rows[i, token, h] = s.T @ query / math.sqrt(width)
            if tokens - 1 - token < kept:
                states[tokens - 1 - token, i, h] = s.T
    return np.concatenate([rows.ravel(), states.ravel()]).reshape(-1, heads * width)


def solve_tri_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    """With ones along the diagonal, or twos, and little beside it, errors do not grow."""
    forms: tuple[tuple[tuple[int, ...], int, int], ...] = (
        ((), 1, 1), ((), 5, 3), ((2, 3), 7, 2), ((2,), 33, 4), ((0,), 3, 2), ((), 4, 0),
    )  # fmt: skip
    for name, (lead, n, k) in itertools.product(FLOATS, forms):
        a, b = data(random, name, (*lead, n, n)), data(random, name, (*lead, n, k))
        a = (a / np.asarray(4 * n, a.dtype) + np.eye(n, dtype=a.dtype) * np.asarray(2, a.dtype)).astype(
            a.dtype
        )
        yield Case(op, [a, b], np.linalg.solve(np.tril(wide(a)), wide(b)))


CASES: dict[str, Cases] = {
    "ssm_conv": ssm_conv_cases, "ssm_scan": ssm_scan_cases, "rwkv_wkv6": rwkv_wkv6_cases,
    "rwkv_wkv7": rwkv_wkv7_cases, "gated_linear_attn": gated_linear_attn_cases,
    "gated_delta_net": gated_delta_net_cases, "solve_tri": solve_tri_cases,
}  # fmt: skip

SCAN = [t("f32", 2, 4, 3, 5), t("f32", 2, 6, 4, 3), t("f32", 2, 6, 4), t("f32", 4, 1), t("f32", 2, 6, 2, 5),
        t("f32", 2, 6, 2, 5), t("i32", 2)]  # fmt: skip
K, STATE = t("f32", 6, 2, 4), t("f32", 3, 32)
DELTA = [t("f32", 2, 3, 2, 4), t("f32", 2, 3, 2, 4), t("f32", 2, 3, 4, 4), t("f32", 2, 3, 4, 1),
         t("f32", 2, 3, 4, 1), t("f32", 2, 4, 4, 4)]  # fmt: skip


def changed(
    what: str, op: str, types: list[Any], place: int, other: Any, message: str, **more: Any
) -> Refusal:
    """Good operands, but for one."""
    return (what, op, [*types[:place], other, *types[place + 1 :]], more, message)


REFUSED: list[Refusal] = [
    changed("a kernel too long", "ssm_conv", [t("f32", 2, 3, 4)], 1, t("f32", 3, 6), "do not fit"),
    changed("a kernel of other channels", "ssm_conv", [t("f32", 2, 3, 4)], 1, t("f32", 2, 2), "do not fit"),
    changed("a kernel of no taps", "ssm_conv", [t("f32", 2, 3, 4)], 1, t("f32", 3, 0), "do not fit"),
    changed("convolved rows", "ssm_conv", [t("f32", 3, 4), t("f32", 3, 2)], 0, t("f32", 3, 4), "needed"),
    changed("states of other heads", "ssm_scan", SCAN, 0, t("f32", 2, 3, 3, 5), "states is f32"),
    changed("x of three dimensions", "ssm_scan", SCAN, 1, t("f32", 6, 4, 3), "x is f32"),
    changed("dt of other tokens", "ssm_scan", SCAN, 2, t("f32", 2, 5, 4), "dt is f32"),
    changed("A of another state", "ssm_scan", SCAN, 3, t("f32", 4, 4), "A is f32"),
    changed("B and C that differ", "ssm_scan", SCAN, 5, t("f32", 2, 6, 1, 5), "C is f32"),
    changed("groups that do not divide", "ssm_scan", [*SCAN[:4], *[t("f32", 2, 6, 3, 5)] * 2, SCAN[6]], 6,
            SCAN[6], "3 groups"),
    changed("ids of other sequences", "ssm_scan", SCAN, 6, t("i32", 3), "ids is i32"),
    changed("ids that are floats", "ssm_scan", SCAN, 6, t("f32", 2), "must be i32 or i64"),
    changed("no snapshot", "ssm_scan", SCAN, 6, SCAN[6], "snapshots is 0", snapshots=0),
    changed("snapshots of Mamba 1", "ssm_scan", SCAN, 3, t("f32", 4, 5), "must be 1", snapshots=2),
    changed("r of other tokens", "rwkv_wkv6", [K, K, K, t("f32", 2, 4), K, STATE], 2, t("f32", 5, 2, 4),
            "r is f32"),
    changed("first for tokens", "rwkv_wkv6", [K, K, K, K, K, STATE], 3, K, "first is f32"),
    changed("a state for other sequences", "rwkv_wkv7", [K] * 6, 6, t("f32", 4, 32), "of equal length"),
    changed("a state for nobody", "rwkv_wkv7", [K] * 6, 6, t("f32", 0, 32), "of equal length"),
    changed("a state of another size", "rwkv_wkv7", [K] * 6, 6, t("f32", 3, 16), "state is f32"),
    changed("keys of rows", "gated_linear_attn", [t("f32", 6, 8), K, K, K, STATE], 1, K, "k is f32"),
    changed("an infinite scale", "gated_linear_attn", [K] * 4, 4, STATE, "scale is inf", scale=math.inf),
    changed("one of f64", "gated_linear_attn", [K] * 4, 4, t("f64", 3, 32), "one of them f64"),
    changed("heads that do not divide", "gated_delta_net", DELTA, 0, t("f32", 2, 3, 3, 4), "do not divide"),
    changed("keys of other tokens", "gated_delta_net", DELTA, 1, t("f32", 2, 2, 2, 4), "k is f32"),
    changed("gates of another width", "gated_delta_net", DELTA, 3, t("f32", 2, 3, 4, 2), "g is f32"),
    changed("beta of elements", "gated_delta_net", DELTA, 4, t("f32", 2, 3, 4, 4), "beta is f32"),
    changed("a packed state", "gated_delta_net", DELTA, 5, t("f32", 2, 64), "state is f32"),
    changed("snapshots below 1", "gated_delta_net", DELTA, 5, DELTA[5], "snapshots is -1", snapshots=-1),
    changed("a matrix that is not square", "solve_tri", [t("f32", 3, 4)], 1, t("f32", 3, 2), "needed"),
    changed("a right side of other rows", "solve_tri", [t("f32", 3, 3)], 1, t("f32", 2, 2), "needed"),
    changed("a right side without columns", "solve_tri", [t("f32", 3, 3)], 1, t("f32", 3), "at least 2"),
    changed("a right side of f16", "solve_tri", [t("f32", 3, 3)], 1, t("f16", 3, 2), "different data"),
]  # fmt: skip
