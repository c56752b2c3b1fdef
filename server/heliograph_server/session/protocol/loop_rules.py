"""Validation of loops, and flow control of the values that they stream. Pure.

Numbers from the wire are compared as Python integers, which do not overflow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from heliograph_proto import commands as c
from heliograph_proto.commands import check_until
from heliograph_proto.errors import InvalidArgumentError, LimitExceededError
from heliograph_proto.plans import Port
from heliograph_server.resources.handles import PlanHandle

#: The number that no run of a partition reaches.
MOST_RUNS = 2**63


def check_loop(run: c.RunCommand, inputs: Sequence[Port], outputs: Sequence[Port]) -> None:
    """Raise InvalidArgumentError unless a plan with these ports can run as this loop."""
    loop = run.loop
    assert loop is not None
    if run.pause:
        raise InvalidArgumentError(
            "a loop that pauses", advice="a loop already waits while its client has too much unread"
        )
    if not 1 <= loop.steps <= c.MAX_LOOP_STEPS:
        raise InvalidArgumentError(f"a loop of {loop.steps} steps; it can have 1 to {c.MAX_LOOP_STEPS:,}")
    for carry in loop.carries:
        _check_carry(carry, inputs, outputs)
    _check_once((one.input for one in loop.carries), "input", "is fed from two outputs")
    if loop.until is not None:
        _check_output(loop.until, outputs)
        check_until(outputs[loop.until])
    for place in loop.taps:
        _check_output(place, outputs)
    _check_once(loop.taps, "output", "is streamed twice")
    for place in loop.fed_inputs:
        if not 0 <= place < len(inputs):
            raise InvalidArgumentError(f"input {place} of a plan with {len(inputs)}")
    _check_once(loop.fed_inputs, "input", "is named twice among those that may be fed")
    if loop.gather_ms > c.MOST_GATHER_MS:
        raise InvalidArgumentError(
            f"values that gather for {loop.gather_ms:,} ms; {c.MOST_GATHER_MS:,} at most"
        )
    if loop.fed_bytes and not loop.is_fed:
        raise InvalidArgumentError("bytes for feeds of a loop that takes none")


def check_loop_exchange(run: c.RunCommand, plan: PlanHandle) -> None:
    """Raise InvalidArgumentError unless a partition, and no other plan, loops together with
    others."""
    loop = run.loop
    assert loop is not None
    exchange = loop.exchange
    if (exchange is None) is not (plan.exchange_run is None):
        raise InvalidArgumentError(
            "a loop of a partition says what it exchanges between two steps, and others exchange nothing",
            advice="loop over the whole graph",
        )
    if exchange is None:
        return
    if loop.fed_inputs and not exchange.fed:
        raise InvalidArgumentError("a loop of a partition that is fed alone")
    if loop.until is not None and exchange.told is not None:
        raise InvalidArgumentError("a loop of a partition that is told of its end and decides it too")
    come, go = plan.loop_edges
    if run.exchange_run > MOST_RUNS - loop.steps:
        raise InvalidArgumentError(f"a loop whose last step would be run {run.exchange_run + loop.steps - 1}")
    for used, most, what in ((exchange.arrivals, come, "arrival"), (exchange.departures, go, "departure")):
        if any(not 0 <= one < most for one in used):
            raise InvalidArgumentError(f"{what} {max(used)} between two steps, of {most}")
        _check_once(used, what, "between two steps is named twice")
    for _, place in (*exchange.gives, *exchange.tells_with):
        _check_output(place, plan.outputs)
    inputs = [place for _, place in exchange.takes] + list(exchange.told_with)
    if any(not 0 <= place < len(plan.inputs) for place in inputs):
        raise InvalidArgumentError(f"an input of a plan with {len(plan.inputs)}")
    _check_once((*(one.input for one in loop.carries), *inputs), "input", "is given twice between two steps")
    _check_told(exchange, plan)


def _check_told(exchange: c.LoopExchange, plan: PlanHandle) -> None:
    """Raise InvalidArgumentError unless what goes with what is told is small, and is told."""
    if exchange.told_with and exchange.told is None:
        raise InvalidArgumentError("inputs come with what a partition is told, and it is told nothing")
    sizes = Counter[int]()
    for departure, place in exchange.tells_with:
        if departure not in exchange.tells:
            raise InvalidArgumentError(f"an output goes with departure {departure}, which tells nothing")
        sizes[departure] += plan.outputs[place].type.nbytes
    come = sum(plan.inputs[place].type.nbytes for place in exchange.told_with)
    if (most := max((come, *sizes.values()))) > c.MAX_TOLD_BYTES:
        raise InvalidArgumentError(f"{most:,} bytes go with what is told, at most {c.MAX_TOLD_BYTES:,} may")


def _check_carry(carry: c.Carry, inputs: Sequence[Port], outputs: Sequence[Port]) -> None:
    _check_output(carry.output, outputs)
    if not 0 <= carry.input < len(inputs):
        raise InvalidArgumentError(f"input {carry.input} of a plan with {len(inputs)}")
    given, taken = outputs[carry.output], inputs[carry.input]
    if given.type != taken.type:
        raise InvalidArgumentError(
            f"output {given.name!r} is {given.type}, but is fed to input {taken.name!r}, "
            f"which is {taken.type}"
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
    """Return the size of the outputs that one step streams."""
    return sum(outputs[place].type.nbytes for place in loop.taps)


class Unread:
    """The bytes that a loop has streamed and its client has not taken, counted as
    `Loop.unread_bytes` is."""

    __slots__ = ("_taken_bytes", "_sent_bytes", "most_bytes")

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._sent_bytes = self._taken_bytes = 0

    def __repr__(self) -> str:
        return f"<Unread {self._sent_bytes - self._taken_bytes:,} of {self.most_bytes:,} bytes>"

    def has_room(self, size_bytes: int) -> bool:
        """True if a value of this size may be sent now. A value above the limit is sent alone."""
        unread = self._sent_bytes - self._taken_bytes
        return not unread or unread + size_bytes + c.STREAMED_VALUE_BYTES <= self.most_bytes

    def tell(self, size_bytes: int) -> None:
        """Count a value that was sent."""
        self._sent_bytes += size_bytes + c.STREAMED_VALUE_BYTES

    def take(self, taken_bytes: int) -> None:
        """Record how many bytes were taken since the loop began.

        Raises InvalidArgumentError for more bytes than were sent.
        """
        if taken_bytes > self._sent_bytes:
            raise InvalidArgumentError(
                f"{taken_bytes:,} bytes were taken of a loop that sent {self._sent_bytes:,}"
            )
        self._taken_bytes = max(self._taken_bytes, taken_bytes)


def never_read() -> LimitExceededError:
    """The error of a loop that waits for its client after the end of the commands."""
    return LimitExceededError(
        "the loop's values are unread, and the command stream has ended, so they can no longer be taken",
        advice="half-close the command stream when the loop has ended",
    )
