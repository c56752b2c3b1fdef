"""Tables: by rich on a terminal, otherwise plain columns that other programs can read."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from heliograph.cli.common.style import STYLES, console
from heliograph.explain.tables import align


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header."""
    shown = console(sys.stdout)
    if shown is None:
        print("\n".join(align([header, *rows])))
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(*header, box=SIMPLE_HEAD, header_style=STYLES["header"], pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    shown.print(table)
