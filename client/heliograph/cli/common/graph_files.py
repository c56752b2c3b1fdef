"""The graph or model file and the inputs of `heliograph run`, `trace`, `compare` and `explain`."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

import heliograph as hg
from heliograph import raw
from heliograph.cli.common import npy
from heliograph.comparison.inputs import check_names, index_bounds, seeded
from heliograph_proto import graph as contract
from heliograph_proto.graph import Leaf, LeafKind

Array = np.ndarray[Any, Any]

#: The default timeout of compiling, a run, or a transfer.
TIMEOUT_SECONDS = 600.0
_FORMS = "NAME=FILE.npy, NAME=@random, NAME=@random:SEED or NAME=@zeros"


def add_graph_arguments(parser: argparse.ArgumentParser) -> None:
    """Add GRAPHFILE, --weights, --timeout, --input."""
    add_file_arguments(parser)
    parser.add_argument(
        "--input",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help=f"value of an input: {_FORMS}; repeatable. In files, bf16 is f32, and quantized types are uint8 "
        "rows of blocks",
    )


def add_file_arguments(parser: argparse.ArgumentParser) -> None:
    """Add GRAPHFILE, --weights, --timeout."""
    parser.add_argument(
        "graph", metavar="GRAPHFILE", help="file written by hg.save, such as model.hgraph, or an ONNX model"
    )
    parser.add_argument(
        "--shape",
        metavar="NAME=SIZES",
        action="append",
        default=[],
        help="shape of an ONNX model's input (x=1,3,224,224), or size of a symbol (batch=1) (default: those "
        "of --input's files); repeatable",
    )
    parser.add_argument(
        "--weights", metavar="FILE", help="file of weights (default: GRAPHFILE with suffix .safetensors)"
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=TIMEOUT_SECONDS,
        help="timeout for compiling, and for each run and transfer (default: %(default)g)",
    )


def read_graph(arguments: argparse.Namespace) -> hg.Graph:
    """Read a graph, or an ONNX model for the given shapes. Raises InvalidModelError and
    InvalidArgumentError."""
    if not str(arguments.graph).endswith(".onnx"):
        if arguments.shape:
            raise hg.InvalidArgumentError("--shape is for ONNX models; a graph's shapes are fixed")
        return hg.load(arguments.graph, weights=arguments.weights)
    if arguments.weights is not None:
        raise hg.InvalidArgumentError("--weights is for graphs; an ONNX model names its files itself")
    model = hg.onnx.load(arguments.graph)
    shapes: dict[str, Sequence[int] | int] = {}
    files = named_inputs(getattr(arguments, "input", ()))
    check_names([one.name for one in model.inputs], files, "input")
    for name, value in files.items():
        if not value.startswith("@"):
            shapes[name] = npy.shape_of(value)
    for one in arguments.shape:
        name, _, sizes = one.rpartition("=")
        numbers = sizes.split(",") if sizes else []
        if not name or not all(number.isdecimal() for number in numbers):
            raise hg.InvalidArgumentError(
                f"--shape {one!r} has no name or sizes", advice="write x=1,3,224,224"
            )
        found = [int(number) for number in numbers]
        shapes[name] = found[0] if len(found) == 1 else found
    return model.graph(shapes)


def named_inputs(given: Sequence[str]) -> dict[str, str]:
    """Return the values of the given inputs, each "NAME=VALUE". Raises InvalidInputError."""
    found: dict[str, str] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not (name and equals and value):
            raise hg.InvalidInputError(f"--input {one!r} has no name or no value", advice=f"write {_FORMS}")
        if name in found:
            raise hg.InvalidInputError(f"input {name!r} is given twice")
        found[name] = value
    return found


def read_inputs(graph: contract.Graph, given: Sequence[str]) -> dict[str, Array]:
    """Read the elements of the given inputs, each "NAME=VALUE". Raises InvalidInputError."""
    found = named_inputs(given)
    check_names([leaf.name for leaf in graph.inputs], found, "input")
    bounds = index_bounds(graph)
    return {
        leaf.name: _elements(leaf, found[leaf.name], bounds.get(value))
        for value, leaf in enumerate(graph.leaves)
        if leaf.kind is LeafKind.INPUT and leaf.name in found
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
    """Raise InvalidInputError, which lists inputs, variables and outputs, if an input is
    missing."""
    missing = [leaf for leaf in graph.inputs if leaf.name not in given]
    if not missing:
        return
    names = ", ".join(repr(leaf.name) for leaf in missing)
    groups = (
        ("input", [(leaf.name, leaf.type) for leaf in graph.inputs]),
        ("variable", [(leaf.name, leaf.type) for leaf in graph.variables]),
        ("output", [(one.name, graph.type_of(one.value)) for one in graph.outputs]),
    )
    lines = [f"  {kind:8} {name}: {type_}" for kind, rows in groups for name, type_ in rows]
    raise hg.InvalidInputError(
        "\n".join([f"inputs are missing: {names}", *lines]),
        advice=" ".join(f"--input {leaf.name}=FILE.npy" for leaf in missing) + f"; values: {_FORMS}",
    )


def put_inputs(
    session: hg.Session, plan: hg.Plan, inputs: Mapping[str, Array], timeout: float
) -> dict[str, hg.Tensor]:
    """Upload the inputs of a plan to its device."""
    return {
        name: raw.put(session, inputs[name], type_, plan.device, timeout)
        for name, type_ in plan.inputs.items()
    }
