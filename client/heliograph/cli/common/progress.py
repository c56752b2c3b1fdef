"""A progress bar on stderr, where rich is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

#: What it is about, how far it is, how many of all, and for how long it has run.
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
    """A bar of these columns: columns of rich by name, or texts.

    Gives what changes it, as `rich.progress.Progress.update` does; None without rich, or when stderr is no
    terminal.
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
