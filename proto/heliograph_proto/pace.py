"""Yield points of long computations in Python, such as the compile of a large graph.

While one thread computes, others of the process get the interpreter only every few milliseconds. A
thread `at_a_pace` gives it away about once a millisecond instead, in the loops that iterate over
`in_turns`, and can be cancelled there. Any other thread iterates as fast as it can.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from heliograph_proto.errors import HeliographError

T = TypeVar("T")

#: How long a thread computes between two pauses, and how long it pauses at least.
TURN_SECONDS, PAUSE_SECONDS = 0.001, 0.0001
#: The items of a loop between two looks at the clock, less one. A power of two, less one.
ITEMS = 15


class Pace:
    """The pace of one computation. `why_over` returns the error that ends it."""

    def __init__(self, why_over: Callable[[], HeliographError | None]) -> None:
        self._why_over = why_over
        self._since = time.perf_counter()

    def __repr__(self) -> str:
        return f"<Pace over={self._why_over()}>"

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """Iterate, with pauses."""
        for number, item in enumerate(items):
            if not number & ITEMS:
                self.give_way()
            yield item

    def give_way(self) -> None:
        """Pause if the turn is over. Raises the error that ends the computation."""
        if time.perf_counter() - self._since < TURN_SECONDS:
            return
        if (error := self._why_over()) is not None:
            raise error
        time.sleep(PAUSE_SECONDS)
        self._since = time.perf_counter()


class _Current(threading.local):
    pace: Pace | None = None


_current = _Current()


@contextmanager
def at_a_pace(pace: Pace) -> Iterator[None]:
    """Compute at a pace on this thread."""
    before, _current.pace = _current.pace, pace
    try:
        yield
    finally:
        _current.pace = before


def in_turns(items: Iterable[T]) -> Iterable[T]:
    """Return the items, with pauses between some of them if this thread computes at a pace."""
    return items if _current.pace is None else _current.pace.over(items)
