"""Checks of the other end of a socket, for shared memory: is it on this host, and of this user?"""

from __future__ import annotations

import os
import socket
import struct

#: struct ucred of unix(7): process, user and group; only the first is signed.
_CREDENTIALS = struct.Struct("iII")


def is_of_this_user(peer: socket.socket) -> bool:
    """True if the other end of a unix socket is known to be a process of this user."""
    try:
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        return False
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def is_of_this_host(host: str) -> bool:
    """True if all addresses of a name, or an address, are this host's.

    Tested by binding a socket to each; nothing is sent.
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
        for family, kind, protocol, _, where in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(where)
    except (OSError, UnicodeError):
        return False
    return bool(found)
