"""A loop over several hosts whose steps go from host to host without this process.

Each host runs its part (`loop_parts.py`). This process reads what they stream, in the order of the
steps, and ends all of them when one fails. It sends feeds to all of them, numbered; the part that
decides tells the others which ones the next step takes.

The loop's thread reads. Any thread stops or cancels, and reports that a part has ended. One thread
at a time feeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from heliograph_backends.contract import HostedLoop
from heliograph_proto.commands import FeedLoop
from heliograph_proto.errors import (
    CancelledError,
    DeadlineExceededError,
    HeliographError,
    LoopEndedError,
    ProtocolError,
)
from heliograph_server.plans.loop_parts import LoopParts
from heliograph_server.resources.feed_order import FeedOrder

#: Returns the error to raise, of those of parts by place.
Choose = Callable[[Sequence[tuple[int, HeliographError]]], HeliographError]


class HostedLoops(HostedLoop):
    """The parts of one loop. `stack` is closed at the end; `taps` are the streamed outputs."""

    def __init__(
        self,
        parts: LoopParts,
        loops: Sequence[HostedLoop],
        taps: Sequence[int],
        choose: Choose,
        stack: ExitStack,
        *,
        assigns: bool,
    ) -> None:
        self._parts, self._loops, self._taps = parts, loops, taps
        self._choose, self._stack = choose, stack
        self.stops_together = assigns
        self._values = self._read()
        self._feeds = FeedOrder()
        self._at_end: Callable[[int], None] = lambda done: None
        for loop in loops:
            loop.when_ended(partial(self._ended, loop))

    def __repr__(self) -> str:
        return f"<HostedLoops of {len(self._loops)} parts>"

    def _ended(self, loop: HostedLoop) -> None:
        if loop.has_failed:
            self.cancel()

    def next(self) -> tuple[int, int, memoryview] | None:
        try:
            return next(self._values, None)
        except HeliographError as error:
            self.cancel()
            raise self._first(error) from None

    def _read(self) -> Iterator[tuple[int, int, memoryview]]:
        step, is_over = 0, not self._taps
        while not is_over:
            for place, output in zip(self._parts.tapped, self._taps, strict=True):
                found = self._loops[place].next()
                if found is None:
                    is_over = True
                    break
                if found[0] != step:
                    raise ProtocolError(f"a member sent a value of step {found[0]}, not of step {step}")
                yield step, output, found[2]
            step += 1
        for loop in self._loops:
            if loop.next() is not None:
                raise ProtocolError("a member ran more steps of the loop than another one")

    def _first(self, error: HeliographError) -> HeliographError:
        """Wait for the end of all parts, and return the error to raise."""
        errors = []
        for place, loop in enumerate(self._loops):
            try:
                while loop.next() is not None:
                    pass
            except HeliographError as failure:
                errors.append((place, failure))
        # An error that only this process found counts more than the cancelling that follows from it.
        return self._choose([*errors, (-1, error)])

    @property
    def has_failed(self) -> bool:
        return any(one.has_failed for one in self._loops)

    @property
    def steps(self) -> int | None:
        # A part that failed is behind the others, or level with them.
        told = [one.steps for one in self._loops]
        return min((one for one in told if one is not None), default=None)

    def when_ended(self, call: Callable[[], None]) -> None:
        self._loops[self._parts.decides].when_ended(call)

    def when_counted(self, call: Callable[[int], None]) -> None:
        self._loops[self._parts.decides].when_counted(call)

    def feed(self, feed: FeedLoop, done: Callable[[int | HeliographError], None]) -> Callable[[], None]:
        apart_from, values = self._feeds.add(feed), dict(feed.values)
        numbered = replace(feed, number=self._feeds.last, apart_from=apart_from)
        withdrawals = []
        for place, loop in enumerate(self._loops):
            own = tuple((mine, values[one]) for one, mine in self._parts.fed[place] if one in values)
            part = replace(numbered, values=own, rows=feed.rows if own else ())
            withdrawals.append(loop.feed(part, partial(self._fed, place, done)))
        # The others drop what the one that decides did not take.
        return withdrawals[self._parts.decides]

    def _fed(
        self, place: int, done: Callable[[int | HeliographError], None], result: int | HeliographError
    ) -> None:
        """Note what became of a feed at one part. The loop ends if not all of them have it."""
        decides = place == self._parts.decides
        expected = (LoopEndedError, *((CancelledError, DeadlineExceededError) if decides else ()))
        if isinstance(result, HeliographError) and not isinstance(result, expected):
            self.cancel()
        if decides:
            done(result)

    def stop(self) -> None:
        self._loops[self._parts.decides].stop()

    def cancel(self) -> None:
        for loop in self._loops:
            loop.cancel()

    def at_end(self, call: Callable[[int], None]) -> None:
        """Call `call` at the end of a loop that succeeds, with its number of steps."""
        self._at_end = call

    def close(self) -> None:
        self.cancel()
        for loop in self._loops:
            loop.close()
        if not self.has_failed and self.steps:
            self._at_end(self.steps)
        self._stack.close()
