"""Edges between the steps of running loops, where a session can be held still.

A loop looks at `is_wanted` after each turn, and waits at the edge while a snapshot is wanted; so
does one that waits for its client to take values. Once the session is still, it is held there until
that is over, also if it is cancelled meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from heliograph_backends.contract import Abort
from heliograph_proto.commands import Bytes

#: The time between two looks at whether a loop that waits was cancelled.
LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class LoopState:
    """A loop between two steps: those that are complete, the number of the last one's values that
    its client was not sent, and its outputs, by their places."""

    steps: int
    unsent: int
    outputs: Mapping[int, Bytes]


class EdgeLoop(Protocol):
    """A loop that can be held between two steps."""

    @property
    def may_be_held(self) -> bool:
        """False if its state is more than its outputs."""

    def state(self) -> LoopState:
        """Return a copy of its state. Called while it is held."""


class Edges:
    """The loops of one session that wait between two steps. Thread-safe."""

    def __init__(self) -> None:
        #: True while loops are to wait. Looked at without a lock.
        self.is_wanted = False
        self._changed = threading.Condition()
        self._is_frozen = False
        self._waiting: dict[int, EdgeLoop] = {}
        #: Wake loops that wait for their clients.
        self._wakes: dict[int, Callable[[], None]] = {}

    def __repr__(self) -> str:
        return f"<Edges of {len(self._waiting)} loops>"

    def wait(
        self, sequence: int, loop: EdgeLoop, abort: Abort, may_go: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait at an edge as long as that is wanted, or until a cancel or `may_go`. On the loop's
        thread."""
        with self._changed:
            self._waiting[sequence] = loop
            try:
                while self.is_wanted and (self._is_frozen or not (abort.is_requested or may_go())):
                    self._changed.wait(LOOK_SECONDS)
            finally:
                del self._waiting[sequence]

    def add(self, sequence: int, wake: Callable[[], None]) -> None:
        """Call `wake` when loops are to wait, until `remove`."""
        with self._changed:
            self._wakes[sequence] = wake

    def remove(self, sequence: int) -> None:
        """A loop has ended."""
        with self._changed:
            self._wakes.pop(sequence, None)

    def want(self) -> None:
        """Have loops wait from their next edge on."""
        with self._changed:
            self.is_wanted = True
            wakes = list(self._wakes.values())
        for wake in wakes:
            wake()

    def hold(self, sequence: int) -> bool:
        """Hold a loop that waits until `go_on`. False if it does not wait."""
        with self._changed:
            self._is_frozen = self.is_wanted and sequence in self._waiting
            return self._is_frozen

    def held(self, sequence: int) -> EdgeLoop:
        """Return a loop that is held."""
        return self._waiting[sequence]

    def go_on(self) -> None:
        """Let the loops go on."""
        with self._changed:
            self.is_wanted = self._is_frozen = False
            self._changed.notify_all()
