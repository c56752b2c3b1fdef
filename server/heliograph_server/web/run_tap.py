"""Takes ended runs for the dashboard: the totals of all, and a bounded sample of records.

It is an observer of the host only while a page is open.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from heliograph_server.session.run_timeline import RunRecord
from heliograph_server.web.quantiles import bucket_of

#: The most records of a tick; of more, every second, third, ... is taken.
MOST_RECORDS = 1000


@dataclass(slots=True)
class RunCounts:
    """The runs of one tick that some callers may see."""

    ended: int = 0
    failed: int = 0
    #: Counts of the sampled runs by buckets of the whole time, and of the wait for their turn.
    whole: Counter[int] = field(default_factory=Counter)
    turn: Counter[int] = field(default_factory=Counter)
    #: Runs by the number of their session.
    sessions: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Taken:
    """The runs that ended between two takes."""

    records: Sequence[RunRecord] = ()
    #: One of so many runs is in `records`.
    stride: int = 1
    #: Ended runs by tenant and session, and failed ones.
    ended: Counter[tuple[str, int]] = field(default_factory=Counter)
    failed: Counter[tuple[str, int]] = field(default_factory=Counter)


class RunTap:
    """An observer of runs. `take` is called by one thread at a time, `run_ended` by any."""

    #: The timeline has splits.
    wants_splits = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: list[RunRecord] = []
        self._ended: Counter[tuple[str, int]] = Counter()
        self._failed: Counter[tuple[str, int]] = Counter()
        self._stride = 1
        self._seen = 0

    def __repr__(self) -> str:
        return f"<RunTap of {len(self._records)} runs>"

    def run_ended(self, run: RunRecord) -> None:
        """Count a run, and keep its record if it is one of the sample."""
        key = (run.principal.tenant, run.session)
        with self._lock:
            self._ended[key] += 1
            if run.error is not None:
                self._failed[key] += 1
            self._seen += 1
            if self._seen % self._stride == 0 and len(self._records) < 2 * MOST_RECORDS:
                self._records.append(run)

    def take(self) -> Taken:
        """Return the runs since the last call, and choose the sample of the next ones by their
        number."""
        with self._lock:
            found = Taken(self._records, self._stride, self._ended, self._failed)
            self._stride = max(1, -(-self._seen // MOST_RECORDS))
            self._records, self._seen = [], 0
            self._ended, self._failed = Counter(), Counter()
        return found


def counts_of(taken: Taken, may_see: Callable[[str], bool]) -> tuple[RunCounts, list[RunRecord]]:
    """The counts and the sampled records of the runs of those tenants that a caller may see."""
    found = RunCounts()
    for (tenant, session), count in taken.ended.items():
        if may_see(tenant):
            found.ended += count
            found.sessions[session] += count
    found.failed = sum(count for (tenant, _), count in taken.failed.items() if may_see(tenant))
    records = [one for one in taken.records if may_see(one.principal.tenant)]
    for one in records:
        found.whole[bucket_of(one.ended - one.came)] += 1
        found.turn[bucket_of(one.began - one.came)] += 1
    return found, records
