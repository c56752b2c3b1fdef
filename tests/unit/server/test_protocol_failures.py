"""The protocol of a session, without devices: what a failure poisons, and what heals."""

from __future__ import annotations

import protocol_script
from protocol_script import STREAM, Script, T, assert_nothing_is_left, same

from heliograph_proto import commands as c
from heliograph_proto.errors import (
    CancelledError,
    ComputeFailedError,
    InvalidArgumentError,
    OutOfRangeError,
    UnknownHandleError,
)
from heliograph_proto.types import tensor_type
from heliograph_server.session.protocol import instructions

script = protocol_script.script


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
