"""The choice of the next token: its settings, and the nodes that make it.

The filters are applied in llama.cpp's order: penalties and biases change logits; the `top_k` most
likely tokens stay; of these the first whose chances sum up to `top_p`; of these those with at
least `min_p` of the chance of the first. Then the temperature scales logits, and the choice is
random. Noise of Gumbel's distribution makes the choice an argmax, so a temperature of 0 is the most
likely token. The noise of a token's rank comes from the seed and the position alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import heliograph as hg

ops = hg.ops

#: The tokens that penalties look back at, at most.
RECENT = 64
#: The most tokens that end an answer.
ENDS = 16
#: The candidates of a choice with `top_k` up to this many.
CANDIDATES = 128
#: Alternatives with log-probabilities for each token.
ALTERNATIVES = 20
#: Candidates are found in blocks of so many logits.
BLOCK = 32

_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repeat_penalty": (0.01, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "presence_penalty": (-100.0, 100.0),
}


@dataclass(frozen=True, slots=True)
class Form:
    """The differences of graphs that make a choice; everything else is an input."""

    #: The tokens that a choice is among: 1 is the most likely one, 0 the whole vocabulary.
    candidates: int
    is_biased: bool = False
    has_logprobs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The way to sample an answer. Raises InvalidArgumentError for a value out of range."""

    #: 0 chooses the most likely token.
    temperature: float = 0.8
    #: 0: all tokens.
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    #: Divides the logits above 0 of tokens that were there, and multiplies those below; 1: none.
    repeat_penalty: float = 1.0
    #: Taken from a token's logit for each time that it was there, and once.
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    #: The tokens that the penalties look back at.
    penalty_last: int = RECENT
    #: Added to the logits of tokens; -inf forbids one.
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    logprobs: bool = False

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not least <= value <= most:
                raise _bad(name, value, f"a number from {least:g} to {most:g}")
        for name, most in (("top_k", 2**31 - 1), ("penalty_last", RECENT), ("seed", 2**63 - 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 <= value <= most:
                raise _bad(name, value, f"a whole number from 0 to {most}")

    @property
    def form(self) -> Form:
        """The graph that makes such choices."""
        is_plain = self.repeat_penalty == 1 and self.frequency_penalty == self.presence_penalty == 0
        if self.temperature == 0 and is_plain and not self.logit_bias:
            return Form(1, has_logprobs=self.logprobs)
        candidates = CANDIDATES if self.temperature == 0 or 0 < self.top_k <= CANDIDATES else 0
        return Form(candidates, bool(self.logit_bias), self.logprobs)

    def inputs(self, vocabulary: int, tokens: list[int]) -> dict[str, np.ndarray[Any, Any]]:
        """Return the inputs of the graph after these tokens. Raises InvalidArgumentError."""
        if self.form.candidates == 1:
            return {}
        recent = np.full(RECENT, -1, np.int32)
        last = tokens[-RECENT:]
        recent[RECENT - len(last) :] = last
        factors = [getattr(self, name) for name in _RANGES]
        made: dict[str, np.ndarray[Any, Any]] = {
            "factors": np.array(factors, np.float32),
            "top_k": np.array([self.top_k or vocabulary], np.int32),
            "penalty_last": np.array([self.penalty_last], np.int32),
            "seed": np.array([self.seed], np.int64),
            "recent": recent,
        }
        if self.logit_bias:
            made["bias"] = self._bias(vocabulary)
        return made

    def _bias(self, vocabulary: int) -> np.ndarray[Any, Any]:
        bias = np.zeros(vocabulary, np.float32)
        for token, value in self.logit_bias.items():
            if not isinstance(token, (int, np.integer)) or not 0 <= token < vocabulary or math.isnan(value):
                raise _bad("logit_bias", {token: value}, f"numbers by tokens from 0 to {vocabulary - 1}")
            bias[token] = value
        return bias


def _bad(name: str, value: object, wanted: str) -> hg.InvalidArgumentError:
    return hg.InvalidArgumentError(f"{name} is {value!r:.60}", advice=f"it is {wanted}")


#: The outputs of a choice that are inputs of the next one.
CARRIED = {"recent_next": "recent"}


def choose(graph: hg.Graph, logits: hg.Value, position: hg.Value, form: Form) -> hg.Value:
    """Return the next token, i32 [1], of logits [1, v] after a position i32 [1].

    Adds the inputs of `Settings.inputs`, and the outputs of `CARRIED`.
    """
    if form.candidates == 1:
        return ops.argmax(logits)
    vocabulary = logits.shape[1]
    factors = graph.input("factors", (len(_RANGES),), "f32")
    temperature, top_p, min_p, *penalties = (factors[place : place + 1] for place in range(len(_RANGES)))
    recent = graph.input("recent", (RECENT,), "i32")
    penalised = _penalised(logits, recent, graph.input("penalty_last", (1,), "i32"), *penalties)
    if form.is_biased:
        penalised = penalised + graph.input("bias", (vocabulary,), "f32")
    best = largest(penalised, min(form.candidates or vocabulary, vocabulary))
    count = best.shape[1]
    picked = hg.reshape(_at(penalised, best), (count,))
    ranks = graph.constant(np.arange(count, dtype=np.int32))
    # Each filter keeps the first candidate.
    is_kept = ranks < graph.input("top_k", (1,), "i32")
    chances = hg.softmax(hg.where(is_kept, picked, float("-inf")))
    before = hg.cumulative_sum(chances, axis=0) - chances
    is_kept = is_kept & (before < top_p) & (chances >= min_p * chances[:1]) | (ranks == 0)
    units = hg.maximum(hg.random.uniform((count,), graph.input("seed", (1,), "i64"), position), 2.0**-25)
    noisy = picked - temperature * hg.log(-hg.log(units))
    place = ops.argmax(hg.reshape(hg.where(is_kept, noisy, float("-inf")), (1, count)))
    token = hg.take(hg.reshape(best, (count,)), place, axis=0)
    graph.output("recent_next", hg.concat([recent[1:], token], axis=0))
    return token


def log_probabilities(logits: hg.Value, token: hg.Value) -> tuple[hg.Value, hg.Value, hg.Value]:
    """Return the log-probability of a token, [1], and the most likely tokens with theirs."""
    top = hg.max(logits, axis=-1, keepdims=True)
    total = hg.log(hg.sum(hg.exp(logits - top), axis=-1, keepdims=True)) + top
    best = largest(logits, min(ALTERNATIVES, logits.shape[1]))
    own = hg.reshape(_at(logits, hg.reshape(token, (1, 1))) - total, (1,))
    return own, hg.reshape(best, (best.shape[1],)), hg.reshape(_at(logits, best) - total, (best.shape[1],))


def largest(logits: hg.Value, count: int) -> hg.Value:
    """Return the places of the `count` largest logits, i32 [1, count] from [1, v], in the order of
    `top_k`.

    The largest ones lie in the `count` blocks that have the largest maxima. So two short rows are
    sorted in place of the whole one.
    """
    v = logits.shape[1]
    blocks = -(-v // BLOCK)
    if count * BLOCK * 2 > v:
        return ops.top_k(logits, k=count)
    table = logits
    if blocks * BLOCK != v:
        filling = logits.graph.full((1, blocks * BLOCK - v), float("-inf"), logits.dtype)
        table = hg.concat([logits, filling], axis=1)
    table = hg.reshape(table, (blocks, BLOCK))
    chosen = ops.top_k(hg.reshape(hg.max(table, axis=1), (1, blocks)), k=count)
    # In the vocabulary's order, so that of equal logits the first one stays first.
    ordered = hg.sort(hg.reshape(chosen, (count,)))
    found = ops.top_k(hg.reshape(ops.get_rows(table, ordered), (1, count * BLOCK)), k=count)
    block = hg.take(ordered, hg.reshape(found // BLOCK, (count,)), axis=0)
    return hg.reshape(block, (1, count)) * BLOCK + found % BLOCK


def _at(logits: hg.Value, tokens: hg.Value) -> hg.Value:
    """Return the logits [1, v] of tokens [1, k], [1, k]."""
    column = hg.reshape(logits, (logits.shape[1], 1))
    return hg.reshape(ops.get_rows(column, hg.reshape(tokens, (tokens.shape[1],))), tokens.shape)


def _penalised(
    logits: hg.Value,
    recent: hg.Value,
    last: hg.Value,
    repeat: hg.Value,
    frequency: hg.Value,
    presence: hg.Value,
) -> hg.Value:
    """Return logits [1, v] with those of recent tokens changed.

    `recent`, i32 [r], ends with the newest token, and begins with -1 where there are fewer.
    """
    graph, count = logits.graph, recent.shape[0]
    places = graph.constant(np.arange(count, dtype=np.int32))
    is_seen = (recent >= 0) & (places >= count - last)
    # A place without a token stands for the newest one once more, which changes nothing.
    tokens = hg.where(is_seen, recent, recent[count - 1 :])
    same = hg.expand_dims(tokens, axis=1) == hg.expand_dims(recent, axis=0)
    times = hg.sum(hg.astype(same & is_seen, "f32"), axis=1)
    was = hg.reshape(_at(logits, hg.reshape(tokens, (1, count))), (count,))
    scaled = hg.where(was > 0, was / repeat, was * repeat) - times * frequency - presence
    changed = hg.where(times > 0, scaled, was)
    column = hg.reshape(logits, (logits.shape[1], 1))
    written = ops.set_rows(column, hg.reshape(changed, (count, 1)), tokens)
    return hg.reshape(written, logits.shape)
