"""Sessions at another daemon, or at one that was restarted, go by its sockets and memory again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon_threads import ThreadDaemon, thread_daemon
from direct_clients import bulk_calls
from moving_programs import LARGE
from surviving import ONE, TRANSPORTS, counting
from surviving_daemons import SurvivingDaemon

import heliograph as hg
from heliograph.transport import handshake

NEAR = ("direct", "unix socket")


@pytest.fixture(params=NEAR)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[ThreadDaemon, ThreadDaemon]]:
    """Two daemons with direct connections, or with what daemons share with clients of their host."""
    options = TRANSPORTS[request.param]
    with thread_daemon(**options) as one, thread_daemon(**options) as other:
        yield one, other


def has_direct_connections(daemon: ThreadDaemon) -> int:
    """The offers of direct connections that hold."""
    assert daemon._daemon is not None
    return len(daemon._daemon._direct._offered)


def test_after_a_move_commands_and_tensors_go_as_they_went_before(
    pair: tuple[ThreadDaemon, ThreadDaemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    with hg.connect(pair[0].url, progress=None) as session:
        calls, is_shared = bulk_calls(monkeypatch), session.shared_memory
        plan, tensor = session.compile(counting()), session.put(LARGE)
        for number in range(1, 5):
            session.move(pair[number % 2].url)
            assert session.command_socket, session.why_no_command_socket
            assert session.shared_memory == is_shared
            assert plan.run(step=ONE)["after"].item() == number
            tensor.set(number * LARGE)
            assert session.put(tensor.get()).get().tobytes() == (number * LARGE).tobytes()
            assert sum(map(has_direct_connections, pair)) == (0 if is_shared else 1)
    assert not calls
    assert not sum(map(has_direct_connections, pair))


def test_an_asyncio_session_does_so_too(
    pair: tuple[ThreadDaemon, ThreadDaemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def program() -> None:
        async with hg.aio.connect(pair[0].url, progress=None) as session:
            calls, is_shared = bulk_calls(monkeypatch), session.shared_memory
            plan, tensor = await session.compile(counting()), await session.put(LARGE)
            for number in range(1, 4):
                await session.move(pair[number % 2].url)
                assert session.command_socket, session.why_no_command_socket
                assert session.shared_memory == is_shared
                assert (await plan.run(step=ONE))["after"].item() == number
                await tensor.set(number * LARGE)
                assert (await tensor.get()).tobytes() == (number * LARGE).tobytes()
            assert not calls

    asyncio.run(program())


@pytest.mark.parametrize("transport", NEAR)
def test_a_daemon_may_offer_more_or_less_than_the_one_before(transport: str) -> None:
    with (
        thread_daemon() as far,
        thread_daemon(**TRANSPORTS[transport]) as near,
        hg.connect(far.url, progress=None) as session,
    ):
        tensor = session.put(LARGE)
        assert not session.command_socket
        session.move(near.url)
        assert session.command_socket, session.why_no_command_socket
        assert tensor.get().tobytes() == LARGE.tobytes()
        session.move(far.url)
        assert not session.command_socket and not session.shared_memory
        assert "the server turned it off" in session.why_not_shared
        assert tensor.get().tobytes() == LARGE.tobytes()


def test_a_session_that_wants_none_gets_none(pair: tuple[ThreadDaemon, ThreadDaemon]) -> None:
    how: dict[str, Any] = {"shared_memory": False, "direct": False, "progress": None}
    with hg.connect(pair[0].url, **how) as session:
        tensor = session.put(LARGE)
        session.move(pair[1].url)
        assert not session.command_socket and not session.shared_memory
        assert tensor.get().tobytes() == LARGE.tobytes()


def test_a_daemon_that_knows_no_offers_is_used_by_grpc(
    pair: tuple[ThreadDaemon, ThreadDaemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "OFFERS", "/heliograph.v1.SessionService/NotThere")
    with hg.connect(pair[0].url, progress=None) as session:
        tensor = session.put(LARGE)
        session.move(pair[1].url)
        assert not session.command_socket and not session.shared_memory
        assert tensor.get().tobytes() == LARGE.tobytes()


def test_a_durable_session_has_a_command_socket_after_a_restart(tmp_path: Path) -> None:
    with SurvivingDaemon(tmp_path / "state") as daemon, daemon.connect() as session:
        plan = session.compile(counting())
        for number in range(1, 4):
            assert plan.run(step=ONE)["after"].item() == number
            assert session.command_socket, session.why_no_command_socket
            daemon.restart()
        session.synchronize(timeout=60)
        assert session.command_socket, session.why_no_command_socket
