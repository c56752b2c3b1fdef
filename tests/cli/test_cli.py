"""The command line: what it prints, its exit statuses, and its errors."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_daemons import running_daemon
from plugin_files import BAD, write_plugin

from heliograph.cli import main
from heliograph.explain.tables import align
from heliograph_proto.ops.table import OPS


def heliograph(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "heliograph.cli", *arguments]


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("heliograph ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["servee"], "did you mean 'serve'?"),
        (["frobnicate"], "there are: run, explain, trace"),
        ([], "run a daemon that owns this host's devices"),
        (["devices", "--foo"], "usage: heliograph devices"),
        (["-v"], "COMMAND"),
        (["compare", "g", "--a", "local:", "--b", "local:", "--tolerance", "-1"], "-1 is not 0 or more"),
    ],
)
def test_what_is_no_command_line_is_answered_with_one(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_names_keep_their_capitals_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["warmup", "--help"])
    assert "Compile the CPU kernels" in capsys.readouterr().out


def test_the_op_table_names_every_op(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == list(OPS)
    assert main(["ops"]) == 0
    assert "soft_max" in capsys.readouterr().out


def test_devices_as_a_table_and_as_json(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--server", url]) == 0
    assert "cpu0" in capsys.readouterr().out
    assert main(["devices", "--server", url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (device,) = found["devices"]
    assert device["name"] == "cpu0" and device["type"] == "cpu" and device["memory"]["total_bytes"] > 0
    assert set(device) == {
        "name", "type", "backend", "description", "id", "memory", "capabilities", "buffer_types", "features",
        "missing", "lost",
    }  # fmt: skip
    assert device["buffer_types"][0] == {
        "name": "cpu0", "role": "default", "alignment_bytes": 64, "max_size_bytes": 2**63 - 1,
        "is_host": True, "readable_by": ["cpu0"], "pads": False,
    }  # fmt: skip
    assert int(device["features"]["threads"]) > 0
    cpu = next(one for one in found["backends"] if one["name"] == "cpu")
    assert cpu["devices"] == ["cpu0"] and cpu["why"] == "" and cpu["origin"] == "built in"
    assert set(cpu) == {"name", "origin", "contract_version", "devices", "why", "features", "version"}
    assert found["server"].startswith("heliograph/")


def test_devices_with_v_have_their_buffer_types_and_features_and_all_backends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["devices", "-v", "--server", "local:#fake:extra=1,max_size=3MiB,host=0"]) == 0
    devices, types, features, backends = capsys.readouterr().out.split("\n\n")
    assert devices.splitlines()[1].split()[:7] == ["fake0", "accelerator", "fake", "1.0", "GiB", "1.0", "GiB"]
    assert [line.split() for line in types.splitlines()[1:]] == [
        ["fake0", "fake0", "default", "64", "3.0", "MiB", "no", "fake0"],
        ["fake0", "fake0_extra0", "extra", "64", "3.0", "MiB", "no", "fake0"],
    ]
    assert [line.split() for line in features.splitlines()[1:]] == [["fake0", "threads", "1"]]
    lines = backends.splitlines()
    assert lines[1].split() == ["cpu", "built", "in", "no", "device", "was", "asked", "for"]
    assert lines[2].split() == ["fake", "built", "in", "fake0"]


def test_a_daemon_shows_its_plugins_and_why_one_cannot_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plugin(tmp_path, "broken", BAD["raises"][0])
    write_plugin(tmp_path, "sim")
    devices = [
        "--device",
        "cpu:threads=1",
        "--device",
        "sim:label=a box,kind=gpu",
        "--device",
        "CPU:threads=2",
    ]
    with running_daemon("--backend", f"{tmp_path}/", *devices) as url:
        assert main(["devices", "--server", url]) == 0
        table, backends = capsys.readouterr().out.split("\n\n")
        assert main(["devices", "--json", "--server", url]) == 0
    lines = [line.split() for line in table.splitlines()[1:]]
    assert [line[:3] for line in lines] == [
        ["cpu0", "cpu", "cpu"],
        ["cpu1", "cpu", "cpu"],
        ["sim0", "gpu", "sim"],
    ]
    assert [line[7] for line in lines] == ["1", "2", "0000:c0:00.0"]
    state = f"broken {tmp_path / 'broken.py'} not available: RuntimeError: no licence"
    assert state in [" ".join(line.split()) for line in backends.splitlines()]
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["backends"]}
    assert found["sim"]["devices"] == ["sim0"] and found["sim"]["origin"] == str(tmp_path / "sim.py")
    assert found["broken"]["why"] and found["broken"]["contract_version"] == 0


def test_the_server_can_be_named_by_the_environment(
    daemon: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HELIOGRAPH_SERVER", daemon.tcp)
    assert main(["devices"]) == 0
    assert "cpu0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["devices", "--server", "grpc://127.0.0.1:1"], "no server answers"),
        (["devices", "--server", "ftp://x"], "unknown scheme"),
        (["embed", "--model", "/no/such", "--server", "local:", "/no/such/file"], "/no/such/file"),
        (
            ["embed", "--model", "/no/such", "--server", "local:", __file__],
            "cannot read /no/such/config.json",
        ),
        (["serve", "--listen", "grpc://0.0.0.0:0"], "--insecure"),
        (["devices", "--server", "local:#cpus"], "did you mean 'cpu'?"),
        (["devices", "--server", "local:#cpu:thread=1"], "did you mean 'threads'?"),
        (["devices", "--server", "local:#fake:fail=no power"], "cannot start: no power"),
        (["devices", "--server", "127.0.0.1:1#cpu:threads=1"], "--device cpu:threads=1"),
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
