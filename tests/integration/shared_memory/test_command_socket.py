"""Commands over a socket of their own: offers, messages, ends, and hostile clients."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from daemon_threads import ThreadDaemon, thread_daemon
from forked_daemons import running_daemon
from raw_client import RawSession, check_leaves_no_descriptor, f32, raw_channel, still_serves

import heliograph as hg
from heliograph.transport import aio_grpc as aio_transport
from heliograph.transport.command_socket.on_loop import LoopSocket
from heliograph_backends.host_memory.sealed import FILES, why_no_sealed
from heliograph_proto.codec import decode_error
from heliograph_proto.codec.frames import FrameReader, framed
from heliograph_proto.errors import HeliographError
from heliograph_proto.sessions import Limits
from heliograph_proto.v1 import command_pb2, memory_pb2, session_pb2, session_pb2_grpc
from heliograph_server.rpc.command_socket.sockets import CommandSocket

if TYPE_CHECKING:
    from daemon_urls import DaemonUrls

#: Callers read by themselves where no handler can interrupt them.
pytestmark = [
    pytest.mark.skipif(bool(why_no_sealed()), reason=why_no_sealed() or "-"),
    pytest.mark.usefixtures("no_signal_handlers"),
]

SECONDS = 60
KIB = 1024


@pytest.fixture(scope="module")
def far() -> Iterator[str]:
    """A server that shares nothing with clients on its host, as if they were on another."""
    with running_daemon("--no-shared-memory", "--device", "cpu:reference=1") as url:
        yield url


@pytest.fixture(params=["tcp", "unix", "far"])
def near(request: pytest.FixtureRequest, daemon: DaemonUrls) -> str:
    """A server on this host, by either transport, and one whose socket is a TCP connection."""
    if request.param == "far":
        return str(request.getfixturevalue("far"))
    return daemon.tcp if request.param == "tcp" else daemon.unix


def plus_one(size: int) -> hg.Graph:
    g = hg.Graph()
    g.output("y", g.input("x", (size,), "f32") + 1.0)
    return g


def filled(size: int, number: float) -> np.ndarray[Any, Any]:
    return np.full(size, number, np.float32)


# Offers


def test_commands_of_a_client_on_the_servers_host_go_over_a_socket_unless_told_otherwise(near: str) -> None:
    with hg.connect(near) as session:
        assert session.command_socket and session.why_no_command_socket == ""
        assert session.compile(plus_one(2)).run(x=filled(2, 1))["y"].tolist() == [2, 2]
    assert not session.command_socket and "ended" in session.why_no_command_socket
    with hg.connect(near, shared_memory=False, direct=False) as session:
        assert not session.command_socket and "turned off by the client" in session.why_no_command_socket
        assert session.compile(plus_one(2)).run(x=filled(2, 1))["y"].tolist() == [2, 2]


def test_a_server_that_shares_nothing_takes_commands_by_grpc() -> None:
    with (
        running_daemon(
            "--no-shared-memory", "--direct-connections", "-1", "--device", "cpu:reference=1"
        ) as url,
        hg.connect(url) as session,
    ):
        assert "the server turned it off" in session.why_no_command_socket
        assert session.put(np.arange(3)).get().tolist() == [0, 1, 2]


def test_within_one_process_there_is_no_socket() -> None:
    with hg.connect("local:") as session:
        assert session.why_no_command_socket == "the server is this process"


# Messages


def test_messages_larger_than_the_sockets_room_arrive_both_ways_and_in_order(near: str) -> None:
    size = 50 * KIB
    with hg.connect(near) as session:
        plan = session.compile(plus_one(size))
        runs = [plan.submit(x=filled(size, number)) for number in range(60)]
        for number, run in enumerate(runs):
            assert (run.result(SECONDS)["y"] == number + 1).all()


def test_threads_that_wait_at_the_same_time_each_get_their_own_results(near: str) -> None:
    with hg.connect(near) as session:
        plan = session.compile(plus_one(4))

        def once(number: int) -> bool:
            return all(
                plan.run(x=filled(4, number + turn))["y"][0] == number + turn + 1 for turn in range(100)
            )

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(once, range(0, 8000, 1000)))


def test_runs_of_all_kinds_in_threads_end_in_order_with_their_results(near: str) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    with hg.connect(near) as session:
        plan = session.compile(plus_one(4))

        def once(number: int) -> bool:
            chosen = random.Random(seed + number)
            for _ in range(60):
                x = filled(4, chosen.randrange(1000))
                runs = [plan.submit(x=x + turn) for turn in range(chosen.randrange(20))]
                with suppress(hg.DeadlineExceededError):
                    plan.run(x=x, timeout=chosen.choice([SECONDS, 5e-5]))
                held = session.put(x)
                assert np.array_equal(held.get(timeout=SECONDS), x)
                for turn, run in enumerate(runs):
                    assert np.array_equal(run.result(SECONDS)["y"], x + turn + 1)
            return True

        with ThreadPoolExecutor(6) as threads:
            assert all(threads.map(once, range(6)))


def test_a_run_that_nobody_waits_for_is_done_after_others_were_waited_for(near: str) -> None:
    with hg.connect(near) as session:
        plan, done = session.compile(plus_one(4)), threading.Event()
        for _ in range(20):
            plan.run(x=filled(4, 1))
        plan.submit(x=filled(4, 2)).add_done_callback(lambda _: done.set())
        assert done.wait(SECONDS)


def test_a_thread_waits_for_a_long_run_while_others_run_short_ones(near: str) -> None:
    with hg.connect(near) as session:
        plan, began = session.compile(plus_one(4)), threading.Event()
        run = plan.loop(x=filled(4, 0), steps=10**9, carry={"y": "x"})

        def wait() -> None:
            began.set()
            with pytest.raises(hg.CancelledError):
                run.result(SECONDS)

        waiting = threading.Thread(target=wait)
        waiting.start()
        assert began.wait(SECONDS)
        with hg.connect(near) as other:
            assert other.compile(plus_one(4)).run(x=filled(4, 1))["y"][0] == 2
        run.cancel()
        assert plan.run(x=filled(4, 1), timeout=SECONDS)["y"][0] == 2
        waiting.join(SECONDS)
        assert not waiting.is_alive()


def test_asyncio_runs_go_over_it_in_order_and_may_be_cancelled(near: str) -> None:
    async def scenario() -> None:
        async with hg.aio.connect(near) as session:
            assert session.command_socket
            size = 50 * KIB
            large, small = await session.compile(plus_one(size)), await session.compile(plus_one(4))
            runs = [large.submit(x=filled(size, number)) for number in range(30)]
            assert (await small.run(x=filled(4, 7)))["y"][0] == 8
            for number, run in enumerate(runs):
                assert (await run.result(SECONDS))["y"][-1] == number + 1
            for _ in range(20):
                running = asyncio.ensure_future(large.run(x=filled(size, 1)))
                await asyncio.sleep(0)
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                assert (await small.run(x=filled(4, 1)))["y"][0] == 2
        assert not session.command_socket

    asyncio.run(scenario())


# Ends

ENDLESS: dict[str, Any] = {"x": filled(2, 0), "steps": 10**9, "carry": {"y": "x"}}


@pytest.mark.parametrize("aio", [False, True])
def test_callers_that_wait_learn_that_the_daemon_ended(aio: bool) -> None:
    with thread_daemon(shared_memory=True) as daemon:
        error: list[BaseException] = []

        def wait() -> None:
            try:
                if aio:
                    asyncio.run(waits())
                else:
                    with hg.connect(daemon.url) as session:
                        session.compile(plus_one(2)).loop(**ENDLESS).result(SECONDS)
            except hg.HeliographError as one:
                error.append(one)

        async def waits() -> None:
            async with hg.aio.connect(daemon.url) as session:
                plan = await session.compile(plus_one(2))
                await plan.loop(**ENDLESS).result(SECONDS)

        waiting = threading.Thread(target=wait)
        waiting.start()
        while not daemon.host.count_busy():
            waiting.join(0.01)
            assert waiting.is_alive()
        daemon.stop()
        waiting.join(SECONDS)
        assert not waiting.is_alive()
        assert isinstance(error[0], hg.HeliographError) and not isinstance(error[0], hg.InternalError)


# Hostile clients


class RawSocket:
    """A raw session and its command socket."""

    def __init__(self, channel: Any, url: str) -> None:
        self.session = RawSession(channel)
        opened = session_pb2_grpc.SessionServiceStub(channel).Open(
            session_pb2.OpenRequest(
                version_min=1, version_max=1, client="raw", features=["shared-memory", "command-socket"]
            ),
            timeout=SECONDS,
        )
        self.session.token, self.session.limits = opened.session, opened.limits
        self.name = f"\0{opened.shared_memory.abstract_name}"
        response, descriptors = self.ask()
        assert not response.HasField("error"), response
        self.socket = socket.socket(fileno=descriptors[0])
        self.socket.settimeout(SECONDS)
        self._frames = FrameReader(2**32)
        self._messages: list[bytes] = []

    def attach(self) -> None:
        self.session.attach(command_socket=True)

    def ask(self) -> tuple[Any, list[int]]:
        """Requests a command socket."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            asking.settimeout(SECONDS)
            asking.connect(self.name)
            request = memory_pb2.MemoryRequest(
                session=self.session.token, command_socket=memory_pb2.CommandSocket()
            )
            asking.send(request.SerializeToString())
            answer, descriptors, _, _ = socket.recv_fds(asking, 65_536, 1)
            return memory_pb2.MemoryResponse.FromString(answer), descriptors

    def refusal(self) -> HeliographError:
        response, descriptors = self.ask()
        assert not descriptors
        return decode_error(response.error)

    def command(self, **kind: Any) -> int:
        """Sends one command over the socket; its sequence number."""
        self.session.sequence += 1
        one = command_pb2.Command(sequence=self.session.sequence, notify=True, **kind)
        batch = command_pb2.CommandBatch(commands=[one])
        self.socket.sendall(framed(batch.SerializeToString()))
        return self.session.sequence

    def answer(self, sequence: int) -> Any:
        """The completion of a command."""
        while True:
            while self._messages:
                batch = command_pb2.CompletionBatch.FromString(self._messages.pop(0))
                for one in batch.completions:
                    if one.sequence == sequence:
                        return one
            data = self.socket.recv(65_536)
            assert data, "the server ended the socket"
            self._messages += self._frames.feed(data)


@contextmanager
def raw_socket(url: str) -> Iterator[RawSocket]:
    with raw_channel(url) as channel:
        made = RawSocket(channel, url)
        try:
            yield made
        finally:
            made.socket.close()
            made.session.close()


@pytest.fixture
def lone() -> Iterator[ThreadDaemon]:
    """A daemon without other clients."""
    with thread_daemon(shared_memory=True, limits=Limits(attach_timeout_ms=1000)) as daemon:
        yield daemon


def test_a_session_has_one_socket_and_asks_before_its_stream_begins(lone: ThreadDaemon) -> None:
    with raw_socket(lone.url) as raw:
        assert isinstance(raw.refusal(), hg.HandleExistsError)
        raw.attach()
        assert not raw.answer(raw.command(memset=command_pb2.Memset(tensor=5))).outputs
        assert isinstance(raw.refusal(), hg.HandleExistsError)
        raw.session.token = b"another session's"
        assert isinstance(raw.refusal(), hg.SessionClosedError)


def test_a_client_that_did_not_get_its_socket_uses_grpc(lone: ThreadDaemon) -> None:
    with raw_socket(lone.url) as raw:
        raw.socket.close()
        raw.session.attach()
        raw.session.allocate(1, 4)
        assert not raw.session.answer(raw.session.send(memset=command_pb2.Memset(tensor=1))).HasField("error")


def test_a_stream_that_announces_a_socket_without_one_is_refused(lone: ThreadDaemon) -> None:
    with raw_channel(lone.url) as channel:
        session = RawSession(channel).attach(command_socket=True)
        try:
            assert isinstance(session.end(), hg.ProtocolError)
        finally:
            session.close()


def test_commands_in_pieces_of_a_byte_are_answered(lone: ThreadDaemon) -> None:
    with raw_socket(lone.url) as raw:
        raw.attach()
        batch = command_pb2.CommandBatch(
            commands=[command_pb2.Command(sequence=1, notify=True, memset=command_pb2.Memset(tensor=5))]
        )
        for byte in framed(batch.SerializeToString()):
            raw.socket.sendall(bytes([byte]))
        raw.session.sequence = 1
        error = decode_error(raw.answer(1).error)
        assert isinstance(error, hg.UnknownHandleError)


def test_a_message_that_is_too_long_ends_the_session_before_it_arrives(lone: ThreadDaemon) -> None:
    with raw_socket(lone.url) as raw:
        raw.attach()
        raw.socket.sendall((raw.session.limits.message_bytes + 1).to_bytes(4, "little"))
        assert isinstance(raw.session.end(), hg.LimitExceededError)
    still_serves(lone.url)


def test_garbage_ends_the_session_and_nothing_else(lone: ThreadDaemon) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chosen = random.Random(seed)
    with hg.connect(lone.url) as witness:
        plan = witness.compile(plus_one(4))
        for turn in range(20):
            with raw_socket(lone.url) as raw:
                raw.attach()
                data = chosen.randbytes(chosen.randrange(1, 4000))
                # Some of it in frames, whose content is then garbage.
                raw.socket.sendall(framed(b"\xff" + data) if turn % 2 else b"\xff\xff\xff\xff" + data)
                assert isinstance(raw.session.end(), hg.ProtocolError | hg.LimitExceededError)
            assert plan.run(x=filled(4, turn))["y"][0] == turn + 1


def test_a_client_that_reads_no_answers_is_not_read_either_and_others_go_on(lone: ThreadDaemon) -> None:
    with raw_socket(lone.url) as raw:
        raw.attach()
        raw.command(allocate=command_pb2.Allocate(tensor=1, type=f32(2**16)))
        for _ in range(400):
            raw.command(get_tensor=command_pb2.GetTensor(tensor=1, size_bytes=2**17))
        raw.socket.settimeout(1.0)
        with pytest.raises(TimeoutError):
            for _ in range(5000):
                raw.command(free=command_pb2.Free(handles=range(1000, 11_000)))
        still_serves(lone.url)
    still_serves(lone.url)


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_messages_that_are_not_taken_are_read_up_to_a_bound_however_small(size: int) -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        FILES.take()
        made = CommandSocket(ours, 1000)
        first = asyncio.ensure_future(made.read(lambda message: False))
        sent_bytes = refused = 0
        while refused < 100:
            assert sent_bytes < 4 * 2**20, "the server read on"
            await asyncio.sleep(0)
            try:
                sent_bytes += theirs.send(framed(bytes(size)) * 10)
                refused = 0
            except BlockingIOError:
                refused += 1
        assert len(await first) % max(size, 1) == 0
        # It goes on once they are taken.
        while refused:
            await made.read(lambda message: False)
            with suppress(BlockingIOError):
                theirs.send(bytes(4))
                refused = 0
        made.close()
        theirs.close()

    asyncio.run(scenario())


def test_a_client_that_floods_its_socket_leaves_turns_to_clients_over_grpc(lone: ThreadDaemon) -> None:
    over = threading.Event()
    with raw_socket(lone.url) as raw, hg.connect(lone.url, shared_memory=False) as other:
        raw.attach()
        plan = other.compile(plus_one(4))

        def flood() -> None:
            while not over.is_set():
                raw.command(free=command_pb2.Free(handles=range(1000, 1100)))

        def drop_answers() -> None:
            while raw.socket.recv(65_536):
                pass

        threads = [threading.Thread(target=one) for one in (flood, drop_answers)]
        for thread in threads:
            thread.start()
        try:
            for number in range(30):
                assert plan.run(x=filled(4, number), timeout=SECONDS)["y"][0] == number + 1
        finally:
            over.set()
            threads[0].join(SECONDS)
            raw.socket.shutdown(socket.SHUT_WR)
            threads[1].join(SECONDS)
        assert not any(thread.is_alive() for thread in threads)


def test_a_session_that_never_begins_its_stream_loses_its_socket(lone: ThreadDaemon) -> None:
    with raw_socket(lone.url) as raw:
        assert raw.socket.recv(1) == b""


def test_half_a_message_and_an_end_leave_nothing_behind(lone: ThreadDaemon) -> None:
    def once() -> None:
        with raw_socket(lone.url) as raw:
            raw.attach()
            assert raw.answer(raw.command(memset=command_pb2.Memset(tensor=5)))
            raw.socket.sendall(b"\x00\x10\x00\x00half")

    check_leaves_no_descriptor(lone.url, once, 10)


def test_many_empty_messages_leave_turns_to_others() -> None:
    async def scenario() -> tuple[list[int], int]:
        ours, theirs = socket.socketpair()
        sizes: list[int] = []
        turns = 0
        done = asyncio.Event()

        def received(messages: Sequence[bytes]) -> None:
            sizes.append(len(messages))
            if sum(sizes) == 16 * KIB:
                done.set()

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        made = LoopSocket(ours, 1000, received, lambda error: None)
        theirs.sendall(bytes(64 * KIB))
        ticker = asyncio.ensure_future(others())
        made.read_on()
        made.pause()
        made.read_on()
        await asyncio.wait_for(done.wait(), SECONDS)
        ticker.cancel()
        made.close()
        theirs.close()
        return sizes, turns

    sizes, turns = asyncio.run(scenario())
    assert max(sizes) <= 1024 and turns >= len(sizes) >= 16


def test_a_message_behind_many_is_read_though_nothing_follows() -> None:
    async def scenario() -> list[bytes]:
        ours, theirs = socket.socketpair()
        FILES.take()
        made = CommandSocket(ours, 1000)
        theirs.sendall(bytes(4 * 3000) + framed(b"last"))
        found = [await made.read(lambda message: False)]
        while found[-1] != b"last":
            found.append(await asyncio.wait_for(made.read(lambda message: False), SECONDS))
        made.close()
        theirs.close()
        return found

    assert asyncio.run(scenario())[-1] == b"last"


def test_a_large_graph_is_encoded_beside_the_event_loop(
    daemon: DaemonUrls, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    real = aio_transport.unary

    def unary(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return real(*given)

    def chain(nodes: int) -> hg.Graph:
        g = hg.Graph()
        x = g.input("x", (1,), "f32")
        for _ in range(nodes):
            x = x + 1.0
        g.output("y", x)
        return g

    async def scenario() -> None:
        async with hg.aio.connect(daemon.tcp) as session:
            monkeypatch.setattr(aio_transport, "unary", unary)
            for nodes in (10, 1000):
                plan = await session.compile(chain(nodes))
                assert (await plan.run(x=filled(1, 1)))["y"].tolist() == [nodes + 1]

    asyncio.run(scenario())
    assert threads[0] is threading.main_thread() is not threads[-1]
