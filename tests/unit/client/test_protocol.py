"""The client's side of the command stream, without any transport."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

import heliograph as hg
from heliograph.core.arrays import byte_view
from heliograph.core.effects import ReceiveDownload, StartUpload, WaitFor
from heliograph.core.feed import Feed, LoopFeed
from heliograph.core.future import Outcome, Pending, Transfer
from heliograph.core.protocol import ClientCore
from heliograph.procedures.run import PlanSpec, Submission, choose_outputs, collect, submit
from heliograph.procedures.transfer import Sending, read, split_pieces, synchronize, write
from heliograph_proto import commands as c
from heliograph_proto.errors import Origin
from heliograph_proto.plans import PlanInfo, Port
from heliograph_proto.sessions import Limits
from heliograph_proto.types import tensor_type

LIMITS = Limits(in_flight_bytes=800, inline_bytes=16, in_flight_commands=20, message_bytes=4096)
F32 = tensor_type("f32", (2,))


@pytest.fixture
def core() -> ClientCore:
    return ClientCore(LIMITS)


def done(core: ClientCore, through: int, *completions: c.Completion) -> list[Outcome]:
    core.apply(c.CompletionBatch(through, completions))
    return core.take_settled()


def kinds(commands: list[c.Command]) -> list[str]:
    return [type(one.kind).__name__ for one in commands]


class Server:
    """Performs the effects of a procedure as a server would that answers at once."""

    def __init__(self, core: ClientCore, data: bytes = b"") -> None:
        self.core = core
        self.data = data
        self.received: dict[int, bytes] = {}
        self.commands: list[c.Command] = []

    def drive(self, procedure: Generator[Any, Any, Any]) -> Any:
        result: Any = None
        try:
            effect = next(procedure)
            while True:
                result = self.perform(effect)
                effect = procedure.send(result)
        except StopIteration as stop:
            return stop.value

    def perform(self, effect: object) -> Any:
        match effect:
            case StartUpload(target=int(number), data=data):
                self.received[number] = bytes(data)
                transfer = Transfer(lambda: None)
                transfer.taken.finish()
                transfer.ended.finish()
                return transfer
            case ReceiveDownload(transfer, out):
                get = next(one.kind for one in self.answer() if one.kind.transfer == transfer)
                out[:] = self.data[get.offset_bytes : get.offset_bytes + get.size_bytes]
                return None
            case WaitFor(outcome):
                self.answer()
                assert outcome.done, "the procedure waits for something that never comes"
        return None

    def answer(self) -> list[Any]:
        while taken := self.core.take(10**6):
            self.commands += taken
            listed = [
                c.Completion(one.sequence, data=self.data[one.kind.offset_bytes :][: one.kind.size_bytes])
                for one in taken
                if isinstance(one.kind, c.GetTensor) and not one.kind.transfer
            ]
            done(self.core, taken[-1].sequence, *listed)
        return [one for one in self.commands if isinstance(one.kind, c.GetTensor)]


def test_sequence_numbers_begin_with_one_and_have_no_gaps(core: ClientCore) -> None:
    for _ in range(3):
        core.send(c.Synchronize())
    first = core.take(10**6)
    core.send(c.Synchronize())
    assert [one.sequence for one in first + core.take(10**6)] == [1, 2, 3, 4]


def test_handles_are_unique_and_leave_the_highest_bit_alone(core: ClientCore) -> None:
    handles = [core.handle() for _ in range(1000)]
    assert len(set(handles)) == 1000 and min(handles) > 0 and max(handles) < c.SERVER_HANDLE


def test_completions_acknowledge_cumulatively(core: ClientCore) -> None:
    sent = [core.send(c.Synchronize(), observed=True) for _ in range(4)]
    core.take(10**6)
    assert done(core, 3) == sent[:3]
    assert [one.done for one in sent] == [True, True, True, False]


def test_a_listed_completion_may_pass_the_others(core: ClientCore) -> None:
    sent = [core.send(c.GetTensor(1, 0, 2), observed=True) for _ in range(3)]
    core.take(10**6)
    assert done(core, 0, c.Completion(3, data=b"hi")) == [sent[2]]
    assert sent[2].completion is not None and sent[2].completion.data == b"hi"
    assert done(core, 3) == sent[:2]


def test_completions_of_unknown_commands_are_ignored(core: ClientCore) -> None:
    assert done(core, 0, c.Completion(99, hg.InternalError("?"))) == []


def test_commands_beyond_the_limit_wait_for_acknowledgement(core: ClientCore) -> None:
    sent = [core.send(c.Synchronize()) for _ in range(10)]
    first = core.take(10**6)
    assert len(first) == LIMITS.in_flight_commands - 16
    assert core.take(10**6) == []
    done(core, 2)
    assert len(core.take(10**6)) == 2
    assert not sent[-1].sequence


def test_a_backlog_that_grows_without_end_is_refused(core: ClientCore) -> None:
    with pytest.raises(hg.LimitExceededError, match="wait for some results"):
        for _ in range(1000):
            core.send(c.Synchronize())


def test_a_batch_stays_below_the_size_of_a_message(core: ClientCore) -> None:
    for _ in range(4):
        core.send(c.SetTensor(1, 0, bytes(1000)))
    assert [len(core.take(2500)) for _ in range(3)] == [2, 2, 0]


def test_a_command_that_alone_passes_the_size_still_goes(core: ClientCore) -> None:
    core.send(c.SetTensor(1, 0, bytes(5000)))
    assert len(core.take(100)) == 1


def test_collected_handles_leave_together_behind_everything(core: ClientCore) -> None:
    core.release(7)
    core.send(c.Synchronize())
    core.release(8)
    commands = core.take(10**6)
    assert kinds(commands) == ["Synchronize", "Free"]
    assert commands[1].kind == c.Free((7, 8))


def test_a_cancel_passes_the_queue_but_not_its_target(core: ClientCore) -> None:
    target = core.send(c.Synchronize(), observed=True)
    core.cancel(target)
    assert kinds(core.take(10**6)) == ["Synchronize", "Cancel"]
    for _ in range(10):
        core.send(c.Synchronize())
    core.take(10**6)
    core.cancel(target)
    assert kinds(core.take(10**6)) == ["Cancel"], "although the limit of commands is reached"
    done(core, 20)
    core.cancel(target)
    assert "Cancel" not in kinds(core.take(10**6)), "since it is done"


def test_the_reason_of_a_cancel_replaces_the_servers_word_for_it(core: ClientCore) -> None:
    pending = core.send(c.SetTensor(1, 0, None, 1, 5), observed=True)
    core.take(10**6)
    core.cancel(pending, hg.UnavailableError("the upload broke"))
    done(core, 1, c.Completion(1, hg.CancelledError("cancelled", origin=Origin(sequence=1))))
    assert isinstance(pending.error, hg.UnavailableError)


def test_a_failed_run_gets_its_line_and_so_do_its_victims(core: ClientCore) -> None:
    run = core.send(c.RunCommand(1, (), ()), observed=True)
    run.source_of = lambda node: f"line of node {node}"
    get = core.send(c.GetTensor(2, 0, 1), observed=True)
    core.take(10**6)
    error = hg.ComputeFailedError("no", origin=Origin(op="get_rows", node=5, sequence=1))
    done(core, 2, c.Completion(1, error), c.Completion(2, error))
    assert run.error is not None and run.error.origin.source == "line of node 5"
    assert get.error is not None and get.error.origin.source == "line of node 5"


def test_an_error_that_nobody_waited_for_appears_at_synchronize_once(core: ClientCore) -> None:
    core.send(c.Memset(1, 0, 1, 0))
    core.take(10**6)
    done(core, 1, c.Completion(1, hg.OutOfRangeError("no", origin=Origin(sequence=1))))
    with pytest.raises(hg.OutOfRangeError):
        Server(core).drive(synchronize(core, (0,)))
    Server(core).drive(synchronize(core, (0,)))


def test_an_error_that_was_raised_elsewhere_does_not_appear_again(core: ClientCore) -> None:
    core.send(c.Allocate(1, F32))
    get = core.send(c.GetTensor(1, 0, 1), observed=True)
    core.take(10**6)
    error = hg.OutOfMemoryError("no", origin=Origin(sequence=1))
    done(core, 2, c.Completion(1, error), c.Completion(2, error))
    with pytest.raises(hg.OutOfMemoryError):
        core.raise_error(get)
    core.raise_unobserved()


def test_a_failed_free_bothers_nobody(core: ClientCore) -> None:
    core.release(1)
    core.take(10**6)
    done(core, 1, c.Completion(1, hg.UnknownHandleError("no")))
    core.raise_unobserved()


def test_byte_credit_is_granted_in_the_order_of_asking(core: ClientCore) -> None:
    first, second, third = core.credit.reserve(500), core.credit.reserve(300), core.credit.reserve(10)
    assert [one.done for one in (first, second, third)] == [True, False, False]
    core.credit.give_back(500)
    assert core.take_settled() == [second, third]


def test_a_withdrawn_grant_lets_the_next_one_pass(core: ClientCore) -> None:
    core.credit.reserve(500)
    second, third = core.credit.reserve(300), core.credit.reserve(10)
    core.credit.withdraw(second)
    assert core.take_settled() == [third]


def test_something_larger_than_all_credit_goes_alone(core: ClientCore) -> None:
    assert core.credit.reserve(10_000).done
    assert not core.credit.reserve(1).done


def observed_run(core: ClientCore, feed: Feed) -> Pending:
    """A run that is under way, and what it tells."""
    assert core.reserve_observed(feed, 0).done
    run = core.send(c.RunCommand(1, (), ()), observed=True)
    run.feed = feed
    core.take(10**6)
    return run


def telling(size_bytes: int, pauses: bool = False) -> Feed:
    return Feed({0: tensor_type("u8", (size_bytes,))}, pauses)


def test_what_observed_runs_tell_has_room_beside_what_commands_carry(core: ClientCore) -> None:
    core.credit.reserve(600)
    run = observed_run(core, telling(200))
    assert core.statistics().in_flight_bytes == 800 and not core.credit.reserve(1).done
    # Beyond a quarter of all it is the others' room that it takes.
    other, waiting = observed_run(core, telling(100)), core.credit.reserve(1)
    core.credit.give_back(101)
    assert not waiting.done
    assert waiting in done(core, other.sequence, c.Completion(other.sequence))
    done(core, other.sequence, c.Completion(run.sequence))
    assert core.statistics().in_flight_bytes == 501


def test_more_observed_runs_wait_while_those_under_way_end_by_themselves(core: ClientCore) -> None:
    run = observed_run(core, telling(400))
    second, third = core.reserve_observed(telling(300), 0), core.reserve_observed(telling(10), 0)
    assert not second.done and not third.done
    assert {second, third} <= set(done(core, 0, c.Completion(run.sequence)))
    assert second.error is None and third.error is None


@pytest.mark.parametrize("feed", [telling(400, pauses=True), LoopFeed({0: F32}, 9, 400, 0)])
def test_no_observed_run_waits_for_one_that_waits_for_its_reader(core: ClientCore, feed: Feed) -> None:
    run = observed_run(core, feed)
    refused = core.reserve_observed(telling(300), 0)
    with pytest.raises(hg.LimitExceededError, match="read their taps, or cancel them"):
        refused.raise_error()
    # Nor one that came to stand behind it.
    beside = observed_run(core, telling(100))
    core.flow(run)
    pausing, behind = (
        core.reserve_observed(telling(300, pauses=True), 0),
        core.reserve_observed(telling(400), 0),
    )
    assert not pausing.done and not behind.done
    assert set(done(core, 0, c.Completion(run.sequence))) >= {pausing, behind}
    assert pausing.error is None and isinstance(behind.error, hg.LimitExceededError)
    core.withdraw_observed(pausing)
    done(core, 0, c.Completion(beside.sequence))
    assert core.statistics().in_flight_bytes == 0


def test_what_is_behind_a_gate_holds_no_room_of_observed_runs(core: ClientCore) -> None:
    gate = core.open_gate()
    behind = core.reserve_observed(telling(600), 0)
    assert not behind.done and core.reserve_observed(telling(500), 0, gate).done
    withdrawn = core.reserve_observed(telling(1), 0)
    core.close_gate(gate)
    assert core.take_settled() == []
    core.withdraw_observed(behind)
    assert core.take_settled() == [withdrawn]
    lost = core.reserve_observed(telling(600), 0)
    core.connection_lost(hg.UnavailableError("gone"))
    assert lost in core.take_settled() and lost.error is core.lost
    assert core.reserve_observed(telling(1), 0).error is core.lost


def test_the_end_of_a_command_gives_its_credit_back(core: ClientCore) -> None:
    core.credit.reserve(600)
    core.send(c.SetTensor(1, 0, None, 1, 600), credit_bytes=600)
    core.take(10**6)
    waiting = core.credit.reserve(600)
    assert waiting in done(core, 1)


def test_commands_behind_an_open_gate_wait_for_it(core: ClientCore) -> None:
    gate = core.open_gate()
    core.send(c.Synchronize())
    assert core.take(10**6) == []
    core.send(c.Record(1), gate=gate)
    assert kinds(core.take(10**6)) == ["Record"]
    core.close_gate(gate)
    assert kinds(core.take(10**6)) == ["Synchronize"]


def test_what_is_behind_a_gate_gets_no_credit_that_the_gate_waits_for(core: ClientCore) -> None:
    """Else both would wait for ever: one for credit, the other for its turn."""
    first, second = core.open_gate(), core.open_gate()
    behind, later = core.credit.reserve(1), core.credit.reserve(1, second)
    assert not behind.done and not later.done and core.credit.reserve(1, first).done
    core.close_gate(first)
    assert core.take_settled() == [later]
    core.close_gate(second)
    assert core.take_settled() == [behind]


def test_a_lost_connection_fails_everything_and_what_comes(core: ClientCore) -> None:
    gate = core.open_gate()
    sent = core.send(c.Synchronize(), observed=True)
    gated = core.send(c.Synchronize(), gate=gate)
    grant = core.credit.reserve(600)
    core.connection_lost(hg.UnavailableError("gone"))
    assert {id(one) for one in core.take_settled()} == {id(one) for one in (sent, gated, grant)}
    for later in (lambda: core.send(c.Synchronize()), core.check, sent.raise_error, grant.raise_error):
        with pytest.raises(hg.UnavailableError, match="gone"):
            later()
    assert core.take(10**6) == [] and not core.has_output


def test_the_first_reason_of_a_loss_stays(core: ClientCore) -> None:
    core.connection_lost(hg.UnavailableError("gone"))
    core.connection_lost(hg.SessionClosedError("closed"))
    assert isinstance(core.lost, hg.UnavailableError)


@pytest.mark.parametrize(
    ("size", "piece", "item", "pieces"),
    [
        (10, 4, 4, [(0, 4), (4, 4), (8, 2)]),
        (24, 10, 8, [(0, 8), (8, 8), (16, 8)]),
        (3, 1, 8, [(0, 3)]),
        (0, 4, 1, []),
    ],
)
def test_pieces_are_whole_items(size: int, piece: int, item: int, pieces: list[tuple[int, int]]) -> None:
    assert split_pieces(size, piece, item) == pieces


@pytest.mark.parametrize("size", [0, 16, 17, 350, 5000])
def test_writes_arrive_whole_whatever_their_size(core: ClientCore, size: int) -> None:
    data = np.arange(size, dtype=np.uint8)
    server = Server(core)
    server.drive(write(core, c.SetTensor(5, 3), byte_view(data), 1, Sending()))
    server.answer()
    arrived = bytearray(3 + size)
    for command in server.commands:
        kind = command.kind
        assert isinstance(kind, c.SetTensor) and kind.tensor == 5
        part = kind.data if kind.data is not None else server.received[kind.transfer]
        arrived[kind.offset_bytes : kind.offset_bytes + len(part)] = part
    assert arrived[3:] == data.tobytes()
    assert core.statistics().in_flight_bytes == 0


@pytest.mark.parametrize("size", [0, 16, 17, 350, 5000])
def test_reads_arrive_whole_whatever_their_size(core: ClientCore, size: int) -> None:
    data = np.arange(size, dtype=np.uint8)
    out = np.empty_like(data)
    Server(core, data.tobytes()).drive(read(core, c.GetTensor(5, 0, size), byte_view(out), 1))
    assert np.array_equal(out, data)
    assert core.statistics().in_flight_bytes == 0


def test_a_read_that_is_broken_off_cancels_and_returns_its_credit(core: ClientCore) -> None:
    out = np.empty(5000, np.uint8)
    procedure = read(core, c.GetTensor(5, 0, 5000), byte_view(out), 1)
    assert isinstance(next(procedure), ReceiveDownload)
    core.take(10**6)
    with pytest.raises(KeyboardInterrupt):
        procedure.throw(KeyboardInterrupt())
    assert "Cancel" in kinds(core.take(10**6))
    assert core.statistics().in_flight_bytes == 0


def test_a_write_that_is_broken_off_stops_its_uploads(core: ClientCore) -> None:
    stopped = []
    procedure = write(core, c.SetTensor(5, 0), byte_view(np.zeros(150, np.uint8)), 1, Sending())
    effect = next(procedure)
    while isinstance(effect, StartUpload):
        number = effect.target
        effect = procedure.send(Transfer(lambda number=number: stopped.append(number)))
    with pytest.raises(hg.DeadlineExceededError):
        procedure.throw(hg.DeadlineExceededError("late"))
    assert stopped == [1, 2]
    core.take(10**6)
    assert kinds(core.take(10**6)) in ([], ["Cancel"] * 2)


LARGE = tensor_type("f32", (50,))
INPUTS, OUTPUTS = (Port("x", F32), Port("big", LARGE)), (Port("y", F32), Port("z", LARGE))
PLAN = PlanSpec(3, PlanInfo(INPUTS, OUTPUTS, (), "cpu0", 0, 1), lambda node: "")


def test_small_inputs_ride_in_the_run_and_large_ones_in_temporary_tensors(core: ClientCore) -> None:
    server, released = Server(core), []
    inputs = [np.ones(2, np.float32), np.arange(50, dtype=np.float32)]
    wanted = choose_outputs(core, PLAN.info, ["y", "z"], True)
    run = server.drive(
        submit(core, Submission(PLAN, inputs, wanted, [], Sending(observed=True), released.append))
    )
    server.answer()
    assert kinds(server.commands) == ["Allocate", "SetTensor", "SetTensor", "RunCommand"]
    command = server.commands[-1].kind
    assert isinstance(command, c.RunCommand)
    small, large = command.inputs
    assert small.data == inputs[0].tobytes() and large.data is None
    assert released == [large.tensor], "the temporary tensor is freed behind the run"
    assert [(one.fetch, bool(one.tensor)) for one in command.outputs] == [(True, False), (False, True)]
    run.drop()
    assert released[-1] == command.outputs[1].tensor


def test_results_are_collected_once(core: ClientCore) -> None:
    wanted = choose_outputs(core, PLAN.info, ["y"], True)
    run = Server(core).drive(
        submit(core, Submission(PLAN, [1, 2], wanted, [], Sending(observed=True), core.release))
    )
    core.take(10**6)
    done(core, 1, c.Completion(1, outputs=((0, np.ones(2, np.float32).tobytes()),)))
    first = Server(core).drive(collect(core, run, False))
    assert first["y"].tolist() == [1.0, 1.0] and first["y"].flags.writeable
    assert Server(core).drive(collect(core, run, False)) is first


@pytest.mark.parametrize(
    ("error", "cancel", "cancelled"),
    [
        (KeyboardInterrupt(), False, True),
        (hg.DeadlineExceededError("late"), False, False),
        (hg.DeadlineExceededError("late"), True, True),
    ],
)
def test_breaking_off_the_waiting_cancels_the_run(
    core: ClientCore, error: BaseException, cancel: bool, cancelled: bool
) -> None:
    wanted = choose_outputs(core, PLAN.info, ["y"], True)
    run = Server(core).drive(
        submit(core, Submission(PLAN, [1, 2], wanted, [], Sending(observed=True), core.release))
    )
    core.take(10**6)
    procedure = collect(core, run, cancel)
    next(procedure)
    with pytest.raises(type(error)):
        procedure.throw(error)
    assert ("Cancel" in kinds(core.take(10**6))) is cancelled


def test_outcomes_call_back_exactly_once() -> None:
    calls: list[str] = []
    outcome = Pending(c.Synchronize(), 0, False, 0)
    outcome.add_callback(lambda: calls.append("before"))
    outcome.settle()
    assert not outcome.settle(hg.InternalError("too late"))
    outcome.fire()
    outcome.fire()
    outcome.add_callback(lambda: calls.append("after"))
    assert calls == ["before", "after"] and outcome.error is None
