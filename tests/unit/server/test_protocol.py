"""The protocol of a session, without devices: ordering, poison, freeing, transfers, cancelling."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heliograph_proto import commands as c
from heliograph_proto.errors import (
    CancelledError,
    ComputeFailedError,
    DeadlineExceededError,
    HandleExistsError,
    HeliographError,
    InvalidArgumentError,
    InvalidInputError,
    LimitExceededError,
    OutOfRangeError,
    ProtocolError,
    SessionClosedError,
    UnknownDeviceError,
    UnknownHandleError,
)
from heliograph_proto.plans import Port
from heliograph_proto.sessions import Limits
from heliograph_proto.types import TensorType, tensor_type
from heliograph_server.resources.handles import (
    NOTHING_BOUND,
    DeviceQueue,
    HandleStorage,
    PlanHandle,
    StreamHandle,
    TensorHandle,
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


# Order


def test_a_chain_on_one_stream_is_submitted_without_waiting(script: Script) -> None:
    chain = [script.tensor(1), script.write(1), script.run(1, 2), script.read(2)]
    assert script.started == chain
    assert script.through == 0


def test_streams_do_not_wait_for_each_other(script: Script) -> None:
    script.send(c.CreateStream(STREAM))
    script.run_all()
    first, second = script.tensor(1), script.tensor(2, STREAM)
    assert script.queue_of(first) is not script.queue_of(second)
    assert script.end(script.queue_of(second)) == second
    assert second in script.done and first not in script.done


def test_a_command_waits_for_an_earlier_writer_on_another_stream(script: Script) -> None:
    script.send(c.CreateStream(STREAM))
    script.run_all()
    script.tensor(1)
    reader = script.read(1, STREAM)
    assert reader not in script.started
    script.end(script.queue)
    assert reader in script.started


def test_readers_on_different_streams_do_not_wait_for_each_other(script: Script) -> None:
    script.send(c.CreateStream(STREAM))
    script.tensor(1)
    script.run_all()
    one, other = script.read(1), script.read(1, STREAM)
    assert {one, other} <= set(script.started)


def test_a_writer_waits_for_all_earlier_readers(script: Script) -> None:
    script.send(c.CreateStream(STREAM))
    script.tensor(1)
    script.run_all()
    reader, writer = script.read(1), script.write(1, STREAM)
    assert writer not in script.started
    script.end(script.queue_of(reader))
    assert writer in script.started


def test_runs_of_one_plan_are_serial_across_streams(script: Script) -> None:
    script.send(c.CreateStream(STREAM))
    script.run_all()
    first, second = script.run(), script.run(stream=STREAM)
    assert second not in script.started
    script.end(script.queue_of(first))
    assert second in script.started


def test_runs_that_share_a_variable_are_serial_if_one_assigns_it(script: Script) -> None:
    script.core.plans.add_variable("v", T, "a", object())
    script.plan(101, assigned=("v",))
    script.plan(102, read=("v",))
    script.plan(103, read=("v",))
    script.send(c.CreateStream(STREAM))
    script.send(c.CreateStream(OTHER))
    script.run_all()
    writer = script.run(plan=101)
    readers = script.run(plan=102, stream=STREAM), script.run(plan=103, stream=OTHER)
    assert not set(readers) & set(script.started)
    script.end(script.queue_of(writer))
    assert set(readers) <= set(script.started)


def test_work_for_another_device_keeps_its_place_in_the_stream(script: Script) -> None:
    here = script.tensor(1)
    there = script.send(c.Allocate(2, T, "b"))
    again = script.tensor(3)
    assert script.started == [here]
    script.end(script.queue)
    assert script.queue_of(there).device == "b" and again not in script.started
    script.end(script.queue)
    assert script.queue_of(again).device == "a"


def test_what_needs_no_device_is_done_when_its_turn_comes(script: Script) -> None:
    first = script.tensor(1)
    view = script.send(c.View(2, 1, 0, T))
    sync = script.send(c.Synchronize())
    assert script.done == {}
    script.end(script.queue)
    assert list(script.done) == [first, view, sync]


# Events


def test_a_wait_holds_the_stream_until_the_mark_is_reached(script: Script) -> None:
    script.send(c.CreateStream(STREAM))
    script.run_all()
    first = script.tensor(1)
    script.send(c.Record(300))
    wait = script.send(c.WaitCommand(300), STREAM)
    after = script.tensor(2, STREAM)
    assert after not in script.started
    script.end(script.queue_of(first))
    assert wait in script.done and after in script.started


def test_an_event_that_was_never_recorded_counts_as_reached(script: Script) -> None:
    assert script.done[script.send(c.WaitCommand(300))] is None


def test_recording_again_moves_the_mark(script: Script) -> None:
    script.send(c.CreateStream(STREAM))
    script.run_all()
    script.send(c.Record(300))
    script.tensor(1)
    script.send(c.Record(300))
    wait = script.send(c.WaitCommand(300), STREAM)
    assert wait not in script.done
    script.run_all()
    assert wait in script.done


def test_a_record_tells_the_first_error_since_the_last_mark(script: Script) -> None:
    script.tensor(1)
    failed = script.write(1)
    later = script.write(9)
    first, second = script.send(c.Record(300)), script.send(c.Record(301))
    script.end(script.queue)
    script.end(script.queue, ComputeFailedError("burnt"))
    script.run_all()
    assert script.done[first] is script.done[failed]
    assert script.done[second] is None
    assert isinstance(script.done[later], UnknownHandleError)


def test_a_failure_after_a_mark_belongs_to_the_next_one(script: Script) -> None:
    script.tensor(1)
    first = script.send(c.Record(300))
    script.read(9)
    second = script.send(c.Record(301))
    script.run_all()
    assert script.done[first] is None
    assert isinstance(script.done[second], UnknownHandleError)


def test_a_wait_is_over_even_if_the_other_stream_failed(script: Script) -> None:
    script.send(c.CreateStream(STREAM))
    script.run_all()
    failing = script.tensor(1)
    script.send(c.Record(300))
    after = script.send(c.WaitCommand(300), STREAM)
    script.end(script.queue_of(failing), ComputeFailedError("burnt"))
    assert script.done[after] is None


# Poison


def test_a_failed_command_poisons_what_it_makes_and_what_follows(script: Script) -> None:
    failing = script.tensor(1)
    run, read = script.run(1, 2), script.read(2)
    script.end(script.queue, ComputeFailedError("burnt"))
    script.run_all()
    assert script.done[failing] is script.done[run] is script.done[read]
    error = script.done[read]
    assert isinstance(error, ComputeFailedError) and error.origin.sequence == failing


def test_poison_is_known_to_what_was_submitted_ahead(script: Script) -> None:
    failing = script.tensor(1)
    script.read(1)
    queue = script.queue
    assert script.begin(queue)
    script.core.fail(failing, ComputeFailedError("burnt"))
    script.end(queue)
    assert not script.begin(queue)
    script.end(queue)


def test_a_device_that_tells_late_still_poisons(script: Script) -> None:
    first, second = script.tensor(1), script.read(1)
    assert script.core.begin(first) and script.core.begin(second)
    queue = script.queue
    script.begun[queue] = True
    script.end(queue, ComputeFailedError("burnt"))
    script.begun[queue] = True
    script.end(queue)
    assert script.done[second] is script.done[first]


def test_a_late_failure_is_told_though_a_later_write_was_cancelled_meanwhile(script: Script) -> None:
    """As on a device that has begun three commands before it tells that the first has failed."""
    script.tensor(1)
    script.run_all()
    failing, read, cancelled = script.write(1), script.read(1), script.write(1)
    script.send(c.Cancel(cancelled))
    queue = script.queue
    assert script.core.begin(failing) and script.core.begin(read) and not script.core.begin(cancelled)
    for error in (ComputeFailedError("burnt"), None):
        script.begun[queue] = True
        script.end(queue, error)
    assert isinstance(script.done[failing], ComputeFailedError)
    assert script.done[read] is script.done[failing]
    script.begun[queue] = False
    script.end(queue)


def test_a_static_error_waits_for_its_turn(script: Script) -> None:
    script.tensor(1)
    wrong = script.send(c.SetTensor(1, 8, bytes(16)))
    before = script.done.copy()
    script.run_all()
    assert before == {} and isinstance(script.done[wrong], OutOfRangeError)


def test_what_was_sent_before_a_static_error_is_not_poisoned_by_it(script: Script) -> None:
    script.tensor(1)
    healthy = script.read(1)
    script.send(c.SetTensor(1, 8, bytes(16)))
    poisoned = script.read(1)
    script.run_all()
    assert script.done[healthy] is None
    assert isinstance(script.done[poisoned], OutOfRangeError)


def test_writing_a_tensor_wholly_heals_it(script: Script) -> None:
    script.tensor(1)
    script.send(c.SetTensor(1, 8, bytes(16)))
    script.write(1)
    healed = script.read(1)
    script.run_all()
    assert script.done[healed] is None


def test_what_begins_before_a_write_is_done_reads_what_it_writes(script: Script) -> None:
    """As on a device that has work before it has done with the last."""
    script.tensor(1)
    script.send(c.SetTensor(1, 8, bytes(16)))
    script.run_all()
    written, healed = script.write(1), script.read(1)
    assert script.core.begin(written) and script.core.begin(healed)
    for _ in range(2):
        script.begun[script.queue] = True
        script.end(script.queue)
    assert script.done[written] is script.done[healed] is None


def test_writing_a_part_of_a_poisoned_tensor_heals_that_part(script: Script) -> None:
    """So a large tensor that is written in pieces is whole again after the last one."""
    script.tensor(1)
    script.send(c.SetTensor(1, 8, bytes(16)))
    half = script.send(c.SetTensor(1, 0, bytes(8)))
    still = script.read(1)
    script.send(c.SetTensor(1, 8, bytes(8)))
    healed = script.read(1)
    script.run_all()
    assert script.done[half] is None and script.done[healed] is None
    assert isinstance(script.done[still], OutOfRangeError)


def test_what_was_never_allocated_cannot_be_written_not_even_by_a_view(script: Script) -> None:
    made = script.send(c.Allocate(1, tensor_type("f32", (4,)), "nowhere"))
    script.send(c.View(2, 1, 0, tensor_type("f32", (2,))))
    writes = [script.send(c.SetTensor(2, 0, bytes(8))), script.send(c.SetTensor(1, 0, bytes(16)))]
    script.run_all()
    assert all(isinstance(script.done[one], type(script.done[made])) for one in writes)


def test_poison_on_one_half_leaves_a_view_of_the_other_usable(script: Script) -> None:
    half = tensor_type("f32", (2,))
    script.tensor(1)
    script.send(c.View(2, 1, 0, half))
    script.send(c.View(3, 1, 8, half))
    script.send(c.SetTensor(2, 4, bytes(8)))
    bad = script.send(c.GetTensor(2, 0, 8))
    good = script.send(c.GetTensor(3, 0, 8))
    whole = script.read(1)
    script.run_all()
    assert script.done[good] is None
    assert isinstance(script.done[bad], OutOfRangeError) and script.done[whole] is script.done[bad]


def test_a_run_that_fails_while_it_writes_poisons_the_variables_that_it_assigns(script: Script) -> None:
    number = script.core.plans.add_variable("v", T, "a", object())
    script.plan(101, assigned=("v",))
    script.run(plan=101)
    read = script.read(number)
    script.end(script.queue, ComputeFailedError("burnt"))
    script.run_all()
    failure = script.done[read]
    assert isinstance(failure, ComputeFailedError)
    assert "variable 'v' was left half written" in failure.message and "burnt" in failure.message
    script.write(number)
    healed = script.run(plan=101)
    script.run_all()
    assert script.done[healed] is None


def test_a_run_that_has_not_begun_leaves_its_variables_as_they_were(script: Script) -> None:
    number = script.core.plans.add_variable("v", T, "a", object())
    script.plan(101, assigned=("v",))
    script.run()
    cancelled, refused = script.run(plan=101), script.run(source=999, plan=101)
    script.core.cancel(cancelled)
    read = script.read(number)
    script.run_all()
    assert isinstance(script.done[cancelled], CancelledError)
    assert isinstance(script.done[refused], UnknownHandleError)
    assert script.done[read] is None


def same(one: HeliographError | None, other: HeliographError | None) -> bool:
    """Return True if both are the error of one command; each reader has a copy."""
    return one is not None and other is not None and vars(one) == vars(other) and type(one) is type(other)


def test_a_refused_view_is_a_poisoned_handle(script: Script) -> None:
    script.tensor(1)
    view = script.send(c.View(2, 1, 1, T))
    use = script.read(2)
    script.run_all()
    assert same(script.done[use], script.done[view])


def test_a_stream_that_could_not_be_made_fails_its_commands_with_the_same_error() -> None:
    script = Script()
    script.sequence += 1
    script.core.receive(c.Command(1, c.CreateStream(STREAM), 0, True))
    opened = [one for one in script.core.take_instructions() if isinstance(one, instructions.OpenQueue)]
    script.core.queue_failed(opened[-1].queue, ComputeFailedError("no threads"))
    script.core.finish(1, opened[-1].queue.error, c.Completion(1))
    script.follow()
    use = script.tensor(1, STREAM)
    assert isinstance(script.done[1], ComputeFailedError)
    assert script.done[use] is not None and script.done[use].origin == script.done[1].origin
    assert_nothing_is_left(script)


def test_a_command_that_cannot_be_decoded_poisons_what_it_was_to_make(script: Script) -> None:
    script.sequence += 1
    script.core.refuse(script.sequence, InvalidArgumentError("bad"), (1,))
    script.follow()
    use = script.read(1)
    script.run_all()
    assert same(script.done[use], script.done[1])


# Free


def test_a_freed_handle_is_unknown_at_once(script: Script) -> None:
    script.tensor(1)
    script.send(c.Free((1,)))
    use = script.read(1)
    script.run_all()
    assert isinstance(script.done[use], UnknownHandleError)


def test_a_tensor_that_is_freed_while_a_run_uses_it_stays_until_the_run_is_done(script: Script) -> None:
    script.tensor(1)
    script.run_all()
    script.run(1)
    free = script.send(c.Free((1,)))
    assert script.released == [] and free not in script.done
    script.run_all()
    assert len(script.released) == 1 and script.done[free] is None


def test_a_view_keeps_the_bytes_of_its_source(script: Script) -> None:
    script.tensor(1)
    script.send(c.View(2, 1, 0, T))
    script.send(c.Free((1,)))
    use = script.read(2)
    script.run_all()
    assert script.done[use] is None and script.released == []
    script.send(c.Free((2,)))
    assert len(script.released) == 1


def test_freeing_an_unknown_handle_frees_the_others(script: Script) -> None:
    script.tensor(1)
    free = script.send(c.Free((9, 1)))
    script.run_all()
    assert isinstance(script.done[free], UnknownHandleError) and len(script.released) == 1


def test_a_freed_number_can_be_used_again_at_once(script: Script) -> None:
    script.tensor(1)
    script.send(c.Free((1,)))
    again = script.tensor(1)
    script.run_all()
    assert script.done[again] is None


def test_a_plan_is_released_when_its_last_run_is_done(script: Script) -> None:
    script.run()
    script.send(c.Free((PLAN,)))
    assert not any(isinstance(one, instructions.ReleasePlan) for one in script.other)
    script.run_all()
    assert any(isinstance(one, instructions.ReleasePlan) for one in script.other)


def test_a_free_is_not_cancelled(script: Script) -> None:
    script.tensor(1)
    free = script.send(c.Free((1,)))
    script.send(c.Cancel(free))
    script.run_all()
    assert script.done[free] is None and len(script.released) == 1


def test_a_variable_cannot_be_freed(script: Script) -> None:
    number = script.core.plans.add_variable("v", T, "a", object())
    assert isinstance(script.done[script.send(c.Free((number,)))], InvalidArgumentError)


# Transfers


def test_a_write_waits_for_its_upload(script: Script) -> None:
    script.tensor(1)
    write = script.send(c.SetTensor(1, 0, None, 7, 16))
    script.run_all()
    assert write not in script.started
    script.core.upload_started(7, 16)
    script.core.upload_arrived(7)
    script.follow()
    script.run_all()
    assert script.done[write] is None and instructions.DropUpload(7) in script.other


def test_an_upload_may_come_before_its_command(script: Script) -> None:
    script.core.upload_started(7, 16)
    script.core.upload_arrived(7)
    script.tensor(1)
    write = script.send(c.SetTensor(1, 0, None, 7, 16))
    assert write in script.started
    script.run_all()
    assert instructions.DropUpload(7) in script.other


@pytest.mark.parametrize("command_first", [True, False])
def test_a_broken_upload_fails_its_command(script: Script, command_first: bool) -> None:
    script.tensor(1)
    if command_first:
        script.send(c.SetTensor(1, 0, None, 7, 16))
    script.core.upload_started(7, 16)
    script.core.upload_broke(7, CancelledError("broke off"))
    if not command_first:
        script.send(c.SetTensor(1, 0, None, 7, 16))
    script.follow()
    script.run_all()
    assert isinstance(script.done[2], CancelledError)


@pytest.mark.parametrize("command_first", [True, False])
def test_an_upload_of_another_size_fails(script: Script, command_first: bool) -> None:
    script.tensor(1)
    if command_first:
        script.send(c.SetTensor(1, 0, None, 7, 16))
        with pytest.raises(InvalidArgumentError):
            script.core.upload_started(7, 12)
    else:
        script.core.upload_started(7, 12)
        script.core.upload_arrived(7)
        script.send(c.SetTensor(1, 0, None, 7, 16))
    script.follow()
    script.run_all()
    assert isinstance(script.done[2], InvalidArgumentError)


def test_an_upload_for_a_command_that_failed_is_told_why_and_the_number_is_free_again(script: Script) -> None:
    wrong = script.send(c.SetTensor(9, 0, None, 7, 16))
    with pytest.raises(UnknownHandleError):
        script.core.upload_started(7, 16)
    assert isinstance(script.done[wrong], UnknownHandleError)
    script.core.upload_started(7, 16)


def test_cancelling_a_write_that_waits_for_its_upload_ends_it(script: Script) -> None:
    script.tensor(1)
    write = script.send(c.SetTensor(1, 0, None, 7, 16))
    after = script.read(1)
    script.send(c.Cancel(write))
    assert isinstance(script.done[write], CancelledError)
    script.run_all()
    assert script.done[after] is script.done[write]


def test_a_read_for_a_transfer_is_delivered_when_it_is_done(script: Script) -> None:
    script.tensor(1)
    read = script.send(c.GetTensor(1, 0, 16, 8))
    assert script.core.transfers.is_reading(8)
    script.run_all()
    assert instructions.Deliver(8, read, None) in script.other


def test_a_refused_read_delivers_its_error(script: Script) -> None:
    read = script.send(c.GetTensor(9, 0, 16, 8))
    assert [one.error for one in script.other if isinstance(one, instructions.Deliver)] == [script.done[read]]


def test_a_transfer_cannot_be_read_twice_at_once(script: Script) -> None:
    script.tensor(1)
    script.send(c.GetTensor(1, 0, 16, 8))
    second = script.send(c.GetTensor(1, 0, 16, 8))
    script.run_all()
    assert isinstance(script.done[second], InvalidArgumentError)


# Cancelling and deadlines


def test_a_queued_command_is_cancelled_at_once_but_keeps_its_place(script: Script) -> None:
    script.send(c.CreateStream(STREAM))
    script.run_all()
    script.tensor(1)
    queued = script.write(1)
    reader = script.read(1, STREAM)
    script.send(c.Cancel(queued))
    assert isinstance(script.done[queued], CancelledError)
    assert reader not in script.started
    script.run_all()
    assert script.done[reader] is script.done[queued]


def test_a_running_run_is_aborted(script: Script) -> None:
    script.tensor(2)
    script.run_all()
    run = script.run(2, 3)
    queue = script.queue
    script.begin(queue)
    script.send(c.Cancel(run))
    assert instructions.AbortWork(run) in script.other
    script.end(queue, CancelledError("aborted"))
    read = script.read(3)
    script.run_all()
    assert isinstance(script.done[run], CancelledError) and script.done[read] is script.done[run]


@pytest.fixture
def at_a_place(script: Script) -> Script:
    """With a tensor, and shared memory by which it is written and read."""
    script.core.share(1000)
    script.tensor(1)
    script.run_all()
    return script


BY_A_PLACE = [c.SetTensor(1, 0, None, 0, 16, shared=8), c.GetTensor(1, 0, 16, shared=8)]


@pytest.mark.parametrize("kind", BY_A_PLACE)
def test_what_uses_its_place_is_reported_when_it_left_it(at_a_place: Script, kind: c.CommandKind) -> None:
    script, moving = at_a_place, at_a_place.send(kind)
    script.begin(script.queue)
    script.core.expire(moving)
    script.send(c.Cancel(moving))
    assert moving not in script.done
    script.core.leave_place(moving)
    script.follow()
    # The first interruption gives the reason.
    assert isinstance(script.done[moving], DeadlineExceededError)
    assert not script.core.take_place(moving)


@pytest.mark.parametrize("kind", BY_A_PLACE)
def test_what_left_its_place_is_broken_off_at_once(at_a_place: Script, kind: c.CommandKind) -> None:
    script, moving = at_a_place, at_a_place.send(kind)
    script.begin(script.queue)
    script.core.leave_place(moving)
    script.follow()
    assert moving not in script.done
    script.core.cancel(moving)
    script.follow()
    assert isinstance(script.done[moving], CancelledError)
    assert not script.core.take_place(moving)


@pytest.mark.parametrize("kind", BY_A_PLACE)
def test_what_came_back_to_its_place_is_done_before_it_is_reported(
    at_a_place: Script, kind: c.CommandKind
) -> None:
    script, moving = at_a_place, at_a_place.send(kind)
    script.begin(script.queue)
    script.core.leave_place(moving)
    assert script.core.take_place(moving)
    script.send(c.Cancel(moving))
    assert moving not in script.done
    script.run_all()
    assert script.done[moving] is None


@pytest.mark.parametrize("sequence", [0, 1, 99, 2**64 - 1])
def test_cancelling_what_is_done_or_unknown_succeeds(script: Script, sequence: int) -> None:
    script.tensor(1)
    script.run_all()
    assert script.done[script.send(c.Cancel(sequence))] is None
    assert script.done[1] is None


def test_an_expired_command_fails_and_disarms_its_deadline(script: Script) -> None:
    script.tensor(1)
    timed = script.send(c.GetTensor(1, 0, 16), timeout_ms=5)
    script.core.expire(timed)
    script.follow()
    assert isinstance(script.done[timed], DeadlineExceededError)
    assert instructions.Disarm(timed) in script.other


def test_a_command_that_is_done_in_time_disarms_its_deadline(script: Script) -> None:
    timed = script.send(c.Allocate(1, T), timeout_ms=5)
    script.run_all()
    assert instructions.Disarm(timed) in script.other


# Acknowledging


def test_the_watermark_waits_for_the_slowest(script: Script) -> None:
    script.send(c.CreateStream(STREAM))
    script.run_all()
    slow, fast = script.tensor(1), script.tensor(2, STREAM)
    script.end(script.queue_of(fast))
    assert script.through == 1 and fast in script.done
    script.end(script.queue_of(slow))
    assert script.through == fast


def test_successes_that_nobody_asked_for_are_only_acknowledged() -> None:
    script = Script()
    script.core.receive(c.Command(1, c.Allocate(1, T)))
    script.follow()
    script.end(script.queue)
    assert script.through == 1 and script.done == {}


@pytest.mark.parametrize("sequence", [0, 2, 2**64 - 1])
def test_a_gap_in_the_sequence_ends_the_session(sequence: int) -> None:
    with pytest.raises(ProtocolError):
        Script().core.receive(c.Command(sequence, c.Synchronize()))


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
    """A device that computes asynchronously begins the next command before it has reported this one."""
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


# The end


def test_closing_fails_what_is_queued_and_aborts_what_runs(script: Script) -> None:
    run, queued = script.run(), script.run()
    script.begin(script.queue)
    script.core.close(ENDED)
    script.follow()
    assert instructions.AbortWork(run) in script.other
    assert isinstance(script.done[queued], SessionClosedError)
    with pytest.raises(SessionClosedError):
        script.send(c.Synchronize())
    script.sequence -= 1


def test_closing_ends_a_wait_for_an_upload(script: Script) -> None:
    script.tensor(1)
    write = script.send(c.SetTensor(1, 0, None, 7, 16))
    script.core.close(ENDED)
    script.follow()
    assert isinstance(script.done[write], SessionClosedError)


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
        lambda plan, source, result: c.RunCommand(
            plan, (c.InputBinding(0, None, source),), (c.OutputBinding(0, result, False),)
        ),
        NUMBERS,
        NUMBERS,
        NUMBERS,
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
    choice = chance.randrange(4)
    if choice == 0:
        _upload(script, chance)
    elif busy:
        queue = chance.choice(busy)
        script.end(queue, ComputeFailedError("burnt") if choice == 1 else None)


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


def test_counts_are_those_of_the_table(script: Script) -> None:
    script.tensor(1)
    script.send(c.CreateStream(STREAM))
    count = script.core.handles.count
    assert (count(TensorHandle), count(PlanHandle), count(StreamHandle)) == (1, 1, 1)
