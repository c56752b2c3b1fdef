"""The protocol of a session, without devices: order, events and acknowledging."""

from __future__ import annotations

import protocol_script
import pytest
from protocol_script import OTHER, STREAM, Script, T

from heliograph_proto import commands as c
from heliograph_proto.errors import (
    ComputeFailedError,
    ProtocolError,
    UnknownHandleError,
)

script = protocol_script.script


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
