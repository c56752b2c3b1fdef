"""The protocol of a session, without devices: hostile commands, limits, any commands."""

from __future__ import annotations

import random
from dataclasses import replace

import protocol_script
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_script import OTHER, PLAN, STREAM, Script, T, assert_nothing_is_left, same

from heliograph_proto import commands as c
from heliograph_proto.errors import (
    CancelledError,
    ComputeFailedError,
    HandleExistsError,
    HeliographError,
    InvalidArgumentError,
    InvalidInputError,
    LimitExceededError,
    OutOfRangeError,
    UnknownDeviceError,
    UnknownHandleError,
)
from heliograph_proto.sessions import Limits
from heliograph_proto.types import TensorType, tensor_type
from heliograph_server.session.protocol.instructions import RunTask

script = protocol_script.script


# Hostile input and limits


HUGE = 2**64 - 1


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (c.Allocate(0, T), InvalidArgumentError),
        (c.Allocate(c.SERVER_HANDLE | 1, T), InvalidArgumentError),
        (c.Allocate(HUGE, T), InvalidArgumentError),
        (c.Allocate(1, T), HandleExistsError),
        (c.Allocate(2, T, "nowhere"), UnknownDeviceError),
        (c.CreateStream(2, "nowhere"), UnknownDeviceError),
        (c.CreateStream(1), HandleExistsError),
        (c.View(2, 9, 0, T), UnknownHandleError),
        (c.View(2, 1, HUGE, T), InvalidArgumentError),
        (c.View(2, 1, 4, T), OutOfRangeError),
        (c.View(2, 1, 0, T, (2**62,)), OutOfRangeError),
        (c.View(2, 1, 0, T, (-4,)), OutOfRangeError),
        (c.View(2, 1, 0, T, (4, 4)), InvalidArgumentError),
        (c.View(2, PLAN, 0, T), InvalidArgumentError),
        (c.SetTensor(1, HUGE, b"1234"), OutOfRangeError),
        (c.SetTensor(1, 0, None, 0, 16), InvalidArgumentError),
        (c.SetTensor(1, 0, None, 7, HUGE), LimitExceededError),
        (c.SetTensor(PLAN, 0, b""), InvalidArgumentError),
        (c.GetTensor(1, 0, HUGE), OutOfRangeError),
        (c.GetTensor(1, HUGE, HUGE, HUGE), OutOfRangeError),
        (c.GetTensor(HUGE, 0, 0), UnknownHandleError),
        (c.Memset(1, 0, 16, 256), InvalidArgumentError),
        (c.Memset(1, 0, HUGE, 1), OutOfRangeError),
        (c.CopyTensor(1, 9), UnknownHandleError),
        (c.CopyTensor(1, 3), InvalidArgumentError),
        (c.RunCommand(9, (), ()), UnknownHandleError),
        (c.RunCommand(1, (), ()), InvalidArgumentError),
        (c.RunCommand(PLAN, (), ()), InvalidInputError),
        (c.RunCommand(PLAN, (c.InputBinding(2**32 - 1, bytes(16)),), ()), InvalidInputError),
        (c.RunCommand(PLAN, (c.InputBinding(0, bytes(16)),) * 2, ()), InvalidInputError),
        (c.RunCommand(PLAN, (c.InputBinding(0, bytes(15)),), ()), InvalidInputError),
        (c.RunCommand(PLAN, (c.InputBinding(0, None, 3),), ()), InvalidInputError),
        (c.RunCommand(PLAN, (c.InputBinding(0, bytes(16)),), (c.OutputBinding(5, 2),)), InvalidArgumentError),
        (c.RunCommand(PLAN, (c.InputBinding(0, bytes(16)),), (c.OutputBinding(0, 1),)), HandleExistsError),
        (
            c.RunCommand(PLAN, (c.InputBinding(0, bytes(16)),), (c.OutputBinding(0, 2),) * 2),
            InvalidArgumentError,
        ),
        (c.Record(0), InvalidArgumentError),
        (c.Record(1), HandleExistsError),
        (c.Free((0, HUGE)), UnknownHandleError),
        (c.Free((1, 1)), UnknownHandleError),
    ],
    ids=str,
)
def test_a_wrong_command_fails_alone(script: Script, kind: c.CommandKind, error: type) -> None:
    script.tensor(1)
    script.send(c.Allocate(3, tensor_type("i8", (3,))))
    wrong = script.send(kind)
    fine = script.run()
    script.run_all()
    assert type(script.done[wrong]) is error
    assert script.done[wrong].origin.sequence == wrong
    assert script.done[fine] is None


def test_a_copy_between_tensors_that_overlap_is_refused(script: Script) -> None:
    script.send(c.Allocate(1, tensor_type("f32", (6,))))
    script.send(c.View(2, 1, 0, T))
    script.send(c.View(3, 1, 8, T))
    copies = script.send(c.CopyTensor(2, 2)), script.send(c.CopyTensor(2, 3))
    script.run_all()
    assert script.done[copies[0]] is None and isinstance(script.done[copies[1]], InvalidArgumentError)


def test_a_command_on_an_unknown_stream_fails(script: Script) -> None:
    lost = script.tensor(1, STREAM)
    use = script.read(1)
    script.run_all()
    assert isinstance(script.done[lost], UnknownHandleError) and same(script.done[use], script.done[lost])


def test_a_limit_on_tensors_is_kept_and_freeing_makes_room() -> None:
    script = Script(replace(Limits(), tensors=2))
    script.tensor(1), script.tensor(2)
    over = script.tensor(3)
    script.send(c.Free((1,)))
    again = script.tensor(4)
    script.run_all()
    assert isinstance(script.done[over], LimitExceededError) and script.done[again] is None
    assert_nothing_is_left(script)


def test_a_limit_on_commands_in_flight_is_kept() -> None:
    script = Script(replace(Limits(), in_flight_commands=2))
    script.tensor(1), script.write(1)
    over = script.tensor(2)
    assert isinstance(script.done[over], LimitExceededError)
    script.run_all()
    again = script.tensor(3)
    script.run_all()
    assert script.done[again] is None
    assert_nothing_is_left(script)


def test_bytes_held_for_commands_in_flight_are_limited() -> None:
    script = Script(replace(Limits(), in_flight_bytes=40))
    script.tensor(1)
    script.write(1), script.read(1)
    over = script.read(1)
    script.run_all()
    assert isinstance(script.done[over], LimitExceededError)
    again = script.read(1)
    script.run_all()
    assert script.done[again] is None
    assert_nothing_is_left(script)


def test_inline_bytes_are_limited() -> None:
    script = Script(replace(Limits(), inline_bytes=8))
    script.tensor(1)
    wrong = script.write(1), script.read(1)
    script.run_all()
    assert all(isinstance(script.done[one], LimitExceededError) for one in wrong)


def test_plans_are_limited() -> None:
    script = Script(replace(Limits(), plans=1))
    script.plan()
    with pytest.raises(LimitExceededError):
        script.plan(101)


def test_a_later_command_that_was_cancelled_fails_none_before_it(script: Script) -> None:
    """A device that computes asynchronously begins the next command before it reports this one."""
    script.tensor(1)
    script.run_all()
    first, later = script.run(1), script.write(1)
    script.core.begin(first)
    script.send(c.Cancel(later))
    assert not script.core.begin(later)
    script.end_begun(first)
    script.end_begun(later)
    assert script.done[first] is None and isinstance(script.done[later], CancelledError)


def test_a_view_does_not_fail_for_a_later_write(script: Script) -> None:
    script.tensor(1)
    script.send(c.CreateStream(STREAM))
    script.send(c.CreateStream(OTHER))
    script.run_all()
    script.send(c.Allocate(5, T), OTHER)
    script.send(c.Record(300), OTHER)
    script.send(c.WaitCommand(300), STREAM)
    view, write = script.send(c.View(2, 1, 0, T), STREAM), script.write(1)
    script.end(script.queue_of(write), ComputeFailedError("burnt"))
    assert view not in script.done
    script.run_all()
    assert script.done[view] is None


# Any commands in any order


NUMBERS = st.sampled_from([0, 1, 2, 3, PLAN, PLAN + 1, STREAM, OTHER, 300, HUGE])
TYPES: list[TensorType] = [T, tensor_type("f32", (2,)), tensor_type("f32", (0,))]
KINDS = st.one_of(
    st.builds(c.Allocate, NUMBERS, st.sampled_from(TYPES), st.sampled_from(["", "a", "b", "?"])),
    st.builds(c.View, NUMBERS, NUMBERS, st.sampled_from([0, 4, 8, HUGE]), st.sampled_from(TYPES)),
    st.builds(c.CreateStream, NUMBERS, st.sampled_from(["", "b"])),
    st.builds(c.SetTensor, NUMBERS, st.sampled_from([0, 8]), st.sampled_from([b"", bytes(8), bytes(16)])),
    st.builds(c.SetTensor, NUMBERS, st.just(0), st.none(), st.sampled_from([0, 7, 8]), st.just(16)),
    st.builds(c.GetTensor, NUMBERS, st.just(0), st.sampled_from([0, 16]), st.sampled_from([0, 7, 8])),
    st.builds(c.Memset, NUMBERS, st.just(0), st.just(16), st.just(1)),
    st.builds(c.CopyTensor, NUMBERS, NUMBERS),
    st.builds(
        lambda plan, source, result, loop: c.RunCommand(
            plan, (c.InputBinding(0, None, source),), (c.OutputBinding(0, result, False),), loop=loop
        ),
        NUMBERS,
        NUMBERS,
        NUMBERS,
        st.sampled_from([None, c.Loop(3), c.Loop(3, fed_inputs=(0,), fed_bytes=1200)]),
    ),
    st.builds(
        lambda loop, size: c.FeedLoop(loop, ((0, bytes(size)),)), st.integers(0, 30), st.sampled_from([8, 16])
    ),
    st.builds(c.Record, NUMBERS),
    st.builds(c.WaitCommand, NUMBERS),
    st.builds(lambda *numbers: c.Free(numbers), NUMBERS, NUMBERS),
    st.builds(c.Cancel, st.integers(0, 30)),
    st.just(c.Synchronize()),
)
STEPS = st.lists(st.tuples(KINDS, st.sampled_from([0, STREAM, OTHER]), st.integers(0, 3)), max_size=30)


@settings(max_examples=300, deadline=None)
@given(steps=STEPS, seed=st.integers(0, 2**16))
@pytest.mark.slow
def test_no_sequence_of_commands_breaks_the_invariants(
    steps: list[tuple[c.CommandKind, int, int]], seed: int
) -> None:
    """Every command ends exactly once, nothing starts twice, and closing leaves nothing behind."""
    chance = random.Random(seed)
    script = Script()
    script.core.plans.add_variable("v", T, "a", object())
    script.plan()
    script.plan(PLAN + 1, assigned=("v",))
    for kind, stream, ends in steps:
        script.send(kind, stream)
        for _ in range(ends):
            _disturb(script, chance)
    assert_nothing_is_left(script)
    assert set(script.done) == set(range(1, script.sequence + 1))


def _disturb(script: Script, chance: random.Random) -> None:
    """Lets a queue work, perhaps badly, or a bulk call do something."""
    busy = [queue for queue, work in script.submitted.items() if work]
    choice = chance.randrange(5)
    if choice == 0:
        _upload(script, chance)
    elif choice == 4:
        _take_feeds(script, chance)
    elif busy:
        queue = chance.choice(busy)
        script.end(queue, ComputeFailedError("burnt") if choice == 1 else None)


def _take_feeds(script: Script, chance: random.Random) -> None:
    """Lets a step of a loop that is fed take what waits."""
    running = [state for work in script.submitted.values() for state in work]
    tasks = {one.sequence: one.task for one in running if isinstance(one.task, RunTask)}
    fed = [number for number, one in tasks.items() if one.progress is not None and one.progress.mailbox]
    if fed:
        script.core.feeds.take(chance.choice(fed), 0)
        script.follow()


def _upload(script: Script, chance: random.Random) -> None:
    transfer = chance.choice([7, 8])
    try:
        script.core.upload_started(transfer, 16)
        if chance.random() < 0.5:
            script.core.upload_arrived(transfer)
        else:
            script.core.upload_broke(transfer, CancelledError("broke off"))
    except HeliographError:
        pass
    script.follow()
