"""The costs of shared memory on a server: descriptors, pages, and time of its event loop."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio

import heliograph as hg
from heliograph.testing import wait_until_serving
from heliograph.transport.same_host import is_of_this_user
from heliograph_backends.fake import FakeDevice
from heliograph_backends.host_memory.sealed import SealedMemory, whole_pages, why_no_sealed
from heliograph_backends.registry import Registry
from heliograph_proto.addresses import Address
from heliograph_proto.codec.status import error_from_metadata
from heliograph_proto.digests import digest_of
from heliograph_proto.sessions import PLACE_BYTES
from heliograph_proto.v1 import bulk_pb2, bulk_pb2_grpc, session_pb2, session_pb2_grpc
from heliograph_server.config.config import ServerConfig
from heliograph_server.daemon.daemon import Daemon
from heliograph_server.rpc.command_socket import askers
from heliograph_server.rpc.command_socket.sockets import CommandSockets
from heliograph_server.rpc.shared_memory_service import MemoryService, is_near
from heliograph_server.runtime.host import Host
from heliograph_server.runtime.host_slot import HostSlot

pytestmark = pytest.mark.skipif(bool(why_no_sealed()), reason=why_no_sealed() or "-")

SECONDS = 30.0
SERVE = f"exec {sys.executable} -m heliograph.cli serve --listen grpc://127.0.0.1:0 --device cpu:reference=1"


@contextmanager
def daemon_with(limits: str) -> Iterator[tuple[int, str]]:
    """A daemon as a process of its own, with limits that the shell sets; its number and URL."""
    process = subprocess.Popen(["sh", "-c", f"{limits}; {SERVE}"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = process.stdout.readline().removeprefix("listening on ").strip()
        wait_until_serving(url)
        yield process.pid, url
    finally:
        process.terminate()
        process.wait(SECONDS)
        process.stdout.close()


def descriptors(process: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{process}/fd"))


# Descriptors


def test_a_piece_of_memory_takes_one_descriptor_and_none_when_it_is_closed() -> None:
    before = descriptors()
    memory = SealedMemory(10)
    assert descriptors() == before + 1
    array = memory.array
    array[:] = 7
    memory.close()
    memory.close()
    assert descriptors() == before
    assert array.tolist() == [7] * 10 and memory.array.nbytes == 0
    with open(os.devnull) as other:
        # It has the number that the memory had, and is not to be handed out.
        assert descriptors() == before + 1, other
        with pytest.raises(hg.UnknownHandleError, match="was freed"):
            memory.descriptor()
    with pytest.raises(hg.UnknownHandleError, match="was freed"):
        memory.part(0, 1)


def test_memory_is_never_a_program_and_keeps_its_size() -> None:
    memory = SealedMemory(10)
    descriptor = memory.descriptor()
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
        if os.fstat(descriptor).st_mode & 0o111:
            pytest.skip("this kernel knows no memory that cannot be executed")
        with pytest.raises(PermissionError):
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
        memory.close()


@pytest.mark.parametrize("size", [2**62, 2**64, 2**80])
def test_more_than_there_can_be_is_refused_and_costs_nothing(size: int) -> None:
    before = descriptors()
    with pytest.raises(hg.OutOfMemoryError, match="refused"):
        SealedMemory(size)
    # Fewer, if an earlier test's connection has just gone.
    assert descriptors() <= before


def test_who_takes_all_shared_memory_leaves_descriptors_to_others() -> None:
    with daemon_with("ulimit -n 256") as (_, url), hg.connect(url, shared_memory=True) as greedy:
        tensors: list[hg.Tensor] = []
        with pytest.raises(hg.LimitExceededError, match="the most that it can") as caught:
            for _ in range(256):
                tensors.append(greedy.empty(1, "u8", buffer_type="shared"))
                tensors[-1].get()
        assert "free some" in caught.value.advice
        assert 50 < len(tensors) <= 64
        with ExitStack() as others:
            for _ in range(10):
                other = others.enter_context(hg.connect(url))
                # It goes on without.
                assert not other.shared_memory and "the most that it can" in other.why_not_shared
                assert "the most that it can" in other.why_no_command_socket
                assert other.put(np.arange(3)).get().tolist() == [0, 1, 2]
        for one in tensors[:2]:
            one.free()
        greedy.synchronize()
        with hg.connect(url, shared_memory=True) as other:
            assert other.shared_memory


def test_a_daemon_asks_for_as_many_descriptors_as_it_may_have() -> None:
    with daemon_with("ulimit -S -n 200; ulimit -H -n 3000") as (process, _):
        assert resource.prlimit(process, resource.RLIMIT_NOFILE) == (3000, 3000)


def test_sessions_leave_no_descriptors_behind_though_their_arrays_live() -> None:
    kept: list[Any] = []

    def once(url: str) -> None:
        with hg.connect(url, shared_memory=True) as session:
            tensors = [session.empty(1000, "u8", buffer_type="shared") for _ in range(3)]
            kept.extend(one.map() for one in tensors)
            kept[-1][:] = 3
            assert tensors[-1].get().tolist() == [3] * 1000

    with daemon_with("true") as (process, url), hg.connect(url) as watcher:
        free, before = watcher.devices[0].memory().free_bytes, descriptors(process)
        for _ in range(50):
            once(url)
        # Connections that are closed go a little later; each question is a round trip.
        for _ in range(2000):
            assert watcher.devices[0].memory().free_bytes == free
            if descriptors(process) <= before:
                break
        assert descriptors(process) <= before
        assert mappings(process) == 1, "that of the session which watches"
        assert {int(one[0]) for one in kept} == {0, 3}


def mappings(process: int) -> int:
    return Path(f"/proc/{process}/maps").read_text().count("memfd:heliograph")


def test_a_tensor_of_one_byte_counts_as_a_page() -> None:
    with hg.connect("local:") as session:
        (device, *_) = session.devices
        before = device.memory().free_bytes
        tensor = session.empty(1, "u8", buffer_type="shared")
        tensor.get()
        assert before - device.memory().free_bytes == mmap.PAGESIZE
        tensor.free()
        session.synchronize()
        assert device.memory().free_bytes == before
    assert [whole_pages(n) // mmap.PAGESIZE for n in (0, 1, mmap.PAGESIZE, mmap.PAGESIZE + 1)] == [1, 1, 1, 2]


# The socket


def test_a_server_without_descriptors_rests_and_serves_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(askers, "REST_SECONDS", 0.05)
    path = tmp_path / "socket"

    async def scenario() -> bytes:
        service = MemoryService(HostSlot(), CommandSockets())
        service.start((Address("unix", path=str(path)),))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.setblocking(False)
            with no_more_descriptors():
                client.connect(f"{path}.memory")
                for _ in range(100):
                    await asyncio.sleep(0)
            told = [one for one in caplog.records if "memory is not shared" in one.message]
            assert len(told) == 1
            client.send(b"\xff\xff\xff")
            answer = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 4096), SECONDS)
        service.close()
        return answer

    with caplog.at_level(logging.WARNING):
        assert b"could not be decoded" in asyncio.run(scenario())


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    """Nothing can be opened in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_peer_that_nobody_knows_is_not_this_user() -> None:
    with socket.socket() as unknown:
        assert not is_of_this_user(unknown)
    # One that is gone cannot be looked at either.
    assert not is_of_this_user(unknown)
    one, other = socket.socketpair()
    with one, other:
        assert is_of_this_user(one)


@pytest.mark.parametrize(("user", "expected"), [(2**31, True), (2**32 - 2, True), (5, False)])
def test_users_have_large_numbers_too(monkeypatch: pytest.MonkeyPatch, user: int, expected: bool) -> None:
    credentials = (1).to_bytes(4, "little") + (user if expected else 6).to_bytes(4, "little") + bytes(4)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    peer: Any = SimpleNamespace(getsockopt=lambda *_: credentials)
    assert is_of_this_user(peer) is expected


@pytest.mark.parametrize(
    ("peer", "here"),
    [
        ("ipv4:127.0.0.1:5000", True),
        ("ipv4:127.9.9.9:5000", True),
        ("ipv6:%5B::1%5D:5000", True),
        ("ipv6:[::1]:5000", True),
        ("ipv4:192.0.2.1:5000", False),
        ("ipv6:%5B2001:db8::1%5D:5000", False),
        ("ipv6:%5Bfe80::1%25nothing0%5D:5000", False),
        ("unix:", False),
        ("", False),
        ("ipv4:somewhere:1", False),
    ],
)
def test_a_client_by_an_address_of_this_host_is_on_it(peer: str, here: bool) -> None:
    assert is_near(peer) is here


# Contents


class Near:
    """A daemon on this loop's thread, and a raw client that shares memory with it."""

    def __init__(self, device: FakeDevice, channel: aio.Channel, token: bytes) -> None:
        self.device = device
        self.token = token
        self.bulk = bulk_pb2_grpc.BulkServiceStub(channel)
        self.sessions = session_pb2_grpc.SessionServiceStub(channel)

    def upload(self, size_bytes: int, piece_bytes: int) -> Any:
        """A call that has sent its first piece."""
        target = bulk_pb2.UploadTarget(session=self.token, digest=digest_of(bytes(size_bytes)))
        target.size_bytes = size_bytes
        request = bulk_pb2.UploadSharedRequest(target=target, size_bytes=piece_bytes)
        return self.bulk.UploadShared(iter([request]), timeout=SECONDS)


def near(scenario: Callable[[Near], Any]) -> None:
    async def play() -> None:
        device = FakeDevice("fake0", 2**28)
        daemon = Daemon(ServerConfig(("grpc://127.0.0.1:0",)), lambda: Host(Registry.of(device)))
        try:
            await daemon.start()
            async with aio.insecure_channel(daemon.addresses[0].grpc_target) as channel:
                opened = await session_pb2_grpc.SessionServiceStub(channel).Open(
                    session_pb2.OpenRequest(version_min=1, version_max=1)
                )
                assert daemon.host is not None
                os.close(daemon.host.session(opened.session).share_memory().descriptor)
                await scenario(Near(device, channel, opened.session))
        finally:
            await daemon.stop()
        assert device.memory().free_bytes == 2**28

    asyncio.run(play())


def test_a_piece_of_a_content_has_a_largest_size() -> None:
    async def scenario(near: Near) -> None:
        with pytest.raises(aio.AioRpcError) as refusal:
            await near.upload(2 * PLACE_BYTES, PLACE_BYTES + 1).read()
        assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = error_from_metadata(tuple(refusal.value.trailing_metadata() or ()))
        assert isinstance(error, hg.LimitExceededError) and "in pieces" in error.advice
        answer = await near.upload(PLACE_BYTES, PLACE_BYTES).read()
        assert answer.received_bytes == PLACE_BYTES

    near(scenario)


def test_a_call_that_breaks_off_while_it_is_hashed_keeps_nobody_waiting() -> None:
    async def scenario(near: Near) -> None:
        gate = near.device.script.hold("set")
        call = near.upload(2 * PLACE_BYTES, PLACE_BYTES)
        reading = asyncio.ensure_future(call.read())
        assert await asyncio.to_thread(gate.entered.wait, SECONDS)
        reading.cancel()
        call.cancel()
        # Its thread is still at work; the loop answers others.
        for _ in range(20):
            request = session_pb2.OpenRequest(version_min=1, version_max=1)
            assert (await near.sessions.Open(request, timeout=5)).session
        assert not gate.opened.is_set()
        gate.open()
        # Bytes that came stay, for the rest of the upload.
        await asyncio.gather(reading, return_exceptions=True)

    near(scenario)
