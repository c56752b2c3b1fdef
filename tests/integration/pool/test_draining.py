"""Members that drain, as their head sees them, and members that have just joined."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from pool_daemons import SECONDS, Daemon, wait_for_devices

import heliograph as hg
import heliograph.admin
from heliograph.cli import main
from heliograph_proto.devices import MemberInfo, MemberState
from heliograph_server.commands.pool import with_drains
from heliograph_server.launchers.specification import MemberStatus, PoolSpecification, PoolStatus
from heliograph_server.pool.discovery import open_source
from heliograph_server.pool.pool import Pool
from heliograph_server.resources.membership import MembershipChange

#: A member that does not answer, and one that has no node.
_NOT_SERVING = (MemberStatus(2, "serving", "grpc://127.0.0.1:1"), MemberStatus(3, "lost"))
BOTH = ["m0/cpu0", "m1/cpu0"]
X = np.ones(8, np.float32)


@contextmanager
def busy(member: Daemon) -> Iterator[None]:
    """A client of the member itself, whose work keeps a drain from its end."""
    g = hg.Graph()
    x = y = g.input("x", (1024, 1024), "f32")
    for _ in range(2000):
        y = y @ x
    g.output("y", y[:1, :1])
    with hg.connect(member.url) as session:
        run = session.compile(g).submit(x=np.zeros((1024, 1024), np.float32))
        yield
        run.cancel()


def member_when(session: hg.Session, name: str, state: MemberState) -> MemberInfo:
    end = time.monotonic() + SECONDS
    while (found := {one.name: one for one in session.members()}[name]).state is not state:
        assert time.monotonic() < end, found
    return found


def chain(nodes: int = 4, scale: float = 1.0) -> hg.Graph:
    g = hg.Graph()
    y = g.input("x", X.shape, "f32") * scale
    for number in range(nodes):
        with g.scope(f"n{number}"):
            y = hg.exp(y * 0.5)
    g.output("y", y)
    return g


def test_new_plans_avoid_a_member_that_drains_and_older_ones_go_on(
    session: hg.Session, members: list[Daemon], head: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    pins = {"n0/*": BOTH[0], "n3/*": BOTH[1]}
    old = session.compile(chain(), BOTH, pins=pins)
    expected = old.run(x=X)["y"]
    free = session.compile(chain(), BOTH)
    with busy(members[0]), heliograph.admin.connect(members[0].url) as admin:
        admin.drain(3600, stay=True)
        found = member_when(session, "m0", MemberState.DRAINING)
        assert found.devices == ("m0/cpu0",) and "drains" in found.why and "--undo" in found.advice
        assert main(["devices", "--server", head.url]) == 0
        assert "draining" in capsys.readouterr().out
        assert main(["doctor", head.url]) == 0
        assert "member m0 at" in (printed := capsys.readouterr().out) and "drains" in printed
        for graph in (chain(), chain(scale=2.0)):
            assert session.compile(graph, BOTH).devices == ("m1/cpu0",)
        named = session.compile(chain(), "m0/cpu0")
        for plan in (old, named, session.compile(chain(), BOTH, pins=pins), free):
            assert np.array_equal(plan.run(x=X)["y"], expected)
        with hg.connect([one.url for one in members]) as late:
            assert len(late.devices) == 1
        admin.undo_drain()
    assert member_when(session, "m0", MemberState.READY).why == ""


def test_a_member_that_was_drained_already_is_listed_as_draining(
    session: hg.Session, members: list[Daemon]
) -> None:
    with heliograph.admin.connect(members[1].url) as admin:
        admin.drain(stay=True)
        found = member_when(session, "m1", MemberState.DRAINING)
        wait_for_devices(session, "cpu0", "m0/cpu0")
        found = member_when(session, "m1", MemberState.DRAINING)
        assert found.devices == () and "draining" in found.why and "--undo" in found.advice
        admin.undo_drain()
    wait_for_devices(session, "cpu0", *BOTH)
    member_when(session, "m1", MemberState.READY)


def test_the_status_of_a_pool_says_which_members_drain(members: list[Daemon]) -> None:
    listed = [MemberStatus(rank, "serving", one.url) for rank, one in enumerate(members)]
    found = PoolStatus(PoolSpecification(members=4), "CREATED", (*listed, *_NOT_SERVING))
    with heliograph.admin.connect(members[0].url) as admin:
        admin.drain(stay=True)
        shown = with_drains(found)
        admin.undo_drain()
    assert [one.state for one in shown.members] == ["draining", "serving", "serving", "lost"]
    assert shown.serving == 2 and shown.members[0].why


def test_a_member_is_ready_only_once_all_sessions_have_its_devices(members: list[Daemon]) -> None:
    pool = Pool(open_source(f"static:m0={members[0].host}"))
    states: list[MemberState] = []

    def changed(change: MembershipChange) -> None:
        states.append(pool.members[0].state)
        change.applied()
        states.append(pool.members[0].state)

    pool.start(lambda: bytes(16), changed)
    try:
        assert pool.wait(lambda _: len(states) == 2, SECONDS)
        assert states == [MemberState.JOINING, MemberState.READY]
    finally:
        pool.close()
