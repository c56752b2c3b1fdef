"""What a head tells of its members and of the ways between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from member_factory import FactoryMember, MemberFactory
from pool_daemons import next_event

import heliograph as hg
from heliograph.cli import main
from heliograph_backends.registry import Registry
from heliograph_proto.codec import decode, decode_all, encode_all
from heliograph_proto.devices import Link
from heliograph_proto.v1 import device_pb2
from heliograph_server.pool.discovery import open_source
from heliograph_server.pool.pool import Pool
from heliograph_server.pool.remote import reached
from heliograph_server.pool.remote.site import RemoteSite
from heliograph_server.runtime.host import Host
from heliograph_server.telemetry.histograms import RunCounter
from heliograph_server.telemetry.metrics import Exposition
from heliograph_server.telemetry.telemetry import DaemonFacts

SECONDS = 30.0
FAKE = ("--device", "fake")


@pytest.fixture(scope="module")
def factory() -> Iterator[MemberFactory]:
    with MemberFactory() as made:
        yield made


@contextmanager
def pool_of(factory: MemberFactory, count: int) -> Iterator[tuple[FactoryMember, list[FactoryMember]]]:
    """A head with a device of its own, and its members, named m0, m1, ..."""
    members = [factory.start(*FAKE) for _ in range(count)]
    listed = ",".join(f"m{number}={one.host}:{one.port}" for number, one in enumerate(members))
    head = factory.start(*FAKE, "--pool", f"static:{listed}")
    try:
        yield head, members
    finally:
        # The factory ends the others.
        head.kill()


def links_when(
    session: hg.Session, is_enough: Callable[[tuple[Link, ...]], bool]
) -> dict[tuple[str, str], Link]:
    """The ways, once that is so."""
    end = time.monotonic() + SECONDS
    while not is_enough(found := session.links(timeout=SECONDS)):
        assert time.monotonic() < end, found
    return {(one.a, one.b): one for one in found}


def all_asked(count: int) -> Callable[[tuple[Link, ...]], bool]:
    """Whether there are so many ways, and of each is known whether it is one."""
    return lambda links: (
        len(links) == count and all(one.reachable is not None and one.round_trip_measured for one in links)
    )


def test_a_head_tells_of_the_ways_to_its_members_and_between_them(factory: MemberFactory) -> None:
    with pool_of(factory, 2) as (head, _), hg.connect(head.url) as session:
        found = links_when(session, all_asked(4))
        assert set(found) == {("", "m0"), ("", "m1"), ("m0", "m1"), ("m1", "m0")}
        assert all(one.reachable and not one.why for one in found.values())
        assert all(
            0 < one.round_trip_seconds < SECONDS and one.bytes_per_second > 0 for one in found.values()
        )
        # Nobody measures how much the head could carry, which carries nothing.
        assert [found[pair].measured for pair in (("m0", "m1"), ("m1", "m0"), ("", "m0"))] == [
            True,
            True,
            False,
        ]


def test_asyncio_and_a_pool_in_this_process_tell_the_same(factory: MemberFactory) -> None:
    async def ask(url: str) -> tuple[Link, ...]:
        async with hg.aio.connect(url) as session:
            return await session.links(timeout=SECONDS)

    with pool_of(factory, 2) as (head, members):
        with hg.connect(head.url) as session:
            found = links_when(session, all_asked(4))
        assert {(one.a, one.b): one for one in asyncio.run(ask(head.url))} == found
        with hg.connect([one.url for one in members]) as session:
            assert all(one.reachable for one in links_when(session, all_asked(4)).values())


@pytest.fixture
def apart(factory: MemberFactory, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The URLs of two daemons, of which others are told a wrong address for the second one."""
    urls = [factory.start(*FAKE).url for _ in range(2)]

    def address(self: RemoteSite) -> str:
        return "grpc://127.0.0.1:1" if self.member.url == urls[1] else self.member.url

    monkeypatch.setattr(RemoteSite, "address", property(address))
    return urls


def test_a_way_that_is_one_way_is_measured_all_the_same_and_values_of_the_other_are_relayed(
    apart: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (url.removeprefix("grpc://") for url in apart)
    with hg.connect(apart) as session:
        found = links_when(session, all_asked(4))
        there, back = found[first, second], found[second, first]
        assert (there.reachable, back.reachable) == (False, True)
        assert there.measured and back.measured, "both are one way with two ends"
        assert "127.0.0.1:1" in there.why and not back.why
        # The head itself finds both. A compile would find the way that is there now.
        monkeypatch.undo()
        monkeypatch.setattr(RemoteSite, "look_again", lambda self, other: None)
        plan = four_nodes(session, f"{second}/fake0", f"{first}/fake0")
        plan.run(x=np.zeros(4, np.float32))
        # What the first one needs of the second, twice; what goes back is direct.
        assert plan.explain().bytes_between_hosts == {"relayed": 32, "direct": 16}
        assert "by the head (relayed)" in str(plan.explain())


def four_nodes(session: hg.Session, *devices: str) -> hg.Plan:
    """Four nodes that alternate between two devices."""
    g = hg.Graph()
    x = g.input("x", (4,), "f32")
    for number in range(4):
        with g.scope(f"n{number}"):
            x = hg.exp(x)
    g.output("y", x)
    return session.compile(g, list(devices), pins={f"n{n}/*": devices[n % 2] for n in range(4)})


def test_a_way_that_comes_back_is_used_at_once_by_new_plans_and_at_the_next_run_by_others(
    apart: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (url.removeprefix("grpc://") for url in apart)
    names = f"{second}/fake0", f"{first}/fake0"
    with hg.connect(apart) as session:
        found = links_when(session, all_asked(4))
        assert found[first, second].unreachable_seconds > 0 == found[second, first].unreachable_seconds
        monkeypatch.undo()
        with monkeypatch.context() as patched:
            patched.setattr(RemoteSite, "look_again", lambda self, other: None)
            old = four_nodes(session, *names)
        expected = old.run(x=np.zeros(4, np.float32))["y"]
        assert old.explain().bytes_between_hosts == {"relayed": 32, "direct": 16}
        monkeypatch.setattr(reached, "COMPILE_RETRY_SECONDS", 0.0)
        new = four_nodes(session, *reversed(names))
        for plan in (new, old):
            assert np.array_equal(plan.run(x=np.zeros(4, np.float32))["y"], expected)
            assert plan.explain().bytes_between_hosts == {"direct": 48}
        links = {(one.a, one.b): one for one in session.links()}
        assert links[first, second].reachable and not links[first, second].unreachable_seconds


def test_a_relayed_way_is_tried_again_without_a_compile_and_a_plan_moves_over_with_its_next_run(
    apart: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (url.removeprefix("grpc://") for url in apart)
    with hg.connect(apart) as session:
        links_when(session, all_asked(4))
        monkeypatch.undo()
        monkeypatch.setattr(RemoteSite, "look_again", lambda self, other: None)
        plan = four_nodes(session, f"{second}/fake0", f"{first}/fake0")
        plan.run(x=np.zeros(4, np.float32))
        monkeypatch.setattr(reached, "RETRY_SECONDS", 0.0)
        links_when(session, lambda links: all(one.reachable for one in links))
        plan.run(x=np.zeros(4, np.float32))
        assert plan.explain().bytes_between_hosts == {"direct": 48}


def test_metrics_name_the_relayed_ways_and_for_how_long(apart: list[str]) -> None:
    listed = ",".join(f"m{number}={url.removeprefix('grpc://')}" for number, url in enumerate(apart))
    host = Host(Registry(), pool=Pool(open_source(f"static:{listed}")))
    facts = DaemonFacts()
    facts.host = lambda: host
    exposition = Exposition(facts, RunCounter())
    try:
        end = time.monotonic() + SECONDS
        while b"heliograph_link_relayed_seconds{" not in (text := exposition.text("")[1]):
            assert time.monotonic() < end
        shown = [one for one in text.decode().splitlines() if one.startswith("heliograph_link_relayed_")]
        ((name, value),) = [line.rsplit(" ", 1) for line in shown]
        assert name == 'heliograph_link_relayed_seconds{reader="m0",source="m1"}' and float(value) > 0
    finally:
        exposition.close()
        host.close()


def test_doctor_names_the_pair_and_the_port_to_open(
    apart: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (url.removeprefix("grpc://") for url in apart)
    with hg.connect(apart) as session:
        # The pool of this process is one for all of its sessions.
        links_when(session, all_asked(4))
        assert main(["doctor", *apart]) == 0
    printed = capsys.readouterr().out
    assert f"warning: {first} cannot fetch values from {second}, for " in printed
    assert f"open port {second.partition(':')[2]} at {second} to {first}" in printed
    assert f"direct to {second}, relayed by the head to {first}" in printed


def test_a_server_without_a_pool_has_no_ways(factory: MemberFactory) -> None:
    alone = factory.start(*FAKE)
    with hg.connect(alone.url) as session:
        assert session.links() == () == session.members()
    alone.kill()


def test_members_tell_what_they_run_and_what_to_do_when_they_are_gone(factory: MemberFactory) -> None:
    with pool_of(factory, 2) as (head, members), hg.connect(head.url) as session, session.watch() as watch:
        links_when(session, all_asked(4))
        assert [one.server for one in session.members()] == [session.info.server] * 2
        members[1].kill()
        # It may have come after this session.
        while not next_event(watch).lost:
            pass
        here, lost = session.members()
        assert (here.state, lost.state) == (hg.MemberState.READY, hg.MemberState.LOST)
        assert lost.why and lost.advice and not lost.server and not here.advice
        assert set(links_when(session, lambda links: len(links) == 1)) == {("", "m0")}


def test_ways_are_what_they_were_after_the_wire() -> None:
    links = (
        Link("", "a", 1e-3, 1e8, True, False, True),
        Link("a", "b", 2e-3, 1e8, reachable=False, why="refused"),
        Link("b", "a", 2e-3, 1e8, True, True, None),
    )
    told = device_pb2.ListLinksResponse(links=encode_all(links, device_pb2.MemberLink)).SerializeToString()
    assert decode_all(device_pb2.ListLinksResponse.FromString(told).links, Link) == links
    # Of a later version.
    other: Any = device_pb2.MemberLink(source="a", destination="b")
    other.reachability = 17
    assert decode(other, Link).reachable is None


def test_anybody_may_ask_a_head_for_its_ways_without_a_session(factory: MemberFactory) -> None:
    with pool_of(factory, 1) as (head, _), grpc.insecure_channel(f"{head.host}:{head.port}") as channel:
        ask = channel.unary_unary(
            "/heliograph.v1.DeviceService/ListLinks",
            request_serializer=device_pb2.ListLinksRequest.SerializeToString,
            response_deserializer=device_pb2.ListLinksResponse.FromString,
        )
        assert len(ask(device_pb2.ListLinksRequest(), timeout=SECONDS).links) <= 1
