"""`heliograph explain`: where the nodes of a saved graph would run, in every form."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import heliograph as hg
from heliograph.cli import main
from heliograph_backends.registry import open_registry


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file with a graph of two layers; the server of this process has two processors and a far device."""
    devices = ("cpu:threads=1", "cpu:threads=1", "fake:host=0,memory=1MiB")
    monkeypatch.setattr("heliograph_backends.registry.open_registry", lambda: open_registry(devices))
    g = hg.Graph()
    x = g.input("x", (4, 16), "f32")
    for number in range(2):
        with g.scope(f"layer{number}"):
            x = hg.ops.matmul(x, g.weight("w", np.ones((16, 16), np.float32)), name="product")
    g.output("y", x)
    hg.save(g, tmp_path / "model.hgraph")
    return str(tmp_path / "model.hgraph")


def explain(graph: str, *arguments: str, server: str = "local:") -> int:
    return main(["explain", graph, "--server", server, *arguments])


SPREAD = ("--device", "cpu0", "--device", "fake0", "--pin", "layer1/*=fake0", "--memory", "cpu0=1MiB")


def test_a_table_of_splits_and_devices(graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(graph, *SPREAD) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("2 splits on cpu0, fake0, 2 nodes, 256 B copied in a run\n")
    assert "layer0/product" in printed and "matmul" not in printed and "1.0 KiB" in printed
    assert explain(graph, "--nodes", *SPREAD) == 0
    assert "user" in capsys.readouterr().out


def test_without_devices_it_is_the_servers_first_or_that_of_the_url(
    graph: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain(graph) == 0 and "1 split on cpu0" in capsys.readouterr().out
    assert explain(graph, server="local:#cpu1") == 0 and "1 split on cpu1" in capsys.readouterr().out


def test_over_the_wire_it_is_the_same(graph: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(graph, "--json", server=url) == 0
    assert [one["device"] for one in json.loads(capsys.readouterr().out)["nodes"]] == ["cpu0", "cpu0"]


def test_json_is_for_programs(graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(graph, "--json", *SPREAD) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["device"] for one in found["nodes"]] == ["cpu0", "fake0"] and found["copied_bytes"] == 256


def test_dot_is_for_graphviz(graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(graph, "--dot", *SPREAD) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("digraph plan {") and printed.endswith("}\n") and "cpu0 to fake0" in printed


def test_weights_over_devices_and_buffer_types(graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    devices = ("--device", "cpu0", "--device", "cpu1", "--buffer-type", "cpu1=cpu1")
    assert explain(graph, *devices, "--split", "layer0/*=cpu1:0.75,cpu0:0.25") == 0
    printed = capsys.readouterr().out
    assert "columns 0 to 12 " in printed and "layer0/w  cpu1" in printed and "layer1/w" not in printed


def test_a_picture_is_a_file(graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.svg"
    assert explain(graph, "--svg", str(picture), *SPREAD) == 0
    assert "plan.svg: 2 splits" in capsys.readouterr().out
    assert "model.hgraph" in picture.read_text() and "layer0" in picture.read_text()
    assert explain(graph, "--svg", str(picture), "--unfold", "0", *SPREAD) == 0
    assert explain(graph, "--memory-svg", str(tmp_path / "memory.svg"), *SPREAD) == 0
    drawn = (tmp_path / "memory.svg").read_text()
    assert "between splits" in drawn and "layer0/product: 256 B" in drawn


def test_a_page_is_a_file_that_a_browser_shows(
    graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: not shown.append(url))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    page = tmp_path / "plan.html"
    assert explain(graph, "--html", str(page), *SPREAD) == 0 and shown == []
    assert page.read_text().startswith("<!doctype html>") and "plan.html: 2 splits" in capsys.readouterr().out
    assert explain(graph, "--html", str(page), "--open", *SPREAD) == 0 and shown == [page.as_uri()]
    assert explain(graph, "--open", *SPREAD) == 0
    (made,) = tmp_path.glob("heliograph-*/plan.html")
    assert shown[1] == made.as_uri() and made.parent.stat().st_mode & 0o077 == 0
    monkeypatch.setattr("webbrowser.open", lambda url: False)
    assert explain(graph, "--html", str(page), "--open") == 0
    assert "no browser was found" in capsys.readouterr().out


def test_two_placements_are_compared(graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(graph, *SPREAD, "--against", "cpu0") == 0
    printed = capsys.readouterr().out
    # The copy between the two devices is memory, too.
    assert printed.startswith("2 nodes differ: 1 in device, 2 in memory") and "layer1/product" in printed
    assert explain(graph, *SPREAD, "--against", "cpu0", "--json") == 0
    row = json.loads(capsys.readouterr().out)["differences"][1]
    assert (row["a"]["device"], row["b"]["device"]) == ("fake0", "cpu0")
    page = tmp_path / "both.html"
    assert explain(graph, *SPREAD, "--against", "cpu0", "--html", str(page)) == 0
    assert page.read_text().count('class="view"') == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--pin", "cpu0"), "--pin PATTERN=DEVICE"),
        (("--pin", "=cpu0"), "--pin PATTERN=DEVICE"),
        (("--memory", "cpu0="), "--memory DEVICE=SIZE"),
        (("--memory", "cpu0=1", "--memory", "cpu0=2"), "'cpu0' twice"),
        (("--memory", "cpu0=much"), "'much'"),
        (("--pin", "layer9/*=cpu0"), "no node matches 'layer9/*'"),
        (("--pin", "layer0/*=cpu1"), "not among the devices of the plan: cpu0"),
        (("--device", "gpu7"), "no device is named 'gpu7'"),
        (("--split", "cpu0:1"), "--split PATTERN=DEVICE:PART,..."),
        (("--split", "*=cpu0"), "--split PATTERN=DEVICE:PART,..."),
        (("--split", "*=cpu0:half"), "--split PATTERN=DEVICE:PART,..."),
        (("--split", "*=cpu0:1,cpu0:2"), "'cpu0' twice"),
        (("--split", "*=cpu0:-1"), "fraction -1.0"),
        (("--buffer-type", "cpu0=fast"), "no buffer type 'fast'"),
        (("--open", "--json"), "--open shows a page"),
        (("--against", "cpu1", "--dot"), "--against compares two plans"),
        (("--against", "gpu7"), "no device is named 'gpu7'"),
        (("--unfold", "1"), "--unfold is for pictures"),
        (("--unfold", "-1", "--svg", "plan.svg"), "unfold is -1"),
    ],
)
def test_what_does_not_fit_is_one_line_and_advice(
    graph: str, arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain(graph, *arguments) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and "advice: " in printed and words in printed


def test_a_file_that_is_no_graph_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(str(tmp_path / "missing.hgraph")) == 1
    assert "missing.hgraph" in capsys.readouterr().err


def test_a_dry_run_says_what_each_device_would_give(graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", graph, "--server", "local:", "--dry-run", *SPREAD]
    assert main(arguments) == 0
    told = capsys.readouterr().out
    assert "memory on cpu0" in told and "memory on fake0" in told
    assert main([*arguments, "--split", "*=cpu0:1,cpu1:1"]) == 1
    assert "--dry-run does not support --split" in capsys.readouterr().err


def test_a_run_becomes_a_trace(graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "run.json"
    arguments = ["trace", graph, "--server", "local:", "--input", "x=@random", "--output", str(output)]
    assert main([*arguments, *SPREAD, "--pipeline", "2"]) == 0
    told = capsys.readouterr().out
    assert str(output) in told and "the last run took" in told and "perfetto" in told
    events = json.loads(output.read_text())["traceEvents"]
    tracks = {one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert tracks == {"cpu0", "fake0"}
    assert {one["cat"] for one in events if one["ph"] == "X"} == {"copy", "compute"}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "inputs are missing: 'x'"),
        (("--input", "x=@random", "--repeat", "0"), "--repeat 0"),
        (("--input", "x=@random", "--output", "/nowhere/run.json"), "/nowhere/run.json"),
        (("--input", "x=@random", "--device", "gpu9"), "gpu9"),
        (("--input", "x=@random", "--pipeline", "0"), "pipeline is 0"),
    ],
)
def test_a_trace_that_cannot_be_is_refused(
    graph: str, arguments: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", graph, "--server", "local:", *arguments]) == 1
    assert why in capsys.readouterr().err


def test_a_run_goes_where_it_is_told_to(graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", graph, "--server", "local:", "--input", "x=@zeros", "--json", *SPREAD]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "fake0"
