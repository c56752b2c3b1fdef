"""The remote backend: a daemon's device behind the backend contract, and behind another daemon."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
from core_client import CoreClient
from daemon_urls import DaemonUrls
from forked_daemons import running_daemon

import heliograph as hg
from heliograph_backends.conformance import run
from heliograph_backends.contract import Abort, DeviceCompileOptions, LeafBindings, Tensor, host_bytes
from heliograph_backends.contract.access import copy
from heliograph_backends.cpu.backend import CpuDevice
from heliograph_proto import commands as c
from heliograph_proto.devices import CopyPath
from heliograph_proto.errors import MemberLostError, UnavailableError, UnsupportedError
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.types import tensor_type
from heliograph_server.pool import RemoteBackend, RemoteDevice, open_device

F4 = tensor_type("f32", (4,))
SUM = Graph(
    (Leaf(LeafKind.INPUT, "x", F4), Leaf(LeafKind.WEIGHT, "w", F4)),
    (Node("add", (0, 1), F4),),
    (Output("y", 2),),
)


@pytest.fixture
def device(daemon: DaemonUrls) -> Iterator[RemoteDevice]:
    """The daemon's device, as a backend's."""
    with open_device(daemon.tcp) as made:
        before = made.memory()
        yield made
        assert made.memory() == before


def placed(device: RemoteDevice, value: float) -> Tensor:
    buffer = device.buffer_type.allocate(16)
    tensor = Tensor(F4, buffer)
    buffer.set(0, host_bytes(np.full(4, value, "f4")))
    return tensor


def elements(tensor: Tensor) -> list[float]:
    found = np.empty(4, "f4")
    tensor.buffer.get(0, host_bytes(found))
    values: list[float] = found.tolist()
    return values


@pytest.mark.slow
def test_the_conformance_suite_passes_through_the_daemon(daemon: DaemonUrls) -> None:
    with open_device(daemon.unix) as device:
        report = run(device, quick=True)
    assert not report.failures, "\n".join(map(str, report.failures))
    assert len(report.results) > 500


def test_its_name_says_where_it_is_and_its_features_which_member(device: RemoteDevice) -> None:
    assert device.name.endswith("/cpu0") and device.name.startswith("127.0.0.1:")
    assert device.features()["member backend"] == "cpu"
    assert device.backend == "remote"


def test_a_run_writes_its_outputs_in_place_and_weights_stay_on_the_member(device: RemoteDevice) -> None:
    x, w, y = placed(device, 1), placed(device, 3), placed(device, 0)
    plan = device.compile(SUM, LeafBindings({1: w}, {}), DeviceCompileOptions())
    plan.compute([x], [y], Abort())
    assert elements(y) == [4, 4, 4, 4]
    other = plan.update(SUM, LeafBindings({1: x}, {}), DeviceCompileOptions())
    other.compute([x], [y], Abort())
    assert elements(y) == [2, 2, 2, 2]
    other.free()
    for tensor in (x, w, y):
        tensor.buffer.free()


def test_inputs_and_outputs_of_other_devices_are_copied(device: RemoteDevice) -> None:
    cpu = CpuDevice(threads=1, native=False)
    w = placed(device, 3)
    x, y = (Tensor(F4, cpu.buffer_type.allocate(16)) for _ in range(2))
    x.array[:] = 1
    plan = device.compile(SUM, LeafBindings({1: w}, {}), DeviceCompileOptions())
    plan.compute([x], [y], Abort())
    assert y.array.tolist() == [4, 4, 4, 4]
    plan.free()
    for tensor in (x, w, y):
        tensor.buffer.free()
    cpu.close()


def test_a_copy_between_tensors_of_one_member_stays_there(device: RemoteDevice) -> None:
    one, two = placed(device, 5), placed(device, 0)
    assert copy(one, two) is CopyPath.DESTINATION
    assert elements(two) == [5, 5, 5, 5]
    cpu = CpuDevice(threads=1, native=False)
    here = Tensor(F4, cpu.buffer_type.allocate(16))
    assert copy(two, here) is CopyPath.HOST
    assert here.array.tolist() == [5, 5, 5, 5]
    for tensor in (one, two, here):
        tensor.buffer.free()
    cpu.close()


def test_memory_of_a_member_is_no_array_of_this_process(device: RemoteDevice) -> None:
    tensor = placed(device, 1)
    with pytest.raises(UnsupportedError, match="another host"):
        _ = tensor.array
    tensor.buffer.free()


def test_the_member_is_asked_about_an_op_once(device: RemoteDevice) -> None:
    sent = []
    ask = device.member_device.query
    device.member_device.query = lambda queries: (sent.append(queries), ask(queries))[1]  # type: ignore[method-assign]
    for _ in range(3):
        assert device.supports_op("add", {}, (F4, F4), F4) == ""
        assert not device.offload_op("add", {}, (F4, F4), F4)
    assert len(sent) == 1


def test_a_member_that_nobody_answers_for_says_so_instead_of_vanishing() -> None:
    backend = RemoteBackend([{"url": "grpc://127.0.0.1:1"}])
    assert not backend.devices() and "127.0.0.1:1" in backend.why_unavailable()
    assert "no member" in RemoteBackend([{}]).why_unavailable()


def test_a_daemon_offers_the_device_of_another_one_and_graphs_run_through_both(daemon: DaemonUrls) -> None:
    with (
        running_daemon("--device", f"remote:url={daemon.tcp}#cpu0", "--device", "cpu:threads=1") as url,
        hg.connect(url) as session,
    ):
        remote, own = session.devices
        assert remote.name.endswith("/cpu0") and own.name == "cpu0"
        g = hg.Graph()
        x = g.input("x", (4, 3), "f32")
        w = g.weight("w", np.arange(6, dtype=np.float32).reshape(3, 2))
        count = g.variable("count", (), "f32")
        g.output("y", x @ w)
        g.output("count", hg.assign(count, count + 1.0))
        array = np.arange(12, dtype=np.float32).reshape(4, 3)
        found = [session.compile(g, remote).run(x=array) for _ in range(2)]
        with hg.connect("local:") as local:
            expected = local.compile(g).run(x=array)["y"]
        for number, outputs in enumerate(found, 1):
            assert np.array_equal(outputs["y"], expected) and outputs["count"] == number
        moved = session.empty((4,), "f32", own)
        session.put(np.full(4, 7, np.float32), remote).copy_to(moved)
        assert moved.get().tolist() == [7, 7, 7, 7]


def test_a_member_that_is_lost_ends_what_waits_for_it_with_a_typed_error() -> None:
    with running_daemon("--device", "cpu:threads=1,memory=64MiB") as url:
        member = open_device(url)
        device = member.__enter__()
        tensor = placed(device, 1)
    for use in (
        lambda: elements(tensor),
        lambda: device.compile(SUM, LeafBindings({1: tensor}, {}), DeviceCompileOptions()),
        lambda: device.buffer_type.allocate(16),
        device.memory,
    ):
        with pytest.raises(MemberLostError, match=re.escape(url)):
            use()
    tensor.buffer.free()
    member.__exit__(None, None, None)


def test_a_daemon_whose_member_is_missing_says_why_and_does_not_start(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with (
        pytest.raises(UnavailableError, match="did not start"),
        running_daemon("--device", "remote:url=grpc://127.0.0.1:1"),
    ):
        pass
    assert "grpc://127.0.0.1:1" in capfd.readouterr().err


def test_devices_of_one_member_share_a_session_and_copies_between_them_stay_there() -> None:
    with running_daemon("--device", "cpu:threads=1,memory=64MiB", "--device", "cpu:threads=1") as url:
        backend = RemoteBackend([{"url": url}])
        first, second = backend.devices()
        assert first.session is second.session
        one, two = placed(first, 5), placed(second, 0)
        assert copy(one, two) is CopyPath.DESTINATION
        assert elements(two) == [5, 5, 5, 5]
        result = placed(second, 0)
        plan = second.compile(SUM, LeafBindings({1: two}, {}), DeviceCompileOptions())
        plan.compute([one], [result], Abort())
        assert elements(result) == [10, 10, 10, 10]
        plan.free()
        for tensor in (one, two, result):
            tensor.buffer.free()
        first.close()
        assert not second.session.closed, "the other device of the member is still there"
        second.close()
        assert second.session.closed


def test_nodes_on_a_member_are_observed(daemon: DaemonUrls) -> None:
    chain = Graph(
        (Leaf(LeafKind.INPUT, "x", F4),),
        (Node("neg", (0,), F4), Node("sqr", (1,), F4), Node("neg", (2,), F4)),
        (Output("y", 3),),
    )
    given = c.InputBinding(0, np.full(4, 3, "f4").tobytes())
    with open_device(daemon.tcp) as own, CoreClient(own) as client:
        client.compile(100, chain, taps=(0, 1))
        for pause in (False, True):
            client.taps.clear()
            run = client.send(c.RunCommand(100, (given,), (c.OutputBinding(0, fetch=True),), pause))
            for count in (1, 2) if pause else ():
                client.wait_for_taps(count)
                client.do(c.Continue(run))
            assert np.frombuffer(client.wait(run).outputs[0][1], "f4").tolist() == [-9] * 4
            told = [(one.node, np.frombuffer(one.data, "f4")[0]) for one in client.taps]
            assert told == [(0, -3), (1, 9)]
