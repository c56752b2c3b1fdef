"""Answers that follow grammars, in steps of a server: their masks, and what a token changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import heliograph as hg
from heliograph.llm.constraints import Matcher
from heliograph.llm.generating import WORTH_FILL, Array
from heliograph.llm.sampling import Form, masks_of
from heliograph.llm.serving.answering import Answering


def masks_for(answers: Sequence[Answering]) -> int:
    """Return the masks of the least graph for these answers: a power of two, or none."""
    count = sum(one.matcher is not None for one in answers)
    return 1 << (count - 1).bit_length() if count else 0


def mask_inputs(answers: Sequence[Answering], rows: int, vocabulary: int, form: Form) -> dict[str, Array]:
    """Return the inputs of a step that are masks."""
    masks = {row: one.matcher.mask for row, one in enumerate(answers) if one.matcher is not None}
    return masks_of(masks, rows, vocabulary, form) if form.masks else {}


async def advance(answers: Sequence[Answering]) -> list[tuple[Answering, hg.HeliographError | None]]:
    """Tell grammars the last tokens of their answers, and wait for what may come next, on a thread.

    Returns each answer, with the error of its grammar if it has one.
    """
    pairs = [(one.matcher, one.job.tokens[-1]) for one in answers if one.matcher is not None]
    errors = await asyncio.to_thread(_advance, pairs) if pairs else []
    return list(zip((one for one in answers if one.matcher is not None), errors, strict=True))


def _advance(pairs: Sequence[tuple[Matcher, int]]) -> list[hg.HeliographError | None]:
    """Their processes work side by side."""
    errors: list[hg.HeliographError | None] = [None] * len(pairs)
    for place, (matcher, token) in enumerate(pairs):
        try:
            matcher.send(token)
        except hg.HeliographError as error:
            errors[place] = error
    for place, (matcher, _) in enumerate(pairs):
        if errors[place] is None:
            try:
                matcher.receive()
            except hg.HeliographError as error:
                errors[place] = error
    return errors


def take_forced(one: Answering) -> list[int]:
    """Return the tokens that must come next in an answer where a chunk takes them faster than
    steps do."""
    matcher = one.matcher
    if matcher is None or one.request.settings.logprobs or len(matcher.forced) < WORTH_FILL:
        return []
    found = list(matcher.forced)[: one.job.left]
    matcher.forced.clear()
    return found
