"""Browsers that have signed in with a token: a random name for each, in a cookie. Pure.

The cookie is no token: it is valid for this run of the daemon, ends an hour after its last use and
twelve hours after the sign-in, and is kept here as a hash only.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from heliograph_proto.errors import LimitExceededError, UnauthenticatedError
from heliograph_server.resources.principals import Principal

#: The longest time without a request, and since the sign-in.
IDLE_SECONDS, MOST_SECONDS = 3600.0, 12 * 3600.0
#: The most browsers at once; the one that was idle longest gives its place.
MOST_BROWSERS = 512
#: The most browsers of one token; again the one that was idle longest gives its place.
MOST_OF_TOKEN = 32
#: The most failed sign-ins of an address in a minute, and of all.
MOST_FAILURES, MOST_FAILURES_OF_ALL, MINUTE = 10, 100, 60.0
_NAME_BYTES = 32
_AGAIN = "sign in again with a token"


@dataclass(slots=True)
class Browser:
    """A browser that has signed in. Times are by the clock of `Browsers`."""

    principal: Principal
    signed_in: float
    used: float
    #: True once it has signed out, or its time or place is over.
    is_out: bool = False


class Browsers:
    """The browsers that have signed in, by the hash of their name. For one thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._browsers: OrderedDict[bytes, Browser] = OrderedDict()
        self._failures: Counter[str] = Counter()
        self._minute = float("-inf")

    def __len__(self) -> int:
        return len(self._browsers)

    def __repr__(self) -> str:
        return f"<Browsers: {len(self)}>"

    def add(self, principal: Principal) -> str:
        """Sign a browser in, and return its name for the cookie."""
        name, now = secrets.token_urlsafe(_NAME_BYTES), self._clock()
        mine = [key for key, one in self._browsers.items() if one.principal.key == principal.key]
        if len(mine) >= MOST_OF_TOKEN:
            self._browsers.pop(mine[0]).is_out = True
        self._browsers[_hash(name)] = Browser(principal, now, now)
        while len(self._browsers) > MOST_BROWSERS:
            self._browsers.popitem(last=False)[1].is_out = True
        return name

    def find(self, name: str) -> Browser:
        """Return a browser by the name in its cookie, and note that it was used. Raises
        UnauthenticatedError."""
        key = _hash(name)
        found = self._browsers.get(key)
        if found is None:
            raise UnauthenticatedError("you are signed out, or the daemon has restarted", advice=_AGAIN)
        try:
            self.use(found)
        except UnauthenticatedError:
            del self._browsers[key]
            raise
        self._browsers.move_to_end(key)
        return found

    def use(self, browser: Browser) -> None:
        """Note that a browser is in use. Raises UnauthenticatedError once its time is over."""
        now = self._clock()
        if now - browser.used > IDLE_SECONDS or now - browser.signed_in > MOST_SECONDS:
            browser.is_out = True
        if browser.is_out:
            raise UnauthenticatedError("you are signed out: your time is over", advice=_AGAIN)
        browser.used = now

    def remove(self, name: str) -> None:
        """Sign a browser out. Idempotent."""
        if (found := self._browsers.pop(_hash(name), None)) is not None:
            found.is_out = True

    # Failed sign-ins

    def check_failures(self, peer: str) -> None:
        """Check that an address may try another token. Raises LimitExceededError."""
        if (now := self._clock()) - self._minute >= MINUTE:
            self._failures.clear()
            self._minute = now
        if self._failures[peer] >= MOST_FAILURES or self._failures.total() >= MOST_FAILURES_OF_ALL:
            raise LimitExceededError(
                "too many sign-ins have failed", advice="try again in a minute", retry_after_seconds=MINUTE
            )

    def failed(self, peer: str) -> None:
        """Count a failed sign-in of an address."""
        self._failures[peer] += 1


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
