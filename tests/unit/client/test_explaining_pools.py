"""Explanations of plans over several hosts: what goes between them by which way, as text, picture, trace."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import heliograph as hg
from heliograph.explain.explanation import Explanation, explanation
from heliograph_proto.plans import (
    Cause,
    CopyReport,
    DeviceShare,
    LinkReport,
    NodePlacement,
    PlanReport,
    Route,
    SplitReport,
)

LENGTH = 4
DEVICES = ("cpu0", "a/cpu0", "b/cpu0", "b:7/cpu0")


def chain() -> hg.Graph:
    g = hg.Graph()
    x = g.input("x", (4, 4), "f32")
    for number in range(LENGTH):
        with g.scope(f"layer{number}"):
            x = hg.exp(x)
    g.output("y", x)
    return g


def split(device: int, began: float, route: Route | None) -> SplitReport:
    """One node, which reads that of the split before; it was to begin 5 us earlier."""
    copies = (CopyReport(device, max(device - 1, 0), 64, route=route, predicted_us=300.0),) if route else ()
    return SplitReport(
        device, copies, 1, 64, 400.0 if copies else 0.0, 50.0, began, "", 300.0 * len(copies), 40.0, began - 5
    )


#: Node by node over the head's own device and those of three members, by another way each time.
REPORT = PlanReport(
    tuple(NodePlacement(number, Cause.USER) for number in range(LENGTH)),
    (
        split(0, 5.0, None),
        split(1, 60.0, Route.DIRECT),
        split(2, 600.0, Route.RELAYED),
        split(3, 1200.0, Route.THROUGH_HEAD),
    ),
    tuple(DeviceShare(name, compute_bytes=64, results_bytes=64) for name in DEVICES),
    predicted_us=1600.0,
    links=(LinkReport("", "a", 500.0, 2**20), LinkReport("a", "b", 300.0, 2**27, True)),
)


@pytest.fixture
def explained() -> Explanation:
    return explanation(chain()._freeze(), REPORT)


def table(text: str, first: str) -> list[list[str]]:
    """The cells of the table whose header begins so, without it."""
    lines = text.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(first))
    rows = []
    for line in lines[at + 1 :]:
        if not line:
            break
        rows.append(re.split("  +", line.strip()))
    return rows


def test_each_value_between_hosts_has_a_line_with_its_bytes_and_its_way(explained: Explanation) -> None:
    assert table(str(explained), "value") == [
        ["layer0/exp_0", "cpu0", "1", "a/cpu0", "64 B", "direct", "300 us"],
        ["layer1/exp_1", "a/cpu0", "2", "b/cpu0", "64 B", "by the head (relayed)", "300 us"],
        ["layer2/exp_2", "b/cpu0", "3", "b:7/cpu0", "64 B", "through head", "300 us"],
    ]
    last = str(explained).splitlines()[-1]
    assert last.startswith("between hosts in a run: 64 B direct, 64 B relayed, 64 B through head; copy times")


def test_each_split_has_what_was_measured_and_beside_it_what_was_predicted(explained: Explanation) -> None:
    rows = table(str(explained), "split")
    assert rows[1][-5:] == ["64 B", "60 us (55 us)", "400 us (300 us)", "50 us (40 us)", "510 us (395 us)"]
    assert explained.summary().endswith("the last run took 1.65 ms; predicted were 1.6 ms")


def test_lines_stay_short_enough_to_be_read(explained: Explanation) -> None:
    assert max(map(len, str(explained).splitlines())) <= 170


def test_before_a_run_there_are_predictions_alone(explained: Explanation) -> None:
    splits = tuple(replace(one, copy_us=0.0, compute_us=0.0, began_us=0.0) for one in REPORT.splits)
    text = str(explanation(chain()._freeze(), replace(REPORT, splits=splits)))
    assert table(text, "split")[1][-4:] == ["55 us", "300 us", "40 us", "395 us"]
    assert "copy time" not in text and "predicted ended" in text


def test_of_very_many_values_the_first_are_listed_unless_all_are_asked_for() -> None:
    copies = tuple(CopyReport(number % 5, 0, 64, route=Route.DIRECT) for number in range(100))
    splits = (REPORT.splits[0], replace(REPORT.splits[1], copies=copies), *REPORT.splits[2:])
    found = explanation(chain()._freeze(), replace(REPORT, splits=splits))
    rows = table(str(found), "value")
    assert len(rows) == 25 and rows[-1][0] == "78 more"
    assert len(table(found.table(nodes=True), "value")) == 102


def test_the_picture_has_a_box_for_each_host_and_says_what_does_not_go_straight(
    explained: Explanation, tmp_path: Path
) -> None:
    dot = explained.dot()
    boxes = re.findall(r'subgraph cluster_host_\d+ {\n\s+label="([^"]*)"', dot)
    assert boxes == ["the server", "a", "b", "b:7"] and dot.count("{") == dot.count("}")
    assert "a/cpu0 to b/cpu0\\nrelayed by the head\\n300 us predicted" in dot
    assert "b/cpu0 to b:7/cpu0\\nthrough the head" in dot and "cpu0 to a/cpu0\\n300 us" in dot
    explained.svg(tmp_path / "plan.svg")
    drawn = (tmp_path / "plan.svg").read_text()
    assert "from a/cpu0 to b/cpu0, relayed, 300 us predicted" in drawn and "through head" in drawn


def test_the_trace_has_a_process_for_each_host(explained: Explanation, tmp_path: Path) -> None:
    explained.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    processes = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert list(processes.values()) == ["the server", "a", "b", "b:7"]
    threads = {one["args"]["name"]: processes[one["pid"]] for one in events if one["name"] == "thread_name"}
    assert threads == {"cpu0": "the server", "a/cpu0": "a", "b/cpu0": "b", "b:7/cpu0": "b:7"}
    (copies,) = [one for one in events if one["name"] == "copies for split 2"]
    assert processes[copies["pid"]] == "b"
    assert copies["args"]["values"] == ["layer1/exp_1 from a/cpu0, relayed"]


def test_a_plan_on_one_host_has_neither(tmp_path: Path) -> None:
    with hg.connect("local:#fake") as session:
        plan = session.compile(chain())
        plan.run(x=np.zeros((4, 4), np.float32))
        found = plan.explain()
    assert "cluster_host" not in found.dot() and "between hosts" not in str(found)
    found.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [one["args"]["name"] for one in events if one["name"] == "process_name"] == ["plan"]
