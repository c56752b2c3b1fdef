"""The graphs of a decoder: one that fills the cache, one that gives all rows, one that decodes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np

import heliograph as hg
from heliograph.llm.architectures import hidden
from heliograph.llm.configuration import Configuration
from heliograph.llm.decoding_step import Cache, FilledError, Step, Weights
from heliograph.llm.files.adapters import Lora, adapt
from heliograph.llm.sampling import CARRIED, ENDS, Form, choose, given_inputs, log_probabilities, pick

ops = hg.ops

#: Outputs of a decoding step by the inputs of the next that take them.
CARRIES = {"token_next": "token", "position_next": "position"}


def carries(form: Form) -> dict[str, str]:
    """Return `CARRIES` with those of a choice."""
    return {**CARRIES, **(CARRIED if form.candidates != 1 else {})}


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
        adaptation = adapt(graph, self.loras, rounds_rows=self.config.rounds_rows)
        return Step(graph, self.config, self.weights, self.cache, positions, adaptation=adaptation)

    def decode(self, form: Form) -> hg.Graph:
        """A graph that takes one `token` (i32 [1]) at a `position` (i32 [1]) and chooses the next.

        `carries` makes it a loop. `done` is true after one of `ends`
        (i32). `chosen` is what `described` returns.
        """
        graph = hg.Graph()
        logits, following = self._next(graph, form)
        ends = graph.input("ends", (ENDS,), "i32")
        graph.output("done", any_of(following == ends))
        graph.output("chosen", described(logits, following, form))
        return graph

    def _next(self, graph: hg.Graph, form: Form) -> tuple[hg.Value, hg.Value]:
        """Add the inputs and the carried outputs of a decoding step to a graph, and return the
        logits and the chosen token."""
        token, position = graph.input("token", (1,), "i32"), graph.input("position", (1,), "i32")
        step = self._step(graph, position)
        logits = step.logits(step.norm("output_norm", hidden(step, token)))
        following = choose(graph, logits, position, form)
        graph.output("token_next", following)
        graph.output("position_next", position + 1)
        return logits, following

    # A choice apart

    def take_in(self) -> hg.Graph:
        """A graph that takes a `token` (i32 [1]; -1 for the one that `choice` chose last) at a
        `position` (i32 [1]) into the cache, and leaves the logits behind it for `choice`."""
        graph = hg.Graph()
        given, position = graph.input("token", (1,), "i32"), graph.input("position", (1,), "i32")
        token = hg.where(given >= 0, given, self._chosen(graph))
        step = self._step(graph, position)
        hg.assign(self._logits(graph), step.logits(step.norm("output_norm", hidden(step, token))))
        graph.output("end", position + 1)
        return graph

    def choice(self, form: Form) -> hg.Graph:
        """A graph that chooses the token behind a `position` (i32 [1]), which `take_in` took last.
        `chosen` is what `described` returns."""
        graph = hg.Graph()
        logits = self._logits(graph)
        following = choose(graph, logits, graph.input("position", (1,), "i32"), form)
        hg.assign(self._chosen(graph), following)
        graph.output("chosen", described(logits, following, form))
        return graph

    def _logits(self, graph: hg.Graph) -> hg.Value:
        return graph.variable(f"{self.cache.name}/logits", (1, self.config.vocabulary), "f32")

    def _chosen(self, graph: hg.Graph) -> hg.Value:
        return graph.variable(f"{self.cache.name}/chosen", (1,), "i32")

    # Speculation

    def propose(self, form: Form, most: int) -> hg.Graph:
        """A graph that decodes as `decode` does, and notes its choice as the last of `most` in the
        variable `proposals`, without an end."""
        graph = hg.Graph()
        _, following = self._next(graph, form)
        proposals = self.proposals(graph, most)
        hg.assign(proposals, hg.concat([proposals[1:], following], axis=0))
        return graph

    def proposals(self, graph: hg.Graph, most: int) -> hg.Value:
        """The variable with the last choices, i32 [most]."""
        return graph.variable(f"{self.cache.name}/proposals", (most,), "i32")

    def check(self, form: Form, count: int, proposer: Decoder | None = None, most: int = 0) -> hg.Graph:
        """A graph that takes a `token` (i32 [1]) at a `position` (i32 [1]) and `count` proposed
        tokens behind it, and chooses the next after each, as `decode` does.

        The proposals are an input (i32 [count]), or the last choices but one of the proposer.
        `chosen` is what `described` returns, with the proposal after the token in its first column.
        """
        graph = hg.Graph()
        token, position = graph.input("token", (1,), "i32"), graph.input("position", (1,), "i32")
        proposed = proposed_tokens(graph, count, proposer, most)
        positions = position + graph.constant(np.arange(count + 1, dtype=np.int32))
        step = self._step(graph, positions)
        logits = step.logits(step.norm("output_norm", hidden(step, hg.concat([token, proposed], axis=0))))
        graph.output("chosen", checked(logits, positions, proposed, form))
        return graph


def any_of(found: hg.Value, axis: int | None = None) -> hg.Value:
    """As `hg.any` of at least one truth value, in f32: a sum of i64 would end the program of
    kernels that a step is, and begin another one behind it."""
    return hg.max(hg.astype(found, "f32"), axis=axis) > 0.0


def proposed_tokens(graph: hg.Graph, count: int, proposer: Decoder | None, most: int) -> hg.Value:
    """Return proposals, i32 [count]: an input, or the last choices but one of a proposer."""
    if proposer is None:
        return graph.input("proposals", (count,), "i32")
    return proposer.proposals(graph, most)[most - 1 - count : most - 1]


def checked(logits: hg.Value, positions: hg.Value, proposed: hg.Value, form: Form) -> hg.Value:
    """Return what `described` does of the choices after a token and the proposals behind it, with
    the proposal after the token in the first column."""
    graph, (rows, vocabulary) = logits.graph, logits.shape
    given = given_inputs(graph, 1, vocabulary, form)
    following = pick(logits, positions, given and given.repeated(hg.expand_dims(proposed, axis=0)))
    column = hg.concat([proposed, graph.constant(np.array([-1], np.int32))], axis=0)
    return hg.concat([hg.reshape(column, (rows, 1)), described(logits, following, form)], axis=1)


def described(
    logits: hg.Value, following: hg.Value, form: Form, is_active: hg.Value | None = None
) -> hg.Value:
    """Return a row of each chosen token, i32 [b, .]: the token, or -1 if its row is not active;
    with log-probabilities its own, then the most likely tokens, then theirs, as bits of f32."""
    shown = following if is_active is None else hg.where(is_active, following, -1)
    column = hg.reshape(shown, (following.shape[0], 1))
    if not form.has_logprobs:
        # A kernel copies it: of a view, Python would.
        return ops.cont(column)
    own, tokens, others = log_probabilities(logits, following)
    bits = (ops.bitcast(one, dtype="i32") for one in (own, others))
    return hg.concat([column, next(bits), tokens, next(bits)], axis=1)
