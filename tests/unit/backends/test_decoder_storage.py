"""A decoder layer with grouped queries, a cache and experts, its weights and its cache in every storage,
against the same layer in float64 on what the storage stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from backend_graphs import Array, normalised_error

import heliograph as hg
from heliograph_proto.quantization import blocks
from heliograph_proto.quantization.blocks import dequantize, quantize
from heliograph_proto.types import dtype

SEED = 20250314
WIDTH, HEADS, KV_HEADS, ROW, ROOM, EXPERTS, USED, HIDDEN, VOCABULARY = 64, 4, 2, 32, 8, 4, 2, 96, 11
#: The rows of each matrix; all have rows of WIDTH elements but for the last.
SHAPES = {
    "tokens": (VOCABULARY, WIDTH), "q": (HEADS * ROW, WIDTH), "k": (KV_HEADS * ROW, WIDTH),
    "v": (KV_HEADS * ROW, WIDTH), "o": (WIDTH, HEADS * ROW), "router": (EXPERTS, WIDTH),
    "gate": (EXPERTS, HIDDEN, WIDTH), "up": (EXPERTS, HIDDEN, WIDTH), "down": (EXPERTS, WIDTH, HIDDEN),
}  # fmt: skip
STORAGES = ("f32", "f16", "bf16", "q8_0", "q4_0")
#: Of roundings in f32, of which a few flip what is stored in a cache; the definition is within 1e-11.
TOLERANCE = 1e-4


def stored(x: Array, name: str) -> Array:
    """Floats as the bits or blocks of a data type."""
    if name == "bf16":
        return blocks.to_bits(x)
    return quantize(x, name) if dtype(name).kind == "quantized" else x.astype(dtype(name).numpy)


def meant(x: Array, name: str) -> Array:
    """What bits or blocks stand for, in float64."""
    if name == "bf16":
        return blocks.from_bits(x).astype(np.float64)
    return (dequantize(x, name) if dtype(name).kind == "quantized" else x).astype(np.float64)


# The graph


def decoder(weights: dict[str, Array], name: str, cache: str, steps: int) -> hg.Graph:
    """`steps` tokens at a time: their ids, positions and mask give the layer's output."""
    g, op = hg.Graph(), hg.ops
    w = {key: g.weight(key, rows, dtype=name) for key, rows in weights.items()}
    at = g.input("at", (steps,), "i32")
    x = op.get_rows(w["tokens"], g.input("ids", (steps,), "i32"))
    h = op.rms_norm(x, eps=1e-5)
    q = op.rope(hg.reshape(op.mul_mat(w["q"], h), (steps, HEADS, ROW)), at, n_dims=ROW, mode=2)
    k = op.rope(hg.reshape(op.mul_mat(w["k"], h), (steps, KV_HEADS, ROW)), at, n_dims=ROW, mode=2)
    kept = []
    for key, rows in (("keys", hg.reshape(k, (steps, KV_HEADS * ROW))), ("values", op.mul_mat(w["v"], h))):
        variable = g.variable(key, (ROOM, KV_HEADS * ROW), cache)
        written = hg.assign(variable, op.set_rows(variable, rows, at))
        heads = op.permute(op.reshape(written, shape=(1, ROOM, KV_HEADS, ROW)), axes=(0, 2, 1, 3))
        kept.append(heads)
    q = op.reshape(op.permute(q, axes=(1, 0, 2)), shape=(1, HEADS, steps, ROW))
    mask = g.input("mask", (steps, ROOM), "f16")
    seen = op.flash_attn_ext(q, *kept, mask, scale=ROW**-0.5)
    x = x + op.mul_mat(w["o"], op.reshape(seen, shape=(steps, HEADS * ROW)))
    g.output("y", x + experts(w, op.rms_norm(x, eps=1e-5), steps))
    return g


def experts(w: dict[str, Any], h: Any, steps: int) -> Any:
    op = hg.ops
    chances = op.soft_max(op.mul_mat(w["router"], h))
    chosen = op.top_k(chances, k=USED)
    share = op.get_rows(op.reshape(chances, shape=(steps, EXPERTS, 1)), chosen)
    each = op.reshape(h, shape=(steps, 1, WIDTH))
    hidden = op.swiglu(op.mul_mat_id(w["gate"], each, chosen), op.mul_mat_id(w["up"], each, chosen))
    return hg.sum(op.mul_mat_id(w["down"], hidden, chosen) * share, axis=1)


# The reference


def rms_norm(x: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def rope(x: Array, at: int) -> Array:
    """One token's heads [h, ROW]."""
    half = ROW // 2
    angle = at * 10000.0 ** (-np.arange(half) * 2 / ROW)
    a, b = x[:, :half], x[:, half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], -1)


def reference(weights: dict[str, Array], name: str, kept: Callable[[Array], Array], ids: list[int]) -> Array:
    """Token by token; `kept` is what the cache makes of a row."""
    w = {key: meant(rows, name) for key, rows in weights.items()}
    keys: list[Array] = []
    values: list[Array] = []
    rows = []
    for at, token in enumerate(ids):
        x = w["tokens"][token]
        h = rms_norm(x)
        q = rope((w["q"] @ h).reshape(HEADS, ROW), at)
        keys.append(kept(rope((w["k"] @ h).reshape(KV_HEADS, ROW), at).ravel()).reshape(KV_HEADS, ROW))
        values.append(kept(w["v"] @ h).reshape(KV_HEADS, ROW))
        group = np.arange(HEADS) * KV_HEADS // HEADS
        scores = np.einsum("hd,nhd->hn", q, np.stack(keys)[:, group]) * ROW**-0.5
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        powers /= powers.sum(-1, keepdims=True)
        x = x + w["o"] @ np.einsum("hn,nhd->hd", powers, np.stack(values)[:, group]).ravel()
        rows.append(x + chosen_experts(w, rms_norm(x)))
    return np.stack(rows)


def chosen_experts(w: dict[str, Array], h: Array) -> Array:
    logits = w["router"] @ h
    chances = np.exp(logits - logits.max())
    chances /= chances.sum()
    total = np.zeros(WIDTH)
    for expert in np.argsort(-chances)[:USED]:
        gate, up = w["gate"][expert] @ h, w["up"][expert] @ h
        total += chances[expert] * (w["down"][expert] @ (gate / (1 + np.exp(-gate)) * up))
    return total


# Tests


@pytest.fixture(scope="module")
def floats() -> dict[str, Array]:
    print(f"seed {SEED}")
    random = np.random.default_rng(SEED)
    return {
        key: (random.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)
        for key, shape in SHAPES.items()
    }


def mask_of(first: int, steps: int) -> Array:
    hidden = np.arange(ROOM) > np.arange(first, first + steps)[:, None]
    return np.where(hidden, -np.inf, 0).astype(np.float16)


@pytest.mark.parametrize("cache", STORAGES)
@pytest.mark.parametrize("name", STORAGES)
def test_a_decoder_layer_is_what_its_storage_stands_for(
    floats: dict[str, Array], name: str, cache: str
) -> None:
    weights = {key: stored(x, name) for key, x in floats.items()}
    ids = [3, 7, 0, 10, 3]

    def kept(row: Array) -> Array:
        return meant(stored(row.astype(np.float32), cache), cache)

    expected = reference(weights, name, kept, ids)
    with hg.connect("local:") as session:
        prompt = session.compile(decoder(weights, name, cache, 3))
        step = session.compile(decoder(weights, name, cache, 1))
        at = np.arange(5, dtype=np.int32)
        found = [prompt.run(ids=np.array(ids[:3], np.int32), at=at[:3], mask=mask_of(0, 3))["y"]]
        for place in (3, 4):
            one = {"ids": np.array(ids[place : place + 1], np.int32), "at": at[place : place + 1]}
            found.append(step.run(**one, mask=mask_of(place, 1))["y"])
    assert normalised_error(np.concatenate(found), expected) < TOLERANCE
