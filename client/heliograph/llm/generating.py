"""The procedures of a model: to fill its cache, to answer, to give rows. For both APIs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

import heliograph as hg
from heliograph.llm.chunks import SIZES, Chunk, cut, shared, smaller_than
from heliograph.llm.configuration import Configuration
from heliograph.llm.constraints import Matcher
from heliograph.llm.current_session import CurrentSession
from heliograph.llm.decoding_step import Weights
from heliograph.llm.effects import Ask, AskNext, Give, Procedure, Work
from heliograph.llm.files.adapters import SCALES, Scales
from heliograph.llm.graphs import Decoder, carries
from heliograph.llm.pooling import pooled
from heliograph.llm.sampling import CANDIDATES, ENDS, Form, Settings, masks_of
from heliograph.llm.spreading import Spreading
from heliograph.llm.tools import MessagePieces, Pieces, Thought, ToolCall

Array: TypeAlias = "np.ndarray[Any, Any]"
#: Why an answer ended: a token, a text or a grammar that ends it, calls of tools, or the most
#: tokens or the end of the context.
Reason: TypeAlias = 'Literal["stop", "tool_calls", "length"]'

AnyPieces: TypeAlias = Pieces | MessagePieces

#: The rows of one run that gives rows. Logits of a large vocabulary need much memory.
ROWS = 32
#: The runs that are sent before the first is done.
AHEAD = 4
#: The seconds for which the tokens of an answer gather that is asked for whole.
GATHER_SECONDS = 0.1
#: The tokens that a grammar forces which are worth a chunk of their own.
WORTH_FILL = 8


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability, before any filter, and those of the most likely tokens."""

    token: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Speculation:
    """The tokens of an answer that were proposed, and those of them that the model chose too."""

    proposed: int = 0
    accepted: int = 0
    #: The runs that checked them.
    runs: int = 0


@dataclass(slots=True)
class Result:
    """An answer, complete or so far."""

    text: str = ""
    #: With the token that ended the answer, without those of a stop text that came after it.
    tokens: list[int] = field(default_factory=list)
    #: One for each token, with `logprobs=True`.
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: Reason | None = None
    prompt_tokens: int = 0
    #: Tokens of the prompt that the cache had already.
    reused_tokens: int = 0
    prompt_seconds: float = 0.0
    seconds: float = 0.0
    #: With `load(..., draft=...)`.
    speculation: Speculation | None = None
    #: The model's thoughts before its message, in a chat.
    reasoning: str = ""
    #: The tools that it calls, in a chat with tools.
    tool_calls: list[ToolCall] = field(default_factory=list)

    def keep(self, part: Thought | ToolCall) -> None:
        """Add a part of a message that is no text of it."""
        if isinstance(part, ToolCall):
            self.tool_calls.append(part)
        else:
            self.reasoning += part.text

    def end(self, reason: Reason) -> None:
        """Note why it ended."""
        self.finish_reason = "tool_calls" if reason == "stop" and self.tool_calls else reason

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of a chat, for the next one."""
        found: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            found["tool_calls"] = [one.as_json for one in self.tool_calls]
        return found

    def parsed(self) -> Any:
        """Return the value of an answer that is JSON.

        Raises LimitExceededError for one that was cut, and InvalidArgumentError for other text.
        """
        try:
            return json.loads(self.text)
        except ValueError as error:
            if self.finish_reason == "length":
                raise hg.LimitExceededError(
                    f"the answer ended after {len(self.tokens)} tokens, before its JSON did",
                    advice="give it more max_tokens, or the model a larger context=",
                ) from None
            raise hg.InvalidArgumentError(f"the answer is no JSON: {error}", advice="give schema=") from None

    @property
    def tokens_per_second(self) -> float:
        """The rate of the answer's tokens, without the prompt's time."""
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    @property
    def prompt_tokens_per_second(self) -> float:
        """The rate of the prompt's tokens that were computed."""
        computed = self.prompt_tokens - self.reused_tokens
        return computed / self.prompt_seconds if self.prompt_seconds else 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how it is answered."""

    tokens: list[int]
    settings: Settings
    max_tokens: int | None
    #: Tokens and texts that end an answer.
    ends: tuple[int, ...]
    stops: tuple[str, ...]
    #: Begins the grammar that the answer follows, if it has one.
    follow: Callable[[], Matcher] | None = None
    #: False if the answer is asked for whole.
    is_read: bool = True


class Drafting(Protocol):
    """A proposer of tokens of answers, which the model checks."""

    def prepare(self) -> Procedure[Any, None]:
        """Compile a plan that has all weights."""

    def write(
        self,
        plain: Callable[[Request, int], Procedure[str, None]],
        request: Request,
        steps: int,
        pieces: AnyPieces,
        result: Result,
    ) -> Procedure[str, None]:
        """As `Engine.answer`, once the cache has the prompt; `plain` writes some tokens without
        proposals."""

    def close(self) -> Procedure[Any, None]:
        """Free the plans."""


class Engine:
    """A decoder on a session: its plans, and the tokens that its cache has.

    One procedure uses the cache at a time.
    """

    def __init__(
        self,
        session: CurrentSession,
        decoder: Decoder,
        pooling: str,
        options: dict[str, Any],
        adapters: Scales | None = None,
    ) -> None:
        self.decoder = decoder
        self.adapters = adapters or Scales()
        self._pooling = pooling
        self.session = session
        #: The number of the session that the plans are of.
        self._number = session.number
        self._spreading = Spreading(
            session, partial(built, decoder.weights, partial(decoder.decode, Form(1))), options
        )
        self._sizes: Sequence[int] = [size for size in SIZES if size <= decoder.cache.rows]
        #: It proposes tokens, if there is one.
        self.draft: Drafting | None = None
        #: The plans by what they are for.
        self.plans: dict[Any, Any] = {}
        #: The tokens whose keys and values the cache has, from position 0 on.
        self._kept: list[int] = []
        #: The adapters' scales with which they were computed.
        self._scales = self.adapters.row()
        self._turn = Lock()
        #: Whether a device of the plans was lost.
        self._is_lost = False

    @property
    def config(self) -> Configuration:
        """The sizes of the model."""
        return self.decoder.config

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its answer."""
        return self.decoder.cache.context

    def check(self, tokens: Sequence[int], room: int) -> None:
        """Raises InvalidArgumentError for tokens that are none of the vocabulary, and
        LimitExceededError for more than the context has, with room for `room` more."""
        words = self.decoder.config.vocabulary
        if not tokens:
            raise hg.InvalidArgumentError("the prompt has no tokens", advice="it needs at least one")
        if bad := [one for one in tokens if not 0 <= one < words]:
            raise hg.InvalidArgumentError(f"token {bad[0]!r:.40} is not of the {words} tokens")
        if len(tokens) + room > self.context:
            raise hg.LimitExceededError(
                f"the prompt has {len(tokens)} tokens, the context {self.context}",
                advice="shorten the prompt, or load the model with a larger context=",
            )

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Use the cache. Raises LimitExceededError while another procedure does."""
        if not self._turn.acquire(blocking=False):
            raise hg.LimitExceededError(
                "the model is at work on another answer",
                advice="finish or close() that one first, or load the model once more: the server "
                "shares the weights",
            )
        try:
            scales = self.adapters.row()
            if (scales != self._scales).any():
                self._scales = scales
                del self._kept[:]
            yield
        except hg.DeviceLostError:
            # The next procedure begins anew, on the devices that are left.
            del self._kept[:]
            self._is_lost = True
            raise
        finally:
            self._turn.release()

    def close(self) -> Procedure[Any, None]:
        """Free the plans and the cache, and those of a draft."""
        with self.exclusively():
            yield from self._freed()

    def _freed(self) -> Procedure[Any, None]:
        del self._kept[:]
        self._is_lost = False
        if self._number != self.session.number:
            # They went with their session.
            self.plans.clear()
        names = {name for plan in self.plans.values() for name in plan.variables}
        for plan in self.plans.values():
            plan.free()
        self.plans.clear()
        self._spreading.forget()
        if self.draft is not None:
            yield from self.draft.close()
        for name in sorted(names):
            # Plans read a draft's proposals too.
            if f"/{self.decoder.cache.name}/" in f"/{name}":
                with suppress(hg.WorkError):
                    yield Ask(partial(self.session.free_variable, name))

    # Plans

    def _renewed(self) -> Procedure[Any, None]:
        """Compile the first plan anew if the session is another one: nothing of the earlier one is
        left."""
        if self._number != self.session.number:
            self._number = self.session.number
            del self._kept[:]
            self.plans.clear()
            self._spreading.forget()
            yield from self.prepare()

    def prepare(self) -> Procedure[Any, None]:
        """Compile the plan of the likeliest token, which has all weights."""
        found = self._spreading.fit(self._sizes, self._later)
        self.plans[Form(1), bool(self.decoder.loras)], self._sizes = yield from found
        if self.draft is not None:
            yield from self.draft.prepare()

    def _later(self, sizes: Sequence[int]) -> Iterator[hg.Graph]:
        """Yield the graphs of prompts and of a choice among candidates."""
        yield from (built(self.decoder.weights, partial(self.decoder.fill, size)) for size in sizes)
        yield self.decoder.decode(Form(CANDIDATES, is_biased=True, has_logprobs=True))

    @property
    def _is_adapted(self) -> bool:
        """False where all scales are 0: the plans of the model without adapters are used."""
        return bool(self._scales.any())

    @property
    def current(self) -> Decoder:
        """The decoder as the scales want it."""
        return self.decoder if self._is_adapted else replace(self.decoder, loras=())

    def given(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return the inputs of a plan with the adapters' scales."""
        return {**inputs, SCALES: self._scales} if self._is_adapted else inputs

    def _decoding(self, form: Form) -> Procedure[Any, Any]:
        return self.plan(form, partial(self.current.decode, form))

    def _filling_plan(self, size: int) -> Procedure[Any, Any]:
        return self.plan(("fill", size), partial(self.current.fill, size))

    def plan(self, what: Any, build: Callable[[], hg.Graph]) -> Procedure[Any, Any]:
        """Return the plan of a graph, which is compiled at its first use. `what` names it."""
        key = what, self._is_adapted
        yield from self._renewed()
        if self._is_lost:
            yield from self._freed()
        if key not in self.plans:
            self.plans[key] = yield from self._spreading.compiled(built(self.decoder.weights, build))
        return self.plans[key]

    # Prompts

    def fill(self, tokens: list[int]) -> Procedure[Any, int]:
        """Bring tokens into the cache, and return how many it had already."""
        found, runs = yield from self._filling(tokens)
        yield from self._filled(tokens, found, runs)
        return found

    def _filling(self, tokens: list[int]) -> Procedure[Any, tuple[int, list[Any]]]:
        """Begin to bring tokens into the cache. Return how many it had already, and the runs that
        are not done; `_filled` waits for them."""
        yield from self._renewed()
        found = shared(self._kept, tokens)
        # A run that fails or is cancelled may have written any of the later rows.
        del self._kept[found:]
        futures: list[Any] = []
        start = found
        try:
            while start < len(tokens):
                chunk = next(cut(start, len(tokens), self.decoder.cache.rows, self._sizes))
                try:
                    plan = yield from self._filling_plan(chunk.size)
                except hg.OutOfMemoryError:
                    if not (smaller := smaller_than(chunk.size, self._sizes)):
                        raise
                    self._sizes = smaller
                    continue
                start += chunk.count
                futures.append(plan.submit(self.given(inputs_of(tokens, chunk))))
                if len(futures) > AHEAD:
                    yield Ask(futures.pop(0).result)
        except BaseException:
            _cancel(futures)
            raise
        return found, futures

    def _filled(self, tokens: list[int], found: int, runs: list[Any]) -> Procedure[Any, None]:
        """Wait until the cache has the tokens. Raises the error of a run, and cancels the others."""
        try:
            while runs:
                yield Ask(runs.pop(0).result)
        finally:
            _cancel(runs)
        self._kept[found:] = tokens[found:]

    def checking(self, form: Form, count: int, proposer: Decoder | None, most: int) -> Procedure[Any, Any]:
        """Return the plan of `Decoder.check`."""
        return self.plan(("check", form, count), partial(self.current.check, form, count, proposer, most))

    def has(self, tokens: Sequence[int]) -> None:
        """Note that the cache has further tokens, which another plan brought into it."""
        self._kept += tokens

    def rows(self, tokens: list[int], output: str) -> Procedure[Any, Array]:
        """Return the logits or the hidden rows of all tokens, f32 [n, .]."""
        with self.exclusively():
            work = partial(self._rows, tokens, output)
            return (yield from self.session.kept_up(work, mend=self._freed))

    def _rows(self, tokens: list[int], output: str) -> Procedure[Any, Array]:
        plan = yield from self.plan(output, partial(self.current.rows, ROWS, output))
        del self._kept[:]
        parts = []
        for chunk in cut(0, len(tokens), self.decoder.cache.rows, (ROWS,)):
            results = yield Ask(partial(plan.run, self.given(inputs_of(tokens, chunk))))
            parts.append(results[output][: chunk.count])
        self._kept[:] = tokens
        return np.concatenate(parts)

    def embed(self, texts: Sequence[list[int]]) -> Procedure[Any, Array]:
        """Return a unit vector for each text, f32 [texts, w]."""
        found = np.empty((len(texts), self.config.width), np.float32)
        for place, tokens in enumerate(texts):
            rows = yield from self.rows(tokens, "hidden")
            found[place] = pooled(rows, self._pooling)
        return found

    # Answers

    @staticmethod
    def place_of(tokens: Sequence[int]) -> dict[str, Array]:
        """Return the inputs of a decoding step that takes the last token."""
        last, position = np.array(tokens[-1:], np.int32), np.array([len(tokens) - 1], np.int32)
        return {"token": last, "position": position}

    def _inputs(self, request: Request, tokens: list[int]) -> dict[str, Array]:
        """Return the inputs of a decoding step behind these tokens."""
        return {
            **self.place_of(tokens),
            "ends": np.array([*request.ends, *[-1] * (ENDS - len(request.ends))], np.int32),
            **request.settings.inputs(self.config.vocabulary, tokens),
        }

    def answer(self, request: Request, pieces: AnyPieces, result: Result) -> Procedure[str, None]:
        """Give the text of an answer piece by piece, and write `result` along.

        An answer whose session is lost goes on in another one, with the tokens that it has.
        """
        with self.exclusively():
            began = time.perf_counter()
            matcher = None if request.follow is None else (yield Work(request.follow))
            try:
                work = partial(self._write, request, pieces, result, matcher, began)
                yield from self.session.kept_up(work, lambda: len(result.tokens), self._freed)
            finally:
                if matcher is not None:
                    matcher.close()
            if rest := pieces.rest():
                result.text += rest
                yield Give(rest)
            result.end(result.finish_reason or ("stop" if pieces.is_stopped else "length"))

    def _write(
        self, request: Request, pieces: AnyPieces, result: Result, matcher: Matcher | None, began: float
    ) -> Procedure[str, None]:
        """Write the rest of an answer.

        The decoding loop takes the last token that is there, so it chooses each further one.
        """
        room = self.context - len(request.tokens) + 1
        steps, written = min(room, request.max_tokens or room), len(result.tokens)
        if is_over(pieces, result, steps):
            return
        tokens = [*request.tokens, *result.tokens]
        rest = replace(request, tokens=tokens)
        reused, runs = yield from self._filling(tokens[:-1])
        filled = partial(self._prompted, tokens[:-1], reused, runs, result, None if written else began)
        is_alone = matcher is None and self.draft is None
        try:
            plan = None if matcher else (yield from self._decoding(request.settings.form))
            if not (runs and is_alone):
                yield from filled()
            if is_alone:
                yield from self._loop(plan, rest, steps - written, pieces, result, filled if runs else None)
        finally:
            _cancel(runs)
        if matcher is not None:
            yield from self._followed(rest, steps, pieces, result, matcher)
            return
        if self.draft is not None:
            plain = partial(self._loop, plan, pieces=pieces, result=result)
            yield from self.draft.write(plain, rest, steps, pieces, result)
        self._kept += [tokens[-1], *result.tokens[written:-1]]

    def _prompted(
        self, tokens: list[int], reused: int, runs: list[Any], result: Result, began: float | None
    ) -> Procedure[Any, None]:
        """Wait for the prompt of an answer, which began then; None: the answer goes on."""
        yield from self._filled(tokens, reused, runs)
        if began is not None:
            result.reused_tokens, result.prompt_seconds = reused, time.perf_counter() - began

    def _loop(
        self,
        plan: Any,
        request: Request,
        steps: int,
        pieces: AnyPieces,
        result: Result,
        filled: Callable[[], Procedure[Any, None]] | None = None,
    ) -> Procedure[str, None]:
        """Choose tokens one after the other. `filled` waits for the prompt, behind which the loop
        is sent: the device does not wait for a message between the two."""
        began = time.perf_counter() - result.seconds
        loop = plan.loop(
            self.given(self._inputs(request, request.tokens)),
            steps=steps,
            carry=carries(request.settings.form),
            until="done",
            taps=["chosen"],
            gather=None if request.is_read or pieces.may_stop else GATHER_SECONDS,
            fetch=(),
        )
        try:
            if filled is not None:
                yield from filled()
                began = time.perf_counter() - result.seconds
            taps = loop.taps()
            while not pieces.is_stopped and (tap := (yield AskNext(taps))) is not None:
                result.seconds = time.perf_counter() - began
                token = take(tap.value[0], result)
                if token in request.ends:
                    result.finish_reason = "stop"
                elif text := pieces.add(token):
                    result.text += text
                    yield Give(text)
            if not loop.done():
                loop.stop()
            yield Ask(loop.result)
        finally:
            loop.cancel()

    def _followed(
        self, request: Request, steps: int, pieces: AnyPieces, result: Result, matcher: Matcher
    ) -> Procedure[str, None]:
        """As `_loop`, for `steps` tokens of the whole answer, each of which a grammar allows.

        A token is chosen by a run of its own, which needs the grammar's mask. The run that takes it
        into the cache is sent behind that one at once: the device computes while the grammar is
        asked. It is in vain where the grammar then forces tokens, so it is left out after such.
        """
        began, tokens = time.perf_counter() - result.seconds, list(request.tokens)
        form = replace(request.settings.form, masks=1)
        choice = yield from self.plan(("choice", form), partial(self.current.choice, form))
        taking = yield from self.plan("take in", self.current.take_in)
        runs: list[Any] = []
        taken, goes_ahead = len(tokens) - 1, True
        try:
            while not is_over(pieces, result, steps):
                if matcher.forced and not request.settings.logprobs:
                    new = matcher.take_forced(steps - len(result.tokens))
                    result.tokens += new
                else:
                    if len(tokens) - taken > WORTH_FILL:
                        yield from self._taken_in(runs, tokens[:taken])
                        yield from self.fill(tokens[:-1])
                        taken = len(tokens) - 1
                    runs += [self._take_in(taking, tokens[at], at) for at in range(taken, len(tokens))]
                    choosing = choice.submit(self._choice_inputs(request, tokens, matcher))
                    ahead = []
                    if goes_ahead and len(result.tokens) + 1 < steps:
                        ahead = [self._take_in(taking, -1, len(tokens))]
                    taken = len(tokens) + len(ahead)
                    try:
                        chosen = (yield Ask(choosing.result))["chosen"][0]
                        # They are done, and may have failed.
                        yield from self._taken_in(runs, tokens)
                        new = [take(chosen, result)]
                    finally:
                        runs += ahead
                    if new[0] not in request.ends:
                        yield Work(partial(matcher.take, new[0]))
                    goes_ahead = not matcher.forced
                result.seconds = time.perf_counter() - began
                tokens += new
                if matcher.is_over or new[-1] in request.ends:
                    result.finish_reason = "stop"
                yield from _given(new, request, pieces, result)
        finally:
            _cancel(runs)

    def _choice_inputs(self, request: Request, tokens: list[int], matcher: Matcher) -> dict[str, Array]:
        vocabulary = self.config.vocabulary
        return {
            "position": np.array([len(tokens) - 1], np.int32),
            **request.settings.inputs(vocabulary, tokens),
            **masks_of([matcher.mask], vocabulary, 1),
        }

    def _take_in(self, plan: Any, token: int, position: int) -> Any:
        """Send a run that takes a token into the cache; -1 for the one that is chosen before."""
        place = {"token": np.array([token], np.int32), "position": np.array([position], np.int32)}
        return plan.submit(self.given(place))

    def _taken_in(self, runs: list[Any], tokens: list[int]) -> Procedure[Any, None]:
        """Wait for runs, after which the cache has these tokens."""
        while runs:
            yield Ask(runs[0].result)
            del runs[0]
        self._kept += tokens[len(self._kept) :]


def _given(new: list[int], request: Request, pieces: AnyPieces, result: Result) -> Procedure[str, None]:
    """Give the text of the newest tokens. Those behind a stop text are no part of the answer."""
    for later, token in enumerate(new, -len(new)):
        if pieces.is_stopped:
            del result.tokens[later:]
            break
        if token not in request.ends and (text := pieces.add(token)):
            result.text += text
            yield Give(text)


def is_over(pieces: AnyPieces, result: Result, steps: int) -> bool:
    """True for an answer that has ended, or has so many tokens."""
    return bool(result.finish_reason) or pieces.is_stopped or len(result.tokens) >= steps


def _cancel(runs: list[Any]) -> None:
    for one in runs:
        one.cancel()


def built(weights: Weights, build: Callable[[], hg.Graph]) -> hg.Graph:
    """Build a graph of a model. Raises InvalidModelError where its sizes and its tensors
    contradict each other."""
    try:
        return build()
    except hg.InvalidGraphError as error:
        raise hg.InvalidModelError(
            f"the tensors of {weights.name} do not fit its metadata: {error.message}",
            advice="convert the model to GGUF again",
        ) from None


def take(chosen: Array, result: Result) -> int:
    """Add a token of a tap to the result, and return it. `chosen` is a row of
    `graphs.described`."""
    token = int(chosen[0])
    result.tokens.append(token)
    if chosen.size > 1:
        count = (chosen.size - 2) // 2
        logprobs = chosen.view(np.float32)
        alternatives = zip(chosen[2 : 2 + count].tolist(), logprobs[2 + count :].tolist(), strict=True)
        result.logprobs.append(Logprob(token, float(logprobs[1]), tuple(alternatives)))
    return token


def inputs_of(tokens: Sequence[int], chunk: Chunk) -> dict[str, Array]:
    """Return the inputs of a chunk's run, padded with zeros."""
    padded = np.zeros(chunk.size, np.int32)
    padded[: chunk.count] = tokens[chunk.start : chunk.start + chunk.count]
    return {"tokens": padded, "start": np.array([chunk.start], np.int32)}
