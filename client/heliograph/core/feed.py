"""Observed values on their way from the command stream to whoever asks for them."""

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
    """Values of one run, each given once. The core's: it is touched where the core is.

    Where the run pauses, the server waits after each value for a Continue: sent when the next one is asked
    for, or at once from when on the run `flows`, since nobody will ask.
    """

    __slots__ = (
        "_array",
        "_filled",
        "_step",
        "_what",
        "changed",
        "error",
        "flows",
        "is_paused",
        "pauses",
        "ready",
        "types",
    )
    #: Whether nothing more is given once a value is missing; else the others are given first.
    ends_at_gap = False

    def __init__(self, types: Mapping[int, TensorType], pauses: bool) -> None:
        #: Of what is observed: nodes, and outputs of a loop as `output_key` has them.
        self.types = types
        self.pauses = pauses
        #: Settled when a value has come, or the run has ended; then there is another.
        self.changed = Outcome()
        #: What it is, the step of a loop, and raw elements (`DType.storage`), that nobody has asked for yet.
        self.ready: deque[tuple[int, int, np.ndarray[Any, Any]]] = deque()
        #: Whether the server waits.
        self.is_paused = False
        self.flows = False
        #: Why values are missing, such as memory of this process.
        self.error: HeliographError | None = None
        #: Of the value that is coming; None between two.
        self._what: int | None = None
        self._step, self._filled = 0, 0
        self._array: np.ndarray[Any, Any] | None = None

    @property
    def held_bytes(self) -> int:
        """What the server holds of the values at most: all that one run brings."""
        return sum(type_.nbytes for type_ in self.types.values())

    @property
    def may_wait(self) -> bool:
        """Whether the run may end only when somebody asks for the values."""
        return self.pauses and not self.flows

    @property
    def taken_bytes(self) -> int:
        """What a Continue says of a loop."""
        return 0

    def take(self) -> tuple[int, int, np.ndarray[Any, Any]]:
        """The next value; there is one."""
        return self.ready.popleft()

    def may_proceed(self) -> bool:
        """Whether a Continue is to be sent now, which is told once. Safe in destructors."""
        waited, self.is_paused = self.is_paused, False
        return waited

    def add(self, piece: TapPiece) -> bool:
        """The next piece; whether a value is complete. Raises ProtocolError for one that does not fit."""
        what = place_of(piece)
        if piece.offset_bytes == 0:
            self._begin(what, piece.step)
        size_bytes = self.types[self._what].nbytes if self._what is not None else 0
        end = piece.offset_bytes + len(piece.data)
        fits = what == self._what and piece.step == self._step
        fits = fits and piece.offset_bytes == self._filled and end <= size_bytes
        if not fits or piece.last != (end == size_bytes):
            raise ProtocolError(f"the server sent a piece of {name_of(what)} that belongs nowhere")
        if self._array is not None:
            byte_view(self._array)[self._filled : end] = piece.data
        self._filled = end
        if piece.last:
            self._complete()
        return piece.last

    def _begin(self, what: int, step: int) -> None:
        if self._what is not None or what not in self.types or not self._may_follow(step):
            raise ProtocolError(
                f"the server sent {name_of(what)}, which is not observed, or in the midst of another"
            )
        self._what, self._step, self._filled = what, step, 0
        try:
            self._array = self._room_for(self.types[what])
        except HeliographError as error:
            self.error = self.error or error

    def _may_follow(self, step: int) -> bool:
        """Whether a value of this step may come now."""
        return step == 0

    def _room_for(self, type: TensorType) -> np.ndarray[Any, Any]:
        return room_for(type.storage_shape, type.dtype.storage)

    def _complete(self) -> None:
        assert self._what is not None
        if self._array is not None:
            self.ready.append((self._what, self._step, self._array))
        self._what, self._array = None, None
        # Before anybody looks whether it flows: `flow` may come from another thread.
        self.is_paused = self.pauses


class LoopFeed(Feed):
    """Values of a loop, which waits by itself while this side has more than `unread_bytes` of it that it did
    not say it took: when somebody takes them, or at once from when on the loop `flows`.

    From then on no more than `kept_bytes` are kept here for who may still ask; further ones are dropped, and
    whoever asks is told so.
    """

    ends_at_gap = True

    __slots__ = (
        "_arrived_bytes",
        "_asked_bytes",
        "_kept",
        "_largest",
        "_said_bytes",
        "steps",
        "unread_bytes",
    )

    def __init__(
        self, types: Mapping[int, TensorType], steps: int, unread_bytes: int, kept_bytes: int
    ) -> None:
        super().__init__(types, False)
        self.steps, self.unread_bytes, self._kept = steps, unread_bytes, kept_bytes
        self._largest = max((cost_of(type_.nbytes) for type_ in types.values()), default=0)
        #: As `Loop.unread_bytes` counts: what came whole, what was asked for, and what the server was told.
        self._arrived_bytes = self._asked_bytes = self._said_bytes = 0

    @property
    def held_bytes(self) -> int:
        return self.unread_bytes + super().held_bytes

    @property
    def may_wait(self) -> bool:
        return not self.flows

    @property
    def taken_bytes(self) -> int:
        return self._arrived_bytes if self.flows else self._asked_bytes

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
                f"more than {self._kept:,} bytes of the loop's values came while nobody took them, and were "
                "dropped",
                advice="take them from run.taps() before waiting for run.result()",
            )
        return super()._room_for(type)

    def _complete(self) -> None:
        assert self._what is not None
        cost = cost_of(self.types[self._what].nbytes)
        self._arrived_bytes += cost
        if self._array is None:
            # It will not be asked for.
            self._asked_bytes += cost
        super()._complete()


def cost_of(size_bytes: int) -> int:
    """What a value of a loop counts."""
    return size_bytes + STREAMED_VALUE_BYTES


def output_key(place: int) -> int:
    """An output of a loop among what is observed; a node is its number."""
    return -1 - place


def place_of(piece: TapPiece) -> int:
    """Which of what is observed a piece belongs to."""
    return piece.node if piece.output is None else output_key(piece.output)


def name_of(what: int) -> str:
    """One of what is observed, in words."""
    return f"node {what}" if what >= 0 else f"output {-1 - what}"
