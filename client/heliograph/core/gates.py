"""Things that wait for their turn in the client: places in the order of commands, and credit."""

from __future__ import annotations

from collections import deque

from heliograph.core.future import Outcome, Pending


class OrderGate:
    """A place in the outbox for commands that come later; commands queued after it wait."""

    __slots__ = ("closed", "queue")

    def __init__(self) -> None:
        self.queue: deque[Pending] = deque()
        self.closed = False


class CreditGrant(Outcome):
    """A request for a number of bytes of credit."""

    __slots__ = ("gate", "size_bytes")

    def __init__(self, size_bytes: int, gate: OrderGate | None) -> None:
        super().__init__()
        self.size_bytes = size_bytes
        self.gate = gate
