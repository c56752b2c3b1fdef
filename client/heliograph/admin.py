"""The operations of a daemon's operator: inspect it, end sessions, drain it, set its log level.

    import heliograph.admin

    with heliograph.admin.connect("grpc://127.0.0.1:7070") as admin:
        for session in admin.sessions():
            print(session.number, session.client, session.device_bytes)

On a daemon with tokens these operations need the right "admin"; without it they raise
PermissionDeniedError. `Admin.plans` alone needs the right "use", and shows a tenant its own.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from heliograph.connection import address_of
from heliograph.graph.arguments import checked_timeout
from heliograph.transport import handshake
from heliograph.transport.channels import credentials_of, open_channel
from heliograph_proto.addresses import Address, Credentials
from heliograph_proto.codec import decode, decode_all
from heliograph_proto.devices import BackendInfo, BackendUse
from heliograph_proto.errors import (
    CancelledError,
    DeadlineExceededError,
    HeliographError,
    InvalidArgumentError,
    UnavailableError,
)
from heliograph_proto.plans import PlanList, PlanStatus
from heliograph_proto.process_facts import process_started
from heliograph_proto.sessions import (
    DeviceStatus,
    DrainState,
    DrainStatus,
    KeptStateStatus,
    Quota,
    SessionOutcome,
    SessionStatus,
    Snapshot,
    StayingSession,
    TenantUsage,
)
from heliograph_proto.v1 import admin_pb2, plan_pb2

__all__ = [
    "Admin",
    "BackendInfo",
    "BackendUse",
    "DeviceStatus",
    "DrainState",
    "DrainStatus",
    "PlanList",
    "PlanStatus",
    "Quota",
    "SessionOutcome",
    "SessionStatus",
    "Snapshot",
    "StayingSession",
    "KeptStateStatus",
    "TenantUsage",
    "connect",
]

_SERVICE = "/heliograph.v1.AdminService/"
_PLANS = "/heliograph.v1.PlanService/"
#: The client soon finds a daemon again that was restarted.
OPTIONS = (*handshake.CHANNEL_OPTIONS, ("grpc.max_reconnect_backoff_ms", 2000))
#: The time that a drain may take beyond its deadline, for ending sessions and stopping the daemon.
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
    """Open a connection for the operator of a daemon. No request is sent yet.

    URL and credentials are those of `heliograph.connect`. Each answer may take `timeout` seconds.
    Raises InvalidArgumentError.
    """
    address = address_of(url)
    if address.scheme == "local":
        raise InvalidArgumentError(
            f"{address} is not a daemon and has no operator", advice="grpc://HOST:PORT or unix:///PATH"
        )
    checked_timeout(timeout)
    return Admin(address, timeout, credentials_of(address, token, ca, certificate, key))


class Admin:
    """A connection for the operator of a daemon. Thread-safe.

    Every method raises UnavailableError if no daemon answers, UnauthenticatedError and
    PermissionDeniedError without sufficient credentials, and DeadlineExceededError.
    """

    def __init__(self, address: Address, timeout: float, credentials: Credentials) -> None:
        self.address = address
        self._timeout = timeout
        self._credentials = credentials
        #: The answer of a daemon that was asked to stop: it may be gone before the next look.
        self._stopping: DrainStatus | None = None
        self._channel = open_channel(address, OPTIONS, credentials)

    def __repr__(self) -> str:
        return f"<Admin of {self.address}>"

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, and end iterators of `watch`. Idempotent."""
        self._channel.close()

    def sessions(self) -> tuple[SessionStatus, ...]:
        """Return all open sessions, of all tenants, by number.

        Rates are averages since each was opened.
        """
        answer = self._ask("ListSessions", admin_pb2.ListSessionsRequest(), "list its sessions")
        found = admin_pb2.ListSessionsResponse.FromString(answer)
        return decode_all(found.sessions, SessionStatus)

    def end_session(self, number: int, reason: str = "") -> None:
        """End a session: its client's calls fail with a SessionClosedError that has the reason.

        Returns when all of its resources are freed. Raises SessionClosedError if there is no such
        session, and InvalidArgumentError.
        """
        if not isinstance(number, int) or not 0 < number < 2**63:
            raise InvalidArgumentError(f"{number!r:.100} is not the number of a session", advice="1 or more")
        request = admin_pb2.EndSessionRequest(number=number, reason=reason)
        self._ask("EndSession", request, "end a session")

    def drain(self, seconds: float | None = None, *, stay: bool = False, move_to: str = "") -> DrainStatus:
        """Drain the daemon: refuse new sessions while running work ends. Does not wait for that.

        Args:
            seconds: The longest time for running work; None means the configured one. Afterwards
                the daemon ends all sessions and stops.
            stay: With True the daemon stays, drained, until `undo_drain`, instead of stopping.
            move_to: The URL of a daemon that takes the sessions with a lease first, as this daemon
                reaches it (`Session.move`). The others end. `DrainStatus.moves` tells which.

        Raises DrainingError if the daemon is already stopping, and InvalidArgumentError.
        """
        if seconds is not None and not 0 < seconds < 2**32:
            raise InvalidArgumentError(f"a drain of {seconds} seconds", advice="more than 0")
        deadline_ms = 0 if seconds is None else max(1, round(seconds * 1e3))
        request = admin_pb2.DrainRequest(deadline_ms=deadline_ms, stay=stay, move_to=move_to)
        answer = self._ask("Drain", request, "drain")
        found = decode(admin_pb2.DrainResponse.FromString(answer).drain, DrainStatus)
        self._stopping = None if stay else found
        return found

    def undo_drain(self) -> DrainStatus:
        """Accept new sessions again. Raises DrainingError if the daemon is already stopping."""
        answer = self._ask("UndoDrain", admin_pb2.UndoDrainRequest(), "undo its drain")
        self._stopping = None
        return decode(admin_pb2.UndoDrainResponse.FromString(answer).drain, DrainStatus)

    def wait_drained(
        self, timeout: float | None = None, *, progress: Callable[[DrainStatus], None] = lambda status: None
    ) -> DrainStatus:
        """Wait for the end of a drain. `progress` is called with each status.

        Returns its last status. The state is DRAINED, STOPPING (the daemon closed the connection;
        on this host its process has ended, too), or SERVING if the drain was undone. The default
        `timeout` is the drain's deadline and a minute. Raises DeadlineExceededError.
        """
        end: float | None = None if timeout is None else time.monotonic() + timeout
        found = self._stopping or DrainStatus()
        try:
            for snapshot in self.watch(0.2):
                found = snapshot.drain
                progress(found)
                if found.state in (DrainState.DRAINED, DrainState.SERVING):
                    return found
                if end is None:
                    end = time.monotonic() + found.remaining_seconds + END_SECONDS
                if time.monotonic() > end:
                    raise DeadlineExceededError("the drain was not over in time")
        except (CancelledError, UnavailableError):
            if found.state is DrainState.SERVING:
                raise
        if end is None:
            end = time.monotonic() + END_SECONDS
        if not _wait_for_end(found.process, found.process_started, max(0.0, end - time.monotonic())):
            raise DeadlineExceededError("the daemon's process did not end in time")
        return replace(found, state=DrainState.STOPPING, remaining_seconds=0.0)

    def backends(self) -> tuple[BackendUse, ...]:
        """Return all backends of the daemon, and the number of sessions that use each."""
        answer = self._ask("ListBackends", admin_pb2.ListBackendsRequest(), "list its backends")
        return decode_all(admin_pb2.ListBackendsResponse.FromString(answer).backends, BackendUse)

    def unload_backend(self, name: str) -> BackendInfo:
        """Unload a backend: close its devices, and remove its code. Native libraries stay.

        Returns the backend as it was. Raises ConfigurationError if it is unknown or in use; the
        error names the sessions.
        """
        answer = self._ask("UnloadBackend", admin_pb2.UnloadBackendRequest(name=name), "unload a backend")
        return decode(admin_pb2.UnloadBackendResponse.FromString(answer).backend, BackendInfo)

    def load_backend(self, source: str, devices: Sequence[str] = ()) -> BackendInfo:
        """Load a backend of Heliograph, of an installed package or of the daemon's setting
        `backends`, and start its devices.

        Args:
            source: Its name, or its source in that setting.
            devices: The specifications of its devices, such as "fake:memory=1GiB". By default one
                device without parameters.

        Raises ConfigurationError.
        """
        request = admin_pb2.LoadBackendRequest(source=source, devices=devices)
        answer = self._ask("LoadBackend", request, "load a backend")
        return decode(admin_pb2.LoadBackendResponse.FromString(answer).backend, BackendInfo)

    def set_log_level(self, level: str) -> str:
        """Log events from this level on: "debug", "info", "warning" or "error".

        Returns the previous level. Raises InvalidArgumentError.
        """
        request = admin_pb2.SetLogLevelRequest(level=level)
        answer = self._ask("SetLogLevel", request, "set the level of its log")
        return admin_pb2.SetLogLevelResponse.FromString(answer).previous

    def snapshot(self) -> Snapshot:
        """Return the daemon's state now. Rates are averages since each session was opened."""
        for found in self.watch(1.0):
            return found
        raise UnavailableError(f"{self.address} ended the answer before it began")

    def plans(self, session: int = 0, plan: int = 0) -> PlanList:
        """Return the plans that have a handle, at most 1,000, with the totals of their runs.

        A token with the right "use" shows the plans of its tenant.

        Args:
            session: The number of a session; 0: those of all sessions, the newest first.
            plan: With a session: one of its plans, with the times of its splits in the last run.

        Raises SessionClosedError, UnknownHandleError, DeviceLostError.
        """
        request = plan_pb2.ListPlansRequest(session_number=session, plan=plan)
        answer = self._ask("ListPlans", request, "list plans", _PLANS)
        return decode(plan_pb2.ListPlansResponse.FromString(answer), PlanList)

    def watch(self, interval: float = 1.0) -> Iterator[Snapshot]:
        """Iterate over the daemon's state, at once and then every `interval` seconds (0.1 to 3600).

        It ends when the iterator is closed. Rates are those since the previous state. Raises
        UnavailableError when the daemon ends, and DeadlineExceededError if the first state does not
        come within the connection's timeout.
        """
        request = admin_pb2.WatchRequest(interval_ms=max(1, round(interval * 1e3)))
        method: Any = self._channel.unary_stream(_SERVICE + "Watch")
        call = method(request.SerializeToString())
        watchdog = handshake.Watchdog(call, self._timeout)
        refused: HeliographError | None = None
        is_there = False
        try:
            for answer in call:
                is_there = True
                watchdog.stop()
                yield decode(admin_pb2.Snapshot.FromString(answer), Snapshot)
        except grpc.RpcError as error:
            refused = self._refused(error, "report its state", is_there=is_there)
            if watchdog.is_late:
                refused = DeadlineExceededError(
                    f"{self.address} did not report its state within {watchdog.seconds:g} s",
                    advice="ask again",
                )
        finally:
            watchdog.stop()
            call.cancel()
        if refused is not None:
            raise refused

    def _ask(self, method: str, request: Any, doing: str, service: str = _SERVICE) -> bytes:
        call: Any = self._channel.unary_unary(service + method)
        refused: HeliographError
        try:
            answer: bytes = call(request.SerializeToString(), timeout=self._timeout)
            return answer
        except grpc.RpcError as error:
            refused = self._refused(error, doing)
        # Raised here so that gRPC's error is not its context.
        raise refused

    def _refused(self, error: grpc.RpcError, doing: str, *, is_there: bool = False) -> HeliographError:
        """Return the typed error of a failed call, and the reason if no daemon ever answered."""
        found = handshake.typed_error(error, self.address, doing)
        if not is_there and isinstance(found, UnavailableError) and not handshake.is_typed(error):
            return handshake.open_error(error, self.address, self._timeout, self._credentials)
        return found


def _wait_for_end(process: int, started: int, seconds: float) -> bool:
    """Wait until a process has ended. Return False if it has not, after so many seconds.

    Returns True at once for a process that is not on this host, or in another PID namespace.
    """
    try:
        descriptor = os.pidfd_open(process)
    except (OSError, OverflowError, AttributeError):
        return True
    try:
        if not started or _started(process) != started:
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1e3))
    finally:
        os.close(descriptor)


def _started(process: int) -> int:
    try:
        return process_started(Path(f"/proc/{process}/stat").read_text(errors="replace"))
    except OSError:
        return 0
