"""`heliograph ops`: the table for people, and what a device makes of it, here and over the wire."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from forked_daemons import running_daemon
from paths import SUPPORT

from heliograph.cli import main
from heliograph_backends.cpu.kernels import available
from heliograph_proto.ops.table import OPS
from heliograph_server.commands.ops import described

native = pytest.mark.skipif(not available(), reason="numba is not installed")


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = [line for row in OPS.values() for line in described(row, width)]
    assert max(map(len, lines)) <= width


def test_an_op_is_its_call_its_group_and_what_it_gives(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "maximum", "leaky_relu"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "maximum(a, b)  [elementwise]",
        "    The larger one; NaN if either is.",
        "leaky_relu(x, slope: real = 0.01)  [elementwise]",
        "    x above 0, else x * `slope`.",
    ]


def found(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The answers by op and data types."""
    assert main(["ops", "--json", *arguments]) == 0
    rows = json.loads(capsys.readouterr().out)
    types = (" to ".join(filter(None, (", ".join(row["dtypes"]), row["to"]))) for row in rows)
    return {(row["op"], each): row for row, each in zip(rows, types, strict=True)}


@native
def test_a_device_says_by_which_path_it_computes_each_op_and_data_type(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = found(
        capsys, "--device", "cpu:threads=1", "--quick", "exp", "matmul", "permute", "get_rows", "sin"
    )
    op_paths = {key: set(row["paths"]) for key, row in rows.items()}
    assert op_paths["exp", "f32"] == {"kernel"} and op_paths["exp", "f16"] == {"kernel"}
    assert op_paths["matmul", "f32"] == {"kernel"} and op_paths["matmul", "f16"] == {"BLAS"}
    assert op_paths["permute", "f32"] == {"view"} and op_paths["sin", "f32"] == {"definition"}
    assert op_paths["get_rows", "q8_0, i32"] == {"kernel"}
    assert all(set(row["conformance"]) == {"passed"} for row in rows.values())


def test_a_device_on_the_definition_alone_has_no_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    rows = found(capsys, "--device", "cpu:reference=1,threads=1", "--ask", "exp", "mul_mat")
    assert {op_path for row in rows.values() for op_path in row["paths"]} == {"definition", "BLAS"}
    assert all(row["conformance"] == {} for row in rows.values())


def test_a_daemon_s_device_is_asked_over_the_wire(daemon: Any, capsys: pytest.CaptureFixture[str]) -> None:
    here = found(capsys, "--device", "cpu:threads=2", "--quick", "soft_max", "cast")
    for url in (daemon.tcp, daemon.unix):
        assert found(capsys, "--device", f"{url}#cpu0", "--quick", "soft_max", "cast") == here


def test_the_table_counts_cases_and_says_what_is_not_supported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["ops", "--device", "cpu:threads=1", "--quick", "soft_max"]) == 0
    summary, *rest = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d+ of \d+ ops? are supported, \d+ with every data type", summary), summary
    header, *lines = rest[rest.index("") + 1 :]
    assert header.split() == ["op", "dtypes", "supported", "conformance", "path"]
    assert lines[0].split()[:5] == ["soft_max", "f32", "yes", "7", "passed"]
    assert lines[-1].startswith("cpu0: 8 passed, 0 not supported, 0 failed in ")


@native
def test_the_sums_have_all_paths_and_outcomes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "--device", "cpu:threads=1", "--ask", "exp", "cast", "mul_mat", "permute"]) == 0
    shown = capsys.readouterr().out.splitlines()
    *lines, op_paths, cases = shown[shown.index("") + 1 :]
    assert op_paths.startswith(f"{len(lines) - 1} ops with data types; cases by path: ")
    assert all(word in op_paths for word in ("kernel", "definition", "BLAS", "view"))
    assert cases.endswith(" cases, none was run")


def test_no_row_is_wider_than_a_hundred_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "--device", "cpu:threads=1", "--ask"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_a_conversion_says_to_what(capsys: pytest.CaptureFixture[str]) -> None:
    rows = found(capsys, "--device", "cpu:threads=1", "--ask", "cast", "fill")
    assert {("cast", "f32 to f16"), ("cast", "q4_k to f32"), ("fill", "i64")} <= set(rows)


@pytest.mark.parametrize("name", ["cpu0", "local:#cpu0", "local:#CPU0", "local:", "cpu"])
def test_a_device_goes_by_the_name_that_heliograph_devices_prints(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ops", "--device", name, "--quick", "neg"]) == 0
    assert "0 failed" in capsys.readouterr().out


def test_a_failure_is_exit_status_1_with_its_details(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plugin = tmp_path / "wrong_backend.py"
    plugin.write_text((SUPPORT / "wrong_backend.py").read_text())
    plugin.chmod(0o600)
    arguments = ["--backend", str(plugin), "--device", "wrong", "--quick"]
    assert main(["ops", *arguments, "tanh", "cos"]) == 1
    printed = capsys.readouterr().out
    assert "tanh(f32[7, 33]): failed" in printed
    assert "not supported" in printed and "it has no cosine" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["exo"], "did you mean"),
        (["--device", "cpo", "exp"], "cpo"),
        (["--device", "cpu7", "exp"], "no device is named 'cpu7'"),
        (["--device", "cpu:0", "exp"], "a device's name has no colon: cpu0"),
        (["--device", "local:#gpu0", "exp"], "unknown backend 'gpu'"),
    ],
)
def test_what_cannot_be_asked_is_an_error(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ops", *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and words in printed.err and printed.out == ""


def test_a_device_that_a_daemon_lacks_is_an_error_that_names_those_it_has(
    daemon: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ops", "--device", f"{daemon.tcp}#cpu9", "exp"]) == 1
    assert "cpu9" in (printed := capsys.readouterr().err) and "cpu0" in printed


def test_a_daemon_that_asks_for_a_token_is_shown_that_of_the_url(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_daemon("--tokens", str(tmp_path / "tokens")) as url:
        assert main(["ops", "--device", f"{url}#cpu0", "--quick", "neg"]) == 0
    assert "0 failed" in capsys.readouterr().out
