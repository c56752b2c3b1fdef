"""Bytes of tensors and contents on connections of their own: see `direct.proto`.

Bytes go straight from the system into their tensor, or from staged memory to the system, on a few
threads. A connection has a thread only while bytes come or go; between two transfers, and while its
client is slow, the event loop waits for it. After a while a busy one gives its thread to others.

The system wakes a reader when all bytes that it asked for are there (SO_RCVLOWAT), not at each
packet: that halves a reader's time, and the sender runs meanwhile. Sockets are non-blocking, since
a libuv loop makes them so; threads wait with poll().
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import suppress
from enum import Enum, auto

from google.protobuf.message import DecodeError

from heliograph_backends.host_memory.sealed import FILES
from heliograph_proto.codec import encode_error
from heliograph_proto.codec.bulk import decode_download
from heliograph_proto.codec.frames import LENGTH_BYTES, framed
from heliograph_proto.codec.packing import encodings_from
from heliograph_proto.errors import (
    CancelledError,
    DeadlineExceededError,
    HeliographError,
    LimitExceededError,
    ProtocolError,
    UnavailableError,
)
from heliograph_proto.v1 import direct_pb2
from heliograph_server.resources.failures import typed
from heliograph_server.rpc.direct.packed import PackedDownload, PackedUpload
from heliograph_server.session.bulk import DownloadReader
from heliograph_server.session.session import Session
from heliograph_server.session.staging import PlacedBytes, StagedMessages
from heliograph_server.weights.uploads import IncomingUpload

logger = logging.getLogger(__name__)

#: The connections of a session.
MOST_CONNECTIONS = 4
#: The largest request.
REQUEST_BYTES = 4096
#: The bytes of one system call.
PIECE_BYTES = 2**20
#: The time for which a thread waits for a client.
PATIENCE_SECONDS = 0.002
#: The time after which a busy connection gives its thread to others.
TURN_SECONDS = 0.02
#: The time for which the bytes of a slow client gather before they are read, unless as many as
#: asked for come sooner.
GATHER_SECONDS = 0.05
#: The bytes of a failed upload that are read, so that its client finds the answer.
MOST_DROPPED_BYTES = 64 * 2**20
#: The bytes of headers among them, at most.
MOST_HEADER_BYTES = 4096


class Next(Enum):
    """The condition under which a connection goes on."""

    THREAD = auto()
    READABLE = auto()
    WRITABLE = auto()
    #: The rest of a piece from a slow client, or what comes of it within a time.
    GATHER = auto()
    #: Its download's command.
    COMMAND = auto()
    NOTHING = auto()


class DirectTransfers:
    """The connections for bytes of all sessions, on the threads of `workers`. On the event loop."""

    def __init__(self, workers: Executor) -> None:
        self._workers = workers
        self._counts: Counter[Session] = Counter()

    def __repr__(self) -> str:
        return f"<DirectTransfers {self._counts.total()} connections>"

    def take(self, session: Session, client: socket.socket) -> None:
        """Serve a connection from now on. Raises LimitExceededError, and SessionClosedError."""
        if self._counts[session] >= MOST_CONNECTIONS:
            raise LimitExceededError(f"a session has at most {MOST_CONNECTIONS} connections for bytes")
        try:
            made = _Connection(session, client, self._workers, lambda: self._ended(session))
        except OSError as error:
            raise UnavailableError(f"the connection broke: {error.strerror}") from None
        self._counts[session] += 1
        session.when_closing[made] = lambda _: made.end()
        if session.closed is not None:
            made.end()
        # After the answer to the request.
        asyncio.get_running_loop().call_soon(made.wait_for, Next.READABLE)

    def _ended(self, session: Session) -> None:
        self._counts[session] -= 1
        if not self._counts[session]:
            del self._counts[session]
        FILES.give()


class _Connection:
    """One connection. `work` runs on a thread, at most one at a time; the rest on the event loop,
    except `end`."""

    def __init__(
        self, session: Session, client: socket.socket, workers: Executor, ended: Callable[[], None]
    ) -> None:
        client.setblocking(False)
        self._session, self._socket, self._workers = session, client, workers
        self._number = client.fileno()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(client, select.POLLIN)
        self._writable.register(client, select.POLLOUT)
        self._on_end = ended
        self._loop = asyncio.get_running_loop()
        self._idle: asyncio.TimerHandle | None = None
        self._head = bytearray()
        self._upload: IncomingUpload | None = None
        #: The pieces of a packed transfer, and the most bytes of its headers that are dropped.
        self._header_bytes = 0
        self._unpacking: PackedUpload | None = None
        self._packing: PackedDownload | None = None
        self._download: DownloadReader | None = None
        #: The bytes of a kept download that were sent, and the messages that were not.
        self._sent_bytes = 0
        self._kept: Iterator[bytes] = iter(())
        self._messages: StagedMessages | PlacedBytes | None = None
        #: True if the connection ends after these bytes of a failed upload, which are still to
        #: come.
        self._has_failed = False
        self._dropped_bytes = 0
        #: True if the last read found less than half of what it asked for.
        self._is_slow = False
        #: The bytes for which the system wakes a reader.
        self._least_bytes = 1
        #: True if the last write had to wait, and found too little room.
        self._has_slow_reader = False
        #: True while its download's command is awaited.
        self._awaits_command = False
        self._unsent = memoryview(b"")
        self._lock = threading.Lock()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Connection of {self._session}>"

    def end(self) -> None:
        """Break it off, since its session ends. From any thread."""
        with self._lock:
            if not self._is_closed:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    # On the event loop

    def wait_for(self, what: Next) -> None:
        """Wait for what the connection needs, then go on with it on a thread."""
        match what:
            case Next.THREAD:
                self._go_on()
            case Next.READABLE:
                self._loop.add_reader(self._number, self._ready)
                self._watch()
            case Next.GATHER:
                self._loop.add_reader(self._number, self._ready)
                self._idle = self._loop.call_later(GATHER_SECONDS, self._ready)
            case Next.WRITABLE:
                self._loop.add_writer(self._number, self._ready)
                self._watch()
            case Next.COMMAND:
                assert self._download is not None
                self._awaits_command = True
                self._loop.add_reader(self._number, self._look)
                self._download.future.add_done_callback(self._staged)
            case Next.NOTHING:
                self._close()

    def _watch(self) -> None:
        """End a transfer that does not go on."""
        if self._upload or self._unsent or self._messages or self._head or self._has_failed:
            seconds = self._session.limits.upload_idle_ms / 1e3
            self._idle = self._loop.call_later(seconds, self._late)

    def _late(self) -> None:
        seconds = self._session.limits.upload_idle_ms / 1e3
        late = DeadlineExceededError(
            f"no bytes of the transfer came or went for {seconds:g} s",
            advice="transfer them again, without such a pause",
        )
        self._stop_waiting()
        self._submit(lambda: self._failed(late, is_over=True))

    def _staged(self, _: Future[StagedMessages | PlacedBytes]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._command_is_done)

    def _command_is_done(self) -> None:
        if self._awaits_command:
            self._awaits_command = False
            self._loop.remove_reader(self._number)
            self._go_on()

    def _look(self) -> None:
        """End a download whose client leaves before its command is done."""
        # Bytes that come too early are read in their turn.
        self._loop.remove_reader(self._number)
        try:
            has_left = not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            self._loop.add_reader(self._number, self._look)
            return
        except OSError:
            has_left = True
        if has_left:
            self._awaits_command = False
            self._submit(self._over)

    def _ready(self) -> None:
        self._stop_waiting()
        self._go_on()

    def _stop_waiting(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        self._loop.remove_reader(self._number)
        self._loop.remove_writer(self._number)

    def _go_on(self) -> None:
        self._submit(self._work)

    def _submit(self, work: Callable[[], Next]) -> None:
        def worked() -> None:
            try:
                needed = work()
            except Exception as error:
                needed = self._failed(typed(error, "a transfer"), is_over=True)
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.wait_for, needed)

        try:
            self._workers.submit(worked)
        except RuntimeError:  # the daemon ends
            self._close()

    def _close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._stop_waiting()
        self._session.when_closing.pop(self, None)
        self._socket.close()
        self._on_end()

    # On a thread

    def _work(self) -> Next:
        """Move bytes while there are some, for a turn."""
        end = time.monotonic() + TURN_SECONDS
        try:
            while (needed := self._step()) is Next.THREAD:
                if time.monotonic() > end:
                    break
            return needed
        except BlockingIOError:
            if self._unsent or self._messages is not None:
                return Next.WRITABLE
            self._wake_for(1)
            return Next.READABLE
        except HeliographError as error:
            # Before OSError, which some of them are.
            return self._failed(error)
        except OSError as error:
            logger.debug("a connection for bytes broke: %s", error)
        return self._over()

    def _step(self) -> Next:
        if self._unsent or self._messages is not None:
            return self._send()
        if self._download is not None:
            self._messages = self._found(self._download)
            return Next.THREAD
        if self._upload is not None:
            return self._receive(self._upload)
        if self._dropped_bytes:
            return self._drop()
        return self._over() if self._has_failed else self._read_head()

    def _over(self) -> Next:
        """Abort what is under way: the connection has ended."""
        if (upload := self._upload) is not None:
            self._upload = None
            upload.break_off(CancelledError("the upload broke off before its end"))
        if (download := self._download) is not None:
            self._download = self._messages = None
            download.close()
        self._unsent = memoryview(b"")
        return Next.NOTHING

    def _failed(self, error: HeliographError, *, is_over: bool = False) -> Next:
        """Answer with an error, and end the connection once the rest of the transfer was read."""
        rest, self._dropped_bytes = self._dropped_bytes, 0
        if (upload := self._upload) is not None:
            rest = upload.size_bytes - upload.received_bytes + self._header_bytes
        has_begun = self._messages is not None
        self._over()
        if has_begun or is_over:
            # The client is in the middle of bytes, or does not read.
            self.end()
            return Next.NOTHING
        answer = direct_pb2.DirectTransferResponse(error=encode_error(error))
        self._unsent = memoryview(framed(answer.SerializeToString()))
        self._dropped_bytes, self._has_failed = min(rest, MOST_DROPPED_BYTES), True
        return Next.THREAD

    def _read_head(self) -> Next:
        """Read a request, and begin its transfer."""
        self._wake_for(1)
        head = self._head
        while (needed := self._needed_bytes()) > len(head):
            if not (data := self._socket.recv(needed - len(head))):
                return self._over()
            head += data
        message, self._head = bytes(head[LENGTH_BYTES:]), bytearray()
        try:
            request = direct_pb2.DirectTransfer.FromString(message)
        except DecodeError:
            raise ProtocolError("a transfer's request could not be decoded") from None
        session, size = self._session, request.size_bytes
        self._unpacking = self._packing = None
        self._has_slow_reader = False
        self._header_bytes = MOST_HEADER_BYTES if request.is_packed else 0
        match request.WhichOneof("what"):
            case "upload":
                self._begin(request, request.upload, request.offset_bytes)
            case "content":
                if session.is_relayed(request.content):
                    self._dropped_bytes = max(0, size - request.offset_bytes)
                    raise ProtocolError("a content for another server cannot come by this connection")
                self._begin(request, request.content, request.offset_bytes)
            case "download":
                if request.encodings:
                    encodings = encodings_from(request.encodings, session.encodings)
                    self._packing = PackedDownload(encodings, request.bytes_per_second)
                self._download = session.open_download(
                    request.download,
                    takes_placed=True,
                    offset_bytes=request.offset_bytes,
                    resume=request.resume,
                )
                self._sent_bytes = request.offset_bytes
                return Next.THREAD if self._download.future.done() else Next.COMMAND
            case _:
                raise ProtocolError("a transfer's request must say what it is for")
        return Next.THREAD

    def _begin(self, request: direct_pb2.DirectTransfer, target: int | bytes, offset_bytes: int) -> None:
        size_bytes = request.size_bytes
        try:
            self._upload = self._session.begin_upload(target, size_bytes, offset_bytes, request.attempt)
            if request.is_packed:
                self._unpacking = PackedUpload(self._upload, self._session.encodings)
        except HeliographError:
            # The client sends them all the same.
            self._dropped_bytes = max(0, size_bytes - offset_bytes) + self._header_bytes
            raise

    def _needed_bytes(self) -> int:
        """The bytes of the request, as far as they are known."""
        if len(self._head) < LENGTH_BYTES:
            return LENGTH_BYTES
        if (size := int.from_bytes(self._head[:LENGTH_BYTES], "little")) > REQUEST_BYTES:
            raise ProtocolError(f"a transfer's request of {size:,} bytes; the most is {REQUEST_BYTES:,}")
        return LENGTH_BYTES + size

    def _receive(self, upload: IncomingUpload) -> Next:
        if upload.received_bytes < upload.size_bytes:
            upload.came()
            if not (self._unpacking or upload).receive(self._into, PIECE_BYTES):
                return self._over()
            return Next.GATHER if self._is_slow else Next.THREAD
        received = upload.finish()
        self._upload = None
        self._unsent = memoryview(_answer(received))
        return Next.THREAD

    def _into(self, place: memoryview) -> int:
        """Receive bytes: all, or what comes of them within the patience, or is there of a slow
        client."""
        self._wake_for(place.nbytes)
        # Also without all bytes if there is no memory for more, which is no fault of the client.
        is_ready = self._readable.poll(0 if self._is_slow else PATIENCE_SECONDS * 1e3)
        # If nothing is there, the connection waits for the first byte.
        self._is_slow = False
        count = self._socket.recv_into(place)
        if 0 < 2 * count < place.nbytes and not is_ready:
            self._is_slow = True
            self._wake_for(place.nbytes - count)
        return count

    def _wake_for(self, size_bytes: int) -> None:
        """Have the system wake a reader when so many bytes are there, or the connection ends."""
        if size_bytes != self._least_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)
            self._least_bytes = size_bytes

    def _drop(self) -> Next:
        """Read bytes of a failed upload, which nothing takes."""
        self._wake_for(1)
        data = self._socket.recv(min(self._dropped_bytes, PIECE_BYTES))
        self._dropped_bytes -= len(data)
        return Next.THREAD if data else self._over()

    def _found(self, download: DownloadReader) -> StagedMessages | PlacedBytes:
        """The bytes of a download whose command is done. Raises the command's error."""
        try:
            found = download.future.result()
        except HeliographError as error:
            raise error.anew() from None
        self._unsent = memoryview(_answer(found.nbytes))
        if download.is_kept and isinstance(found, StagedMessages):
            self._kept = found.since(download.offset_bytes)
        return found

    def _send(self) -> Next:
        if not self._unsent:
            messages, download = self._messages, self._download
            assert messages is not None and download is not None
            if isinstance(messages, PlacedBytes) and download.is_kept:
                out = self._out if self._packing is None else self._pack
                sent_bytes = messages.send_from(self._sent_bytes, out, PIECE_BYTES)
                self._sent_bytes += sent_bytes
                if sent_bytes:
                    return Next.WRITABLE if self._has_slow_reader else Next.THREAD
                return self._sent(download)
            if isinstance(messages, PlacedBytes):
                if messages.send(self._out if self._packing is None else self._pack, PIECE_BYTES):
                    return Next.WRITABLE if self._has_slow_reader else Next.THREAD
                return self._sent(download)
            if download.is_kept:
                if (message := next(self._kept, None)) is None:
                    return self._sent(download)
                self._take(decode_download(message).data)
            elif messages.encoded:
                self._take(decode_download(messages.encoded.popleft()).data)
            elif messages.is_dropped:
                raise self._session.closed or CancelledError("the download was dropped")
            else:
                return self._sent(download)
        if self._unsent:
            self._unsent = self._unsent[self._out(self._unsent) :]
        return Next.WRITABLE if self._unsent and self._has_slow_reader else Next.THREAD

    def _out(self, data: memoryview) -> int:
        """Send bytes: as many as there is room for within the patience."""
        try:
            count = self._socket.send(data)
            self._has_slow_reader = False
        except BlockingIOError:
            self._writable.poll(PATIENCE_SECONDS * 1e3)
            count = self._socket.send(data)
            self._has_slow_reader = count < data.nbytes
        return count

    def _pack(self, data: memoryview) -> int:
        """Take bytes of a packed download, which are sent before anything else."""
        self._take(data)
        return data.nbytes

    def _take(self, data: memoryview) -> None:
        self._unsent = data if self._packing is None else self._packing.piece(data)

    def _sent(self, download: DownloadReader) -> Next:
        self._download = self._messages = None
        self._kept = iter(())
        download.close()
        return Next.THREAD


def _answer(size_bytes: int) -> bytes:
    return framed(direct_pb2.DirectTransferResponse(size_bytes=size_bytes).SerializeToString())
