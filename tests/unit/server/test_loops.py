"""Loops in the core: what they write where, how much may be unread, and how they end; on gates."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
from core_client import SECONDS, CoreClient
from core_loops import F4, FED, ONE, PLAN, X, doubling
from cuda_emulation import EmulatedDriver, why_not
from graph_arrivals import chain, compile_received

from heliograph_backends.contract import Abort, Device
from heliograph_backends.cpu.backend import CpuDevice
from heliograph_backends.cuda import CudaDevice
from heliograph_backends.fake import FakeDevice
from heliograph_proto import commands as c
from heliograph_proto.errors import (
    CancelledError,
    ComputeFailedError,
    DeadlineExceededError,
    HeliographError,
    InvalidArgumentError,
    LimitExceededError,
    OutOfMemoryError,
    SessionClosedError,
)
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.plans import Port
from heliograph_proto.sessions import Limits
from heliograph_proto.types import tensor_type
from heliograph_server.resources.device_queue import SHORT_US, DeviceLock
from heliograph_server.resources.handles import PlanHandle
from heliograph_server.session.protocol.loop_rules import Unread, check_loop

N = np.zeros(1, np.int32)
COST = c.STREAMED_VALUE_BYTES

Array = np.ndarray[Any, Any]


def loop_of(
    steps: int, *, plan: int = PLAN, outputs: Sequence[c.OutputBinding] = (), **loop: Any
) -> c.RunCommand:
    """A loop of doublings of X; y comes in the completion."""
    inputs = (c.InputBinding(0, X.tobytes()), c.InputBinding(1, (N + 1).tobytes()))
    wanted = tuple(outputs) or (c.OutputBinding(0, 0, True),)
    return c.RunCommand(plan, inputs, wanted, loop=c.Loop(steps, **{"carries": FED, **loop}))


def result(done: c.Completion) -> Array:
    assert done.error is None, done.error
    return np.frombuffer(done.outputs[0][1], np.float32)


def streamed(pieces: Sequence[c.TapPiece]) -> list[tuple[int, int | None, list[float]]]:
    return [(one.step, one.output, np.frombuffer(one.data, np.float32).tolist()) for one in pieces]


def timed(client: CoreClient, kind: c.RunCommand, timeout_ms: int) -> int:
    client._sequence += 1
    client.session.submit([c.Command(client._sequence, kind, 0, notify=True, timeout_ms=timeout_ms)])
    return client._sequence


# What they compute


def test_each_step_is_fed_with_the_one_before_and_is_told(client: CoreClient) -> None:
    for steps in (1, 2, 3, 10):
        done = client.do(loop_of(steps))
        assert np.array_equal(result(done), X * 2**steps) and done.steps == steps


def test_a_loop_writes_what_it_makes_and_nothing_else(client: CoreClient) -> None:
    client.do(c.Allocate(1, F4))
    client.do(c.SetTensor(1, 0, X.tobytes()))
    for steps in (1, 2, 5):
        for until in (None, 1):
            client.do(c.Allocate(3, F4))
            kind = c.RunCommand(
                PLAN,
                (c.InputBinding(0, None, 1), c.InputBinding(1, N.tobytes())),
                (c.OutputBinding(0, 0, into=3), c.OutputBinding(1, 4, False)),
                loop=c.Loop(steps, FED, until),
            )
            client.do(kind)
            assert np.array_equal(client.get(1, F4), X)
            assert np.array_equal(client.get(3, F4), X * 2**steps)
            assert client.get(4, ONE).tolist() == [0]
            client.do(c.Free((3, 4)))


def test_an_output_into_an_input_is_refused_as_in_a_run(client: CoreClient) -> None:
    client.do(c.Allocate(1, F4))
    inputs = (c.InputBinding(0, None, 1), c.InputBinding(1, N.tobytes()))
    kind = c.RunCommand(PLAN, inputs, (c.OutputBinding(0, 0, into=1),), loop=c.Loop(2, FED))
    assert "overlaps another tensor" in str(client.refused(kind))


def test_a_step_that_finds_no_memory_is_tried_once_more(client: CoreClient, fake: FakeDevice) -> None:
    # What nobody has a handle of any more makes room.
    compile_received(client, PLAN + 1, chain("neg", "exp"))
    client.do(c.Free((PLAN + 1,)))
    assert client.session.statistics().idle_plans == 1
    gate = fake.script.hold("compute")
    fake.script.fail("compute", OutOfMemoryError("not now"))
    sequence = client.send(loop_of(3))
    gate.open()
    assert np.array_equal(result(client.wait(sequence)), X * 8)
    assert client.session.statistics().idle_plans == 0


def test_a_device_of_another_memory_loops_too() -> None:
    with CoreClient(FakeDevice("far", 2**20, is_host=False), CpuDevice("cpu0", 1, native=False)) as client:
        client.compile(PLAN, doubling())
        client.do(c.Allocate(1, F4, "cpu0"))
        client.do(c.SetTensor(1, 0, X.tobytes()))
        inputs = (c.InputBinding(0, None, 1), c.InputBinding(1, (N + 1).tobytes()))
        kind = c.RunCommand(PLAN, inputs, (c.OutputBinding(0, 0, True),), loop=c.Loop(7, (c.Carry(1, 1),)))
        # What lies elsewhere and stays as it is.
        assert np.array_equal(result(client.do(kind)), X * 2)
        assert np.array_equal(result(client.do(loop_of(7))), X * 2**7)


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_a_device_that_computes_later_loops_too() -> None:
    """Between two steps it is waited for, and what is replayed has the places of each step."""
    with CoreClient(CudaDevice("cuda0", EmulatedDriver(lazy=True), 2**28)) as client:
        client.compile(PLAN, doubling())
        client.compile(PLAN + 1, doubling(), taps=(0, 1))
        for steps in (1, 2, 3, 10):
            for plan in (PLAN, PLAN + 1):
                done = client.do(loop_of(steps, plan=plan, taps=(0,), unread_bytes=10**6))
                assert np.array_equal(result(done), X * 2**steps)
            assert client.do(loop_of(steps, until=1)).steps == 1
        assert [one.step for one in client.taps[-30:]] == [step for step in range(10) for _ in range(3)]


# How they end


def test_an_output_ends_it(client: CoreClient) -> None:
    inputs = (c.InputBinding(0, X.tobytes()), c.InputBinding(1, np.array([1 << 29], np.int32).tobytes()))
    # It overflows to 0 with the third doubling.
    kind = c.RunCommand(PLAN, inputs, (c.OutputBinding(0, 0, True),), loop=c.Loop(9, FED, 1))
    done = client.do(kind)
    assert done.steps == 1
    zero = c.RunCommand(
        PLAN, (inputs[0], c.InputBinding(1, N.tobytes())), kind.outputs, loop=c.Loop(9, FED, 1)
    )
    assert client.do(zero).steps == 9


def test_a_step_that_fails_ends_it_with_its_number(client: CoreClient, fake: FakeDevice) -> None:
    gates = [fake.script.hold("compute") for _ in range(3)]
    fake.script.fail("compute", ComputeFailedError("the fan stopped"))
    sequence = client.send(loop_of(9, outputs=[c.OutputBinding(0, 7)]))
    for gate in gates:
        gate.open()
    done = client.wait(sequence)
    error = done.error
    assert isinstance(error, ComputeFailedError) and error.message == "in step 3 of the loop: the fan stopped"
    assert done.steps == 3
    spoilt = client.refused(c.GetTensor(7, 0, 16))
    assert "in step 3" in spoilt.message and spoilt.origin.sequence == sequence
    assert np.array_equal(result(client.do(loop_of(2))), X * 4)


@pytest.mark.parametrize("how", ["cancel", "time", "close"])
def test_it_ends_between_two_steps(client: CoreClient, fake: FakeDevice, how: str) -> None:
    first, second = fake.script.hold("compute"), fake.script.hold("compute")
    sequence = timed(client, loop_of(10**6), 500 if how == "time" else 0)
    assert first.entered.wait(SECONDS)
    first.open()
    assert second.entered.wait(SECONDS)
    expected: type[HeliographError] = DeadlineExceededError
    if how == "cancel":
        client.do(c.Cancel(sequence))
        expected = CancelledError
    elif how == "close":
        second.open()
        client.session.close()
        expected = SessionClosedError
    done = client.wait(sequence)
    assert isinstance(done.error, expected) and (done.steps == 1 or how == "close")
    second.open()


def test_a_plan_can_be_freed_while_it_loops(client: CoreClient, fake: FakeDevice) -> None:
    gate = fake.script.hold("compute")
    sequence = client.send(loop_of(5))
    assert gate.entered.wait(SECONDS)
    client.send(c.Free((PLAN,)))
    gate.open()
    assert np.array_equal(result(client.wait(sequence)), X * 32)


def test_its_steps_are_so_many_runs_of_the_plan(client: CoreClient) -> None:
    loaded = client.session._core.handles.get(PLAN, PlanHandle).plan
    loaded.note(0, 1000 * SHORT_US)
    client.do(loop_of(64))
    # What was slow once is forgotten, and the loop as a whole was never one run.
    assert loaded.expected_us < 1000 * SHORT_US
    assert loaded.took_us <= loaded.expected_us


class CountedTurns(DeviceLock):
    """A device's lock that counts how often it was entered to compute."""

    entered = 0

    def computing(self, abort: Abort, device: Device | None = None) -> AbstractContextManager[object]:
        self.entered += 1
        return super().computing(abort, device)


@pytest.mark.parametrize("taps", [(), (0,)], ids=["alone", "streamed"])
def test_short_steps_share_a_turn_unless_their_values_are_sent(
    client: CoreClient, taps: tuple[int, ...]
) -> None:
    loaded = client.session._core.handles.get(PLAN, PlanHandle).plan
    turns = loaded.copies[0]._device_lock = CountedTurns()
    client.do(loop_of(64, taps=taps, unread_bytes=10**6 if taps else 0))
    assert turns.entered == 64 if taps else turns.entered < 64


def test_no_loop_runs_on_the_thread_that_brings_it(fake: FakeDevice) -> None:
    with CoreClient(fake) as client:
        client.session._executor._at_once = lambda: True
        client.compile(PLAN, doubling())
        loaded = client.session._core.handles.get(PLAN, PlanHandle).plan
        loaded.expected_us = 0.0
        gate = fake.script.hold("compute")
        # It would wait for the gate here.
        sequence = client.send(loop_of(2))
        assert gate.entered.wait(SECONDS)
        gate.open()
        assert np.array_equal(result(client.wait(sequence)), X * 4)


# What they stream


def test_outputs_come_after_each_step_behind_its_nodes(client: CoreClient) -> None:
    client.compile(PLAN + 1, doubling(), taps=(0,))
    done = client.do(loop_of(3, plan=PLAN + 1, taps=(0,), unread_bytes=10**6))
    assert streamed(client.taps) == [
        (step, output, (X * 2 ** (step + 1)).tolist()) for step in range(3) for output in (None, 0)
    ]
    assert np.array_equal(result(done), X * 8)
    assert {(one.node, one.last, one.offset_bytes) for one in client.taps} == {(0, True, 0)}


def test_a_loop_waits_until_its_client_took_more(client: CoreClient) -> None:
    # Two values may be unread.
    most = 2 * (16 + COST)
    sequence = client.send(loop_of(6, taps=(0,), unread_bytes=most))
    for taken in range(4):
        assert len(client.wait_for_taps(taken + 2)) == taken + 2
        # Nothing new.
        client.do(c.Continue(sequence, taken * (16 + COST)))
        assert len(client.taps) == taken + 2
        client.do(c.Continue(sequence, (taken + 1) * (16 + COST)))
    done = client.wait(sequence)
    assert done.steps == 6 and [one.step for one in client.taps] == list(range(6))


def test_a_value_larger_than_all_that_may_be_unread_goes_alone(client: CoreClient) -> None:
    sequence = client.send(loop_of(3, taps=(0, 1), unread_bytes=0))
    taken = 0
    for count, size in enumerate((16, 4, 16, 4, 16, 4), 1):
        assert len(client.wait_for_taps(count)) == count
        taken += size + COST
        client.do(c.Continue(sequence, taken)) if count < 6 else None
    assert client.wait(sequence).steps == 3


def test_the_same_or_less_taken_again_changes_nothing_and_more_than_went_is_refused(
    client: CoreClient,
) -> None:
    sequence = client.send(loop_of(4, taps=(0,), unread_bytes=0))
    client.wait_for_taps(1)
    for taken in (0, 1, 0):
        client.do(c.Continue(sequence, taken))
    assert len(client.taps) == 1
    for taken in (2**64 - 1, 16 + COST + 1):
        error = client.refused(c.Continue(sequence, taken))
        assert isinstance(error, InvalidArgumentError) and "were taken of a loop that sent" in error.message
    assert len(client.taps) == 1
    client.do(c.Cancel(sequence))
    assert isinstance(client.wait(sequence).error, CancelledError)
    assert isinstance(client.refused(c.Continue(sequence, 0)), InvalidArgumentError)


@pytest.mark.parametrize("how", ["cancel", "time", "close"])
def test_a_loop_that_waits_for_its_client_can_be_ended(client: CoreClient, how: str) -> None:
    sequence = timed(client, loop_of(9, taps=(0,), unread_bytes=0), 1000 if how == "time" else 0)
    expected: type[HeliographError] = DeadlineExceededError
    client.wait_for_taps(1)
    if how == "cancel":
        client.do(c.Cancel(sequence))
        expected = CancelledError
    elif how == "close":
        client.session.close()
        expected = SessionClosedError
    assert isinstance(client.wait(sequence).error, expected)
    if how != "close":
        assert np.array_equal(result(client.do(loop_of(2))), X * 4)


def test_when_no_command_can_come_what_is_unread_ends_it(client: CoreClient) -> None:
    sequence = client.send(loop_of(9, taps=(0,), unread_bytes=0))
    client.wait_for_taps(1)
    client.session.end_of_commands()
    error = client.wait(sequence).error
    assert isinstance(error, LimitExceededError) and "half-close" in error.advice
    assert "in step 1 of the loop" in error.message


def test_when_no_command_can_come_what_fits_is_streamed(client: CoreClient, fake: FakeDevice) -> None:
    gate = fake.script.hold("compute")
    sequence = client.send(loop_of(3, taps=(0,), unread_bytes=10**5))
    assert gate.entered.wait(SECONDS)
    client.session.end_of_commands()
    gate.open()
    assert client.wait(sequence).steps == 3 and len(client.taps) == 3


def test_of_two_devices_both_may_wait_for_the_client() -> None:
    first, second = (FakeDevice(f"fake{number}", 2**20, is_host=False) for number in range(2))
    with CoreClient(first, second) as client:
        nodes = (Node("neg", (0,), F4), Node("sqr", (0,), F4), Node("add", (1, 2), F4))
        graph = Graph((Leaf(LeafKind.INPUT, "x", F4),), nodes, (Output("y", 3),))
        pins = {0: "fake0", 1: "fake1", 2: "fake0"}
        client.compile(PLAN, graph, devices=["fake0", "fake1"], pins=pins, taps=(0, 1, 2))
        loop = c.Loop(3, (c.Carry(0, 0),), None, (0,), 0)
        kind = c.RunCommand(
            PLAN, (c.InputBinding(0, X.tobytes()),), (c.OutputBinding(0, 0, True),), loop=loop
        )
        sequence = client.send(kind)
        for count in range(1, 13):
            assert len(client.wait_for_taps(count)) == count
            if count < 12:
                client.do(c.Continue(sequence, count * (16 + COST)))
        assert client.wait(sequence).steps == 3
        assert [one.step for one in client.taps] == [step for step in range(3) for _ in range(4)]
        assert [one.output for one in client.taps][3::4] == [0, 0, 0]


# Bounds


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        ({"steps": 0}, "0 steps"),
        ({"steps": 2**64 - 1}, "1 to 1,000,000,000"),
        ({"carries": (c.Carry(2, 0),)}, "output 2 of a plan with 2"),
        ({"carries": (c.Carry(0, 2),)}, "input 2 of a plan with 2"),
        ({"carries": (c.Carry(2**32 - 1, 0),)}, "of a plan with 2"),
        ({"carries": (c.Carry(0, 1),)}, "'y' is f32.4., but is fed to input 'n', which is i32.1."),
        ({"carries": (c.Carry(0, 0), c.Carry(0, 0))}, "input 0 is fed from two outputs"),
        ({"until": 2}, "output 2 of a plan with 2"),
        ({"until": 0}, "only one bool or integer can end a loop"),
        ({"taps": (0, 1, 0)}, "output 0 is streamed twice"),
        ({"taps": (7,)}, "output 7 of a plan"),
    ],
)
def test_loops_that_are_none_are_refused_and_poison_what_they_were_to_make(
    client: CoreClient, loop: dict[str, Any], words: str
) -> None:
    kind = loop_of(**{"steps": 3, **loop}, outputs=[c.OutputBinding(0, 9)])
    with pytest.raises(InvalidArgumentError, match=words):
        client.do(kind)
    with pytest.raises(InvalidArgumentError, match=words):
        client.do(c.GetTensor(9, 0, 16))
    assert np.array_equal(result(client.do(loop_of(2))), X * 4)


def test_a_loop_does_not_pause(client: CoreClient) -> None:
    run = loop_of(2)
    paused = c.RunCommand(run.plan, run.inputs, run.outputs, True, run.loop)
    assert "a loop that pauses" in str(client.refused(paused))


def test_what_may_be_unread_counts_and_not_all_that_is_streamed(fake: FakeDevice) -> None:
    # 20 bytes of inputs and 16 of y.
    with CoreClient(fake, limits=Limits(in_flight_bytes=1000)) as client:
        client.compile(PLAN, doubling())
        kind = loop_of(50, taps=(0,), unread_bytes=948)
        sequence = client.send(kind)
        for count in range(1, 50):
            client.wait_for_taps(count)
            client.do(c.Continue(sequence, count * (16 + COST)))
        assert client.wait(sequence).steps == 50
        for most in (949, 2**64 - 1):
            refused = client.refused(loop_of(50, taps=(0,), unread_bytes=most))
            assert isinstance(refused, LimitExceededError) and "would pass the limit" in refused.message
        # It was given back.
        client.do(loop_of(1, taps=(0,), unread_bytes=948))


def test_a_loop_that_was_cancelled_leaves_its_room_to_the_next_while_its_step_goes_on(
    fake: FakeDevice,
) -> None:
    with CoreClient(fake, limits=Limits(in_flight_bytes=1000)) as client:
        client.compile(PLAN, doubling())
        gate = fake.script.hold("compute")
        sequence = client.send(loop_of(9, taps=(0,), unread_bytes=800))
        assert gate.entered.wait(SECONDS)
        client.do(c.Cancel(sequence))
        assert isinstance(client.wait(sequence).error, CancelledError)
        again = client.send(loop_of(1, taps=(0,), unread_bytes=800))
        gate.open()
        assert client.wait(again).error is None
        # No more than it was is given back.
        assert isinstance(client.refused(loop_of(1, taps=(0,), unread_bytes=949)), LimitExceededError)


def test_what_cannot_be_read_between_two_steps_fails_it(client: CoreClient, fake: FakeDevice) -> None:
    fake.script.fail("get", ComputeFailedError("the bus is gone"))
    error = client.refused(loop_of(3, taps=(0,), unread_bytes=10**5))
    assert "in step 0 of the loop: the bus is gone" in error.message


def test_memory_of_a_loop_that_finds_none_is_given_back(fake: FakeDevice) -> None:
    with CoreClient(fake) as client:
        wide = tensor_type("f32", (2**16 - 2**12,))
        leaves, nodes = (Leaf(LeafKind.INPUT, "x", wide),), (Node("neg", (0,), wide),)
        client.compile(PLAN, Graph(leaves, nodes, (Output("y", 1),)))
        client.do(c.Allocate(1, wide))
        run = c.RunCommand(
            PLAN, (c.InputBinding(0, None, 1),), (c.OutputBinding(0, 2),), loop=c.Loop(2, (c.Carry(0, 0),))
        )
        before = fake.memory().free_bytes
        client.do(run)
        client.do(c.Free((2,)))
        assert fake.memory().free_bytes == before
        client.do(c.Allocate(3, tensor_type("u8", (before - 2 * wide.nbytes + 2**15,))))
        assert isinstance(client.refused(run), OutOfMemoryError)
        client.do(c.Free((2, 3)))
        assert fake.memory().free_bytes == before


# Pure


def test_what_is_unread_is_counted() -> None:
    unread = Unread(100 + COST)
    assert unread.has_room(10**9)
    unread.tell(60)
    assert unread.has_room(40 - COST) and not unread.has_room(41)
    unread.take(30)
    assert not unread.has_room(100)
    with pytest.raises(InvalidArgumentError):
        unread.take(61 + COST)
    unread.take(60 + COST)
    assert unread.has_room(10**9)


def test_one_element_of_any_rank_may_end_a_loop() -> None:
    for shape in ((), (1,), (1, 1, 1)):
        port = Port("p", tensor_type("bool", shape))
        check_loop(c.RunCommand(1, (), (), loop=c.Loop(1, (), 0)), (), (port,))
    for dtype, shape in (("f32", ()), ("i32", (2,)), ("i32", (0,)), ("q8_0", (32,)), ("bf16", (1,))):
        port = Port("p", tensor_type(dtype, shape))
        with pytest.raises(InvalidArgumentError):
            check_loop(c.RunCommand(1, (), (), loop=c.Loop(1, (), 0)), (), (port,))
