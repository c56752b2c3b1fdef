"""The values of an edge between two daemons: the real ledger, streams that break, and forged requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

from heliograph_proto.errors import ComputeFailedError, HeliographError
from heliograph_proto.plans import CAPABILITY_BYTES, EDGE_BYTES, SECRET_BYTES, Edge
from heliograph_server.exchange.ledger import Disposition, EdgeRefusal, Ledger
from simulation.world import World, hold


@dataclass(eq=False)
class Request:
    """A request of another daemon for the value of a run."""

    run: int
    is_honest: bool = True
    answers: int = 0
    is_gone: bool = False


@dataclass(frozen=True, eq=False)
class Value:
    run: int


class SimulatedEdge:
    """A producer that gives values, fails and sheds them, and a consumer whose streams break."""

    def __init__(self, seed: int, runs: int = 40) -> None:
        self.world = World(seed)
        chance = self.world.random
        self._edge = Edge(bytes(EDGE_BYTES), chance.randbytes(SECRET_BYTES))
        self._ledger: Ledger[Value, Request] = Ledger(self._edge)
        self._fate: dict[int, Counter[str]] = {run: Counter() for run in range(1, runs + 1)}
        self._failed: set[int] = set()
        self._requests: list[Request] = []
        self._is_closed = False
        self._ended_early = False
        for run in self._fate:
            self.world.after(run * 0.1 + chance.random(), partial(self._produce, run))
            self.world.after(run * 0.1 + chance.random(), partial(self._ask, run))
            if self.world.chance(0.2):
                self.world.after(run * 0.1 + chance.random(), partial(self._attack, run))
        if self.world.chance(0.3):
            self._ended_early = True
            self.world.after(chance.random() * runs * 0.1, self._close)

    def run(self) -> int:
        """Run the schedule to its end. Returns the number of events. Raises Violation."""
        events = self.world.run(self._check)
        self._close()
        self._check()
        for run, fate in self._fate.items():
            hold(sum(fate.values()) <= 1, f"the value of run {run} has the fates {fate}")
        for one in self._requests:
            hold(one.answers == 1 or one.is_gone, f"{one} has {one.answers} answers")
            if one.is_honest and not one.is_gone:
                fate = self._fate[one.run]
                excused = one.run in self._failed or fate["shed"] or self._ended_early
                hold(fate["taken"] == 1 or bool(excused), f"{one} got nothing: {fate}")
        return events

    def _check(self) -> None:
        for one in self._requests:
            hold(one.answers <= 1, f"{one} has {one.answers} answers")
            hold(one.answers == 0 or not one.is_gone, f"{one} was answered although it left")

    # The producer

    def _produce(self, run: int) -> None:
        if self._is_closed:
            return
        if self.world.chance(0.15):
            self._failed.add(run)
            self._end(run, ComputeFailedError("burnt"))
            return
        value = Value(run)
        found = self._ledger.give(run, value)
        if isinstance(found, Request):
            self._take(found, value)
        elif found is Disposition.REFUSED:
            self._fate[run]["refused"] += 1
        self.world.soon(partial(self._end, run, None))
        if self.world.chance(0.05):
            for dropped in self._ledger.shed(3):
                self._fate[dropped.run]["shed"] += 1

    def _end(self, run: int, error: HeliographError | None) -> None:
        if self._is_closed:
            return
        found = self._ledger.end(run, error, keeps=True)
        if isinstance(found, Request):
            found.answers += 1
            self._failed.add(run)
        elif found is not None:
            self._let_go(run, "dropped")

    # The consumer

    def _ask(self, run: int) -> None:
        request = Request(run)
        self._requests.append(request)
        self._show(request)

    def _show(self, request: Request) -> None:
        if self._is_closed:
            request.answers += 1
            return
        found = self._ledger.show(request.run, self._edge.capability(request.run), request)
        if isinstance(found, Value):
            self._take(request, found)
        elif isinstance(found, EdgeRefusal):
            request.answers += 1
            if found.error is not None and found.reason is not None:
                self._failed.add(request.run)
        elif self.world.chance(0.3):
            self.world.soon(partial(self._break, request))

    def _break(self, request: Request) -> None:
        """The stream of a waiting request breaks: it got nothing, and comes back or gives up."""
        again = self.world.chance(0.7)
        if self._is_closed or not self._ledger.withdraw(request.run, request, again=again):
            return
        if again:
            self.world.soon(partial(self._show, request))
        else:
            request.is_gone = True

    def _attack(self, run: int) -> None:
        """A request with a forged capability, or with that of another run."""
        if self._is_closed:
            return
        forged = self.world.random.choice((bytes(CAPABILITY_BYTES), self._edge.capability(run + 1)))
        found = self._ledger.show(run, forged, Request(run, is_honest=False))
        hold(isinstance(found, EdgeRefusal), f"a forged capability gets {found}")

    def _take(self, request: Request, value: Value) -> None:
        hold(value.run == request.run, f"{request} gets the value of run {value.run}")
        request.answers += 1
        self._fate[value.run]["taken"] += 1

    def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        waiters, values = self._ledger.close()
        for waiter in waiters:
            waiter.answers += 1
        for value in values:
            self._let_go(value.run, "closed")

    def _let_go(self, run: int, fate: str) -> None:
        """A value is let go; one that was taken was kept for the same request of another stream."""
        if not self._fate[run]["taken"]:
            self._fate[run][fate] += 1
