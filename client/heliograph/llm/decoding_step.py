"""The parts of which decoders are made: norms, products, attention over a cache, feed-forward
layers.

Shapes: n tokens of one sequence, a cache of c rows, width w.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import heliograph as hg
from heliograph.llm.configuration import Configuration, Rope
from heliograph.llm.products import multiply, multiply_chosen

ops = hg.ops

#: The size of the chunks that are padded at the end of a context.
PADDING = 32


class FilledError(Exception):
    """Ends the construction of a graph that only fills the cache. Never leaves the package."""


class Weights(Protocol):
    """The tensors of a model's file, here or on the server."""

    @property
    def name(self) -> str:
        """The name of the file in errors."""

    def __contains__(self, name: object) -> bool: ...

    def add(self, graph: hg.Graph, name: str) -> hg.Value:
        """Add a tensor to a graph, as it is stored. Raises InvalidModelError if there is none."""


class Kept(Protocol):
    """The keys and values of sequences."""

    @property
    def context(self) -> int:
        """The most tokens of a sequence."""

    @property
    def rows(self) -> int:
        """The keys that attention covers for each sequence."""

    @property
    def parts(self) -> int:
        """The equal parts of the rows that `write` returns, as `attend` takes them."""

    def write(self, graph: hg.Graph, which: str, new: hg.Value, places: hg.Value) -> hg.Value:
        """Write the rows of tokens at their positions, [n, k], and return all rows, [parts * m,
        k]."""

    def attend(
        self,
        queries: hg.Value,
        keys: hg.Value,
        values: hg.Value,
        mask: hg.Value,
        *sinks: hg.Value,
        **attributes: float,
    ) -> hg.Value:
        """Attend from queries [sequences, heads, n, d] to keys and values [parts, heads, m, d]
        by a mask [sequences, 1, n, rows]."""


class Adapting(Protocol):
    """Additions to the products of a model's tensors, such as those of adapters."""

    def product(self, tensor: str, y: hg.Value, x: hg.Value) -> hg.Value:
        """Return the product y of a matrix and rows x, changed."""

    def experts(self, tensor: str, y: hg.Value, x: hg.Value, chosen: hg.Value) -> hg.Value:
        """Return the products y of the matrices that each of the rows x chose, changed."""

    def embedding(self, x: hg.Value, tokens: hg.Value) -> hg.Value:
        """Return the embeddings x of tokens, changed."""

    def check(self) -> None:
        """Raises InvalidModelError for an addition that no product of the whole graph has."""


@dataclass(frozen=True, slots=True)
class Cache:
    """The keys and values of a sequence: variables of the session, a row for each token."""

    #: The beginning of its variables' names.
    name: str
    #: The most tokens of a sequence.
    context: int
    #: "f16", "f32", or a type of blocks.
    dtype: str

    @property
    def rows(self) -> int:
        """One for each token, and room for what a padded chunk writes behind the last one."""
        return -(-self.context // PADDING) * PADDING + PADDING

    @property
    def parts(self) -> int:
        """One sequence."""
        return 1

    def write(self, graph: hg.Graph, which: str, new: hg.Value, places: hg.Value) -> hg.Value:
        """Write rows [n, k], and return all of them, [c, k]."""
        variable = graph.variable(f"{self.name}/{which}", (self.rows, new.shape[1]), self.dtype)
        return hg.assign(variable, ops.set_rows(variable, new, places))

    def attend(
        self,
        queries: hg.Value,
        keys: hg.Value,
        values: hg.Value,
        mask: hg.Value,
        *sinks: hg.Value,
        **attributes: float,
    ) -> hg.Value:
        """Attend to all rows."""
        return ops.flash_attn_ext(queries, keys, values, mask, *sinks, **attributes)


@dataclass
class Step:
    """A graph under construction that takes n tokens: those of one sequence at consecutive
    positions, or equally many of several.

    Methods that name a weight take its name without ".weight".
    """

    graph: hg.Graph
    config: Configuration
    weights: Weights
    cache: Kept
    #: i32 [n].
    positions: hg.Value
    sequences: int = 1
    #: Whether the graph ends with the keys and values of the last layer.
    only_fills: bool = False
    adaptation: Adapting | None = None
    _made: dict[str, hg.Value] = field(default_factory=dict)
    _masks: dict[int, hg.Value] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """The number of tokens, n."""
        return self.positions.shape[0]

    def has(self, name: str) -> bool:
        """True if the model has this tensor; here with its whole name."""
        return name in self.weights

    def weight(self, name: str) -> hg.Value:
        """Return a tensor by its whole name, the same value each time."""
        if name not in self._made:
            self._made[name] = self.weights.add(self.graph, name)
        return self._made[name]

    def norm(self, name: str, x: hg.Value) -> hg.Value:
        """Scale rows to unit mean square, then by a weight."""
        return ops.rms_norm(x, eps=self.config.epsilon) * self.weight(f"{name}.weight")

    def product(self, name: str, x: hg.Value) -> hg.Value:
        """Multiply rows [n, k] by the transpose of a matrix [m, k], and add its bias if it has
        one."""
        y = self._adapted_product(name, x)
        return y + self.weight(f"{name}.bias") if self.has(f"{name}.bias") else y

    def _adapted_product(self, name: str, x: hg.Value) -> hg.Value:
        y = self._plain_product(name, x)
        return self.adaptation.product(f"{name}.weight", y, x) if self.adaptation else y

    def _plain_product(self, name: str, x: hg.Value) -> hg.Value:
        y = multiply(self.weight(f"{name}.weight"), x, rounds_rows=self.config.rounds_rows)
        return self._scaled(name, y)

    def product_of_experts(self, name: str, x: hg.Value, chosen: hg.Value) -> hg.Value:
        """Multiply rows [n, 1 or used, k] by the matrices of the experts that each token chose:
        [n, used, m]."""
        weight = self.weight(f"{name}.weight")
        y = multiply_chosen(weight, x, chosen, rounds_rows=self.config.rounds_rows)
        y = self._scaled(name, y, chosen)
        return self.adaptation.experts(f"{name}.weight", y, x, chosen) if self.adaptation else y

    def _scaled(self, name: str, y: hg.Value, chosen: hg.Value | None = None) -> hg.Value:
        """Multiply a product by the scale of its whole matrix, or of the chosen experts: files with
        weights in nvfp4 have such."""
        if not self.has(f"{name}.scale"):
            return y
        scale = self.weight(f"{name}.scale")
        if chosen is not None:
            scale = ops.get_rows(hg.reshape(scale, (scale.size, 1)), hg.reshape(chosen, (chosen.size,)))
            scale = hg.reshape(scale, (*chosen.shape, 1))
        return y * scale

    def embedding(self, tokens: hg.Value) -> hg.Value:
        """Return the rows of tokens, f32 [n, w]."""
        x = ops.get_rows(self.weight("token_embd.weight"), tokens)
        if self.adaptation:
            x = self.adaptation.embedding(x, tokens)
        scale = self.config.embedding_scale
        return x if scale == 1.0 else ops.scale(x, scale=scale)

    def logits(self, x: hg.Value) -> hg.Value:
        """Return the logits of hidden rows that are normed already, f32 [n, vocabulary]."""
        if self.has("output.weight"):
            y = self._adapted_product("output", x)
        else:
            y = self._plain_product("token_embd", x)
        if self.adaptation:
            self.adaptation.check()
        if self.has("output.bias"):
            y = y + self.weight("output.bias")
        cap = self.config.logit_cap
        return ops.scale(ops.tanh(ops.scale(y, scale=1 / cap)), scale=cap) if cap else y

    # Attention

    def heads(self, x: hg.Value, count: int) -> hg.Value:
        """Return rows [n, count * size] as [n, count, size]."""
        return hg.reshape(x, (self.tokens, count, x.shape[1] // count))

    def queries_keys_values(self, layer: str, x: hg.Value) -> tuple[hg.Value, hg.Value, hg.Value]:
        """Return the heads of queries, keys and values, from three matrices or from one."""
        config = self.config
        counts = (config.heads, config.kv_heads, config.kv_heads)
        if not self.has(f"{layer}.attn_qkv.weight"):
            q, k, v = (
                self.heads(self.product(f"{layer}.attn_{one}", x), count)
                for one, count in zip("qkv", counts, strict=True)
            )
            return q, k, v
        joined = self.product(f"{layer}.attn_qkv", x)
        parts, begin = [], 0
        sizes = (config.key_size, config.key_size, config.value_size)
        for count, size in zip(counts, sizes, strict=True):
            parts.append(self.heads(joined[:, begin : begin + count * size], count))
            begin += count * size
        return parts[0], parts[1], parts[2]

    def attention(
        self,
        number: int,
        x: hg.Value,
        *,
        rope: Rope | None = None,
        window: int = 0,
        factors: str = "rope_freqs.weight",
    ) -> hg.Value:
        """Attend from the tokens to all before them, and to themselves: [n, w] from [n, w].

        Sinks, if the model has them, are scores of each head whose values are zeros.

        Args:
            number: The layer's.
            x: The normed rows.
            rope: The embedding of positions, if it is not the configuration's.
            window: The keys that a token sees, itself included; 0: all.
            factors: The tensor by which frequencies are divided, if the model has it.
        """
        layer, config = f"blk.{number}", self.config
        # First: a value for another device ends a part of the graph, and what is between two parts
        # takes memory. Here these are rows, later they would be the cache.
        mask = self._mask(window)
        q, k, v = self.queries_keys_values(layer, x)
        if self.has(f"{layer}.attn_q_norm.weight"):
            q, k = self.norm(f"{layer}.attn_q_norm", q), self.norm(f"{layer}.attn_k_norm", k)
        divisors = self.weight(factors) if self.has(factors) else None
        q, k = ((rope or config.rope).rotate(one, self.positions, divisors) for one in (q, k))
        keys, values = self._kept(number, "keys", k), self._kept(number, "values", v)
        if self.only_fills and number == config.layers - 1:
            raise FilledError
        sinks = f"{layer}.attn_sinks.weight"
        attended = self.cache.attend(
            self._by_heads(q, self.sequences),
            keys,
            values,
            mask,
            *((self.weight(sinks),) if self.has(sinks) else ()),
            scale=config.scale,
            logit_softcap=config.score_cap,
        )
        joined = hg.reshape(attended, (self.tokens, config.heads * config.value_size))
        return self.product(f"{layer}.attn_output", joined)

    def _kept(self, number: int, which: str, new: hg.Value) -> hg.Value:
        """Write keys or values [n, heads, size] into the cache, and return all of it as its
        attention takes it, [parts, heads, m, size]."""
        _, heads, size = new.shape
        rows = hg.reshape(new, (self.tokens, heads * size))
        kept = self.cache.write(self.graph, f"{which}{number}", rows, self.positions)
        return self._by_heads(hg.reshape(kept, (kept.shape[0], heads, size)), self.cache.parts)

    def _by_heads(self, x: hg.Value, parts: int) -> hg.Value:
        """Return [parts * m, heads, size] as [parts, heads, m, size]."""
        rows, heads, size = x.shape
        apart = hg.reshape(x, (parts, rows // parts, heads, size))
        return hg.permute_dims(apart, (0, 2, 1, 3))

    def _mask(self, window: int) -> hg.Value:
        """Return what scores grow by, f32 [sequences, 1, n / sequences, c]: 0 where a token sees a
        key, else -inf."""
        if window not in self._masks:
            keys = ops.arange(graph=self.graph, start=0.0, stop=float(self.cache.rows), step=1.0)
            distance = hg.reshape(hg.astype(self.positions, "f32"), (self.tokens, 1)) - keys
            is_seen = distance >= 0.0
            if window:
                is_seen = is_seen & (distance < float(window))
            shape = (self.sequences, 1, self.tokens // self.sequences, self.cache.rows)
            self._masks[window] = hg.reshape(hg.where(is_seen, 0.0, float("-inf")), shape)
        return self._masks[window]

    # Feed-forward

    def gated(self, layer: str, x: hg.Value, activation: str = "swiglu") -> hg.Value:
        """Apply a feed-forward layer whose one half gates the other: [n, w] from [n, w]."""
        gate = getattr(ops, activation)
        up = self.product(f"{layer}.ffn_up", x)
        has_gate = self.has(f"{layer}.ffn_gate.weight")
        inner = gate(self.product(f"{layer}.ffn_gate", x), up) if has_gate else gate(up)
        return self.product(f"{layer}.ffn_down", inner)

    def experts(self, layer: str, x: hg.Value) -> hg.Value:
        """Apply the experts that a router selects for each token, weighted by its probabilities of
        these: [n, w] from [n, w]."""
        n, used = self.tokens, self.config.experts_used
        chances = ops.soft_max(self.product(f"{layer}.ffn_gate_inp", x))
        chosen = ops.top_k(chances, k=used)
        weights = hg.take_along_axis(chances, hg.astype(chosen, "i64"), axis=-1)
        weights = weights / hg.sum(weights, axis=-1, keepdims=True)

        def product(name: str, rows: hg.Value) -> hg.Value:
            return self.product_of_experts(f"{layer}.{name}_exps", rows, chosen)

        rows = hg.reshape(x, (n, 1, x.shape[1]))
        inner = ops.swiglu(product("ffn_gate", rows), product("ffn_up", rows))
        return hg.sum(product("ffn_down", inner) * hg.expand_dims(weights, axis=2), axis=1)
