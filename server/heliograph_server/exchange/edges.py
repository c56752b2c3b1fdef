"""Values that travel between daemons while a plan runs: offered by who made them, taken once.

    split ─▸ offer ─▸ [edge, run] ─▸ PeerService ── wire ──▸ puller ─▸ the consumer's tensor ─▸ split

The consumer may ask before the producer has it, and the producer may have it before anybody asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from heliograph_backends.contract import Abort, Tensor
from heliograph_proto.errors import HeliographError
from heliograph_proto.plans import Partition


class IncomingValues(Protocol):
    """The arrivals of one run of a partition, which are on their way."""

    def wait(self, place: int, abort: Abort) -> None:
        """Waits until an arrival, by its place in `Partition.arrivals`, is in its tensor. Raises what went
        wrong at the other end or on the way, MemberLostError, and CancelledError after an abort."""

    def when_ended(self, place: int, call: Callable[[], None]) -> bool:
        """Whether `wait` would return or raise at once; else this is called once when it would, by whatever
        thread. It must not wait or raise."""

    def ask_ahead(self) -> None:
        """Begins to fetch what is small of the next run, so that this one's beginning need not. Returns at
        once; again it does nothing."""

    def close(self) -> None:
        """What has not come is not waited for any more: nobody writes to the tensors when this returns."""


class EdgePorts(Protocol):
    """One end of the edges of a partition, for as long as its plan lives. Thread-safe."""

    def expect(self, run: int, targets: Sequence[Tensor]) -> IncomingValues:
        """Begins to fetch all arrivals of a run, each into its tensor. Raises nothing that `wait` can."""

    def offer(self, place: int, run: int, tensor: Tensor, abort: Abort) -> None:
        """Gives a departure, by its place in `Partition.departures`, to whoever asks. Its bytes are copied
        before this returns, so the tensor may be written again. Waits where too much is held that nobody
        took."""

    def offer_now(self, place: int, run: int, tensor: Tensor) -> bool:
        """As `offer`, of what is small, where that need not wait. Whether it did."""

    def end(self, run: int, error: HeliographError | None = None) -> None:
        """The run is over: whoever asks for what it did not offer gets this error, or that it was
        cancelled."""

    def close(self) -> None:
        """The partition is gone: whoever waits is told so. Idempotent."""


class Exchange(Protocol):
    """Of one daemon."""

    def open(self, partition: Partition) -> EdgePorts:
        """Raises HandleExistsError for an edge that is open already."""
