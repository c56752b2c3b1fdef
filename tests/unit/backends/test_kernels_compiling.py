"""How CPU kernels are compiled by two processes, and by one where that cannot be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from heliograph_backends.cpu.kernels.runtime import compiling
from heliograph_backends.cpu.kernels.runtime.compiling import (
    LEAST_MEMORY_BYTES,
    Seen,
    meanwhile,
    why_not_apart,
)

RUNNER = SimpleNamespace(BY_ADDRESS=[SimpleNamespace(name="heavy_block")])
NAMES = {"heavy_block"}


@pytest.fixture
def large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1}, raising=False)
    monkeypatch.setattr(compiling, "machine_memory_bytes", lambda: LEAST_MEMORY_BYTES)


@pytest.mark.usefixtures("large_machine")
def test_another_process_compiles_what_is_not_in_the_cache(tmp_path: Path) -> None:
    assert why_not_apart(tmp_path, NAMES) == ""
    (tmp_path / "heavy.heavy_block-17.py311.nbi").touch()
    assert why_not_apart(tmp_path, NAMES) == "the cache has it"
    assert why_not_apart(None, NAMES) == "nothing is kept on disk"


@pytest.mark.usefixtures("large_machine")
def test_a_small_machine_compiles_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "machine_memory_bytes", lambda: LEAST_MEMORY_BYTES - 1)
    assert "bytes of memory" in why_not_apart(tmp_path, NAMES)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {1}, raising=False)
    assert why_not_apart(tmp_path, NAMES) == "there is only one processor"


@pytest.mark.usefixtures("large_machine")
def test_a_program_that_is_no_python_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert "not a Python" in why_not_apart(tmp_path, NAMES)


def test_the_other_process_finds_its_module() -> None:
    names: dict[str, object] = {}
    exec(compiling._APART.partition(";")[0], names)
    assert names["compiling"] is compiling


@pytest.mark.usefixtures("large_machine")
@pytest.mark.parametrize("executable", ["/nowhere/python", "/bin/false"])
def test_a_process_that_cannot_be_started_or_fails_is_no_failure(
    executable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    seen = Seen(NAMES, None)
    with meanwhile(tmp_path, RUNNER, seen):
        pass
    assert seen.names == set()


@pytest.mark.usefixtures("large_machine")
def test_what_the_other_process_compiled_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int, str]] = []
    seen = Seen(
        {"heavy_block", "post"}, lambda done, all_of_them, name: told.append((done, all_of_them, name))
    )
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho heavy_block\necho post\necho somebody_else\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    seen.add("post")
    with meanwhile(tmp_path, RUNNER, seen):
        pass
    assert told == [(1, 2, "post"), (2, 2, "heavy_block")]


@pytest.mark.usefixtures("large_machine")
def test_a_failure_here_ends_the_other_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def recorded(*arguments: object, **keywords: object) -> subprocess.Popen[str]:
        started.append(popen(["sleep", "60"], stdout=subprocess.PIPE, text=True))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", recorded)
    with pytest.raises(KeyboardInterrupt), meanwhile(tmp_path, RUNNER, Seen(NAMES, None)):
        raise KeyboardInterrupt
    assert started[0].returncode is not None and started[0].returncode < 0
