"""`session.watch()` for asyncio; as `heliograph.watching`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Self

from heliograph._watching import DeviceEvent, WatchBase


class DeviceWatch(WatchBase):
    """An asynchronous iterator over what happens to devices, from the moment it was made. It ends with the
    session, or when it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self._woken = asyncio.Event()

    def put(self, events: Sequence[DeviceEvent]) -> None:
        super().put(events)
        self._woken.set()

    def end(self) -> None:
        super().end()
        self._woken.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> DeviceEvent:
        """Waits for the next event. Raises LimitExceededError, once, where events were missed."""
        while (found := self._take()) is None:
            if self._ended:
                raise StopAsyncIteration
            self._woken.clear()
            await self._woken.wait()
        return found

    def close(self) -> None:
        """Ends it. Idempotent."""
        self.end()
