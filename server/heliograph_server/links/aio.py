"""Links to other daemons on an event loop. Methods that any thread may call say so.

A link whose connections break has them made again. Meanwhile its requests wait; then they go again,
and large values go on behind the bytes that are there.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
from grpc import aio

from heliograph.transport.channels import open_aio_channel
from heliograph.transport.direct.opening import open_offered
from heliograph_proto.addresses import Shown, nothing_shown
from heliograph_proto.codec import decode
from heliograph_proto.codec.bulk import decode_download
from heliograph_proto.eager import begin
from heliograph_proto.errors import CancelledError, HeliographError, ProtocolError
from heliograph_proto.plans import Edge, PeerSource, lost
from heliograph_proto.sessions import DirectOffer
from heliograph_proto.v1 import direct_pb2, peer_pb2
from heliograph_server.exchange.incoming import Done, Sink
from heliograph_server.exchange.outgoing import SMALL_BYTES, OutgoingValue, unneeded
from heliograph_server.links import links
from heliograph_server.links.joined import JoinedStream
from heliograph_server.links.redialling import LEASE_SECONDS, Redialling
from heliograph_server.links.requests import RECEIPT_SECONDS, Answered, Asked, Brought, LinkRequests
from heliograph_server.resources.failures import typed

logger = logging.getLogger(__name__)

#: How long a link that closes waits for the write under way, which may never end.
CLOSE_SECONDS = 1.0


class LoopPeers:
    """`PeerLinks` of an event loop. `movers` are threads for devices that are slow to write."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        movers: Executor,
        silence_seconds: float = links.SILENCE_SECONDS,
        idle_seconds: float = links.IDLE_SECONDS,
        shown: Shown = nothing_shown,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        """`shown` returns the credentials presented to other daemons. `lease_seconds`: the time for
        which a broken connection is made again."""
        self.loop = loop
        self.shown = shown
        self.movers = movers
        self.silence_seconds = silence_seconds
        self.idle_seconds = idle_seconds
        self.lease_seconds = lease_seconds
        #: The numbers of calls and streams, which take the place of earlier ones.
        self.next_attempt = itertools.count(1).__next__
        self._thread = threading.get_ident()
        self._calls: deque[Callable[[], None]] = deque()
        self._is_rung = False
        self._links: dict[PeerSource, LoopLink] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<LoopPeers {len(self._links)} links>"

    # From any thread

    def pull(self, source: PeerSource, sinks: Sequence[Sink]) -> None:
        """As `PeerLinks.pull`."""
        self._soon(partial(self._pull, source, sinks))

    def forget(self, source: PeerSource, sinks: Sequence[Sink]) -> None:
        """As `PeerLinks.forget`."""
        self._soon(partial(self._forget, source, sinks))

    def push(self, destination: PeerSource, edge: Edge, run: int, value: OutgoingValue, done: Done) -> None:
        """As `PeerLinks.push`."""
        self._soon(partial(self._push, destination, edge, run, value, done))

    def _soon(self, call: Callable[[], None]) -> None:
        if threading.get_ident() == self._thread:
            call()
            return
        self._calls.append(call)
        if self._is_rung:
            return
        self._is_rung = True
        try:
            self.loop.call_soon_threadsafe(self._turn)
        except RuntimeError:
            self._turn()  # the loop is closed, and so are all links: each call fails

    # On the loop

    def _turn(self) -> None:
        self._is_rung = False
        while self._calls:
            try:
                self._calls.popleft()()
            except Exception:  # the other calls must still be made
                logger.exception("a call for another daemon failed")

    def _link(self, source: PeerSource) -> LoopLink:
        """Raises InvalidArgumentError, LimitExceededError, CancelledError."""
        if self._is_closed or self.loop.is_closed():
            raise CancelledError("the daemon is shutting down")
        if source not in self._links:
            if len(self._links) >= links.max_links():
                raise links.too_many_links(source)
            self._links[source] = LoopLink(self, source)
        return self._links[source]

    def _pull(self, source: PeerSource, sinks: Sequence[Sink]) -> None:
        try:
            self._link(source).pull(sinks)
        except Exception as error:
            for sink in sinks:
                sink.fail(typed(error, f"pulling from {source.address}"))

    def _forget(self, source: PeerSource, sinks: Sequence[Sink]) -> None:
        if (link := self._links.get(source)) is not None:
            link.forget(sinks)

    def _push(self, destination: PeerSource, edge: Edge, run: int, value: OutgoingValue, done: Done) -> None:
        try:
            self._link(destination).push(edge, run, value, done)
        except Exception as error:
            value.drop()
            done(typed(error, f"pushing to {destination.address}"))

    def drop(self, link: LoopLink) -> None:
        """Forget a closed link. The next use opens another one."""
        if self._links.get(link.source) is link:
            del self._links[link.source]

    def close(self) -> None:
        """End all links, without waiting; from any thread."""
        self._soon(self._close)

    def _close(self) -> None:
        self._is_closed = True
        for link in tuple(self._links.values()):
            link.end(CancelledError("the daemon is shutting down"))

    async def closed(self) -> None:
        """End all links, and wait until they have ended."""
        found = tuple(self._links.values())
        self._close()
        for link in found:
            await link.ended()


class LoopLink:
    """The link to one daemon: a stream for small values, and a channel for large ones."""

    def __init__(self, peers: LoopPeers, source: PeerSource) -> None:
        self.source = source
        self._peers = peers
        self._loop = peers.loop
        self._address = links.address_of(source.address)
        # A link without credentials that may go there is none.
        peers.shown(source.address)
        self._requests = LinkRequests(source, peers.next_attempt)
        self._redialling = Redialling(peers.lease_seconds, random.random)
        #: Counts the connections, so that a break is noted once.
        self._generation = 0
        self._is_there = asyncio.Event()
        self._is_there.set()
        self._redials: asyncio.Task[None] | None = None
        self._channels: list[aio.Channel] = []
        self._call: Any = None
        #: The call's messages, which may go on beside gRPC.
        self._stream: JoinedStream | None = None
        self._reader: asyncio.Task[None] | None = None
        #: The attempts to open a connection for them.
        self._joining: set[asyncio.Task[None]] = set()
        self._bulk: aio.Channel | None = None
        #: The tasks that pull large values.
        self._pulled: dict[Sink, asyncio.Task[None]] = {}
        #: Clear while a write is under way.
        self._is_written = asyncio.Event()
        self._is_written.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle: asyncio.TimerHandle | None = None
        self._receipts: asyncio.TimerHandle | None = None
        self._error: HeliographError | None = None
        self._closing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        waiting = len(self._requests.waiting)
        return f"<LoopLink to {self.source.address}: {waiting} small, {len(self._tasks)} large>"

    # Requests

    def pull(self, sinks: Sequence[Sink]) -> None:
        """Request values."""
        self._use()
        for sink in sinks:
            if sink.size_bytes > SMALL_BYTES:
                self._pulled[sink] = self._spawn(self._pull_large(sink), sink.fail)
            else:
                self._requests.ask(sink)
        self._flush()

    def forget(self, sinks: Sequence[Sink]) -> None:
        """Cancel the requests for values."""
        for sink in sinks:
            if (task := self._pulled.pop(sink, None)) is not None:
                task.cancel()
                self._requests.unneeded(sink)
            else:
                self._requests.withdraw(sink)
        self._flush()
        self._note_idle()

    def push(self, edge: Edge, run: int, value: OutgoingValue, done: Done) -> None:
        """Push a value."""
        self._use()
        data = value.whole
        if data is None:
            give_up = partial(_give_up, value, done)
            self._spawn(self._push_large(edge, run, value, done), give_up)
            return
        self._requests.bring(edge, run, value, data, done)
        self._flush()

    def _use(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _spawn(self, coroutine: Any, give_up: Callable[[HeliographError], None]) -> asyncio.Task[None]:
        """Start a task. `give_up` receives the error if the task is cancelled before it has
        begun."""
        task: asyncio.Task[None] = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(partial(self._task_ended, give_up))
        return task

    def _task_ended(self, give_up: Callable[[HeliographError], None], task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            # None of it ran. A task that has begun reports the error itself.
            give_up(self._error or unneeded())
        self._note_idle()

    # The stream for small values

    def _flush(self) -> None:
        """Write the gathered requests, unless a write is in progress."""
        is_down = self._error is not None or self._redialling.is_away
        if is_down or not self._is_written.is_set() or not self._requests.is_ready:
            return
        if self._call is None:
            self._requests.begin()
            self._call = self._channel().stream_stream(links.EXCHANGE, None, None)()
            generation = self._generation
            passed = partial(self._passed, generation)
            self._stream = JoinedStream(self._call, links.MOST_MESSAGE_BYTES, passed)
            self._reader = self._loop.create_task(self._read(self._stream, generation))
        assert self._stream is not None
        self._is_written.clear()
        begin(self._stream.write(self._requests.next()), partial(self._written, self._is_written))

    def _new_channel(self) -> aio.Channel:
        # The credentials may have changed since the last one.
        shown = self._peers.shown(self.source.address)
        return open_aio_channel(self._address, links.channel_options(self._peers.silence_seconds), shown)

    def _channel(self) -> aio.Channel:
        """Another one, which ends with the link or with its next break."""
        self._channels.append(made := self._new_channel())
        return made

    def _written(self, event: asyncio.Event, error: BaseException | None) -> None:
        event.set()
        if error is not None:
            # The reader meets the same error.
            logger.debug("writing to %s failed: %s", self.source.address, error)
        elif self._error is None:
            self._flush()

    async def _read(self, stream: JoinedStream, generation: int) -> None:
        # One offer of each stream is taken.
        joining: asyncio.Task[None] | None = None
        try:
            while (data := await stream.read()) is not aio.EOF:
                response = peer_pb2.ExchangeResponse.FromString(data)
                if response.HasField("direct") and joining is None:
                    joining = self._loop.create_task(self._join(stream, response.direct))
                    self._joining.add(joining)
                    joining.add_done_callback(self._joining.discard)
                self._answered(response)
            self._broke(lost(self.source, "it ended the stream"), generation)
        except grpc.RpcError as broken:
            self._failed(broken, generation)
        except Exception as error:
            self.end(typed(error, f"reading from {self.source.address}"))

    def _passed(self, generation: int, data: bytes) -> None:
        """Take a message that came beside gRPC: a task that reads it would be one turn later."""
        try:
            if generation == self._generation and self._error is None:
                self._answered(peer_pb2.ExchangeResponse.FromString(data))
        except Exception as error:
            self.end(typed(error, f"reading from {self.source.address}"))

    def _answered(self, response: peer_pb2.ExchangeResponse) -> None:
        for answered in self._requests.answered(response):
            self._take(answered)
        self._progress()
        self._owe()
        self._note_idle()

    def _take(self, answered: Answered) -> None:
        """Hand on the answer to one that waited."""
        one, error = answered.waiting, answered.error
        if isinstance(one, Brought):
            one.settle(error)
        elif isinstance(one, Asked):
            if error is not None:
                one.sink.fail(error)
            elif one.sink.is_quick:
                links.land(one.sink, answered.data)
            else:
                self._peers.movers.submit(links.land, one.sink, answered.data)

    def _owe(self) -> None:
        """Send the receipts that are due, and the others after a while."""
        self._flush()
        if self._receipts is None and self._requests.owes_receipts:
            self._receipts = self._loop.call_later(RECEIPT_SECONDS, self._tell)

    def _tell(self) -> None:
        self._receipts = None
        if self._error is None:
            self._requests.be_due()
            self._flush()

    async def _join(self, stream: JoinedStream, offer: direct_pb2.DirectOffer) -> None:
        """Have the stream go on by a connection of its own, if there can be one."""
        request = direct_pb2.DirectRequest(exchange=direct_pb2.ExchangeConnection())
        silence_seconds = self._peers.silence_seconds
        try:
            found = decode(offer, DirectOffer)
            ask = partial(open_offered, self._address, found, request, silence_seconds)
            stream.begin(await asyncio.to_thread(ask))
        except HeliographError as error:
            logger.debug("values of %s come by gRPC: %s", self.source.address, error.message)

    # Large values

    def _bulk_channel(self) -> aio.Channel:
        if self._bulk is None:
            self._bulk = self._channel()
        return self._bulk

    async def _pull_large(self, sink: Sink) -> None:
        error: HeliographError | None = None
        try:
            while not await self._tried(partial(self._pull_once, sink)):
                pass
        except asyncio.CancelledError:
            error = self._error or unneeded()
        except Exception as failure:
            error = self._error_of(failure, "pulling from")
            self._requests.unneeded(sink)
            self._flush()
        if error is not None:
            sink.fail(error)
        self._pulled.pop(sink, None)

    async def _tried(self, attempt: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Make an attempt once there is a connection. Return False if the connection broke: then it
        is worth another one. Raises what the attempt raises, and CancelledError with the link."""
        await self._is_there.wait()
        if self._error is not None:
            raise asyncio.CancelledError
        generation = self._generation
        try:
            await attempt()
        except grpc.RpcError as broken:
            if not self._may_mend(broken):
                raise
            self._failed(broken, generation)
            return False
        except (asyncio.CancelledError, asyncio.InvalidStateError, aio.UsageError, aio.InternalError):
            task = asyncio.current_task()
            # gRPC raises these for calls of channels that are closed here.
            if (task is not None and task.cancelling()) or generation == self._generation:
                raise
            return False
        self._progress()
        return True

    def _error_of(self, failure: Exception, what: str) -> HeliographError:
        if isinstance(failure, grpc.RpcError):
            return links.error_of(failure, self.source)
        return typed(failure, f"{what} {self.source.address}")

    async def _pull_once(self, sink: Sink) -> None:
        if sink.received_bytes >= sink.size_bytes:
            sink.finish()
            return
        method: Any = self._bulk_channel().unary_stream(links.PULL, None, None)
        call = method(links.pull_request(self.source, sink, self._peers.next_attempt()))
        try:
            await self._receive(call, sink)
        finally:
            call.cancel()

    async def _receive(self, call: Any, sink: Sink) -> None:
        while (data := await call.read()) is not aio.EOF:
            piece = decode_download(data)
            if piece.size_bytes != sink.size_bytes:
                raise links.wrong_size(piece.size_bytes, sink.size_bytes)
            await self._until_ready(sink.ready)
            if sink.is_quick:
                continues = sink.write(piece.offset_bytes, piece.data)
            else:
                write = partial(sink.write, piece.offset_bytes, piece.data)
                continues = await self._loop.run_in_executor(self._peers.movers, write)
            if not continues:
                return
            self._progress()
            self._requests.received(sink, piece.data.nbytes)
            self._owe()
        sink.finish()

    async def _until_ready(self, ready: Callable[[Callable[[], None]], bool]) -> None:
        event = asyncio.Event()
        while not ready(partial(_set_soon, self._loop, event)):
            await event.wait()
            event.clear()

    async def _push_large(self, edge: Edge, run: int, value: OutgoingValue, done: Done) -> None:
        error: HeliographError | None = None
        is_again = False
        try:
            while not await self._tried(partial(self._push_once, edge, run, value, is_again)):
                is_again = True
        except asyncio.CancelledError:
            error = self._error or CancelledError("the daemon is shutting down")
        except Exception as failure:
            error = self._error_of(failure, "pushing to")
        value.drop()
        done(error)

    async def _push_once(self, edge: Edge, run: int, value: OutgoingValue, is_again: bool) -> None:
        attempt = self._peers.next_attempt()
        first = links.push_request(self.source, edge, run, value.size_bytes, attempt, again=is_again)
        call: Any = self._bulk_channel().stream_stream(links.PUSH, None, None)()
        #: The byte to begin with, which the other side tells of another attempt.
        start: asyncio.Future[int] = self._loop.create_future()
        if not is_again:
            start.set_result(0)
        # A write may never return after a break, but a read does.
        sending = self._loop.create_task(_send(call, first, value, start))
        try:
            while not value.is_taken and (data := await call.read()) is not aio.EOF:
                received_bytes = peer_pb2.PushResponse.FromString(data).received_bytes
                value.acknowledge(received_bytes)
                self._progress()
                if not start.done():
                    start.set_result(received_bytes)
        except asyncio.CancelledError:
            if not sending.done() or (error := sending.result()) is None:
                raise
            raise error from None
        finally:
            call.cancel()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        if not value.is_taken:
            raise ProtocolError(f"{self.source.address} took a value that was not complete")

    # Breaks

    def _progress(self) -> None:
        self._redialling.progressed()

    def _may_mend(self, broken: grpc.RpcError) -> bool:
        is_break, is_refusal = links.is_break(broken), links.is_refusal(broken)
        return self._redialling.may_mend(is_break=is_break, is_refusal=is_refusal)

    def _failed(self, broken: grpc.RpcError, generation: int) -> None:
        error = links.error_of(broken, self.source)
        if self._may_mend(broken):
            self._broke(error, generation)
        elif generation == self._generation:
            self.end(error)

    def _broke(self, error: HeliographError, generation: int) -> None:
        """Have the connections made again, if anything waits for that and there is time."""
        if self._error is not None or generation != self._generation or self._redialling.is_away:
            return
        is_needed = self._requests.waiting or self._tasks
        pause = self._redialling.broke(self._loop.time()) if is_needed else None
        if pause is None:
            self.end(error)
            return
        logger.info("the connection broke, and is made again: %s", error.message)
        self._generation += 1
        self._is_there.clear()
        self._requests.broke()
        self._redials = self._loop.create_task(self._redial(error, pause))

    async def _redial(self, error: HeliographError, pause: float | None) -> None:
        await self._hang_up()
        # The write under way of a stream that broke may never end.
        self._is_written = asyncio.Event()
        self._is_written.set()
        while pause is not None and (self._requests.waiting or self._tasks):
            await asyncio.sleep(pause)
            try:
                await self._dial()
            except grpc.RpcError as broken:
                error = links.error_of(broken, self.source)
                if not self._may_mend(broken):
                    break
            except HeliographError as failure:
                error = failure
                break
            else:
                self._redialling.back(self._loop.time())
                self._is_there.set()
                self._flush()
                return
            pause = self._redialling.broke(self._loop.time())
        self.end(error)

    async def _dial(self) -> None:
        """Make a connection. Raises gRPC's error, and that of a daemon that is gone for sure."""
        error = await self._loop.run_in_executor(None, links.gone, self.source, self._redialling.was_there)
        if error is not None:
            raise error
        channel = self._new_channel()
        try:
            echo: Any = channel.unary_unary(
                links.ECHO, peer_pb2.EchoRequest.SerializeToString, peer_pb2.EchoResponse.FromString
            )
            answer = await echo(peer_pb2.EchoRequest(), timeout=links.DIAL_SECONDS)
            links.check_incarnation(self.source, answer.incarnation)
        except BaseException:
            await channel.close()
            raise
        self._channels.append(channel)
        self._bulk = channel

    async def _hang_up(self) -> None:
        """Close what there is of connections."""
        call, self._call, self._bulk = self._call, None, None
        stream, self._stream = self._stream, None
        channels, self._channels = self._channels, []
        if stream is not None:
            stream.close()
        if call is not None:
            call.cancel()
        for channel in channels:
            await channel.close()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)

    # The end

    def _note_idle(self) -> None:
        """Close the link if it stays unused for a while."""
        is_used = self._requests.waiting or self._tasks
        if self._error is None and self._idle is None and not is_used:
            error = CancelledError("the link was idle")
            self._idle = self._loop.call_later(self._peers.idle_seconds, self.end, error)

    def end(self, error: HeliographError) -> None:
        """Fail all requests with this error, and close the link. Idempotent."""
        if self._error is not None:
            return
        self._error = error
        self._peers.drop(self)
        for timer in (self._idle, self._receipts):
            if timer is not None:
                timer.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        for one in self._requests.end():
            self._take(Answered(one, b"", error))
        self._closing = self._loop.create_task(self._close())

    async def _close(self) -> None:
        if self._redials is not None:
            # Unless it is the one that ended the link.
            self._redials.cancel()
            await asyncio.gather(self._redials, return_exceptions=True)
        await self._hang_up()
        # gRPC ends the write with the call, and needs the loop for that.
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._is_written.wait()

    async def ended(self) -> None:
        """Wait until all its tasks have ended."""
        tasks = [*self._tasks, self._closing] if self._closing is not None else [*self._tasks]
        await asyncio.gather(*tasks, *self._joining, return_exceptions=True)


async def taken(
    value: OutgoingValue, loop: asyncio.AbstractEventLoop, offset_bytes: int = 0
) -> AsyncIterator[bytes]:
    """The messages of a value from an offset on, as they are made. Raises as
    `OutgoingValue.piece`."""
    event = asyncio.Event()
    while True:
        piece = value.piece(offset_bytes, partial(_set_soon, loop, event))
        if piece is None:
            await event.wait()
            event.clear()
            continue
        yield piece.message
        offset_bytes += piece.size_bytes
        if offset_bytes >= value.size_bytes:
            return


async def _send(
    call: Any, first: bytes, value: OutgoingValue, start: asyncio.Future[int]
) -> HeliographError | None:
    """Write the messages of a value that is pushed. If the value fails, cancel the call and return
    the error."""
    # Other errors of writes are those of the call, which its reader meets.
    with suppress(grpc.RpcError, asyncio.InvalidStateError, aio.UsageError, aio.InternalError):
        await call.write(first)
        offset_bytes = await start
        try:
            if offset_bytes < value.size_bytes:
                async for message in taken(value, asyncio.get_running_loop(), offset_bytes):
                    await call.write(message)
        except HeliographError as error:
            if not value.is_taken:
                call.cancel()
                return error
        await call.done_writing()
    return None


def _set_soon(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set an event from any thread."""
    try:
        loop.call_soon_threadsafe(event.set)
    except RuntimeError:
        pass  # the loop is closed, and no task waits


def _give_up(value: OutgoingValue, done: Done, error: HeliographError) -> None:
    value.drop()
    done(error)
