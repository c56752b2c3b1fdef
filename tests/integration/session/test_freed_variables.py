"""Variables that are freed before their session ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from daemon_threads import thread_daemon
from tenant_hosts import PLAN, TenantHost

import heliograph as hg
from heliograph_backends.fake import FakeDevice
from heliograph_proto import commands as c
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.types import tensor_type

SECONDS = 20.0
STREAM = 3


def counter(shape: tuple[int, ...] = (4,)) -> hg.Graph:
    """A variable that each run increments."""
    g = hg.Graph()
    count = g.variable("count", shape, "f32")
    g.output("y", hg.assign(count, count + 1.0))
    return g


@pytest.fixture(params=["fake:memory=16MiB", "daemon"])
def session(request: pytest.FixtureRequest) -> Iterator[hg.Session]:
    if request.param == "daemon":
        with thread_daemon() as daemon, hg.connect(daemon.url) as made:
            yield made
    else:
        with hg.connect(f"local:#{request.param}") as made:
            yield made


def test_a_variable_that_was_freed_is_made_anew_with_another_shape(session: hg.Session) -> None:
    for size in (4, 8, 16):
        plan = session.compile(counter((size,)))
        plan.run()
        assert plan.run()["y"].tolist() == [2.0] * size
        plan.free()
        session.free_variable("count", timeout=SECONDS)


def test_a_freed_variable_begins_with_zeros_also_for_the_same_graph(session: hg.Session) -> None:
    for _ in range(3):
        plan = session.compile(counter())
        assert plan.run()["y"].tolist() == [1.0] * 4
        plan.free()
        session.free_variable("count", timeout=SECONDS)


def test_variables_of_models_one_after_the_other_fit(session: hg.Session) -> None:
    device = session.devices[0]
    session.synchronize(timeout=SECONDS)
    for _ in range(4):
        size = 14 * 2**20 // 4
        g = hg.Graph()
        g.output("y", g.variable("large", (size,), "f32")[:1])
        session.compile(g, [device.name]).free()
        session.free_variable("large", timeout=SECONDS)


def test_a_variable_that_plans_use_is_not_freed(session: hg.Session) -> None:
    first, second = session.compile(counter()), session.compile(counter())
    with pytest.raises(hg.InvalidArgumentError, match=r"used by 2 plans[^$]*plan.free"):
        session.free_variable("count", timeout=SECONDS)
    first.free()
    with pytest.raises(hg.InvalidArgumentError, match="used by 1 plan"):
        session.free_variable("count", timeout=SECONDS)
    assert second.run()["y"].tolist() == [1.0] * 4
    second.free()
    session.free_variable("count", timeout=SECONDS)
    with pytest.raises(hg.UnknownHandleError, match="no variable 'count'"):
        session.free_variable("count", timeout=SECONDS)


def test_a_view_of_a_freed_variable_keeps_its_bytes(session: hg.Session) -> None:
    plan = session.compile(counter())
    plan.run()
    variable = plan.variables["count"]
    view = variable[:2]
    plan.free()
    session.free_variable("count", timeout=SECONDS)
    assert view.get(timeout=SECONDS).tolist() == [1.0] * 2
    with pytest.raises(hg.UnknownHandleError):
        variable.get(timeout=SECONDS)


def test_runs_on_other_streams_end_before_their_variable_is_freed() -> None:
    device = FakeDevice()
    type = tensor_type("f32", (4,))
    leaves = (Leaf(LeafKind.VARIABLE, "v", type),)
    graph = Graph(leaves, (Node("neg", (0,), type),), (Output("y", 1),))
    with TenantHost(device) as host:
        client = host.client()
        client.do(c.CreateStream(STREAM, ""))
        client.compile(PLAN, graph)
        gate = device.script.hold("compute")
        run = client.send(c.RunCommand(PLAN, (), (c.OutputBinding(0, 0, True),)), STREAM)
        assert gate.entered.wait(SECONDS)
        client.send(c.Free((PLAN,)))
        freed = client.send(c.FreeVariable("v"))
        client.compile(PLAN + 1, graph)
        assert host.usage().runs_in_flight == 1
        gate.open()
        assert client.wait(run).error is None and client.wait(freed).error is None
        client.do(c.Free((PLAN + 1,)))
        client.do(c.FreeVariable("v"))
        assert host.usage().device_memory_bytes == 0


def test_freeing_a_variable_under_asyncio() -> None:
    async def scenario() -> None:
        async with await hg.aio.connect("local:#fake") as session:
            plan = await session.compile(counter())
            plan.free()
            await session.free_variable("count", timeout=SECONDS)
            plan = await session.compile(counter((7,)))
            assert (await plan.run())["y"].tolist() == [1.0] * 7

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))


def test_a_variable_of_a_plan_on_several_devices_is_freed() -> None:
    devices = FakeDevice("fake0"), FakeDevice("fake1")
    type = tensor_type("f32", (4,))
    leaves = (Leaf(LeafKind.VARIABLE, "v", type), Leaf(LeafKind.VARIABLE, "w", type))
    nodes = (Node("neg", (0,), type), Node("neg", (1,), type), Node("add", (2, 3), type))
    graph = Graph(leaves, nodes, (Output("y", 4),))
    with TenantHost(*devices) as host:
        client = host.client()
        for _ in range(3):
            info = client.compile(PLAN, graph, devices=["fake0", "fake1"], pins={0: "fake0", 1: "fake1"})
            assert info.devices == ("fake0", "fake1")
            client.do(c.Free((PLAN,)))
            client.do(c.FreeVariable("v"))
            client.do(c.FreeVariable("w"))
            assert host.usage().device_memory_bytes == 0
