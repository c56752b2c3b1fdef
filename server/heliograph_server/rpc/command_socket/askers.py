"""Listening sockets whose clients send one request first, in bounded time. On the event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

logger = logging.getLogger(__name__)

#: The largest request.
REQUEST_BYTES = 4096
#: The time limit for the request of a client that connected.
ASK_SECONDS = 2.0
#: The most clients that have connected without a request. One more ends the oldest.
MAX_CONNECTIONS = 64
#: The pause after the system refused a connection, most likely for lack of descriptors.
REST_SECONDS = 1.0


class Verdict(Enum):
    """The fate of a client's connection after some bytes of it."""

    MORE = auto()
    CLOSE = auto()
    #: The connection has another owner now.
    KEPT = auto()


@dataclass(slots=True)
class _Connection:
    """A client that has not sent its request yet."""

    socket: socket.socket
    timer: asyncio.TimerHandle
    received: bytearray = field(default_factory=bytearray)


class Askers:
    """Accepts clients, and passes what each sends first to a function."""

    def __init__(
        self,
        admits: Callable[[socket.socket], bool],
        asked: Callable[[socket.socket, bytes], Verdict],
        what: str,
    ) -> None:
        """`admits` says whether a client may ask at all. `asked` gets all bytes so far. `what` is
        not done while the system refuses connections, for the log."""
        self._admits, self._asked, self._what = admits, asked, what
        self._listeners: list[socket.socket] = []
        self._connections: dict[int, _Connection] = {}
        #: Timers of sockets that accept no connections for a while.
        self._resting: dict[int, asyncio.TimerHandle] = {}

    def __repr__(self) -> str:
        return f"<Askers at {len(self._listeners)} sockets, {len(self._connections)} connected>"

    @property
    def count(self) -> int:
        """The listening sockets."""
        return len(self._listeners)

    def listen(self, listener: socket.socket) -> None:
        """Listen at a bound socket, which is closed by `close`."""
        listener.listen(MAX_CONNECTIONS)
        listener.setblocking(False)
        self._listeners.append(listener)
        self._watch(listener)

    def _watch(self, listener: socket.socket) -> None:
        self._resting.pop(listener.fileno(), None)
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self._rest(listener, error)
            return
        if not self._admits(client):
            # A stranger learns nothing, not even the reason.
            client.close()
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            self._close(next(iter(self._connections)))
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        number = client.fileno()
        self._connections[number] = _Connection(client, loop.call_later(ASK_SECONDS, self._close, number))
        loop.add_reader(number, self._read, number)

    def _rest(self, listener: socket.socket, error: OSError) -> None:
        """Pause accepting, since the loop would report the waiting client again and again."""
        logger.warning("%s for %.0f s: %s", self._what, REST_SECONDS, error.strerror)
        loop, number = asyncio.get_running_loop(), listener.fileno()
        loop.remove_reader(number)
        self._resting[number] = loop.call_later(REST_SECONDS, self._watch, listener)

    def _read(self, number: int) -> None:
        connection, loop = self._connections[number], asyncio.get_running_loop()
        received, verdict = connection.received, Verdict.CLOSE
        # A new owner may read it at once.
        loop.remove_reader(number)
        try:
            if data := connection.socket.recv(REQUEST_BYTES - len(received)):
                received += data
                verdict = self._asked(connection.socket, bytes(received))
        except BlockingIOError:
            verdict = Verdict.MORE
        except OSError as error:
            logger.debug("a client that asked is gone: %s", error)
        if verdict is Verdict.MORE and len(received) < REQUEST_BYTES:
            loop.add_reader(number, self._read, number)
            return
        connection.timer.cancel()
        del self._connections[number]
        if verdict is not Verdict.KEPT:
            connection.socket.close()

    def _close(self, number: int) -> None:
        if (connection := self._connections.pop(number, None)) is not None:
            asyncio.get_running_loop().remove_reader(number)
            connection.timer.cancel()
            connection.socket.close()

    def close(self) -> None:
        """Stop listening, and close every connection. Idempotent."""
        loop = asyncio.get_running_loop()
        for timer in self._resting.values():
            timer.cancel()
        self._resting.clear()
        for listener in self._listeners:
            loop.remove_reader(listener.fileno())
            listener.close()
        self._listeners.clear()
        for number in list(self._connections):
            self._close(number)
