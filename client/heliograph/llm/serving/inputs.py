"""The arrays that the steps of a served model take. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from heliograph.llm.chunks import Chunk
from heliograph.llm.files.adapters import SCALES, Scales
from heliograph.llm.generating import Array
from heliograph.llm.sampling import CANDIDATES, ENDS, Form, Settings, masks_of
from heliograph.llm.serving.answering import Answering
from heliograph.llm.serving.graphs import NOTHING
from heliograph.llm.serving.scheduler import Decode, Job, places_of

#: The settings of a row that is no answer's.
_IDLE = Settings(temperature=0)


def common_form(settings: Iterable[Settings]) -> Form:
    """Return the least form that can make all the choices of answers of a kind."""
    forms = [one.form for one in settings]
    counts = {one.candidates for one in forms}
    candidates = counts.pop() if len(counts) == 1 else CANDIDATES
    return Form(candidates, any(one.is_biased for one in forms), any(one.has_logprobs for one in forms))


class StepInputs:
    """Makes the inputs of steps: of a model with so many words, whose page `spare` is not read."""

    def __init__(self, words: int, spare: int, adapters: Scales) -> None:
        self._words, self._spare, self._adapters = words, spare, adapters

    def decoding(
        self, action: Decode, answers: Sequence[Answering], limits: Sequence[int], form: Form
    ) -> dict[str, Array]:
        """Return the inputs of a loop: a row for each answer, which goes on below its limit, and
        idle ones. Answers with grammars come first."""
        rows = action.rows
        token = np.full(rows, NOTHING, np.int32)
        position, limit = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        ends = np.full((rows, ENDS), -1, np.int32)
        choices = []
        for row, one in enumerate(answers):
            tokens = one.job.tokens
            token[row], position[row], limit[row] = tokens[-1], len(tokens) - 1, limits[row]
            ends[row, : len(one.request.ends)] = one.request.ends
            choices.append(one.request.settings.inputs(self._words, tokens, form))
        choices += [_IDLE.inputs(self._words, [], form)] * (rows - len(answers))
        stacked = {name: np.concatenate([one[name] for one in choices]) for name in choices[0]}
        variants = [one.job.variant for one in answers] + [""] * (rows - len(answers))
        return {
            "token": token,
            "position": position,
            "limit": limit,
            "ends": ends,
            "table": self.tables(action.jobs, rows, action.pages),
            **stacked,
            **self.masks(answers, form.masks),
            **self._scales(variants),
        }

    def chunk(self, job: Job, chunk: Chunk, pages: int) -> dict[str, Array]:
        """Return the inputs of a chunk of tokens that are the answer's own: its table, of so many
        pages, the places of the tokens, and its adapter."""
        return {
            "table": self.tables([job], 1, pages),
            "places": np.array(places_of(job.pages, chunk, self._spare), np.int32),
            **self._scales([job.variant]),
        }

    def tables(self, jobs: Sequence[Job], rows: int, pages: int) -> Array:
        """Return the first pages of jobs, i32 [rows, pages], with the spare page behind them."""
        tables = np.full((rows, pages), self._spare, np.int32)
        for table, job in zip(tables, jobs, strict=False):
            own = job.pages[:pages]
            table[: len(own)] = own
        return tables

    def masks(self, answers: Sequence[Answering], count: int) -> dict[str, Array]:
        """Return the input that is the masks of those with grammars, who come first; none for 0."""
        masks = [one.matcher.mask for one in answers if one.matcher is not None]
        return masks_of(masks, self._words, count) if count else {}

    def _scales(self, variants: Sequence[str]) -> dict[str, Any]:
        """Return the input of adapters' scales: a row for each of a plan's rows."""
        if not any(variants):
            return {}
        return {SCALES: np.concatenate([self._adapters.only(one).row() for one in variants])}
