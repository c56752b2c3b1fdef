"""One style for all commands: colours on a terminal, plain text where other programs read."""

from __future__ import annotations

import io
import sys

import pytest

from heliograph.cli.common.style import STYLES, print_error, say
from heliograph.cli.common.tables import print_table
from heliograph.cli.doctor.findings import Finding, Level, first_change


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replace this process's streams, in a test itself: pytest sets them after its fixtures."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    found = Terminal()
    monkeypatch.setattr(sys, "stdout", found)
    monkeypatch.setattr(sys, "stderr", found)
    return found


def test_a_pipe_gets_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    say("well", "good")
    print_table(["name", "n"], [["a", "1"]])
    print_error("it failed\n  advice: do better")
    found = capsys.readouterr()
    assert found.out == "well\nname  n\na     1\n"
    assert found.err == "error: it failed\n  advice: do better\n"


@pytest.mark.parametrize("meaning", [meaning for meaning in STYLES if meaning])
def test_a_terminal_gets_colours(monkeypatch: pytest.MonkeyPatch, meaning: str) -> None:
    terminal = on_a_terminal(monkeypatch)
    say("[bold]text[/bold]", meaning)  # type: ignore[arg-type]
    assert "\x1b[" in terminal.getvalue() and "[bold]text[/bold]" in terminal.getvalue()


def test_tables_and_errors_have_the_same_colours_and_keep_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)
    print_table(["name"], [["f32[2, 3]"]])
    print_error("f32[2, 3] [/x]\n  where: here\n  advice: there")
    shown = terminal.getvalue()
    assert "f32[2, 3] [/x]" in shown and "1;36m" in shown and "advice: there" in shown


def test_a_terminal_without_rich_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    say("well", "good")
    print_table(["name"], [["a"]])
    assert terminal.getvalue() == "well\nname\na\n"


def finding(cost: str, level: Level = Level.HINT) -> Finding:
    return Finding("it", level, "it is slow", cost, "make it fast")


def test_doctor_names_the_one_thing_to_change_first() -> None:
    assert first_change([]) == "change first: nothing"
    assert first_change([finding("none was seen")]) == "change first: nothing"
    found = first_change([finding("nothing as long as it is on"), finding("time")])
    assert found == "change first: make it fast (it is slow)"
