"""Loops of hostile clients byte by byte, and the client's side under a wrong server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from raw_client import RawSession, graph_of, node, raw_channel, still_serves

import heliograph as hg
from heliograph.core.feed import LoopFeed, cost_of, output_key
from heliograph.core.future import Pending
from heliograph.core.protocol import ClientCore
from heliograph_proto import commands as c
from heliograph_proto.codec import decode_command, decode_completions, encode_command, encode_completions
from heliograph_proto.errors import ProtocolError
from heliograph_proto.sessions import Limits
from heliograph_proto.types import tensor_type
from heliograph_proto.v1 import command_pb2

if TYPE_CHECKING:
    from daemon_urls import DaemonUrls

CHAIN = graph_of(node("neg", 0), node("relu", 1))
ONES = np.ones((4, 3), np.float32)
COST = ONES.nbytes + c.STREAMED_VALUE_BYTES
FED = [command_pb2.Carry(output=0, input=0)]


@pytest.fixture
def raw(daemon: DaemonUrls) -> Iterator[RawSession]:
    """A raw session with a plan; the daemon serves the others on afterwards."""
    with raw_channel(daemon.tcp) as channel:
        session = RawSession(channel).attach()
        try:
            session.compile(CHAIN)
            yield session
        finally:
            session.close()
    still_serves(daemon.tcp)


def loop_of(**loop: Any) -> command_pb2.Run:
    given = command_pb2.InputBinding(input=0, data=ONES.tobytes())
    outputs = [command_pb2.OutputBinding(fetch=True)]
    return command_pb2.Run(plan=1, inputs=[given], outputs=outputs, loop=command_pb2.Loop(**loop))


def taken(sequence: int, taken_bytes: int) -> dict[str, Any]:
    return {"continue": command_pb2.Continue(sequence=sequence, taken_bytes=taken_bytes)}


def steps_until(raw: RawSession, last: int) -> list[int]:
    """The steps of the next values, until that of a step has come; completions are dropped."""
    found: list[int] = []
    for batch in raw._answers:
        found += [piece.step for piece in batch.taps]
        if last in found:
            return found
    raise AssertionError("the stream ended before that value came")


def test_the_wire_carries_steps(raw: RawSession) -> None:
    sequence, seen = raw.send(run=loop_of(steps=3, carries=FED, taps=[0], unread_bytes=10**6)), []
    for batch in raw._answers:
        seen += [(one.step, one.output, one.HasField("output"), one.last) for one in batch.taps]
        if done := [one for one in batch.completions if one.sequence == sequence]:
            break
    assert seen == [(step, 0, True, True) for step in range(3)]
    assert done[0].steps == 3 and not done[0].HasField("error")
    assert raw.answer(raw.send(run=loop_of(steps=2, carries=FED))).steps == 2


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        ({}, "0 steps"),
        ({"steps": 2**64 - 1}, "1,000,000,000"),
        ({"steps": 2, "carries": [command_pb2.Carry(output=2**32 - 1)]}, "of a plan with 1"),
        ({"steps": 2, "carries": [command_pb2.Carry(input=1)]}, "input 1 of a plan with 1"),
        ({"steps": 2, "carries": FED * 2}, "fed from two outputs"),
        ({"steps": 2, "until": 0}, "one bool or integer"),
        ({"steps": 2, "until": 2**32 - 1}, "of a plan with 1"),
        ({"steps": 2, "taps": [0, 0]}, "streamed twice"),
        ({"steps": 2, "taps": [2**32 - 1]}, "of a plan with 1"),
        ({"steps": 2, "taps": [0], "gather_ms": 1001}, "gather for 1,001 ms; 1,000 at most"),
    ],
)
def test_loops_that_are_none_are_refused(raw: RawSession, loop: dict[str, Any], words: str) -> None:
    error = raw.failure(run=loop_of(**loop))
    assert isinstance(error, hg.InvalidArgumentError) and words in error.message
    assert raw.answer(raw.send(run=loop_of(steps=2, carries=FED))).steps == 2


def test_what_no_server_could_hold_is_refused(raw: RawSession) -> None:
    for most in (raw.limits.in_flight_bytes, 2**64 - 1):
        error = raw.failure(run=loop_of(steps=2, carries=FED, taps=[0], unread_bytes=most))
        assert isinstance(error, hg.LimitExceededError)
    # Also where nothing is streamed.
    assert isinstance(raw.failure(run=loop_of(steps=2, unread_bytes=2**64 - 1)), hg.LimitExceededError)


def feed_of(loop: int, *values: tuple[int, bytes], rows: Sequence[int] = ()) -> dict[str, Any]:
    made = [command_pb2.FedValue(input=place, data=data) for place, data in values]
    return {"feed_loop": command_pb2.FeedLoop(sequence=loop, values=made, rows=rows)}


@pytest.mark.parametrize(
    ("feed", "words"),
    [
        ({}, "without values"),
        ({"values": [(0, ONES.tobytes())] * 2}, "an input twice"),
        ({"values": [(1, ONES.tobytes())]}, "input 1 of the loop is not fed"),
        ({"values": [(2**32 - 1, b"")]}, "is not fed"),
        ({"values": [(0, b"")]}, "not 0"),
        ({"values": [(0, ONES.tobytes())], "rows": [0]}, "1 rows of f32"),
        ({"values": [(0, ONES[:1].tobytes())], "rows": [4]}, "given once, from 0 to 3"),
        ({"values": [(0, ONES[:1].tobytes())], "rows": [2**32 - 1]}, "given once"),
        ({"values": [(0, ONES[:2].tobytes())], "rows": [1, 1]}, "given once"),
        ({"values": [(0, ONES.tobytes())], "rows": [0] * 10_001}, "10,001 rows in one message"),
        ({"values": [(0, bytes(300_000))]}, "300,000 bytes of one input"),
    ],
)
def test_feeds_that_are_none_are_refused_and_the_loop_goes_on(
    raw: RawSession, feed: dict[str, Any], words: str
) -> None:
    loop = raw.send(run=loop_of(steps=10**9, carries=FED, fed_inputs=[0], fed_bytes=10**5))
    error = raw.failure(**feed_of(loop, *feed.get("values", ()), rows=feed.get("rows", ())))
    assert isinstance(error, hg.HeliographError) and words in error.message
    right = raw.answer(raw.send(**feed_of(loop, (0, ONES.tobytes()))))
    assert not right.HasField("error")
    raw.send(cancel=command_pb2.Cancel(sequence=loop, after_step=True))
    assert raw.answer(loop).steps > right.steps


def test_a_feed_of_no_loop_is_too_late(raw: RawSession) -> None:
    loop = raw.send(run=loop_of(steps=2, carries=FED, fed_inputs=[0], fed_bytes=10**5))
    assert raw.answer(loop).steps == 2
    for number in (0, loop, loop + 1, 2**64 - 1):
        assert isinstance(raw.failure(**feed_of(number, (0, ONES.tobytes()))), hg.LoopEndedError)


def test_room_for_feeds_that_no_server_has_is_refused(raw: RawSession) -> None:
    for most in (raw.limits.in_flight_bytes, 2**64 - 1):
        error = raw.failure(run=loop_of(steps=2, fed_inputs=[0], fed_bytes=most))
        assert isinstance(error, hg.LimitExceededError)
    error = raw.failure(run=loop_of(steps=2, fed_inputs=[0] * (raw.limits.graph_nodes + 1)))
    assert isinstance(error, hg.LimitExceededError) and "fed inputs" in error.message


def test_a_client_that_leaves_while_feeds_wait_leaves_nothing(daemon: DaemonUrls) -> None:
    for _ in range(3):
        with raw_channel(daemon.tcp) as channel:
            session = RawSession(channel).attach()
            session.compile(CHAIN)
            first = session.send(run=loop_of(steps=10**9, fed_inputs=[0], fed_bytes=10**5))
            second = session.send(run=loop_of(steps=10**9, fed_inputs=[0], fed_bytes=10**5))
            for loop in (first, second) * 20:
                session.send(**feed_of(loop, (0, ONES.tobytes())))
            session.close()
    still_serves(daemon.tcp)


def test_lists_longer_than_any_graph_are_refused(raw: RawSession) -> None:
    many = raw.limits.graph_nodes + 1
    error = raw.failure(run=loop_of(steps=2, taps=range(many)))
    assert isinstance(error, hg.LimitExceededError) and "taps in one message" in error.message
    error = raw.failure(run=loop_of(steps=2, carries=FED * many))
    assert isinstance(error, hg.LimitExceededError) and "carried values" in error.message


def test_a_client_that_takes_nothing_holds_no_more_than_it_asked_for(raw: RawSession) -> None:
    sequence = raw.send(run=loop_of(steps=10**9, carries=FED, taps=[0], unread_bytes=3 * COST))
    assert steps_until(raw, 2) == [0, 1, 2]
    for number in (2**64 - 1, 3 * COST + 1):
        error = raw.failure(**taken(sequence, number))
        assert isinstance(error, hg.InvalidArgumentError)
    raw.send(**taken(sequence, COST))
    assert steps_until(raw, 3) == [3]
    raw.send(cancel=command_pb2.Cancel(sequence=sequence))
    assert raw.answer(sequence).HasField("error")


def test_half_closing_ends_a_loop_that_waits_for_its_client(raw: RawSession) -> None:
    sequence = raw.send(run=loop_of(steps=10**9, carries=FED, taps=[0], unread_bytes=COST))
    assert steps_until(raw, 0) == [0]
    raw._outgoing.put(None)
    done = [one for batch in raw._answers for one in batch.completions]
    assert [one.sequence for one in done] == [sequence] and done[0].HasField("error")


def test_a_client_that_leaves_ends_its_loops(raw: RawSession, daemon: DaemonUrls) -> None:
    with hg.connect(daemon.tcp) as watcher:
        before = watcher.devices[0].memory().free_bytes
        with raw_channel(daemon.tcp) as channel:
            other = RawSession(channel).attach()
            other.compile(CHAIN)
            other.send(run=loop_of(steps=10**9, carries=FED, taps=[0], unread_bytes=COST))
            steps_until(other, 0)
            other.send(run=loop_of(steps=10**9, carries=FED))
        # Its connection is gone; this ends its thread alone.
        other.close()
        for _ in range(5_000):
            if watcher.devices[0].memory().free_bytes == before:
                return
    raise AssertionError("the memory of a session that left is not back")


def test_loops_that_nobody_reads_harm_nobody(raw: RawSession) -> None:
    for _ in range(500):
        raw.send(run=loop_of(steps=10**9, carries=FED, taps=[0], unread_bytes=10 * COST))


# Messages


def test_what_is_said_of_loops_comes_back_as_it_was() -> None:
    whole = c.Loop(2**40, (c.Carry(1, 2), c.Carry(0, 7)), 0, (3, 0), 2**50)
    for kind in (
        c.Continue(7, 2**60),
        c.RunCommand(3, (), (), False, whole),
        c.RunCommand(3, (), (), loop=c.Loop(1)),
    ):
        assert decode_command(encode_command(c.Command(9, kind))).kind == kind
    pieces = (
        c.TapPiece(7, 5, 2**40, b"abc", True, 2**40),
        c.TapPiece(8, 0, 0, b"", False, 3, 0),
        c.TapPiece(8, 0, 0, b"", False, 0, 2**32 - 1),
    )
    batch = c.CompletionBatch(3, (c.Completion(7, steps=2**40),), pieces)
    assert decode_completions(encode_completions(batch)) == batch


# The client's side

F8 = tensor_type("u8", (8,))
ONE = cost_of(8)


def looping(unread_bytes: int = 4 * ONE, kept_bytes: int = 10**6) -> tuple[ClientCore, Pending, LoopFeed]:
    """A core with a loop of ten steps under way, of sequence number 1."""
    core = ClientCore(Limits())
    run = core.send(c.RunCommand(1, (), ()), observed=True)
    run.feed = feed = LoopFeed({0: F8, output_key(0): F8}, 10, unread_bytes, kept_bytes)
    core.take(10**6)
    return core, run, feed


def value(step: int, output: int | None = 0, data: bytes = b"12345678") -> c.CompletionBatch:
    return c.CompletionBatch(0, (), (c.TapPiece(1, 0, 0, data, True, step, output),))


def test_values_come_with_what_they_are_and_their_steps() -> None:
    core, _, feed = looping()
    for batch in (value(0, None), value(0), value(3), value(9, None)):
        core.apply(batch)
    assert [(what, step) for what, step, _ in feed.ready] == [(0, 0), (-1, 0), (-1, 3), (0, 9)]


@pytest.mark.parametrize(
    "batches",
    [
        [value(10)],
        [value(2**63)],
        [value(3), value(2)],
        [value(0, 1)],
        [value(0, 2**32 - 1)],
        [value(0, data=b"1234")],
    ],
)
def test_values_that_belong_nowhere_break_the_protocol(batches: list[c.CompletionBatch]) -> None:
    core, _, _ = looping()
    with pytest.raises(ProtocolError):
        for batch in batches:
            core.apply(batch)


def test_a_step_that_changes_in_the_midst_of_a_value_breaks_the_protocol() -> None:
    core, _, _ = looping()
    core.apply(c.CompletionBatch(0, (), (c.TapPiece(1, 0, 0, b"1234", False, 0),)))
    with pytest.raises(ProtocolError):
        core.apply(c.CompletionBatch(0, (), (c.TapPiece(1, 0, 4, b"5678", True, 1),)))


def test_what_was_taken_is_told_before_the_loop_would_wait_and_not_each_time() -> None:
    core, run, feed = looping()
    said = []
    for step in range(10):
        core.apply(value(step))
        feed.take()
        core.proceed(run)
        said.append([one.kind for one in core.take(10**6)])
    # Half of what may be unread at a time.
    told = [(step, kind.taken_bytes) for step, kinds in enumerate(said) for kind in kinds]
    assert told == [(2, 3 * ONE), (5, 6 * ONE), (8, 9 * ONE)]


def test_a_loop_that_flows_is_told_what_came_and_what_cannot_be_kept_is_missed() -> None:
    core, run, feed = looping(kept_bytes=3 * ONE)
    core.apply(value(0))
    assert core.take(10**6) == []
    core.flow(run)
    for step in range(1, 10):
        core.apply(value(step))
    said = [one.kind for one in core.take(10**6)]
    assert said and said[-1] == c.Continue(1, 9 * ONE) or said[-1] == c.Continue(1, 10 * ONE)
    assert [step for _, step, _ in feed.ready] == [0, 1, 2, 3]
    assert isinstance(feed.error, hg.LimitExceededError) and "were dropped" in feed.error.message


def test_what_was_taken_of_a_loop_that_has_ended_is_not_told() -> None:
    core, run, feed = looping(unread_bytes=0)
    core.apply(value(0))
    feed.take()
    core.proceed(run)
    core.apply(c.CompletionBatch(1))
    assert core.take(10**6) == []
