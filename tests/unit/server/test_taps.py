"""Observed runs in the core: order, pauses, ends and bounds; on gates, without a wait for a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from core_client import SECONDS, CoreClient

from heliograph_backends.cpu.backend import CpuDevice
from heliograph_backends.fake import FakeDevice
from heliograph_proto import commands as c
from heliograph_proto.errors import (
    CancelledError,
    ComputeFailedError,
    DeadlineExceededError,
    HeliographError,
    InvalidArgumentError,
    LimitExceededError,
    SessionClosedError,
)
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.sessions import Limits
from heliograph_proto.types import TensorType, tensor_type

F4 = tensor_type("f32", (4,))
X = np.arange(4, dtype=np.float32)
PLAN = 100


def chain(of: TensorType = F4) -> Graph:
    """The negative, its square, the negative of that, and its sum with x."""
    nodes = (
        Node("neg", (0,), of),
        Node("sqr", (1,), of),
        Node("neg", (2,), of),
        Node("add", (3, 0), of),
    )
    return Graph((Leaf(LeafKind.INPUT, "x", of),), nodes, (Output("y", 4),))


@pytest.fixture
def client(fake: FakeDevice) -> Iterator[CoreClient]:
    with CoreClient(fake) as made:
        yield made


def run(
    client: CoreClient, plan: int = PLAN, *, pause: bool = False, timeout_ms: int = 0, stream: int = 0
) -> int:
    """Sends a run of a plan of x; its sequence number."""
    kind = c.RunCommand(plan, (c.InputBinding(0, X.tobytes()),), (c.OutputBinding(0, 0, True),), pause)
    client._sequence += 1
    client.session.submit([c.Command(client._sequence, kind, stream, notify=True, timeout_ms=timeout_ms)])
    return client._sequence


def values(pieces: Sequence[c.TapPiece]) -> list[tuple[int, list[float]]]:
    return [(one.node, np.frombuffer(one.data, np.float32).tolist()) for one in pieces]


def result(done: c.Completion) -> list[float]:
    assert done.error is None, done.error
    found: list[float] = np.frombuffer(done.outputs[0][1], np.float32).tolist()
    return found


def test_every_run_tells_of_the_observed_nodes_before_it_is_done(client: CoreClient) -> None:
    info = client.compile(PLAN, chain(), taps=(2, 0))
    # What nobody observes runs in one go with what somebody does.
    assert info.splits == 3
    for count in (1, 2):
        sequence = run(client)
        assert result(client.wait(sequence)) == (X - X * X).tolist()
        told = client.taps[2 * (count - 1) :]
        assert values(told) == [(0, (-X).tolist()), (2, (-X * X).tolist())]
        assert {(one.sequence, one.offset_bytes, one.last) for one in told} == {(sequence, 0, True)}


def test_a_large_value_comes_in_pieces_of_the_inline_limit(fake: FakeDevice) -> None:
    with CoreClient(fake, limits=Limits(inline_bytes=6)) as client:
        client.compile(PLAN, chain(), taps=(3,))
        client.do(c.Allocate(1, F4))
        client.do(c.RunCommand(PLAN, (c.InputBinding(0, None, 1),), ()))
        assert [(one.offset_bytes, len(one.data), one.last) for one in client.taps] == [
            (0, 6, False), (6, 6, False), (12, 4, True),
        ]  # fmt: skip


def test_a_value_without_elements_is_told_too(client: CoreClient) -> None:
    nothing = tensor_type("f32", (0, 4))
    client.compile(PLAN, chain(nothing), taps=(1,))
    client.do(c.RunCommand(PLAN, (c.InputBinding(0, b""),), ()))
    assert [(one.node, bytes(one.data), one.last) for one in client.taps] == [(1, b"", True)]


# Pauses


def test_a_run_that_pauses_waits_after_each_observed_node(client: CoreClient, fake: FakeDevice) -> None:
    client.compile(PLAN, chain(), taps=(0, 2))
    gates = [fake.script.hold("compute") for _ in range(3)]
    sequence = run(client, pause=True)
    for count, gate in enumerate(gates):
        assert gate.entered.wait(SECONDS)
        assert len(client.taps) == count
        gate.open()
        if count < 2:
            client.wait_for_taps(count + 1)
            assert not gates[count + 1].entered.is_set()
            client.do(c.Continue(sequence))
    assert result(client.wait(sequence)) == (X - X * X).tolist()


def test_continue_is_refused_where_nothing_waits(client: CoreClient, fake: FakeDevice) -> None:
    client.compile(PLAN, chain(), taps=(0,))
    gate = fake.script.hold("compute")
    sequence = run(client)
    assert gate.entered.wait(SECONDS)
    for number in (sequence, 0, 2**64 - 1, sequence + 1):
        error = client.refused(c.Continue(number))
        assert isinstance(error, InvalidArgumentError) and "neither a run that waits" in error.message
    gate.open()
    result(client.wait(sequence))
    assert isinstance(client.refused(c.Continue(sequence)), InvalidArgumentError)
    # It fails by itself: nothing behind it does.
    client.do(c.Synchronize())


def test_a_second_continue_for_one_pause_is_refused(client: CoreClient, fake: FakeDevice) -> None:
    client.compile(PLAN, chain(), taps=(0, 2))
    sequence = run(client, pause=True)
    client.wait_for_taps(1)
    gate = fake.script.hold("compute")
    client.do(c.Continue(sequence))
    assert gate.entered.wait(SECONDS)
    assert isinstance(client.refused(c.Continue(sequence)), InvalidArgumentError)
    gate.open()
    client.wait_for_taps(2)
    client.do(c.Continue(sequence))
    result(client.wait(sequence))


def test_what_is_on_another_stream_goes_on_meanwhile(client: CoreClient) -> None:
    client.compile(PLAN, chain(), taps=(0,))
    client.compile(PLAN + 1, chain())
    client.compile(PLAN + 2, chain())
    client.do(c.CreateStream(7))
    paused, behind = run(client, pause=True), run(client, PLAN + 2)
    client.wait_for_taps(1)
    beside = run(client, PLAN + 1, stream=7)
    result(client.wait(beside))
    assert paused not in client._done and behind not in client._done
    client.do(c.Continue(paused))
    result(client.wait(paused))
    result(client.wait(behind))


def test_pausing_where_nothing_is_observed_is_no_pause(client: CoreClient) -> None:
    client.compile(PLAN, chain())
    result(client.wait(run(client, pause=True)))


def test_a_device_whose_run_pauses_is_not_occupied(client: CoreClient) -> None:
    client.compile(PLAN, chain(), taps=(0,))
    device_lock = client.host._device_locks["fake0"]
    sequence = run(client, pause=True)
    client.wait_for_taps(1)
    done: list[int] = []
    while not device_lock.at_once(lambda: done.append(1)):
        # It tells its client a moment before it waits.
        assert sequence not in client._done
    client.do(c.Continue(sequence))
    result(client.wait(sequence))
    assert done == [1] and device_lock.at_once(lambda: done.append(2))


# Ends


def test_a_paused_run_can_be_cancelled(client: CoreClient) -> None:
    client.compile(PLAN, chain(), taps=(0, 3))
    for _ in range(3):
        client.taps.clear()
        sequence = run(client, pause=True)
        client.wait_for_taps(1)
        client.do(c.Cancel(sequence))
        assert isinstance(client.wait(sequence).error, CancelledError)
    client.taps.clear()
    result(client.wait(run(client)))
    assert [one.node for one in client.taps] == [0, 3]


def test_the_time_of_a_paused_run_goes_on(client: CoreClient) -> None:
    client.compile(PLAN, chain(), taps=(0,))
    sequence = run(client, pause=True, timeout_ms=50)
    assert isinstance(client.wait(sequence).error, DeadlineExceededError)


def test_closing_ends_a_paused_run(client: CoreClient) -> None:
    client.compile(PLAN, chain(), taps=(0,))
    sequence = run(client, pause=True)
    client.wait_for_taps(1)
    client.session.close()
    assert isinstance(client.wait(sequence).error, SessionClosedError)


def test_when_no_command_can_come_any_more_a_run_goes_on(client: CoreClient) -> None:
    client.compile(PLAN, chain(), taps=(0, 2))
    sequence = run(client, pause=True)
    client.wait_for_taps(1)
    client.session.end_of_commands()
    result(client.wait(sequence))
    assert [one.node for one in client.taps] == [0, 2]


def test_a_plan_can_be_freed_while_its_run_pauses(client: CoreClient) -> None:
    client.compile(PLAN, chain(), taps=(0,))
    sequence = run(client, pause=True)
    client.wait_for_taps(1)
    client.send(c.Free((PLAN,)))
    client.do(c.Continue(sequence))
    result(client.wait(sequence))


def test_a_device_that_fails_leaves_what_was_told(client: CoreClient, fake: FakeDevice) -> None:
    client.compile(PLAN, chain(), taps=(0, 2))
    gate = fake.script.hold("compute")
    fake.script.fail("compute", ComputeFailedError("the fan stopped"))
    sequence = run(client)
    gate.open()
    error = client.wait(sequence).error
    assert isinstance(error, ComputeFailedError) and "the fan stopped" in error.message
    assert values(client.taps) == [(0, (-X).tolist())]
    result(client.wait(run(client)))


def test_a_value_that_cannot_be_read_fails_the_run(client: CoreClient, fake: FakeDevice) -> None:
    client.compile(PLAN, chain(), taps=(0,))
    fake.script.fail("get", ComputeFailedError("the bus is gone"))
    assert "the bus is gone" in str(client.wait(run(client)).error)
    assert not client.taps


# Bounds


@pytest.mark.parametrize("taps", [(4,), (0, 0), (2**32 - 1,)])
def test_nodes_that_are_none_are_refused_and_the_handle_is_free(
    client: CoreClient, taps: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidArgumentError, match="tapped"):
        client.compile(PLAN, chain(), taps=taps)
    client.compile(PLAN, chain(), taps=(3,))


def test_the_bytes_of_taps_count_as_long_as_the_run_is_in_flight(fake: FakeDevice) -> None:
    # An input and an output of 16 bytes, and two taps.
    with CoreClient(fake, limits=Limits(in_flight_bytes=100)) as client:
        client.compile(PLAN, chain(), taps=(0, 1))
        gate = fake.script.hold("compute")
        first = run(client)
        assert gate.entered.wait(SECONDS)
        second = run(client)
        gate.open()
        result(client.wait(first))
        refused = client.wait(second).error
        assert isinstance(refused, LimitExceededError) and "64 more would pass" in refused.message
        result(client.wait(run(client)))
        with pytest.raises(LimitExceededError, match="128 bytes"):
            client.compile(PLAN + 1, wide(), taps=range(8))


def wide() -> Graph:
    nodes = tuple(Node("neg", (number,), F4) for number in range(8))
    return Graph((Leaf(LeafKind.INPUT, "x", F4),), nodes, (Output("y", 8),))


def test_a_failed_compile_of_taps_leaves_no_memory(client: CoreClient, fake: FakeDevice) -> None:
    before = fake.memory().free_bytes
    fake.script.fail("compile", ComputeFailedError("no"))
    with pytest.raises(HeliographError):
        client.compile(PLAN, chain(), taps=(0,))
    assert fake.memory().free_bytes == before


# Several devices


class Pair:
    """Two branches of x, on two scripted devices, and their sum on a third."""

    def __init__(self, client: CoreClient, first: FakeDevice, second: FakeDevice) -> None:
        self.client, self.first, self.second = client, first, second
        nodes = (Node("neg", (0,), F4), Node("sqr", (0,), F4), Node("add", (1, 2), F4))
        graph = Graph((Leaf(LeafKind.INPUT, "x", F4),), nodes, (Output("y", 3),))
        names = ["fake0", "fake1", "cpu0"]
        client.compile(PLAN, graph, devices=names, pins=dict(enumerate(names)), taps=(0, 1, 2))


@pytest.fixture
def pair() -> Iterator[Pair]:
    first, second = (FakeDevice(f"fake{number}", 2**20, is_host=False) for number in range(2))
    with CoreClient(first, second, CpuDevice("cpu0", 1, native=False)) as client:
        yield Pair(client, first, second)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_runs_side_by_side_is_told_in_the_order_in_which_it_ends(
    pair: Pair, order: tuple[int, ...]
) -> None:
    gates = pair.first.script.hold("compute"), pair.second.script.hold("compute")
    sequence = run(pair.client)
    assert all(gate.entered.wait(SECONDS) for gate in gates)
    for count, number in enumerate(order, 1):
        gates[number].open()
        pair.client.wait_for_taps(count)
    assert result(pair.client.wait(sequence)) == (X * X - X).tolist()
    assert [one.node for one in pair.client.taps] == [*order, 2]


def test_of_two_devices_one_waits_at_a_time(pair: Pair) -> None:
    sequence = run(pair.client, pause=True)
    for count in (1, 2, 3):
        assert len(pair.client.wait_for_taps(count)) == count
        pair.client.do(c.Continue(sequence))
    assert result(pair.client.wait(sequence)) == (X * X - X).tolist()


def test_cancelling_ends_all_devices_that_wait(pair: Pair) -> None:
    sequence = run(pair.client, pause=True)
    pair.client.wait_for_taps(1)
    pair.client.do(c.Cancel(sequence))
    assert isinstance(pair.client.wait(sequence).error, CancelledError)
    pair.client.taps.clear()
    assert result(pair.client.wait(run(pair.client))) == (X * X - X).tolist()
    assert sorted(one.node for one in pair.client.taps) == [0, 1, 2]


def test_a_device_that_fails_ends_one_that_waits(pair: Pair) -> None:
    pair.second.script.delay("compute", 0.05)
    pair.second.script.fail("compute", ComputeFailedError("the fan stopped"))
    error = pair.client.wait(run(pair.client, pause=True)).error
    assert isinstance(error, ComputeFailedError) and "the fan stopped" in error.message


def test_runs_that_overlap_are_told_apart(pair: Pair) -> None:
    names = ["fake0", "fake1", "cpu0"]
    pins = {0: "fake0", 1: "fake1", 2: "cpu0", 3: "cpu0"}
    pair.client.compile(PLAN + 1, chain(), devices=names, pins=pins, taps=range(4), pipeline=3)
    paused = run(pair.client, PLAN + 1, pause=True)
    pair.client.wait_for_taps(1)
    others = [run(pair.client, PLAN + 1) for _ in range(4)]
    for count in range(4):
        while len([one for one in pair.client.taps if one.sequence == paused]) <= count:
            pair.client.wait_for_taps(len(pair.client.taps) + 1)
        pair.client.do(c.Continue(paused))
    for sequence in (paused, *others):
        assert result(pair.client.wait(sequence)) == (X - X * X).tolist()
        assert [one.node for one in pair.client.taps if one.sequence == sequence] == [0, 1, 2, 3]


def test_observing_moves_no_node_to_another_device(pair: Pair) -> None:
    names = ["fake0", "fake1", "cpu0"]
    graph = chain()
    pins = {0: "fake1", 2: "cpu0"}
    pair.client.compile(PLAN + 1, graph, devices=names, pins=pins)
    pair.client.compile(PLAN + 2, graph, devices=names, pins=pins, taps=range(4))
    plain, observed = (pair.client.session.explain(number) for number in (PLAN + 1, PLAN + 2))
    places = [
        [(report.splits[one.split].device, one.cause) for one in report.nodes] for report in (plain, observed)
    ]
    assert places[0] == places[1] and len(observed.splits) == 4
