"""What both gRPC shells share: channel options, the handshake's messages, and errors from statuses."""

from __future__ import annotations

import os
import socket
import stat
from typing import Any

import grpc

from heliograph.core.future import logger
from heliograph.transport.channels import NO_CREDENTIALS
from heliograph.transport.tenant import tenant_secret
from heliograph_proto import FEATURES, VERSION_MAX, VERSION_MIN, __version__
from heliograph_proto.addresses import Address, Credentials
from heliograph_proto.codec import decode
from heliograph_proto.codec.status import error_from_metadata
from heliograph_proto.errors import (
    CancelledError,
    DeadlineExceededError,
    HeliographError,
    InternalError,
    LimitExceededError,
    NotHeliographError,
    PermissionDeniedError,
    ProtocolError,
    SessionClosedError,
    UnauthenticatedError,
    UnavailableError,
)
from heliograph_proto.sessions import SessionInfo
from heliograph_proto.v1 import session_pb2

EXECUTE = "/heliograph.v1.CommandService/Execute"
OPEN = "/heliograph.v1.SessionService/Open"
CLOSE = "/heliograph.v1.SessionService/Close"
UPLOAD = "/heliograph.v1.BulkService/Upload"
UPLOAD_SHARED = "/heliograph.v1.BulkService/UploadShared"
DOWNLOAD = "/heliograph.v1.BulkService/Download"

#: What a server is to do with one, in words for errors.
TAKE_AN_UPLOAD = "take an upload"
#: How long closing a session may take.
CLOSE_SECONDS = 2.0
#: How long frees may gather before they are sent.
GATHER_SECONDS = 0.005

#: A server that is gone or stopped is noticed after the sum of the two keepalive times.
KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000

CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # Without this a ping may take 60 s, whatever the keepalive timeout is (grpcio 1.85).
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A session lives on one connection; nothing is sent twice.
    ("grpc.enable_retries", 0),
    # Bulk has a connection of its own only if channels do not share them.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)

#: Of the silence after which a server is gone: when it is asked for a sign of life, and how long that may
#: take. What is left is for noticing it.
_ASKED, _ANSWERED = 0.4, 0.5


def channel_options(silence_seconds: float | None = None) -> tuple[tuple[str, Any], ...]:
    """Options of a channel on which a server is gone after so much silence; by default the usual one."""
    if silence_seconds is None:
        return CHANNEL_OPTIONS
    answered = max(1, int(silence_seconds * _ANSWERED * 1e3))
    changed = {
        "grpc.keepalive_time_ms": max(1, int(silence_seconds * _ASKED * 1e3)),
        "grpc.keepalive_timeout_ms": answered,
        "grpc.http2.ping_timeout_ms": answered,
    }
    return tuple((name, changed.get(name, value)) for name, value in CHANNEL_OPTIONS)


_ADVICE = "is the daemon running? start one with: heliograph serve"
_SHOW = (
    "show a token: hg.connect(url, token=...), $HELIOGRAPH_TOKEN, or the URL that heliograph serve printed"
)


def open_request() -> bytes:
    """The first message: what this client speaks."""
    return session_pb2.OpenRequest(
        version_min=VERSION_MIN,
        version_max=VERSION_MAX,
        features=FEATURES,
        client=f"heliograph-python/{__version__}",
        tenant_secret=tenant_secret(),
    ).SerializeToString()


def decode_open(answer: bytes, address: Address) -> SessionInfo:
    """What was agreed. Raises NotHeliographError for an answer that makes no sense."""
    try:
        info = decode(session_pb2.OpenResponse.FromString(answer), SessionInfo)
    except Exception as error:
        raise NotHeliographError(f"{address} gave an answer that cannot be read: {error}") from None
    if not (info.session and info.devices and VERSION_MIN <= info.version <= VERSION_MAX):
        raise NotHeliographError(f"{address} gave an answer without session, devices or version")
    if min(info.limits.in_flight_bytes, info.limits.chunk_bytes, info.limits.message_bytes) < 1:
        raise NotHeliographError(f"{address} gave limits of 0")
    return info


def close_request(session: bytes) -> bytes:
    """The last message."""
    return session_pb2.CloseRequest(session=session).SerializeToString()


def typed_error(error: Any, address: Address, doing: str) -> HeliographError:
    """The error of a status: the server's own where it sent one, else what the code means."""
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
                advice="is a daemon there, and not something else? ask: heliograph health --server URL",
            )
        case grpc.StatusCode.CANCELLED:
            return CancelledError(f"cancelled: {doing}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return LimitExceededError(f"{address} refused to {doing}: {details}")
        case grpc.StatusCode.UNAUTHENTICATED:
            return UnauthenticatedError(
                f"{address} does not know who asks it to {doing}: {details}", advice=_SHOW
            )
        case grpc.StatusCode.PERMISSION_DENIED:
            return PermissionDeniedError(f"{address} does not let this client {doing}: {details}")
        case grpc.StatusCode.UNIMPLEMENTED:
            return ProtocolError(f"{address} does not know how to {doing}: {details}")
    return InternalError(f"{address} failed to {doing}: {error.code().name}: {details}")


def is_typed(error: Any) -> bool:
    """Whether the server itself sent the error of a status."""
    trailing = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    return error_from_metadata(tuple(trailing or ())) is not None


def upload_error(broken: Exception, address: Address) -> HeliographError:
    """Why an upload failed, whatever was raised: by gRPC, by us, or by who is told of its progress."""
    if isinstance(broken, grpc.RpcError):
        return typed_error(broken, address, TAKE_AN_UPLOAD)
    if isinstance(broken, HeliographError):
        return broken
    # Not with its traceback, which would keep the call.
    words = f"an upload failed: {type(broken).__name__}: {broken}"
    logger.error("%s", words)
    return InternalError(words)


def forget_traceback(error: Any) -> None:
    """Lets go of a call that gRPC has raised: its traceback refers to itself, and so would keep it until
    some garbage collection, perhaps the interpreter's last (see `_blocking`)."""
    if isinstance(error, BaseException):
        error.__traceback__ = None


#: What a server says while its devices start, and how long to wait before it is asked again.
STARTING = "the server is starting its devices"
START_SECONDS = 0.25


def open_error(
    error: Any, address: Address, timeout: float, credentials: Credentials = NO_CREDENTIALS
) -> HeliographError:
    """Why a session could not be opened: nobody there, silence, no trust, or somebody else."""
    found = typed_error(error, address, "open a session")
    if isinstance(found, UnavailableError) and not is_typed(error) and "http" not in found.message.lower():
        cause, advice = why_nobody(address)
        if cause:
            return UnavailableError(f"nobody answers at {address}: {cause}", advice=advice)
    is_silent = isinstance(found, DeadlineExceededError) and address.is_tls
    may_be_tls = (is_silent or isinstance(found, UnavailableError)) and not is_typed(error)
    if may_be_tls and (distrusted := _why_no_trust(address, credentials)) is not None:
        return distrusted
    if isinstance(found, UnavailableError | ProtocolError | InternalError):
        if error_from_metadata(tuple(error.trailing_metadata() or ())) is not None:
            return found
        return NotHeliographError(
            f"{address} answers, but not as a Heliograph server: {error.details() or error.code().name}",
            advice="check the port; `heliograph serve` listens on 7070 unless told otherwise",
        )
    if isinstance(found, DeadlineExceededError):
        return UnavailableError(f"{address} did not answer within {timeout:g} s", advice=_ADVICE)
    return found


def _why_no_trust(address: Address, credentials: Credentials) -> HeliographError | None:
    """What is wrong with TLS or with a certificate, on either side, if that is what it was."""
    if address.scheme not in ("grpc", "grpcs"):
        return None
    # Not before: few need it.
    from heliograph.transport import tls

    is_tls = address.is_tls
    why = tls.why_no_tls(address, credentials) if is_tls else tls.why_no_plaintext(address)
    if why is None:
        return None
    kind = UnauthenticatedError if why.is_about_us else UnavailableError
    return kind(f"cannot speak with {address}: {why.cause}", advice=why.advice)


def is_starting(error: HeliographError) -> bool:
    """Whether a server answered that it is not ready yet; silence is another thing."""
    return type(error) is UnavailableError and error.message == STARTING


def why_nobody(address: Address) -> tuple[str, str]:
    """Why nothing accepts connections there, and what to do; empty if something does.

    Asked only after gRPC has failed, which does not tell these apart.
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


def _why_no_host(address: Address, error: Exception) -> tuple[str, str]:
    port = f"is it the right port? is the daemon running? start one with: heliograph serve --listen {address}"
    match error:
        case socket.gaierror() | UnicodeError():
            return f"the name {address.host!r} does not resolve", "check how the host's name is written"
        case ConnectionRefusedError():
            return "connection refused", port
        case TimeoutError():
            return "no reply", "is the host up, and does a firewall let the port through?"
    return str(getattr(error, "strerror", None) or error).lower(), _ADVICE


def _why_no_socket(address: Address, error: Exception) -> tuple[str, str]:
    start = f"is the daemon running? start one with: heliograph serve --listen unix://{address.path}"
    match error:
        case FileNotFoundError():
            return "there is no such file", start
        case PermissionError():
            return "permission denied", "the socket's owner may open it: run as that user, or change its mode"
    if not stat.S_ISSOCK(os.stat(address.path).st_mode):
        return "the file is no socket", "name the socket that the daemon listens on, or another path"
    return "the socket is there, but no daemon listens on it", start


def stream_error(error: Any, address: Address) -> HeliographError:
    """Why the command stream ended."""
    if error is None:
        return SessionClosedError(f"{address} ended the session")
    found = typed_error(error, address, "go on with the session")
    if isinstance(found, CancelledError):
        return SessionClosedError("the session was closed")
    if isinstance(found, UnavailableError):
        return UnavailableError(
            f"the connection to {address} broke: {error.details() or 'no reason given'}",
            advice="everything of the session is gone; connect again, compile and run",
        )
    return found
