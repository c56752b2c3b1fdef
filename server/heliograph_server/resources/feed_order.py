"""The order of a loop's feeds: which of them no step takes together. Pure.

Feeds that set the same row go to steps of their own, so that each is seen by a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from heliograph_proto.commands import FeedLoop

#: The most feeds that one step of a loop on several hosts takes: as many as have a bit in what the
#: hosts tell each other.
MOST_TOLD = 64


class FeedOrder:
    """Numbers the feeds of one loop from 1 on."""

    def __init__(self) -> None:
        #: The number of the last feed.
        self.last = 0
        #: By input: the last feed of all of it, and that of each row since.
        self._whole: dict[int, int] = {}
        self._rows: dict[int, dict[int, int]] = {}

    def __repr__(self) -> str:
        return f"<FeedOrder of {self.last} feeds>"

    def add(self, feed: FeedLoop) -> int:
        """Number a feed, and return the greatest number of those before it that set one of its
        rows; 0: none did."""
        self.last += 1
        apart_from = 0
        for place, _ in feed.values:
            rows = self._rows.setdefault(place, {})
            met = [rows.get(row, 0) for row in feed.rows] if feed.rows else rows.values()
            apart_from = max(apart_from, self._whole.get(place, 0), *met)
            if feed.rows:
                rows.update(dict.fromkeys(feed.rows, self.last))
            else:
                rows.clear()
                self._whole[place] = self.last
        return apart_from


@dataclass(frozen=True, slots=True)
class ToldFeeds:
    """The feeds that the partitions of a loop take before a step, as one tells the others."""

    #: The number of the last one that was taken.
    through: int = 0
    #: A bit for that one, the lowest, and for each of those before it: set if it was withdrawn.
    withdrawn: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.withdrawn < 1 << MOST_TOLD, "as many feeds as bits"

    def has_withdrawn(self, number: int) -> bool:
        """True if a feed that was taken, of the last ones, was withdrawn."""
        return bool(self.withdrawn >> (self.through - number) & 1)
