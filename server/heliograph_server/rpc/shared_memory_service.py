"""Gives clients of this host memory and command sockets: descriptors over unix sockets, as in
`memory.proto`.

Beside each unix socket that the daemon listens on there is a second one, for clients that share its
folder, also in containers. For clients over TCP there is one in Linux's abstract namespace, visible
only in the daemon's network namespace. Every process there can read its name (/proc/net/unix), so
the name protects nothing: both sides check the user at the other end, and a client must know the
session's secret.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import socket
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
from heliograph_server.rpc.command_socket.askers import REQUEST_BYTES, Askers, Verdict
from heliograph_server.rpc.command_socket.sockets import CommandSockets
from heliograph_server.runtime.host_slot import HostSlot
from heliograph_server.session.identity import FileOfMemory

logger = logging.getLogger(__name__)

#: Appended to the path of the daemon's socket.
PATH_SUFFIX = ".memory"


class MemoryService:
    """Listens beside the daemon's addresses. On the event loop; nothing blocks."""

    def __init__(self, slot: HostSlot, sockets: CommandSockets) -> None:
        self._slot = slot
        self._sockets = sockets
        self._askers = Askers(is_of_this_user, self._asked, "memory is not shared")
        self._paths: list[Address] = []
        self._abstract_name = ""
        #: The reason why no memory is shared; empty if it is.
        self.why_not = "it does not listen for it"

    def __repr__(self) -> str:
        return f"<MemoryService with {self._askers.count} sockets>"

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
            self._askers.listen(bind_socket(beside.path))
            self._paths.append(beside)
        elif not self._abstract_name:
            name = f"heliograph-{secrets.token_hex(16)}"
            self._askers.listen(bind_socket(f"\0{name}"))
            self._abstract_name = name

    def offer(self, peer: str) -> SharedMemoryOffer | None:
        """Return the offer of shared memory for a gRPC peer; None if it is on another host."""
        if peer.startswith("unix:"):
            return SharedMemoryOffer(path_suffix=PATH_SUFFIX) if self._paths else None
        if not self._abstract_name or not is_near(peer):
            return None
        return SharedMemoryOffer(abstract_name=self._abstract_name)

    def _asked(self, client: socket.socket, request: bytes) -> Verdict:
        # A packet is a whole request.
        self._send(client, request)
        return Verdict.CLOSE

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

    def close(self) -> None:
        """Stop listening, and close every connection. Idempotent."""
        self._askers.close()
        for address in self._paths:
            unbind(address)
        self._paths, self._abstract_name = [], ""


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
