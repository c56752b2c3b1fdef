"""The work of users with the asyncio API. Each program checks every answer, bit by bit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TypeAlias

import numpy as np

import heliograph as hg
from soaking.programs import (
    LARGE_BYTES,
    SECONDS,
    check,
    expected,
    product_graph,
    step_graph,
    total_graph,
    whole,
)

Connect: TypeAlias = Callable[[], Awaitable[hg.aio.Session]]
Program: TypeAlias = Callable[[hg.aio.Session, random.Random, Connect], Awaitable[None]]


async def run(session: hg.aio.Session, chance: random.Random, connect: Connect) -> None:
    weight = whole(chance, 16, 8 * chance.randint(1, 4))
    plan = await session.compile(product_graph(weight), timeout=SECONDS)
    given = [whole(chance, 4, 16) for _ in range(16)]
    found = await asyncio.gather(*(plan.run(x=x, timeout=SECONDS) for x in given))
    for x, one in zip(given, found, strict=True):
        check(one["y"], x @ weight * np.float32(2) + np.float32(1))
    plan.free()


async def loop(session: hg.aio.Session, chance: random.Random, connect: Connect) -> None:
    x, steps = whole(chance, 4, 8), chance.randint(5, 40)
    plan = await session.compile(step_graph(8), timeout=SECONDS)
    looping = plan.loop(x=x, steps=steps, carry={"next": "x"}, taps=["next"], timeout=SECONDS)
    async for tap in looping.taps(SECONDS):
        check(tap.value, x + np.float32(tap.step + 1))
    check((await looping.result(SECONDS))["next"], x + np.float32(steps))
    plan.free()


async def large(session: hg.aio.Session, chance: random.Random, connect: Connect) -> None:
    data = np.frombuffer(chance.randbytes(chance.randint(1, LARGE_BYTES)), np.uint8)
    tensor = await session.put(data, timeout=SECONDS)
    other = session.empty(data.shape, "u8")
    tensor.copy_to(other)
    check(await other.get(timeout=SECONDS), data)
    tensor.free()
    other.free()


async def variables(session: hg.aio.Session, chance: random.Random, connect: Connect) -> None:
    # Tasks share the resident session, and with it its variables.
    async with await connect() as other:
        plan = await other.compile(total_graph(), timeout=SECONDS)
        for number in range(10):
            found = await plan.run(x=np.ones(8, np.float32), timeout=SECONDS)
            check(found["total"], np.full(8, number + 1, np.float32))


async def cancelling(session: hg.aio.Session, chance: random.Random, connect: Connect) -> None:
    """Cancel the task that waits for an endless loop."""
    plan = await session.compile(step_graph(4), timeout=SECONDS)
    x = np.zeros((4, 4), np.float32)
    looping = plan.loop(x=x, steps=10**9, carry={"next": "x"}, timeout=SECONDS)
    waiting = asyncio.ensure_future(looping.result(SECONDS))
    await asyncio.sleep(0)
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    looping.cancel()
    with expected(hg.CancelledError):
        await looping.result(SECONDS)
    plan.free()


async def sessions(session: hg.aio.Session, chance: random.Random, connect: Connect) -> None:
    async def one(number: int) -> None:
        async with await connect() as other:
            tensor = await other.put(np.arange(number), timeout=SECONDS)
            check(await tensor.get(timeout=SECONDS), np.arange(number))

    # A failure of one leaves the others to end by themselves.
    found = await asyncio.gather(*map(one, (3, 4, 5)), return_exceptions=True)
    for error in found:
        if error is not None:
            raise error


async def facts(session: hg.aio.Session, chance: random.Random, connect: Connect) -> None:
    graph = product_graph(whole(chance, 8, 8))
    await session.estimate(graph, timeout=SECONDS)
    plan = await session.compile(graph, timeout=SECONDS)
    await plan.explain(SECONDS)
    plan.free()
    await session.devices[0].memory(SECONDS)
    await session.server_facts(SECONDS)
    async with session.log("warning"):
        await session.synchronize(SECONDS)


PROGRAMS: Mapping[str, Program] = {
    one.__name__: one for one in (run, loop, large, variables, cancelling, sessions, facts)
}
