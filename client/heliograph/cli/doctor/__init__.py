"""`heliograph doctor`: measure the connection to a server, and advise what to change."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from itertools import count
from typing import TYPE_CHECKING, Any

from heliograph.cli.common.arguments import add_json_argument, add_server_argument
from heliograph.cli.common.progress import progress_bar
from heliograph.cli.doctor.findings import Finding, by_weight, find, find_in_pool
from heliograph.cli.doctor.measurements import Direction, TransportMeasurements
from heliograph.cli.doctor.measuring import measure
from heliograph.cli.doctor.tables import compression_of, show
from heliograph_proto.errors import InvalidArgumentError

if TYPE_CHECKING:
    from rich.console import Console

#: The default timeout of each wait.
TIMEOUT_SECONDS = 10.0
_EPILOG = (
    "Takes about five seconds, and at most a second in each direction of each transport: gRPC, direct "
    "connections, shared memory if both are on one host, and a mapped tensor. On one host it compares them "
    "with copies and sockets of the machine itself. For the head of a pool, or several URLs, measures the "
    "members and the links between them too. Exit status: 0 measured, whatever was found; 1 the server "
    "could not be reached."
)
#: The most steps that the progress bar shows.
STEPS = 11


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add URL ..., --server, --timeout, --json."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "url", metavar="URL", nargs="*", help="same as --server URL; several URLs form a pool"
    )
    add_server_argument(parser)
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=TIMEOUT_SECONDS,
        help="timeout for connecting and for each answer and transfer (default: %(default)g)",
    )
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Raises ConnectionError, InvalidArgumentError."""
    if arguments.url and arguments.server:
        raise InvalidArgumentError("URL and --server both name a server", advice="give one of them")
    with step_progress() as report:
        urls = arguments.url[0] if len(arguments.url) == 1 else arguments.url
        found = measure(urls or arguments.server, arguments.timeout, report)
    findings = by_weight([*find_in_pool(found), *find(found)])
    if arguments.json:
        print(json.dumps(as_json(found, findings), indent=2, allow_nan=False))
    else:
        show(found, findings)
    return 0


# For programs


def as_json(found: TransportMeasurements, findings: Sequence[Finding]) -> dict[str, Any]:
    """The measurements and findings; numbers that are not finite are null. Rates include
    bytes_per_second."""
    measured = _plain(asdict(found))
    for transport, shown in zip(found.transports, measured["transports"], strict=True):
        for way in ("up", "down"):
            direction: Direction | None = getattr(transport, way)
            if direction is not None:
                shown[way]["rate"]["bytes_per_second"] = _plain(direction.rate.bytes_per_second)
    measured["compression"] = compression_of(found)
    return {"measurements": measured, "findings": [_plain(asdict(one)) for one in findings]}


def _plain(value: Any) -> Any:
    """The value in types of JSON."""
    match value:
        case dict():
            return {str(key): _plain(one) for key, one in value.items()}
        case list() | tuple():
            return [_plain(one) for one in value]
        case Enum():
            return value.value
        case float() if not math.isfinite(value):
            return None
    return value


@contextmanager
def step_progress(console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Show on stderr what is being measured, if it is a terminal."""
    columns = ("{task.description}", "BarColumn", "TimeElapsedColumn")
    with progress_bar("measuring", STEPS, console, *columns) as update:
        if update is None:
            yield lambda _: None
            return
        done = count()
        yield lambda name: update(completed=next(done), description=name)
