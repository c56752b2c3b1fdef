"""Connections of HTTP whose clients may not keep them for nothing."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

#: The longest time for the head of a request; of a later one on a connection, up to twice as long.
HEAD_SECONDS = 10.0
#: The most bytes of the head of a request.
MOST_HEAD = 64 * 1024


class Connection(H11Protocol):
    """A connection that ends if the head of a request does not come in time.

    uvicorn has a limit for connections that are idle after a request alone: one that sends nothing,
    or a byte now and then, would take its place among the most connections for ever.
    """

    _looking: asyncio.TimerHandle | None = None
    #: The exchange after which the connection was seen without a request, or _BUSY.
    _idle_after: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        super().connection_made(cast(asyncio.Transport, transport))
        self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        super().connection_lost(exc)

    def _look_later(self) -> None:
        self._looking = self.loop.call_later(HEAD_SECONDS, self._look)

    def _look(self) -> None:
        has_request = self.cycle is not None and not self.cycle.response_complete
        if not has_request and self._idle_after is self.cycle:
            self.transport.abort()
            return
        self._idle_after = _BUSY if has_request else self.cycle
        self._look_later()


_BUSY = object()
