"""Access of the services to the host, which exists once the devices are ready, and the calls in
progress. Event loop only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from heliograph_proto.errors import LimitExceededError, UnavailableError
from heliograph_server.resources.principals import current_principal
from heliograph_server.resources.quotas import Holding, QuotaKind
from heliograph_server.runtime.host import Host
from heliograph_server.session.session import Session

#: Smaller requests are not counted: as many of them as there may be calls take little.
LEAST_HELD_BYTES = 64 * 1024
#: The most calls at once, unless the configuration has another number.
MOST_CALLS = 16_384


@dataclass(slots=True)
class _Call:
    """A call in progress."""

    #: The number of the session that it has named; 0: none yet.
    session: int = 0


_CALL: ContextVar[_Call | None] = ContextVar("heliograph_call", default=None)


class HeldBytes:
    """The bytes of a request, which count against the quota of its tenant."""

    def __init__(self, slot: HostSlot) -> None:
        self._slot = slot
        self._uncounted = 0
        self._holding: Holding | None = None

    def __enter__(self) -> HeldBytes:
        return self

    def __exit__(self, *_: object) -> None:
        """Give all of them back."""
        if self._holding is not None:
            self._holding.close()

    def add(self, size_bytes: int) -> None:
        """Count further bytes. Raises LimitExceededError beyond the quota `staging_bytes`."""
        self._uncounted += size_bytes
        if self._holding is None:
            if self._uncounted < LEAST_HELD_BYTES:
                return
            self._holding = Holding(self._slot.host.account(current_principal()))
        self._holding.take(QuotaKind.STAGING, self._uncounted)
        self._uncounted = 0


class HostSlot:
    """The host, once its devices are ready."""

    def __init__(self, host: Host | None = None, most_calls: int = MOST_CALLS) -> None:
        self._host = host
        self._most_calls = most_calls
        #: The number of refused calls by the error's reason.
        self.refused: Counter[int] = Counter()
        self._calls = 0
        #: Calls in progress by the number of the session that they named.
        self._calls_of: Counter[int] = Counter()

    def fill(self, host: Host) -> None:
        self._host = host

    @property
    def is_filled(self) -> bool:
        """True if the devices are ready."""
        return self._host is not None

    @property
    def host(self) -> Host:
        """The host. Raises UnavailableError while the devices are starting."""
        if self._host is None:
            raise UnavailableError("the server is starting its devices", advice="try again in a moment")
        return self._host

    @contextmanager
    def calling(self, *, is_operators: bool = False) -> Iterator[None]:
        """Count a call of this task until its end, for the daemon, the caller's tenant, and the
        session that it names. Calls of operators are also taken when the daemon has the most calls,
        so that they can end others.

        Raises LimitExceededError, here or in `session`.
        """
        if self._calls >= self._most_calls and not is_operators:
            raise LimitExceededError(
                f"the server has {self._calls:,} calls in progress, which is the most",
                advice="try again; the operator may raise max_calls",
                retry_after_seconds=1.0,
            )
        host = self._host
        charge = None if host is None else host.account(current_principal()).charge(QuotaKind.CALLS, 1)
        self._calls += 1
        _CALL.set(call := _Call())
        try:
            yield
        finally:
            self._calls -= 1
            if charge is not None:
                charge.give()
            if call.session:
                self._calls_of[call.session] -= 1
                if not self._calls_of[call.session]:
                    del self._calls_of[call.session]

    def holding(self, size_bytes: int = 0) -> HeldBytes:
        """Count the bytes of a request of the caller, within the context that is returned. Raises
        LimitExceededError."""
        held = HeldBytes(self)
        held.add(size_bytes)
        return held

    def session(self, token: bytes) -> Session:
        """A session of the caller, whose calls include this one from now on.

        Raises SessionClosedError, UnavailableError, LimitExceededError.
        """
        found = self.host.session(token, current_principal())
        call = _CALL.get()
        if call is not None and not call.session:
            if self._calls_of[found.number] >= found.limits.calls:
                raise LimitExceededError(
                    f"the session has {found.limits.calls:,} calls in progress, which is the most",
                    advice="wait for earlier calls; the operator may raise the limit 'calls'",
                )
            self._calls_of[found.number] += 1
            call.session = found.number
        return found
