"""Small values that are requested before their run begins, so that it need not wait a round trip.

    run n ── requests run n + 1 ──▸ the other daemon ── value, as soon as it is made ──▸ here
    run n + 1 begins ── claims it

At most one small value of each arrival is held for a run that has not begun, or AHEAD_RUNS of the
steps of a loop, whose requests go together.

Everything here may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from heliograph_proto.errors import (
    HeliographError,
    MemberLostError,
    ProtocolError,
    UnavailableError,
)
from heliograph_server.exchange.incoming import IncomingValue
from heliograph_server.exchange.outgoing import SMALL_BYTES

#: Prefetched values of runs that are so much older than the one that begins are never claimed.
OLD_RUNS = 64
#: The most runs whose values are requested ahead if they are known to follow, as steps of a loop.
AHEAD_RUNS = 16


class PrefetchedValue:
    """A value of a run that has not begun: a `Sink`. Thread-safe."""

    def __init__(self, value: IncomingValue, run: int) -> None:
        """The value of the same arrival as `value`, in another run."""
        self.edge, self.source, self.size_bytes = value.edge, value.source, value.size_bytes
        self.run = run
        self._lock = threading.Lock()
        self._data: bytes | None = None
        self._error: HeliographError | None = None
        self._claimed: IncomingValue | None = None

    def __repr__(self) -> str:
        return f"<PrefetchedValue {self.edge} run {self.run}>"

    @property
    def is_quick(self) -> bool:
        """As `Sink.is_quick`. Keeping an unclaimed value is quick."""
        return self._claimed is None or self._claimed.is_quick

    def claim(self, value: IncomingValue) -> bool:
        """Deliver to the value of the run that begins. Return False if the link broke before, so
        that the value must be requested again."""
        with self._lock:
            if isinstance(self._error, UnavailableError | MemberLostError):
                return False
            self._claimed, data, error = value, self._data, self._error
        value.asked_as = self
        if data is not None:
            value.land(data)
        elif error is not None:
            value.fail(error)
        return True

    # Called by the link

    @property
    def is_awaited(self) -> bool:
        """As `Sink.is_awaited`."""
        return False

    @property
    def received_bytes(self) -> int:
        """As `Sink.received_bytes`. A small value comes in one piece."""
        return 0

    def ready(self, wake: object) -> bool:
        """As `Sink.ready`."""
        return True

    def write(self, offset_bytes: int, data: memoryview) -> bool:
        """As `Sink.write`."""
        if offset_bytes or data.nbytes != self.size_bytes:
            raise ProtocolError(f"received {data.nbytes:,} bytes for a value of {self.size_bytes:,}")
        with self._lock:
            if self._data is not None or self._error is not None:
                return False
            self._data, value = bytes(data), self._claimed
        if value is not None:
            value.land(self._data)
        return True

    def finish(self) -> None:
        """As `Sink.finish`."""

    def fail(self, error: HeliographError) -> None:
        """As `Sink.fail`."""
        with self._lock:
            if self._data is not None or self._error is not None:
                return
            self._error, value = error, self._claimed
        if value is not None:
            value.fail(error)


class Prefetches:
    """The prefetched values of a partition. The caller holds a lock."""

    def __init__(self) -> None:
        #: The newest run with a request.
        self._newest = 0
        self._by_run: dict[int, list[PrefetchedValue]] = {}

    def begin(self, run: int) -> tuple[list[PrefetchedValue], list[PrefetchedValue]]:
        """Begin a run. Return its prefetched values, and those that are too old to be claimed."""
        mine = self._by_run.pop(run, [])
        old = [one for one in self._by_run if one < run - OLD_RUNS]
        self._newest = max(self._newest, run)
        return mine, [one for number in old for one in self._by_run.pop(number)]

    def ahead(self, run: int, values: Sequence[IncomingValue], last: int = 0) -> list[PrefetchedValue]:
        """The values to request for runs after one that has begun with these: the next one and,
        up to `last`, those that are known to follow."""
        until = max(run + 1, min(run + AHEAD_RUNS, last))
        newest = max(self._newest, run)
        if newest > run and newest >= min(run + AHEAD_RUNS // 2, until):
            return []
        small = [one for one in values if one.source is not None and one.size_bytes <= SMALL_BYTES]
        made: list[PrefetchedValue] = []
        for number in range(newest + 1, until + 1):
            made += self._by_run.setdefault(number, [PrefetchedValue(one, number) for one in small])
        self._newest = until
        return made

    def close(self) -> list[PrefetchedValue]:
        """Remove all values and return them."""
        left = [one for several in self._by_run.values() for one in several]
        self._by_run.clear()
        return left


def claimed(values: Sequence[IncomingValue], prefetched: Sequence[PrefetchedValue]) -> list[IncomingValue]:
    """Claim prefetched values. Return the values that are still to be requested."""
    by_edge = {one.edge.name: one for one in prefetched}
    return [one for one in values if (found := by_edge.get(one.edge.name)) is None or not found.claim(one)]
