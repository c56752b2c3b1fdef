"""Values that arrive and depart while a partition runs. Device threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from heliograph_backends.contract import Abort, Tensor
from heliograph_proto.errors import HeliographError, InternalError, Origin
from heliograph_proto.graph import Graph
from heliograph_server.exchange.edges import IncomingValues
from heliograph_server.plans.partitions import Exchanging
from heliograph_server.scheduler.model import Schedule
from heliograph_server.scheduler.split_memory import Place


class LateRun:
    """The values of one run: here, of a plan that exchanges nothing."""

    def before(self, number: int, abort: Abort) -> None:
        """Wait for the values that a split reads. Raises what `IncomingValues.wait` does."""

    def behind(self, number: int, tensors: Mapping[Place, Tensor], abort: Abort) -> None:
        """Offer the results of a split."""

    def end(self, error: BaseException | None) -> None:
        """End the run for the other partitions."""


NOT_LATE = LateRun()


class LateValues:
    """The arrivals that each split of a partition waits for, and the departures that it offers."""

    def __init__(self, graph: Graph, schedule: Schedule, exchanging: Exchanging) -> None:
        partition = exchanging.partition
        self.ports = exchanging.ports
        #: The place of each arrival, in the partition's order.
        self.places = tuple((one.leaf, schedule.homes[one.leaf]) for one in partition.arrivals)
        place_of = {one.leaf: place for place, one in enumerate(partition.arrivals)}
        self.leaves = frozenset(place_of)
        #: By split: the indices of the arrivals that it reads.
        self.awaited = tuple(
            tuple(place_of[value] for value in one.inputs if value in place_of) for one in schedule.splits
        )
        leaving: dict[int, list[int]] = {}
        for place, one in enumerate(partition.departures):
            leaving.setdefault(one.node, []).append(place)
        leaves = len(graph.leaves)
        #: By split: the indices of its departures, which are results of its last node, and the
        #: place of that result.
        self.offered = tuple(
            (tuple(leaving.get(one.nodes[-1], ())), (leaves + one.nodes[-1], one.device))
            for one in schedule.splits
        )

    def __repr__(self) -> str:
        return f"<Late {len(self.places)} arrivals>"

    def run(self, number: int, tensors: Mapping[Place, Tensor]) -> LateValuesRun:
        """Start to fetch the values that arrive in a run."""
        targets = [tensors[place] for place in self.places]
        return LateValuesRun(self, number, self.ports.expect(number, targets))


class LateValuesRun(LateRun):
    """One run of a partition."""

    def __init__(self, late: LateValues, number: int, incoming: IncomingValues) -> None:
        self._late = late
        self._number = number
        self._incoming = incoming

    def ask_ahead(self) -> None:
        """Start to fetch the arrivals of the next run."""
        self._incoming.ask_ahead()

    def before(self, number: int, abort: Abort) -> None:
        for place in self._late.awaited[number]:
            try:
                self._incoming.wait(place, abort)
            except HeliographError as error:
                # The node belongs to another partition, whose own run reports it.
                raise error.at(Origin()) from None

    def coming(self, number: int, call: Callable[[], None]) -> bool:
        """True if all values that a split reads have come or failed. Otherwise `call` is called
        once, when it is worth checking again."""
        incoming = self._incoming
        return all(incoming.when_ended(place, call) for place in self._late.awaited[number])

    def departing(self, number: int) -> tuple[Sequence[int], Place]:
        """Return the indices of a split's departures, and the place of their value."""
        return self._late.offered[number]

    def offer_now(self, place: int, tensor: Tensor) -> bool:
        """Offer a departure if that need not wait. True if it was offered."""
        return self._late.ports.offer_now(place, self._number, tensor)

    def offer(self, place: int, tensor: Tensor, abort: Abort) -> None:
        """Offer a departure."""
        self._late.ports.offer(place, self._number, tensor, abort)

    def behind(self, number: int, tensors: Mapping[Place, Tensor], abort: Abort) -> None:
        places, made = self._late.offered[number]
        for place in places:
            self._late.ports.offer(place, self._number, tensors[made], abort)

    def end(self, error: BaseException | None) -> None:
        self._incoming.ask_ahead()
        # First report the end of the run, so that other partitions learn the cause before this one
        # cleans up.
        self._late.ports.end(self._number, None if error is None else _reported(error))
        self._incoming.close()


def _reported(error: BaseException) -> HeliographError:
    """Return the error that is reported to the other partitions."""
    if isinstance(error, HeliographError):
        return error
    return InternalError(f"another part of the run failed: {type(error).__name__}: {error}")
