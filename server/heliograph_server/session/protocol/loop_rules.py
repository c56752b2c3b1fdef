"""Loops: what may be asked of one, and how much of what it streams may be unread. Pure.

Numbers from the wire are compared as Python's integers, which do not overflow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from heliograph_proto import commands as c
from heliograph_proto.commands import check_until
from heliograph_proto.errors import InvalidArgumentError, LimitExceededError
from heliograph_proto.plans import Port


def check_loop(run: c.RunCommand, inputs: Sequence[Port], outputs: Sequence[Port]) -> None:
    """Whether a plan of these inputs and outputs can be run as this loop. Raises InvalidArgumentError."""
    loop = run.loop
    assert loop is not None
    if run.pause:
        raise InvalidArgumentError(
            "a loop that pauses", advice="it waits by itself while its client has too much unread"
        )
    if not 1 <= loop.steps <= c.MAX_LOOP_STEPS:
        raise InvalidArgumentError(f"a loop of {loop.steps} steps: 1 to {c.MAX_LOOP_STEPS:,} can be done")
    for carry in loop.carries:
        _check_carry(carry, inputs, outputs)
    _check_once((one.input for one in loop.carries), "input", "is fed from two outputs")
    if loop.until is not None:
        _check_output(loop.until, outputs)
        check_until(outputs[loop.until])
    for place in loop.taps:
        _check_output(place, outputs)
    _check_once(loop.taps, "output", "is streamed twice")


def _check_carry(carry: c.Carry, inputs: Sequence[Port], outputs: Sequence[Port]) -> None:
    _check_output(carry.output, outputs)
    if not 0 <= carry.input < len(inputs):
        raise InvalidArgumentError(f"input {carry.input} of a plan with {len(inputs)}")
    given, taken = outputs[carry.output], inputs[carry.input]
    if given.type != taken.type:
        raise InvalidArgumentError(
            f"output {given.name!r} is {given.type}, and is to be input {taken.name!r}, which is {taken.type}"
        )


def _check_output(place: int, outputs: Sequence[Port]) -> None:
    if not 0 <= place < len(outputs):
        raise InvalidArgumentError(f"output {place} of a plan with {len(outputs)}")


def _check_once(places: Iterable[int], what: str, problem: str) -> None:
    seen: set[int] = set()
    for place in places:
        if place in seen:
            raise InvalidArgumentError(f"{what} {place} {problem}")
        seen.add(place)


def streamed_bytes(loop: c.Loop, outputs: Sequence[Port]) -> int:
    """Of the outputs that one step streams."""
    return sum(outputs[place].type.nbytes for place in loop.taps)


class Unread:
    """What a loop has streamed and its client has not taken yet, in bytes as `Loop.unread_bytes` counts."""

    __slots__ = ("_taken_bytes", "_told_bytes", "most_bytes")

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._told_bytes = self._taken_bytes = 0

    def __repr__(self) -> str:
        return f"<Unread {self._told_bytes - self._taken_bytes:,} of {self.most_bytes:,} bytes>"

    def has_room(self, size_bytes: int) -> bool:
        """Whether a value of so many bytes may go now. A large one goes alone."""
        unread = self._told_bytes - self._taken_bytes
        return not unread or unread + size_bytes + c.STREAMED_VALUE_BYTES <= self.most_bytes

    def tell(self, size_bytes: int) -> None:
        """A value of so many bytes went."""
        self._told_bytes += size_bytes + c.STREAMED_VALUE_BYTES

    def take(self, taken_bytes: int) -> None:
        """So much was taken since the loop began. Raises InvalidArgumentError for more than went."""
        if taken_bytes > self._told_bytes:
            raise InvalidArgumentError(
                f"{taken_bytes:,} bytes were taken of a loop that sent {self._told_bytes:,}"
            )
        self._taken_bytes = max(self._taken_bytes, taken_bytes)


def never_read() -> LimitExceededError:
    """The error of a loop whose client can no longer say that it took anything."""
    return LimitExceededError(
        "the loop's values are unread, and no command can come any more that says they were taken",
        advice="half-close the command stream when the loop has ended",
    )
