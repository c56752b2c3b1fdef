"""A step of a small decoder, q4_0 weights and an f16 cache, beside ggml's CPU backend on as many
threads.

The two run in turn, so that a drift of the machine meets both; the note has the shortest run of
each.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from figures import Figure, rested_turns
from limits import limits

from heliograph_backends.contract import Abort, DeviceCompileOptions, LeafBindings
from heliograph_backends.cpu import CpuDevice
from heliograph_proto.graph import LeafKind

sys.path.append(str(Path(__file__).parents[1] / "support"))

from backend_graphs import Maker, normalised_error, place, place_weight
from peers import ggml

LAYERS, WIDTH, HIDDEN, WORDS = 8, 1024, 2816, 32000
HEADS, KV_HEADS, ROW = 16, 4, 64
#: Tokens in the cache, with the one that is decoded.
TOKENS = 128
ROUNDS, RUNS = 12, 10
BAR = 1.2
STORED = "q4_0"
EPS, BASE = 1e-5, 10000.0
#: ggml quantizes the activations too, layer after layer.
TOLERANCE = 2e-2
#: The rows and the row's length of each matrix of a layer.
MATRICES = {
    "q": (HEADS * ROW, WIDTH), "k": (KV_HEADS * ROW, WIDTH), "v": (KV_HEADS * ROW, WIDTH),
    "o": (WIDTH, HEADS * ROW), "gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN),
}  # fmt: skip

Array = ggml.Array


class Leaves(NamedTuple):
    """All that a step reads: blocks, rows of norms and caches by name, and the token."""

    matrices: dict[str, Array]
    norms: dict[str, Array]
    caches: dict[str, Array]
    token: Array
    at: Array
    mask: Array


def figures() -> Iterator[Figure]:
    """Milliseconds a token."""
    device = CpuDevice("decoder")
    try:
        yield _figure(device, leaves())
    except ggml.MissingError as error:
        print(f"no figures of a decoder: {error}", file=sys.stderr)
    finally:
        device.close()


def leaves() -> Leaves:
    """Random weights of a size at which activations neither grow nor fade."""
    random = np.random.default_rng(17)

    def matrix(rows: int, columns: int) -> Array:
        values = random.standard_normal((rows, columns), np.float32) * np.float32(columns**-0.5)
        return ggml.quantized(values, STORED)

    shapes = {f"{name}{layer}": shape for layer in range(LAYERS) for name, shape in MATRICES.items()}
    matrices = {name: matrix(*shape) for name, shape in shapes.items()}
    matrices |= {"tokens": matrix(WORDS, WIDTH), "output": matrix(WORDS, WIDTH)}
    names = [f"{kind}{layer}" for layer in range(LAYERS) for kind in ("before", "between")]
    norms = {name: random.uniform(0.5, 1.5, WIDTH).astype(np.float32) for name in (*names, "last")}
    caches = {
        f"{kind}{layer}": random.standard_normal((TOKENS, KV_HEADS * ROW), np.float32).astype(np.float16)
        for layer in range(LAYERS)
        for kind in ("keys", "values")
    }
    at = np.array([TOKENS - 1], np.int32)
    return Leaves(matrices, norms, caches, np.array([4711], np.int32), at, np.zeros((1, TOKENS), np.float16))


def _figure(device: CpuDevice, given: Leaves) -> Figure:
    with Peer(given, device.threads) as theirs, _plan(device, given) as (run, result):
        ours, peer = rested_turns(run, theirs.compute, ROUNDS, RUNS)
        if normalised_error(result, theirs.result()) > TOLERANCE:
            raise RuntimeError("the decoders differ")
    shortest = f"shortest {min(ours) * 1e3:.3f} and {min(peer) * 1e3:.3f} ms, {device.threads} threads"
    medians = [statistics.median(found) * 1e3 for found in (ours, peer)]
    # A token reads every matrix but that of tokens, of which it reads a row.
    read_bytes = sum(array.nbytes for name, array in given.matrices.items() if name != "tokens")
    note = f"{shortest}; {limits().beside(min(ours), read_bytes=read_bytes)}"
    return Figure(f"decoder/{STORED}-1", *medians, BAR, "ms", f"ggml {ggml.version()}", note)


# Ours


def graph(given: Leaves) -> Maker:
    """The step: the token's word, the layers, the logits of the next word."""
    made = Maker()
    matrices = {name: made.weight(blocks, STORED) for name, blocks in given.matrices.items()}
    norms = {name: made.weight(row) for name, row in given.norms.items()}
    caches = {name: made.variable(rows) for name, rows in given.caches.items()}
    token, at, mask = (made.input(each) for each in (given.token, given.at, given.mask))
    x = made.node("get_rows", matrices["tokens"], token)
    for layer in range(LAYERS):
        h = _normal(made, x, norms[f"before{layer}"])
        seen = _attention(made, h, matrices, caches, layer, at, mask)
        x = made.node("add", x, made.node("mul_mat", matrices[f"o{layer}"], seen))
        h = _normal(made, x, norms[f"between{layer}"])
        gate, up = (made.node("mul_mat", matrices[f"{name}{layer}"], h) for name in ("gate", "up"))
        hidden = made.node("swiglu", gate, up)
        x = made.node("add", x, made.node("mul_mat", matrices[f"down{layer}"], hidden))
    made.output(made.node("mul_mat", matrices["output"], _normal(made, x, norms["last"])))
    return made


def _normal(made: Maker, x: int, row: int) -> int:
    return made.node("mul", made.node("rms_norm", x, eps=EPS), row)


def _attention(
    made: Maker, h: int, matrices: dict[str, int], caches: dict[str, int], layer: int, at: int, mask: int
) -> int:
    q, k, v = (made.node("mul_mat", matrices[f"{name}{layer}"], h) for name in "qkv")
    q, k = (
        made.node(
            "rope", made.node("reshape", each, shape=(1, heads, ROW)), at, n_dims=ROW, mode=0, freq_base=BASE
        )
        for each, heads in ((q, HEADS), (k, KV_HEADS))
    )
    q = made.node("reshape", q, shape=(1, HEADS, 1, ROW))
    kept = []
    for name, rows in (("keys", made.node("reshape", k, shape=(1, KV_HEADS * ROW))), ("values", v)):
        cache = caches[f"{name}{layer}"]
        written = made.node("assign", cache, made.node("set_rows", cache, rows, at))
        heads = made.node("reshape", written, shape=(1, TOKENS, KV_HEADS, ROW))
        kept.append(made.node("permute", heads, axes=(0, 2, 1, 3)))
    seen = made.node("flash_attn_ext", q, *kept, mask, scale=ROW**-0.5)
    return made.node("reshape", seen, shape=(1, HEADS * ROW))


@contextmanager
def _plan(device: CpuDevice, given: Leaves) -> Iterator[tuple[Callable[[], object], Array]]:
    """A run of our plan, and the array that it writes."""
    made = graph(given)
    pairs = zip(made.leaves, made.arrays, strict=True)
    tensors = [
        (place_weight if leaf.kind is LeafKind.WEIGHT else place)(device, array, leaf.type)
        for leaf, array in pairs
    ]
    bound = {
        kind: {value: tensors[value] for value, leaf in enumerate(made.leaves) if leaf.kind is kind}
        for kind in LeafKind
    }
    y = place(device, np.zeros((1, WORDS), np.float32))
    bindings = LeafBindings(bound[LeafKind.WEIGHT], bound[LeafKind.VARIABLE])
    plan = device.compile(made.graph(), bindings, DeviceCompileOptions())
    inputs, abort = list(bound[LeafKind.INPUT].values()), Abort()
    try:
        yield lambda: plan.compute(inputs, [y], abort), y.array
    finally:
        plan.free()
        for each in (*tensors, y):
            each.buffer.free()


# ggml's


class Peer(ggml.Graph):
    """The same step in ggml, prepared once."""

    def __init__(self, given: Leaves, threads: int) -> None:
        super().__init__()
        self._given = given
        self._token, self._at = self.input("i32", (1,)), self.input("i32", (1,))
        self._row = self.input("i64", (1,))
        self._mask = self.weight("f16", given.mask.shape, given.mask)
        x = self.node("get_rows", self._matrix("tokens", (WORDS, WIDTH)), self._token)
        for layer in range(LAYERS):
            seen = self._attention(self._normal(x, f"before{layer}"), layer)
            x = self.node("add", x, self._product("o", layer, seen))
            h = self._normal(x, f"between{layer}")
            gate, up = (self._product(name, layer, h) for name in ("gate", "up"))
            x = self.node("add", x, self._product("down", layer, self.node("swiglu_split", gate, up)))
        matrix = self._matrix("output", (WORDS, WIDTH))
        self._logits = self.node("mul_mat", matrix, self._normal(x, "last"))
        inputs = {self._token: given.token, self._at: given.at, self._row: given.at.astype(np.int64)}
        self._prepared_at = self._prepared([self._logits], inputs, threads)

    def compute(self) -> None:
        ggml._compute(self._prepared_at)

    def result(self) -> Any:
        return ggml._values_of(self._logits).reshape(1, WORDS)

    def _matrix(self, name: str, shape: tuple[int, int]) -> ggml.Tensor:
        return self.weight(STORED, shape, self._given.matrices[name])

    def _product(self, name: str, layer: int, x: ggml.Tensor) -> ggml.Tensor:
        return self.node("mul_mat", self._matrix(f"{name}{layer}", MATRICES[name]), x)

    def _normal(self, x: ggml.Tensor, name: str) -> ggml.Tensor:
        return self.node("mul", self.node("rms_norm", x, EPS), self.array(self._given.norms[name]))

    def _attention(self, h: ggml.Tensor, layer: int) -> ggml.Tensor:
        numbers = (None, ROW, 0, 0, BASE, 1.0, 0.0, 1.0, 32.0, 1.0)
        q, k = (
            self.node("rope_ext", self._heads(self._product(name, layer, h), heads), self._at, *numbers)
            for name, heads in (("q", HEADS), ("k", KV_HEADS))
        )
        size = KV_HEADS * ROW
        kept = []
        for name, rows in (("keys", self._line(k, size)), ("values", self._product("v", layer, h))):
            cache = self.array(self._given.caches[f"{name}{layer}"])
            written = self.node("set_rows", cache, rows, self._row)
            kept.append(
                self.node(
                    "view_4d", written, ROW, TOKENS, KV_HEADS, 1, 2 * size, 2 * ROW, 2 * size * TOKENS, 0
                )
            )
        q = self.node("permute", q, 0, 2, 1, 3)
        seen = self.node("flash_attn_ext", q, *kept, self._mask, ROW**-0.5, 0.0, 0.0)
        return self._line(seen, HEADS * ROW)

    def _heads(self, x: ggml.Tensor, heads: int) -> ggml.Tensor:
        return self.node("view_3d", x, ROW, heads, 1, 4 * ROW, 4 * ROW * heads, 0)

    def _line(self, x: ggml.Tensor, size: int) -> ggml.Tensor:
        return self.node("view_2d", x, size, 1, 4 * size, 0)
