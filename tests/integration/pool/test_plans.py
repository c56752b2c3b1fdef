"""Plans over the devices of several daemons: each runs its partition, and values go from one to the other."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from daemon_threads import ThreadDaemon
from fed_loops import adding, check_random_feeds
from forked_daemons import running_daemon
from pool_daemons import Daemon
from waiting import until

import heliograph as hg
from heliograph_backends.fake import FakeDevice
from heliograph_proto.errors import (
    CancelledError,
    DeadlineExceededError,
    MemberLostError,
    OutOfRangeError,
    UnavailableError,
)
from heliograph_proto.plans import Route
from heliograph_server.pool.remote.site import RemoteSite

CPU = "--device", "cpu:threads=1"
X = np.arange(4, dtype=np.float32) / 4


@pytest.fixture(scope="module")
def members() -> Iterator[tuple[str, str]]:
    """Two daemons."""
    with running_daemon(*CPU) as one, running_daemon(*CPU) as other:
        yield one, other


@pytest.fixture(scope="module")
def head_url(members: tuple[str, str]) -> Iterator[str]:
    """A daemon that offers theirs beside its own device."""
    remote = (word for url in members for word in ("--device", f"remote:url={url}"))
    with running_daemon(*CPU, *remote) as url:
        yield url


@pytest.fixture(params=["daemon", "own process"])
def head(request: pytest.FixtureRequest, members: tuple[str, str]) -> Iterator[hg.Session]:
    """A session whose last two devices are the members'."""
    where = request.getfixturevalue("head_url") if request.param == "daemon" else list(members)
    with hg.connect(where) as session:
        yield session


def names_of(session: hg.Session) -> list[str]:
    """Of the members' devices."""
    return [one.name for one in session.devices][-2:]


def chain(length: int, size: int = 4) -> hg.Graph:
    """Scopes n0, n1, ... each of which reads the one before."""
    g = hg.Graph()
    x = g.input("x", (size,), "f32")
    for number in range(length):
        with g.scope(f"n{number}"):
            x = hg.tanh(x) - hg.sin(x)
    g.output("y", x)
    return g


def alternating(names: list[str], length: int) -> dict[str, str]:
    return {f"n{number}/*": names[number % len(names)] for number in range(length)}


def routes(plan: hg.Plan) -> set[Route]:
    return {copy.route for split in plan.explain().splits for copy in split.copies}


def test_a_chain_that_alternates_between_two_members_has_the_bits_of_one_device(head: hg.Session) -> None:
    names = names_of(head)
    expected = head.compile(chain(8), devices=names[0]).run(x=X)["y"]
    plan = head.compile(chain(8), devices=names, pins=alternating(names, 8))
    assert plan.splits == 8 and set(plan.devices) == set(names)
    for _ in range(3):
        assert plan.run(x=X)["y"].tobytes() == expected.tobytes()
    assert routes(plan) == {Route.DIRECT}
    explained = plan.explain()
    assert explained.bytes_between_hosts == {"direct": explained.copied_bytes}
    assert explained.run_us > 0 and all(one.compute_us > 0 for one in explained.splits)


def test_every_member_tells_the_time_of_its_steps(head: hg.Session) -> None:
    names = names_of(head)
    plan = head.compile(chain(4), devices=names, pins=alternating(names, 4))
    assert plan.explain().steps == ()
    steps = plan.profile(x=X, runs=2).steps
    assert {one.device for one in steps} == set(names) and all(one.took_us > 0 for one in steps)
    assert {node.number for one in steps for node in one.nodes} == set(range(12))


def test_a_member_that_runs_all_of_a_plan_tells_times_too(head: hg.Session) -> None:
    (name, _) = names_of(head)
    steps = head.compile(chain(2), devices=name).profile(x=X, runs=2).steps
    assert [one.device for one in steps] == [name] * len(steps) and steps
    assert {node.number for one in steps for node in one.nodes} == set(range(6))


def test_a_member_that_runs_all_of_a_plan_tells_where_its_results_lie(head: hg.Session) -> None:
    (name, _) = names_of(head)
    found = head.compile(chain(2), devices=name, fusion=False).explain()
    assert [one.device for one in found.blocks] == [name] and found.splits[0].memory_steps == 6
    assert {one.name.partition("/")[0] for one in found.stored} == {"n0", "n1"}


def test_the_heads_own_device_takes_part(head_url: str) -> None:
    with hg.connect(head_url) as session:
        names = [one.name for one in session.devices]
        expected = session.compile(chain(9), devices=names[0]).run(x=X)["y"]
        plan = session.compile(chain(9), devices=names, pins=alternating(names, 9))
        assert plan.run(x=X)["y"].tobytes() == expected.tobytes()
        assert set(plan.devices) == set(names) and routes(plan) == {Route.DIRECT}


def test_bytes_of_tensors_go_from_member_to_member_and_not_through_the_head(
    head_url: str, members: tuple[str, str]
) -> None:
    size = 2**18
    x = np.linspace(-1, 1, size, dtype=np.float32)
    with ExitStack() as stack:
        session, *direct = (stack.enter_context(hg.connect(url)) for url in (head_url, *members))
        names = names_of(session)
        expected = session.compile(chain(4, size), devices=names[0]).run(x=x)["y"]
        plan = session.compile(chain(4, size), devices=names, pins=alternating(names, 4))
        before = [one.server_traffic().peers for one in (session, *direct)]
        assert plan.run(x=x)["y"].tobytes() == expected.tobytes()
        after = [one.server_traffic().peers for one in (session, *direct)]
    moved = [new.received_bytes - old.received_bytes for old, new in zip(before, after, strict=True)]
    assert moved[0] == 0 and after[0].sent_bytes == before[0].sent_bytes
    assert sum(moved) >= 3 * 4 * size


def decoder(session: hg.Session) -> tuple[hg.Graph, dict[str, str]]:
    """A cache that one member keeps and the other reads, before and after it is written."""
    names = names_of(session)
    g = hg.Graph()
    x = g.input("x", (4,), "f32")
    cache = g.variable("cache", (4,), "f32")
    with g.scope("old"):
        old = cache * 2.0 + x
    with g.scope("kept"):
        hg.assign(cache, cache + x)
    with g.scope("new"):
        new = cache * 3.0 + old
    g.output("old", old)
    g.output("new", new)
    g.output("cache", cache)
    return g, {"old/*": names[1], "kept/*": names[0], "new/*": names[1]}


def test_a_variable_is_read_elsewhere_as_it_is_before_and_after_its_assignment(head: hg.Session) -> None:
    g, pins = decoder(head)
    plan = head.compile(g, devices=names_of(head), pins=pins)
    assert routes(plan) == {Route.DIRECT}
    cache = np.zeros(4, np.float32)
    for step in range(1, 5):
        x = X * step
        found = plan.run(x=x)
        old = cache * np.float32(2) + x
        cache = cache + x
        np.testing.assert_array_equal(found["old"], old)
        np.testing.assert_array_equal(found["cache"], cache)
        np.testing.assert_array_equal(found["new"], cache * np.float32(3) + old)


def test_runs_of_a_pipeline_overlap_and_have_their_own_values(head: hg.Session) -> None:
    names = names_of(head)
    one = head.compile(chain(6), devices=names[0])
    plan = head.compile(chain(6), devices=names, pins=alternating(names, 6), pipeline=3)
    assert plan.pipeline == 3
    inputs = [X * number for number in range(24)]
    futures = [plan.submit(x=x) for x in inputs]
    for x, future in zip(inputs, futures, strict=True):
        assert future.result(60)["y"].tobytes() == one.run(x=x)["y"].tobytes()


def test_several_plans_at_once_do_not_wait_for_each_other_in_circles(head: hg.Session) -> None:
    names = names_of(head)
    expected = head.compile(chain(6), devices=names[0]).run(x=X)["y"].tobytes()
    plans = [
        head.compile(chain(6), devices=order, pins=alternating(order, 6), pipeline=2)
        for order in (names, names[::-1], names)
    ]
    wrong: list[Any] = []

    def work(plan: hg.Plan) -> None:
        futures = [plan.submit(x=X) for _ in range(15)]
        wrong.extend(one for one in futures if one.result(60)["y"].tobytes() != expected)

    threads = [threading.Thread(target=work, args=(plan,)) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_tensors_that_lie_on_a_member_are_used_there_and_outputs_may_stay(head: hg.Session) -> None:
    names = names_of(head)
    plan = head.compile(chain(4), devices=names, pins=alternating(names, 4))
    expected = plan.run(x=X)["y"]
    for device in (one.name for one in head.devices):
        x = head.put(X, device=device)
        kept = plan.run(x=x, fetch=False)["y"]
        assert kept.get().tobytes() == expected.tobytes()
        written = head.empty((4,), "f32", device=device)
        plan.run(x=x, fetch=False, out={"y": written})
        assert written.get().tobytes() == expected.tobytes()


def test_a_loop_over_several_hosts_is_a_run_for_each_step(head: hg.Session) -> None:
    names = names_of(head)
    plan = head.compile(chain(4), devices=names, pins=alternating(names, 4))
    y = X
    for _ in range(5):
        y = plan.run(x=y)["y"]
    found = plan.loop(x=X, steps=5, carry={"y": "x"}).result(60)["y"]
    assert found.tobytes() == y.tobytes()


def test_a_loop_over_several_hosts_is_fed_between_its_steps(head: hg.Session) -> None:
    names = names_of(head)
    plan = head.compile(adding(), devices=names, pins={"half/*": names[1]})
    check_random_feeds(plan, 100, 40, 7)


def test_observed_nodes_make_a_plan_go_through_the_head_and_it_says_so(head: hg.Session) -> None:
    names = names_of(head)
    plan = head.compile(chain(4), devices=names, pins=alternating(names, 4))
    expected = plan.run(x=X)["y"]
    run = plan.submit(x=X, taps=["n1/*"])
    assert len(list(run.taps())) > 0
    assert run.result(60)["y"].tobytes() == expected.tobytes()


def test_a_plan_that_cannot_be_cut_goes_through_the_head_and_says_why(head: hg.Session) -> None:
    names = names_of(head)
    g = hg.Graph()
    table = g.weight("table", np.arange(12, dtype=np.float32).reshape(3, 4))
    ids = g.input("ids", (2,), "i32")
    with g.scope("here"):
        here = hg.take(table, ids, axis=0)
    with g.scope("there"):
        there = hg.take(table, ids, axis=0)
    g.output("y", here + there)
    plan = head.compile(g, devices=names, pins={"here/*": names[0], "there/*": names[1]})
    found = plan.run(ids=np.array([0, 2], np.int32))["y"]
    np.testing.assert_array_equal(found, np.arange(12).reshape(3, 4)[[0, 2]] * 2)
    assert Route.THROUGH_HEAD in routes(plan)
    assert "through the head: rows of a weight go from one host to another" in plan.explain().table()


def failing(session: hg.Session, names: list[str] | None = None) -> hg.Plan:
    """Row numbers that may be out of range are read on the first device, between nodes of the second."""
    names = names or names_of(session)
    g = hg.Graph()
    ids = g.input("ids", (2,), "i32")
    table = g.weight("table", np.ones((3, 4), np.float32))
    with g.scope("before"):
        numbers = hg.abs(ids)
    with g.scope("rows"):
        rows = hg.take(table, numbers, axis=0)
    with g.scope("behind"):
        y = hg.tanh(rows)
    g.output("y", y)
    pins = {"before/*": names[1], "rows/*": names[0], "behind/*": names[1]}
    return session.compile(g, devices=names, pins=pins)


def test_a_split_that_fails_is_the_runs_error_with_its_node_and_line(head: hg.Session) -> None:
    plan = failing(head)
    for _ in range(3):
        with pytest.raises(OutOfRangeError) as caught:
            plan.run(ids=np.array([0, 7], np.int32))
        assert caught.value.origin.op == "get_rows"
        assert "rows = hg.take" in caught.value.origin.source
        good = plan.run(ids=np.array([0, 2], np.int32))["y"]
        np.testing.assert_array_equal(good, np.tanh(np.ones((2, 4), np.float32)))


def test_runs_that_are_over_hold_no_memory_of_members(head: hg.Session) -> None:
    size, names = 2**17, names_of(head)
    x = np.linspace(-1, 1, size, dtype=np.float32)
    plan = head.compile(chain(4, size), devices=names, pins=alternating(names, 4), pipeline=2)

    def free_bytes() -> list[int]:
        for future in [plan.submit(x=x) for _ in range(6)]:
            future.result(60)
        return [one.memory().free_bytes for one in head.devices if one.name in names]

    gc.disable()
    try:
        before = free_bytes()
        assert [free_bytes() for _ in range(3)] == [before] * 3
    finally:
        gc.enable()


def check_origin(error: OutOfRangeError) -> None:
    assert error.origin.op == "get_rows" and "rows = hg.take" in error.origin.source


def test_a_split_of_the_head_that_fails_is_its_own_node_though_a_member_waits_for_it(head_url: str) -> None:
    with hg.connect(head_url) as session:
        own, member = (session.devices[place].name for place in (0, 1))
        plan = failing(session, [own, member])
        with pytest.raises(OutOfRangeError) as caught:
            plan.run(ids=np.array([0, 7], np.int32))
        check_origin(caught.value)


def test_a_split_that_fails_is_its_own_node_though_its_value_is_relayed(
    members: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteSite, "can_reach", lambda self, other: False)
    with hg.connect(list(members)) as session:
        plan = failing(session)
        for _ in range(3):
            with pytest.raises(OutOfRangeError) as caught:
                plan.run(ids=np.array([0, 7], np.int32))
            check_origin(caught.value)


@pytest.fixture
def scripted() -> Iterator[tuple[FakeDevice, FakeDevice, hg.Session]]:
    """Two daemons of this process with scripted devices, and a session with both."""
    devices = FakeDevice("fake0"), FakeDevice("fake1")
    daemons = [ThreadDaemon(one) for one in devices]
    try:
        with hg.connect([one.url for one in daemons]) as session:
            yield (*devices, session)
            for daemon in daemons:
                # The receipt of a value may come a little later.
                until(lambda daemon=daemon: not daemon.exchange.budget.held_bytes)
    finally:
        for daemon in daemons:
            daemon.stop()


def test_a_run_is_cancelled_in_the_middle_on_all_members(
    scripted: tuple[FakeDevice, FakeDevice, hg.Session],
) -> None:
    one, _, session = scripted
    names = names_of(session)
    plan = session.compile(chain(4), devices=names, pins=alternating(names, 4))
    expected = plan.run(x=X)["y"]
    gate = one.script.hold("compute")
    run = plan.submit(x=X)
    assert gate.entered.wait(20)
    run.cancel()
    with pytest.raises(CancelledError):
        run.result(20)
    gate.open()
    assert plan.run(x=X, timeout=20)["y"].tobytes() == expected.tobytes()


def test_a_deadline_ends_a_run_on_all_members(
    scripted: tuple[FakeDevice, FakeDevice, hg.Session],
) -> None:
    _, other, session = scripted
    names = names_of(session)
    plan = session.compile(chain(4), devices=names, pins=alternating(names, 4))
    expected = plan.run(x=X)["y"]
    gate = other.script.hold("compute")
    with pytest.raises(DeadlineExceededError):
        plan.run(x=X, timeout=0.5)
    gate.open()
    assert plan.run(x=X, timeout=20)["y"].tobytes() == expected.tobytes()


def test_members_that_cannot_reach_each_other_are_relayed_by_the_head(
    members: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteSite, "can_reach", lambda self, other: False)
    for size in (4, 2**17):
        x = np.linspace(-1, 1, size, dtype=np.float32)
        with hg.connect(list(members)) as session:
            names = names_of(session)
            expected = session.compile(chain(5, size), devices=names[0]).run(x=x)["y"]
            plan = session.compile(chain(5, size), devices=names, pins=alternating(names, 5))
            for _ in range(3):
                assert plan.run(x=x)["y"].tobytes() == expected.tobytes()
            assert routes(plan) == {Route.RELAYED}
            assert "(relayed)" in str(plan.explain()) and '"route": "relayed"' in plan.explain().json()
            assert session.server_traffic().peers.relayed_bytes == 3 * 4 * 4 * size


def test_a_pair_that_turns_out_unreachable_is_relayed_from_the_next_run_on(
    members: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = property(lambda self: "grpc://127.0.0.1:1")
    with hg.connect(list(members)) as session:
        names = names_of(session)
        expected = session.compile(chain(5), devices=names[0]).run(x=X)["y"]
        with monkeypatch.context() as patched:
            # Each tells the other an address at which nobody is.
            patched.setattr(RemoteSite, "address", wrong)
            patched.setattr(RemoteSite, "can_reach", lambda self, other: True)
            plan = session.compile(chain(5), devices=names, pins=alternating(names, 5))
        with pytest.raises((MemberLostError, UnavailableError)):
            plan.run(x=X, timeout=30)
        # The head knows the way to both; each end of an edge may be noticed in a run of its own.
        for _ in range(2):
            try:
                plan.run(x=X, timeout=30)
            except (MemberLostError, UnavailableError):
                continue
        assert plan.run(x=X, timeout=30)["y"].tobytes() == expected.tobytes()
        assert Route.RELAYED in routes(plan)


def test_a_member_that_is_killed_in_the_middle_of_a_run_is_its_error_and_others_go_on() -> None:
    device, other = FakeDevice("fake0"), Daemon()
    daemon = ThreadDaemon(device)
    try:
        with hg.connect([daemon.url, other.url]) as session:
            here, there = names_of(session)
            plan = session.compile(chain(4), devices=[here, there], pins=alternating([here, there], 4))
            alone = session.compile(chain(4), devices=here)
            expected = plan.run(x=X)["y"].tobytes()
            gate = device.script.hold("compute")
            run = plan.submit(x=X)
            assert gate.entered.wait(20)
            other.kill()
            gate.open()
            with pytest.raises(MemberLostError, match=other.host):
                run.result(20)
            assert alone.run(x=X, timeout=20)["y"].tobytes() == expected
            with pytest.raises(MemberLostError):
                plan.run(x=X, timeout=20)
    finally:
        daemon.stop()
        other.end()
