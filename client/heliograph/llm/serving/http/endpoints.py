"""The endpoints: a request to its reply."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

import heliograph as hg
from heliograph.llm.constraints import Matcher
from heliograph.llm.language_model import Asked, constraint_in
from heliograph.llm.serving.answering import Answering, Delta
from heliograph.llm.serving.engine import Server
from heliograph.llm.serving.following import close_all
from heliograph.llm.serving.http import parameters, replies
from heliograph.llm.serving.http.errors import ApiError, from_heliograph, refused
from heliograph.llm.serving.http.metrics import Metrics

#: The longest body.
MAX_BODY = 4 * 2**20
#: Longer ones are read on a thread.
MOST_ON_LOOP = 2**18
#: The time that a body may take to come.
BODY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The replies of a model that is loaded."""

    server: Server
    #: The model's name for clients.
    name: str
    metrics: Metrics
    #: The most time of an answer.
    seconds: float

    @property
    def names(self) -> list[str]:
        """The names of the model and of its adapters."""
        return [self.name, *self.server.adapters.by_name]

    async def models(self, _: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": list(map(self._described, self.names))})

    async def one_model(self, request: Request) -> Response:
        """GET /v1/models/{model}."""
        return JSONResponse(self._described(parameters.model_of(request.path_params, self.names)))

    def _described(self, model: str) -> dict[str, Any]:
        found = {"id": model, "object": "model", "created": 0, "owned_by": "heliograph"}
        return found | ({"parent": self.name} if model != self.name else {})

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = await _body(request, parameters.COMPLETION)
        model = parameters.model_of(body, self.names)
        wanted = parameters.wanted(body, is_chat=False)
        constraint = constraint_in(wanted.options)
        prompts = [Asked(await self._tokens(one), constraint) for one in parameters.prompts(body)]
        return await self._answer(request, model, wanted, prompts, is_chat=False)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = await _body(request, parameters.CHAT)
        name = parameters.model_of(body, self.names)
        wanted, model = parameters.wanted(body, is_chat=True), self.server.model
        asked = await asyncio.to_thread(
            model.asked,
            parameters.messages(body),
            body.get("tools"),
            body.get("tool_choice"),
            parameters.variables(body),
            is_parallel=parameters.is_parallel(body),
            constraint=constraint_in(wanted.options),
        )
        return await self._answer(request, name, wanted, [asked], is_chat=True)

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        body = await _body(request, parameters.EMBEDDINGS)
        model = parameters.model_of(body, self.names)
        form = body.get("encoding_format", "float")
        if form not in ("float", "base64"):
            raise refused("encoding_format", 'is neither "float" nor "base64"')
        if "dimensions" in body:
            raise refused("dimensions", "is not supported: vectors have the model's width")
        texts = [await self._tokens(one) for one in parameters.prompts(body, "input", parameters.TEXTS)]
        found = await _while_connected(request, self.server.embed(texts, self._adapter(model)))
        data = (
            {"object": "embedding", "index": place, "embedding": _encoded(one.tolist(), form)}
            for place, one in enumerate(found)
        )
        count = sum(map(len, texts))
        used = {"prompt_tokens": count, "total_tokens": count}
        return await _json(replies.with_list, "data", data, object="list", model=model, usage=used)

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        body = await _body(request, frozenset(("content", "add_special")))
        if not isinstance(body.get("content"), str):
            raise refused("content", "is not a text")
        ends = bool(body.get("add_special", False))
        tokenizer = self.server.model.tokenizer
        return JSONResponse({"tokens": await asyncio.to_thread(tokenizer.encode, body["content"], ends=ends)})

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        body = await _body(request, frozenset(("tokens",)))
        found = body.get("tokens")
        if not isinstance(found, list) or not all(type(one) is int for one in found):
            raise refused("tokens", "is not an array of tokens")
        return JSONResponse({"content": await asyncio.to_thread(self.server.model.tokenizer.decode, found)})

    # Answers

    def _adapter(self, model: str) -> str:
        """Return the adapter that a model's name stands for; empty: none."""
        return "" if model == self.name else model

    async def _tokens(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        return await asyncio.to_thread(self.server.model.tokenizer.encode, prompt)

    async def _answer(
        self,
        request: Request,
        model: str,
        wanted: parameters.Wanted,
        prompts: Sequence[Asked],
        *,
        is_chat: bool,
    ) -> Response:
        form = replies.Form(is_chat, model, self.server.model.tokenizer, wanted.alternatives)
        wanted.options["adapter"] = self._adapter(model)
        answers = await self._submit(request.state.tenant, wanted, prompts)
        if wanted.is_stream:
            stream = self._events(form, wanted, answers, len(prompts))
            return EventStream(stream, answers)
        await _while_connected(request, self._finish(answers))
        results = [one.result for one in answers]
        if wanted.alternatives is not None:
            return await _json(form.whole, results, len(prompts))
        return Response(form.whole(results, len(prompts)), media_type="application/json")

    async def _submit(
        self, tenant: str, wanted: parameters.Wanted, prompts: Sequence[Asked]
    ) -> list[Answering]:
        """Begin all answers of a request, or none."""
        server = self.server
        bounds = server.scheduler.bounds
        most = min(parameters.ANSWERS, bounds.answers + bounds.queue)
        if len(prompts) * wanted.n > most:
            raise refused("n", f"times the prompts is more than {most}")
        server.scheduler.room_for(len(prompts) * wanted.n)
        matchers: list[Matcher | None] = []
        made: list[Answering] = []
        try:
            for asked in prompts:
                matchers += await server.following.begin(asked, wanted.n)
            # Others may have come meanwhile.
            server.scheduler.room_for(len(prompts) * wanted.n)
            for place, matcher in enumerate(matchers):
                asked, number = prompts[place // wanted.n], place % wanted.n
                options: Any = {**wanted.options, "seed": wanted.seed + number}
                made.append(
                    server.submit(asked, matcher=matcher, tenant=tenant, seconds=self.seconds, **options)
                )
        except BaseException:
            for one in made:
                one.close()
            close_all(matchers)
            raise
        return made

    async def _finish(self, answers: Sequence[Answering]) -> None:
        async with aclosing(self._merged(answers)) as deltas:
            async for _ in deltas:
                pass

    async def _events(
        self, form: replies.Form, wanted: parameters.Wanted, answers: Sequence[Answering], prompts: int
    ) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(self._merged(answers)) as deltas:
                for index in range(len(answers)):
                    if begin := form.begin(index):
                        yield replies.event(begin)
                calls, offsets = [0] * len(answers), [form.offsets() for _ in answers]
                async for index, delta in deltas:
                    if delta is None:
                        yield replies.event(form.end(index, answers[index].result.finish_reason))
                    elif delta.has_parts:
                        yield replies.event(form.piece(index, delta, calls[index], offsets[index]))
                        calls[index] += len(delta.tool_calls)
            if wanted.has_usage:
                yield replies.event(form.total([one.result for one in answers], prompts))
        except hg.HeliographError as error:
            yield replies.event(from_heliograph(error, {}).body)
        yield replies.DONE

    async def _merged(self, answers: Sequence[Answering]) -> AsyncGenerator[tuple[int, Delta | None], None]:
        """Yield what is added to each answer, as it comes, and None at its end."""
        iterators = [aiter(one) for one in answers]
        tasks = {asyncio.create_task(_next(one)): index for index, one in enumerate(iterators)}
        try:
            while tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=tasks.__getitem__):
                    index, delta = tasks.pop(task), task.result()
                    if delta is not None:
                        tasks[asyncio.create_task(_next(iterators[index]))] = index
                    yield index, delta
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for one in answers:
                one.close()
                self.metrics.count(one)


_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(StreamingResponse):
    """Events of answers, which end with it even where its client left before the first one."""

    def __init__(self, events: AsyncGenerator[bytes, None], answers: Sequence[Answering]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_STREAM_HEADERS)
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for one in self._answers:
                one.close()


async def _next(iterator: AsyncIterator[Delta]) -> Delta | None:
    return await anext(iterator, None)


async def _body(request: Request, known: frozenset[str]) -> dict[str, Any]:
    """Read a body of at most MAX_BODY bytes, which comes within BODY_SECONDS. Raises ApiError."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > MAX_BODY:
                    raise ApiError(413, f"the body has more than {MAX_BODY} bytes", code="too_large")
    except TimeoutError:
        raise ApiError(
            408,
            f"the body did not come within {BODY_SECONDS:g} s",
            code="request_timeout",
            headers={"connection": "close"},
        ) from None
    raw = b"".join(parts)
    if size <= MOST_ON_LOOP:
        return parameters.parse_body(raw, known)
    return await asyncio.to_thread(parameters.parse_body, raw, known)


async def _json(make: Callable[..., bytes], *arguments: Any, **named: Any) -> Response:
    """Return a reply whose JSON takes long to make, which is done on a thread."""
    return Response(await asyncio.to_thread(make, *arguments, **named), media_type="application/json")


async def _while_connected(request: Request, work: Any) -> Any:
    """Return the result of work, which is cancelled when the client leaves."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "the client left", code="client_closed_request")
        return await working
    finally:
        for one in (working, leaving):
            one.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Callable[[], Any]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _encoded(numbers: list[float], form: str) -> list[float] | str:
    if form == "float":
        return numbers
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()
