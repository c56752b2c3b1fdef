"""Clients that want one device, on a clock of their own: what the fair queue makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from heliograph_server.resources.fair_queue import FairQueue, Ticket


@dataclass(eq=False)
class Tenant:
    """One that keeps so many runs in flight, each so long, and thinks for a while before the next one."""

    run_seconds: float
    in_flight: int = 1
    weight: float = 1.0
    think_seconds: float = 0.0
    comes_at: float = 0.0
    device_seconds: float = 0.0
    #: How long each of its runs waited.
    waits: list[float] = field(default_factory=list)

    def had(self, seconds: float) -> None:
        self.device_seconds += seconds


class Sharing:
    """A device that computes whatever has begun, each run in its time."""

    def __init__(self, tenants: list[Tenant], queue: FairQueue | None = None) -> None:
        self.queue = queue or FairQueue()
        self.now = 0.0
        #: The most runs at once.
        self.most = 0
        self._running = 0
        self._numbers = count()
        #: When each run arrives, or ends.
        self._events: list[tuple[float, int, Tenant, Ticket | None]] = []
        self._arrived: dict[Ticket, float] = {}
        for tenant in tenants:
            for _ in range(tenant.in_flight):
                self._at(tenant.comes_at, tenant, None)

    def _at(self, when: float, tenant: Tenant, ticket: Ticket | None) -> None:
        heappush(self._events, (when, next(self._numbers), tenant, ticket))

    def until(self, seconds: float) -> None:
        """Goes on until then."""
        while self._events and self._events[0][0] <= seconds:
            self.now, _, tenant, ticket = heappop(self._events)
            if ticket is None:
                ticket = Ticket(tenant)
                self._arrived[ticket] = self.now
                self._begin(self.queue.arrive(ticket, self.now))
            else:
                self._running -= 1
                self._at(self.now + tenant.think_seconds, tenant, None)
                self._begin(self.queue.end(ticket, self.now))

    def _begin(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            tenant = ticket.flow
            assert isinstance(tenant, Tenant) and ticket.has_begun
            tenant.waits.append(self.now - self._arrived.pop(ticket))
            self._running += 1
            self._at(self.now + tenant.run_seconds, tenant, ticket)
        self.most = max(self.most, self._running)

    @property
    def is_busy(self) -> bool:
        return self._running > 0
