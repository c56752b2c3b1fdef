"""Runs of callers who compute them themselves, as models that are served do. Values, order, errors, time
limits and what ends the session are those of every run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

import heliograph as hg
from heliograph_proto.addresses import parse_address
from heliograph_server.inprocess.blocking import LocalShell

SECONDS = 20.0
#: The side of the matrices of `long`, whose run takes about this number of products.
SIDE, PRODUCTS = 512, 2000
TABLE = np.arange(8, dtype=np.float32).reshape(4, 2)


@pytest.fixture
def session() -> Iterator[hg.Session]:
    with hg.Session(LocalShell(parse_address("local:"), computes=True)) as session:
        yield session


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def product() -> hg.Graph:
    """A product that is no short run, and two outputs."""
    g = hg.Graph()
    x = g.input("x", (64, SIDE), "f32")
    y = hg.matmul(x, g.weight("w", np.eye(SIDE, dtype=np.float32)))
    g.output("same", y)
    g.output("sum", hg.sum(y))
    return g


def long() -> hg.Graph:
    """A run of seconds, in many steps."""
    g = hg.Graph()
    y = w = g.weight("w", np.eye(SIDE, dtype=np.float32))
    for _ in range(PRODUCTS):
        y = hg.matmul(y, w)
    g.output("y", y[:64] + g.input("x", (64, SIDE), "f32"))
    return g


def rows() -> hg.Graph:
    """Rows of a table by index, beside a product: one outside fails the run that asks for it."""
    g = hg.Graph()
    w = g.weight("w", np.eye(SIDE, dtype=np.float32))
    y = hg.matmul(w, w)
    found = hg.ops.get_rows(g.weight("table", TABLE), g.input("i", (1,), "i32"))
    g.output("y", found + 0.0 * hg.sum(y) * g.input("x", (), "f32"))
    return g


def of(number: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.full((64, SIDE), number, np.float32)


def check(plan: hg.Plan, number: float) -> None:
    found = plan.run(x=of(number), timeout=SECONDS)
    np.testing.assert_array_equal(found["same"], of(number))
    assert found["sum"] == 64 * SIDE * number


def running(threads: ThreadPoolExecutor, plan: hg.Plan, timeout: float | None = None) -> Future[Any]:
    """Begin a long run on a thread."""
    begun = threading.Event()

    def run() -> Any:
        begun.set()
        return plan.run(x=of(1), timeout=timeout)

    made = threads.submit(run)
    assert begun.wait(SECONDS)
    return made


def test_runs_of_many_threads_have_their_own_results(
    session: hg.Session, threads: ThreadPoolExecutor
) -> None:
    plan, other = session.compile(product()), session.compile(product())

    def many(plan: hg.Plan, first: int) -> None:
        for number in range(first, first + 40):
            check(plan, number)

    for one in [threads.submit(many, each, 100 * place) for place, each in enumerate([plan, other, plan])]:
        one.result(SECONDS)


def test_commands_of_other_threads_keep_their_order_beside_runs(
    session: hg.Session, threads: ThreadPoolExecutor
) -> None:
    plan = session.compile(product())

    def runs() -> None:
        for number in range(60):
            check(plan, number)

    def writes() -> None:
        tensor = session.put(of(0))
        for number in range(60):
            tensor.set(of(number))
            kept = plan.run(x=tensor, fetch=False, timeout=SECONDS)
            np.testing.assert_array_equal(kept["same"].get(), of(number))
            session.synchronize(SECONDS)

    for one in [threads.submit(work) for work in (runs, writes, runs)]:
        one.result(SECONDS)


def test_a_run_that_takes_too_long_ends_between_two_steps(session: hg.Session) -> None:
    plan, other = session.compile(long()), session.compile(product())
    with pytest.raises(hg.DeadlineExceededError):
        plan.run(x=of(1), timeout=0.05)
    check(other, 3)


def end_session(session: hg.Session, plan: hg.Plan) -> None:
    session.close()


def free_plan(session: hg.Session, plan: hg.Plan) -> None:
    plan.free()
    session.synchronize(SECONDS)


def compute(session: hg.Session, plan: hg.Plan) -> None:
    check(session.compile(product()), 5)


@pytest.mark.parametrize("meanwhile", [end_session, free_plan, compute])
def test_a_run_under_way_hears_of_what_others_do(
    session: hg.Session, threads: ThreadPoolExecutor, meanwhile: Callable[[hg.Session, hg.Plan], None]
) -> None:
    plan = session.compile(long())
    run, done = running(threads, plan, timeout=0.3), threads.submit(meanwhile, session, plan)
    with pytest.raises((hg.DeadlineExceededError, hg.SessionClosedError, hg.UnknownHandleError)):
        run.result(SECONDS)
    done.result(SECONDS)


def test_a_run_that_fails_says_why_and_leaves_the_next_one_alone(session: hg.Session) -> None:
    plan = session.compile(rows())
    find = partial(plan.run, x=np.float32(1), timeout=SECONDS)
    for number in range(3):
        np.testing.assert_array_equal(find(i=np.array([number], np.int32))["y"], TABLE[[number]])
        with pytest.raises(hg.OutOfRangeError, match="9 is not one of 4 rows") as failure:
            find(i=np.array([9], np.int32))
        assert failure.value.origin.op == "get_rows" and "test_runs_alone.py" in failure.value.origin.source
