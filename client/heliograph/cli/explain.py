"""`heliograph explain`: show where the nodes of a graph would run, the copies and the memory."""

from __future__ import annotations

import argparse
import tempfile
import webbrowser
from pathlib import Path

import heliograph as hg
from heliograph.cli.common.arguments import add_json_argument
from heliograph.cli.common.graph_files import add_file_arguments, read_graph
from heliograph.cli.common.placement import add_placing_arguments, placing

_EPILOG = (
    "Compiles the graph without running it. Devices are filled in order; a node that one cannot run goes to "
    "another. Example: heliograph explain model.hgraph --device cpu0 --device cpu1 --memory cpu0=512MiB "
    "--pin 'layer0/*=cpu1' --html model.html"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a graph file and of a placement, --against, and the forms of the output."""
    parser.epilog = _EPILOG
    add_file_arguments(parser)
    add_placing_arguments(parser)
    parser.add_argument(
        "--against",
        metavar="NAME",
        action="append",
        default=[],
        help="compare with a plan on this device, by priority, without pins and the like; repeatable",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--nodes", action="store_true", help="list every node, with full names")
    add_json_argument(form)
    form.add_argument("--dot", action="store_true", help="print the graph in the DOT language")
    form.add_argument("--svg", metavar="FILE", help="write a picture of the graph")
    form.add_argument("--memory-svg", metavar="FILE", help="write a picture of the memory over the steps")
    form.add_argument("--html", metavar="FILE", help="write a page with a graph that folds, and the memory")
    parser.add_argument(
        "--open",
        action="store_true",
        help="show the page in a browser; a temporary file without --html",
    )
    parser.add_argument(
        "--unfold", metavar="N", type=int, help="open N levels of scopes in --svg (default: up to 60 boxes)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Compile a graph and print its placement. Raises InvalidModelError, InvalidArgumentError, the
    errors of compiling."""
    _check(arguments)
    graph = read_graph(arguments)
    where, timeout = placing(arguments), arguments.timeout
    with hg.connect(arguments.server) as session:
        found = session.compile(graph, timeout=timeout, **where).explain(timeout)
        if arguments.against:
            other = {"devices": arguments.against, "pipeline": arguments.pipeline}
            beside = session.compile(graph, timeout=timeout, **other).explain(timeout)
            _show_both(found.compare(beside), arguments)
        else:
            _show(found, arguments)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raise InvalidArgumentError for forms that do not go together."""
    others = arguments.nodes or arguments.json or arguments.dot or arguments.svg or arguments.memory_svg
    if arguments.open and others:
        raise hg.InvalidArgumentError("--open shows a page", advice="give it alone, or with --html FILE")
    if arguments.against and (arguments.dot or arguments.svg or arguments.memory_svg):
        raise hg.InvalidArgumentError(
            "--against compares two plans",
            advice="as tables, with --nodes or --json, or as a page with --html",
        )
    if arguments.unfold is not None and not arguments.svg:
        raise hg.InvalidArgumentError("--unfold is for pictures", advice="give --svg FILE with it")


def _show(found: hg.Explanation, arguments: argparse.Namespace) -> None:
    title = Path(arguments.graph).name
    if arguments.svg:
        found.svg(arguments.svg, title=title, unfold=arguments.unfold)
        print(f"{arguments.svg}: {found.summary()}")
    elif arguments.memory_svg:
        found.memory_svg(arguments.memory_svg, title=title)
        print(f"{arguments.memory_svg}: {found.summary()}")
    elif (page := _page(arguments)) is not None:
        found.html(page, title=title)
        _shown(page, found.summary(), arguments)
    else:
        print(text_of(found, arguments), end="" if arguments.dot else "\n")


def _show_both(found: hg.ComparedPlans, arguments: argparse.Namespace) -> None:
    if (page := _page(arguments)) is not None:
        first = ", ".join(arguments.device) or "the first plan"
        found.html(page, titles=(first, ", ".join(arguments.against)))
        _shown(page, found.summary(), arguments)
    else:
        print(found.json() if arguments.json else found.table(nodes=arguments.nodes))


def _page(arguments: argparse.Namespace) -> Path | None:
    """The file of the page; None if no page is asked for."""
    if arguments.html:
        return Path(arguments.html)
    if not arguments.open:
        return None
    # Only its user can look into the folder. It stays, since the browser reads it later.
    return Path(tempfile.mkdtemp(prefix="heliograph-"), "plan.html")


def _shown(page: Path, summary: str, arguments: argparse.Namespace) -> None:
    print(f"{page}: {summary}")
    if arguments.open and not webbrowser.open(page.resolve().as_uri()):
        print("no browser was found here: open the file in one")


def text_of(found: hg.Explanation, arguments: argparse.Namespace) -> str:
    """The explanation in the chosen form."""
    if arguments.json:
        return found.json()
    return found.dot() if arguments.dot else found.table(nodes=arguments.nodes)
