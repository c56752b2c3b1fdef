"""The samples of the pages on PyTorch run as written, on the daemon of the tests."""

from __future__ import annotations

import ast
import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; `make test-torch` installs it")

from pages import pages  # noqa: E402

import heliograph as hg  # noqa: E402

PAGES = pages("docs/guide/pytorch.md", "docs/guide/pytorch_training.md")
URL = "grpc://127.0.0.1:7070"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_the_samples_run(page: Any, daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    namespace: dict[str, Any] = {"__name__": "sample"}
    try:
        for sample in page.samples("python"):
            tree = ast.parse(sample.code.replace(URL, daemon.tcp))
            code = compile(ast.increment_lineno(tree, sample.line - 1), str(sample.page), "exec")
            with contextlib.redirect_stdout(io.StringIO()):
                exec(code, namespace)
    finally:
        hg.torch.compiling._close()
        torch._dynamo.reset()
