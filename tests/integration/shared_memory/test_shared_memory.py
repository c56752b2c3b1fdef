"""Memory that client and server map both: who gets it, what goes through it, and how it ends."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from forked_daemons import running_daemon

import heliograph as hg
from heliograph.transport.shared_memory import SLOT_BYTES
from heliograph_backends.host_memory.sealed import why_no_sealed

if TYPE_CHECKING:
    from daemon_urls import DaemonUrls

pytestmark = pytest.mark.skipif(bool(why_no_sealed()), reason=why_no_sealed() or "-")

MIB = 2**20
SECONDS = 60


def filled(size: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


# Offers


def test_a_client_on_the_servers_host_shares_memory_unless_told_otherwise(near: str) -> None:
    with hg.connect(near) as session:
        assert session.shared_memory and session.why_not_shared == ""
    with hg.connect(near, shared_memory=False) as session:
        assert not session.shared_memory
        assert "turned off by the client" in session.why_not_shared


def test_in_one_process_there_is_nothing_to_share() -> None:
    with hg.connect("local:") as session:
        assert (session.shared_memory, session.why_not_shared) == (False, "the server is this process")


def test_in_one_process_it_cannot_be_insisted_on() -> None:
    with pytest.raises(hg.UnavailableError, match="the server is this process"):
        hg.connect("local:", shared_memory=True)
    with pytest.raises(hg.InvalidArgumentError, match="shared_memory"):
        hg.connect("local:", shared_memory="nonsense")  # type: ignore[arg-type]


def test_a_session_that_has_ended_shares_nothing(near: str) -> None:
    with hg.connect(near) as session:
        assert session.shared_memory
    assert not session.shared_memory and session.why_not_shared


def test_the_server_may_turn_it_off() -> None:
    with running_daemon("--no-shared-memory", "--device", "cpu:reference=1") as url:
        with hg.connect(url) as session:
            assert not session.shared_memory
            assert "the server turned it off" in session.why_not_shared
        for _ in range(3):
            with pytest.raises(hg.UnavailableError, match="the server turned it off"):
                hg.connect(url, shared_memory=True)


@pytest.mark.parametrize("given", ["yes", None, 1.5])
def test_another_word_for_it_is_refused(daemon: DaemonUrls, given: Any) -> None:
    with pytest.raises(hg.InvalidArgumentError, match="shared_memory"):
        hg.connect(daemon.tcp, shared_memory=given)


def test_a_server_whose_socket_cannot_be_reached_is_used_without_and_nobody_learns_its_name(
    tmp_path: Path,
) -> None:
    path = tmp_path / "heliograph.sock"
    with running_daemon("--listen", f"unix://{path}", "--device", "cpu:reference=1"):
        beside = Path(f"{path}.memory")
        assert beside.stat().st_mode & 0o777 == 0o600
        beside.unlink()
        with hg.connect(f"unix://{path}") as session:
            assert not session.shared_memory
            assert str(tmp_path) not in session.why_not_shared
            assert session.put(filled(MIB)).get().tobytes() == filled(MIB).tobytes()


def test_the_sockets_go_when_the_daemon_ends(tmp_path: Path) -> None:
    with running_daemon("--listen", f"unix://{tmp_path}/a.sock", "--device", "cpu:reference=1"):
        assert sorted(one.name for one in tmp_path.iterdir()) == ["a.sock", "a.sock.memory"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_shares_nothing(daemon: DaemonUrls) -> None:
    script = f"""
        import os, socket
        import heliograph as hg
        # Modules are loaded with the first, which no other user may do from this folder.
        hg.connect({daemon.tcp!r}).close()
        os.setuid(65534)
        with hg.connect({daemon.tcp!r}) as session:
            print(session.why_not_shared)
            name = session._shell.info.shared_memory.abstract_name
            raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            raw.settimeout(30)
            raw.connect("\\0" + name)
            print(raw.recv(100))
            raw.close()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    theirs = {**os.environ, "HELIOGRAPH_TENANT": "another tenant's secret"}
    found = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=theirs, check=False)
    assert found.stdout.splitlines() == ["the server runs as another user", "b''"], found.stderr


# Transfers


@pytest.mark.parametrize(
    "size", [1, 262_144, 262_145, SLOT_BYTES, SLOT_BYTES + 1, 3 * SLOT_BYTES, 9 * SLOT_BYTES + 7]
)
def test_bytes_come_back_as_they_went(session_of: hg.Session, size: int) -> None:
    data = filled(size)
    tensor = session_of.empty(size, "u8")
    tensor.set(data)
    out = np.zeros_like(data)
    assert tensor.get(out=out) is out
    assert out.tobytes() == data.tobytes() == tensor.get().tobytes()


def test_views_rows_and_blocks_come_back_as_they_went(session_of: hg.Session) -> None:
    table = np.arange(3000 * 1000, dtype=np.float32).reshape(3000, 1000)
    tensor = session_of.put(table)
    tensor[::2, 100:900].set(-table[::2, 100:900])
    table[::2, 100:900] *= -1
    assert np.array_equal(tensor.get(), table)
    assert np.array_equal(tensor[1::3].get(), table[1::3])
    rows = tensor.get_2d(3000, 400, 40, 4000)
    assert np.array_equal(rows.view(np.float32), table[:, 10:110])
    tensor.set_2d(np.zeros((3000, 100), np.float32), 40, 4000)
    table[:, 10:110] = 0
    assert np.array_equal(tensor.get(), table)
    blocks = filled(2 * 32_000 * 34).reshape(64_000, 34)
    quantized = session_of.empty((64_000, 32), "q8_0")
    quantized.set(blocks)
    assert np.array_equal(quantized.get(), blocks)


def test_runs_take_and_give_large_arrays_through_it(session_of: hg.Session) -> None:
    g = hg.Graph()
    x = g.input("x", (1500, 1000), "f32")
    g.output("y", x + g.weight("w", np.full((1500, 1000), 2, np.float32)))
    plan = session_of.compile(g)
    given = np.random.default_rng(1).standard_normal((1500, 1000), dtype=np.float32)
    futures = [plan.submit(x=given * number) for number in range(12)]
    for number, future in enumerate(futures):
        assert np.array_equal(future.result(SECONDS)["y"], given * np.float32(number) + 2)


def test_more_at_once_than_there_is_room_for_all_arrives(session_of: hg.Session) -> None:
    size = SLOT_BYTES + 5
    tensors = [session_of.empty(size, "u8") for _ in range(8)]

    def once(number: int) -> bool:
        data = filled(size, number)
        tensors[number].set(data)
        return bool(np.array_equal(tensors[number].get(), data))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(once, range(8)))


def test_random_writes_and_reads_of_many_threads_are_those_of_arrays(session_of: hg.Session) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")

    def once(number: int) -> None:
        chosen = random.Random(seed + number)
        size = chosen.randrange(MIB, 12 * MIB)
        mirror = np.zeros(size, np.uint8)
        tensor = session_of.empty(size, "u8")
        for turn in range(12):
            start = chosen.randrange(size)
            part = filled(chosen.randrange(1, size - start + 1), turn)
            tensor.set(part, start)
            mirror[start : start + part.size] = part
            start = chosen.randrange(size)
            count = chosen.randrange(1, size - start + 1)
            assert np.array_equal(tensor.get(None, start, count), mirror[start : start + count])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(once, range(4)))


@pytest.mark.slow
def test_what_is_broken_off_does_no_harm_to_what_comes_next(session_of: hg.Session) -> None:
    g = hg.Graph()
    x = y = g.input("x", (1200, 1200), "f32")
    for _ in range(10):
        y = y @ x
    g.output("y", y)
    plan = session_of.compile(g)
    held = session_of.put(np.zeros((1200, 1200), np.float32))
    plan.run(x=held)
    for _ in range(5):
        result = plan.run({"x": held}, fetch=False)["y"]
        with pytest.raises(hg.DeadlineExceededError):
            result.get(timeout=1e-4)
        other = session_of.put(filled(5 * MIB))
        assert np.array_equal(other.get(), filled(5 * MIB))
        assert not result.get().any()


def test_weights_go_through_it_once(session_of: hg.Session) -> None:
    weight = np.random.default_rng(2).standard_normal((3000, 1100), dtype=np.float32)
    seen: list[tuple[int, int]] = []

    def graph() -> hg.Graph:
        g = hg.Graph()
        g.output("y", g.input("x", (1, 3000), "f32") @ g.weight("w", weight))
        return g

    x = np.ones((1, 3000), np.float32)
    with hg.connect(
        session_of.address, progress=lambda done, total: seen.append((done, total)), shared_memory=True
    ) as session:
        first = session.compile(graph()).run(x=x)["y"]
        assert seen[0] == (0, weight.nbytes) and seen[-1] == (weight.nbytes, weight.nbytes)
        assert len(seen) > 1 + weight.nbytes // (8 * MIB)
        seen.clear()
        assert np.array_equal(session.compile(graph()).run(x=x)["y"], first)
        assert seen == []
    with hg.connect("local:") as local:
        assert np.array_equal(local.compile(graph()).run(x=x)["y"], first)


def test_asyncio_has_the_same(near: str) -> None:
    data = filled(3 * SLOT_BYTES + 3)
    weight = np.ones((2000, 600), np.float32)

    async def scenario() -> None:
        async with hg.aio.connect(near, shared_memory=True) as session:
            assert session.shared_memory
            tensors = [session.empty(data.size, "u8") for _ in range(3)]
            await asyncio.gather(*(one.set(data) for one in tensors))
            for one in await asyncio.gather(*(one.get() for one in tensors)):
                assert np.array_equal(one, data)
            mapped = await session.empty(10, "i32", buffer_type="shared").map()
            assert mapped.tolist() == [0] * 10
            g = hg.Graph()
            g.output("y", g.input("x", (1, 2000), "f32") @ g.weight("w", weight))
            plan = await session.compile(g)
            assert (await plan.run(x=weight[:, :1].T))["y"].tolist() == [[2000.0] * 600]

    asyncio.run(scenario())


def test_asyncio_writes_that_are_cancelled_do_no_harm_to_what_comes_next(near: str) -> None:
    data = filled(3 * SLOT_BYTES)

    async def scenario() -> None:
        async with hg.aio.connect(near, shared_memory=True) as session:
            tensor, other = session.empty(data.size, "u8"), session.empty(data.size, "u8")
            for _ in range(10):
                writing = asyncio.ensure_future(tensor.set(data))
                await asyncio.sleep(0)
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
                await other.set(data[::-1].copy())
                assert np.array_equal(await other.get(), data[::-1])

    asyncio.run(scenario())


def test_who_is_cancelled_twice_does_no_harm_either(near: str) -> None:
    data = filled(3 * SLOT_BYTES)

    async def scenario() -> None:
        async with hg.aio.connect(near, shared_memory=True) as session:
            tensor, other = session.empty(data.size, "u8"), session.empty(data.size, "u8")
            for turn in range(30):
                writing = asyncio.ensure_future(tensor.set(data) if turn % 2 else tensor.get())
                for _ in range(turn % 5):
                    await asyncio.sleep(0)
                writing.cancel()
                await asyncio.sleep(0)
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
                expected = filled(data.size, turn)
                await other.set(expected)
                assert np.array_equal(await other.get(), expected), f"turn {turn}"

    asyncio.run(scenario())


@pytest.mark.parametrize("aio", [False, True])
def test_uploads_that_break_off_keep_no_room_for_ever(near: str, aio: bool) -> None:
    def graph() -> hg.Graph:
        g = hg.Graph()
        weight = np.random.default_rng().standard_normal((3000, 3000), dtype=np.float32)
        g.output("y", g.input("x", (1, 3000), "f32") @ g.weight("w", weight))
        return g

    class Enough(Exception):
        pass

    def enough(done: int, total: int) -> None:
        if done:
            raise Enough

    async def scenario() -> int:
        async with hg.aio.connect(near, progress=enough, shared_memory=True) as session:
            for _ in range(8):
                with pytest.raises(hg.InternalError, match="Enough"):
                    await session.compile(graph())
            return len(session._shell.core.space()._free)

    if aio:
        left = asyncio.run(scenario())
    else:
        with hg.connect(near, progress=enough, shared_memory=True) as session:
            for _ in range(8):
                with pytest.raises(hg.InternalError, match="Enough"):
                    session.compile(graph())
            left = len(session._shell.core.space()._free)
    assert left == 8


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_more_than_two_gigabytes_travel_at_once(shared: bool) -> None:
    size = 2**31 + 4096
    with (
        running_daemon("--device", "cpu:threads=1,memory=3GiB") as url,
        hg.connect(url, shared_memory=shared) as session,
    ):
        data = np.zeros(size, np.uint8)
        data[[0, 2**31 - 1, 2**31, size - 1]] = 1, 2, 3, 4
        tensor = session.empty(size, "u8")
        tensor.set(data, timeout=SECONDS)
        data[:] = 0
        tensor.get(out=data, timeout=SECONDS)
        assert data[[0, 2**31 - 1, 2**31, size - 1]].tolist() == [1, 2, 3, 4]
        assert np.count_nonzero(data) == 4


# Clients without manners


@pytest.fixture
def raw_socket(daemon: DaemonUrls) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made:
        made.settimeout(SECONDS)
        made.connect(f"{daemon.unix.removeprefix('unix://')}.memory")
        yield made


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (b"\xff\xff\xff", "could not be decoded"),
        (b"\x0a\x02no", "session is unknown"),
        (b"\x0a\xff\x7f" + bytes(16_383), "too long"),
    ],
)
def test_requests_that_make_no_sense_are_answered_with_errors(
    raw_socket: socket.socket, request_: bytes, said: str
) -> None:
    from heliograph_proto.v1 import memory_pb2

    raw_socket.send(request_)
    answer, descriptors, _, _ = socket.recv_fds(raw_socket, 65_536, 1)
    assert not descriptors
    assert said in memory_pb2.MemoryResponse.FromString(answer).error.message
    assert raw_socket.recv(10) == b""


def test_who_asks_for_nothing_is_sent_away(raw_socket: socket.socket) -> None:
    assert raw_socket.recv(10) == b""


def test_many_who_ask_for_nothing_keep_nobody_from_working(daemon: DaemonUrls) -> None:
    path = f"{daemon.unix.removeprefix('unix://')}.memory"
    crowd = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(200)]
    try:
        for one in crowd:
            one.setblocking(False)
            one.connect_ex(path)
        with hg.connect(daemon.unix) as session:
            assert session.put(filled(MIB)).get().tobytes() == filled(MIB).tobytes()
    finally:
        for one in crowd:
            one.close()


def test_a_client_cannot_change_the_size_of_what_it_maps(session_of: hg.Session) -> None:
    from heliograph.transport.shared_memory import _connected, _offer_of
    from heliograph_proto.v1 import memory_pb2

    shell = session_of._shell
    request = memory_pb2.MemoryRequest(
        session=shell.info.session, session_memory=memory_pb2.SessionMemory()
    ).SerializeToString()
    with _connected(shell.address, _offer_of(shell.info), time.monotonic() + SECONDS) as server:
        server.send(request)
        _, (descriptor,), _, _ = socket.recv_fds(server, 65_536, 1)
    try:
        for size in (0, 10, 2**40):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)
    assert session_of.put(filled(MIB)).get().tobytes() == filled(MIB).tobytes()


# Servers without manners


ANSWERS = {
    "no message": b"\xff\xff\xff\xff",
    "nothing": b"",
    "no descriptor": b"\x10\x08",
    "an error": b"\x0a\x06\x12\x04oops",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_answers_that_make_no_sense_are_why_nothing_is_shared(tmp_path: Path, answer: bytes) -> None:
    assert isinstance(_shared_by(tmp_path, answer, None), str)


@pytest.mark.parametrize("size", [0, 2**63, 2**64 - 1, 5_000_000])
def test_files_of_another_size_than_was_said_are_why_nothing_is_shared(tmp_path: Path, size: int) -> None:
    from heliograph_backends.host_memory.sealed import SealedMemory
    from heliograph_proto.v1 import memory_pb2

    memory = SealedMemory(1000)
    try:
        answer = memory_pb2.MemoryResponse(size_bytes=size).SerializeToString()
        assert isinstance(_shared_by(tmp_path, answer, memory.descriptor()), str)
    finally:
        memory.close()


def test_a_file_that_could_be_cut_is_not_mapped(tmp_path: Path) -> None:
    from heliograph_proto.v1 import memory_pb2

    descriptor = os.memfd_create("cut")
    os.ftruncate(descriptor, 1000)
    answer = memory_pb2.MemoryResponse(size_bytes=1000).SerializeToString()
    found = _shared_by(tmp_path, answer, descriptor)
    assert isinstance(found, str) and "may change" in found


def _shared_by(folder: Path, answer: bytes, descriptor: int | None) -> object:
    """Return the memory that a client shares after a server's answer to its request."""
    from heliograph.transport.shared_memory import share
    from heliograph_proto.addresses import Address
    from heliograph_proto.sessions import Limits, SessionInfo, SharedMemoryOffer

    address = Address("unix", path=str(folder / "a.sock"))
    offer = SharedMemoryOffer(path_suffix=".memory")
    info = SessionInfo(b"secret", 1, ("shared-memory",), Limits(), b"", "", (), shared_memory=offer)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address.path + offer.path_suffix)
        listener.listen()

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(1000)
                socket.send_fds(client, [answer], [] if descriptor is None else [descriptor])

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            return share(address, info, "auto")
        finally:
            serving.join(SECONDS)
            if descriptor is not None:
                os.close(descriptor)


@pytest.mark.parametrize(
    ("url", "name", "suffix"),
    [
        ("grpc://192.0.2.1:7070", "heliograph-" + "0" * 32, ""),
        ("grpc://127.0.0.1:7070", "somebody-else", ""),
        ("grpc://127.0.0.1:7070", "", ".memory"),
        ("unix:///tmp/a.sock", "heliograph-" + "0" * 32, ""),
        ("unix:///tmp/a.sock", "", "/../b.sock"),
        ("unix:///tmp/a.sock", "", ".a\0b"),
    ],
)
def test_a_server_has_nobody_connect_to_whatever_it_likes(url: str, name: str, suffix: str) -> None:
    from heliograph.transport.shared_memory import share
    from heliograph_proto.addresses import parse_address
    from heliograph_proto.sessions import Limits, SessionInfo, SharedMemoryOffer

    offer = SharedMemoryOffer(name, suffix)
    info = SessionInfo(b"secret", 1, ("shared-memory",), Limits(), b"", "", (), shared_memory=offer)
    found = share(parse_address(url), info, "auto")
    assert found == "the server's offer does not fit the address that it was reached by"
