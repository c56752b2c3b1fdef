"""Runs of short splits, done by whoever brings what they wait for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from heliograph_backends.contract import Abort, Done
from heliograph_proto.errors import CancelledError
from heliograph_server.plans.stepwise import SteppedRun, Stepwise
from heliograph_server.resources.device_queue import DeviceLock


class Values:
    """One run's values: split 1 waits for one."""

    def __init__(self) -> None:
        self.call: Callable[[], None] | None = None
        self.has_room, self.is_there = True, False
        self.offered: list[int] = []
        self.ended: BaseException | str | None = "no"

    def run(self, number: int, tensors: Mapping[Any, Any]) -> Values:
        return self

    def coming(self, number: int, call: Callable[[], None]) -> bool:
        self.call = call
        return number == 0 or self.is_there

    def ask_ahead(self) -> None:
        pass

    def before(self, number: int, abort: Abort) -> None:
        if abort.is_set:
            raise CancelledError("it was cancelled")

    def departing(self, number: int) -> tuple[Sequence[int], Any]:
        return (number,), "place"

    def offer_now(self, place: int, tensor: object) -> bool:
        if self.has_room:
            self.offered.append(place)
        return self.has_room

    def offer(self, place: int, tensor: object, abort: Abort) -> None:
        self.offered.append(place)

    def end(self, error: BaseException | None) -> None:
        self.ended = error


class Run:
    """A run of two splits, and what was given to the queue's thread."""

    def __init__(self) -> None:
        self.values, self.device_lock, self.abort = Values(), DeviceLock(), Abort()
        self.ran: list[int] = []
        self.given: list[tuple[Callable[[], None], Done]] = []
        self.done: list[BaseException | None] = []
        steps = [lambda: self.ran.append(0), lambda: self.ran.append(1)]
        late: Any = SimpleNamespace(run=self.values.run)
        partition = Stepwise(late, self.device_lock, steps, {"place": None}, [], [], lambda *times: None)  # type: ignore[dict-item]
        elsewhere = lambda work, done: self.given.append((work, done))  # noqa: E731
        SteppedRun(partition, 1, self.abort, elsewhere, self.done.append).begin([])

    def come(self) -> None:
        """The value is there."""
        assert self.values.call is not None
        self.values.is_there = True
        self.values.call()

    def work(self) -> None:
        """What the queue's thread does."""
        (work, done), self.given = self.given[0], []
        try:
            work()
        except CancelledError as error:
            done(error)
        else:
            done(None)


def test_who_brings_a_value_runs_the_split_that_waits_for_it() -> None:
    run = Run()
    assert run.ran == [0] and not run.done
    run.come()
    assert run.ran == run.values.offered == [0, 1] and run.done == [None] and not run.given


def test_where_another_computes_on_the_device_the_lanes_thread_goes_on() -> None:
    run = Run()
    with run.device_lock:
        run.come()
    assert run.ran == [0] and not run.done
    run.work()
    assert run.ran == run.values.offered == [0, 1] and run.done == [None]


def test_where_there_is_no_room_for_a_value_the_lanes_thread_waits_and_no_split_runs_twice() -> None:
    run = Run()
    run.values.has_room = False
    run.come()
    assert run.ran == [0, 1] and run.values.offered == [0] and not run.done
    run.work()
    assert run.ran == run.values.offered == [0, 1] and run.done == [None]


def test_a_run_that_is_aborted_while_it_waits_ends_once() -> None:
    run = Run()
    run.abort.set()
    run.come()
    assert run.ran == [0] and not run.done
    run.work()
    assert isinstance(run.values.ended, CancelledError)
    (error,) = run.done
    with pytest.raises(CancelledError):
        raise error or AssertionError("it ended well")
