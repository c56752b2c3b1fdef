"""Memory that comes back: whatever holds it, and however late its work ends."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from core_client import CoreClient
from tenant_hosts import F4, PLAN, TenantHost, X, chain

from heliograph_backends.contract.memory import PIECE_BYTES
from heliograph_backends.cpu.backend import CpuDevice
from heliograph_backends.fake import FakeDevice
from heliograph_proto import commands as c
from heliograph_proto.digests import digest_of
from heliograph_proto.errors import CancelledError, HeliographError
from heliograph_proto.types import tensor_type

SECONDS = 20.0
TENSOR, OTHER, BUFFER = 1, 2, 3
#: More than one piece.
LONG = tensor_type("u8", (PIECE_BYTES + 4096,))


def allocate(client: CoreClient, *numbers: int, device: str = "") -> None:
    for number in numbers:
        client.do(c.Allocate(number, F4, device=device))


def send_write(client: CoreClient) -> None:
    allocate(client, TENSOR)
    client.send(c.SetTensor(TENSOR, 0, X.tobytes()))


def send_read(client: CoreClient) -> None:
    allocate(client, TENSOR)
    client.send(c.GetTensor(TENSOR, 0, X.nbytes))


def send_copy(client: CoreClient) -> None:
    allocate(client, TENSOR, device="other")
    allocate(client, OTHER)
    client.send(c.CopyTensor(TENSOR, OTHER))


def send_allocation(client: CoreClient) -> None:
    client.send(c.Allocate(TENSOR, F4))


def upload(client: CoreClient) -> threading.Thread:
    def write() -> None:
        incoming = client.session.begin_upload(digest_of(X.tobytes()), X.nbytes)
        with pytest.raises(HeliographError):
            incoming.write(0, X.tobytes())
            incoming.finish()

    return _started(write)


def compile_plan(client: CoreClient) -> threading.Thread:
    def compile_it() -> None:
        with pytest.raises(HeliographError):
            client.compile(PLAN, chain())

    return _started(compile_it)


def _started(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("work", "begin"),
    [
        ("set", send_write),
        ("get", send_read),
        ("copy", send_copy),
        ("allocate", send_allocation),
        ("set", upload),
        ("compile", compile_plan),
    ],
    ids=["set", "get", "copy", "allocate", "upload", "compile"],
)
def test_work_that_cannot_be_broken_off_keeps_its_memory_until_it_ends(
    work: str, begin: Callable[[CoreClient], threading.Thread | None]
) -> None:
    device, other = FakeDevice(), FakeDevice("other")
    with TenantHost(device, other) as host:
        client = host.client()
        gate = device.script.hold(work)  # type: ignore[arg-type]
        thread = begin(client)
        assert gate.entered.wait(SECONDS)
        ended = client.session.end(CancelledError("the client left"))
        client.session.close(wait_seconds=0)
        assert not ended.done() and host.usage().sessions == 1
        gate.open()
        ended.result(SECONDS)
        if thread is not None:
            thread.join(SECONDS)
        assert host.usage().is_idle and not host.host.sessions


def test_the_log_says_once_that_a_session_waits_for_work_and_once_that_its_memory_is_free(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    device = FakeDevice()
    waits = threading.Event()

    class Sees(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waits for work" in record.getMessage():
                waits.set()

    handler = Sees()
    logging.getLogger("heliograph_server").addHandler(handler)
    try:
        with TenantHost(device) as host:
            client = host.client()
            gate = device.script.hold("set")
            send_write(client)
            assert gate.entered.wait(SECONDS)
            ended = client.session.end()
            assert waits.wait(SECONDS)
            gate.open()
            ended.result(SECONDS)
    finally:
        logging.getLogger("heliograph_server").removeHandler(handler)
    lines = [one.getMessage() for one in caplog.records]
    assert sum("waits for work" in one for one in lines) == 1
    assert sum("its memory is free" in one for one in lines) == 1


def test_sessions_whose_work_goes_on_hold_up_no_other_sessions_end() -> None:
    device = FakeDevice()
    with TenantHost(device) as host, ThreadPoolExecutor(1) as one_thread:
        client, other = host.client(), host.client()
        gate = device.script.hold("set")
        send_write(client)
        assert gate.entered.wait(SECONDS)
        late = one_thread.submit(client.session.end).result(SECONDS)
        one_thread.submit(other.session.end).result(SECONDS).result(SECONDS)
        assert not late.done()
        gate.open()


def resident_bytes() -> int:
    """The bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_new_tensor_takes_no_pages_before_they_are_used() -> None:
    size = 2**30
    with TenantHost(CpuDevice(threads=1, native=False, memory_bytes=2 * size)) as host:
        client, before = host.client(), resident_bytes()
        client.do(c.AllocateBuffer(BUFFER, size))
        client.do(c.PlaceTensor(TENSOR, BUFFER, size // 2, F4))
        assert not client.get(TENSOR, F4).any()
        assert resident_bytes() - before < size // 2


@pytest.mark.parametrize(
    ("work", "command"),
    [
        ("memset", c.ClearBuffer(BUFFER, 1)),
        ("memset", c.Memset(TENSOR, 0, LONG.nbytes, 1)),
        ("copy", c.CopyTensor(OTHER, TENSOR)),
    ],
    ids=["clear", "fill", "copy"],
)
def test_long_work_on_memory_is_broken_off_between_two_pieces(work: str, command: c.CommandKind) -> None:
    device, other = FakeDevice(), FakeDevice("other")
    with TenantHost(device, other) as host:
        client = host.client()
        client.do(c.AllocateBuffer(BUFFER, LONG.nbytes))
        client.do(c.PlaceTensor(TENSOR, BUFFER, 0, LONG))
        client.do(c.Allocate(OTHER, LONG, "other"))
        gates = [device.script.hold(work) for _ in range(2)]  # type: ignore[arg-type]
        client.send(command)
        assert gates[0].entered.wait(SECONDS)
        ended = client.session.end()
        gates[0].open()
        ended.result(SECONDS)
        assert not gates[1].entered.is_set()
