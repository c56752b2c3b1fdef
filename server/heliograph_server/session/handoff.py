"""Whole tensors from daemon to daemon, by a command at each end.

Device threads give and take values. Any thread opens and closes, under the session's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from heliograph_backends.contract import Abort
from heliograph_proto.errors import HeliographError
from heliograph_proto.plans import Arrival, Departure, Partition
from heliograph_server.exchange.exchange import LiveExchange, LivePorts
from heliograph_server.session.protocol.instructions import CloseEdge, FetchTask, OfferTask, OpenEdge


class TensorHandoff:
    """Performs the OfferTasks and FetchTasks of one session."""

    def __init__(self, exchange: LiveExchange) -> None:
        self._exchange = exchange
        #: The ports that offer tensors, or the error that prevents it, by sequence number.
        self._offers: dict[int, LivePorts | HeliographError] = {}

    def open(self, instruction: OpenEdge) -> None:
        """Open a port for a tensor. Daemons may ask for it before the command runs."""
        partition = Partition(departures=(Departure(0, instruction.task.command.edge),))
        try:
            self._offers[instruction.sequence] = self._exchange.open(partition)
        except HeliographError as error:
            self._offers[instruction.sequence] = error

    def close(self, instruction: CloseEdge) -> Callable[[], None]:
        """End an offer. Return a call, to make without a lock, that fails waiting daemons."""
        ports = self._offers.pop(instruction.sequence, None)
        return partial(ports.close, instruction.error) if isinstance(ports, LivePorts) else lambda: None

    def offer(self, sequence: int, task: OfferTask, abort: Abort) -> None:
        """Give the tensor away; block until it was taken. Raises HandleExistsError,
        CancelledError."""
        ports = self._offers[sequence]
        if isinstance(ports, HeliographError):
            raise ports
        ports.hand_over(0, task.command.run, task.tensor.placed, abort)

    def fetch(self, task: FetchTask, abort: Abort) -> None:
        """Write the tensor; block until it is written. Raises the other daemon's errors, too."""
        ports = self._exchange.open(Partition((Arrival(0, task.command.edge, task.command.source),)))
        try:
            ports.expect(task.command.run, [task.tensor.placed], is_awaited=True).wait(0, abort)
        finally:
            ports.close()
