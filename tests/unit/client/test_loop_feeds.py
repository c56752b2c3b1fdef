"""Feeds in the client's core: their order, their room on the server, and their end."""

from __future__ import annotations

import pytest

from heliograph.core.future import Pending
from heliograph.core.loop_feeds import MOST_UNSENT
from heliograph.core.protocol import ClientCore
from heliograph_proto import commands as c
from heliograph_proto.errors import (
    LimitExceededError,
    LoopEndedError,
    OutOfRangeError,
    SessionClosedError,
    UnavailableError,
)
from heliograph_proto.sessions import Limits

MOST = 2**20
#: The size of one feed, as it counts while it waits.
COST = 100 + c.FEED_BYTES
FEED = c.FeedLoop(0, ((0, bytes(100)),))


@pytest.fixture
def core() -> ClientCore:
    return ClientCore(Limits())


def looping(core: ClientCore, room: int = 2 * COST, *, credit_bytes: int = 0) -> Pending:
    loop = c.Loop(9, fed_inputs=(0,), fed_bytes=room)
    run = core.send(c.RunCommand(1, (), (), loop=loop), observed=True, credit_bytes=credit_bytes)
    core.feeds.open(run, room)
    return run


def kinds(core: ClientCore) -> list[c.CommandKind]:
    return [one.kind for one in core.take(MOST) if isinstance(one, c.Command)]


def answer(core: ClientCore, *feeds: Pending, steps: int = 0) -> None:
    done = tuple(c.Completion(one.sequence, steps=steps) for one in feeds)
    core.apply(c.CompletionBatch(0, done))


def test_a_feed_leaves_behind_its_loop_and_before_all_that_waits(core: ClientCore) -> None:
    run = looping(core)
    others = [core.send(c.Synchronize()) for _ in range(3)]
    fed = core.feed(run, FEED, 7)
    assert core.has_output
    found = core.take(MOST)
    assert isinstance(found[1], c.Command) and found[1].timeout_ms == 7 and found[1].notify
    assert found[1].kind == c.FeedLoop(run.sequence, FEED.values)
    assert (run.sequence, fed.sequence, others[0].sequence) == (1, 2, 3) and not core.has_output


def test_feeds_pass_a_gate_and_a_full_stream() -> None:
    core = ClientCore(Limits(in_flight_commands=20))
    run = looping(core)
    kinds(core)
    core.open_gate()
    for _ in range(9):
        core.send(c.Synchronize())
    fed = core.feed(run, FEED, 0)
    assert [type(one) for one in kinds(core)] == [c.FeedLoop] and fed.sequence == 2


def test_a_loop_that_lasts_holds_up_no_command_whatever_was_answered_meanwhile() -> None:
    core = ClientCore(Limits(in_flight_commands=20))
    run = looping(core)
    kinds(core)
    for number in range(100):
        fed = core.feed(run, FEED, 0)
        other = core.send(c.Synchronize(), observed=True)
        assert len(kinds(core)) == 2, number
        answer(core, fed, other)
    # All but a few places are taken, which are left for cancelling.
    for _ in range(9):
        core.send(c.Synchronize())
    core.feed(run, FEED, 0)
    assert len(kinds(core)) == 3 and len(core._in_flight) == 4
    core.cancel(run)
    assert kinds(core) == [c.Cancel(run.sequence)]


def test_no_more_leaves_than_has_room_until_a_step_took_some(core: ClientCore) -> None:
    run, other = looping(core), looping(core)
    kinds(core)
    fed = [core.feed(run, FEED, 0) for _ in range(4)]
    assert len(kinds(core)) == 2 and not core.has_output and not core.has_only_garbage
    waits = core.feeds.blocking(run)
    # Another loop has room of its own.
    core.feed(other, FEED, 0)
    assert len(kinds(core)) == 1 and waits is not None and not waits.done
    answer(core, fed[0])
    assert waits.done and fed[0].done and core.has_output
    assert len(kinds(core)) == 1 and core.feeds.blocking(run) is not None
    answer(core, fed[1], fed[2])
    assert len(kinds(core)) == 1 and core.feeds.blocking(run) is None
    assert [one.sequence for one in fed] == [3, 4, 6, 7]


def test_a_feed_that_is_larger_than_the_room_leaves_alone(core: ClientCore) -> None:
    run = looping(core, 1)
    fed = [core.feed(run, FEED, 0) for _ in range(2)]
    assert len(kinds(core)) == 2
    answer(core, fed[0])
    assert len(kinds(core)) == 1


def test_feeds_that_were_not_sent_end_with_their_loop(core: ClientCore) -> None:
    run = looping(core)
    kinds(core)
    fed = [core.feed(run, FEED, 0) for _ in range(3)]
    kinds(core)
    core.apply(c.CompletionBatch(0, (c.Completion(run.sequence, steps=5),)))
    assert [one.done for one in fed] == [False, False, True] and isinstance(fed[2].error, LoopEndedError)
    # The server answers the others.
    answer(core, fed[0], steps=4)
    assert fed[0].error is None and core.feeds.known
    core.apply(c.CompletionBatch(0, (c.Completion(fed[1].sequence, LoopEndedError("late")),)))
    assert isinstance(fed[1].error, LoopEndedError) and not core.feeds.known and not core.has_output
    late = core.feed(run, FEED, 0)
    assert isinstance(late.error, LoopEndedError) and not core.has_output


def test_a_feed_that_came_after_the_end_of_its_loop_says_why_that_ended(core: ClientCore) -> None:
    run = looping(core)
    kinds(core)
    fed = core.feed(run, FEED, 0)
    kinds(core)
    # The server has forgotten the loop.
    failed = OutOfRangeError("index 4 is not one of 4 rows").from_command(run.sequence)
    unknown = LoopEndedError("the loop ended before a step took the feed").from_command(fed.sequence)
    answers = c.Completion(run.sequence, failed), c.Completion(fed.sequence, unknown)
    core.apply(c.CompletionBatch(fed.sequence, answers))
    assert run.error is failed and isinstance(fed.error, LoopEndedError)
    assert "took the feed: index 4 is not one" in fed.error.message
    assert fed.error.origin.sequence == fed.sequence


def test_the_end_of_the_session_ends_all_feeds(core: ClientCore) -> None:
    run = looping(core)
    kinds(core)
    fed = [core.feed(run, FEED, 0) for _ in range(4)]
    kinds(core)
    waits = core.feeds.blocking(run)
    core.connection_lost(UnavailableError("the cable"))
    assert all(isinstance(one.error, UnavailableError) for one in fed)
    assert waits is not None and waits.done and not core.feeds.known and not core.feeds.unsent
    with pytest.raises(UnavailableError):
        core.feed(run, FEED, 0)
    assert not isinstance(fed[0].error, SessionClosedError)


def test_so_many_feeds_may_wait_here_and_no_more(core: ClientCore) -> None:
    run = looping(core)
    for _ in range(MOST_UNSENT):
        core.feed(run, FEED, 0)
    with pytest.raises(LimitExceededError, match=r"1,024 feeds of the loop wait to be sent"):
        core.feed(run, FEED, 0)
