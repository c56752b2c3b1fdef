"""TCP connections beside gRPC's: commands and bytes of whole clients."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from daemon_threads import ThreadDaemon
from direct_clients import (
    bulk_calls,
    connected,
)
from raw_client import check_leaves_no_descriptor

import heliograph as hg

SECONDS = 60
MIB = 2**20


@pytest.mark.parametrize("aio", [False, True])
@pytest.mark.parametrize("size", [256 * 1024 + 1, MIB, 33 * MIB + 7])
def test_bytes_come_back_as_they_went_without_a_call_of_grpc(
    lone: ThreadDaemon, monkeypatch: pytest.MonkeyPatch, size: int, aio: bool
) -> None:
    calls = bulk_calls(monkeypatch)
    array = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    with connected(lone.url, aio) as there_and_back:
        for _ in range(2):
            assert np.array_equal(there_and_back(array), array)
    assert not calls


def test_bytes_come_straight_into_their_tensor(lone: ThreadDaemon) -> None:
    with hg.connect(lone.url) as session:
        tensor = session.empty((16 * MIB,), "u8")
        # Bytes that overtake their command are copied once.
        for _ in range(50):
            session.synchronize()
            tensor.set(np.ones(16 * MIB, np.uint8))
            session.synchronize()
            server, client = session.server_traffic(), session.statistics().traffic
            assert server.written_bytes == client.written_bytes and client.copied_in_bytes == 0
            if server.copied_in_bytes < server.written_bytes:
                return
        raise AssertionError("all bytes were copied")


def test_bytes_that_come_before_their_command_runs_are_kept(lone: ThreadDaemon) -> None:
    g = hg.Graph()
    g.output("y", g.input("x", (1,), "f32") + 1.0)
    with hg.connect(lone.url) as session:
        plan = session.compile(g)
        tensor = session.empty((4 * MIB,), "u8")
        loop = plan.loop(x=np.zeros(1, np.float32), steps=10**9, carry={"y": "x"})
        array = np.random.default_rng(1).integers(0, 256, 4 * MIB, np.uint8)
        # Returns once the bytes are on their way, while the loop still holds the stream.
        tensor.set(array)
        array_then = array.copy()
        array[:] = 0
        loop.cancel()
        with pytest.raises(hg.CancelledError):
            loop.result(SECONDS)
        assert np.array_equal(tensor.get(timeout=SECONDS), array_then)


@pytest.mark.parametrize("aio", [False, True])
def test_weights_go_over_them_and_have_the_digest_of_their_bytes(
    lone: ThreadDaemon, monkeypatch: pytest.MonkeyPatch, aio: bool
) -> None:
    calls = bulk_calls(monkeypatch)
    weight = np.random.default_rng(2).standard_normal((1024, 1024), np.float32)
    g = hg.Graph()
    g.output("y", g.input("x", (1, 1024), "f32") @ g.weight("w", weight))
    x = np.eye(1, 1024, dtype=np.float32)
    if aio:

        async def scenario() -> Any:
            async with hg.aio.connect(lone.url) as session:
                plan = await session.compile(g)
                return (await plan.run(x=x))["y"]

        found = asyncio.run(scenario())
    else:
        with hg.connect(lone.url) as session:
            found = session.compile(g).run(x=x)["y"]
    assert np.array_equal(found[0], weight[0])
    assert not calls


def test_many_threads_transfer_at_once_and_those_without_a_connection_use_grpc(lone: ThreadDaemon) -> None:
    with hg.connect(lone.url) as session:

        def once(number: int) -> bool:
            array = np.full(2 * MIB, number, np.uint8)
            return all(np.array_equal(session.put(array).get(timeout=SECONDS), array) for _ in range(4))

        with ThreadPoolExecutor(10) as threads:
            assert all(threads.map(once, range(10)))


def test_the_error_of_a_command_is_that_of_its_bytes(lone: ThreadDaemon) -> None:
    with hg.connect(lone.url) as session:
        kept = session.put(np.ones(8 * MIB, np.uint8))
        lost = session.empty((2**50,), "u8")
        with pytest.raises(hg.OutOfMemoryError):
            lost.set(np.ones(8 * MIB, np.uint8), offset_bytes=0)
            lost[: 8 * MIB].get()
        assert kept.get(timeout=SECONDS).all()


def test_a_download_has_its_deadline(lone: ThreadDaemon) -> None:
    g = hg.Graph()
    g.output("y", g.input("x", (1,), "f32") + 1.0)
    with hg.connect(lone.url) as session:
        plan, tensor = session.compile(g), session.put(np.ones(MIB, np.float32))
        session.synchronize()
        loop = plan.loop(x=np.zeros(1, np.float32), steps=10**9, carry={"y": "x"})
        with pytest.raises(hg.DeadlineExceededError):
            tensor.get(timeout=0.05)
        loop.cancel()
        assert tensor.get(timeout=SECONDS).all()


def test_transfers_end_with_the_session_and_nothing_stays_open(lone: ThreadDaemon) -> None:
    def once() -> None:
        with hg.connect(lone.url) as session:
            session.put(np.ones(MIB, np.float32)).get()

    check_leaves_no_descriptor(lone.url, once, 5)


def test_a_fork_leaves_the_connections_to_the_parent(lone: ThreadDaemon) -> None:
    script = f"""
        import os
        import numpy as np
        import heliograph as hg
        with hg.connect({lone.url!r}) as session:
            tensor = session.put(np.arange(2**19))
            assert session.command_socket and tensor.get()[-1] == 2**19 - 1
            if (child := os.fork()) == 0:
                try:
                    tensor.get()
                except hg.HeliographError:
                    os._exit(0)
                os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
            assert tensor.get()[-1] == 2**19 - 1
    """
    ends_well(script)


def test_bytes_go_straight_from_their_tensor(lone: ThreadDaemon) -> None:
    array = np.random.default_rng(3).integers(0, 256, 16 * MIB, np.uint8)
    with hg.connect(lone.url) as session:
        tensor = session.put(array)
        # Bytes of a command before its reader are copied once.
        for _ in range(50):
            assert np.array_equal(tensor.get(timeout=SECONDS), array)
            server = session.server_traffic()
            if server.copied_out_bytes < server.read_bytes:
                return
        raise AssertionError("all bytes were copied")


def test_a_command_that_is_read_in_place_is_done_before_its_tensor_changes(lone: ThreadDaemon) -> None:
    with hg.connect(lone.url) as session:
        tensor = session.put(np.zeros(8 * MIB, np.uint8))
        for number in range(1, 20):
            found: list[Any] = []
            reading = threading.Thread(target=lambda found=found: found.append(tensor.get(timeout=SECONDS)))
            reading.start()
            tensor.set(np.full(8 * MIB, number, np.uint8))
            reading.join(SECONDS)
            # Written before or after the read, in the order of the stream.
            assert len(np.unique(found[0])) == 1 and found[0][0] in (number - 1, number)


def test_a_fork_while_a_thread_takes_a_connection_does_not_hang_the_child(lone: ThreadDaemon) -> None:
    ends_well(f"""
        import os, threading
        import heliograph as hg
        with hg.connect({lone.url!r}) as session:
            bulk = session._shell._bulk
            held, go_on = threading.Event(), threading.Event()

            def hold():
                with bulk._direct._lock:
                    held.set()
                    go_on.wait(60)

            threading.Thread(target=hold, daemon=True).start()
            assert held.wait(60)
            child = os.fork()
            go_on.set()
            if child == 0:
                bulk._direct.close()
                session.close()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    """)


def test_ctrl_c_before_a_connection_is_there_leaves_the_array_alone(lone: ThreadDaemon) -> None:
    ends_well(f"""
        import os, signal, threading
        import numpy as np
        import heliograph as hg
        from heliograph.core.interrupts import InThread
        from heliograph.transport.direct.transfers import Connection, DirectTransfers
        take, join, receive = DirectTransfers.take, InThread.join, Connection.receive
        raised, ended, received = threading.Event(), threading.Event(), []

        def interrupted(self):
            os.kill(os.getpid(), signal.SIGINT)
            assert raised.wait(60)
            return take(self)

        def joined(self, seconds):
            # The caller has the exception, and then the thread goes on.
            raised.set()
            join(self, 60)

        def receiving(self, out, deadline):
            received.append(receive(self, out, deadline))

        with hg.connect({lone.url!r}) as session:
            tensor = session.put(np.ones(2**20, np.uint8))
            tensor.get()
            DirectTransfers.take, InThread.join, Connection.receive = interrupted, joined, receiving
            try:
                tensor.get()
            except KeyboardInterrupt:
                pass
            else:
                raise AssertionError("not interrupted")
            assert raised.is_set() and not received
            DirectTransfers.take, Connection.receive = take, receive
            assert tensor.get().all()
    """)


def ends_well(script: str) -> None:
    """Runs a program."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(script)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert found.returncode == 0, found.stderr
