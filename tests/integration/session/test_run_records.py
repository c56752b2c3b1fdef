"""What is told of runs: when they were where, whichever way they took, and how they ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from core_client import SECONDS, CoreClient
from core_loops import FED, PLAN, X, doubling
from daemon_threads import thread_daemon

import heliograph as hg
from heliograph_backends.cpu import CpuDevice
from heliograph_backends.fake import FakeDevice
from heliograph_proto import commands as c
from heliograph_proto.codec.inline_forms import InlineResult, InlineRun, RunForm
from heliograph_proto.errors import CancelledError, InvalidInputError
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.plans import CompileRequest
from heliograph_proto.types import tensor_type
from heliograph_server.resources.principals import Principal
from heliograph_server.runtime.host import NO_QUOTA
from heliograph_server.session.run_timeline import RunRecord
from heliograph_server.session.session import Session

INPUTS = (c.InputBinding(0, X.tobytes()), c.InputBinding(1, bytes(4)))
WANTED = (c.OutputBinding(0, 0, True),)
ORDINARY = c.RunCommand(PLAN, INPUTS, WANTED)
F4 = tensor_type("f32", (4,))
NEGATION = Graph((Leaf(LeafKind.INPUT, "x", F4),), (Node("neg", (0,), F4),), (Output("y", 1),))
FORM = RunForm(PLAN, [(0, 16)], [0])


class Notes:
    """What an observer was told."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._records: list[RunRecord] = []

    def run_ended(self, run: RunRecord) -> None:
        with self._changed:
            self._records.append(run)
            self._changed.notify_all()

    def wait(self, count: int) -> list[RunRecord]:
        """All so far, which are so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._records) >= count, SECONDS)
            assert len(self._records) == count
            return list(self._records)


def phases(run: RunRecord) -> tuple[float, ...]:
    times = (run.came, run.began, run.had_inputs, run.computed, run.ended)
    assert list(times) == sorted(times) and times[0] > 0
    return tuple(after - before for before, after in zip(times, times[1:], strict=False))


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def fake() -> FakeDevice:
    return FakeDevice(memory_bytes=2**20)


@pytest.fixture
def client(fake: FakeDevice, notes: Notes) -> Iterator[CoreClient]:
    with CoreClient(fake) as made:
        made.host.observers.append(notes)
        made.compile(PLAN, doubling())
        yield made


def test_an_ordinary_run_is_told_of_with_its_phases(client: CoreClient, notes: Notes) -> None:
    client.do(ORDINARY)
    (run,) = notes.wait(1)
    assert (run.session, run.sequence, run.error) == (client.session.number, 1, None)
    assert run.devices == (client.session.devices[0].name,)
    assert run.principal == Principal(quota=NO_QUOTA) and run.trace_parent == ""
    assert all(seconds > 0 for seconds in phases(run))


def test_other_commands_are_no_runs(client: CoreClient, notes: Notes) -> None:
    client.do(c.Record(7))
    client.do(ORDINARY)
    assert [run.sequence for run in notes.wait(1)] == [2]


def test_a_loop_is_one_run(client: CoreClient, notes: Notes) -> None:
    client.do(c.RunCommand(PLAN, INPUTS, WANTED, loop=c.Loop(5, carries=FED)))
    (run,) = notes.wait(1)
    assert run.error is None and all(seconds > 0 for seconds in phases(run))


def test_one_that_is_refused_has_waited_and_nothing_else(client: CoreClient, notes: Notes) -> None:
    error = client.refused(c.RunCommand(PLAN, (), WANTED))
    (run,) = notes.wait(1)
    assert isinstance(error, InvalidInputError) and run.error == error and run.devices == ()
    assert phases(run)[1:] == (0, 0, 0)


def test_one_that_nobody_waits_for_is_told_of_too(client: CoreClient, notes: Notes) -> None:
    client.session.submit([c.Command(1, c.RunCommand(PLAN, INPUTS, (c.OutputBinding(0, 50, False),)))])
    (run,) = notes.wait(1)
    assert run.sequence == 1 and run.error is None


def test_runs_that_are_cancelled_while_they_wait_or_compute_end_at_once(
    client: CoreClient, fake: FakeDevice, notes: Notes
) -> None:
    gate = fake.script.hold("compute")
    first, second = client.send(ORDINARY), client.send(ORDINARY)
    assert gate.entered.wait(SECONDS)
    for sequence in (second, first):
        client.do(c.Cancel(sequence))
    runs = notes.wait(2)
    gate.open()
    assert [run.sequence for run in runs] == [second, first]
    assert all(isinstance(run.error, CancelledError) and phases(run)[3] == 0 for run in runs)
    # What it does after that is no second end.
    client.do(ORDINARY)
    notes.wait(3)


def test_what_a_session_is_closed_over_is_told_of_as_it_failed(
    client: CoreClient, fake: FakeDevice, notes: Notes
) -> None:
    gate = fake.script.hold("compute")
    client.send(ORDINARY)
    assert gate.entered.wait(SECONDS)
    closing = threading.Thread(target=client.session.close, args=(CancelledError("enough"),))
    closing.start()
    (run,) = notes.wait(1)
    gate.open()
    closing.join(SECONDS)
    assert isinstance(run.error, CancelledError)


def test_an_observer_that_fails_is_in_nobodys_way(client: CoreClient, notes: Notes) -> None:
    class Broken:
        def run_ended(self, run: RunRecord) -> None:
            raise RuntimeError("broken")

    client.host.observers.insert(0, Broken())
    client.do(ORDINARY)
    client.do(ORDINARY)
    assert len(notes.wait(2)) == 2


def attached(client: CoreClient) -> tuple[Session, list[c.CompletionBatch]]:
    """A session that does short runs where they arrive."""
    session = client.host.session(client.host.open_session("test").session)
    batches: list[c.CompletionBatch] = []
    session.attach(batches.append, at_once=lambda: True)
    session.compile(CompileRequest(PLAN, NEGATION))
    return session, batches


def test_a_run_that_is_done_where_it_arrives_is_all_computing(notes: Notes) -> None:
    with CoreClient(CpuDevice(threads=1)) as client:
        client.host.observers.append(notes)
        session, batches = attached(client)
        given: list[InlineResult] = []
        assert session.answer(InlineRun(FORM, [X.tobytes()], 1), given.append) and given
        session.submit([InlineRun(FORM, [X.tobytes()], number) for number in (2, 3)])
        runs = notes.wait(3)
        session.close()
        assert batches and [run.sequence for run in runs] == [1, 2, 3]
        for run in runs:
            waited, brought, computed, given_back = phases(run)
            assert (waited, brought, given_back) == (0, 0, 0) and computed > 0
            assert run.devices == (client.session.devices[0].name,) and run.session == session.number


def test_without_observers_nothing_is_kept() -> None:
    with CoreClient(FakeDevice(memory_bytes=2**20)) as client:
        client.compile(PLAN, doubling())
        client.do(ORDINARY)
        assert not client.session._book.is_kept and 1 not in client.session._book.under_way


def test_each_host_of_a_pool_tells_of_its_partition() -> None:
    with thread_daemon() as one, thread_daemon() as other:
        notes = [Notes(), Notes()]
        for daemon, noted in zip((one, other), notes, strict=True):
            daemon.host.observers.append(noted)
        with hg.connect([one.url, other.url]) as session:
            names = [device.name for device in session.devices][-2:]
            g = hg.Graph()
            x = g.input("x", (4,), "f32")
            for number in range(4):
                with g.scope(f"n{number}"):
                    x = hg.tanh(x)
            g.output("y", x)
            pins = {f"n{number}/*": names[number % 2] for number in range(4)}
            plan = session.compile(g, devices=names, pins=pins)
            for _ in range(2):
                plan.run(x=np.ones(4, np.float32))
            for noted in notes:
                for run in noted.wait(2):
                    assert run.error is None and phases(run)[2] > 0
