"""Tables for a terminal: by rich where it is installed, else plain columns."""

from __future__ import annotations

from collections.abc import Sequence


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints rows under a header."""
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        print("\n".join(align([header, *rows])))
        return
    table = Table(*header)
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with columns of one width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return ["  ".join(row).rstrip() for row in padded]
