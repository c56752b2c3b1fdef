"""A decoder whose cache has a slot of a whole context for each answer: what pages are held against."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import heliograph as hg
from heliograph.llm.architectures import hidden
from heliograph.llm.decoding_step import Cache, Step
from heliograph.llm.graphs import Decoder, described
from heliograph.llm.sampling import ENDS, Form, choose

ops = hg.ops


@dataclass
class Slots:
    """The rows of slots that lie one after the other."""

    cache: Cache
    parts: int
    places: hg.Value

    @property
    def context(self) -> int:
        return self.cache.context

    @property
    def rows(self) -> int:
        return self.cache.rows

    def write(self, graph: hg.Graph, which: str, new: hg.Value, places: hg.Value) -> hg.Value:
        shape = (self.parts * self.rows, new.shape[1])
        variable = graph.variable(f"{self.cache.name}-{self.parts}/{which}", shape, self.cache.dtype)
        return hg.assign(variable, ops.set_rows(variable, new, self.places))

    def attend(self, *operands: hg.Value, **attributes: float) -> hg.Value:
        return ops.flash_attn_ext(*operands, **attributes)


def decode(decoder: Decoder, rows: int, form: Form) -> hg.Graph:
    """As `PagedDecoder.decode`, of slots."""
    graph = hg.Graph()
    token, position = (graph.input(name, (rows,), "i32") for name in ("token", "position"))
    ends = graph.input("ends", (rows, ENDS), "i32")
    begin = graph.constant(np.arange(rows, dtype=np.int32) * decoder.cache.rows)
    kept = Slots(decoder.cache, rows, begin + position)
    step = Step(graph, decoder.config, decoder.weights, kept, position, sequences=rows)
    logits = step.logits(step.norm("output_norm", hidden(step, token)))
    following = choose(graph, logits, position, form)
    graph.output("token_next", following)
    graph.output("position_next", position + 1)
    graph.output("done", hg.any(hg.expand_dims(following, axis=1) == ends))
    graph.output("chosen", described(logits, following, form))
    return graph
