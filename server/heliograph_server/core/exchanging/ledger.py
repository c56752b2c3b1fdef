"""Who may have what of an edge, run by run, and what became of it. Pure: no thread, clock or socket.

At the producer's end of an edge its own portion *gives* values and another daemon *shows* the capability to
get one; at the end that values are pushed to, the portion gives places and another daemon shows the
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

from heliograph_proto.errors import (
    CancelledError,
    HeliographError,
    LimitExceededError,
    PermissionDeniedError,
)
from heliograph_proto.portions import Edge

#: What is so many runs older than the newest run of its end has expired.
WINDOW_RUNS = 1024
#: The most who wait at one end.
MAX_WAITING = 4096
#: The most runs of which one end knows what became of them: those of the window, and such as come early.
MAX_RUNS = 4 * MAX_WAITING

Thing = TypeVar("Thing")
Visitor = TypeVar("Visitor")


class Fate(Enum):
    """What became of something given that nobody waited for."""

    #: Somebody will come for it.
    HELD = 1
    #: Nobody can come for it any more.
    REFUSED = 2


class Why(Enum):
    """Why a capability was refused, for the log alone: whoever is refused learns nothing."""

    UNKNOWN = "for an edge that is not open"
    FORGED = "forged, or for something else"
    USED = "used before"
    EXPIRED = "expired"
    CROWDED = "one of too many that wait"


@dataclass(frozen=True, slots=True)
class Refusal:
    """What somebody is told instead of getting something."""

    error: HeliographError
    #: Set where the capability was refused, not where the run ended badly.
    why: Why | None = None


@dataclass(frozen=True, slots=True)
class _Shown(Generic[Visitor]):
    visitor: Visitor


@dataclass(frozen=True, slots=True)
class _Given(Generic[Thing]):
    thing: Thing


@dataclass(frozen=True, slots=True)
class _Over:
    error: HeliographError | None


class _Gone(Enum):
    GONE = 0


_State: TypeAlias = "_Shown[Visitor] | _Given[Thing] | _Over | _Gone"


def refusal(why: Why) -> Refusal:
    """Says the same whatever was wrong."""
    if why is Why.CROWDED:
        return Refusal(LimitExceededError("too many wait for this edge", advice="wait for some"), why)
    return Refusal(
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


class Ledger(Generic[Thing, Visitor]):
    """One end of one edge."""

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self._states: dict[int, _State[Visitor, Thing]] = {}
        self._waiting = 0
        self._newest = 0

    def __repr__(self) -> str:
        return f"<Ledger of {self.edge}: {len(self._states)} runs, {self._waiting} wait>"

    def show(self, run: int, capability: bytes, visitor: Visitor) -> Thing | Refusal | None:
        """Somebody comes for the thing of a run: it, or why not, or None: he waits for it."""
        if not self.edge.allows(run, capability):
            return refusal(Why.FORGED)
        if run <= self._newest - WINDOW_RUNS:
            return refusal(Why.EXPIRED)
        state = self._states.get(run)
        match state:
            case None if self._waiting >= MAX_WAITING or len(self._states) >= MAX_RUNS:
                return refusal(Why.CROWDED)
            case None:
                self._states[run] = _Shown(visitor)
                self._waiting += 1
                return None
            case _Given(thing):
                self._states[run] = _Gone.GONE
                return thing
            case _Over(error):
                self._states[run] = _Gone.GONE
                return Refusal(ended(error))
        return refusal(Why.USED)

    def give(self, run: int, thing: Thing) -> Visitor | Fate:
        """The thing of a run is there: who waits for it, or what becomes of it."""
        self._note(run)
        state = self._states.get(run)
        if state is None and run > self._newest - WINDOW_RUNS:
            self._states[run] = _Given(thing)
            return Fate.HELD
        if isinstance(state, _Shown):
            self._go(run)
            return state.visitor
        return Fate.REFUSED

    def end(self, run: int, error: HeliographError | None, *, keeps: bool) -> Visitor | Thing | None:
        """The run is over: who is to be told so, or what nobody gets any more. `keeps`: what was given stays
        for whoever comes late, unless the run failed."""
        self._note(run)
        state = self._states.get(run)
        match state:
            case None:
                self._states[run] = _Over(error)
            case _Shown(visitor):
                self._go(run)
                return visitor
            case _Given(thing) if error is not None or not keeps:
                self._states[run] = _Over(error)
                return thing
        return None

    def withdraw(self, run: int, visitor: Visitor, *, again: bool = False) -> bool:
        """Who waited does not any more. Whether he did. `again`: he got nothing, and may come back: his
        stream broke."""
        state = self._states.get(run)
        if isinstance(state, _Shown) and state.visitor is visitor:
            self._go(run)
            if again:
                del self._states[run]
            return True
        return False

    def expired(self) -> tuple[list[Visitor], list[Thing]]:
        """Who waits for, and what was given in, runs that are too old now; each once."""
        if len(self._states) <= WINDOW_RUNS:
            return [], []
        # In the order of their first events, which is nearly that of their numbers.
        old = [run for run in self._states if run <= self._newest - WINDOW_RUNS]
        return self._take(old)

    def shed(self, most: int) -> list[Thing]:
        """What was given and nobody came for, but for the newest: nobody gets it any more."""
        given = {run: one.thing for run, one in self._states.items() if isinstance(one, _Given)}
        old = sorted(given)[: max(0, len(given) - most)]
        for run in old:
            self._states[run] = _Over(_crowded_out())
        return [given[run] for run in old]

    def close(self) -> tuple[list[Visitor], list[Thing]]:
        """The end closes: who waits, and what nobody gets any more."""
        return self._take(list(self._states))

    def _take(self, runs: list[int]) -> tuple[list[Visitor], list[Thing]]:
        states = [self._states.pop(run) for run in runs]
        visitors = [one.visitor for one in states if isinstance(one, _Shown)]
        self._waiting -= len(visitors)
        return visitors, [one.thing for one in states if isinstance(one, _Given)]

    def _go(self, run: int) -> None:
        self._states[run] = _Gone.GONE
        self._waiting -= 1

    def _note(self, run: int) -> None:
        self._newest = max(self._newest, run)
