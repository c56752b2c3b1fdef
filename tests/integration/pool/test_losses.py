"""Runs on a member that is lost: the waiting ones fail together, and cost the other members nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from pool_daemons import SECONDS, Daemon, daemons, head_of, wait_for_devices

import heliograph as hg
import heliograph.admin

SIZE = 512
SQUARE = np.zeros((SIZE, SIZE), np.float32)
RUNS = 300
#: The most commands that the members that are left get, for the run that was under way.
FEW = 30
DEVICES = ["m0/cpu0", "m1/cpu0", "m2/cpu0"]
PINS = {f"stage{number}/*": device for number, device in enumerate(DEVICES)}


def three_stages(products: int = 2000) -> hg.Graph:
    """Much longer work than a test takes, and then two sums: a stage for each member."""
    g = hg.Graph()
    x = y = g.input("x", (SIZE, SIZE), "f32")
    with g.scope("stage0"):
        for _ in range(products):
            y = y @ x
    for number in (1, 2):
        with g.scope(f"stage{number}"):
            y = y + 1.0
    g.output("y", y)
    return g


@contextmanager
def pool() -> Iterator[tuple[Daemon, list[Daemon]]]:
    with daemons(3) as members, head_of(*members) as head:
        with hg.connect(head.url) as session:
            wait_for_devices(session, "cpu0", *DEVICES)
        yield head, members


def commands_on(members: list[Daemon]) -> int:
    """How many commands the head has sent to these members."""
    found = 0
    for one in members:
        with heliograph.admin.connect(one.url) as admin:
            found += sum(session.commands for session in admin.sessions())
    return found


def test_runs_that_wait_for_a_lost_member_fail_together_and_send_nothing_to_the_others() -> None:
    with pool() as (head, members), hg.connect(head.url) as session:
        plan = session.compile(three_stages(), DEVICES, pins=PINS)
        x = session.put(SQUARE, "cpu0")
        waiting = [plan.submit(x=x) for _ in range(RUNS)]
        others = [members[0], members[2]]
        before = commands_on(others)
        members[1].kill()
        for run in waiting:
            with pytest.raises(hg.MemberLostError, match="m1 at"):
                run.result(timeout=SECONDS)
        assert commands_on(others) - before < FEW
        plan.free()


def test_asyncio_gets_the_failures_of_all_waiting_runs_together_too() -> None:
    async def lose(head: str, member: Daemon, others: list[Daemon]) -> tuple[list[object], int]:
        async with hg.aio.connect(head) as session:
            plan = await session.compile(three_stages(), DEVICES, pins=PINS)
            x = await session.put(SQUARE, "cpu0")
            waiting = [plan.submit(x=x) for _ in range(RUNS)]
            before = await asyncio.to_thread(commands_on, others)
            await asyncio.to_thread(member.kill)
            results = (run.result(timeout=SECONDS) for run in waiting)
            found = await asyncio.gather(*results, return_exceptions=True)
            after = await asyncio.to_thread(commands_on, others)
            plan.free()
            return list(found), after - before

    with pool() as (head, members):
        found, sent = asyncio.run(lose(head.url, members[1], [members[0], members[2]]))
    assert [type(one) for one in found] == [hg.MemberLostError] * RUNS
    assert sent < FEW
