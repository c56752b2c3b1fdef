"""Feeds of loops in the core: what a mailbox holds and gives, and what the server refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from core_client import SECONDS, CoreClient
from core_loops import FED, PLAN, X, doubling
from cuda_emulation import EmulatedDriver, why_not
from graph_arrivals import chain, compile_received

from heliograph_backends.cuda import CudaDevice
from heliograph_backends.fake import FakeDevice
from heliograph_proto import commands as c
from heliograph_proto.errors import (
    CancelledError,
    ComputeFailedError,
    InvalidArgumentError,
    InvalidInputError,
    LimitExceededError,
    LoopEndedError,
    OutOfMemoryError,
    SessionClosedError,
)
from heliograph_proto.plans import Port
from heliograph_proto.sessions import Limits
from heliograph_proto.types import tensor_type
from heliograph_server.resources.feed_order import FeedOrder, ToldFeeds
from heliograph_server.session.protocol.loop_feeds import Mailbox

ROOM = 10_000
ONES = np.ones(4, np.float32)


def loop_of(steps: int, **loop: Any) -> c.RunCommand:
    """A loop of doublings of X, whose x may be fed."""
    inputs = (c.InputBinding(0, X.tobytes()), c.InputBinding(1, np.ones(1, np.int32).tobytes()))
    how = {"carries": FED, "fed_inputs": (0,), "fed_bytes": ROOM, **loop}
    return c.RunCommand(PLAN, inputs, (c.OutputBinding(0, 0, True),), loop=c.Loop(steps, **how))


def feed_of(loop: int, x: Any, *rows: int, place: int = 0) -> c.FeedLoop:
    return c.FeedLoop(loop, ((place, np.asarray(x, np.float32).tobytes()),), rows)


def result(done: c.Completion) -> list[float]:
    assert done.error is None, done.error
    return np.frombuffer(done.outputs[0][1], np.float32).tolist()


# Which step takes what


def test_what_waits_is_taken_before_the_next_step_and_told(client: CoreClient, fake: FakeDevice) -> None:
    first, second = fake.script.hold("compute"), fake.script.hold("compute")
    loop = client.send(loop_of(3))
    assert first.entered.wait(SECONDS)
    whole = client.send(feed_of(loop, ONES))
    row = client.send(feed_of(loop, [5.0], 2))
    other = client.send(feed_of(loop, [7.0, 6.0], 3, 0))
    first.open()
    assert client.wait(whole).steps == 1 and second.entered.wait(SECONDS)
    second.open()
    # The rows were set already in that step, so they have the next one.
    assert client.wait(row).steps == client.wait(other).steps == 2
    assert result(client.wait(loop)) == [12.0, 4.0, 10.0, 14.0]


def test_a_step_that_is_tried_once_more_keeps_what_it_took(client: CoreClient, fake: FakeDevice) -> None:
    # A plan without a handle makes room.
    compile_received(client, PLAN + 1, chain("neg", "exp"))
    client.do(c.Free((PLAN + 1,)))
    gate = fake.script.hold("compute")
    fake.script.fail("compute", OutOfMemoryError("not now"))
    loop = client.send(loop_of(3))
    assert gate.entered.wait(SECONDS)
    fed = [client.send(feed_of(loop, ONES * k)) for k in (1, 5)]
    gate.open()
    # The second one waits for the step after it.
    assert [client.wait(one).steps for one in fed] == [1, 2]
    assert result(client.wait(loop)) == [10.0] * 4


def test_a_feed_that_cannot_be_written_fails_its_step(client: CoreClient, fake: FakeDevice) -> None:
    gate = fake.script.hold("compute")
    loop = client.send(loop_of(5))
    assert gate.entered.wait(SECONDS)
    fake.script.fail("set", ComputeFailedError("the bus is gone"))
    fed = client.send(feed_of(loop, ONES))
    gate.open()
    assert client.wait(fed).steps == 1
    done = client.wait(loop)
    assert done.error is not None and done.error.message == "in step 1 of the loop: the bus is gone"
    assert done.steps == 1


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_a_device_that_computes_later_is_fed_too() -> None:
    with CoreClient(CudaDevice("cuda0", EmulatedDriver(lazy=True), 2**28)) as client:
        client.compile(PLAN, doubling())
        for _ in range(20):
            loop = client.send(loop_of(30, carries=(c.Carry(1, 1),)))
            fed = [client.send(feed_of(loop, [k], k % 4)) for k in range(8)]
            steps = [client.wait(one) for one in fed]
            expected = X.copy()
            for k, done in enumerate(steps):
                if done.error is None:
                    expected[k % 4] = k
            assert result(client.wait(loop)) == (2 * expected).tolist()


# How they end


def test_a_cancelled_feed_is_not_applied_and_the_next_is(client: CoreClient, fake: FakeDevice) -> None:
    gate = fake.script.hold("compute")
    loop = client.send(loop_of(2))
    assert gate.entered.wait(SECONDS)
    gone, kept = client.send(feed_of(loop, [9.0], 0)), client.send(feed_of(loop, [8.0], 1))
    client.do(c.Cancel(gone))
    assert isinstance(client.wait(gone).error, CancelledError)
    gate.open()
    assert client.wait(kept).steps == 1
    assert result(client.wait(loop)) == [0.0, 16.0, 8.0, 12.0]


def test_feeds_that_wait_end_with_their_loop(client: CoreClient, fake: FakeDevice) -> None:
    for how in (None, c.Cancel):
        gate = fake.script.hold("compute")
        loop = client.send(loop_of(1 if how is None else 10**6))
        assert gate.entered.wait(SECONDS)
        waiting = [client.send(feed_of(loop, ONES)) for _ in range(3)]
        if how is not None:
            client.do(how(loop))
        else:
            gate.open()
        for one in waiting:
            assert isinstance(client.wait(one).error, LoopEndedError)
        client.wait(loop)
        # Its step may still go on.
        assert isinstance(client.refused(feed_of(loop, ONES)), LoopEndedError)
        gate.open()


def test_the_end_of_the_session_leaves_no_feed_behind(fake: FakeDevice) -> None:
    # The client's context checks that the host holds nothing then.
    with CoreClient(fake) as client:
        client.compile(PLAN, doubling())
        gate = fake.script.hold("compute")
        loops = [client.send(loop_of(10**6)) for _ in range(2)]
        assert gate.entered.wait(SECONDS)
        waiting = [client.send(feed_of(loop, ONES)) for loop in loops for _ in range(3)]
        gate.open()
        client.session.close()
        for one in waiting:
            error = client.wait(one).error
            assert error is None or isinstance(error, SessionClosedError | LoopEndedError)


def test_feeds_reach_a_loop_after_the_last_command(client: CoreClient, fake: FakeDevice) -> None:
    gate = fake.script.hold("compute")
    loop = client.send(loop_of(2))
    assert gate.entered.wait(SECONDS)
    fed = client.send(feed_of(loop, ONES))
    client.session.end_of_commands()
    gate.open()
    assert client.wait(fed).steps == 1 and result(client.wait(loop)) == [2.0] * 4


# Bounds


def test_more_bytes_than_may_wait_are_refused_and_counted_until_they_are_taken(
    client: CoreClient, fake: FakeDevice
) -> None:
    first = fake.script.hold("compute")
    cost = 16 + c.FEED_BYTES
    loop = client.send(loop_of(1000, fed_bytes=3 * cost, until=None))
    assert first.entered.wait(SECONDS)
    fed = [client.send(feed_of(loop, ONES)) for _ in range(3)]
    error = client.refused(feed_of(loop, ONES))
    assert isinstance(error, LimitExceededError) and "1,584 bytes of feeds wait" in error.message
    first.open()
    assert [client.wait(one).steps for one in fed] == [1, 2, 3]
    client.wait(loop)


def test_the_room_for_feeds_counts_as_long_as_the_loop(fake: FakeDevice) -> None:
    # 20 bytes of inputs and 16 of y.
    with CoreClient(fake, limits=Limits(in_flight_bytes=1000)) as client:
        client.compile(PLAN, doubling())
        for most in (965, 2**64 - 1):
            refused = client.refused(loop_of(3, fed_bytes=most))
            assert isinstance(refused, LimitExceededError) and "would pass the limit" in refused.message
        for _ in range(3):
            assert client.do(loop_of(3, fed_bytes=964)).steps == 3


@pytest.mark.parametrize(
    ("feed", "error", "words"),
    [
        (c.FeedLoop(0, ()), InvalidInputError, "without values"),
        (c.FeedLoop(0, ((0, bytes(16)), (0, bytes(16)))), InvalidInputError, "gives an input twice"),
        (feed_of(0, ONES, place=1), InvalidInputError, "input 1 of the loop is not fed"),
        (feed_of(0, ONES, place=2**32 - 1), InvalidInputError, "is not fed"),
        (feed_of(0, ONES[:3]), InvalidInputError, "f32.4. of 16 bytes, not 12"),
        (feed_of(0, ONES, 0, 1), InvalidInputError, "2 rows of f32.4. of 8 bytes, not 16"),
        (feed_of(0, ONES[:1], 4), InvalidInputError, "each is given once, from 0 to 3"),
        (feed_of(0, ONES[:2], 1, 1), InvalidInputError, "each is given once"),
        (feed_of(0, np.ones(2**19)), LimitExceededError, "2,097,152 bytes of one input in a feed"),
    ],
)
def test_feeds_that_do_not_fit_change_nothing(
    client: CoreClient, fake: FakeDevice, feed: c.FeedLoop, error: type[Exception], words: str
) -> None:
    gate = fake.script.hold("compute")
    loop = client.send(loop_of(2))
    assert gate.entered.wait(SECONDS)
    with pytest.raises(error, match=words):
        client.do(c.FeedLoop(loop, feed.values, feed.rows))
    gate.open()
    assert result(client.wait(loop)) == (X * 4).tolist()


def test_only_loops_that_say_so_are_fed(client: CoreClient, fake: FakeDevice) -> None:
    gate = fake.script.hold("compute")
    loop = client.send(loop_of(2, fed_inputs=(), fed_bytes=0))
    assert gate.entered.wait(SECONDS)
    assert "is no loop that is fed" in str(client.refused(feed_of(loop, ONES)))
    gate.open()
    client.wait(loop)
    for number in (0, loop, 10**9):
        assert isinstance(client.refused(feed_of(number, ONES)), LoopEndedError)


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        ({"fed_inputs": (2,)}, "input 2 of a plan with 2"),
        ({"fed_inputs": (0, 0)}, "named twice among those that may be fed"),
        ({"fed_inputs": ()}, "bytes for feeds of a loop that takes none"),
    ],
)
def test_loops_whose_feeds_are_none_are_refused(client: CoreClient, loop: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        client.do(loop_of(3, **loop))


# Pure


def test_rows_of_blocks_are_whole_blocks() -> None:
    ports = (
        Port("blocks", tensor_type("q8_0", (3, 64))),
        Port("one row", tensor_type("q8_0", (32,))),
        Port("number", tensor_type("f32", ())),
        Port("empty", tensor_type("f32", (0, 2))),
    )
    box = Mailbox(c.Loop(1, fed_inputs=(0, 1, 2, 3), fed_bytes=ROOM), ports)
    box.add(1, c.FeedLoop(9, ((0, bytes(2 * 68)),), (2, 0)))
    for place in (1, 2, 3):
        with pytest.raises(InvalidInputError, match="no rows"):
            box.add(2, c.FeedLoop(9, ((place, bytes(4)),), (0,)))
    box.add(3, c.FeedLoop(9, ((1, bytes(34)), (2, bytes(4)), (3, b""))))
    assert [one.sequence for one in box.take()] == [1, 3]
    assert box.take() == box.close() == []


# Partitions


def numbered(number: int, apart_from: int = 0, *rows: int) -> c.FeedLoop:
    """A feed of the only input, or without values."""
    values = ((0, ONES[: len(rows)].tobytes()),) if rows else ()
    return c.FeedLoop(9, values, rows, number, apart_from)


def box_of_partition() -> Mailbox:
    loop = c.Loop(9, fed_inputs=(0,), fed_bytes=10**6, exchange=c.LoopExchange(fed=True))
    return Mailbox(loop, (Port("x", tensor_type("f32", (4,))),))


@pytest.mark.parametrize(
    "feed", [numbered(0), numbered(1), numbered(3), numbered(2, 2), numbered(2, 9)], ids=str
)
def test_feeds_of_a_partition_come_in_the_order_of_their_numbers(feed: c.FeedLoop) -> None:
    box = box_of_partition()
    box.add(1, numbered(1, 0, 3))
    with pytest.raises(InvalidInputError, match="of a partition's loop follows 1"):
        box.add(2, feed)
    box.add(2, numbered(2, 1))
    assert [one.number for one in box.take()] == [1]
    assert [one.number for one in box.take()] == [2]


def test_a_feed_with_a_number_belongs_to_a_partition() -> None:
    box = Mailbox(c.Loop(9, fed_inputs=(0,), fed_bytes=ROOM), (Port("x", tensor_type("f32", (4,))),))
    with pytest.raises(InvalidInputError, match="no partition's"):
        box.add(1, numbered(1, 0, 3))


def test_a_partition_takes_no_more_feeds_than_it_can_tell() -> None:
    box = box_of_partition()
    for number in range(1, 101):
        box.add(number, numbered(number))
    assert [len(box.take()) for _ in range(3)] == [64, 36, 0]


def test_feeds_that_are_told_are_taken_and_no_others() -> None:
    box = box_of_partition()
    for number in range(1, 6):
        box.add(number, numbered(number, number - 1, 0))
    assert [one.number for one in box.take_through(3)] == [1, 2, 3]
    assert not box.take_through(3)
    assert [one.number for one in box.take_through(2**64 - 1)] == [4, 5]


def test_each_feed_goes_apart_from_the_last_one_that_set_a_row_of_it() -> None:
    order = FeedOrder()
    given = [
        ((0,), (1,)),
        ((0,), (2, 3)),
        ((0, 1), (3,)),
        ((1,), ()),
        ((1,), (7,)),
        ((0,), ()),
        ((0,), (5,)),
        ((), ()),
    ]
    found = [
        order.add(c.FeedLoop(9, tuple((place, b"") for place in places), rows)) for places, rows in given
    ]
    assert found == [0, 0, 2, 3, 4, 3, 6, 0]
    told = ToldFeeds(70, 0b101)
    assert [number for number in range(1, 71) if told.has_withdrawn(number)] == [68, 70]
