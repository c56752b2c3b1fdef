"""Links to other daemons on threads, for a process without an event loop of its own.

A link whose connections break has them made again. Meanwhile its requests wait; then they go again,
and large values go on behind the bytes that are there.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import grpc

from heliograph.transport.channels import open_channel
from heliograph_proto.addresses import Shown, nothing_shown
from heliograph_proto.codec.bulk import decode_download
from heliograph_proto.errors import CancelledError, HeliographError, ProtocolError
from heliograph_proto.plans import Edge, PeerSource, lost
from heliograph_proto.v1 import peer_pb2
from heliograph_server.exchange.incoming import Done, Sink
from heliograph_server.exchange.outgoing import SMALL_BYTES, OutgoingValue, unneeded
from heliograph_server.links import links
from heliograph_server.links.redialling import LEASE_SECONDS, Redialling
from heliograph_server.links.requests import RECEIPT_SECONDS, Answered, Asked, Brought, LinkRequests
from heliograph_server.resources.failures import typed
from heliograph_server.resources.timers import Deadlines

#: The time that the threads of a link have to end.
END_SECONDS = 5.0


class BlockingPeers:
    """`PeerLinks` on threads. Thread-safe. `close` ends the threads."""

    def __init__(
        self,
        silence_seconds: float = links.SILENCE_SECONDS,
        shown: Shown = nothing_shown,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        """`shown` returns the credentials presented to other daemons. `lease_seconds`: the time for
        which a broken connection is made again."""
        self.silence_seconds = silence_seconds
        self.shown = shown
        self.lease_seconds = lease_seconds
        #: The numbers of calls and streams, which take the place of earlier ones.
        self.next_attempt = itertools.count(1).__next__
        self.timers = Deadlines()
        self._lock = threading.Lock()
        self._links: dict[PeerSource, BlockingLink] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<BlockingPeers {len(self._links)} links>"

    def pull(self, source: PeerSource, sinks: Sequence[Sink]) -> None:
        """As `PeerLinks.pull`."""
        try:
            while not self._link(source).pull(sinks):
                pass
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
            while not self._link(destination).push(edge, run, value, done):
                pass
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
        """Forget a link that has ended. The next use opens another one."""
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
        self.timers.close()


class BlockingLink:
    """The link to one daemon: one thread reads the small values, and each large value has a
    thread."""

    def __init__(self, peers: BlockingPeers, source: PeerSource) -> None:
        self.source = source
        self._peers = peers
        self._address = links.address_of(source.address)
        # A link without credentials that may go there is none.
        peers.shown(source.address)
        self._lock = threading.Lock()
        #: Notified when the connection is there again, when a value is not needed, and at the end.
        self._changed = threading.Condition(self._lock)
        self._requests = LinkRequests(source, peers.next_attempt)
        self._redialling = Redialling(peers.lease_seconds, random.random)
        #: Counts the connections, so that a break is noted once.
        self._generation = 0
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._channels: list[grpc.Channel] = []
        self._bulk: grpc.Channel | None = None
        self._call: Any = None
        self._threads: set[threading.Thread] = set()
        #: Calls of large values that are still needed. None: not made yet.
        self._calls: dict[object, Any] = {}
        self._owes = False
        self._error: HeliographError | None = None

    def __repr__(self) -> str:
        waiting = len(self._requests.waiting)
        return f"<BlockingLink to {self.source.address}: {waiting} small, {len(self._calls)} large>"

    def pull(self, sinks: Sequence[Sink]) -> bool:
        """Request values. Return False if the link has ended: there is another one."""
        with self._lock:
            if self._error is not None:
                return False
            for sink in sinks:
                if sink.size_bytes > SMALL_BYTES:
                    self._calls[sink] = None
                    self._start(partial(self._pull_large, sink))
                else:
                    self._requests.ask(sink)
            self._flush()
        return True

    def forget(self, sinks: Sequence[Sink]) -> None:
        """Cancel the requests for values."""
        with self._lock:
            calls = []
            for sink in sinks:
                if sink in self._calls:
                    calls.append(self._calls.pop(sink))
                    self._requests.unneeded(sink)
                else:
                    self._requests.withdraw(sink)
            self._changed.notify_all()
            if self._error is None:
                self._flush()
        for call in calls:
            if call is not None:
                call.cancel()

    def push(self, edge: Edge, run: int, value: OutgoingValue, done: Done) -> bool:
        """Push a value. Return False as `pull`."""
        data = value.whole
        with self._lock:
            if self._error is not None:
                return False
            if data is None:
                self._calls[value] = None
                self._start(partial(self._push_large, edge, run, value, done))
            else:
                self._requests.bring(edge, run, value, data, done)
                self._flush()
        return True

    # Called with the lock held

    def _flush(self) -> None:
        """Send the gathered requests."""
        if self._redialling.is_away or not self._requests.is_ready:
            return
        if self._call is None:
            self._requests.begin()
            self._outgoing = SimpleQueue()
            method: Any = self._channel().stream_stream(links.EXCHANGE, None, None)
            self._call = method(iter(self._outgoing.get, None))
            self._start(partial(self._read, self._call, self._generation))
        while self._requests.is_ready:
            self._outgoing.put(self._requests.next())

    def _new_channel(self) -> grpc.Channel:
        # The credentials may have changed since the last one.
        shown = self._peers.shown(self.source.address)
        return open_channel(self._address, links.channel_options(self._peers.silence_seconds), shown)

    def _channel(self) -> grpc.Channel:
        """Another one, which ends with the link or with its next break."""
        self._channels.append(made := self._new_channel())
        return made

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
            self._bulk = self._channel()
        return self._bulk

    def _progress(self) -> None:
        self._redialling.progressed()

    def _owe(self) -> None:
        """Send the receipts that are due, and the others after a while."""
        if self._error is not None:
            return
        self._flush()
        if self._requests.owes_receipts and not self._owes:
            self._owes = True
            self._peers.timers.after(RECEIPT_SECONDS, self._tell)

    # Run on the link's threads

    def _tell(self) -> None:
        with self._lock:
            self._owes = False
            if self._error is None:
                self._requests.be_due()
                self._flush()

    def _read(self, call: Any, generation: int) -> None:
        try:
            for data in call:
                with self._lock:
                    found = self._requests.answered(peer_pb2.ExchangeResponse.FromString(data))
                    self._progress()
                    self._owe()
                for answered in found:
                    _take(answered)
            self._broke(lost(self.source, "it ended the stream"), generation)
        except grpc.RpcError as broken:
            self._failed(broken, generation)
        except Exception as error:
            self.end(typed(error, f"reading from {self.source.address}"))

    def _begin(self, key: object, name: str, begin: Callable[[Any], Any]) -> Any:
        """Begin the call of a large value, which ends with the connection.

        Raises CancelledError if the value is no longer needed, and the error of a broken link.
        """
        with self._lock:
            if self._error is not None:
                raise self._error.at(self._error.origin)
            if key not in self._calls:
                raise unneeded()
            channel = self._bulk_channel()
            make: Any = channel.unary_stream if name == links.PULL else channel.stream_stream
            self._calls[key] = call = begin(make(name, None, None))
            return call

    def _try_until_done(self, key: object, attempt: Callable[[], None]) -> None:
        """Make attempts, each once there is a connection, until one succeeds. Raises the error of
        one that failed but not by a break, and the errors of `_begin`."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: not self._redialling.is_away or self._error is not None or key not in self._calls
                )
                generation = self._generation
            try:
                attempt()
            except grpc.RpcError as broken:
                # Also where this end cancelled it, after which `_begin` raises the reason.
                if not self._may_mend(broken):
                    raise
                if self._is_needed(key):
                    self._failed(broken, generation)
            else:
                with self._lock:
                    self._progress()
                return

    def _is_needed(self, key: object) -> bool:
        with self._lock:
            return key in self._calls

    def _error_of(self, failure: Exception, what: str) -> HeliographError:
        if isinstance(failure, grpc.RpcError):
            return self._error or links.error_of(failure, self.source)
        return typed(failure, f"{what} {self.source.address}")

    def _pull_large(self, sink: Sink) -> None:
        try:
            self._try_until_done(sink, partial(self._pull_once, sink))
        except Exception as failure:
            error = self._error_of(failure, "pulling from")
            with self._lock:
                if self._error is None:
                    self._requests.unneeded(sink)
                    self._flush()
            sink.fail(error)
        finally:
            self._end_call(sink)

    def _pull_once(self, sink: Sink) -> None:
        if sink.received_bytes >= sink.size_bytes:
            sink.finish()
            return
        request = links.pull_request(self.source, sink, self._peers.next_attempt())
        call = self._begin(sink, links.PULL, lambda method: method(request))
        try:
            self._receive(call, sink)
        finally:
            call.cancel()

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
            with self._lock:
                self._progress()
                self._requests.received(sink, piece.data.nbytes)
                self._owe()
        sink.finish()

    def _push_large(self, edge: Edge, run: int, value: OutgoingValue, done: Done) -> None:
        error: HeliographError | None = None
        is_again: list[bool] = []
        try:
            self._try_until_done(value, partial(self._push_once, edge, run, value, is_again))
        except Exception as failure:
            error = self._error_of(failure, "pushing to")
        finally:
            value.drop()
            self._end_call(value)
            done(error)

    def _push_once(self, edge: Edge, run: int, value: OutgoingValue, is_again: list[bool]) -> None:
        attempt = self._peers.next_attempt()
        first = links.push_request(self.source, edge, run, value.size_bytes, attempt, again=bool(is_again))
        messages = _Messages(first, value, self._cancel_of(value), is_again=bool(is_again))
        is_again.append(True)
        call = self._begin(value, links.PUSH, lambda method: method(iter(messages)))
        try:
            for data in call:
                messages.received(peer_pb2.PushResponse.FromString(data).received_bytes)
                with self._lock:
                    self._progress()
        except grpc.RpcError:
            if messages.error is not None:
                raise messages.error from None
            raise
        finally:
            messages.end()
            call.cancel()
        if not value.is_taken:
            raise ProtocolError(f"{self.source.address} took a value that was not complete")

    def _cancel_of(self, key: object) -> Callable[[], None]:
        def cancel() -> None:
            with self._lock:
                call = self._calls.get(key)
            if call is not None:
                call.cancel()

        return cancel

    def _end_call(self, key: object) -> None:
        with self._lock:
            self._calls.pop(key, None)

    # Breaks

    def _may_mend(self, broken: grpc.RpcError) -> bool:
        is_break, is_refusal = links.is_break(broken), links.is_refusal(broken)
        with self._lock:
            return self._redialling.may_mend(is_break=is_break, is_refusal=is_refusal)

    def _failed(self, broken: grpc.RpcError, generation: int) -> None:
        error = links.error_of(broken, self.source)
        if self._may_mend(broken):
            self._broke(error, generation)
        elif generation == self._generation:
            self.end(error)

    def _broke(self, error: HeliographError, generation: int) -> None:
        """Have the connections made again, if anything waits for that and there is time."""
        with self._lock:
            if self._error is not None or generation != self._generation or self._redialling.is_away:
                return
            is_needed = self._requests.waiting or self._calls
            pause = self._redialling.broke(time.monotonic()) if is_needed else None
            if pause is not None:
                self._generation += 1
                self._requests.broke()
                closing = self._let_go()
                self._start(partial(self._redial, error, pause, closing))
                return
            # Under the same lock, so that no new request meets the error.
            tell = self._ended(error)
        tell()

    def _let_go(self) -> Callable[[], None]:
        """Forget the connections. Return what closes them, to be called without the lock."""
        calls, channels = (self._call, *self._calls.values()), tuple(self._channels)
        self._outgoing.put(None)
        self._call, self._bulk = None, None
        self._channels.clear()
        return partial(_close, calls, channels)

    def _redial(self, error: HeliographError, pause: float | None, closing: Callable[[], None]) -> None:
        closing()
        while pause is not None:
            with self._changed:
                is_over = self._changed.wait_for(self._is_idle, pause)
                tell = self._ended(error) if is_over else None
            if tell is not None:
                tell()
                return
            try:
                self._dial()
            except grpc.RpcError as broken:
                error = links.error_of(broken, self.source)
                if not self._may_mend(broken):
                    break
            except HeliographError as failure:
                error = failure
                break
            else:
                return
            with self._lock:
                pause = self._redialling.broke(time.monotonic())
        self.end(error)

    def _is_idle(self) -> bool:
        return self._error is not None or not (self._requests.waiting or self._calls)

    def _dial(self) -> None:
        """Make a connection. Raises gRPC's error, and that of a daemon that is gone for sure."""
        if (error := links.gone(self.source, self._redialling.was_there)) is not None:
            raise error
        channel = self._new_channel()
        try:
            echo: Any = channel.unary_unary(
                links.ECHO, peer_pb2.EchoRequest.SerializeToString, peer_pb2.EchoResponse.FromString
            )
            answer = echo(peer_pb2.EchoRequest(), timeout=links.DIAL_SECONDS)
            links.check_incarnation(self.source, answer.incarnation)
        except BaseException:
            channel.close()
            raise
        with self._changed:
            self._channels.append(channel)
            self._bulk = channel
            self._redialling.back(time.monotonic())
            self._changed.notify_all()
            closing = None if self._error is None else self._let_go()
            if closing is None:
                self._flush()
        if closing is not None:
            closing()

    # The end

    def end(self, error: HeliographError) -> None:
        """Fail all requests with this error, and close the link. Idempotent."""
        with self._lock:
            tell = self._ended(error)
        tell()

    def _ended(self, error: HeliographError) -> Callable[[], None]:
        """End the link, with the lock held. Return what tells those who wait, and closes the
        connections, to be called without the lock."""
        if self._error is not None:
            return lambda: None
        self._error = error
        self._peers.drop(self)
        waiting = self._requests.end()
        closing = self._let_go()
        self._changed.notify_all()

        def tell() -> None:
            for one in waiting:
                _take(Answered(one, b"", error))
            closing()

        return tell

    def join(self) -> None:
        """Wait for the threads of a link that has ended."""
        with self._lock:
            threads = tuple(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(END_SECONDS)


def _take(answered: Answered) -> None:
    """Hand on the answer to one that waited."""
    one, error = answered.waiting, answered.error
    if isinstance(one, Brought):
        one.settle(error)
    elif isinstance(one, Asked):
        if error is not None:
            one.sink.fail(error)
        else:
            links.land(one.sink, answered.data)


def _close(calls: Sequence[Any], channels: Sequence[grpc.Channel]) -> None:
    for call in calls:
        if call is not None:
            call.cancel()
    for channel in channels:
        channel.close()


class _Messages:
    """The messages of one call that pushes a value. gRPC's thread takes them, another one notes
    what arrived."""

    def __init__(
        self, first: bytes, value: OutgoingValue, cancel: Callable[[], None], *, is_again: bool
    ) -> None:
        """`cancel` cancels the call. `is_again`: the other side says first what it has."""
        self._first, self._value, self._cancel = first, value, cancel
        self._woken = threading.Event()
        self._start: int | None = None if is_again else 0
        self._is_over = False
        #: The error of a value that failed.
        self.error: HeliographError | None = None

    def received(self, received_bytes: int) -> None:
        """Note the bytes that are there."""
        self._value.acknowledge(received_bytes)
        if self._start is None:
            self._start = received_bytes
            self._woken.set()

    def end(self) -> None:
        """End the messages."""
        self._is_over = True
        self._woken.set()

    def __iter__(self) -> Iterator[bytes]:
        yield self._first
        while self._start is None and not self._is_over:
            self._wait()
        offset_bytes = self._start or 0
        while not (self._is_over or self._value.is_taken):
            try:
                piece = self._value.piece(offset_bytes, self._woken.set)
            except HeliographError as error:
                self.error = None if self._is_over or self._value.is_taken else error
                self._cancel()
                return
            if piece is None:
                self._wait()
                continue
            yield piece.message
            offset_bytes += piece.size_bytes
            if offset_bytes >= self._value.size_bytes:
                return

    def _wait(self) -> None:
        self._woken.wait()
        self._woken.clear()
