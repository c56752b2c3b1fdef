"""What a head tells of its members and of the ways between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from member_factory import FactoryMember, MemberFactory

import heliograph as hg
from heliograph_proto.errors import UnsupportedError
from heliograph_proto.membership import Way
from heliograph_proto.messages import decode_ways, encode_ways
from heliograph_proto.v1 import device_pb2

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


def ways_when(
    session: hg.Session, is_enough: Callable[[tuple[Way, ...]], bool]
) -> dict[tuple[str, str], Way]:
    """The ways, once that is so."""
    end = time.monotonic() + SECONDS
    while not is_enough(found := session.ways(timeout=SECONDS)):
        assert time.monotonic() < end, found
    return {(one.a, one.b): one for one in found}


def all_asked(count: int) -> Callable[[tuple[Way, ...]], bool]:
    """Whether there are so many ways, and of each is known whether it is one."""
    return lambda ways: (
        len(ways) == count and all(one.reachable is not None and one.round_trip_measured for one in ways)
    )


def test_a_head_tells_of_the_ways_to_its_members_and_between_them(factory: MemberFactory) -> None:
    with pool_of(factory, 2) as (head, _), hg.connect(head.url) as session:
        found = ways_when(session, all_asked(4))
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
    async def ask(url: str) -> tuple[Way, ...]:
        async with hg.aio.connect(url) as session:
            return await session.ways(timeout=SECONDS)

    with pool_of(factory, 2) as (head, members):
        with hg.connect(head.url) as session:
            found = ways_when(session, all_asked(4))
        assert {(one.a, one.b): one for one in asyncio.run(ask(head.url))} == found
        with hg.connect([one.url for one in members]) as session:
            assert all(one.reachable for one in ways_when(session, all_asked(4)).values())


def test_a_server_without_a_pool_has_no_ways_and_an_old_one_says_so(
    factory: MemberFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = factory.start(*FAKE)
    with hg.connect(alone.url) as session:
        assert session.ways() == () == session.members()
    monkeypatch.setattr("heliograph._grpc.FEATURES", ("blake3",))
    with hg.connect(alone.url) as session, pytest.raises(UnsupportedError, match="upgrade the server"):
        session.ways()
    alone.kill()


def test_members_tell_what_they_run_and_what_to_do_when_they_are_gone(factory: MemberFactory) -> None:
    with pool_of(factory, 2) as (head, members), hg.connect(head.url) as session, session.watch() as watch:
        ways_when(session, all_asked(4))
        assert [one.server for one in session.members()] == [session.info.server] * 2
        members[1].kill()
        assert watch.next(timeout=SECONDS) is not None
        here, lost = session.members()
        assert (here.state, lost.state) == (hg.MemberState.READY, hg.MemberState.LOST)
        assert lost.why and lost.advice and not lost.server and not here.advice
        assert set(ways_when(session, lambda ways: len(ways) == 1)) == {("", "m0")}


def test_ways_are_what_they_were_after_the_wire() -> None:
    ways = (
        Way("", "a", 1e-3, 1e8, True, False, True),
        Way("a", "b", 2e-3, 1e8, reachable=False, why="refused"),
        Way("b", "a", 2e-3, 1e8, True, True, None),
    )
    assert decode_ways(device_pb2.ListWaysResponse.FromString(encode_ways(ways).SerializeToString())) == ways
    # Of a later version.
    other: Any = device_pb2.MemberWay(source="a", destination="b")
    other.reachability = 17
    assert decode_ways(device_pb2.ListWaysResponse(ways=[other]))[0].reachable is None


def test_anybody_may_ask_a_head_for_its_ways_without_a_session(factory: MemberFactory) -> None:
    with pool_of(factory, 1) as (head, _), grpc.insecure_channel(f"{head.host}:{head.port}") as channel:
        ask = channel.unary_unary(
            "/heliograph.v1.DeviceService/ListWays",
            request_serializer=device_pb2.ListWaysRequest.SerializeToString,
            response_deserializer=device_pb2.ListWaysResponse.FromString,
        )
        assert len(ask(device_pb2.ListWaysRequest(), timeout=SECONDS).ways) <= 1
