"""Cuts between a head and its members: what heals within the lease, and what is lost after it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from cutting import CutProxy, RandomCuts, cut_proxy
from pool_daemons import DEVICE, SECONDS, Daemon, daemons, head_of, next_event, wait_for_devices

import heliograph as hg
import heliograph.admin
from heliograph_proto.devices import MemberInfo, MemberState

#: Everything of a member passes by its one way.
PLAIN = ("--device", DEVICE, "--no-shared-memory", "--direct-connections", "-1")
#: So long that a test ends before.
LONG = 10 * SECONDS
BOTH = ["m0/cpu0", "m1/cpu0"]
ONE = np.ones(1, np.float32)
ROW = np.ones((1, 256), np.float32)


class Cuttable:
    """A head, and its members behind ways that can be cut."""

    def __init__(self, head: Daemon, members: list[Daemon], ways: list[CutProxy]) -> None:
        self.head, self.members, self.ways = head, members, ways

    def connect(self) -> hg.Session:
        session = hg.connect(self.head.url)
        wait_for_devices(session, "cpu0", *BOTH)
        return session

    def sessions(self, place: int) -> int:
        """How many sessions a member has."""
        with heliograph.admin.connect(self.members[place].url) as admin:
            return len(admin.sessions())


@contextmanager
def cuttable(members: list[Daemon], lease: float = LONG, silence: float = 0.5) -> Iterator[Cuttable]:
    with cut_proxy(members[0].url) as first, cut_proxy(members[1].url) as second:
        ways = [first, second]
        hosts = [f"127.0.0.1:{one.port}" for one in ways]
        with head_of(*hosts, silence=silence, lease=lease) as head:
            yield Cuttable(head, members, ways)


@pytest.fixture(scope="module")
def members() -> Iterator[list[Daemon]]:
    with daemons(2, *PLAIN) as made:
        yield made


@pytest.fixture
def site(members: list[Daemon]) -> Iterator[Cuttable]:
    with cuttable(members) as made:
        yield made


@pytest.fixture
def session(site: Cuttable) -> Iterator[hg.Session]:
    with site.connect() as made:
        yield made


def counting(name: str = "count") -> hg.Graph:
    """A variable that each run adds one to."""
    g = hg.Graph()
    count = g.variable(name, (1,), "f32")
    g.output("after", hg.assign(count, count + g.input("step", (1,), "f32")))
    return g


def weighty(seed: int) -> hg.Graph:
    generator, g = np.random.default_rng(seed), hg.Graph()
    x = g.input("x", ROW.shape, "f32")
    for number in range(16):
        x = hg.tanh(x @ g.weight(f"w{number}", generator.standard_normal((256, 256)).astype(np.float32)))
    g.output("y", x)
    return g


def member_when(session: hg.Session, name: str, state: MemberState) -> MemberInfo:
    end = time.monotonic() + SECONDS
    while (found := {one.name: one for one in session.members()}[name]).state is not state:
        assert time.monotonic() < end, found
    return found


@pytest.mark.parametrize("reset", [False, True], ids=["cut", "reset"])
def test_a_run_on_a_member_goes_on_after_a_cut(site: Cuttable, session: hg.Session, reset: bool) -> None:
    plan = session.compile(counting(f"cut {reset}"), "m0/cpu0")
    kept, sessions = session.put(ROW, "m0/cpu0"), site.sessions(0)
    for number in range(1, 6):
        site.ways[0].cut(reset=reset)
        assert plan.run(step=ONE, timeout=SECONDS)["after"] == number
    assert np.array_equal(kept.get(timeout=SECONDS), ROW)
    assert site.sessions(0) <= sessions


def test_each_run_is_done_once_however_often_the_way_to_its_member_is_cut(
    site: Cuttable, session: hg.Session
) -> None:
    plan = session.compile(counting("often"), "m0/cpu0")
    with RandomCuts(site.ways[0], 1, 0.05):
        for number in range(1, 101):
            assert plan.run(step=ONE, timeout=SECONDS)["after"] == number
        runs = [plan.submit(step=ONE) for _ in range(100)]
        assert [one.result(SECONDS)["after"].item() for one in runs] == list(range(101, 201))


def test_each_step_of_a_loop_on_a_member_arrives_once_over_cuts(site: Cuttable, session: hg.Session) -> None:
    plan = session.compile(counting("steps"), "m0/cpu0")
    with RandomCuts(site.ways[0], 2, 0.05):
        loop = plan.loop(step=ONE, steps=2000, taps="after")
        found = [tap.value.item() for tap in loop.taps()]
    assert found == list(range(1, 2001))


def test_weights_reach_a_member_over_cuts(site: Cuttable, session: hg.Session) -> None:
    with RandomCuts(site.ways[0], 3, 0.2):
        for seed in range(4):
            graph = weighty(seed)
            found = session.compile(graph, "m0/cpu0", timeout=SECONDS).run(x=ROW, timeout=SECONDS)["y"]
            assert np.array_equal(found, session.compile(graph, "cpu0").run(x=ROW)["y"])


def test_work_waits_for_a_member_that_is_away_and_new_plans_avoid_it(
    site: Cuttable, session: hg.Session
) -> None:
    plan = session.compile(counting("away"), "m0/cpu0")
    plan.run(step=ONE)
    site.ways[0].stall()
    try:
        waiting = plan.submit(step=ONE)
        found = member_when(session, "m0", MemberState.AWAY)
        assert found.devices == ("m0/cpu0",) and "broke" in found.why and "network" in found.advice
        assert session.compile(weighty(9), BOTH).devices == ("m1/cpu0",)
        with hg.connect(site.head.url) as late:
            assert len(late.devices) == 3
        with pytest.raises(hg.DeadlineExceededError):
            session.compile(weighty(8), "m0/cpu0", timeout=0.3)
        with pytest.raises(hg.DeadlineExceededError):
            waiting.result(timeout=0.3)
    finally:
        site.ways[0].go_on()
    assert waiting.result(SECONDS)["after"] == 2
    assert member_when(session, "m0", MemberState.READY).why == ""
    assert plan.run(step=ONE, timeout=SECONDS)["after"] == 3


def test_a_plan_is_rebuilt_when_its_member_is_gone_and_not_when_its_connection_is_cut(
    members: list[Daemon],
) -> None:
    with cuttable(members, silence=3.0) as site, site.connect() as session:
        plan = session.compile(counting(), BOTH, pins={"*": "m0/cpu0"}, on_loss="rebuild")
        plan.run(step=ONE)
        plan.checkpoint()
        with RandomCuts(site.ways[0], 4, 0.05):
            for number in range(2, 31):
                assert plan.run(step=ONE, timeout=SECONDS)["after"] == number
        assert not plan.rebuilds and plan.devices == ("m0/cpu0",)
        # A port that refuses says that the member has ended, whatever is left of its lease.
        site.ways[0].close()
        assert plan.run(step=ONE, timeout=SECONDS)["after"] == 31
        assert len(plan.rebuilds) == 1 and plan.devices != ("m0/cpu0",)


def test_a_member_that_was_restarted_behind_a_cut_is_another_one(site: Cuttable, session: hg.Session) -> None:
    plan = session.compile(counting(), "m0/cpu0")
    plan.run(step=ONE)
    with session.watch() as watch:
        site.ways[0].refuse()
        site.ways[0].cut()
        member_when(session, "m0", MemberState.AWAY)
        site.members[0].restart()
        site.ways[0].go_on()
        assert next_event(watch).lost and next_event(watch) == hg.DeviceEvent("m0/cpu0", "m0")
    with pytest.raises(hg.MemberLostError, match="m0 at"):
        plan.run(step=ONE, timeout=SECONDS)
    assert session.compile(counting("new"), "m0/cpu0").run(step=ONE)["after"] == 1


def test_a_member_is_lost_at_the_lease_s_end_and_holds_nothing_when_it_is_back() -> None:
    with daemons(2, *PLAIN) as own, cuttable(own, lease=0.5) as site, site.connect() as session:
        plan = session.compile(counting(), "m0/cpu0")
        plan.run(step=ONE)
        with session.watch() as watch:
            site.ways[0].stall()
            waiting = plan.submit(step=ONE)
            with pytest.raises(hg.MemberLostError, match=r"m0 at .* is lost: .* lease"):
                waiting.result(SECONDS)
            assert next_event(watch).lost
            site.ways[0].go_on()
            assert next_event(watch) == hg.DeviceEvent("m0/cpu0", "m0")
        assert session.compile(counting("new"), "m0/cpu0").run(step=ONE)["after"] == 1
        end = time.monotonic() + SECONDS
        while site.sessions(0) != 1:
            assert time.monotonic() < end


def test_a_pool_without_leases_loses_a_member_with_its_connection(members: list[Daemon]) -> None:
    with cuttable(members, lease=0.0) as site, site.connect() as session:
        plan = session.compile(counting(), "m0/cpu0")
        plan.run(step=ONE)
        site.ways[0].cut()
        with pytest.raises(hg.MemberLostError, match="m0 at"):
            plan.run(step=ONE, timeout=SECONDS)
        wait_for_devices(session, "cpu0", *BOTH)
