"""A way to a daemon that tests cut, reset and stall, at any byte, and heal again."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_CHUNK = 64 * 1024
SECONDS = 30.0


class CutProxy:
    """Passes connections over TCP on to a daemon, and harms those that are there."""

    def __init__(self, target: str) -> None:
        """`target`: grpc://HOST:PORT or unix:///PATH."""
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"grpc://127.0.0.1:{self.port}"
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._flows = threading.Event()
        self._flows.set()
        self._is_refusing = self._is_closed = False
        #: The bytes after which all connections are cut, and how many have passed.
        self._cut_at: int | None = None
        #: After how many bytes the next cut follows a cut.
        self._again: Callable[[], int] | None = None
        self.passed_bytes = self.cuts = 0
        self._threads = [threading.Thread(target=self._accept, name="cut-proxy", daemon=True)]
        self._threads[0].start()

    def __repr__(self) -> str:
        return f"<CutProxy {self.port}, {self.cuts} cuts>"

    def cut(self, *, reset: bool = False) -> None:
        """End every connection; with `reset`, without what is under way."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
            self.cuts += 1
            self._cut_at = None if self._again is None else self.passed_bytes + self._again()
        for pair in pairs:
            for one in pair:
                with suppress(OSError):
                    if reset:
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        # The other thread still reads, and so it is the close that resets.
                    else:
                        one.shutdown(socket.SHUT_RDWR)
                if reset:
                    with suppress(OSError):
                        one.shutdown(socket.SHUT_RD)
                one.close()

    def cut_after(self, size_bytes: int) -> None:
        """Cut all once so many more bytes have passed, in either direction."""
        with self._lock:
            self._cut_at = self.passed_bytes + size_bytes

    def cut_always(self, again: Callable[[], int] | None) -> None:
        """Cut all after so many more bytes, again and again; None: no more."""
        with self._lock:
            self._again = again
            self._cut_at = None if again is None else self.passed_bytes + again()

    def stall(self) -> None:
        """Pass nothing on; connections stay, and new ones are taken."""
        self._flows.clear()

    def go_on(self) -> None:
        """Pass everything on again, and take new connections."""
        self._is_refusing = False
        self._flows.set()

    def lead_to(self, target: str) -> None:
        """Pass new connections on to another daemon."""
        self._target = target

    def refuse(self) -> None:
        """End new connections at once."""
        self._is_refusing = True

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                if self._is_refusing:
                    here.close()
                    continue
                try:
                    there = self._connect()
                except OSError:
                    here.close()
                    continue
                here.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._pairs.append((here, there))
                for ends in ((here, there), (there, here)):
                    passing = threading.Thread(target=self._pass, args=ends, name="cut-proxy", daemon=True)
                    self._threads.append(passing)
                    passing.start()

    def _connect(self) -> socket.socket:
        if self._target.startswith("unix://"):
            made = socket.socket(socket.AF_UNIX)
            made.connect(self._target.removeprefix("unix://"))
            return made
        host, _, port = self._target.removeprefix("grpc://").rpartition(":")
        made = socket.create_connection((host, int(port)))
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError, ValueError):
            while data := source.recv(_CHUNK):
                self._flows.wait()
                if self._is_closed:
                    break
                with self._lock:
                    room = None if self._cut_at is None else max(0, self._cut_at - self.passed_bytes)
                    self.passed_bytes += len(data)
                if room is not None and room < len(data):
                    target.sendall(data[:room])
                    self.cut()
                    return
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        # The other thread ends too, since both ends are shut down; a socket is closed once.
        source.close()

    def close(self) -> None:
        """End everything."""
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._flows.set()
        self._threads[0].join(SECONDS)
        self.cut()
        for thread in self._threads:
            thread.join(SECONDS)


@contextmanager
def cut_proxy(target: str) -> Iterator[CutProxy]:
    """One for a daemon, for as long as the context lasts."""
    made = CutProxy(target)
    try:
        yield made
    finally:
        made.close()


class RandomCuts:
    """Cuts a proxy again and again, at random moments or bytes, while a context lasts."""

    def __init__(self, proxy: CutProxy, seed: int, pause_seconds: float = 0.05) -> None:
        self._proxy, self._chance, self._pause = proxy, random.Random(seed), pause_seconds
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._cut, name="cuts")

    def _cut(self) -> None:
        while not self._is_over.wait(self._pause * 2 * self._chance.random()):
            if self._chance.random() < 0.5:
                self._proxy.cut_after(self._chance.randrange(1, 4000))
            else:
                self._proxy.cut(reset=self._chance.random() < 0.5)

    def __enter__(self) -> RandomCuts:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(SECONDS)
        # The last one may still wait for its byte.
        self._proxy.cut_always(None)


@contextmanager
def cuts_by_bytes(proxy: CutProxy, seed: int, most_bytes: int) -> Iterator[None]:
    """Cut a proxy at random bytes, up to so many after the cut before, while the context lasts. However
    slow the machine is, some bytes pass between two cuts."""
    chance = random.Random(seed)
    proxy.cut_always(lambda: int(most_bytes ** chance.uniform(0.5, 1.0)))
    try:
        yield
    finally:
        proxy.cut_always(None)
