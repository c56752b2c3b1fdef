"""A progress bar on stderr, if rich is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

#: Columns of a bar with a count.
COUNTED = ("{task.description}", "BarColumn", "MofNCompleteColumn", "TimeElapsedColumn")


@contextmanager
def progress_bar(
    what: str,
    total: int | None,
    console: Console | None,
    *columns: str,
    transient: bool = True,
    **fields: Any,
) -> Iterator[Callable[..., None] | None]:
    """Show a progress bar with the given columns: names of rich's columns, or texts.

    Gives a function that updates it, with the arguments of `rich.progress.Progress.update`; None
    without rich or a terminal.
    """
    if console is None and not sys.stderr.isatty():
        yield None
        return
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        yield None
        return
    shown = [getattr(progress, one)() if one.isidentifier() else one for one in columns]
    console = console or Console(file=sys.stderr)
    with progress.Progress(*shown, console=console, transient=transient) as bars:
        yield partial(bars.update, bars.add_task(what, total=total, **fields))
