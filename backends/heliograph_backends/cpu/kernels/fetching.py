"""Which lines of weights are asked for ahead of time.

A weight of a product with few rows is read once, so what it costs is mostly the way from memory. Kernels
read 32 of its rows side by side: for the hardware these are 32 streams, more than it follows. But the rows
together are one stretch of memory, so while some are multiplied the stretch behind them is asked for line
by line, a few lines with each element so that no queue fills up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .lanes import integer, prefetch
from .layout import CACHE_LINE_BYTES
from .stored_types import Form


class Fetches:
    """Lines that are asked for while the elements of a unit are taken in order."""

    def __init__(self, builder: Any, places: Sequence[Any], elements: int) -> None:
        self._builder, self._places, self._elements = builder, places, elements

    def go(self, element: int) -> None:
        """Ask for what belongs to an element."""
        first, last = (number * len(self._places) // self._elements for number in (element, element + 1))
        for place in self._places[first:last]:
            prefetch(self._builder, place)


def unit_bytes(form: Form) -> int:
    """Return the bytes that a unit takes of one row."""
    return form.block_bytes * form.unit // form.block_size


def in_rows(builder: Any, form: Form, rows: Sequence[Any], ahead: Any) -> Fetches:
    """Ask for as much of each row as a unit takes, `ahead` bytes from the rows' addresses."""
    places = [builder.add(row, ahead) for row in rows]
    return Fetches(builder, _lines(builder, places, unit_bytes(form)), form.unit)


def behind_rows(builder: Any, form: Form, following: Any, start: Any, rows: int) -> Fetches:
    """Ask for as much as a unit, which begins at element `start`, takes of so many rows; of those that
    follow, taken as one stretch without gaps.
    """
    share = rows * unit_bytes(form)
    offset = builder.mul(builder.udiv(start, integer(form.unit)), integer(share))
    return Fetches(builder, _lines(builder, [builder.add(following, offset)], share), form.unit)


def _lines(builder: Any, places: Sequence[Any], size: int) -> list[Any]:
    lines = range(0, size, CACHE_LINE_BYTES)
    return [builder.add(place, integer(line)) for line in lines for place in places]
