"""Members that are of another version, or lie once they have joined; and pools with nobody left: typed errors
that name the member, and lines in the log once and not once a second."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from daemon_threads import ThreadDaemon
from pool_daemons import SECONDS, wait_for_devices

import heliograph as hg
from heliograph_backends.fake import FakeDevice
from heliograph_backends.registry import Registry
from heliograph_proto import EXCHANGE, FEATURES
from heliograph_proto.addresses import parse_address
from heliograph_proto.devices import Memory, OpAnswer, PlacementInfo
from heliograph_proto.errors import HeliographError, ProtocolError, VersionMismatchError
from heliograph_proto.plans import PlanReport
from heliograph_proto.sessions import SessionInfo
from heliograph_server.pool.discovery import open_source
from heliograph_server.pool.pool import Pool
from heliograph_server.runtime.host import Host
from heliograph_server.session.session import Session

X = np.linspace(-1, 1, 4, dtype=np.float32)
OWN = b"the head's own!!"


@pytest.fixture
def daemons() -> Iterator[tuple[ThreadDaemon, ThreadDaemon]]:
    """Two; tests have the second one misbehave."""
    made = ThreadDaemon(FakeDevice("fake0")), ThreadDaemon(FakeDevice("fake0"))
    yield made
    for one in made:
        one.stop()


@contextmanager
def pool_of(*daemons: ThreadDaemon) -> Iterator[tuple[hg.Session, list[str]]]:
    """A session with their pool in this process, and the names of its devices."""
    names = [f"127.0.0.1:{one.port}/fake0" for one in daemons]
    with hg.connect([one.url for one in daemons]) as session:
        wait_for_devices(session, *names)
        yield session, names


@pytest.fixture
def pools() -> Iterator[Callable[[str], Pool]]:
    """Makes pools of this process, of a head whose incarnation is OWN."""
    made: list[Pool] = []

    def make(source: str) -> Pool:
        made.append(Pool(open_source(source)))
        made[-1].start(lambda: OWN, lambda change: None)
        return made[-1]

    yield make
    for one in made:
        one.close()


def chain(length: int) -> hg.Graph:
    """Scopes n0, n1, ... each of which reads the one before."""
    g = hg.Graph()
    x = g.input("x", (4,), "f32")
    for number in range(length):
        with g.scope(f"n{number}"):
            x = hg.tanh(x) - hg.sin(x)
    g.output("y", x)
    return g


def alternating(names: list[str], length: int) -> dict[str, str]:
    return {f"n{number}/*": names[number % len(names)] for number in range(length)}


def lines(caplog: pytest.LogCaptureFixture, words: str) -> int:
    """How many lines of the log have these words."""
    return sum(words in one.getMessage() for one in caplog.records)


# Of another version


def test_a_daemon_that_refuses_this_version_is_no_member_and_that_is_logged_once(
    daemons: tuple[ThreadDaemon, ThreadDaemon],
    pools: Callable[[str], Pool],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good, old = daemons
    asked = 0

    def refuse(*arguments: Any, **others: Any) -> Any:
        nonlocal asked
        asked += 1
        raise VersionMismatchError(
            "the client speaks versions 1 to 1, this server 2 to 3", advice="upgrade one side"
        )

    monkeypatch.setattr(old.host, "open_session", refuse)
    with caplog.at_level(logging.WARNING, "heliograph_server.pool"):
        pool = pools(f"static:good=127.0.0.1:{good.port},old=127.0.0.1:{old.port}")
        assert pool.wait(lambda one: asked >= 3 and one.is_settled, SECONDS)
        (info,) = [one for one in pool.members if one.why]
        assert (info.name, info.state, info.advice) == ("old", hg.MemberState.JOINING, "upgrade one side")
        assert "this server 2 to 3" in info.why and [one.name for one in pool.devices] == ["good/fake0"]
        pool.close()
    assert lines(caplog, "this server 2 to 3") == 1


def test_a_member_that_exchanges_nothing_is_used_through_the_head_which_says_so(
    daemons: tuple[ThreadDaemon, ThreadDaemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, old = daemons
    features = tuple(one for one in FEATURES if one != EXCHANGE)
    real = old.host.open_session
    monkeypatch.setattr(
        old.host,
        "open_session",
        lambda client, versions, _, *rest, **more: real(client, versions, features, *rest, **more),
    )
    with pool_of(good, old) as (session, names):
        expected = session.compile(chain(4), devices=names[0]).run(x=X)["y"]
        plan = session.compile(chain(4), devices=names, pins=alternating(names, 4))
        assert plan.run(x=X, timeout=SECONDS)["y"].tobytes() == expected.tobytes()
        assert set(plan.explain().bytes_between_hosts) <= {"through head"}
        between = [one for one in session.links() if one.a]
        assert {one.reachable for one in between} == {False}
        assert all("exchanges nothing" in one.why for one in between)


# Who lies once it has joined


def test_a_member_that_answers_with_wrong_sizes_is_not_believed(
    daemons: tuple[ThreadDaemon, ThreadDaemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, liar = daemons
    real = liar.host.open_session

    def open_padding(*arguments: Any, **others: Any) -> SessionInfo:
        """It says that it pads, so that it is asked what tensors take."""
        info = real(*arguments, **others)
        kinds = tuple(replace(one, pads=True) for one in info.devices[0].buffer_types)
        return replace(info, devices=(replace(info.devices[0], buffer_types=kinds),))

    monkeypatch.setattr(liar.host, "open_session", open_padding)
    answers = [PlacementInfo((1,), (1,)), PlacementInfo((2**60,), (2**60,)), PlacementInfo((), ())]
    with pool_of(good, liar) as (session, names):
        for answer in answers:
            monkeypatch.setattr(liar.host, "query_placement", lambda *_, answer=answer: answer)
            with pytest.raises(ProtocolError, match="is invalid"):
                session.empty((3, 5), "f32", names[1]).get(timeout=SECONDS)
        assert session.compile(chain(2), devices=names[0]).run(x=X)["y"].shape == (4,)


def test_a_member_that_lies_about_its_memory_later_is_not_believed(
    daemons: tuple[ThreadDaemon, ThreadDaemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, liar = daemons
    with pool_of(good, liar) as (session, names):
        for memory in (Memory(2**60, 2**60), Memory(2, 1)):
            monkeypatch.setattr(liar.host, "memory", lambda name="", memory=memory: memory)
            with pytest.raises(ProtocolError, match="is invalid"):
                session.device(names[1]).memory(timeout=SECONDS)
        assert session.device(names[0]).memory(timeout=SECONDS).total_bytes >= 0


def test_a_member_that_answers_other_questions_than_were_asked_is_not_believed(
    daemons: tuple[ThreadDaemon, ThreadDaemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, liar = daemons
    monkeypatch.setattr(liar.host, "query_ops", lambda device, queries: (OpAnswer(),) * 3)
    with pool_of(good, liar) as (session, names):
        with pytest.raises(ProtocolError, match="3 answers"):
            session.compile(chain(1), devices=names[1], timeout=SECONDS)
        assert session.compile(chain(2), devices=names[0]).run(x=X)["y"].shape == (4,)


@pytest.mark.parametrize(
    "change",
    [
        lambda report: replace(report, splits=()),
        lambda report: replace(report, splits=report.splits * 3),
        lambda report: replace(report, splits=tuple(replace(one, compute_us=-1.0) for one in report.splits)),
        lambda report: replace(report, splits=(replace(report.splits[0], began_us=math.nan),)),
        lambda report: replace(report, nodes=tuple(replace(one, step_us=-1.0) for one in report.nodes)),
    ],
)
def test_a_member_that_explains_nonsense_breaks_no_explanation_but_by_a_typed_error(
    daemons: tuple[ThreadDaemon, ThreadDaemon],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[PlanReport], PlanReport],
) -> None:
    good, liar = daemons
    real = Session.explain

    def explain(self: Session, plan: int, measure: bool | None = None) -> PlanReport:
        report = real(self, plan, measure)
        return change(report) if self in liar.host._all_sessions() else report

    with pool_of(good, liar) as (session, names):
        plan = session.compile(chain(4), devices=names, pins=alternating(names, 4))
        expected = plan.run(x=X, timeout=SECONDS)["y"].tobytes()
        monkeypatch.setattr(Session, "explain", explain)
        try:
            assert str(plan.explain())
        except HeliographError as error:
            assert error.message
        assert plan.run(x=X, timeout=SECONDS)["y"].tobytes() == expected


# Nobody left


def test_a_pool_with_no_member_left_is_a_typed_error_for_whoever_asks(
    daemons: tuple[ThreadDaemon, ThreadDaemon],
) -> None:
    with pool_of(*daemons) as (session, names):
        plan = session.compile(chain(4), devices=names, pins=alternating(names, 4))
        plan.run(x=X, timeout=SECONDS)
        for one in daemons:
            one.stop()
        wait_for_devices(session)
        with pytest.raises(hg.MemberLostError):
            plan.run(x=X, timeout=SECONDS)
        with pytest.raises(hg.MemberLostError):
            session.compile(chain(1), devices=names[0], timeout=SECONDS)
        with pytest.raises(HeliographError):
            session.compile(chain(1), timeout=SECONDS)
        assert {one.state for one in session.members()} == {hg.MemberState.LOST}
        assert session.links() == ()


def test_a_head_without_devices_and_members_opens_no_session_and_says_what_to_start() -> None:
    host = Host(Registry.of(), pool=Pool(open_source("static:127.0.0.1:1")))
    try:
        with pytest.raises(hg.UnavailableError, match="no devices left"):
            host.open_session()
    finally:
        host.close()


# Addresses


def test_a_member_whose_name_does_not_resolve_is_missing_with_advice_and_that_is_logged_once(
    pools: Callable[[str], Pool], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "heliograph_server.pool"):
        pool = pools("static:nowhere=no-such-host.invalid:7070")
        assert pool.wait(lambda one: one.is_settled, SECONDS)
        # It is tried again and again.
        assert not pool.wait(lambda one: bool(one.devices), 1.5)
        (info,) = pool.members
        assert "does not resolve" in info.why and info.advice
        assert isinstance(pool.why_missing("nowhere/cpu0"), hg.MemberLostError)
        pool.close()
    assert lines(caplog, "does not resolve") == 1


@pytest.mark.parametrize("url", ["grpc://[::1", "grpc://[x]:7070", "[2J", "unix://[", "grpc://a:99999999"])
def test_addresses_that_are_none_are_typed_errors(url: str) -> None:
    with pytest.raises(hg.InvalidArgumentError):
        parse_address(url)
    with pytest.raises(hg.InvalidArgumentError):
        hg.connect([url])
