"""Small values that are asked for before the run that wants them begins, so that none waits for its ask.

    run n ── asks for run n + 1 ──▸ the other daemon ── value, as soon as it is made ──▸ here
    run n + 1 begins ── claims it

At most one value of each arrival is held for a run that has not begun, and only small ones.

Any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from heliograph_proto.errors import (
    CancelledError,
    HeliographError,
    MemberLostError,
    ProtocolError,
    UnavailableError,
)
from heliograph_server.exchange.incoming import IncomingValue
from heliograph_server.exchange.outgoing import SMALL_BYTES

#: Of runs so much older than one that begins, nobody claims anything any more.
OLD_RUNS = 64


class PrefetchedValue:
    """A value of a run that has not begun: a `Sink`. Thread-safe."""

    def __init__(self, landing: IncomingValue, run: int) -> None:
        """Of the same arrival as `landing`, in another run."""
        self.edge, self.source, self.size_bytes = landing.edge, landing.source, landing.size_bytes
        self.run = run
        self._lock = threading.Lock()
        self._data: bytes | None = None
        self._error: HeliographError | None = None
        self._claimed: IncomingValue | None = None

    def __repr__(self) -> str:
        return f"<PrefetchedValue {self.edge} run {self.run}>"

    @property
    def is_quick(self) -> bool:
        """As `Sink.is_quick`: what nobody claimed is only kept."""
        return self._claimed is None or self._claimed.is_quick

    def claim(self, landing: IncomingValue) -> bool:
        """Its run begins: it goes to that one's place. False where the way to the other daemon broke before,
        so that it is to be asked for anew."""
        with self._lock:
            if isinstance(self._error, UnavailableError | MemberLostError):
                return False
            self._claimed, data, error = landing, self._data, self._error
        landing.asked_as = self
        if data is not None:
            landing.land(data)
        elif error is not None:
            landing.fail(error)
        return True

    # Who brings it

    def ready(self, wake: object) -> bool:
        """As `Sink.ready`."""
        return True

    def write(self, offset_bytes: int, data: memoryview) -> bool:
        """As `Sink.write`: all of it, since it is small."""
        if offset_bytes or data.nbytes != self.size_bytes:
            raise ProtocolError(f"{data.nbytes:,} bytes came where a value has {self.size_bytes:,}")
        with self._lock:
            if self._data is not None or self._error is not None:
                return False
            self._data, landing = bytes(data), self._claimed
        if landing is not None:
            landing.land(self._data)
        return True

    def finish(self) -> None:
        """As `Sink.finish`."""

    def fail(self, error: HeliographError) -> None:
        """As `Sink.fail`."""
        with self._lock:
            if self._data is not None or self._error is not None:
                return
            self._error, landing = error, self._claimed
        if landing is not None:
            landing.fail(error)


class Prefetches:
    """What a partition has asked for ahead. Its owner holds a lock."""

    def __init__(self) -> None:
        #: The newest run for which something was asked.
        self._newest = 0
        self._foretold: dict[int, list[PrefetchedValue]] = {}

    def begin(self, run: int) -> tuple[list[PrefetchedValue], list[PrefetchedValue]]:
        """A run begins: what was asked for it, and what nobody will claim any more."""
        mine = self._foretold.pop(run, [])
        old = [one for one in self._foretold if one < run - OLD_RUNS]
        self._newest = max(self._newest, run)
        return mine, [one for number in old for one in self._foretold.pop(number)]

    def ahead(self, run: int, landings: Sequence[IncomingValue]) -> list[PrefetchedValue]:
        """What is to be asked for the run behind one that has begun with these."""
        if self._newest > run:
            return []
        self._newest = run + 1
        small = (one for one in landings if one.source is not None and one.size_bytes <= SMALL_BYTES)
        made = self._foretold[run + 1] = [PrefetchedValue(one, run + 1) for one in small]
        return made

    def close(self) -> list[PrefetchedValue]:
        """Nobody claims any of these."""
        left = [one for several in self._foretold.values() for one in several]
        self._foretold.clear()
        return left


def cancel(foretold: Iterable[PrefetchedValue]) -> None:
    """Nobody wants them any more."""
    for one in foretold:
        one.fail(CancelledError("nobody waits for this value any more"))


def claimed(landings: Sequence[IncomingValue], foretold: Sequence[PrefetchedValue]) -> list[IncomingValue]:
    """Gives landings what was asked for before; those that are to be asked for now."""
    by_edge = {one.edge.name: one for one in foretold}
    return [one for one in landings if (found := by_edge.get(one.edge.name)) is None or not found.claim(one)]
