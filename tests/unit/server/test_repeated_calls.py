"""Calls that a client repeats after a break: computed once, or the answer again."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from copy import copy
from typing import Any

import pytest

from heliograph_proto.errors import HandleExistsError, LimitExceededError
from heliograph_proto.v1 import plan_pb2
from heliograph_server.rpc.leases import repeated_calls
from heliograph_server.rpc.leases.repeated_calls import RepeatedCalls


class LeasedSession:
    """As much of a session as the calls look at."""

    lease_seconds = 60.0
    is_detached = False
    closed = None


REQUEST = plan_pb2.ReserveRequest(session=bytes(16), reservation=1), None
OTHER = plan_pb2.ReserveRequest(session=bytes(16), reservation=2), None


def answer_of(size_bytes: int) -> plan_pb2.ReserveResponse:
    return plan_pb2.ReserveResponse(devices=[plan_pb2.ReservedShare(name="c" * size_bytes)])


async def twice_while_others_come(others: int) -> list[str]:
    """Repeat a call that is being computed after as many others; return what was computed."""
    calls, session, computed = RepeatedCalls(), LeasedSession(), list[str]()
    began, may_end = asyncio.Event(), asyncio.Event()

    async def slow() -> plan_pb2.ReserveResponse:
        computed.append("slow")
        began.set()
        await may_end.wait()
        return answer_of(4)

    async def quick() -> plan_pb2.ReserveResponse:
        return answer_of(5)

    def once(number: int, compute: Any) -> Any:
        return calls.once(session, ("Reserve", number), REQUEST, compute)  # type: ignore[arg-type]

    first = asyncio.create_task(once(0, slow))
    for number in range(1, others + 1):
        assert await once(number, quick) == answer_of(5)
    second = asyncio.create_task(once(0, slow))
    await began.wait()
    may_end.set()
    assert await asyncio.gather(first, second) == [answer_of(4)] * 2
    return computed


def test_a_call_that_is_being_computed_is_found_again_whatever_came_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repeated_calls, "MOST_ANSWERS", 2)
    assert asyncio.run(twice_while_others_come(5)) == ["slow"]


def test_another_request_with_the_same_handle_is_refused() -> None:
    async def scenario() -> None:
        calls, session = RepeatedCalls(), LeasedSession()

        async def answer() -> plan_pb2.ReserveResponse:
            return answer_of(1)

        key = "Reserve", 1
        assert await calls.once(session, key, REQUEST, answer) == answer_of(1)  # type: ignore[arg-type]
        with pytest.raises(HandleExistsError, match="another request"):
            await calls.once(session, key, OTHER, answer)  # type: ignore[arg-type]

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [LimitExceededError("no room"), asyncio.CancelledError()])
def test_a_session_whose_calls_failed_is_gone_with_its_last_user(error: BaseException) -> None:
    async def scenario() -> Callable[[], object]:
        session = LeasedSession()

        async def fail() -> plan_pb2.ReserveResponse:
            here = session
            raise copy(error) if here.lease_seconds else error

        try:
            await calls.once(session, ("Reserve", 1), REQUEST, fail)  # type: ignore[arg-type]
        except type(error) as raised:
            # As the daemon does with all errors of calls.
            raised.__traceback__ = None
        return weakref.ref(session)

    calls = RepeatedCalls()
    found = asyncio.run(scenario())
    gc.collect()
    assert found() is None


def test_answers_beyond_a_bound_of_bytes_are_computed_again_and_the_newest_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repeated_calls, "MOST_ANSWER_BYTES", 250)

    async def scenario() -> list[int]:
        calls, session, computed = RepeatedCalls(), LeasedSession(), list[int]()

        async def once(number: int, size_bytes: int) -> None:
            async def compute() -> plan_pb2.ReserveResponse:
                computed.append(number)
                return answer_of(size_bytes)

            answer = await calls.once(session, ("Reserve", number), REQUEST, compute)  # type: ignore[arg-type]
            assert answer == answer_of(size_bytes)

        for number in (1, 2, 3, 3, 2):
            await once(number, 100)
        await once(1, 100)
        for _ in range(2):
            await once(4, 1000)
        return computed

    assert asyncio.run(scenario()) == [1, 2, 3, 1, 4]
