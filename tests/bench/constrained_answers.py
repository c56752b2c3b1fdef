"""Tokens of answers that follow a form, beside free ones of the same model.

The model has random q4_0 weights, 4 layers of width 1,024 and 32,000 tokens, and is near: in this
process.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, paired_medians
from llm_shapes import SHAPES, write

import heliograph as hg
from heliograph.llm.constraints import Constraint, constraint_of

TOKENS = 48
ROUNDS = 6
#: The most that telling a grammar a token may take of a step of the model.
MASK_BAR = 0.15
#: The most that a token may take of a free one's time: all of them chosen, and those of JSON.
CHOSEN_BAR, JSON_BAR = 1.25, 1.0
#: Every token is chosen.
PATTERN = r"(?s:.{400})"
#: Most tokens are forced.
SCHEMA = {
    "type": "object",
    "properties": {
        name: {"enum": ["the first of all values", "another one of them"]}
        for name in ("the name of the person", "the city in which it lives", "a reason for the answer")
    },
    "required": ["the name of the person", "the city in which it lives", "a reason for the answer"],
    "additionalProperties": False,
}


def figures() -> Iterator[Figure]:
    """Milliseconds of a token."""
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "model.gguf", replace(SHAPES["small"], layers=4))
        with hg.connect("local:") as session:
            llm = hg.llm.load(session, path)
            yield from compared(llm)
            llm.close()


def compared(llm: hg.llm.LanguageModel) -> Iterator[Figure]:
    """Masks and tokens, in turns with free tokens."""

    def free(runs: int) -> list[float]:
        return [seconds_of_token(llm) for _ in range(runs)]

    def followed(**options: Any) -> Any:
        return lambda runs: [seconds_of_token(llm, **options) for _ in range(runs)]

    constraint = constraint_of(schema=True)
    assert constraint is not None
    mask, step = paired_medians(
        lambda runs: [seconds_of_mask(llm, constraint) for _ in range(runs)], free, ROUNDS, 1
    )
    yield Figure("llm-form/mask", mask * 1e3, step * 1e3, MASK_BAR, "ms", "a free token")
    chosen, step = paired_medians(followed(regex=PATTERN), free, ROUNDS, 1)
    yield Figure("llm-form/chosen", chosen * 1e3, step * 1e3, CHOSEN_BAR, "ms/token", "a free token")
    json, step = paired_medians(followed(schema=SCHEMA), free, ROUNDS, 1)
    yield Figure("llm-form/json", json * 1e3, step * 1e3, JSON_BAR, "ms/token", "a free token")


def seconds_of_token(llm: hg.llm.LanguageModel, **options: Any) -> float:
    """Return the mean time of a token, without the prompt's and the form's beginning."""
    result = llm.generate("Once upon a time", max_tokens=TOKENS, seed=1, **options).result()
    return result.seconds / len(result.tokens)


def seconds_of_mask(llm: hg.llm.LanguageModel, constraint: Constraint) -> float:
    """Return the mean time of a token that a form is told, in an answer at random."""
    rng, matcher, spent, count = random.Random(5), llm.matching.follow(constraint), 0.0, 0
    bits = np.arange(len(llm.tokenizer))
    while count < TOKENS and not matcher.is_over:
        allowed = np.flatnonzero(matcher.mask[bits // 32] >> (bits % 32) & 1)
        begin = time.perf_counter()
        matcher.take(int(rng.choice(allowed)))
        spent += time.perf_counter() - begin
        count += 1
    matcher.close()
    return spent / count
