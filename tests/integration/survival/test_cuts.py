"""Sessions that go on after their connection was cut: nothing is lost, and nothing done twice."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest
from cutting import RandomCuts
from surviving import ONE, Site, counting, doubled, doubling, four
from waiting import until

import heliograph as hg
from heliograph.core.connection_state import ConnectionState
from heliograph.transport import blocking_grpc

SECONDS = 30.0
MIB = 2**20


@pytest.mark.parametrize("reset", [False, True], ids=["cut", "reset"])
def test_a_session_goes_on_after_a_cut(site: Site, reset: bool) -> None:
    with site.connect() as session:
        plan, broke = doubling(session), list[hg.HeliographError]()
        session.on_disconnect(broke.append)
        for value in range(5):
            site.cut(reset=reset)
            assert (plan.run(x=four(value))["y"] == 2 * value).all()
        assert broke and all(isinstance(one, hg.UnavailableError) for one in broke)
        assert session.connection is hg.ConnectionState.CONNECTED
        assert site.sessions == 1
    assert session.connection is hg.ConnectionState.LOST
    assert site.sessions == 0


@pytest.mark.parametrize("reset", [False, True], ids=["cut", "reset"])
def test_a_session_that_ends_behind_a_cut_does_not_stay_for_its_lease(site: Site, reset: bool) -> None:
    for _ in range(5):
        with site.connect() as session:
            doubling(session)
            site.cut(reset=reset)
        assert site.sessions == 0
    with site.connect() as session:
        doubling(session)


def test_an_asyncio_session_that_ends_behind_a_cut_does_not_stay_for_its_lease(site: Site) -> None:
    async def scenario() -> None:
        for number in range(10):
            async with hg.aio.connect(site.url, progress=None) as session:
                await session.compile(doubled())
                site.cut(reset=number % 2 == 0)
            assert site.sessions == 0
        # Calls that were cut end on a loop that goes on for a moment.
        async with hg.aio.connect(site.url, progress=None) as session:
            await session.compile(doubled())

    asyncio.run(scenario())


def test_each_run_is_done_once_however_often_the_connection_is_cut(site: Site) -> None:
    with site.connect() as session:
        plan = session.compile(counting())
        with RandomCuts(site.grpc, 1, 0.03), RandomCuts(site.direct, 2, 0.04):
            for number in range(1, 201):
                assert plan.run(step=ONE)["after"] == number
            futures = [plan.submit(step=ONE) for _ in range(400)]
            assert [one.result()["after"].item() for one in futures] == list(range(201, 601))


def test_results_far_beyond_what_is_kept_come_while_many_more_are_asked_for(site: Site) -> None:
    g = hg.Graph()
    g.output("y", hg.broadcast_to(g.input("x", (1,), "f32"), (60_000,)))
    with site.connect() as session:
        plan = session.compile(g)
        futures = [plan.submit(x=np.full(1, value, np.float32)) for value in range(400)]
        for value, future in enumerate(futures):
            assert future.result(SECONDS)["y"][-1] == value


def test_runs_and_tensors_that_were_sent_before_a_cut_are_there_afterwards(site: Site) -> None:
    with site.connect() as session:
        plan = doubling(session)
        tensor = session.put(four(3))
        made = plan.submit(x=tensor, fetch=False)
        site.cut()
        kept = made.result()["y"]
        site.cut()
        assert (kept.get() == 6).all()
        site.cut()
        assert (plan.run(x=kept)["y"] == 12).all()


def test_large_tensors_go_on_at_their_byte(site: Site) -> None:
    data = np.arange(12 * MIB, dtype=np.float32)
    with site.connect() as session:
        tensor = session.empty(data.shape, "f32")
        for number, size in enumerate((5 * MIB, 20 * MIB, 30 * MIB), 1):
            site.grpc.cut_after(size)
            site.direct.cut_after(size)
            tensor.set(data * number)
            site.grpc.cut_after(size)
            site.direct.cut_after(size)
            assert np.array_equal(tensor.get(), data * number)
    assert site.daemon.host.statistics().sessions == 0


def test_weights_go_on_at_their_byte(site: Site) -> None:
    weights = np.arange(6 * MIB, dtype=np.float32).reshape(6, MIB)
    g = hg.Graph()
    g.output("y", g.weight("w", weights).sum(axis=1) + g.input("x", (6,), "f32"))
    with site.connect() as session:
        site.grpc.cut_after(9 * MIB)
        site.direct.cut_after(9 * MIB)
        plan = session.compile(g)
        found = plan.run(x=np.zeros(6, np.float32))["y"]
    assert np.allclose(found, weights.sum(axis=1), rtol=1e-5)


def test_a_call_under_way_is_made_again(site: Site) -> None:
    with site.connect() as session, RandomCuts(site.grpc, 5, 0.01):
        for number in range(20):
            g = hg.Graph()
            g.output("y", g.input("x", (4,), "f32") * float(number))
            plan = session.compile(g)
            assert (plan.run(x=four(1))["y"] == number).all()
        assert session.estimate(doubled()) is not None


def test_a_loop_streams_each_value_once_and_in_order(site: Site) -> None:
    g = hg.Graph()
    x = g.input("x", (2,), "f32")
    g.output("y", x * 0.999 + 1.0)
    steps = 3000
    with site.connect() as session:
        plan = session.compile(g)
        expected = np.zeros(2, np.float32)
        with RandomCuts(site.grpc, 3, 0.02), RandomCuts(site.direct, 4, 0.02):
            loop = plan.loop(x=np.zeros(2, np.float32), steps=steps, carry={"y": "x"}, taps="y")
            seen = [(one.step, one.value.copy()) for one in loop.taps()]
        assert [step for step, _ in seen] == list(range(steps))
        for _, value in seen:
            expected = expected * np.float32(0.999) + np.float32(1.0)
            assert value.tobytes() == expected.tobytes()
        assert loop.result()["y"].tobytes() == expected.tobytes()


def test_asyncio_sessions_go_on_too(site: Site) -> None:
    data = np.arange(6 * MIB, dtype=np.float32)

    async def scenario() -> None:
        async with hg.aio.connect(site.url) as session:
            plan, large = await session.compile(counting()), session.empty(data.shape, "f32")
            with RandomCuts(site.grpc, 1, 0.03), RandomCuts(site.direct, 2, 0.04):
                for number in range(1, 101):
                    assert (await plan.run(step=ONE))["after"] == number
                futures = [plan.submit(step=ONE) for _ in range(200)]
                found = [(await one)["after"].item() for one in futures]
                assert found == list(range(101, 301))
            site.grpc.cut_after(9 * MIB)
            site.direct.cut_after(9 * MIB)
            await large.set(data)
            site.grpc.cut_after(9 * MIB)
            site.direct.cut_after(9 * MIB)
            assert np.array_equal(await large.get(), data)

    asyncio.run(scenario())
    assert site.sessions == 0


@pytest.mark.parametrize("transport", ["unix socket", "direct"], indirect=True)
def test_a_command_socket_that_ends_alone_is_replaced(site: Site) -> None:
    with site.connect() as session:
        plan = doubling(session)
        for value in range(3):
            assert session.command_socket
            shell: Any = session._shell
            shell._socket._connection.shutdown(socket.SHUT_RDWR)
            assert (plan.run(x=four(value))["y"] == 2 * value).all()


@pytest.mark.parametrize("transport", ["grpc"], indirect=True)
def test_calls_keep_their_own_time_while_there_is_no_connection(site: Site) -> None:
    with site.connect() as session:
        plan = session.compile(counting())
        site.grpc.refuse()
        site.cut()
        with pytest.raises(hg.DeadlineExceededError):
            plan.run(step=ONE, timeout=0.3)
        with pytest.raises(hg.DeadlineExceededError):
            session.compile(doubled(), timeout=0.3)
        assert session.connection in (ConnectionState.DISCONNECTED, ConnectionState.ATTACHING)
        later = plan.submit(step=ONE)
        site.grpc.go_on()
        # The run whose time was over was never sent, or cancelled before it began.
        assert later.result(SECONDS)["after"] in (1, 2)


@pytest.mark.parametrize("transport", ["grpc"], indirect=True)
def test_closing_without_a_connection_is_prompt(site: Site) -> None:
    session = site.connect()
    plan = doubling(session)
    site.grpc.refuse()
    site.cut()
    waiting = plan.submit(x=four(1))
    start = time.monotonic()
    session.close()
    assert time.monotonic() - start < SECONDS / 3
    with pytest.raises(hg.SessionClosedError):
        waiting.result()

    async def scenario() -> None:
        site.grpc.go_on()
        session = await hg.aio.connect(site.url)
        site.grpc.refuse()
        site.cut()
        await asyncio.sleep(0.05)
        async with asyncio.timeout(SECONDS / 3):
            await session.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("transport", ["grpc"], indirect=True)
def test_ctrl_c_ends_a_wait_without_a_connection(site: Site) -> None:
    with site.connect() as session:
        plan = session.compile(counting())
        site.grpc.refuse()
        site.cut()
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            plan.run(step=ONE)
        timer.join()
        site.grpc.go_on()
        assert plan.run(step=ONE, timeout=SECONDS)["after"] in (1, 2)


@pytest.mark.parametrize("transport", ["grpc"], indirect=True)
def test_a_stalled_connection_is_left_for_another_one(site: Site) -> None:
    with site.connect(silence_seconds=0.5) as session:
        plan = session.compile(counting())
        site.grpc.stall()
        waiting = plan.submit(step=ONE)
        until(lambda: session.connection is not ConnectionState.CONNECTED)
        site.cut()
        site.grpc.go_on()
        assert waiting.result(SECONDS)["after"] == 1
        assert plan.run(step=ONE)["after"] == 2


@pytest.mark.parametrize("transport", ["grpc"], indirect=True)
def test_log_lines_come_again_after_a_cut(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "heliograph_server")
    with site.connect() as session, session.log("info") as lines:
        site.cut()
        doubling(session)
        # Lines of the time without a connection are lost, so there is one again and again.
        is_over = threading.Event()

        def compile_often() -> None:
            while not is_over.wait(0.05):
                doubling(session)

        compiling = threading.Thread(target=compile_often)
        compiling.start()
        try:
            assert next(one for one in lines if "compiled" in one.message).level == "info"
        finally:
            is_over.set()
            compiling.join()


def test_a_defect_while_connecting_again_ends_the_session_with_its_reason(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    with site.connect() as session:
        plan = doubling(session)
        monkeypatch.setattr(blocking_grpc, "open_command_socket", broken)
        site.cut()
        with pytest.raises(hg.InternalError, match="can't start new thread"):
            while True:
                # A run may be done before the break is noticed.
                plan.run(x=four(1.0), timeout=SECONDS)
    assert session.connection is hg.ConnectionState.LOST
