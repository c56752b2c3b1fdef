"""Rules, dashboard and table of metrics name what daemons export, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from paths import DEPLOY

from heliograph_server.telemetry.metrics import METRICS

RULES = DEPLOY / "prometheus" / "alerts.yaml"
DASHBOARD = DEPLOY / "grafana" / "heliograph.json"
_NAME = re.compile(r"\b(?:heliograph|process)_[a-z_]+")
_PROCESS = {
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "process_virtual_memory_bytes",
    "process_start_time_seconds",
    "process_open_fds",
    "process_max_fds",
}


def exported() -> set[str]:
    """Every name that a query may have."""
    found = set(_PROCESS)
    for metric in METRICS:
        suffixes = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        found.update(metric.shown + suffix for suffix in suffixes)
    return found


def queries() -> Iterator[str]:
    """Of the rules and the dashboard."""
    for line in RULES.read_text().splitlines():
        if not re.match(r"\s*(#|summary|description|- name|- alert)", line):
            yield line
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))


def test_every_metric_in_rules_and_dashboard_is_exported() -> None:
    named = {name for query in queries() for name in _NAME.findall(query)}
    assert len(named) > 15 and named <= exported(), named - exported()


def test_every_metric_is_named_by_convention_and_has_a_meaning() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("heliograph_") and not metric.name.endswith(("_total", "_ms", "_mb"))
        assert metric.help.endswith(".") and len(metric.help) > 20
        for label in metric.labels:
            assert label in DASHBOARD.parent.parent.joinpath("prometheus", "README.md").read_text()


def test_the_table_in_the_readme_is_the_one_of_the_code() -> None:
    table = []
    for one in METRICS:
        labels = ", ".join(f"`{label}`" for label in one.labels) or "-"
        table.append(f"| `{one.shown}` | {one.kind} | {labels} | {one.help} |")
    lines = (DEPLOY / "prometheus" / "README.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("| `")] == table


def test_every_alert_is_tested_for_when_it_fires_and_when_not() -> None:
    alerts = set(re.findall(r"alert: (\w+)", RULES.read_text()))
    tests = (RULES.parent / "alerts_test.yaml").read_text()
    assert alerts == set(re.findall(r"alertname: (\w+)}", tests))
    assert alerts == set(re.findall(r"alertname: (\w+)\n\s+exp_alerts:", tests))


def test_the_dashboard_has_panels_that_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    panels: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (place["x"] + column, place["y"] + row)
            for column in range(place["w"])
            for row in range(place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "alerts.yaml"),
        ("test", "rules", "alerts_test.yaml"),
        ("check", "config", "prometheus.yml"),
    ],
)
def test_promtool_agrees(arguments: tuple[str, ...]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    done = subprocess.run(
        [promtool, *arguments], cwd=RULES.parent, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
