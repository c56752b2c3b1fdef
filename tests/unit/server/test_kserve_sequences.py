"""Sequences of a model begin and end without each other, and none begins on a model that has ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
import pytest

from heliograph_proto.errors import DeadlineExceededError, InvalidInputError, UnavailableError
from heliograph_server.gateways.kserve.requests import InferOptions
from heliograph_server.gateways.kserve.sequences import Sequences
from heliograph_server.gateways.kserve.statistics import ModelStatistics

SECONDS = 30.0


def on_a_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Run a test on an event loop of its own, in bounded time."""

    async def bounded() -> None:
        async with asyncio.timeout(SECONDS):
            await test()

    def run() -> None:
        asyncio.run(bounded())

    return run


class Opened:
    """A session that counts its requests."""

    is_lost = False

    def __init__(self) -> None:
        self.count = 0
        self.closed = threading.Event()

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        self.count += 1
        return {"y": np.array([self.count])}

    def close(self) -> None:
        self.closed.set()


class Models:
    """Opens sessions, of which each waits until it may."""

    def __init__(self, most: int = 4) -> None:
        self.may_open = threading.Semaphore(0)
        self.opened: list[Opened] = []
        self.begun = asyncio.Semaphore(0)
        self._loop = asyncio.get_running_loop()
        open_model: Any = self._open
        self.sequences = Sequences("m", open_model, ModelStatistics(), most, idle_seconds=3600.0)

    def _open(self) -> Opened:
        self._loop.call_soon_threadsafe(self.begun.release)
        assert self.may_open.acquire(timeout=SECONDS)
        self.opened.append(Opened())
        return self.opened[-1]

    async def send(self, sequence: int, *, seconds: float = SECONDS, **options: bool) -> int:
        """Send a request, and return how many the sequence has had."""
        found = await self.sequences.infer("a", {}, InferOptions(0, seconds, sequence, **options))
        return int(found["y"][0])


@on_a_loop
async def test_a_sequence_that_begins_holds_no_other_up() -> None:
    models = Models()
    models.may_open.release()
    assert await models.send(1, starts=True) == 1
    await models.begun.acquire()
    slow = [asyncio.create_task(models.send(2, starts=number == 0)) for number in range(4)]
    await models.begun.acquire()
    assert [await models.send(1), await models.send(1, ends=True)] == [2, 3]
    assert models.opened[0].closed.is_set()
    models.may_open.release()
    assert await asyncio.gather(*slow) == [1, 2, 3, 4], "they keep their order"
    await models.sequences.close()


@on_a_loop
async def test_a_sequence_may_end_and_begin_anew_in_one_go() -> None:
    models = Models(most=1)
    for _ in range(2):
        models.may_open.release()
    wishes: list[dict[str, bool]] = [{"starts": True}, {}, {"ends": True}, {"starts": True}, {}]
    found = await asyncio.gather(*(models.send(1, **wish) for wish in wishes))
    assert found == [1, 2, 3, 1, 2]
    await models.sequences.close()
    assert all(one.closed.is_set() for one in models.opened)


@on_a_loop
async def test_no_sequence_begins_on_a_model_that_has_ended() -> None:
    models = Models()
    await models.sequences.close()
    with pytest.raises(UnavailableError, match="is being unloaded"):
        await models.send(1, starts=True)
    with pytest.raises(InvalidInputError, match="has not begun"):
        await models.send(1)
    assert not models.opened


@on_a_loop
async def test_the_time_of_a_request_bounds_its_wait_for_the_session() -> None:
    models = Models()
    with pytest.raises(DeadlineExceededError, match="did not begin within"):
        await models.send(1, seconds=0.01, starts=True)
    models.may_open.release()
    # The session that no one waits for is ended, and the sequence can begin.
    models.may_open.release()
    assert await models.send(1, starts=True) == 1
    await models.sequences.close()
    for one in models.opened:
        assert await asyncio.to_thread(one.closed.wait, SECONDS)
