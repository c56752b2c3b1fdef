"""The graphs that work on a cache of pages."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np

import heliograph as hg
from heliograph.llm.architectures import hidden
from heliograph.llm.configuration import Configuration
from heliograph.llm.decoding_step import Cache, FilledError, Step, Weights
from heliograph.llm.files.adapters import Lora, adapt
from heliograph.llm.graphs import Decoder, any_of, checked, described, proposed_tokens
from heliograph.llm.sampling import ENDS, Form, choose
from heliograph.llm.serving.pages import PAGE

ops = hg.ops

#: The token of a row that has none.
NOTHING = -1


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
        step.adaptation = adapt(graph, self.loras, rounds_rows=self.config.rounds_rows)
        with suppress(FilledError):
            hidden(step, tokens)
        graph.output("end", positions[-1:] + 1)
        return graph

    def decode(self, rows: int, pages: int, form: Form) -> hg.Graph:
        """A graph that takes a `token` for each sequence at its `position`, by its row of `table`
        (i32 [rows, pages]), and chooses the next ones (all i32 [rows]).

        A row is active while its token is not `NOTHING` and its position is below its `limit`, both
        i32 [rows]. The others keep what they have, write to the spare page, and choose `NOTHING`.
        After one of its `ends` (i32 [rows, .]) a row has no token. `idle` is true if no row is
        active in the next step. `chosen` is what `described` returns.
        """
        graph = hg.Graph()
        token, position, limit = (
            graph.input(name, (rows,), "i32") for name in ("token", "position", "limit")
        )
        ends = graph.input("ends", (rows, ENDS), "i32")
        table = graph.input("table", (rows, pages), "i32")
        is_active = (token != NOTHING) & (position < limit)
        own = hg.where(is_active, position, 0)
        places = self._places(graph, table, own, is_active)
        step = self._step(graph, table, places, own)
        step.adaptation = adapt(graph, self.loras, rows, rounds_rows=self.config.rounds_rows)
        logits = step.logits(step.norm("output_norm", hidden(step, hg.maximum(token, 0))))
        chosen = choose(graph, logits, own, form, is_active)
        has_ended = any_of(hg.expand_dims(chosen, axis=1) == ends, axis=1)
        following = hg.where(is_active, hg.where(has_ended, NOTHING, chosen), token)
        after = position + hg.astype(is_active, "i32")
        graph.output("token_next", following)
        graph.output("position_next", after)
        graph.output("idle", ~any_of((following != NOTHING) & (after < limit)))
        graph.output("chosen", described(logits, chosen, form, is_active))
        return graph

    def _places(self, graph: hg.Graph, table: hg.Value, positions: hg.Value, is_active: hg.Value) -> hg.Value:
        """Return the places of positions in the cache; of rows that are not active, in the spare
        page."""
        rows, pages = table.shape
        numbers = graph.constant(np.arange(rows, dtype=np.int32))
        page = ops.get_rows(hg.reshape(table, (rows * pages, 1)), numbers * pages + positions // PAGE)
        own = hg.reshape(page, (rows,)) * PAGE + positions % PAGE
        return hg.where(is_active, own, numbers + self.pages * PAGE)

    def check(
        self, pages: int, form: Form, count: int, proposer: Decoder | None = None, most: int = 0
    ) -> hg.Graph:
        """As `Decoder.check`, for a sequence with a `table` (i32 [1, pages]), whose tokens have
        `places` in the cache (i32 [count + 1])."""
        graph = hg.Graph()
        token, position = graph.input("token", (1,), "i32"), graph.input("position", (1,), "i32")
        places = graph.input("places", (count + 1,), "i32")
        proposed = proposed_tokens(graph, count, proposer, most)
        positions = position + graph.constant(np.arange(count + 1, dtype=np.int32))
        step = self._step(graph, graph.input("table", (1, pages), "i32"), places, positions)
        step.adaptation = adapt(graph, self.loras, rounds_rows=self.config.rounds_rows)
        logits = step.logits(step.norm("output_norm", hidden(step, hg.concat([token, proposed], axis=0))))
        graph.output("chosen", checked(logits, positions, proposed, form))
        return graph

    def _step(self, graph: hg.Graph, table: hg.Value, places: hg.Value, positions: hg.Value) -> Step:
        kept = _Paged(self.cache, self.pages + 1, table, places)
        return Step(graph, self.config, self.weights, kept, positions, sequences=table.shape[0])
