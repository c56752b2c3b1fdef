"""Feeds of running loops: what waits for a step, and which step takes what. Pure.

Numbers from the wire are compared as Python integers, which do not overflow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from heliograph_proto import commands as c
from heliograph_proto.commands import loop_ended
from heliograph_proto.errors import (
    HeliographError,
    InvalidArgumentError,
    InvalidInputError,
    LimitExceededError,
)
from heliograph_proto.plans import Port
from heliograph_proto.types import TensorType
from heliograph_server.resources.checks import len_bytes
from heliograph_server.session.protocol.instructions import FreeTask, RunTask, Task

if TYPE_CHECKING:
    from heliograph_server.session.protocol.dependencies import CommandState


class Mailbox:
    """The feeds of one loop that wait for its next step, in their order.

    The session's lock guards it. The loop's thread looks at `waiting` without the lock, between two
    steps.
    """

    __slots__ = ("_ports", "_size_bytes", "is_closed", "most_bytes", "waiting")

    def __init__(self, loop: c.Loop, inputs: Sequence[Port]) -> None:
        self._ports = {place: inputs[place] for place in loop.fed_inputs}
        self.most_bytes = loop.fed_bytes
        #: Sequence numbers and feeds.
        self.waiting: deque[tuple[int, c.FeedLoop]] = deque()
        self._size_bytes = 0
        #: True once the loop has ended.
        self.is_closed = False

    def __repr__(self) -> str:
        return f"<Mailbox of {len(self.waiting)} feeds, {self._size_bytes:,} of {self.most_bytes:,} bytes>"

    def add(self, sequence: int, feed: c.FeedLoop) -> None:
        """Add a feed. Raises InvalidInputError, LimitExceededError, with nothing changed."""
        if not feed.values:
            raise InvalidInputError("a feed without values")
        places = [place for place, _ in feed.values]
        if len(set(places)) < len(places):
            raise InvalidInputError("a feed gives an input twice")
        for place, data in feed.values:
            self._check(place, data, feed.rows)
        size = feed.waiting_bytes
        if self.waiting and self._size_bytes + size > self.most_bytes:
            raise LimitExceededError(
                f"{self._size_bytes:,} bytes of feeds wait for the loop's next step, {size:,} more would "
                f"pass its limit of {self.most_bytes:,}",
                advice="wait until a step has taken some",
            )
        self.waiting.append((sequence, feed))
        self._size_bytes += size

    def _check(self, place: int, data: c.Bytes, rows: tuple[int, ...]) -> None:
        port = self._ports.get(place)
        if port is None:
            raise InvalidInputError(
                f"input {place} of the loop is not fed", advice="name it when the loop starts"
            )
        expected = port.type.nbytes
        if rows:
            expected = len(rows) * row_bytes(port)
            if max(rows) >= port.type.shape[0] or min(rows) < 0 or len(set(rows)) < len(rows):
                raise InvalidInputError(
                    f"rows of input {port.name!r}, which is {port.type}: each is given once, from 0 to "
                    f"{port.type.shape[0] - 1}"
                )
        if (size := len_bytes(data)) != expected:
            what = f"{len(rows)} rows of {port.type}" if rows else f"{port.type}"
            raise InvalidInputError(f"input {port.name!r} is {what} of {expected} bytes, not {size}")

    def take(self) -> list[tuple[int, c.FeedLoop]]:
        """Return the feeds for one step: all that wait, up to the first that sets a row again."""
        taken: list[tuple[int, c.FeedLoop]] = []
        #: By input: the rows that are set; None is all of them.
        filled: dict[int, set[int] | None] = {}
        while self.waiting and not _meets(filled, self.waiting[0][1]):
            sequence, feed = self.waiting.popleft()
            self._size_bytes -= feed.waiting_bytes
            taken.append((sequence, feed))
            for place, _ in feed.values:
                rows = filled.setdefault(place, set())
                if not feed.rows:
                    filled[place] = None
                elif rows is not None:
                    rows.update(feed.rows)
        return taken

    def close(self) -> list[int]:
        """Take no more feeds. Returns the sequence numbers of those that no step took."""
        self.is_closed = True
        left = [sequence for sequence, _ in self.waiting]
        self.waiting.clear()
        self._size_bytes = 0
        return left


def _meets(filled: Mapping[int, set[int] | None], feed: c.FeedLoop) -> bool:
    """True if a feed sets a row that is set already."""
    for place, _ in feed.values:
        if place in filled:
            rows = filled[place]
            if rows is None or not feed.rows or not rows.isdisjoint(feed.rows):
                return True
    return False


def row_bytes(port: Port) -> int:
    """Return the bytes of one row of an input. Raises InvalidInputError for one without rows."""
    type_ = port.type
    if not type_.shape or not type_.shape[0]:
        raise InvalidInputError(f"input {port.name!r} is {type_}, which has no rows")
    return TensorType(type_.dtype, type_.shape[1:]).nbytes if type_.ndim > 1 else _element_bytes(port)


def _element_bytes(port: Port) -> int:
    if port.type.dtype.kind == "quantized":
        raise InvalidInputError(f"input {port.name!r} is {port.type}, whose elements are no rows")
    return port.type.dtype.block_bytes


class LoopFeeds:
    """The feeds of one session's loops.

    `commands` are the unretired ones, and `end` reports and retires one. A value has at most
    `inline_bytes`.
    """

    def __init__(
        self,
        commands: Mapping[int, CommandState],
        end: Callable[[CommandState, c.Completion], None],
        inline_bytes: int,
    ) -> None:
        self._commands, self._end, self._inline_bytes = commands, end, inline_bytes

    def receive(self, state: CommandState, kind: c.FeedLoop) -> None:
        """Leave a feed in its loop's mailbox, where it waits for a step; a refused one fails
        alone."""
        state.stream = None
        if state.error is not None:
            return
        try:
            for _, data in kind.values:
                if (size := len_bytes(data)) > self._inline_bytes:
                    raise LimitExceededError(
                        f"{size:,} bytes of one input in a feed; this server takes {self._inline_bytes:,}",
                        advice="feed fewer rows at a time",
                    )
            self._mailbox(kind.sequence).add(state.sequence, kind)
            # Its loop ends it.
            state.blockers = 1
        except HeliographError as error:
            state.error = error.from_command(state.sequence)

    def _mailbox(self, sequence: int) -> Mailbox:
        loop = self._commands.get(sequence)
        if loop is None:
            raise loop_ended()
        mailbox = _mailbox_of(loop.task)
        if mailbox is None:
            raise InvalidArgumentError(f"command {sequence} is no loop that is fed")
        if mailbox.is_closed:
            raise loop_ended()
        return mailbox

    def take(self, sequence: int, step: int) -> list[c.FeedLoop]:
        """Return the feeds that a step of a loop takes, and report them as done."""
        mailbox, found = _mailbox_of(self._commands[sequence].task), []
        assert mailbox is not None
        for number, feed in mailbox.take():
            state = self._commands[number]
            # One that was cancelled has been reported.
            if not state.reported:
                found.append(feed)
            self._end(state, c.Completion(number, steps=step))
        return found

    def end(self, task: Task | FreeTask | None) -> None:
        """Fail the feeds that a loop did not take before its end."""
        mailbox = _mailbox_of(task)
        for number in mailbox.close() if mailbox is not None else ():
            state = self._commands[number]
            state.error = state.error or loop_ended().from_command(number)
            self._end(state, c.Completion(number))


def _mailbox_of(task: Task | FreeTask | None) -> Mailbox | None:
    progress = task.progress if isinstance(task, RunTask) else None
    return None if progress is None else progress.mailbox
