"""`Server`: a model on a session that writes many answers at a time. For asyncio."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import numpy as np

import heliograph as hg
from heliograph.llm.adapters import SCALES, AdapterArgument, Scales
from heliograph.llm.effects import awaiting
from heliograph.llm.generating import Engine, built, inputs_of
from heliograph.llm.graphs import CARRIES
from heliograph.llm.language_model import AsyncLanguageModel, Options, request_of
from heliograph.llm.loading import CacheType, FileArgument, engine_of, tokenizer_of
from heliograph.llm.sampling import CANDIDATES, CARRIED, ENDS, Form, Settings
from heliograph.llm.serving.answering import Answering
from heliograph.llm.serving.graphs import SlotDecoder
from heliograph.llm.serving.scheduler import SIZES, Bounds, Decode, Fill, Job, Scheduler
from heliograph.llm.weights import open_file

logger = logging.getLogger(__name__)

#: The time of an answer, its wait for a slot included.
SECONDS = 600.0
#: The time of a chunk, or of a loop.
STEP_SECONDS = 300.0
#: The settings of a row that is no answer's.
_IDLE = Settings(temperature=0)


class Server:
    """A model that writes many answers at a time. Made by `Server.load`.

    An answer is the same, to the bit, whether it is written alone or beside others.
    """

    def __init__(
        self, session: hg.aio.Session, model: AsyncLanguageModel, engine: Any, bounds: Bounds, options: Any
    ) -> None:
        #: The same model for one text at a time: its tokenizer, its template, its embeddings.
        self.model = model
        self._session = session
        self._engine = engine
        #: The adapters, by whose names requests choose one.
        self.adapters: Scales = engine.adapters
        self._options = options
        self._plans: dict[Any, Any] = {}
        self._answers: dict[Job, Answering] = {}
        self._embedding = asyncio.Lock()
        self._driver: asyncio.Task[None] | None = None
        #: Whether it takes no more requests.
        self.is_draining = False
        engine.adapters = self.adapters.silent()
        rows = engine.decoder.cache.rows if isinstance(engine, Engine) else 1
        self.scheduler = Scheduler(bounds, rows)

    @classmethod
    async def load(
        cls,
        session: hg.aio.Session,
        file: FileArgument,
        *,
        bounds: Bounds | None = None,
        context: int | None = None,
        cache: CacheType = "f16",
        chat_template: str | None = None,
        adapters: Sequence[AdapterArgument] = (),
        **options: Unpack[hg.CompileOptions],
    ) -> Server:
        """Load a model of a GGUF file, and compile its plans. The arguments are those of
        `hg.llm.load`, whose errors it raises too."""
        bounds = bounds or Bounds()
        if not 1 <= bounds.slots <= SIZES[-1]:
            raise hg.InvalidArgumentError(f"slots is {bounds.slots}", advice=f"1 to {SIZES[-1]}")
        found = await asyncio.to_thread(open_file, file)
        engine = await asyncio.to_thread(engine_of, session, found, context, cache, dict(options), adapters)
        tokenizer = await asyncio.to_thread(tokenizer_of, found, engine)
        model = AsyncLanguageModel(found.header, engine, tokenizer, chat_template)
        server = cls(session, model, engine, bounds, dict(options))
        await server._prepare()
        return server

    @property
    def writes(self) -> bool:
        """False for a model that only embeds."""
        return isinstance(self._engine, Engine)

    def submit(
        self,
        tokens: Sequence[int],
        *,
        tenant: str = "",
        seconds: float = SECONDS,
        adapter: str = "",
        **options: Unpack[Options],
    ) -> Answering:
        """Begin an answer to a prompt. `options` are those of `hg.llm.Options`, but `top_k` is 1 to
        128.

        Args:
            tokens: The prompt.
            tenant: Tenants take turns.
            seconds: The most time, the wait for a slot included; then DeadlineExceededError.
            adapter: The name of the adapter that answers; empty: the model without adapters.

        Raises InvalidArgumentError, LimitExceededError for a prompt that exceeds the context and
        for a full queue, and DrainingError.
        """
        if self.is_draining:
            raise hg.DrainingError("the server shuts down", advice="ask another one")
        prompt = list(tokens)
        request, pieces, result = request_of(self._engine, self.model.tokenizer, prompt, options)
        if request.settings.form.candidates == 0:
            raise hg.InvalidArgumentError(
                f"top_k is {request.settings.top_k}", advice=f"a whole number from 1 to {CANDIDATES}"
            )
        if request.settings.logit_bias:
            request.settings.inputs(self.model.config.vocabulary, [])
        room = self.model.context - len(prompt) + 1
        if adapter:
            self.adapters.place(adapter)
        job = Job(tenant, prompt, min(room, request.max_tokens or room), adapter)
        self.scheduler.add(job)
        made = Answering(job, request, pieces, result, time.monotonic() + seconds)
        made.on_leave(self._leave)
        self._answers[job] = made
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive(), name="llm-serving")
        return made

    async def embed(self, texts: Sequence[Sequence[int]], adapter: str = "") -> np.ndarray[Any, Any]:
        """Return a unit vector for each text, f32 [texts, width], by an adapter if one is named."""
        async with self._embedding:
            self._engine.adapters = self.adapters.only(adapter)
            return await self.model.embed(texts)

    async def close(self) -> None:
        """End all answers, and free the plans and the caches. The session stays open."""
        self.is_draining = True
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.cancel()
            await asyncio.gather(driver, return_exceptions=True)
        self._end_all(list(self._answers.values()), hg.DrainingError("the server shuts down"))
        names = {name for plan in self._plans.values() for name in plan.variables}
        for plan in self._plans.values():
            plan.free()
        self._plans.clear()
        with suppress(hg.ConnectionError):
            for name in sorted(names):
                await self._session.free_variable(name)
            await self.model.close()

    # Plans

    async def _prepare(self) -> None:
        if not self.writes:
            async for _ in awaiting(self._engine.prepare()):
                pass
            return
        for rows in SIZES:
            for is_adapted in {False, bool(self.adapters.loras)}:
                await self._decoding(rows, Form(CANDIDATES), is_adapted)
            if rows >= self.scheduler.bounds.slots:
                break

    async def _plan(self, key: Any, build: Callable[[], hg.Graph]) -> Any:
        if key not in self._plans:
            self._plans[key] = await self._session.compile(built(build), **self._options)
        return self._plans[key]

    async def _decoding(self, rows: int, form: Form, is_adapted: bool) -> Any:
        build = partial(self._slots(is_adapted).decode, rows, form)
        return await self._plan((rows, form, is_adapted), build)

    def _slots(self, is_adapted: bool) -> SlotDecoder:
        decoder = self._engine.decoder
        loras = self.adapters.loras if is_adapted else ()
        cache = replace(decoder.cache, name=f"{decoder.cache.name}-slots")
        return SlotDecoder(decoder.config, decoder.weights, cache, self.scheduler.bounds.slots, loras)

    # Work

    async def _drive(self) -> None:
        """Compute what the scheduler says until nothing is left."""
        while True:
            self._expire()
            action = self.scheduler.next()
            if action is None:
                return
            try:
                await (self._fill(action) if isinstance(action, Fill) else self._decode(action))
            except hg.HeliographError as error:
                self._fail(error)
            except Exception as error:
                logger.exception("a step of the model fails")
                self._fail(hg.ComputeFailedError(f"a step of the model fails: {error!r:.200}"))

    async def _fill(self, action: Fill) -> None:
        chunk, job = action.chunk, action.job
        is_adapted = bool(job.variant)
        build = partial(self._slots(is_adapted).fill, chunk.size)
        plan = await self._plan(("fill", chunk.size, is_adapted), build)
        inputs = {**inputs_of(job.prompt, chunk), "slot": np.array([job.slot], np.int32)}
        await plan.run({**inputs, **self._scales([job.variant])}, timeout=STEP_SECONDS)
        self.scheduler.filled(action)

    async def _decode(self, action: Decode) -> None:
        answers = [self._answers[job] for job in action.jobs]
        form = _common(one.request.settings for one in answers)
        variants = ["" for _ in range(action.rows)]
        for job in action.jobs:
            variants[job.slot] = job.variant
        plan = await self._decoding(action.rows, form, any(variants))
        loop = plan.loop(
            {**self._inputs(action.rows, answers, form), **self._scales(variants)},
            steps=action.steps,
            carry={**CARRIES, **(CARRIED if form.candidates != 1 else {})},
            until="done",
            taps=["chosen"],
            fetch=(),
            timeout=STEP_SECONDS,
        )
        try:
            async for tap in loop.taps():
                self._take(tap.value, answers)
                is_idle = all(one.job.is_over for one in answers)
                if (is_idle or self.scheduler.could_admit) and not loop.done():
                    loop.stop()
            await loop.result()
        finally:
            loop.cancel()

    def _take(self, chosen: np.ndarray[Any, Any], answers: Sequence[Answering]) -> None:
        """Add a step's tokens to the answers."""
        for one in answers:
            if one.job.is_over:
                continue
            row = chosen[one.job.slot]
            self.scheduler.chosen(one.job, int(row[0]))
            if len(one.result.tokens) == 0:
                one.result.reused_tokens = one.job.reused
            if one.add(row):
                self._leave(one)

    def _inputs(self, rows: int, answers: Sequence[Answering], form: Form) -> Mapping[str, Any]:
        """Return the inputs of a loop: a row for each slot."""
        by_slot = {one.job.slot: one for one in answers}
        words = self.model.config.vocabulary
        token, position, active = (np.zeros(rows, np.int32) for _ in range(3))
        ends = np.full((rows, ENDS), -1, np.int32)
        choices = []
        for row in range(rows):
            one = by_slot.get(row)
            if one is None:
                choices.append(_IDLE.inputs(words, [], form))
                continue
            tokens = one.job.tokens
            token[row], position[row], active[row] = tokens[-1], len(tokens) - 1, 1
            ends[row, : len(one.request.ends)] = one.request.ends
            choices.append(one.request.settings.inputs(words, tokens, form))
        stacked = {name: np.concatenate([one[name] for one in choices]) for name in choices[0]}
        return {"token": token, "position": position, "active": active, "ends": ends, **stacked}

    def _scales(self, variants: Sequence[str]) -> dict[str, Any]:
        """Return the input of adapters' scales: a row for each of a plan's rows."""
        if not any(variants):
            return {}
        return {SCALES: np.concatenate([self.adapters.only(one).row() for one in variants])}

    # Ends

    def _leave(self, one: Answering) -> None:
        self._answers.pop(one.job, None)
        self.scheduler.end(one.job)

    def _expire(self) -> None:
        now = time.monotonic()
        late = [one for one in self._answers.values() if one.deadline <= now]
        self._end_all(late, hg.DeadlineExceededError("the answer took longer than its time"))

    def _fail(self, error: hg.HeliographError) -> None:
        """End the answers that have slots with an error: the cache may have lost their tokens."""
        self._end_all([self._answers[job] for job in self.scheduler.jobs], error)
        self.scheduler.forget()

    def _end_all(self, answers: Sequence[Answering], error: hg.HeliographError) -> None:
        for one in answers:
            self._leave(one)
            one.fail(error)


def _common(settings: Any) -> Form:
    """Return the least form that can make all the choices."""
    forms = [one.form for one in settings]
    candidates = CANDIDATES if any(one.candidates != 1 for one in forms) else 1
    return Form(candidates, any(one.is_biased for one in forms), any(one.has_logprobs for one in forms))
