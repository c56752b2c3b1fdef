"""The limit of a TCP connection: bytes of a warm array into a warm array, both ways, and nothing else.

`server` says its port; `client PORT` answers lines "upload|download BYTES RUNS".
"""

from __future__ import annotations

import socket
import struct
import sys

from peer_lines import Bytes, Timed, Warm, answer, end_with_parent, say

HEADER = struct.Struct("<cQ")


def receive(connection: socket.socket, view: memoryview) -> bool:
    """Fills memory; False when the other side is gone."""
    at = 0
    while at < len(view):
        got = connection.recv_into(view[at:])
        if not got:
            return False
        at += got
    return True


def serve() -> None:
    end_with_parent()
    memory, header = Warm(), bytearray(HEADER.size)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        say(listening.getsockname()[1])
        connection, _ = listening.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while receive(connection, memoryview(header)):
            direction, nbytes = HEADER.unpack(header)
            view = memoryview(memory.of(nbytes))
            if direction == b"d":
                connection.sendall(view)
            elif receive(connection, view):
                connection.sendall(b".")


class Client:
    def __init__(self, port: int) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def prepare(self, nbytes: int) -> None:
        pass

    def upload(self, array: Bytes) -> None:
        self._connection.sendall(HEADER.pack(b"u", array.nbytes))
        self._connection.sendall(memoryview(array))
        assert receive(self._connection, memoryview(bytearray(1)))

    def download(self, array: Bytes) -> None:
        self._connection.sendall(HEADER.pack(b"d", array.nbytes))
        assert receive(self._connection, memoryview(array))


if __name__ == "__main__":
    if sys.argv[1] == "server":
        serve()
    else:
        answer(Timed(Client(int(sys.argv[2]))))
