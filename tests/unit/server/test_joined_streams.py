"""Streams that begin in a gRPC call and go on by a connection: nothing is lost, or overtakes."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from grpc import aio

from heliograph.transport.command_socket.on_loop import LoopSocket
from heliograph_proto.codec.frames import framed
from heliograph_proto.v1 import direct_pb2
from heliograph_server.links.joined import JoinedStream

SECONDS = 10.0
MOST_BYTES = 4 * 2**20


class Call:
    """One end of a call: what the other end writes is read here."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[Any] = asyncio.Queue()
        self.other = self

    async def read(self) -> Any:
        return await self.incoming.get()

    async def write(self, message: bytes) -> None:
        # As gRPC's, a write takes a while.
        await asyncio.sleep(0)
        self.other.incoming.put_nowait(message)


class Streams:
    """Both ends of a stream, and of a connection beside it."""

    def __init__(self, *, passes: bool = False) -> None:
        """`passes`: the opener passes on what comes beside the call."""
        opener, taker = Call(), Call()
        opener.other, taker.other = taker, opener
        self.passed: list[bytes] = []
        self.opener, self.taker = JoinedStream(opener, MOST_BYTES), JoinedStream(taker, MOST_BYTES)
        if passes:
            self.opener = JoinedStream(opener, MOST_BYTES, self.passed.append)
        self.calls = opener, taker
        self.sockets = socket.socketpair()
        #: How often the taker's connection was closed.
        self.closed = 0

    def _count(self) -> None:
        self.closed += 1

    def change_over(self) -> None:
        self.taker.take(self.sockets[1], self._count)
        self.opener.begin(self.sockets[0])

    def close(self) -> None:
        self.opener.close()
        self.taker.close()
        for one in self.sockets:
            one.close()


def run(work: Callable[[Streams], Awaitable[None]], *, passes: bool = False) -> Streams:
    """Run a test on a loop, with a bound."""

    async def bounded() -> Streams:
        streams = Streams(passes=passes)
        try:
            async with asyncio.timeout(SECONDS):
                await work(streams)
        finally:
            streams.close()
        return streams

    return asyncio.run(bounded())


async def turns_until(is_so: Callable[[], bool]) -> None:
    """Give other tasks turns of the loop until something is so."""
    for _ in range(100_000):
        if is_so():
            return
        await asyncio.sleep(0)
    raise AssertionError("it was not so after 100,000 turns of the loop")


@pytest.mark.parametrize("seed", range(8))
def test_messages_keep_their_order_in_both_directions(seed: int) -> None:
    dice = random.Random(seed)
    print("seed", seed)
    messages = [dice.randbytes(dice.choice((0, 3, 500, 300_000))) for _ in range(40)]
    change = dice.randrange(len(messages))

    async def write(stream: JoinedStream) -> None:
        for one in messages:
            await stream.write(one)
            if not dice.randrange(3):
                await asyncio.sleep(0)

    async def read(stream: JoinedStream) -> list[bytes]:
        return [await stream.read() for _ in messages]

    async def change_over(streams: Streams) -> None:
        for _ in range(change):
            await asyncio.sleep(0)
        streams.change_over()

    async def work(streams: Streams) -> None:
        ends = streams.opener, streams.taker
        *_, first, second = await asyncio.gather(change_over(streams), *map(write, ends), *map(read, ends))
        assert first == second == messages
        # From now on gRPC carries nothing.
        await asyncio.gather(*map(write, ends), *map(read, ends))
        assert all(one.incoming.empty() for one in streams.calls)

    assert run(work).closed == 1


@pytest.mark.parametrize("seed", range(8))
def test_messages_that_come_by_the_connection_are_passed_on_behind_those_of_the_call(seed: int) -> None:
    dice = random.Random(seed)
    print("seed", seed)
    messages = [bytes([number]) * dice.choice((1, 500, 300_000)) for number in range(40)]
    change = dice.randrange(len(messages))

    async def read(streams: Streams) -> None:
        while (message := await streams.opener.read()) is not aio.EOF:
            streams.passed.append(message)
            if not dice.randrange(3):
                await asyncio.sleep(0)

    async def work(streams: Streams) -> None:
        reading = asyncio.ensure_future(read(streams))
        for number, one in enumerate(messages):
            if number == change:
                streams.change_over()
            await streams.taker.write(one)
            if not dice.randrange(3):
                await asyncio.sleep(0)
        await turns_until(lambda: len(streams.passed) == len(messages))
        assert streams.passed == messages
        # From now on they need no reader.
        reading.cancel()
        await streams.taker.write(b"last")
        await turns_until(lambda: streams.passed[-1] == b"last")

    run(work, passes=True)


def sent_now(stream: JoinedStream, message: bytes) -> bool:
    """Send from another thread. The loop stands still meanwhile, and so takes nothing."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(stream.send_now, message).result(SECONDS)


def test_threads_send_whole_messages_and_never_wait() -> None:
    large = bytes(3 * 2**20)

    async def work(streams: Streams) -> None:
        assert not await asyncio.to_thread(streams.taker.send_now, b"early")
        streams.change_over()
        await streams.opener.write(b"hello")
        assert await streams.taker.read() == b"hello"
        # More than the system takes at once: the rest follows, and others must wait.
        assert [sent_now(streams.taker, one) for one in (large, b"too early")] == [True, False]
        writing = asyncio.ensure_future(streams.taker.write(b"behind"))
        assert [await streams.opener.read(), await streams.opener.read()] == [large, b"behind"]
        await writing
        assert await asyncio.to_thread(streams.taker.send_now, b"again")
        assert await streams.opener.read() == b"again"
        streams.taker.close()
        assert not await asyncio.to_thread(streams.taker.send_now, b"late")

    run(work)


def test_an_end_that_waits_loses_nothing_of_what_threads_sent() -> None:
    large = bytes(3 * 2**20)

    async def work(streams: Streams) -> None:
        await streams.taker.sent()
        streams.change_over()
        await streams.opener.write(b"hello")
        assert await streams.taker.read() == b"hello"
        assert sent_now(streams.taker, large)
        given_up, *waits = [asyncio.ensure_future(streams.taker.sent()) for _ in range(3)]
        await asyncio.sleep(0)
        assert not given_up.done()
        given_up.cancel()
        reading = asyncio.ensure_future(streams.opener.read())
        await asyncio.gather(*waits)
        streams.taker.close()
        assert await reading == large

    async def closed(streams: Streams) -> None:
        streams.change_over()
        await streams.opener.write(b"hello")
        assert await streams.taker.read() == b"hello"
        assert sent_now(streams.taker, large)
        waiting = asyncio.ensure_future(streams.taker.sent())
        await asyncio.sleep(0)
        streams.taker.close()
        with pytest.raises(ConnectionError):
            await waiting

    run(work)
    run(closed)


def test_a_connection_that_nobody_uses_leaves_the_stream_with_grpc() -> None:
    async def work(streams: Streams) -> None:
        streams.taker.take(streams.sockets[1], streams._count)
        streams.sockets[0].close()
        await streams.opener.write(b"one")
        assert await streams.taker.read() == b"one"
        await streams.taker.write(b"two")
        assert await streams.opener.read() == b"two"

    assert run(work).closed == 1


def test_the_stream_ends_with_its_connection_and_with_its_call() -> None:
    async def broken(streams: Streams) -> None:
        streams.change_over()
        await streams.opener.write(b"one")
        assert await streams.taker.read() == b"one"
        streams.sockets[0].shutdown(socket.SHUT_RDWR)
        assert await streams.taker.read() is aio.EOF
        assert await streams.opener.read() is aio.EOF

    async def ended(streams: Streams) -> None:
        streams.change_over()
        await streams.opener.write(b"one")
        streams.calls[1].incoming.put_nowait(aio.EOF)
        # Messages that were there before the end come before it.
        assert await streams.taker.read() == b"one"
        assert await streams.taker.read() is aio.EOF

    run(broken)
    run(ended)


@pytest.mark.parametrize(
    "data", [b"\xff" * 40, framed(b"\xff\xff"), framed(b"")[:3]], ids=["length", "switch", "cut"]
)
def test_garbage_on_a_connection_changes_nothing(data: bytes) -> None:
    async def work(streams: Streams) -> None:
        streams.taker.take(streams.sockets[1], streams._count)
        streams.sockets[0].sendall(data)
        streams.sockets[0].shutdown(socket.SHUT_WR)
        await streams.opener.write(b"one")
        assert await streams.taker.read() == b"one"

    assert run(work).closed == 1


def test_the_end_reads_what_was_sent_before_it_and_no_flood() -> None:
    ours, theirs = socket.socketpair()
    came: list[bytes] = []
    ends: list[Exception | None] = []

    def received(messages: Sequence[bytes]) -> None:
        came.extend(messages)
        assert len(came) < 1000, "a flood is read for as long as it lasts"
        theirs.send(framed(bytes(10_000)))

    async def work() -> None:
        end = LoopSocket(ours, MOST_BYTES, received, ends.append)
        theirs.sendall(framed(b"early") * 20)
        end.drain()
        assert came[:20] == [b"early"] * 20
        assert ends == [None]
        end.drain()
        end.close()
        end.drain()

    with ours, theirs:
        asyncio.run(work())


@pytest.mark.parametrize("size_bytes", [0, 10_000])
def test_messages_that_must_wait_are_bounded(size_bytes: int) -> None:
    async def work(streams: Streams) -> None:
        streams.taker.take(streams.sockets[1], streams._count)
        ours = streams.sockets[0]
        ours.setblocking(False)
        # The message before these never comes.
        switch = direct_pb2.ExchangeSwitch(sent_messages=2**63).SerializeToString()
        data, taken = framed(switch) + framed(bytes(size_bytes)) * (10**7 // (size_bytes + 4)), 0
        for _ in range(200):
            try:
                taken += ours.send(data[taken:])
            except BlockingIOError:
                pass
            await asyncio.sleep(0)
        assert taken < len(data) / 2
        reading = asyncio.ensure_future(streams.taker.read())
        await asyncio.sleep(0)
        assert not reading.done()
        reading.cancel()

    run(work)
