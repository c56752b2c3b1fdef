"""`Server`: a model on a session that writes many answers at a time. For asyncio."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import numpy as np

import heliograph as hg
from heliograph.llm import chunks
from heliograph.llm.adapters import SCALES, AdapterArgument, Scales
from heliograph.llm.constraints import Matcher
from heliograph.llm.effects import awaiting
from heliograph.llm.generating import Engine, built, inputs_of
from heliograph.llm.graphs import carries
from heliograph.llm.language_model import Asked, AsyncLanguageModel, Options
from heliograph.llm.loading import CacheType, FileArgument, Loading, engine_of, tokenizer_of
from heliograph.llm.products import Activations
from heliograph.llm.sampling import CANDIDATES, ENDS, Form, Settings
from heliograph.llm.serving.answering import Answering
from heliograph.llm.serving.following import Following, mask_inputs, masks_for, take_forced
from heliograph.llm.serving.graphs import PagedDecoder
from heliograph.llm.serving.pages import PAGE
from heliograph.llm.serving.scheduler import (
    SIZES,
    Bounds,
    Decode,
    Fill,
    Job,
    Scheduler,
    places_of,
)
from heliograph.llm.spreading import Spreading
from heliograph.llm.weights import open_file

logger = logging.getLogger(__name__)

#: The time of an answer, its wait included.
SECONDS = 600.0
#: The time of a chunk, or of a loop.
STEP_SECONDS = 300.0
#: The most tokens of a cache: their places are numbers of 32 bits.
CACHE_TOKENS = 2**30
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
        engine.adapters = self.adapters.silent()
        self.scheduler = Scheduler(bounds, model.context)
        self._spreading = Spreading(session, partial(built, self._whole), options)
        self._plans: dict[Any, Any] = {}
        self._answers: dict[Job, Answering] = {}
        self.following = Following(model.matching)
        self._embedding = asyncio.Lock()
        self._driver: asyncio.Task[None] | None = None
        #: Whether it takes no more requests.
        self.is_draining = False
        #: Whether a device of the plans was lost.
        self._is_lost = False
        #: Set when the session has lost its server: nothing of the model is left.
        self.lost = asyncio.Event()

    @classmethod
    async def load(
        cls,
        session: hg.aio.Session,
        file: FileArgument,
        *,
        bounds: Bounds | None = None,
        context: int | None = None,
        cache: CacheType = "f16",
        activations: Activations = "f32",
        chat_template: str | None = None,
        adapters: Sequence[AdapterArgument] = (),
        **options: Unpack[hg.CompileOptions],
    ) -> Server:
        """Load a model of a GGUF file, and compile its plans. The arguments are those of
        `hg.llm.load`, whose errors it raises too."""
        bounds = bounds or Bounds()
        if not 1 <= bounds.answers <= SIZES[-1]:
            raise hg.InvalidArgumentError(f"answers is {bounds.answers}", advice=f"1 to {SIZES[-1]}")
        if bounds.cache_tokens is not None and not PAGE <= bounds.cache_tokens <= CACHE_TOKENS:
            raise hg.InvalidArgumentError(
                f"cache_tokens is {bounds.cache_tokens}", advice=f"{PAGE} to {CACHE_TOKENS}"
            )
        found = await asyncio.to_thread(open_file, file)
        engine = await asyncio.to_thread(
            engine_of, session, found, Loading(context, cache, activations, adapters, dict(options))
        )
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
        tokens: Sequence[int] | Asked,
        *,
        matcher: Matcher | None = None,
        tenant: str = "",
        seconds: float = SECONDS,
        adapter: str = "",
        **options: Unpack[Options],
    ) -> Answering:
        """Begin an answer to a prompt. `options` are those of `hg.llm.Options`.

        Args:
            tokens: The prompt, also with what its answer may be.
            matcher: One of `following.begin`, of an answer with a grammar.
            tenant: Tenants take turns.
            seconds: The most time, the wait included; then DeadlineExceededError.
            adapter: The name of the adapter that answers; empty: the model without adapters.

        Raises InvalidArgumentError, LimitExceededError for a prompt that exceeds the context or
        the cache and for a full queue, and DrainingError.
        """
        if self.is_draining:
            raise hg.DrainingError("the server shuts down", advice="ask another one")
        asked = tokens if isinstance(tokens, Asked) else Asked(list(tokens))
        prompt = asked.tokens
        request, pieces, result = self.model.request(asked, options)
        if request.settings.logit_bias:
            request.settings.inputs(self.model.config.vocabulary, [])
        if adapter:
            self.adapters.place(adapter)
        most = self.scheduler.pages.total * PAGE
        if len(prompt) >= most:
            raise hg.LimitExceededError(
                f"the prompt has {len(prompt)} tokens, the cache {most}",
                advice="shorten the prompt, or serve the model with a larger cache",
            )
        room = min(self.model.context, most) - len(prompt) + 1
        # A choice among all tokens has another sum of chances than one among some.
        is_whole = request.settings.form.candidates == 0
        job = Job(tenant, prompt, min(room, request.max_tokens or room), int(is_whole), adapter)
        self.scheduler.add(job)
        made = Answering(job, request, pieces, result, time.monotonic() + seconds)
        made.matcher = matcher
        made.on_leave(self._leave)
        self._answers[job] = made
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive(), name="llm-serving")
        return made

    async def embed(self, texts: Sequence[Sequence[int]], adapter: str = "") -> np.ndarray[Any, Any]:
        """Return a unit vector for each text, f32 [texts, width], by an adapter if one is named.

        Raises InvalidArgumentError for an adapter that is not there.
        """
        if adapter:
            self.adapters.place(adapter)
        async with self._embedding:
            self._engine.adapters = self.adapters.only(adapter)
            try:
                return await self.model.embed(texts)
            except hg.ConnectionError:
                self.lost.set()
                raise

    def stop(self) -> None:
        """End all answers with DrainingError, and take no more requests."""
        self.is_draining = True
        self._end_all(list(self._answers.values()), hg.DrainingError("the server shuts down"))

    async def close(self) -> None:
        """End all answers, and free the plans and the caches. The session stays open."""
        self.stop()
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.cancel()
            await asyncio.gather(driver, return_exceptions=True)
        self.following.close()
        with suppress(hg.ConnectionError):
            await self._free_plans()
            await self.model.close()

    # Plans

    async def _free_plans(self) -> None:
        """Free the plans and the caches. The next request makes them anew, without devices that are
        lost."""
        names = {name for plan in self._plans.values() for name in plan.variables}
        for plan in self._plans.values():
            plan.free()
        self._plans.clear()
        self._spreading.forget()
        for name in sorted(names):
            # The step after tells of a connection that is lost, too.
            with suppress(hg.WorkError, hg.ConnectionError):
                await self._session.free_variable(name)

    async def _prepare(self) -> None:
        if not self.writes:
            async for _ in awaiting(self._engine.prepare()):
                pass
            return
        pages = self.scheduler.table_sizes[0]
        sizes = [size for size in chunks.SIZES if size <= self._engine.decoder.cache.rows]
        async for _ in awaiting(self._spreading.fit(sizes, self._later), self._fitted):
            pass
        for rows in SIZES:
            for is_adapted in {False, bool(self.adapters.loras)}:
                await self._decoding(rows, pages, Form(CANDIDATES), is_adapted)
            if rows >= self.scheduler.bounds.answers:
                break

    def _whole(self) -> hg.Graph:
        rows, pages, form, is_adapted = self._first
        return self._decoder(is_adapted).decode(rows, pages, form)

    @property
    def _first(self) -> tuple[int, int, Form, bool]:
        """The key of the plan that has all weights."""
        return SIZES[0], self.scheduler.table_sizes[0], Form(CANDIDATES), bool(self.adapters.loras)

    def _later(self, sizes: Sequence[int]) -> Iterator[hg.Graph]:
        """Yield the graphs of prompts and of a choice among candidates, for the largest tables."""
        decoder, pages = self._decoder(bool(self.adapters.loras)), self.scheduler.table_sizes[-1]
        yield from (built(partial(decoder.fill, size, pages)) for size in sizes)
        rows = next(size for size in SIZES if size >= self.scheduler.bounds.answers)
        yield decoder.decode(rows, pages, Form(CANDIDATES, is_biased=True, has_logprobs=True))

    def _fitted(self, found: tuple[Any, Sequence[int]]) -> None:
        self._plans[self._first], self.scheduler.chunks = found

    async def _plan(self, key: Any, build: Callable[[], hg.Graph]) -> Any:
        if key not in self._plans:
            keep = partial(self._plans.__setitem__, key)
            async for _ in awaiting(self._spreading.compiled(built(build)), keep):
                pass
        return self._plans[key]

    async def _decoding(self, rows: int, pages: int, form: Form, is_adapted: bool) -> Any:
        build = partial(self._decoder(is_adapted).decode, rows, pages, form)
        return await self._plan((rows, pages, form, is_adapted), build)

    def _decoder(self, is_adapted: bool) -> PagedDecoder:
        decoder = self._engine.decoder
        loras = self.adapters.loras if is_adapted else ()
        cache = replace(decoder.cache, name=f"{decoder.cache.name}-pages")
        return PagedDecoder(decoder.config, decoder.weights, cache, self._spare, loras)

    @property
    def _spare(self) -> int:
        """The page for rows that are not read: the one after those of answers."""
        return self.scheduler.pages.total

    # Work

    async def _drive(self) -> None:
        """Compute what the scheduler says until nothing is left."""
        while True:
            self._expire()
            action = self.scheduler.next()
            if action is None:
                return
            try:
                if self._is_lost:
                    self._is_lost = False
                    await self._free_plans()
                await (self._fill(action) if isinstance(action, Fill) else self._decode(action))
            except hg.HeliographError as error:
                self._fail(error)
                if isinstance(error, hg.ConnectionError):
                    self.lost.set()
                self._is_lost = isinstance(error, hg.DeviceLostError)
            except Exception as error:
                logger.exception("a step of the model fails")
                self._fail(hg.ComputeFailedError(f"a step of the model fails: {error!r:.200}"))

    async def _fill(self, action: Fill) -> None:
        job, chunk, pages = action.job, action.chunk, action.pages
        is_adapted = bool(job.variant)
        build = partial(self._decoder(is_adapted).fill, chunk.size, pages)
        try:
            plan = await self._plan(("fill", chunk.size, pages, is_adapted), build)
        except hg.OutOfMemoryError:
            if not (smaller := chunks.smaller_than(chunk.size, self.scheduler.chunks)):
                raise
            self.scheduler.chunks = smaller
            return
        if job.is_over:
            # Its pages were given back while the plan was compiled.
            return
        places = places_of(job.pages, chunk, self._spare)
        inputs = {
            **inputs_of(job.tokens, chunk),
            "table": self._tables([job], 1, pages),
            "places": np.array(places, np.int32),
            **self._scales([job.variant]),
        }
        await plan.run(inputs, timeout=STEP_SECONDS)
        self.scheduler.filled(action)

    async def _decode(self, action: Decode) -> None:
        answers = [self._answers[job] for job in action.jobs]
        form = replace(_common(one.request.settings for one in answers), masks=masks_for(answers))
        variants = [job.variant for job in action.jobs] + [""] * (action.rows - len(action.jobs))
        plan = await self._decoding(action.rows, action.pages, form, any(variants))
        inputs = {**self._inputs(action, answers, form), **self._scales(variants)}
        if form.masks:
            masks = mask_inputs(answers, action.rows, self.model.config.vocabulary, form)
            await self._step(plan, {**inputs, **masks}, answers)
            return
        loop = plan.loop(
            inputs,
            steps=action.steps,
            carry=carries(form),
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

    async def _step(self, plan: Any, inputs: Mapping[str, Any], answers: Sequence[Answering]) -> None:
        """Compute one token of all answers, some of which follow grammars."""
        found = await plan.run(inputs, fetch=["chosen"], timeout=STEP_SECONDS)
        self._take(found["chosen"], answers)
        for one, error in await self.following.advance([one for one in answers if not one.job.is_over]):
            if one.job.is_over:
                continue
            if error is not None:
                self._end_all([one], error)
                continue
            for token in take_forced(one):
                self.scheduler.forced(one.job, [token])
                if one.add(np.array([token], np.int32)):
                    self._leave(one)
                    break
            if not one.job.is_over and one.is_complete():
                self._leave(one)

    def _take(self, chosen: np.ndarray[Any, Any], answers: Sequence[Answering]) -> None:
        """Add a step's tokens to the answers."""
        for one, row in zip(answers, chosen, strict=False):
            if one.job.is_over:
                continue
            self.scheduler.chosen(one.job, int(row[0]))
            if len(one.result.tokens) == 0:
                one.result.reused_tokens = one.job.reused
            if one.add(row):
                self._leave(one)

    def _inputs(self, action: Decode, answers: Sequence[Answering], form: Form) -> Mapping[str, Any]:
        """Return the inputs of a loop: a row for each answer, and idle ones."""
        rows, words = action.rows, self.model.config.vocabulary
        token, position = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        ends = np.full((rows, ENDS), -1, np.int32)
        choices = []
        for row, one in enumerate(answers):
            tokens = one.job.tokens
            token[row], position[row] = tokens[-1], len(tokens) - 1
            ends[row, : len(one.request.ends)] = one.request.ends
            choices.append(one.request.settings.inputs(words, tokens, form))
        choices += [_IDLE.inputs(words, [], form)] * (rows - len(answers))
        stacked = {name: np.concatenate([one[name] for one in choices]) for name in choices[0]}
        table = self._tables(action.jobs, rows, action.pages)
        return {"token": token, "position": position, "ends": ends, "table": table, **stacked}

    def _tables(self, jobs: Sequence[Job], rows: int, pages: int) -> np.ndarray[Any, Any]:
        """Return the first pages of jobs, i32 [rows, pages], with the spare page behind them."""
        tables = np.full((rows, pages), self._spare, np.int32)
        for table, job in zip(tables, jobs, strict=False):
            own = job.pages[:pages]
            table[: len(own)] = own
        return tables

    def _scales(self, variants: Sequence[str]) -> dict[str, Any]:
        """Return the input of adapters' scales: a row for each of a plan's rows."""
        if not any(variants):
            return {}
        return {SCALES: np.concatenate([self.adapters.only(one).row() for one in variants])}

    # Ends

    def _leave(self, one: Answering) -> None:
        self._answers.pop(one.job, None)
        self.scheduler.end(one.job)
        if one.matcher is not None:
            one.matcher.close()

    def _expire(self) -> None:
        now = time.monotonic()
        late = [one for one in self._answers.values() if one.deadline <= now]
        self._end_all(late, hg.DeadlineExceededError("the answer took longer than its time"))

    def _fail(self, error: hg.HeliographError) -> None:
        """End the answers that have pages with an error: the cache may have lost their tokens."""
        self._end_all([self._answers[job] for job in self.scheduler.jobs], error)
        self.scheduler.forget()

    def _end_all(self, answers: Sequence[Answering], error: hg.HeliographError) -> None:
        for one in answers:
            self._leave(one)
            one.fail(error)


def _common(settings: Any) -> Form:
    """Return the least form that can make all the choices of answers of a kind."""
    forms = [one.form for one in settings]
    counts = {one.candidates for one in forms}
    candidates = counts.pop() if len(counts) == 1 else CANDIDATES
    return Form(candidates, any(one.is_biased for one in forms), any(one.has_logprobs for one in forms))
