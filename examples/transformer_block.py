"""One transformer block with weights from a safetensors file, checked against NumPy.

Pre-norm (RMSNorm), causal attention with rotary positions, and a SwiGLU feed-forward layer, as in
Llama.

    pip install 'heliograph[models]'
    python transformer_block.py [URL] [FILE.safetensors]
"""

import sys
from pathlib import Path

import numpy as np
from weights import load_or_make

import heliograph as hg

TOKENS, HIDDEN, HEADS, INNER = 16, 64, 4, 128
SIZE = HIDDEN // HEADS

SHAPES = {
    "attention_norm.weight": (HIDDEN,),
    "wq.weight": (HIDDEN, HIDDEN),
    "wk.weight": (HIDDEN, HIDDEN),
    "wv.weight": (HIDDEN, HIDDEN),
    "wo.weight": (HIDDEN, HIDDEN),
    "ffn_norm.weight": (HIDDEN,),
    "gate.weight": (INNER, HIDDEN),
    "up.weight": (INNER, HIDDEN),
    "down.weight": (HIDDEN, INNER),
}


def block(weights: dict[str, np.ndarray]) -> hg.Graph:
    """Return a graph from `x`, f32 [TOKENS, HIDDEN], to `y` of the same shape."""
    graph = hg.Graph()
    w = {name.removesuffix(".weight"): graph.weight(name, array) for name, array in weights.items()}
    x = graph.input("x", (TOKENS, HIDDEN), "f32")
    positions = graph.constant(np.arange(TOKENS, dtype=np.int32))
    hidden = np.triu(np.full((TOKENS, TOKENS), -np.inf, np.float32), 1)  # later tokens are hidden

    with graph.scope("attention"):
        normed = hg.rms_norm(x, w["attention_norm"])
        q, k, v = ((normed @ w[name].mT).reshape((TOKENS, HEADS, SIZE)) for name in ("wq", "wk", "wv"))
        q, k = (hg.ops.rope(one, positions, n_dims=SIZE) for one in (q, k))
        q, k, v = (hg.permute_dims(one, (1, 0, 2)).reshape((1, HEADS, TOKENS, SIZE)) for one in (q, k, v))
        mask = graph.constant(hidden.reshape((1, 1, TOKENS, TOKENS)))
        attended = hg.ops.flash_attn_ext(q, k, v, mask, scale=SIZE**-0.5)
        x = x + attended.reshape((TOKENS, HIDDEN)) @ w["wo"].mT
    with graph.scope("feed_forward"):
        normed = hg.rms_norm(x, w["ffn_norm"])
        x = x + (hg.silu(normed @ w["gate"].mT) * (normed @ w["up"].mT)) @ w["down"].mT
    graph.output("y", x)
    return graph


def in_numpy(w: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """The same in float64."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"]

    def rope(x: np.ndarray) -> np.ndarray:
        angles = np.arange(TOKENS)[:, None] * 10000.0 ** (-np.arange(0, SIZE, 2) / SIZE)
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None]
        return np.stack([turned.real, turned.imag], -1).reshape(x.shape)

    x = x.astype(np.float64)
    normed = norm(x, "attention_norm")
    q, k, v = ((normed @ w[f"{name}.weight"].T).reshape((TOKENS, HEADS, SIZE)) for name in ("wq", "wk", "wv"))
    scores = np.einsum("ihd,jhd->hij", rope(q), rope(k)) / np.sqrt(SIZE)
    scores[:, np.triu(np.ones((TOKENS, TOKENS), bool), 1)] = -np.inf
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    x = x + np.einsum("hij,jhd->ihd", shares, v).reshape((TOKENS, HIDDEN)) @ w["wo.weight"].T
    normed = norm(x, "ffn_norm")
    gate = normed @ w["gate.weight"].T
    return x + (gate / (1 + np.exp(-gate)) * (normed @ w["up.weight"].T)) @ w["down.weight"].T


if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else "local:"
    file = Path(sys.argv[2] if len(sys.argv) > 2 else "transformer_block.safetensors")
    weights = load_or_make(file, SHAPES)
    x = np.random.default_rng(1).standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    with hg.connect(url) as session:
        y = session.compile(block(weights)).run(x=x)["y"]
    error = np.abs(y - in_numpy(weights, x)).max()
    print(f"y is {y.shape} {y.dtype}; the largest difference from NumPy in float64 is {error:.1e}")
    assert error < 1e-3
