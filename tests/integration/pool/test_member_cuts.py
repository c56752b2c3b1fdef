"""Runs, loops and copies of a pool whose members lose the connections to each other: they take longer,
and nothing else."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from cutting import CutProxy, cut_proxy, cuts_by_bytes
from daemon_threads import ThreadDaemon, thread_daemon
from waiting import until

import heliograph as hg
from heliograph_server.pool.remote.site import RemoteSite

SECONDS = 60.0
LEASE = {"pool_silence_seconds": 0.5, "pool_lease_seconds": 20.0}


class Cuttable:
    """Two members, a session with both, and the ways by which values go from one to the other. The
    ways from the session to them are others."""

    def __init__(self, members: list[ThreadDaemon], ways: list[CutProxy], session: hg.Session) -> None:
        self.members, self.ways, self.session = members, ways, session
        self.names = [one.name for one in session.devices]

    def cutting(self, most_bytes: int = 30_000) -> ExitStack:
        """Cut both ways at random bytes, with at most so many between two cuts."""
        seed, stack = secrets.randbits(30), ExitStack()
        print(f"seed {seed}")
        for number, way in enumerate(self.ways):
            stack.enter_context(cuts_by_bytes(way, seed + number, most_bytes))
        return stack

    def part(self) -> None:
        """Cut both ways until `meet`."""
        for way in self.ways:
            way.refuse()
            way.cut()

    def meet(self) -> None:
        """Let the members find each other again."""
        for way in self.ways:
            way.go_on()

    def compile(self, graph: hg.Graph, count: int, **options: Any) -> hg.Plan:
        """Scopes s0, s1, ... alternate between the members."""
        pins = {f"s{number}/*": self.names[number % 2] for number in range(count)}
        return self.session.compile(graph, self.names, pins=pins, **options)

    @property
    def held_bytes(self) -> int:
        return sum(one.exchange.budget.held_bytes for one in self.members)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuttable]:
    with ExitStack() as stack:
        members = [stack.enter_context(thread_daemon(**LEASE)) for _ in range(2)]
        ways = [stack.enter_context(cut_proxy(one.url)) for one in members]
        told = {one.url: way.url for one, way in zip(members, ways, strict=True)}
        monkeypatch.setattr(RemoteSite, "address", property(lambda site: told[site.member.url]))
        with hg.connect([one.url for one in members]) as session:
            until(lambda: all(one.reachable for one in session.links()) and len(session.links()) == 4)
            yield Cuttable(members, ways, session)
        assert all(one.exchange.budget.held_bytes == 0 for one in members)


def chain(size: int, count: int = 4) -> hg.Graph:
    """Stages that each keep a sum: a run that is done twice, or in another order, gives other bits."""
    g = hg.Graph()
    value = g.input("x", (size,), "f32")
    for number in range(count):
        with g.scope(f"s{number}"):
            total = g.variable("total", (size,), "f32")
            value = hg.assign(total, total * 0.5 + hg.tanh(value * 1.5))
    g.output("y", value)
    return g


def inputs(size: int, count: int) -> list[np.ndarray[Any, Any]]:
    generator = np.random.default_rng(size)
    return [generator.standard_normal(size).astype(np.float32) for _ in range(count)]


def calm(pool: Cuttable, graph: hg.Graph, given: list[np.ndarray[Any, Any]]) -> list[bytes]:
    """The results of one member alone."""
    with hg.connect(pool.members[0].url) as session:
        plan = session.compile(graph)
        return [plan.run(x=one)["y"].tobytes() for one in given]


@pytest.mark.parametrize(
    ("size", "runs", "most_bytes"),
    [(64, 100, 30_000), (200_000, 15, 10_000_000)],
    ids=["small", "large"],
)
def test_runs_over_two_members_have_their_bits_however_often_the_ways_between_these_are_cut(
    pool: Cuttable, size: int, runs: int, most_bytes: int
) -> None:
    given = inputs(size, runs)
    expected = calm(pool, chain(size), given)
    plan = pool.compile(chain(size), 4, on_loss="rebuild")
    with pool.cutting(most_bytes):
        found = [plan.run(x=one, timeout=SECONDS)["y"].tobytes() for one in given]
    assert sum(way.cuts for way in pool.ways) > 0
    assert found == expected
    assert not plan.rebuilds and "relayed" not in plan.explain().bytes_between_hosts


def test_runs_that_are_under_way_together_survive_cuts_in_order(pool: Cuttable) -> None:
    given = inputs(256, 60)
    expected = calm(pool, chain(256), given)
    plan = pool.compile(chain(256), 4)
    with pool.cutting():
        runs = [plan.submit(x=one) for one in given]
        assert [one.result(SECONDS)["y"].tobytes() for one in runs] == expected


@pytest.mark.parametrize("size", [16, 30_000], ids=["small", "large"])
def test_a_loop_from_member_to_member_tells_each_step_once_over_cuts(pool: Cuttable, size: int) -> None:
    steps, (x,) = 300 if size == 16 else 15, inputs(size, 1)

    def told(plan: hg.Plan) -> list[Any]:
        loop = plan.loop(x=x, steps=steps, carry={"y": "x"}, taps="y")
        taps = [(tap.step, tap.value.tobytes()) for tap in loop.taps(SECONDS)]
        return [taps, loop.result(SECONDS)["y"].tobytes()]

    with hg.connect(pool.members[0].url) as session:
        expected = told(session.compile(chain(size, 3)))
    plan = pool.compile(chain(size, 3), 3)
    with pool.cutting(30_000 if size == 16 else 1_000_000):
        found = told(plan)
    assert [step for step, _ in found[0]] == list(range(steps))
    assert found == expected


def test_a_run_goes_on_when_members_find_each_other_again(pool: Cuttable) -> None:
    given = inputs(64, 2)
    plan = pool.compile(chain(64), 4)
    plan.run(x=given[0])
    pool.part()
    waiting = plan.submit(x=given[1])
    with pytest.raises(hg.DeadlineExceededError):
        waiting.result(timeout=0.3)
    pool.meet()
    assert waiting.result(SECONDS)["y"].tobytes() == calm(pool, chain(64), given)[1]


def test_a_run_is_cancelled_while_members_do_not_find_each_other(pool: Cuttable) -> None:
    given = inputs(64, 3)
    plan = pool.compile(chain(64), 4)
    plan.run(x=given[0])
    pool.part()
    waiting = plan.submit(x=given[1])
    waiting.cancel()
    with pytest.raises(hg.CancelledError):
        waiting.result(SECONDS)
    pool.meet()
    plan.run(x=given[2], timeout=SECONDS)


def test_a_tensor_is_copied_from_member_to_member_over_cuts(pool: Cuttable) -> None:
    value = np.random.default_rng(5).standard_normal(3_000_000).astype(np.float32)
    source = pool.session.put(value, pool.names[0])
    target = pool.session.empty(value.shape, "f32", pool.names[1])
    with pool.cutting(2 * value.nbytes):
        for _ in range(3):
            source.copy_to(target)
            assert np.array_equal(target.get(timeout=SECONDS), value)


def test_what_members_hold_for_each_other_is_given_back_after_runs(pool: Cuttable) -> None:
    plan = pool.compile(chain(200_000), 4)
    for one in inputs(200_000, 3):
        plan.run(x=one)
    until(lambda: pool.held_bytes == 0)
