"""Turns of compiles: who is next, and what a compile does for others meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from tenant_hosts import chain

from heliograph_proto.codec import decode_graph, graph_bytes
from heliograph_proto.errors import CancelledError
from heliograph_proto.graph import validate
from heliograph_proto.pace import pausing
from heliograph_proto.sessions import Limits
from heliograph_server.compile.turns import SMALL_BYTES, CompileTurns, Pace

SECONDS = 10.0
LARGE = SMALL_BYTES + 1


class Tenant:
    """The owner of a share."""

    weight = 1.0

    def had(self, seconds: float) -> None:
        pass


@pytest.fixture
def turns() -> Iterator[CompileTurns]:
    made = CompileTurns()
    yield made
    made.close()


class Blocked:
    """A large compile that goes on until it is told to end."""

    def __init__(self, turns: CompileTurns, tenant: Tenant) -> None:
        self._begun, self._over = threading.Event(), threading.Event()
        self.turn = turns.submit(tenant, LARGE, self._wait)
        assert self._begun.wait(SECONDS)

    def _wait(self) -> bool:
        self._begun.set()
        return self._over.wait(SECONDS)

    def end(self) -> None:
        self._over.set()
        assert self.turn.future.result(SECONDS)


def test_a_small_compile_does_not_wait_behind_a_large_one(turns: CompileTurns) -> None:
    blocked = Blocked(turns, Tenant())
    assert turns.submit(Tenant(), SMALL_BYTES, lambda: "small").future.result(SECONDS) == "small"
    blocked.end()


def test_small_compiles_do_not_wait_while_a_thread_of_theirs_could_begin(turns: CompileTurns) -> None:
    turns.submit(Tenant(), SMALL_BYTES, lambda: None).future.result(SECONDS)
    both = threading.Barrier(2)
    waiting = [turns.submit(Tenant(), SMALL_BYTES, lambda: both.wait(SECONDS / 2)) for _ in range(2)]
    assert sorted(one.future.result(SECONDS) for one in waiting) == [0, 1]


def test_a_tenant_with_one_compile_does_not_wait_for_all_of_another(turns: CompileTurns) -> None:
    greedy, modest, order = Tenant(), Tenant(), list[str]()
    blocked = Blocked(turns, greedy)
    waiting = [turns.submit(greedy, LARGE, lambda: order.append("greedy")) for _ in range(5)]
    waiting.append(turns.submit(modest, LARGE, lambda: order.append("modest")))
    blocked.end()
    for one in waiting:
        one.future.result(SECONDS)
    assert order == ["modest", *["greedy"] * 5]


def test_a_tenant_that_comes_back_has_saved_up_nothing(turns: CompileTurns) -> None:
    first, second, order = Tenant(), Tenant(), list[str]()
    turns.submit(second, LARGE, lambda: None).future.result(SECONDS)
    blocked = Blocked(turns, first)
    waiting = [turns.submit(second, LARGE, lambda: order.append("second")) for _ in range(2)]
    waiting.append(turns.submit(first, LARGE, lambda: order.append("first")))
    blocked.end()
    for one in waiting:
        one.future.result(SECONDS)
    assert order[0] == "second" and sorted(order) == ["first", "second", "second"]


def test_a_compile_that_nobody_waits_for_does_not_begin(turns: CompileTurns) -> None:
    blocked, begun = Blocked(turns, Tenant()), list[int]()
    gone = turns.submit(Tenant(), LARGE, lambda: begun.append(1))
    gone.cancel()
    blocked.end()
    assert turns.submit(Tenant(), LARGE, lambda: begun).future.result(SECONDS) == []


def test_a_large_compile_ends_at_a_yield_point_once_its_client_is_gone(turns: CompileTurns) -> None:
    graph, begun = chain(100), threading.Event()

    def validate_for_ever() -> None:
        begun.set()
        while True:
            validate(graph, Limits())

    turn = turns.submit(Tenant(), LARGE, validate_for_ever)
    assert begun.wait(SECONDS)
    turn.cancel()
    with pytest.raises(CancelledError):
        turn.future.result(SECONDS)


def test_an_error_of_a_compile_is_that_of_its_call(turns: CompileTurns) -> None:
    for size_bytes in (1, LARGE):
        with pytest.raises(ZeroDivisionError):
            turns.submit(Tenant(), size_bytes, lambda: 1 // 0).future.result(SECONDS)


def test_a_server_that_closes_cancels_what_waits() -> None:
    turns = CompileTurns()
    blocked = Blocked(turns, Tenant())
    waiting = turns.submit(Tenant(), LARGE, lambda: None)
    closing = threading.Thread(target=turns.close)
    closing.start()
    blocked.end()
    closing.join(SECONDS)
    assert waiting.future.cancelled()
    with pytest.raises(CancelledError):
        turns.submit(Tenant(), 1, lambda: None).future.result(SECONDS)


def test_what_is_computed_at_a_pace_is_the_same() -> None:
    graph = chain(1000)
    with pausing(Pace(lambda: None).give_way):
        assert validate(decode_graph(graph_bytes(graph), Limits()), Limits()) == validate(graph, Limits())
