"""One end of a command socket on an event loop, for asyncio clients and for servers."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Sequence

from heliograph_proto.codec.frames import FrameReader, framed
from heliograph_proto.errors import UnavailableError

#: The bytes that are read before others have their turn.
READ_BYTES = 65_536
#: The same of messages, which may be empty.
READ_MESSAGES = 1024
#: The most bytes that lie in the other end's system, as Linux has it unless it is told otherwise.
SENDING_BYTES = 4 * 2**20


class LoopSocket:
    """Writes messages, and passes those that come to a function. On its loop's thread alone.

    `received` is called with one or several messages, and `ended` once, when no more come: with the
    error of a message that is too long, or of `received`; with UnavailableError if the connection
    broke; or with None, at its good end.
    """

    def __init__(
        self,
        connection: socket.socket,
        most_bytes: int,
        received: Callable[[Sequence[bytes]], None],
        ended: Callable[[Exception | None], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        connection.setblocking(False)
        self._frames = FrameReader(most_bytes, READ_MESSAGES)
        self._received, self._ended = received, ended
        self._room: asyncio.Future[None] | None = None
        self._is_reading = self._has_ended = self._is_closed = False

    def __repr__(self) -> str:
        return f"<LoopSocket {'closed' if self._is_closed else 'open'}>"

    def read_on(self) -> None:
        """Begin to read, or go on after a `pause`. Idempotent."""
        if not (self._is_reading or self._has_ended):
            self._is_reading = True
            self._loop.add_reader(self._connection.fileno(), self._read)
            self._read_rest()

    def pause(self) -> None:
        """Read nothing until `read_on`; the other end's messages then wait in the system."""
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._connection.fileno())

    def _read_rest(self) -> None:
        """Pass on the messages beyond the bound of the last read, in a later turn."""
        if self._frames.has_more:
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._is_reading and self._frames.has_more:
            self._read()

    def _read(self, most_bytes: int = READ_BYTES) -> int | None:
        """Pass on what has come. Returns how many bytes were read for that; None if nothing has."""
        try:
            data = b"" if (has_more := self._frames.has_more) else self._connection.recv(most_bytes)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            self._end(UnavailableError(f"the command socket broke: {error.strerror}"))
            return None
        if not (data or has_more):
            self._end(None)
            return None
        try:
            if messages := self._frames.feed(data):
                self._received(messages)
        except Exception as error:
            self._end(error)
            return None
        if self._is_reading:
            self._read_rest()
        return len(data)

    def drain(self) -> None:
        """Pass on what lies in the systems of both ends, and end. More may come without end."""
        left = 0 if self._has_ended else _bytes_in_system(self._connection) + SENDING_BYTES
        while not self._has_ended and (left or self._frames.has_more):
            if (read := self._read(min(left, READ_BYTES))) is None:
                break
            left -= read
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        self.pause()
        if not self._has_ended:
            self._has_ended = True
            self._ended(error)

    async def write(self, message: bytes) -> None:
        """Write a message, after the one before. Raises ConnectionError if the other end is gone."""
        rest = memoryview(framed(message))
        while rest:
            if self._is_closed:
                raise ConnectionError("the command socket is closed")
            try:
                rest = rest[self._connection.send(rest) :]
            except (BlockingIOError, InterruptedError):
                await self._wait_for_room()

    async def _wait_for_room(self) -> None:
        room = self._room = self._loop.create_future()
        self._loop.add_writer(self._connection.fileno(), self._make_room)
        try:
            await room
        finally:
            self._room = None
            if not self._is_closed:
                self._loop.remove_writer(self._connection.fileno())

    def _make_room(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def close(self) -> None:
        """Close this end. Idempotent."""
        if self._is_closed:
            return
        self.pause()
        self._has_ended = self._is_closed = True
        if self._room is not None:
            self._loop.remove_writer(self._connection.fileno())
            self._make_room()
        self._connection.close()

    def abandon(self) -> None:
        """Close it in the child of a fork, without an effect on the parent's loop."""
        self._connection.close()


def _bytes_in_system(connection: socket.socket) -> int:
    """Return how many bytes have come that were not read."""
    import fcntl
    import termios

    return int.from_bytes(fcntl.ioctl(connection, termios.FIONREAD, bytes(4)), sys.byteorder)
