"""The places of sessions that go from daemon to daemon, and who may claim them. Pure.

here ── begin ──▸ on its way ── give_up ──▸ elsewhere, for its lease
                      └── end ──▸ here
image ── offer ──▸ unclaimed ── claim, by who has its secret ──▸ here
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from heliograph_proto.errors import MovedError, UnavailableError


@dataclass(slots=True)
class _Gone:
    """A session that another daemon has."""

    error: MovedError
    tenant: str
    until: float
    #: True once its client has heard of it.
    is_told: bool = False


class Departures:
    """The sessions of one daemon that go, and those that are gone, by their secret here."""

    def __init__(self) -> None:
        self._gone: dict[bytes, _Gone] = {}
        self._moving: set[Hashable] = set()

    def __repr__(self) -> str:
        return f"<Departures: {len(self._gone)} gone, {len(self._moving)} on their way>"

    def begin(self, session: Hashable) -> None:
        """A session is about to go. Raises UnavailableError for one that is on its way."""
        if session in self._moving:
            raise UnavailableError("the session is being moved already", advice="wait for that move")
        self._moving.add(session)

    def end(self, session: Hashable) -> None:
        """A session is gone, or stays."""
        self._moving.discard(session)

    def check(self, session: Hashable) -> None:
        """Raise UnavailableError while a session is on its way, so that nothing attaches to it."""
        if session in self._moving:
            raise UnavailableError("the session is on its way to another daemon", advice="attach in a moment")

    def give_up(self, token: bytes, error: MovedError, tenant: str, until: float, *, is_told: bool) -> None:
        """Another daemon has a session from now on. `is_told`: its client hears of it at once."""
        self._gone[token] = _Gone(error, tenant, until, is_told)

    def where(self, token: bytes, tenant: str | None, now: float) -> MovedError | None:
        """Return the error that tells the client of a session where it is; None: not elsewhere.

        `tenant` is that of the caller; None: not known."""
        self._drop_old(now)
        found = self._gone.get(token)
        if found is None or tenant not in (None, found.tenant):
            return None
        found.is_told = True
        return found.error.at(found.error.origin)

    def untold(self, now: float) -> int:
        """The number of sessions elsewhere whose clients have not heard of it, and may still come."""
        self._drop_old(now)
        return sum(not one.is_told for one in self._gone.values())

    def _drop_old(self, now: float) -> None:
        for token in [token for token, one in self._gone.items() if one.until <= now]:
            del self._gone[token]


class Arrivals:
    """The sessions of one daemon that were restored and had no client here, by their places."""

    def __init__(self) -> None:
        #: By the digest of the secret.
        self._places: dict[bytes, bytes] = {}

    def __repr__(self) -> str:
        return f"<Arrivals: {len(self._places)} unclaimed>"

    def __bool__(self) -> bool:
        return bool(self._places)

    def offer(self, secret_digest: bytes, place: bytes) -> None:
        """A session waits at a place for who has its secret."""
        self._places[secret_digest] = place

    def claim(self, secret_digest: bytes) -> bytes | None:
        """Return the place of the session with a secret, once; None: there is none."""
        return self._places.pop(secret_digest, None)

    def is_unclaimed(self, place: bytes) -> bool:
        """True if the session at a place has had no client here."""
        return place in self._places.values()

    def forget(self, place: bytes) -> None:
        """Forget a session that has ended."""
        self._places = {digest: one for digest, one in self._places.items() if one != place}
