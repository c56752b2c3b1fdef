"""Values that a head takes to daemons: those of its own portion, and those of daemons that cannot be reached
from where they are wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from heliograph_proto.bulk import encode_download
from heliograph_proto.errors import HeliographError, UnsupportedError
from heliograph_proto.portions import Edge, Source
from heliograph_server.core.exchanging import SMALL_BYTES, LiveExchange, Value

#: Told once that a value is where it belongs, or why it is not; from any thread.
Done: TypeAlias = Callable[[HeliographError | None], None]


@dataclass(frozen=True, slots=True)
class Errand:
    """A value of a plan that is taken to a daemon in each run."""

    edge: Edge
    size_bytes: int
    destination: Source
    #: None: this process offers it.
    source: Source | None = None
    #: Where it is not this process that offers it: another edge, from there to here.
    fetched_by: Edge | None = None


class Courier(Protocol):
    """Runs errands."""

    def go(self, errand: Errand, run: int, done: Done) -> None:
        """Takes the value of a run, once it is there. Returns at once; raises nothing."""


class LiveCourier:
    """A `Courier` between the exchange of this process and others."""

    def __init__(self, exchange: LiveExchange) -> None:
        self._exchange = exchange

    def __repr__(self) -> str:
        return f"<LiveCourier of {self._exchange!r}>"

    def go(self, errand: Errand, run: int, done: Done) -> None:
        puller = self._exchange.puller
        if puller is None:
            done(UnsupportedError("this process takes no values to other daemons"))
        elif errand.source is not None:
            puller.pull(errand.source, [Relayed(self, errand, run, done)])
        else:
            edge = errand.edge

            def found(value: Value | HeliographError) -> None:
                if isinstance(value, HeliographError):
                    done(value)
                else:
                    self.push(errand, run, value, done)

            self._exchange.ask(edge.name, run, edge.capability(run), found)

    def push(self, errand: Errand, run: int, value: Value, done: Done) -> None:
        """Brings a value to its destination."""
        pusher = self._exchange.puller
        push = getattr(pusher, "push", None)
        if push is None:
            value.drop()
            done(UnsupportedError("this process takes no values to other daemons"))
        else:
            push(errand.destination, errand.edge, run, value, done)

    def relayed(self, size_bytes: int) -> None:
        """Counts a value that came from one daemon and has gone to another."""
        self._exchange.counter.relayed(size_bytes)


class Relayed:
    """A value that is fetched from one daemon to be brought to another: a `Sink`. A small one is brought
    once it is here, a large one piece by piece."""

    is_quick = True

    def __init__(self, courier: LiveCourier, errand: Errand, run: int, done: Done) -> None:
        self.edge = errand.fetched_by or errand.edge
        self.run = run
        self.size_bytes = errand.size_bytes
        self._courier, self._errand, self._done = courier, errand, done
        self._lock = threading.Lock()
        self._is_over = False
        self._small = bytearray() if errand.size_bytes <= SMALL_BYTES else None
        self._value = Value(errand.size_bytes)
        if self._small is None:
            courier.push(errand, run, self._value, self._brought)

    def ready(self, wake: Callable[[], None]) -> bool:
        return True

    def write(self, offset_bytes: int, data: memoryview) -> bool:
        if self._small is not None:
            self._small += data
            return True
        self._value.put(encode_download(offset_bytes, self.size_bytes, data), data.nbytes)
        return not self._value.is_dropped

    def finish(self) -> None:
        if self._small is not None:
            value = Value.of(bytes(self._small))
            self._courier.push(self._errand, self.run, value, self._brought)

    def fail(self, error: HeliographError) -> None:
        if self._small is None:
            self._value.fail(error)
        self._end(error)

    def _brought(self, error: HeliographError | None) -> None:
        if error is None:
            self._courier.relayed(self.size_bytes)
        self._end(error)

    def _end(self, error: HeliographError | None) -> None:
        with self._lock:
            first, self._is_over = not self._is_over, True
        if first:
            self._done(error)
