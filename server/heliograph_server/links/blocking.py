"""Links to other daemons on threads, for a process without an event loop of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

import grpc

from heliograph.transport.channels import open_channel
from heliograph_proto.addresses import Shown, nothing_shown
from heliograph_proto.codec import decode_error
from heliograph_proto.codec.bulk import decode_download
from heliograph_proto.errors import CancelledError, HeliographError, MemberLostError
from heliograph_proto.plans import Edge, PeerSource, lost
from heliograph_proto.v1 import peer_pb2
from heliograph_server.exchange.incoming import Done, Sink
from heliograph_server.exchange.outgoing import SMALL_BYTES, OutgoingValue, unneeded
from heliograph_server.links import links
from heliograph_server.resources.failures import typed

#: The time that the threads of a link have to end.
END_SECONDS = 5.0

_Waiting: TypeAlias = Callable[[bytes | HeliographError], None]


class BlockingPeers:
    """`PeerLinks` on threads. Thread-safe. `close` ends the threads."""

    def __init__(self, silence_seconds: float = links.SILENCE_SECONDS, shown: Shown = nothing_shown) -> None:
        """`shown` returns the credentials presented to other daemons."""
        self.silence_seconds = silence_seconds
        self.shown = shown
        self._lock = threading.Lock()
        self._links: dict[PeerSource, BlockingLink] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<BlockingPeers {len(self._links)} links>"

    def pull(self, source: PeerSource, sinks: Sequence[Sink]) -> None:
        """As `PeerLinks.pull`."""
        try:
            self._link(source).pull(sinks)
        except Exception as error:
            for sink in sinks:
                sink.fail(typed(error, f"pulling from {source.address}"))

    def forget(self, source: PeerSource, sinks: Sequence[Sink]) -> None:
        """As `PeerLinks.forget`."""
        with self._lock:
            link = self._links.get(source)
        if link is not None:
            link.forget(sinks)

    def push(self, destination: PeerSource, edge: Edge, run: int, value: OutgoingValue, done: Done) -> None:
        """As `PeerLinks.push`."""
        try:
            self._link(destination).push(edge, run, value, done)
        except Exception as error:
            value.drop()
            done(typed(error, f"pushing to {destination.address}"))

    def _link(self, source: PeerSource) -> BlockingLink:
        with self._lock:
            if self._is_closed:
                raise CancelledError("all links to other daemons are closed")
            if source not in self._links:
                if len(self._links) >= links.max_links():
                    raise links.too_many_links(source)
                self._links[source] = BlockingLink(self, source)
            return self._links[source]

    def drop(self, link: BlockingLink) -> None:
        """Forget a broken link. The next use opens another one."""
        with self._lock:
            if self._links.get(link.source) is link:
                del self._links[link.source]

    def close(self) -> None:
        """End all links, and wait until their threads have ended. Idempotent."""
        with self._lock:
            self._is_closed = True
            found = tuple(self._links.values())
        for link in found:
            link.end(CancelledError("all links to other daemons are closed"))
        for link in found:
            link.join()


class BlockingLink:
    """The link to one daemon: one thread reads the small values, and each large value has a
    thread."""

    def __init__(self, peers: BlockingPeers, source: PeerSource) -> None:
        self.source = source
        self._peers = peers
        options = links.channel_options(peers.silence_seconds)
        self._new_channel = partial(
            open_channel, links.address_of(source.address), options, peers.shown(source.address)
        )
        self._lock = threading.Lock()
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._channels: list[grpc.Channel] = []
        self._bulk: grpc.Channel | None = None
        self._call: Any = None
        self._threads: set[threading.Thread] = set()
        #: Calls of large values that are still needed. None: not made yet.
        self._calls: dict[object, Any] = {}
        self._numbers: dict[Sink, int] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._number = 0
        self._error: HeliographError | None = None

    def __repr__(self) -> str:
        return (
            f"<BlockingLink to {self.source.address}: {len(self._waiting)} small, {len(self._calls)} large>"
        )

    def pull(self, sinks: Sequence[Sink]) -> None:
        """Request values. Raises the error of a broken link."""
        request = peer_pb2.ExchangeRequest()
        with self._lock:
            self._check()
            for sink in sinks:
                if sink.size_bytes > SMALL_BYTES:
                    self._calls[sink] = None
                    self._start(partial(self._pull_large, sink))
                    continue
                self._numbers[sink] = number = self._next(partial(self._landed, sink))
                capability = sink.edge.capability(sink.run)
                request.asks.add(number=number, edge=sink.edge.name, run=sink.run, capability=capability)
                if len(request.asks) * links.ASK_BYTES >= links.MESSAGE_BYTES:
                    self._send(request)
                    request = peer_pb2.ExchangeRequest()
            if request.asks:
                self._send(request)

    def forget(self, sinks: Sequence[Sink]) -> None:
        """Cancel the requests for values."""
        request = peer_pb2.ExchangeRequest()
        with self._lock:
            calls = [self._calls.pop(sink, None) for sink in sinks]
            for sink in sinks:
                number = self._numbers.pop(sink, 0)
                if self._waiting.pop(number, None) is not None:
                    request.withdrawals.append(number)
            if request.withdrawals:
                self._send(request)
        for call in calls:
            if call is not None:
                call.cancel()

    def push(self, edge: Edge, run: int, value: OutgoingValue, done: Done) -> None:
        """Push a value. Raises the error of a broken link."""
        data = value.take_whole()
        with self._lock:
            self._check()
            if data is None:
                self._calls[value] = None
                self._start(partial(self._push_large, edge, run, value, done))
                return
            number = self._next(lambda found: done(found if isinstance(found, HeliographError) else None))
            request = peer_pb2.ExchangeRequest()
            capability = edge.capability(run)
            request.brings.add(number=number, edge=edge.name, run=run, capability=capability, data=data)
            self._send(request)

    # Called with the lock held

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.at(self._error.origin)

    def _next(self, waiting: _Waiting) -> int:
        self._number += 1
        self._waiting[self._number] = waiting
        return self._number

    def _send(self, request: peer_pb2.ExchangeRequest) -> None:
        if self._call is None:
            request.incarnation = self.source.incarnation
            channel = self._new_channel()
            self._channels.append(channel)
            method: Any = channel.stream_stream(links.EXCHANGE, None, None)
            self._call = method(iter(self._outgoing.get, None))
            self._start(self._read)
        self._outgoing.put(request.SerializeToString())

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._run, args=(work,), name="heliograph-peer", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _bulk_channel(self) -> grpc.Channel:
        if self._bulk is None:
            self._bulk = self._new_channel()
            self._channels.append(self._bulk)
        return self._bulk

    # Run on the link's threads

    def _read(self) -> None:
        try:
            for data in self._call:
                for answer in peer_pb2.ExchangeResponse.FromString(data).answers:
                    with self._lock:
                        waiting = self._waiting.pop(answer.number, None)
                    if waiting is not None:
                        waiting(decode_error(answer.error) if answer.HasField("error") else answer.data)
            self.end(lost(self.source, "it ended the stream"))
        except grpc.RpcError as broken:
            self.end(links.error_of(broken, self.source))
        except Exception as error:
            self.end(typed(error, f"reading from {self.source.address}"))

    def _landed(self, sink: Sink, found: bytes | HeliographError) -> None:
        with self._lock:
            self._numbers.pop(sink, None)
        if isinstance(found, HeliographError):
            sink.fail(found)
        else:
            links.land(sink, found)

    def _begin(self, key: object, name: str, begin: Callable[[Any], Any]) -> Any:
        """Begin the call of a large value, which ends with the link.

        Raises CancelledError if the value is no longer needed, and the error of a broken link.
        """
        with self._lock:
            self._check()
            if key not in self._calls:
                raise unneeded()
            channel = self._bulk_channel()
            make: Any = channel.unary_stream if name == links.PULL else channel.stream_unary
            self._calls[key] = call = begin(make(name, None, None))
            return call

    def _cancel(self, key: object) -> None:
        with self._lock:
            call = self._calls.get(key)
        if call is not None:
            call.cancel()

    def _pull_large(self, sink: Sink) -> None:
        request = links.pull_request(self.source, sink.edge, sink.run)
        call: Any = None
        try:
            call = self._begin(sink, links.PULL, lambda method: method(request))
            self._receive(call, sink)
        except grpc.RpcError as broken:
            error = self._error or links.error_of(broken, self.source)
            sink.fail(error)
            self._note(error)
        except Exception as error:
            sink.fail(typed(error, f"pulling from {self.source.address}"))
        finally:
            self._end_call(sink, call)

    def _receive(self, call: Any, sink: Sink) -> None:
        woken = threading.Event()
        for data in call:
            piece = decode_download(data)
            if piece.size_bytes != sink.size_bytes:
                raise links.wrong_size(piece.size_bytes, sink.size_bytes)
            while not sink.ready(woken.set):
                woken.wait()
                woken.clear()
            if not sink.write(piece.offset_bytes, piece.data):
                return
        sink.finish()

    def _push_large(self, edge: Edge, run: int, value: OutgoingValue, done: Done) -> None:
        error: HeliographError | None = None
        call: Any = None
        failed: list[HeliographError] = []

        def give_up(failure: HeliographError) -> None:
            failed.append(failure)
            self._cancel(value)

        try:
            first = links.push_request(self.source, edge, run, value.size_bytes)
            messages = _messages(first, value, give_up)
            call = self._begin(value, links.PUSH, lambda method: method.future(messages))
            call.result()
        except grpc.RpcError as broken:
            error = self._error or links.error_of(broken, self.source)
        except grpc.FutureCancelledError:
            error = next(iter(failed), self._error or unneeded())
        except Exception as failure:
            error = typed(failure, f"pushing to {self.source.address}")
        finally:
            value.drop()
            self._end_call(value, call)
            done(error)
            self._note(error)

    def _note(self, error: HeliographError | None) -> None:
        """End the link if a large value found that the daemon is gone. Without small values, the
        reader does not find it."""
        if isinstance(error, MemberLostError):
            self.end(error)

    def _end_call(self, key: object, call: Any) -> None:
        with self._lock:
            self._calls.pop(key, None)
        if call is not None:
            call.cancel()

    # The end

    def end(self, error: HeliographError) -> None:
        """Fail all requests with this error, and close the link. Idempotent."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            waiting, self._waiting = self._waiting, {}
            calls = tuple(self._calls.values())
        self._peers.drop(self)
        self._outgoing.put(None)
        for one in waiting.values():
            one(error)
        for call in (self._call, *calls):
            if call is not None:
                call.cancel()
        for channel in self._channels:
            channel.close()

    def join(self) -> None:
        """Wait for the threads of a link that has ended."""
        with self._lock:
            threads = tuple(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(END_SECONDS)


def _messages(
    first: bytes, value: OutgoingValue, give_up: Callable[[HeliographError], None]
) -> Iterator[bytes]:
    """The messages of a value that is pushed. A failed value calls `give_up` and ends."""
    woken = threading.Event()
    yield first
    while not value.is_taken:
        try:
            message = value.take(woken.set)
        except HeliographError as error:
            give_up(error)
            return
        if message is not None:
            yield message
        else:
            woken.wait()
            woken.clear()
