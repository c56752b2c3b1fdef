"""Asynchronous iterators over a server's device changes and log lines."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Self

from heliograph.core.watching import DeviceEvent, WatchBase
from heliograph.transport.aio import AioShell, AsyncLogSource
from heliograph_proto.sessions import LogLine


class DeviceWatch(WatchBase):
    """An asynchronous iterator over what happens to devices, from its creation on.

    It ends with the session, or when it is closed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._woken = asyncio.Event()

    def put(self, events: Sequence[DeviceEvent]) -> None:
        super().put(events)
        self._woken.set()

    def end(self, why: str = "") -> None:
        super().end(why)
        self._woken.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> DeviceEvent:
        """Wait for the next event. Raises LimitExceededError, once, if events were missed."""
        while (found := self._take()) is None:
            if self._ended:
                raise StopAsyncIteration
            self._woken.clear()
            await self._woken.wait()
        return found

    def close(self) -> None:
        """End the iterator. Idempotent."""
        self.end()


class LogLines:
    """An asynchronous iterator over the server's log of a session. Made by `Session.log`.

    It starts at the first line that is awaited, or when it is entered with `async with`, and ends
    with the session.
    """

    def __init__(self, shell: AioShell, level: str) -> None:
        self._shell, self._level = shell, level
        self._source: AsyncLogSource | None = None
        self._lines: deque[LogLine] = deque()
        self._is_over = False
        self._beginning = asyncio.Lock()

    async def _begun(self) -> AsyncLogSource:
        async with self._beginning:
            if self._source is None:
                self._source = await self._shell.follow_log(self._level)
            return self._source

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> LogLine:
        while not self._lines:
            source = None if self._is_over else await self._begun()
            more = None if source is None else await source.take()
            if more is None:
                self._is_over = True
                raise StopAsyncIteration
            self._lines.extend(more)
        return self._lines.popleft()

    def close(self) -> None:
        """End the iterator. Idempotent."""
        self._is_over = True
        if self._source is not None:
            self._source.close()

    async def __aenter__(self) -> Self:
        await self._begun()
        return self

    async def __aexit__(self, *details: object) -> None:
        self.close()
