"""The queue of completions between the devices' threads and the event loop that writes them.

Only `put` and `end` may be called from other threads. Completions put between two turns of the loop
are written as one message, up to a size; beyond that, flow control of the stream decides. Commands
that need no completion are acknowledged with the next message, or after a moment. Small values that
a loop streams gather for a few milliseconds: a message for each would take from the processors that
compute the next ones.

In a session with a lease it outlives its stream: another stream goes on, first with the messages of
the log that its client has not received.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from heliograph_proto.codec.inline_forms import InlineResult
from heliograph_proto.codec.inline_runs import encode_results
from heliograph_proto.commands import Completion, CompletionBatch, TapPiece
from heliograph_proto.devices import DeviceChange
from heliograph_proto.errors import HeliographError, LimitExceededError, ProtocolError
from heliograph_proto.sessions import Limits
from heliograph_server.rpc.leases.completion_log import CompletionLog

#: While more than this is unwritten, the command stream is not read.
HIGH_WATER_BYTES = 16 * 2**20
#: About the size of the largest message, far below the limit of clients.
MESSAGE_BYTES = 2**20
#: Commands without a completion are acknowledged after this time, or once there are this many.
LATE_SECONDS = 0.005
LATE_COMMANDS = 1000
#: Values of a loop gather for this time after a message with such, unless there are this many bytes
#: or the client allows another time, in which the first ones gather too.
GATHER_SECONDS = 0.005
GATHER_BYTES = 4096
#: The approximate memory of a completion without data.
COMPLETION_BYTES = 64
#: The approximate memory of its error.
ERROR_BYTES = 1024
#: The approximate memory of a device change, and of each device that appeared.
CHANGE_BYTES = 4096


class CompletionWriter:
    """A queue of completions for one stream, or several in turn. Created on its loop.

    `log` keeps what was written; None: the session has no lease.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limits: Limits | None = None,
        log: CompletionLog | None = None,
    ) -> None:
        self._loop = loop
        self.log = log
        #: The number of the present stream, and what it writes first.
        self.stream = 0
        self._first: deque[bytes] = deque()
        #: True while the reader of commands waits for room.
        self._awaits_room = False
        #: A client that acknowledges nothing has no more kept for it than this.
        self._most_kept_bytes = max((limits or Limits()).in_flight_bytes, 2 * HIGH_WATER_BYTES)
        most = (limits or Limits()).in_flight_commands
        self._late_commands = max(1, min(LATE_COMMANDS, most // 4))
        self._thread = threading.get_ident()
        self._pieces: deque[tuple[CompletionBatch, int]] = deque()
        #: The last counts of loops' steps, of which the client misses those in between.
        self._steps: dict[int, int] = {}
        # Two counters with one writer each need no lock.
        self._put_bytes = 0
        self._taken_bytes = 0
        self._written_through = 0
        #: The last command done without a completion of its own.
        self._acknowledged = 0
        self._ack_is_armed = False
        self._ack_is_due = False
        #: The seconds for which values of loops gather at present; 0: they do not.
        self._gathers = 0.0
        #: True once something came that is to be written at once.
        self._is_urgent = False
        #: The stream ends when this number is acknowledged; None while the client may send more.
        self._finish_at: int | None = None
        #: The error that ends the stream; None for a good end.
        self.error: HeliographError | None = None
        self._woken = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._wake_pending = False
        #: True while an answer is written past the queue, or a message taken from it.
        self._answering = False
        self._writing = False
        #: True while nothing new is written, since the session is on its way to another daemon.
        self.is_held = False
        #: True once nothing is written any more.
        self.is_closed = False

    def __repr__(self) -> str:
        return f"<Outbox {self.unwritten_bytes:,} bytes, written through {self._written_through}>"

    @property
    def unwritten_bytes(self) -> int:
        """The approximate memory of the queue."""
        return self._put_bytes - self._taken_bytes

    # From any thread

    def put(self, batch: CompletionBatch) -> None:
        """Queue a batch. Calls must not overlap. After `close` it is dropped."""
        if self.is_closed:
            return
        if batch.steps:
            self._steps.update(batch.steps)
            self._wake_soon()
        tells = batch.changes or batch.durable_through or batch.move_to
        if batch.completions or batch.taps or tells:
            for piece in _split(batch):
                self._put_bytes += piece[1]
                self._pieces.append(piece)
            gather = 0.0 if batch.completions or tells else min(map(_gather_seconds, batch.taps))
            # In this order, since the end of the gathering looks for pieces afterwards.
            if gather < self._gathers or not gather or self.unwritten_bytes > GATHER_BYTES:
                self._is_urgent = True
                self._wake_soon()
            elif not self._gathers and gather <= GATHER_SECONDS:
                self._wake_soon()
            elif not self._gathers:
                self._gathers = gather
                self._call_soon(partial(self._loop.call_later, gather, self._end_gathering))
            return
        # The client waits for none of these commands, so their acknowledgement may be late.
        self._acknowledged = batch.completed_through
        if self._acknowledged - self._written_through >= self._late_commands:
            self._ack_is_due = True
            self._wake_soon()
        elif not self._ack_is_armed:
            self._ack_is_armed = True
            self._call_soon(partial(self._loop.call_later, LATE_SECONDS, self._make_ack_due))

    def end(self, error: HeliographError) -> None:
        """End the stream with this error, once everything in the queue is written."""
        self.error = self.error or error
        self._wake_soon()

    def close(self) -> None:
        """Drop the queue, and every later batch. To be called again once no `put` is under way.

        The session refers to the queue in a cycle, so its bytes would otherwise wait for the
        garbage collector, which an idle daemon hardly runs.
        """
        self.is_closed = True
        self._pieces.clear()
        self._steps.clear()
        self._first.clear()
        self._room.set()

    def _wake_soon(self) -> None:
        if self._wake_pending:
            return
        if threading.get_ident() == self._thread:
            self._woken.set()
            return
        self._wake_pending = True
        self._call_soon(self._wake)

    def _call_soon(self, call: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            pass  # the loop is closed, and with it the stream

    # On the loop

    def begin_stream(self, first: Iterable[bytes] = ()) -> int:
        """End the present stream, and begin the next one with these messages. Return its number."""
        self.stream += 1
        self._first = deque(first)
        self._answering = self._writing = False
        self._woken.set()
        self._room.set()
        return self.stream

    def acknowledge(self, received: int) -> None:
        """Drop the messages that the client has. Raises ProtocolError, also without a lease."""
        if self.log is None:
            raise ProtocolError("a session without a lease acknowledges no messages")
        was_full = self.log.is_full
        self.log.acknowledge(received)
        if was_full:
            self._woken.set()

    @property
    def _is_full(self) -> bool:
        return self.log is not None and self.log.is_full and not self._awaits_room

    def _make_ack_due(self) -> None:
        self._ack_is_armed = False
        self._ack_is_due = True
        self._woken.set()

    def _end_gathering(self) -> None:
        self._gathers = 0.0
        if self._pieces:
            self._woken.set()

    def _wake(self) -> None:
        self._wake_pending = False
        self._woken.set()

    def finish_at(self, sequence: int) -> None:
        """End the stream once this number is acknowledged, since the client sends no more."""
        self._finish_at = sequence
        self._woken.set()

    def may_write(self) -> bool:
        """True if an answer may be written past the queue, which is empty and not being written."""
        is_busy = self._answering or self._writing or self._pieces or self.is_held or self.error is not None
        return not (is_busy or self._first or (self.log is not None and self.log.is_full))

    def begin_write(self, through: int, answer: bytes) -> int:
        """Begin to write an answer past the queue, which acknowledges through this number.

        Return the number of the stream.
        """
        self._answering = True
        self._written_through = max(self._written_through, through)
        if self.log is not None:
            self.log.append(answer)
        return self.stream

    def end_write(self, stream: int) -> None:
        """Record that the answer was written on a stream, or failed."""
        if stream != self.stream:
            return
        self._answering = False
        # Waking the task that writes costs as much as the rest of a small run's Python.
        if self._pieces or self._steps or self._must_acknowledge or self.is_ending:
            self._woken.set()

    def keep_all(self) -> tuple[int, tuple[bytes, ...]]:
        """Encode everything in the queue as the messages that will be written. Return the number of
        those that the client has acknowledged, and all after them: none without a lease."""
        while self._pieces or self._acknowledged > self._written_through:
            message = self._encode_next()
            if self.log is not None:
                self.log.append(message)
            self._first.append(message)
        self._woken.set()
        return (0, ()) if self.log is None else (self.log.acknowledged, self.log.since(self.log.acknowledged))

    def hold(self, *, on: bool) -> None:
        """Write nothing but what `keep_all` has encoded, or go on."""
        self.is_held = on
        self._woken.set()

    async def has_room(self) -> None:
        """Wait while more than HIGH_WATER_BYTES are unwritten, and the stream is the same."""
        if self.unwritten_bytes > HIGH_WATER_BYTES and not self.is_closed:
            self._room.clear()
            # Acknowledgements may lie behind the commands that are not read meanwhile.
            self._awaits_room = True
            self._woken.set()
            try:
                await self._room.wait()
            finally:
                self._awaits_room = False

    async def take(self, stream: int = 0) -> bytes | None:
        """Return a stream's next message, once the one before was written; None when it ends."""
        if stream == self.stream:
            self._writing = False
        while stream == self.stream and not self._first and (self._answering or not self._has_next):
            has_ended = self.error is not None or self._finish_at == self._written_through
            if has_ended and not self._answering:
                return None
            self._woken.clear()
            await self._woken.wait()
        if stream != self.stream:
            return None
        self._writing = True
        if self._first:
            return self._first.popleft()
        message = self._encode_next()
        if self.log is not None:
            self.log.append(message)
            if self.log.size_bytes > self._most_kept_bytes:
                self.end(
                    LimitExceededError(
                        f"{self.log.size_bytes:,} bytes of completions were not acknowledged",
                        advice="acknowledge what was received: CommandBatch.received",
                    )
                )
        return message

    @property
    def _has_next(self) -> bool:
        may_wait = self._gathers and not (self._is_urgent or self.is_ending)
        return bool((self._pieces and not may_wait) or self._steps or self._must_acknowledge) and not (
            self._is_full or self.is_held
        )

    @property
    def _must_acknowledge(self) -> bool:
        """True if a late acknowledgement is due, since its time is over or the stream ends."""
        return (self._ack_is_due or self.is_ending) and self._acknowledged > self._written_through

    @property
    def is_ending(self) -> bool:
        """True once the session's last stream is to end."""
        return self._finish_at is not None or self.error is not None

    def _encode_next(self) -> bytes:
        listed: list[Completion | InlineResult] = []
        taps: list[TapPiece] = []
        changes: list[DeviceChange] = []
        size = durable_through = 0
        move_to = ""
        # In this order, since `put` may set it again. And before the queue is read, which then
        # holds every completion up to this number.
        self._ack_is_due = self._is_urgent = False
        acknowledged = self._acknowledged
        while self._pieces and size < MESSAGE_BYTES:
            batch, more = self._pieces.popleft()
            listed.extend(batch.completions)
            taps.extend(batch.taps)
            changes.extend(batch.changes)
            size += more
            durable_through = max(durable_through, batch.durable_through)
            move_to = batch.move_to or move_to
            self._written_through = max(self._written_through, batch.completed_through)
        if not self._pieces:
            self._written_through = max(self._written_through, acknowledged)
        else:
            self._is_urgent = True
        self._taken_bytes += size
        if not self._gathers and taps and (gather := _gather_seconds(taps[-1])):
            self._gathers = gather
            self._loop.call_later(gather, self._end_gathering)
        steps = []
        while self._steps:
            # Any thread adds to it.
            steps.append(self._steps.popitem())
        if self.unwritten_bytes <= HIGH_WATER_BYTES:
            self._room.set()
        return encode_results(
            CompletionBatch(
                self._written_through,
                tuple(listed),
                tuple(taps),
                tuple(changes),
                durable_through=durable_through,
                move_to=move_to,
                steps=tuple(steps),
            )
        )


def _gather_seconds(tap: TapPiece) -> float:
    """Return the time for which a value may wait for others."""
    if tap.gather_ms is None:
        return 0.0
    return tap.gather_ms / 1e3 if tap.gather_ms else GATHER_SECONDS


def _split(batch: CompletionBatch) -> Iterator[tuple[CompletionBatch, int]]:
    """Cut a batch into pieces of about MESSAGE_BYTES, with sizes: changes and taps first.

    Only the last piece acknowledges.
    """
    for change in batch.changes:
        yield CompletionBatch(0, changes=(change,)), CHANGE_BYTES * (1 + len(change.appeared))
    for tap in batch.taps:
        yield CompletionBatch(0, (), (tap,)), COMPLETION_BYTES + len(tap.data)
    listed: list[Completion | InlineResult] = []
    size = COMPLETION_BYTES
    for one in batch.completions:
        listed.append(one)
        size += COMPLETION_BYTES
        if isinstance(one, InlineResult):
            size += one.form.template.size_bytes
        else:
            size += len(one.data) + (ERROR_BYTES if one.error is not None else 0)
            for _, data in one.outputs:
                size += len(data)
        if size >= MESSAGE_BYTES:
            yield CompletionBatch(0, tuple(listed)), size
            listed, size = [], COMPLETION_BYTES
    yield replace(batch, completions=tuple(listed), taps=(), changes=(), steps=()), size
