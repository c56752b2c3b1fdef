"""Loops of plans that members run: the bits of one device, and no message between two steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from daemon_threads import ThreadDaemon
from fed_loops import CARRY, ROWS, N, X, adding, check_random_feeds, endless
from forked_daemons import running_daemon
from pool_daemons import Daemon

import heliograph as hg
from heliograph_backends.cpu.backend import CpuDevice
from heliograph_backends.fake import FakeDevice
from heliograph_proto.errors import (
    CancelledError,
    DeadlineExceededError,
    MemberLostError,
    OutOfRangeError,
)
from heliograph_server.pool.remote.loop import RemoteLoop
from heliograph_server.pool.remote.site import RemoteSite
from heliograph_server.session import loop_runner

SECONDS = 20.0
HOSTS = 3


class Member:
    """A daemon of this process that counts the runs and loops that have ended."""

    def __init__(self, device: CpuDevice | FakeDevice) -> None:
        self.daemon, self._ended, self.runs = ThreadDaemon(device), threading.Condition(), 0
        self.daemon.host.observers.append(self)

    def run_ended(self, run: object) -> None:
        with self._ended:
            self.runs += 1
            self._ended.notify_all()

    def wait(self, runs: int) -> None:
        """Until so many have ended."""
        with self._ended:
            assert self._ended.wait_for(lambda: self.runs >= runs, SECONDS)


@pytest.fixture(scope="module")
def members() -> Iterator[list[str]]:
    """Daemons in processes of their own."""
    with ExitStack() as stack:
        yield [stack.enter_context(running_daemon("--device", "cpu:threads=1")) for _ in range(HOSTS)]


@pytest.fixture(scope="module")
def head_url(members: list[str]) -> Iterator[str]:
    remote = (word for url in members for word in ("--device", f"remote:url={url}"))
    with running_daemon("--device", "cpu:threads=1", *remote) as url:
        yield url


@pytest.fixture(params=["daemon", "own process"])
def head(request: pytest.FixtureRequest, members: list[str]) -> Iterator[hg.Session]:
    """A session whose last devices are the members'."""
    where = request.getfixturevalue("head_url") if request.param == "daemon" else members
    with hg.connect(where) as session:
        yield session


@pytest.fixture
def counted() -> Iterator[tuple[list[Member], hg.Session]]:
    """Members of this process, and a session with all of them. At the end they hold nothing."""
    made = [Member(CpuDevice(f"cpu{number}", threads=1)) for number in range(HOSTS)]
    try:
        with hg.connect([one.daemon.url for one in made]) as session:
            yield made, session
        for one in made:
            assert one.daemon.exchange.budget.held_bytes == 0
    finally:
        for one in made:
            one.daemon.stop()


def stages(count: int) -> hg.Graph:
    """A loop over so many scopes, s0, s1, ...: the last one makes a token for the first one.

    Each stage keeps a sum in a variable of its own, and counts its steps."""
    g = hg.Graph()
    x, n, last = g.input("x", (4,), "f32"), g.input("n", (), "i32"), g.input("last", (), "i32")
    y = x
    kept = [g.variable(f"kept{number}", (4,), "f32") for number in range(count)]
    for number in range(count):
        with g.scope(f"s{number}"):
            total = hg.assign(kept[number], kept[number] + y)
            y = hg.tanh(y) * 1.5 - hg.sin(total)
            if not number:
                m = n + 1
    with g.scope(f"s{count - 1}"):
        y, same, done = hg.round(y * 64.0) * 0.25, m * 1, hg.equal(m, last)
    g.output("y", y)
    g.output("m", same)
    g.output("done", done)
    return g


def spread(session: hg.Session, count: int) -> hg.Plan:
    """Over so many members."""
    names = [one.name for one in session.devices][-HOSTS:][:count]
    pins = {f"s{number}/*": names[number] for number in range(count)} if count > 1 else None
    return session.compile(stages(count), devices=names, pins=pins)


def looped(plan: hg.Plan, last: int, steps: int = 1000, **options: Any) -> hg.RunFuture:
    x = np.linspace(-1, 1, 4, dtype=np.float32)
    given = {"x": x, "n": np.int32(0), "last": np.int32(last)}
    return plan.loop(given, steps=steps, carry={"y": "x", "m": "n"}, until="done", **options)


def told(plan: hg.Plan, last: int, **options: Any) -> list[Any]:
    """The bits of everything that a loop tells."""
    loop = looped(plan, last, taps=["y", "m"], **options)
    taps = [(tap.name, tap.step, tap.value.tobytes()) for tap in loop.taps(SECONDS)]
    found = loop.result(SECONDS)
    return [taps, loop.steps, {name: value.tobytes() for name, value in sorted(found.items())}]


def alone(count: int, *lasts: int) -> list[Any]:
    """The same loops in this process."""
    with hg.connect("local:") as session:
        plan = session.compile(stages(count))
        return [told(plan, last) for last in lasts]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_loops_have_the_bits_of_one_device_on_any_number_of_members(head: hg.Session, count: int) -> None:
    lasts = 7, 1, 40, 2
    plan = spread(head, count)
    assert [told(plan, last) for last in lasts] == alone(count, *lasts)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_loop_is_one_run_of_each_member(counted: tuple[list[Member], hg.Session], count: int) -> None:
    members, head = counted
    plan = spread(head, count)
    assert looped(plan, 50).result(SECONDS)["m"] == 50
    looped(plan, 0, steps=30).result(SECONDS)
    expected = [2] * count + [0] * (HOSTS - count)
    for one, runs in zip(members, expected, strict=True):
        one.wait(runs)
    assert [one.runs for one in members] == expected


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_loop_that_is_stopped_ends_after_the_same_step_everywhere(head: hg.Session, count: int) -> None:
    plan = spread(head, count)
    loop = looped(plan, 0, steps=10**9, taps=["m"])
    taps = loop.taps(SECONDS)
    seen = [int(next(taps).value) for _ in range(5)]
    loop.stop()
    seen += [int(tap.value) for tap in taps]
    steps = loop.steps
    assert seen == list(range(1, len(seen) + 1)) and int(loop.result(SECONDS)["m"]) == steps == len(seen)
    # The variables of all members have the values of that step.
    expected = session_of(count, steps)
    assert [plan.variables[f"kept{n}"].get().tobytes() for n in range(count)] == expected


def session_of(count: int, steps: int) -> list[bytes]:
    """The variables after so many steps of a loop in this process."""
    with hg.connect("local:") as session:
        plan = session.compile(stages(count))
        looped(plan, 0, steps=steps).result(SECONDS)
        return [plan.variables[f"kept{n}"].get().tobytes() for n in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_cancel_and_a_deadline_leave_the_variables_of_a_whole_step(head: hg.Session, count: int) -> None:
    plan = spread(head, count)
    for limit, error in ((None, CancelledError), (0.3, DeadlineExceededError)):
        loop = looped(plan, 0, steps=10**9, taps=["m"], timeout=limit)
        taps = loop.taps(SECONDS)
        next(taps)
        if limit is None:
            loop.cancel()
        with pytest.raises(error):
            list(taps)
        assert loop.steps
        kept = [plan.variables[f"kept{n}"] for n in range(count)]
        assert [one.get().tobytes() for one in kept] == session_of(count, loop.steps)
        for one in kept:
            one.set(np.zeros(4, np.float32))
    assert told(plan, 5) == alone(count, 5)[0]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_loop_waits_while_its_values_are_unread_and_other_clients_go_on(head_url: str, count: int) -> None:
    with hg.connect(head_url) as session, hg.connect(head_url) as another:
        loop = looped(spread(session, count), 0, steps=10**9, taps=["y", "m"])
        taps = loop.taps(SECONDS)
        next(taps)
        # These values are not read, and the members run other plans.
        assert told(spread(another, count), 9) == alone(count, 9)[0]
        loop.stop()
        values = [int(tap.value) for tap in taps if tap.name == "m"]
        assert values == list(range(1, len(values) + 1))


def test_a_loop_on_one_member_is_fed_there(counted: tuple[list[Member], hg.Session]) -> None:
    members, head = counted
    plan = head.compile(adding(), devices=[one.name for one in head.devices][-1])
    for seed in range(3):
        check_random_feeds(plan, 400, 60, seed)
    members[-1].wait(3)
    assert members[-1].runs == 3


def fed_over(session: hg.Session, count: int) -> hg.Plan:
    """`adding` over so many members: the last one makes what ends the loop."""
    names = [one.name for one in session.devices][-HOSTS:][:count]
    pins = {"half/*": names[0], "equal*": names[-1], "[!he]*": names[count // 2]}
    return session.compile(adding(), devices=names, pins=pins)


@pytest.mark.parametrize("count", [2, 3])
def test_loops_over_several_members_are_fed_there(
    counted: tuple[list[Member], hg.Session], count: int
) -> None:
    """Each feed is taken before the same step by all of them, though each needs a part of it."""
    members, head = counted
    plan = fed_over(head, count)
    for seed in range(4):
        check_random_feeds(plan, 400, 60, seed)
    for one in members[:count]:
        one.wait(4)
    assert [one.runs for one in members] == [4] * count + [0] * (HOSTS - count)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_feeds_of_the_same_rows_go_to_steps_of_their_own_on_all_members(head: hg.Session, count: int) -> None:
    plan = fed_over(head, count)
    loop = endless(plan, taps=["same"])
    fed = [loop.feed({"x": X[:1] + number}, rows=[1]) for number in range(1, 40)]
    others = [loop.feed({"b": X[:1]}, rows=[number % ROWS]) for number in range(40)]
    steps = [one.result(SECONDS) for one in fed]
    others[-1].result(SECONDS)
    loop.stop()
    same = {tap.step: tap.value[1, 0] for tap in loop.taps(SECONDS)}
    assert steps == sorted(set(steps)) and [same[step] for step in steps] == list(range(1, 40))


@pytest.mark.parametrize("lost", [0, 1])
def test_feeds_end_with_the_member_that_is_lost(lost: int) -> None:
    """The one that decides, or the other one."""
    daemons = [Daemon() for _ in range(2)]
    try:
        with hg.connect([one.url for one in daemons]) as session:
            plan = fed_over(session, 2)
            loop = endless(plan, taps=["m"])
            taps = loop.taps(SECONDS)
            next(taps)
            loop.feed({"x": X + 1.0}).result(SECONDS)
            daemons[lost].kill()
            fed = [loop.feed({"x": X + 1.0}) for _ in range(20)]
            with pytest.raises(MemberLostError, match=daemons[lost].host):
                list(taps)
            for one in fed:
                one.exception(SECONDS)
    finally:
        for one in daemons:
            one.end()


def test_a_feed_that_a_member_is_told_of_and_never_receives_ends_the_loop(
    counted: tuple[list[Member], hg.Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    members, head = counted
    plan = fed_over(head, 2)
    lost, feed = head.devices[-HOSTS + 1].name, RemoteLoop.feed

    def sent(loop: RemoteLoop, *given: Any) -> Callable[[], None]:
        """To all but the member that does not decide."""
        return (lambda: None) if loop._device.name == lost else feed(loop, *given)

    monkeypatch.setattr(RemoteLoop, "feed", sent)
    monkeypatch.setattr(loop_runner, "FEED_SECONDS", 0.2)
    loop = endless(plan, taps=["m"])
    taps = loop.taps(SECONDS)
    next(taps)
    loop.feed({"x": X + 1.0}).exception(SECONDS)
    with pytest.raises(DeadlineExceededError, match="feed 1 of the loop, which other hosts have"):
        list(taps)
    # Nothing is left of it, and other loops are fed.
    monkeypatch.undo()
    for one in members[:2]:
        one.wait(1)
    check_random_feeds(plan, 100, 20, 1)


def test_members_without_such_loops_run_step_by_step(
    members: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an older daemon does, which the handshake tells."""
    monkeypatch.setattr(RemoteSite, "exchanges_loops", False)
    with hg.connect(members) as session:
        plan = fed_over(session, 2)
        check_random_feeds(plan, 40, 20, 1)
        assert told(spread(session, 2), 6) == alone(2, 6)[0]


def test_a_feed_of_a_loop_on_a_member_tells_its_step_and_ends_with_the_loop(head: hg.Session) -> None:
    plan = head.compile(adding(), devices=[one.name for one in head.devices][-1])
    loop = endless(plan, taps=["same"])
    step = loop.feed({"x": X + 64.0}).result(SECONDS)
    taps = loop.taps(SECONDS)
    assert next(tap.value[0, 0] for tap in taps if tap.step == step) == 64.0
    loop.stop()
    list(taps)
    with pytest.raises(hg.LoopEndedError):
        loop.feed({"x": X}).result(SECONDS)


@pytest.mark.parametrize("count", [1, 2])
def test_a_feed_whose_time_has_passed_reaches_no_step_of_any_member(count: int) -> None:
    devices = [FakeDevice(f"fake{number}") for number in range(count)]
    members = [Member(one) for one in devices]
    try:
        with hg.connect([one.daemon.url for one in members]) as session:
            names = [one.name for one in session.devices]
            pins = {"half/*": names[0], "[!h]*": names[-1]}
            plan = session.compile(adding(), devices=names, pins=pins)
            # The first one takes the feeds, and tells the others.
            gate = devices[0].script.hold("compute")
            loop = endless(plan, steps=4)
            assert gate.entered.wait(SECONDS)
            late = [loop.feed({"x": X[:1] + 8.0}, rows=[row], timeout=0.2) for row in range(3)]
            taken = loop.feed({"b": X + 1.0})
            for one in late:
                with pytest.raises(DeadlineExceededError):
                    one.result(SECONDS)
            gate.open()
            assert taken.result(SECONDS) == 1
            assert (loop.result(SECONDS)["y"] == 1.75).all()
    finally:
        for one in members:
            one.daemon.stop()


def picking(count: int) -> hg.Graph:
    """A loop whose last stage looks up a row that grows with each step."""
    g = hg.Graph()
    n = g.input("n", (1,), "i32")
    with g.scope("s0"):
        m = n + 1
    with g.scope(f"s{count - 1}"):
        rows = g.weight("rows", np.arange(8, dtype=np.float32).reshape(4, 2))
        row, same = hg.ops.get_rows(rows, n), m * 1
    g.output("row", row)
    g.output("m", same)
    return g


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_error_names_its_step_and_node_once(head: hg.Session, count: int) -> None:
    names = [one.name for one in head.devices][-HOSTS:][:count]
    pins = {f"s{number}/*": names[number] for number in (0, count - 1)} if count > 1 else None
    plan = head.compile(picking(count), devices=names, pins=pins)
    for _ in range(2):
        loop = plan.loop(n=np.zeros(1, np.int32), steps=9, carry={"m": "n"}, taps=["m"])
        with pytest.raises(OutOfRangeError) as caught:
            list(loop.taps(SECONDS))
        assert caught.value.message.count("in step 4 of the loop: ") == 1
        assert caught.value.origin.op == "get_rows" and loop.steps == 4
    found = plan.loop(n=np.zeros(1, np.int32), steps=4, carry={"m": "n"}).result(SECONDS)
    assert found["row"].tolist() == [[6.0, 7.0]]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_loop_ends_with_the_member_that_is_lost(count: int) -> None:
    daemons = [Daemon() for _ in range(count)]
    try:
        with hg.connect([one.url for one in daemons]) as session:
            names = [one.name for one in session.devices]
            pins = {f"s{number}/*": names[number] for number in range(count)} if count > 1 else None
            plan = session.compile(stages(count), devices=names, pins=pins)
            loop = looped(plan, 0, steps=10**9, taps=["m"])
            taps = loop.taps(SECONDS)
            for _ in range(3):
                next(taps)
            daemons[-1].kill()
            with pytest.raises(MemberLostError, match=daemons[-1].host):
                list(taps)
    finally:
        for one in daemons:
            one.end()


def forward(first: bool, size: int = 4) -> hg.Graph:
    """Two stages, of which the second gives the first nothing. One of them ends the loop."""
    g = hg.Graph()
    x, n, last = g.input("x", (size,), "f32"), g.input("n", (), "i32"), g.input("last", (), "i32")
    total = g.variable("total", (size,), "f32")
    with g.scope("s0"):
        y, m, done = hg.sin(x) + 0.25, n + 1, hg.equal(n + 1, last)
    with g.scope("s1"):
        summed = hg.assign(total, total * 0.5 + y)
        later = hg.equal(m * 1, last)
    g.output("y", y)
    g.output("m", m)
    g.output("total", summed)
    g.output("done", done if first else later)
    return g


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("size", [4, 2**15])
def test_a_member_that_waits_for_no_value_of_others_keeps_in_step_with_them(
    counted: tuple[list[Member], hg.Session], first: bool, size: int
) -> None:
    """Small values, and those that have a call of their own; more steps than an edge remembers."""
    members, head = counted
    names = [one.name for one in head.devices][:2]
    steps = 1500 if size == 4 else 40
    found = []
    spread_over: dict[str, Any] = {"devices": names, "pins": {"s0/*": names[0], "s1/*": names[1]}}
    with hg.connect("local:") as local:
        for session, options in ((head, spread_over), (local, {})):
            plan = session.compile(forward(first, size), **options)
            x = np.linspace(-1, 1, size, dtype=np.float32)
            for last in (steps, 0):
                given = {"x": x, "n": np.int32(0), "last": np.int32(last)}
                loop = plan.loop(given, steps=steps + 5, carry={"y": "x", "m": "n"}, until="done")
                outputs = loop.result(SECONDS)
                found.append((loop.steps, {name: one.tobytes() for name, one in outputs.items()}))
    assert found[:2] == found[2:]
    members[1].wait(2)
    assert [one.runs for one in members] == [2, 2, 0]


def test_members_that_cannot_reach_each_other_loop_step_by_step(
    members: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteSite, "can_reach", lambda self, other: False)
    with hg.connect(members) as session:
        assert told(spread(session, 2), 6) == alone(2, 6)[0]


def test_a_loop_whose_runs_overlap_goes_step_by_step(members: list[str]) -> None:
    with hg.connect(members) as session:
        names = [one.name for one in session.devices][:2]
        g = hg.Graph()
        x = g.input("x", (4,), "f32")
        with g.scope("s0"):
            y = hg.tanh(x)
        with g.scope("s1"):
            y = y + 0.5
        g.output("y", y)
        plans = [
            session.compile(g, devices=names, pins={"s0/*": names[0], "s1/*": names[1]}, pipeline=pipeline)
            for pipeline in (1, 2)
        ]
        given = {"steps": 9, "carry": {"y": "x"}}
        found = [plan.loop(x=X[0, :1].repeat(4), **given).result(SECONDS)["y"].tobytes() for plan in plans]
    assert found[0] == found[1]


def test_loops_and_runs_of_one_plan_follow_each_other(members: list[str]) -> None:
    """Each of a few kinds, in any order: they share the numbers of runs and the edges."""
    seed = 5
    print(f"seed {seed}")
    random = np.random.default_rng(seed)
    kinds = [int(random.integers(4)) for _ in range(24)]
    with hg.connect(members) as session, hg.connect("local:") as local:
        assert several(spread(session, 2), kinds) == several(local.compile(stages(2)), kinds)


def several(plan: hg.Plan, kinds: list[int]) -> list[Any]:
    found: list[Any] = []
    for number, kind in enumerate(kinds):
        x = np.full(4, number / 8, np.float32)
        if kind == 0:
            made = plan.run(x=x, n=np.int32(number), last=np.int32(0))
            found.append([made["y"].tobytes(), int(made["m"])])
        elif kind == 1:
            found.append(told(plan, 1 + number))
        elif kind == 2:
            found.append(told(plan, 0, steps=3))
        else:
            # The count alone goes on: another kind of value on the edges.
            loop = plan.loop(x=x, n=np.int32(0), last=np.int32(4), steps=9, carry={"m": "n"}, until="done")
            found.append([loop.result(SECONDS)["y"].tobytes(), loop.steps])
    return found


def test_outputs_of_a_loop_go_to_tensors_wherever_they_lie(head: hg.Session) -> None:
    names = [one.name for one in head.devices][-HOSTS:]
    plan = head.compile(adding(), devices=names[0])
    given: dict[str, Any] = {"x": X, "b": X + 1.0, "n": N, "carry": CARRY}
    expected = plan.loop(steps=6, **given).result(SECONDS)["y"].tobytes()
    for name in names[:2]:
        out = head.empty((4, 3), "f32", device=name)
        given["b"] = head.empty((4, 3), "f32", device=name)
        given["b"].set(X + 1.0)
        kept = plan.loop(steps=6, fetch=["m"], out={"y": out}, **given).result(SECONDS)
        assert kept["m"] == 6 and out.get().tobytes() == expected
        assert plan.loop(steps=6, fetch=False, **given).result(SECONDS)["y"].get().tobytes() == expected
