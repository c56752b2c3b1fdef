"""Tenants that want one device, in virtual time: the real queue of turns under random load."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from heliograph_server.resources.fair_queue import PATIENCE_SECONDS, FairQueue, Ticket
from simulation.world import World, hold


@dataclass(eq=False)
class Tenant:
    """A flow: its weight, the lengths of its runs, and how many it has under way at once."""

    name: str
    weight: float
    longest_seconds: float
    at_once: int
    #: The longest pause before it sends the next run; 0: it always wants more.
    pause_seconds: float
    used_seconds: float = 0.0
    waiting: list[Ticket] = field(default_factory=list)

    def had(self, seconds: float) -> None:
        hold(seconds >= 0, f"{self.name} is given {seconds} s")
        self.used_seconds += seconds


class SimulatedTurns:
    """Several tenants on one device. Those that always want more must have the device by weight."""

    def __init__(self, seed: int, runs: int = 60) -> None:
        self.world = World(seed)
        chance = self.world.random
        self._queue = FairQueue()
        self._runs_left = runs
        self._running: set[Ticket] = set()
        self._begun: set[Ticket] = set()
        #: Since when the device has been idle although runs waited.
        self._idle_since: float | None = None
        self._tenants = [
            Tenant(
                f"tenant {number}",
                chance.choice((1.0, 1.0, 2.0, 5.0)),
                chance.choice((0.001, 0.01, 0.1)),
                chance.choice((1, 1, 3)),
                chance.choice((0.0, 0.0, 0.02, 0.2)),
            )
            for number in range(chance.randrange(1, 5))
        ]
        #: The use of each greedy tenant when the last of them first waited; None: not yet.
        self._start: dict[Tenant, float] | None = None
        self._is_over = False
        for tenant in self._tenants:
            for _ in range(tenant.at_once):
                self.world.after(chance.random() * 0.01, partial(self._arrive, tenant))

    def run(self) -> int:
        """Run the schedule to its end. Returns the number of events. Raises Violation."""
        events = self.world.run(self._check)
        hold(not self._running, "runs go on")
        hold(not any(tenant.waiting for tenant in self._tenants), "runs wait for ever")
        return events

    def _arrive(self, tenant: Tenant) -> None:
        if self._runs_left <= 0:
            self._is_over = True
            return
        self._runs_left -= 1
        ticket = Ticket(tenant)
        tenant.waiting.append(ticket)
        self._begin(self._queue.arrive(ticket, self.world.now))
        if tenant.pause_seconds and ticket in tenant.waiting and self.world.chance(0.1):
            self.world.soon(partial(self._give_up, ticket), 0.05)

    def _give_up(self, ticket: Ticket) -> None:
        tenant = ticket.flow
        assert isinstance(tenant, Tenant)
        if ticket in tenant.waiting:
            tenant.waiting.remove(ticket)
            self._begin(self._queue.withdraw(ticket, self.world.now))
            self._arrive(tenant)

    def _begin(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            tenant = ticket.flow
            assert isinstance(tenant, Tenant)
            hold(ticket in tenant.waiting, "a run begins that does not wait")
            hold(ticket not in self._begun, "a run begins twice")
            tenant.waiting.remove(ticket)
            self._begun.add(ticket)
            self._running.add(ticket)
            self.world.after(self.world.random.random() * tenant.longest_seconds, partial(self._end, ticket))

    def _end(self, ticket: Ticket) -> None:
        tenant = ticket.flow
        assert isinstance(tenant, Tenant)
        self._running.remove(ticket)
        has_more = tenant.pause_seconds == 0 and self._runs_left > 0
        self._begin(self._queue.end(ticket, self.world.now, has_more=has_more))
        if has_more:
            self.world.after(0.0001, partial(self._arrive, tenant))
            self.world.after(PATIENCE_SECONDS, self._look)
        else:
            self.world.after(self.world.random.random() * tenant.pause_seconds, partial(self._arrive, tenant))

    def _look(self) -> None:
        self._begin(self._queue.look(self.world.now))

    # Invariants

    def _check(self) -> None:
        now = self.world.now
        if self._running or not any(tenant.waiting for tenant in self._tenants):
            self._idle_since = None
        else:
            self._idle_since = now if self._idle_since is None else self._idle_since
            idle = now - self._idle_since
            hold(idle <= PATIENCE_SECONDS * 1.01, f"the device is idle for {idle} s while runs wait")
        self._check_shares()

    def _check_shares(self) -> None:
        """Of two tenants that always want more, neither is ahead by more than a run of each."""
        greedy = [one for one in self._tenants if one.pause_seconds == 0]
        if len(greedy) < 2 or self._is_over:
            return
        if self._start is None:
            if all(one.waiting or any(t.flow is one for t in self._running) for one in greedy):
                self._start = {one: one.used_seconds for one in greedy}
            return
        shares = {one: (one.used_seconds - self._start[one]) / one.weight for one in greedy}
        for one in greedy:
            for other in greedy:
                # Those that began before the other came run beside each other.
                slack = sum(it.at_once * it.longest_seconds / it.weight for it in (one, other))
                slack += PATIENCE_SECONDS * 2
                ahead = shares[one] - shares[other]
                hold(ahead <= slack, f"{one.name} is {ahead} s ahead of {other.name}")
