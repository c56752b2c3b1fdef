"""What one client can cost the others: work that grows faster than what was sent, memory without a limit,
and the event loop's time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heliograph_backends.contract import Tensor
from heliograph_backends.cpu.backend import CpuDevice
from heliograph_backends.fake import FakeDevice
from heliograph_backends.registry import Registry
from heliograph_proto import commands as c
from heliograph_proto.codec import decode_graph
from heliograph_proto.codec.inline_runs import CommandReader
from heliograph_proto.errors import (
    ComputeFailedError,
    HeliographError,
    InvalidArgumentError,
    LimitExceededError,
    ProtocolError,
    Reason,
)
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.plans import CompileRequest
from heliograph_proto.sessions import Limits
from heliograph_proto.types import tensor_type
from heliograph_proto.v1 import command_pb2, graph_pb2, tensor_pb2
from heliograph_server.resources.device_queue import DeviceLock
from heliograph_server.resources.handles import HandleStorage, TensorHandle, layout
from heliograph_server.resources.timers import Deadlines, Timer
from heliograph_server.rpc import command_service
from heliograph_server.rpc.completion_writer import CompletionWriter
from heliograph_server.rpc.leases.conversations import Stream
from heliograph_server.rpc.message_limits import check_command
from heliograph_server.runtime.host import Host, HostStatistics
from heliograph_server.session.protocol.core import SessionCore
from heliograph_server.session.session import Session
from heliograph_server.session.staging import Staging

T, BYTE = tensor_type("f32", (4096,)), tensor_type("u8", (1,))
#: Far more than FEW_READERS.
MANY = 300
SECONDS = 10.0


def core_with(*kinds: c.CommandKind, limits: Limits | None = None) -> SessionCore:
    """A core with one device whose queue never works."""
    core = SessionCore(limits or Limits(), ("a",))
    for number, kind in enumerate(kinds, 1):
        core.receive(c.Command(number, kind))
    return core


def edges(core: SessionCore) -> int:
    """How many times some command waits for another."""
    return sum(len(state.dependents) for state in core._commands.values())


#: A tensor whose write waits for an upload, and so everything behind it.
STUCK = (c.Allocate(1, T), c.SetTensor(1, 0, None, 7, 16))


def test_views_and_frees_beside_many_readers_cost_no_more_than_themselves() -> None:
    reads = [c.GetTensor(1, 0, 4)] * MANY
    views = [c.View(10 + n, 1, n, BYTE) for n in range(MANY)]
    frees = [c.Free((10 + n,)) for n in range(MANY)]
    assert edges(core_with(*STUCK, *reads, *views, *frees)) < 10 * 3 * MANY
    assert edges(core_with(*STUCK, *reads, *views, c.Free(tuple(range(10, 10 + MANY))))) < 10 * 2 * MANY


def test_a_free_waits_for_every_one_of_many_readers() -> None:
    core = core_with(c.Allocate(1, T), *[c.GetTensor(1, 0, 4)] * MANY, c.Free((1,)), c.Free((1,)))
    core.take_instructions()
    for sequence in range(1, MANY + 2):
        assert len(core.resources.storages) == 1
        core.begin(sequence)
        core.finish(sequence, None, c.Completion(sequence))
    assert len(core.resources.storages) == 0 and core.unretired == 0


def test_waits_that_pass_the_limit_are_refused_and_forgotten() -> None:
    limits = replace(Limits(), in_flight_commands=10)
    core = core_with(*STUCK, c.Record(5), *[c.WaitCommand(5)] * MANY, limits=limits)
    assert core.unretired <= 10


def test_uploads_that_no_command_claims_are_limited() -> None:
    core = core_with(limits=replace(Limits(), in_flight_commands=10))
    for transfer in range(1, 11):
        core.upload_started(transfer, 0)
        core.upload_arrived(transfer)
    with pytest.raises(LimitExceededError):
        core.upload_started(11, 0)


@settings(max_examples=200, deadline=None)
@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from([0, 1, 2, 3]), st.integers(0, 30), st.integers(0, 8))))
def test_poison_is_the_same_as_byte_by_byte(events: list[tuple[int, int, int]]) -> None:
    """Each event is the failure of a command of this number, or 0: a write that heals."""
    storage = HandleStorage(64, "a")
    bad: dict[int, int] = {}
    for sequence, start, size in events:
        tensor = TensorHandle(Tensor(tensor_type("u8", (size,)), layout(T).buffer, start), storage)
        span = range(start, start + max(1, size))
        assert (tensor.problem() is not None) == any(byte in bad for byte in span)
        if not sequence:
            tensor.heal()
            bad = {byte: by for byte, by in bad.items() if byte not in span}
        else:
            tensor.poison(ComputeFailedError("x"), sequence)
            bad |= {byte: min(sequence, bad.get(byte, sequence)) for byte in span}
        found = [(byte, one.sequence) for one in storage.poisons for byte in range(one.start, one.end)]
        assert found == sorted(bad.items())


# Lists in messages


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"free": {"handles": [1] * 10_001}}, LimitExceededError),
        ({"skip": {"lost": [1] * 10_002}}, LimitExceededError),
        ({"run": {"inputs": [{}] * 11}}, LimitExceededError),
        ({"run": {"outputs": [{}] * 11}}, LimitExceededError),
        ({"allocate": {"type": {"shape": [1] * 9}}}, InvalidArgumentError),
        ({"view": {"type": {"shape": [1] * 9}}}, InvalidArgumentError),
        ({"view": {"strides_bytes": [1] * 9}}, InvalidArgumentError),
    ],
)
def test_long_lists_in_a_command_are_refused_unread(
    message: dict[str, Any], error: type[HeliographError]
) -> None:
    with pytest.raises(error):
        check_command(command_pb2.Command(**message), replace(Limits(), tensors=10, graph_nodes=10))


NODE = graph_pb2.Node(op="neg", result=tensor_pb2.TensorType(data_type=1))
LEAF = graph_pb2.Leaf(kind=graph_pb2.LEAF_KIND_INPUT, type=NODE.result)
AXES = graph_pb2.Attribute(name="axes", integers=graph_pb2.IntegerList(values=range(1000)))


@pytest.mark.parametrize(
    "graph",
    [
        graph_pb2.Graph(nodes=[NODE] * 11),
        graph_pb2.Graph(leaves=[LEAF] * 11),
        graph_pb2.Graph(outputs=[graph_pb2.Output()] * 11),
        graph_pb2.Graph(nodes=[graph_pb2.Node(operands=[0] * 1000, result=NODE.result)]),
        graph_pb2.Graph(nodes=[graph_pb2.Node(attributes=[AXES], result=NODE.result)]),
        graph_pb2.Graph(
            leaves=[graph_pb2.Leaf(kind=1, type=tensor_pb2.TensorType(data_type=1, shape=[1] * 1000))]
        ),
    ],
    ids=["nodes", "leaves", "outputs", "operands", "attributes", "dimensions"],
)
def test_long_lists_in_a_graph_are_refused_unread(graph: graph_pb2.Graph) -> None:
    with pytest.raises(LimitExceededError):
        decode_graph(graph.SerializeToString(), replace(Limits(), graph_nodes=10))


def test_what_waits_to_be_compiled_is_counted() -> None:
    waiting = Staging(100, "graphs")
    waiting.reserve(60)
    with pytest.raises(LimitExceededError, match="graphs"):
        waiting.reserve(60)
    waiting.give(60)
    waiting.reserve(60)


# The loop's time


def test_a_long_batch_leaves_the_loop_to_others_in_between() -> None:
    async def scenario() -> int:
        outbox, turns = CompletionWriter(asyncio.get_running_loop()), 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        ticker = asyncio.ensure_future(others())
        await asyncio.sleep(0)
        batch = command_pb2.CommandBatch()
        for number in range(1, 1001):
            batch.commands.add(sequence=number, synchronize=command_pb2.Synchronize())
        taken: list[c.Command] = []
        session: Any = SimpleNamespace(limits=Limits(), submit=taken.extend, commands=0)
        unused: Any = None
        turn_size = command_service.TurnSize()
        reader = command_service._Reader(Stream(session, outbox, unused, 0), unused, turn_size)
        await reader._submit(batch.commands)
        assert reader._last == 1000
        ticker.cancel()
        assert [one.sequence for one in taken] == list(range(1, 1001))
        return turns

    assert asyncio.run(scenario()) > 1000 // command_service.COMMANDS_A_TURN


def test_a_turn_is_short_also_when_its_commands_free_many_handles() -> None:
    free = command_pb2.Command(free=command_pb2.Free(handles=range(1, 1000)))
    other = command_pb2.Command(synchronize=command_pb2.Synchronize())
    turns = list(command_service._turns([free, free, *[other] * 100], command_service.TurnSize()))
    assert [len(turn) for turn in turns] == [1, 1, 64, 36]


def test_a_turn_is_short_also_when_its_commands_lose_many_handles() -> None:
    skip = command_pb2.Command(skip=command_pb2.Skip(lost=range(1, 1000)))
    turns = list(command_service._turns([skip, skip], command_service.TurnSize()))
    assert [len(turn) for turn in turns] == [1, 1]


def test_a_turn_is_short_also_when_a_client_has_many_downloads() -> None:
    data = command_pb2.CommandBatch(downloaded=range(100_000)).SerializeToString()
    turns = command_service._turns(CommandReader().read(data), command_service.TurnSize())
    told = [[one.downloaded for one in turn if isinstance(one, c.Acknowledged)] for turn in turns]
    assert max(sum(map(len, turn)) for turn in told) < 1000
    assert [number for turn in told for one in turn for number in one] == list(range(100_000))


def test_streams_with_batches_share_one_turn() -> None:
    turn_size, other = command_service.TurnSize(), command_pb2.Command(synchronize=command_pb2.Synchronize())
    turn_size.streams = 4
    turns = command_service._turns([other] * 40, turn_size)
    assert [len(next(turns)), len(next(turns))] == [16, 16]
    turn_size.streams = 1000
    assert len(next(turns)) == 4


def test_failures_that_nobody_reads_stop_the_reading_of_commands() -> None:
    async def scenario() -> None:
        outbox = CompletionWriter(asyncio.get_running_loop())
        failed = tuple(c.Completion(number, ComputeFailedError("x")) for number in range(1, 20_001))
        outbox.put(c.CompletionBatch(20_000, failed))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(outbox.has_room(), 0.01)
        while outbox.unwritten_bytes:
            await outbox.take()
        await asyncio.wait_for(outbox.has_room(), SECONDS)

    asyncio.run(scenario())


# Short runs, done where they arrive


def test_nothing_is_done_at_once_while_somebody_computes() -> None:
    device_lock, done = DeviceLock(), []
    with device_lock:
        assert not device_lock.at_once(lambda: done.append(1))
    assert device_lock.at_once(lambda: done.append(2)) and done == [2]


def test_who_comes_while_something_is_done_at_once_waits() -> None:
    device_lock, order = DeviceLock(), []

    def compute() -> None:
        with device_lock:
            order.append("thread")

    thread = threading.Thread(target=compute)

    def work() -> None:
        thread.start()
        thread.join(0.05)
        order.append("at once")

    assert device_lock.at_once(work)
    thread.join(SECONDS)
    assert order == ["at once", "thread"]


SMALL = tensor_type("f32", (4,))
NEG = Graph((Leaf(LeafKind.INPUT, "x", SMALL),), (Node("neg", (0,), SMALL),), (Output("y", 1),))


class Attached:
    """A session with a plan, and what it answers."""

    def __init__(self, device: CpuDevice, at_once: bool = True) -> None:
        self.host = Host(Registry.of(device))
        self.session: Session = self.host.session(self.host.open_session("test").session)
        self.changed = threading.Condition()
        self.done: dict[int, c.Completion] = {}
        self.threads: dict[int, threading.Thread] = {}
        self.session.attach(self.take, at_once=lambda: at_once)
        self.session.compile(CompileRequest(100, NEG))

    def take(self, batch: c.CompletionBatch) -> None:
        with self.changed:
            for one in batch.completions:
                self.done[one.sequence] = one
                self.threads[one.sequence] = threading.current_thread()
            self.changed.notify_all()

    def run(self, sequence: int, here: list[Callable[[], None]] | None = None) -> None:
        kind = c.RunCommand(100, (c.InputBinding(0, bytes(16)),), (c.OutputBinding(0, 0, True),))
        self.session.submit([c.Command(sequence, kind)], here)

    def wait(self, sequence: int) -> c.Completion:
        with self.changed:
            assert self.changed.wait_for(lambda: sequence in self.done, SECONDS)
            return self.done[sequence]

    @property
    def plan(self) -> Any:
        (found,) = self.session._core.plans.plans
        return found.plan


@pytest.fixture
def attached() -> Iterator[Attached]:
    made = Attached(CpuDevice(threads=1, native=False))
    yield made
    made.session.close()
    assert made.host.statistics() == HostStatistics()
    made.host.close()


def test_a_run_that_was_short_is_done_in_the_thread_that_brings_it(attached: Attached) -> None:
    attached.plan.expected_us = 0.0
    attached.run(1)
    assert bytes(attached.done[1].outputs[0][1])[3] == 0x80
    assert attached.threads[1] is threading.current_thread()


def test_a_long_run_is_done_in_the_thread_that_asks_for_that(attached: Attached) -> None:
    here: list[Callable[[], None]] = []
    attached.run(1, here)
    attached.run(2)
    assert not attached.done
    (perform,) = here
    perform()
    assert not attached.done[1].error and attached.threads[1] is threading.current_thread()
    assert not attached.wait(2).error and attached.threads[2] is not threading.current_thread()


def test_a_run_here_waits_for_its_turn_behind_what_is_queued(attached: Attached) -> None:
    here: list[Callable[[], None]] = []
    with next(iter(attached.host._device_locks.values()))._door:
        attached.run(1)
        attached.run(2, here)
        assert not here and not attached.done
    assert not attached.wait(2).error and list(attached.done) == [1, 2]


def test_nothing_is_done_at_once_unless_that_was_asked_for() -> None:
    attached = Attached(CpuDevice(threads=1, native=False), at_once=False)
    attached.plan.expected_us = 0.0
    attached.run(1)
    assert not attached.wait(1).error
    assert attached.threads[1] is not threading.current_thread()
    attached.session.close()
    attached.host.close()


def test_a_short_run_waits_for_its_turn_behind_what_is_queued(attached: Attached) -> None:
    device_lock = next(iter(attached.host._device_locks.values()))
    with device_lock._door:
        attached.run(1)
        attached.plan.expected_us = 0.0
        attached.run(2)
        assert not attached.done
    assert not attached.wait(2).error
    assert list(attached.done) == [1, 2] and attached.threads[2] is not threading.current_thread()


def test_a_short_run_is_not_begun_here_while_the_device_computes(attached: Attached) -> None:
    attached.plan.expected_us = 0.0
    with next(iter(attached.host._device_locks.values())):
        attached.run(1)
        assert not attached.wait(1).error
    assert attached.threads[1] is not threading.current_thread()


def test_a_plan_is_short_once_its_last_runs_were(attached: Attached) -> None:
    plan = attached.plan
    plan.note(0, 400.0)
    assert plan.expected_us == 400.0
    for expected in (200.0, 100.0, 50.0, 30.0):
        plan.note(0, 30.0)
        assert plan.expected_us == expected


def test_a_short_run_that_fails_is_an_error_of_its_command(attached: Attached) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    attached.plan.expected_us = 0.0
    attached.plan.plan.compute = fail
    attached.run(1)
    found = attached.done[1].error
    assert found is not None and found.reason == Reason.REASON_COMPUTE_FAILED


# Deadlines


class Impatient(Deadlines):
    """Every time has come as soon as it is set, in another thread."""

    def after(self, seconds: float, callback: Any) -> Timer:
        threading.Thread(target=callback).start()
        return Timer(0.0, 0, None)


def test_a_deadline_that_passes_at_once_is_not_lost() -> None:
    attached = Attached(FakeDevice("fake0", 2**20))
    attached.session._executor._deadlines = Impatient()
    late = c.Command(2, c.SetTensor(1, 0, None, 7, 16), timeout_ms=1)
    attached.session.submit([c.Command(1, c.Allocate(1, SMALL)), late])
    found = attached.wait(2).error
    assert found is not None and found.reason == Reason.REASON_DEADLINE_EXCEEDED
    attached.session.close()
    attached.host.close()


def test_a_command_that_ends_the_session_leaves_no_timer(attached: Attached) -> None:
    with pytest.raises(ProtocolError):
        attached.session.submit([c.Command(9, c.Synchronize(), timeout_ms=2**32 - 1)])
    attached.session.close()
    assert attached.host.statistics().timers == 0
