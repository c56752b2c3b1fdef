"""A session in an image, put into another host: every value and every later run has the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from core_client import CoreClient
from state_hosts import (
    BUFFER,
    EVENT,
    F4,
    F22,
    F44,
    OTHER,
    PLACED,
    PLAN,
    STREAM,
    TENSOR,
    VIEW,
    W,
    X,
    abandon,
    adder,
    product,
    restarted,
    state_host,
)
from waiting import until

from heliograph_backends.contract import Device
from heliograph_backends.cpu import CpuDevice
from heliograph_backends.fake import FakeDevice
from heliograph_proto import commands as c
from heliograph_proto.devices import Usage
from heliograph_proto.errors import (
    HeliographError,
    NotReplayableError,
    SessionClosedError,
    SnapshotFailedError,
    UnknownHandleError,
    UnsupportedError,
)
from heliograph_proto.types import tensor_type


def run(client: CoreClient, plan: int = PLAN, x: np.ndarray = X, stream: int = 0) -> np.ndarray:
    given = c.InputBinding(0, x.tobytes())
    sent = client.send(c.RunCommand(plan, (given,), (c.OutputBinding(0, 0, True),)), stream)
    done = client.wait(sent)
    if done.error is not None:
        raise done.error
    return np.frombuffer(done.outputs[0][1], np.float32)


def cpu() -> list[Device]:
    return [CpuDevice()]


@pytest.fixture
def again(tmp_path: Path) -> Callable[..., None]:
    """Runs one function before and another one after a restart."""

    def both(before: Callable[[CoreClient], None], after: Callable[[CoreClient], None]) -> None:
        restarted(tmp_path, cpu, before, after)

    return both


def test_tensors_views_and_buffers_come_back(again: Callable[..., None]) -> None:
    def before(client: CoreClient) -> None:
        client.do(c.Allocate(TENSOR, F22))
        client.do(c.View(VIEW, TENSOR, 4, tensor_type("f32", (2,)), (8,)))
        client.do(c.SetTensor(TENSOR, 0, X.tobytes()))
        client.do(c.AllocateBuffer(BUFFER, 1024, usage=Usage.WEIGHTS))
        client.do(c.PlaceTensor(PLACED, BUFFER, 64, F4))
        client.do(c.SetTensor(PLACED, 0, (2 * X).tobytes()))

    def after(client: CoreClient) -> None:
        assert client.get(TENSOR, F22).tolist() == [[1, 2], [3, 4]]
        assert client.get(VIEW, tensor_type("f32", (2,))).tolist() == [2, 4]
        assert client.get(PLACED, F4).tolist() == [2, 4, 6, 8]
        # They share their bytes as before.
        client.do(c.SetTensor(VIEW, 0, np.float32([7, 9]).tobytes()))
        assert client.get(TENSOR, F22).tolist() == [[1, 7], [3, 9]]
        client.do(c.ClearBuffer(BUFFER, 0))
        assert client.get(PLACED, F4).tolist() == [0, 0, 0, 0]
        client.do(c.Free((TENSOR,)))
        assert client.get(VIEW, tensor_type("f32", (2,))).tolist() == [7, 9]
        assert "in use" in client.refused(c.Allocate(BUFFER, F4)).message

    again(before, after)


def test_variables_and_plans_go_on_where_they_were(again: Callable[..., None]) -> None:
    def before(client: CoreClient) -> None:
        client.compile(PLAN, adder())
        for _ in range(3):
            run(client)

    def after(client: CoreClient) -> None:
        assert run(client).tolist() == (4 * X).tolist()
        # A second plan shares the variable by its name.
        client.compile(OTHER, adder())
        assert run(client, OTHER).tolist() == (5 * X).tolist()
        assert run(client).tolist() == (6 * X).tolist()

    again(before, after)


def test_weights_are_read_from_the_folder(again: Callable[..., None]) -> None:
    def before(client: CoreClient) -> None:
        client.compile(PLAN, product(client.upload(W.tobytes())))
        assert run(client).tolist() == (X @ W).tolist()

    def after(client: CoreClient) -> None:
        assert run(client).tolist() == (X @ W).tolist()

    again(before, after)


def test_a_bound_tensor_whose_handle_was_freed_stays_the_weight_of_its_plan(
    again: Callable[..., None],
) -> None:
    def before(client: CoreClient) -> None:
        client.do(c.Allocate(TENSOR, F44))
        client.do(c.SetTensor(TENSOR, 0, W.tobytes()))
        client.compile(PLAN, product(b""), {1: TENSOR})
        client.do(c.Free((TENSOR,)))

    def after(client: CoreClient) -> None:
        assert run(client).tolist() == (X @ W).tolist()
        client.do(c.Free((PLAN,)))
        assert client.session.statistics().tensor_bytes == 0

    again(before, after)


def test_streams_and_events_come_back(again: Callable[..., None]) -> None:
    def before(client: CoreClient) -> None:
        client.do(c.CreateStream(STREAM, "cpu0"))
        client.compile(PLAN, adder())
        run(client, stream=STREAM)
        client.send(c.Record(EVENT), STREAM)

    def after(client: CoreClient) -> None:
        client.send(c.WaitCommand(EVENT))
        assert run(client, stream=STREAM).tolist() == (2 * X).tolist()
        assert "in use" in client.refused(c.CreateStream(STREAM, "cpu0")).message

    again(before, after)


def test_poison_comes_back_with_its_origin(again: Callable[..., None]) -> None:
    def before(client: CoreClient) -> None:
        client.do(c.Allocate(TENSOR, F4))
        client.refused(c.View(VIEW, 77, 0, F4))

    def after(client: CoreClient) -> None:
        error = client.refused(c.GetTensor(VIEW, 0, 16))
        assert isinstance(error, UnknownHandleError) and error.origin.sequence == 2
        assert client.get(TENSOR, F4).tolist() == [0, 0, 0, 0]

    again(before, after)


def test_several_devices_each_have_their_tensors(tmp_path: Path) -> None:
    def devices() -> list[Device]:
        return [FakeDevice(name="a", memory_bytes=2**20), FakeDevice(name="b", memory_bytes=2**20)]

    def before(client: CoreClient) -> None:
        for number, device in enumerate("ab", 1):
            client.do(c.Allocate(number, F4, device))
            client.do(c.SetTensor(number, 0, (number * X).tobytes()))
        client.compile(PLAN, adder(), devices=["a", "b"])
        run(client)

    def after(client: CoreClient) -> None:
        assert client.get(1, F4).tolist() == X.tolist() and client.get(2, F4).tolist() == (2 * X).tolist()
        assert run(client).tolist() == (2 * X).tolist()

    restarted(tmp_path, devices, before, after)


def test_a_device_that_is_gone_takes_only_what_was_on_it(tmp_path: Path) -> None:
    names = ["a", "b"]

    def devices() -> list[Device]:
        return [FakeDevice(name=name, memory_bytes=2**20) for name in names]

    def before(client: CoreClient) -> None:
        for number, device in enumerate("ab", 1):
            client.do(c.Allocate(number, F4, device))
            client.do(c.SetTensor(number, 0, X.tobytes()))
        client.compile(PLAN, adder(), devices=["b"])
        names.pop()

    def after(client: CoreClient) -> None:
        assert client.get(1, F4).tolist() == X.tolist()
        assert "b" in client.refused(c.GetTensor(2, 0, 16)).message
        with pytest.raises(HeliographError, match="b"):
            run(client)

    restarted(tmp_path, devices, before, after)


def test_only_what_changed_is_written(tmp_path: Path) -> None:
    big = tensor_type("f32", (2**18,))
    with state_host(tmp_path, *cpu()) as host, CoreClient(host=host, durable=True) as client:
        assert host.snapshots is not None
        values = np.random.default_rng(0).random(2**18, np.float32)
        for number in (1, 2):
            client.do(c.Allocate(number, big))
            for start in range(0, big.nbytes, 2**16):
                data = (number * values).tobytes()[start : start + 2**16]
                client.send(c.SetTensor(number, start, data))
        first = host.snapshots.take(client.session)
        assert first.written_bytes == first.size_bytes == 2 * big.nbytes
        assert host.snapshots.take(client.session).written_bytes == 0
        client.do(c.SetTensor(2, 0, bytes(4)))
        assert host.snapshots.take(client.session).written_bytes == big.nbytes
        client.do(c.Free((1, 2)))
        for _ in range(2):
            host.snapshots.take(client.session)
        store = host.snapshots.store
        until(lambda: store.size_bytes() < 2**16)
        with client.session._lock:
            assert client.durable_through == client.session.commands


def test_a_session_that_ends_leaves_nothing_on_disk(tmp_path: Path) -> None:
    with state_host(tmp_path, *cpu()) as host:
        with CoreClient(host=host, durable=True) as client:
            client.do(c.Allocate(TENSOR, F4))
            assert host.snapshots is not None
            host.snapshots.take(client.session)
            client.session.close()
            with pytest.raises((SessionClosedError, UnsupportedError)):
                host.snapshots.take(client.session)
        assert not list((tmp_path / "sessions").iterdir())


def test_an_upgrade_keeps_the_last_command(tmp_path: Path) -> None:
    with state_host(tmp_path, *cpu()) as host:
        client = CoreClient(host=host, durable=True)
        client.compile(PLAN, adder())
        run(client)
    with state_host(tmp_path, *cpu()) as host:
        assert run(CoreClient(host=host, token=client.token)).tolist() == (2 * X).tolist()


def test_a_run_that_does_not_end_lets_no_snapshot_wait_for_long(tmp_path: Path) -> None:
    device = FakeDevice(memory_bytes=2**20)
    with state_host(tmp_path, device) as host, CoreClient(host=host, durable=True) as client:
        client.compile(PLAN, adder(), taps=[0])
        given = c.InputBinding(0, X.tobytes())
        paused = client.send(c.RunCommand(PLAN, (given,), (), pause=True))
        client.wait_for_taps(1)
        assert host.snapshots is not None
        with pytest.raises(SnapshotFailedError, match="commands are under way"):
            host.snapshots.take(client.session, 0.05)
        # A command that lets the run go on is not kept back.
        client.send(c.Continue(paused))
        client.wait(paused)
        assert host.snapshots.take(client.session).sequence == 2


def test_another_session_cannot_be_reached_by_what_is_on_disk(tmp_path: Path) -> None:
    with state_host(tmp_path, *cpu()) as host:
        client = CoreClient(host=host, durable=True)
        client.do(c.Allocate(TENSOR, F4))
    name = next((tmp_path / "sessions").iterdir()).name
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert client.token not in files
    with state_host(tmp_path, *cpu()) as host:
        with pytest.raises(SessionClosedError):
            host.session(bytes.fromhex(name))
        host.session(client.token).close()


def test_a_mapped_tensor_says_that_it_was_mapped(again: Callable[..., None]) -> None:
    import os

    def before(client: CoreClient) -> None:
        client.do(c.Allocate(TENSOR, F4, buffer_type="shared"))
        os.close(client.session.share_tensor(TENSOR).descriptor)

    def after(client: CoreClient) -> None:
        error = client.refused(c.GetTensor(TENSOR, 0, 16))
        assert isinstance(error, NotReplayableError) and "mapped" in error.message
        client.do(c.SetTensor(TENSOR, 0, X.tobytes()))
        assert client.get(TENSOR, F4).tolist() == X.tolist()

    again(before, after)


def test_snapshots_are_taken_by_themselves(tmp_path: Path) -> None:
    with state_host(tmp_path, *cpu(), runs=1) as host, CoreClient(host=host, durable=True) as client:
        client.compile(PLAN, adder())
        run(client)
        with client._changed:
            assert client._changed.wait_for(lambda: client.durable_through == 1, 10)
        abandon(host)
