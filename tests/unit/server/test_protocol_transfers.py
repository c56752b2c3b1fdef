"""The protocol of a session, without devices: transfers, cancelling, deadlines, and the end."""

from __future__ import annotations

import protocol_script
import pytest
from protocol_script import ENDED, STREAM, Script, T

from heliograph_proto import commands as c
from heliograph_proto.errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidArgumentError,
    SessionClosedError,
    UnknownHandleError,
)
from heliograph_server.session.protocol import instructions

script = protocol_script.script


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
