"""`make figures`: the page of figures in docs, from the JSON of `run.py`.

    python tests/bench/report.py dist/figures.json

It writes docs/operate/figures.md, adds the run to history.jsonl beside this file, which has the
ratio of each figure by commit, and draws that as docs/operate/figures.svg.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias

from bounds import bound_of
from history_picture import drawn

Row: TypeAlias = Mapping[str, Any]

HERE = Path(__file__).parent
HISTORY = HERE / "history.jsonl"
PAGE = HERE.parents[1] / "docs" / "operate" / "figures.md"
PICTURE = PAGE.with_suffix(".svg")
#: Runs that are kept.
MOST_RUNS = 60
#: Figures whose names begin so are what the machine can do, and have no bar.
LIMITS = "limits/"

INTRODUCTION = """\
# Figures

`make figures` measures and writes this page. Each figure stands beside a peer or a limit that was
measured in the same run, in turns with it. The ratio is ours divided by the peer's; smaller is
better. It is the median of the rounds, with the least and the most of them behind it. A figure is
`ok` if its ratio is at most its bar, else `short`; a few are measured without a bar. Times on
another machine differ; ratios differ less.
"""
PICTURE_TEXT = """\
## History

The ratio of each figure divided by its bar, by commit, on machines with this processor: one thin
line for each figure, a thick one for the median of a benchmark. Below the horizontal line figures
are `ok`.

![Ratios by commit](figures.svg)
"""


def page(found: Row) -> str:
    """Return the page."""
    rows = found["figures"]
    limits = [row for row in rows if row["name"].startswith(LIMITS)]
    others = [row for row in rows if not row["name"].startswith(LIMITS)]
    barred = [row for row in others if isfinite(row["bar"])]
    ok, minutes = sum(row["ok"] for row in barred), sum(found["seconds"].values()) / 60
    parts = [
        INTRODUCTION,
        f"{ok} of {len(barred)} figures are ok. Measuring took {minutes:.0f} minutes.\n",
        "## Machine\n",
        table(("", ""), found["about"].items()),
    ]
    if limits:
        parts += ["## Limits of the machine\n", table(("limit", "value", "unit"), map(limit_cells, limits))]
    titles = ("figure", "ours", "peer", "unit", "ratio", "least to most", "bar", "", "against", "note")
    for name, group in groupby(others, key=lambda row: row["benchmark"]):
        parts += [f"## {name}\n", table(titles, map(cells, group))]
    if known := list(bounds(others)):
        parts += ["## Bounds of the short ones\n", table(("figures", "bound"), known)]
    if found["missing"]:
        parts += ["## Not measured\n", table(("benchmark", "reason"), found["missing"].items())]
    return "\n".join([*parts, PICTURE_TEXT])


def cells(row: Row) -> Sequence[str]:
    """Return the cells of a figure."""
    spread = f"{row['least']:.2f} to {row['most']:.2f}" if row["least"] != row["most"] else ""
    numbers = (short(row["ours"]), short(row["peer"]), row["unit"], f"{row['ratio']:.2f}", spread)
    verdict = (f"{row['bar']:.2f}", "ok" if row["ok"] else "short") if isfinite(row["bar"]) else ("", "")
    return row["name"], *numbers, *verdict, row["against"], row["note"]


def bounds(rows: Sequence[Row]) -> Iterator[Sequence[str]]:
    """Yield the short figures that have a known bound in common, and that."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if not row["ok"] and (says := bound_of(row["name"])):
            names.setdefault(says, []).append(row["name"])
    for says, found in names.items():
        yield ", ".join(found), says


def limit_cells(row: Row) -> Sequence[str]:
    """Return the cells of a limit of the machine."""
    return row["name"].removeprefix(LIMITS), short(row["ours"]), row["unit"]


def short(number: float) -> str:
    """Return three digits of a number, and all before its point."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def table(titles: Sequence[str], rows: Any) -> str:
    """Return a table in Markdown."""
    lines = [titles, ["--"] * len(titles), *rows]
    return "".join("| " + " | ".join(str(cell).replace("|", "/") for cell in line) + " |\n" for line in lines)


def with_run(lines: Sequence[str], found: Row) -> list[str]:
    """Return the lines of the history with this run, instead of an earlier one of its commit."""
    about = found["about"]
    run = {key: about[key] for key in ("commit", "date", "processor", "processors")}
    ratios = {
        row["name"]: [row["benchmark"], round(row["ratio"], 4), row["bar"]]
        for row in found["figures"]
        if isfinite(row["bar"])
    }
    kept = [line for line in lines if not _is_same(json.loads(line), run)]
    return [*kept, json.dumps({**run, "figures": ratios}, separators=(",", ":"))][-MOST_RUNS:]


def _is_same(one: Row, run: Row) -> bool:
    return all(one[key] == run[key] for key in ("commit", "processor", "processors"))


def runs_like_the_last(lines: Sequence[str]) -> Iterator[Row]:
    """Yield the runs on a machine as that of the last one."""
    runs = [json.loads(line) for line in lines]
    for run in runs:
        if all(run[key] == runs[-1][key] for key in ("processor", "processors")):
            yield run


def main() -> int:
    """Write the page, the history and the picture."""
    found = json.loads(Path(sys.argv[1]).read_text())
    lines = with_run(HISTORY.read_text().splitlines() if HISTORY.exists() else [], found)
    HISTORY.write_text("".join(f"{line}\n" for line in lines))
    PICTURE.write_text(drawn(list(runs_like_the_last(lines))))
    PAGE.write_text(page(found))
    print(f"{PAGE}, {PICTURE} and {HISTORY} are written")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
