"""memory= bounds everything that a plan takes of a device."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tenant_hosts import PLAN, TenantHost

import heliograph as hg
from heliograph_backends.fake import FakeDevice
from heliograph_proto import commands as c
from heliograph_proto.digests import digest_of
from heliograph_proto.errors import ComputeFailedError, HeliographError, OutOfMemoryError
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.types import tensor_type

KIB = 2**10
SIZE = 256 * KIB
ROWS = SIZE // 4


def with_results() -> hg.Graph:
    g = hg.Graph()
    x = g.input("x", (ROWS,), "f32")
    g.output("y", (hg.exp(x).reshape((-1, 1)) @ hg.exp(-x).reshape((1, -1))[:, :4]).sum())
    return g


def with_weights() -> hg.Graph:
    g = hg.Graph()
    g.output("y", g.input("x", (ROWS,), "f32") + g.weight("w", np.ones(ROWS, np.float32)))
    return g


def with_variables() -> hg.Graph:
    g = hg.Graph()
    v = g.variable("v", (ROWS,), "f32")
    g.output("y", hg.assign(v, v + 1.0)[:1])
    return g


@pytest.fixture(params=["cpu:threads=1,memory=64MiB", "fake:host=0,memory=64MiB"])
def session(request: pytest.FixtureRequest) -> Iterator[hg.Session]:
    with hg.connect(f"local:#{request.param}") as made:
        yield made


GRAPHS = [with_results, with_weights, with_variables]


@pytest.mark.parametrize("make", GRAPHS)
def test_a_plan_above_its_limit_is_refused_with_what_it_needs(
    session: hg.Session, make: Callable[[], hg.Graph]
) -> None:
    (device,), free = session.devices, session.devices[0].memory().free_bytes
    with pytest.raises(hg.OutOfMemoryError) as caught:
        session.compile(make(), memory={device.name: "100KiB"})
    found = re.search(
        r"needs (?:about )?([\d,]+) bytes.* allows 102,400.*: ([\d,]+) too many", str(caught.value)
    )
    assert found is not None, caught.value
    need, over = (int(one.replace(",", "")) for one in found.groups())
    assert need >= SIZE and over == need - 100 * KIB
    assert session.devices[0].memory().free_bytes >= free - SIZE


@pytest.mark.parametrize("make", GRAPHS)
def test_a_plan_takes_no_more_than_the_limit_that_it_keeps(
    session: hg.Session, make: Callable[[], hg.Graph]
) -> None:
    (device,) = session.devices
    most = 4 * 2**20
    before = device.memory().free_bytes
    plan = session.compile(make(), memory={device.name: most})
    assert before - device.memory().free_bytes <= most
    plan.free()


def test_each_limit_of_several_devices_holds() -> None:
    with hg.connect("local:") as session:
        device = session.devices[0].name
        with pytest.raises(hg.OutOfMemoryError, match="allows 1,000.*too many"):
            session.compile(with_results(), device, memory={device: 1000}, pipeline=2)


def test_a_limit_on_the_second_of_two_devices_holds() -> None:
    type = tensor_type("f32", (4096,))
    nodes = (Node("neg", (0,), type), Node("exp", (1,), type), Node("neg", (2,), type))
    graph = Graph((Leaf(LeafKind.INPUT, "x", type),), nodes, (Output("y", 3),))
    names, pins = ["fake0", "fake1"], {0: "fake0", 1: "fake1", 2: "fake0"}
    with TenantHost(FakeDevice("fake0"), FakeDevice("fake1")) as host:
        client = host.client()
        with pytest.raises(OutOfMemoryError, match="device fake1 .*allows 1,000: .* too many"):
            client.compile(PLAN, graph, devices=names, pins=pins, memory={"fake1": 1000})
        assert host.usage().device_memory_bytes == 0
        client.compile(PLAN, graph, devices=names, pins=pins, memory={"fake1": 2**20})


@pytest.mark.parametrize("work", ["compile", "allocate"])
def test_a_compile_that_fails_on_the_second_device_gives_everything_back(work: str) -> None:
    """Weights, variables, handles and plans; the weights that were uploaded stay until needed."""
    devices = FakeDevice("fake0", 2**20), FakeDevice("fake1", 2**20)
    type = tensor_type("f32", (1024,))
    data = np.ones(1024, np.float32).tobytes()
    leaves = (
        Leaf(LeafKind.INPUT, "x", type),
        Leaf(LeafKind.WEIGHT, "w", type, digest_of(data)),
        Leaf(LeafKind.VARIABLE, "v", type),
    )
    nodes = (Node("add", (0, 1), type), Node("add", (3, 1), type), Node("add", (4, 2), type))
    graph = Graph(leaves, nodes, (Output("y", 5),))
    pins = {0: "fake0", 1: "fake1", 2: "fake1"}
    with TenantHost(*devices) as host:
        client = host.client()
        client.upload(data)
        before = client.session.statistics()
        for _ in range(3):
            devices[1].script.fail(work, ComputeFailedError("it burnt"))  # type: ignore[arg-type]
            with pytest.raises(HeliographError, match="it burnt"):
                client.compile(PLAN, graph, devices=["fake0", "fake1"], pins=pins)
            assert client.session.statistics() == before
            assert host.usage().plans == 0
            assert host.usage().device_memory_bytes == len(data), "the uploaded weight"
        client.do(c.AllocateBuffer(1, 2**20, "fake0"))
        client.do(c.AllocateBuffer(2, 2**20, "fake1"))


def test_tensors_of_the_session_do_not_count_against_a_limit(session: hg.Session) -> None:
    (device,) = session.devices
    weights = {"w": session.put(np.ones(ROWS, np.float32))}
    plan = session.compile(with_weights(), weights=weights, memory={device.name: 3 * SIZE})
    with pytest.raises(hg.OutOfMemoryError):
        session.compile(with_weights(), memory={device.name: SIZE - 1})
    plan.free()
