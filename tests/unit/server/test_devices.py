"""Plans over several devices of one host: spread by memory, pinned, with gaps in their ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from core_client import CoreClient

from heliograph_backends.cpu.backend import CpuDevice
from heliograph_backends.fake import FakeDevice
from heliograph_proto import commands as c
from heliograph_proto.errors import (
    CancelledError,
    ComputeFailedError,
    InvalidArgumentError,
    OutOfMemoryError,
    UnknownDeviceError,
    UnsupportedError,
)
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.types import TensorType, tensor_type

ROWS = tensor_type("f32", (8, 64))
SQUARE = tensor_type("f32", (64, 64))
SCALAR = tensor_type("f32", ())
LAYERS = 6
PLAN, SINGLE = 100, 101


class Gap(FakeDevice):
    """An accelerator that lacks an op, and whose memory no other code can reach."""

    def __init__(self, lacks: str = "soft_max", **parameters: Any) -> None:
        super().__init__(**{"memory_bytes": 2**20, **parameters})
        self.lacks = lacks
        self.buffer_type.is_host = False

    def supports_buffer_type(self, buffer_type: Any) -> bool:
        return buffer_type.device is self

    def supports_op(
        self, op: str, attributes: Mapping[str, Any], operands: Sequence[TensorType], result: TensorType
    ) -> str:
        return (
            f"no kernel for {op}"
            if op == self.lacks
            else super().supports_op(op, attributes, operands, result)
        )


def layered(client: CoreClient) -> tuple[Graph, list[np.ndarray[Any, Any]]]:
    """x through matrix products and soft_max, with a weight a layer."""
    random = np.random.default_rng(7)
    weights = [random.standard_normal((64, 64)).astype(np.float32) for _ in range(LAYERS)]
    leaves = [Leaf(LeafKind.INPUT, "x", ROWS)]
    leaves += [
        Leaf(LeafKind.WEIGHT, f"w{number}", SQUARE, client.upload(one.tobytes()))
        for number, one in enumerate(weights)
    ]
    nodes: list[Node] = []
    value = 0
    for number in range(LAYERS):
        nodes.append(Node("matmul", (value, 1 + number), ROWS, {}, f"layer{number}.product"))
        attributes = {"scale": 1.0, "max_bias": 0.0}
        nodes.append(
            Node("soft_max", (len(leaves) + len(nodes) - 1,), ROWS, attributes, f"layer{number}.soft")
        )
        value = len(leaves) + len(nodes) - 1
    return Graph(tuple(leaves), tuple(nodes), (Output("y", value),)), weights


X = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)


def run(client: CoreClient, plan: int) -> bytes:
    done = client.do(c.RunCommand(plan, (c.InputBinding(0, X.tobytes()),), (c.OutputBinding(0, 0, True),)))
    return bytes(done.outputs[0][1])


def cpus(*memory_bytes: int) -> list[CpuDevice]:
    return [
        CpuDevice(f"cpu{number}", threads=1, native=False, memory_bytes=size)
        for number, size in enumerate(memory_bytes)
    ]


@pytest.fixture
def expected() -> Iterator[bytes]:
    """The results of the graph on one device."""
    with CoreClient(*cpus(2**24)) as client:
        graph, _ = layered(client)
        client.compile(SINGLE, graph)
        yield run(client, SINGLE)


def used(client: CoreClient) -> list[int]:
    found = [client.host.memory(one.name) for one in client.host.device_list().devices]
    return [one.total_bytes - one.free_bytes for one in found]


def test_a_model_that_is_larger_than_any_device_is_spread_over_several(expected: bytes) -> None:
    with CoreClient(*cpus(45_000, 45_000, 45_000)) as client:
        graph, _ = layered(client)
        client.compile(PLAN, graph, devices=["cpu0", "cpu1", "cpu2"])
        assert all(used(client)), "every device holds a part"
        assert run(client, PLAN) == expected
        assert run(client, PLAN) == expected, "a second run on the same memory"


def test_a_limit_on_a_devices_memory_moves_the_rest_to_the_next(expected: bytes) -> None:
    with CoreClient(*cpus(2**20, 2**20)) as client:
        graph, _ = layered(client)
        info = client.compile(PLAN, graph, devices=["cpu0", "cpu1"], memory={"cpu0": 50_000})
        assert info.device == "cpu1"
        assert run(client, PLAN) == expected
        with pytest.raises(UnknownDeviceError):
            client.compile(SINGLE, graph, devices=["cpu0"], memory={"cpu7": 1})


def test_a_model_that_fits_nowhere_says_by_how_much_and_leaves_nothing() -> None:
    with CoreClient(*cpus(52_000, 52_000)) as client:
        graph, _ = layered(client)
        with pytest.raises(OutOfMemoryError, match="more are needed"):
            client.compile(PLAN, graph, devices=["cpu0", "cpu1"])
        assert used(client) == [0, 0], "the weights stay, and their memory counts as free"


def test_what_an_accelerator_cannot_run_is_done_by_the_host(expected: bytes) -> None:
    with CoreClient(Gap(), *cpus(2**20)) as client:
        graph, _ = layered(client)
        client.compile(PLAN, graph, devices=["fake0"])
        assert run(client, PLAN) == expected
        weights = used(client)
        assert weights[0] > LAYERS * SQUARE.nbytes, "the weights moved to the accelerator"
        assert weights[1] < SQUARE.nbytes


def test_an_op_that_no_device_can_run_is_refused_with_every_reason() -> None:
    with CoreClient(Gap(), Gap(name="fake1")) as client:
        graph, _ = layered(client)
        with pytest.raises(UnsupportedError, match="fake0: no kernel.*fake1: no kernel") as raised:
            client.compile(PLAN, graph, devices=["fake0", "fake1"])
        assert raised.value.origin.node_name == "layer0.soft"


def test_pins_are_kept_and_bad_ones_refused(expected: bytes) -> None:
    with CoreClient(Gap(), *cpus(2**20)) as client:
        graph, _ = layered(client)
        client.compile(PLAN, graph, devices=["cpu0", "fake0"], pins={0: "fake0", 4: "fake0"})
        assert run(client, PLAN) == expected
        with pytest.raises(InvalidArgumentError, match=r"layer0.soft.*fake0.*soft_max"):
            client.compile(SINGLE, graph, devices=["cpu0", "fake0"], pins={1: "fake0"})
        with pytest.raises(UnknownDeviceError):
            client.compile(SINGLE, graph, devices=["cpu0", "fake0"], pins={1: "gpu7"})


def test_a_device_that_fails_in_mid_run_is_an_error_of_that_run_alone(expected: bytes) -> None:
    gap = Gap()
    with CoreClient(gap, *cpus(2**20)) as client:
        graph, _ = layered(client)
        client.compile(PLAN, graph, devices=["fake0"])
        gap.script.fail("compute", ComputeFailedError("the fan stopped"))
        error = client.refused(
            c.RunCommand(PLAN, (c.InputBinding(0, X.tobytes()),), (c.OutputBinding(0, 0, True),))
        )
        assert "the fan stopped" in error.message
        assert run(client, PLAN) == expected


def test_a_run_over_several_devices_can_be_cancelled() -> None:
    gap = Gap()
    with CoreClient(gap, *cpus(2**20)) as client:
        graph, _ = layered(client)
        client.compile(PLAN, graph, devices=["fake0"])
        gate = gap.script.hold("compute")
        running = client.send(c.RunCommand(PLAN, (c.InputBinding(0, X.tobytes()),), ()))
        assert gate.entered.wait(10)
        client.send(c.Cancel(running))
        assert isinstance(client.wait(running).error, CancelledError)


def test_a_variable_is_shared_by_plans_that_name_its_device_and_refused_by_others() -> None:
    scalar = tensor_type("f32", ())
    count = Graph(
        (Leaf(LeafKind.INPUT, "x", scalar), Leaf(LeafKind.VARIABLE, "count", scalar)),
        (Node("add", (0, 1), scalar), Node("assign", (1, 2), scalar)),
        (Output("count", 3),),
    )
    one = (c.InputBinding(0, np.float32(1).tobytes()),)
    with CoreClient(*cpus(2**20, 2**20)) as client:
        client.compile(PLAN, count, devices=["cpu1"])
        client.compile(SINGLE, count, devices=["cpu0", "cpu1"])
        for plan in (PLAN, SINGLE, PLAN):
            done = client.do(c.RunCommand(plan, one, (c.OutputBinding(0, 0, True),)))
        assert np.frombuffer(done.outputs[0][1], "f4") == 3
        with pytest.raises(UnsupportedError, match="lies on device cpu1"):
            client.compile(102, count, devices=["cpu0"], pins={0: "cpu0"})


ONE = c.InputBinding(0, np.float32(1).tobytes())


def floats_of(client: CoreClient, plan: int, count: int, given: c.InputBinding = ONE) -> list[float]:
    """The first outputs of a run."""
    done = client.do(
        c.RunCommand(plan, (given,), tuple(c.OutputBinding(place, 0, True) for place in range(count)))
    )
    return [np.frombuffer(data, "f4").item() for _, data in done.outputs]


def counting() -> Graph:
    """count += x, then twice the input: in nodes that can be pinned apart."""
    return Graph(
        (Leaf(LeafKind.INPUT, "x", SCALAR), Leaf(LeafKind.VARIABLE, "count", SCALAR)),
        (
            Node("add", (0, 1), SCALAR),
            Node("assign", (1, 2), SCALAR),
            Node("add", (0, 0), SCALAR),
        ),
        (Output("count", 3), Output("twice", 4), Output("x", 0)),
    )


@pytest.mark.parametrize("pins", [{}, {1: "cpu0", 2: "cpu1"}])
def test_a_variable_given_as_an_input_is_read_as_it_was_before_the_run(pins: dict[int, str]) -> None:
    with CoreClient(*cpus(2**20, 2**20)) as client:
        info = client.compile(PLAN, counting(), devices=["cpu0", "cpu1"], pins=pins)
        (variable,) = info.variables
        client.do(c.SetTensor(variable.tensor, 0, np.float32(3).tobytes()))
        assert floats_of(client, PLAN, 3, c.InputBinding(0, tensor=variable.tensor)) == [6, 6, 3]


def test_a_leaf_that_no_node_reads_may_lie_on_another_device_than_all_nodes() -> None:
    graph = Graph(
        (Leaf(LeafKind.INPUT, "x", SCALAR), Leaf(LeafKind.VARIABLE, "count", SCALAR)),
        (Node("neg", (0,), SCALAR),),
        (Output("y", 2), Output("count", 1)),
    )
    with CoreClient(*cpus(2**20, 2**20)) as client:
        info = client.compile(SINGLE, counting(), devices=["cpu1"])
        client.do(c.SetTensor(info.variables[0].tensor, 0, np.float32(5).tobytes()))
        client.compile(PLAN, graph, devices=["cpu0", "cpu1"])
        assert floats_of(client, PLAN, 2) == [-1, 5]


def test_a_graph_without_nodes_runs_on_several_devices() -> None:
    graph = Graph((Leaf(LeafKind.INPUT, "x", SCALAR),), (), (Output("y", 0),))
    with CoreClient(*cpus(2**20, 2**20)) as client:
        client.compile(PLAN, graph, devices=["cpu0", "cpu1"])
        assert floats_of(client, PLAN, 1) == [1]
