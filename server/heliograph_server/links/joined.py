"""A stream of messages that begins in a gRPC call and goes on by a connection beside it.

    call ── message 1 .. n ──▸ │ ── the other end reads these first
    connection ── "n by gRPC", message n + 1, ... ──▸ │ ── and then those

Both directions change over by themselves, and messages keep their order. The call stays open: the
stream ends with it, and with the connection. See `ExchangeConnection` in `direct.proto`.

On an event loop, except for `send_now`.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from google.protobuf.message import DecodeError
from grpc import aio

from heliograph.transport.command_socket.on_loop import READ_BYTES, LoopSocket
from heliograph_proto.codec.frames import LENGTH_BYTES, framed
from heliograph_proto.errors import ProtocolError
from heliograph_proto.v1 import direct_pb2


class Call(Protocol):
    """Either end of a gRPC call with a stream in both directions."""

    async def read(self) -> Any:
        """Return the next message, or aio.EOF."""

    async def write(self, message: bytes) -> None:
        """Write a message."""


class JoinedStream:
    """One end of such a stream. It reads and writes as the call does.

    A message on the connection has at most `most_bytes`. `passed` receives those that come by it
    once `read` has returned all before them: at once, without the task that reads. It must not
    raise.
    """

    def __init__(self, call: Call, most_bytes: int, passed: Callable[[bytes], None] | None = None) -> None:
        self._call, self._most_bytes, self._passed = call, most_bytes, passed
        self._loop = asyncio.get_running_loop()
        #: The messages that went by gRPC; and those of the other end, once it has told.
        self._sent = self._received = 0
        self._expected: int | None = None
        #: A read of the call that is under way.
        self._reading: asyncio.Task[Any] | None = None
        self._awaited: asyncio.Future[None] | None = None
        #: Messages of the connection that were not read.
        self._messages: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._socket: LoopSocket | None = None
        self._beside: socket.socket | None = None
        #: True once this end writes by the connection.
        self._is_told = self._is_over = False
        #: Held while bytes are sent by the connection. None: this end writes by gRPC, or it is closed.
        self._sending = threading.Lock()
        self._connection: socket.socket | None = None
        self._closed: Callable[[], None] = lambda: None
        #: Bytes for which the system had no room.
        self._unsent = bytearray()
        #: Set when the system has them.
        self._room = asyncio.Event()

    def __repr__(self) -> str:
        return f"<JoinedStream {'beside' if self._is_told else 'by'} gRPC, {len(self._messages)} unread>"

    def begin(self, connection: socket.socket) -> None:
        """Go on by a connection that this end opened."""
        if self._is_over or self._socket is not None:
            connection.close()
            return
        self._receive(connection)
        self._change_over()

    def take(self, connection: socket.socket, closed: Callable[[], None]) -> None:
        """Go on by a connection that the other end opened, once it says that it uses it.

        `closed` is called when the connection is closed.
        """
        if self._is_over or self._socket is not None:
            connection.close()
            closed()
            return
        self._closed = closed
        self._receive(connection)

    def _receive(self, connection: socket.socket) -> None:
        self._beside = connection
        self._socket = LoopSocket(connection, self._most_bytes, self._came, self._ended)
        self._socket.read_on()

    def _change_over(self) -> None:
        """Write by the connection from now on."""
        self._is_told = True
        switch = direct_pb2.ExchangeSwitch(sent_messages=self._sent)
        with self._sending:
            self._connection = self._beside
            self._send(framed(switch.SerializeToString()))

    # Reading

    async def read(self) -> Any:
        """Return the next message; aio.EOF at the end, and if the connection broke. Raises the
        call's error."""
        while True:
            if self._messages and self._received == self._expected:
                return self._taken()
            if self._is_over:
                return aio.EOF
            if self._reading is None:
                self._reading = asyncio.ensure_future(self._call.read())
                self._reading.add_done_callback(self._has_read)
            if self._reading.done():
                if not self._is_end(self._reading):
                    found, self._reading = self._reading.result(), None
                    self._received += 1
                    return found
                if self._socket is not None and not self._is_over:
                    # The last messages may lie in the system.
                    self._socket.drain()
                    continue
                return self._reading.result()
            self._awaited = self._loop.create_future()
            await self._awaited

    def _has_read(self, reading: asyncio.Task[Any]) -> None:
        if not reading.cancelled():
            # Otherwise asyncio would report the error of a read that none awaits any more.
            reading.exception()
        self._wake()

    @staticmethod
    def _is_end(reading: asyncio.Task[Any]) -> bool:
        return reading.cancelled() or reading.exception() is not None or reading.result() is aio.EOF

    def _taken(self) -> bytes:
        message = self._messages.popleft()
        self._waiting_bytes -= len(message) + LENGTH_BYTES
        if not self._messages and self._socket is not None:
            self._socket.read_on()
        return message

    def _came(self, messages: Sequence[bytes]) -> None:
        if self._expected is None:
            try:
                self._expected = direct_pb2.ExchangeSwitch.FromString(messages[0]).sent_messages
            except DecodeError:
                raise ProtocolError("a connection for values does not say where it begins") from None
            messages = messages[1:]
            if not self._is_told:
                self._change_over()
        if self._passed is not None and not self._messages and self._received == self._expected:
            for message in messages:
                self._passed(message)
            return
        self._messages.extend(messages)
        # With their lengths: empty messages take memory, too.
        self._waiting_bytes += sum(map(len, messages)) + len(messages) * LENGTH_BYTES
        if self._waiting_bytes >= READ_BYTES and self._socket is not None:
            self._socket.pause()
        self._wake()

    def _ended(self, _: Exception | None) -> None:
        if self._is_told:
            self._is_over = True
            self._wake()
        elif self._socket is not None:
            # The other end did not want it, and goes on by gRPC.
            self._socket.close()
            self._socket = None
            self._closed()

    def _wake(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)

    # Writing

    async def write(self, message: bytes) -> None:
        """Write a message, after the one before. Raises the call's error, and ConnectionError."""
        if not self._is_told:
            self._sent += 1
            await self._call.write(message)
            return
        with self._sending:
            self._send(framed(message))
        await self.sent()

    async def sent(self) -> None:
        """Wait until the system has all bytes. Raises ConnectionError once this end is closed."""
        while self._is_behind():
            self._room.clear()
            await self._room.wait()

    def _is_behind(self) -> bool:
        # Under the lock, as a thread may have sent a part.
        with self._sending:
            if self._unsent and self._connection is None:
                raise ConnectionError("the connection for values is closed")
            return bool(self._unsent)

    def send_now(self, message: bytes) -> bool:
        """Send a message from any thread if the system takes it at once. Return False if `write`
        must."""
        with self._sending:
            if self._connection is None or self._unsent:
                return False
            self._send(framed(message))
        return True

    def _send(self, data: bytes) -> None:
        """Send bytes, or keep them. The caller holds the lock."""
        if self._connection is None:
            raise ConnectionError("the connection for values is closed")
        if not self._unsent:
            data = data[self._sent_of(data) :]
            if data:
                self._loop.call_soon_threadsafe(self._await_room)
        self._unsent += data

    def _sent_of(self, data: bytes | bytearray) -> int:
        """Return how many bytes the system took: all if the other end is gone, as a read notices."""
        assert self._connection is not None
        try:
            return self._connection.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            return len(data)

    def _await_room(self) -> None:
        with self._sending:
            if self._connection is not None and self._unsent:
                self._loop.add_writer(self._connection.fileno(), self._send_rest)

    def _send_rest(self) -> None:
        with self._sending:
            if self._connection is None:
                return
            del self._unsent[: self._sent_of(self._unsent)]
            if self._unsent:
                return
            self._loop.remove_writer(self._connection.fileno())
        self._room.set()

    # The end

    def close(self) -> None:
        """Close the connection, and end the read under way. Idempotent."""
        self._is_over = True
        if self._reading is not None:
            self._reading.cancel()
            # Its error would keep gRPC's objects.
            self._reading = None
        if (beside := self._socket) is not None:
            self._socket = None
            with self._sending:
                # Closed under the lock, so no thread writes to a descriptor that another has.
                if self._connection is not None and self._unsent:
                    self._loop.remove_writer(self._connection.fileno())
                self._connection = None
                beside.close()
            self._closed()
        self._room.set()
        self._wake()
