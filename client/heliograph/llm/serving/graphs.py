"""The graphs that work on a cache of several slots."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np

import heliograph as hg
from heliograph.llm.adapters import Lora, adapt
from heliograph.llm.architectures import hidden
from heliograph.llm.configuration import Configuration
from heliograph.llm.decoding_step import Cache, FilledError, Step, Weights
from heliograph.llm.graphs import described
from heliograph.llm.sampling import ENDS, Form, choose

ops = hg.ops


@dataclass
class _Slots:
    """The rows of the slots that a graph works on."""

    cache: Cache
    #: All slots of the cache, and those whose rows the graph reads.
    count: int
    used: int
    #: The places of the graph's tokens in the cache, i32 [n].
    places: hg.Value
    #: The places that it reads, i32 [rows]; None: the first slots as they are.
    read: hg.Value | None = None

    @property
    def context(self) -> int:
        """The most tokens of a slot."""
        return self.cache.context

    @property
    def rows(self) -> int:
        """Those of a slot."""
        return self.cache.rows

    def write(self, graph: hg.Graph, which: str, new: hg.Value, places: hg.Value) -> hg.Value:
        """Write rows, and return those of the slots in use."""
        variable = graph.variable(
            f"{self.cache.name}/{which}", (self.count * self.rows, new.shape[1]), self.cache.dtype
        )
        kept = hg.assign(variable, ops.set_rows(variable, new, self.places))
        return kept[: self.used * self.rows] if self.read is None else ops.get_rows(kept, self.read)


@dataclass(frozen=True, slots=True)
class SlotDecoder:
    """Builds the graphs of a model whose cache has `slots` sequences."""

    config: Configuration
    weights: Weights
    #: The form of each slot.
    cache: Cache
    slots: int
    #: Graphs of a model with adapters have the input `adapters.SCALES`, a row for each slot.
    loras: tuple[Lora, ...] = ()

    def fill(self, count: int) -> hg.Graph:
        """A graph that takes `tokens` (i32 [count]) from the position `start` on into a `slot`
        (both i32 [1])."""
        graph = hg.Graph()
        tokens = graph.input("tokens", (count,), "i32")
        start, slot = graph.input("start", (1,), "i32"), graph.input("slot", (1,), "i32")
        positions = start + graph.constant(np.arange(count, dtype=np.int32))
        begin = slot * self.cache.rows
        read = begin + graph.constant(np.arange(self.cache.rows, dtype=np.int32))
        kept = _Slots(self.cache, self.slots, 1, begin + positions, read)
        step = Step(graph, self.config, self.weights, kept, positions, only_fills=True)
        step.adaptation = adapt(graph, self.loras)
        with suppress(FilledError):
            hidden(step, tokens)
        graph.output("end", positions[-1:] + 1)
        return graph

    def decode(self, rows: int, form: Form) -> hg.Graph:
        """A graph that takes a `token` for each of the first `rows` slots at its `position`, and
        chooses the next ones (all i32 [rows]).

        A slot that is not `active` (i32 [rows], 0 or 1) keeps its keys and values. `done` is true
        after one of `ends` (i32 [rows, .]) of its slot. `chosen` is what `described` returns.
        """
        graph = hg.Graph()
        token, position, active = (
            graph.input(name, (rows,), "i32") for name in ("token", "position", "active")
        )
        ends = graph.input("ends", (rows, ENDS), "i32")
        # The last row of a slot is no token's.
        own = hg.where(active > 0, position, self.cache.rows - 1)
        begin = graph.constant(np.arange(rows, dtype=np.int32) * self.cache.rows)
        kept = _Slots(self.cache, self.slots, rows, begin + own)
        step = Step(graph, self.config, self.weights, kept, position, sequences=rows)
        step.adaptation = adapt(graph, self.loras, rows)
        logits = step.logits(step.norm("output_norm", hidden(step, token)))
        following = choose(graph, logits, position, form)
        graph.output("token_next", following)
        graph.output("position_next", position + active)
        graph.output("done", hg.any(hg.expand_dims(following, axis=1) == ends))
        graph.output("chosen", described(logits, following, form))
        return graph
