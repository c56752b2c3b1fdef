"""Memory that a session reserves: where its plans lie after that, and what becomes of them at the end."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from core_client import CoreClient
from graph_arrivals import F4, X, chain, compile_received, output_of
from plan_options import plan_options

from heliograph_backends.cpu.backend import CpuDevice
from heliograph_backends.fake import FakeDevice
from heliograph_proto import commands as c
from heliograph_proto.errors import (
    HandleExistsError,
    HeliographError,
    InvalidArgumentError,
    LimitExceededError,
    OutOfMemoryError,
    SessionClosedError,
    UnknownHandleError,
)
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.plans import ReserveRequest
from heliograph_proto.types import tensor_type
from heliograph_server.resources.handles import MAX_RESERVATIONS

MIB = 2**20
#: The handle of the reservation in all tests but those of several.
R = 900
LARGEST = chain(*["neg", "sqr"] * 4, size=512)


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice(memory_bytes=MIB)


@pytest.fixture
def client(device: FakeDevice) -> Iterator[CoreClient]:
    with CoreClient(device) as made:
        yield made


def reserve(client: CoreClient, graph: Graph = LARGEST, number: int = R, **wish: Any) -> dict[str, int]:
    return client.session.reserve(ReserveRequest(number, graph, plan_options(**wish)))


def used(device: FakeDevice | CpuDevice) -> int:
    memory = device.memory()
    return memory.total_bytes - memory.free_bytes


def ones(graph: Graph) -> np.ndarray[Any, Any]:
    return np.ones(graph.inputs[0].type.shape, np.float32)


# Where plans lie


def test_plans_take_no_more_as_long_as_they_fit(client: CoreClient, device: FakeDevice) -> None:
    sizes = reserve(client)
    assert sizes == {"fake0": used(device)} and sizes["fake0"] > 0
    for plan, graph in ((100, LARGEST), (101, chain("neg", "sqr", "neg", size=512))):
        info = compile_received(client, plan, graph, reservation=R)
        assert info.reserved_bytes == info.compute_bytes > 0
    assert used(device) == sizes["fake0"]
    assert set(output_of(client, 100, ones(LARGEST))) == {1.0}
    assert set(output_of(client, 101, ones(LARGEST))) == {-1.0}


def test_a_plan_that_does_not_fit_takes_memory_of_its_own_and_says_so(
    client: CoreClient, device: FakeDevice
) -> None:
    reserve(client, chain("neg", "sqr", "neg", size=8))
    before = used(device)
    info = compile_received(client, 100, LARGEST, reservation=R)
    assert info.reserved_bytes == 0 < info.compute_bytes == used(device) - before
    client.do(c.Free((R,)))
    assert set(output_of(client, 100, ones(LARGEST))) == {1.0}


def test_plans_without_the_reservation_take_memory_of_their_own(client: CoreClient) -> None:
    reserve(client)
    assert compile_received(client, 100, LARGEST).reserved_bytes == 0


def test_runs_of_plans_that_share_memory_wait_for_each_other(client: CoreClient, device: FakeDevice) -> None:
    reserve(client)
    graphs = {100: LARGEST, 101: chain("sqr", "neg", "sqr", size=512)}
    gates = []
    for plan, graph in graphs.items():
        compile_received(client, plan, graph, reservation=R)
        client.do(c.CreateStream(plan + 200))
        gates.append(device.script.hold("compute"))
    wanted = (c.OutputBinding(0, 0, True),)
    given = (c.InputBinding(0, ones(LARGEST).tobytes()),)
    runs = [client.send(c.RunCommand(plan, given, wanted), plan + 200) for plan in graphs]
    assert gates[0].entered.wait(10)
    assert not gates[1].entered.wait(0.05)
    for gate in gates:
        gate.open()
    for run in runs:
        assert np.frombuffer(client.wait(run).outputs[0][1], np.float32).tolist() == [1.0] * 512


def test_an_update_in_a_reservation_stays_there(client: CoreClient, device: FakeDevice) -> None:
    sizes = reserve(client)
    compile_received(client, 100, LARGEST, reservation=R)
    info = compile_received(client, 101, chain("neg", "neg", size=512), reservation=R, updates=100)
    assert info.reserved_bytes == info.compute_bytes and used(device) == sizes["fake0"]
    assert set(output_of(client, 101, ones(LARGEST))) == {1.0}
    info = compile_received(client, 102, chain("sqr", "neg", "neg", "neg", size=512), updates=101)
    assert info.reserved_bytes == 0 and used(device) == sizes["fake0"] + info.compute_bytes
    client.do(c.Free((R,)))
    assert set(output_of(client, 102, ones(LARGEST))) == {-1.0}


def test_a_graph_needs_no_contents_to_be_reserved_for(client: CoreClient, device: FakeDevice) -> None:
    leaves = (*LARGEST.leaves, Leaf(LeafKind.WEIGHT, "w", LARGEST.leaves[0].type))
    nodes = (Node("mul", (0, 1), leaves[0].type), Node("soft_max", (2,), leaves[0].type))
    assert reserve(client, Graph(leaves, nodes, (Output("y", 3),)))["fake0"] == used(device) > 0
    assert client.session.statistics().content_bytes == 0


# The end


def test_a_reset_gives_the_memory_back_and_ends_its_plans(client: CoreClient, device: FakeDevice) -> None:
    reserve(client)
    compile_received(client, 100, LARGEST, reservation=R)
    client.do(c.Free((R,)))
    assert used(device) == 0
    given = (c.InputBinding(0, ones(LARGEST).tobytes()),)
    error = client.refused(c.RunCommand(100, given, ()))
    assert isinstance(error, UnknownHandleError) and "compile" in error.advice
    for action in (
        lambda: client.session.explain(100),
        lambda: compile_received(client, 101, chain("neg"), updates=100),
        lambda: compile_received(client, 101, LARGEST, reservation=R),
    ):
        with pytest.raises(UnknownHandleError):
            action()
    client.do(c.Free((100,)))
    assert isinstance(client.refused(c.Free((R,))), UnknownHandleError)
    assert client.session.statistics().plans == 0


def test_what_a_plan_returned_outlives_the_reservation(client: CoreClient) -> None:
    reserve(client)
    compile_received(client, 100, chain("neg", "sqr", size=4), reservation=R)
    client.do(c.RunCommand(100, (c.InputBinding(0, X.tobytes()),), (c.OutputBinding(0, 7),)))
    client.do(c.Free((R,)))
    assert client.get(7, F4).tolist() == (X * X).tolist()


def test_runs_in_flight_end_before_the_memory_goes(client: CoreClient, device: FakeDevice) -> None:
    reserve(client)
    for plan in (100, 101):
        compile_received(client, plan, chain(*["neg"] * plan, size=8), reservation=R)
    gate = device.script.hold("compute")
    given = (c.InputBinding(0, np.ones(8, "f4").tobytes()),)
    runs = [client.send(c.RunCommand(plan, given, (c.OutputBinding(0, 0, True),))) for plan in (100, 101)]
    assert gate.entered.wait(10)
    freed = client.send(c.Free((R,)))
    late = client.send(c.RunCommand(100, given, ()))
    assert used(device) > 0
    gate.open()
    assert isinstance(client.wait(late).error, UnknownHandleError)
    for run, expected in zip(runs, (1.0, -1.0), strict=True):
        assert np.frombuffer(client.wait(run).outputs[0][1], "f4").tolist() == [expected] * 8
    client.wait(freed)
    assert used(device) == 0


def test_after_a_reset_there_can_be_another(client: CoreClient, device: FakeDevice) -> None:
    sizes = [reserve(client)]
    compile_received(client, 100, LARGEST, reservation=R)
    client.do(c.Free((R,)))
    sizes.append(reserve(client))
    assert sizes[0] == sizes[1]
    info = compile_received(client, 101, LARGEST, reservation=R)
    assert info.reserved_bytes == info.compute_bytes
    assert set(output_of(client, 101, ones(LARGEST))) == {1.0}


def test_a_plan_without_a_handle_goes_with_the_reservation(client: CoreClient, device: FakeDevice) -> None:
    reserve(client)
    compile_received(client, 100, LARGEST, reservation=R)
    client.do(c.Free((100,)))
    assert client.session.statistics().idle_plans == 1
    client.do(c.Free((R,)))
    assert (client.session.statistics().idle_plans, used(device)) == (0, 0)


def test_a_client_that_left_meanwhile_holds_nothing(client: CoreClient, device: FakeDevice) -> None:
    reserve(client)
    client.session.discard_reservation(R)
    client.session.discard_reservation(R)
    client.session.discard_reservation(901)
    assert used(device) == 0


def test_a_compile_whose_reservation_is_reset_meanwhile_is_refused(device: FakeDevice) -> None:
    with CoreClient(device) as client:
        reserve(client)
        gate = device.script.hold("compile")
        errors: list[BaseException] = []

        def compiling() -> None:
            try:
                compile_received(client, 100, LARGEST, reservation=R)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=compiling)
        thread.start()
        assert gate.entered.wait(10)
        client.do(c.Free((R,)))
        gate.open()
        thread.join(10)
        assert [type(error) for error in errors] == [UnknownHandleError]
        assert (used(device), client.session.statistics().plans) == (0, 0)


# Bad input


def test_more_than_the_device_has_is_refused_and_says_by_how_much(
    client: CoreClient, device: FakeDevice
) -> None:
    with pytest.raises(OutOfMemoryError, match=r"[\d,]+ bytes free; [\d,]+ are needed"):
        reserve(client, chain(*["neg", "sqr"] * 4, size=MIB))
    assert used(device) == 0
    reserve(client)


def test_a_reservation_gets_its_memory_from_plans_without_a_handle(client: CoreClient) -> None:
    compile_received(client, 100, chain("neg", "sqr", "neg", size=160_000))
    client.do(c.Free((100,)))
    assert client.session.statistics().idle_plans == 1
    reserve(client, chain("neg", "sqr", "neg", size=150_000))
    assert client.session.statistics().idle_plans == 0


def test_handles_of_reservations_are_handles_like_others(client: CoreClient) -> None:
    reserve(client)
    with pytest.raises(HandleExistsError, match="a reservation"):
        reserve(client)
    with pytest.raises(InvalidArgumentError, match="cannot be chosen"):
        reserve(client, number=0)
    with pytest.raises(InvalidArgumentError, match="a reservation is needed"):
        client.do(c.Allocate(1, LARGEST.inputs[0].type))
        compile_received(client, 100, LARGEST, reservation=1)
    with pytest.raises(UnknownHandleError):
        compile_received(client, 100, LARGEST, reservation=999)
    assert isinstance(client.refused(c.RunCommand(R, (), ())), InvalidArgumentError)
    assert isinstance(client.refused(c.GetTensor(R, 0, 4)), InvalidArgumentError)
    assert client.session.statistics().plans == 0


def test_there_is_a_most_of_reservations(client: CoreClient, device: FakeDevice) -> None:
    for number in range(1, MAX_RESERVATIONS + 1):
        reserve(client, chain("neg", "sqr"), number=number)
    before = used(device)
    with pytest.raises(LimitExceededError):
        reserve(client, number=R)
    assert used(device) == before


def test_a_closed_session_reserves_nothing() -> None:
    device = FakeDevice(memory_bytes=MIB)
    with CoreClient(device) as client:
        client.session.close()
        with pytest.raises(SessionClosedError):
            reserve(client)
        assert used(device) == 0


def test_a_graph_that_is_refused_leaves_the_number_free(client: CoreClient) -> None:
    with pytest.raises(HeliographError):
        reserve(client, chain("no such op"))
    reserve(client)


# Several devices


def far_devices() -> tuple[FakeDevice, ...]:
    return *(FakeDevice(f"fake{n}", MIB, is_host=False) for n in range(2)), FakeDevice("fake2", MIB)


def test_splits_lie_one_over_the_other_and_values_between_them_beside() -> None:
    devices = far_devices()
    names = tuple(one.name for one in devices)
    pins = {node: names[node // 2 % 2] for node in range(8)}
    with CoreClient(*devices) as client:
        alone = compile_received(client, 100, LARGEST, devices=names, pins=pins, fusion=False)
        expected = output_of(client, 100, ones(LARGEST))
        client.do(c.Free((100,)))
        client.host._room.make()
        assert all(used(one) == 0 for one in devices)
        sizes = reserve(client, devices=names, pins=pins, fusion=False)
        assert sizes == {one.name: used(one) for one in devices if one.name in sizes}
        assert sum(sizes.values()) < alone.compute_bytes
        info = compile_received(client, 101, LARGEST, devices=names, pins=pins, fusion=False, reservation=R)
        assert info.splits == 4 and info.reserved_bytes == info.compute_bytes == alone.compute_bytes
        assert sizes == {one.name: used(one) for one in devices if one.name in sizes}
        assert output_of(client, 101, ones(LARGEST)) == expected
        client.do(c.Free((R,)))
        assert all(used(one) == 0 for one in devices)


def test_copies_of_a_plan_that_run_at_once_take_memory_of_their_own() -> None:
    devices = far_devices()
    names = tuple(one.name for one in devices)
    wish: dict[str, Any] = {"devices": names, "pins": {node: names[node // 4] for node in range(8)}}
    with CoreClient(*devices) as client:
        reserve(client, **wish)
        info = compile_received(client, 100, LARGEST, reservation=R, pipeline=3, **wish)
        assert (info.pipeline, info.reserved_bytes) == (3, 0)
        again = compile_received(client, 101, LARGEST, reservation=R, pipeline=3, **wish)
        assert again.compute_bytes == info.compute_bytes > 0
        client.do(c.Free((R, 100)))
        given = (c.InputBinding(0, ones(LARGEST).tobytes()),)
        runs = [client.send(c.RunCommand(101, given, (c.OutputBinding(0, 0, True),))) for _ in range(7)]
        for run in runs:
            assert np.frombuffer(client.wait(run).outputs[0][1], "f4").tolist() == [1.0] * 512
        client.do(c.Free((101,)))
        compile_received(client, 102, LARGEST, pipeline=3, **wish)
        assert set(output_of(client, 102, ones(LARGEST))) == {1.0}


def test_what_was_reserved_counts_as_room_for_its_plans() -> None:
    wide = tensor_type("f32", (MIB // 16,))
    first, second = FakeDevice("fake0", 3 * MIB, is_host=False), FakeDevice("fake1", 3 * MIB, is_host=False)
    with CoreClient(first, second, FakeDevice("fake2", MIB)) as client:
        digests = [client.upload(bytes([number]) * wide.nbytes) for number in range(2)]
        weights = (Leaf(LeafKind.WEIGHT, f"w{number}", wide, one) for number, one in enumerate(digests))
        nodes = (Node("mul", (0, 1), wide), Node("soft_max", (3,), wide))
        nodes += (Node("mul", (4, 2), wide), Node("soft_max", (5,), wide))
        graph = Graph((Leaf(LeafKind.INPUT, "x", wide), *weights), nodes, (Output("y", 6),))
        assert set(reserve(client, graph, devices=("fake0", "fake1"))) == {"fake0"}
        client.do(c.AllocateBuffer(50, first.memory().free_bytes - wide.nbytes - 4096))
        info = compile_received(client, 100, graph, reservation=R, devices=("fake0", "fake1"))
        assert info.devices == ("fake0",) and info.reserved_bytes == info.compute_bytes


@pytest.mark.parametrize("seed", range(4))
def test_random_plans_on_random_devices_have_the_bits_of_plans_with_memory_of_their_own(seed: int) -> None:
    chance = random.Random(seed)
    devices = far_devices()
    names = tuple(one.name for one in devices)
    ops = ("neg", "sqr", "tanh", "exp", "soft_max")
    with CoreClient(*devices) as client:
        most = chain(*(chance.choice(ops) for _ in range(24)), size=256)
        pins = {node: chance.choice(names) for node in range(24)}
        reserve(client, most, devices=names, pins=pins, fusion=False)
        taken, own, lent = sum(map(used, devices)), 0, 0
        sizes: dict[int, int] = {}
        for plan in range(100, 116):
            count, sizes[plan] = chance.randint(1, 24), chance.choice((8, 64, 256))
            graph = chain(*(chance.choice(ops) for _ in range(count)), size=sizes[plan])
            pins = {node: chance.choice(names) for node in range(count)}
            wish: dict[str, Any] = {"devices": names, "fusion": False, "pins": pins}
            found = compile_received(client, plan, graph, reservation=R, **wish)
            lent, own = lent + found.reserved_bytes, own + found.compute_bytes - found.reserved_bytes
            assert sum(map(used, devices)) == taken + own, f"seed {seed}, plan {plan}"
            own += compile_received(client, plan + 100, graph, **wish).compute_bytes
        for one in chance.choices(list(sizes), k=64):
            x = np.linspace(-1, 1, sizes[one], dtype=np.float32)
            assert output_of(client, one, x) == output_of(client, one + 100, x), f"seed {seed}, plan {one}"
        # What small inputs and outputs lie in is kept from run to run.
        scratch = sum(2 * 2 * 4 * size for size in sizes.values())
        assert sum(map(used, devices)) <= taken + own + scratch and lent > 0, f"seed {seed}"
