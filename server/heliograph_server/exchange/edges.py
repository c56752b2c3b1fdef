"""Values that travel between daemons while a plan runs. Each is offered by its producer and taken
once.

    split ─▸ offer ─▸ [edge, run] ─▸ PeerService ─ wire ─▸ puller ─▸ the consumer's tensor ─▸ split

The request and the value may arrive in either order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from heliograph_backends.contract import Abort, Tensor
from heliograph_proto.errors import HeliographError
from heliograph_proto.plans import Partition

#: The most steps of a loop for which another partition may not have taken everything.
LATE_STEPS = 16


class IncomingValues(Protocol):
    """The arrivals of one run of a partition."""

    def wait(self, place: int, abort: Abort) -> None:
        """Wait until an arrival, by its index in `Partition.arrivals`, is in its tensor.

        Raises the error of the other daemon or of the link, MemberLostError, and CancelledError
        after an abort.
        """

    def when_ended(self, place: int, call: Callable[[], None]) -> bool:
        """True if `wait` would return or raise at once. Otherwise `call` is called once when it
        would, from any thread; it must not wait or raise."""

    def ask_ahead(self) -> None:
        """Begin to fetch the small values of the next run, so that its start need not wait for a
        round trip.

        Returns at once. Repeated calls have no effect.
        """

    def close(self) -> None:
        """Stop waiting for values that have not arrived. No tensor is written to after this
        returns."""


class Exchange(Protocol):
    """The edges of one daemon."""

    def open(self, partition: Partition, copies: int = 1) -> EdgePorts:
        """Open the edges of a partition, of which `copies` runs may be in progress at once.

        Raises HandleExistsError for an edge that is open already, and UnavailableError after
        its end.
        """


class EdgePorts(Protocol):
    """One end of the edges of a partition, for the lifetime of its plan. Thread-safe."""

    def expect(
        self, run: int, targets: Sequence[Tensor], places: Sequence[int] | None = None
    ) -> IncomingValues:
        """Begin to fetch arrivals of a run, each into its tensor: those at `places`, or all. Errors
        are raised by `wait`, whose places count these arrivals."""

    def offer(self, place: int, run: int, tensor: Tensor, abort: Abort) -> None:
        """Make a departure, by its index in `Partition.departures`, available to its consumer.

        The bytes are copied before this returns, so the tensor may be written again. Waits while
        too many bytes are held that no consumer has taken.
        """

    def offer_now(self, place: int, run: int, tensor: Tensor) -> bool:
        """As `offer`, for a small value and only if that need not wait. Return True if it was
        offered."""

    def expect_runs(self, last: int) -> None:
        """Note that runs up to this number follow, unless they end early; 0: it is not known.
        `ask_ahead` then asks for the values of several."""

    def leave(self, run: int) -> None:
        """Note that a run has offered and received all that it will. Its values can still be
        requested."""

    def end(self, run: int, error: HeliographError | None = None) -> None:
        """End a run. Requests for values that it did not offer receive `error`, or
        CancelledError."""

    def close(self) -> None:
        """Close the partition, and fail the requests that wait. Idempotent."""
