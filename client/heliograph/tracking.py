"""`hg.track`: a bar around a loop of one's own, such as the steps of a training."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sized
from typing import Generic, TypeVar

from heliograph.core.progress.bars import AUTOMATIC, Meter, ProgressBars, Waiting
from heliograph_proto.errors import InvalidArgumentError

T = TypeVar("T")


def track(
    items: Iterable[T] | AsyncIterable[T], what: str = "training", *, total: int | None = None
) -> Track[T]:
    """Iterate over items and show how many are done, in a terminal or a notebook::

        steps = hg.track(batches, "training")
        for batch in steps:
            steps.show(loss=train(batch))

    A bar appears after a second, beside those of uploads, and only where a person sees it: with
    rich on a terminal, and in a notebook. A loop's observed values can be tracked too:
    `hg.track(loop.taps(), "generating", total=steps)`.

    Args:
        items: The items; `async for` takes asynchronous items.
        what: The text before the bar.
        total: The number of items (default: `len(items)`, if it has one).

    Raises InvalidArgumentError.
    """
    count = len(items) if total is None and isinstance(items, Sized) else total
    if not isinstance(items, Iterable | AsyncIterable):
        raise InvalidArgumentError(
            f"{items!r:.80} cannot be iterated", advice="a list, a range, a generator or a loop's taps"
        )
    if not isinstance(what, str) or not (count is None or (isinstance(count, int) and count >= 0)):
        raise InvalidArgumentError(
            f"track(what={what!r:.40}, total={total!r:.40})", advice="a text, and a number of items"
        )
    return Track(items, what, count, AUTOMATIC)


class Track(Generic[T]):
    """Items with a bar. Made by `hg.track`; it is iterated once."""

    def __init__(
        self, items: Iterable[T] | AsyncIterable[T], what: str, total: int | None, bars: ProgressBars
    ) -> None:
        self._items, self._what, self._total, self._bars = items, what, total, bars
        self._meter: Meter | None = None
        self._values = ""

    def show(self, **values: object) -> None:
        """Show values beside the bar from the next item on, such as the loss."""
        self._values = ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in ((name, _plain(value)) for name, value in values.items())
        )
        if self._meter is not None:
            self._meter.values = self._values

    def __iter__(self) -> Iterator[T]:
        if not isinstance(self._items, Iterable):
            raise InvalidArgumentError("the items are asynchronous", advice="async for item in hg.track(...)")
        ended = self._begin()
        try:
            for one in self._items:
                yield one
                self._advance()
        finally:
            ended.end()

    async def __aiter__(self) -> AsyncIterator[T]:
        ended = self._begin()
        try:
            if isinstance(self._items, AsyncIterable):
                async for one in self._items:
                    yield one
                    self._advance()
            else:
                for one in self._items:
                    yield one
                    self._advance()
        finally:
            ended.end()

    def _begin(self) -> Meter | Waiting:
        if not self._total:
            return Waiting(self._what, self._bars)
        self._meter = Meter(self._what, self._total, self._bars, "steps")
        self._meter.values = self._values
        return self._meter

    def _advance(self) -> None:
        if self._meter is not None:
            self._meter(1)


def _plain(value: object) -> object:
    """A number of an array of one element, or the value."""
    item = getattr(value, "item", None)
    try:
        return item() if callable(item) else value
    except (TypeError, ValueError):
        return value
