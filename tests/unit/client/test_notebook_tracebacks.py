"""Errors in IPython: the traceback ends at the user's line, and says where the value was built."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import heliograph as hg

pytest.importorskip("IPython", reason="needs IPython")

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config


@pytest.fixture
def shell(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    # No thread of a history outlives the test.
    made = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    made.run_line_magic("colors", "nocolor")
    made.user_ns.update(hg=hg, np=np)
    yield made
    made.InteractiveTB.skip_hidden = True
    made.reset(new_session=False)
    InteractiveShell.clear_instance()


def shown(shell: InteractiveShell, cell: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The output of a cell."""
    shell.run_cell(cell)
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)


WRONG = "def model(x, w):\n    return x @ w\ng = hg.Graph()\nx = g.input('x', (2, 3), 'f32')\ny = model(x, x)"


def test_a_traceback_ends_at_the_line_of_the_user(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    found = shown(shell, WRONG, capsys)
    assert "InvalidGraphError" in found and "return x @ w" in found and "model(x, x)" in found
    assert "where:" in found and "advice:" in found
    assert "heliograph/graph" not in found and "interactiveshell" not in found


def test_the_frames_of_the_library_come_back_where_hidden_ones_are_asked_for(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.InteractiveTB.skip_hidden = False
    assert "heliograph/graph" in shown(shell, WRONG, capsys)


def test_the_debugger_and_programs_see_every_frame(shell: InteractiveShell) -> None:
    error = shell.run_cell(WRONG, silent=True).error_in_exec
    assert isinstance(error, hg.InvalidGraphError)
    names, one = [], error.__traceback__
    while one is not None:
        names.append(one.tb_frame.f_globals["__name__"])
        one = one.tb_next
    assert any(name.startswith("heliograph.") for name in names)


def test_a_function_of_the_user_that_the_library_calls_is_shown(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = (
        "with hg.connect('local:') as session:\n"
        "    @session.function\n"
        "    def broken(x):\n"
        "        return x @ x\n"
        "    broken(np.ones((2, 3), np.float32))"
    )
    found = shown(shell, cell, capsys)
    assert "return x @ x" in found and "broken(np.ones" in found
    assert "traced.py" not in found
