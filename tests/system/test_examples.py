"""Every example runs as a user would start it, in this process or on a daemon."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from daemon_urls import DaemonUrls
from forked_daemons import running_daemon
from paths import ROOT

import heliograph as hg

EXAMPLES = ROOT / "examples"
SECONDS = 120.0

SCRIPTS = {
    "first_graph": "y = [0.5 0.5]",
    "embed_sentences": "forgot password",
    "cnn": "with probability",
    "transformer_block": "the largest difference from NumPy",
    "decoder_loop": "64 steps",
    "train": "300 steps on the daemon",
}


def run(name: str, *arguments: str, folder: Path) -> str:
    """What a script prints, started in an empty folder."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("where", ["local", "tcp"])
def test_a_script_runs_in_its_own_process_and_on_a_daemon(
    name: str, where: str, daemon: DaemonUrls, tmp_path: Path
) -> None:
    printed = run(name, *([daemon.tcp] if where == "tcp" else []), folder=tmp_path)
    assert SCRIPTS[name] in printed


def test_a_pool_of_two_daemons_gives_the_bits_of_one_process(tmp_path: Path) -> None:
    assert "the same bits as in one process" in run("pool", folder=tmp_path)


def test_training_goes_on_through_cuts_and_deaths_of_its_daemon(tmp_path: Path) -> None:
    assert "every weight has the same bits" in run("surviving", str(tmp_path / "state"), folder=tmp_path)


def test_the_backend_passes_the_conformance_suite_and_runs_its_part_of_a_graph(tmp_path: Path) -> None:
    plugin = tmp_path / "backend.py"
    plugin.write_text((EXAMPLES / "backend.py").read_text())
    # A plugin that others can write to is refused.
    plugin.chmod(0o600)
    chosen = ["--backend", str(plugin), "--device", "numpy:memory=256MiB"]
    command = [sys.executable, "-m", "heliograph.cli", "conformance", *chosen, "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    results = json.loads(done.stdout)["results"]
    not_run = [one["id"] for one in results if one["outcome"] != "passed" and one["group"] in ("plan", "run")]
    assert len(not_run) == 1 and "arena" in not_run[0]
    graph = hg.Graph()
    x = graph.input("x", (2, 3), "f32")
    graph.output("y", hg.gelu(hg.exp(x)))
    ones = np.ones((2, 3), np.float32)
    both = [*chosen, "--device", "cpu:threads=1,memory=256MiB"]
    with running_daemon(*both) as url, hg.connect(url) as session:
        plan = session.compile(graph)
        assert "on numpy0, cpu0" in repr(plan)
        on_cpu = session.compile(graph, "cpu0").run(x=ones)["y"]
        np.testing.assert_allclose(plan.run(x=ones)["y"], on_cpu, rtol=1e-6)


@pytest.fixture
def service(daemon: DaemonUrls) -> Iterator[str]:
    """The address of the web service."""
    command = [sys.executable, "-m", "uvicorn", "web_service:app", "--port", "0", "--no-access-log"]
    environment = os.environ | {"HELIOGRAPH_SERVER": daemon.tcp}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=EXAMPLES, env=environment, stderr=pipe, text=True) as process:
        try:
            assert process.stderr is not None
            found = (re.search(r"running on (http://\S+)", line) for line in process.stderr)
            yield next(one[1] for one in found if one)
        finally:
            process.terminate()
            process.communicate(timeout=SECONDS)


def post(url: str, content: object) -> tuple[int, dict[str, object]]:
    request = urllib.request.Request(url, json.dumps(content).encode())
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_the_web_service_answers_and_refuses_what_does_not_fit(service: str) -> None:
    status, answer = post(f"{service}/softmax", {"x": [1, 1, 1]})
    assert status == 200 and answer["y"] == pytest.approx([1 / 3] * 3)
    for wrong in ({"x": [1, 2]}, {"x": "three"}, {}, []):
        status, answer = post(f"{service}/softmax", wrong)
        assert status == 400 and answer["error"]


#: A word that each notebook shows.
NOTEBOOKS = {
    "notebook": "InvalidGraphError",
    "notebook_training": "the loss fell from",
    "notebook_placement": "agree",
}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(
    name: str, daemon: DaemonUrls, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("HELIOGRAPH_SERVER", daemon.tcp)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    # A kernel of this very Python, wherever others are registered.
    client = nbclient.NotebookClient(notebook, timeout=SECONDS, kernel_name="python3")
    asyncio.run(client.async_execute())
    shown = json.dumps(notebook.cells)
    assert NOTEBOOKS[name] in shown and "hg-card" in shown


def test_notebooks_are_kept_without_outputs() -> None:
    assert set(NOTEBOOKS) == {one.stem for one in EXAMPLES.glob("*.ipynb")}
    for name in NOTEBOOKS:
        cells = json.loads((EXAMPLES / f"{name}.ipynb").read_text())["cells"]
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


def test_the_page_of_examples_names_them_all() -> None:
    named = set(re.findall(r"\]\(([\w.]+)\)", (EXAMPLES / "README.md").read_text()))
    there = {one.name for one in EXAMPLES.iterdir() if one.suffix in {".py", ".ipynb"}}
    assert named == there - {"weights.py"}
