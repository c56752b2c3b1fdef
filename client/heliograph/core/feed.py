"""Observed values between the command stream and their reader."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from heliograph.core.arrays import byte_view, room_for
from heliograph.core.future import Outcome
from heliograph_proto.commands import STREAMED_VALUE_BYTES, TapPiece
from heliograph_proto.errors import HeliographError, LimitExceededError, ProtocolError
from heliograph_proto.types import TensorType


class Feed:
    """The values of one run, each given once. It belongs to the core and is used where the core is.

    If the run pauses, the server waits after each value for a Continue. It is sent when the next
    value is requested or, once the run `flows`, at once, since no reader will come.
    """

    __slots__ = (
        "_array",
        "_filled",
        "_owes",
        "_seen",
        "_skipped",
        "_step",
        "_what",
        "changed",
        "error",
        "flows",
        "goes_on",
        "is_paused",
        "pauses",
        "ready",
        "repeats",
        "types",
    )
    #: True if no value is given after a missing one; otherwise the others are given first.
    ends_at_gap = False

    def __init__(self, types: Mapping[int, TensorType], pauses: bool) -> None:
        #: The types of the observed values: nodes, and outputs of a loop under their `output_key`.
        self.types = types
        self.pauses = pauses
        #: Settled when a value has come or the run has ended, and then replaced by a new outcome.
        self.changed = Outcome()
        #: The values that were not read yet: key, step of a loop, and raw elements
        #: (`DType.storage`).
        self.ready: deque[tuple[int, int, np.ndarray[Any, Any]]] = deque()
        #: True while the server waits.
        self.is_paused = False
        self.flows = False
        #: The reason why values are missing, such as too little memory in this process.
        self.error: HeliographError | None = None
        #: The key of the value that is arriving; None between two values.
        self._what: int | None = None
        self._step, self._filled = 0, 0
        self._array: np.ndarray[Any, Any] | None = None
        #: Whole values that came, and those of them that come again and are dropped.
        self._seen = self._skipped = 0
        #: True while such values come; whether the server is to wait after the last of them; and
        #: whether it may go on after the value that came last.
        self.repeats = self._owes = self.goes_on = False

    def begin_again(self, steps: int = 0, unsent: int = 0) -> None:
        """Expect the run's values from its start, or those of a loop after so many steps but for
        the last values of the last of them, since the server does it again.

        Those that came are dropped, and acknowledged for the server. Some that did not come may
        still come before."""
        start = steps * len(self.types) - unsent
        if self._seen < start:
            return
        self._owes, self.is_paused = self.is_paused, False
        self._what, self._step, self._filled, self._array = None, 0, 0, None
        self._skipped, self._seen = max(self._seen, self._skipped), start
        self.repeats = self._skipped > start

    @property
    def held_bytes(self) -> int:
        """The most bytes of values that the server holds: those of one run."""
        return sum(type_.nbytes for type_ in self.types.values())

    @property
    def may_wait(self) -> bool:
        """True if the run may end only when its values are read."""
        return self.pauses and not self.flows

    @property
    def taken_bytes(self) -> int:
        """The number of bytes of a loop that a Continue acknowledges."""
        return 0

    def take(self) -> tuple[int, int, np.ndarray[Any, Any]]:
        """Return the next value, of which there is one."""
        return self.ready.popleft()

    def may_proceed(self) -> bool:
        """True, once, if a Continue is to be sent now. Safe in destructors."""
        waited, self.is_paused = self.is_paused, False
        return waited

    def add(self, piece: TapPiece) -> bool:
        """Add a piece. Returns True if it completes a value.

        Raises ProtocolError for a misplaced piece.
        """
        what = key_of(piece)
        if piece.offset_bytes == 0:
            self._begin(what, piece.step)
        size_bytes = self.types[self._what].nbytes if self._what is not None else 0
        end = piece.offset_bytes + len(piece.data)
        fits = what == self._what and piece.step == self._step
        fits = fits and piece.offset_bytes == self._filled and end <= size_bytes
        if not fits or piece.last != (end == size_bytes):
            raise ProtocolError(f"the server sent a piece of {name_of(what)} in the wrong place")
        if self._array is not None:
            byte_view(self._array)[self._filled : end] = piece.data
        self._filled = end
        if piece.last:
            self._complete()
        return piece.last

    def _begin(self, what: int, step: int) -> None:
        if self._what is not None or what not in self.types or not self._may_follow(step):
            raise ProtocolError(
                f"the server sent {name_of(what)}, which is not observed or interrupts another value"
            )
        self._what, self._step, self._filled = what, step, 0
        if self.repeats:
            return
        try:
            self._array = self._room_for(self.types[what])
        except HeliographError as error:
            self.error = self.error or error

    def _may_follow(self, step: int) -> bool:
        """True if a value of this step may come now."""
        return step == 0

    def _room_for(self, type: TensorType) -> np.ndarray[Any, Any]:
        return room_for(type.storage_shape, type.dtype.storage)

    def _complete(self) -> None:
        assert self._what is not None
        self._seen += 1
        if self._array is not None:
            self.ready.append((self._what, self._step, self._array))
        self._what, self._array = None, None
        was_repeated = self.repeats
        self.repeats = was_repeated and self._seen < self._skipped
        self.goes_on = was_repeated and (self.repeats or not self._owes)
        # Set last: `flow`, perhaps in another thread, looks at it.
        self.is_paused = self.pauses


class LoopFeed(Feed):
    """The values of a loop, which pauses while more than `unread_bytes` are unacknowledged.

    Values are acknowledged when they are read or, once the loop `flows`, when they arrive. From
    then on at most `kept_bytes` are kept for a late reader. Further values are dropped, and the
    reader gets an error.
    """

    ends_at_gap = True

    __slots__ = (
        "_arrived_bytes",
        "_at_bytes",
        "_asked_bytes",
        "_kept",
        "_largest",
        "_said_bytes",
        "_start_bytes",
        "steps",
        "unread_bytes",
    )

    def __init__(
        self, types: Mapping[int, TensorType], steps: int, unread_bytes: int, kept_bytes: int
    ) -> None:
        super().__init__(types, False)
        self.steps, self.unread_bytes, self._kept = steps, unread_bytes, kept_bytes
        self._largest = max((cost_of(type_.nbytes) for type_ in types.values()), default=0)
        #: Counted as in `Loop.unread_bytes`: bytes of whole values that arrived, that were read,
        #: and that were acknowledged.
        self._arrived_bytes = self._asked_bytes = self._said_bytes = 0
        #: Those from the loop's start to the value that came last, and to the one with which the
        #: server began, for the last time.
        self._at_bytes = self._start_bytes = 0

    def begin_again(self, steps: int = 0, unsent: int = 0) -> None:
        costs = [cost_of(type_.nbytes) for type_ in self.types.values()]
        self._said_bytes = 0
        self._start_bytes = steps * sum(costs) - sum(costs[len(costs) - unsent :])
        super().begin_again(steps, unsent)
        # Behind the start, values that the server does not count come first.
        self._at_bytes = min(self._at_bytes, self._start_bytes)

    @property
    def held_bytes(self) -> int:
        return self.unread_bytes + super().held_bytes

    @property
    def may_wait(self) -> bool:
        return not self.flows

    @property
    def taken_bytes(self) -> int:
        # A server that does the loop again must not hear of values that it has not sent yet.
        taken = min(self._at_bytes, self._arrived_bytes if self.flows else self._asked_bytes)
        return max(0, taken - self._start_bytes)

    def take(self) -> tuple[int, int, np.ndarray[Any, Any]]:
        found = super().take()
        self._asked_bytes += cost_of(self.types[found[0]].nbytes)
        return found

    def may_proceed(self) -> bool:
        taken = self.taken_bytes
        unsaid = taken - self._said_bytes
        # Not for each value, but before the loop would wait for it.
        if not unsaid or unsaid + max(self._largest, self.unread_bytes // 2) <= self.unread_bytes:
            return False
        self._said_bytes = taken
        return True

    def _may_follow(self, step: int) -> bool:
        return self._step <= step < self.steps

    def _room_for(self, type: TensorType) -> np.ndarray[Any, Any]:
        if self.error is not None:
            raise self.error
        if self.flows and self._arrived_bytes - self._asked_bytes > self._kept:
            raise LimitExceededError(
                f"more than {self._kept:,} bytes of the loop's values came without being read, and were "
                "dropped",
                advice="read them from run.taps() before waiting for run.result()",
            )
        return super()._room_for(type)

    def _complete(self) -> None:
        assert self._what is not None
        cost = cost_of(self.types[self._what].nbytes)
        self._at_bytes += cost
        if not self.repeats:
            self._arrived_bytes += cost
            if self._array is None:
                # It cannot be read any more.
                self._asked_bytes += cost
        super()._complete()


def cost_of(size_bytes: int) -> int:
    """Return the bytes that a value of a loop counts."""
    return size_bytes + STREAMED_VALUE_BYTES


def output_key(place: int) -> int:
    """Return the key of a loop's output among the observed values. A node's key is its number."""
    return -1 - place


def key_of(piece: TapPiece) -> int:
    """Return the key of the observed value that a piece belongs to."""
    return piece.node if piece.output is None else output_key(piece.output)


def name_of(what: int) -> str:
    """Return the words for an observed value."""
    return f"node {what}" if what >= 0 else f"output {-1 - what}"
