"""`heliograph run`: a graph from a file, arrays from files and to files, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import heliograph as hg
from heliograph.cli import main
from heliograph.cli.common.npy import file_names
from heliograph_proto.quantization import blocks

SEED = 20251121


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A graph with a weight, a variable, and an output whose name is a path."""
    g = hg.Graph()
    x, ids = g.input("x", (4, 3), "f32"), g.input("ids", (2,), "i32")
    y = x @ g.weight("w", np.arange(6, dtype=np.float32).reshape(3, 2))
    total = g.variable("total", (4, 2), "f32")
    g.output("../../y", hg.assign(total, total + y))
    g.output("taken", hg.ops.get_rows(x, ids))
    hg.save(g, tmp_path / "model.hgraph")
    np.save(tmp_path / "x.npy", np.ones((4, 3), np.float32))
    np.save(tmp_path / "ids.npy", np.array([3, 1], np.int32))
    return tmp_path


def run(folder: Path, *arguments: str, server: str = "local:", inputs: Sequence[str] | None = None) -> int:
    given = [f"x={folder}/x.npy", f"ids={folder}/ids.npy"] if inputs is None else inputs
    options = [word for one in given for word in ("--input", one)]
    return main(["run", str(folder / "model.hgraph"), "--server", server, *options, *arguments])


def test_outputs_are_files_of_a_folder(folder: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "deep" / "out"
    assert run(folder, "--output", str(out), server=url) == 0
    assert sorted(os.listdir(out)) == ["_.._y.npy", "taken.npy"]
    np.testing.assert_array_equal(np.load(out / "_.._y.npy"), np.ones((4, 3)) @ np.arange(6).reshape(3, 2))
    assert np.load(out / "taken.npy").shape == (2, 3)
    printed = capsys.readouterr().out
    assert "f32[4, 2]" in printed and str(out / "taken.npy") in printed and "cpu0: compiled in" in printed


def test_a_device_can_be_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, server="local:#cpu0") == 0
    assert run(folder, server="local:#gpu7") == 1
    assert "no device is named 'gpu7'" in capsys.readouterr().err


def test_repeating_gives_median_and_spread_and_the_last_outputs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--repeat", "3", "--output", str(folder)) == 0
    assert "ran 3 times: median" in capsys.readouterr().out
    # The variable sums up what each run adds.
    expected = 3 * (np.ones((4, 3)) @ np.arange(6).reshape(3, 2))
    np.testing.assert_array_equal(np.load(folder / "_.._y.npy"), expected)


def test_observed_nodes_are_printed_as_they_come(
    folder: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--tap", "matmul*", "--tap", "*assign*", "--repeat", "2", server=url) == 0
    lines = capsys.readouterr().out.splitlines()
    # A row of ones times 0 to 5 in two columns; the variable holds the sum of two runs.
    assert [line.split("  ")[1:] for line in lines[:2]] == [
        ["f32[4, 2]", "min 6", "mean 7.5", "max 9"],
        ["f32[4, 2]", "min 12", "mean 15", "max 18"],
    ]
    assert lines[0].startswith("matmul") and "assign" in lines[1] and "output" in lines[2]


def test_observed_nodes_are_in_the_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--tap", "matmul*", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["taps"]
    assert found["shape"] == [4, 2] and (found["min"], found["mean"], found["max"]) == (6, 7.5, 9)


def test_a_profile_has_the_time_of_each_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--profile", "--repeat", "2") == 0
    printed = capsys.readouterr().out
    assert "ran 2 times" in printed and "share" in printed and "matmul" in printed.split("share")[1]
    assert run(folder, "--profile", "--json") == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert any("matmul" in one["ops"] and one["took_us"] > 0 for one in steps)


def test_a_tap_that_matches_nothing_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--tap", "matmull*") == 1
    printed = capsys.readouterr().err
    assert "no node matches 'matmull*'" in printed and "near names: 'matmul" in printed


def test_nodes_of_any_type_can_be_observed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    g = hg.Graph()
    x = g.input("x", (2, 32), "f32")
    g.output("b", hg.astype(x, "bf16"))
    g.output("q", hg.ops.cpy(x, g.variable("v", (2, 32), "q8_0")))
    g.output("n", x[:, :0] * 1.0)
    g.output("t", x > 0.0)
    hg.save(g, folder / "same.hgraph")
    np.save(folder / "x.npy", np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32))
    assert main([*same(folder), "--tap", "*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for words in (
        "bf16[2, 32]  min -1  mean",
        "q8_0[2, 32]",
        "f32[2, 0]",
        "bool[2, 32]  min 0  mean 0.5  max 1",
    ):
        assert any(words in line for line in lines), (words, lines)


def test_json_is_for_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--json", "--repeat", "2", "--output", str(folder / "out")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"] == "cpu0" and len(found["run_seconds"]) == 2
    assert found["outputs"][1] == {
        "name": "taken",
        "type": "f32",
        "shape": [2, 3],
        "file": str(folder / "out" / "taken.npy"),
    }


def test_random_inputs_are_the_same_again_and_in_range(folder: Path) -> None:
    found = []
    for number, seed in enumerate((1, 1, 2)):
        out = folder / str(number)
        assert run(folder, "--output", str(out), inputs=[f"x=@random:{seed}", "ids=@random"]) == 0
        found.append(np.load(out / "taken.npy").tobytes())
    assert found[0] == found[1] != found[2]
    assert run(folder, inputs=["x=@zeros", "ids=@random:9"]) == 0


def test_missing_inputs_are_listed_with_what_the_graph_takes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, inputs=[f"x={folder}/x.npy"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: inputs are missing: 'ids'")
    for line in ("input    ids: i32[2]", "variable total: f32[4, 2]", "output   taken: f32[2, 3]"):
        assert line in printed
    assert "--input ids=FILE.npy" in printed


def test_a_dry_run_says_what_it_would_take_and_needs_no_inputs(
    folder: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--dry-run", server=url, inputs=[]) == 0
    printed = capsys.readouterr().out
    assert "memory on cpu0" in printed and "total" in printed and "MiB" not in printed
    assert run(folder, "--dry-run", "--json", server=url, inputs=[]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["weights_bytes"] >= 6 * 4 and found["variables_bytes"] >= 8 * 4
    assert found["total_bytes"] >= found["weights_bytes"] + found["variables_bytes"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("x", "no name or no value"),
        ("=x.npy", "no name or no value"),
        ("X=@zeros", "no input 'X'"),
        ("x=@ones", "unknown value '@ones'"),
        ("x=@random:-1", "unknown value"),
        ("x=missing.npy", "not a file"),
        ("x=ids.npy", "is f32[4, 3]"),
        ("x=double.npy", "is f32[4, 3]"),
        ("x=transposed.npy", "shape (3, 4)"),
        ("x=objects.npy", "not a .npy file"),
        ("x=text.npy", "not a .npy file"),
        ("x=cut.npy", "not a .npy file"),
        ("x=empty.npy", "not a .npy file"),
        ("x=archive.npz", "archive"),
        ("x=pipe.npy", "not a file"),
    ],
)
def test_what_is_no_input_is_refused_before_anything_is_sent(
    value: str,
    words: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    write_bad_files(folder)
    assert run(folder, server="grpc://127.0.0.1:1", inputs=[value, "ids=@zeros"]) == 1
    printed = capsys.readouterr().err
    assert words in printed and "advice: " in printed, printed


def write_bad_files(folder: Path) -> None:
    np.save(folder / "double.npy", np.ones((4, 3)))
    np.save(folder / "transposed.npy", np.ones((3, 4), np.float32))
    np.save(folder / "objects.npy", np.array([{}], object), allow_pickle=True)
    np.savez(folder / "archive.npz", np.ones(3))
    (folder / "text.npy").write_text("not an array")
    (folder / "cut.npy").write_bytes((folder / "x.npy").read_bytes()[:-1])
    (folder / "empty.npy").touch()
    os.mkfifo(folder / "pipe.npy")


def test_a_file_that_is_no_graph_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model.hgraph").write_bytes(b"nothing")
    assert run(folder) == 1
    assert "not a graph file" in capsys.readouterr().err


def test_a_file_of_weights_says_that_it_holds_no_graph(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "tiny.gguf").write_bytes(b"GGUF" + bytes(64))
    assert main(["explain", str(folder / "tiny.gguf")]) == 1
    told = capsys.readouterr().err
    assert "not a graph file" in told and "session.server_weights" in told and "hg.save" in told
    assert "heliograph generate" in told


def test_a_device_without_its_server_says_how_one_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "cpu0.invalid"
    assert main(["compare", str(folder / "model.hgraph"), "--a", name, "--b", "local:"]) == 1
    assert f"local:#{name}" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--output", str(folder / "x.npy")) == 1
    assert "cannot make the folder" in capsys.readouterr().err


def test_bfloat16_is_f32_in_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = np.array([[1.5, -2.0, np.inf, np.nan]], np.float32)
    found = through(folder, "bf16", (1, 4), values)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, values)
    bits = blocks.to_bits(values)
    np.testing.assert_array_equal(through(folder, "bf16", (1, 4), bits), values)
    np.save(folder / "x.npy", np.array([[0.1] * 4], np.float32))
    assert main(same(folder)) == 1
    assert "more digits" in capsys.readouterr().err


def test_quantized_types_are_rows_of_blocks_in_files(folder: Path) -> None:
    rows = np.random.default_rng(SEED).integers(0, 64, (4, 2 * 34), np.uint8)
    np.testing.assert_array_equal(through(folder, "q8_0", (4, 64), rows), rows)


def through(folder: Path, dtype: str, shape: tuple[int, ...], array: Any) -> Any:
    """What comes out of a graph that returns its input."""
    g = hg.Graph()
    g.output("y", g.input("x", shape, dtype))
    hg.save(g, folder / "same.hgraph")
    np.save(folder / "x.npy", array)
    assert main([*same(folder), "--output", str(folder / "out")]) == 0
    return np.load(folder / "out" / "y.npy")


def same(folder: Path) -> list[str]:
    return ["run", str(folder / "same.hgraph"), "--server", "local:", "--input", f"x={folder}/x.npy"]


def test_names_of_files_are_never_paths_and_never_alike() -> None:
    names = ["y", "Y", "a/b", "a\\b", "..", "", ".hidden", "\u00fc", "x" * 500, "x" * 501, "/etc/passwd"]
    found = file_names(names)
    assert list(found) == names and len({file.lower() for file in found.values()}) == len(names)
    for file in found.values():
        assert Path(file).name == file and not file.startswith(".") and len(file) < 140
    assert found["y"] == "y.npy" and found["Y"] == "Y_2.npy"
