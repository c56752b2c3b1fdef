"""The style of all commands: by rich on a terminal, plain text otherwise.

Every command prints tables by `print_table`, notes and verdicts by `say`, and errors by
`print_error`, so that they look alike, and so that other programs read plain lines.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Literal, TextIO, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console

#: The meaning of a text; its look follows from it.
Meaning: TypeAlias = Literal["title", "header", "good", "warning", "error", "quiet", ""]
STYLES: dict[str, str] = {
    "title": "bold",
    "header": "bold cyan",
    "good": "green",
    "warning": "bold yellow",
    "error": "bold red",
    "quiet": "dim",
    "": "",
}


def console(stream: TextIO) -> Console | None:
    """rich's console for a terminal; None without one, or without rich."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream, highlight=False)


def say(text: str, meaning: Meaning = "", *, stream: TextIO | None = None) -> None:
    """Print lines of one meaning."""
    out = stream or sys.stdout
    found = console(out)
    if found is None:
        print(text, file=out)
    else:
        found.print(text, style=STYLES[meaning] or None, markup=False, soft_wrap=True)


def print_error(text: str) -> None:
    """Print an error, its place and its advice to stderr."""
    found = console(sys.stderr)
    if found is None:
        print(f"error: {text}", file=sys.stderr)
        return
    first, *rest = text.split("\n")
    found.print("error: ", style=STYLES["error"], end="", markup=False)
    found.print(first, markup=False, soft_wrap=True)
    for line in rest:
        style = None if line.lstrip().startswith("advice:") else STYLES["quiet"]
        found.print(line, style=style, markup=False, soft_wrap=True)
