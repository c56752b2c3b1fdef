"""Sixteen answers of a language model at a time, beside the same ones one after the other; and with
a system prompt that all begin with, beside prompts that have nothing in common.

The model has random q4_0 weights, 4 layers of width 1,024 and 32,000 tokens. The first prompts are
short and differ.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, paired_medians
from llm_shapes import SHAPES, write

import heliograph as hg
from heliograph.llm.serving import Bounds, Server

ANSWERS, TOKENS, PROMPT, SYSTEM, CONTEXT = 16, 64, 24, 384, 512
#: The most that all answers together may take of their time one after the other.
BAR = 0.5
#: The most that one answer of a server of many may take of one answer of a model that writes one.
ALONE_BAR = 1.15
#: The most that answers with a shared prompt may take of those without.
SHARED_BAR = 0.5
ROUNDS = 3


def figures() -> Iterator[Figure]:
    """Seconds of all answers, and of one."""
    with tempfile.TemporaryDirectory() as folder:
        path = model(Path(folder) / "model.gguf", CONTEXT)
        with asyncio.Runner() as runner:
            measured = runner.run(Measured.open(path))
            try:
                yield from compared(measured, runner)
            finally:
                runner.run(measured.close())


def model(path: Path, context: int) -> Path:
    """Write the model."""
    return write(path, replace(SHAPES["small"], layers=4, context=context))


class Measured:
    """A model that is served, and one that writes one answer at a time."""

    def __init__(self, session: hg.aio.Session, server: Server, llm: hg.llm.AsyncLanguageModel) -> None:
        self._session = session
        self._server = server
        self._llm = llm
        self._turn = 0

    @classmethod
    async def open(cls, path: Path) -> Measured:
        """Load both."""
        session = await hg.aio.connect("local:")
        server = await Server.load(session, path, bounds=Bounds(ANSWERS))
        return cls(session, server, await hg.llm.load(session, path))

    async def close(self) -> None:
        """Free both."""
        await self._server.close()
        await self._session.close()

    async def together(self) -> None:
        """Write all answers at a time."""
        self._turn += 1
        await asyncio.gather(*(self._served(number) for number in range(ANSWERS)))

    async def one_by_one(self) -> None:
        """Write the same number of answers one after the other."""
        self._turn += 1
        for number in range(ANSWERS):
            await self._served(number)

    async def shared(self) -> None:
        """Write all answers at a time to prompts that begin with the same system prompt."""
        self._turn += 1
        system = self._long(self._turn, 0)
        await asyncio.gather(
            *(self._served(number, [*system, *self._prompt(number)]) for number in range(ANSWERS))
        )

    async def apart(self) -> None:
        """Write as many answers to prompts of the same lengths, which have nothing in common."""
        self._turn += 1
        await asyncio.gather(
            *(
                self._served(number, [*self._long(self._turn, number), *self._prompt(number)])
                for number in range(ANSWERS)
            )
        )

    async def served_alone(self) -> None:
        """Write one answer."""
        self._turn += 1
        await self._served(0)

    async def single(self) -> None:
        """Write one answer by the model that writes one at a time."""
        self._turn += 1
        await self._llm.generate(self._prompt(0), **self._options(0))

    async def _served(self, number: int, prompt: list[int] | None = None) -> None:
        async for _ in self._server.submit(prompt or self._prompt(number), **self._options(number)):
            pass

    def _long(self, turn: int, number: int) -> list[int]:
        return np.random.default_rng((turn, number)).integers(300, 30_000, SYSTEM).tolist()

    def _prompt(self, number: int) -> list[int]:
        return [300 + self._turn, *range(310 + 20 * number, 309 + 20 * number + PROMPT)]

    def _options(self, number: int) -> Any:
        return {"max_tokens": TOKENS, "seed": number, "temperature": 0.8}


def compared(measured: Measured, runner: asyncio.Runner) -> Iterator[Figure]:
    """All at a time and one after the other, in turns; then one answer of each."""
    cpu: dict[str, float] = {}

    def seconds(call: Any, runs: int) -> list[float]:
        return [_timed(runner, call(), call.__name__, cpu) for _ in range(runs)]

    together, after = paired_medians(
        lambda runs: seconds(measured.together, runs),
        lambda runs: seconds(measured.one_by_one, runs),
        ROUNDS,
        1,
    )
    tokens = ANSWERS * TOKENS
    yield Figure(
        "llm-serving/together",
        together,
        after,
        BAR,
        "s",
        "one after the other",
        f"{tokens / together:.0f} against {tokens / after:.0f} tokens/s; "
        f"CPU {cpu['together']:.1f} against {cpu['one_by_one']:.1f} s",
    )
    shared, apart = paired_medians(
        lambda runs: seconds(measured.shared, runs), lambda runs: seconds(measured.apart, runs), ROUNDS, 1
    )
    yield Figure(
        "llm-serving/shared-prompt",
        shared,
        apart,
        SHARED_BAR,
        "s",
        "prompts that differ",
        f"{tokens / shared:.0f} against {tokens / apart:.0f} tokens/s; "
        f"CPU {cpu['shared']:.1f} against {cpu['apart']:.1f} s",
    )
    alone, single = paired_medians(
        lambda runs: seconds(measured.served_alone, runs),
        lambda runs: seconds(measured.single, runs),
        2 * ROUNDS,
        1,
    )
    yield Figure(
        "llm-serving/alone", alone * 1e3, single * 1e3, ALONE_BAR, "ms", "a model that writes one at a time"
    )


def _timed(
    runner: asyncio.Runner, work: Coroutine[Any, Any, None], name: str, cpu: dict[str, float]
) -> float:
    begin, used = time.perf_counter(), time.process_time()
    runner.run(work)
    cpu[name] = time.process_time() - used
    return time.perf_counter() - begin
