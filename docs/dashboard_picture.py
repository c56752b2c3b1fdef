"""The picture of the dashboard for Grafana on the page about metrics: `make dashboard-picture`.

It is drawn from the dashboard's own queries, which a Prometheus evaluates over a minute of daemons
at work. Grafana has no part in it: panels lie where the dashboard places them, and all are lines.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heliograph.explain.pictures.words import DEVICE_COLOURS, fitted
from heliograph_proto.types import size_text

if TYPE_CHECKING:
    from prometheus_site import Site

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "operate" / "grafana.svg"
DASHBOARD = ROOT / "deploy" / "grafana" / "heliograph.json"
#: Points in time and their values, by the name in the legend.
Series = Mapping[str, Sequence[tuple[float, float]]]

#: The time that is drawn, and that before it of which the first rates are, in seconds.
DRAWN_SECONDS, BEFORE_SECONDS = 60, 20
#: The size of a unit of the dashboard's grid, and the margins.
ACROSS, DOWN, MARGIN, HEAD = 40.0, 14.0, 10.0, 52.0
#: The most lines of a panel, and names below it.
MOST_SERIES, MOST_NAMES = 12, 4
CAPTION = (
    "Drawn from the dashboard's queries, which Prometheus evaluated over a minute of two daemons at work.",
    "This is not Grafana: there the panels are live, some are numbers or tables, and colours differ.",
)
STYLE = """
text { font: 10px sans-serif; fill: #24292f }
.row { font-weight: bold; font-size: 12px }
.title { font-weight: bold }
.head { font-weight: bold; font-size: 15px }
.small { font-size: 8.5px; fill: #57606a }
.panel { fill: #fff; stroke: #d0d7de }
.ground { fill: #f6f8fa }
polyline { fill: none; stroke-width: 1.4 }
"""


def draw(dashboard: Mapping[str, Any], found: Mapping[str, Series]) -> str:
    """Return the picture as SVG. `found` has the series of panels, by their titles."""
    panels = dashboard["panels"]
    width = 24 * ACROSS + 2 * MARGIN
    height = max(it["gridPos"]["y"] + it["gridPos"]["h"] for it in panels) * DOWN + HEAD + MARGIN
    name = escape(f"{dashboard['title']} dashboard. {CAPTION[0]}")
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{name}" '
        f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}">',
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{width:g}" height="{height:g}"/>',
        _text("head", MARGIN, 20, f"{dashboard['title']}: a picture of its queries"),
        *(_text("small", MARGIN, 34 + 11 * place, line) for place, line in enumerate(CAPTION)),
    ]
    for panel in panels:
        lines += _panel(panel, found.get(panel["title"], {}))
    return "\n".join([*lines, "</svg>", ""])


def form_of(picture: str) -> str:
    """Return a picture without its data: the panels and where they lie."""
    return re.sub(r"<g>.*?</g>\n", "", picture, flags=re.S)


def _panel(panel: Mapping[str, Any], series: Series) -> Iterator[str]:
    at = panel["gridPos"]
    x, y = MARGIN + at["x"] * ACROSS, HEAD + at["y"] * DOWN
    wide, tall = at["w"] * ACROSS - 6, at["h"] * DOWN - 6
    if panel["type"] == "row":
        yield _text("row", x, y + 11, panel["title"])
        return
    yield f'<rect class="panel" x="{x:g}" y="{y:g}" width="{wide:g}" height="{tall:g}" rx="3"/>'
    yield _text("title", x + 6, y + 13, fitted(panel["title"], wide - 12, 10))
    if series:
        yield "<g>"
        unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "none")
        yield from _data(panel["type"] == "stat", unit, series, (x + 6, y + 18, wide - 12, tall - 22))
        yield "</g>"


def _data(
    is_stat: bool, unit: str, series: Series, place: tuple[float, float, float, float]
) -> Iterator[str]:
    """Lines over time with the largest value and names, or the last value of each."""
    x, y, wide, tall = place
    names = list(series)
    if is_stat:
        for row, name in enumerate(names[:2]):
            last = f"{name}: {_amount(series[name][-1][1], unit)}" if ": " not in name else name
            yield _text("small", x, y + 10 + 11 * row, fitted(last, wide, 8.5))
        return
    most = max((value for points in series.values() for _, value in points), default=0.0)
    ends = [points[place][0] for points in series.values() for place in (0, -1)]
    begin, end = min(ends), max(ends)
    plot = tall - 14
    for number, name in enumerate(names[:MOST_SERIES]):
        points = " ".join(
            f"{x + wide * (when - begin) / max(end - begin, 1):.1f},"
            f"{y + plot - plot * (value / most if most > 0 else 0):.1f}"
            for when, value in series[name]
        )
        yield f'<polyline points="{points}" stroke="{_colour(number)}">'
        yield f"<title>{escape(name)}</title></polyline>"
    yield _text("small", x + wide, y - 5, f"most {_amount(most, unit)}", ' text-anchor="end"')
    shown = names[:MOST_NAMES]
    room = wide / max(1, len(shown))
    for number, name in enumerate(shown):
        more = f" +{len(names) - MOST_NAMES}" if number == MOST_NAMES - 1 and len(names) > MOST_NAMES else ""
        at = x + number * room
        yield f'<rect x="{at:.1f}" y="{y + tall - 8:.1f}" width="6" height="6" fill="{_colour(number)}"/>'
        yield _text("small", at + 8, y + tall - 2, fitted(name + more, room - 10, 8.5))


def _colour(number: int) -> str:
    return DEVICE_COLOURS[number % len(DEVICE_COLOURS)]


def _amount(value: float, unit: str) -> str:
    match unit:
        case "bytes":
            return size_text(value)
        case "Bps":
            return f"{size_text(value)}/s"
        case "s":
            return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
        case "percentunit":
            return f"{value:.0%}"
        case "ops":
            return f"{value:.3g}/s"
    return f"{value:,.4g}"


def _text(kind: str, x: float, y: float, text: str, more: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{more}>{escape(text)}</text>'


# Data


def look(site: Site, dashboard: Mapping[str, Any]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return what each panel shows over the last minute of a site, by its title."""
    from prometheus_site import filled

    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    end = time.time()
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            how = {"start": str(end - DRAWN_SECONDS), "end": str(end), "step": "2"}
            answer = site.ask("query_range", query=filled(target["expr"]), **how)
            for one in answer["result"]:
                labels = one["metric"] | {"instance": site.names.get(one["metric"].get("instance"), "")}
                name = re.sub(r"{{(\w+)}}", lambda it: labels.get(it[1], ""), target["legendFormat"])  # noqa: B023
                points = [(float(when), float(value)) for when, value in one["values"] if value != "NaN"]
                if points:
                    found.setdefault(panel["title"], {})[name or "all"] = points
    return found


def write(path: Path) -> None:
    """Have daemons work for a minute and more, and draw that."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from prometheus_site import working_site
    from waiting import until

    dashboard = json.loads(DASHBOARD.read_text())
    seconds = DRAWN_SECONDS + BEFORE_SECONDS
    with tempfile.TemporaryDirectory() as folder, working_site(Path(folder)) as site:
        scrapes = f"min(count_over_time(heliograph_serving[{2 * seconds}s]))"
        until(lambda: (site.numbers(scrapes) or [0])[0] >= seconds, "a minute of data", 4 * seconds)
        path.write_text(draw(dashboard, look(site, dashboard)))


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
