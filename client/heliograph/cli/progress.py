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


@contextmanager
def upload_progress(console: Console | None = None) -> Iterator[Callable[[int, int], None] | None]:
    """What `hg.connect(progress=...)` takes: shows bytes and speed while weights are uploaded.

    Gives None where nobody would see it.
    """

    def columns() -> Sequence[ProgressColumn]:
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

        return TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()

    with progress_bars(columns, console) as bars:
        if bars is None:
            yield None
            return
        task = bars.add_task("uploading weights", total=None, visible=False)

        def show(done_bytes: int, total_bytes: int) -> None:
            bars.update(task, completed=done_bytes, total=total_bytes, visible=True)

        yield show
