"""Helper threads: on which processors they run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import numpy as np
import pytest
from kernel_runs import Layer

from heliograph_backends.cpu.kernels import WorkerPool
from heliograph_backends.cpu.kernels.runtime.workers import UNKNOWN

on_linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are not placed here")


@contextmanager
def only(thread: int, processors: set[int]) -> Iterator[None]:
    """Has a thread on these processors alone; 0 is the calling one."""
    before = os.sched_getaffinity(thread)
    os.sched_setaffinity(thread, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(thread, before)


def helper_threads() -> list[int]:
    found = [each for each in threading.enumerate() if each.name.startswith("heliograph-kernel-")]
    return [each.native_id for each in found if each.native_id is not None]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline


def park_on(pool: WorkerPool, layer: Layer, processor: int) -> None:
    """Has the pool's one helper sleep on a processor."""

    def was_there() -> bool:
        layer.run(pool)
        return pool.processors == [processor]

    (helper,) = helper_threads()
    with only(helper, {processor}):
        wait_until(was_there)
        wait_until(lambda: pool.parked == 1)


@on_linux
def test_a_helper_that_sleeps_where_the_leader_is_wakes_elsewhere(random: np.random.Generator) -> None:
    """The system may move it back at once if others work there, so one of several runs will do."""
    here, *others = sorted(os.sched_getaffinity(0))
    if not others:
        pytest.skip("there is one processor")
    layer = Layer(random, tokens=300)
    expected = layer.run(None)
    with WorkerPool(2) as pool:

        def went_elsewhere() -> bool:
            park_on(pool, layer, here)
            with only(0, {here}):
                assert layer.run(pool) == expected
                wait_until(lambda: pool.parked == 1)
            return pool.processors[0] in others

        wait_until(went_elsewhere)


@on_linux
def test_a_helper_that_sleeps_elsewhere_is_not_woken_where_the_leader_is(
    random: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system would take it there, also from an idle processor."""
    allowed = os.sched_getaffinity(0)
    here, *others = sorted(allowed)
    if not others:
        pytest.skip("there is one processor")
    layer = Layer(random)
    with WorkerPool(2) as pool:
        park_on(pool, layer, others[0])
        given: list[set[int]] = []
        place = os.sched_setaffinity

        def note(thread: int, processors: set[int]) -> None:
            given.append(set(processors))
            place(thread, processors)

        monkeypatch.setattr(os, "sched_setaffinity", note)
        pool.wake(1, here)
        assert given == [set(others), allowed]


@on_linux
def test_a_helper_that_was_sent_elsewhere_may_be_anywhere_again(random: np.random.Generator) -> None:
    layer = Layer(random)
    with WorkerPool(3) as pool:
        before = [os.sched_getaffinity(thread) for thread in helper_threads()]
        for processor in 2 * sorted(os.sched_getaffinity(0)):
            with only(0, {processor}):
                layer.run(pool)
                wait_until(lambda: pool.parked == 2)
            assert [os.sched_getaffinity(thread) for thread in helper_threads()] == before


@on_linux
def test_what_a_helper_may_use_is_as_before_when_it_was_sent_elsewhere() -> None:
    """Also where the process has one processor and nothing can be chosen."""
    before = os.sched_getaffinity(0)
    helpers = {one.native_id for one in threading.enumerate()}
    with WorkerPool(3) as workers:
        mine = [one.native_id for one in threading.enumerate() if one.native_id not in helpers]
        for processor in (UNKNOWN, *workers.processors, *before):
            workers.wake(2, processor)
        assert mine and all(os.sched_getaffinity(one or 0) == before for one in mine)


@on_linux
def test_a_process_confined_to_one_processor_computes_the_same(random: np.random.Generator) -> None:
    """Threads begin with what the one that makes them may use."""
    layer = Layer(random)
    expected = layer.run(None)
    processor = min(os.sched_getaffinity(0))
    with only(0, {processor}), WorkerPool(2) as pool:
        park_on(pool, layer, processor)
        for _ in range(20):
            assert layer.run(pool) == expected
        assert pool.processors == [processor]
        assert [os.sched_getaffinity(thread) for thread in helper_threads()] == [{processor}]


@on_linux
def test_where_threads_may_not_be_placed_runs_are_the_same(
    random: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise PermissionError("a sandbox forbids it")

    layer = Layer(random)
    expected = layer.run(None)
    with WorkerPool(3) as pool:
        for name in ("sched_setaffinity", "sched_getaffinity"):
            monkeypatch.setattr(os, name, refuse)
            for _ in range(3):
                assert layer.run(pool) == expected
                wait_until(lambda: pool.parked == 2)
        monkeypatch.delattr(os, "sched_getaffinity")
        assert layer.run(pool) == expected
