"""Who may have what of an edge, run by run, and what became of it. Pure: no thread, clock or socket.

At the producer's end of an edge its own partition *gives* values and another daemon *shows* the capability to
get one; at the end that values are pushed to, the partition gives places and another daemon shows the
capability to bring one. Either may come first, each comes once:

                 give                    show
    (nothing) ─────────▸ given ──────────────────────▸ gone
        │                  │ end with an error
        ├── show ─▸ shown ─┼─ give, end, withdraw ───▸ gone
        └── end ──▸ over ──┴─ show: is told why ─────▸ gone

Who waits on a stream that breaks got nothing, and may show it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeAlias, TypeVar

from heliograph_proto.errors import CancelledError, HeliographError, LimitExceededError, PermissionDeniedError
from heliograph_proto.plans import Edge

#: What is so many runs older than the newest run of its end has expired.
WINDOW_RUNS = 1024
#: The most who wait at one end.
MAX_WAITING = 4096
#: The most runs of which one end knows what became of them: those of the window, and such as come early.
MAX_RUNS = 4 * MAX_WAITING

Payload = TypeVar("Payload")
Waiter = TypeVar("Waiter")


class Disposition(Enum):
    """What became of something given that nobody waited for."""

    #: Somebody will come for it.
    HELD = 1
    #: Nobody can come for it any more.
    REFUSED = 2


class RefusalReason(Enum):
    """Why a capability was refused, for the log alone: whoever is refused learns nothing."""

    UNKNOWN = "for an edge that is not open"
    FORGED = "forged, or for something else"
    USED = "used before"
    EXPIRED = "expired"
    CROWDED = "one of too many that wait"


@dataclass(frozen=True, slots=True)
class EdgeRefusal:
    """What somebody is told instead of getting something."""

    error: HeliographError
    #: Set where the capability was refused, not where the run ended badly.
    why: RefusalReason | None = None


@dataclass(frozen=True, slots=True)
class _Shown(Generic[Waiter]):
    waiter: Waiter


@dataclass(frozen=True, slots=True)
class _Given(Generic[Payload]):
    payload: Payload


@dataclass(frozen=True, slots=True)
class _Over:
    error: HeliographError | None


class _Gone(Enum):
    GONE = 0


_State: TypeAlias = "_Shown[Waiter] | _Given[Payload] | _Over | _Gone"


def refusal(why: RefusalReason) -> EdgeRefusal:
    """Says the same whatever was wrong."""
    if why is RefusalReason.CROWDED:
        return EdgeRefusal(LimitExceededError("too many wait for this edge", advice="wait for some"), why)
    return EdgeRefusal(
        PermissionDeniedError(
            "the capability is forged, was used before, has expired, or is for something else",
            advice="it is good for one run and edge, once, while the plan lives",
        ),
        why,
    )


def _crowded_out() -> LimitExceededError:
    return LimitExceededError(
        "the value was held until there were too many that nobody came for", advice="run it again"
    )


def ended(error: HeliographError | None) -> HeliographError:
    """What becomes of whoever waits for something of a run that is over."""
    return error or CancelledError("the run ended at the other daemon without this value")


class Ledger(Generic[Payload, Waiter]):
    """One end of one edge."""

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self._states: dict[int, _State[Waiter, Payload]] = {}
        self._waiting = 0
        self._newest = 0

    def __repr__(self) -> str:
        return f"<Ledger of {self.edge}: {len(self._states)} runs, {self._waiting} wait>"

    def show(self, run: int, capability: bytes, waiter: Waiter) -> Payload | EdgeRefusal | None:
        """Somebody comes for the thing of a run: it, or why not, or None: he waits for it."""
        if not self.edge.allows(run, capability):
            return refusal(RefusalReason.FORGED)
        if run <= self._newest - WINDOW_RUNS:
            return refusal(RefusalReason.EXPIRED)
        state = self._states.get(run)
        match state:
            case None if self._waiting >= MAX_WAITING or len(self._states) >= MAX_RUNS:
                return refusal(RefusalReason.CROWDED)
            case None:
                self._states[run] = _Shown(waiter)
                self._waiting += 1
                return None
            case _Given(payload):
                self._states[run] = _Gone.GONE
                return payload
            case _Over(error):
                self._states[run] = _Gone.GONE
                return EdgeRefusal(ended(error))
        return refusal(RefusalReason.USED)

    def give(self, run: int, payload: Payload) -> Waiter | Disposition:
        """The thing of a run is there: who waits for it, or what becomes of it."""
        self._note(run)
        state = self._states.get(run)
        if state is None and run > self._newest - WINDOW_RUNS:
            self._states[run] = _Given(payload)
            return Disposition.HELD
        if isinstance(state, _Shown):
            self._go(run)
            return state.waiter
        return Disposition.REFUSED

    def end(self, run: int, error: HeliographError | None, *, keeps: bool) -> Waiter | Payload | None:
        """The run is over: who is to be told so, or what nobody gets any more. `keeps`: what was given stays
        for whoever comes late, unless the run failed."""
        self._note(run)
        state = self._states.get(run)
        match state:
            case None:
                self._states[run] = _Over(error)
            case _Shown(waiter):
                self._go(run)
                return waiter
            case _Given(payload) if error is not None or not keeps:
                self._states[run] = _Over(error)
                return payload
        return None

    def withdraw(self, run: int, waiter: Waiter, *, again: bool = False) -> bool:
        """Who waited does not any more. Whether he did. `again`: he got nothing, and may come back: his
        stream broke."""
        state = self._states.get(run)
        if isinstance(state, _Shown) and state.waiter is waiter:
            self._go(run)
            if again:
                del self._states[run]
            return True
        return False

    def expired(self) -> tuple[list[Waiter], list[Payload]]:
        """Who waits for, and what was given in, runs that are too old now; each once."""
        if len(self._states) <= WINDOW_RUNS:
            return [], []
        # In the order of their first events, which is nearly that of their numbers.
        old = [run for run in self._states if run <= self._newest - WINDOW_RUNS]
        return self._take(old)

    def shed(self, most: int) -> list[Payload]:
        """What was given and nobody came for, but for the newest: nobody gets it any more."""
        given = {run: one.payload for run, one in self._states.items() if isinstance(one, _Given)}
        old = sorted(given)[: max(0, len(given) - most)]
        for run in old:
            self._states[run] = _Over(_crowded_out())
        return [given[run] for run in old]

    def close(self) -> tuple[list[Waiter], list[Payload]]:
        """The end closes: who waits, and what nobody gets any more."""
        return self._take(list(self._states))

    def _take(self, runs: list[int]) -> tuple[list[Waiter], list[Payload]]:
        states = [self._states.pop(run) for run in runs]
        waiters = [one.waiter for one in states if isinstance(one, _Shown)]
        self._waiting -= len(waiters)
        return waiters, [one.payload for one in states if isinstance(one, _Given)]

    def _go(self, run: int) -> None:
        self._states[run] = _Gone.GONE
        self._waiting -= 1

    def _note(self, run: int) -> None:
        self._newest = max(self._newest, run)
