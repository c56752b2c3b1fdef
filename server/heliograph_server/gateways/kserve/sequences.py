"""Sequences: requests of one correlation id, whose state is the variables of a session of its own.

Lives on one event loop. Sessions are opened and ended on threads.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from heliograph_proto.errors import HeliographError, InvalidInputError, LimitExceededError
from heliograph_server.gateways.kserve.batching import BatchPolicy
from heliograph_server.gateways.kserve.dispatcher import Dispatcher, late, unloaded
from heliograph_server.gateways.kserve.models import OpenedModel
from heliograph_server.gateways.kserve.requests import InferOptions
from heliograph_server.gateways.kserve.statistics import ModelStatistics
from heliograph_server.gateways.kserve.tensors import Array

#: A tenant and its correlation id.
Key = tuple[str, int | str]


@dataclass(frozen=True, slots=True)
class _Session:
    """The session of a sequence, and the queue of its requests."""

    opened: OpenedModel
    dispatcher: Dispatcher

    def close(self) -> None:
        """Answer the requests that wait, and end the session. Blocks."""
        self.dispatcher.close()
        self.opened.close()


@dataclass(slots=True, eq=False)
class _Sequence:
    """A sequence, from its first request until all of its requests have ended."""

    #: Held while it begins, so that requests that come meanwhile keep their order.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: None until it has begun, and from its last request on.
    session: _Session | None = None
    #: True if it counts as in progress: as with the session, and while that is opened.
    is_counted: bool = False
    #: The number of its requests in progress, and when the last one ended.
    running: int = 0
    used: float = 0.0


class Sequences:
    """The sequences of a model in progress. None waits for another to begin or end."""

    def __init__(
        self,
        name: str,
        open_model: Callable[[], OpenedModel],
        statistics: ModelStatistics,
        most: int,
        idle_seconds: float,
    ) -> None:
        """`open_model` opens a session for a sequence; it blocks."""
        self._name, self._open_model, self._statistics = name, open_model, statistics
        self._most, self._idle_seconds = most, idle_seconds
        self._sequences: dict[Key, _Sequence] = {}
        self._closed = False

    async def infer(
        self, tenant: str, feeds: Mapping[str, Array], options: InferOptions, seconds: float = math.inf
    ) -> dict[str, Array]:
        """Run the next request of a sequence, after those before it.

        Raises InvalidInputError for one that has not begun, LimitExceededError for too many, and
        the errors of `Dispatcher.infer`.
        """
        key, seconds = (tenant, options.sequence), min(options.seconds, seconds)
        sequence = self._sequences.get(key)
        if sequence is None:
            if not options.starts:
                raise self._not_begun(options)
            sequence = self._sequences[key] = _Sequence()
        sequence.running += 1
        end = time.monotonic() + seconds
        try:
            session = await self._session_for(sequence, options, seconds)
            try:
                # No other task has its turn before this request is queued.
                return await session.dispatcher.infer(feeds, options.priority, end - time.monotonic())
            finally:
                if options.ends:
                    await asyncio.to_thread(session.close)
        finally:
            sequence.running -= 1
            sequence.used = time.monotonic()
            if not sequence.running and sequence.session is None:
                self._sequences.pop(key, None)

    async def _session_for(self, sequence: _Sequence, options: InferOptions, seconds: float) -> _Session:
        """Return the session of a request, which is opened for the first one, and is the caller's
        to end after the last one."""
        try:
            async with asyncio.timeout(seconds if seconds < math.inf else None), sequence.turn:
                if self._closed:
                    raise unloaded(self._name)
                if options.starts:
                    await self._begin(sequence)
                if (session := sequence.session) is None:
                    raise self._not_begun(options)
                if options.ends:
                    sequence.session, sequence.is_counted = None, False
                return session
        except HeliographError:
            # DeadlineExceededError is a TimeoutError too.
            raise
        except TimeoutError:
            raise late(seconds) from None

    def _not_begun(self, options: InferOptions) -> InvalidInputError:
        return InvalidInputError(
            f"the sequence {options.sequence!r:.80} has not begun, or has ended",
            advice="begin it with sequence_start",
        )

    async def _begin(self, sequence: _Sequence) -> None:
        """Open the session of a sequence, in place of the one that it has. Its turn is held."""
        await self._end(sequence)
        if self._count() >= self._most:
            await self.end_idle()
        if self._count() >= self._most:
            raise LimitExceededError(
                f"the model has {self._most} of at most {self._most} sequences in progress",
                advice="end one with sequence_end; sequences in model.toml sets the number",
                retry_after_seconds=1.0,
            )
        sequence.is_counted = True
        opening = asyncio.ensure_future(asyncio.to_thread(self._open_model))
        try:
            opened = await asyncio.shield(opening)
        except BaseException:
            sequence.is_counted = False
            opening.add_done_callback(_close_unused)
            raise
        dispatcher = Dispatcher(self._name, opened.run, BatchPolicy(), 1, self._statistics)
        sequence.session = _Session(opened, dispatcher)

    def _count(self) -> int:
        return sum(one.is_counted for one in self._sequences.values())

    async def _end(self, sequence: _Sequence) -> None:
        """End the session of a sequence, if it has one. Its turn is held, or no request runs."""
        session, sequence.session, sequence.is_counted = sequence.session, None, False
        if session is not None:
            await asyncio.to_thread(session.close)

    async def end_idle(self) -> None:
        """End the sequences that had no request for a while."""
        end = time.monotonic() - self._idle_seconds
        for key, one in tuple(self._sequences.items()):
            if one.running or one.session is None or self._sequences.get(key) is not one:
                continue
            if one.used <= end or one.session.opened.is_lost:
                del self._sequences[key]
                await self._end(one)

    async def close(self) -> None:
        """End all sequences, and begin none any more."""
        self._closed = True
        for key, one in tuple(self._sequences.items()):
            async with one.turn:
                await self._end(one)
            if not one.running:
                self._sequences.pop(key, None)


def _close_unused(opening: asyncio.Future[OpenedModel]) -> None:
    """End the session of a sequence whose client left while it was opened."""
    if not opening.cancelled() and opening.exception() is None:
        threading.Thread(target=opening.result().close, name="heliograph-end").start()
