"""A progress bar for uploads, on stderr, where rich is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def upload_progress(console: Console | None = None) -> Iterator[Callable[[int, int], None] | None]:
    """What `hg.connect(progress=...)` takes: shows bytes and speed while weights are uploaded.

    Gives None where nobody would see it: without rich, or when stderr is no terminal.
    """
    if console is None and not sys.stderr.isatty():
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
    except ImportError:
        yield None
        return
    where = console or Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=where) as bars:
        task = bars.add_task("uploading weights", total=None, visible=False)

        def show(done_bytes: int, total_bytes: int) -> None:
            bars.update(task, completed=done_bytes, total=total_bytes, visible=True)

        yield show
