"""What an operator does with a daemon, for programs: look on, end sessions, drain, set the level of its log.

    import heliograph.admin

    with heliograph.admin.connect("grpc://127.0.0.1:7070") as admin:
        for session in admin.sessions():
            print(session.number, session.client, session.device_bytes)

Where a daemon knows tokens, they need the right "admin"; PermissionDeniedError otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import grpc

from heliograph.connection import address_of
from heliograph.graph.arguments import checked_timeout
from heliograph.transport import handshake
from heliograph.transport.channels import credentials_of, open_channel
from heliograph_proto.addresses import Address, Credentials
from heliograph_proto.codec import decode, decode_all
from heliograph_proto.errors import (
    CancelledError,
    DeadlineExceededError,
    HeliographError,
    InvalidArgumentError,
    UnavailableError,
)
from heliograph_proto.sessions import (
    DeviceStatus,
    DrainState,
    DrainStatus,
    Quota,
    SessionStatus,
    Snapshot,
    TenantUsage,
)
from heliograph_proto.v1 import admin_pb2

__all__ = [
    "Admin",
    "DeviceStatus",
    "DrainState",
    "DrainStatus",
    "Quota",
    "SessionStatus",
    "Snapshot",
    "TenantUsage",
    "connect",
]

_SERVICE = "/heliograph.v1.AdminService/"
#: A daemon that is restarted is soon found again.
OPTIONS = (*handshake.CHANNEL_OPTIONS, ("grpc.max_reconnect_backoff_ms", 2000))
#: How long a drain may take beyond its deadline: sessions are ended, and the daemon stops.
END_SECONDS = 60.0


def connect(
    url: str | None = None,
    *,
    timeout: float = 10.0,
    token: str | None = None,
    ca: str | None = None,
    certificate: str | None = None,
    key: str | None = None,
) -> Admin:
    """A daemon as its operator sees it. Nothing is asked yet; each answer may take `timeout` seconds.

    URL and credentials are those of `heliograph.connect`. Raises InvalidArgumentError.
    """
    address = address_of(url)
    if address.scheme == "local":
        raise InvalidArgumentError(
            f"{address} is no daemon, and has no operator", advice="grpc://HOST:PORT or unix:///PATH"
        )
    checked_timeout(timeout)
    return Admin(address, timeout, credentials_of(address, token, ca, certificate, key))


class Admin:
    """A daemon as its operator sees it. For any thread. Every method raises UnavailableError when nobody
    answers, UnauthenticatedError and PermissionDeniedError for who may not ask, and DeadlineExceededError."""

    def __init__(self, address: Address, timeout: float, credentials: Credentials) -> None:
        self.address = address
        self._timeout = timeout
        self._credentials = credentials
        #: Whether the daemon was asked to stop: then it may be gone before anybody looks.
        self._is_to_stop = False
        self._channel = open_channel(address, OPTIONS, credentials)

    def __repr__(self) -> str:
        return f"<Admin of {self.address}>"

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hangs up. What is being watched ends. Idempotent."""
        self._channel.close()

    def sessions(self) -> tuple[SessionStatus, ...]:
        """All that are open, of all tenants, by number; with average rates since each was opened."""
        answer = self._ask("ListSessions", admin_pb2.ListSessionsRequest(), "list its sessions")
        found = admin_pb2.ListSessionsResponse.FromString(answer)
        return decode_all(found.sessions, SessionStatus)

    def end_session(self, number: int, reason: str = "") -> None:
        """Ends a session: its client's calls fail with a SessionClosedError that has the reason. Returns when
        everything of it is freed. Raises SessionClosedError when there is no such session."""
        if not isinstance(number, int) or not 0 < number < 2**63:
            raise InvalidArgumentError(f"{number!r:.100} is no number of a session", advice="1 or more")
        request = admin_pb2.EndSessionRequest(number=number, reason=reason)
        self._ask("EndSession", request, "end a session")

    def drain(self, seconds: float | None = None, *, stay: bool = False) -> DrainStatus:
        """Has the daemon refuse new sessions while running work ends, for so many seconds at most (None: what
        it was configured for). Then it ends all sessions and stops, or with `stay` waits, drained, until
        that is undone. Returns at once. Raises DrainingError when it is stopping already."""
        if seconds is not None and not 0 < seconds < 2**32:
            raise InvalidArgumentError(f"a drain of {seconds} seconds", advice="more than 0")
        deadline_ms = 0 if seconds is None else max(1, round(seconds * 1e3))
        request = admin_pb2.DrainRequest(deadline_ms=deadline_ms, stay=stay)
        answer = self._ask("Drain", request, "drain")
        self._is_to_stop = not stay
        return decode(admin_pb2.DrainResponse.FromString(answer).drain, DrainStatus)

    def undo_drain(self) -> DrainStatus:
        """New sessions are welcome again. Raises DrainingError when it is stopping already."""
        answer = self._ask("UndoDrain", admin_pb2.UndoDrainRequest(), "undo its drain")
        self._is_to_stop = False
        return decode(admin_pb2.UndoDrainResponse.FromString(answer).drain, DrainStatus)

    def wait_drained(self, timeout: float | None = None) -> DrainState:
        """Waits until a drain is over: DRAINED, STOPPING (it has hung up), or SERVING if that was undone.
        `timeout`: None for the drain's deadline and a minute. Raises DeadlineExceededError."""
        end: float | None = None if timeout is None else time.monotonic() + timeout
        state = DrainState.DRAINING if self._is_to_stop else DrainState.SERVING
        try:
            for snapshot in self.watch(0.2):
                state = snapshot.drain.state
                if state in (DrainState.DRAINED, DrainState.SERVING):
                    return state
                if end is None:
                    end = time.monotonic() + snapshot.drain.remaining_seconds + END_SECONDS
                if time.monotonic() > end:
                    raise DeadlineExceededError("the drain was not over in time")
        except (CancelledError, UnavailableError):
            if state is DrainState.SERVING:
                raise
        return DrainState.STOPPING

    def set_log_level(self, level: str) -> str:
        """From now on events from this level on are logged: "debug", "info", "warning" or "error". The level
        before. Raises InvalidArgumentError."""
        request = admin_pb2.SetLogLevelRequest(level=level)
        answer = self._ask("SetLogLevel", request, "set the level of its log")
        return admin_pb2.SetLogLevelResponse.FromString(answer).previous

    def snapshot(self) -> Snapshot:
        """What the daemon has and does now; rates are averages since each session was opened."""
        for found in self._watch(1.0, self._timeout):
            return found
        raise UnavailableError(f"{self.address} ended the answer before it began")

    def watch(self, interval: float = 1.0) -> Iterator[Snapshot]:
        """What the daemon has and does, at once and then after each interval (0.1 to 3600 seconds), until the
        iterator is closed; rates are those since the one before. Raises UnavailableError when the daemon
        ends."""
        return self._watch(interval, None)

    def _watch(self, interval: float, timeout: float | None) -> Iterator[Snapshot]:
        request = admin_pb2.WatchRequest(interval_ms=max(1, round(interval * 1e3)))
        method: Any = self._channel.unary_stream(_SERVICE + "Watch")
        call = method(request.SerializeToString(), timeout=timeout)
        refused: HeliographError | None = None
        is_there = False
        try:
            for answer in call:
                is_there = True
                yield decode(admin_pb2.Snapshot.FromString(answer), Snapshot)
        except grpc.RpcError as error:
            refused = self._refused(error, "tell how it is", is_there=is_there)
        finally:
            call.cancel()
        if refused is not None:
            raise refused

    def _ask(self, method: str, request: Any, doing: str) -> bytes:
        call: Any = self._channel.unary_unary(_SERVICE + method)
        refused: HeliographError
        try:
            answer: bytes = call(request.SerializeToString(), timeout=self._timeout)
            return answer
        except grpc.RpcError as error:
            refused = self._refused(error, doing)
        # Outside: gRPC's error must not live on as its context.
        raise refused

    def _refused(self, error: grpc.RpcError, doing: str, *, is_there: bool = False) -> HeliographError:
        """Why a call failed, and why nobody answers if nobody ever did."""
        found = handshake.typed_error(error, self.address, doing)
        if not is_there and isinstance(found, UnavailableError) and not handshake.is_typed(error):
            return handshake.open_error(error, self.address, self._timeout, self._credentials)
        return found
