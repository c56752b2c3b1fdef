"""The picture of the dashboard for Grafana has the dashboard's panels, and says how it was made."""

from __future__ import annotations

import importlib.util
import json
import xml.etree.ElementTree as xml
from types import ModuleType
from typing import Any

import pytest
from paths import DEPLOY, ROOT

PICTURE = ROOT / "docs/operate/grafana.svg"


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dashboard_picture", ROOT / "docs/dashboard_picture.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def dashboard() -> Any:
    return json.loads((DEPLOY / "grafana/heliograph.json").read_text())


def test_the_picture_has_the_panels_of_the_dashboard(drawing: ModuleType, dashboard: Any) -> None:
    found = PICTURE.read_text()
    assert drawing.form_of(found) == drawing.form_of(drawing.draw(dashboard, {})), "make dashboard-picture"
    xml.parse(PICTURE)


def test_the_picture_has_data_and_says_that_it_is_not_grafana(dashboard: Any) -> None:
    found = PICTURE.read_text()
    assert "This is not Grafana" in found and "127.0.0.1" not in found
    queried = sum("targets" in panel for panel in dashboard["panels"])
    # A panel about certificates has none without TLS.
    assert found.count("<g>") == queried - 1
    page = (ROOT / "docs/operate/observe.md").read_text()
    assert "](grafana.svg)" in page


def test_lines_are_as_high_as_their_values(drawing: ModuleType) -> None:
    panel = {
        "title": "Runs",
        "type": "timeseries",
        "gridPos": {"x": 0, "y": 0, "w": 8, "h": 8},
        "fieldConfig": {"defaults": {"unit": "ops"}},
    }
    series = {"head <1>": [(10.0, 0.0), (20.0, 50.0), (30.0, 100.0)]}
    drawn = drawing.draw({"title": "One", "panels": [panel]}, {"Runs": series})
    (line,) = xml.fromstring(drawn).iter("{http://www.w3.org/2000/svg}polyline")
    points = [tuple(map(float, one.split(","))) for one in line.attrib["points"].split()]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert y2 < y1 < y0 and "most 100/s" in drawn and "head &lt;1&gt;" in drawn
