"""Progress bars on stderr, where rich is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn


@contextmanager
def progress_bars(
    columns: Callable[[], Sequence[ProgressColumn]], console: Console | None, *, transient: bool = False
) -> Iterator[Progress | None]:
    """Bars with these columns, which may be imported from rich when they are asked for.

    Gives None where nobody would see them: without rich, or when stderr is no terminal.
    """
    if console is None and not sys.stderr.isatty():
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress

        chosen = columns()
    except ImportError:
        yield None
        return
    with Progress(*chosen, console=console or Console(file=sys.stderr), transient=transient) as bars:
        yield bars
