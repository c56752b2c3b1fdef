"""The values, requests and capabilities of an edge, run by run. Pure: no thread, clock or socket.

At the producer's end of an edge its own partition *gives* values and another daemon *shows* the
capability to get one. At the end that values are pushed to, the partition gives places and another
daemon shows the capability to push a value. Either may come first, and each comes once:

                  give                  show
    (nothing) ─────────▸ given ─────────────────────▸ matched ── many later ones ──▸ gone
        │                  │ end with an error          ▴  │ end with an error
        ├── show ─▸ shown ─┼─ give ─────────────────────┘  │
        │             └────┼─ withdraw ────────────────────┼───────────────────────▸ gone
        └── end ──▸ over ◂─┴───────────────────────────────┘

A capability may be shown again, after the connection of its waiter broke: with a larger attempt,
which takes the place of the earlier one and gets the same payload or error. A payload is thus kept
until the other daemon has it, which the payload itself knows, or until so many later ones were
matched that it must have it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from typing import Generic, TypeAlias, TypeVar

from heliograph_proto.errors import CancelledError, HeliographError, LimitExceededError, PermissionDeniedError
from heliograph_proto.plans import Edge

#: Runs that are so much older than the newest one have expired.
WINDOW_RUNS = 1024
#: The most waiters at one end.
MAX_WAITING = 4096
#: The most matched payloads that one end keeps. Before so many later runs the other daemon has taken
#: those of a run; no loop is further ahead either.
KEPT_RUNS = 16
#: The most runs that one end remembers: those of the window, and those that come early.
MAX_RUNS = 4 * MAX_WAITING

Payload = TypeVar("Payload")
Waiter = TypeVar("Waiter")


class Disposition(Enum):
    """The fate of a given payload without a waiter."""

    #: It is held for a later request.
    HELD = 1
    #: No request can come any more.
    REFUSED = 2


class RefusalReason(Enum):
    """The reason for refusing a capability. Only for the log: the answer does not reveal it."""

    UNKNOWN = "for an edge that is not open"
    FORGED = "forged, or for something else"
    USED = "used before"
    EXPIRED = "expired"
    CROWDED = "one of too many that wait"


@dataclass(frozen=True, slots=True)
class EdgeRefusal:
    """An error in place of the payload."""

    error: HeliographError
    #: Set if the capability was refused, not if the run failed.
    reason: RefusalReason | None = None


@dataclass(frozen=True, slots=True)
class Superseded(Generic[Waiter]):
    """The waiter waits, in place of an earlier one, which gets nothing."""

    earlier: Waiter


@dataclass(frozen=True, slots=True)
class _Shown(Generic[Waiter]):
    waiter: Waiter
    attempt: int


@dataclass(frozen=True, slots=True)
class _Given(Generic[Payload]):
    payload: Payload


@dataclass(frozen=True, slots=True)
class _Matched(Generic[Payload]):
    payload: Payload
    attempt: int


@dataclass(frozen=True, slots=True)
class _Over:
    error: HeliographError | None


class _Gone(Enum):
    GONE = 0


_State: TypeAlias = "_Shown[Waiter] | _Given[Payload] | _Matched[Payload] | _Over | _Gone"


def refusal(reason: RefusalReason) -> EdgeRefusal:
    """The answer to a refused capability. It does not reveal which check failed."""
    if reason is RefusalReason.CROWDED:
        return EdgeRefusal(
            LimitExceededError("too many requests wait for it", advice="wait for some"), reason
        )
    return EdgeRefusal(
        PermissionDeniedError(
            "the capability is forged, was used before, has expired, or is for something else",
            advice="it is good for one run and edge, once, while the plan lives",
        ),
        reason,
    )


def ended(error: HeliographError | None) -> HeliographError:
    """The error for requests of a run that has ended."""
    return error or CancelledError("the run ended at the other daemon without this value")


class Ledger(Generic[Payload, Waiter]):
    """One end of one edge."""

    def __init__(self, edge: Edge, kept_runs: int = KEPT_RUNS) -> None:
        """`kept_runs`: the most matched payloads that are kept."""
        self.edge = edge
        self._kept_runs = kept_runs
        #: The runs whose payloads were matched, in that order.
        self._matched: deque[int] = deque()
        self._states: dict[int, _State[Waiter, Payload]] = {}
        self._waiting = 0
        self._newest = 0

    def __repr__(self) -> str:
        return f"<Ledger of {self.edge}: {len(self._states)} runs, {self._waiting} wait>"

    def show(
        self, run: int, capability: bytes, waiter: Waiter, attempt: int = 0
    ) -> Payload | EdgeRefusal | Superseded[Waiter] | None:
        """Present the capability of a run. Return the payload, a refusal, or None or `Superseded`
        if the waiter waits."""
        if not self.edge.allows(run, capability):
            return refusal(RefusalReason.FORGED)
        if run <= self._newest - WINDOW_RUNS:
            return refusal(RefusalReason.EXPIRED)
        state = self._states.get(run)
        match state:
            case None if self._waiting >= MAX_WAITING or len(self._states) >= MAX_RUNS:
                return refusal(RefusalReason.CROWDED)
            case None:
                self._states[run] = _Shown(waiter, attempt)
                self._waiting += 1
                return None
            case _Shown(earlier, before) if attempt > before:
                self._states[run] = _Shown(waiter, attempt)
                return Superseded(earlier)
            case _Given(payload):
                self._match(run, payload, attempt)
                return payload
            case _Matched(payload, before) if attempt > before:
                self._states[run] = _Matched(payload, attempt)
                return payload
            case _Over(error):
                return EdgeRefusal(ended(error))
        return refusal(RefusalReason.USED)

    def matched(self, run: int, capability: bytes) -> Payload | None:
        """The payload of a run that the holder of its capability has or gets; None if there is
        none."""
        state = self._states.get(run)
        return state.payload if isinstance(state, _Matched) and self.edge.allows(run, capability) else None

    def abandon(self, run: int, capability: bytes) -> Payload | Waiter | None:
        """Note that the holder of a run's capability does not need its payload. Return the payload
        to drop, or the waiter, which gets nothing."""
        state = self._states.get(run)
        is_known = state is not None or self._newest - WINDOW_RUNS < run and len(self._states) < MAX_RUNS
        if isinstance(state, _Over | _Gone) or not is_known or not self.edge.allows(run, capability):
            return None
        self._states[run] = _Gone.GONE
        if isinstance(state, _Shown):
            self._waiting -= 1
            return state.waiter
        return state.payload if state is not None else None

    def give(self, run: int, payload: Payload) -> Waiter | Disposition:
        """Give the payload of a run. Return its waiter, or what becomes of the payload."""
        self._note(run)
        state = self._states.get(run)
        if state is None and run > self._newest - WINDOW_RUNS:
            self._states[run] = _Given(payload)
            return Disposition.HELD
        if isinstance(state, _Shown):
            self._waiting -= 1
            self._match(run, payload, state.attempt)
            return state.waiter
        return Disposition.REFUSED

    def end(self, run: int, error: HeliographError | None, *, keeps: bool) -> Waiter | Payload | None:
        """End a run. Return the waiter to fail, or the payload to drop.

        `keeps`: a payload stays for a late request, unless the run failed.
        """
        self._note(run)
        state = self._states.get(run)
        match state:
            case None:
                self._states[run] = _Over(error)
            case _Shown(waiter):
                self._waiting -= 1
                self._states[run] = _Over(error)
                return waiter
            case _Given(payload) | _Matched(payload) if error is not None or not keeps:
                self._states[run] = _Over(error)
                return payload
        return None

    def withdraw(self, run: int, waiter: Waiter, *, again: bool = False) -> bool:
        """Remove a waiter. Return True if it was waiting.

        `again`: it got nothing, and may come back because its stream broke.
        """
        state = self._states.get(run)
        if isinstance(state, _Shown) and state.waiter == waiter:
            self._go(run)
            if again:
                del self._states[run]
            return True
        return False

    def expired(self) -> tuple[list[Waiter], list[Payload]]:
        """Remove the runs that are too old, and the payloads that the other daemon must have.
        Return their waiters and payloads."""
        sure = [self._matched.popleft() for _ in range(len(self._matched) - self._kept_runs)]
        had = [one.payload for run in sure if isinstance(one := self._states.get(run), _Matched)]
        self._states |= {run: _Gone.GONE for run in sure if isinstance(self._states.get(run), _Matched)}
        if len(self._states) <= WINDOW_RUNS:
            return [], had
        # In the order of their first events, which is almost that of their numbers. One that came
        # early waits for those before it.
        last = self._newest - WINDOW_RUNS
        waiters, payloads = self._take(list(takewhile(lambda run: run <= last, self._states)))
        return waiters, [*had, *payloads]

    def shed(self, most: int) -> list[Payload]:
        """Drop the payloads that no request took, except for the newest `most`. Return them."""
        given = {run: one.payload for run, one in self._states.items() if isinstance(one, _Given)}
        old = sorted(given)[: max(0, len(given) - most)]
        for run in old:
            self._states[run] = _Over(
                LimitExceededError("the value was dropped: too many were held", advice="run it again")
            )
        return [given[run] for run in old]

    def close(self) -> tuple[list[Waiter], list[Payload]]:
        """Close the end. Return its waiters and payloads."""
        return self._take(list(self._states))

    def _take(self, runs: list[int]) -> tuple[list[Waiter], list[Payload]]:
        states = [self._states.pop(run) for run in runs]
        waiters = [one.waiter for one in states if isinstance(one, _Shown)]
        self._waiting -= len(waiters)
        return waiters, [one.payload for one in states if isinstance(one, _Given | _Matched)]

    def _match(self, run: int, payload: Payload, attempt: int) -> None:
        self._states[run] = _Matched(payload, attempt)
        self._matched.append(run)

    def _go(self, run: int) -> None:
        self._states[run] = _Gone.GONE
        self._waiting -= 1

    def _note(self, run: int) -> None:
        self._newest = max(self._newest, run)
