"""`heliograph compare`: compare the results of a graph on two devices, node by node."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import heliograph as hg
from heliograph.cli.common.arguments import add_json_argument
from heliograph.cli.common.graph_files import add_graph_arguments, read_graph, read_inputs
from heliograph.cli.common.progress import progress_bar
from heliograph.cli.common.tables import print_table

if TYPE_CHECKING:
    from rich.console import Console

#: The number of rows that are shown without -v.
_WORST = 10
_EPILOG = (
    "Computes each node by itself on both devices, from the operands that the first one computed; with "
    "--nodes, runs the whole graph and compares the nodes with matching names. Inputs that are not given are "
    "random. With -v, prints every node. Exit status: 1 if a node failed, or differs by more than the "
    "tolerance of its op."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a graph file, --a, --b, --nodes, --seed, --tolerance, --json."""
    parser.epilog = _EPILOG
    add_graph_arguments(parser)
    parser.add_argument("--a", metavar="URL#DEVICE", required=True, help="device to use as the reference")
    parser.add_argument("--b", metavar="URL#DEVICE", required=True, help="device to compare with it")
    parser.add_argument(
        "--nodes",
        metavar="PATTERN",
        action="append",
        help="compare nodes with matching names (as in fnmatch), such as 'layer3/*'; repeatable",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of inputs that are not given (default: 0)")
    parser.add_argument(
        "--tolerance", metavar="NMSE", type=_tolerance, help="tolerance of every node (default: each op's)"
    )
    add_json_argument(parser)


def _tolerance(text: str) -> float:
    number = float(text)
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more")
    return number


def run(arguments: argparse.Namespace) -> int:
    """Compare, print, and return the exit status."""
    graph = read_graph(arguments)
    frozen = graph._freeze()
    inputs = read_inputs(frozen, arguments.input)
    with (
        hg.connect(arguments.a) as a,
        hg.connect(arguments.b) as b,
        node_progress(len(frozen.nodes)) as on_node,
    ):
        found = hg.compare(
            graph,
            a,
            b,
            inputs,
            arguments.nodes,
            seed=arguments.seed,
            tolerance=arguments.tolerance,
            on_node=on_node,
            timeout=arguments.timeout,
        )
    if arguments.json:
        print(json.dumps(as_json(found), indent=2))
    else:
        show(found, everything=arguments.verbose > 0)
    return 0 if found.ok else 1


def show(found: hg.Comparison, *, everything: bool) -> None:
    """Print a table, the worst rows first or all of them, and the counts of verdicts."""
    header = ["node", "name", "type", "verdict", "NMSE", "tolerance", "largest", "NaN", "inf", "note"]
    rows = found.rows if everything else found.worst(_WORST)
    print_table(header, [_cells(row) for row in rows])
    if len(rows) < len(found.rows):
        print(f"... and {len(found.rows) - len(rows)} more, no worse; -v shows all")
    counts = ", ".join(f"{found.count(one)} {one.value}" for one in hg.Verdict if found.count(one))
    print(f"{found.a} and {found.b}: {counts or 'no nodes'}")


def _cells(row: hg.ComparedNode) -> list[str]:
    apart = row.difference
    figures = ["-"] * 5
    if apart is not None:
        figures = [
            f"{apart.nmse:.2e}",
            f"{row.tolerance:.2e}",
            f"{apart.max_difference:.2e}",
            str(apart.nan_mismatches),
            str(apart.infinity_mismatches),
        ]
    return [str(row.number), row.name, str(row.type), row.verdict.value, *figures, row.note]


def as_json(found: hg.Comparison) -> dict[str, Any]:
    """The comparison; numbers that are not finite are null."""
    return {"a": found.a, "b": found.b, "ok": found.ok, "nodes": [_row_as_json(row) for row in found.rows]}


def _row_as_json(row: hg.ComparedNode) -> dict[str, Any]:
    figures = {} if row.difference is None else asdict(row.difference)
    return {
        "number": row.number,
        "name": row.name,
        "op": row.op,
        "type": row.type.dtype.name,
        "shape": row.type.shape,
        "verdict": row.verdict.value,
        "tolerance": row.tolerance,
        **{name: value if math.isfinite(value) else None for name, value in figures.items()},
        "note": row.note,
    }


@contextmanager
def node_progress(
    total: int, console: Console | None = None
) -> Iterator[Callable[[hg.ComparedNode], None] | None]:
    """Give a callback for hg.compare(on_node=...) that shows the progress on stderr; None without a
    terminal."""
    columns = ("{task.description}", "BarColumn", "MofNCompleteColumn", "{task.fields[node]}")
    with progress_bar("comparing", total, console, *columns, transient=False, node="") as update:
        if update is None:
            yield None
            return
        yield lambda row: update(completed=row.number + 1, node=row.name)
        update(completed=total)
