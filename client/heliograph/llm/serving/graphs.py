"""The graphs that work on a cache of pages."""

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
from heliograph.llm.serving.pages import PAGE

ops = hg.ops


@dataclass
class _Paged:
    """The pages that a graph works on."""

    cache: Cache
    #: All pages of the cache.
    total: int
    #: The pages of each sequence, i32 [sequences, m].
    table: hg.Value
    #: The places of the graph's tokens in the cache, i32 [n].
    places: hg.Value

    @property
    def context(self) -> int:
        """The most tokens of a sequence."""
        return self.cache.context

    @property
    def rows(self) -> int:
        """Those of a table's pages."""
        return self.table.shape[1] * PAGE

    @property
    def parts(self) -> int:
        """Its pages."""
        return self.total

    def write(self, graph: hg.Graph, which: str, new: hg.Value, places: hg.Value) -> hg.Value:
        """Write rows, and return those of all pages."""
        shape = (self.total * PAGE, new.shape[1])
        variable = graph.variable(f"{self.cache.name}/{which}", shape, self.cache.dtype)
        return hg.assign(variable, ops.set_rows(variable, new, self.places))

    def attend(
        self,
        queries: hg.Value,
        keys: hg.Value,
        values: hg.Value,
        mask: hg.Value,
        *sinks: hg.Value,
        **attributes: float,
    ) -> hg.Value:
        """Attend to the pages of the tables."""
        return ops.flash_attn_paged(queries, keys, values, mask, self.table, *sinks, **attributes)


@dataclass(frozen=True, slots=True)
class PagedDecoder:
    """Builds the graphs of a model whose cache is pages, one more than answers may have: the last
    takes rows that are not read."""

    config: Configuration
    weights: Weights
    cache: Cache
    #: The pages that answers may have.
    pages: int
    #: Graphs of a model with adapters have the input `adapters.SCALES`, a row for each sequence.
    loras: tuple[Lora, ...] = ()

    def fill(self, count: int, pages: int) -> hg.Graph:
        """A graph that takes `tokens` from the position `start` (i32 [1]) on into `places` of the
        cache (both i32 [count]), by a `table` of the sequence (i32 [1, pages])."""
        graph = hg.Graph()
        tokens, places = (graph.input(name, (count,), "i32") for name in ("tokens", "places"))
        positions = graph.input("start", (1,), "i32") + graph.constant(np.arange(count, dtype=np.int32))
        step = self._step(graph, graph.input("table", (1, pages), "i32"), places, positions)
        step.only_fills = True
        step.adaptation = adapt(graph, self.loras)
        with suppress(FilledError):
            hidden(step, tokens)
        graph.output("end", positions[-1:] + 1)
        return graph

    def decode(self, rows: int, pages: int, form: Form) -> hg.Graph:
        """A graph that takes a `token` for each sequence at its `position`, by its row of `table`
        (i32 [rows, pages]), and chooses the next ones (all i32 [rows]).

        `done` is true after one of `ends` (i32 [rows, .]) of its sequence. `chosen` is what
        `described` returns.
        """
        graph = hg.Graph()
        token, position = (graph.input(name, (rows,), "i32") for name in ("token", "position"))
        ends = graph.input("ends", (rows, ENDS), "i32")
        table = graph.input("table", (rows, pages), "i32")
        first = graph.constant(np.arange(rows, dtype=np.int32) * pages)
        own = ops.get_rows(hg.reshape(table, (rows * pages, 1)), first + position // PAGE)
        places = hg.reshape(own, (rows,)) * PAGE + position % PAGE
        step = self._step(graph, table, places, position)
        step.adaptation = adapt(graph, self.loras, rows)
        logits = step.logits(step.norm("output_norm", hidden(step, token)))
        following = choose(graph, logits, position, form)
        graph.output("token_next", following)
        graph.output("position_next", position + 1)
        graph.output("done", hg.any(hg.expand_dims(following, axis=1) == ends))
        graph.output("chosen", described(logits, following, form))
        return graph

    def _step(self, graph: hg.Graph, table: hg.Value, places: hg.Value, positions: hg.Value) -> Step:
        kept = _Paged(self.cache, self.pages + 1, table, places)
        return Step(graph, self.config, self.weights, kept, positions, sequences=table.shape[0])
