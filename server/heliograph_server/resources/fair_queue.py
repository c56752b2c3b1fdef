"""Start-time fair queueing of several tenants on one device, by measured time.

Pure: the caller reports when runs arrive and end, and gets the runs that begin. A flow is anything
with a share: a tenant. Each flow has a tag, its device time divided by its weight; among waiting
flows the one with the lowest tag is next. A flow that returns after a while starts at the tag of
the flows served meanwhile. So no flow saves up time, and none waits longer than the others' turns.

A flow that is alone is never held back, whatever its number of runs. While several flows need the
device, each has one run at a time, also for a moment after the others left: otherwise a flow with
many runs would begin them all in each gap of a flow with few.

A long run can be paused: it gives its turn to a flow that is behind, and waits as the first of its
own flow. `overdue` names the runs that should. A run has at least a slice of time, since each pause
costs two thread switches.

When a run ends and its flow has another one right behind it, that one counts as waiting: it arrives
as soon as its thread has finished with the ended run, and keeps its turn meanwhile if it is next,
unless a paused run could use the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

#: For so long after its last run a flow still counts as using the device.
LINGER_SECONDS = 0.05
#: The longest time that the device waits for a run that is about to arrive.
PATIENCE_SECONDS = 0.005
#: A run that was begun or went on is not paused for so long.
SLICE_SECONDS = 0.002


class FairFlow(Hashable, Protocol):
    """An owner of a share."""

    @property
    def weight(self) -> float:
        """The share relative to other flows. Read each time."""

    def had(self, seconds: float) -> None:
        """Add device time in seconds to the flow's usage."""


class Ticket:
    """One run of a flow, from its arrival to its end."""

    __slots__ = ("began", "flow", "has_begun", "is_paused")

    def __init__(self, flow: FairFlow) -> None:
        self.flow = flow
        self.has_begun = False
        #: The time at which it began, or went on after a pause.
        self.began = 0.0
        self.is_paused = False


@dataclass(slots=True, eq=False)
class _State:
    """The state of one flow on the device."""

    #: Device time divided by the flow's weight.
    tag: float
    running: int = 0
    waiting: deque[Ticket] = field(default_factory=deque)
    #: The time of its last run here.
    seen: float = 0.0
    #: Another run is expected until this time.
    expected: float = 0.0

    @property
    def is_here(self) -> bool:
        return self.running > 0 or bool(self.waiting)


class FairQueue:
    """The queue of one device. Times are seconds of one clock and must not decrease."""

    def __init__(self, linger_seconds: float = LINGER_SECONDS) -> None:
        self._linger_seconds = linger_seconds
        self._states: dict[FairFlow, _State] = {}
        #: The tag at the start of the last run.
        self._virtual = 0.0
        #: Forgotten flows that are ahead of it. They return at their own tags, and gain nothing.
        self._ahead: dict[FairFlow, float] = {}
        #: The runs that have begun, are not paused and have not ended.
        self._running: set[Ticket] = set()
        self._waiting = 0
        #: Device time is charged to the running flows up to this time.
        self._charged_until = 0.0

    def __repr__(self) -> str:
        return f"<FairQueue {len(self._running)} run, {self._waiting} wait, {len(self._states)} flows>"

    @property
    def is_shared(self) -> bool:
        """True if several flows need the device, or did just now."""
        return len(self._states) > 1

    def count(self, flow: FairFlow) -> int:
        """The runs of a flow that have arrived and not ended."""
        state = self._states.get(flow)
        return 0 if state is None else state.running + len(state.waiting)

    def arrive(self, ticket: Ticket, now: float) -> list[Ticket]:
        """Add a run. Return the runs that begin now."""
        if not self._running and len(self._states) == 1 and (alone := self._states.get(ticket.flow)):
            # No other flow is here, and nothing runs: this is the whole cost for a flow that is
            # alone.
            self._charged_until = alone.seen = now
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
        """End a run. Return the runs that begin now.

        `has_more`: another run of its flow is about to arrive.
        """
        self._pass_time(now)
        state = self._states[ticket.flow]
        state.running -= 1
        self._running.discard(ticket)
        state.seen = now
        if has_more:
            state.expected = now + PATIENCE_SECONDS
        return self._next(now) if self._waiting else []

    def look(self, now: float, flow: FairFlow | None = None) -> list[Ticket]:
        """Update the queue after time has passed. With `flow`, no run of that flow is expected any
        more. Return the runs that begin now."""
        self._pass_time(now)
        if flow is not None and (state := self._states.get(flow)) is not None:
            state.expected = 0.0
        return self._next(now) if self._waiting else []

    def withdraw(self, ticket: Ticket, now: float) -> list[Ticket]:
        """Remove a run that has not begun. Return the runs that begin now."""
        self._pass_time(now)
        self._states[ticket.flow].waiting.remove(ticket)
        self._waiting -= 1
        return self._next(now)

    def overdue(self, now: float) -> tuple[tuple[Ticket, ...], float]:
        """The runs that should be paused now, if any, and the seconds until that may change."""
        flows = {one.flow for one in self._running}
        if not self._waiting or len(flows) > 1:
            return (), inf
        if not flows:
            # The device waits for a run that is expected.
            ends = [one.expected - now for one in self._states.values() if one.expected > now]
            return (), min(ends, default=inf)
        self._pass_time(now)
        (flow,) = flows
        tags = [one.tag for other, one in self._states.items() if one.waiting and other != flow]
        if not tags:
            return (), inf
        # Its tag grows by its time divided by its weight.
        ahead = (min(tags) - self._states[flow].tag) * flow.weight
        left = max(ahead, max(one.began for one in self._running) + SLICE_SECONDS - now)
        return ((), left) if left > 0 else (tuple(self._running), inf)

    def pause(self, ticket: Ticket, now: float) -> list[Ticket]:
        """Stop a run for a while. Return the runs that begin now, or go on: perhaps itself.

        Other runs of its flow go on until they are paused too. None of them may wait for this one.
        """
        self._pass_time(now)
        if not self._waiting:
            return [ticket]
        state = self._states[ticket.flow]
        state.running -= 1
        self._running.discard(ticket)
        state.seen = now
        ticket.has_begun, ticket.is_paused = False, True
        state.waiting.appendleft(ticket)
        self._waiting += 1
        return self._next(now)

    def charge(self, flow: FairFlow, seconds: float, now: float) -> None:
        """Charge a flow for device time outside of the runs reported here."""
        self._pass_time(now)
        state = self._state(flow, now)
        self._virtual = max(self._virtual, state.tag)
        self._give(flow, state, seconds)

    # Time

    def _pass_time(self, now: float) -> None:
        """Charge the time since the last event to the running flows, in equal parts per run."""
        passed, self._charged_until = now - self._charged_until, now
        if not self._running or passed <= 0:
            return
        for flow, state in self._states.items():
            if state.running:
                self._give(flow, state, passed * state.running / len(self._running))
                state.seen = now

    @staticmethod
    def _give(flow: FairFlow, state: _State, seconds: float) -> None:
        state.tag += seconds / flow.weight
        flow.had(seconds)

    def _state(self, flow: FairFlow, now: float) -> _State:
        """The state of a flow that needs the device, without saved-up time."""
        self._forget(flow, now)
        found = self._states.get(flow)
        if found is None:
            found = self._states[flow] = _State(max(self._ahead.pop(flow, 0.0), self._reached(now)))
        elif not found.is_here:
            found.tag = max(found.tag, self._reached(now))
        found.seen = now
        return found

    def _reached(self, now: float) -> float:
        """The virtual time: a flow that waited for nothing meanwhile starts here.

        It never passes a flow that waits, however long the run of another one has become.
        """
        present = [one.tag for one in self._states.values() if one.is_here or one.expected > now]
        if present:
            self._virtual = max(self._virtual, min(present))
        return self._virtual

    def _forget(self, flow: FairFlow, now: float) -> None:
        """Forget flows that have not used the device for a while. A flow alone is kept."""
        if len(self._states) <= (flow in self._states):
            return
        since = now - self._linger_seconds
        gone = [one for one, it in self._states.items() if not it.is_here and it.seen < since and one != flow]
        for one in gone:
            self._ahead[one] = self._states.pop(one).tag
        if gone:
            self._ahead = {one: tag for one, tag in self._ahead.items() if tag > self._virtual}

    # Turns

    def _next(self, now: float) -> list[Ticket]:
        waiting = [flow for flow, state in self._states.items() if state.waiting]
        if not waiting:
            return []
        self._forget(waiting[0], now)
        if len(self._states) == 1:
            state = self._states[waiting[0]]
            begun = [self._begin(state, one) for one in state.waiting]
            self._waiting -= len(begun)
            state.waiting.clear()
            return begun
        if self._running:
            return []
        candidates = [one for one in self._states.values() if one.waiting]
        if not any(one.waiting[0].is_paused for one in candidates):
            candidates += [one for one in self._states.values() if not one.waiting and one.expected > now]
        state = min(candidates, key=lambda one: one.tag)
        if not state.waiting:
            return []
        self._waiting -= 1
        return [self._begin(state, state.waiting.popleft())]

    def _begin(self, state: _State, ticket: Ticket) -> Ticket:
        self._virtual = max(self._virtual, state.tag)
        ticket.has_begun, ticket.is_paused = True, False
        ticket.began = self._charged_until
        state.running += 1
        self._running.add(ticket)
        return ticket
