"""Tables: by rich on a terminal, otherwise plain columns that other programs can read."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from heliograph.explain.tables import align


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header."""
    if not sys.stdout.isatty() or not _print_rich(header, rows):
        print("\n".join(align([header, *rows])))


def _print_rich(header: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """True if rich is installed and printed the rows."""
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        return False
    table = Table(*header)
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)
    return True
