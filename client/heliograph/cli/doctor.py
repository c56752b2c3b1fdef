"""`heliograph doctor`: how well the road to a server works, and what to change."""

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

from heliograph.cli import add_server_argument
from heliograph.cli.findings import NOT_TOLD, Finding, by_weight, find, plain, rate_text, said, time_text
from heliograph.cli.measurements import MOST, Direction, Measurements, PoolSeen, Road, RoadKind, RoundTrip
from heliograph.cli.measuring import measure
from heliograph.cli.pool_findings import find_in_pool
from heliograph.cli.pool_tables import member_rows, more_ways, way_rows
from heliograph.cli.progress import progress_bars
from heliograph.cli.tables import print_table
from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.sizes import size_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn

#: Bounds each wait.
TIMEOUT_SECONDS = 10.0
_EPILOG = (
    "Takes about five seconds, and sends no more than fits into a second each way of each road: over gRPC, "
    "over shared memory where both are on one host, and through a mapped tensor. Of the head of a pool, and "
    "of several URLs, also the members and the ways between them. Exit status 0: it could be measured, "
    "whatever was found; 1: the server could not be reached."
)
#: Rows of the table of both sides, by the names of facts.
FACTS = {
    "python": "Python",
    "grpc": "gRPC",
    "protobuf": "protobuf",
    "numpy": "NumPy",
    "numba": "numba",
    "rich": "rich",
    "event_loop": "event loop",
    "processors": "processors",
    "allocator": "allocator",
    "allocator_settings": "its settings",
    "system": "system",
}
#: Those that one side alone has; and those that are no package which may be missing.
OF_SERVER, OF_CLIENT = ("event_loop", "processors"), ("rich",)
NO_PACKAGES = ("python", *OF_SERVER, "allocator", "system")
NO_COMPRESSION = "none: tensors hardly compress, and it would cost the processor, which is the limit"
#: The steps that are shown: at most so many.
STEPS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """URL ..., --server, --timeout, --json."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "url", metavar="URL", nargs="*", help="the same as --server URL; several: the pool that they make"
    )
    add_server_argument(parser)
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=TIMEOUT_SECONDS,
        help="for connecting, and for each answer and transfer (default: %(default)g)",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object with measurements and findings, for programs"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints. Raises ConnectionError, InvalidArgumentError."""
    if arguments.url and arguments.server:
        raise InvalidArgumentError("URL and --server name a server each", advice="say one of them")
    with step_progress() as tell:
        urls = arguments.url[0] if len(arguments.url) == 1 else arguments.url
        found = measure(urls or arguments.server, arguments.timeout, tell)
    findings = by_weight([*find_in_pool(found), *find(found)])
    if arguments.json:
        print(json.dumps(as_json(found, findings), indent=2, allow_nan=False))
    else:
        show(found, findings)
    return 0


# For programs


def as_json(found: Measurements, findings: Sequence[Finding]) -> dict[str, Any]:
    """Everything; numbers that are not finite are null. Rates have bytes_per_second beside them."""
    measured = _plain(asdict(found))
    for road, shown in zip(found.roads, measured["roads"], strict=True):
        for way in ("up", "down"):
            direction: Direction | None = getattr(road, way)
            if direction is not None:
                shown[way]["rate"]["bytes_per_second"] = _plain(direction.rate.bytes_per_second)
    measured["compression"] = NO_COMPRESSION
    return {"measurements": measured, "findings": [_plain(asdict(one)) for one in findings]}


def _plain(value: Any) -> Any:
    """What JSON can hold."""
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


# For people


def show(found: Measurements, findings: Sequence[Finding]) -> None:
    """Prints tables of what was measured, and the findings."""
    program, connected = plain(found.server.program), time_text(found.connect_seconds)
    print(f"{found.url}: {program}, {_where(found)}; connected in {connected}\n")
    trips = {"empty command": found.empty, "run of one op, 64 bytes": found.run}
    header = ["round trip", "median", "90th percentile", "samples"]
    print_table(header, [_trip(*one) for one in trips.items()])
    print()
    if found.pool is not None:
        _show_pool(found.pool)
    if found.roads:
        header = ["road", "up", "down", "largest", "copies up", "copies down", "note"]
        print_table(header, [_road(one) for one in found.roads])
        print("copies: of each byte, by the code of client, server; beside them gRPC and the kernel copy")
    if any(one.kind is RoadKind.GRPC for one in found.roads):
        print(f"gRPC carries {size_text(found.chunk_bytes)} a message")
    if found.roads:
        print()
    sides = ["this process"] if found.in_process else ["client", "server"]
    rows = [_fact(found, *one) for one in FACTS.items() if not (found.in_process and one[0] in OF_SERVER)]
    print_table(["", *sides], [row[: len(sides) + 1] for row in rows])
    print()
    header = ["device", "type", "backend", "free", "total", "kernels", "BLAS", "description"]
    print_table(header, list(_devices(found)))
    print("\n".join(["", *_agreed(found), "", *said(findings)]))


def _where(found: Measurements) -> str:
    if found.pool is not None and found.pool.in_process:
        return "a pool in this process"
    where = "this process" if found.in_process else "on this host" if found.local_address else "elsewhere"
    return where if found.pool is None else f"{where}, the head of a pool"


def _show_pool(pool: PoolSeen) -> None:
    """Members, and the ways between them."""
    for header, *rows in (member_rows(pool), way_rows(pool)):
        if rows:
            print_table(header, rows)
            print()
    for line in (more_ways(pool), plain(pool.why_no_ways)):
        if line:
            print(f"{line}\n")


def _trip(name: str, one: RoundTrip) -> list[str]:
    return [name, time_text(one.median_seconds), time_text(one.p90_seconds), str(one.samples)]


def _road(one: Road) -> list[str]:
    ways = (one.up, one.down)
    rates = ["-" if way is None else f"{rate_text(way.rate.bytes_per_second)}/s" for way in ways]
    sizes = [way.rate.size_bytes for way in ways if way is not None]
    largest = rate_text(max(sizes)) if sizes else "-"
    note = "copied by the caller alone" if one.kind is RoadKind.MAPPED and sizes else plain(one.why_not)
    return [one.kind.value, *rates, largest, *map(_copies, ways), note]


def _copies(way: Direction | None) -> str:
    if way is None:
        return "-"
    sides = (way.copies.client, way.copies.server)
    return ", ".join(map(_times, sides))


def _times(copies: float | None) -> str:
    if copies is None:
        return NOT_TOLD
    return f"{round(copies, 2):g}" if 0 <= copies < MOST else "unknown"


def _fact(found: Measurements, name: str, shown: str) -> list[str]:
    client = "-" if name in OF_SERVER else found.client.facts.get(name, _absent(name))
    server = found.server.facts.get(name, _absent(name) if found.server.facts else NOT_TOLD)
    if name in OF_CLIENT:
        server = "-"
    return [shown, plain(client), plain(server)]


def _absent(name: str) -> str:
    if name == "allocator_settings":
        return "the defaults"
    return "unknown" if name in NO_PACKAGES else "not installed"


def _devices(found: Measurements) -> Iterator[list[str]]:
    for one in found.devices:
        sizes = [rate_text(size) for size in (one.free_bytes, one.total_bytes)]
        if not one.total_bytes:
            sizes = [NOT_TOLD, NOT_TOLD]
        kernels = one.features.get("native_kernels") or ("none" if "native_kernels" in one.missing else "-")
        blas = one.features.get("blas", "-")
        cells = (one.name, one.type, one.backend, *sizes, kernels, blas, one.description)
        yield [plain(text) for text in cells]


def _agreed(found: Measurements) -> Iterator[str]:
    features = ", ".join(map(plain, found.features)) or "no features"
    yield f"contract: version {found.version}; both speak {features}"
    off = "no need, it is this process" if found.in_process else f"off: {plain(found.why_not_shared)}"
    yield f"shared memory: {'on' if found.shared_memory else off}"
    yield f"compression: {NO_COMPRESSION}"


@contextmanager
def step_progress(console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Shows on stderr what is being measured, where somebody sees it."""

    def columns() -> Sequence[ProgressColumn]:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

        return TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()

    with progress_bars(columns, console, transient=True) as bars:
        if bars is None:
            yield lambda _: None
            return
        task, done = bars.add_task("measuring", total=STEPS), count()

        def show_step(name: str) -> None:
            bars.update(task, completed=next(done), description=name)

        yield show_step
