"""Disturbances of clients, connections, members and rights, and the errors that each explains."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from heliograph_proto.errors import HeliographError
from soaking.clients import Failure
from soaking.site import GUEST, Site

#: The time after a disturbance in which a client may still run into it.
GRACE_SECONDS = 3.0


@dataclass
class Disturbance:
    """One event, the clients that may fail by it, and the errors that they may get."""

    kind: str
    clients: frozenset[str] = frozenset()
    classes: frozenset[str] = frozenset()
    began: float = field(default_factory=time.monotonic)
    ended: float = float("inf")

    def explains(self, failure: Failure) -> bool:
        """True if a failure may come of this."""
        return (
            failure.client in self.clients
            and not self.classes.isdisjoint(failure.classes)
            and failure.ended >= self.began
            and failure.began <= self.ended + GRACE_SECONDS
        )


class Disturber:
    """Draws disturbances like cards, so that all kinds come equally often."""

    def __init__(self, site: Site, chance: random.Random) -> None:
        self._site, self._chance = site, chance
        self._deck: list[str] = []
        self._ended = threading.Event()
        self.kinds: dict[str, Callable[[Disturbance], None]] = {
            "kill a client": self._kill,
            "stop a client": self._stop,
            "cut connections": self._cut,
            "end a session": self._end_session,
            "reload tokens": self._reload,
            "revoke a token": self._revoke,
            "drain, stay, undo": self._drain,
            "kill a member": self._kill_member,
            "stop a member": self._stop_member,
        }
        self.done: list[Disturbance] = []
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []

    def disturb(self, seconds: float) -> None:
        """Disturb for this time, or for as long as the last one takes."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not self._deck:
                self._deck = [*self.kinds]
                self._chance.shuffle(self._deck)
            kind = self._deck.pop()
            one = Disturbance(kind)
            self.done.append(one)
            self.counts[kind] += 1
            try:
                self.kinds[kind](one)
            except Exception as error:
                self.faults.append(f"the disturbance {kind!r} failed: {error!r}")
            one.ended = time.monotonic()
            self._wait(0.2, 0.6)

    def unexplained(self, failures: list[Failure]) -> list[Failure]:
        """Return the failures that no disturbance explains."""
        return [one for one in failures if not any(cause.explains(one) for cause in self.done)]

    def forget(self, before: float) -> None:
        """Forget what ended long ago."""
        self.done = [one for one in self.done if one.ended > before]

    def _wait(self, least: float, most: float) -> None:
        self._ended.wait(self._chance.uniform(least, most))

    def _client(self) -> str:
        return self._chance.choice([*self._site.clients])

    def _kill(self, one: Disturbance) -> None:
        client = self._site.clients[self._client()]
        client.kill()
        self._wait(0.1, 0.3)
        client.revive()

    def _stop(self, one: Disturbance) -> None:
        client = self._site.clients[self._client()]
        client.signal(signal.SIGSTOP)
        self._wait(0.5, 1.5)
        client.signal(signal.SIGCONT)

    def _cut(self, one: Disturbance) -> None:
        one.clients = frozenset({"cut"})
        # Before HTTP/2's first frame, a connection that is cut looks like one of another program.
        one.classes = frozenset({"UnavailableError", "SessionClosedError", "NotHeliographError"})
        for _ in range(self._chance.randint(1, 5)):
            self._site.proxy.drop()
            self._wait(0.02, 0.2)

    def _end_session(self, one: Disturbance) -> None:
        one.clients, one.classes = self._site.names, frozenset({"SessionClosedError"})
        found = self._site.operator.sessions()
        for session in self._chance.sample(found, min(len(found), 3)):
            # It may have ended by itself.
            with suppress(HeliographError):
                self._site.operator.end_session(session.number, "a soak")

    def _reload(self, one: Disturbance) -> None:
        for number in range(3):
            name = f"passing{number}"
            self._site.tokens.add(name)
            self._site.reload()
            self._wait(0.05, 0.2)
            self._site.revoke(name)

    def _revoke(self, one: Disturbance) -> None:
        one.clients = frozenset({GUEST})
        one.classes = frozenset({"UnauthenticatedError", "SessionClosedError"})
        self._site.revoke(GUEST)
        self._wait(0.5, 1.0)
        self._site.admit(GUEST)

    def _drain(self, one: Disturbance) -> None:
        one.clients = self._site.names
        # A feed whose loop the drain ended has the loop's reason in its text.
        one.classes = frozenset({"DrainingError", "SessionClosedError", "LoopEndedError"})
        self._site.operator.drain(self._chance.choice((0.2, 5.0)), stay=True)
        self._wait(0.2, 0.8)
        self._site.operator.undo_drain()

    def _members_lost(self, one: Disturbance) -> None:
        one.clients = self._site.pool_names
        one.classes = frozenset({"DeviceLostError", "UnknownDeviceError"})

    def _kill_member(self, one: Disturbance) -> None:
        # The first member lives on, and is sampled.
        member = self._chance.choice(self._site.members[1:])
        self._members_lost(one)
        member.kill()
        self._wait(0.1, 0.5)
        member.restart()
        self._joined()

    def _stop_member(self, one: Disturbance) -> None:
        member = self._chance.choice(self._site.members[1:])
        self._members_lost(one)
        member.stop()
        self._wait(0.2, 2.0)
        member.resume()
        self._joined()

    def _joined(self) -> None:
        if wrong := self._site.wait_for_members():
            self.faults.append(wrong)
