"""Sessions that go to another daemon: the program goes on there, with the same bits, or stays whole."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from access_daemons import Tokens, daemon_with_tokens, works
from cutting import cut_proxy
from daemon_threads import ThreadDaemon, thread_daemon
from forked_daemons import running_daemon
from moving_programs import LARGE, STEPS, InThread, batches, calm, training
from surviving import ONE, TRANSPORTS, counting
from surviving_daemons import SurvivingDaemon
from waiting import until

import heliograph as hg
from heliograph_proto.sessions import Limits
from heliograph_proto.v1 import peer_pb2
from heliograph_server.resources.principals import Right

LAST = peer_pb2.TakeSessionRequest(is_last=True)


@pytest.fixture(scope="module")
def urls() -> Iterator[tuple[str, str]]:
    """Two daemons as they are by default."""
    with running_daemon() as one, running_daemon() as other:
        yield one, other


@pytest.fixture
def daemon() -> Iterator[ThreadDaemon]:
    with thread_daemon() as made:
        yield made


@pytest.fixture
def pair() -> Iterator[tuple[ThreadDaemon, ThreadDaemon]]:
    """Two daemons of this process."""
    with thread_daemon() as one, thread_daemon() as other:
        yield one, other


def alone(*daemons: ThreadDaemon) -> None:
    """Check that of some daemons one has a session, and its client is there."""
    sessions = [one for daemon in daemons for one in daemon.host.sessions]
    assert len(sessions) == 1 and sessions[0].is_attached and not sessions[0].is_detached


@pytest.mark.parametrize("transport", list(TRANSPORTS))
def test_a_training_loop_goes_on_with_equal_bits_on_every_transport(transport: str) -> None:
    with thread_daemon(**TRANSPORTS[transport]) as one, thread_daemon(**TRANSPORTS[transport]) as other:
        expected = calm(one.url)
        found = []
        with hg.connect(one.url, progress=None) as session:
            plan, tensor = session.compile(training()), session.put(LARGE)
            for number, batch in enumerate(batches()):
                if number in (10, 25):
                    went = session.move(other.url if number == 10 else one.url)
                    assert went.sent_bytes >= LARGE.nbytes and went.size_bytes >= LARGE.nbytes
                    assert tensor.get().tobytes() == LARGE.tobytes()
                found.append(plan.run(**batch)["loss"].tobytes())
            alone(one, other)
    assert found == expected


def test_real_daemons_hand_over_what_an_asyncio_program_has(urls: tuple[str, str]) -> None:
    expected = calm(urls[0])

    async def program() -> list[bytes]:
        found = []
        async with hg.aio.connect(urls[0], progress=None) as session:
            plan = await session.compile(training())
            tensor = await session.put(LARGE)
            for number, batch in enumerate(batches()):
                if number == STEPS // 2:
                    await session.move(urls[1])
                    assert session.address == urls[1]
                found.append((await plan.run(**batch))["loss"].tobytes())
            assert (await tensor.get()).tobytes() == LARGE.tobytes()
        return found

    assert asyncio.run(program()) == expected


def test_handles_made_before_and_after_a_move_live_together(urls: tuple[str, str]) -> None:
    with hg.connect(urls[0], progress=None) as session:
        before = session.put(LARGE)
        view = before[:4]
        session.move(urls[1])
        after = session.put(2 * LARGE)
        before.set(after.get())
        assert view.get().tolist() == [0.0, 2.0, 4.0, 6.0]
        assert works(session)
        plan = session.compile(training())
        assert plan.run(**batches()[0])["loss"].shape == (32,)


def test_work_of_other_threads_goes_on_while_the_session_moves(urls: tuple[str, str]) -> None:
    with hg.connect(urls[0], progress=None) as session:
        plan, tensor = session.compile(counting()), session.put(LARGE)
        counts: list[float] = []

        def count() -> None:
            futures = [plan.submit(step=ONE) for _ in range(8)]
            counts.extend(one.result(60)["after"].item() for one in futures)

        def write() -> None:
            tensor.set(LARGE, timeout=60)
            assert tensor.get(timeout=60).tobytes() == LARGE.tobytes()

        with InThread(count) as counting_on, InThread(write) as writing:
            for number in range(6):
                session.move(urls[(number + 1) % 2])
        assert counting_on.count and writing.count
        assert counts == [float(one + 1) for one in range(len(counts))]


def test_a_durable_session_goes_on_after_a_kill_of_the_daemon_that_took_it(tmp_path: Path) -> None:
    with (
        SurvivingDaemon(tmp_path / "one") as one,
        SurvivingDaemon(tmp_path / "other") as other,
        one.connect() as session,
    ):
        plan = session.compile(counting())
        assert plan.run(step=ONE)["after"].item() == 1
        session.move(other.url)
        assert plan.run(step=ONE)["after"].item() == 2
        other.restart()
        assert plan.run(step=ONE)["after"].item() == 3
        session.snapshot()
        other.restart()
        assert plan.run(step=ONE)["after"].item() == 4


def test_a_session_that_is_there_already_stays_at_once(urls: tuple[str, str]) -> None:
    with hg.connect(urls[0], progress=None) as session:
        session.put(LARGE)
        assert session.move(urls[0]).sent_bytes == 0
        with ThreadPoolExecutor(4) as threads:
            moves = [threads.submit(session.move, urls[1]) for _ in range(4)]
            errors = [one.exception() for one in moves]
        assert any(error is None for error in errors)
        assert all(error is None or "already" in str(error) for error in errors)
        assert session.address == urls[1] and works(session)


# Sessions that stay


def stays(session: hg.Session, plan: hg.Plan, before: float) -> None:
    """Check that a session counts on."""
    assert plan.run(step=ONE, timeout=30)["after"].item() == before + 1


def test_a_daemon_that_is_not_there_gets_nothing(pair: tuple[ThreadDaemon, ThreadDaemon]) -> None:
    with hg.connect(pair[0].url, progress=None) as session:
        plan = session.compile(counting())
        plan.run(step=ONE)
        with pytest.raises(hg.UnavailableError, match="refused"):
            session.move("grpc://127.0.0.1:1")
        stays(session, plan, 1)
        with pytest.raises(hg.InvalidArgumentError, match="cannot move"):
            session.move("local:")
        pair[1].change(lease=0.0)
        with pytest.raises(hg.UnsupportedError, match="no leases"):
            session.move(pair[1].url)
        stays(session, plan, 2)
        assert not pair[1].host.sessions
    with hg.connect("local:") as session, pytest.raises(hg.UnsupportedError, match="within this process"):
        session.move(pair[0].url)
    with (
        hg.connect(pair[0].url, reconnect=False) as session,
        pytest.raises(hg.UnsupportedError, match="reconnect=True"),
    ):
        session.move(pair[1].url)


def test_a_daemon_without_room_or_features_gets_nothing(tmp_path: Path) -> None:
    small = Limits(tensors=10)
    with (
        thread_daemon() as one,
        thread_daemon(small) as other,
        running_daemon("--max-sessions", "1") as full,
        hg.connect(one.url, progress=None) as session,
        hg.connect(full),
    ):
        plan = session.compile(counting())
        plan.run(step=ONE)
        with pytest.raises(hg.LimitExceededError, match="limit tensors is lower"):
            session.move(other.url)
        with pytest.raises(hg.LimitExceededError, match="sessions"):
            session.move(full)
        stays(session, plan, 1)
        assert not other.host.sessions
    with (
        SurvivingDaemon(tmp_path / "state") as kept,
        running_daemon() as forgetful,
        kept.connect() as session,
    ):
        plan = session.compile(counting())
        with pytest.raises(hg.UnsupportedError, match="keeps no state"):
            session.move(forgetful)
        stays(session, plan, 0)


def test_a_daemon_with_other_devices_or_too_little_memory_gets_nothing() -> None:
    with (
        running_daemon("--device", "fake:memory=64MiB") as one,
        running_daemon("--device", "fake:memory=1MiB") as small,
        running_daemon("--device", "cpu:threads=1") as other,
        hg.connect(one, progress=None) as session,
    ):
        tensor = session.put(np.zeros(2**20, np.float32))
        with pytest.raises(hg.OutOfMemoryError):
            session.move(small)
        with pytest.raises(hg.UnknownDeviceError, match="fake0"):
            session.move(other)
        assert not tensor.get().any()


def test_a_loop_under_way_keeps_its_session_where_it_is(pair: tuple[ThreadDaemon, ThreadDaemon]) -> None:
    g = hg.Graph()
    g.output("y", g.input("x", (1,), "i64") + g.constant(np.ones(1, np.int64)))
    with hg.connect(pair[0].url, progress=None) as session:
        plan = session.compile(g)
        loop = plan.loop(x=np.zeros(1, np.int64), steps=10**9, carry={"y": "x"})
        with pytest.raises(hg.DeadlineExceededError, match="commands under way"):
            session.move(pair[1].url, wait_seconds=0.2)
        loop.stop()
        steps = loop.result(30)["y"].item()
        assert steps == loop.steps
        session.move(pair[1].url)
        assert plan.run(x=np.zeros(1, np.int64))["y"].item() == 1


def test_a_mapped_tensor_keeps_its_session_where_it_is() -> None:
    with (
        thread_daemon(shared_memory=True) as one,
        thread_daemon() as other,
        hg.connect(one.url, progress=None, shared_memory=True) as session,
    ):
        tensor = session.empty((4,), "f32", buffer_type="shared")
        array = tensor.map()
        array[:] = 3
        with pytest.raises(hg.UnsupportedError, match="maps memory"):
            session.move(other.url)
        assert session.shared_memory
        array[0] = 4
        assert tensor.get().tolist() == [4.0, 3.0, 3.0, 3.0]
        del array


# Tokens


def test_a_session_goes_only_where_its_token_and_its_daemons_are_known(tmp_path: Path) -> None:
    tokens, strangers = Tokens(tmp_path / "tokens"), Tokens(tmp_path / "strangers")
    mover = tokens.add("mover", (Right.USE, Right.POOL))
    pool_token = tmp_path / "pool"
    pool_token.write_text(tokens.of["head"])
    with (
        daemon_with_tokens(tokens, pool_token=str(pool_token)) as one,
        daemon_with_tokens(tokens) as other,
        daemon_with_tokens(strangers) as strange,
    ):
        with hg.connect(one.url, token=tokens.of["alice"], progress=None) as session:
            with pytest.raises(hg.PermissionDeniedError, match="'pool'"):
                session.move(other.url)
            assert works(session)
        with hg.connect(one.url, token=mover, progress=None) as session:
            with pytest.raises(hg.UnauthenticatedError):
                session.move(strange.url)
            session.move(other.url)
            assert works(session) and session.address == other.url
            # That daemon has no token for the first one.
            with pytest.raises(hg.PermissionDeniedError, match="takes no sessions"):
                session.move(one.url)
            assert works(session)


# Daemons that break the contract


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [b""],
        [b"\xff\xff"],
        [peer_pb2.TakeSessionRequest().SerializeToString()],
        [peer_pb2.TakeSessionRequest(), peer_pb2.TakeSessionRequest(is_last=True)],
        [peer_pb2.TakeSessionRequest(), peer_pb2.TakeSessionRequest(data=b"HGSTATE"), LAST],
        [peer_pb2.TakeSessionRequest(), peer_pb2.TakeSessionRequest(data=bytes(2**21)), LAST],
    ],
)
def test_a_daemon_that_sends_nonsense_leaves_nothing(daemon: ThreadDaemon, messages: list[Any]) -> None:
    sent = [one if isinstance(one, bytes) else one.SerializeToString() for one in messages]
    with grpc.insecure_channel(daemon.url.removeprefix("grpc://")) as channel:
        call: Any = channel.stream_stream("/heliograph.v1.PeerService/TakeSession")(iter(sent), timeout=30)
        with pytest.raises(grpc.RpcError) as refused:
            list(call)
    code = refused.value.code()
    assert code not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED), refused.value.details()
    assert not daemon.host.sessions
    with hg.connect(daemon.url, progress=None) as session:
        assert works(session)


# Cuts


@pytest.mark.parametrize("seed", range(4))
def test_cuts_between_the_daemons_lose_and_double_nothing(
    pair: tuple[ThreadDaemon, ThreadDaemon], seed: int
) -> None:
    chance = random.Random(seed)
    with (
        cut_proxy(pair[0].url) as first,
        cut_proxy(pair[1].url) as second,
        hg.connect(first.url, progress=None) as session,
    ):
        plan, tensor = session.compile(counting()), session.put(LARGE)
        at, moves = 0, 0
        for count in range(1, 13):
            target = (first, second)[1 - at]
            if chance.random() < 0.7:
                target.cut_after(chance.randrange(2 * LARGE.nbytes))
            try:
                session.move(target.url)
            except (hg.UnavailableError, hg.SnapshotFailedError):
                pass
            else:
                at, moves = 1 - at, moves + 1
                assert session.address == target.url
            assert plan.run(step=ONE, timeout=60)["after"].item() == count
            assert tensor.get().tobytes() == LARGE.tobytes()
        assert moves


@pytest.mark.parametrize("seed", range(4))
def test_cuts_between_client_and_daemon_lose_and_double_nothing(
    pair: tuple[ThreadDaemon, ThreadDaemon], seed: int
) -> None:
    chance = random.Random(seed)
    with cut_proxy(pair[0].url) as way:
        for _ in range(6):
            # Also what the one before has left to cut.
            way.cut()
            with hg.connect(way.url, progress=None) as session:
                plan = session.compile(counting())
                assert plan.run(step=ONE)["after"].item() == 1
                way.cut_after(chance.randrange(600))
                try:
                    session.move(pair[1].url)
                except hg.UnavailableError:
                    assert session.address == way.url
                assert plan.run(step=ONE, timeout=60)["after"].item() == 2


# Drains


def drained(daemon: ThreadDaemon | str, target: str, *options: str) -> tuple[int, list[str]]:
    """Run `heliograph drain --move-to`. Return its status and its lines."""
    url = daemon if isinstance(daemon, str) else daemon.url
    command = [sys.executable, "-m", "heliograph", "drain", "--server", url, "--move-to", target, *options]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return found.returncode, found.stdout.splitlines() + found.stderr.splitlines()


def test_a_drained_daemon_sends_its_sessions_away_and_their_programs_go_on(
    pair: tuple[ThreadDaemon, ThreadDaemon],
) -> None:
    one, other = pair
    expected = calm(one.url)
    with (
        hg.connect(one.url, progress=None) as session,
        hg.connect(one.url, reconnect=False) as bound,
        ThreadPoolExecutor(1) as threads,
    ):
        plan = session.compile(training())
        found = [plan.run(**batch)["loss"].tobytes() for batch in batches()[:5]]
        draining = threads.submit(drained, one, other.url, "--stay", "--seconds", "30")
        until(lambda: one.host.is_draining)
        found += [plan.run(**batch)["loss"].tobytes() for batch in batches()[5:20]]
        until(lambda: session.address == other.url)
        found += [plan.run(**batch)["loss"].tobytes() for batch in batches()[20:]]
        assert found == expected
        status, lines = draining.result(60)
        assert status == 0
        words = {line.split(" of ")[0]: line.rpartition("0.1.0 ")[2] for line in lines if "session" in line}
        assert words["session 2"] == "moved"
        assert words["session 3"].startswith("did not move: the session belongs to its connection")
        with pytest.raises(hg.DrainingError):
            bound.put(LARGE)
        alone(other)


def test_an_asyncio_program_follows_a_drained_daemon(pair: tuple[ThreadDaemon, ThreadDaemon]) -> None:
    one, other = pair

    async def program() -> None:
        async with hg.aio.connect(one.url, progress=None) as session:
            plan = await session.compile(counting())
            assert (await plan.run(step=ONE))["after"].item() == 1
            status, _ = await asyncio.to_thread(drained, one, other.url, "--stay", "--seconds", "30")
            assert status == 0 and session.address == other.url
            assert (await plan.run(step=ONE))["after"].item() == 2

    asyncio.run(program())


def test_a_session_whose_client_is_away_is_found_at_the_other_daemon(
    pair: tuple[ThreadDaemon, ThreadDaemon],
) -> None:
    one, other = pair
    with cut_proxy(one.url) as way, hg.connect(way.url, progress=None) as session:
        plan = session.compile(counting())
        assert plan.run(step=ONE)["after"].item() == 1
        way.refuse()
        way.cut()
        until(lambda: any(found.is_detached for found in one.host.sessions))
        futures = [plan.submit(step=ONE) for _ in range(5)]
        with ThreadPoolExecutor(1) as threads:
            draining = threads.submit(drained, one, other.url, "--stay", "--seconds", "60")
            until(lambda: bool(other.host.sessions))
            assert not draining.done(), "the drain does not end before the client has heard of the move"
            way.go_on()
            assert [future.result(60)["after"].item() for future in futures] == [2, 3, 4, 5, 6]
            status, lines = draining.result(60)
        assert status == 0 and any(line.endswith(" moved") for line in lines)
        assert session.address == other.url
        alone(other)


def test_a_drain_to_nowhere_ends_sessions_as_any_drain_and_says_why(
    pair: tuple[ThreadDaemon, ThreadDaemon],
) -> None:
    with hg.connect(pair[0].url, progress=None) as session:
        session.put(LARGE)
        status, lines = drained(pair[0], "grpc://127.0.0.1:1", "--stay", "--seconds", "2")
        assert status == 0 and any("did not move: its client has not moved it" in line for line in lines)
        with pytest.raises(hg.DrainingError):
            session.put(LARGE)
    status, lines = drained(pair[1], "local:")
    assert status and any("no plain address of a daemon" in line for line in lines)
    assert not pair[1].host.is_draining
