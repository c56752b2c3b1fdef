"""Virtual time: events in the order of their moments, with random delays from one seed."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

#: The most events of a schedule. More mean that something goes on for ever.
MOST_EVENTS = 50_000


class Violation(AssertionError):
    """An invariant that does not hold."""


def hold(condition: bool, what: str) -> None:
    """Raise Violation unless an invariant holds."""
    if not condition:
        raise Violation(what)


class World:
    """A clock and the events to come. Equal moments keep the order in which they were planned."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Plan an event."""
        self.at(self.now + seconds, event)

    def at(self, moment: float, event: Callable[[], None]) -> None:
        """Plan an event for a moment."""
        self._planned += 1
        heapq.heappush(self._events, (moment, self._planned, event))

    def soon(self, event: Callable[[], None], most_seconds: float = 1.0) -> None:
        """Plan an event after a random delay; sometimes at once, sometimes late."""
        delay = self.random.choice((0.0, 0.1, 1.0)) * self.random.random() * most_seconds
        self.after(delay, event)

    def chance(self, share: float) -> bool:
        """True in this share of the cases."""
        return self.random.random() < share

    def run(self, checked: Callable[[], None]) -> int:
        """Let all events happen, and check the invariants after each. Return their number."""
        for count in range(MOST_EVENTS):
            if not self._events:
                return count
            self.now, _, event = heapq.heappop(self._events)
            event()
            checked()
        raise Violation(f"still busy after {MOST_EVENTS:,} events")


class Wire:
    """One direction of a connection: messages arrive in order, after random delays."""

    def __init__(self, world: World, most_seconds: float = 1.0) -> None:
        self._world = world
        self._most_seconds = most_seconds
        self._arrival = 0.0
        self.is_cut = False

    def send(self, arrive: Callable[[], None]) -> None:
        """Deliver a message, unless the connection is cut before it arrives."""
        delay = self._world.random.choice((0.0, 0.1, 1.0)) * self._world.random.random() * self._most_seconds
        self._arrival = max(self._arrival, self._world.now + delay)
        self._world.at(self._arrival, lambda: None if self.is_cut else arrive())
