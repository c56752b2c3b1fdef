"""The port at which sessions and streams of values open TCP connections beside gRPC's: see
`direct.proto`.

Every host that reaches the daemon can connect, so nothing is said before a request has come whose
ticket was offered. On the event loop, except where it says otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

from google.protobuf.message import DecodeError

from heliograph.transport.direct.keeping import ASK_PART, is_gone, keep
from heliograph_backends.host_memory.sealed import FILES
from heliograph_proto.addresses import Address
from heliograph_proto.codec import encode_error
from heliograph_proto.codec.frames import FrameReader, framed
from heliograph_proto.errors import (
    HeliographError,
    LimitExceededError,
    ProtocolError,
    SessionClosedError,
)
from heliograph_proto.sessions import DirectOffer
from heliograph_proto.v1 import direct_pb2
from heliograph_server.rpc.command_socket.askers import REQUEST_BYTES, Askers, Verdict
from heliograph_server.rpc.command_socket.sockets import CommandSockets
from heliograph_server.session.session import Session

logger = logging.getLogger(__name__)

#: Takes a stream's connection, and what is called when it is closed.
TakesStream: TypeAlias = Callable[[socket.socket, Callable[[], None]], None]

#: Of tickets and proofs.
SECRET_BYTES = 32


class DirectPort:
    """Takes connections of sessions. `take_transfers` receives those for bytes.

    It owns the connection if it returns, and may raise LimitExceededError. A connection breaks
    after `silence_seconds` without a sign of the client.
    """

    def __init__(
        self,
        sockets: CommandSockets,
        take_transfers: Callable[[Session, socket.socket], None],
        silence_seconds: float,
    ) -> None:
        self._sockets, self._take_transfers = sockets, take_transfers
        self._askers = Askers(lambda client: True, self._asked, "direct connections are not taken")
        #: Sessions, and takers of a stream's connection, and the proofs for them, by ticket.
        self._offered: dict[bytes, tuple[Session | TakesStream, bytes]] = {}
        self._silence_seconds = silence_seconds
        self._port = 0
        self._own_ports: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"<DirectPort {self._port or 'closed'}, {len(self._offered)} offers>"

    @property
    def port(self) -> int:
        """Its number; 0: it is not open."""
        return self._port

    def start(self, addresses: Sequence[Address], port: int) -> None:
        """Listen on the hosts of the addresses over TCP, at this port or any free one (0).

        Failures are only logged, since clients can use gRPC. With TLS at any address nothing is
        offered: these connections have none.
        """
        plain = [one for one in addresses if one.scheme in ("grpc", "grpcs")]
        if not plain or any(one.is_tls for one in plain):
            return
        self._own_ports = tuple(one.port for one in plain)
        for host in dict.fromkeys(one.host for one in plain):
            for family, where in _places(host):
                try:
                    self._listen(family, where, self._port or port)
                except OSError as error:
                    logger.warning("no direct connections at %s: %s", where, error.strerror)

    def _listen(self, family: int, host: str, port: int) -> None:
        both = family == socket.AF_INET6 and host == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server((host, port), family=family, dualstack_ipv6=both)
        self._port = listener.getsockname()[1]
        self._askers.listen(listener)

    def offer(self, session: Session, peer: str) -> DirectOffer | None:
        """Return the offer for a session of a gRPC peer; None if there is none. One before is void."""
        for earlier in [one for one, (owner, _) in tuple(self._offered.items()) if owner is session]:
            self.withdraw(earlier)
        if (made := self._offer(session, peer)) is None:
            return None
        session.when_closing[self] = lambda _: self.withdraw(made.ticket)
        if session.closed is not None:
            self.withdraw(made.ticket)
        return made

    def offer_stream(self, take: TakesStream, peer: str) -> DirectOffer | None:
        """As `offer`, for a stream of values, until `withdraw`."""
        return self._offer(take, peer)

    def _offer(self, owner: Session | TakesStream, peer: str) -> DirectOffer | None:
        if not self._port or not peer.startswith(("ipv4:", "ipv6:")):
            return None
        ticket, proof = secrets.token_bytes(SECRET_BYTES), secrets.token_bytes(SECRET_BYTES)
        self._offered[ticket] = owner, proof
        return DirectOffer(self._port, ticket, proof, self._own_ports)

    def withdraw(self, ticket: bytes) -> None:
        """Forget an offer. From any thread. Idempotent."""
        self._offered.pop(ticket, None)

    def _asked(self, client: socket.socket, data: bytes) -> Verdict:
        frames = FrameReader(REQUEST_BYTES)
        try:
            messages = frames.feed(data)
        except LimitExceededError:
            return Verdict.CLOSE
        if not messages:
            return Verdict.MORE
        answer, verdict = direct_pb2.DirectResponse(), Verdict.KEPT
        try:
            if len(messages) > 1 or not frames.is_empty:
                raise ProtocolError("a direct connection begins with one request")
            answer.proof = self._take(client, messages[0])
        except HeliographError as error:
            answer.error.CopyFrom(encode_error(error))
            verdict = Verdict.CLOSE
        except OSError:
            return Verdict.CLOSE
        # It is the first on the connection. A client that is gone is noticed by its owner.
        with suppress(OSError):
            client.send(framed(answer.SerializeToString()))
        return verdict

    def _take(self, client: socket.socket, message: bytes) -> bytes:
        """Give the connection to its new owner, and return the proof."""
        try:
            request = direct_pb2.DirectRequest.FromString(message)
        except DecodeError:
            raise ProtocolError("a request for a direct connection could not be decoded") from None
        owner, proof = self._offered.get(request.ticket) or (None, b"")
        if owner is None:
            raise SessionClosedError("no session of this server has the ticket")
        keep(client, self._silence_seconds)
        match request.WhichOneof("what"), owner:
            case "command_socket", Session():
                self._sockets.keep(owner, client)
                self._watch(client)
            case "transfers", Session():
                FILES.take()
                try:
                    self._take_transfers(owner, client)
                except BaseException:
                    FILES.give()
                    raise
            case "exchange", taker if not isinstance(taker, Session):
                FILES.take()
                self.withdraw(request.ticket)
                # Once the proof is sent.
                asyncio.get_running_loop().call_soon(taker, client, FILES.give)
                self._watch(client)
            case _:
                raise ProtocolError("a request for a direct connection must say what it is for")
        return proof

    def _watch(self, client: socket.socket) -> None:
        """Break a command socket whose client is gone, again and again until it is closed."""
        # Closed by another thread, or broken already.
        with suppress(OSError):
            if client.fileno() < 0:
                return
            if not is_gone(client, self._silence_seconds):
                later = self._silence_seconds / ASK_PART
                asyncio.get_running_loop().call_later(later, self._watch, client)
                return
            logger.debug("a client acknowledges nothing on its command socket")
            client.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._askers.close()
        self._port = 0


def _places(host: str) -> list[tuple[int, str]]:
    """The families and addresses of a host, each once."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys((int(family), str(where[0])) for family, _, _, _, where in found))
