"""The choice of the next token: its settings, and the nodes that make it.

The filters are applied in llama.cpp's order: penalties and biases change logits; the `top_k` most
likely tokens stay; of these the first whose chances sum up to `top_p`; of these those with at
least `min_p` of the chance of the first. Then the temperature scales logits, and the choice is
random. Noise of Gumbel's distribution makes the choice an argmax, so a temperature of 0 is the most
likely token. The noise of a token's rank comes from the seed and the position alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

import numpy as np

import heliograph as hg

ops = hg.ops

#: The tokens that penalties look back at, at most.
RECENT = 64
#: The most tokens that end an answer.
ENDS = 16
#: The most that is added to a logit: a token with it is chosen unless a grammar forbids it.
MOST_BIAS = 1e30
#: The candidates of a choice with `top_k` up to this many.
CANDIDATES = 128
#: Alternatives with log-probabilities for each token.
ALTERNATIVES = 20

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
    #: The first rows whose tokens a mask chooses among.
    masks: int = 0


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
            if not is_within(value, Real, least, most):
                raise _bad(name, value, f"a number from {least:g} to {most:g}")
        for name, most in (("top_k", 2**31 - 1), ("penalty_last", RECENT), ("seed", 2**63 - 1)):
            value = getattr(self, name)
            if not is_within(value, Integral, 0, most):
                raise _bad(name, value, f"a whole number from 0 to {most}")
        if self.logit_bias and not isinstance(self.logit_bias, Mapping):
            raise _bad("logit_bias", self.logit_bias, "a mapping of tokens to numbers")

    @property
    def form(self) -> Form:
        """The graph that makes such choices."""
        is_plain = self.repeat_penalty == 1 and self.frequency_penalty == self.presence_penalty == 0
        if self.temperature == 0 and is_plain and not self.logit_bias:
            return Form(1, has_logprobs=self.logprobs)
        candidates = CANDIDATES if self.temperature == 0 or 0 < self.top_k <= CANDIDATES else 0
        return Form(candidates, bool(self.logit_bias), self.logprobs)

    def inputs(
        self, vocabulary: int, tokens: list[int], form: Form | None = None
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Return a row of the inputs of the graph after these tokens; of a graph of another form
        that can make the same choices, if one is given. Raises InvalidArgumentError."""
        form = form or self.form
        if form.candidates == 1:
            return {}
        recent = np.full((1, RECENT), -1, np.int32)
        last = tokens[-RECENT:]
        recent[0, RECENT - len(last) :] = last
        factors = [getattr(self, name) for name in _RANGES]
        made: dict[str, np.ndarray[Any, Any]] = {
            "factors": np.array([factors], np.float32),
            "top_k": np.array([[self.top_k or vocabulary]], np.int32),
            "penalty_last": np.array([[self.penalty_last]], np.int32),
            "seed": np.array([self.seed], np.int64),
            "recent": recent,
        }
        if form.is_biased:
            made["bias"] = self._bias(vocabulary)
        return made

    def _bias(self, vocabulary: int) -> np.ndarray[Any, Any]:
        bias = np.zeros((1, vocabulary), np.float32)
        for token, value in self.logit_bias.items():
            is_known = is_within(token, Integral, 0, vocabulary - 1)
            if not is_known or not isinstance(value, Real) or math.isnan(value):
                raise _bad("logit_bias", {token: value}, f"numbers by tokens from 0 to {vocabulary - 1}")
            # Of infinity and the -inf of a token that a grammar forbids, the sum is no number.
            bias[0, token] = min(value, MOST_BIAS)
        return bias


def is_within(value: Any, kind: type[Any], least: float, most: float) -> bool:
    """True for a number of a kind, NumPy's too, that lies in a range."""
    return isinstance(value, kind) and not isinstance(value, bool) and least <= value <= most


def _bad(name: str, value: object, wanted: str) -> hg.InvalidArgumentError:
    return hg.InvalidArgumentError(f"{name} is {value!r:.60}", advice=f"it is {wanted}")


#: The outputs of a choice that are inputs of the next one.
CARRIED = {"recent_next": "recent"}


@dataclass(frozen=True, slots=True)
class Given:
    """The settings of a choice as values of a graph, a row each, or one row for all."""

    form: Form
    factors: hg.Value
    top_k: hg.Value
    penalty_last: hg.Value
    seed: hg.Value
    #: The newest tokens, i32 [b, RECENT].
    recent: hg.Value
    bias: hg.Value | None

    def after(self, tokens: hg.Value) -> Given:
        """Return those of rows after one more token each, i32 [b, 1]."""
        return replace(self, recent=hg.concat([self.recent[:, 1:], tokens], axis=1))

    def repeated(self, following: hg.Value) -> Given:
        """Return rows of a row: itself, and after each more of the following tokens, i32 [1, n]."""
        rows = following.shape[1] + 1
        whole = hg.concat([self.recent, following], axis=1)
        recent = hg.concat([whole[:, row : row + RECENT] for row in range(rows)], axis=0)

        def repeat(value: hg.Value) -> hg.Value:
            return hg.broadcast_to(value, (rows, *value.shape[1:]))

        return Given(
            self.form,
            repeat(self.factors),
            repeat(self.top_k),
            repeat(self.penalty_last),
            repeat(self.seed),
            recent,
            None if self.bias is None else repeat(self.bias),
        )


def given_inputs(graph: hg.Graph, rows: int, vocabulary: int, form: Form) -> Given | None:
    """Add the inputs of `Settings.inputs` to a graph, a row each. None: the choice of the likeliest
    token has none."""
    if form.candidates == 1:
        return None
    return Given(
        form,
        graph.input("factors", (rows, len(_RANGES)), "f32"),
        graph.input("top_k", (rows, 1), "i32"),
        graph.input("penalty_last", (rows, 1), "i32"),
        graph.input("seed", (rows,), "i64"),
        graph.input("recent", (rows, RECENT), "i32"),
        graph.input("bias", (rows, vocabulary), "f32") if form.is_biased else None,
    )


def choose(
    graph: hg.Graph, logits: hg.Value, positions: hg.Value, form: Form, is_active: hg.Value | None = None
) -> hg.Value:
    """Return the next tokens, i32 [b], of logits [b, v] after positions i32 [b].

    Adds the inputs of `Settings.inputs`, a row each, those of `masks_of`, and the outputs of
    `CARRIED`, which keep their values in rows that are not active. The choice of a row does not
    depend on the others.
    """
    if form.masks:
        logits = _masked(graph, logits, form.masks)
    rows, vocabulary = logits.shape
    given = given_inputs(graph, rows, vocabulary, form)
    token = pick(logits, positions, given)
    if given is not None:
        column = hg.reshape(token, (rows, 1))
        recent = given.after(column).recent
        if is_active is not None:
            recent = hg.where(hg.expand_dims(is_active, axis=1), recent, given.recent)
        graph.output("recent_next", recent)
    return token


def pick(logits: hg.Value, positions: hg.Value, given: Given | None) -> hg.Value:
    """Return the next tokens, i32 [b], of logits [b, v] after positions i32 [b]."""
    if given is None:
        return ops.argmax(logits)
    graph, (rows, vocabulary), factors = logits.graph, logits.shape, given.factors
    temperature, top_p, min_p, *penalties = (factors[:, place : place + 1] for place in range(len(_RANGES)))
    penalised = _penalised(logits, given.recent, given.penalty_last, *penalties)
    if given.bias is not None:
        penalised = penalised + given.bias
    best = ops.top_k(penalised, k=min(given.form.candidates or vocabulary, vocabulary))
    count = best.shape[1]
    picked = _at(penalised, best)
    ranks = graph.constant(np.arange(count, dtype=np.int32))
    # Each filter keeps the first candidate.
    is_kept = ranks < given.top_k
    chances = hg.softmax(hg.where(is_kept, picked, float("-inf")), axis=-1)
    before = hg.cumulative_sum(chances, axis=1) - chances
    is_kept = is_kept & (before < top_p) & (chances >= min_p * chances[:, :1]) | (ranks == 0)
    units = hg.maximum(_units(given.seed, positions, count), 2.0**-25)
    noisy = picked - temperature * hg.log(-hg.log(units))
    place = ops.argmax(hg.where(is_kept, noisy, float("-inf")))
    return hg.reshape(_at(best, hg.reshape(place, (rows, 1))), (rows,))


def masks_of(
    given: Sequence[np.ndarray[Any, Any]], vocabulary: int, count: int
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the inputs of a graph with `count` masks: the tokens that its first rows may choose, a
    bit each, the least first, in words of i32. Rows without a mask may choose all."""
    masks = np.full((count, _words(vocabulary)), -1, np.int32)
    for row, mask in zip(masks, given, strict=False):
        row[:] = mask[: masks.shape[1]]
    return {"masks": masks}


def _words(vocabulary: int) -> int:
    return -(-vocabulary // 32)


def _masked(graph: hg.Graph, logits: hg.Value, count: int) -> hg.Value:
    """Return logits that are -inf for tokens that one of the first `count` rows may not choose."""
    vocabulary = logits.shape[1]
    words = graph.input("masks", (count, _words(vocabulary)), "i32")
    bits = graph.constant((1 << np.arange(32, dtype=np.int64)).astype(np.uint32).view(np.int32))
    is_set = hg.bitwise_and(hg.expand_dims(words, axis=2), bits) != 0
    is_set = hg.reshape(is_set, (count, words.shape[1] * 32))[:, :vocabulary]
    masked = hg.where(is_set, logits[:count], float("-inf"))
    return masked if count == logits.shape[0] else hg.concat([masked, logits[count:]], axis=0)


def _units(seeds: hg.Value, positions: hg.Value, count: int) -> hg.Value:
    """Return `count` random numbers for each row, by its seed and its position alone."""
    drawn = (
        hg.random.uniform((1, count), seeds[row : row + 1], positions[row : row + 1])
        for row in range(seeds.shape[0])
    )
    return hg.concat(list(drawn), axis=0)


def log_probabilities(logits: hg.Value, token: hg.Value) -> tuple[hg.Value, hg.Value, hg.Value]:
    """Return the log-probability of a token of each row, [b, 1], and the most likely tokens with
    theirs, [b, k]."""
    top = hg.max(logits, axis=-1, keepdims=True)
    total = hg.log(hg.sum(hg.exp(logits - top), axis=-1, keepdims=True)) + top
    best = ops.top_k(logits, k=min(ALTERNATIVES, logits.shape[1]))
    own = _at(logits, hg.reshape(token, (logits.shape[0], 1))) - total
    return own, best, _at(logits, best) - total


def _flat(tokens: hg.Value, v: int) -> hg.Value:
    """Return the places of tokens [b, k] in b rows of v, in a line."""
    rows, count = tokens.shape
    if rows > 1:
        tokens = tokens + tokens.graph.constant(np.arange(rows, dtype=np.int32)[:, None] * v)
    return hg.reshape(tokens, (rows * count,))


def _at(table: hg.Value, tokens: hg.Value) -> hg.Value:
    """Return the elements of a table [b, v] at tokens [b, k], [b, k]."""
    flat = hg.reshape(table, (table.size,))
    return hg.reshape(hg.take(flat, _flat(tokens, table.shape[1]), axis=0), tokens.shape)


def _penalised(
    logits: hg.Value,
    recent: hg.Value,
    last: hg.Value,
    repeat: hg.Value,
    frequency: hg.Value,
    presence: hg.Value,
) -> hg.Value:
    """Return logits [b, v] with those of recent tokens changed.

    `recent`, i32 [b, r], ends with the newest token, and begins with -1 where there are fewer.
    """
    (rows, vocabulary), count = logits.shape, recent.shape[1]
    places = logits.graph.constant(np.arange(count, dtype=np.int32))
    is_seen = (recent >= 0) & (places >= count - last)
    # A place without a token stands for the newest one once more, which changes nothing.
    tokens = hg.maximum(hg.where(is_seen, recent, recent[:, count - 1 :]), 0)
    same = hg.expand_dims(tokens, axis=2) == hg.expand_dims(recent, axis=1)
    times = hg.sum(hg.astype(same & hg.expand_dims(is_seen, axis=1), "f32"), axis=2)
    was = _at(logits, tokens)
    scaled = hg.where(was > 0, was / repeat, was * repeat) - times * frequency - presence
    changed = hg.where(times > 0, scaled, was)
    column = hg.reshape(logits, (rows * vocabulary, 1))
    written = ops.set_rows(column, hg.reshape(changed, (rows * count, 1)), _flat(tokens, vocabulary))
    return hg.reshape(written, logits.shape)
