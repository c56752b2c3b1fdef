"""Gives clients of this host memory and command sockets: descriptors over unix sockets, as in
`memory.proto`.

Beside each unix socket that the daemon listens on there is a second one, for clients that share its
folder, also in containers. For clients over TCP there is one in Linux's abstract namespace, visible
only in the daemon's network namespace. Every process there can read its name (/proc/net/unix), so
the name protects nothing: both sides check the user at the other end, and a client must know the
session's secret.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import secrets
import socket
from dataclasses import dataclass
from urllib.parse import unquote

from google.protobuf.message import DecodeError

from heliograph.transport.same_host import is_of_this_host, is_of_this_user
from heliograph_backends.host_memory.sealed import why_no_sealed
from heliograph_proto.addresses import MAX_SOCKET_PATH, Address
from heliograph_proto.codec import encode_error
from heliograph_proto.errors import (
    ConfigurationError,
    HeliographError,
    InternalError,
    LimitExceededError,
    ProtocolError,
)
from heliograph_proto.sessions import SharedMemoryOffer
from heliograph_proto.v1 import memory_pb2
from heliograph_server.config.sockets import bind_socket, unbind
from heliograph_server.rpc.command_socket.sockets import CommandSockets
from heliograph_server.runtime.host_slot import HostSlot
from heliograph_server.session.session import FileOfMemory

logger = logging.getLogger(__name__)

#: Appended to the path of the daemon's socket.
PATH_SUFFIX = ".memory"
#: The largest request.
REQUEST_BYTES = 4096
#: The time limit for the request of a client that connected.
ASK_SECONDS = 2.0
#: The most clients that have connected without a request.
MAX_CONNECTIONS = 64
#: The pause after the system refused a connection, most likely for lack of descriptors.
REST_SECONDS = 1.0


@dataclass(slots=True)
class _Connection:
    """A client that has not sent its request yet."""

    socket: socket.socket
    timer: asyncio.TimerHandle


class MemoryService:
    """Listens beside the daemon's addresses. On the event loop; nothing blocks."""

    def __init__(self, slot: HostSlot, sockets: CommandSockets) -> None:
        self._slot = slot
        self._sockets = sockets
        self._listeners: list[socket.socket] = []
        self._paths: list[Address] = []
        self._connections: dict[int, _Connection] = {}
        #: Timers of sockets that accept no connections for a while.
        self._resting: dict[int, asyncio.TimerHandle] = {}
        self._abstract_name = ""
        #: The reason why no memory is shared; empty if it is.
        self.why_not = "it does not listen for it"

    def __repr__(self) -> str:
        return f"<MemoryService with {len(self._listeners)} sockets>"

    def start(self, addresses: tuple[Address, ...]) -> None:
        """Listen, if memory can be shared. Failures are only logged, since clients can use gRPC."""
        if why := why_no_sealed():
            logger.info("no shared memory: %s", why)
            self.why_not = why
            return
        for address in addresses:
            try:
                self._start(address)
                self.why_not = ""
            except (OSError, ConfigurationError) as error:
                self.why_not = self.why_not and str(error)
                logger.warning("no shared memory for clients of %s: %s", address, error)

    def _start(self, address: Address) -> None:
        if address.scheme == "unix":
            beside = Address("unix", path=address.path + PATH_SUFFIX)
            if len(beside.path.encode()) > MAX_SOCKET_PATH:
                raise ConfigurationError("its path leaves no room for that of a socket beside it")
            self._listen(bind_socket(beside.path))
            self._paths.append(beside)
        elif not self._abstract_name:
            name = f"heliograph-{secrets.token_hex(16)}"
            self._listen(bind_socket(f"\0{name}"))
            self._abstract_name = name

    def _listen(self, listener: socket.socket) -> None:
        listener.listen(MAX_CONNECTIONS)
        listener.setblocking(False)
        self._listeners.append(listener)
        self._watch(listener)

    def _watch(self, listener: socket.socket) -> None:
        self._resting.pop(listener.fileno(), None)
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)

    def offer(self, peer: str) -> SharedMemoryOffer | None:
        """Return the offer of shared memory for a gRPC peer; None if it is on another host."""
        if peer.startswith("unix:"):
            return SharedMemoryOffer(path_suffix=PATH_SUFFIX) if self._paths else None
        if not self._abstract_name or not is_near(peer):
            return None
        return SharedMemoryOffer(abstract_name=self._abstract_name)

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self._rest(listener, error)
            return
        if len(self._connections) >= MAX_CONNECTIONS or not is_of_this_user(client):
            # A stranger learns nothing, not even the reason.
            client.close()
            return
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        number = client.fileno()
        self._connections[number] = _Connection(client, loop.call_later(ASK_SECONDS, self._close, number))
        loop.add_reader(number, self._answer, number)

    def _rest(self, listener: socket.socket, error: OSError) -> None:
        """Pause accepting, since the loop would report the waiting client again and again."""
        logger.warning("memory is not shared for %.0f s: %s", REST_SECONDS, error.strerror)
        loop, number = asyncio.get_running_loop(), listener.fileno()
        loop.remove_reader(number)
        self._resting[number] = loop.call_later(REST_SECONDS, self._watch, listener)

    def _answer(self, number: int) -> None:
        client = self._connections[number].socket
        try:
            request = client.recv(REQUEST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            request = b""
        try:
            if request:
                self._send(client, request)
        except OSError as error:
            logger.debug("a client that asked for memory is gone: %s", error)
        finally:
            self._close(number)

    def _send(self, client: socket.socket, request: bytes) -> None:
        try:
            found = self._find(request)
        except HeliographError as error:
            client.send(memory_pb2.MemoryResponse(error=encode_error(error)).SerializeToString())
            return
        try:
            answer = memory_pb2.MemoryResponse(size_bytes=found.size_bytes, offset_bytes=found.offset_bytes)
            socket.send_fds(client, [answer.SerializeToString()], [found.descriptor])
        finally:
            os.close(found.descriptor)

    def _find(self, message: bytes) -> FileOfMemory:
        """The memory that a client requests. Raises HeliographError."""
        if len(message) == REQUEST_BYTES:
            raise LimitExceededError("a request for memory is too long")
        try:
            request = memory_pb2.MemoryRequest.FromString(message)
        except DecodeError:
            raise ProtocolError("a request for memory could not be decoded") from None
        session = self._slot.host.session(request.session)
        try:
            match request.WhichOneof("what"):
                case "session_memory":
                    return session.share_memory()
                case "tensor":
                    return session.share_tensor(request.tensor)
                case "command_socket":
                    return FileOfMemory(self._sockets.connect(session).detach(), 0)
            raise ProtocolError("a request for memory must name the session's memory or a tensor")
        except HeliographError:
            raise
        except Exception as error:
            logger.exception("memory could not be shared")
            raise InternalError(f"the memory could not be shared: {type(error).__name__}") from None

    def _close(self, number: int) -> None:
        connection = self._connections.pop(number, None)
        if connection is not None:
            asyncio.get_running_loop().remove_reader(number)
            connection.timer.cancel()
            connection.socket.close()

    def close(self) -> None:
        """Stop listening, and close every connection. Idempotent."""
        loop = asyncio.get_running_loop()
        for timer in self._resting.values():
            timer.cancel()
        self._resting.clear()
        for listener in self._listeners:
            loop.remove_reader(listener.fileno())
            listener.close()
        for number in list(self._connections):
            self._close(number)
        for address in self._paths:
            unbind(address)
        self._listeners, self._paths, self._abstract_name = [], [], ""


def is_near(peer: str) -> bool:
    """True if a gRPC peer, such as "ipv4:10.0.0.7:51234", has an address of this host.

    A client in a network namespace of its own has none.
    """
    kind, _, place = unquote(peer).partition(":")
    host, _, _ = place.rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return kind in ("ipv4", "ipv6") and (address.is_loopback or is_of_this_host(str(address)))
