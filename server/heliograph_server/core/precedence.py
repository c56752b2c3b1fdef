"""Runs of a plan that overlap: on each device one computes at a time, and the oldest goes first.

So a pipeline keeps its order: a younger run fills the gaps of an older one and never delays it by more than
the split that it is in.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import count

from heliograph_backends.contract import Abort
from heliograph_proto.errors import CancelledError


class Precedence:
    """Of one device. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_taken = False
        #: Ranks of the runs that wait; each run waits once at most on one device.
        self._waiting: list[int] = []
        self._gone: set[int] = set()

    def __repr__(self) -> str:
        return f"<Precedence {'taken' if self._is_taken else 'free'}, {len(self._waiting)} wait>"

    @contextmanager
    def turn(self, rank: int, abort: Abort) -> Iterator[None]:
        """The device, as soon as it is free and no run of a lower rank waits. Raises CancelledError."""
        with abort.watch(self._wake):
            self._take(rank, abort)
        try:
            yield
        finally:
            with self._changed:
                self._is_taken = False
                self._changed.notify_all()

    def _take(self, rank: int, abort: Abort) -> None:
        with self._changed:
            heappush(self._waiting, rank)
            self._changed.wait_for(lambda: abort.is_set or (not self._is_taken and self._first() == rank))
            if abort.is_set:
                self._gone.add(rank)
                self._first()
                self._changed.notify_all()
                raise CancelledError("the run was cancelled")
            heappop(self._waiting)
            self._is_taken = True

    def _first(self) -> int:
        """The lowest rank that waits; -1: nobody does."""
        while self._waiting and self._waiting[0] in self._gone:
            self._gone.remove(heappop(self._waiting))
        return self._waiting[0] if self._waiting else -1

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


class Precedences:
    """Of the devices of one plan, for all of its copies."""

    def __init__(self, devices: int) -> None:
        self.of = tuple(Precedence() for _ in range(devices))
        self._ranks = count()

    def rank(self) -> int:
        """Of a run that begins now: higher than all before."""
        return next(self._ranks)
