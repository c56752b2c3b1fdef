"""Explanations of plans from what a server reports, in all forms; plans compared; sizes as text."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as xml
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import heliograph as hg
from heliograph.explain.explanation import Explanation, explanation
from heliograph_proto import codec
from heliograph_proto import graph as contract
from heliograph_proto.plans import (
    Cause,
    CopyReport,
    DeviceShare,
    LinkReport,
    MemoryBlock,
    MemoryUse,
    NodePart,
    NodePlacement,
    PlanReport,
    SplitReport,
    StoredValue,
    WeightShare,
)
from heliograph_proto.types import NO_UNITS, parse_size, size_text
from heliograph_proto.v1 import plan_pb2

ODD = 'l"a\\N & <b> é'
COPY_FOR_EVER = CopyReport(0, 1, 64, predicted_us=float("inf"))
SHARES = (DeviceShare("gpu0", 4096, 0, 64), DeviceShare("cpu0", 0, 32, 2**20))


@pytest.fixture
def graph() -> contract.Graph:
    """x @ w, soft_max, and a sum with x again."""
    g = hg.Graph()
    x = g.input("x", (4, 4), "f32")
    with g.scope(ODD):
        y = hg.ops.matmul(x, g.weight("w", np.ones((4, 4), np.float32)), name="product")
        z = hg.ops.soft_max(y, name="soft")
    g.output("sum", hg.ops.add(z, y, name="sum"))
    return g._freeze()


@pytest.fixture
def report() -> PlanReport:
    """The product on gpu0, the rest on cpu0; the product, value 2, is copied."""
    nodes = (
        NodePlacement(0, Cause.WEIGHT, 1),
        NodePlacement(1, Cause.FIRST_THAT_CAN),
        NodePlacement(1, Cause.USER),
    )
    splits = (
        SplitReport(0, (), 1, 64, 0.0, 250.0),
        SplitReport(1, (CopyReport(2, 0, 64),), 2, 128, 3.5, 1500.0, 260.0),
    )
    return PlanReport(nodes, splits, SHARES)


@pytest.fixture
def explained(graph: contract.Graph, report: PlanReport) -> Explanation:
    return explanation(graph, report)


@pytest.fixture
def expected(report: PlanReport) -> PlanReport:
    """The same, with what was expected of it: gpu0 is on the server's host, cpu0 on another."""
    first, second = report.splits
    (copy,) = second.copies
    return replace(
        report,
        splits=(
            replace(first, predicted_compute_us=240.0),
            replace(
                second,
                copies=(replace(copy, predicted_us=4.5),),
                predicted_copy_us=4.5,
                predicted_compute_us=1250.0,
                predicted_began_us=240.0,
            ),
        ),
        predicted_us=1494.5,
        links=(LinkReport("", "near", 8.0, 2.5 * 2**20, True), LinkReport("near", "far", 1e3, 2**20)),
    )


def before_a_run(report: PlanReport) -> PlanReport:
    return replace(
        report, splits=tuple(replace(one, copy_us=0.0, compute_us=0.0, began_us=0.0) for one in report.splits)
    )


def test_nodes_have_names_devices_and_reasons(explained: Explanation) -> None:
    product, soft, total = explained.nodes
    assert (product.name, product.op, product.device, product.split) == (
        f"{ODD}/product",
        "matmul",
        "gpu0",
        0,
    )
    assert product.why == f"weight of operand 1, {ODD}/w"
    assert (soft.why, total.why, total.cause) == ("first that can", "user", Cause.USER)
    assert str(total.type) == "f32[4, 4]" and total.number == 2


def test_splits_have_their_nodes_and_copies(explained: Explanation) -> None:
    first, second = explained.splits
    assert [node.name for node in second.nodes] == [f"{ODD}/soft", "sum"] and first.copies == ()
    (copy,) = second.copies
    assert (copy.name, copy.source, copy.size_bytes) == (f"{ODD}/product", "gpu0", 64)
    assert explained.copied_bytes == second.copied_bytes == 64
    assert explained.run_us == second.ended_us == 260 + 3.5 + 1500 and explained.devices == SHARES


def test_as_text_it_is_tables_of_splits_and_devices(explained: Explanation) -> None:
    text = str(explained)
    assert text.startswith(
        "2 splits on gpu0, cpu0, 3 nodes, 64 B copied in a run; the last run took 1.76 ms\n"
    )
    for part in ("4.0 KiB", "1.0 MiB", "250 us", "3.5 us", "1.5 ms"):
        assert part in text
    assert "first that can" not in text
    assert "first that can" in explained.table(nodes=True) and "matmul" in explained.table(nodes=True)


def test_what_was_expected_stands_beside_what_was_measured(
    graph: contract.Graph, expected: PlanReport
) -> None:
    explained = explanation(graph, expected)
    summary, header, first, second = str(explained).splitlines()[0:1] + str(explained).splitlines()[2:5]
    assert summary.endswith("; the last run took 1.76 ms; predicted were 1.49 ms")
    cells = [re.split("  +", line.strip())[-4:] for line in (header, first, second)]
    assert cells == [
        [f"{name} (predicted)" for name in ("began", "copy time", "compute time", "ended")],
        ["-", "-", "250 us (240 us)", "250 us (240 us)"],
        ["260 us (240 us)", "3.5 us (4.5 us)", "1.5 ms (1.25 ms)", "1.76 ms (1.49 ms)"],
    ]


def test_the_ways_that_copies_take_are_listed(graph: contract.Graph, expected: PlanReport) -> None:
    lines = str(explanation(graph, expected)).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("from"))
    assert [line.split() for line in lines[at : at + 3]] == [
        ["from", "to", "round", "trip", "bandwidth", "known"],
        ["(server)", "near", "8", "us", "2.5", "MiB/s", "measured"],
        ["near", "far", "1", "ms", "1.0", "MiB/s", "partly", "assumed"],
    ]


def test_before_the_first_run_there_is_what_is_expected(graph: contract.Graph, expected: PlanReport) -> None:
    explained = explanation(graph, before_a_run(expected))
    assert "predicted were 1.49 ms" in explained.summary() and "last run" not in explained.summary()
    assert "predicted compute" in str(explained) and "compute time" not in str(explained)


def test_where_nothing_was_predicted_nothing_is_said_of_it(explained: Explanation) -> None:
    assert "predicted" not in explained.table(nodes=True) and "predicted" not in explained.dot()


def test_predictions_are_in_the_json_and_in_the_picture(graph: contract.Graph, expected: PlanReport) -> None:
    explained = explanation(graph, expected)
    found = json.loads(explained.json())
    assert found["predicted_us"] == 1494.5 and found["splits"][1]["predicted_compute_us"] == 1250.0
    assert found["links"][0] == {
        "source": "", "destination": "near", "round_trip_us": 8.0, "bytes_per_s": 2.5 * 2**20,
        "is_measured": True,
    }  # fmt: skip
    assert "split 1 on cpu0\\n1.25 ms predicted, 1.5 ms measured" in explained.dot()
    assert "gpu0 to cpu0\\n4.5 us predicted" in explained.dot()
    assert codec.decode(codec.encode(expected, plan_pb2.ExplainResponse), PlanReport) == expected


def test_times_before_the_first_run_are_no_times(graph: contract.Graph, report: PlanReport) -> None:
    explained = explanation(graph, before_a_run(report))
    assert "last run" not in explained.summary() and " time" not in str(explained)
    with pytest.raises(hg.InvalidArgumentError, match="has not run"):
        explained.trace("trace.json")


def test_long_lists_of_copies_are_cut_unless_all_is_asked_for(
    graph: contract.Graph, report: PlanReport
) -> None:
    copies = (CopyReport(0, 1, 64), CopyReport(1, 0, 64), CopyReport(2, 0, 64), CopyReport(3, 0, 64))
    splits = (report.splits[0], replace(report.splits[1], copies=copies))
    explained = explanation(graph, replace(report, splits=splits))
    assert "1 more" in str(explained) and "1 more" not in explained.table(nodes=True)


def test_a_plan_that_computes_nothing_is_explained(tmp_path: Path) -> None:
    g = hg.Graph()
    g.output("y", g.input("x", (1,), "f32"))
    nothing = explanation(g._freeze(), PlanReport((), (SplitReport(0, (), 0, 0, 0.0, 5.0),), SHARES[:1]))
    assert "1 split on gpu0, 0 nodes" in str(nothing)
    nothing.trace(tmp_path / "trace.json")
    assert "v0 -> o0" in nothing.dot() and json.loads(nothing.json())["nodes"] == []


@pytest.mark.parametrize(
    "change",
    [
        lambda r: replace(r, nodes=r.nodes[1:]),
        lambda r: replace(r, nodes=(replace(r.nodes[0], split=2), *r.nodes[1:])),
        lambda r: replace(r, nodes=(replace(r.nodes[0], operand=2), *r.nodes[1:])),
        lambda r: replace(r, devices=r.devices[:1]),
        lambda r: replace(r, splits=(replace(r.splits[0], copies=(CopyReport(5, 0, 1),)), r.splits[1])),
        lambda r: replace(r, splits=(replace(r.splits[0], copies=(CopyReport(0, 2, 1),)), r.splits[1])),
        lambda r: replace(r, splits=(replace(r.splits[0], compute_us=float("nan")), r.splits[1])),
        lambda r: replace(r, splits=(replace(r.splits[0], copy_us=float("inf")), r.splits[1])),
        lambda r: replace(r, splits=(replace(r.splits[0], began_us=-1.0), r.splits[1])),
        lambda r: replace(r, weights=(WeightShare(2, 0, 0, 1, 1),)),
        lambda r: replace(r, weights=(WeightShare(0, 2, 0, 1, 1),)),
        lambda r: replace(r, weights=(WeightShare(0, 0, 0, 1, 1),), parts=(NodePart(3, 0, 0),)),
        lambda r: replace(r, weights=(WeightShare(0, 0, 0, 1, 1),), parts=(NodePart(0, 2, 0),)),
        lambda r: replace(r, parts=(NodePart(0, 0, 0),)),
        lambda r: replace(r, predicted_us=float("nan")),
        lambda r: replace(r, splits=(replace(r.splits[0], predicted_copy_us=-1.0), r.splits[1])),
        lambda r: replace(r, splits=(r.splits[0], replace(r.splits[1], copies=(COPY_FOR_EVER,)))),
        lambda r: replace(r, links=(LinkReport("", "a", -1.0, 1e6),)),
        lambda r: replace(r, links=(LinkReport("", "a", 1.0, float("inf")),)),
    ],
)
def test_a_report_that_does_not_fit_the_graph_is_refused(graph, report, change) -> None:
    with pytest.raises(hg.ProtocolError, match="does not fit"):
        explanation(graph, change(report))


def test_json_is_for_programs(explained: Explanation) -> None:
    found = json.loads(explained.json())
    keys = "copied_bytes devices splits nodes weights predicted_us links steps blocks stored"
    assert list(found) == keys.split()
    assert found["devices"][0] == {
        "name": "gpu0", "weights_bytes": 4096, "variables_bytes": 0, "compute_bytes": 64,
        "results_bytes": 0
    }  # fmt: skip
    assert found["splits"][1] == {
        "number": 1,
        "device": "cpu0",
        "nodes": [1, 2],
        "parts": [],
        "copies": [
            {
                "value": 2,
                "name": f"{ODD}/product",
                "source": "gpu0",
                "size_bytes": 64,
                "rows_only": False,
                "ahead": False,
                "route": "within",
                "predicted_us": 0.0,
            }
        ],
        "steps": 2,
        "compute_bytes": 128,
        "copy_us": 3.5,
        "compute_us": 1500.0,
        "began_us": 260.0,
        "note": "",
        "memory_steps": 0,
        "predicted_copy_us": 0.0,
        "predicted_compute_us": 0.0,
        "predicted_began_us": 0.0,
    }
    assert found["nodes"][0] == {
        "number": 0,
        "name": f"{ODD}/product",
        "op": "matmul",
        "type": "f32",
        "shape": [4, 4],
        "split": 0,
        "device": "gpu0",
        "cause": "weight",
        "why": f"weight of operand 1, {ODD}/w",
        "concurrent": 0,
        "step": 0,
        "step_us": 0.0,
        "source": "",
    }


def test_dot_colours_devices_and_labels_copies(explained: Explanation) -> None:
    lines = explained.dot().splitlines()
    nodes = {line.split()[0]: line.partition("fillcolor=")[2] for line in lines if "fillcolor" in line}
    colour = [nodes[f"v{value}"] for value in (2, 3, 4)]
    assert colour[0] != colour[1] == colour[2]
    assert sum("gpu0 to cpu0" in line and "v2 -> v3" in line for line in lines) == 1
    assert sum("dashed" in line and "v2 -> v4" in line for line in lines) == 1
    assert "  v0 -> v2;" in lines and "  v4 -> o0;" in lines


def test_svg_has_names_as_they_are(explained: Explanation, tmp_path: Path) -> None:
    explained.svg(tmp_path / "plan.svg", title=ODD)
    root = xml.parse(tmp_path / "plan.svg")
    titles = [one.text for one in root.iter("{http://www.w3.org/2000/svg}title")]
    assert {ODD, "product", "soft", "sum", "x"} <= set(titles) and titles[0].startswith(f"{ODD}: 2 splits")
    texts = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    for wanted in ("gpu0", "cpu0", "copied to another device", "64 B"):
        assert wanted in texts, texts
    explained.svg(tmp_path / "folded.svg", unfold=0)
    assert "soft" not in (tmp_path / "folded.svg").read_text()
    with pytest.raises(hg.InvalidArgumentError, match="unfold is -1"):
        explained.svg(tmp_path / "plan.svg", unfold=-1)


def test_a_page_has_the_graph_the_memory_and_the_splits(explained: Explanation, tmp_path: Path) -> None:
    explained.html(tmp_path / "plan.html", title="A <plan>")
    page = (tmp_path / "plan.html").read_text()
    assert "<h1>A &lt;plan&gt;</h1>" in page and "does not tell where results lie" in page
    assert all(f'role="tab" id="tab-{number}"' in page for number in range(3))
    with pytest.raises(hg.InvalidArgumentError, match="does not tell where"):
        explained.memory_svg(tmp_path / "memory.svg")


@pytest.fixture
def remembered(report: PlanReport) -> PlanReport:
    """The same, with where its results lie: two steps on cpu0 after one on gpu0."""
    blocks = (MemoryBlock(0, 64), MemoryBlock(1, 256), MemoryBlock(1, 64, MemoryUse.BETWEEN))
    stored = (StoredValue(3, 1, 0, 64, 1, 2), StoredValue(4, 1, 64, 64, 2, 2), StoredValue(2, 2, 0, 64, 0, 2))
    first, second = report.splits
    splits = (replace(first, memory_steps=1), replace(second, memory_steps=2))
    return replace(report, splits=splits, blocks=blocks, stored=stored)


def test_results_have_their_memory(graph: contract.Graph, remembered: PlanReport, tmp_path: Path) -> None:
    explained = explanation(graph, remembered)
    assert [(one.device, one.size_bytes, str(one.use)) for one in explained.blocks] == [
        ("gpu0", 64, "results"), ("cpu0", 256, "results"), ("cpu0", 64, "between splits")
    ]  # fmt: skip
    soft = explained.stored[0]
    assert (soft.name, soft.block, soft.first_step, soft.last_step) == (f"{ODD}/soft", 1, 1, 2)
    found = json.loads(explained.json())
    assert found["blocks"][2] == {"device": "cpu0", "size_bytes": 64, "use": "between splits"}
    assert found["stored"][1]["offset_bytes"] == 64 and found["splits"][1]["memory_steps"] == 2
    explained.memory_svg(tmp_path / "memory.svg")
    titles = [
        one.text for one in xml.parse(tmp_path / "memory.svg").iter("{http://www.w3.org/2000/svg}title")
    ]
    assert f"{ODD}/soft: 64 B at 0, steps 1 to 2" in titles
    assert codec.decode(codec.encode(remembered, plan_pb2.ExplainResponse), PlanReport) == remembered


@pytest.mark.parametrize(
    "change",
    [
        lambda one: replace(one, value=5),
        lambda one: replace(one, block=3),
        lambda one: replace(one, offset_bytes=200),
        lambda one: replace(one, first_step=3),
        lambda one: replace(one, last_step=2**31),
    ],
)
def test_memory_that_does_not_fit_the_plan_is_refused(graph, remembered, change) -> None:
    stored = (change(remembered.stored[0]), *remembered.stored[1:])
    with pytest.raises(hg.ProtocolError, match="does not fit"):
        explanation(graph, replace(remembered, stored=stored))


def test_more_results_than_nodes_and_copies_are_refused(graph, remembered) -> None:
    with pytest.raises(hg.ProtocolError, match="does not fit"):
        explanation(graph, replace(remembered, stored=remembered.stored * 10))
    with pytest.raises(hg.ProtocolError, match="does not fit"):
        explanation(graph, replace(remembered, blocks=(MemoryBlock(2, 64), *remembered.blocks[1:])))


def test_nodes_have_the_lines_that_built_them(graph: contract.Graph, report: PlanReport) -> None:
    explained = explanation(graph, report, lambda number: f"model.py:{number}")
    assert [node.source for node in explained.nodes] == ["model.py:0", "model.py:1", "model.py:2"]


# Two plans


def test_plans_are_compared_node_by_node(graph, report: PlanReport, remembered: PlanReport) -> None:
    remembered = before_a_run(remembered)
    moved = replace(remembered.nodes[1], split=0, step=1)
    other = replace(
        remembered,
        nodes=(replace(remembered.nodes[0], step=1), moved, remembered.nodes[2]),
        stored=remembered.stored[1:],
    )
    found = explanation(graph, remembered).compare(explanation(graph, other))
    assert [(one.name, *map(str, one.aspects)) for one in found.differences] == [
        (f"{ODD}/soft", "device", "memory")
    ]
    assert found.count(hg.PlanAspect.DEVICE) == 1 and "1 node differs: 1 in device, 1 in memory" in str(found)
    (soft,) = found.differences
    assert soft.a is not None and soft.b is not None
    assert (soft.a.node.device, soft.b.node.device) == ("cpu0", "gpu0")
    assert (soft.a.stored_bytes, soft.b.stored_bytes) == (64, 0)
    same = explanation(graph, report).compare(explanation(graph, report))
    assert same.differences == () and same.summary() == "0 nodes differ"


def test_steps_and_times_are_compared_where_both_have_them(graph, report: PlanReport) -> None:
    def measured(steps: tuple[int, int], took_us: float) -> Explanation:
        first, *others = report.nodes
        nodes = [replace(one, step=step, step_us=took_us) for one, step in zip(others, steps, strict=True)]
        return explanation(graph, replace(report, nodes=(replace(first, step=1, step_us=5.0), *nodes)))

    found = measured((1, 1), 10.0).compare(measured((1, 2), 10.0))
    assert [str(aspect) for one in found.differences for aspect in one.aspects] == ["time", "fusion"] * 2
    assert measured((1, 2), 10.0).compare(measured((1, 2), 10.9)).differences == ()
    assert len(measured((1, 2), 10.0).compare(measured((1, 2), 15.0)).differences) == 2
    assert measured((1, 2), 10.0).compare(measured((1, 2), 15.0), tolerance=0.6).differences == ()
    # Measured steps are not compared with the time of a run.
    assert measured((1, 2), 10.0).compare(explanation(graph, report)).count(hg.PlanAspect.TIME) == 0
    with pytest.raises(hg.InvalidArgumentError, match="tolerance"):
        measured((1, 2), 1.0).compare(measured((1, 2), 1.0), tolerance=-1)


def test_nodes_of_one_plan_alone_are_listed(explained: Explanation, tmp_path: Path) -> None:
    g = hg.Graph()
    x = g.input("x", (4, 4), "f32")
    g.output("y", hg.ops.soft_max(x, name="other"))
    report = PlanReport(
        (NodePlacement(0, Cause.FIRST_THAT_CAN),), (SplitReport(0, (), 1, 64, 0.0, 5.0),), SHARES
    )
    found = explained.compare(explanation(g._freeze(), report))
    assert found.count(hg.PlanAspect.PRESENCE) == 4 and len(found.table(nodes=True).splitlines()) > 12
    rows = json.loads(found.json())["differences"]
    assert rows[-1]["a"] is None and rows[-1]["b"]["device"] == "gpu0" and rows[0]["b"] is None
    found.html(tmp_path / "both.html", titles=("before", "after"))
    page = (tmp_path / "both.html").read_text()
    assert page.count('class="view"') == 2 and 'data-nodes=",0"' in page and 'data-nodes="0,"' in page
    with pytest.raises(hg.InvalidArgumentError, match="3 titles"):
        found.html(tmp_path / "both.html", titles="abc")


# Traces


def test_a_trace_counts_memory_and_waiting_splits(
    graph: contract.Graph, remembered: PlanReport, tmp_path: Path
) -> None:
    explanation(graph, remembered).trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    counts: dict[str, list[tuple[float, float]]] = {}
    for one in events:
        if one["ph"] == "C":
            counts.setdefault(one["name"], []).append((one["ts"], *one["args"].values()))
    # The first step on cpu0 begins after the copy, and the second in the middle of its time.
    assert counts["memory of cpu0"] == [(0.0, 64), (263.5, 128), (1013.5, 192), (1763.5, 0)]
    assert counts["copies under way of cpu0"] == [(260.0, 64), (263.5, 0)]
    # It could have begun when the product was done, and began 10 us later.
    assert counts["waiting splits of cpu0"] == [(250.0, 1), (260.0, 0)]
    assert counts["waiting splits of gpu0"] == [(0.0, 0)]


def test_a_trace_has_a_track_for_each_device(explained: Explanation, tmp_path: Path) -> None:
    explained.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {one["args"]["name"]: one["tid"] for one in events if one["name"] == "thread_name"}
    assert list(tracks) == ["gpu0", "cpu0"]
    timed = [(one["name"], one["tid"], one["ts"], one["dur"]) for one in events if one["ph"] == "X"]
    assert timed == [
        ("split 0", tracks["gpu0"], 0.0, 250.0),
        ("copies for split 1", tracks["cpu0"], 260.0, 3.5),
        ("split 1", tracks["cpu0"], 263.5, 1500.0),
    ]


@pytest.mark.parametrize("path", ["", ".", "missing/trace.json"])
def test_files_that_cannot_be_written_are_typed_errors(
    explained: Explanation, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(hg.InvalidArgumentError, match="cannot write"):
        explained.trace(path)


# Sizes


def test_sizes_have_units() -> None:
    found = [parse_size(text) for text in ("0", "17", "17B", "2KiB", "512MiB", "2GiB", "1TiB")]
    assert found == [0, 17, 17, 2048, 2**29, 2**31, 2**40]
    for text in ("", "-1", "1.5GiB", "1 GiB", "2GB", "2gib", "MiB", "8388608TiB", "9" * 19, "\u0662"):
        assert parse_size(text) is None, text
    assert parse_size("3", NO_UNITS) == 3 and parse_size("3B", NO_UNITS) is None


def test_sizes_are_shown_in_the_largest_unit_that_fits() -> None:
    assert [size_text(size) for size in (2**40, 1.5 * 2**20, 12.6)] == ["1.0 TiB", "1.5 MiB", "13 B"]
    assert [size_text(size) for size in (0, 1023, 1024, 2**20, 3 * 2**29)] == [
        "0 B", "1023 B", "1.0 KiB", "1.0 MiB", "1.5 GiB"
    ]  # fmt: skip
