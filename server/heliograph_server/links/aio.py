"""Links to other daemons on an event loop. Methods that any thread may call say so."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import grpc
from grpc import aio

from heliograph.transport.channels import open_aio_channel
from heliograph.transport.direct.opening import open_offered
from heliograph_proto.addresses import Shown, nothing_shown
from heliograph_proto.codec import decode, decode_error
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
from heliograph_server.resources.failures import typed

logger = logging.getLogger(__name__)

#: How long a link that closes waits for the write under way.
CLOSE_SECONDS = 5.0

#: Receives the answer to a request or a push: its bytes, or an error.
_Waiting: TypeAlias = Callable[[bytes | HeliographError], None]


class LoopPeers:
    """`PeerLinks` of an event loop. `movers` are threads for devices that are slow to write."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        movers: Executor,
        silence_seconds: float = links.SILENCE_SECONDS,
        idle_seconds: float = links.IDLE_SECONDS,
        shown: Shown = nothing_shown,
    ) -> None:
        """`shown` returns the credentials presented to other daemons."""
        self.loop = loop
        self.shown = shown
        self.movers = movers
        self.silence_seconds = silence_seconds
        self.idle_seconds = idle_seconds
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
        options = links.channel_options(peers.silence_seconds)
        self._address = links.address_of(source.address)
        shown = peers.shown(source.address)
        self._new_channel = partial(open_aio_channel, self._address, options, shown)
        self._channels: list[aio.Channel] = []
        self._call: Any = None
        #: The call's messages, which may go on beside gRPC.
        self._stream: JoinedStream | None = None
        self._reader: asyncio.Task[None] | None = None
        self._joining: asyncio.Task[None] | None = None
        self._bulk: aio.Channel | None = None
        self._number = 0
        self._waiting: dict[int, _Waiting] = {}
        #: The number of a sink's request, or the task that pulls it.
        self._pulled: dict[Sink, int | asyncio.Task[None]] = {}
        self._request = peer_pb2.ExchangeRequest()
        #: Its approximate size, and full requests, which are sent first.
        self._request_bytes = 0
        self._full_requests: deque[peer_pb2.ExchangeRequest] = deque()
        #: Clear while a write is under way.
        self._is_written = asyncio.Event()
        self._is_written.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle: asyncio.TimerHandle | None = None
        self._error: HeliographError | None = None
        self._closing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<LoopLink to {self.source.address}: {len(self._waiting)} small, {len(self._tasks)} large>"

    # Requests

    def pull(self, sinks: Sequence[Sink]) -> None:
        """Request values."""
        for sink in sinks:
            if sink.size_bytes > SMALL_BYTES:
                self._pulled[sink] = self._spawn(self._pull_large(sink), sink.fail)
                continue
            number = self._pulled[sink] = self._next(partial(self._landed, sink))
            self._request.asks.add(
                number=number, edge=sink.edge.name, run=sink.run, capability=sink.edge.capability(sink.run)
            )
            self._grew(links.ASK_BYTES)
        self._flush()

    def forget(self, sinks: Sequence[Sink]) -> None:
        """Cancel the requests for values."""
        for sink in sinks:
            found = self._pulled.pop(sink, None)
            if isinstance(found, asyncio.Task):
                found.cancel()
            elif found is not None and self._waiting.pop(found, None) is not None:
                self._request.withdrawals.append(found)
        self._flush()
        self._note_idle()

    def push(self, edge: Edge, run: int, value: OutgoingValue, done: Done) -> None:
        """Push a value."""
        data = value.take_whole()
        if data is None:
            give_up = partial(_give_up, value, done)
            self._spawn(self._push_large(edge, run, value, done), give_up)
            return
        number = self._next(lambda found: done(found if isinstance(found, HeliographError) else None))
        capability = edge.capability(run)
        self._request.brings.add(number=number, edge=edge.name, run=run, capability=capability, data=data)
        self._grew(links.ASK_BYTES + len(data))
        self._flush()

    def _grew(self, size_bytes: int) -> None:
        """Begin another message when this one is as large as the other side accepts."""
        self._request_bytes += size_bytes
        if self._request_bytes >= links.MESSAGE_BYTES:
            self._full_requests.append(self._request)
            self._request, self._request_bytes = peer_pb2.ExchangeRequest(), 0

    def _next(self, waiting: _Waiting) -> int:
        self._number += 1
        self._waiting[self._number] = waiting
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        return self._number

    def _spawn(self, coroutine: Any, give_up: Callable[[HeliographError], None]) -> asyncio.Task[None]:
        """Start a task. `give_up` receives the error if the task is cancelled before it has
        begun."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
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
        request = self._full_requests[0] if self._full_requests else self._request
        if not self._is_written.is_set() or not (request.asks or request.brings or request.withdrawals):
            return
        if self._full_requests:
            self._full_requests.popleft()
        else:
            self._request, self._request_bytes = peer_pb2.ExchangeRequest(), 0
        if self._call is None:
            channel = self._new_channel()
            self._channels.append(channel)
            self._call = channel.stream_stream(links.EXCHANGE, None, None)()
            self._stream = JoinedStream(self._call, links.MOST_MESSAGE_BYTES)
            request.incarnation = self.source.incarnation
            self._reader = self._loop.create_task(self._read(self._stream))
        assert self._stream is not None
        self._is_written.clear()
        begin(self._stream.write(request.SerializeToString()), self._written)

    def _written(self, error: BaseException | None) -> None:
        self._is_written.set()
        if error is not None:
            # The reader meets the same error and fails all requests.
            logger.debug("writing to %s failed: %s", self.source.address, error)
        elif self._error is None:
            self._flush()

    async def _read(self, stream: JoinedStream) -> None:
        try:
            while (data := await stream.read()) is not aio.EOF:
                response = peer_pb2.ExchangeResponse.FromString(data)
                if response.HasField("direct") and self._joining is None:
                    offer = decode(response.direct, DirectOffer)
                    self._joining = self._loop.create_task(self._join(stream, offer))
                for answer in response.answers:
                    if (waiting := self._waiting.pop(answer.number, None)) is not None:
                        waiting(decode_error(answer.error) if answer.HasField("error") else answer.data)
                self._note_idle()
            self.end(lost(self.source, "it ended the stream"))
        except grpc.RpcError as broken:
            self.end(links.error_of(broken, self.source))
        except Exception as error:
            self.end(typed(error, f"reading from {self.source.address}"))

    async def _join(self, stream: JoinedStream, offer: DirectOffer) -> None:
        """Have the stream go on by a connection of its own, if there can be one."""
        request = direct_pb2.DirectRequest(exchange=direct_pb2.ExchangeConnection())
        ask = partial(open_offered, self._address, offer, request, self._peers.silence_seconds)
        try:
            stream.begin(await asyncio.to_thread(ask))
        except HeliographError as error:
            logger.debug("values of %s come by gRPC: %s", self.source.address, error.message)

    def _landed(self, sink: Sink, found: bytes | HeliographError) -> None:
        self._pulled.pop(sink, None)
        if isinstance(found, HeliographError):
            sink.fail(found)
        elif sink.is_quick:
            links.land(sink, found)
        else:
            self._peers.movers.submit(links.land, sink, found)

    # Large values

    def _bulk_channel(self) -> aio.Channel:
        if self._bulk is None:
            self._bulk = self._new_channel()
            self._channels.append(self._bulk)
        return self._bulk

    async def _pull_large(self, sink: Sink) -> None:
        call: Any = None
        try:
            method: Any = self._bulk_channel().unary_stream(links.PULL, None, None)
            call = method(links.pull_request(self.source, sink.edge, sink.run))
            await self._receive(call, sink)
        except grpc.RpcError as broken:
            sink.fail(links.error_of(broken, self.source))
        except asyncio.CancelledError:
            sink.fail(self._error or unneeded())
        except Exception as error:
            sink.fail(typed(error, f"pulling from {self.source.address}"))
        finally:
            self._pulled.pop(sink, None)
            if call is not None:
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
        sink.finish()

    async def _until_ready(self, ready: Callable[[Callable[[], None]], bool]) -> None:
        event = asyncio.Event()
        while not ready(partial(_set_soon, self._loop, event)):
            await event.wait()
            event.clear()

    async def _push_large(self, edge: Edge, run: int, value: OutgoingValue, done: Done) -> None:
        call: Any = None
        error: HeliographError | None = None
        try:
            call = self._bulk_channel().stream_unary(links.PUSH, None, None)()
            await call.write(links.push_request(self.source, edge, run, value.size_bytes))
            async for message in taken(value, self._loop):
                await call.write(message)
            await call.done_writing()
            await call
        except grpc.RpcError as broken:
            error = links.error_of(broken, self.source)
        except asyncio.InvalidStateError:
            error = await self._status_of(call)
        except asyncio.CancelledError:
            error = self._error or CancelledError("the daemon is shutting down")
        except Exception as failure:
            error = typed(failure, f"pushing to {self.source.address}")
        finally:
            value.drop()
            if call is not None:
                call.cancel()
            done(error)

    async def _status_of(self, call: Any) -> HeliographError:
        """The error with which the other side ended a call during a write."""
        try:
            await call
        except grpc.RpcError as broken:
            return links.error_of(broken, self.source)
        return ProtocolError(f"{self.source.address} took a value that was not complete")

    # The end

    def _note_idle(self) -> None:
        """Close the link if it stays unused for a while."""
        if self._error is None and self._idle is None and not self._waiting and not self._tasks:
            error = CancelledError("the link was idle")
            self._idle = self._loop.call_later(self._peers.idle_seconds, self.end, error)

    def end(self, error: HeliographError) -> None:
        """Fail all requests with this error, and close the link. Idempotent."""
        if self._error is not None:
            return
        self._error = error
        self._peers.drop(self)
        if self._idle is not None:
            self._idle.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        waiting, self._waiting = self._waiting, {}
        for one in waiting.values():
            one(error)
        self._closing = self._loop.create_task(self._close())

    async def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._call.cancel()
        for channel in self._channels:
            await channel.close()
        # gRPC ends the write with the call, and needs the loop for that.
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._is_written.wait()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)

    async def ended(self) -> None:
        """Wait until all its tasks have ended."""
        others = [one for one in (self._closing, self._joining) if one is not None]
        await asyncio.gather(*self._tasks, *others, return_exceptions=True)


async def taken(value: OutgoingValue, loop: asyncio.AbstractEventLoop) -> AsyncIterator[bytes]:
    """The messages of a value, as they are made. Raises the error of a failed value."""
    event = asyncio.Event()
    while not value.is_taken:
        message = value.take(partial(_set_soon, loop, event))
        if message is not None:
            yield message
        else:
            await event.wait()
            event.clear()


def _set_soon(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set an event from any thread."""
    try:
        loop.call_soon_threadsafe(event.set)
    except RuntimeError:
        pass  # the loop is closed, and no task waits


def _give_up(value: OutgoingValue, done: Done, error: HeliographError) -> None:
    value.drop()
    done(error)
