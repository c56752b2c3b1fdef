"""Whose turn it is on a device that several tenants want: start-time fair queueing on measured time.

Pure: runs arrive and end at times that the caller tells, and it is told which runs begin. A flow is whatever
has a share: a tenant. Each flow has a tag, the time that it had of the device divided by its weight; of
those that wait the one with the lowest tag is next. One that comes back after a while begins where those are
that were served meanwhile, so nobody saves time up, and nobody waits for longer than the others have in turn.

A flow that is alone is never held back, with however many runs. While several want the device it does one
run at a time, also for a moment after the others went: else a flow with many runs would begin them all in
each gap of one with few.

Where a run ends and its flow has another right behind it, that one counts as if it waited: it arrives as soon
as its thread has seen to the one that ended, and its turn is not given away meanwhile if it is the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

#: So long after a flow's last run it still counts as one that wants the device.
LINGER_SECONDS = 0.05
#: The device waits at most so long for a run that is about to arrive.
PATIENCE_SECONDS = 0.005


class FairFlow(Hashable, Protocol):
    """Who has a share."""

    @property
    def weight(self) -> float:
        """Its share is as large as this, against those of others. Looked at each time."""

    def had(self, seconds: float) -> None:
        """It had a device for so long."""


class Ticket:
    """One run of a flow, from its arrival to its end."""

    __slots__ = ("flow", "has_begun")

    def __init__(self, flow: FairFlow) -> None:
        self.flow = flow
        self.has_begun = False


@dataclass(slots=True, eq=False)
class _State:
    """Of one flow on the device."""

    #: Of the device's time, divided by the flow's weight.
    tag: float
    running: int = 0
    waiting: deque[Ticket] = field(default_factory=deque)
    #: When it last had a run here.
    seen: float = 0.0
    #: Until when a run of it is expected.
    expected: float = 0.0

    @property
    def is_here(self) -> bool:
        return self.running > 0 or bool(self.waiting)


class FairQueue:
    """Of one device. Times are in seconds of one clock, none before the one told last."""

    def __init__(self, linger_seconds: float = LINGER_SECONDS) -> None:
        self._linger_seconds = linger_seconds
        self._states: dict[FairFlow, _State] = {}
        #: The tag with which the last run began.
        self._virtual = 0.0
        self._running = 0
        self._waiting = 0
        #: Up to when time was given to those who run.
        self._told = 0.0

    def __repr__(self) -> str:
        return f"<FairQueue {self._running} run, {self._waiting} wait, {len(self._states)} flows>"

    @property
    def is_shared(self) -> bool:
        """Whether several flows want the device, or did just now."""
        return len(self._states) > 1

    def count(self, flow: FairFlow) -> int:
        """The runs of a flow that have arrived and not ended."""
        state = self._states.get(flow)
        return 0 if state is None else state.running + len(state.waiting)

    def arrive(self, ticket: Ticket, now: float) -> list[Ticket]:
        """A run wants the device. Those that begin now: it, or none."""
        if not self._running and len(self._states) == 1 and (alone := self._states.get(ticket.flow)):
            # Nobody else is here, and nothing runs: this is all that a flow alone pays.
            self._told = alone.seen = now
            return [self._begin(alone, ticket)]
        self._pass_time(now)
        state = self._state(ticket.flow, now)
        if len(self._states) == 1:
            return [self._begin(state, ticket)]
        state.expected = 0.0
        state.waiting.append(ticket)
        self._waiting += 1
        return self._next(now)

    def end(self, ticket: Ticket, now: float, *, has_more: bool = False) -> list[Ticket]:
        """A run that had begun is over; `has_more`: another of its flow is about to arrive. Those that begin
        now."""
        self._pass_time(now)
        state = self._states[ticket.flow]
        state.running -= 1
        self._running -= 1
        state.seen = now
        if has_more:
            state.expected = now + PATIENCE_SECONDS
        return self._next(now) if self._waiting else []

    def look(self, now: float, flow: FairFlow | None = None) -> list[Ticket]:
        """Time has passed, or no run of a flow is about to arrive any more. Those that begin now."""
        self._pass_time(now)
        if flow is not None and (state := self._states.get(flow)) is not None:
            state.expected = 0.0
        return self._next(now) if self._waiting else []

    def withdraw(self, ticket: Ticket, now: float) -> list[Ticket]:
        """A run that has not begun will not. Those that begin now."""
        self._pass_time(now)
        self._states[ticket.flow].waiting.remove(ticket)
        self._waiting -= 1
        return self._next(now)

    def charge(self, flow: FairFlow, seconds: float, now: float) -> None:
        """A flow had the device for so long, between the runs that are told of here."""
        self._pass_time(now)
        state = self._state(flow, now)
        self._virtual = max(self._virtual, state.tag)
        self._give(flow, state, seconds)

    # Time

    def _pass_time(self, now: float) -> None:
        """Gives the time since the last event to those who run, in equal parts."""
        passed, self._told = now - self._told, now
        if not self._running or passed <= 0:
            return
        for flow, state in self._states.items():
            if state.running:
                self._give(flow, state, passed * state.running / self._running)
                state.seen = now

    @staticmethod
    def _give(flow: FairFlow, state: _State, seconds: float) -> None:
        state.tag += seconds / flow.weight
        flow.had(seconds)

    def _state(self, flow: FairFlow, now: float) -> _State:
        """Of a flow that wants the device: as it was, but without what it might have saved up."""
        self._forget(flow, now)
        found = self._states.get(flow)
        if found is None:
            found = self._states[flow] = _State(self._reached())
        elif not found.is_here:
            found.tag = max(found.tag, self._reached())
        found.seen = now
        return found

    def _reached(self) -> float:
        """Where those are that are served: who waited for nothing meanwhile begins there."""
        running = [state.tag for state in self._states.values() if state.running]
        if running:
            self._virtual = max(self._virtual, min(running))
        return self._virtual

    def _forget(self, flow: FairFlow, now: float) -> None:
        """Those who have not wanted the device for a while; one alone is forgotten by nobody."""
        if len(self._states) <= (flow in self._states):
            return
        since = now - self._linger_seconds
        gone = [one for one, it in self._states.items() if not it.is_here and it.seen < since and one != flow]
        for one in gone:
            # Whoever comes next begins where it was, so that it gains nothing by coming back.
            self._virtual = max(self._virtual, self._states.pop(one).tag)

    # Turns

    def _next(self, now: float) -> list[Ticket]:
        waiting = [flow for flow, state in self._states.items() if state.waiting]
        if not waiting:
            return []
        self._forget(waiting[0], now)
        if len(self._states) == 1:
            state = self._states[waiting[0]]
            return list(self._begin_all(state))
        if self._running:
            return []
        wanted = (one for one in self._states.values() if one.waiting or one.expected > now)
        state = min(wanted, key=lambda one: one.tag)
        if not state.waiting:
            return []
        self._waiting -= 1
        return [self._begin(state, state.waiting.popleft())]

    def _begin_all(self, state: _State) -> Iterator[Ticket]:
        while state.waiting:
            self._waiting -= 1
            yield self._begin(state, state.waiting.popleft())

    def _begin(self, state: _State, ticket: Ticket) -> Ticket:
        self._virtual = max(self._virtual, state.tag)
        ticket.has_begun = True
        state.running += 1
        self._running += 1
        return ticket
