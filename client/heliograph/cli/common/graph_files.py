"""What `heliograph run`, `compare` and `explain` share: the graph's file and its inputs."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

import heliograph as hg
from heliograph.cli.common import npy
from heliograph.comparison.inputs import check_names, index_bounds, seeded
from heliograph_proto import graph as contract
from heliograph_proto.graph import Leaf, LeafKind

Array = np.ndarray[Any, Any]

#: How long compiling, a run, or a transfer may take unless told otherwise.
TIMEOUT_SECONDS = 600.0
_FORMS = "NAME=FILE.npy, NAME=@random, NAME=@random:SEED or NAME=@zeros"


def add_graph_arguments(parser: argparse.ArgumentParser) -> None:
    """GRAPHFILE, --weights, --input, --timeout."""
    add_file_arguments(parser)
    parser.add_argument(
        "--input",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help=f"{_FORMS}; bf16 is f32 in files, and quantized types are uint8 rows of blocks",
    )


def add_file_arguments(parser: argparse.ArgumentParser) -> None:
    """GRAPHFILE, --weights, --timeout."""
    parser.add_argument("graph", metavar="GRAPHFILE", help="a file that hg.save wrote, such as model.hgraph")
    parser.add_argument(
        "--weights", metavar="FILE", help="where the weights are (default: beside it, FILE.safetensors)"
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=TIMEOUT_SECONDS,
        help="for compiling, and for each run or transfer (default: %(default)g)",
    )


def parse_inputs(given: Sequence[str]) -> dict[str, str]:
    """What was given for each name. Raises InvalidInputError."""
    found: dict[str, str] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not (name and equals and value):
            raise hg.InvalidInputError(f"--input {one!r} has no name or no value", advice=f"write {_FORMS}")
        if name in found:
            raise hg.InvalidInputError(f"input {name!r} is given twice")
        found[name] = value
    return found


def read_inputs(graph: contract.Graph, given: Mapping[str, str]) -> dict[str, Array]:
    """The elements of the inputs that were given. Raises InvalidInputError."""
    check_names(graph.inputs, given, "input")
    bounds = index_bounds(graph)
    return {
        leaf.name: _elements(leaf, given[leaf.name], bounds.get(value))
        for value, leaf in enumerate(graph.leaves)
        if leaf.kind is LeafKind.INPUT and leaf.name in given
    }


def _elements(leaf: Leaf, value: str, bound: int | None) -> Array:
    kind, _, seed = value.partition(":")
    if kind == "@random" and (not seed or seed.isdecimal()):
        return seeded(leaf, int(seed or 0), bound)
    if value == "@zeros":
        return np.zeros(leaf.type.storage_shape, leaf.type.dtype.storage)
    if value.startswith("@"):
        raise hg.InvalidInputError(f"input {leaf.name!r}: unknown value {value!r}", advice=f"write {_FORMS}")
    return npy.read(value, leaf)


def require_inputs(graph: contract.Graph, given: Collection[str]) -> None:
    """Raises InvalidInputError, which lists inputs and outputs, when one is missing."""
    missing = [leaf for leaf in graph.inputs if leaf.name not in given]
    if not missing:
        return
    names = ", ".join(repr(leaf.name) for leaf in missing)
    raise hg.InvalidInputError(
        f"inputs are missing: {names}\n{describe(graph)}",
        advice=" ".join(f"--input {leaf.name}=FILE.npy" for leaf in missing) + f"; values: {_FORMS}",
    )


def describe(graph: contract.Graph) -> str:
    """The graph's inputs, variables and outputs with their types, a line each."""
    outputs = [(one.name, graph.type_of(one.value)) for one in graph.outputs]
    groups = (
        ("input", [(leaf.name, leaf.type) for leaf in graph.inputs]),
        ("variable", [(leaf.name, leaf.type) for leaf in graph.variables]),
        ("output", outputs),
    )
    return "\n".join(f"  {kind:8} {name}: {type_}" for kind, rows in groups for name, type_ in rows)
