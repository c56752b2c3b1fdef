"""`heliograph explain`: show where the nodes of a graph would run, the copies and the memory."""

from __future__ import annotations

import argparse

import heliograph as hg
from heliograph.cli.common.arguments import add_json_argument
from heliograph.cli.common.graph_files import add_file_arguments, read_graph
from heliograph.cli.common.placement import add_placing_arguments, placing

_EPILOG = (
    "Compiles the graph without running it. Devices are filled in order; a node that one cannot run goes to "
    "another. Example: heliograph explain model.hgraph --device cpu0 --device cpu1 --memory cpu0=512MiB "
    "--pin 'layer0/*=cpu1' --svg model.svg"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a graph file and of a placement, --nodes, --json, --dot, --svg."""
    parser.epilog = _EPILOG
    add_file_arguments(parser)
    add_placing_arguments(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--nodes", action="store_true", help="list every node, with full names")
    add_json_argument(form)
    form.add_argument("--dot", action="store_true", help="print text for Graphviz")
    form.add_argument("--svg", metavar="FILE", help="write a picture, drawn by Graphviz")


def run(arguments: argparse.Namespace) -> int:
    """Compile a graph and print its placement. Raises InvalidModelError, the errors of
    compiling."""
    graph = read_graph(arguments)
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
    """The explanation in the chosen form."""
    if arguments.json:
        return found.json()
    return found.dot() if arguments.dot else found.table(nodes=arguments.nodes)
