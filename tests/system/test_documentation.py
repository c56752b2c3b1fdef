"""Every code sample of the documentation runs."""

from __future__ import annotations

import contextlib
import io
import re
from typing import TYPE_CHECKING

import pytest
from paths import ROOT

if TYPE_CHECKING:
    from daemon_urls import DaemonUrls

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


def test_the_walk_through_a_session_names_what_exists() -> None:
    """Classes and their methods, functions, and files or folders."""
    code = "\n".join(
        path.read_text() for path in ROOT.glob("[a-z]*/heliograph*/**/*.py") if "_pb2" not in path.name
    )
    for name in re.findall(r"`([^`]+)`", (ROOT / "docs/design/session.md").read_text()):
        if "/" in name:
            folder = name.rstrip("/")
            assert (ROOT / folder).exists() or any(ROOT.glob(f"*/heliograph*/**/{folder}")), name
        elif re.fullmatch(r"[A-Za-z_.]+", name):
            for part in name.split("."):
                assert re.search(rf"(class|def) {part}\b|\b{part} ?[:=]", code), name


def test_links_between_the_pages_lead_somewhere() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
