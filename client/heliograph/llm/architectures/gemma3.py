"""Gemma 3: Gemma 2's block with norms of queries and keys; five layers of six see a window."""

from __future__ import annotations

from dataclasses import replace

import heliograph as hg
from heliograph.llm.architectures.gemma2 import ROPE_MODE, normed_block, score_scale
from heliograph.llm.configuration import Configuration, Fields, decoder
from heliograph.llm.decoding_step import Step

#: Every so many layers one sees all keys.
PERIOD = 6
#: The model of 27 billion parameters, by its layers.
LARGEST_LAYERS = 62


def configure(fields: Fields) -> Configuration:
    """Layers with a window have positions of their own frequencies, which nothing scales."""
    made = decoder(
        fields,
        ROPE_MODE,
        window=fields.size("attention.sliding_window", 1024),
        logit_cap=fields.real("final_logit_softcapping", 0.0),
        embedding_scale=fields.size("embedding_length") ** 0.5,
        score_scale=score_scale(fields, LARGEST_LAYERS),
    )
    local = replace(made.rope, base=fields.real("rope.freq_base_swa", 10000.0), scale=1.0)
    return replace(made, local_rope=local)


def block(step: Step, layer: int, x: hg.Value) -> hg.Value:
    """The last layer of each period sees all keys."""
    config = step.config
    if layer % PERIOD == PERIOD - 1:
        return normed_block(step, layer, x, 0)
    return normed_block(step, layer, x, config.window, config.local_rope)
