"""Sessions that outlive their connections: the client's side of the stream, without a transport."""

from __future__ import annotations

import pytest

import heliograph as hg
from heliograph.core.protocol import ClientCore
from heliograph.core.replay.journal import CommandJournal, MadePlan
from heliograph_proto import commands as c
from heliograph_proto.codec.inline_forms import InlineRun
from heliograph_proto.plans import ReserveRequest
from heliograph_proto.sessions import Limits

LIMITS = Limits(in_flight_commands=50, message_bytes=4096)


@pytest.fixture
def core() -> ClientCore:
    made = ClientCore(LIMITS)
    made.has_lease = True
    return made


def leave(core: ClientCore, count: int) -> list[c.Command | InlineRun]:
    for _ in range(count):
        core.send(c.Synchronize(), observed=True)
    return core.take(4096)


def attach(core: ClientCore, last: int, restored: bool = False, next_message: int | None = None) -> None:
    if core.is_attached:
        core.detached()
    number = core.received + 1 if next_message is None else next_message
    core.apply(c.CompletionBatch(0, attached=c.Attached(last, number, restored)))


def numbers(commands: list[c.Command | InlineRun]) -> list[int]:
    return [one.sequence for one in commands]


def test_commands_that_the_server_lacks_leave_again_before_new_ones(core: ClientCore) -> None:
    first = leave(core, 5)
    core.detached()
    core.send(c.Memset(1, 0, 1, 0), observed=True)
    assert (core.take(4096), core.has_output) == ([], False)
    attach(core, last=2)
    assert core.take(4096) == first[2:]
    assert numbers(core.take(4096)) == [6]


def test_commands_that_the_server_has_are_awaited(core: ClientCore) -> None:
    leave(core, 3)
    attach(core, last=3)
    assert core.take(4096) == []
    core.apply(c.CompletionBatch(3))
    assert [one.error for one in core.take_settled()] == [None, None, None]


def test_a_second_cut_sends_again_what_is_still_missing(core: ClientCore) -> None:
    leave(core, 4)
    attach(core, last=1)
    assert numbers(core.take(500)) == [2, 3]
    attach(core, last=2)
    assert numbers(core.take(4096)) == [3, 4]


def test_completions_of_commands_that_leave_again_settle_them_once(core: ClientCore) -> None:
    leave(core, 2)
    core.apply(c.CompletionBatch(1))
    attach(core, last=1)
    core.take(4096)
    core.apply(c.CompletionBatch(2))
    core.apply(c.CompletionBatch(2))
    assert len(core.take_settled()) == 2 and core.is_answered


def test_received_messages_are_counted_and_told_with_commands(core: ClientCore) -> None:
    taken = leave(core, 2)
    assert core.take_acknowledgement(taken) is None
    core.apply(c.CompletionBatch(1))
    core.apply(c.CompletionBatch(2))
    assert core.attach(b"i") == c.Attach(2, b"i")
    assert core.take_acknowledgement([]) is None
    taken = leave(core, 1)
    assert core.take_acknowledgement(taken) == c.Acknowledged(2)
    assert core.take_acknowledgement(taken) is None


def test_messages_without_a_command_to_go_with_are_told_after_512(core: ClientCore) -> None:
    for _ in range(511):
        core.apply(c.CompletionBatch(0))
    assert core.take_acknowledgement([]) is None and not core.has_output
    core.apply(c.CompletionBatch(0))
    assert core.has_output
    assert core.take_acknowledgement([]) == c.Acknowledged(512)
    assert not core.has_output


def test_large_messages_are_told_sooner(core: ClientCore) -> None:
    core.apply(c.CompletionBatch(0), 2**18)
    assert core.take_acknowledgement([]) == c.Acknowledged(1)


def test_downloads_are_told_at_once(core: ClientCore) -> None:
    core.downloaded(9)
    assert core.has_output
    assert core.take_acknowledgement([]) == c.Acknowledged(0, (9,))


def test_without_a_lease_nothing_is_told() -> None:
    core = ClientCore(LIMITS)
    core.downloaded(9)
    for _ in range(100):
        core.apply(c.CompletionBatch(0))
    assert core.take_acknowledgement(leave(core, 1)) is None and not core.has_output


@pytest.mark.parametrize(
    ("last", "next_message", "says"),
    [(3, None, "received 3 commands"), (2, 5, "message 5 after 0"), (2, 0, "message 0 after 0")],
)
def test_an_attach_that_does_not_fit_breaks_the_protocol(
    core: ClientCore, last: int, next_message: int | None, says: str
) -> None:
    leave(core, 2)
    with pytest.raises(hg.ProtocolError, match=says):
        attach(core, last, next_message=next_message)


def test_an_answer_without_an_attach_breaks_the_protocol(core: ClientCore) -> None:
    with pytest.raises(hg.ProtocolError):
        core.apply(c.CompletionBatch(0, attached=c.Attached(0, 1)))


def test_a_server_that_has_lost_finished_commands_loses_the_session(core: ClientCore) -> None:
    leave(core, 3)
    core.apply(c.CompletionBatch(2))
    with pytest.raises(hg.SessionClosedError, match="2 commands, of which 1 were done"):
        attach(core, last=1)


def test_a_restarted_server_gets_the_commands_after_its_snapshot_again(core: ClientCore) -> None:
    core.journal = CommandJournal(1 << 20)
    first = leave(core, 4)
    core.apply(c.CompletionBatch(4, durable_through=1))
    attach(core, last=2, restored=True, next_message=1)
    again = core.take(4096)
    assert [type(one) for one in again] == [c.Command, c.Command]
    assert [one.kind for one in again] == [one.kind for one in first[2:]]  # type: ignore[union-attr]
    assert numbers(again) == [3, 4] and len(core.take_settled()) == 4
    core.apply(c.CompletionBatch(4, durable_through=4))
    assert core.received == 1
    attach(core, last=4)
    assert core.take(4096) == []


def test_the_end_of_the_session_forgets_what_would_leave_again(core: ClientCore) -> None:
    leave(core, 2)
    attach(core, last=0)
    core.connection_lost(hg.SessionClosedError("over"))
    assert core.take(4096) == [] and not core.has_output
    assert [type(one.error) for one in core.take_settled()] == [hg.SessionClosedError] * 2


def test_downloads_are_told_again_unless_a_later_command_was_done(core: ClientCore) -> None:
    core.downloaded(9)
    core.take_acknowledgement([])
    leave(core, 1)
    core.downloaded(10)
    core.take_acknowledgement([])
    core.apply(c.CompletionBatch(1))
    attach(core, last=1)
    assert core.take_acknowledgement([]) == c.Acknowledged(1, (10,))


def test_a_cut_makes_no_plan_again_on_a_server_that_lives(core: ClientCore) -> None:
    core.journal = CommandJournal(1 << 20)
    core.journal.made(MadePlan(ReserveRequest(9, block_bytes=(8,)), {}, 0, 0))
    first = leave(core, 2)
    attach(core, last=1)
    assert core.repetition.plan() is None and core.has_output
    assert numbers(core.take(4096)) == numbers(first[1:])
    attach(core, last=2, restored=True)
    made = core.repetition.plan()
    assert made is not None and made.due.done and core.repetition.is_of_restart
