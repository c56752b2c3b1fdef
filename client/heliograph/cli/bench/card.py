"""The report card of a daemon: rows with a figure or a reason, as JSON, and compared with another.
Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from heliograph.cli.common.text import MOST, plain, time_text
from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.types import size_text

#: The format of saved cards.
FORMAT = 1
#: Units, and whether more is better.
UNITS = {"s": False, "runs/s": True, "B/s": True, "flop/s": True, "tokens/s": True}


@dataclass(frozen=True, slots=True)
class Row:
    """A measure."""

    name: str
    #: One of UNITS.
    unit: str
    #: 0 if it was not measured.
    value: float = 0.0
    #: How it was measured, or why not.
    note: str = ""


@dataclass(frozen=True, slots=True)
class Card:
    """The measures of a daemon's device from one client."""

    server: str
    device: str
    description: str
    #: Where the client was: "on this host" or "elsewhere".
    client: str
    rows: tuple[Row, ...] = field(default_factory=tuple)

    @property
    def title(self) -> str:
        """The daemon in a line."""
        words = (self.server, f"{self.device}: {self.description}", f"client {self.client}")
        return ", ".join(map(plain, words))


def figure(row: Row) -> str:
    """The figure with its unit, for people."""
    if not row.value:
        return "-"
    if row.unit == "s":
        return time_text(row.value)
    if row.unit == "B/s":
        return f"{size_text(round(row.value))}/s"
    if row.unit == "flop/s":
        return f"{row.value / 1e9:,.4g} Gflop/s"
    return f"{row.value:,.4g} {row.unit}"


def table(card: Card) -> list[Sequence[str]]:
    """A header, and a row for each measure."""
    return [["measure", "figure", "note"], *([one.name, figure(one), plain(one.note)] for one in card.rows)]


def compared(cards: Sequence[tuple[str, Card]]) -> list[Sequence[str]]:
    """A header, and a row for each measure of the first card, with how much better others are.

    A ratio above 1 is better, whatever the unit.
    """
    names = [plain(name) for name, _ in cards]
    header = ["measure", names[0], *(cell for name in names[1:] for cell in (name, "better by"))]
    others = [{one.name: one for one in card.rows} for _, card in cards[1:]]
    rows = []
    for base in cards[0][1].rows:
        cells = [base.name, figure(base)]
        for rows_of in others:
            other = rows_of.get(base.name, Row(base.name, base.unit))
            cells += [figure(other), _ratio(base, other)]
        rows.append(cells)
    return [header, *rows]


def _ratio(base: Row, other: Row) -> str:
    if not (base.value and other.value) or base.unit != other.unit:
        return "-"
    ratio = other.value / base.value
    return f"{ratio if UNITS[base.unit] else 1 / ratio:.2f}x"


# Files


def as_json(card: Card) -> str:
    """The card for a file."""
    return json.dumps({"format": FORMAT, **asdict(card)}, indent=2, allow_nan=False)


def from_json(text: str, where: str) -> Card:
    """The card of a file, whose numbers are not trusted. Raises InvalidArgumentError."""
    try:
        found = json.loads(text)
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']!r:.20}")
        rows = tuple(map(_row, found["rows"]))
        words = {name: str(found[name]) for name in ("server", "device", "description", "client")}
        return Card(**words, rows=rows)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidArgumentError(
            f"{where} is no report card: {error!r:.100}", advice="write one: heliograph bench --json > FILE"
        ) from None


def _row(one: Mapping[str, Any]) -> Row:
    value, unit = float(one["value"]), str(one["unit"])
    if unit not in UNITS or not math.isfinite(value) or not 0 <= value < MOST:
        raise ValueError(f"{one['name']!r:.40} is {value:g} {unit:.20}")
    return Row(str(one["name"]), unit, value, str(one["note"]))
