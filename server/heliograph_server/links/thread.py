"""Links to other daemons for a process without an event loop: on one in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from heliograph_proto.addresses import Shown, nothing_shown
from heliograph_proto.plans import Edge, PeerSource
from heliograph_server.exchange.incoming import Done, Sink
from heliograph_server.exchange.outgoing import OutgoingValue
from heliograph_server.links.aio import LoopPeers

#: The threads that write to slow devices.
MOVERS = 4
#: The time that the thread has to end.
END_SECONDS = 5.0


class ThreadPeers:
    """`PeerLinks` of an event loop in a thread. Thread-safe. `close` ends the thread."""

    def __init__(self, shown: Shown = nothing_shown) -> None:
        """`shown` returns the credentials presented to other daemons."""
        self._closing = asyncio.Event()
        made: Future[LoopPeers] = Future()
        serving = self._serve(made, shown)
        self._thread = threading.Thread(
            target=asyncio.run, args=(serving,), name="heliograph-peers", daemon=True
        )
        self._thread.start()
        self._peers = made.result()

    def __repr__(self) -> str:
        return repr(self._peers)

    async def _serve(self, made: Future[LoopPeers], shown: Shown) -> None:
        with ThreadPoolExecutor(MOVERS, "heliograph-mover") as movers:
            peers = LoopPeers(asyncio.get_running_loop(), movers, shown=shown)
            made.set_result(peers)
            await self._closing.wait()
            await peers.closed()

    def pull(self, source: PeerSource, sinks: Sequence[Sink]) -> None:
        """As `PeerLinks.pull`."""
        self._peers.pull(source, sinks)

    def forget(self, source: PeerSource, sinks: Sequence[Sink]) -> None:
        """As `PeerLinks.forget`."""
        self._peers.forget(source, sinks)

    def push(self, destination: PeerSource, edge: Edge, run: int, value: OutgoingValue, done: Done) -> None:
        """As `PeerLinks.push`."""
        self._peers.push(destination, edge, run, value, done)

    def close(self) -> None:
        """End all links, and wait until the thread has ended. Idempotent."""
        with suppress(RuntimeError):  # the loop has ended
            self._peers.loop.call_soon_threadsafe(self._closing.set)
        if threading.current_thread() is not self._thread:
            self._thread.join(END_SECONDS)
