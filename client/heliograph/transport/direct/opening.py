"""Opening TCP connections of a session beside gRPC's: see `direct.proto`."""

from __future__ import annotations

import hmac
import socket
import threading
import time

from google.protobuf.message import DecodeError

from heliograph.transport.direct.keeping import keep
from heliograph_proto import DIRECT
from heliograph_proto.addresses import Address
from heliograph_proto.codec import decode_error
from heliograph_proto.codec.frames import FrameReader, framed
from heliograph_proto.errors import HeliographError, LimitExceededError, UnavailableError, UnsupportedError
from heliograph_proto.sessions import DirectOffer, SessionInfo
from heliograph_proto.v1 import direct_pb2

#: The time to connect and for the server's answer.
DIRECT_SECONDS = 1.0
#: The time for which an address that let connections time out is not tried again.
AVOIDED_SECONDS = 60.0
#: The most addresses that are remembered for that.
MOST_AVOIDED = 256
#: The most addresses of one name that are tried.
MOST_PLACES = 4
#: The longest ticket: the server has these bytes sent to a port of its choice.
TICKET_BYTES = 64
#: The largest answer.
ANSWER_BYTES = 65_536

#: When addresses may be tried again.
_avoided: dict[str, float] = {}
_lock = threading.Lock()


def open_direct(
    address: Address,
    info: SessionInfo,
    request: direct_pb2.DirectRequest,
    silence_seconds: float,
    seconds: float = DIRECT_SECONDS,
) -> socket.socket:
    """Return a connection that the server has accepted; its ticket is filled in here.

    It breaks after `silence_seconds` without a sign of the server.

    Raises UnsupportedError if none is offered, UnavailableError if the port cannot be reached, or
    the server's error.
    """
    if DIRECT not in info.features or info.direct is None:
        raise UnsupportedError("the server takes no direct connections")
    return open_offered(address, info.direct, request, silence_seconds, seconds)


def open_offered(
    address: Address,
    offer: DirectOffer,
    request: direct_pb2.DirectRequest,
    silence_seconds: float,
    seconds: float = DIRECT_SECONDS,
) -> socket.socket:
    """As `open_direct`, for an offer that came by gRPC from this address."""
    _check(address, offer)
    if time.monotonic() < _avoided.get(str(address), 0.0):
        raise UnavailableError(f"port {offer.port} of {address.host} did not answer a short time ago")
    request.ticket = offer.ticket
    end, why = time.monotonic() + min(seconds, DIRECT_SECONDS), ""
    try:
        # Names in ASCII need no codec, which may be unreadable to this user.
        host = address.host.encode("ascii") if address.host.isascii() else address.host
        found = socket.getaddrinfo(host, offer.port, type=socket.SOCK_STREAM)[:MOST_PLACES]
        for family, kind, protocol, _, where in found:
            try:
                made = socket.socket(family, kind, protocol)
            except OSError as error:
                # This family is off in the system; another address may have another one.
                why = str(error)
                continue
            try:
                made.settimeout(max(0.001, end - time.monotonic()))
                made.connect(where)
                keep(made, silence_seconds, is_read=request.HasField("transfers"))
                _ask(made, request, offer, end)
            except (OSError, HeliographError) as error:
                made.close()
                why = str(error)
                if isinstance(error, TimeoutError):
                    _avoid(address)
                    break
            except BaseException:
                made.close()
                raise
            else:
                made.settimeout(None)
                return made
    except (OSError, UnicodeError) as error:
        why = str(error)
    raise UnavailableError(f"port {offer.port} of {address.host} takes no direct connections: {why}")


def _check(address: Address, offer: DirectOffer) -> None:
    if not 0 < offer.port < 2**16:
        raise UnsupportedError("the server takes no direct connections")
    if address.is_tls or address.port not in offer.own_ports:
        raise UnsupportedError("a proxy or a tunnel is between this client and the server")
    if len(offer.ticket) > TICKET_BYTES:
        raise UnsupportedError(f"the server offers a ticket of {len(offer.ticket):,} bytes")


def _ask(made: socket.socket, request: direct_pb2.DirectRequest, offer: DirectOffer, end: float) -> None:
    """Send the request, and check the answer. Raises OSError, HeliographError."""
    made.sendall(framed(request.SerializeToString()))
    frames, messages = FrameReader(ANSWER_BYTES), list[bytes]()
    while not messages:
        made.settimeout(max(0.001, end - time.monotonic()))
        if not (data := made.recv(ANSWER_BYTES)):
            raise UnavailableError("it ended the connection")
        try:
            messages = frames.feed(data)
        except LimitExceededError:
            raise UnavailableError("another program answers") from None
    try:
        answer = direct_pb2.DirectResponse.FromString(messages[0])
    except DecodeError:
        raise UnavailableError("another program answers") from None
    if answer.HasField("error"):
        raise decode_error(answer.error)
    if len(messages) > 1 or not frames.is_empty or not hmac.compare_digest(answer.proof, offer.proof):
        raise UnavailableError("another program answers")


def _avoid(address: Address) -> None:
    with _lock:
        _avoided[str(address)] = time.monotonic() + AVOIDED_SECONDS
        if len(_avoided) > MOST_AVOIDED:
            del _avoided[next(iter(_avoided))]
