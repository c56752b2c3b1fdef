"""Noticing that the other end of a TCP connection is gone, for clients and servers."""

from __future__ import annotations

import socket

#: The part of the silence after which the system asks the other end whether it is there.
ASK_PART = 5


def keep(connection: socket.socket, silence_seconds: float) -> None:
    """Have the system break a connection whose other end is silent for so long.

    gRPC's pings notice only that its own connection broke.
    """
    seconds = max(1, round(silence_seconds / ASK_PART))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (
        ("TCP_KEEPIDLE", seconds),
        ("TCP_KEEPINTVL", seconds),
        ("TCP_KEEPCNT", ASK_PART - 1),
        # Of bytes that the other end does not acknowledge. In milliseconds.
        ("TCP_USER_TIMEOUT", max(1, round(silence_seconds * 1e3))),
    ):
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
