"""The lines that a server's log has of a session, as an asynchronous iterator."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Self

from heliograph._aio import AioShell, AsyncLogSource
from heliograph_proto.log_lines import LogLine


class LogLines:
    """As `heliograph.LogLines`; made by `Session.log`. It begins with the first line that is waited for, or
    where it is entered by `async with`."""

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
        """Waits for the next line."""
        while not self._lines:
            source = None if self._is_over else await self._begun()
            more = None if source is None else await source.take()
            if more is None:
                self._is_over = True
                raise StopAsyncIteration
            self._lines.extend(more)
        return self._lines.popleft()

    def close(self) -> None:
        """Ends it. Idempotent."""
        self._is_over = True
        if self._source is not None:
            self._source.close()

    async def __aenter__(self) -> Self:
        await self._begun()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
