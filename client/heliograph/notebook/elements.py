"""Elements of a notebook's HTML: every text is escaped and bounded, and colours follow the page's.

Borders and bars are shades of grey and of one accent that are readable on dark and light pages, and
text has the page's own colour. Nothing runs in the browser.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

#: The longest text of one cell, and the most rows of a table.
MOST_CHARACTERS = 160
MOST_ROWS = 20

_STYLE = (
    "<style>"
    ".hg-card{border:1px solid rgba(128,128,128,.35);border-radius:6px;padding:.6em .8em;margin:.2em 0;"
    "display:inline-block;max-width:100%;overflow-x:auto;color:inherit;font-size:13px;line-height:1.45}"
    ".hg-card .hg-title{font-weight:600;margin-bottom:.3em}"
    ".hg-card .hg-note{opacity:.75;margin:.3em 0}"
    ".hg-card .hg-warning{font-weight:600;border-left:3px solid #d9822b;padding-left:.5em;margin:.3em 0}"
    ".hg-card table{border-collapse:collapse;margin:.3em 0;color:inherit;background:transparent}"
    ".hg-card th,.hg-card td{text-align:left!important;padding:.15em .7em!important;"
    "border:0;border-bottom:1px solid rgba(128,128,128,.25);color:inherit;background:transparent;"
    "white-space:nowrap}"
    ".hg-card th{font-weight:600;opacity:.8}"
    ".hg-card td.hg-number{text-align:right!important;font-variant-numeric:tabular-nums}"
    ".hg-card summary{cursor:pointer;opacity:.8}"
    ".hg-card svg{display:block;margin:.3em 0;color:inherit}"
    "</style>"
)
#: Readable beside both black and white.
ACCENT = "#4c8dd6"
#: For devices, in their order; then again from the first.
COLOURS = (ACCENT, "#d9822b", "#5aa469", "#b26fc4", "#c8564b", "#8a8f3c", "#3f9fa8", "#a9745b")


class Markup(str):
    """HTML that is safe: made of escaped texts."""

    __slots__ = ()


def text(value: object) -> Markup:
    """A text as one escaped line of printable characters, cut if it is long."""
    if isinstance(value, Markup):
        return value
    found = "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in str(value))
    cut = found if len(found) <= MOST_CHARACTERS else found[: MOST_CHARACTERS - 1] + "…"
    return Markup(escape(cut, quote=True))


def card(title: object, *parts: Markup) -> str:
    """A framed view under a title; what a `_repr_html_` returns."""
    inside = "".join(part for part in parts if part)
    return f'{_STYLE}<div class="hg-card"><div class="hg-title">{text(title)}</div>{inside}</div>'


def table(header: Sequence[object], rows: Iterable[Sequence[object]], *, most: int = MOST_ROWS) -> Markup:
    """Rows under a header, at most so many; nothing without rows."""
    found = list(rows)
    if not found:
        return Markup("")
    head = "".join(f"<th>{text(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in found[:most])
    more = note(f"and {len(found) - most:,} more") if len(found) > most else ""
    return Markup(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}")


def _cell(value: object) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number:
        return f'<td class="hg-number">{text(number(value))}</td>'  # type: ignore[arg-type]
    return f"<td>{text(value)}</td>"


def number(value: float) -> str:
    """A number in a few digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def facts(pairs: Iterable[tuple[str, object]]) -> Markup:
    """Names and values, a line each; pairs without a value are left out."""
    rows = "".join(
        f"<tr><th>{text(name)}</th>{_cell(value)}</tr>" for name, value in pairs if value not in (None, "")
    )
    return Markup(f"<table><tbody>{rows}</tbody></table>" if rows else "")


def note(value: object) -> Markup:
    """A quiet line."""
    return Markup(f'<div class="hg-note">{text(value)}</div>')


def warning(value: object) -> Markup:
    """A line that is not to be overlooked."""
    return Markup(f'<div class="hg-warning">{text(value)}</div>')


def heading(value: object) -> Markup:
    """A line above a table."""
    return Markup(f'<div class="hg-note"><b>{text(value)}</b></div>')


def folded(title: object, *parts: Markup) -> Markup:
    """Parts that are shown on a click; nothing if they are empty."""
    inside = "".join(parts)
    return Markup(f"<details><summary>{text(title)}</summary>{inside}</details>" if inside else "")


# Pictures


def bar(share: float, label: object, *, width: int = 120) -> Markup:
    """A share from 0 to 1 as a bar with a label beside it."""
    full = round(min(1.0, max(0.0, share)) * width) if share == share else 0
    return Markup(
        f'<svg width="{width}" height="10" role="img" aria-label="{text(label)}" '
        'style="display:inline-block;vertical-align:middle;margin:0 .5em 0 0">'
        f'<rect width="{width}" height="10" rx="2" fill="currentColor" opacity=".15"/>'
        f'<rect width="{full}" height="10" rx="2" fill="{ACCENT}"/></svg>{text(label)}'
    )


def histogram(counts: Sequence[int], label: object, *, width: int = 240, height: int = 48) -> Markup:
    """Counts of equal intervals as columns."""
    if not counts or not max(counts):
        return Markup("")
    step, most = width / len(counts), max(counts)
    columns = []
    for place, count in enumerate(counts):
        # A count that is not zero is seen.
        tall = max(1.0, count / most * (height - 2)) if count else 0.0
        columns.append(
            f'<rect x="{place * step:.2f}" y="{height - 1 - tall:.2f}" width="{max(1.0, step - 1):.2f}" '
            f'height="{tall:.2f}" fill="{ACCENT}"/>'
        )
    base = f'<rect y="{height - 1}" width="{width}" height="1" fill="currentColor" opacity=".4"/>'
    return Markup(
        f'<svg width="{width}" height="{height}" role="img" aria-label="{text(label)}">'
        f"{''.join(columns)}{base}</svg>"
    )


def line(values: Sequence[float], label: object, *, width: int = 240, height: int = 48) -> Markup:
    """Finite numbers in their order as a line; nothing for fewer than two."""
    found = [one for one in values if one - one == 0]
    if len(found) < 2:
        return Markup("")
    low, high = min(found), max(found)
    reach = (high - low) or 1.0
    points = " ".join(
        f"{place / (len(found) - 1) * width:.1f},{height - 2 - (one - low) / reach * (height - 4):.1f}"
        for place, one in enumerate(found)
    )
    return Markup(
        f'<svg width="{width}" height="{height}" role="img" aria-label="{text(label)}">'
        f'<polyline points="{points}" fill="none" stroke="{ACCENT}" stroke-width="1.5"/></svg>'
    )


def lanes(rows: Sequence[tuple[str, Sequence[tuple[float, float]]]], label: object) -> Markup:
    """Spans (start, end) on a lane for each name, to one scale."""
    end = max((stop for _, spans in rows for _, stop in spans), default=0.0)
    if end <= 0:
        return Markup("")
    width, left, tall = 360, 110, 16
    parts = []
    for place, (name, spans) in enumerate(rows):
        top = place * tall
        style = 'font-size="11" fill="currentColor"'
        parts.append(f'<text x="0" y="{top + 12}" {style}>{text(name[:16])}</text>')
        for start, stop in spans:
            begin, long = start / end * width, max(1.0, (stop - start) / end * width)
            parts.append(
                f'<rect x="{left + begin:.2f}" y="{top + 2}" width="{long:.2f}" height="{tall - 4}" rx="1" '
                f'fill="{COLOURS[place % len(COLOURS)]}"/>'
            )
    size = f'width="{left + width + 1}" height="{len(rows) * tall}"'
    return Markup(f'<svg {size} role="img" aria-label="{text(label)}">{"".join(parts)}</svg>')
