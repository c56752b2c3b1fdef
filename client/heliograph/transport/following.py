"""A session that goes to another daemon: who may send its client where, with which credentials.

A client follows its daemon to another one only if it loses nothing by it: no certificate that was
checked, no token in the clear, no way into its own host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import grpc

from heliograph.core.future import logger
from heliograph.core.interrupts import InThread
from heliograph.transport import handshake
from heliograph.transport.channels import (
    Options,
    credentials_elsewhere,
    credentials_of,
    fetch_pinned,
    open_channel,
)
from heliograph.transport.reconnecting import DURABLE
from heliograph.transport.shared_memory import SharedMemoryArgument, SharedSpace, seconds_for, share
from heliograph_proto.addresses import Address, Credentials, parse_address
from heliograph_proto.digests import moved_secret
from heliograph_proto.errors import (
    HeliographError,
    InvalidArgumentError,
    MovedError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedError,
)
from heliograph_proto.sessions import SessionInfo
from heliograph_proto.v1 import device_pb2

#: The time for the answer of a daemon to which a session may go.
LOOK_SECONDS = 10.0
#: When a daemon that drains asks for the move: the time for commands under way to end, in which later
#: ones wait, and the pause before the next attempt.
ASKED_SECONDS, ASKED_PAUSE_SECONDS = 10.0, 2.0
_LIST_DEVICES = "/heliograph.v1.DeviceService/ListDevices"
#: The reason why a session shares no memory until the other daemon has offered its own.
MOVED = "the session came from another daemon"


@dataclass(frozen=True, slots=True)
class Destination:
    """A daemon to which a session goes."""

    address: Address
    credentials: Credentials

    @property
    def url(self) -> str:
        """The address as daemons name it."""
        return self.address.plain


def named_destination(url: str | Address, own: Address, credentials: Credentials) -> Destination:
    """Return the daemon that the user names. Raises InvalidArgumentError.

    A token in the URL is for that daemon; without one the session's own is shown there.
    """
    address = parse_address(url) if isinstance(url, str) else url
    if address.scheme == "local" or address.members:
        raise InvalidArgumentError(
            f"a session cannot move to {address}", advice="name a daemon: grpc://host:port"
        )
    address = replace(address, device=own.device)
    if address.token:
        shown = credentials_of(address, ca=credentials.ca or None)
        shown = replace(shown, certificate=credentials.certificate, key=credentials.key)
    else:
        in_clear = credentials.in_clear or address.insecure
        shown = credentials_elsewhere(replace(credentials, in_clear=in_clear), own, address)
    if credentials.token and not shown.token:
        raise InvalidArgumentError(
            f"the session's token would go to {address} unencrypted, where others may read it",
            advice="move it to grpcs://; or write grpc://HOST:PORT?insecure=yes if the network is trusted",
        )
    return Destination(address, shown)


def followed(
    moved: MovedError, own: Address, credentials: Credentials, named: Destination | None
) -> Destination:
    """Return the daemon that a daemon says has the session.

    `named`: the one to which the user moves it. Raises PermissionDeniedError for one that the
    client does not follow to.
    """
    if named is not None and named.url == moved.url:
        return named
    return trusted(moved.url, own, credentials)


def trusted(url: str, own: Address, credentials: Credentials) -> Destination:
    """Return a daemon that a daemon names. Raises PermissionDeniedError."""
    try:
        other = parse_address(url)
    except InvalidArgumentError as error:
        raise _refused(url, error.message) from None
    if (why := _why_not(own, credentials, other)) is not None:
        raise _refused(url, why)
    address = replace(other, device=own.device, insecure=own.insecure and not other.is_tls)
    return Destination(address, credentials_elsewhere(credentials, own, other))


def _why_not(own: Address, credentials: Credentials, other: Address) -> str | None:
    """Return why a client does not follow its daemon to another one."""
    if other.scheme == "local" or other.token or other.pin or other.insecure:
        return "that is no plain address of a daemon"
    if own.is_tls and not other.is_tls:
        return "that connection would not be encrypted, as this one is"
    if own.pin:
        return "this daemon is known by the fingerprint of its certificate, and the other one is not"
    if other.is_loopback and not own.is_loopback:
        return "that is an address of this host, and the daemon is on another one"
    if credentials.token and not credentials_elsewhere(credentials, own, other).token:
        return "the token would go there unencrypted"
    return None


def _refused(url: str, why: str) -> PermissionDeniedError:
    return PermissionDeniedError(
        f"the daemon sends the session to {url:.200}, and this client does not follow: {why}",
        advice="connect there, compile and run; or move the session yourself: session.move(url)",
    )


def info_there(info: SessionInfo, moved: MovedError) -> SessionInfo:
    """Return what a client knows of its session at the other daemon, which makes its own offers."""
    secret = moved_secret(info.session, moved.proof)
    return replace(info, session=secret, direct=None, shared_memory=None)


def renewed(
    address: Address,
    info: SessionInfo,
    answer: bytes | grpc.RpcError,
    argument: SharedMemoryArgument,
    end: float,
) -> tuple[SessionInfo, SharedSpace | str]:
    """Return what a client knows of its session with the offers that a daemon answered with, and
    the memory that both share, or why there is none. Blocks until a moment.

    Memory that was required at the first daemon is only wished for here. Raises the errors of
    `handshake.with_offers`.
    """
    info = handshake.with_offers(info, answer, address)
    if info.durable:
        return info, DURABLE
    return info, share(address, info, argument and "auto", seconds_for(end))


def stays() -> UnsupportedError:
    """Return the error of a session that cannot move."""
    return UnsupportedError(
        "the session belongs to its connection, or its daemon is older, so it cannot move",
        advice="connect with reconnect=True to a daemon of this version that gives leases",
    )


def moves_already() -> UnavailableError:
    """Return the error of a move while another one is under way."""
    return UnavailableError("the session is being moved already", advice="wait for that move")


def is_there(destination: Destination, address: Address) -> bool:
    """True if a session is where it is to move."""
    return destination.url == address.plain


def settling() -> str:
    """Return what a move waits for, in the words of an error."""
    return "waiting for the end of commands under way, so that the session can move"


def tell_staying(url: str, error: HeliographError) -> None:
    """Log why a session does not go to the daemon that its own names, which drains."""
    logger.warning("the session does not move to %.200s: %s", url, error.message)


def look(destination: Destination, options: Options) -> None:
    """Check that a daemon answers this client. Blocks.

    Raises UnavailableError, UnauthenticatedError, PermissionDeniedError, and others.
    """
    InThread(lambda: _look(destination, options)).result()


def _look(destination: Destination, options: Options) -> None:
    address = destination.address
    fetch_pinned(address, destination.credentials, LOOK_SECONDS)
    channel = open_channel(address, options, destination.credentials)
    error: HeliographError | None = None
    try:
        ask: Any = channel.unary_unary(_LIST_DEVICES, None, None)
        answer = ask(device_pb2.ListDevicesRequest().SerializeToString(), timeout=LOOK_SECONDS)
        device_pb2.ListDevicesResponse.FromString(answer)
    except grpc.RpcError as broken:
        error = handshake.open_error(broken, address, LOOK_SECONDS, destination.credentials)
    except Exception as broken:
        error = UnavailableError(f"{address} sent an answer that cannot be read: {broken}")
    finally:
        channel.close()
    if error is not None:
        raise error
