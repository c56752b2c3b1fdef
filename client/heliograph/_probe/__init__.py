"""`heliograph health`: one grpc.health.v1 request, with as few imports as possible.

A container's health check starts this every few seconds, and the rest of the package takes most of
a second of CPU time to import. So this module imports only gRPC, not even protobuf: request and
response are a few bytes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    import grpc

#: Exit statuses: it serves; it answers that it does not serve; it gave no such answer.
SERVING, NOT_SERVING, UNKNOWN = 0, 1, 2
DEFAULT_URL = "grpc://127.0.0.1:7070"
DEFAULT_PORT = 7070
CHECK = "/grpc.health.v1.Health/Check"
#: The longest time of one attempt, and the pause before the next one with --wait.
ATTEMPT_SECONDS = 3.0
PAUSE_SECONDS = 0.1
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)
#: Files with the trusted authorities, and with the client's key and certificate, for grpcs://.
_FILES = ("HELIOGRAPH_CA", "HELIOGRAPH_KEY", "HELIOGRAPH_CERTIFICATE")
#: The values of HealthCheckResponse.status, a varint in the message's first field.
_WORDS = {0: "unknown", 1: "serving", 2: "not serving", 3: "no such service"}


class NoAnswerError(Exception):
    """The reason why there is no answer."""


@dataclass(frozen=True)
class ProbeTarget:
    """The parts of a URL that matter here."""

    #: The URL for messages, without secrets.
    name: str
    #: The target for gRPC.
    target: str
    is_tls: bool = False
    #: The name in the daemon's certificate, if it is not the host's.
    tls_name: str = ""
    #: The URL, if it names the daemon's certificate by its fingerprint.
    pinned_url: str = field(default="", repr=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --server, --service and --wait."""
    parser.epilog = "exit status: 0 serving, 1 not serving, 2 unreachable or no such service"
    parser.add_argument(
        "--server",
        metavar="URL",
        help="grpc://HOST:PORT, grpcs://HOST:PORT or unix:///PATH "
        f"(default: $HELIOGRAPH_SERVER, else {DEFAULT_URL}). grpcs uses the files $HELIOGRAPH_CA and, if the "
        "daemon requires them, $HELIOGRAPH_CERTIFICATE and $HELIOGRAPH_KEY; its health_listen needs none",
    )
    parser.add_argument(
        "--service",
        default="",
        metavar="NAME",
        help="live: no restart is needed; ready: it accepts sessions; or a gRPC service (same as ready)",
    )
    parser.add_argument(
        "--wait",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="repeat until it serves, at most this long",
    )


def run(arguments: argparse.Namespace) -> int:
    """Send the request, print one line, and return the exit status."""
    url = arguments.server or os.environ.get("HELIOGRAPH_SERVER") or DEFAULT_URL
    what = "heliograph health"
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        target = target_of(url)
        what = f"{target.name} {arguments.service}".rstrip()
        with _channel(target) as channel:
            status = _check_until(channel, arguments.service, arguments.wait)
    except NoAnswerError as error:
        print(f"{what}: {error}", file=sys.stderr)
        return UNKNOWN
    print(f"{what}: {_WORDS.get(status, 'unknown')}")
    return SERVING if status == 1 else NOT_SERVING


def main(given: Sequence[str]) -> int:
    """Run `heliograph health` with these arguments and return the exit status."""
    parser = argparse.ArgumentParser(prog="heliograph health", description="Check whether a daemon serves.")
    parser.add_argument("-v", "--verbose", action="count", default=0, help=argparse.SUPPRESS)
    add_arguments(parser)
    try:
        return run(parser.parse_args(given))
    except KeyboardInterrupt:
        return 130


def serves(url: str) -> bool | None:
    """Return whether a daemon takes new sessions. None: there is no answer within
    `ATTEMPT_SECONDS`."""
    try:
        with _channel(target_of(url)) as channel:
            return _check_until(channel, "", 0.0) == 1
    except NoAnswerError:
        return None


def target_of(url: str) -> ProbeTarget:
    """Return the target of a URL. Raises NoAnswerError for a URL of another kind.

    The error does not repeat the URL, which may contain a token. gRPC reports a wrong host or port.
    """
    url = url.strip().partition("#")[0]
    if url.startswith("unix:"):
        path = url.removeprefix("unix:").removeprefix("//")
        return ProbeTarget(f"unix://{path}", f"unix:{path}")
    try:
        parts = urlsplit(url if "://" in url else f"grpc://{url}")
        host, port = parts.hostname, parts.port or DEFAULT_PORT
    except ValueError as error:
        raise NoAnswerError(f"bad address: {error}") from None
    if parts.scheme not in ("grpc", "grpcs") or not host:
        raise NoAnswerError("bad address: use grpc://HOST:PORT, grpcs://HOST:PORT or unix:///PATH")
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    parameters = parse_qs(parts.query)
    tls_name, pinned = parameters.get("tls_name", [""])[0], url if "pin" in parameters else ""
    return ProbeTarget(f"{parts.scheme}://{where}", f"dns:{where}", parts.scheme == "grpcs", tls_name, pinned)


def _channel(target: ProbeTarget) -> grpc.Channel:
    """Open a channel. No token is sent, since health checks need none.

    Raises NoAnswerError for files that cannot be read.
    """
    import grpc

    if not target.is_tls:
        return grpc.insecure_channel(target.target, _OPTIONS)
    if target.pinned_url:
        return _pinned_channel(target.pinned_url)
    credentials = grpc.ssl_channel_credentials(*map(_content, _FILES))
    name = (("grpc.ssl_target_name_override", target.tls_name),) if target.tls_name else ()
    return grpc.secure_channel(target.target, credentials, (*_OPTIONS, *name))


def _pinned_channel(url: str) -> grpc.Channel:
    """Open a channel to a daemon with a pin. Raises NoAnswerError."""
    # Imported only when needed, as it takes longer than all else.
    import grpc

    from heliograph._probe.pins import pinned
    from heliograph_proto.addresses import Credentials, parse_address
    from heliograph_proto.errors import HeliographError

    _, key, certificate = map(_content, _FILES)
    own = Credentials(
        certificate=os.environ.get("HELIOGRAPH_CERTIFICATE", ""), key=os.environ.get("HELIOGRAPH_KEY", "")
    )
    try:
        address = parse_address(url)
        found = pinned(address, own, ATTEMPT_SECONDS)
    except HeliographError as error:
        raise NoAnswerError(error.message) from None
    credentials = grpc.ssl_channel_credentials(found.pem, key, certificate)
    name = ("grpc.ssl_target_name_override", found.name)
    return grpc.secure_channel(address.grpc_target, credentials, (*_OPTIONS, name))


def _content(variable: str) -> bytes | None:
    """Return the bytes of the file that a variable names."""
    path = os.environ.get(variable)
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise NoAnswerError(f"cannot read {path}, which ${variable} names: {error.strerror}") from None


def _check_until(channel: grpc.Channel, service: str, wait: float) -> int:
    """Return the status, after repeating the check until it is SERVING or `wait` seconds are over.

    Raises NoAnswerError.
    """
    end = time.monotonic() + wait
    check = channel.unary_unary(CHECK, lambda request: request, lambda answer: answer)
    while True:
        left = end - time.monotonic()
        is_last = left <= PAUSE_SECONDS
        try:
            status = _status(check, service, min(ATTEMPT_SECONDS, left) if wait else ATTEMPT_SECONDS)
            if status == 1 or is_last:
                return status
        except NoAnswerError:
            if is_last:
                raise
        time.sleep(PAUSE_SECONDS)


def _status(check: grpc.UnaryUnaryMultiCallable[bytes, bytes], service: str, seconds: float) -> int:
    import grpc

    name = service.encode()
    request = b"\x0a" + _varint(len(name)) + name if name else b""
    try:
        answer = check(request, timeout=max(seconds, PAUSE_SECONDS))
    except grpc.RpcError as error:
        raise NoAnswerError(_why(error)) from None
    return answer[1] if len(answer) >= 2 and answer[0] == 0x08 else 0


def _why(error: grpc.RpcError) -> str:
    import grpc

    match error.code():
        case grpc.StatusCode.NOT_FOUND:
            return "no such service; live and ready are there"
        case grpc.StatusCode.UNIMPLEMENTED:
            return "it does not answer grpc.health.v1"
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return "no answer in time"
    return f"unreachable: {' '.join(str(error.details()).split())[:300]}"


def _varint(number: int) -> bytes:
    more = []
    while number > 0x7F:
        more.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*more, number))


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not 0 to 86400 seconds")
    return seconds
