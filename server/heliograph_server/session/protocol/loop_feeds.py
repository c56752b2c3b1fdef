"""Feeds of running loops: what waits for a step, and which step takes what. Pure.

Numbers from the wire are compared as Python integers, which do not overflow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from heliograph_server.resources.feed_order import MOST_TOLD, FeedOrder, ToldFeeds
from heliograph_server.session.protocol.instructions import (
    FreeTask,
    HandOn,
    Instruction,
    Proceed,
    RunTask,
    Task,
    Withdraw,
)

if TYPE_CHECKING:
    from heliograph_server.session.protocol.dependencies import CommandState


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A feed that waits, by the number of its command. `number` and `apart_from` are as those of
    `FeedOrder`."""

    sequence: int
    feed: c.FeedLoop
    number: int
    apart_from: int


class Mailbox:
    """The feeds of one loop that wait for its next step, in their order.

    The session's lock guards it. The loop's thread looks at `waiting` and `last` without the lock,
    between two steps. Those of a partition's loop come with their numbers, and may have no values.
    """

    __slots__ = ("_order", "_ports", "_size_bytes", "is_closed", "is_hosted", "last", "most_bytes", "waiting")

    def __init__(self, loop: c.Loop, inputs: Sequence[Port]) -> None:
        self._ports = {place: inputs[place] for place in loop.fed_inputs}
        self.most_bytes = loop.fed_bytes
        self.waiting: deque[_Waiting] = deque()
        self._size_bytes = 0
        #: None for a partition, whose feeds are numbered.
        self._order = FeedOrder() if loop.exchange is None else None
        #: The number of the last feed.
        self.last = 0
        #: True once the loop has ended.
        self.is_closed = False
        #: True if the loop goes on at other hosts, which take its feeds.
        self.is_hosted = False

    def __repr__(self) -> str:
        return f"<Mailbox of {len(self.waiting)} feeds, {self._size_bytes:,} of {self.most_bytes:,} bytes>"

    def add(self, sequence: int, feed: c.FeedLoop) -> None:
        """Add a feed. Raises InvalidInputError, LimitExceededError, with nothing changed."""
        self._check_number(feed)
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
        apart_from = feed.apart_from if self._order is None else self._order.add(feed)
        self.last += 1
        self.waiting.append(_Waiting(sequence, feed, self.last, apart_from))
        self._size_bytes += size

    def _check_number(self, feed: c.FeedLoop) -> None:
        if self._order is None:
            if feed.number != self.last + 1 or feed.apart_from > self.last:
                raise InvalidInputError(
                    f"feed {feed.number} of a partition's loop follows {self.last}, apart from "
                    f"{feed.apart_from}"
                )
        elif not feed.values:
            raise InvalidInputError("a feed without values")
        elif feed.number or feed.apart_from:
            raise InvalidInputError("a feed with a number, of a loop that is no partition's")

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

    @property
    def is_numbered(self) -> bool:
        """True for a partition's loop."""
        return self._order is None

    def take(self) -> list[_Waiting]:
        """Return the feeds for one step: all that wait, up to the first that sets a row again. A
        partition takes no more than it can tell."""
        taken: list[_Waiting] = []
        while self.waiting and self.waiting[0].apart_from < (taken or self.waiting)[0].number:
            if self._order is None and len(taken) == MOST_TOLD:
                break
            taken.append(self._pop())
        return taken

    def take_through(self, number: int) -> list[_Waiting]:
        """Return the feeds up to a number."""
        taken: list[_Waiting] = []
        while self.waiting and self.waiting[0].number <= number:
            taken.append(self._pop())
        return taken

    def _pop(self) -> _Waiting:
        found = self.waiting.popleft()
        self._size_bytes -= found.feed.waiting_bytes
        return found

    def remove(self, sequence: int) -> None:
        """Remove one feed, which a host took or refused."""
        for place, one in enumerate(self.waiting):
            if one.sequence == sequence:
                del self.waiting[place]
                self._size_bytes -= one.feed.waiting_bytes
                return

    def close(self) -> list[int]:
        """Take no more feeds. Returns the sequence numbers of those that no step took."""
        self.is_closed = True
        left = [one.sequence for one in self.waiting]
        self.waiting.clear()
        self._size_bytes = 0
        return left


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

    A loop at other hosts takes its feeds there: each is handed on as it comes, stays in the mailbox
    until they report it, and is done then. A cancel asks them to withdraw it, since they may have
    taken it already.
    """

    def __init__(
        self,
        commands: Mapping[int, CommandState],
        end: Callable[[CommandState, c.Completion], None],
        instructions: list[Instruction],
        inline_bytes: int,
    ) -> None:
        self._commands, self._end, self._inline_bytes = commands, end, inline_bytes
        self._instructions = instructions
        #: The mailboxes of feeds that were handed on, by the feeds' sequence numbers.
        self._handed_on: dict[int, Mailbox] = {}

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
            mailbox = self._mailbox(kind.sequence)
            mailbox.add(state.sequence, kind)
            # Its loop ends it.
            state.blockers = 1
            if mailbox.is_hosted:
                self._hand_on(mailbox, state.sequence, kind)
            elif kind.number:
                # The partition may wait for it.
                self._instructions.append(Proceed(kind.sequence))
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

    def take(
        self, sequence: int, step: int, told: ToldFeeds | None = None
    ) -> tuple[list[c.FeedLoop], ToldFeeds]:
        """Return the feeds that a step of a loop takes, and report them as done: those that wait,
        or those that another partition told. Also return what to tell others."""
        mailbox, found, withdrawn = _mailbox_of(self._commands[sequence].task), [], 0
        assert mailbox is not None
        taken = mailbox.take() if told is None else mailbox.take_through(told.through)
        for one in taken:
            state = self._commands[one.sequence]
            # One that was cancelled has been reported.
            if state.reported or (told is not None and told.has_withdrawn(one.number)):
                withdrawn |= 1 << taken[-1].number - one.number
            else:
                found.append(one.feed)
            self._end(state, c.Completion(one.sequence, steps=step))
        if told is not None or not (taken and mailbox.is_numbered):
            return found, ToldFeeds()
        return found, ToldFeeds(taken[-1].number, withdrawn)

    def host(self, sequence: int) -> None:
        """Hand on the feeds of a loop, which has begun at other hosts, from now on."""
        mailbox = _mailbox_of(self._commands[sequence].task)
        if mailbox is not None:
            mailbox.is_hosted = True
            for one in list(mailbox.waiting):
                state = self._commands[one.sequence]
                if state.reported:
                    # It was cancelled before the loop began, and its room is free again.
                    mailbox.remove(one.sequence)
                    self._end(state, c.Completion(one.sequence))
                else:
                    self._hand_on(mailbox, one.sequence, one.feed)

    def _hand_on(self, mailbox: Mailbox, sequence: int, feed: c.FeedLoop) -> None:
        self._handed_on[sequence] = mailbox
        self._instructions.append(HandOn(sequence, feed.sequence, feed))

    def withdraw(self, state: CommandState, error: HeliographError) -> bool:
        """True if a feed was handed on: it fails with this error if no step took it."""
        if state.sequence not in self._handed_on:
            return False
        state.interruption = state.interruption or error.from_command(state.sequence)
        self._instructions.append(Withdraw(state.sequence))
        return True

    def taken(self, sequence: int, result: int | HeliographError) -> None:
        """Report a feed that was handed on as done, with the step that took it, or as failed."""
        if (mailbox := self._handed_on.pop(sequence, None)) is None:
            return
        mailbox.remove(sequence)
        state = self._commands[sequence]
        if isinstance(result, HeliographError):
            state.error = state.error or state.interruption or result.from_command(sequence)
            self._end(state, c.Completion(sequence))
        else:
            self._end(state, c.Completion(sequence, steps=result))

    def end(self, task: Task | FreeTask | None, why: HeliographError | None) -> None:
        """Fail the feeds that a loop did not take before its end, or before its error."""
        mailbox = _mailbox_of(task)
        for number in mailbox.close() if mailbox is not None else ():
            self._handed_on.pop(number, None)
            state = self._commands[number]
            state.error = state.error or loop_ended(why).from_command(number)
            self._end(state, c.Completion(number))


def _mailbox_of(task: Task | FreeTask | None) -> Mailbox | None:
    progress = task.progress if isinstance(task, RunTask) else None
    return None if progress is None else progress.mailbox
