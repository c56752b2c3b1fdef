"""Daemons that are one list of devices: joined, lost in every way, and there again."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
from pool_daemons import SECONDS, Daemon, head_of, next_event, wait_for_devices

import heliograph as hg
from heliograph.core.watching import MOST_EVENTS
from heliograph.watching import DeviceWatch
from heliograph_backends.fake import FakeDevice
from heliograph_backends.registry import Registry
from heliograph_proto.commands import CompletionBatch
from heliograph_proto.devices import DeviceChange
from heliograph_proto.errors import MemberLostError
from heliograph_server.resources.membership import MembershipChange
from heliograph_server.runtime.host import Host

W = np.arange(6, dtype=np.float32).reshape(3, 2)
X = np.arange(12, dtype=np.float32).reshape(4, 3)


def counted(variable: str = "count") -> hg.Graph:
    """x @ w, and how often that was asked."""
    g = hg.Graph()
    count = g.variable(variable, (), "f32")
    g.output("y", g.input("x", X.shape, "f32") @ g.weight("w", W))
    g.output("count", hg.assign(count, count + 1.0))
    return g


def long_graph(products: int = 400, size: int = 1024) -> hg.Graph:
    """Many seconds of work."""
    g = hg.Graph()
    x = y = g.input("x", (size, size), "f32")
    for _ in range(products):
        y = y @ x
    g.output("y", y[:1, :1])
    return g


def test_a_head_lists_its_own_devices_first_and_then_its_members(session: hg.Session) -> None:
    first, *others = [device.name for device in session.devices]
    assert first == "cpu0" and set(others) == {"m0/cpu0", "m1/cpu0"}
    assert [(one.name, one.state.name, one.devices) for one in session.members()] == [
        ("m0", "READY", ("m0/cpu0",)),
        ("m1", "READY", ("m1/cpu0",)),
    ]


@pytest.mark.parametrize("device", ["cpu0", "m0/cpu0", "m1/cpu0"])
def test_a_graph_gives_the_same_on_every_device(session: hg.Session, device: str) -> None:
    found = session.compile(counted(), device).run(x=X)
    with hg.connect("local:") as local:
        expected = local.compile(counted()).run(x=X)
    assert np.array_equal(found["y"], expected["y"]) and found["count"] == 1


def test_a_killed_member_ends_its_runs_alone_and_is_there_again_when_it_is_restarted(
    session: hg.Session, members: list[Daemon]
) -> None:
    plan = session.compile(counted(), "m0/cpu0")
    other = session.compile(counted("other"), "m1/cpu0")
    kept = session.put(np.ones(4, np.float32), "m0/cpu0")
    first = plan.run(x=X)
    running = session.compile(long_graph(), "m0/cpu0").submit(x=np.zeros((1024, 1024), np.float32))
    with session.watch() as watch:
        began = time.monotonic()
        members[0].kill()
        event = next_event(watch)
        print(f"a killed member was noticed after {(time.monotonic() - began) * 1e3:.0f} ms")
        assert (event.device, event.member) == ("m0/cpu0", "m0") and members[0].url in event.lost
        with pytest.raises(MemberLostError, match=f"m0 at {members[0].url}"):
            running.result(timeout=SECONDS)
        for use in (
            lambda: plan.run(x=X, timeout=SECONDS),
            lambda: kept.get(timeout=SECONDS),
            lambda: session.compile(counted("more"), "m0/cpu0", timeout=SECONDS),
            lambda: session.put(np.ones(4, np.float32), "m0/cpu0").get(timeout=SECONDS),
            lambda: session.device("m0/cpu0").memory(timeout=SECONDS),
        ):
            with pytest.raises(MemberLostError, match="m0 at"):
                use()
        assert session.device("m0/cpu0").lost and not session.device("m1/cpu0").lost
        assert np.array_equal(other.run(x=X)["y"], first["y"])
        members[0].restart()
        assert next_event(watch) == hg.DeviceEvent("m0/cpu0", "m0")
    with pytest.raises(MemberLostError):
        kept.get(timeout=SECONDS)
    with pytest.raises(MemberLostError):
        plan.run(x=X, timeout=SECONDS)
    with pytest.raises(MemberLostError, match=r"'count'.*gone"):
        session.compile(counted(), "m0/cpu0")
    again = session.compile(counted("from now on"), "m0/cpu0").run(x=X)
    assert np.array_equal(again["y"], first["y"]) and again["count"] == 1
    plan.free()
    kept.free()


def test_a_stopped_member_is_lost_after_the_silence_and_there_again_when_it_goes_on(
    session: hg.Session, members: list[Daemon]
) -> None:
    running = session.compile(long_graph(), "m1/cpu0").submit(x=np.zeros((1024, 1024), np.float32))
    with session.watch() as watch:
        began = time.monotonic()
        members[1].stop()
        try:
            with pytest.raises(MemberLostError, match=f"m1 at {members[1].url}"):
                running.result(timeout=SECONDS)
            print(f"a stopped member was noticed after {time.monotonic() - began:.2f} s")
            assert next_event(watch).device == "m1/cpu0"
        finally:
            members[1].resume()
        assert next_event(watch) == hg.DeviceEvent("m1/cpu0", "m1")
    assert session.compile(counted(), "m1/cpu0").run(x=X)["count"] == 1


def test_what_lay_on_a_member_is_asked_for_again_and_other_sessions_see_it_too(
    session: hg.Session, head: Daemon, members: list[Daemon]
) -> None:
    session.compile(counted(), "m0/cpu0").run(x=X)
    with hg.connect(head.url) as other:
        members[0].kill()
        wait_for_devices(session, "cpu0", "m1/cpu0")
        wait_for_devices(other, "cpu0", "m1/cpu0")
        with hg.connect(head.url) as late:
            assert [device.name for device in late.devices] == ["cpu0", "m1/cpu0"]
            with pytest.raises(MemberLostError, match="m0"):
                late.compile(counted(), "m0/cpu0")
            found = late.compile(counted(), "m1/cpu0").run(x=X)
            assert found["count"] == 1 and np.array_equal(found["y"], X @ W)
        with pytest.raises(MemberLostError, match=r"'count'.*gone"):
            session.compile(counted(), "cpu0")
        assert session.compile(counted("new"), "cpu0").run(x=X)["count"] == 1
        members[0].restart()
        wait_for_devices(other, "cpu0", "m0/cpu0", "m1/cpu0")


def test_a_head_whose_members_are_all_gone_still_serves_its_own_device(
    capsys: pytest.CaptureFixture[str], members: list[Daemon]
) -> None:
    from heliograph.cli import main

    with head_of("127.0.0.1:1") as alone, hg.connect(alone.url) as session:
        assert session.compile(counted()).run(x=X)["count"] == 1
        with pytest.raises(MemberLostError, match="m0 at grpc://127.0.0.1:1 is not available"):
            session.compile(counted(), "m0/cpu0")
        with pytest.raises(hg.UnknownDeviceError):
            session.compile(counted(), "m9/cpu0")
        assert main(["devices", "--server", alone.url]) == 0
    shown = capsys.readouterr().out
    assert "127.0.0.1:1" in shown and "joining" in shown and "no server answers" in shown


def test_the_addresses_of_a_name_are_members(members: list[Daemon]) -> None:
    pool = "--device", "cpu:threads=1", "--pool", f"dns:localhost:{members[1].port}"
    head = Daemon(*pool)
    try:
        with hg.connect(head.url, timeout=SECONDS) as session:
            wait_for_devices(session, "cpu0", f"{members[1].host}/cpu0")
    finally:
        head.end()


def test_a_session_is_told_of_devices_that_came_before_its_command_stream() -> None:
    host = Host(Registry.of(FakeDevice()))
    session = host.session(host.open_session("test").session)
    late, told = FakeDevice("late/fake0"), DeviceChange("late")
    assert session.change_devices(MembershipChange("late", appeared=(late,)))
    session.tell_devices(told)
    batches: list[CompletionBatch] = []
    session.attach(batches.append)
    host.close()
    late.close()
    assert batches[0].changes == (told,)


def test_a_head_does_not_start_with_a_source_that_is_none(tmp_path: Path) -> None:
    from heliograph_proto.errors import ConfigurationError
    from heliograph_server.config.config import ServerConfig
    from heliograph_server.daemon.daemon import open_host_of

    with pytest.raises(ConfigurationError, match="not a source of members"):
        open_host_of(ServerConfig(pool="a,b"))
    with pytest.raises(ConfigurationError, match="pool_silence_seconds"):
        ServerConfig(pool_silence_seconds=0.01)


def test_watching_tells_of_the_end_of_the_session_and_stops() -> None:
    async def watched() -> list[hg.DeviceEvent]:
        async with hg.aio.connect("local:") as session:
            watch = session.watch()
            assert await session.members() == ()
        return [one async for one in watch]

    ended = hg.DeviceEvent("", "", ended="the session was closed")
    assert asyncio.run(watched()) == [ended]
    with hg.connect("local:") as local:
        blocking = local.watch()
        with pytest.raises(hg.DeadlineExceededError):
            blocking.next(timeout=0.01)
    assert list(blocking) == list(local.watch()) == [ended]
    assert list(blocking) == []
    with hg.connect("local:") as local, local.watch() as closed:
        pass
    assert list(closed) == []


def test_events_that_nobody_takes_are_bounded_and_who_missed_some_is_told() -> None:
    with DeviceWatch() as watch:
        for number in range(MOST_EVENTS + 3):
            watch.put([hg.DeviceEvent(f"m/cpu{number}", "m")])
        assert [next(watch).device for _ in range(MOST_EVENTS)][-1] == f"m/cpu{MOST_EVENTS - 1}"
        with pytest.raises(hg.LimitExceededError, match="3 device events"):
            next(watch)
        watch.put([hg.DeviceEvent("m/cpu0", "m", lost="gone")])
        assert next(watch).lost == "gone"
