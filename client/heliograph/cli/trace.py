"""`heliograph trace`: one run of a graph as a trace, for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import argparse
from pathlib import Path

import heliograph as hg
from heliograph import raw
from heliograph.cli.common.arguments import add_server_argument
from heliograph.cli.common.graph_files import add_graph_arguments, parse_inputs, read_inputs, require_inputs
from heliograph.cli.common.placement import add_placing_arguments, placing

_EPILOG = (
    "Runs the graph, and writes what its last run did, device by device. Example: heliograph trace "
    "model.hgraph --input x=@random --device cpu0 --device cpu1 --pin 'layer0/*=cpu1' --output run.json"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--server, --output, --repeat, where it runs, and those of a graph's file."""
    parser.epilog = _EPILOG
    add_graph_arguments(parser)
    add_server_argument(parser)
    add_placing_arguments(parser)
    parser.add_argument(
        "--output", metavar="FILE", type=Path, default=Path("trace.json"), help="default: %(default)s"
    )
    parser.add_argument(
        "--repeat", metavar="N", type=int, default=3, help="run so often; the last is shown (default: 3)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the trace. Raises InvalidModelError, InvalidInputError, the run's errors."""
    if arguments.repeat < 1:
        raise hg.InvalidArgumentError(f"--repeat {arguments.repeat}", advice="1 or more")
    graph = hg.load(arguments.graph, weights=arguments.weights)
    frozen, given = graph._freeze(), parse_inputs(arguments.input)
    inputs = read_inputs(frozen, given)
    require_inputs(frozen, given)
    timeout = arguments.timeout
    with hg.connect(arguments.server) as session:
        plan = session.compile(graph, timeout=timeout, **placing(arguments))
        tensors = {
            name: raw.put(session, inputs[name], type_, plan.device, timeout)
            for name, type_ in plan.inputs.items()
        }
        for _ in range(arguments.repeat):
            plan.run(tensors, fetch=False, timeout=timeout)
        found = plan.explain(timeout)
    found.trace(arguments.output)
    print(f"{arguments.output}: {found.summary()}\nopen it in ui.perfetto.dev or chrome://tracing")
    return 0
