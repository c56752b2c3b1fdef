"""Completions on their way from the devices' threads to the event loop that writes them.

Only `put` and `end` may be called from other threads. What was put between two turns of the loop is
written as one message, up to a size; then flow control of the stream decides. What is done and listed
nowhere, since nobody asked, takes no message of its own unless none comes for a moment.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator

from heliograph_proto.codec.inline_forms import InlineResult
from heliograph_proto.codec.inline_runs import encode_results
from heliograph_proto.commands import Completion, CompletionBatch, TapPiece
from heliograph_proto.devices import DeviceChange
from heliograph_proto.errors import HeliographError
from heliograph_proto.sessions import Limits

#: While more than this is unwritten, the command stream is not read.
HIGH_WATER_BYTES = 16 * 2**20
#: About the size of the largest message: far below what a client accepts.
MESSAGE_BYTES = 2**20
#: What nobody waits for is acknowledged with the next message, or after so long, or as soon as it is so many.
LATE_SECONDS = 0.005
LATE_COMMANDS = 1000
#: What a completion without data costs, roughly.
COMPLETION_BYTES = 64
#: What an error holds in memory beyond that, roughly.
ERROR_BYTES = 1024
#: What each device that came, and the change itself, hold in memory, roughly.
CHANGE_BYTES = 4096


class CompletionWriter:
    """A queue of completions for one stream. Made on its loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: Limits | None = None) -> None:
        self._loop = loop
        most = (limits or Limits()).in_flight_commands
        self._late_commands = max(1, min(LATE_COMMANDS, most // 4))
        self._thread = threading.get_ident()
        self._pieces: deque[tuple[CompletionBatch, int]] = deque()
        # Two counters with one writer each, instead of one that needs a lock.
        self._put_bytes = 0
        self._taken_bytes = 0
        self._written_through = 0
        #: Done and listed nowhere: what nobody waits for.
        self._acknowledged = 0
        self._ack_is_armed = False
        self._ack_is_due = False
        #: The stream ends when this is acknowledged; None while the client may send more.
        self._finish_at: int | None = None
        #: Why the stream ends; None for a good end.
        self.error: HeliographError | None = None
        self._woken = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._wake_pending = False
        #: An answer is being written past the queue, or else what was taken from it.
        self._answering = False
        self._writing = False

    def __repr__(self) -> str:
        return f"<Outbox {self.unwritten_bytes:,} bytes, written through {self._written_through}>"

    @property
    def unwritten_bytes(self) -> int:
        return self._put_bytes - self._taken_bytes

    # From any thread

    def put(self, batch: CompletionBatch) -> None:
        """Queues what is done. Calls come one at a time."""
        if not (batch.completions or batch.taps or batch.changes):
            self._acknowledge(batch.completed_through)
            return
        for piece in _split(batch):
            self._put_bytes += piece[1]
            self._pieces.append(piece)
        self._wake_soon()

    def _acknowledge(self, through: int) -> None:
        """With the next message, or soon: nobody waits for it."""
        self._acknowledged = through
        if through - self._written_through >= self._late_commands:
            self._ack_is_due = True
            self._wake_soon()
        elif not self._ack_is_armed:
            self._ack_is_armed = True
            self._call_soon(self._arm_ack)

    def end(self, error: HeliographError) -> None:
        """Ends the stream with this error once all that is queued was written."""
        self.error = self.error or error
        self._wake_soon()

    def _wake_soon(self) -> None:
        if self._wake_pending:
            return
        if threading.get_ident() == self._thread:
            self._woken.set()
            return
        self._wake_pending = True
        self._call_soon(self._wake)

    def _call_soon(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            pass  # the loop is closed: nobody is there to read this

    # On the loop

    def _arm_ack(self) -> None:
        self._loop.call_later(LATE_SECONDS, self._make_ack_due)

    def _make_ack_due(self) -> None:
        self._ack_is_armed = False
        self._ack_is_due = True
        self._woken.set()

    def _wake(self) -> None:
        self._wake_pending = False
        self._woken.set()

    def finish_at(self, sequence: int) -> None:
        """The client will send no more: the stream ends well once this number is acknowledged."""
        self._finish_at = sequence
        self._woken.set()

    def may_write(self) -> bool:
        """Whether nobody writes and nothing is queued, so that an answer may go out past the queue."""
        return not (self._answering or self._writing or self._pieces or self.error is not None)

    def begin_write(self, through: int) -> None:
        """An answer goes out past the queue, which acknowledges everything up to this number."""
        self._answering = True
        self._written_through = max(self._written_through, through)

    def end_write(self) -> None:
        """It has been written, or never will be."""
        self._answering = False
        self._woken.set()

    async def has_room(self) -> None:
        """Waits while too much is unwritten."""
        if self.unwritten_bytes > HIGH_WATER_BYTES:
            self._room.clear()
            await self._room.wait()

    async def take(self) -> bytes | None:
        """The next message, or None when the stream ends. The one before has been written."""
        self._writing = False
        while self._answering or not (self._pieces or self._must_acknowledge):
            has_ended = self.error is not None or self._finish_at == self._written_through
            if has_ended and not self._answering:
                return None
            self._woken.clear()
            await self._woken.wait()
        self._writing = True
        return self._encode_next()

    @property
    def _must_acknowledge(self) -> bool:
        """Whether what nobody waits for is to be acknowledged now: its time is over, or the stream ends."""
        is_due = self._ack_is_due or self._finish_at is not None or self.error is not None
        return is_due and self._acknowledged > self._written_through

    def _encode_next(self) -> bytes:
        listed: list[Completion | InlineResult] = []
        taps: list[TapPiece] = []
        changes: list[DeviceChange] = []
        size = 0
        # In this order: what comes meanwhile makes it due again. And before the look at the queue, where what
        # was listed before it is then.
        self._ack_is_due = False
        acknowledged = self._acknowledged
        while self._pieces and size < MESSAGE_BYTES:
            batch, more = self._pieces.popleft()
            listed.extend(batch.completions)
            taps.extend(batch.taps)
            changes.extend(batch.changes)
            size += more
            self._written_through = max(self._written_through, batch.completed_through)
        if not self._pieces:
            self._written_through = max(self._written_through, acknowledged)
        self._taken_bytes += size
        if self.unwritten_bytes <= HIGH_WATER_BYTES:
            self._room.set()
        return encode_results(
            CompletionBatch(self._written_through, tuple(listed), tuple(taps), tuple(changes))
        )


def _split(batch: CompletionBatch) -> Iterator[tuple[CompletionBatch, int]]:
    """Pieces of about MESSAGE_BYTES and their sizes, changes and taps first; the last one alone
    acknowledges."""
    for change in batch.changes:
        yield CompletionBatch(0, changes=(change,)), CHANGE_BYTES * (1 + len(change.appeared))
    for tap in batch.taps:
        yield CompletionBatch(0, (), (tap,)), COMPLETION_BYTES + len(tap.data)
    listed: list[Completion | InlineResult] = []
    size = COMPLETION_BYTES
    for one in batch.completions:
        listed.append(one)
        size += _size_of(one)
        if size >= MESSAGE_BYTES:
            yield CompletionBatch(0, tuple(listed)), size
            listed, size = [], COMPLETION_BYTES
    yield CompletionBatch(batch.completed_through, tuple(listed)), size


def _size_of(one: Completion | InlineResult) -> int:
    if isinstance(one, InlineResult):
        return COMPLETION_BYTES + one.form.template.size_bytes
    data = sum(len(data) for _, data in one.outputs)
    error = ERROR_BYTES if one.error is not None else 0
    return COMPLETION_BYTES + error + len(one.data) + data
