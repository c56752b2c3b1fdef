"""The choice of the requests of a model that share its next run, and when it begins. Pure.

A run begins at once where waiting gains nothing: the queue has as many rows as a run may have, or
as many requests as the run before had. Otherwise it waits for others, until its oldest request has
waited for the window. So one client alone never waits, and clients that return together, as they
do after a run that they shared, share the next one.

Clients that all return together leave the processors to themselves until the last one is back. So
such a crowd is halved: while one half computes, the answers of the other are sent and its next
requests read. That needs plans of half the rows that take not much more than half the time.

Tenants take turns by rows: the turn of a request comes after the rows of its tenant that wait,
counted from the turn in progress (start-time fair queueing, Goyal et al. 1996).

Plans have a few sizes, and a run is padded to one of them. Where rows do not fill a plan, the next
smaller plan runs first if it computes more of them in a second, as far as the runs so far tell.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from heliograph_proto.errors import LimitExceededError

#: The part of a plan's rows that must not be padding, or a smaller plan runs first; where the times
#: of both are not known.
FULL = 0.75
#: The part of a longer time by which the known time of a plan rises.
RISE = 0.125
#: The longest time for which nothing ran before a crowd that is halved, as a part of its run.
#: Clients that stay away for longer do not wait for runs alone.
IDLE = 0.5
#: The most plans whose times are known.
MOST_TIMES = 1024


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """The rules of a model's queue."""

    #: The rows of its plans, rising; () if requests share no runs.
    sizes: tuple[int, ...] = ()
    #: The longest wait for further requests.
    window_seconds: float = 0.001
    #: The most requests of a tenant that wait.
    most_waiting: int = 1024
    #: Priorities from 1, the most urgent.
    priorities: int = 1
    default_priority: int = 1

    @property
    def most_rows(self) -> int:
        """The most rows of a run; 0 if requests share none."""
        return self.sizes[-1] if self.sizes else 0

    def priority_of(self, given: int) -> int:
        """Return the priority of a request that gives one; 0 is none."""
        return min(given, self.priorities) if given else self.default_priority


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request that waits for its run."""

    rows: int
    #: Requests with equal ones can share a run.
    form: Hashable
    priority: int
    arrived: float
    #: The caller's own.
    work: Any = None
    tenant: str = ""
    #: Its place among the requests of all tenants, and of one.
    turn: int = field(default=0)
    number: int = field(default=0)


def _order(one: QueuedRequest) -> tuple[int, int, int]:
    return one.priority, one.turn, one.number


class BatchQueue:
    """The requests of a model that wait, by priority, turn and arrival. Times are any clock's
    seconds."""

    def __init__(self, policy: BatchPolicy) -> None:
        self._policy = policy
        self._waiting: list[QueuedRequest] = []
        self._rows = 0
        self._numbers = 0
        #: The turn in progress, and by tenant the turn of its next request and the number of those
        #: that wait.
        self._turn = 0
        self._turns: dict[str, int] = {}
        self._of_tenant: Counter[str] = Counter()
        #: The number of requests in the run before.
        self._shared = 1
        #: The runs in progress, and when the last of them ended.
        self._running, self._ended = 0, math.inf
        #: The seconds of a run by its form and the rows of its plan; inf after the first one.
        self._seconds: dict[tuple[Hashable, int], float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: QueuedRequest) -> bool:
        """Add a request. Returns False if no run begins, and the time of the next one stays.

        Raises LimitExceededError if too many of its tenant wait.
        """
        waiting = self._of_tenant[request.tenant]
        if waiting >= self._policy.most_waiting:
            raise LimitExceededError(
                f"{waiting:,} requests wait for the model, which is the most",
                advice="try again; max_queue in model.toml sets the number",
                retry_after_seconds=1.0,
            )
        self._numbers += 1
        request.number = self._numbers
        is_first = not self._waiting
        if is_first:
            self._turns.clear()
        request.turn = max(self._turn, self._turns.get(request.tenant, 0))
        self._turns[request.tenant] = request.turn + request.rows
        self._of_tenant[request.tenant] += 1
        insort(self._waiting, request, key=_order)
        self._rows += request.rows
        is_enough = len(self._waiting) >= self._shared or self._rows >= self._policy.most_rows
        return is_first or is_enough

    def remove(self, request: QueuedRequest) -> bool:
        """Remove a request whose client has left, or whose time is over. False if it does not wait
        any more."""
        if request not in self._waiting:
            return False
        self._waiting.remove(request)
        self._left(request)
        # Its tenant's later ones have its turn, so that requests which end early cost none.
        if (later := self._turns.get(request.tenant)) is not None:
            self._turns[request.tenant] = later - request.rows
        for one in self._waiting:
            if one.tenant == request.tenant and one.turn > request.turn:
                one.turn -= request.rows
        self._waiting.sort(key=_order)
        return True

    def _left(self, request: QueuedRequest) -> None:
        """Count a request that waits no more."""
        self._rows -= request.rows
        self._of_tenant[request.tenant] -= 1
        if not self._of_tenant[request.tenant]:
            del self._of_tenant[request.tenant]

    def take(self, now: float) -> list[QueuedRequest]:
        """Remove and return the requests of the run that begins now; none if it is to wait."""
        batch = self._candidates()
        if not batch or now < self._begins(batch):
            return []
        if self._policy.sizes:
            batch = self._halved(self._cut(batch), now)
        taken = set(map(id, batch))
        self._waiting = [one for one in self._waiting if id(one) not in taken]
        for one in batch:
            self._left(one)
        self._turn = max(self._turn, batch[0].turn)
        self._shared = len(batch)
        self._running += 1
        return batch

    def ended(self, now: float) -> None:
        """Note the end of a run that `take` returned."""
        self._running -= 1
        self._ended = now

    def ran(self, form: Hashable, rows: int, seconds: float) -> None:
        """Note the time of a run of so many rows. The first one of a plan may have compiled it."""
        if (key := (form, _size_of(rows, self._policy.sizes))) not in self._seconds:
            if len(self._seconds) >= MOST_TIMES:
                self._seconds.clear()
            self._seconds[key] = math.inf
            return
        known = self._seconds[key]
        self._seconds[key] = seconds if seconds < known else known + RISE * (seconds - known)

    def looks_again(self) -> float:
        """Return the time at which the next run begins, if no request comes; inf if none waits."""
        batch = self._candidates()
        return self._begins(batch) if batch else math.inf

    def _candidates(self) -> list[QueuedRequest]:
        """The requests that can share a run with the first one, as many as fit."""
        if not self._waiting:
            return []
        first, most = self._waiting[0], self._policy.most_rows
        batch, rows = [first], first.rows
        for one in self._waiting[1:]:
            if rows >= most:
                break
            if one.form == first.form and rows + one.rows <= most:
                batch.append(one)
                rows += one.rows
        return batch

    def _begins(self, batch: Sequence[QueuedRequest]) -> float:
        """The time at which the run of these requests begins, if no other comes."""
        rows = sum(one.rows for one in batch)
        if rows >= self._policy.most_rows or len(batch) >= self._shared:
            return -math.inf
        return min(one.arrived for one in batch) + self._policy.window_seconds

    def _cut(self, batch: list[QueuedRequest]) -> list[QueuedRequest]:
        """Return the first requests of a batch that fill a smaller plan, where that computes more
        of them in a second than the larger one, which is padded; else all."""
        rows, sizes, form = sum(one.rows for one in batch), self._policy.sizes, batch[0].form
        size, smaller = _size_of(rows, sizes), max((one for one in sizes if one < rows), default=0)
        of_size, of_smaller = (self._seconds.get((form, one), math.inf) for one in (size, smaller))
        if of_size == math.inf:
            is_whole = rows >= FULL * size
        else:
            # An unknown one is tried, and known after two runs: without it, runs that are padded
            # would go on for as long as their clients return together.
            is_whole = of_smaller < math.inf and of_size * smaller <= of_smaller * rows
        if rows == size or is_whole:
            return batch
        return _first_rows(batch, smaller) or batch

    def _halved(self, batch: list[QueuedRequest], now: float) -> list[QueuedRequest]:
        """Return half of a crowd that has come while nothing ran, where two runs of that half take
        less than one and the time for which nothing ran; else all."""
        if self._running or min(one.arrived for one in batch) < self._ended:
            return batch
        rows, sizes, form = sum(one.rows for one in batch), self._policy.sizes, batch[0].form
        size, half = _size_of(rows, sizes), max((one for one in sizes if 2 * one <= rows), default=0)
        whole = self._seconds.get((form, size), math.inf)
        part = self._seconds.get((form, half), math.inf)
        if not half or whole == math.inf:
            return batch
        # An unknown one is tried, and known after two runs.
        part, idle = whole / 2 if part == math.inf else part, now - self._ended
        if idle > IDLE * whole or 2 * part >= whole + idle:
            return batch
        return _first_rows(batch, half) or batch


def _first_rows(batch: list[QueuedRequest], rows: int) -> list[QueuedRequest]:
    """Return the first requests that have exactly so many rows; none if there are no such."""
    count = 0
    for place, one in enumerate(batch):
        count += one.rows
        if count == rows:
            return batch[: place + 1]
    return []


def _size_of(rows: int, sizes: Sequence[int]) -> int:
    """Return the rows of the plan that so many are padded to."""
    return next((one for one in sizes if one >= rows), rows)
