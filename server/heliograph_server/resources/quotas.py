"""What the tenants of a host have: accounts, held against quotas, and what is told to whoever looks on.

All sessions of a tenant draw on one account. What a session takes goes through its `Holding`, which gives
back whatever is left when the session ends, in any state. Memory that may outlive a session, contents that
others of its tenant hold as well, is drawn from the account itself, by a `Charge` that goes with it.

Any thread.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Protocol

from heliograph_proto.errors import HeliographError, LimitExceededError, OutOfMemoryError
from heliograph_proto.sessions import Quota, TenantUsage
from heliograph_server.resources.principals import Principal

#: Of the releases from which is told when there may be room again: the last so many.
RELEASES = 16
#: The soonest and the latest that somebody is told to come back, and what is said when nothing is known.
SOONEST_SECONDS, LATEST_SECONDS, UNKNOWN_SECONDS = 0.01, 60.0, 1.0


class QuotaKind(StrEnum):
    """What a tenant has so much of. The fields of `Quota` and of `TenantUsage` have these names."""

    SESSIONS = "sessions"
    PLANS = "plans"
    RUNS = "runs_in_flight"
    MEMORY = "device_memory_bytes"
    STAGING = "staging_bytes"


_NAMES = {
    QuotaKind.SESSIONS: "sessions",
    QuotaKind.PLANS: "plans",
    QuotaKind.RUNS: "runs in flight",
    QuotaKind.MEMORY: "bytes of devices' memory",
    QuotaKind.STAGING: "bytes of transfers and contents on their way",
}
_ADVICE = {
    QuotaKind.SESSIONS: "close a session",
    QuotaKind.PLANS: "free a plan",
    QuotaKind.RUNS: "wait for a run to end",
    QuotaKind.MEMORY: "free tensors or plans",
    QuotaKind.STAGING: "wait for earlier transfers",
}


class TenantReclaimable(Protocol):
    """Whoever keeps memory of a tenant that nobody uses."""

    def make_room(self) -> bool:
        """Gives it back. Whether there was any."""


class Freed(Protocol):
    """Memory that somebody can be told the end of."""

    def free(self) -> None: ...

    def when_freed(self, call: Callable[[], None]) -> None: ...


class Account:
    """One tenant's. Thread-safe. Its lock is held for no call to others."""

    def __init__(
        self, tenant: str = "", quota: Quota | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.tenant = tenant
        #: What comes next is held against it; what is there stays.
        self.quota = quota or Quota()
        self._clock = clock
        self._lock = threading.Lock()
        self._used: dict[QuotaKind, int] = dict.fromkeys(QuotaKind, 0)
        self._releases: dict[QuotaKind, deque[tuple[float, int]]] = {}
        self._givers: dict[TenantReclaimable, None] = {}
        self._device_seconds = 0.0
        self._refused = 0

    def __repr__(self) -> str:
        used = ", ".join(f"{kind}: {count:,}" for kind, count in self._used.items() if count)
        return f"<Account of {self.tenant or 'everybody'} {used or 'without anything'}>"

    def usage(self) -> TenantUsage:
        """What the tenant has now."""
        with self._lock:
            used = {str(kind): count for kind, count in self._used.items()}
            last = {"device_seconds": self._device_seconds, "refused": self._refused, "quota": self.quota}
            return TenantUsage(self.tenant, **used, **last)  # type: ignore[arg-type]

    def had(self, seconds: float) -> None:
        """It had a device for so long."""
        with self._lock:
            self._device_seconds += seconds

    # Taking and giving

    def has_room(self, kind: QuotaKind, amount: int = 1) -> bool:
        """Whether so much more could be had now. Takes nothing, and costs next to nothing."""
        limit = getattr(self.quota, kind)
        return not limit or self._used[kind] + amount <= limit

    def take(self, kind: QuotaKind, amount: int = 1, *, by_force: bool = False) -> None:
        """Counts so much more; `by_force`: of what is there already. Raises LimitExceededError, for memory of
        devices OutOfMemoryError, with nothing taken."""
        if self._try(kind, amount, by_force):
            return
        # The tenant's own, before it is refused; others keep theirs.
        if kind is QuotaKind.MEMORY and self._make_room() and self._try(kind, amount, by_force):
            return
        raise self._refusal(kind, amount)

    def _try(self, kind: QuotaKind, amount: int, by_force: bool) -> bool:
        with self._lock:
            is_room = by_force or self.has_room(kind, amount)
            if is_room:
                self._used[kind] += amount
            return is_room

    def give(self, kind: QuotaKind, amount: int = 1) -> None:
        """Counts so much less."""
        with self._lock:
            self._used[kind] -= amount
            if getattr(self.quota, kind):
                self._releases.setdefault(kind, deque(maxlen=RELEASES)).append((self._clock(), amount))

    def charge(self, kind: QuotaKind, amount: int, *, by_force: bool = False) -> Charge:
        """As `take`; what is given back with the charge."""
        self.take(kind, amount, by_force=by_force)
        return Charge(self, kind, amount)

    def _make_room(self) -> bool:
        with self._lock:
            givers = list(self._givers)
        made = [giver.make_room() for giver in givers]
        return any(made)

    def join(self, giver: TenantReclaimable) -> None:
        """From now on it is asked before memory is refused."""
        with self._lock:
            self._givers[giver] = None

    def leave(self, giver: TenantReclaimable) -> None:
        """Undoes `join`. Idempotent."""
        with self._lock:
            self._givers.pop(giver, None)

    # Refusing

    def _refusal(self, kind: QuotaKind, amount: int) -> HeliographError:
        with self._lock:
            self._refused += 1
            limit, used = getattr(self.quota, kind), self._used[kind]
            seconds = self._seconds_until(kind, used + amount - limit)
        name = f"tenant {self.tenant!r}" if self.tenant else "this server"
        more = f"{amount:,} more" if amount > 1 else "one more"
        message = f"the quota of {name} is {limit:,} {_NAMES[kind]}: {used:,} are used, so not {more}"
        refused: type[HeliographError] = OutOfMemoryError if kind is QuotaKind.MEMORY else LimitExceededError
        if amount > limit:
            return refused(message, advice="ask for less, or have the operator raise the quota")
        advice = f"{_ADVICE[kind]}, or try again in about {seconds:.2g} s; the operator may raise the quota"
        return refused(message, advice=advice, retry_after_seconds=seconds)

    def _seconds_until(self, kind: QuotaKind, amount: int) -> float:
        """After about how long so much will have been given back, as things went lately."""
        releases = self._releases.get(kind)
        if not releases or (passed := self._clock() - releases[0][0]) <= 0:
            return UNKNOWN_SECONDS
        given = sum(size for _, size in releases)
        return min(max(amount * passed / max(given, 1), SOONEST_SECONDS), LATEST_SECONDS)


class Charge:
    """So much of an account, until it is given back. Thread-safe."""

    __slots__ = ("_account", "_amount", "_kind")

    def __init__(self, account: Account, kind: QuotaKind, amount: int) -> None:
        self._account = account
        self._kind = kind
        self._amount = [amount]

    def __repr__(self) -> str:
        return f"<Charge {self._kind}: {sum(self._amount):,}>"

    def give(self) -> None:
        """Idempotent."""
        try:
            amount = self._amount.pop()
        except IndexError:
            return
        self._account.give(self._kind, amount)


class Holding:
    """What one session has of its tenant's account. Thread-safe."""

    def __init__(self, account: Account | None = None) -> None:
        self.account = account or Account()
        self._lock = threading.Lock()
        self._held: Counter[QuotaKind] = Counter()
        self._is_over = False

    def __repr__(self) -> str:
        return f"<Holding {dict(self._held)} of {self.account!r}>"

    def has_room(self, kind: QuotaKind) -> bool:
        """Whether one more could be had now."""
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
        """Gives back what was taken; of a session that is over everything has been."""
        with self._lock:
            given = min(amount, self._held[kind])
            self._held[kind] -= given
        if given:
            self.account.give(kind, given)

    @contextmanager
    def taken(self, kind: QuotaKind, amount: int = 1, *, by_force: bool = False) -> Iterator[None]:
        """As `take`, unless what is done inside fails."""
        self.take(kind, amount, by_force=by_force)
        try:
            yield
        except BaseException:
            self.give(kind, amount)
            raise

    def charge(self, size_bytes: int, made: Freed) -> None:
        """Counts so much of devices' memory until it is freed. Raises OutOfMemoryError, and frees it."""
        try:
            charge = self.account.charge(QuotaKind.MEMORY, size_bytes)
        except BaseException:
            made.free()
            raise
        made.when_freed(charge.give)

    def close(self) -> None:
        """Gives back what is left. Idempotent."""
        with self._lock:
            self._is_over = True
            left, self._held = self._held, Counter()
        for kind, amount in left.items():
            if amount:
                self.account.give(kind, amount)


class QuotaShare:
    """Whoever has a share of devices, as `fair.Flow`: a tenant, or one of those that have no names."""

    def __init__(self, account: Account) -> None:
        self._account = account

    def __repr__(self) -> str:
        return f"<Share of {self._account!r}>"

    @property
    def weight(self) -> float:
        return max(self._account.quota.weight, 1e-3)

    def had(self, seconds: float) -> None:
        self._account.had(seconds)


class Tenants:
    """The accounts of a host. Thread-safe.

    Where there are no names everybody draws on one account, but time on devices is shared among those that
    can be told apart: by the secret of a tenant, and without one, by session.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._accounts: dict[str, Account] = {}
        #: By account and secret, with how many sessions there are.
        self._shares: dict[tuple[str, bytes], tuple[QuotaShare, int]] = {}

    def __repr__(self) -> str:
        return f"<Tenants {', '.join(map(repr, self._accounts.values()))}>"

    def account(self, principal: Principal) -> Account:
        """Of whoever asks; from now on with the quota that it has now."""
        with self._lock:
            found = self._accounts.get(principal.tenant)
            if found is None:
                found = self._accounts[principal.tenant] = Account(principal.tenant)
        found.quota = principal.quota
        return found

    def change(self, tenant: str, quota: Quota) -> None:
        """Another quota of a tenant that has an account, for what comes next; what is there stays."""
        with self._lock:
            found = self._accounts.get(tenant)
        if found is not None:
            found.quota = quota

    def enter(self, account: Account, secret: bytes) -> QuotaShare:
        """The share of one more session. `leave` it."""
        key = account.tenant, b"" if account.tenant else secret
        if not any(key):
            return QuotaShare(account)
        with self._lock:
            share, count = self._shares.get(key) or (QuotaShare(account), 0)
            self._shares[key] = share, count + 1
        return share

    def leave(self, share: QuotaShare) -> None:
        """The session is over. Idempotent only for what was never entered by a name."""
        with self._lock:
            for key, (one, count) in list(self._shares.items()):
                if one is share:
                    self._shares[key] = one, count - 1
                    if count == 1:
                        del self._shares[key]

    def usages(self) -> tuple[TenantUsage, ...]:
        """What each has, by name."""
        with self._lock:
            accounts = sorted(self._accounts.values(), key=lambda one: one.tenant)
        return tuple(one.usage() for one in accounts)
