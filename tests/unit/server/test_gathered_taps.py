"""Values of loops on their way to the client: several in one message, and none behind what waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from waiting import until

from heliograph_proto import commands as c
from heliograph_proto.codec.inline_runs import CompletionReader
from heliograph_proto.errors import UnavailableError
from heliograph_server.rpc import completion_writer
from heliograph_server.rpc.completion_writer import GATHER_BYTES, CompletionWriter

SECONDS = 10.0
#: Longer than any test.
NEVER = 1e6


def tap(step: int, size_bytes: int = 4, *, gather_ms: int | None = 0) -> c.CompletionBatch:
    """The value of an output after a step."""
    value = c.TapPiece(1, 0, 0, bytes(size_bytes), True, step, 0, gather_ms)
    return c.CompletionBatch(0, taps=(value,))


def written(scenario: Callable[[CompletionWriter], Awaitable[None]]) -> list[list[int]]:
    """The steps of the values in each message, of a stream that ends with an error."""

    async def write() -> list[list[int]]:
        found, reader = [], CompletionReader()
        outbox = CompletionWriter(asyncio.get_running_loop())
        task = asyncio.ensure_future(scenario(outbox))
        async with asyncio.timeout(SECONDS):
            while (message := await outbox.take()) is not None:
                found.append([one.step for one in reader.read(message).taps])
            await task
        return found

    return asyncio.run(write())


async def put_each_in_a_turn(outbox: CompletionWriter, *batches: c.CompletionBatch) -> None:
    """Put batches with time to write between any two."""
    for batch in batches:
        outbox.put(batch)
        for _ in range(10):
            await asyncio.sleep(0)


def test_the_first_value_goes_at_once_and_those_after_it_together() -> None:
    async def scenario(outbox: CompletionWriter) -> None:
        await put_each_in_a_turn(outbox, *map(tap, range(5)))
        await asyncio.to_thread(until, lambda: not outbox.unwritten_bytes)
        outbox.end(UnavailableError("the end"))

    first, *rest = written(scenario)
    assert first == [0] and [step for steps in rest for step in steps] == [1, 2, 3, 4]
    assert len(rest) < 4


@pytest.mark.parametrize(
    "urgent",
    [
        c.CompletionBatch(1, (c.Completion(1),)),
        tap(2, gather_ms=None),
        tap(2, GATHER_BYTES),
    ],
    ids=["a-completion", "a-value-that-somebody-waits-for", "many-bytes"],
)
def test_values_that_gather_hold_nothing_up(
    monkeypatch: pytest.MonkeyPatch, urgent: c.CompletionBatch
) -> None:
    monkeypatch.setattr(completion_writer, "GATHER_SECONDS", NEVER)

    async def scenario(outbox: CompletionWriter) -> None:
        await put_each_in_a_turn(outbox, tap(0), tap(1), urgent, tap(3))
        outbox.end(UnavailableError("the end"))

    own = [one.step for one in urgent.taps]
    assert written(scenario) == [[0], [1, *own], [3]]


async def after_a_turn(outbox: CompletionWriter, steps: int, gather_ms: int) -> None:
    """Put values of so many steps, and wait until all are written."""
    await put_each_in_a_turn(outbox, *(tap(step, gather_ms=gather_ms) for step in range(steps)))
    await asyncio.to_thread(until, lambda: not outbox.unwritten_bytes)
    outbox.end(UnavailableError("the end"))


def test_in_a_time_that_the_client_allows_the_first_value_gathers_too() -> None:
    assert written(lambda outbox: after_a_turn(outbox, 5, 200)) == [[0, 1, 2, 3, 4]]


def test_a_completion_takes_along_what_gathers_for_long() -> None:
    async def scenario(outbox: CompletionWriter) -> None:
        done = c.CompletionBatch(1, (c.Completion(1),))
        await put_each_in_a_turn(outbox, tap(0, gather_ms=10**9), tap(1, gather_ms=10**9), done)
        outbox.end(UnavailableError("the end"))

    assert written(scenario) == [[0, 1]]


def test_a_value_that_may_wait_for_less_ends_a_longer_time() -> None:
    async def scenario(outbox: CompletionWriter) -> None:
        await put_each_in_a_turn(outbox, tap(0, gather_ms=10**9), tap(1))
        outbox.end(UnavailableError("the end"))

    assert written(scenario) == [[0, 1]]
