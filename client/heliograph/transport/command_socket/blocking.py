"""The client's end of a command socket, used by the threads that call a blocking session.

A caller that waits reads the socket itself, so that no other thread has to wake before it. While no
caller waits, a thread of the session reads. A caller that sends a small run writes it itself, and
one that waits for a command writes what is queued, if the session's writer has not woken yet, which
writes everything else. Where a signal handler of the program may run, the session's threads read
and write: the handler may use the session too, or raise.
"""

from __future__ import annotations

import select
import socket
import threading
import weakref
from _thread import get_ident
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

from heliograph.core.future import Deadline, Outcome
from heliograph.core.interrupts import runs_handlers, undisturbed
from heliograph.transport.command_socket.opening import MOST_BYTES
from heliograph_proto.codec.frames import FrameReader, framed
from heliograph_proto.errors import UnsupportedError

#: The bytes of one read.
READ_BYTES = 262_144
#: The time after which the session's thread reads again, if no caller has read meanwhile.
ASIDE_SECONDS = 0.01


class Queued(Protocol):
    """The commands of a session, which any thread may ask for."""

    @property
    def has_output(self) -> bool:
        """True if something is to be sent."""

    @property
    def has_only_garbage(self) -> bool:
        """True if that can wait for more."""

    @property
    def is_answered(self) -> bool:
        """True if nothing is to come."""


class BlockingSocket:
    """Writes the messages that `take` returns, and passes those that come to `apply`.

    `take` returns b"" if there is nothing to send. Any thread.
    """

    def __init__(
        self,
        connection: socket.socket,
        take: Callable[[], bytes],
        apply: Callable[[bytes], None],
        queued: Queued,
    ) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._take, self._apply, self._queued = take, apply, queued
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._frames = FrameReader(MOST_BYTES)
        self._sending = threading.Lock()
        #: The rest of a message that found no room. Under `_sending`.
        self._unsent = memoryview(b"")
        #: Has the claim of the thread that reads, if there is one. No call may lie between taking
        #: or giving it and the `try` around: Ctrl-C is raised after calls.
        self._reader: dict[int, tuple[int, object]] = {}
        #: Wakes the session's thread while it stands aside.
        self._attention: SimpleQueue[None] = SimpleQueue()
        self._is_aside = False
        #: The outcome of a run that its caller has just sent and waits for, in a thread without
        #: handlers: finding that out takes some time.
        self.sent: object = None
        self._reads = 0
        self._is_over = False
        self._error: Exception | None = None
        # Closed when no thread uses it any more.
        finalizer = weakref.finalize(self, connection.close)
        # While the interpreter ends, the session is closed first, and closes the socket.
        finalizer.atexit = False

    def __repr__(self) -> str:
        return f"<BlockingSocket {'over' if self._is_over else 'open'}, {self._reads:,} reads by callers>"

    # Sending

    def send_now(self) -> bool:
        """Send what is queued without waiting.

        Returns False if the writer must do it, since the socket is full or in use.
        """
        return not runs_handlers() and undisturbed(self._send_now)

    def _send_now(self) -> bool:
        if not self._sending.acquire(blocking=False):
            return False
        try:
            return not self._unsent and self._send(self._take())
        finally:
            self._sending.release()

    def _send(self, message: bytes) -> bool:
        """Send a message, or the beginning of it. Returns False if some of it is left."""
        if message:
            self._unsent = memoryview(framed(message))
        try:
            while self._unsent:
                self._unsent = self._unsent[self._connection.send(self._unsent) :]
        except BlockingIOError:
            return False
        except OSError:
            # The end, which the thread that reads reports.
            self._unsent = memoryview(b"")
        return True

    def send_all(self) -> None:
        """Send everything that is queued, for the writer. Returns early at the end."""
        room = select.poll()
        room.register(self._connection, select.POLLOUT)
        with self._sending:
            while self._unsent or (message := self._take()):
                if not self._send(b"" if self._unsent else message):
                    room.poll()
                if self._is_over:
                    break
        self.attend()

    # Reading

    def wait(self, outcome: Outcome, deadline: Deadline) -> None:
        """Read until an outcome is done, or another thread reads, or the socket ends.

        Raises DeadlineExceededError, and UnsupportedError in a finalizer that runs while its thread
        reads.
        """
        if outcome is self.sent:
            self.sent = None
        elif runs_handlers():
            self.attend()
            return
        elif self._queued.has_output and not self._queued.has_only_garbage:
            # Sooner than the writer, which has to wake.
            undisturbed(self._send_now)
        claim = get_ident(), object()
        try:
            if (found := self._reader.setdefault(0, claim)) is not claim:
                if found[0] == claim[0]:
                    raise UnsupportedError(
                        "a finalizer waits for its session within a call of that session",
                        advice="do not wait for a session in __del__",
                    )
                return
            self._reads += 1
            # The answer to a short run is often there once the run was sent.
            undisturbed(self._read)
            while not (outcome.done or self._is_over):
                seconds = deadline.remaining()
                if not self._poll.poll(None if seconds is None else seconds * 1e3):
                    raise deadline.error()
                self._reads += 1
                undisturbed(self._read)
        finally:
            if 0 in self._reader and self._reader[0] is claim:
                del self._reader[0]
                if not self._queued.is_answered:
                    self.attend()

    def _read(self) -> None:
        try:
            data = self._connection.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._is_over = True
        try:
            for message in self._frames.feed(data):
                self._apply(message)
        except Exception as error:
            # The session's thread raises it.
            self._error, self._is_over = error, True
            self.end()

    def read_until_end(self) -> None:
        """Read whenever no caller does, until the other end or `end` ends it.

        Raises the errors of `apply`, also those that a caller met.
        """
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        while not self._is_over:
            seen = self._reads
            poll.poll()
            claim = get_ident(), object()
            if self._reader.setdefault(0, claim) is claim:
                try:
                    self._read()
                finally:
                    del self._reader[0]
                if seen == self._reads:
                    continue
            self._stand_aside()
        if self._error is not None:
            raise self._error

    def _stand_aside(self) -> None:
        """Wait until callers have stopped to read, or `attend`."""
        self._is_aside = True
        # A caller that gives its claim afterwards finds this thread aside.
        is_needed = 0 not in self._reader and not self._queued.is_answered
        seen = self._reads if is_needed else -1
        while seen != self._reads and not self._is_over:
            seen = self._reads
            try:
                self._attention.get(timeout=ASIDE_SECONDS)
                break
            except Empty:
                pass
        self._is_aside = False

    def attend(self) -> None:
        """Let the session's thread read, since something is to come that no caller waits for."""
        if self._is_aside:
            self._is_aside = False
            self._attention.put(None)

    # The end

    def end(self) -> None:
        """End it. Messages that have come can still be read. From any thread."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def abandon(self) -> None:
        """Close it in the child of a fork, without an effect on the parent's."""
        self._connection.close()
