"""Plans of a session beyond compiling and running: leaves that are tensors, updates, estimates,
outputs into existing tensors, and the order that a device prefers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from core_client import CoreClient
from plan_options import plan_options

from heliograph_backends.cpu.backend import CpuDevice
from heliograph_backends.fake import FakeDevice
from heliograph_proto import commands as c
from heliograph_proto.errors import (
    ComputeFailedError,
    HeliographError,
    InvalidArgumentError,
    InvalidGraphError,
    MissingContentError,
    OutOfMemoryError,
    OutOfRangeError,
    UnknownHandleError,
    UnsupportedError,
)
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output, reordered
from heliograph_proto.plans import EstimateRequest, PlanOptions
from heliograph_proto.types import tensor_type

F4, I1 = tensor_type("f32", (4,)), tensor_type("i32", (1,))
MATRIX, ROW = tensor_type("f32", (3, 4)), tensor_type("f32", (1, 4))
PLAN, OTHER, X, W, Y, V, Z = 100, 101, 1, 2, 3, 4, 5

#: y = x + w
SUM = Graph(
    (Leaf(LeafKind.INPUT, "x", F4), Leaf(LeafKind.WEIGHT, "w", F4)),
    (Node("add", (0, 1), F4),),
    (Output("y", 2),),
)
#: count += x
COUNT = Graph(
    (Leaf(LeafKind.INPUT, "x", F4), Leaf(LeafKind.VARIABLE, "count", F4)),
    (Node("add", (0, 1), F4), Node("assign", (1, 2), F4)),
    (Output("count", 3),),
)
NEG = Graph((Leaf(LeafKind.INPUT, "x", F4),), (Node("neg", (0,), F4),), (Output("y", 1),))
ONES = np.ones(4, "f4")


@pytest.fixture
def client() -> Iterator[CoreClient]:
    with CoreClient(CpuDevice(threads=1, native=False, memory_bytes=2**20)) as made:
        yield made


def put(client: CoreClient, number: int, value: float) -> None:
    client.do(c.Allocate(number, F4))
    client.do(c.SetTensor(number, 0, np.full(4, value, "f4").tobytes()))


def run(client: CoreClient, plan: int = PLAN, value: float = 1.0) -> list[float]:
    given = c.InputBinding(0, np.full(4, value, "f4").tobytes())
    done = client.do(c.RunCommand(plan, (given,), (c.OutputBinding(0, 0, True),)))
    found: list[float] = np.frombuffer(done.outputs[0][1], "f4").tolist()
    return found


# Leaves that are tensors


def test_a_weight_can_be_a_tensor_of_the_session_and_outlives_its_handle(client: CoreClient) -> None:
    put(client, W, 3)
    client.compile(PLAN, SUM, {1: W})
    client.do(c.Free((W,)))
    assert run(client) == [4, 4, 4, 4]


def test_a_weight_is_written_by_every_kind_of_command(client: CoreClient) -> None:
    client.do(c.AllocateBuffer(50, 128))
    client.do(c.PlaceTensor(W, 50, 0, F4))
    client.do(c.PlaceTensor(X, 50, 64, F4))
    client.do(c.Memset(W, 0, 16, 0))
    client.compile(PLAN, SUM, {1: W})
    put(client, Y, 1)
    assert run(client) == [1, 1, 1, 1]
    client.do(c.CopyTensor(Y, W))
    assert run(client) == [2, 2, 2, 2]
    client.do(c.ClearBuffer(50, 0))
    assert run(client) == [1, 1, 1, 1]
    client.do(c.ResetBuffer(50))
    client.do(c.PlaceTensor(Z, 50, 0, F4))
    client.do(c.CopyTensor(Y, Z))
    assert run(client) == [2, 2, 2, 2]


def test_an_output_is_not_written_to_a_weight_of_the_same_run(client: CoreClient) -> None:
    put(client, W, 1)
    client.compile(PLAN, SUM, {1: W})
    into = c.RunCommand(PLAN, (c.InputBinding(0, bytes(16)),), (c.OutputBinding(0, into=W),))
    assert "overlaps" in client.refused(into).message


def test_a_weight_is_of_the_leafs_type_and_written_before(client: CoreClient) -> None:
    client.do(c.Allocate(X, MATRIX))
    with pytest.raises(InvalidArgumentError, match=r"f32\[3, 4\]"):
        client.compile(PLAN, SUM, {1: X})
    with pytest.raises(UnknownHandleError):
        client.compile(PLAN, SUM, {1: 999})
    with pytest.raises(InvalidGraphError, match="not a weight or variable"):
        client.compile(PLAN, SUM, {0: X})
    with pytest.raises(InvalidGraphError, match="not a weight or variable"):
        client.compile(PLAN, SUM, {7: X})
    with pytest.raises(InvalidGraphError):
        client.compile(PLAN, SUM)


def test_a_weight_that_is_still_being_written_is_refused() -> None:
    device = FakeDevice(memory_bytes=2**20)
    with CoreClient(device) as client:
        client.do(c.Allocate(W, F4))
        gate = device.script.hold("set")
        client.send(c.SetTensor(W, 0, bytes(16)))
        assert gate.entered.wait(10)
        with pytest.raises(InvalidArgumentError, match="still being written"):
            client.compile(PLAN, SUM, {1: W})
        gate.open()
        client.do(c.Synchronize())
        client.compile(PLAN, SUM, {1: W})


def test_a_weight_whose_writing_failed_is_refused_with_that_error() -> None:
    device = FakeDevice(memory_bytes=2**20)
    with CoreClient(device) as client:
        client.do(c.Allocate(W, F4))
        device.script.fail("set", ComputeFailedError("the fan stopped"))
        client.refused(c.SetTensor(W, 0, bytes(16)))
        with pytest.raises(HeliographError, match="the fan stopped"):
            client.compile(PLAN, SUM, {1: W})


def test_a_variable_can_be_a_tensor_of_the_session_and_is_written_in_place(client: CoreClient) -> None:
    put(client, V, 5)
    info = client.compile(PLAN, COUNT, {1: V})
    assert [one.tensor for one in info.variables] == [V]
    assert run(client) == [6, 6, 6, 6]
    assert client.get(V, F4).tolist() == [6, 6, 6, 6]
    client.do(c.SetTensor(V, 0, np.zeros(4, "f4").tobytes()))
    assert run(client) == [1, 1, 1, 1]


def test_a_leaf_on_another_device_that_the_plans_device_cannot_read_is_refused() -> None:
    fake = FakeDevice(memory_bytes=2**20)
    cpu = CpuDevice(threads=1, native=False, memory_bytes=2**20)
    with CoreClient(cpu, fake) as client:
        fake.buffer_type.is_host = False
        client.do(c.Allocate(W, F4, "fake0"))
        with pytest.raises(UnsupportedError, match="fake0"):
            client.compile(PLAN, SUM, {1: W})


# Updates


def test_an_updated_plan_has_a_new_handle_and_the_old_one_is_gone(client: CoreClient) -> None:
    put(client, W, 3)
    client.compile(PLAN, SUM, {1: W})
    client.compile(OTHER, NEG, updates=PLAN)
    assert run(client, OTHER) == [-1, -1, -1, -1]
    assert isinstance(
        client.refused(c.RunCommand(PLAN, (c.InputBinding(0, bytes(16)),), ())), UnknownHandleError
    )
    client.do(c.Memset(W, 0, 4, 1))
    assert client.session.statistics().plans == 1


def test_an_update_that_fails_leaves_the_plan_as_it_was(client: CoreClient) -> None:
    client.compile(PLAN, NEG)
    unknown = Graph(SUM.leaves[:1] + (Leaf(LeafKind.WEIGHT, "w", F4, bytes(32)),), SUM.nodes, SUM.outputs)
    with pytest.raises(MissingContentError):
        client.compile(OTHER, unknown, updates=PLAN)
    assert run(client) == [-1, -1, -1, -1]
    with pytest.raises(UnknownHandleError):
        client.compile(OTHER, NEG, updates=999)


def test_a_plan_that_runs_is_updated_without_its_memory() -> None:
    device = FakeDevice(memory_bytes=2**20)
    with CoreClient(device) as client:
        client.compile(PLAN, NEG)
        gate = device.script.hold("compute")
        given = (c.InputBinding(0, ONES.tobytes()),)
        running = client.send(c.RunCommand(PLAN, given, (c.OutputBinding(0, 0, True),)))
        assert gate.entered.wait(10)
        client.compile(OTHER, NEG, updates=PLAN)
        gate.open()
        assert np.frombuffer(client.wait(running).outputs[0][1], "f4").tolist() == [-1, -1, -1, -1]
        assert run(client, OTHER) == [-1, -1, -1, -1]
        assert client.session.statistics().plans == 1


# Estimates


def test_an_estimate_is_what_compiling_takes_and_takes_nothing(client: CoreClient) -> None:
    wide = tensor_type("f32", (64, 64))
    nodes = (Node("soft_max", (0,), wide), Node("soft_max", (2,), wide), Node("mul", (3, 1), wide))
    leaves = (Leaf(LeafKind.INPUT, "x", wide), Leaf(LeafKind.WEIGHT, "w", wide))
    graph = Graph(leaves, nodes, (Output("y", 4),))
    before = client.host.memory().free_bytes
    estimate = client.session.estimate(EstimateRequest(graph))
    assert client.host.memory().free_bytes == before
    client.do(c.Allocate(W, wide))
    info = client.compile(PLAN, graph, {1: W})
    assert sum(estimate.compute_bytes) == info.compute_bytes
    assert (estimate.weights_bytes, estimate.variables_bytes) == (wide.nbytes, 0)
    counted = client.session.estimate(EstimateRequest(COUNT, PlanOptions(fusion=False)))
    assert counted.variables_bytes == 16


def test_an_estimate_over_several_devices_says_what_each_would_take() -> None:
    wide = tensor_type("f32", (64, 64))
    leaves = (Leaf(LeafKind.INPUT, "x", wide), Leaf(LeafKind.WEIGHT, "w", wide))
    nodes = (Node("soft_max", (0,), wide), Node("matmul", (2, 1), wide), Node("soft_max", (3,), wide))
    graph = Graph(leaves, nodes, (Output("y", 4),))
    names, pins = ("fake0", "cpu0"), {0: "fake0", 1: "cpu0", 2: "fake0"}
    devices = FakeDevice("fake0", 2**20, is_host=False), CpuDevice("cpu0", 1, native=False)
    with CoreClient(*devices) as client:
        for copies in (1, 3):
            free = [device.memory().free_bytes for device in devices]
            asked = EstimateRequest(graph, plan_options(devices=names, pins=pins, pipeline=copies))
            found = client.session.estimate(asked)
            assert [device.memory().free_bytes for device in devices] == free
            client.do(c.Allocate(W, wide, device="cpu0"))
            before = [device.memory().free_bytes for device in devices]
            client.compile(PLAN, graph, {1: W}, devices=names, pins=pins, pipeline=copies)
            after = [device.memory().free_bytes for device in devices]
            taken = {one.name: sum(one.compute_bytes) for one in found.devices}
            assert taken == {name: was - now for name, was, now in zip(names, before, after, strict=True)}
            assert [one.weights_bytes for one in found.devices] == [0, wide.nbytes]
            assert found.total_bytes == sum(one.total_bytes for one in found.devices)
            client.do(c.Free((PLAN, W)))
            client.do(c.Synchronize())
        with pytest.raises(OutOfMemoryError, match=r"fake0 allows 4, cpu0 allows 4: [\d,]+ too many"):
            limits = {"fake0": 4, "cpu0": 4}
            client.session.estimate(EstimateRequest(graph, plan_options(devices=names, memory=limits)))


# Outputs into existing tensors


def test_an_output_is_written_to_an_existing_tensor_also_to_a_view_with_gaps(client: CoreClient) -> None:
    client.compile(PLAN, NEG)
    put(client, Y, 9)
    given = (c.InputBinding(0, ONES.tobytes()),)
    client.do(c.RunCommand(PLAN, given, (c.OutputBinding(0, into=Y),)))
    assert client.get(Y, F4).tolist() == [-1, -1, -1, -1]
    wide = tensor_type("f32", (8,))
    client.do(c.Allocate(W, wide))
    client.do(c.View(X, W, 4, F4, (8,)))
    client.do(c.RunCommand(PLAN, given, (c.OutputBinding(0, into=X),)))
    assert client.get(W, wide).tolist() == [0, -1, 0, -1, 0, -1, 0, -1]


def test_an_output_into_a_tensor_of_another_device_is_copied_there() -> None:
    fake = FakeDevice(memory_bytes=2**20)
    with CoreClient(CpuDevice(threads=1, native=False, memory_bytes=2**20), fake) as client:
        fake.buffer_type.is_host = False
        client.compile(PLAN, NEG)
        client.do(c.Allocate(Y, F4, "fake0"))
        client.do(c.RunCommand(PLAN, (c.InputBinding(0, ONES.tobytes()),), (c.OutputBinding(0, into=Y),)))
        assert client.get(Y, F4).tolist() == [-1, -1, -1, -1]


def test_an_output_overlaps_no_input_no_variable_and_no_other_output(client: CoreClient) -> None:
    put(client, X, 1)
    put(client, V, 0)
    client.compile(PLAN, NEG)
    client.compile(OTHER, COUNT, {1: V})
    own = c.RunCommand(PLAN, (c.InputBinding(0, None, X),), (c.OutputBinding(0, into=X),))
    variable = c.RunCommand(OTHER, (c.InputBinding(0, None, X),), (c.OutputBinding(0, into=V),))
    both = c.RunCommand(PLAN, (c.InputBinding(0, None, X),), (c.OutputBinding(0, 77, into=Y),))
    for kind in (own, variable):
        assert "overlaps" in client.refused(kind).message
    assert isinstance(client.refused(both), InvalidArgumentError)


def test_a_run_that_fails_poisons_the_tensor_that_it_was_to_write_and_a_later_one_heals_it() -> None:
    device = FakeDevice(memory_bytes=2**20)
    with CoreClient(device) as client:
        client.compile(PLAN, NEG)
        put(client, Y, 9)
        kind = c.RunCommand(PLAN, (c.InputBinding(0, ONES.tobytes()),), (c.OutputBinding(0, into=Y),))
        device.script.fail("compute", ComputeFailedError("the fan stopped"))
        client.refused(kind)
        assert "the fan stopped" in client.refused(c.GetTensor(Y, 0, 16)).message
        client.do(kind)
        assert client.get(Y, F4).tolist() == [-1, -1, -1, -1]


# The order that a device prefers


class Backwards(FakeDevice):
    """Prefers the last order of nodes that there is, when nothing holds them."""

    def optimize(self, graph: Graph) -> Sequence[int]:
        return tuple(reversed(range(len(graph.nodes))))


def test_a_device_may_reorder_nodes_and_errors_keep_the_numbers_of_the_client() -> None:
    lookup = Node("get_rows", (0, 1), ROW, {}, "lookup")
    graph = Graph(
        (Leaf(LeafKind.INPUT, "table", MATRIX), Leaf(LeafKind.INPUT, "row", I1)),
        (lookup, Node("neg", (0,), MATRIX, {}, "negative")),
        (Output("rows", 2), Output("negative", 3)),
    )
    with CoreClient(Backwards(memory_bytes=2**20)) as client:
        client.compile(PLAN, graph)
        table = np.arange(12, dtype="f4").reshape(3, 4)

        def bound(row: int) -> tuple[c.InputBinding, ...]:
            return c.InputBinding(0, table.tobytes()), c.InputBinding(1, np.int32(row).tobytes())

        wanted = (c.OutputBinding(0, 0, True), c.OutputBinding(1, 0, True))
        rows, negative = (one for _, one in client.do(c.RunCommand(PLAN, bound(2), wanted)).outputs)
        assert np.frombuffer(rows, "f4").tolist() == table[2].tolist()
        assert np.frombuffer(negative, "f4").tolist() == (-table).ravel().tolist()
        error = client.refused(c.RunCommand(PLAN, bound(3), wanted))
        assert isinstance(error, OutOfRangeError)
        assert (error.origin.node, error.origin.node_name) == (0, "lookup")


def test_a_split_is_reordered_as_its_device_wants_and_errors_keep_the_numbers_of_the_client() -> None:
    graph = Graph(
        (Leaf(LeafKind.INPUT, "table", MATRIX), Leaf(LeafKind.INPUT, "row", I1)),
        (
            Node("neg", (0,), MATRIX, {}, "elsewhere"),
            Node("get_rows", (2, 1), ROW, {}, "lookup"),
            Node("neg", (2,), MATRIX, {}, "back"),
        ),
        (Output("rows", 3), Output("back", 4)),
    )
    with CoreClient(Backwards(memory_bytes=2**20), CpuDevice("cpu0", 1, native=False)) as client:
        client.compile(PLAN, graph, devices=("fake0", "cpu0"), pins={0: "cpu0", 1: "fake0", 2: "fake0"})
        table = np.arange(12, dtype="f4").reshape(3, 4)
        wanted = (c.OutputBinding(0, 0, True), c.OutputBinding(1, 0, True))
        for row in (2, 3):
            given = c.InputBinding(0, table.tobytes()), c.InputBinding(1, np.int32(row).tobytes())
            run = c.RunCommand(PLAN, given, wanted)
            if row == 2:
                found, back = (one for _, one in client.do(run).outputs)
                assert np.frombuffer(found, "f4").tolist() == (-table[2]).tolist()
                assert np.frombuffer(back, "f4").tolist() == table.ravel().tolist()
            else:
                assert client.refused(run).origin.node_name == "lookup"


def test_an_order_keeps_operands_first_and_a_variables_reads_and_writes_as_they_were() -> None:
    with pytest.raises(InvalidGraphError, match="operands"):
        reordered(COUNT, (1, 0))
    two = Graph(COUNT.leaves, (Node("neg", (1,), F4), Node("assign", (1, 0), F4)), (Output("y", 2),))
    with pytest.raises(InvalidGraphError, match="same variable"):
        reordered(two, (1, 0))
    with pytest.raises(InvalidGraphError, match="once"):
        reordered(two, (0, 0))
    free = Graph(NEG.leaves, (Node("neg", (0,), F4), Node("abs", (0,), F4)), (Output("y", 1), Output("z", 2)))
    moved = reordered(free, (1, 0))
    assert [node.op for node in moved.nodes] == ["abs", "neg"]
    assert [one.value for one in moved.outputs] == [2, 1]


def test_a_tensor_that_does_not_fit_is_out_of_memory_when_an_output_is_made(client: CoreClient) -> None:
    huge = tensor_type("u8", (2**20 - 64,))
    client.do(c.Allocate(X, huge))
    client.compile(PLAN, NEG)
    big = c.RunCommand(PLAN, (c.InputBinding(0, bytes(16)),), (c.OutputBinding(0, Y),))
    client.do(c.Allocate(W, tensor_type("u8", (56,))))
    assert isinstance(client.refused(big), OutOfMemoryError)


def test_whoever_waits_for_a_tensor_is_told_when_it_was_written_or_never_will_be() -> None:
    device = FakeDevice(memory_bytes=2**20)
    with CoreClient(device) as client:
        client.do(c.Allocate(W, F4))
        assert client.session.when_written([W, 999]).done()
        gate = device.script.hold("set")
        client.send(c.SetTensor(W, 0, bytes(16)))
        assert gate.entered.wait(10)
        waiting = client.session.when_written([W])
        assert not waiting.done()
        gate.open()
        waiting.result(10)
        client.compile(PLAN, SUM, {1: W})
        client.send(c.SetTensor(X, 0, None, 7, 16))
        client.send(c.Allocate(Y, F4))
        client.send(c.SetTensor(Y, 0, None, 8, 16))
        late = client.session.when_written([Y])
        assert not late.done()
    late.result(10)


def test_a_weight_may_be_a_variable_that_another_plan_assigns(client: CoreClient) -> None:
    put(client, V, 1)
    client.compile(PLAN, COUNT, {1: V})
    client.compile(OTHER, SUM, {1: V})
    for expected in (2, 3):
        assert run(client) == [expected] * 4
        assert run(client, OTHER) == [expected + 1] * 4
