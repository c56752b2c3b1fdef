"""Draws the history of figures as SVG: a panel for each benchmark, with ratios by commit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Any, TypeAlias
from xml.sax.saxutils import escape

Run: TypeAlias = Mapping[str, Any]
#: A line: the place of a run, and the ratio divided by the bar.
Line: TypeAlias = list[tuple[int, float]]

COLUMNS, WIDTH, HEIGHT, GAP, TITLE = 4, 210, 110, 16, 16
#: The ratio divided by the bar at the lower and the upper edge of a panel; lines beyond are cut there.
LOWEST, HIGHEST = 1 / 8, 4.0
STYLE = (
    "text{font:11px sans-serif;fill:#888}.thin{stroke:#5a8fd6;stroke-width:.7;opacity:.6}"
    ".thick{stroke:#d6532a;stroke-width:2}.bar{stroke:#888;stroke-dasharray:3 3}"
    ".frame{fill:none;stroke:#8884}polyline{fill:none}circle{fill:#d6532a;stroke:none}"
)


def drawn(runs: Sequence[Run]) -> str:
    """Return the picture of some runs, the oldest first."""
    lines = lines_of(runs)
    rows = math.ceil(len(lines) / COLUMNS)
    wide, high = COLUMNS * (WIDTH + GAP) + GAP, rows * (HEIGHT + TITLE + GAP) + 2 * GAP
    found = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}">',
        f"<style>{STYLE}</style>",
    ]
    for place, (benchmark, inside) in enumerate(sorted(lines.items())):
        x = GAP + place % COLUMNS * (WIDTH + GAP)
        y = TITLE + place // COLUMNS * (HEIGHT + TITLE + GAP)
        found.append(f'<g transform="translate({x},{y})">{panel(benchmark, inside, len(runs))}</g>')
    ends = " to ".join(dict.fromkeys(f"{run['commit']} ({run['date']})" for run in (runs[0], runs[-1])))
    found.append(f'<text x="{GAP}" y="{high - GAP // 2}">{escape(ends)}</text></svg>')
    return "\n".join(found) + "\n"


def lines_of(runs: Sequence[Run]) -> dict[str, dict[str, Line]]:
    """Return the line of each figure, by benchmark."""
    found: dict[str, dict[str, Line]] = {}
    for place, run in enumerate(runs):
        for name, (benchmark, ratio, bar) in run["figures"].items():
            found.setdefault(benchmark, {}).setdefault(name, []).append((place, ratio / bar))
    return found


def panel(title: str, lines: Mapping[str, Line], count: int) -> str:
    """Return the lines of a benchmark in a frame, with their median."""
    by_run: dict[int, list[float]] = {}
    for place, value in chain.from_iterable(lines.values()):
        by_run.setdefault(place, []).append(value)
    thick = [(place, median(by_run[place])) for place in sorted(by_run)]
    parts = [f'<text y="-4">{escape(title)}</text><rect class="frame" width="{WIDTH}" height="{HEIGHT}"/>']
    parts.append(f'<line class="bar" x2="{WIDTH}" y1="{height(1):.1f}" y2="{height(1):.1f}"/>')
    for name, line in lines.items():
        what = f"<title>{escape(name)}</title>"
        parts.append(f'<polyline class="thin" points="{points(line, count)}">{what}</polyline>')
    parts.append(f'<polyline class="thick" points="{points(thick, count)}"/>')
    x, y = points(thick[-1:], count).split(",")
    parts.append(f'<circle cx="{x}" cy="{y}" r="3"><title>{thick[-1][1]:.2f}</title></circle>')
    return "".join(parts)


def points(line: Line, count: int) -> str:
    """Return a line as points of a panel."""
    first, step = (0.0, WIDTH / (count - 1)) if count > 1 else (WIDTH / 2, 0.0)
    return " ".join(f"{first + place * step:.1f},{height(value):.1f}" for place, value in line)


def height(value: float) -> float:
    """Return the height of a value, on a scale of powers, from above."""
    share = math.log(max(value, LOWEST) / LOWEST) / math.log(HIGHEST / LOWEST)
    return HEIGHT * (1 - min(share, 1.0))
