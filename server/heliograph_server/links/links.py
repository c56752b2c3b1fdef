"""Parts shared by all links to other daemons: channels, names of calls, requests, errors of
statuses, and the pool's credentials."""

from __future__ import annotations

import logging
import resource
import threading
from dataclasses import replace
from typing import Any

import grpc

from heliograph.transport.channels import token_in
from heliograph.transport.handshake import NO_LISTENER, why_unreachable
from heliograph.transport.tls import read_pem
from heliograph_proto.addresses import Address, Credentials, parse_address
from heliograph_proto.codec.status import error_from_metadata
from heliograph_proto.errors import (
    ConfigurationError,
    ConnectionError,
    HeliographError,
    InternalError,
    InvalidArgumentError,
    LimitExceededError,
    MemberLostError,
    PermissionDeniedError,
    ProtocolError,
)
from heliograph_proto.plans import Edge, PeerSource, lost
from heliograph_proto.v1 import peer_pb2
from heliograph_server.exchange.incoming import Sink
from heliograph_server.resources.failures import typed

SERVICE = peer_pb2.DESCRIPTOR.services_by_name["PeerService"].full_name
EXCHANGE, PULL, PUSH, ECHO = (f"/{SERVICE}/{name}" for name in ("Exchange", "Pull", "Push", "Echo"))

#: A daemon that is silent for so long is lost.
SILENCE_SECONDS = 3.0
#: The approximate size of a message of small values, and the largest that is accepted.
MESSAGE_BYTES = 2**20
MOST_MESSAGE_BYTES = 4 * 2**20
#: The largest message from another daemon, such as a piece of a large value.
RECEIVED_BYTES = 64 * 2**20
#: The most other daemons that one exchanges values with.
MAX_LINKS = 1024
#: The approximate size of a request for a value.
ASK_BYTES = 64
#: The time of one attempt to connect again.
DIAL_SECONDS = 2.0
#: The codes of calls whose connection breaks. A daemon's own errors are typed.
BREAKS = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)
#: A link that is unused for so long is closed.
IDLE_SECONDS = 60.0


def max_links() -> int:
    """The most links at once. A member of a pool has at most 1,000 others, and each link takes two
    descriptors, which other parts of the process need too."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_LINKS if soft == resource.RLIM_INFINITY else min(MAX_LINKS, max(1, soft // 8))


def too_many_links(source: PeerSource) -> LimitExceededError:
    """The error of a link beyond the limit."""
    return LimitExceededError(
        f"{source.address} is one daemon too many to exchange values with", advice="wait for other plans"
    )


def channel_options(silence_seconds: float = SILENCE_SECONDS) -> tuple[tuple[str, Any], ...]:
    """Options of a channel that notices the loss of its other end after so long, also while
    connecting."""
    ping_ms = max(1, int(silence_seconds * 1000 * 2 / 3))
    timeout_ms = max(1, int(silence_seconds * 1000 / 3))
    return (
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", RECEIVED_BYTES),
        ("grpc.keepalive_time_ms", ping_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # Without this a ping may take 60 s, whatever the keepalive timeout is.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # The time that one attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", int(silence_seconds * 1000)),
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    )


def address_of(address: str) -> Address:
    """Parse a daemon's address. Raises InvalidArgumentError."""
    found = parse_address(address)
    if found.scheme == "local":
        raise InvalidArgumentError(f"{address!r} is no address of a daemon", advice="use grpc://host:port")
    if found.pin:
        raise InvalidArgumentError(
            f"{found} names a certificate by its fingerprint, which is for clients",
            advice="use --pool-ca FILE",
        )
    return found


def error_of(broken: Any, source: PeerSource) -> HeliographError:
    """The error of a failed call to another daemon: the daemon's own one if it sent one."""
    broken.__traceback__ = None
    trailing = broken.trailing_metadata() if hasattr(broken, "trailing_metadata") else None
    found = error_from_metadata(tuple((key, value) for key, value in trailing or ()))
    if is_refusal(broken):
        return _refused(source, found.message if found is not None else _details(broken))
    if found is not None:
        # A daemon that is starting has another incarnation as well, and is therefore lost too.
        return lost(source, found.message) if isinstance(found, MemberLostError | ConnectionError) else found
    details = _details(broken)
    match broken.code():
        case grpc.StatusCode.CANCELLED:
            # The call was not cancelled here: a local cancel does not look for the error.
            return lost(source, "it ended the call")
        case grpc.StatusCode.PERMISSION_DENIED:
            return _refused(source, details)
        case grpc.StatusCode.UNIMPLEMENTED:
            return ProtocolError(f"{source.address} exchanges no values", advice="upgrade that daemon")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return LimitExceededError(f"{source.address} refused a message: {details}")
        case (
            grpc.StatusCode.UNAVAILABLE
            | grpc.StatusCode.DEADLINE_EXCEEDED
            # A daemon's own errors are typed; gRPC makes these of some connections that break.
            | grpc.StatusCode.INTERNAL
            | grpc.StatusCode.UNKNOWN
        ):
            return lost(source, details)
    return InternalError(f"{source.address} failed: {broken.code().name}: {details}")


def _details(broken: Any) -> str:
    return " ".join((broken.details() or broken.code().name).split())


def _refused(source: PeerSource, why: str) -> PermissionDeniedError:
    return PermissionDeniedError(
        f"{source.address} refuses to exchange values: {why}",
        advice="give the daemons tokens with the right 'pool': --pool-token FILE",
    )


def is_refusal(broken: Any) -> bool:
    """True if a call failed since its token is not known, or not any more."""
    return broken.code() is grpc.StatusCode.UNAUTHENTICATED


def is_break(broken: Any) -> bool:
    """True if a failed call may only say that its connection broke."""
    trailing = broken.trailing_metadata() if hasattr(broken, "trailing_metadata") else None
    is_typed = error_from_metadata(tuple((key, value) for key, value in trailing or ())) is not None
    return broken.code() in BREAKS and not is_typed


def gone(source: PeerSource, was_there: bool) -> MemberLostError | None:
    """The error of a daemon that is not there for sure: nothing listens at its address, or the
    address has no host and never had. Blocks for about a second at most."""
    why, _ = why_unreachable(address_of(source.address))
    is_sure = why in NO_LISTENER or (not was_there and "does not resolve" in why)
    return lost(source, why) if is_sure else None


def check_incarnation(source: PeerSource, found: bytes) -> None:
    """Raise MemberLostError if another incarnation answers."""
    if found != source.incarnation:
        raise lost(source, "another incarnation of the daemon answers there")


def pull_request(source: PeerSource, sink: Sink, attempt: int) -> bytes:
    """The request for a large value, or the rest of it."""
    return peer_pb2.PullRequest(
        incarnation=source.incarnation,
        edge=sink.edge.name,
        run=sink.run,
        capability=sink.edge.capability(sink.run),
        attempt=attempt,
        offset_bytes=sink.received_bytes,
    ).SerializeToString()


def push_request(
    destination: PeerSource, edge: Edge, run: int, size_bytes: int, attempt: int, *, again: bool
) -> bytes:
    """The first message of a large value. `again`: an earlier call for it broke off."""
    target = peer_pb2.PushTarget(
        incarnation=destination.incarnation,
        edge=edge.name,
        run=run,
        capability=edge.capability(run),
        attempt=attempt,
        again=again,
    )
    return peer_pb2.PushRequest(size_bytes=size_bytes, target=target).SerializeToString()


def land(sink: Sink, data: bytes) -> None:
    """Write all of a small value."""
    try:
        if len(data) != sink.size_bytes:
            raise wrong_size(len(data), sink.size_bytes)
        sink.write(0, memoryview(data))
        sink.finish()
    except Exception as error:
        sink.fail(typed(error, "writing a value of another daemon"))


def wrong_size(found_bytes: int, expected_bytes: int) -> ProtocolError:
    """The error of a value of unexpected size."""
    return ProtocolError(
        f"received a value of {found_bytes:,} bytes instead of {expected_bytes:,}",
        advice="do both daemons run the same version?",
    )


logger = logging.getLogger(__name__)


class PoolCredentials:
    """The credentials presented to other daemons. Thread-safe.

    The files are read for every new connection, so they may change. The constructor raises
    ConfigurationError for files that cannot be used; later failures are logged, and the token that
    was read before stays in use.
    """

    def __init__(
        self,
        token_file: str = "",
        ca: str = "",
        certificate: str = "",
        key: str = "",
        *,
        insecure: bool = False,
    ) -> None:
        if bool(certificate) != bool(key):
            raise ConfigurationError(
                "a certificate and its key go together", advice="--pool-certificate FILE --pool-key FILE"
            )
        self._token_file, self._insecure = token_file, insecure
        self._files = Credentials(ca=ca, certificate=certificate, key=key)
        self._lock = threading.Lock()
        self._is_bad = False
        try:
            read_pem(self._files)
            self._token = self._read()
        except InvalidArgumentError as error:
            raise ConfigurationError(f"for the pool: {error.message}", advice=error.advice) from None

    def __call__(self, address: str) -> Credentials:
        """The credentials to present at an address. Raises InvalidArgumentError.

        A pool that speaks TLS sends its token in the clear only over loopback. Otherwise a user who
        may name other daemons could have the token sent to an address of their choice. Without TLS,
        it goes to other hosts only with `insecure`.
        """
        found = parse_address(address)
        with self._lock:
            self._refresh()
            is_private = found.is_tls or found.is_loopback
            if self._token and not (is_private or self._insecure or self._files.ca):
                raise InvalidArgumentError(
                    f"the pool's token would go to {found} in the clear",
                    advice="use grpcs:// and --pool-ca FILE, or start this daemon with --insecure if the "
                    "network is trusted",
                )
            token = self._token if is_private or not self._files.ca else ""
            return replace(self._files, token=token, in_clear=self._insecure)

    def _refresh(self) -> None:
        try:
            self._token = self._read()
        except HeliographError as error:
            if not self._is_bad:
                logger.error("%s; the token read before stays in use", error.message)
            self._is_bad = True
        else:
            self._is_bad = False

    def _read(self) -> str:
        return token_in(self._token_file, "pool_token") if self._token_file else ""
