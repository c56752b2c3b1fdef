"""The connections of sessions whose command stream has not begun, and how a stream reads its own.

On the event loop, except where it says otherwise.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from grpc import aio

from heliograph.transport.command_socket.on_loop import READ_BYTES, LoopSocket
from heliograph_backends.host_memory.sealed import FILES
from heliograph_proto.errors import HandleExistsError, OutOfMemoryError, ProtocolError
from heliograph_server.session.session import Session

#: The approximate memory of a message beside its bytes, of which it may have none.
MESSAGE_BYTES = 64


class CommandSockets:
    """Keeps connections until the command streams of their sessions begin."""

    def __init__(self) -> None:
        self._kept: dict[Session, socket.socket] = {}

    def __repr__(self) -> str:
        return f"<CommandSockets {len(self._kept)} waiting>"

    def connect(self, session: Session) -> socket.socket:
        """Keep one end of a new connection for a session, and return the client's.

        Raises HandleExistsError for a second one, LimitExceededError or OutOfMemoryError without
        free descriptors, or the error that closed the session.
        """
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise OutOfMemoryError(f"no command socket: {error.strerror}") from None
        try:
            self.keep(session, ours)
        except BaseException:
            ours.close()
            theirs.close()
            raise
        return theirs

    def keep(self, session: Session, connection: socket.socket) -> None:
        """Keep the server's end of a connection. Raises the errors of `connect`, and leaves the
        connection to the caller then.

        In a session with a lease the connection is for the next stream. It replaces an earlier one.
        """
        if session.lease_seconds:
            self._drop(session)
        elif session in self._kept or session.is_attached:
            raise HandleExistsError("the session has its command socket, or its command stream, already")
        FILES.take()
        self._kept[session] = connection
        session.when_closing[self] = lambda _: self._drop(session)
        if session.closed is not None:
            self._drop(session)
            raise session.closed.anew()

    def take(self, session: Session, is_used: bool) -> CommandSocket | None:
        """Return the connection of a session whose stream begins; None if its client uses gRPC.

        Raises ProtocolError if it uses a connection that it has not requested.
        """
        session.when_closing.pop(self, None)
        if not is_used:
            # The client did not get the other end.
            self._drop(session)
            return None
        kept = self._kept.pop(session, None)
        if kept is None:
            raise ProtocolError("the command stream announces a command socket that was not requested")
        return CommandSocket(kept, session.limits.message_bytes)

    def _drop(self, session: Session) -> None:
        """Close a connection that is not used. From any thread."""
        kept = self._kept.pop(session, None)
        if kept is not None:
            kept.close()
            FILES.give()


class CommandSocket:
    """The messages of one command stream, read and written as those of a gRPC call."""

    def __init__(self, connection: socket.socket, most_bytes: int) -> None:
        self._messages: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._awaited: asyncio.Future[None] | None = None
        self._at_once: Callable[[bytes], bool] = lambda message: False
        self._error: Exception | None = None
        self._is_over = self._is_closed = False
        self._socket = LoopSocket(connection, most_bytes, self._came, self._ended)
        self.write = self._socket.write

    def __repr__(self) -> str:
        return f"<CommandSocket {len(self._messages)} messages waiting, {self._socket}>"

    async def read(self, at_once: Callable[[bytes], bool]) -> Any:
        """Return the next message, or several joined, or aio.EOF.

        A message that comes alone while this waits is first passed to `at_once`, which returns True
        if it has dealt with it. Raises its errors, and LimitExceededError.
        """
        self._at_once = at_once
        if not self._messages and not self._is_over:
            self._socket.read_on()
            self._awaited = asyncio.get_running_loop().create_future()
            try:
                await self._awaited
            finally:
                self._awaited = None
        else:
            # Others have their turn, as they have between two messages of gRPC.
            await asyncio.sleep(0)
        if self._messages:
            return self._take()
        if self._error is not None:
            raise self._error
        return aio.EOF

    def _take(self) -> bytes:
        """Return the first messages as one: protobuf joins them, and their lists."""
        size, taken = 0, list[bytes]()
        while self._messages and (not taken or size + len(self._messages[0]) <= READ_BYTES):
            taken.append(self._messages.popleft())
            size += len(taken[-1])
        self._waiting_bytes -= size + MESSAGE_BYTES * len(taken)
        return taken[0] if len(taken) == 1 else b"".join(taken)

    def _came(self, messages: Sequence[bytes]) -> None:
        is_idle = self._awaited is not None and not self._awaited.done()
        if is_idle and len(messages) == 1 and self._is_done(messages[0]):
            return
        self._messages.extend(messages)
        self._waiting_bytes += sum(map(len, messages)) + MESSAGE_BYTES * len(messages)
        if self._waiting_bytes >= READ_BYTES:
            self._socket.pause()
        self._wake()

    def _is_done(self, message: bytes) -> bool:
        try:
            return self._at_once(message)
        except Exception as error:
            self._ended(error)
            return True

    def _ended(self, error: Exception | None) -> None:
        self._error, self._is_over = error, True
        self._socket.pause()
        self._wake()

    def _wake(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = self._is_over = True
        self._messages.clear()
        self._socket.close()
        FILES.give()
        self._wake()
