"""The command line: what it prints, its exit statuses, and its errors."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from heliograph.cli import main
from heliograph.cli.tables import align
from heliograph_proto.ops import OPS


def heliograph(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "heliograph.cli", *arguments]


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("heliograph ")


def test_the_op_table_names_every_op(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == list(OPS)
    assert main(["ops"]) == 0
    assert "soft_max" in capsys.readouterr().out


def test_devices_as_a_table_and_as_json(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--server", url]) == 0
    assert "cpu0" in capsys.readouterr().out
    assert main(["devices", "--server", url, "--json"]) == 0
    (device,) = json.loads(capsys.readouterr().out)
    assert device["name"] == "cpu0" and device["type"] == "cpu" and device["memory"]["total_bytes"] > 0


def test_the_server_can_be_named_by_the_environment(
    daemon: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HELIOGRAPH_SERVER", daemon.tcp)
    assert main(["devices"]) == 0
    assert "cpu0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["devices", "--server", "grpc://127.0.0.1:1"], "nobody answers"),
        (["devices", "--server", "ftp://x"], "unknown scheme"),
        (["embed", "--model", "/no/such", "--server", "local:", "/no/such/file"], "/no/such/file"),
        (
            ["embed", "--model", "/no/such", "--server", "local:", __file__],
            "cannot read /no/such/config.json",
        ),
        (["serve", "--listen", "grpc://0.0.0.0:0"], "--insecure"),
    ],
)
def test_errors_are_a_line_and_advice(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and words in printed.err
    assert "Traceback" not in printed.err and printed.out == ""


@pytest.mark.parametrize("content", ["not json", '{"a": 1}', "[1, 2]"])
def test_a_json_file_must_be_an_array_of_strings(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from heliograph.cli.embed import read_texts
    from heliograph.errors import InvalidArgumentError

    path = tmp_path / "texts.json"
    path.write_text(content)
    with pytest.raises(InvalidArgumentError):
        list(read_texts(str(path)))


def test_texts_are_lines_or_a_json_array(tmp_path: Path) -> None:
    from heliograph.cli.embed import read_texts

    lines, array = tmp_path / "texts.txt", tmp_path / "texts.json"
    lines.write_text("one\ntwo, \u00fc\n", encoding="utf-8")
    array.write_text('["one", "two\\nlines"]')
    assert list(read_texts(str(lines))) == ["one", "two, \u00fc"]
    assert list(read_texts(str(array))) == ["one", "two\nlines"]


def test_a_closed_pipe_is_quiet() -> None:
    process = subprocess.Popen(
        heliograph("ops", "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""


def test_ctrl_c_is_130_and_quiet() -> None:
    code = "import sys\nfrom heliograph import cli\nclass M:\n  def run(a):\n    print('on', flush=True)\n" \
        "    import threading; threading.Event().wait()\n  def add_arguments(p): pass\n" \
        "cli.load = lambda name: M\nsys.exit(cli.main(['ops']))"  # fmt: skip
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == b"on\n"
        process.send_signal(signal.SIGINT)
        try:
            assert process.communicate(timeout=30)[1] == b""
        finally:
            process.kill()
    assert process.returncode == 130


def test_plain_tables_have_columns_of_one_width() -> None:
    assert align([["name", "type"], ["cpu0", "cpu"], ["a", "b"]]) == ["name  type", "cpu0  cpu", "a     b"]
