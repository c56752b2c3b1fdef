"""The command stream of a session over one connection or, with a lease, one after another.

On the event loop, except where it says otherwise.

    begin ──▸ attached ── its connection breaks ──▸ detached ── attach ──▸ attached
                  │  ▴                                  │
                  │  └── attach by another connection   └── the lease's end ──▸ ended
                  └── half-close, Close, an error ──▸ ended
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeAlias

from heliograph_proto.codec.inline_runs import encode_results
from heliograph_proto.commands import Attach, CompletionBatch
from heliograph_proto.errors import CancelledError, HandleExistsError, HeliographError, ProtocolError
from heliograph_server.rpc.command_socket.sockets import CommandSocket
from heliograph_server.rpc.completion_writer import CompletionWriter
from heliograph_server.rpc.leases.attaching import Attaching
from heliograph_server.rpc.leases.completion_log import CompletionLog
from heliograph_server.rpc.requests import Context
from heliograph_server.session.session import Session

logger = logging.getLogger(__name__)

#: The messages of a stream: those of its call, or of its socket. Both are encoded, so that small
#: runs need no message objects.
Wire: TypeAlias = "Context | CommandSocket"

#: The longest time that a snapshot waits for the event loop.
KEEP_SECONDS = 5.0


class Stream:
    """One connection of a session's command stream."""

    def __init__(self, session: Session, outbox: CompletionWriter, wire: Wire, number: int) -> None:
        self.session, self.outbox, self.wire, self.number = session, outbox, wire, number
        #: The reason for its end if the session goes on.
        self.error: HeliographError | None = None

    def __repr__(self) -> str:
        return f"<Stream {self.number} of {self.session}>"

    @property
    def is_over(self) -> bool:
        """True if it takes no more commands: it broke, another one attached, or the session ended."""
        return self.outbox.stream != self.number or self.outbox.is_closed

    def break_off(self, error: HeliographError) -> None:
        """End it without the session: between two commands, and after the message under way."""
        if not self.is_over:
            self.error = error
            self.outbox.begin_stream()


class Conversation:
    """A session with its completions and its lease, which outlive a connection."""

    def __init__(
        self,
        session: Session,
        end: Callable[[Session, HeliographError], Awaitable[None]],
        forget: Callable[[Session], object],
        incarnation: bytes = b"",
    ) -> None:
        """`end` ends the session when its lease does; `forget` is called once it is over.
        `incarnation`: that of the daemon."""
        log = CompletionLog(*session.kept_messages) if session.lease_seconds else None
        written = log.written if log is not None else 0
        self._attaching = Attaching(incarnation, session.is_restored, session.has_moved_here, written)
        self.session, self._end, self._forget = session, end, forget
        self._loop = asyncio.get_running_loop()
        self.outbox = CompletionWriter(self._loop, session.limits, log)
        session.attach(self.outbox.put, self.outbox.end, at_once=lambda: True)
        self._began = time.monotonic()
        self._stream: Stream | None = None
        self._lease: asyncio.TimerHandle | None = None
        self._ending: asyncio.Future[None] | None = None
        self._is_over = False
        session.when_closing[self] = self._closing
        session.keep_messages, session.hold_messages = self._keep_messages, self._hold_messages

    def __repr__(self) -> str:
        return f"<Conversation of {self.session}: {self._stream or 'detached'}>"

    def check(self, attach: Attach) -> None:
        """Raise the error with which an attach is refused, which changes nothing."""
        if (log := self.outbox.log) is None:
            raise ProtocolError("the session has no lease, so nothing attaches to it again")
        log.since(self._attaching.received(attach))

    def begin(self, wire: Wire, attach: Attach | None = None) -> Stream:
        """Begin the session's stream, or its next one, which ends the one before.

        From here on no command of that one is taken, so the answer names the last command for good.
        """
        first: tuple[bytes, ...] = ()
        if attach is not None and self.outbox.log is not None:
            answer = self._attaching.answer(attach, self.session.commands, self.session.resumed_loops)
            kept = self.outbox.log.since(answer.next_message - 1)
            first = (encode_results(CompletionBatch(0, attached=answer)), *kept)
        if (before := self._stream) is not None:
            before.break_off(
                HandleExistsError(
                    "another connection has attached to the session",
                    advice="share no session between clients; each opens its own",
                )
            )
            if isinstance(before.wire, CommandSocket):
                before.wire.close()
        self._stop_lease()
        self._stream = Stream(self.session, self.outbox, wire, self.outbox.begin_stream(first))
        return self._stream

    def leave(self, stream: Stream) -> bool:
        """Record that a stream has ended. Return True if the session is to end with it."""
        if self._stream is not stream:
            return False
        if self.outbox.is_ending or not self.session.lease_seconds or self.session.closed is not None:
            return True
        self._detach()
        return False

    def leave_unused(self) -> None:
        """Let the lease begin if an attach failed that was to be the first stream."""
        if self._stream is None and self._lease is None:
            self._detach()

    def _detach(self) -> None:
        self._stream = None
        self.outbox.begin_stream()
        seconds = self.session.lease_seconds
        self.session.lease_end = time.monotonic() + seconds
        self._lease = self._loop.call_later(seconds, self._expire)
        message = "%s: its connection broke; it is kept for %.0f s"
        logger.info(message, self.session, seconds, extra=self.session.log_fields)

    def _stop_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
            self._lease = self.session.lease_end = None
            logger.info("%s: its client is back", self.session, extra=self.session.log_fields)

    def _expire(self) -> None:
        logger.info("%s: its lease has ended", self.session, extra=self.session.log_fields)
        error = CancelledError("the session's lease ended before its client came back")
        self._ending = asyncio.ensure_future(self._end(self.session, error))

    def _keep_messages(self) -> tuple[int, tuple[bytes, ...]]:
        """The messages that the client has acknowledged, and those after them.

        On any thread but the loop's."""

        async def keep() -> tuple[int, tuple[bytes, ...]]:
            return self.outbox.keep_all()

        return asyncio.run_coroutine_threadsafe(keep(), self._loop).result(KEEP_SECONDS)

    def _hold_messages(self, on: bool) -> None:
        """Hold messages back, or go on. On any thread but the loop's."""

        async def hold() -> None:
            self.outbox.hold(on=on)

        asyncio.run_coroutine_threadsafe(hold(), self._loop).result(KEEP_SECONDS)

    def _closing(self, _: HeliographError) -> None:
        """The session ends. From any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._closed)

    def _closed(self) -> None:
        if self._stream is None:
            # No stream is there to write the rest.
            if self._lease is not None:
                self._lease.cancel()
            self.over()

    def over(self) -> None:
        """Drop what is kept, and log the end."""
        self.outbox.close()
        if self._is_over:
            return
        self._is_over = True
        session = self.session
        # A session that is referred to, as by a line of the log, keeps no call of gRPC alive.
        self._stream = None
        self._forget(session)
        session.when_closing.pop(self, None)
        seconds, commands = time.monotonic() - self._began, f"{session.commands:,}"
        message = "%s ended after %.1f s and %s commands"
        logger.info(message, session, seconds, commands, extra=session.log_fields)
