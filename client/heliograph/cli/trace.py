"""`heliograph trace`: write a trace of a run, for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import argparse
from pathlib import Path

import heliograph as hg
from heliograph.cli.common.graph_files import (
    add_graph_arguments,
    put_inputs,
    read_graph,
    read_inputs,
    require_inputs,
)
from heliograph.cli.common.placement import add_placing_arguments, placing

_EPILOG = (
    "Runs the graph and writes a track for each device of the last run. Example: heliograph trace "
    "model.hgraph --input x=@random --device cpu0 --device cpu1 --pin 'layer0/*=cpu1' --output run.json"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a graph file and of a placement, --output, --repeat."""
    parser.epilog = _EPILOG
    add_graph_arguments(parser)
    add_placing_arguments(parser)
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        default=Path("trace.json"),
        help="file to write (default: %(default)s)",
    )
    parser.add_argument(
        "--repeat", metavar="N", type=int, default=3, help="number of runs; the last is traced (default: 3)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the trace. Raises InvalidModelError, InvalidInputError, the run's errors."""
    if arguments.repeat < 1:
        raise hg.InvalidArgumentError(f"--repeat {arguments.repeat}", advice="give 1 or more")
    graph = read_graph(arguments)
    frozen = graph._freeze()
    inputs = read_inputs(frozen, arguments.input)
    require_inputs(frozen, inputs)
    timeout = arguments.timeout
    with hg.connect(arguments.server) as session:
        plan = session.compile(graph, timeout=timeout, **placing(arguments))
        tensors = put_inputs(session, plan, inputs, timeout)
        for _ in range(arguments.repeat):
            plan.run(tensors, fetch=False, timeout=timeout)
        found = plan.explain(timeout)
    found.trace(arguments.output)
    print(f"{arguments.output}: {found.summary()}\nopen it in ui.perfetto.dev or chrome://tracing")
    return 0
