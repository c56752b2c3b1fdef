"""Observed runs under hostile clients, and the client's side under a wrong server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from raw_client import SECONDS, RawSession, graph_of, node, raw_channel, still_serves

import heliograph as hg
from heliograph.core.feed import Feed
from heliograph.core.future import Pending
from heliograph.core.protocol import ClientCore
from heliograph_proto import commands as c
from heliograph_proto.codec import decode_command, decode_completions, encode_command, encode_completions
from heliograph_proto.codec.status import error_from_metadata
from heliograph_proto.errors import ProtocolError
from heliograph_proto.sessions import Limits
from heliograph_proto.types import tensor_type
from heliograph_proto.v1 import command_pb2, plan_pb2
from heliograph_server.rpc.completion_writer import HIGH_WATER_BYTES, MESSAGE_BYTES, CompletionWriter

if TYPE_CHECKING:
    from daemon_urls import DaemonUrls

CHAIN = graph_of(node("neg", 0), node("exp", 1), node("neg", 2))
ONES = np.ones((4, 3), np.float32)


@pytest.fixture
def raw(daemon: DaemonUrls) -> Iterator[RawSession]:
    """A raw session; the daemon serves the others on afterwards."""
    with raw_channel(daemon.tcp) as channel:
        session = RawSession(channel).attach()
        try:
            yield session
        finally:
            session.close()
    still_serves(daemon.tcp)


def compile_with(raw: RawSession, taps: Any, plan: int = 1) -> None:
    """Raises the typed error of a refusal."""
    request = plan_pb2.CompileRequest(
        session=raw.token, plan=plan, graph=CHAIN, options=plan_pb2.PlanOptions(taps=taps)
    )
    try:
        raw.plans.Compile(request, timeout=SECONDS)
    except grpc.RpcError as refusal:
        error = error_from_metadata(tuple(refusal.trailing_metadata() or ()))
        raise error or refusal from None


def run_of(plan: int = 1, *, pause: bool = False) -> command_pb2.Run:
    given = command_pb2.InputBinding(input=0, data=ONES.tobytes())
    return command_pb2.Run(
        plan=plan, inputs=[given], outputs=[command_pb2.OutputBinding(fetch=True)], pause=pause
    )


def proceed(sequence: int) -> dict[str, Any]:
    return {"continue": command_pb2.Continue(sequence=sequence)}


def until_tap(raw: RawSession) -> command_pb2.TapPiece:
    """The next piece of an observed node; completions are dropped."""
    for batch in raw._answers:
        for piece in batch.taps:
            found: command_pb2.TapPiece = piece
            return found
    raise AssertionError("the stream ended before a node was told of")


@pytest.mark.parametrize(
    ("taps", "words"),
    [([3], "node 3"), ([2**32 - 1], "is tapped"), ([1, 1], "twice"), ([0, 1, 2, 0], "twice")],
)
def test_nodes_that_are_none_are_refused(raw: RawSession, taps: list[int], words: str) -> None:
    with pytest.raises(hg.InvalidArgumentError, match=words):
        compile_with(raw, taps)
    compile_with(raw, [0, 1, 2])


def test_a_list_longer_than_any_graph_is_refused(raw: RawSession) -> None:
    with pytest.raises(hg.LimitExceededError, match="taps in one message"):
        compile_with(raw, range(raw.limits.graph_nodes + 1))


def test_the_wire_carries_values_before_the_completion(raw: RawSession) -> None:
    compile_with(raw, [1])
    sequence, seen = raw.send(run=run_of()), []
    for batch in raw._answers:
        seen += [("tap", one.node, one.data, one.last) for one in batch.taps]
        seen += [
            ("done", 0, one.outputs[0].data, True) for one in batch.completions if one.sequence == sequence
        ]
        if seen and seen[-1][0] == "done":
            break
    expected = np.exp(-ONES)
    assert [one[:2] for one in seen] == [("tap", 1), ("done", 0)]
    assert np.allclose(np.frombuffer(seen[0][2], np.float32), expected.ravel()) and seen[0][3]


def test_continue_for_anything_else_is_refused_and_harms_nothing(raw: RawSession) -> None:
    compile_with(raw, [0])
    for sequence in (0, 1, 5, 2**64 - 1):
        assert isinstance(raw.failure(**proceed(sequence)), hg.InvalidArgumentError)
    assert not raw.answer(raw.send(synchronize=command_pb2.Synchronize())).HasField("error")
    assert raw.answer(raw.send(run=run_of())).outputs


def test_a_run_that_waits_can_be_cancelled_and_continued(raw: RawSession) -> None:
    compile_with(raw, [0, 1])
    first = raw.send(run=run_of(pause=True))
    assert until_tap(raw).node == 0
    raw.send(cancel=command_pb2.Cancel(sequence=first))
    assert raw.answer(first).HasField("error")
    second = raw.send(run=run_of(pause=True))
    for number in (0, 1):
        assert until_tap(raw).node == number
        raw.send(**proceed(second))
    assert raw.answer(second).outputs


def test_half_closing_lets_a_paused_run_end(raw: RawSession) -> None:
    compile_with(raw, [0, 1, 2])
    sequence = raw.send(run=run_of(pause=True))
    assert until_tap(raw).node == 0
    raw._outgoing.put(None)
    told, done = [], []
    for batch in raw._answers:
        told += [one.node for one in batch.taps]
        done += [one.sequence for one in batch.completions]
    assert told == [1, 2] and done == [sequence]


def test_a_client_that_leaves_ends_its_paused_run(raw: RawSession, daemon: DaemonUrls) -> None:
    with hg.connect(daemon.tcp) as watcher:
        before = watcher.devices[0].memory().free_bytes
        with raw_channel(daemon.tcp) as channel:
            other = RawSession(channel).attach()
            compile_with(other, [0])
            other.send(run=run_of(pause=True))
            until_tap(other)
        # Its connection is gone; this ends its thread alone.
        other.close()
        for _ in range(5_000):
            if watcher.devices[0].memory().free_bytes == before:
                return
    raise AssertionError("the memory of a session that left is not back")


def test_runs_that_nobody_reads_harm_nobody(raw: RawSession) -> None:
    """Thousands of values for a client that never takes one: it leaves, the daemon serves on."""
    compile_with(raw, [0, 1, 2])
    for _ in range(2_000):
        raw.send(run=run_of())


def test_values_that_nobody_reads_stop_the_reading_of_commands() -> None:
    async def scenario() -> None:
        outbox, piece = CompletionWriter(asyncio.get_running_loop()), bytes(2**18)
        pieces = tuple(c.TapPiece(1, 0, number * 2**18, piece, False) for number in range(80))
        outbox.put(c.CompletionBatch(1, (c.Completion(1, outputs=((0, b"y"),)),), pieces))
        assert outbox.unwritten_bytes > HIGH_WATER_BYTES
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(outbox.has_room(), 0.01)
        taps, largest = 0, 0
        while outbox.unwritten_bytes:
            data = await outbox.take()
            message = command_pb2.CompletionBatch.FromString(data or b"")
            assert taps == 80 or not message.completions or len(message.taps) + taps == 80
            taps, largest = taps + len(message.taps), max(largest, message.ByteSize())
        assert taps == 80 and largest < 2 * MESSAGE_BYTES

    asyncio.run(scenario())


# Messages


def test_what_is_said_of_observed_runs_comes_back_as_it_was() -> None:
    for kind in (c.Continue(7), c.RunCommand(3, (), (), True), c.RunCommand(3, (), ())):
        assert decode_command(encode_command(c.Command(9, kind))).kind == kind
    pieces = (c.TapPiece(7, 2**31, 2**40, b"abc", True), c.TapPiece(8, 0, 0, b"", False))
    batch = c.CompletionBatch(3, (), pieces)
    assert decode_completions(encode_completions(batch)) == batch


# The client's side


F8 = tensor_type("u8", (8,))


def observing(*, pauses: bool = False) -> tuple[ClientCore, Pending]:
    """A core with a run under way, of sequence number 1."""
    core = ClientCore(Limits())
    run = core.send(c.RunCommand(1, (), ()), observed=True)
    run.feed = Feed({0: F8, 3: F8}, pauses)
    core.take(10**6)
    return core, run


def piece(node: int, offset: int, data: bytes, last: bool = False, sequence: int = 1) -> c.CompletionBatch:
    return c.CompletionBatch(0, (), (c.TapPiece(sequence, node, offset, data, last),))


def test_pieces_become_a_value() -> None:
    core, run = observing()
    for batch in (
        piece(3, 0, b"abc"),
        piece(3, 3, b"def"),
        piece(3, 6, b"gh", True),
        piece(0, 0, b"12345678", True),
    ):
        core.apply(batch)
    assert run.feed is not None
    assert [(node, array.tobytes()) for node, _, array in run.feed.ready] == [
        (3, b"abcdefgh"),
        (0, b"12345678"),
    ]


@pytest.mark.parametrize(
    "pieces",
    [
        [piece(1, 0, b"a")],
        [piece(0, 1, b"a")],
        [piece(0, 0, b"123456789")],
        [piece(0, 0, b"12345678")],
        [piece(0, 0, b"1234", True)],
        [piece(0, 0, b"1234"), piece(0, 3, b"1234")],
        [piece(0, 0, b"1234"), piece(3, 4, b"1234", True)],
        [piece(0, 0, b"1234"), piece(3, 0, b"12345678", True)],
        [piece(0, 0, b"12345678", True), piece(0, 8, b"", True)],
    ],
)
def test_pieces_that_belong_nowhere_break_the_protocol(pieces: list[c.CompletionBatch]) -> None:
    core, _ = observing()
    with pytest.raises(ProtocolError):
        for batch in pieces:
            core.apply(batch)


def test_pieces_of_other_runs_are_dropped() -> None:
    core, run = observing()
    core.apply(piece(0, 0, b"12345678", True, sequence=2))
    core.apply(c.CompletionBatch(1))
    core.apply(piece(0, 0, b"12345678", True))
    assert run.done and run.feed is not None and not run.feed.ready


def test_a_continue_passes_everything_that_waits_and_is_sent_once() -> None:
    core, run = observing(pauses=True)
    core.open_gate()
    for _ in range(3):
        core.send(c.Synchronize())
    core.apply(piece(0, 0, b"12345678", True))
    assert core.take(10**6) == []
    core.proceed(run)
    core.proceed(run)
    assert [one.kind for one in core.take(10**6)] == [c.Continue(1)]
    core.flow(run)
    assert core.take(10**6) == []
    core.apply(piece(3, 0, b"12345678", True))
    assert [one.kind for one in core.take(10**6)] == [c.Continue(1)]


def test_a_continue_for_a_run_that_has_ended_is_not_sent() -> None:
    core, run = observing(pauses=True)
    core.apply(piece(0, 0, b"12345678", True))
    core.proceed(run)
    core.apply(c.CompletionBatch(1))
    assert core.take(10**6) == []
