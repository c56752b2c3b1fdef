"""Partitions under hostile clients: what is wrong with one is a typed error, and the daemon serves on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from raw_client import RawSession, graph_of, node, raw_channel, still_serves

from heliograph_proto.errors import HeliographError
from heliograph_proto.v1 import command_pb2, error_pb2, plan_pb2

if TYPE_CHECKING:
    from daemon_urls import DaemonUrls

CHAIN = graph_of(node("neg", 0), node("exp", 1), node("neg", 2))
X = np.ones((4, 3), np.float32).tobytes()
SECRET = bytes(32)


@pytest.fixture
def raw(daemon: DaemonUrls) -> Iterator[RawSession]:
    """A raw session; the daemon serves the others on afterwards."""
    with raw_channel(daemon.tcp) as channel:
        session = RawSession(channel).attach()
        try:
            yield session
        finally:
            session.close()
    still_serves(daemon.tcp)


def edge(number: int) -> bytes:
    return bytes([number]) * 16


def departure(node: int = 2, name: bytes = edge(1), secret: bytes = SECRET) -> plan_pb2.Departure:
    return plan_pb2.Departure(node=node, edge=name, secret=secret)


def arrival(leaf: int = 0, name: bytes = edge(2), **more: Any) -> plan_pb2.Arrival:
    return plan_pb2.Arrival(leaf=leaf, edge=name, secret=SECRET, **more)


def compile_partition(raw: RawSession, partition: plan_pb2.Partition, plan: int = 1, **more: Any) -> None:
    """Raises the typed error of a refusal."""
    raw.compile(CHAIN, plan, partition=partition, **more)


@pytest.mark.parametrize(
    "partition",
    [
        plan_pb2.Partition(departures=[departure(3)]),
        plan_pb2.Partition(departures=[departure(2**31)]),
        plan_pb2.Partition(departures=[departure(name=b"short")]),
        plan_pb2.Partition(departures=[departure(name=bytes(17))]),
        plan_pb2.Partition(departures=[departure(secret=bytes(31))]),
        plan_pb2.Partition(departures=[departure(1), departure(2)]),
        plan_pb2.Partition(departures=[departure()], arrivals=[arrival(name=edge(1))]),
        plan_pb2.Partition(arrivals=[arrival(1)]),
        plan_pb2.Partition(arrivals=[arrival(2**31)]),
        plan_pb2.Partition(arrivals=[arrival(), arrival(name=edge(3))]),
        plan_pb2.Partition(arrivals=[arrival(source="x" * 2000)]),
        plan_pb2.Partition(begins=[3]),
    ],
)
def test_a_partition_that_makes_no_sense_is_refused(raw: RawSession, partition: plan_pb2.Partition) -> None:
    with pytest.raises(HeliographError) as caught:
        compile_partition(raw, partition)
    assert caught.value.reason == error_pb2.REASON_INVALID_ARGUMENT
    compile_partition(raw, plan_pb2.Partition(departures=[departure()]), plan=2)


def test_an_edge_that_is_open_is_refused_until_its_plan_is_freed(raw: RawSession) -> None:
    partition = plan_pb2.Partition(departures=[departure()])
    compile_partition(raw, partition, 1)
    with pytest.raises(HeliographError, match="open already"):
        compile_partition(raw, partition, 2)
    raw.send(free=command_pb2.Free(handles=[1]))
    raw.answer(raw.send(synchronize=command_pb2.Synchronize()))
    compile_partition(raw, partition, 3)


def test_a_partition_is_not_observed_updated_or_reserved_for(raw: RawSession) -> None:
    partition = plan_pb2.Partition(departures=[departure()])
    for more in ({"taps": [1]}, {"reservation": 7}, {"updates": 9}):
        with pytest.raises(HeliographError) as caught:
            compile_partition(raw, partition, **more)  # type: ignore[arg-type]
        assert caught.value.reason == error_pb2.REASON_UNSUPPORTED


def run(plan: int, number: int, **more: Any) -> command_pb2.Run:
    inputs = [command_pb2.InputBinding(input=0, data=X)]
    outputs = [command_pb2.OutputBinding(output=0, fetch=True)]
    return command_pb2.Run(plan=plan, inputs=inputs, outputs=outputs, exchange_run=number, **more)


def test_runs_of_a_partition_have_rising_numbers_and_those_of_others_have_none(raw: RawSession) -> None:
    compile_partition(raw, plan_pb2.Partition(departures=[departure()]), 1)
    raw.compile(CHAIN, 2)
    wanted = {
        (1, 0): False, (1, 5): True, (1, 5, "again"): False, (1, 4): False, (1, 2**64 - 1): True,
        (2, 1): False, (2, 0): True,
    }  # fmt: skip
    for (plan, number, *_), is_good in wanted.items():
        found = raw.answer(raw.send(run=run(plan, number)))
        assert found.HasField("error") != is_good, (plan, number)


def loop(run: int = 1, steps: int = 2, more: Any = None, **exchange: Any) -> command_pb2.Run:
    """Of plan 1, whose x is given."""
    made = command_pb2.Loop(steps=steps, exchange=command_pb2.LoopExchange(**exchange), **(more or {}))
    given = [command_pb2.InputBinding(input=0, data=X)]
    return command_pb2.Run(plan=1, inputs=given, exchange_run=run, loop=made)


def looping(address: str = "unix:///nowhere", incarnation: bytes = bytes(16)) -> plan_pb2.Partition:
    """Two edges between two steps of a loop in each direction."""
    source = {"secret": SECRET, "source": address, "incarnation": incarnation}
    arrivals = [plan_pb2.LoopArrival(edge=edge(number), **source) for number in (3, 4)]
    departures = [plan_pb2.LoopDeparture(edge=edge(number), secret=SECRET) for number in (5, 6)]
    return plan_pb2.Partition(loop_arrivals=arrivals, loop_departures=departures)


@pytest.mark.parametrize(
    "bad",
    [
        loop(signals=[2]),
        loop(tells=[2**32 - 1]),
        loop(told=2),
        loop(awaits=[1, 1]),
        loop(told=0, awaits=[0]),
        loop(tells=[0], signals=[0]),
        loop(gives=[command_pb2.LoopGive(departure=0, output=9)]),
        loop(takes=[command_pb2.LoopTake(arrival=0, input=9)]),
        loop(takes=[command_pb2.LoopTake(arrival=place, input=0) for place in (0, 1)]),
        loop(more={"carries": [command_pb2.Carry()]}, takes=[command_pb2.LoopTake()]),
        loop(more={"fed_inputs": [0], "fed_bytes": 1}),
        loop(more={"fed_bytes": 1}),
        loop(told_with=[0]),
        loop(told=0, told_with=[9]),
        loop(told=0, told_with=[0], takes=[command_pb2.LoopTake(arrival=1, input=0)]),
        loop(tells_with=[command_pb2.LoopGive(departure=0, output=0)]),
        loop(tells=[0], tells_with=[command_pb2.LoopGive(departure=0, output=9)]),
        loop(tells=[0], tells_with=[command_pb2.LoopGive(departure=0, output=0)] * 100),
        loop(fed=True, more={"fed_inputs": [9], "fed_bytes": 1}),
        loop(run=2**63 - 1),
        command_pb2.Run(plan=1, inputs=loop().inputs, exchange_run=1, loop=command_pb2.Loop(steps=2)),
    ],
)
def test_a_loop_of_a_partition_that_exchanges_what_is_not_there_is_refused(
    raw: RawSession, bad: command_pb2.Run
) -> None:
    compile_partition(raw, looping())
    assert raw.failure(run=bad).reason == error_pb2.REASON_INVALID_ARGUMENT
    assert not raw.answer(raw.send(run=loop())).HasField("error")


def test_a_loop_that_is_never_told_whether_to_go_on_ends_when_it_is_cancelled(
    raw: RawSession, daemon: DaemonUrls
) -> None:
    compile_partition(raw, looping(daemon.tcp, raw.incarnation), 1)
    # A partition of the same daemon, which never runs.
    silent = [plan_pb2.LoopDeparture(edge=edge(number), secret=SECRET) for number in (3, 4)]
    compile_partition(raw, plan_pb2.Partition(loop_departures=silent), 2)
    sequence = raw.send(run=loop(told=0))
    raw.send(cancel=command_pb2.Cancel(sequence=sequence))
    assert raw.answer(sequence).error.reason == error_pb2.REASON_CANCELLED
    late = raw.send(run=loop(run=9, told=1, awaits=[0]), timeout_ms=300)
    assert raw.answer(late).error.reason == error_pb2.REASON_DEADLINE_EXCEEDED
    assert not raw.answer(raw.send(run=loop(run=20))).HasField("error")


def test_only_loops_of_partitions_exchange_values(raw: RawSession) -> None:
    raw.compile(CHAIN, 1)
    bad = loop()
    bad.exchange_run = 0
    assert raw.failure(run=bad).reason == error_pb2.REASON_INVALID_ARGUMENT


def test_a_run_whose_value_never_comes_ends_when_it_is_cancelled_or_its_time_is_over(raw: RawSession) -> None:
    partition = plan_pb2.Partition(arrivals=[arrival()])
    compile_partition(raw, partition, 1)
    waiting = command_pb2.Run(
        plan=1, outputs=[command_pb2.OutputBinding(output=0, fetch=True)], exchange_run=1
    )
    sequence = raw.send(run=waiting)
    raw.send(cancel=command_pb2.Cancel(sequence=sequence))
    assert raw.answer(sequence).error.reason == error_pb2.REASON_CANCELLED
    late = raw.send(run=command_pb2.Run(plan=1, exchange_run=2), timeout_ms=300)
    assert raw.answer(late).error.reason == error_pb2.REASON_DEADLINE_EXCEEDED


def test_a_session_that_ends_while_a_run_waits_leaves_nothing_open(daemon: DaemonUrls) -> None:
    for _ in range(2):
        with raw_channel(daemon.tcp) as channel:
            session = RawSession(channel).attach()
            compile_partition(session, plan_pb2.Partition(arrivals=[arrival()]), 1)
            session.send(run=command_pb2.Run(plan=1, exchange_run=1))
            session.close()
    still_serves(daemon.tcp)
