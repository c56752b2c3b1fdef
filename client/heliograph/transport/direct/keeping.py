"""The system's knowledge of a TCP connection: whether its other end is gone, and its rate."""

from __future__ import annotations

import socket
from struct import Struct

#: The part of the silence after which the system asks the other end whether it is there.
ASK_PART = 5
#: The segments in a row that the other end leaves unanswered before it counts as gone.
LEAST_UNANSWERED = 2
#: The beginning of struct tcp_info: retransmissions and probes that were not answered, and the
#: milliseconds since the last acknowledgement.
_TCP_INFO = Struct("=2xBB52xI")
#: Further on: the acknowledged bytes, the microseconds in which some were under way, and those of
#: them in which the other end had no room.
_TCP_SENT = Struct("=120xQ40xQQ")


def keep(connection: socket.socket, silence_seconds: float, *, is_read: bool = False) -> None:
    """Have the system break a connection whose other end is silent for so long.

    gRPC's pings notice only that its own connection broke. The system asks only while all bytes are
    acknowledged. `is_read` says that the other end reads all bytes when they come, so that those it
    does not take are a sign that it is gone. Without it, `is_gone` finds that out.
    """
    seconds = max(1, round(silence_seconds / ASK_PART))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    options = {"TCP_KEEPIDLE": seconds, "TCP_KEEPINTVL": seconds, "TCP_KEEPCNT": ASK_PART - 1}
    if is_read:
        # In milliseconds. It also breaks a connection whose other end answers, but has no room.
        options["TCP_USER_TIMEOUT"] = max(1, round(silence_seconds * 1e3))
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def is_gone(connection: socket.socket, silence_seconds: float) -> bool:
    """Return whether bytes for the other end got no answer for so long.

    An end that has no room for them answers. Raises OSError. False where the system does not tell.
    """
    if (option := getattr(socket, "TCP_INFO", None)) is None:
        return False
    told = connection.getsockopt(socket.IPPROTO_TCP, option, _TCP_INFO.size)
    if len(told) < _TCP_INFO.size:
        return False
    retransmissions, probes, silent_ms = _TCP_INFO.unpack(told)
    return bool(max(retransmissions, probes) >= LEAST_UNANSWERED and silent_ms >= silence_seconds * 1e3)


def sent(connection: socket.socket) -> tuple[int, float] | None:
    """Return the acknowledged bytes, and the seconds in which the link was what they waited for.

    None where the system does not tell.
    """
    if (option := getattr(socket, "TCP_INFO", None)) is None:
        return None
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, option, _TCP_SENT.size)
    except OSError:
        return None
    if len(told) < _TCP_SENT.size:
        return None
    acknowledged, busy, without_room = _TCP_SENT.unpack(told)
    return acknowledged, max(0, busy - without_room) / 1e6
