"""Members that drain while a program trains: what they hold goes to other members, and runs go on."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from member_factory import MemberFactory
from named_members import SECONDS, SIZE, TRANSPORTS, NamedMembers, recurrent
from pool_daemons import wait_for_devices
from waiting import until

import heliograph as hg
import heliograph.admin
from heliograph.cli import main

#: The time of drains: longer than any wait here for what they do, also on a machine that is busy.
DRAIN_SECONDS = 120.0
GIVEN = [np.random.default_rng(n).standard_normal((SIZE, SIZE)).astype(np.float32) for n in range(12)]


@pytest.fixture(scope="module")
def calm() -> list[np.ndarray]:
    with hg.connect("local:#cpu:threads=1") as session:
        plan = session.compile(recurrent(2))
        return [plan.run(x=one)["y"] for one in GIVEN]


class Pool:
    """Members of these devices, and what an operator does to them."""

    def __init__(self, factory: MemberFactory, transport: str, devices: list[str], *more: str) -> None:
        # An entry may have several devices, with spaces between them.
        time = f"--drain-seconds={DRAIN_SECONDS:.0f}"
        self._options = [[*(f"--device={part}" for part in one.split()), time] for one in devices]
        head = "--device", "cpu:threads=1,memory=1MiB", *more
        self.named = NamedMembers(factory, transport, self._options, head)
        self.members, self.names, self.own = self.named.members, self.named.names, self.named.own
        self.address, self.connect, self.end = self.named.address, self.named.connect, self.named.end

    def drain(self, place: int, seconds: float = DRAIN_SECONDS) -> heliograph.admin.DrainStatus:
        with heliograph.admin.connect(self.members[place].url) as admin:
            return admin.drain(seconds)

    def restart(self, place: int) -> None:
        self.named.restart(place, *self._options[place])

    def is_gone(self, session: hg.Session, place: int) -> bool:
        return bool(session.device(self.names[place]).lost)


@pytest.fixture(scope="module")
def factory() -> Iterator[MemberFactory]:
    with MemberFactory() as made:
        yield made


@pytest.fixture(params=TRANSPORTS)
def pool(request: pytest.FixtureRequest, factory: MemberFactory) -> Iterator[Pool]:
    made = Pool(factory, request.param, ["cpu:threads=1,memory=64MiB"] * 3)
    try:
        yield made
    finally:
        made.end()


def same(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_training_goes_on_with_the_same_bits_when_its_member_drains(
    pool: Pool, calm: list[np.ndarray]
) -> None:
    with pool.connect() as session:
        plan = session.compile(recurrent(2), pool.names[:2], pins={"stage0/*": pool.names[0]})
        found = [plan.run(x=one)["y"] for one in GIVEN[:3]]
        runs = [plan.submit(x=one) for one in GIVEN[3:7]]
        pool.drain(0)
        found += [one.result(SECONDS)["y"] for one in runs]
        until(lambda: pool.is_gone(session, 0), seconds=SECONDS)
        found += [plan.run(x=one)["y"] for one in GIVEN[7:]]
        assert plan.devices == (pool.names[1],), "a device that it named already"
    assert same(found, calm)


def test_asyncio_goes_on_with_the_same_bits(pool: Pool, calm: list[np.ndarray]) -> None:
    async def go() -> list[np.ndarray]:
        with pool.connect():
            pass
        async with hg.aio.connect(pool.address, timeout=SECONDS) as session:
            plan = await session.compile(recurrent(2), pool.names[:2], pins={"stage1/*": pool.names[1]})
            found = [(await plan.run(x=one))["y"] for one in GIVEN[:3]]
            runs = [plan.submit(x=one) for one in GIVEN[3:7]]
            await asyncio.to_thread(pool.drain, 1)
            found += [(await one)["y"] for one in runs]
            await asyncio.to_thread(until, lambda: session.device(pool.names[1]).lost, SECONDS)
            return found + [(await plan.run(x=one))["y"] for one in GIVEN[7:]]

    assert same(asyncio.run(go()), calm)


def test_two_members_drain_one_after_the_other(pool: Pool, calm: list[np.ndarray]) -> None:
    with pool.connect() as session:
        plan = session.compile(recurrent(2), pool.names[0])
        found = []
        for place in (0, 1):
            found += [plan.run(x=one)["y"] for one in GIVEN[4 * place : 4 * place + 4]]
            pool.drain(place)
            until(lambda place=place: pool.is_gone(session, place), seconds=SECONDS)
        found += [plan.run(x=one)["y"] for one in GIVEN[8:]]
        assert pool.names[2] in str(plan.explain())
    assert same(found, calm)


def test_tensors_views_weights_and_streams_go_along(pool: Pool) -> None:
    x = np.arange(64, dtype=np.float32)
    g = hg.Graph()
    g.output("y", g.input("x", (64,), "f32") * g.weight("w", x))
    with pool.connect() as session:
        there = pool.names[0]
        tensor, weight = session.empty(64, "f32", there), session.empty(64, "f32", there)
        tensor.set(x)
        view, stream = tensor[8:16], session.stream(there)
        tensor.copy_to(weight, stream=stream)
        nothing = session.empty((0, 4), "f32", there)
        too_large = session.empty(2**30, "f32", there)
        with pytest.raises(hg.OutOfMemoryError):
            too_large.get()
        plan = session.compile(g, there, weights={"w": weight})
        pool.drain(0)
        until(lambda: pool.is_gone(session, 0), seconds=SECONDS)
        assert np.array_equal(tensor.get(), x) and np.array_equal(view.get(), x[8:16])
        assert nothing.get().shape == (0, 4)
        assert {tensor.device, view.device, *plan.devices} <= set(pool.names[1:])
        with pytest.raises(hg.OutOfMemoryError):
            too_large.get()
        tensor.set(2 * x)
        assert np.array_equal(view.get(), 2 * x[8:16])
        assert np.array_equal(plan.run(x=x)["y"], x * x)
        # Names of the device that went stand for the one that has its place.
        late = session.empty(64, "f32", there)
        tensor.copy_to(late, stream=stream)
        assert np.array_equal(late.get(), 2 * x)
        assert session.compile(recurrent(1), there).run(x=GIVEN[0])["y"].shape == (SIZE, SIZE)


def test_reserved_memory_goes_along_with_the_plans_in_it(pool: Pool, calm: list[np.ndarray]) -> None:
    with pool.connect() as session:
        reservation = session.reserve(recurrent(2), pool.names[0])
        plan = session.compile(recurrent(2), pool.names[0])
        assert plan.reserved_bytes
        found = [plan.run(x=one)["y"] for one in GIVEN[:6]]
        pool.drain(0)
        until(lambda: pool.is_gone(session, 0), seconds=SECONDS)
        found += [plan.run(x=one)["y"] for one in GIVEN[6:]]
        again = session.compile(recurrent(2), plan.devices)
        assert again.reserved_bytes
        assert np.isfinite(again.run(x=GIVEN[0])["y"]).all()
        reservation.reset()
        with pytest.raises(hg.UnknownHandleError, match="reset"):
            plan.run(x=GIVEN[0])
    assert same(found, calm)


def test_memory_reserved_under_the_name_of_a_member_that_went_goes_along_too(pool: Pool) -> None:
    with pool.connect() as session:
        plan = session.compile(recurrent(2), pool.names[0])
        for turn in range(2):
            (there,) = plan.devices
            place = pool.names.index(there)
            pool.drain(place)
            until(lambda place=place: pool.is_gone(session, place), seconds=SECONDS)
            if turn == 0:
                session.reserve(recurrent(1), pool.names[0])
        assert session.compile(recurrent(1), plan.devices).reserved_bytes


def test_a_name_means_its_own_device_again_once_that_is_back(
    pool: Pool, factory: MemberFactory, calm: list[np.ndarray]
) -> None:
    with pool.connect() as session:
        plan = session.compile(recurrent(2), pool.names[0])
        found = [plan.run(x=one)["y"] for one in GIVEN[:6]]
        pool.drain(0)
        until(lambda: pool.is_gone(session, 0), seconds=SECONDS)
        pool.restart(0)
        until(lambda: not pool.is_gone(session, 0), seconds=SECONDS)
        found += [plan.run(x=one)["y"] for one in GIVEN[6:]]
        other = hg.Graph()
        other.output("y", other.input("x", (4,), "f32") * 2.0)
        assert pool.names[0] in str(session.compile(other, pool.names[0]).explain())
    assert same(found, calm)


def test_devices_on_which_a_session_has_nothing_need_no_place(
    factory: MemberFactory, calm: list[np.ndarray]
) -> None:
    """No other member has a device of the second kind."""
    pool = Pool(factory, "list", ["cpu:threads=1,memory=64MiB fake", "cpu:threads=1,memory=64MiB"])
    pool.own.append(pool.names[0].replace("/cpu0", "/fake0"))
    try:
        with pool.connect() as session:
            plan = session.compile(recurrent(2), pool.names[0])
            found = [plan.run(x=one)["y"] for one in GIVEN[:6]]
            pool.drain(0)
            until(lambda: pool.is_gone(session, 0), seconds=SECONDS)
            found += [plan.run(x=one)["y"] for one in GIVEN[6:]]
            assert plan.devices == (pool.names[1],)
    finally:
        pool.end()
    assert same(found, calm)


def test_without_room_the_member_waits_and_says_which_session_stays(
    factory: MemberFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = Pool(factory, "head", ["cpu:threads=1,memory=64MiB", "cpu:threads=1,memory=4MiB"])
    try:
        with pool.connect() as session:
            tensor = session.empty(2**22, "f32", pool.names[0])
            tensor.set(np.ones(2**22, np.float32))
            with heliograph.admin.connect(pool.members[0].url) as admin:
                admin.drain(3600)
                until(lambda: any("bytes free" in one.why for one in admin.snapshot().drain.staying))
                (stays,) = admin.snapshot().drain.staying
                assert "heliograph" in stays.client
                assert (tensor.get() == 1).all()
                waiting = ["drain", "--server", pool.members[0].url, "--seconds", "3600", "--wait"]
                with ThreadPoolExecutor(1) as thread:
                    ended = thread.submit(main, waiting)
                    until(lambda: admin.snapshot().drain.staying)
                    until(lambda: "keeps values here" in capsys.readouterr().out)
                    tensor.free()
                    until(lambda: pool.is_gone(session, 0), seconds=SECONDS)
                    assert ended.result(SECONDS) == 0
    finally:
        pool.end()


def test_the_devices_of_the_head_take_what_no_member_can(
    factory: MemberFactory, calm: list[np.ndarray]
) -> None:
    pool = Pool(factory, "head", ["cpu:threads=1,memory=64MiB"])
    try:
        with pool.connect() as session:
            plan = session.compile(recurrent(2), pool.names[0])
            found = [plan.run(x=one)["y"] for one in GIVEN[:6]]
            pool.drain(0)
            until(lambda: pool.is_gone(session, 0), seconds=SECONDS)
            found += [plan.run(x=one)["y"] for one in GIVEN[6:]]
    finally:
        pool.end()
    assert same(found, calm)


def test_a_plan_that_fits_nowhere_else_leaves_the_session_as_it_was_until_it_is_freed(
    factory: MemberFactory, calm: list[np.ndarray]
) -> None:
    """The variables fit on the head's own device, and the weight of the other plan does not."""
    pool = Pool(factory, "head", ["cpu:threads=1,memory=64MiB"])
    wide = hg.Graph()
    x = wide.input("x", (1024,), "f32")
    wide.output("y", x @ wide.weight("w", np.ones((1024, 1024), np.float32)))
    try:
        with pool.connect() as session:
            plan, other = (session.compile(one, pool.names[0]) for one in (recurrent(2), wide))
            found = [plan.run(x=one)["y"] for one in GIVEN[:4]]
            with heliograph.admin.connect(pool.members[0].url) as admin:
                admin.drain(3600)
                until(lambda: admin.snapshot().drain.staying)
            found += [plan.run(x=one)["y"] for one in GIVEN[4:8]]
            assert (other.run(x=np.ones(1024, np.float32))["y"] == 1024).all()
            other.free()
            until(lambda: pool.is_gone(session, 0), seconds=SECONDS)
            found += [plan.run(x=one)["y"] for one in GIVEN[8:]]
    finally:
        pool.end()
    assert same(found, calm)


def test_a_loop_that_does_not_end_keeps_its_member_until_the_drain_is_over(factory: MemberFactory) -> None:
    pool = Pool(factory, "head", ["cpu:threads=1,memory=64MiB"] * 2)
    g = hg.Graph()
    x = g.input("x", (), "f32")
    g.output("x", x + 1.0)
    try:
        with pool.connect() as session:
            plan = session.compile(g, pool.names[0])
            loop = plan.loop(steps=10**9, carry={"x": "x"}, taps=["x"], x=np.float32(0))
            assert next(iter(loop.taps())).step == 0, "it is under way"
            with heliograph.admin.connect(pool.members[0].url) as admin:
                admin.drain(3600)
                until(lambda: admin.snapshot().drain.staying)
                assert "loop" in admin.snapshot().drain.staying[0].why
                loop.stop()
                loop.result(SECONDS)
                until(lambda: pool.is_gone(session, 0), seconds=SECONDS)
            assert plan.run(x=np.float32(1))["x"] == 2
    finally:
        pool.end()


def test_members_that_drain_all_at_once_end_soon_and_say_why(factory: MemberFactory) -> None:
    pool = Pool(factory, "list", ["cpu:threads=1,memory=64MiB"] * 2)
    try:
        with pool.connect() as session:
            plan = session.compile(recurrent(2), pool.names, pins={"stage0/*": pool.names[0]})
            plan.run(x=GIVEN[0])
            # The time of the drains is longer than the test may take.
            with ThreadPoolExecutor(2) as threads:
                list(threads.map(lambda place: pool.drain(place, 3600), (0, 1)))
            until(lambda: pool.is_gone(session, 0) and pool.is_gone(session, 1), seconds=SECONDS)
            with pytest.raises(hg.MemberLostError):
                plan.run(x=GIVEN[1])
    finally:
        pool.end()


def test_a_plan_that_is_rebuilt_after_losses_goes_on_through_drains_too(
    pool: Pool, calm: list[np.ndarray]
) -> None:
    with pool.connect() as session:
        pins = {f"stage{number}/*": name for number, name in enumerate(pool.names[:2])}
        plan = session.compile(recurrent(2), pool.names, pins=pins, on_loss="rebuild")
        found = [plan.run(x=one)["y"] for one in GIVEN[:3]]
        plan.checkpoint()
        found += [plan.run(x=one)["y"] for one in GIVEN[3:5]]
        pool.drain(0)
        until(lambda: pool.is_gone(session, 0), seconds=SECONDS)
        found += [plan.run(x=one)["y"] for one in GIVEN[5:8]]
        assert not plan.rebuilds, "nothing was lost"
        pool.members[1].kill()
        found += [plan.run(x=one, timeout=SECONDS)["y"] for one in GIVEN[8:]]
    assert same(found, calm)


def test_a_head_that_is_killed_after_a_member_drained_goes_on_with_the_same_bits(
    factory: MemberFactory, calm: list[np.ndarray], tmp_path: Path
) -> None:
    pool = Pool(factory, "head", ["cpu:threads=1,memory=64MiB"] * 2, "--state", str(tmp_path / "state"))
    try:
        with hg.connect(pool.address, timeout=SECONDS, durable=True) as session:
            wait_for_devices(session, *pool.own, *pool.names)
            plan = session.compile(recurrent(2), pool.names[0])
            found = [plan.run(x=one)["y"] for one in GIVEN[:4]]
            pool.drain(0)
            until(lambda: pool.is_gone(session, 0), seconds=SECONDS)
            found += [plan.run(x=one)["y"] for one in GIVEN[4:8]]
            pool.named.restart_head()
            found += [plan.run(x=one, timeout=SECONDS)["y"] for one in GIVEN[8:]]
            late = session.empty(4, "f32", pool.names[0])
            late.set(np.ones(4, np.float32))
            assert (late.get() == 1).all()
    finally:
        pool.end()
    assert same(found, calm)


def test_runs_under_way_on_the_member_end_there_and_later_ones_follow_in_order(
    factory: MemberFactory, calm: list[np.ndarray]
) -> None:
    """A run takes long enough for the drain to come in the middle of runs."""
    pool = Pool(factory, "list", ["fake:compute_ms=30"] * 3)
    try:
        with pool.connect() as session:
            pins = {f"stage{number}/*": name for number, name in enumerate(pool.names[:2])}
            plan = session.compile(recurrent(2), pool.names, pins=pins, pipeline=2)
            runs = [plan.submit(x=one) for one in GIVEN[:8]]
            found = [runs[0].result(SECONDS)["y"]]
            pool.drain(0)
            found += [one.result(SECONDS)["y"] for one in runs[1:]]
            until(lambda: pool.is_gone(session, 0), seconds=SECONDS)
            found += [plan.run(x=one)["y"] for one in GIVEN[8:]]
    finally:
        pool.end()
    with hg.connect("local:#fake") as session:
        plan = session.compile(recurrent(2))
        assert same(found, [plan.run(x=one)["y"] for one in GIVEN])


def test_members_that_drain_and_come_back_in_any_order_change_no_bit(
    pool: Pool, factory: MemberFactory
) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    given = [chance.choice(GIVEN) for _ in range(40)]
    found: list[np.ndarray] = []
    with pool.connect() as session:
        plan = session.compile(recurrent(3), pool.names, pins={"stage1/*": pool.names[1]})
        tensor = session.empty(SIZE, "f32", chance.choice(pool.names))
        for turn in range(4):
            tensor.set(np.full(SIZE, turn, np.float32))
            runs = [plan.submit(x=one) for one in given[10 * turn : 10 * turn + 10]]
            place = chance.randrange(3)
            if chance.random() < 0.5:
                pool.drain(place)
            else:
                pool.members[place].kill(signal.SIGTERM)
            found += [one.result(DRAIN_SECONDS / 2)["y"] for one in runs]
            until(lambda place=place: pool.is_gone(session, place), seconds=DRAIN_SECONDS / 2)
            assert (tensor.get() == turn).all()
            pool.restart(place)
            until(lambda place=place: not pool.is_gone(session, place), seconds=SECONDS)
    with hg.connect("local:#cpu:threads=1") as session:
        plan = session.compile(recurrent(3))
        assert same(found, [plan.run(x=one)["y"] for one in given])
