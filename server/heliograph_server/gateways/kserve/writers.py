"""Language models that write: each is a server of many answers, on an event loop of its own.

The loop has a thread, since a step of a model and the graphs of a prompt are work that other
requests of the daemon would wait for. It has no sockets and no gRPC.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import heliograph as hg
from heliograph_proto.errors import HeliographError, UnavailableError
from heliograph_server.gateways.kserve.prompts import Prompt
from heliograph_server.gateways.kserve.repository import ModelSettings
from heliograph_server.inprocess.sessions import ModelSessions
from heliograph_server.resources.failures import typed

T = TypeVar("T")
#: The most time of an answer, its wait included.
ANSWER_SECONDS = 600.0
#: How long the end of a model waits for its thread.
END_SECONDS = 10.0
_Give = Callable[["Piece | HeliographError"], None]


@dataclass(frozen=True, slots=True)
class Piece:
    """An addition to an answer; the last one has no text, but the reason of the end."""

    text: str = ""
    #: "stop" or "length" of the last piece, else "".
    reason: str = ""
    #: Of the last piece: the seconds until the first token.
    prompt_seconds: float = 0.0


class Writer:
    """A language model in a session. Thread-safe but for `answer`, which is of the caller's loop."""

    def __init__(self, sessions: ModelSessions, path: Path, settings: ModelSettings) -> None:
        """Load a model. Blocks. Raises the errors of `hg.llm.load`."""
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._turn, name="heliograph-writer", daemon=True)
        self._thread.start()
        self._started.wait()
        try:
            self._session, self._server = self._wait(self._load(sessions, path, settings))
        except BaseException:
            self._end()
            raise

    def _turn(self) -> None:
        with asyncio.Runner() as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        self._started.set()
        await self._ending.wait()

    async def _load(self, sessions: ModelSessions, path: Path, settings: ModelSettings) -> tuple[Any, Any]:
        from heliograph.llm.serving import Bounds, Server

        bounds = Bounds(
            settings.max_batch_size or Bounds().answers, settings.max_queue, settings.cache_tokens or None
        )
        session = await sessions.open_aio()
        try:
            server = await Server.load(session, path, bounds=bounds, **settings.loading)
        except BaseException:
            await session.close()
            raise
        return session, server

    def _wait(self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """Run work on the loop, and wait for it. Blocks. Raises TimeoutError."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    @property
    def waiting(self) -> int:
        """The number of answers that have not begun."""
        return int(self._server.scheduler.waiting)

    @property
    def is_lost(self) -> bool:
        """True if its session has ended."""
        return bool(self._server.lost.is_set() or self._session.closed)

    async def answer(self, tenant: str, prompt: Prompt, seconds: float) -> AsyncGenerator[Piece]:
        """Yield the pieces of an answer. An answer that is left early ends there.

        Raises InvalidArgumentError, LimitExceededError, DeadlineExceededError, UnavailableError.
        """
        here, found = asyncio.get_running_loop(), asyncio.Queue[Piece | HeliographError]()
        seconds = min(seconds, ANSWER_SECONDS)

        def give(one: Piece | HeliographError) -> None:
            # The caller's loop may have ended.
            with suppress(RuntimeError):
                here.call_soon_threadsafe(found.put_nowait, one)

        try:
            writing = asyncio.run_coroutine_threadsafe(self._write(tenant, prompt, seconds, give), self._loop)
        except RuntimeError:
            raise UnavailableError("the model is being unloaded", advice="load it again") from None
        try:
            while True:
                one = await _within(found, seconds + END_SECONDS)
                if isinstance(one, HeliographError):
                    raise one
                yield one
                if one.reason:
                    return
        finally:
            writing.cancel()

    async def _write(self, tenant: str, prompt: Prompt, seconds: float, give: _Give) -> None:
        try:
            tokens = await asyncio.to_thread(self._server.model.tokenizer.encode, prompt.text)
            answering = self._server.submit(tokens, tenant=tenant, seconds=seconds, **prompt.options)
            try:
                async for delta in answering:
                    if delta.text:
                        give(Piece(delta.text))
            finally:
                answering.close()
            result = answering.result
            give(Piece("", result.finish_reason or "stop", result.prompt_seconds))
        except asyncio.CancelledError:
            give(UnavailableError("the model is being unloaded", advice="load it again"))
            raise
        except Exception as error:
            give(typed(error, "answering a prompt").anew())

    def close(self) -> None:
        """End all answers, and the session. Blocks."""
        with suppress(hg.ConnectionError, TimeoutError):
            self._wait(self._close(), END_SECONDS)
        self._end()

    async def _close(self) -> None:
        await self._server.close()
        await self._session.close()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(END_SECONDS)


async def _within(found: asyncio.Queue[Piece | HeliographError], seconds: float) -> Piece | HeliographError:
    """Return what comes next. Work that is handed to a loop as it ends tells nothing, ever."""
    try:
        return await asyncio.wait_for(found.get(), seconds)
    except TimeoutError:
        return UnavailableError("the model has ended without a word", advice="load it again")
