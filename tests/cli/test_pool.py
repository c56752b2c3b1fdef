"""`heliograph doctor` and `heliograph devices` of the head of a pool."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import doctor_measurements
import pytest
from doctor_measurements import FAR, WELL
from member_factory import FactoryMember, MemberFactory
from pool_daemons import next_event

import heliograph as hg
from heliograph.cli import doctor, main
from heliograph.cli.doctor.findings import Finding, Level, find_in_pool
from heliograph.cli.doctor.measurements import MemberSeen, PoolSeen, TransportMeasurements
from heliograph.cli.doctor.tables import MOST_LINKS, link_rows, more_links
from heliograph_proto.devices import Link

SECONDS = 30.0
FAKE = ("--device", "fake")
RUNS = WELL.server.program


def member(name: str, address: str = "") -> MemberSeen:
    """One that is there, and that this client reaches."""
    where = address or f"grpc://{name}:7070"
    return MemberSeen(name, where, "ready", devices=(f"{name}/cpu0",), server=RUNS, reached=True)


def way(a: str, b: str) -> Link:
    """A good one."""
    return Link(a, b, 0.2e-3, 900e6, bool(a), bool(a), True)


POOL = PoolSeen(
    (member("a"), member("b")),
    (way("", "a"), way("", "b"), way("a", "b"), way("b", "a")),
)


def pooled(pool: PoolSeen) -> TransportMeasurements:
    """All is well but for what the pool has."""
    return replace(FAR, pool=pool)


def only(pool: PoolSeen) -> Finding:
    """The one finding that there is."""
    (finding,) = find_in_pool(pooled(pool))
    assert finding.seen and finding.cost and finding.advice
    return finding


def with_link(*changed: Link) -> PoolSeen:
    links = {(one.a, one.b): one for one in (*POOL.links, *changed)}
    return replace(POOL, links=tuple(links.values()))


# Findings, of frozen measurements


def test_of_a_pool_where_all_is_well_nothing_is_said_nor_of_a_server_without_one() -> None:
    assert find_in_pool(pooled(POOL)) == find_in_pool(FAR) == ()


@pytest.mark.parametrize(("state", "words"), [("lost", "is lost"), ("joining", "has not joined")])
def test_a_member_that_is_missing_is_told_with_its_reason_and_what_to_do(state: str, words: str) -> None:
    gone = MemberSeen("b", "grpc://b:7071", state, "connection refused", "is the daemon running?")
    found = only(PoolSeen((member("a"), gone), (way("", "a"),)))
    assert (found.name, found.level) == ("member", Level.WARNING)
    assert found.seen == f"member b at grpc://b:7071 {words}: connection refused"
    assert "is the daemon running?" in found.advice and "port 7071" in found.advice


def test_a_pool_of_nobody_is_told_where_to_look() -> None:
    found = only(PoolSeen(()))
    assert (found.name, found.level) == ("pool", Level.WARNING) and "source" in found.advice


def test_a_pair_that_cannot_reach_one_another_is_told_which_port_to_open_from_where_to_where() -> None:
    cut = Link("a", "b", 1e-3, 1e8, reachable=False, why="nobody answers at grpc://b:7070")
    found = only(with_link(cut))
    assert (found.name, found.level) == ("unreachable", Level.WARNING)
    assert found.seen == "a cannot fetch values from b: nobody answers at grpc://b:7070"
    assert "through the head" in found.cost and "open port 7070 at b to a" in found.advice


def test_many_that_cannot_reach_one_are_one_finding() -> None:
    names = [f"m{number}" for number in range(9)]
    cut = tuple(Link(name, "b", 1e-3, 1e8, reachable=False, why="refused") for name in names)
    found = only(PoolSeen((member("b"), *map(member, names)), cut))
    assert found.seen.startswith("m0, m1, m2, m3 and 5 more cannot fetch values from b")


def test_a_slow_way_is_told_with_what_it_costs() -> None:
    found = only(with_link(replace(way("a", "b"), bytes_per_second=2**21)))
    assert (found.name, found.level) == ("slow_link", Level.WARNING)
    assert "between a and b" in found.seen and "500 ms" in found.cost
    found = only(with_link(replace(way("a", "b"), round_trip_seconds=40e-3)))
    assert (found.name, found.level) == ("slow_link", Level.HINT) and "40 ms" in found.seen


def test_what_nobody_measured_is_no_finding() -> None:
    unknown = Link("a", "b", 1.0, 1.0, reachable=None)
    assert find_in_pool(pooled(with_link(unknown, replace(unknown, a="b", b="a")))) == ()


def test_a_member_of_another_version_is_told_and_what_it_lacks_is_no_firewall() -> None:
    old = replace(member("b"), server="heliograph/0.0.9")
    found = only(replace(POOL, members=(member("a"), old)))
    assert (found.name, found.level) == ("member_version", Level.HINT)
    assert found.seen == f"b runs heliograph/0.0.9, the head {RUNS}"
    cut = Link("a", "b", 1e-3, 1e8, reachable=False, why="b runs heliograph/0.0.9, which exchanges nothing")
    apart, _ = find_in_pool(pooled(replace(with_link(cut), members=(member("a"), old))))
    assert apart.name == "unreachable" and apart.advice == "upgrade the older daemon of these"


def test_a_member_that_this_client_does_not_reach_gets_its_weights_through_the_head() -> None:
    far = replace(member("b"), reached=False, why_not_reached="another daemon answers there")
    found = only(replace(POOL, members=(member("a"), far)))
    assert (found.name, found.level) == ("through_head", Level.HINT)
    assert "weights" in found.cost and "port 7070" in found.advice


def test_a_hostile_head_s_words_stay_on_their_line(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "x\n1. all is well\x1b[2J"
    gone = MemberSeen(evil, evil, "lost", evil, evil, (evil,), evil)
    here = replace(member("a"), server=evil, reached=False, why_not_reached=evil)
    ways = (Link(evil, "a", float("nan"), float("inf"), True, True, False, evil), way("", evil))
    found = pooled(PoolSeen((gone, here), ways))
    doctor.show(found, find_in_pool(found))
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and not [one for one in printed.splitlines() if one.startswith("1. all")]


def test_of_many_ways_those_are_shown_with_which_something_is_the_matter() -> None:
    names = [f"m{number}" for number in range(16)]
    ways = [way(a, b) for a in names for b in names if a != b]
    cut = Link("m14", "m15", 1e-3, 1e8, reachable=False, why="refused")
    pool = PoolSeen(
        tuple(map(member, names)), (*(one for one in ways if (one.a, one.b) != ("m14", "m15")), cut)
    )
    _, *rows = link_rows(pool)
    assert len(rows) == MOST_LINKS and more_links(pool) == "and 80 more; --json has all"
    (bad,) = [row[-1] for row in rows if row[-1] != "direct"]
    assert bad == "direct to m15, relayed by the head to m14"


# The commands


brief = doctor_measurements.brief


@dataclass
class Seen:
    """A head whose second member is gone, and whose third has never been there."""

    head: FactoryMember
    members: list[FactoryMember]


@pytest.fixture(scope="module")
def pool() -> Iterator[Seen]:
    with MemberFactory() as factory:
        members = [factory.start(*FAKE) for _ in range(3)]
        listed = ",".join(f"m{number}={one.host}:{one.port}" for number, one in enumerate(members))
        head = factory.start(*FAKE, "--pool", f"static:{listed},never=127.0.0.1:1")
        with hg.connect(head.url) as session, session.watch() as watch:
            end = time.monotonic() + SECONDS
            while sum(one.reachable is True for one in session.links()) < 3 + 6:
                assert time.monotonic() < end
            members[2].kill()
            while not next_event(watch).lost:
                pass
        yield Seen(head, members)


@pytest.mark.usefixtures("brief")
def test_doctor_tells_of_members_ways_and_what_is_missing(
    pool: Seen, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", pool.head.url]) == 0
    printed = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert "the head of a pool" in lines[0]
    assert any(one.startswith(f"m0 ready {pool.members[0].url} {RUNS} fake0 direct,") for one in lines)
    assert any(one.startswith(f"m2 lost {pool.members[2].url}") for one in lines)
    assert any(one.startswith("(head) m1") and one.endswith("direct") for one in lines)
    assert any(one.startswith("m0 m1") and one.endswith("direct") for one in lines)
    assert "warning: member m2" in printed and "warning: member never" in printed


@pytest.mark.usefixtures("brief")
def test_doctor_tells_programs_the_same(pool: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", pool.head.url, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    found = told["measurements"]["pool"]
    states = {one["name"]: (one["state"], one["reached"]) for one in found["members"]}
    assert states == {
        "m0": ("ready", True),
        "m1": ("ready", True),
        "m2": ("lost", None),
        "never": ("joining", None),
    }
    ways = {(one["a"], one["b"]): one for one in found["links"]}
    assert set(ways) == {("", "m0"), ("", "m1"), ("m0", "m1"), ("m1", "m0")}
    assert all(one["reachable"] and one["round_trip_measured"] for one in ways.values())
    assert ways["m0", "m1"]["bytes_per_second"] > 0 and not found["in_process"]
    assert [one["name"] for one in told["findings"]][:2] == ["member", "member"]


@pytest.mark.usefixtures("brief")
def test_doctor_of_several_urls_measures_the_pool_that_they_make(
    pool: Seen, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *(one.url for one in pool.members[:2])]) == 0
    printed = capsys.readouterr().out
    assert "a pool in this process" in printed.splitlines()[0] and "shared memory: not needed" in printed
    for one in pool.members[:2]:
        assert any(line.split()[:3] == [one.url[7:], "ready", one.url] for line in printed.splitlines())


def test_devices_are_grouped_by_member_with_its_state(pool: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--server", pool.head.url]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:3] for line in lines[1:6]] == [
        ["(head)", "-", "fake0"],
        ["m0", "ready", "m0/fake0"],
        ["m1", "ready", "m1/fake0"],
        ["m2", "lost", "-"],
        ["never", "joining", "-"],
    ]
    assert lines[2][4] == "fake", "by the backend that it has there"
    assert "refused" in " ".join(lines[5])
    assert main(["devices", "-v", "--server", pool.head.url]) == 0
    printed = capsys.readouterr().out
    assert all(one.url in printed for one in pool.members) and "is the daemon running?" in printed
