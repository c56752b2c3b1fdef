"""The page of figures, the history and its picture, as `make figures` writes them."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
from paths import ROOT

BENCH = ROOT / "tests" / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import a module of the benchmarks; afterwards its name is free again."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module
    for name in {path.stem for path in BENCH.glob("*.py")} & (set(sys.modules) - before):
        del sys.modules[name]


@pytest.fixture
def report(bench: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module, which writes to a folder of its own."""
    module = bench("report")
    monkeypatch.setattr(module, "HISTORY", tmp_path / "history.jsonl")
    monkeypatch.setattr(module, "PAGE", tmp_path / "figures.md")
    monkeypatch.setattr(module, "PICTURE", tmp_path / "figures.svg")
    return module


def _row(name: str, benchmark: str, ratio: float, **changed: Any) -> dict[str, Any]:
    row = {
        "name": name,
        "benchmark": benchmark,
        "unit": "ms",
        "against": "a copy | warm",
        "note": "long",
    }
    numbers = {"ours": 10 * ratio, "peer": 10.0, "ratio": ratio, "bar": 1.5, "least": ratio, "most": ratio}
    return row | numbers | {"ok": ratio <= 1.5} | changed


def _found(commit: str, *rows: dict[str, Any], processor: str = "One") -> dict[str, Any]:
    about = {"date": "2030-01-02", "commit": commit, "processor": processor, "processors": "2"}
    return {"about": about, "figures": rows, "missing": {"hosts": "no namespaces"}, "seconds": {"all": 180.0}}


@pytest.fixture
def write(report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Write the page for what was measured."""
    file = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["report.py", str(file)])

    def write(found: Any) -> None:
        file.write_text(json.dumps(found))
        report.main()

    return write


def test_the_page_has_machine_limits_figures_with_spread_and_what_is_missing(
    write: Callable[[Any], None], tmp_path: Path
) -> None:
    rows = [
        _row("limits/copy", "limits", 1.0, ours=24.5, unit="GB/s"),
        _row("loops/step", "loops", 1.25, least=1.1, most=1.4),
        _row("minilm/batch-8", "minilm", 2.0),
    ]
    write(_found("abc", *rows))
    page = (tmp_path / "figures.md").read_text()
    assert "1 of 2 figures are ok. Measuring took 3 minutes." in page
    assert "| processor | One |" in page and "| copy | 24.5 | GB/s |" in page
    assert "| loops/step | 12.5 | 10 | ms | 1.25 | 1.10 to 1.40 | 1.50 | ok | a copy / warm | long |" in page
    assert "| minilm/batch-8 | 20 | 10 | ms | 2.00 |  | 1.50 | short |" in page
    assert "| hosts | no namespaces |" in page and "](figures.svg)" in page


def test_short_figures_with_a_known_bound_stand_beside_it(
    write: Callable[[Any], None], tmp_path: Path, bench: Callable[[str], ModuleType]
) -> None:
    """Bars that are met need no reason; a short figure without one is seen in its own table."""
    names = {"planner-time/wide": 2.0, "planner-time/bert": 1.9, "planner-time/chain": 1.0, "rows/roll": 3.0}
    write(_found("abc", *(_row(name, "planner", ratio) for name, ratio in names.items())))
    _, _, part = (tmp_path / "figures.md").read_text().partition("## Bounds")
    says = bench("bounds").bound_of("planner-time/wide")
    assert f"| planner-time/wide, planner-time/bert | {says} |" in part.partition("##")[0]
    assert "planner-time/chain" not in part and "rows/roll" not in part


def test_the_picture_has_a_panel_for_each_benchmark_and_a_line_for_each_figure(
    write: Callable[[Any], None], tmp_path: Path, bench: Callable[[str], ModuleType]
) -> None:
    for commit, ratio in (("a", 2.0), ("b", 1.0), ("c", 0.001)):
        rows = [_row("loops/<step>", "loops", ratio), _row("loops/daemon", "loops", 1.0)]
        rows += [_row("new", "minilm", 1e6)] if commit == "c" else []
        write(_found(commit, *rows))
    picture = ElementTree.fromstring((tmp_path / "figures.svg").read_text())
    space = "{http://www.w3.org/2000/svg}"
    panels = picture.findall(f"{space}g")
    titles = [[one.text for one in panel.iter(f"{space}title")] for panel in panels]
    assert [names[:-1] for names in titles] == [["loops/<step>", "loops/daemon"], ["new"]]
    (line, *_) = panels[0].findall(f"{space}polyline")
    places = [tuple(map(float, point.split(","))) for point in line.get("points", "").split()]
    drawing = bench("history_picture")
    assert [x for x, _ in places] == [0, drawing.WIDTH / 2, drawing.WIDTH]
    heights = [y for _, y in places]
    assert heights == sorted(heights) and heights[-1] == drawing.HEIGHT


def test_a_commit_is_in_the_history_once_and_each_processor_has_its_own(
    write: Callable[[Any], None], tmp_path: Path
) -> None:
    for commit, processor, ratio in (("a", "One", 2.0), ("a", "Two", 1.0), ("a", "One", 0.5)):
        found = _found(commit, _row("loops/step", "loops", ratio), processor=processor)
        write(found)
    runs = list(map(json.loads, (tmp_path / "history.jsonl").read_text().splitlines()))
    kept = [(run["processor"], run["figures"]["loops/step"][1]) for run in runs]
    assert kept == [("Two", 1.0), ("One", 0.5)]
    # Only runs on a machine like the last one's are drawn: one point, in the middle.
    assert 'class="thick" points="105.0,' in (tmp_path / "figures.svg").read_text()


def test_every_benchmark_names_a_function_that_exists(bench: Callable[[str], ModuleType]) -> None:
    run = bench("run")
    assert set(run.QUICK) <= set(run.BENCHMARKS)
    for place in run.BENCHMARKS.values():
        module, function = place.split(":")
        assert f"\ndef {function}(" in (BENCH / f"{module}.py").read_text(), place


def test_a_benchmark_that_fails_leaves_the_others(
    bench: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, figure = bench("run"), bench("figures").Figure

    def figures_of(name: str) -> Any:
        if name == "hosts":
            raise RuntimeError("no rights")
        yield figure(name, 3.0, 2.0, 1.0, "ms", "a peer")

    monkeypatch.setattr(run, "figures_of", figures_of)
    measured = run.Run()
    measured.measure(["hosts", "loops"], 3)
    found = json.loads(measured.as_json())
    assert found["missing"] == {"hosts": "no rights"}
    (row,) = found["figures"]
    assert (row["name"], row["ratio"], row["ok"], row["benchmark"]) == ("loops", 1.5, False, "loops")


@pytest.mark.parametrize(
    "body, why",
    [
        ("raise SystemExit('no rights')", "SystemExit: no rights"),
        ("import os; os._exit(3)", "its process ended with 3"),
    ],
)
def test_a_benchmark_in_its_process_gives_figures_until_it_ends(
    body: str, why: str, bench: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "short_one.py").write_text(
        f"from figures import Figure\n\ndef figures():\n"
        f"    print('in passing')\n"
        f"    yield Figure('short-one', 3.0, 2.0, float('inf'), 'ms', 'a peer')\n    {body}\n"
    )
    (tmp_path / "run.py").write_text(
        "import run_benchmarks\nrun_benchmarks.BENCHMARKS['hosts'] = 'short_one:figures'\n"
        "run_benchmarks.main()\n"
    )
    (tmp_path / "run_benchmarks.py").write_text((BENCH / "run.py").read_text())
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{BENCH}")
    run = bench("run")
    monkeypatch.setattr(run, "__file__", str(tmp_path / "run.py"))
    figures = run.figures_of("hosts")
    assert next(figures).ratio == 1.5
    with pytest.raises(RuntimeError, match=why):
        next(figures)
