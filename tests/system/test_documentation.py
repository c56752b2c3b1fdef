"""The documentation: its samples run, its links lead somewhere, and it names what exists.

Samples are fenced blocks of Python, shell, console and TOML. Those of one page share names and a
folder, in their order. A sample that tests cannot run says so in its first line: `# Not run by the
tests: REASON`. A Python sample that begins with `# NAME.py` is also a file of that name for the
shell samples below it.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from certificates import Authority
from pages import Page, Sample, pages
from paths import ROOT
from sample_shell import SampleShell, check_output, commands_of, sample_shell

import heliograph as hg
from heliograph_server.auth.clients import parse_clients
from heliograph_server.auth.tokens import parse_tokens
from heliograph_server.config.config import load_config

RUN = ("python", "shell", "console", "toml")
SHOWN = ("text", "yaml", "mermaid")
#: Pages for users.
FOR_USERS = pages("README.md", "docs/index.md", "docs/guide/*.md", "docs/operate/*.md", "docs/extend/*.md")
#: Pages that are followed from their first to their last step in `test_secure_pages`.
FOLLOWED = pages("docs/operate/secure-*.md")
#: Pages whose samples need PyTorch, and run in `make test-torch`.
WITH_TORCH = pages("docs/guide/pytorch.md", "docs/guide/pytorch_training.md")
WITH_SAMPLES = [
    page
    for page in pages("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "docs/**/*.md")
    if page not in (*FOLLOWED, *WITH_TORCH)
]
LINKED = pages("README.md", "docs/**/*.md", "deploy/**/*.md")
#: The reasons for which a sample may not run.
REASONS = {
    "needs Docker",
    "needs Kubernetes",
    "needs systemd",
    "needs a GPU",
    "needs a Ray cluster",
    "needs a package index",
    "needs another machine",
    "needs a collector of traces",
    "needs the files of a model",
}
DEFAULT_URL = "grpc://127.0.0.1:7070"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The daemon of all samples, with two small devices, and a folder for state."""
    from forked_daemons import running_daemon

    device = "cpu:threads=1,memory=1GiB"
    state = str(tmp_path_factory.mktemp("state"))
    with running_daemon("--device", device, "--device", device, "--state", state) as url:
        yield url


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder: a graph, an input, certificates, the example of a backend, and folders
    for models and weights."""
    g = hg.Graph()
    x = g.input("x", (2, 8), "f32")
    for number in range(2):
        with g.scope(f"layer{number}"):
            x = hg.gelu(x @ g.weight("w", np.eye(8, dtype=np.float32)))
    g.output("y", x)
    hg.save(g, tmp_path / "model.hgraph")
    np.save(tmp_path / "x.npy", np.ones((2, 8), np.float32))
    authority = Authority(tmp_path)
    pair = authority.server("localhost", "127.0.0.1", "127.0.0.2", "127.0.0.3", file="cert")
    Path(pair.key).rename(tmp_path / "key.pem")
    (tmp_path / "backend.py").write_text((ROOT / "examples/backend.py").read_text())
    # A plugin that others can write to is refused.
    (tmp_path / "backend.py").chmod(0o600)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_SAMPLES, ids=[page.name for page in WITH_SAMPLES])
def test_the_samples_run(page: Page, server: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As written, except that they talk to the daemon of the tests, and start others by forking."""
    from forked_daemons import running_daemon

    samples = [one for one in page.samples(*RUN) if not one.why_not_run]
    if not samples:
        pytest.skip("the page has no samples")
    monkeypatch.setattr("heliograph.testing.running_daemon", running_daemon)
    monkeypatch.setenv("HELIOGRAPH_SERVER", server)
    namespace: dict[str, Any] = {"__name__": "sample"}
    with sample_shell(folder, server) as shell:
        try:
            for sample in samples:
                run_sample(sample, namespace, shell, server)
        finally:
            for value in namespace.values():
                if isinstance(value, hg.Session):
                    value.close()


def run_sample(sample: Sample, namespace: dict[str, Any], shell: SampleShell, server: str) -> None:
    if sample.language == "python":
        if named := re.match(r"# (\w+\.py)\n", sample.code):
            Path(named[1]).write_text(sample.code)
        tree = ast.parse(sample.code.replace(DEFAULT_URL, server))
        # Tracebacks and graphs name the page's lines.
        code = compile(ast.increment_lineno(tree, sample.line - 1), str(sample.page), "exec")
        with contextlib.redirect_stdout(io.StringIO()):
            exec(code, namespace)
    elif sample.language == "shell":
        shell.run(sample.code)
    elif sample.language == "console":
        for command, expected in commands_of(sample.code):
            check_output(expected, shell.run(command))
    elif "token" in tomllib.loads(sample.code):
        assert parse_tokens(sample.code, sample.where)
    elif "client" in tomllib.loads(sample.code):
        assert parse_clients(sample.code, sample.where)
    else:
        Path("sample.toml").write_text(sample.code)
        load_config(Path("sample.toml"))


NOT_RUN = [sample for page in WITH_SAMPLES for sample in page.samples() if sample.why_not_run]


@pytest.mark.parametrize("sample", NOT_RUN, ids=[sample.where for sample in NOT_RUN])
def test_a_sample_that_does_not_run_says_why(sample: Sample) -> None:
    """Skipped, so that `pytest -rs` lists them."""
    assert sample.why_not_run in REASONS
    pytest.skip(sample.why_not_run)


@pytest.mark.parametrize("page", FOR_USERS, ids=[page.name for page in FOR_USERS])
def test_no_sample_evades_the_tests(page: Page) -> None:
    assert {one.language for one in page.samples()} <= {*RUN, *SHOWN}
    indented = [line for line in page.prose.splitlines() if re.match(r"    [^ -]", line)]
    assert not indented, "blocks of code have fences"


@pytest.mark.parametrize("page", LINKED, ids=[page.name for page in LINKED])
def test_links_lead_somewhere(page: Page) -> None:
    for link in page.links():
        target, _, anchor = link.partition("#")
        path = page.path.parent / target if target else page.path
        assert path.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in Page(path).anchors(), f"{page.name}: {link}"


def test_an_index_has_every_page() -> None:
    """That of all pages, or that of a folder."""
    indexes = pages("docs/**/index.md")
    listed = {(index.path.parent / link).resolve() for index in indexes for link in index.links()}
    listed |= {ROOT / "docs/index.md"}
    assert not {page.name for page in pages("docs/**/*.md") if page.path not in listed}


def test_the_map_of_folders_names_what_exists() -> None:
    folders = re.findall(r"^\| `([\w/]+)/`", (ROOT / "README.md").read_text(), re.M)
    assert len(folders) >= 6
    for folder in folders:
        assert (ROOT / folder).is_dir(), folder


def test_the_commands_named_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in WITH_SAMPLES:
        for target in re.findall(r"`make ([a-z-]+)", page.text):
            assert target in targets, f"{page.name}: make {target}"


def test_the_extras_named_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for page in WITH_SAMPLES:
        for extras in re.findall(r"'(?:heliograph|\.)\[([\w,]+)\]'", page.text):
            assert set(extras.split(",")) <= set(project["optional-dependencies"]), f"{page.name}: {extras}"


def test_the_walk_through_a_session_names_what_exists() -> None:
    """Classes and their methods, functions, and files or folders."""
    defined: set[str] = set()
    for path in ROOT.glob("[a-z]*/heliograph*/**/*.py"):
        if "_pb2" not in path.name:
            defined.update(re.findall(r"\b(?:class|def) (\w+)", path.read_text()))
            defined.update(re.findall(r"\b(\w+) ?[:=]", path.read_text()))
    for name in re.findall(r"`([^`]+)`", (ROOT / "docs/design/session.md").read_text()):
        if "/" in name:
            folder = name.rstrip("/")
            assert (ROOT / folder).exists() or any(ROOT.glob(f"*/heliograph*/**/{folder}")), name
        elif re.fullmatch(r"[A-Za-z_.]+", name):
            for part in name.split("."):
                assert part in defined, name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    # Tables of contents without every method: they take as long as all the rest.
    few = ["-D", "toc_object_entries=0"]
    done = subprocess.run([*command, *few, ROOT / "docs", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"(https?:[^\"]*)", page.read_text())
        assert not loaded, f"{page.name}: {loaded}"
