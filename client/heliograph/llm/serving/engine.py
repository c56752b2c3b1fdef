"""`Server`: a model on a session that writes many answers at a time. For asyncio."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np

import heliograph as hg
from heliograph.llm import chunks
from heliograph.llm.chunks import Chunk
from heliograph.llm.constraints import Matcher
from heliograph.llm.current_session import LOOK_SECONDS, MOST_LOSSES, CurrentSession
from heliograph.llm.effects import awaiting
from heliograph.llm.files.adapters import AdapterArgument, Scales
from heliograph.llm.files.weights import open_file
from heliograph.llm.generating import Array, Engine, Speculation, inputs_of
from heliograph.llm.graphs import carries
from heliograph.llm.language_model import Asked, AsyncLanguageModel, Options
from heliograph.llm.loading import (
    CacheType,
    FileArgument,
    Loading,
    check_rounding,
    draft_of,
    engine_of,
    tokenizer_of,
)
from heliograph.llm.serving.answering import Answering
from heliograph.llm.serving.drafting import Checking
from heliograph.llm.serving.following import Following, masks_for, take_forced
from heliograph.llm.serving.graphs import NOTHING
from heliograph.llm.serving.inputs import StepInputs, common_form
from heliograph.llm.serving.pages import PAGE
from heliograph.llm.serving.plans import ServedPlans
from heliograph.llm.serving.scheduler import (
    SIZES,
    STEPS,
    Bounds,
    Decode,
    Fill,
    Job,
    Scheduler,
)
from heliograph.llm.speculating import UNFOUND, Draft, Speculator
from heliograph_proto.devices import Activations

logger = logging.getLogger(__name__)

#: The time of an answer, its wait included.
SECONDS = 600.0
#: The time of a chunk, or of a step.
STEP_SECONDS = 300.0
#: The most tokens of a cache: their places are numbers of 32 bits.
CACHE_TOKENS = 2**30
#: The time of a step from which on all answers wait for the grammars of some: that costs less than
#: a tenth of it, and an answer with a grammar would else miss every other step.
SLOW_STEP_SECONDS = 0.02
#: The steps of answers in progress whose time prompts may take between two of them.
GAP = 2.0
#: The weight of a time in the next one that is expected.
DECAY = 0.9


@dataclass(frozen=True, slots=True)
class _Running:
    """A loop and the answers of its rows."""

    loop: Any
    answers: Sequence[Answering]


class Server:
    """A model that writes many answers at a time. Made by `Server.load`.

    An answer is the same, to the bit, whether it is written alone or beside others.
    """

    def __init__(
        self, session: CurrentSession, model: AsyncLanguageModel, engine: Any, bounds: Bounds, options: Any
    ) -> None:
        self._number = session.number
        #: The same model for one text at a time: its tokenizer, its template, its embeddings.
        self.model = model
        self.session = session
        #: True while another session is opened in the place of a lost one.
        self.is_reconnecting = False
        self._engine = engine
        #: The adapters, by whose names requests choose one.
        self.adapters: Scales = engine.adapters
        engine.adapters = self.adapters.silent()
        self.scheduler = Scheduler(bounds, model.context)
        if self.writes:
            self.plans = ServedPlans(session, engine.decoder, self.scheduler, self.adapters.loras, options)
            self._inputs = StepInputs(model.config.vocabulary, self.plans.spare, self.adapters)
        #: It proposes tokens of an answer that is the only one, if there is one.
        self._draft: Speculator | None = None
        self._answers: dict[Job, Answering] = {}
        self.following = Following(model.matching)
        #: Grammars that take a token, by the answers that follow them.
        self._coming: dict[Answering, asyncio.Task[None]] = {}
        self._running: _Running | None = None
        self._embedding = asyncio.Lock()
        self._driver: asyncio.Task[None] | None = None
        #: Whether it takes no more requests.
        self.is_draining = False
        #: Whether a device of the plans was lost.
        self._is_lost = False
        #: The expected times of steps by their rows, and of a token of a prompt, which is 0. Short
        #: ones count for more: others had the machine in the long ones.
        self._seconds: dict[int, float] = {}
        #: Set when the session is lost, and no other could be opened: nothing of the model is left.
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
        activations: Activations = "auto",
        chat_template: str | None = None,
        adapters: Sequence[AdapterArgument] = (),
        draft: FileArgument | Draft | None = None,
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
        how = Loading(context, cache, activations, adapters, dict(options))
        current = CurrentSession(session)
        engine = await asyncio.to_thread(engine_of, current, found, how)
        async for _ in awaiting(check_rounding(current, how)):
            pass
        tokenizer = await asyncio.to_thread(tokenizer_of, found, engine)
        model = AsyncLanguageModel(found.header, engine, tokenizer, chat_template)
        server = cls(current, model, engine, bounds, dict(options))
        if draft is not None:
            server._draft = await asyncio.to_thread(draft_of, current, engine, found, draft, how)
        await server._prepare()
        return server

    @property
    def is_connected(self) -> bool:
        """False while it has no session, or none with a connection. A lost one that nothing was
        computed in is opened again from then on."""
        is_idle = self._driver is None or self._driver.done()
        lost = self.session.lost
        if lost is not None and is_idle and not self.is_draining and self.session.may_follow(lost):
            self._driver = asyncio.create_task(self._drive(lost), name="llm-serving")
        return self.session.is_connected and not self.is_reconnecting

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
        if self._draft is not None:
            result.speculation = Speculation()
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
                # No other session could be opened.
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
        await asyncio.gather(*self._coming.values(), return_exceptions=True)
        with suppress(hg.ConnectionError):
            await self._free_plans()
        with suppress(hg.ConnectionError):
            await self.model.close()

    async def _prepare(self) -> None:
        if not self.writes:
            async for _ in awaiting(self._engine.prepare()):
                pass
            return
        await self.plans.prepare()
        if self._draft is not None:
            async for _ in awaiting(self._draft.prepare()):
                pass

    async def _free_plans(self) -> None:
        """Free the plans and the caches. The next request makes them anew, without devices that are
        lost."""
        if self.writes:
            await self.plans.free()
        if self._draft is not None:
            async for _ in awaiting(self._draft.close()):
                pass

    # Work

    async def _drive(self, lost: hg.HeliographError | None = None) -> None:
        """Compute what the scheduler says until nothing is left; after a session was lost for that
        reason, in another one."""
        if lost is not None:
            await self._survive(lost)
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
                if self._may_survive(error):
                    await self._survive(error)
                    continue
                self._fail(error)
                if isinstance(error, hg.ConnectionError):
                    self.lost.set()
            except Exception as error:
                logger.exception("a step of the model fails")
                self._fail(hg.ComputeFailedError(f"a step of the model fails: {error!r:.200}"))

    def _may_survive(self, error: hg.HeliographError) -> bool:
        """True if answers may go on after an error: in another session, or on the devices that are
        left."""
        return isinstance(error, hg.DeviceLostError) or self.session.may_follow(error)

    async def _survive(self, error: hg.HeliographError) -> None:
        """Put all answers back, and compile the plans anew, in another session if one is lost. Ends
        the requests with the error of that where it fails."""
        for one in [self._answers[job] for job in self.scheduler.jobs]:
            if one.lose() > MOST_LOSSES:
                self._end_all([one], error)
        self.scheduler.begin_again()
        self.is_reconnecting = True
        work = asyncio.create_task(self._begin_again(error), name="llm-reconnecting")
        try:
            while not work.done():
                await asyncio.wait([work], timeout=LOOK_SECONDS)
                self._expire()
            await work
        except hg.HeliographError as failed:
            self._end_all(list(self._answers.values()), failed)
            if isinstance(failed, hg.ConnectionError):
                self.lost.set()
            self._is_lost = isinstance(failed, hg.DeviceLostError)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            self.is_reconnecting = False

    async def _begin_again(self, error: hg.HeliographError) -> None:
        """Compile the plans anew. Raises as `CurrentSession.again`."""
        for left in reversed(range(MOST_LOSSES)):
            if isinstance(error, hg.ConnectionError):
                async for _ in awaiting(self.session.again(self._number, error)):
                    pass
                self._number = self.session.number
                if self.writes:
                    self.plans.forget()
            else:
                await self._free_plans()
            try:
                return await self._prepare()
            except hg.HeliographError as failed:
                if not left or not self._may_survive(failed):
                    raise
                error = failed

    async def _fill(self, action: Fill) -> None:
        job, chunk, pages = action.job, action.chunk, action.pages
        try:
            plan = await self.plans.filling(chunk.size, pages, is_adapted=bool(job.variant))
        except hg.OutOfMemoryError:
            if not (smaller := chunks.smaller_than(chunk.size, self.scheduler.chunks)):
                raise
            self.scheduler.chunks = smaller
            return
        if job.is_over:
            # Its pages were given back while the plan was compiled.
            return
        inputs = {**inputs_of(job.tokens, chunk), **self._inputs.chunk(job, chunk, pages)}
        began = time.perf_counter()
        await plan.run(inputs, timeout=STEP_SECONDS)
        self._measured(0, (time.perf_counter() - began) / chunk.size)
        self.scheduler.filled(action)

    async def _decode(self, action: Decode) -> None:
        # Masks are those of the first rows.
        jobs = sorted(action.jobs, key=lambda job: self._answers[job].matcher is None)
        action = replace(action, jobs=tuple(jobs))
        answers = [self._answers[job] for job in jobs]
        is_slow = self._seconds.get(action.rows, 0.0) > SLOW_STEP_SECONDS
        coming = [self._coming[one] for one in answers if one in self._coming]
        if coming and (is_slow or len(coming) == len(answers)):
            how = asyncio.ALL_COMPLETED if is_slow else asyncio.FIRST_COMPLETED
            await asyncio.wait(coming, return_when=how)
            return
        plain = await self._speculate(answers[0], action) if self._is_drafted(action, answers) else STEPS
        if not plain:
            return
        form = replace(common_form(one.request.settings for one in answers), masks=masks_for(answers))
        is_adapted = any(job.variant for job in action.jobs)
        plan = await self.plans.decoding(action.rows, action.pages, form, is_adapted=is_adapted)
        if not all(job.is_over or job.is_filled for job in jobs):
            # A grammar forced tokens meanwhile, which the cache has not.
            return
        # The limit of an answer that ended meanwhile is 0.
        limits = [self._limit(one) for one in answers]
        inputs = self._inputs.decoding(action, answers, limits, form)
        loop = plan.loop(
            inputs,
            steps=1 if form.masks and is_slow else min(action.steps, plain),
            carry=carries(form),
            until="idle",
            taps=["chosen"],
            feed=["limit", "table", *(["masks"] if form.masks else [])],
            fetch=(),
        )
        self._running = _Running(loop, answers)
        began, steps = time.perf_counter(), 0
        try:
            async for tap in loop.taps(STEP_SECONDS):
                steps += 1
                self._take(tap.value, answers)
                self._expire()
                for row, job in self.scheduler.grow(action):
                    self._feed_pages(loop, row, job, action.pages)
                if self.scheduler.ends(action):
                    loop.stop()
            await loop.result()
        finally:
            self._running = None
            loop.cancel()
        seconds = time.perf_counter() - began
        self._measured(action.rows, seconds / max(steps, 1))
        if self._draft is not None and plain < STEPS:
            self._draft.pace.wrote(steps, seconds)
        if 0 in self._seconds:
            self.scheduler.turn = int(GAP * self._seconds[action.rows] / self._seconds[0])

    def _measured(self, what: int, seconds: float) -> None:
        known = self._seconds.get(what, seconds)
        self._seconds[what] = min(seconds, DECAY * known + (1 - DECAY) * seconds)

    def _feed_pages(self, loop: Any, row: int, job: Job, pages: int) -> None:
        """Give a row of a running loop its answer's new page, and let it go on there. A row that
        follows a grammar waits for its mask."""
        values: dict[str, Any] = {"table": self._inputs.tables([job], 1, pages)}
        if self._answers[job].matcher is None:
            values["limit"] = [job.end]
        loop.feed(values, rows=[row])

    # Proposals

    def _is_drafted(self, action: Decode, answers: Sequence[Answering]) -> bool:
        """True if there may be proposals: for an answer that is alone. Runs of several rows take
        more time for each row that is added."""
        is_alone = len(answers) == 1 and action.steps == STEPS
        return self._draft is not None and is_alone and answers[0].matcher is None

    async def _speculate(self, one: Answering, action: Decode) -> int:
        """Write tokens of an answer with proposals, and return 0, or how many to write without."""
        draft, job, form = self._draft, one.job, one.request.settings.form
        speculation = one.result.speculation
        assert draft is not None and speculation is not None
        count = draft.pace.count(min(job.left, draft.room - len(job.tokens)) - 1)
        if not count or not self.scheduler.reserve(job, count + 1, action.pages):
            return draft.pace.plain
        found = None
        if draft.looks_up:
            one.lookup.add(job.tokens[len(one.lookup) :])
            if (found := one.lookup.following(count)) is None:
                return UNFOUND
        chunk = Chunk(len(job.tokens) - 1, count + 1, count + 1)
        own = self._inputs.chunk(job, chunk, action.pages)
        checking = Checking(
            self.plans.decoder(is_adapted=bool(job.variant)), action.pages, own, self.plans.plan
        )
        rounds: list[Array] = []
        is_known, began = checking.key(form, count) in self.plans.known, time.perf_counter()
        async with asyncio.timeout(STEP_SECONDS):
            procedure = draft.round(checking, one.request, list(job.tokens), count, found)
            async for _ in awaiting(procedure, rounds.append):
                pass
        seconds = time.perf_counter() - began if is_known else None
        accepted = draft.note(rounds[0], speculation, seconds)
        for row in rounds[0][: accepted + 1, 1:]:
            self._take(row[None], [one])
        return 0

    # Grammars

    async def _follow(self, followed: Sequence[Answering]) -> None:
        """Tell grammars the last tokens of their answers, and let their rows go on. A row waits
        meanwhile, and the others do not."""
        try:
            for one, error in await self.following.advance(followed):
                del self._coming[one]
                if one.job.is_over:
                    continue
                if error is not None:
                    self._end_all([one], error)
                    continue
                self._add_forced(one)
                if not one.job.is_over and one.is_complete():
                    self._leave(one)
                self._go_on(one)
        except Exception as error:
            logger.exception("a step of grammars fails")
            there = [one for one in followed if not one.job.is_over]
            self._end_all(there, hg.ComputeFailedError(f"a step of grammars fails: {error!r:.200}"))
        finally:
            for one in followed:
                self._coming.pop(one, None)

    def _go_on(self, one: Answering) -> None:
        """Feed an answer's mask to its row of the running loop. Another loop begins with it."""
        running = self._running
        if running is not None and one in running.answers and one.job.is_filled and not one.job.is_over:
            values = {**self._inputs.masks([one], 1), "limit": [self._limit(one)]}
            running.loop.feed(values, rows=[running.answers.index(one)])

    def _add_forced(self, one: Answering) -> None:
        """Add the tokens that a grammar leaves no choice for."""
        for token in take_forced(one):
            self.scheduler.forced(one.job, [token])
            if one.add(np.array([token], np.int32)):
                self._leave(one)
                return

    def _limit(self, one: Answering) -> int:
        """Return the position before which an answer's row goes on. One that follows a grammar has
        a token at a time, and waits while the grammar takes it."""
        tokens = len(one.job.tokens)
        if one.matcher is None:
            return one.job.end
        return tokens - 1 if one in self._coming else min(one.job.end, tokens)

    def _take(self, chosen: np.ndarray[Any, Any], answers: Sequence[Answering]) -> None:
        """Add a step's tokens to the answers."""
        followed = []
        for one, row in zip(answers, chosen, strict=False):
            if one.job.is_over or row[0] == NOTHING:
                continue
            self.scheduler.chosen(one.job, int(row[0]))
            if len(one.result.tokens) == 0:
                one.result.reused_tokens = one.job.reused
            if one.add(row):
                self._leave(one)
            elif one.matcher is not None:
                followed.append(one)
        if followed:
            self._coming.update(dict.fromkeys(followed, asyncio.create_task(self._follow(followed))))

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
