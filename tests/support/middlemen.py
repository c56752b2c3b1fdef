"""A way to a daemon that a test watches, cuts and leads elsewhere."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue

_CHUNK = 64 * 1024
#: Two for each connection that is there at the same time.
MOST_WAYS = 32


@dataclass(frozen=True)
class _Way:
    """One direction of a connection."""

    source: socket.socket
    target: socket.socket
    number: int | None = None


class Middleman:
    """Passes connections on to a daemon. What it is told counts for connections that come afterwards."""

    def __init__(self, url: str) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"grpc://127.0.0.1:{self._listener.getsockname()[1]}"
        #: Bytes towards the daemon, by connection, in the order in which these came.
        self.passed_bytes: list[int] = []
        #: Bytes from the daemon, of all connections.
        self.returned_bytes = 0
        self._target = _address(url)
        self._refuses = False
        #: After how many bytes towards the daemon a connection is cut, once, and the first that may be.
        self._cut_bytes, self._cut_from = math.inf, 0
        self._cutting = threading.Lock()
        #: Set when that has happened.
        self.was_cut = threading.Event()
        self._sockets: set[socket.socket] = set()
        #: Connections to pass on, one way. Who is to do that is there before the test is.
        self._ways: SimpleQueue[_Way | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(MOST_WAYS)]
        self._threads.append(threading.Thread(target=self._accept, daemon=True))
        for thread in self._threads:
            thread.start()

    def lead_to(self, url: str) -> None:
        """New connections go to another daemon."""
        self._target = _address(url)

    def refuse(self, refuses: bool) -> None:
        """Whether new connections are closed at once; those that are there go on."""
        self._refuses = refuses

    def cut_after(self, size_bytes: int) -> None:
        """The first of the connections to come that takes so many bytes towards the daemon is cut then;
        further ones are not."""
        with self._cutting:
            self._cut_bytes, self._cut_from = size_bytes, len(self.passed_bytes)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                if self._refuses:
                    here.close()
                    continue
                there = socket.create_connection(self._target)
                self._sockets |= {here, there}
                self.passed_bytes.append(0)
                number = len(self.passed_bytes) - 1
                self._ways.put(_Way(here, there, number))
                self._ways.put(_Way(there, here))

    def _work(self) -> None:
        while (way := self._ways.get()) is not None:
            self._pass(way.source, way.target, way.number)

    def _pass(self, source: socket.socket, target: socket.socket, number: int | None) -> None:
        is_cut = False
        with suppress(OSError):
            while not is_cut and (data := source.recv(_CHUNK)):
                target.sendall(data)
                if number is not None:
                    self.passed_bytes[number] += len(data)
                    is_cut = self._is_to_cut(number)
                else:
                    self.returned_bytes += len(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        if is_cut:
            self.was_cut.set()

    def _is_to_cut(self, number: int) -> bool:
        """Whether a connection is the one that is to be cut, now."""
        with self._cutting:
            if number < self._cut_from or self.passed_bytes[number] < self._cut_bytes:
                return False
            self._cut_bytes = math.inf
            return True

    def close(self) -> None:
        """Ends all connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for _ in self._threads:
            self._ways.put(None)


@contextmanager
def middleman(url: str) -> Iterator[Middleman]:
    """One for a daemon, for as long as the context lasts."""
    made = Middleman(url)
    try:
        yield made
    finally:
        made.close()


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("grpc://").rpartition(":")
    return host, int(port)
