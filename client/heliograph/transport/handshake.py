"""Channel options, handshake messages, and errors from gRPC statuses, for both shells."""

from __future__ import annotations

import os
import socket
import stat
import threading
from dataclasses import dataclass, replace
from typing import Any

import grpc

from heliograph.core.future import logger
from heliograph.transport.channels import NO_CREDENTIALS
from heliograph.transport.tenant import tenant_secret
from heliograph_proto import FEATURES, HAND_OVER, MOVE, VERSION_MAX, VERSION_MIN, __version__
from heliograph_proto.addresses import Address, Credentials
from heliograph_proto.codec import decode, packing
from heliograph_proto.codec.status import error_from_metadata
from heliograph_proto.errors import (
    CancelledError,
    DeadlineExceededError,
    HeliographError,
    InternalError,
    LimitExceededError,
    MovedError,
    NotHeliographError,
    PermissionDeniedError,
    ProtocolError,
    SessionClosedError,
    UnauthenticatedError,
    UnavailableError,
)
from heliograph_proto.sessions import Offers, SessionInfo
from heliograph_proto.v1 import session_pb2

EXECUTE = "/heliograph.v1.CommandService/Execute"
OPEN = "/heliograph.v1.SessionService/Open"
CLOSE = "/heliograph.v1.SessionService/Close"
OFFERS = "/heliograph.v1.SessionService/GetOffers"
UPLOAD = "/heliograph.v1.BulkService/Upload"
UPLOAD_SHARED = "/heliograph.v1.BulkService/UploadShared"
DOWNLOAD = "/heliograph.v1.BulkService/Download"

#: The request to a server, in words for errors.
TAKE_AN_UPLOAD = "take an upload"
#: The time for closing a session.
CLOSE_SECONDS = 2.0
#: The time that frees may gather before they are sent.
GATHER_SECONDS = 0.005

#: A server that has been silent for so long counts as gone.
SILENCE_SECONDS = 25.0
#: The bounds of that time as an argument.
LEAST_SILENCE_SECONDS, MOST_SILENCE_SECONDS = 0.25, 3600.0
#: The part of that time after which a ping is sent; the rest is for its answer.
PING_PART = 0.2


def channel_options(silence_seconds: float = SILENCE_SECONDS) -> tuple[tuple[str, Any], ...]:
    """Return the options of a channel on which a server counts as gone after this much silence."""
    ping_ms = round(silence_seconds * PING_PART * 1e3)
    answer_ms = round(silence_seconds * (1 - PING_PART) * 1e3)
    return (
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.keepalive_time_ms", ping_ms),
        ("grpc.keepalive_timeout_ms", answer_ms),
        # Without this a ping may take 60 s, whatever the keepalive timeout is (grpcio 1.85).
        ("grpc.http2.ping_timeout_ms", answer_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A session repeats by itself what may be repeated.
        ("grpc.enable_retries", 0),
        # A channel that failed to connect fails its calls for this time.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # Bulk data has its own connection only if channels do not share them.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    )


#: The options of a channel with the default silence.
CHANNEL_OPTIONS = channel_options()

_REFUSED, _NO_FILE = "connection refused", "there is no such file"
_NO_DAEMON = "the socket is there, but no daemon listens on it"
_ADVICE = "is the daemon running? start one with: heliograph serve"
_TOKEN_ADVICE = (
    "pass a token: hg.connect(url, token=...), $HELIOGRAPH_TOKEN, or the URL that heliograph serve printed"
)


@dataclass(frozen=True, slots=True)
class Wish:
    """A client's wish for its session to outlive its connection, or its daemon."""

    #: The time for which it outlives a broken connection; 0: not at all.
    lease_ms: int = 0
    #: True if it is to outlive the daemon.
    is_durable: bool = False
    #: The time between snapshots; 0: the server's.
    snapshot_ms: int = 0
    #: True for a head: the session never goes to another daemon, but its values do.
    is_head: bool = False


NO_WISH = Wish()
_OF_HEADS = (*(one for one in FEATURES if one != MOVE), HAND_OVER)


def open_request(wish: Wish = NO_WISH) -> bytes:
    """Return the first message, with the versions and features of this client, and its wish."""
    return session_pb2.OpenRequest(
        version_min=VERSION_MIN,
        version_max=VERSION_MAX,
        features=(*(_OF_HEADS if wish.is_head else FEATURES), *packing.features()),
        client=f"heliograph-python/{__version__}",
        tenant_secret=tenant_secret(),
        lease_ms=wish.lease_ms,
        durable=wish.is_durable,
        snapshot_ms=wish.snapshot_ms,
    ).SerializeToString()


def decode_open(answer: bytes, address: Address) -> SessionInfo:
    """Return the result of the handshake. Raises NotHeliographError for a meaningless answer."""
    try:
        info = decode(session_pb2.OpenResponse.FromString(answer), SessionInfo)
    except Exception as error:
        raise NotHeliographError(f"{address} sent an answer that cannot be read: {error}") from None
    if not (info.session and info.devices and VERSION_MIN <= info.version <= VERSION_MAX):
        raise NotHeliographError(f"{address} sent an answer without session, devices or version")
    limits = info.limits
    if min(limits.in_flight_bytes, limits.chunk_bytes, limits.message_bytes, limits.graph_bytes) < 1:
        raise NotHeliographError(f"{address} sent limits of 0")
    return info


def offers_request(session: bytes) -> bytes:
    """Return the request for the offers of the daemon that has a session now."""
    return session_pb2.GetOffersRequest(session=session).SerializeToString()


def with_offers(info: SessionInfo, answer: bytes | grpc.RpcError, address: Address) -> SessionInfo:
    """Return what a client knows of its session, with a daemon's offers.

    An older daemon makes none. Raises the error with which it refused, or the break of the
    connection.
    """
    if isinstance(answer, grpc.RpcError):
        code: Any = getattr(answer, "code", lambda: None)()
        if code is not grpc.StatusCode.UNIMPLEMENTED or is_typed(answer):
            raise stream_error(answer, address, has_lease=True)
        return info
    try:
        found = decode(session_pb2.GetOffersResponse.FromString(answer), Offers)
    except Exception as error:
        raise broken(address, f"it sent offers that cannot be read: {error}") from None
    return replace(info, shared_memory=found.shared_memory, direct=found.direct)


def close_request(session: bytes) -> bytes:
    """Return the last message."""
    return session_pb2.CloseRequest(session=session).SerializeToString()


def typed_error(error: Any, address: Address, doing: str) -> HeliographError:
    """Return the error of a status: the server's own if it sent one, otherwise that of the code."""
    forget_traceback(error)
    trailing = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    if (sent := error_from_metadata(tuple(trailing or ()))) is not None:
        return sent
    details = error.details() or ""
    match error.code():
        case grpc.StatusCode.UNAVAILABLE:
            return UnavailableError(f"cannot reach {address} to {doing}: {details}", advice=_ADVICE)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceededError(
                f"{address} did not {doing} in time",
                advice="is it a Heliograph daemon? check it with: heliograph health --server URL",
            )
        case grpc.StatusCode.CANCELLED:
            return CancelledError(f"cancelled: {doing}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return LimitExceededError(f"{address} refused to {doing}: {details}")
        case grpc.StatusCode.UNAUTHENTICATED:
            return UnauthenticatedError(
                f"{address} does not accept this client's credentials to {doing}: {details}",
                advice=_TOKEN_ADVICE,
            )
        case grpc.StatusCode.PERMISSION_DENIED:
            return PermissionDeniedError(f"{address} does not let this client {doing}: {details}")
        case grpc.StatusCode.UNIMPLEMENTED:
            return ProtocolError(f"{address} does not know how to {doing}: {details}")
    return InternalError(f"{address} failed to {doing}: {error.code().name}: {details}")


def is_typed(error: Any) -> bool:
    """True if the server itself sent the error of a status."""
    trailing = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    return error_from_metadata(tuple(trailing or ())) is not None


def is_moved(error: Any) -> bool:
    """True if a status says that another daemon has the session."""
    trailing = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    return isinstance(error_from_metadata(tuple(trailing or ())), MovedError)


def upload_error(broken: Exception, address: Address) -> HeliographError:
    """Return the error of a failed upload: gRPC's, Heliograph's, or a progress function's."""
    if isinstance(broken, grpc.RpcError):
        return typed_error(broken, address, TAKE_AN_UPLOAD)
    # Without the traceback, which would keep the call alive.
    if isinstance(broken, HeliographError):
        forget_traceback(broken)
        return broken
    words = f"an upload failed: {type(broken).__name__}: {broken}"
    logger.error("%s", words)
    return InternalError(words)


def forget_traceback(error: Any) -> None:
    """Drop the traceback of a call that gRPC has raised.

    The traceback refers to itself and would keep the call until a garbage collection, perhaps the
    interpreter's last (see `blocking.py`).
    """
    if isinstance(error, BaseException):
        error.__traceback__ = None


#: gRPC's words if the other side never spoke HTTP/2. Without them a connection was there and broke.
_NO_CONNECTION = "failed to connect"
#: gRPC's words if a certificate has the host's name as its common name, which gRPC accepts at first,
#: and others as alternative names, of which alone a call may be to one.
_WRONG_NAME = "does not match SSL server name"
#: The server's message while its devices start, and the pause before the next request.
STARTING = "the server is starting its devices"
START_SECONDS = 0.25


def open_error(
    error: Any, address: Address, timeout: float, credentials: Credentials = NO_CREDENTIALS
) -> HeliographError:
    """Return why no session was opened: no server, silence, no trust, another program, or a break."""
    found = typed_error(error, address, "open a session")
    # An HTTP status in gRPC's words is the answer of another program.
    is_lost = isinstance(found, UnavailableError) and "http" not in found.message.lower()
    if is_lost and not is_typed(error):
        cause, advice = why_unreachable(address)
        if cause:
            return UnavailableError(f"no server answers at {address}: {cause}", advice=advice)
    is_silent = isinstance(found, DeadlineExceededError) and address.is_tls
    is_misnamed = isinstance(found, UnauthenticatedError) and _WRONG_NAME in found.message
    may_be_tls = (is_silent or is_misnamed or isinstance(found, UnavailableError)) and not is_typed(error)
    if may_be_tls and (distrusted := _why_no_trust(address, credentials, is_misnamed)) is not None:
        return distrusted
    if isinstance(found, UnavailableError | ProtocolError | InternalError):
        if is_typed(error):
            return found
        if is_lost and _NO_CONNECTION not in found.message:
            return UnavailableError(
                f"the connection to {address} broke before a session was open: {error.details()}",
                advice="connect again",
            )
        return NotHeliographError(
            f"{address} answers, but not as a Heliograph server: {error.details() or error.code().name}",
            advice="check the port; `heliograph serve` listens on port 7070 by default",
        )
    if isinstance(found, DeadlineExceededError):
        return UnavailableError(f"{address} did not answer within {timeout:g} s", advice=_ADVICE)
    return found


def _why_no_trust(address: Address, credentials: Credentials, is_misnamed: bool) -> HeliographError | None:
    """Return the error if TLS or a certificate, on either side, is the reason.

    `is_misnamed`: gRPC has found that the certificate is for other names."""
    if address.scheme not in ("grpc", "grpcs"):
        return None
    # Imported only when needed, which is rare.
    from heliograph.transport import tls

    if is_misnamed:
        why: tls.TlsDiagnosis | None = tls.wrong_name(address)
    elif address.is_tls:
        why = tls.why_no_tls(address, credentials)
    else:
        why = tls.why_no_plaintext(address)
    if why is None:
        return None
    kind = UnauthenticatedError if why.is_ours else UnavailableError
    return kind(f"cannot speak with {address}: {why.cause}", advice=why.advice)


def is_starting(error: HeliographError) -> bool:
    """True if a server answered that it is not ready yet; silence does not count."""
    return type(error) is UnavailableError and error.message == STARTING


def why_unreachable(address: Address) -> tuple[str, str]:
    """Return why nothing accepts connections at an address, with advice; empty if something does.

    Called only after gRPC has failed, which does not distinguish these cases.
    """
    try:
        if address.scheme == "unix":
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(1.0)
                probe.connect(address.path)
        else:
            socket.create_connection((address.host, address.port), timeout=1.0).close()
    except (OSError, UnicodeError) as error:
        return _why_no_socket(address, error) if address.scheme == "unix" else _why_no_host(address, error)
    return "", ""


#: The words for an address of this host at which nothing listens.
NO_LISTENER = (_REFUSED, _NO_FILE, _NO_DAEMON)


def _why_no_host(address: Address, error: Exception) -> tuple[str, str]:
    port = f"is it the right port? is the daemon running? start one with: heliograph serve --listen {address}"
    match error:
        case socket.gaierror() | UnicodeError():
            return f"the name {address.host!r} does not resolve", (
                "check how the host's name is written; a device goes behind its server: "
                f"local:#{address.host} or grpc://HOST:PORT#{address.host}"
            )
        case ConnectionRefusedError():
            return _REFUSED, port
        case TimeoutError():
            return "no reply", "is the host up, and does a firewall block the port?"
    return str(getattr(error, "strerror", None) or error).lower(), _ADVICE


def _why_no_socket(address: Address, error: Exception) -> tuple[str, str]:
    start = f"is the daemon running? start one with: heliograph serve --listen unix://{address.path}"
    match error:
        case FileNotFoundError():
            return _NO_FILE, start
        case PermissionError():
            return "permission denied", "the socket's owner may open it: run as that user, or change its mode"
    if not stat.S_ISSOCK(os.stat(address.path).st_mode):
        return "the file is not a socket", "name the socket that the daemon listens on, or another path"
    return _NO_DAEMON, start


class Watchdog:
    """Cancels a call after a time, unless it is stopped before."""

    def __init__(self, call: Any, seconds: float) -> None:
        # Dropped at the end: the timer refers to this, and no call may live until the next garbage
        # collection.
        self._call, self.seconds = call, seconds
        #: True if it cancelled the call.
        self.is_late = False
        self._timer = threading.Timer(seconds, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def _expire(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            self.is_late = True
            call.cancel()

    def stop(self) -> None:
        """Leave the call alone from now on. Idempotent."""
        self._call = None
        self._timer.cancel()


def stream_error(error: Any, address: Address, *, has_lease: bool = False) -> HeliographError:
    """Return the reason why the command stream ended.

    In a session with a lease everything but a reason that the server gave is a broken connection.
    """
    if error is None:
        return SessionClosedError(f"{address} ended the session")
    found = typed_error(error, address, "go on with the session")
    if has_lease:
        return found if is_typed(error) else broken(address, error.details())
    if isinstance(found, CancelledError):
        return SessionClosedError("the session was closed")
    return broken(address, error.details()) if isinstance(found, UnavailableError) else found


def broken(address: Address, why: str | None) -> UnavailableError:
    """Return the error of a connection that broke."""
    return UnavailableError(
        f"the connection to {address} broke: {why or 'no reason given'}",
        advice="all data of the session is gone; connect again, compile and run",
    )
