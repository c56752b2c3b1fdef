"""Drives the core of a session's protocol without devices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from heliograph_proto import commands as c
from heliograph_proto.errors import (
    HeliographError,
    SessionClosedError,
)
from heliograph_proto.plans import Port
from heliograph_proto.sessions import Limits
from heliograph_proto.types import tensor_type
from heliograph_server.resources.handles import (
    NOTHING_BOUND,
    DeviceQueue,
    HandleStorage,
    PlanHandle,
)
from heliograph_server.session.protocol import instructions
from heliograph_server.session.protocol.core import SessionCore
from heliograph_server.session.protocol.dependencies import CommandState

T = tensor_type("f32", (4,))
PLAN, STREAM, OTHER = 100, 200, 201
ENDED = SessionClosedError("closed")


class Script:
    """Drives a core as the runtime would, with queues that work when they are told to."""

    def __init__(self, limits: Limits | None = None, devices: tuple[str, ...] = ("a", "b")) -> None:
        self.core = SessionCore(limits or Limits(), devices)
        self.sequence = 0
        self.submitted: dict[DeviceQueue, list[CommandState]] = {}
        self.begun: dict[DeviceQueue, bool] = {}
        self.started: list[int] = []
        self.done: dict[int, HeliographError | None] = {}
        self.through = 0
        self.other: list[instructions.Instruction] = []
        self.released: list[HandleStorage] = []

    def send(self, kind: c.CommandKind, stream: int = 0, timeout_ms: int = 0) -> int:
        """The next command, with notify; its sequence number."""
        self.sequence += 1
        self.core.receive(c.Command(self.sequence, kind, stream, True, timeout_ms))
        self.follow()
        return self.sequence

    def follow(self) -> None:
        """Takes the instructions and completions that are there."""
        for one in self.core.take_instructions():
            match one:
                case instructions.Start(state):
                    assert state.queue is not None and state.sequence not in self.started
                    self.submitted.setdefault(state.queue, []).append(state)
                    self.started.append(state.sequence)
                case instructions.ReleaseStorage(storage):
                    self.released.append(storage)
                case instructions.OpenQueue() | instructions.CloseQueue():
                    pass
                case _:
                    self.other.append(one)
        batch = self.core.take_completions()
        if batch is not None:
            assert batch.completed_through >= self.through
            self.through = batch.completed_through
            for completion in batch.completions:
                assert completion.sequence not in self.done
                self.done[completion.sequence] = completion.error

    def begin(self, queue: DeviceQueue) -> bool:
        """The first of the queue begins."""
        self.begun[queue] = self.core.begin(self.submitted[queue][0].sequence)
        return self.begun[queue]

    def end(self, queue: DeviceQueue, error: HeliographError | None = None) -> int:
        """The first of the queue, begun or not, is done."""
        if queue not in self.begun:
            self.begin(queue)
        state = self.submitted[queue].pop(0)
        failure = error if self.begun.pop(queue) else None
        self.core.finish(state.sequence, failure, c.Completion(state.sequence))
        self.follow()
        return state.sequence

    def end_begun(self, sequence: int) -> None:
        """The first of its queue, which the test has begun, is done."""
        state = self.submitted[self.queue_of(sequence)].pop(0)
        assert state.sequence == sequence
        self.core.finish(sequence, None, c.Completion(sequence))
        self.follow()

    def run_all(self) -> None:
        """Lets all queues work until nothing is queued."""
        while busy := [queue for queue, work in self.submitted.items() if work]:
            self.end(busy[0])

    @property
    def queue(self) -> DeviceQueue:
        """The first queue that has work."""
        return next(queue for queue, work in self.submitted.items() if work)

    def queue_of(self, sequence: int) -> DeviceQueue:
        return next(
            queue for queue, work in self.submitted.items() if any(one.sequence == sequence for one in work)
        )

    def tensor(self, number: int, stream: int = 0) -> int:
        return self.send(c.Allocate(number, T), stream)

    def write(self, number: int, stream: int = 0) -> int:
        return self.send(c.SetTensor(number, 0, bytes(16)), stream)

    def read(self, number: int, stream: int = 0) -> int:
        return self.send(c.GetTensor(number, 0, 16), stream)

    def run(self, source: int | None = None, result: int = 0, stream: int = 0, plan: int = PLAN) -> int:
        given_ = c.InputBinding(0, bytes(16)) if source is None else c.InputBinding(0, None, source)
        return self.send(c.RunCommand(plan, (given_,), (c.OutputBinding(0, result, False),)), stream)

    def plan(self, number: int = PLAN, assigned: tuple[str, ...] = (), read: tuple[str, ...] = ()) -> None:
        variables = [
            tuple(self.core.plans.variables[name][1] for name in names) for names in (read, assigned)
        ]
        ports = (Port("x", T),), (Port("y", T),)
        self.core.plans.add_plan(
            number, PlanHandle("a", *ports, *variables, assigned, NOTHING_BOUND, object())
        )


@pytest.fixture
def script() -> Iterator[Script]:
    """A script with a plan; at the end the session closes and must hold nothing."""
    made = Script()
    made.plan()
    yield made
    assert_nothing_is_left(made)


def assert_nothing_is_left(script: Script) -> None:
    """Closes the session, lets the queues work, and checks that everything was given back."""
    core = script.core
    core.close(ENDED)
    script.follow()
    script.run_all()
    assert core.unretired == 0 and core.in_flight == 0
    assert script.through == script.sequence
    core.release_all()
    script.follow()
    assert len(core.handles) == 0 and len(core.resources.storages) == 0 and list(core.resources.queues) == []
    assert len(script.released) == len(set(script.released))


def same(one: HeliographError | None, other: HeliographError | None) -> bool:
    """Return True if both are the error of one command; each reader has a copy."""
    return one is not None and other is not None and vars(one) == vars(other) and type(one) is type(other)
