"""Plans over the daemons of a pool that are placed again when one of them is killed, with real daemons."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from losing import SECONDS, Array, inputs, same
from member_factory import MemberFactory
from named_members import SIZE, TRANSPORTS, NamedMembers, recurrent
from pool_daemons import next_event, wait_for_devices

import heliograph as hg

#: A run's partition on each member takes long enough for a kill to come in the middle of runs.
MEMBER = ("--device", "fake:compute_ms=20")
STAGES = 3


def undisturbed(given: list[Array]) -> list[Array]:
    with hg.connect("local:#fake") as session:
        plan = session.compile(recurrent(STAGES))
        return [plan.run(x=one)["y"] for one in given]


GIVEN = inputs(12, (SIZE, SIZE))


class Pool:
    """Three members, each with a stage of its own."""

    def __init__(self, factory: MemberFactory, transport: str) -> None:
        self.named = NamedMembers(factory, transport, [MEMBER] * STAGES, ("--device", "fake"))
        self.members, self.names, self.own = self.named.members, self.named.names, self.named.own
        self.address, self.connect, self.end = self.named.address, self.named.connect, self.named.end
        self.pins = {f"stage{number}/*": name for number, name in enumerate(self.names)}

    def compile(self, session: hg.Session, pipeline: int = 1) -> hg.Plan:
        """Each stage on a member of its own."""
        how = {"devices": self.names, "pins": self.pins, "pipeline": pipeline}
        return session.compile(recurrent(STAGES), **how, on_loss="rebuild")

    def kill(self, place: int) -> None:
        self.members[place].kill()

    def restart(self, place: int) -> None:
        """Another life of a member that was killed."""
        self.named.restart(place, *MEMBER)


@pytest.fixture(scope="module")
def factory() -> Iterator[MemberFactory]:
    with MemberFactory() as made:
        yield made


@pytest.fixture(params=TRANSPORTS)
def pool(request: pytest.FixtureRequest, factory: MemberFactory) -> Iterator[Pool]:
    made = Pool(factory, request.param)
    try:
        yield made
    finally:
        made.end()


@pytest.fixture
def session(pool: Pool) -> Iterator[hg.Session]:
    with pool.connect() as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> list[Array]:
    return undisturbed(GIVEN)


def check(found: list[Array], expected: list[Array]) -> None:
    assert all(same(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("pipeline", [1, 3])
@pytest.mark.parametrize("place", range(3))
def test_runs_under_way_give_the_same_bits_when_a_member_is_killed(
    pool: Pool, session: hg.Session, expected: list[Array], place: int, pipeline: int
) -> None:
    plan = pool.compile(session, pipeline)
    assert set(plan.devices) == set(pool.names), "it runs on all three"
    found = [plan.run(x=one)["y"] for one in GIVEN[:2]]
    plan.checkpoint()
    runs = [plan.submit(x=one) for one in GIVEN[2:9]]
    found.append(runs[0].result(SECONDS)["y"])
    pool.kill(place)
    found += [one.result(SECONDS)["y"] for one in runs[1:]]
    found += [plan.run(x=one)["y"] for one in GIVEN[9:]]
    check(found, expected)
    assert set(plan.devices) == set(pool.names) - {pool.names[place]}
    assert pool.names[place] in plan.rebuilds[-1].lost


def test_asyncio_has_the_same_bits_when_a_member_is_killed(pool: Pool, expected: list[Array]) -> None:
    async def go() -> list[Array]:
        with pool.connect():
            pass
        async with hg.aio.connect(pool.address, timeout=SECONDS) as session:
            how = {"devices": pool.names, "pins": pool.pins}
            plan = await session.compile(recurrent(STAGES), **how, on_loss="rebuild")
            found = [(await plan.run(x=GIVEN[0]))["y"]]
            await plan.checkpoint()
            runs = [plan.submit(x=one) for one in GIVEN[1:]]
            found.append((await runs[0])["y"])
            await asyncio.to_thread(pool.kill, 1)
            found += [(await one)["y"] for one in runs[1:]]
            assert pool.names[1] in plan.rebuilds[-1].lost
        return found

    check(asyncio.run(go()), expected)


def test_a_member_that_is_there_again_under_its_name_is_used_again(
    pool: Pool, session: hg.Session, expected: list[Array]
) -> None:
    plan = pool.compile(session)
    found = [plan.run(x=GIVEN[0])["y"]]
    plan.checkpoint()
    found.append(plan.run(x=GIVEN[1])["y"])
    with session.watch() as watch:
        pool.kill(1)
        pool.restart(1)
        assert next_event(watch).lost and not next_event(watch).lost
    found += [plan.run(x=one)["y"] for one in GIVEN[2:4]]
    check(found, expected[:4])
    assert set(plan.devices) == set(pool.names)


def test_a_member_that_came_back_later_takes_its_stage_again_at_the_next_loss(
    pool: Pool, session: hg.Session, expected: list[Array]
) -> None:
    plan = pool.compile(session)
    plan.checkpoint()
    pool.kill(1)
    found = [plan.run(x=one)["y"] for one in GIVEN[:3]]
    assert pool.names[1] not in plan.devices
    pool.restart(1)
    wait_for_devices(session, *pool.own, *pool.names)
    found.append(plan.run(x=GIVEN[3])["y"])
    pool.kill(2)
    found.append(plan.run(x=GIVEN[4])["y"])
    assert pool.names[1] in plan.devices and pool.names[2] not in plan.devices
    check(found, expected[:5])


def test_a_second_kill_while_the_first_is_mended_gives_the_same_bits(
    pool: Pool, session: hg.Session, expected: list[Array]
) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    plan = pool.compile(session)
    plan.checkpoint()
    runs = [plan.submit(x=one) for one in GIVEN]
    first, second = random.Random(seed).sample(range(3), 2)
    found = [runs[0].result(SECONDS)["y"]]
    pool.kill(first)
    with ThreadPoolExecutor(1) as thread:
        rest = thread.submit(lambda: [one.result(SECONDS)["y"] for one in runs[1:]])
        with session.watch() as watch:
            if not session.device(pool.names[first]).lost:
                watch.next(timeout=SECONDS)
        pool.kill(second)
        found += rest.result(2 * SECONDS)
    check(found, expected)
    rest_of_it = tuple(name for place, name in enumerate(pool.names) if place not in (first, second))
    assert plan.devices == rest_of_it


def test_without_a_checkpoint_a_plan_whose_variables_were_lost_says_what_to_do(
    pool: Pool, session: hg.Session
) -> None:
    plan = pool.compile(session)
    plan.run(x=GIVEN[0])
    pool.kill(0)
    with pytest.raises(hg.MemberLostError, match="no checkpoint") as caught:
        plan.run(x=GIVEN[1], timeout=SECONDS)
    assert "checkpoint" in caught.value.advice


def test_with_no_member_left_the_loss_is_raised_and_a_checkpoint_goes_on_elsewhere(
    pool: Pool, session: hg.Session, expected: list[Array]
) -> None:
    plan = pool.compile(session)
    found = [plan.run(x=one)["y"] for one in GIVEN[:2]]
    taken = plan.checkpoint()
    for place in range(3):
        pool.kill(place)
    with pytest.raises(hg.MemberLostError, match="none of its devices is left"):
        plan.run(x=GIVEN[2], timeout=SECONDS)
    with hg.connect("local:#fake") as elsewhere:
        other = elsewhere.compile(recurrent(STAGES))
        other.restore(taken)
        found += [other.run(x=one)["y"] for one in GIVEN[2:]]
    check(found, expected)
