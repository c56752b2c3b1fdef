"""Answers that follow grammars, in steps of a server: their masks, and what a token changes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import heliograph as hg
from heliograph.llm.constraints import Matcher, Matching
from heliograph.llm.generating import WORTH_FILL
from heliograph.llm.language_model import Asked
from heliograph.llm.serving.answering import Answering

#: Grammars that are compiled at a time.
COMPILED = 4


class Following:
    """Waits for the processes of grammars on threads, so that nothing else waits for these."""

    def __init__(self, matching: Matching) -> None:
        self._matching = matching
        self._compiling = asyncio.Semaphore(COMPILED)
        # A thread of its own: steps of answers wait for no compilation.
        self._masking = ThreadPoolExecutor(1, "llm-masks")

    async def begin(self, asked: Asked, count: int) -> list[Matcher | None]:
        """Begin the grammars of so many answers. Raises as `Matching.follow`."""
        if asked.constraint is None:
            return [None] * count
        made: list[Matcher | None] = []
        try:
            for _ in range(count):
                async with self._compiling:
                    made.append(await asyncio.to_thread(self._matching.follow, asked.constraint))
        except BaseException:
            close_all(made)
            raise
        return made

    async def advance(
        self, answers: Sequence[Answering]
    ) -> list[tuple[Answering, hg.HeliographError | None]]:
        """Tell grammars the last tokens of their answers, and wait for what may come next.

        Returns the answers that follow one, with the error of it if there is one.
        """
        pairs = [(one, one.matcher) for one in answers if one.matcher is not None]
        told = [(matcher, one.result.tokens[-1]) for one, matcher in pairs]
        loop = asyncio.get_running_loop()
        errors = await loop.run_in_executor(self._masking, _advance, told) if told else []
        return [(one, error) for (one, _), error in zip(pairs, errors, strict=True)]

    def close(self) -> None:
        """End the thread of its own, after what it waits for."""
        self._masking.shutdown(wait=False, cancel_futures=True)


def close_all(matchers: Iterable[Matcher | None]) -> None:
    """End the processes of grammars."""
    for one in matchers:
        if one is not None:
            one.close()


def masks_for(answers: Sequence[Answering]) -> int:
    """Return the masks of the least graph for these answers: a power of two, or none."""
    count = sum(one.matcher is not None for one in answers)
    return 1 << (count - 1).bit_length() if count else 0


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
    return matcher.take_forced(one.job.left)
