"""Memory that comes back: whatever holds it, and however late its work ends."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_client import CoreClient
from tenant_hosts import F4, PLAN, TenantHost, X, chain, run_of

from heliograph_backends.contract.memory import PIECE_BYTES
from heliograph_backends.cpu.backend import CpuDevice
from heliograph_backends.fake import FakeDevice
from heliograph_proto import commands as c
from heliograph_proto.digests import digest_of
from heliograph_proto.errors import CancelledError, HeliographError, OutOfMemoryError
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.sessions import Quota
from heliograph_proto.types import tensor_type

SECONDS = 20.0
TENSOR, OTHER, BUFFER = 1, 2, 3
#: The size of a model.
UNIT = 2**17
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


def send_run(client: CoreClient) -> None:
    """A run, whose output is being read."""
    client.compile(PLAN, chain())
    client.send(run_of())


def send_loop(client: CoreClient) -> None:
    """A loop, whose last output is being read."""
    client.compile(PLAN, chain())
    client.send(replace(run_of(), loop=c.Loop(2, (c.Carry(0, 0),))))


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
        ("get", send_run),
        ("get", send_loop),
        ("set", upload),
        ("compile", compile_plan),
    ],
    ids=["set", "get", "copy", "allocate", "run", "loop", "upload", "compile"],
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
    device, waits = FakeDevice(), threading.Event()
    lines: list[str] = []

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            if "waits for work" in lines[-1]:
                waits.set()

    reader, log = Reader(), logging.getLogger("heliograph_server")
    log.addHandler(reader)
    try:
        with caplog.at_level(logging.INFO, "heliograph_server"), TenantHost(device) as host:
            client = host.client()
            gate = device.script.hold("set")
            send_write(client)
            assert gate.entered.wait(SECONDS)
            ended = client.session.end()
            assert waits.wait(SECONDS)
            gate.open()
            ended.result(SECONDS)
            client.session.close()
            threads = [one for one in threading.enumerate() if one.name == "heliograph-release"]
            for thread in threads:
                thread.join(SECONDS)
    finally:
        log.removeHandler(reader)
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


# Weights that no plan uses


def model(number: int, size: int = UNIT) -> tuple[Graph, bytes]:
    """A graph with a weight of its own, and the weight's bytes."""
    data = np.full(size // 4, number, np.float32)
    type = tensor_type("f32", (size // 4,))
    leaves = (Leaf(LeafKind.INPUT, "x", type), Leaf(LeafKind.WEIGHT, "w", type, digest_of(data.tobytes())))
    return Graph(leaves, (Node("add", (0, 1), type),), (Output("y", 2),)), data.tobytes()


def load(client: CoreClient, number: int, **options: Any) -> int:
    """Uploads a model and compiles it, as a client does; the plan's handle."""
    graph, data = model(number)
    if client.session.missing_contents((digest_of(data),)):
        client.upload(data)
    client.compile(PLAN + number, graph, **options)
    return PLAN + number


@pytest.mark.parametrize("devices", [1, 2])
def test_the_weights_of_freed_plans_make_room_for_those_of_others(devices: int) -> None:
    fakes = [FakeDevice(f"fake{number}", 16 * UNIT) for number in range(devices)]
    names = [one.name for one in fakes]
    with TenantHost(*fakes) as host:
        client = host.client()
        for number in range(20 * devices):
            client.do(c.Free((load(client, number, devices=names),)))
        assert host.usage().device_memory_bytes > 0
        assert client.session.missing_contents((digest_of(model(number)[1]),)) == ()


def test_weights_that_no_plan_uses_stay_while_there_is_room() -> None:
    with TenantHost(FakeDevice("fake0", 16 * UNIT)) as host:
        client = host.client()
        for number in range(4):
            client.do(c.Free((load(client, number),)))
        digests = tuple(digest_of(model(number)[1]) for number in range(4))
        assert client.session.missing_contents(digests) == ()


def take_buffer(host: TenantHost, client: CoreClient) -> None:
    client.do(c.AllocateBuffer(BUFFER, 15 * UNIT))


def take_in_another_session(host: TenantHost, client: CoreClient) -> None:
    take_buffer(host, host.client("another"))


def take_output(host: TenantHost, client: CoreClient) -> None:
    client.compile(1, chain())
    client.do(c.AllocateBuffer(BUFFER, 15 * UNIT - 1024))
    client.do(c.RunCommand(1, (c.InputBinding(0, X.tobytes()),), (c.OutputBinding(0, OTHER),)))


def take_variable(host: TenantHost, client: CoreClient) -> None:
    type = tensor_type("f32", (15 * UNIT // 4,))
    leaves = (Leaf(LeafKind.VARIABLE, "v", type),)
    client.compile(1, Graph(leaves, (), (Output("y", 0),)))


def take_weight(host: TenantHost, client: CoreClient) -> None:
    client.upload(bytes(15 * UNIT))


@pytest.mark.parametrize(
    "take", [take_buffer, take_in_another_session, take_output, take_variable, take_weight]
)
def test_weights_that_no_plan_uses_give_way_to_any_allocation(
    take: Callable[[TenantHost, CoreClient], None],
) -> None:
    with TenantHost(FakeDevice("fake0", 16 * UNIT)) as host:
        client = host.client()
        for number in range(12):
            client.do(c.Free((load(client, number),)))
        take(host, client)


def test_weights_of_plans_do_not_give_way() -> None:
    with TenantHost(FakeDevice("fake0", 16 * UNIT)) as host:
        client = host.client()
        plans = [load(client, number) for number in range(4)]
        assert isinstance(client.refused(c.AllocateBuffer(BUFFER, 14 * UNIT)), OutOfMemoryError)
        graph, _ = model(0)
        x = np.ones(UNIT // 4, np.float32)
        run = c.RunCommand(plans[3], (c.InputBinding(0, x.tobytes()),), (c.OutputBinding(0, 0, True),))
        assert np.frombuffer(client.do(run).outputs[0][1], np.float32)[0] == 4


def test_weights_that_a_compile_is_about_to_use_do_not_give_way() -> None:
    with TenantHost(FakeDevice("fake0", 16 * UNIT)) as host:
        client = host.client()
        client.do(c.Free((load(client, 0),)))
        digest = digest_of(model(0)[1])
        assert client.session.missing_contents((digest,)) == ()
        assert isinstance(client.refused(c.AllocateBuffer(BUFFER, 16 * UNIT)), OutOfMemoryError)
        assert client.session.missing_contents((digest,)) == ()
        client.do(c.Free((load(client, 0),)))
        client.do(c.AllocateBuffer(TENSOR, 16 * UNIT))
        assert client.session.missing_contents((digest,)) == (digest,)


def test_weights_that_no_plan_uses_give_way_to_the_tenants_quota() -> None:
    with TenantHost(FakeDevice("fake0"), tenant=Quota(device_memory_bytes=4 * UNIT)) as host:
        client = host.client("tenant")
        for number in range(10):
            client.do(c.Free((load(client, number),)))
        assert host.usage("tenant").device_memory_bytes <= 4 * UNIT


def test_freed_tensors_give_back_the_quota() -> None:
    with TenantHost(FakeDevice("fake0"), tenant=Quota(device_memory_bytes=4 * UNIT)) as host:
        client = host.client("tenant")
        for number in range(1, 20):
            client.do(c.AllocateBuffer(number, 3 * UNIT))
            client.do(c.Free((number,)))
        assert host.usage("tenant").device_memory_bytes == 0


@pytest.mark.parametrize("limits", [{}, {"fake0": 1000}], ids=["quota", "limit"])
def test_a_refusal_by_a_right_takes_no_weights_of_other_tenants(limits: dict[str, int]) -> None:
    quota = Quota(device_memory_bytes=0 if limits else UNIT)
    with TenantHost(FakeDevice("fake0"), small=quota) as host:
        client, small = host.client("large"), host.client("small")
        client.do(c.Free((load(client, 0),)))
        type = tensor_type("f32", (UNIT,))
        graph = Graph((Leaf(LeafKind.VARIABLE, "v", type),), (), (Output("y", 0),))
        with pytest.raises(OutOfMemoryError):
            small.compile(PLAN, graph, memory=limits)
        assert client.session.missing_contents((digest_of(model(0)[1]),)) == ()
