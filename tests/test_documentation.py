"""Every code sample of the documentation runs."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import DaemonUrls

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")
DEFAULT_URL = "grpc://127.0.0.1:7070"


def samples() -> list[tuple[str, str]]:
    """(where, code) of every Python block."""
    found = []
    for name in DOCUMENTS:
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.S)
        found += [(f"{name}-{number}", block) for number, block in enumerate(blocks, 1)]
    return found


@pytest.mark.parametrize("code", [code for _, code in samples()], ids=[where for where, _ in samples()])
def test_the_sample_runs(code: str, daemon: DaemonUrls) -> None:
    """As written, except that it talks to the daemon of the tests."""
    if "opentelemetry" in code:
        pytest.importorskip("opentelemetry.trace", reason="needs OpenTelemetry: pip install heliograph[otel]")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code.replace(DEFAULT_URL, daemon.tcp), "sample", "exec"), {"__name__": "sample"})
    assert printed.getvalue().strip()


def test_the_map_of_folders_names_what_exists() -> None:
    for folder in re.findall(r"^\| `([\w/]+)/`", (ROOT / "README.md").read_text(), re.M):
        assert (ROOT / folder).is_dir(), folder


def test_the_commands_named_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    for name in DOCUMENTS:
        for target in re.findall(r"`make ([a-z]+)", (ROOT / name).read_text()):
            assert target in targets, f"{name}: make {target}"
