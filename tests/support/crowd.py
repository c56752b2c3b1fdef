"""Connections that mean no call: `python crowd.py PORT COUNT` opens so many at once, answers their pings,
says how many there are, and goes when its standard input ends. A process of its own has its own descriptors.
"""

from __future__ import annotations

import selectors
import socket
import sys
from contextlib import suppress

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING = 4, 6
HEADER_BYTES = 9
SECONDS = 60.0


def frame(kind: int, flags: int = 0, payload: bytes = b"", stream: int = 0) -> bytes:
    """One frame of HTTP/2."""
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags))
    return head + stream.to_bytes(4, "big") + payload


class Connection:
    """One that is idle and alive."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
        self.socket.sendall(PREFACE + frame(SETTINGS))
        self._read = b""

    def answer(self) -> bool:
        """Reads what came, and acknowledges settings and pings. Whether it is still there."""
        data = b""
        with suppress(OSError):
            data = self.socket.recv(65536)
        self._read += data
        while len(self._read) >= HEADER_BYTES:
            end = HEADER_BYTES + int.from_bytes(self._read[:3], "big")
            if len(self._read) < end:
                break
            kind, flags, payload = self._read[3], self._read[4], self._read[HEADER_BYTES:end]
            if kind in (SETTINGS, PING) and not flags & 1:
                with suppress(OSError):
                    self.socket.sendall(frame(kind, 1, payload if kind == PING else b""))
            self._read = self._read[end:]
        return bool(data)


def main(port: int, count: int) -> None:
    """Opens them, and keeps them until nobody needs them any more."""
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        for _ in range(count):
            one = Connection(port)
            selector.register(one.socket, selectors.EVENT_READ, one)
        told = False
        while True:
            for key, _ in selector.select(0.2):
                if key.data is None:
                    return
                if not key.data.answer():
                    selector.unregister(key.fileobj)
                    key.data.socket.close()
            if not told:
                # The first answers are read: the server knows them.
                print(len(selector.get_map()) - 1, flush=True)
                told = True


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
