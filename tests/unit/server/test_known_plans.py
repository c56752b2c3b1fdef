"""Compiling again what a session has a plan of: one plan with several handles, and how long it stays."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from core_client import CoreClient
from graph_arrivals import F4, X, chain, compile_received, output_of

from heliograph_backends.cpu.backend import CpuDevice
from heliograph_backends.fake import FakeDevice
from heliograph_proto import commands as c
from heliograph_proto.devices import DeviceChange
from heliograph_proto.errors import (
    ComputeFailedError,
    DeviceLostError,
    InvalidArgumentError,
    MemberLostError,
    OutOfMemoryError,
)
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.types import tensor_type
from heliograph_server.compile.plan_cache import MOST_IDLE, MOST_IDLE_BYTES
from heliograph_server.resources.membership import MembershipChange

MIB = 2**20
#: So much that two plans of `tall` do not fit beside each other.
ROWS = 4096
TALL = tensor_type("f32", (ROWS, 64))
SUM = Graph(
    (Leaf(LeafKind.INPUT, "x", F4), Leaf(LeafKind.WEIGHT, "w", F4)),
    (Node("add", (0, 1), F4),),
    (Output("y", 2),),
)
COUNT = Graph(
    (Leaf(LeafKind.INPUT, "x", F4), Leaf(LeafKind.VARIABLE, "count", F4)),
    (Node("add", (0, 1), F4), Node("assign", (1, 2), F4)),
    (Output("count", 3),),
)


def tall(name: str = "y") -> Graph:
    """A graph that needs a MiB between its two nodes."""
    nodes = (Node("soft_max", (0,), TALL), Node("soft_max", (1,), TALL))
    return Graph((Leaf(LeafKind.INPUT, "x", TALL),), nodes, (Output(name, 2),))


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice(memory_bytes=3 * MIB)


@pytest.fixture
def client(device: FakeDevice) -> Iterator[CoreClient]:
    with CoreClient(device) as made:
        yield made


def idle(client: CoreClient) -> int:
    return client.session.statistics().idle_plans


def never_compiles(device: FakeDevice) -> None:
    device.script.fail("compile", ComputeFailedError("it was compiled again"))


# One plan, several handles


def test_what_is_compiled_again_is_the_same_plan(client: CoreClient, device: FakeDevice) -> None:
    first = compile_received(client, 100, tall())
    free = device.memory().free_bytes
    never_compiles(device)
    second = compile_received(client, 101, tall())
    assert (first.compute_bytes, first.steps) == (second.compute_bytes, second.steps)
    assert device.memory().free_bytes == free
    assert client.session.statistics().plans == 2
    client.do(c.Free((100,)))
    client.do(c.Allocate(200, TALL))
    client.do(c.RunCommand(101, (c.InputBinding(0, None, 200),), ()))
    assert idle(client) == 0


def test_runs_of_all_its_handles_wait_for_each_other(client: CoreClient, device: FakeDevice) -> None:
    for plan in (100, 101):
        compile_received(client, plan, chain("neg"))
    streams = (300, 301)
    for stream in streams:
        client.do(c.CreateStream(stream))
    gate = device.script.hold("compute")
    second = device.script.hold("compute")
    given, wanted = (c.InputBinding(0, X.tobytes()),), (c.OutputBinding(0, 0, True),)
    runs = [
        client.send(c.RunCommand(plan, given, wanted), stream)
        for plan, stream in zip((100, 101), streams, strict=True)
    ]
    assert gate.entered.wait(10)
    assert not second.entered.wait(0.05)
    gate.open()
    assert second.entered.wait(10)
    second.open()
    for run in runs:
        assert np.array_equal(np.frombuffer(client.wait(run).outputs[0][1], np.float32), -X)


@pytest.mark.parametrize("wish", [{"fusion": False}, {"threads": 1}, {"memory": {"fake0": 2 * MIB}}])
def test_what_is_compiled_otherwise_is_another_plan(
    client: CoreClient, device: FakeDevice, wish: dict[str, object]
) -> None:
    compile_received(client, 100, chain("neg", "sqr"))
    never_compiles(device)
    with pytest.raises(ComputeFailedError):
        compile_received(client, 101, chain("neg", "sqr"), **wish)


def test_another_name_is_another_plan(client: CoreClient, device: FakeDevice) -> None:
    compile_received(client, 100, tall("y"))
    assert [port.name for port in compile_received(client, 101, tall("z")).outputs] == ["z"]


def test_a_plan_is_bound_to_tensors_and_not_to_their_numbers(client: CoreClient) -> None:
    for plan, value in ((100, 1.0), (101, 2.0)):
        client.do(c.Allocate(1, F4))
        client.do(c.SetTensor(1, 0, np.full(4, value, "f4").tobytes()))
        compile_received(client, plan, SUM, bindings={1: 1})
        compile_received(client, plan + 10, SUM, bindings={1: 1})
        client.do(c.Free((1,)))
    for plan, value in ((100, 1.0), (101, 2.0), (110, 1.0), (111, 2.0)):
        assert output_of(client, plan) == (X + np.float32(value)).tolist()


def test_all_handles_of_a_plan_see_what_is_written_to_its_weight(client: CoreClient) -> None:
    client.do(c.Allocate(1, F4))
    client.do(c.SetTensor(1, 0, np.ones(4, "f4").tobytes()))
    for plan in (100, 101):
        compile_received(client, plan, SUM, bindings={1: 1})
    client.do(c.Memset(1, 0, 16, 0))
    assert output_of(client, 100) == output_of(client, 101) == X.tolist()
    client.do(c.Free((100,)))
    client.do(c.SetTensor(1, 0, np.ones(4, "f4").tobytes()))
    assert output_of(client, 101) == (X + np.float32(1)).tolist()


def test_handles_of_one_plan_share_its_variables(client: CoreClient) -> None:
    for plan in (100, 101):
        compile_received(client, plan, COUNT)
    assert output_of(client, 100) == X.tolist()
    assert output_of(client, 101) == (2 * X).tolist()


def test_a_compile_that_is_refused_for_its_handle_leaves_the_plan_alone(client: CoreClient) -> None:
    compile_received(client, 100, chain("neg"))
    with pytest.raises(Exception, match="in use"):
        compile_received(client, 100, chain("neg"))
    client.do(c.Free((100,)))
    assert (idle(client), client.session.statistics().plans) == (1, 0)


# Without a handle


def test_a_plan_without_a_handle_is_found_again(client: CoreClient, device: FakeDevice) -> None:
    compile_received(client, 100, tall())
    client.do(c.Free((100,)))
    assert idle(client) == 1
    never_compiles(device)
    compile_received(client, 100, tall())
    assert idle(client) == 0


def test_one_that_is_found_again_has_not_run_yet(client: CoreClient) -> None:
    compile_received(client, 100, chain("neg"))
    output_of(client, 100)
    assert client.session.explain(100).splits[0].compute_us > 0
    client.do(c.Free((100,)))
    compile_received(client, 101, chain("neg"))
    assert client.session.explain(101).splits[0].compute_us == 0


def test_a_pipeline_that_is_found_again_has_its_lanes_again() -> None:
    devices = [FakeDevice(f"fake{number}", MIB, is_host=False) for number in range(2)]
    host = CpuDevice("cpu0", threads=1, native=False, memory_bytes=MIB)
    wish = {"devices": ("fake0", "fake1"), "pins": {0: "fake0", 1: "fake1"}, "pipeline": 2}
    with CoreClient(*devices, host) as client:
        compile_received(client, 100, chain("neg", "sqr"), **wish)
        for plan in range(100, 105):
            for device in devices if plan > 100 else ():
                never_compiles(device)
            assert compile_received(client, plan + 1, chain("neg", "sqr"), **wish).pipeline == 2
            client.do(c.Free((plan,)))
            given, wanted = (c.InputBinding(0, X.tobytes()),), (c.OutputBinding(0, 0, True),)
            runs = [client.send(c.RunCommand(plan + 1, given, wanted)) for _ in range(4)]
            for run in runs:
                assert np.frombuffer(client.wait(run).outputs[0][1], np.float32).tolist() == (X * X).tolist()
        for _ in range(2):
            client.do(c.Free((105,)))
            assert idle(client) == 1
            compile_received(client, 105, chain("neg", "sqr"), **wish)
            assert output_of(client, 105) == (X * X).tolist()


def test_what_it_takes_counts_as_free(client: CoreClient, device: FakeDevice) -> None:
    free = client.host.memory().free_bytes
    compile_received(client, 100, tall())
    assert client.host.memory().free_bytes < free
    client.do(c.Free((100,)))
    assert client.host.memory().free_bytes == free == client.host.device_list().devices[0].memory.free_bytes
    assert device.memory().free_bytes == free - client.session.statistics().idle_bytes < free


def test_of_many_plans_without_a_handle_those_used_last_stay(client: CoreClient, device: FakeDevice) -> None:
    graphs = [chain(*["neg"] * count) for count in range(1, MOST_IDLE + 2)]
    for graph in graphs:
        compile_received(client, 100, graph)
        client.do(c.Free((100,)))
    assert idle(client) == MOST_IDLE
    compile_received(client, 100, graphs[0])
    never_compiles(device)
    compile_received(client, 101, graphs[-1])


def test_a_plan_that_takes_much_memory_goes_with_its_last_handle() -> None:
    size = MOST_IDLE_BYTES // 4 + 64
    type = tensor_type("f32", (1, size))
    nodes = (Node("soft_max", (0,), type), Node("soft_max", (1,), type))
    graph = Graph((Leaf(LeafKind.INPUT, "x", type),), nodes, (Output("y", 2),))
    with CoreClient(FakeDevice(memory_bytes=4 * MOST_IDLE_BYTES)) as client:
        compile_received(client, 101, chain("neg"))
        client.do(c.Free((101,)))
        assert compile_received(client, 100, graph).compute_bytes > MOST_IDLE_BYTES
        client.do(c.Free((100,)))
        assert idle(client) == 1


# Whoever wants memory


def big(client: CoreClient, number: int = 50) -> c.AllocateBuffer:
    """All but a little of what the device says is free."""
    return c.AllocateBuffer(number, client.host.memory().free_bytes - 1024)


def test_memory_for_a_tensor_comes_from_plans_without_a_handle(client: CoreClient) -> None:
    compile_received(client, 100, tall())
    client.do(c.Free((100,)))
    client.do(big(client))
    assert idle(client) == 0


def test_memory_for_a_plan_comes_from_plans_without_a_handle(client: CoreClient) -> None:
    compile_received(client, 100, tall())
    client.do(c.Free((100,)))
    client.do(c.AllocateBuffer(50, 3 * MIB // 2))
    compile_received(client, 101, tall("z"))
    assert idle(client) == 0


def test_memory_for_a_content_comes_from_plans_without_a_handle(client: CoreClient) -> None:
    compile_received(client, 100, tall())
    client.do(c.Free((100,)))
    client.upload(bytes(client.host.memory().free_bytes - 1024))
    assert idle(client) == 0


def test_memory_for_an_output_comes_from_plans_without_a_handle(client: CoreClient) -> None:
    wide = chain("neg", size=MIB // 4)
    compile_received(client, 100, tall())
    compile_received(client, 101, wide)
    client.do(c.AllocateBuffer(50, MIB - 1024))
    client.do(c.Allocate(1, tensor_type("f32", (MIB // 4,))))
    assert isinstance(
        client.refused(c.RunCommand(101, (c.InputBinding(0, None, 1),), (c.OutputBinding(0, 2),))),
        OutOfMemoryError,
    )
    client.do(c.Free((100,)))
    client.do(c.RunCommand(101, (c.InputBinding(0, None, 1),), (c.OutputBinding(0, 3),)))
    assert idle(client) == 0


def test_one_sessions_idle_memory_is_never_why_another_has_none(client: CoreClient) -> None:
    compile_received(client, 100, tall())
    client.do(c.Free((100,)))
    other = client.host.session(client.host.open_session("other").session)
    size = client.host.memory().free_bytes - 1024
    upload = other.begin_upload(bytes(32), size)
    upload.abort(InvalidArgumentError("no matter"))
    other.close()
    assert idle(client) == 0


# Updates


def test_an_update_takes_over_no_memory_that_another_handle_uses(client: CoreClient) -> None:
    for plan in (100, 101):
        compile_received(client, plan, chain("neg", "sqr"))
    compile_received(client, 102, chain("sqr", "neg"), updates=100)
    assert output_of(client, 101) == (X * X).tolist()
    assert output_of(client, 102) == (-X * X).tolist()


def test_an_update_to_a_graph_that_is_known_is_that_plan(client: CoreClient, device: FakeDevice) -> None:
    compile_received(client, 100, chain("neg"))
    compile_received(client, 101, chain("sqr"))
    never_compiles(device)
    compile_received(client, 102, chain("neg"), updates=101)
    compile_received(client, 103, chain("neg"), updates=102)
    client.do(c.Free((100,)))
    assert output_of(client, 103) == (-X).tolist()


def test_what_was_updated_is_not_found_again(client: CoreClient) -> None:
    compile_received(client, 100, chain("neg", "sqr"))
    compile_received(client, 101, chain("sqr", "neg"), updates=100)
    compile_received(client, 102, chain("neg", "sqr"))
    assert output_of(client, 102) == (X * X).tolist()
    client.do(c.Free((101, 102)))


# All of it


@pytest.mark.parametrize("seed", range(4))
def test_random_compiles_runs_and_frees_give_what_each_graph_gives(seed: int) -> None:
    chance = random.Random(seed)
    graphs = [chain(*(chance.choice(("neg", "sqr")) for _ in range(count))) for count in range(1, 9)]
    with CoreClient(CpuDevice(threads=1, native=False, memory_bytes=MIB)) as client:
        live: dict[int, Graph] = {}
        for number in range(100, 300):
            match chance.choice(("compile", "run", "free", "update")):
                case "compile":
                    live[number] = chance.choice(graphs)
                    compile_received(client, number, live[number])
                case "update" if live:
                    old = chance.choice(list(live))
                    del live[old]
                    live[number] = chance.choice(graphs)
                    compile_received(client, number, live[number], updates=old)
                case "run" if live:
                    plan = chance.choice(list(live))
                    expected = X
                    for node in live[plan].nodes:
                        expected = -expected if node.op == "neg" else expected * expected
                    assert output_of(client, plan) == expected.tolist(), f"seed {seed}"
                case "free" if live:
                    gone = chance.choice(list(live))
                    del live[gone]
                    client.do(c.Free((gone,)))
        assert client.session.statistics().plans == len(live), f"seed {seed}"


def test_sessions_that_want_memory_at_once_do_not_wait_for_each_other(client: CoreClient) -> None:
    others = [client.host.session(client.host.open_session("other").session) for _ in range(3)]
    failures: list[BaseException] = []

    def upload(number: int) -> None:
        for turn in range(20):
            try:
                upload = others[number].begin_upload(bytes([number, turn] * 16), 3 * MIB // 2)
                upload.abort(InvalidArgumentError("no matter"))
            except OutOfMemoryError:
                continue
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=upload, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for plan in range(100, 120):
        compile_received(client, plan, chain("neg", "sqr"))
        client.do(c.Free((plan,)))
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    for other in others:
        other.close()
    assert not failures


class Mortal(FakeDevice):
    """A device that may be lost."""

    lost: DeviceLostError | None = None


def test_a_device_that_is_lost_while_a_plan_is_compiled_for_it_is_the_error() -> None:
    device = Mortal()
    with CoreClient(device) as client, ThreadPoolExecutor(1) as threads:
        gate = device.script.hold("compile")
        compiling = threads.submit(client.compile, 7, COUNT)
        assert gate.entered.wait(10)
        device.lost = MemberLostError("member a is lost")
        assert client.session.change_devices(MembershipChange("a", lost=(device,)))
        client.session.tell_devices(DeviceChange("a", lost=(device.name,)))
        gate.open()
        with pytest.raises(MemberLostError, match="member a is lost"):
            compiling.result(10)
