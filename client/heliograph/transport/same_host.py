"""Whether the other end of a socket is on this host, and of this user; for both sides of shared memory."""

from __future__ import annotations

import os
import socket
import struct

#: struct ucred of unix(7): process, user and group; only the first has a sign.
_CREDENTIALS = struct.Struct("iII")


def is_of_this_user(peer: socket.socket) -> bool:
    """Whether the other end of a unix socket is a process of this process's user; not if nobody knows."""
    try:
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        return False
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def is_of_this_host(host: str) -> bool:
    """Whether a name's addresses, or an address, are this host's: whether a socket can be bound to them all.
    Nothing is sent."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
        for family, kind, protocol, _, where in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(where)
    except (OSError, UnicodeError):
        return False
    return bool(found)
