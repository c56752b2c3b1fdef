"""An exchange within one process, for tests of plans that are partitions: no daemon, no wire."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from heliograph_backends.contract import Abort, Tensor, access
from heliograph_proto.errors import CancelledError, HandleExistsError, HeliographError
from heliograph_proto.plans import Partition

Key = tuple[bytes, int]


class FakeExchange:
    """Of all "daemons" of a test: what one offers, another gets by the edge's name."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.values: dict[Key, bytes] = {}
        self.errors: dict[Key, HeliographError] = {}
        self.open_edges: set[tuple[bytes, bool]] = set()

    def open(self, partition: Partition) -> FakePorts:
        ends = [(one.edge.name, True) for one in partition.arrivals]
        ends += [(one.edge.name, False) for one in partition.departures]
        if self.open_edges.intersection(ends):
            raise HandleExistsError("an edge is open already")
        self.open_edges.update(ends)
        return FakePorts(self, partition, ends)

    @property
    def left(self) -> int:
        """Values that nobody took, and ends that nobody closed."""
        return len(self.values) + len(self.open_edges)


class FakePorts:
    def __init__(self, exchange: FakeExchange, partition: Partition, ends: list[tuple[bytes, bool]]) -> None:
        self.exchange, self.partition, self._ends = exchange, partition, ends

    def expect(self, run: int, targets: Sequence[Tensor]) -> FakeIncoming:
        keys = [(one.edge.name, run) for one in self.partition.arrivals]
        return FakeIncoming(self.exchange, keys, targets)

    def offer(self, place: int, run: int, tensor: Tensor, abort: Abort) -> None:
        key = self.partition.departures[place].edge.name, run
        data = bytes(access.read_whole(tensor))
        with self.exchange.changed:
            assert key not in self.exchange.values, "offered twice"
            self.exchange.values[key] = data
            self.exchange.changed.notify_all()

    def end(self, run: int, error: HeliographError | None = None) -> None:
        why = error or CancelledError("the run is over")
        with self.exchange.changed:
            for one in self.partition.departures:
                self.exchange.errors[one.edge.name, run] = why
            self.exchange.changed.notify_all()

    def close(self) -> None:
        self.exchange.open_edges.difference_update(self._ends)


class FakeIncoming:
    def __init__(self, exchange: FakeExchange, keys: list[Key], targets: Sequence[Tensor]) -> None:
        self.exchange, self.keys, self.targets = exchange, keys, targets
        self.here: set[int] = set()
        self.locks = [threading.Lock() for _ in keys]

    def ask_ahead(self) -> None:
        """Nothing is gained by it here."""

    def wait(self, place: int, abort: Abort) -> None:
        key, changed = self.keys[place], self.exchange.changed

        def wake() -> None:
            with changed:
                changed.notify_all()

        def ready() -> bool:
            return abort.is_set or key in self.exchange.values or key in self.exchange.errors

        with self.locks[place]:
            if place in self.here:
                return
            with abort.watch(wake), changed:
                wait_for(changed, ready)
                if abort.is_set:
                    raise CancelledError("the run was cancelled")
                data = self.exchange.values.pop(key, None)
                if data is None:
                    raise self.exchange.errors[key]
            access.write(self.targets[place], 0, memoryview(data))
            self.here.add(place)

    def close(self) -> None:
        pass


def wait_for(changed: threading.Condition, ready: Callable[[], bool]) -> None:
    assert changed.wait_for(ready, 20), "nothing came in time"
