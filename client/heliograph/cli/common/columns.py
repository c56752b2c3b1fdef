"""Lines of text in aligned columns for a screen of a given width, with bars and sparklines. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from heliograph.cli.common.text import plain
from heliograph.explain.tables import align

Style: TypeAlias = Literal["title", "header", "warning", "quiet", "marked", ""]
#: A line and its style.
Line: TypeAlias = tuple[str, Style]
Row: TypeAlias = Sequence[str]

#: The cells of a bar, and of a sparkline.
BAR = 10
SPARKS = 12
GAP = 2


@dataclass(frozen=True, slots=True)
class Column:
    """A column. On a narrow screen, columns of the highest rank are dropped first; 0 stays."""

    title: str
    rank: int = 0


def table(
    columns: Sequence[Column], rows: Iterable[Row], width: int, marked: int | None = None
) -> list[Line]:
    """An empty line, a header and the rows, of which one may be marked; nothing without rows."""
    cells = [[column.title for column in columns], *(list(map(plain, row)) for row in rows)]
    if len(cells) == 1:
        return []
    kept = _fitting(columns, cells, width)
    header, *lines = align([[row[place] for place in kept] for row in cells])
    styled: list[Line] = [(line, "marked" if place == marked else "") for place, line in enumerate(lines)]
    return [("", ""), (header, "header"), *styled]


def _fitting(columns: Sequence[Column], cells: Sequence[Row], width: int) -> list[int]:
    """The indices of the columns that are shown."""
    # Empty columns are dropped.
    kept = [place for place in range(len(columns)) if any(row[place] for row in cells[1:])]
    sizes = [max(len(row[place]) for row in cells) for place in range(len(columns))]
    while sum(sizes[place] + GAP for place in kept) - GAP > width:
        least = max(kept, key=lambda place: (columns[place].rank, place))
        if columns[least].rank == 0:
            break
        kept.remove(least)
    return kept


def cut(text: str, width: int) -> str:
    """The text, or its begin if it is wider than the screen."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def bar(share: float) -> str:
    """A share from 0 to 1 as a bar."""
    full = round(min(1.0, max(0.0, share)) * BAR)
    return "█" * full + "░" * (BAR - full)


#: Parts of a cell, from its eighth to all of it.
_SPARKS = "▁▂▃▄▅▆▇█"


def sparks(values: Sequence[float], most: float = 0.0) -> str:
    """Numbers of 0 and more as columns in their order, a cell each; fewer than two are nothing.

    A column is full at `most`, or at the largest of them.
    """
    if len(values) < 2:
        return ""
    full = max(most, *values)
    steps = len(_SPARKS) - 1
    shares = (max(0.0, one) / full if full > 0 else 0.0 for one in values)
    return "".join(_SPARKS[min(steps, round(share * steps))] for share in shares)
