"""`heliograph conformance`: check the results of a device against the op table, here or over the
wire."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from string import digits
from typing import TYPE_CHECKING

from heliograph.cli.common.arguments import add_json_argument
from heliograph.cli.common.progress import COUNTED, progress_bar
from heliograph.cli.common.tables import print_table
from heliograph_proto.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console

    from heliograph_backends.conformance import Report, Result
    from heliograph_backends.contract import Device
    from heliograph_backends.registry import Registry

#: A device of another process: a URL with a scheme, or host:port.
REMOTE = re.compile(r"grpcs?://|unix:|(?!(cpu|cuda|fake):)[^:#/=,]+:[0-9]+(#|$)|\[")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --device, --backend, --op, --match, --seed, --quick, --list, --json."""
    parser.add_argument(
        "--device",
        metavar="URL#DEVICE",
        default="cpu",
        help="device to check: grpc://host:port#cpu0 or unix:///path#cpu0, as named by `heliograph devices`; "
        "in this process, local:#cpu0, local:#cpu:threads=2 or cpu:threads=2 (default: cpu)",
    )
    add_backend_argument(parser)
    parser.add_argument(
        "--op",
        metavar="OP",
        help="run only this op, or this part: graph, device, buffer type, buffer, stream, event, plan, run, "
        "memory",
    )
    parser.add_argument("--match", metavar="TEXT", help="run only cases with this text in their id")
    parser.add_argument("--seed", metavar="N", type=int, help="seed of the operands (default: a fixed one)")
    parser.add_argument("--quick", action="store_true", help="run only the first case of each kind")
    parser.add_argument("--list", action="store_true", help="print the ids of the cases, and run none")
    add_json_argument(parser)


def add_backend_argument(parser: argparse.ArgumentParser) -> None:
    """Add --backend."""
    parser.add_argument(
        "--backend",
        action="append",
        default=[],
        dest="backends",
        metavar="PLUGIN",
        help="plugin of the device, to load and run: a module, a FILE.py or a DIRECTORY/ of such files; "
        "repeatable",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the suite. Returns 1 if a case fails.

    Raises InvalidArgumentError, ConfigurationError, ConnectionError.
    """
    from heliograph_backends.conformance import SEED, run_cases, select

    cases = select(op=arguments.op, match=arguments.match, quick=arguments.quick)
    if arguments.list:
        print("\n".join(case.id for case in cases))
        return 0
    seed = SEED if arguments.seed is None else arguments.seed
    with opened(arguments.device, arguments.backends) as device, case_progress(len(cases)) as progress:
        report = run_cases(device, cases, seed, on_result=progress)
    if arguments.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        print_report(report, everything=arguments.verbose > 0)
    return 0 if report.ok else 1


@contextmanager
def opened(text: str, backends: Sequence[str] = ()) -> Iterator[Device]:
    """Open the device of the command line. Raises ConfigurationError, ConnectionError,
    HandleError."""
    if REMOTE.match(text):
        from heliograph_server.pool import open_device

        with open_device(text) as device:
            yield device
        return
    registry, name = _started(text.removeprefix("local:").removeprefix("#") or "cpu", backends)
    try:
        yield registry.device(name)
    finally:
        registry.close()


def _started(text: str, backends: Sequence[str]) -> tuple[Registry, str]:
    """Open the backend of a specification, or of the name of one of its devices, such as cpu0.

    Returns that name, too; empty for a specification.
    """
    from heliograph_backends.registry import open_registry

    backend = text.rstrip(digits)
    try:
        return open_registry((text,), backends), ""
    except ConfigurationError:
        if backend in ("", text) or ":" in text:
            raise
    return open_registry((backend,), backends), text


def print_report(report: Report, *, everything: bool = False) -> None:
    """Print a table of the ops, the reasons of unsupported cases, the failures, and a summary.

    With `everything`, print each unsupported case.
    """
    from heliograph_backends.conformance import CaseOutcome

    largest: dict[str, float] = {}
    for one in report.results:
        largest[one.group] = max(one.error, largest.get(one.group, 0.0))
    rows = [
        [group, *(str(counts[outcome] or "") for outcome in CaseOutcome), _error(largest[group])]
        for group, counts in report.by_group.items()
    ]
    print_table(["op", *(outcome.value for outcome in CaseOutcome), "largest NMSE"], rows)
    if everything:
        print(*report.unsupported, sep="\n")
    else:
        reasons = Counter(one.detail for one in report.unsupported)
        for reason, count in reasons.most_common():
            print(f"not supported ({count}): {reason}")
    for line in (*map(str, report.failures), *report.gaps):
        print(line)
    print(f"{report} (seed {report.seed})")


def _error(error: float) -> str:
    return f"{error:.1e}" if error else ""


@contextmanager
def case_progress(total: int, console: Console | None = None) -> Iterator[Callable[[Result], None] | None]:
    """Show on stderr how many cases have run and failed. Gives None without a terminal."""
    with progress_bar("conformance", total, console, *COUNTED) as update:
        if update is None:
            yield None
            return
        from heliograph_backends.conformance import CaseOutcome

        failed = 0

        def show(result: Result) -> None:
            nonlocal failed
            failed += result.outcome is CaseOutcome.FAILED
            update(advance=1, description=f"{result.group}, {failed} failed" if failed else result.group)

        yield show
