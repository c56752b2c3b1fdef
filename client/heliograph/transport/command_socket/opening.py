"""Requesting the command socket from a server on this host."""

from __future__ import annotations

import os
import socket

from heliograph.transport.shared_memory import ANSWER_SECONDS, SharedMemoryArgument, ask_for
from heliograph_proto import COMMAND_SOCKET
from heliograph_proto.addresses import Address
from heliograph_proto.errors import HeliographError
from heliograph_proto.sessions import SessionInfo
from heliograph_proto.v1 import memory_pb2

#: The most bytes of a message from the server, whose lists are as long as what it answers.
MOST_BYTES = 2**32 - 1


def open_command_socket(
    address: Address, info: SessionInfo, argument: SharedMemoryArgument, seconds: float = ANSWER_SECONDS
) -> socket.socket | None:
    """Return a connection for the command stream that begins; None to use gRPC for it."""
    if argument is False or COMMAND_SOCKET not in info.features:
        return None
    request = memory_pb2.MemoryRequest(session=info.session, command_socket=memory_pb2.CommandSocket())
    try:
        _, descriptor = ask_for(address, info, request, seconds)
    except HeliographError:
        return None
    try:
        made = socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        return None
    if (made.family, made.type) != (socket.AF_UNIX, socket.SOCK_STREAM):
        made.close()
        return None
    return made
