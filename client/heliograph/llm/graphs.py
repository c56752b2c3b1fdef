"""The graphs of a decoder: one that fills the cache, one that gives all rows, one that decodes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np

import heliograph as hg
from heliograph.llm.adapters import Adaptation, Lora, adapt
from heliograph.llm.architectures import hidden
from heliograph.llm.configuration import Configuration
from heliograph.llm.decoding_step import Cache, FilledError, Step, Weights
from heliograph.llm.sampling import ENDS, Form, choose, log_probabilities

ops = hg.ops

#: Outputs of a decoding step by the inputs of the next that take them.
CARRIES = {"token_next": "token", "position_next": "position"}


@dataclass(frozen=True, slots=True)
class Decoder:
    """Builds the graphs of a model."""

    config: Configuration
    weights: Weights
    cache: Cache
    #: Graphs of a model with adapters have the input `adapters.SCALES`.
    loras: tuple[Lora, ...] = ()

    def fill(self, count: int) -> hg.Graph:
        """A graph that takes `tokens` (i32 [count]) from the position `start` (i32 [1]) into the
        cache."""
        graph, step, tokens = self._chunk(count)
        step.only_fills = True
        with suppress(FilledError):
            hidden(step, tokens)
        graph.output("end", step.positions[-1:] + 1)
        return graph

    def rows(self, count: int, output: str) -> hg.Graph:
        """As `fill`, with all rows as an output: "logits", or the normed "hidden" ones."""
        graph, step, tokens = self._chunk(count)
        x = step.norm("output_norm", hidden(step, tokens))
        graph.output(output, step.logits(x) if output == "logits" else x)
        return graph

    def _chunk(self, count: int) -> tuple[hg.Graph, Step, hg.Value]:
        graph = hg.Graph()
        tokens, start = graph.input("tokens", (count,), "i32"), graph.input("start", (1,), "i32")
        positions = start + graph.constant(np.arange(count, dtype=np.int32))
        return graph, self._step(graph, positions), tokens

    def _step(self, graph: hg.Graph, positions: hg.Value) -> Step:
        adaptation = adapt(graph, self.loras)
        return Step(graph, self.config, self.weights, self.cache, positions, adaptation=adaptation)

    def decode(self, form: Form) -> hg.Graph:
        """A graph that takes one `token` (i32 [1]) at a `position` (i32 [1]) and chooses the next.

        `CARRIES` and those of the choice make it a loop. `done` is true after one of `ends`
        (i32). `chosen` is what `described` returns.
        """
        graph = hg.Graph()
        token, position = graph.input("token", (1,), "i32"), graph.input("position", (1,), "i32")
        ends = graph.input("ends", (ENDS,), "i32")
        step = self._step(graph, position)
        logits = step.logits(step.norm("output_norm", hidden(step, token)))
        if isinstance(step.adaptation, Adaptation):
            step.adaptation.check()
        following = choose(graph, logits, position, form)
        graph.output("token_next", following)
        graph.output("position_next", position + 1)
        graph.output("done", hg.any(following == ends))
        graph.output("chosen", described(logits, following, form))
        return graph


def described(logits: hg.Value, following: hg.Value, form: Form) -> hg.Value:
    """Return a row of each chosen token, i32 [b, .]: the token; with log-probabilities its own,
    then the most likely tokens, then theirs, as bits of f32."""
    column = hg.reshape(following, (following.shape[0], 1))
    if not form.has_logprobs:
        return column
    own, tokens, others = log_probabilities(logits, following)
    bits = (ops.bitcast(one, dtype="i32") for one in (own, others))
    return hg.concat([column, next(bits), tokens, next(bits)], axis=1)
