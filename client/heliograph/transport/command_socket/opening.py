"""Requesting the command socket: from a server on this host, or over TCP."""

from __future__ import annotations

import os
import socket

from heliograph.transport.direct.opening import open_direct
from heliograph.transport.shared_memory import ANSWER_SECONDS, SharedMemoryArgument, ask_for
from heliograph_proto import COMMAND_SOCKET
from heliograph_proto.addresses import Address
from heliograph_proto.errors import HeliographError
from heliograph_proto.sessions import SessionInfo
from heliograph_proto.v1 import direct_pb2, memory_pb2

#: The most bytes of a message from the server, whose lists are as long as what it answers.
MOST_BYTES = 2**32 - 1


def open_command_socket(
    address: Address,
    info: SessionInfo,
    argument: SharedMemoryArgument,
    tcp_silence_seconds: float | None,
    seconds: float = ANSWER_SECONDS,
) -> socket.socket | str:
    """Return a connection for the command stream that begins, or why commands go by gRPC.

    It is a unix socket on one host, else a TCP connection, which breaks after this silence of the
    server; None: no TCP connection.
    """
    near = _open_near(address, info, argument, seconds)
    if not isinstance(near, str):
        return near
    if tcp_silence_seconds is None:
        return f"{near}; over TCP: it was turned off by the client: direct=False"
    request = direct_pb2.DirectRequest(command_socket=memory_pb2.CommandSocket())
    try:
        return open_direct(address, info, request, tcp_silence_seconds, seconds)
    except HeliographError as error:
        return f"{near}; over TCP: {error.message}"


def _open_near(
    address: Address, info: SessionInfo, argument: SharedMemoryArgument, seconds: float
) -> socket.socket | str:
    """Return a unix socket to a server on this host, or why there is none."""
    if argument is False:
        return "it was turned off by the client: shared_memory=False"
    if COMMAND_SOCKET not in info.features:
        return "the server does not support it"
    request = memory_pb2.MemoryRequest(session=info.session, command_socket=memory_pb2.CommandSocket())
    try:
        _, descriptor = ask_for(address, info, request, seconds)
    except HeliographError as error:
        return error.message
    try:
        made = socket.socket(fileno=descriptor)
    except OSError as error:
        os.close(descriptor)
        return f"the server sent no socket: {error.strerror}"
    if (made.family, made.type) != (socket.AF_UNIX, socket.SOCK_STREAM):
        made.close()
        return "the server sent another kind of socket"
    return made
