"""Timers are called at their time, and wake their thread for nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from heliograph_server.resources.timers import Deadlines

SECONDS = 20.0


class Clock:
    """A clock that counts the looks of other threads."""

    def __init__(self) -> None:
        self.looks, self._own = 0, threading.current_thread()

    def __call__(self) -> float:
        self.looks += threading.current_thread() is not self._own
        return time.monotonic()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def deadlines(clock: Clock) -> Iterator[Deadlines]:
    made = Deadlines(clock)
    yield made
    made.close()


def test_a_timer_is_called_before_later_ones_that_came_earlier(deadlines: Deadlines) -> None:
    called = [threading.Event() for _ in range(3)]
    deadlines.after(600.0, called[0].set)
    for one in called[1:]:
        deadlines.after(0.001, one.set)
        assert one.wait(SECONDS)
    assert not called[0].is_set() and deadlines.pending == 1


def test_a_timer_that_comes_after_a_cancelled_one_is_called(deadlines: Deadlines) -> None:
    called = threading.Event()
    deadlines.cancel(deadlines.after(0.05, lambda: pytest.fail("it was cancelled")))
    deadlines.after(0.1, called.set)
    assert called.wait(SECONDS) and deadlines.pending == 0


def test_timers_that_are_cancelled_before_their_time_wake_no_thread(
    deadlines: Deadlines, clock: Clock
) -> None:
    others = Deadlines()
    for _ in range(20):
        passed, timer = threading.Event(), deadlines.after(600.0, lambda: None)
        # A thread that was woken has its turn meanwhile.
        others.after(0.001, passed.set)
        assert passed.wait(SECONDS)
        deadlines.cancel(timer)
    others.close()
    assert clock.looks <= 2
