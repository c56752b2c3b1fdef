"""Values that come and go while a partition runs. Device threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from heliograph_backends.contract import Abort, Tensor
from heliograph_proto.errors import HeliographError, InternalError, Origin
from heliograph_proto.graph import Graph
from heliograph_server.exchange.edges import IncomingValues
from heliograph_server.plans.partitions import Exchanging
from heliograph_server.scheduler.model import Schedule
from heliograph_server.scheduler.split_memory import Place


class LateRun(Protocol):
    """The values of one run. As a context, it ends the run for the other partitions."""

    def before(self, number: int, abort: Abort) -> None:
        """Waits for what a split reads. Raises what `IncomingValues.wait` does."""

    def behind(self, number: int, tensors: Mapping[Place, Tensor], abort: Abort) -> None:
        """Offers what a split made."""

    def __enter__(self) -> LateRun: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...


class _NotLate:
    """Of a plan that exchanges nothing."""

    def before(self, number: int, abort: Abort) -> None:
        pass

    def behind(self, number: int, tensors: Mapping[Place, Tensor], abort: Abort) -> None:
        pass

    def __enter__(self) -> _NotLate:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        pass


NOT_LATE = _NotLate()


class LateValues:
    """Which splits of a partition wait for which arrivals, and offer which departures."""

    def __init__(self, graph: Graph, schedule: Schedule, exchanging: Exchanging) -> None:
        partition = exchanging.partition
        self.ports = exchanging.ports
        #: Where each arrival lies, by its place in the partition.
        self.places = tuple((one.leaf, schedule.homes[one.leaf]) for one in partition.arrivals)
        place_of = {one.leaf: place for place, one in enumerate(partition.arrivals)}
        self.leaves = frozenset(place_of)
        #: By split: the places of the arrivals that it reads.
        self.awaited = tuple(
            tuple(place_of[value] for value in one.inputs if value in place_of) for one in schedule.splits
        )
        leaving: dict[int, list[int]] = {}
        for place, one in enumerate(partition.departures):
            leaving.setdefault(one.node, []).append(place)
        leaves = len(graph.leaves)
        #: By split: the places of its departures, which are its last node's, and where that lies.
        self.offered = tuple(
            (tuple(leaving.get(one.nodes[-1], ())), (leaves + one.nodes[-1], one.device))
            for one in schedule.splits
        )

    def __repr__(self) -> str:
        return f"<Late {len(self.places)} arrivals>"

    def run(self, number: int, tensors: Mapping[Place, Tensor]) -> LateValuesRun:
        """Begins to fetch what arrives in a run."""
        targets = [tensors[place] for place in self.places]
        return LateValuesRun(self, number, self.ports.expect(number, targets))


class LateValuesRun:
    """One run."""

    def __init__(self, late: LateValues, number: int, incoming: IncomingValues) -> None:
        self._late = late
        self._number = number
        self._incoming = incoming

    def ask_ahead(self) -> None:
        """Begins to fetch what the next run will want."""
        self._incoming.ask_ahead()

    def before(self, number: int, abort: Abort) -> None:
        for place in self._late.awaited[number]:
            try:
                self._incoming.wait(place, abort)
            except HeliographError as error:
                # A node of another partition is no node of this one: its own run tells which it was.
                raise error.at(Origin()) from None

    def coming(self, number: int, call: Callable[[], None]) -> bool:
        """Whether all that a split reads has come, or failed; else this is called once when it is worth
        asking again."""
        incoming = self._incoming
        return all(incoming.when_ended(place, call) for place in self._late.awaited[number])

    def departing(self, number: int) -> tuple[Sequence[int], Place]:
        """The places of what a split offers, and where that lies."""
        return self._late.offered[number]

    def offer_now(self, place: int, tensor: Tensor) -> bool:
        """Offers one of these, where that need not wait. Whether it did."""
        return self._late.ports.offer_now(place, self._number, tensor)

    def offer(self, place: int, tensor: Tensor, abort: Abort) -> None:
        """Offers one of these."""
        self._late.ports.offer(place, self._number, tensor, abort)

    def behind(self, number: int, tensors: Mapping[Place, Tensor], abort: Abort) -> None:
        places, made = self._late.offered[number]
        for place in places:
            self._late.ports.offer(place, self._number, tensors[made], abort)

    def __enter__(self) -> LateValuesRun:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._incoming.ask_ahead()
        # First the end of the run: whoever waits for it elsewhere is told why before this one cleans up.
        self._late.ports.end(self._number, None if error is None else _told(error))
        self._incoming.close()


def _told(error: BaseException) -> HeliographError:
    """As the other partitions learn of it."""
    if isinstance(error, HeliographError):
        return error
    return InternalError(f"another part of the run failed: {type(error).__name__}: {error}")
