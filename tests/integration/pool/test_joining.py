"""Who may be a member, and a pool in the client's own process."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from forked_daemons import running_daemon
from pool_daemons import DEVICE, HANGS_UP, SECONDS, Daemon, daemons, head_of, liar, present, wait_for_devices

import heliograph as hg
from heliograph.head.members import await_arrival
from heliograph_proto.devices import DeviceChange
from heliograph_proto.errors import ConfigurationError, HeliographError, ProtocolError
from heliograph_proto.types import tensor_type
from heliograph_proto.v1 import session_pb2
from heliograph_server.pool.backend import open_device
from heliograph_server.pool.discovery import Changed, Failed, ListedMember, MembershipSource, open_source
from heliograph_server.pool.joining import LAST_PAUSE_SECONDS, pause_seconds
from heliograph_server.pool.pool import Pool

OWN = b"the head's own!!"


@pytest.fixture(scope="module")
def members() -> Iterator[list[Daemon]]:
    with daemons(2) as made:
        yield made


@pytest.fixture
def pools() -> Iterator[Callable[[str], Pool]]:
    """Makes pools of this process, of a head whose incarnation is OWN."""
    made: list[Pool] = []

    def make(source: str) -> Pool:
        pool = Pool(open_source(source))
        made.append(pool)
        pool.start(lambda: OWN, lambda change: None)
        return pool

    yield make
    for one in made:
        one.close()


def doubled() -> hg.Graph:
    """x + x."""
    g = hg.Graph()
    x = g.input("x", (4,), "f32")
    g.output("y", x + x)
    return g


def why_of(pool: Pool, name: str) -> str:
    """Why a member is missing, once it has been tried."""
    assert pool.wait(lambda one: one.is_settled, SECONDS)
    return next(one.why for one in pool.members if one.name == name)


# A pool in this process


def test_a_list_of_daemons_is_one_list_of_their_devices(members: list[Daemon]) -> None:
    names = {f"{one.host}/cpu0" for one in members}
    with hg.connect([one.url for one in members]) as session:
        assert {device.name for device in session.devices} == names
        one = session.put(np.full(4, 3, np.float32), session.devices[0])
        two = session.empty((4,), "f32", session.devices[1])
        one.copy_to(two)
        assert two.get().tolist() == [3, 3, 3, 3]
        assert [member.state.name for member in session.members()] == ["READY", "READY"]


def test_asyncio_has_pools_too_and_watches_them(members: list[Daemon]) -> None:
    async def seen() -> list[hg.DeviceEvent]:
        async with hg.aio.connect([one.url for one in members]) as session:
            watch = session.watch()
            members[0].kill()
            lost = await anext(watch)
            await asyncio.to_thread(members[0].restart)
            return [lost, await anext(watch)]

    lost, again = asyncio.run(seen())
    assert lost.device == again.device == f"{members[0].host}/cpu0" and lost.lost and not again.lost


def test_daemons_that_answer_are_enough(members: list[Daemon]) -> None:
    with hg.connect([members[0].url, "grpc://127.0.0.1:1"]) as session:
        assert [device.name for device in session.devices] == [f"{members[0].host}/cpu0"]
        with pytest.raises(hg.MemberLostError, match="127.0.0.1:1"):
            session.compile(doubled(), "127.0.0.1:1/cpu0")


def test_a_session_whose_first_device_is_lost_goes_on_and_has_it_again(members: list[Daemon]) -> None:
    with hg.connect([one.url for one in members]) as session:
        first, other = [device.name for device in session.devices]
        gone = next(one for one in members if first.startswith(one.host))
        gone.kill()
        wait_for_devices(session, other)
        with pytest.raises(hg.MemberLostError):
            session.compute(doubled(), x=np.ones(4, np.float32))
        with pytest.raises(hg.MemberLostError):
            session.empty((4,), "f32").get(timeout=SECONDS)
        assert session.put(np.ones(4, np.float32), other).get().tolist() == [1, 1, 1, 1]
        assert session.compute(doubled(), x=np.ones(4, np.float32), devices=other)["y"].tolist() == [2] * 4
        gone.restart()
        wait_for_devices(session, first, other)
        assert session.put(np.ones(4, np.float32)).get().tolist() == [1, 1, 1, 1]
        assert session.compute(doubled(), x=np.ones(4, np.float32))["y"].tolist() == [2] * 4
        stream = session.stream(first)
        gone.kill()
        wait_for_devices(session, other)
        gone.restart()
        wait_for_devices(session, first, other)
        tensor = session.empty((4,), "f32", first)
        tensor.set(np.ones(4, np.float32), stream=stream)
        assert tensor.get(stream=stream).tolist() == [1, 1, 1, 1]


def test_a_program_that_ends_with_its_pool_open_speaks_of_no_loss(members: list[Daemon]) -> None:
    code = "import sys, heliograph as hg; pool = hg.connect(sys.argv[1:])"
    command = [sys.executable, "-c", code, *(one.url for one in members)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    assert found.stderr == ""


def test_a_pool_of_which_nobody_answers_says_why_of_each() -> None:
    with pytest.raises(hg.UnavailableError) as caught:
        hg.connect(["grpc://127.0.0.1:1", "grpc://127.0.0.1:2"], timeout=0.5)
    assert all(name in caught.value.message for name in ("127.0.0.1:1: ", "127.0.0.1:2: "))


@pytest.mark.parametrize("urls", [[], [7], ["local:"], ["grpc://a#cpu0"], ["http://a"]])
def test_a_list_that_cannot_be_a_pool_is_refused(urls: list[str]) -> None:
    with pytest.raises(hg.InvalidArgumentError):
        hg.connect(urls)


def test_two_daemons_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="two members are named"):
        hg.connect(["grpc://a", "grpc://a"])


# A list that changes


class Told(MembershipSource):
    """A source that tells what a test has it tell."""

    prefix = "told"

    def __init__(self) -> None:
        self.tell: Changed = lambda listed: None
        self.refreshed = threading.Event()

    @classmethod
    def parse(cls, text: str) -> Told:
        return cls()

    def start(self, changed: Changed, failed: Failed) -> None:
        self.tell = changed

    def refresh(self) -> None:
        self.refreshed.set()

    def close(self) -> None:
        self.tell = lambda listed: None


@pytest.fixture
def told() -> Iterator[tuple[Told, Pool]]:
    source = Told()
    pool = Pool(source)
    pool.start(lambda: OWN, lambda change: None)
    yield source, pool
    pool.close()


def names_of(pool: Pool) -> list[str]:
    return [device.name for device in pool.devices]


def test_members_come_with_the_list_and_in_its_order(members: list[Daemon], told: tuple[Told, Pool]) -> None:
    source, pool = told
    one, two = (ListedMember(name, daemon.url) for name, daemon in zip("ab", members, strict=True))
    source.tell([two])
    assert pool.wait(lambda it: names_of(it) == ["b/cpu0"], SECONDS)
    source.tell([one, two])
    assert pool.wait(lambda it: names_of(it) == ["a/cpu0", "b/cpu0"], SECONDS)
    source.tell([two, one])
    assert pool.wait(lambda it: names_of(it) == ["b/cpu0", "a/cpu0"], SECONDS)


def test_who_is_listed_no_more_is_used_as_long_as_it_answers_and_then_not_tried_again(
    members: list[Daemon], told: tuple[Told, Pool]
) -> None:
    source, pool = told
    one, two = (ListedMember(name, daemon.url) for name, daemon in zip("ab", members, strict=True))
    source.tell([one, two])
    assert pool.wait(lambda it: len(it.devices) == 2, SECONDS)
    source.tell([two])
    assert set(names_of(pool)) == {"a/cpu0", "b/cpu0"}
    members[0].kill()
    assert source.refreshed.wait(SECONDS), "whoever lists them may know more now"
    assert pool.wait(lambda it: [member.name for member in it.members] == ["b"], SECONDS)
    members[0].restart()
    source.tell([two, one])
    assert pool.wait(lambda it: names_of(it) == ["b/cpu0", "a/cpu0"], SECONDS)


def test_the_second_of_two_listed_under_one_name_is_refused_and_that_is_logged_once(
    members: list[Daemon], told: tuple[Told, Pool], caplog: pytest.LogCaptureFixture
) -> None:
    source, pool = told
    with caplog.at_level(logging.WARNING, "heliograph_server.pool"):
        for _ in range(3):
            source.tell([ListedMember("a", members[0].url), ListedMember("A", members[1].url)])
        assert pool.wait(lambda it: names_of(it) == ["a/cpu0"], SECONDS)
    assert [one.why for one in pool.members] == ["", "another member has its name"]
    assert sum("another member has its name" in one.getMessage() for one in caplog.records) == 1


# Who is refused


def test_a_daemon_under_two_addresses_is_a_member_once_and_that_is_logged_once(
    members: list[Daemon], pools: Callable[[str], Pool], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "heliograph_server.pool"):
        pool = pools(f"static:one={members[0].host},two=localhost:{members[0].port}")
        assert pool.wait(lambda one: one.is_settled, SECONDS)
        (missing,) = [one for one in pool.members if one.why]
        assert "is a member already" in missing.why
        # It is tried again and again.
        assert not pool.wait(lambda one: len(one.devices) != 1, 1.0)
    assert sum("member already" in one.getMessage() for one in caplog.records) == 1
    assert len(pool.devices) == 1


def test_a_head_is_no_member_of_itself() -> None:
    with daemons(1) as (spare,):
        port = spare.port
    head = Daemon("--device", DEVICE, "--pool", f"static:me=127.0.0.1:{port}", port=port)
    try:
        with hg.connect(head.url, timeout=SECONDS) as session:
            (me,) = session.members()
            while "head itself" not in me.why:
                (me,) = session.members()
            assert present(session) == {"cpu0"}
    finally:
        head.end()


def test_of_two_heads_that_name_each_other_at_most_one_has_the_other() -> None:
    with daemons(2) as spares:
        ports = [one.port for one in spares]
    with (
        head_of(f"127.0.0.1:{ports[1]}", port=ports[0]) as one,
        head_of(f"127.0.0.1:{ports[0]}", port=ports[1]) as two,
        hg.connect(one.url) as first,
        hg.connect(two.url) as second,
    ):
        end = time.monotonic() + SECONDS
        while not any("among its members" in session.members()[0].why for session in (first, second)):
            assert time.monotonic() < end
        end = time.monotonic() + SECONDS
        while len(present(first)) + len(present(second)) > 3:
            assert time.monotonic() < end
        longest = max(name.count("/") for name in present(first) | present(second))
        assert longest <= 1


def test_a_head_can_be_a_member_whose_devices_come_and_go(members: list[Daemon]) -> None:
    with (
        head_of(members[0]) as lower,
        head_of(lower) as upper,
        hg.connect(upper.url) as session,
    ):
        wait_for_devices(session, "cpu0", "m0/cpu0", "m0/m0/cpu0")
        held = session.put(np.ones(4, np.float32), "m0/m0/cpu0")
        members[0].kill()
        wait_for_devices(session, "cpu0", "m0/cpu0")
        with pytest.raises(hg.MemberLostError):
            held.get(timeout=SECONDS)
        members[0].restart()
        wait_for_devices(session, "cpu0", "m0/cpu0", "m0/m0/cpu0")
        assert session.put(np.ones(4, np.float32), "m0/m0/cpu0").get().tolist() == [1, 1, 1, 1]


def test_what_a_life_says_last_is_of_no_meaning_for_the_next(
    members: list[Daemon], told: tuple[Told, Pool]
) -> None:
    source, pool = told
    source.tell([ListedMember("m0", members[0].url)])
    assert pool.wait(lambda one: bool(one.devices), SECONDS)
    old = pool.devices[0].member
    members[0].restart()
    assert pool.wait(lambda one: bool(one.devices) and one.devices[0].member is not old, SECONDS)
    device = pool.devices[0]
    old._news(DeviceChange("m0", lost=("cpu0",), why="it was lost in another life"))
    # What follows comes after it.
    device.member._news(DeviceChange("m0", why="nothing"))
    old.session.close()
    members[0].kill()
    assert pool.wait(lambda one: not one.devices, SECONDS)
    members[0].restart()
    assert device.lost is not None and "another life" not in device.lost.message


def no_incarnation(answer: session_pb2.OpenResponse) -> None:
    answer.incarnation = b""


def the_head(answer: session_pb2.OpenResponse) -> None:
    answer.incarnation = OWN


def has_the_head(answer: session_pb2.OpenResponse) -> None:
    answer.daemons.append(OWN)


def another_version(answer: session_pb2.OpenResponse) -> None:
    answer.version = 9


def no_name(answer: session_pb2.OpenResponse) -> None:
    answer.devices[0].name = ""


def unprintable(answer: session_pb2.OpenResponse) -> None:
    answer.devices[0].name = "cpu\n0"


def twice(answer: session_pb2.OpenResponse) -> None:
    answer.devices.add().CopyFrom(answer.devices[0])


def many(answer: session_pb2.OpenResponse) -> None:
    for number in range(100):
        answer.devices.add().CopyFrom(answer.devices[0])
        answer.devices[-1].name = f"more{number}"


def much_memory(answer: session_pb2.OpenResponse) -> None:
    answer.devices[0].memory.total_bytes = 2**60


def more_free_than_there_is(answer: session_pb2.OpenResponse) -> None:
    answer.devices[0].memory.free_bytes = answer.devices[0].memory.total_bytes + 1


def odd_alignment(answer: session_pb2.OpenResponse) -> None:
    answer.devices[0].buffer_types[0].alignment_bytes = 48


def many_kinds_of_memory(answer: session_pb2.OpenResponse) -> None:
    for _ in range(100):
        answer.devices[0].buffer_types.add().CopyFrom(answer.devices[0].buffer_types[0])


def unprintable_memory(answer: session_pb2.OpenResponse) -> None:
    answer.devices[0].buffer_types[0].name = "\x1b[2J"


def odd_daemons(answer: session_pb2.OpenResponse) -> None:
    answer.daemons.append(b"short")


def no_memory(answer: session_pb2.OpenResponse) -> None:
    del answer.devices[0].buffer_types[:]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (no_incarnation, "not report its incarnation"),
        (the_head, "this head itself"),
        (has_the_head, "has this one among its members"),
        (another_version, "without session, devices or version"),
        (no_name, "a device is named ''"),
        (unprintable, "a device is named"),
        (twice, "two devices are named 'cpu0'"),
        (many, "lists 101 devices"),
        (much_memory, "bytes free"),
        (more_free_than_there_is, "bytes free"),
        (odd_alignment, "aligned to 48 bytes"),
        (no_memory, "has no memory"),
        (many_kinds_of_memory, "kinds of memory"),
        (unprintable_memory, "memory of device cpu0 is named"),
        (odd_daemons, "daemons behind it"),
    ],
)
def test_a_member_that_cannot_be_what_it_says_is_refused_and_that_is_logged_once(
    members: list[Daemon],
    pools: Callable[[str], Pool],
    caplog: pytest.LogCaptureFixture,
    change: Callable[[session_pb2.OpenResponse], None],
    why: str,
) -> None:
    with (
        caplog.at_level(logging.WARNING, "heliograph_server.pool"),
        liar(members[1].url, change) as (url, made),
    ):
        pool = pools(f"static:good={members[0].host},bad={url}")
        assert why in why_of(pool, "bad")
        assert made.wait_for(3)
        assert pool.wait(lambda it: names_of(it) == ["good/cpu0"], SECONDS)
        missing = pool.why_missing("bad/cpu0")
        assert missing is not None and why in missing.message
        pool.close()
    assert sum(why in one.getMessage() for one in caplog.records) == 1


def hangs_up(answer: session_pb2.OpenResponse) -> None:
    answer.server = HANGS_UP


def test_a_member_that_joins_and_is_lost_again_and_again_is_left_alone_longer_and_longer(
    members: list[Daemon], pools: Callable[[str], Pool], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "heliograph_server.pool"),
        liar(members[1].url, hangs_up) as (url, made),
    ):
        pool = pools(f"static:bad={url}")
        assert made.wait_for(4)
        pool.close()
    # It may hang up before it has joined, or after.
    reasons = Counter(one.getMessage() for one in caplog.records)
    assert set(reasons.values()) == {1}, reasons


def test_a_member_that_answers_nothing_but_the_handshake_is_no_hang(
    members: list[Daemon], pools: Callable[[str], Pool]
) -> None:
    with liar(members[1].url, lambda answer: None) as (url, _):
        pool = pools(f"static:mute={url}")
        assert pool.wait(lambda one: bool(one.devices), SECONDS)
        (device,) = pool.devices
        with pytest.raises(HeliographError):
            device.supports_op("neg", {}, (), None)  # type: ignore[arg-type]
        pool.close()


def test_who_does_not_say_how_much_memory_there_is_is_not_asked_by_everybody(
    members: list[Daemon], pools: Callable[[str], Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float | None] = []
    monkeypatch.setattr("heliograph_server.pool.remote.device.ANSWER_SECONDS", 0.25)

    def arriving(session: hg.Session, timeout: float | None = None) -> None:
        asked.append(timeout)
        await_arrival(session, timeout)

    monkeypatch.setattr("heliograph.head.members.await_arrival", arriving)
    with liar(members[1].url, lambda answer: None) as (url, _):
        pool = pools(f"static:mute={url}")
        assert pool.wait(lambda one: bool(one.devices), SECONDS)
        (device,) = pool.devices
        for _ in range(5):
            with pytest.raises(hg.DeadlineExceededError):
                device.memory()
        pool.close()
    assert asked == [0.25]


def test_a_clock_that_jumps_loses_no_member(members: list[Daemon], monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(open_source(f"static:{members[0].host}"), silence_seconds=0.25)
    pool.start(lambda: OWN, lambda change: None)
    assert pool.wait(lambda one: bool(one.devices), SECONDS)
    for now in (0.0, 1e10):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        assert not pool.wait(lambda one: not one.devices, 0.5)
    pool.close()


# Pure


def test_attempts_become_rarer_up_to_a_bound_and_no_two_heads_keep_time() -> None:
    pauses = [pause_seconds(attempt, 1.0) for attempt in range(100)]
    assert pauses == sorted(pauses) and pauses[-1] == LAST_PAUSE_SECONDS
    assert pause_seconds(3, 0.0) < pause_seconds(3, 0.5) < pause_seconds(3, 1.0)


def test_answers_that_cannot_be_true_are_refused() -> None:
    from heliograph_proto.types import tensor_type
    from heliograph_server.pool.remote.answers import checked_size, one_answer

    tensor = tensor_type("f32", (4,))
    assert checked_size((16,), tensor) == 16
    for sizes in ((), (16, 16), (15,), (2**40,)):
        with pytest.raises(ProtocolError, match="is invalid"):
            checked_size(sizes, tensor)
    with pytest.raises(ProtocolError, match="is invalid"):
        one_answer(())


def test_what_a_member_says_of_an_op_is_kept_short_and_printable() -> None:
    from heliograph_proto.devices import OpAnswer
    from heliograph_server.pool.remote.answers import one_answer

    said = one_answer([OpAnswer("no\x1b[2J" + "o" * 10**6)])
    assert said.why_not.isprintable() and len(said.why_not) <= 1000


def test_the_answers_about_an_op_with_several_result_types_are_kept_apart() -> None:
    four, five = tensor_type("f32", (4,)), tensor_type("f32", (5,))
    with running_daemon("--device", "fake") as url, open_device(url) as device:
        assert device.supports_op("exp", {}, [four], four) == ""
        with pytest.raises(hg.InvalidArgumentError, match="gives"):
            device.supports_op("exp", {}, [four], five)


def test_devices_that_keep_coming_are_refused_at_last() -> None:
    from dataclasses import replace

    from heliograph_proto.devices import DeviceChange
    from heliograph_server.pool.joining import MAX_DEVICES, check_change

    with hg.connect("local:#fake") as session:
        one = session.info.devices[0]
    more = tuple(replace(one, name=f"more{number}") for number in range(10))
    names = [f"cpu{number}" for number in range(MAX_DEVICES - 5)]
    check_change(DeviceChange("m", appeared=more, lost=tuple(names[:5])), names)
    with pytest.raises(ProtocolError, match="65 devices"):
        check_change(DeviceChange("m", appeared=more), names)


def test_a_plan_that_gives_something_else_than_its_graph_is_refused() -> None:
    from heliograph_proto.graph import Graph, Leaf, LeafKind, Output
    from heliograph_proto.plans import PlanInfo, Port
    from heliograph_proto.types import tensor_type
    from heliograph_server.pool.remote.answers import check_plan

    right, wrong = tensor_type("f32", (4,)), tensor_type("f32", (3,))
    graph = Graph((Leaf(LeafKind.INPUT, "x", right),), (), (Output("y", 0),))
    check_plan(PlanInfo((), (Port("y", right),), (), "cpu0", 0, 0), graph)
    for ports in ((), (Port("y", wrong),), (Port("z", right),), (Port("y", right),) * 2):
        with pytest.raises(ProtocolError):
            check_plan(PlanInfo((), ports, (), "cpu0", 0, 0), graph)
