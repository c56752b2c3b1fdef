"""`heliograph bench`: a report card of a daemon, to compare machines; and saved cards beside each
other."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

from heliograph.cli.bench.card import Card, as_json, compared, from_json, table
from heliograph.cli.common.arguments import add_json_argument, add_server_argument
from heliograph.cli.common.progress import progress_bar
from heliograph.cli.common.style import say
from heliograph.cli.common.tables import print_table
from heliograph_proto.errors import InvalidArgumentError

_EPILOG = (
    "Takes about a minute, at most two: round trips, runs sent ahead, transfers by each transport, matrix "
    "products, memory, and a transformer block, on the first GPU, else the first CPU, or the URL's device. "
    "Nothing stays on the daemon, and quotas are kept. Save a card with --json > FILE, compare cards with "
    "--compare FILE FILE. It takes the daemon's time: other clients are slower meanwhile."
)
#: The measures, for the bar.
MEASURES = 13


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --server, --seconds, --compare, --json."""
    parser.epilog = _EPILOG
    add_server_argument(parser)
    parser.add_argument(
        "--seconds", type=float, default=3.0, metavar="SECONDS", help="time for each measure (default: 3)"
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        metavar="FILE",
        help="show saved cards beside the first, and measure nothing",
    )
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print, or compare. Raises ConnectionError, InvalidArgumentError."""
    if arguments.compare:
        return _compare(arguments.compare)
    if not 0.05 <= arguments.seconds <= 60:
        raise InvalidArgumentError(f"--seconds is {arguments.seconds:g}", advice="give 0.05 to 60")
    import heliograph as hg
    from heliograph.cli.bench.measuring import measured

    connect = partial(hg.connect, arguments.server, progress=None)
    with _progress() as report:
        card = measured(connect, arguments.seconds, report)
    if arguments.json:
        print(as_json(card))
        return 0
    say(card.title, "title")
    header, *rows = table(card)
    print_table(header, rows)
    return 0


def _compare(files: list[str]) -> int:
    cards = [(Path(name).stem, _read(name)) for name in files]
    for name, card in cards:
        say(f"{name}: {card.title}", "quiet")
    header, *rows = compared(cards)
    print_table(header, rows)
    return 0


def _read(name: str) -> Card:
    try:
        return from_json(Path(name).read_text(), name)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{name} cannot be read: {error}") from None


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    columns = ("{task.description}", "BarColumn", "TimeElapsedColumn")
    with progress_bar("measuring", MEASURES, None, *columns) as update:
        done = count()
        yield (
            (lambda _: None)
            if update is None
            else (lambda name: update(completed=next(done), description=name))
        )
