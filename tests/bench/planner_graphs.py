"""Graphs that are built for our planner and for ggml's graph allocator alike, node for node in one order."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "support"))

from backend_graphs import Maker
from peers import ggml
from peers.ggml import MissingError as MissingError

AXES = 4


@dataclass(frozen=True)
class Pair:
    """One value in both graphs."""

    ours: int
    peer: ggml.Tensor
    shape: tuple[int, ...]


class Twins(ggml.Graph):
    """A graph of f32 and its twin; each method makes one node of both."""

    def __enter__(self) -> Self:
        super().__enter__()
        self.made = Maker()
        self.order: list[ggml.Tensor] = []
        self.results: list[ggml.Tensor] = []
        return self

    def output(self, value: Pair) -> None:
        self.made.output(value.ours)
        self.results.append(value.peer)

    def matrix(self, *shape: int) -> Pair:
        """A weight; neither side counts it."""
        zeros = np.broadcast_to(np.float32(0), shape)
        return Pair(self.made.weight(zeros), self.weight("f32", shape), shape)

    def data(self, shape: Sequence[int], type_name: str = "f32") -> Pair:
        """An input, which has memory of its own on both sides."""
        zeros = np.broadcast_to(np.zeros((), {"f32": "f4", "i32": "i4", "i64": "i8"}[type_name]), shape)
        return Pair(self.made.input(zeros), self.weight(type_name, shape), tuple(shape))

    def cache(self, *shape: int) -> Pair:
        """A tensor that stays from run to run; neither side counts it."""
        zeros = np.broadcast_to(np.float32(0), shape)
        return Pair(self.made.variable(zeros), self.weight("f32", shape), shape)

    def write_rows(self, cache: Pair, rows: Pair, indices: Pair) -> Pair:
        """The cache with the rows at the indices; the cache itself, on both sides."""
        peer = self.node("set_rows", cache.peer, rows.peer, indices.peer)
        found = self._pair("set_rows", [cache, rows, indices], peer)
        return Pair(self.made.node("assign", cache.ours, found.ours), peer, found.shape)

    def _pair(self, op: str, operands: Sequence[Pair], peer: ggml.Tensor, **attributes: Any) -> Pair:
        ours = self.made.node(op, *(each.ours for each in operands), **attributes)
        self.order.append(peer)
        return Pair(ours, peer, self.made.type(ours).shape)

    def op(self, name: str, *operands: Pair) -> Pair:
        """An op that has the same name and no parameters on both sides."""
        return self._pair(name, operands, self.node(name, *(each.peer for each in operands)))

    def normal(self, name: str, x: Pair, *affine: Pair) -> Pair:
        """norm or rms_norm, times a row, plus another."""
        found = self._pair(name, [x], self.node(name, x.peer, 1e-5), eps=1e-5)
        for op, row in zip(("mul", "add"), affine, strict=False):
            found = self.op(op, found, row)
        return found

    def swiglu(self, a: Pair, b: Pair) -> Pair:
        return self._pair("swiglu", [a, b], self.node("swiglu_split", a.peer, b.peer))

    def soft_max(self, x: Pair, mask: Pair, scale: float) -> Pair:
        peer = self.node("soft_max_ext", x.peer, mask.peer, scale, 0.0)
        return self._pair("soft_max", [x, mask], peer, scale=scale)

    def rope(self, x: Pair, positions: Pair) -> Pair:
        turned, dims = self.made.type(x.ours), x.shape[-1]
        parameters = (None, dims, 0, 0, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0)
        peer = self.node("rope_ext", x.peer, positions.peer, *parameters)
        return self._pair("rope", [x, positions], peer, n_dims=turned.shape[-1])

    def reshape(self, x: Pair, *shape: int) -> Pair:
        peer = self.node("reshape", x.peer, self.weight("f32", shape))
        return self._pair("reshape", [x], peer, shape=shape)

    def permute(self, x: Pair, *axes: int) -> Pair:
        front = AXES - len(axes)
        whole = [*range(front), *(front + axis for axis in axes)]
        targets = [0] * AXES
        for place, axis in enumerate(whole):
            targets[AXES - 1 - axis] = AXES - 1 - place
        return self._pair("permute", [x], self.node("permute", x.peer, *targets), axes=axes)

    def conv_2d(self, kernel: Pair, x: Pair, stride: int, padding: int) -> Pair:
        peer = self.node("conv_2d_direct", kernel.peer, x.peer, *(stride,) * 2, *(padding,) * 2, 1, 1)
        sizes = {"stride": (stride,) * 2, "padding": (padding,) * 2, "dilation": (1, 1)}
        return self._pair("conv_2d", [kernel, x], peer, **sizes)

    def pool_2d(self, x: Pair, size: int) -> Pair:
        peer = self.node("pool_2d", x.peer, 0, *(size,) * 4, 0.0, 0.0)
        sizes = {"kernel": (size,) * 2, "stride": (size,) * 2, "padding": (0, 0)}
        return self._pair("pool_2d", [x], peer, average=False, **sizes)

    def peer_bytes(self) -> int:
        """What ggml reserves for the nodes, in the order in which they were made."""
        self._place_leaves()
        library = ggml.library()
        graph = library.ggml_new_graph_custom(self._context, self.nodes, False)
        for node in self.order:
            library.ggml_build_forward_expand(graph, node.address)
        for result in self.results:
            library.ggml_set_output(result.address)
        buffer_type = library.ggml_backend_cpu_buffer_type()
        allocator = self._own(library.ggml_gallocr_free, library.ggml_gallocr_new(buffer_type))
        if not library.ggml_gallocr_reserve(allocator, graph):
            raise MemoryError("ggml could not reserve the graph's memory")
        return int(library.ggml_gallocr_get_buffer_size(allocator, 0))


def llama(g: Twins, layers: int, tokens: int, width: int, heads: int, hidden: int, cached: int = 0) -> Pair:
    """A decoder: rotary positions, a mask, gated linear units; `cached`: rows of its caches."""
    h, positions, places = g.data((tokens, width)), g.data((tokens,), "i32"), g.data((tokens,), "i64")
    mask, size = g.data((tokens, cached or tokens)), width // heads
    for _ in range(layers):
        x = g.normal("rms_norm", h, g.matrix(width))
        q, k, v = (g.op("mul_mat", g.matrix(width, width), x) for _ in range(3))
        q, k = (g.rope(g.reshape(each, tokens, heads, size), positions) for each in (q, k))
        if cached:
            k, v = g.reshape(k, tokens, width), g.reshape(v, tokens, width)
            k, v = (g.write_rows(g.cache(cached, width), rows, places) for rows in (k, v))
        k, v = (g.reshape(each, cached or tokens, heads, size) for each in (k, v))
        q, k = g.permute(q, 1, 0, 2), g.permute(k, 1, 0, 2)
        v = g.op("cont", g.permute(v, 1, 2, 0))
        scores = g.soft_max(g.op("mul_mat", k, q), mask, size**-0.5)
        mixed = g.op("cont", g.permute(g.op("mul_mat", v, scores), 1, 0, 2))
        mixed = g.op("mul_mat", g.matrix(width, width), g.reshape(mixed, tokens, width))
        h = g.op("add", mixed, h)
        x = g.normal("rms_norm", h, g.matrix(width))
        up, gate = (g.op("mul_mat", g.matrix(hidden, width), x) for _ in range(2))
        h = g.op("add", g.op("mul_mat", g.matrix(width, hidden), g.swiglu(gate, up)), h)
    return g.normal("rms_norm", h, g.matrix(width))


def bert(g: Twins, layers: int, tokens: int, width: int, heads: int) -> Pair:
    """An encoder: biases, norms behind the sums, gelu."""
    h, mask = g.data((tokens, width)), g.data((tokens, tokens))
    size = width // heads

    def linear(x: Pair, rows: int) -> Pair:
        return g.op("add", g.op("mul_mat", g.matrix(rows, x.shape[-1]), x), g.matrix(rows))

    for _ in range(layers):
        q, k, v = (g.reshape(linear(h, width), tokens, heads, size) for _ in range(3))
        q, k = g.permute(q, 1, 0, 2), g.permute(k, 1, 0, 2)
        scores = g.soft_max(g.op("mul_mat", k, q), mask, size**-0.5)
        mixed = g.op("mul_mat", g.op("cont", g.permute(v, 1, 2, 0)), scores)
        mixed = g.reshape(g.op("cont", g.permute(mixed, 1, 0, 2)), tokens, width)
        h = g.normal("norm", g.op("add", linear(mixed, width), h), g.matrix(width), g.matrix(width))
        grown = linear(g.op("gelu", linear(h, 4 * width)), width)
        h = g.normal("norm", g.op("add", grown, h), g.matrix(width), g.matrix(width))
    return h


def elementwise(g: Twins, nodes: int, seed: int) -> Pair:
    """Random sums, products and functions of recent values; all that nobody read is summed at last."""
    random = np.random.default_rng(seed)
    values = [g.data((64, 32)) for _ in range(4)]
    unread: dict[int, Pair] = {}
    for _ in range(nodes):
        operands = [values[-1 - int(random.integers(min(len(values), 12)))] for _ in range(2)]
        name = str(random.choice(["add", "mul", "tanh", "silu", "sub"]))
        operands = operands[: 1 if name in ("tanh", "silu") else 2]
        values.append(g.op(name, *operands))
        unread = {n: each for n, each in unread.items() if each not in operands} | {len(values): values[-1]}
    total, *others = unread.values()
    for other in others:
        total = g.op("add", total, other)
    return total


def chain(g: Twins, nodes: int) -> Pair:
    """Ops on rows, which nothing fuses, one behind the other."""
    x = g.data((64, 64))
    for number in range(nodes - 1):
        x = g.op("soft_max", x) if number % 2 else g.normal("norm", x)
    return x


def wide(g: Twins, nodes: int) -> Pair:
    """Many results of one input, then their sum by halves."""
    x = g.data((64, 64))
    level = [g.normal("rms_norm", x) for _ in range(nodes // 2)]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        level = [g.op("add", a, b) for a, b in pairs] + level[len(level) // 2 * 2 :]
    return level[0]


def convolutions(g: Twins, blocks: int, size: int, channels: int) -> Pair:
    """Residual blocks of convolutions, wider and coarser as they go."""
    x = g.data((1, 3, size, size))
    x = g.op(
        "relu", g.op("add", g.conv_2d(g.matrix(channels, 3, 7, 7), x, 2, 3), g.matrix(1, channels, 1, 1))
    )
    x = g.pool_2d(x, 2)
    for number in range(blocks):
        step, wider = (2, 2 * channels) if number % 2 else (1, channels)
        y = g.conv_2d(g.matrix(wider, channels, 3, 3), x, step, 1)
        y = g.op("relu", g.op("add", y, g.matrix(1, wider, 1, 1)))
        y = g.op("add", g.conv_2d(g.matrix(wider, wider, 3, 3), y, 1, 1), g.matrix(1, wider, 1, 1))
        short = g.conv_2d(g.matrix(wider, channels, 1, 1), x, step, 0) if number % 2 else x
        x, channels = g.op("relu", g.op("add", y, short)), wider
    return x
