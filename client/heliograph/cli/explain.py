"""`heliograph explain`: where the nodes of a graph would run, and why; what is copied; what it takes."""

from __future__ import annotations

import argparse

import heliograph as hg
from heliograph.cli.common.arguments import add_server_argument
from heliograph.cli.common.graph_files import add_file_arguments
from heliograph.cli.common.placement import add_placing_arguments, placing

_EPILOG = (
    "The graph is compiled, and not run. Devices are filled in their order; what one cannot run another "
    "does. Example: heliograph explain model.hgraph --device cpu0 --device cpu1 --memory cpu0=512MiB "
    "--pin 'layer0/*=cpu1' --svg model.svg"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--server, where it would run, how it is shown, and those of a graph's file."""
    parser.epilog = _EPILOG
    add_file_arguments(parser)
    add_server_argument(parser)
    add_placing_arguments(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--nodes", action="store_true", help="every node too, and names in full")
    form.add_argument("--json", action="store_true", help="one JSON object, for programs")
    form.add_argument("--dot", action="store_true", help="text for Graphviz")
    form.add_argument("--svg", metavar="FILE", help="a picture, which Graphviz draws")


def run(arguments: argparse.Namespace) -> int:
    """Compiles a graph and prints where it would run. Raises InvalidModelError, and what compiling raises."""
    graph = hg.load(arguments.graph, weights=arguments.weights)
    where = placing(arguments)
    with hg.connect(arguments.server) as session:
        plan = session.compile(graph, timeout=arguments.timeout, **where)
        found = plan.explain(arguments.timeout)
    if arguments.svg:
        found.svg(arguments.svg, timeout=arguments.timeout)
        print(f"{arguments.svg}: {found.summary()}")
    else:
        print(text_of(found, arguments), end="" if arguments.dot else "\n")
    return 0


def text_of(found: hg.Explanation, arguments: argparse.Namespace) -> str:
    """The explanation in the form that was asked for."""
    if arguments.json:
        return found.json()
    return found.dot() if arguments.dot else found.table(nodes=arguments.nodes)
