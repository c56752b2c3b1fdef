"""`LanguageModel` and `AsyncLanguageModel`: text from a model on a session."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf
from numbers import Integral
from operator import index
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Unpack

import heliograph as hg
from heliograph.llm.chat import ChatTemplate, checked, read_chat_template
from heliograph.llm.configuration import Configuration
from heliograph.llm.constraints import Constraint, Matching, constraint_of
from heliograph.llm.effects import Procedure, awaited, awaiting, blocking, result_of
from heliograph.llm.encoding import EncoderEngine
from heliograph.llm.generating import AnyPieces, Array, Engine, Logprob, Request, Result
from heliograph.llm.sampling import ENDS, Settings, is_within
from heliograph.llm.tools import (
    Format,
    MessagePieces,
    Pieces,
    ToolCall,
    ToolChoice,
    around,
    for_template,
    forcing,
    format_of,
    reader_of,
    tools_of,
)
from heliograph_proto.gguf import GgufHeader

if TYPE_CHECKING:
    from heliograph.llm.tokenizers import Tokenizer

#: Of a model that writes, or of one that only embeds.
AnyEngine: TypeAlias = Engine | EncoderEngine

#: Messages, each a mapping with "role" and "content", as in OpenAI's interface.
Messages: TypeAlias = "Sequence[Mapping[str, Any]]"
#: A text, or its tokens.
Prompt: TypeAlias = "str | Sequence[int]"


class Options(TypedDict, total=False):
    """The options of an answer.

    Keys:
        max_tokens: The most tokens of the answer; the default is the rest of the context.
        temperature: The randomness; 0 takes the most likely token. 0.8 is the default.
        top_k: The number of the most likely tokens that are left to choose from; 0: all. 40.
        top_p: The share of chances that the most likely tokens have together which are left. 0.95.
        min_p: The least chance, as a share of the first's. 0.05.
        repeat_penalty: Divides the logits of tokens that were there; 1, the default, changes none.
        frequency_penalty: Taken from a token's logit for each time that it was there.
        presence_penalty: Taken from the logit of a token that was there.
        penalty_last: The tokens that the penalties look back at, up to 64.
        logit_bias: Numbers that are added to logits, by token.
        seed: The seed of the choices: the same one gives the same text. A random one is the
            default.
        stop: A text, or several, that ends the answer and is not part of it.
        logprobs: Whether `result.logprobs` has the tokens' log-probabilities: the model's own,
            before any filter or grammar.
        schema: A JSON schema that the answer follows; `True` is any JSON.
        regex: A regular expression that the whole answer matches.
        grammar: A grammar that the answer follows, in Lark's notation or in GBNF.
    """

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    penalty_last: int
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: str | Sequence[str] | None
    logprobs: bool
    schema: Mapping[str, Any] | bool | None
    regex: str | None
    grammar: str | None


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt, and what its answer may be."""

    tokens: list[int]
    constraint: Constraint | None = None
    #: The way in which the answer writes its message, in a chat.
    form: Format | None = None
    #: The tools that it may call.
    choice: ToolChoice | None = None
    #: Whether the prompt ends within a thought.
    is_thinking: bool = False

    def pieces(self, tokenizer: Tokenizer, stops: Sequence[str], result: Result) -> AnyPieces:
        """Return what turns the answer's tokens into text, and keeps the rest in its result."""
        form, choice = self.form, self.choice
        if form is None or not (choice or form.has_thoughts):
            return Pieces(tokenizer.decode_stream(), stops)
        marks = map(tokenizer.control_token, form.marks)
        shown = frozenset(one for one in marks if one is not None)
        names = [one.name for one in choice.tools] if choice else []
        is_single = choice is not None and not choice.is_parallel
        return MessagePieces(
            Pieces(tokenizer.decode_stream(shown=shown), stops),
            reader_of(form, names, is_thinking=self.is_thinking),
            result.keep,
            lambda: is_single and bool(result.tool_calls),
        )


_CONSTRAINTS = ("schema", "regex", "grammar")


def constraint_in(options: Options | Mapping[str, Any]) -> Constraint | None:
    """Return the constraint of options. Raises as `constraint_of`."""
    return constraint_of(options.get("schema"), options.get("regex"), options.get("grammar"))


class ModelBase:
    """The parts that `LanguageModel` and `AsyncLanguageModel` share."""

    def __init__(
        self,
        header: GgufHeader,
        engine: AnyEngine,
        tokenizer: Tokenizer,
        chat_template: str | None,
    ) -> None:
        #: The file's name.
        self.name = header.name
        self.tokenizer = tokenizer
        self._engine = engine
        self._header = header
        self._given_template = chat_template

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self.config.architecture}, context {self.context}>"

    @property
    def config(self) -> Configuration:
        """The sizes of the model."""
        return self._engine.config

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its answer."""
        return self._engine.context

    @property
    def adapters(self) -> dict[str, float]:
        """The scales of the model's adapters by name."""
        return self._engine.adapters.by_name

    def set_adapter_scale(self, name: str, scale: float) -> None:
        """Set the scale of an adapter, from the next answer on.

        Nothing is compiled, but for the first use of the model with all scales 0, which is the
        model without adapters. The next answer computes its whole prompt. Raises
        InvalidArgumentError.
        """
        self._engine.adapters.set(name, scale)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The template that makes a prompt of messages. Raises UnsupportedError for a model without
        one."""
        return read_chat_template(self._header, self._given_template)

    @property
    def plans(self) -> list[Any]:
        """The plans that were needed so far, in the order of their first use."""
        return list(self._engine.plans.values())

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a prompt, with those that the model wants around it."""
        return len(self.tokenizer.encode(text))

    def _tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        try:
            if not isinstance(prompt, (bytes, bytearray)):
                return [index(one) for one in prompt]
        except TypeError:
            pass
        raise hg.InvalidArgumentError(
            f"a prompt is {prompt!r:.60}", advice="it is a text, or a sequence of tokens"
        )

    @cached_property
    def message_format(self) -> Format:
        """The way in which the model writes thoughts and calls of tools. Raises as
        `chat_template`."""
        return format_of("".join(self.chat_template.templates.values()), self.tokenizer.control_words)

    @cached_property
    def matching(self) -> Matching:
        """The constraints of this model's vocabulary."""
        return Matching(self.tokenizer)

    def asked(
        self,
        messages: Messages,
        tools: Messages | None,
        tool_choice: str | Mapping[str, Any] | None,
        variables: Mapping[str, Any] | None,
        *,
        is_parallel: bool = True,
        constraint: Constraint | None = None,
    ) -> Asked:
        """Return the prompt that the template makes of messages, and what its answer may be.
        Blocks. Raises InvalidArgumentError, and as `chat_template.render`."""
        form, tokenizer = self.message_format, self.tokenizer
        messages = checked(messages, "messages", needs_role=True)
        choice = tools_of(tools, tool_choice, is_parallel)
        shown = checked(tools, "tools", needs_role=False) if choice else None
        tokens = self.chat_template.tokens(
            tokenizer,
            for_template(messages, shown, form),
            tools=shown if form.is_native else None,
            variables=variables,
        )
        end = tokenizer.decode(tokens[-8:], special=True).rstrip()
        is_thinking = form.thought is not None and end.endswith(form.thought[0])
        if choice and choice.is_forced:
            if constraint is not None:
                raise hg.InvalidArgumentError(
                    f"{constraint.name} and tool_choice are given", advice="a call follows its tool's schema"
                )
            constraint = forcing(form, choice, tokenizer.control_token, is_thinking=is_thinking)
        elif constraint is not None:
            rules = around(form, tokenizer.control_token, is_thinking=is_thinking)
            constraint = replace(constraint, around=rules)
        return Asked(tokens, constraint, form, choice, is_thinking)

    def _close_parts(self) -> None:
        """End the processes of the template and of grammars, if there are any."""
        for name in ("chat_template", "matching"):
            if name in self.__dict__:
                getattr(self, name).close()

    def request(self, asked: Asked, options: Options) -> tuple[Request, AnyPieces, Result]:
        """Check a request before anything is sent, and return what its answer needs.

        Raises InvalidArgumentError, and LimitExceededError for a prompt that exceeds the context.
        """
        given: dict[str, Any] = {name: value for name, value in options.items() if name not in _CONSTRAINTS}
        max_tokens, stop = given.pop("max_tokens", None), given.pop("stop", None) or ()
        if given.get("seed") is None:
            given["seed"] = secrets.randbits(63)
        if unknown := sorted(map(str, set(options) - set(Options.__annotations__))):
            raise hg.InvalidArgumentError(
                f"there is no option {unknown[0]!r:.60}",
                advice=f"options are {', '.join(Options.__annotations__)}",
            )
        settings = Settings(**given)
        if max_tokens is not None and not is_within(max_tokens, Integral, 1, inf):
            raise hg.InvalidArgumentError(f"max_tokens is {max_tokens!r:.40}", advice="a number from 1 on")
        stops = tuple(_listed(stop))
        if not all(isinstance(one, str) and one for one in stops):
            raise hg.InvalidArgumentError(f"stop is {stop!r:.80}", advice="a text, or several")
        self._engine.check(asked.tokens, 1)
        ends = tuple(sorted(self.tokenizer.stops))[:ENDS]
        follow = None if asked.constraint is None else partial(self.matching.follow, asked.constraint)
        request = Request(asked.tokens, settings, max_tokens, ends, stops, follow)
        result = Result(prompt_tokens=len(asked.tokens))
        return request, asked.pieces(self.tokenizer, stops, result), result

    def _request(self, prompt: Prompt, options: Options) -> tuple[Request, AnyPieces, Result]:
        return self.request(Asked(self._tokens(prompt), constraint_in(options)), options)

    def _checked(self, prompt: Prompt) -> list[int]:
        tokens = self._tokens(prompt)
        self._engine.check(tokens, 0)
        return tokens

    def _checked_all(self, texts: str | Sequence[Prompt]) -> list[list[int]]:
        return [self._checked(one) for one in _listed(texts)]


def _listed(texts: Any) -> Iterable[Any]:
    """Return several as they are, and one in a list."""
    return [texts] if isinstance(texts, str) or not isinstance(texts, Iterable) else texts


class LanguageModel(ModelBase):
    """A language model on a session. Made by `hg.llm.load`.

    It computes one answer at a time.
    """

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Answer:
        """Continue a prompt: a text, or its tokens.

        Returns an answer, an iterator of pieces of text. It begins with the first piece that is
        taken; `options` are those of `hg.llm.Options`.

        Raises InvalidArgumentError, and LimitExceededError for a prompt that exceeds the context.
        """
        return Answer(self._engine, *self._request(prompt, options))

    def chat(
        self,
        messages: Messages,
        *,
        tools: Messages | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        variables: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """Answer messages, of which the model's template makes a prompt.

        Args:
            messages: Mappings as {"role": "user", "content": "Hello!"}. The template may know
                further keys.
            tools: Functions that the model may call, as in OpenAI's interface. Its calls are
                `answer.tool_calls`; the caller makes them, and adds `answer.message` and messages
                of the role "tool" with their results.
            tool_choice: "auto", "none", "required", or {"type": "function", "function": {"name":
                ...}} for a call of this one.
            parallel_tool_calls: Whether an answer may have several calls.
            variables: Variables of the template, such as {"enable_thinking": False}.
            options: Those of `generate`.

        Raises UnsupportedError for a model without a template, and the errors of `generate` and of
        `chat_template.render`.
        """
        asked = self.asked(
            messages,
            tools,
            tool_choice,
            variables,
            is_parallel=parallel_tool_calls,
            constraint=constraint_in(options),
        )
        return Answer(self._engine, *self.request(asked, options))

    def logits(self, tokens: Prompt) -> Array:
        """Return the logits after each token, f32 [tokens, vocabulary]. Raises as `generate`."""
        return result_of(self._engine.rows(self._checked(tokens), "logits"))

    def embed(self, texts: str | Sequence[Prompt]) -> Array:
        """Return a unit vector for each text, f32 [texts, width]. Raises as `generate`."""
        return result_of(self._engine.embed(self._checked_all(texts)))

    def close(self) -> None:
        """Free the model's plans and its cache. The session stays open."""
        self._close_parts()
        result_of(self._engine.close())
        result_of(self._engine.session.close())


class AsyncLanguageModel(ModelBase):
    """As `LanguageModel`, for asyncio. Made by `hg.llm.load` with a session of `hg.aio`."""

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncAnswer:
        """Continue a prompt. Returns an answer: `async for piece in answer`, or `await answer`."""
        return AsyncAnswer(self._engine, *self._request(prompt, options))

    async def chat(
        self,
        messages: Messages,
        *,
        tools: Messages | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        variables: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> AsyncAnswer:
        """Answer messages: `answer = await llm.chat(messages)`. See `LanguageModel.chat`."""
        asked = await asyncio.to_thread(
            self.asked,
            messages,
            tools,
            tool_choice,
            variables,
            is_parallel=parallel_tool_calls,
            constraint=constraint_in(options),
        )
        return AsyncAnswer(self._engine, *self.request(asked, options))

    async def logits(self, tokens: Prompt) -> Array:
        """Return the logits after each token, f32 [tokens, vocabulary]."""
        return await awaited(self._engine.rows(self._checked(tokens), "logits"))

    async def embed(self, texts: str | Sequence[Prompt]) -> Array:
        """Return a unit vector for each text, f32 [texts, width]."""
        return await awaited(self._engine.embed(self._checked_all(texts)))

    async def close(self) -> None:
        """Free the model's plans and its cache. The session stays open."""
        self._close_parts()
        await awaited(self._engine.close())
        await awaited(self._engine.session.close())


@dataclass(slots=True)
class Reading:
    """The way in which an answer is read."""

    #: True once all of it is asked for.
    is_whole: bool = False


def answering(
    engine: AnyEngine, request: Request, pieces: AnyPieces, result: Result, reading: Reading
) -> Procedure[str, None]:
    """Answer a request in the way in which the answer is read when it begins."""
    yield from engine.answer(replace(request, is_read=not reading.is_whole), pieces, result)


class AnswerBase:
    """The parts that `Answer` and `AsyncAnswer` share."""

    def __init__(self, engine: AnyEngine, request: Request, pieces: AnyPieces, result: Result) -> None:
        self._reading = Reading()
        # It does not refer to the answer: one that is dropped ends at once.
        self._procedure = answering(engine, request, pieces, result, self._reading)
        self._result = result
        #: The seed of its choices, which gives the same text again.
        self.seed = request.settings.seed

    @property
    def so_far(self) -> Result:
        """The answer as it is now; `finish_reason` is None before its end."""
        return self._result

    def _whole(self) -> Result:
        """The result of an answer that has ended. Raises CancelledError if it ended early."""
        if self._result.finish_reason is None:
            raise hg.CancelledError(
                "the answer ended early: it was closed, or an error was raised before",
                advice="answer.so_far has what came until then",
            )
        return self._result

    def __repr__(self) -> str:
        state = self._result.finish_reason or "not finished"
        return f"<{type(self).__name__}: {len(self._result.tokens)} tokens, {state}>"


class Answer(AnswerBase):
    """A text that a model writes: an iterator of its pieces."""

    def __init__(self, engine: AnyEngine, request: Request, pieces: AnyPieces, result: Result) -> None:
        super().__init__(engine, request, pieces, result)
        self._pieces = blocking(self._procedure)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def result(self) -> Result:
        """Wait for the end of the answer, and return all of it.

        Raises the error that ended it, and CancelledError if it was closed before its end.
        """
        self._reading.is_whole = True
        for _ in self._pieces:
            pass
        return self._whole()

    @property
    def text(self) -> str:
        """The whole text; waits for its end."""
        return self.result().text

    @property
    def tokens(self) -> list[int]:
        """All tokens; waits for the end."""
        return self.result().tokens

    @property
    def logprobs(self) -> list[Logprob]:
        """The log-probabilities of all tokens; waits for the end."""
        return self.result().logprobs

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls of tools; waits for the end."""
        return self.result().tool_calls

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of a chat, for the next one; waits for the end."""
        return self.result().message

    def close(self) -> None:
        """End the answer here. The model is free for another one."""
        self._pieces.close()


class AsyncAnswer(AnswerBase):
    """A text that a model writes: an asynchronous iterator of its pieces. `await answer` waits for
    its end and returns the result."""

    def __init__(self, engine: AnyEngine, request: Request, pieces: AnyPieces, result: Result) -> None:
        super().__init__(engine, request, pieces, result)
        self._pieces = awaiting(self._procedure)

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        return await anext(self._pieces)

    async def result(self) -> Result:
        """Wait for the end of the answer, and return all of it."""
        self._reading.is_whole = True
        async for _ in self._pieces:
            pass
        return self._whole()

    def __await__(self) -> Generator[Any, Any, Result]:
        return self.result().__await__()

    async def aclose(self) -> None:
        """End the answer here. The model is free for another one."""
        await self._pieces.aclose()
