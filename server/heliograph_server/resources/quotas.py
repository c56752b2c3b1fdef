"""Usage and quotas of the tenants of a host, and the usage reported to observers.

All sessions of a tenant share one account. A session takes through its `Holding`, which gives back
the rest when the session ends, in any state. Memory that may outlive a session, such as contents
that other sessions of the tenant hold too, is taken from the account by a `Charge` of its own.

Everything here may be called from any thread.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from functools import lru_cache
from typing import Protocol

from heliograph_proto.errors import HeliographError, LimitExceededError
from heliograph_proto.sessions import Quota, TenantUsage
from heliograph_server.resources.reclaim import BeyondReclaimError, Reclaimable, reclaimed

#: The number of recent releases from which the time until there is room is estimated.
RELEASES = 16
#: Bounds of the retry time in an error, and the time if nothing is known.
SOONEST_SECONDS, LATEST_SECONDS, UNKNOWN_SECONDS = 0.01, 60.0, 1.0


class QuotaKind(StrEnum):
    """A resource of a tenant. `Quota` and `TenantUsage` have fields of these names."""

    SESSIONS = "sessions"
    PLANS = "plans"
    RUNS = "runs_in_flight"
    MEMORY = "device_memory_bytes"
    STAGING = "staging_bytes"
    CALLS = "calls"


_NAMES = {
    QuotaKind.SESSIONS: "sessions",
    QuotaKind.PLANS: "plans",
    QuotaKind.RUNS: "runs in flight",
    QuotaKind.MEMORY: "bytes of device memory",
    QuotaKind.STAGING: "bytes of transfers and contents in transit",
    QuotaKind.CALLS: "calls at once",
}
#: Kinds that are also counted for all tenants together.
_IN_ALL = frozenset((QuotaKind.SESSIONS, QuotaKind.STAGING))
#: The part of all staged bytes that a tenant may have without a quota of its own.
STAGING_SHARE = 2
_ADVICE = {
    QuotaKind.SESSIONS: "close a session",
    QuotaKind.PLANS: "free a plan",
    QuotaKind.RUNS: "wait for a run to end",
    QuotaKind.MEMORY: "free tensors or plans",
    QuotaKind.STAGING: "wait for earlier transfers",
    QuotaKind.CALLS: "end a call",
}


class Freed(Protocol):
    """Memory with a callback for its end."""

    def free(self) -> None: ...

    def when_freed(self, call: Callable[[], None]) -> None: ...


class Account:
    """The account of one tenant. Thread-safe. Its lock is not held during calls to others."""

    def __init__(
        self,
        tenant: str = "",
        quota: Quota | None = None,
        clock: Callable[[], float] = time.monotonic,
        total: Account | None = None,
    ) -> None:
        """`total` counts some kinds for all tenants together, and limits them too."""
        self.tenant = tenant
        self._total = total
        #: Limits new usage; existing usage stays.
        self.quota = quota or Quota()
        self._clock = clock
        self._lock = threading.Lock()
        self._used: dict[QuotaKind, int] = dict.fromkeys(QuotaKind, 0)
        self._releases: dict[QuotaKind, deque[tuple[float, int]]] = {}
        self._owners: dict[Reclaimable, None] = {}
        self._device_seconds = 0.0
        self._refused = 0

    def __repr__(self) -> str:
        used = ", ".join(f"{kind}: {count:,}" for kind, count in self._used.items() if count)
        return f"<Account of {self.tenant or 'all tenants'}: {used or 'nothing used'}>"

    def usage(self) -> TenantUsage:
        """The usage of the tenant now."""
        with self._lock:
            used = {str(kind): count for kind, count in self._used.items()}
            last = {"device_seconds": self._device_seconds, "refused": self._refused, "quota": self.quota}
            return TenantUsage(self.tenant, **used, **last)  # type: ignore[arg-type]

    def had(self, seconds: float) -> None:
        """Add device time in seconds."""
        with self._lock:
            self._device_seconds += seconds

    # Taking and giving back

    def has_room(self, kind: QuotaKind, amount: int = 1) -> bool:
        """True if the amount would fit now. Takes nothing, and is cheap."""
        limit = getattr(self.quota, kind)
        return not limit or self._used[kind] + amount <= limit

    def left(self, kind: QuotaKind) -> int | None:
        """Return the amount that the quota leaves; None: it has no limit."""
        limit = getattr(self.quota, kind)
        return max(0, limit - self._used[kind]) if limit else None

    def take(self, kind: QuotaKind, amount: int = 1, *, by_force: bool = False) -> None:
        """Take an amount; `by_force` for what exists already, without a check.

        Raises LimitExceededError, or OutOfMemoryError for device memory, with nothing taken.
        """
        may_reclaim = kind is QuotaKind.MEMORY
        while True:
            with self._lock:
                if fits := by_force or self.has_room(kind, amount):
                    self._used[kind] += amount
            if fits:
                self._take_of_total(kind, amount, by_force=by_force)
                return
            # Reclaim the tenant's own idle memory before refusing; other tenants keep theirs.
            if not may_reclaim or not self._make_room():
                raise self._refusal(kind, amount)
            may_reclaim = False

    def _take_of_total(self, kind: QuotaKind, amount: int, *, by_force: bool) -> None:
        """Take the same amount of what all tenants have together, or give back the tenant's."""
        if self._total is None or kind not in _IN_ALL:
            return
        try:
            self._total.take(kind, amount, by_force=by_force)
        except HeliographError:
            with self._lock:
                self._used[kind] -= amount
                self._refused += 1
            raise

    def give(self, kind: QuotaKind, amount: int = 1) -> None:
        """Give back an amount."""
        if self._total is not None and kind in _IN_ALL:
            self._total.give(kind, amount)
        with self._lock:
            self._used[kind] -= amount
            if getattr(self.quota, kind):
                self._releases.setdefault(kind, deque(maxlen=RELEASES)).append((self._clock(), amount))

    def charge(self, kind: QuotaKind, amount: int, *, by_force: bool = False) -> Charge:
        """As `take`, with a `Charge` that gives it back."""
        self.take(kind, amount, by_force=by_force)
        return Charge(self, kind, amount)

    def _make_room(self) -> bool:
        with self._lock:
            owners = list(self._owners)
        return reclaimed(owners)

    def join(self, owner: Reclaimable) -> None:
        """Register an owner of memory that is reclaimed before memory is refused."""
        with self._lock:
            self._owners[owner] = None

    def leave(self, owner: Reclaimable) -> None:
        """Undo `join`. Idempotent."""
        with self._lock:
            self._owners.pop(owner, None)

    # Refusing

    def _refusal(self, kind: QuotaKind, amount: int) -> HeliographError:
        with self._lock:
            self._refused += 1
            limit, used = getattr(self.quota, kind), self._used[kind]
            seconds = self._seconds_until(kind, used + amount - limit)
        name = f"tenant {self.tenant!r}" if self.tenant else "this server"
        more = f"{amount:,} more" if amount > 1 else "one more"
        message = f"the quota of {name} is {limit:,} {_NAMES[kind]}: {used:,} are used, so not {more}"
        refused: type[HeliographError] = (
            BeyondReclaimError if kind is QuotaKind.MEMORY else LimitExceededError
        )
        if amount > limit:
            return refused(message, advice="ask for less, or have the operator raise the quota")
        advice = f"{_ADVICE[kind]}, or try again in about {seconds:.2g} s; the operator may raise the quota"
        return refused(message, advice=advice, retry_after_seconds=seconds)

    def _seconds_until(self, kind: QuotaKind, amount: int) -> float:
        """The time in seconds until the amount will have been given back, at the recent rate."""
        releases = self._releases.get(kind)
        if not releases or (passed := self._clock() - releases[0][0]) <= 0:
            return UNKNOWN_SECONDS
        given = sum(size for _, size in releases)
        return min(max(amount * passed / max(given, 1), SOONEST_SECONDS), LATEST_SECONDS)


class Charge:
    """An amount of an account, until it is given back. Thread-safe."""

    __slots__ = ("_account", "_amount", "_kind")

    def __init__(self, account: Account, kind: QuotaKind, amount: int) -> None:
        self._account = account
        self._kind = kind
        self._amount = [amount]

    def __repr__(self) -> str:
        return f"<Charge {self._kind}: {sum(self._amount):,}>"

    def give(self) -> None:
        """Give it back. Idempotent."""
        try:
            amount = self._amount.pop()
        except IndexError:
            return
        self._account.give(self._kind, amount)


class Holding:
    """The share of a tenant's account that one session has taken. Thread-safe."""

    def __init__(self, account: Account | None = None) -> None:
        self.account = account or Account()
        self._lock = threading.Lock()
        self._held: Counter[QuotaKind] = Counter()
        self._is_over = False

    def __repr__(self) -> str:
        return f"<Holding {dict(self._held)} of {self.account!r}>"

    def has_room(self, kind: QuotaKind) -> bool:
        """True if one more would fit now."""
        return self.account.has_room(kind)

    def take(self, kind: QuotaKind, amount: int = 1, *, by_force: bool = False) -> None:
        """As `Account.take`."""
        self.account.take(kind, amount, by_force=by_force)
        with self._lock:
            is_over = self._is_over
            if not is_over:
                self._held[kind] += amount
        if is_over:
            self.account.give(kind, amount)

    def give(self, kind: QuotaKind, amount: int = 1) -> None:
        """Give back what was taken. Everything is given back when the session ends."""
        with self._lock:
            given = min(amount, self._held[kind])
            self._held[kind] -= given
        if given:
            self.account.give(kind, given)

    @contextmanager
    def taken(self, kind: QuotaKind, amount: int = 1, *, by_force: bool = False) -> Iterator[None]:
        """As `take`, undone if the body of the context fails."""
        self.take(kind, amount, by_force=by_force)
        try:
            yield
        except BaseException:
            self.give(kind, amount)
            raise

    def charge(self, size_bytes: int, made: Freed) -> None:
        """Charge device memory until it is freed. Raises OutOfMemoryError, and frees the memory
        then."""
        try:
            charge = self.account.charge(QuotaKind.MEMORY, size_bytes)
        except BaseException:
            made.free()
            raise
        made.when_freed(charge.give)

    def close(self) -> None:
        """Give back the rest. Idempotent."""
        with self._lock:
            self._is_over = True
            left, self._held = self._held, Counter()
        for kind, amount in left.items():
            if amount:
                self.account.give(kind, amount)


class QuotaShare:
    """A `FairFlow`: a tenant, or one of the unnamed callers that can be told apart."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self.had = account.had

    def __repr__(self) -> str:
        return f"<QuotaShare of {self._account!r}>"

    @property
    def weight(self) -> float:
        return max(self._account.quota.weight, 1e-3)


class Tenants:
    """The accounts of a host. Thread-safe.

    Without tenants' names all sessions share one account, but device time is shared among callers
    that can be told apart: by a tenant's secret, or else by session.
    """

    def __init__(self, total: Quota | None = None) -> None:
        """`total`: what all tenants may have together."""
        self._lock = threading.Lock()
        self._total = Account(quota=total or Quota(sessions=0))
        self._accounts: dict[str, Account] = {}
        #: By account and secret, with the number of sessions.
        self._shares: dict[tuple[str, bytes], tuple[QuotaShare, int]] = {}

    def __repr__(self) -> str:
        return f"<Tenants {', '.join(map(repr, self._accounts.values()))}>"

    def account(self, tenant: str, quota: Quota) -> Account:
        """The account of a tenant, updated to this quota."""
        with self._lock:
            found = self._accounts.get(tenant)
            if found is None:
                found = self._accounts[tenant] = Account(tenant, total=self._total)
        found.quota = _with_default(quota, self._total.quota.staging_bytes)
        return found

    def change(self, tenant: str, quota: Quota) -> None:
        """Change the quota of a tenant that has an account. It limits new usage; existing usage
        stays."""
        with self._lock:
            found = self._accounts.get(tenant)
        if found is not None:
            found.quota = _with_default(quota, self._total.quota.staging_bytes)

    def enter(self, account: Account, secret: bytes) -> QuotaShare:
        """The share of one more session. The caller must `leave` it."""
        key = account.tenant, b"" if account.tenant else secret
        if not any(key):
            return QuotaShare(account)
        with self._lock:
            share, count = self._shares.get(key) or (QuotaShare(account), 0)
            self._shares[key] = share, count + 1
        return share

    def leave(self, share: QuotaShare) -> None:
        """End a session's use of a share. A share without name or secret needs no `leave`."""
        with self._lock:
            for key, (one, count) in list(self._shares.items()):
                if one is share:
                    self._shares[key] = one, count - 1
                    if count == 1:
                        del self._shares[key]

    def usages(self) -> tuple[TenantUsage, ...]:
        """The usage of each tenant, sorted by name."""
        with self._lock:
            accounts = sorted(self._accounts.values(), key=lambda one: one.tenant)
        return tuple(one.usage() for one in accounts)


# Every call asks.
@lru_cache
def _with_default(quota: Quota, staging_bytes: int) -> Quota:
    """The quota, with a share of all staged bytes if it says nothing about them."""
    if quota.staging_bytes or not staging_bytes:
        return quota
    return replace(quota, staging_bytes=max(1, staging_bytes // STAGING_SHARE))
