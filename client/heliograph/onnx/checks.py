"""Checks of a model's file, before anything is made of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from google.protobuf.message import DecodeError
from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, defs

import heliograph as hg

#: The opsets of ONNX's own domain that are read.
FIRST_OPSET, LAST_OPSET = 6, defs.onnx_opset_version()
#: The most bytes of a model's own file, which Protobuf sets.
MOST_BYTES = 2**31 - 1
#: The most nodes of a file.
MOST_NODES = 200_000
#: The most subgraphs and functions inside each other.
MOST_DEPTH = 40

#: The sources of a model: the path of its file, its bytes, or the message itself.
Source: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview | ModelProto"


def read(source: Source) -> tuple[ModelProto, Path | None]:
    """Return a checked model, and the folder of its file.

    Raises InvalidModelError, and InvalidArgumentError for anything but a source of a model.
    """
    if isinstance(source, ModelProto):
        # A copy: large constants are taken out of it.
        return _parsed(source.SerializeToString(), "the model"), None
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _parsed(bytes(source), "the model"), None
    if not isinstance(source, (str, os.PathLike)):
        raise hg.InvalidArgumentError(
            f"a model cannot be read from an object of type {type(source).__name__}",
            advice="give the path of its file, its bytes, or an onnx.ModelProto",
        )
    path = Path(source)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise hg.InvalidModelError(
                f"{path} is larger than 2 GiB", advice="save the model with its weights in a file beside it"
            )
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise hg.InvalidModelError(
            f"cannot read {str(path)!r:.200}: {why}", advice="name the file of an ONNX model"
        ) from None
    return _parsed(data, str(path)), path.parent


def _parsed(data: bytes, what: str) -> ModelProto:
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except (DecodeError, RecursionError) as error:
        raise hg.InvalidModelError(
            f"{what} is no ONNX model, or is damaged: {error}", advice="export or copy the file again"
        ) from None
    try:
        check(model, what)
    except (TypeError, AttributeError) as error:
        raise hg.InvalidModelError(f"{what} is no ONNX model, or is damaged: {error}") from None
    return model


def check(model: ModelProto, what: str) -> None:
    """Check the parts of a model that the walk relies on. Raises InvalidModelError."""
    if not model.HasField("graph") or not model.ir_version:
        raise hg.InvalidModelError(f"{what} is no ONNX model: it has no graph")
    if not model.graph.output:
        raise hg.InvalidModelError(f"{what} has no outputs")
    seen: dict[str, int] = {}
    for one in model.opset_import:
        if seen.setdefault(one.domain, one.version) != one.version:
            raise hg.InvalidModelError(f"{what} names two opsets of {one.domain!r:.80}")
        is_old = one.version < FIRST_OPSET and not _is_unchanged(model, one.version)
        if one.domain in ("", "ai.onnx") and (is_old or one.version > LAST_OPSET):
            raise hg.UnsupportedError(
                f"{what} is of opset {one.version}; {FIRST_OPSET} to {LAST_OPSET} are read",
                advice="convert it with onnx.version_converter, or install a newer package onnx",
            )
    _check_names([one.name for one in model.graph.input], "input")
    _check_names([one.name for one in model.graph.output], "output")
    count = 0
    for graph in (model.graph.node, *(one.node for one in model.functions)):
        for _ in all_nodes(graph):
            count += 1
            if count > MOST_NODES:
                raise hg.InvalidModelError(f"{what} has more than {MOST_NODES:,} nodes")


def _is_unchanged(model: ModelProto, version: int) -> bool:
    """True if every op of an old model was still the same in the first opset that is read."""
    for node in all_nodes(model.graph.node):
        try:
            old, new = (defs.get_schema(node.op_type, one, "") for one in (version, FIRST_OPSET))
        except defs.SchemaError:
            return False
        if old.since_version != new.since_version:
            return False
    return version > 0


def _check_names(names: list[str], kind: str) -> None:
    # Protobuf gives texts that are no UTF-8 as bytes.
    if not all(isinstance(one, str) for one in names):
        raise hg.InvalidModelError(f"the name of an {kind} is no UTF-8")
    if len(set(names)) != len(names):
        twice = next(one for one in names if names.count(one) > 1)
        raise hg.InvalidModelError(f"two {kind}s are named {twice!r:.80}")
    if "" in names:
        raise hg.InvalidModelError(f"an {kind} has no name")


def all_nodes(nodes: Iterable[NodeProto], depth: int = 0) -> Iterator[NodeProto]:
    """Yield nodes, and those of the subgraphs in them. Raises InvalidModelError for deep nests."""
    if depth > MOST_DEPTH:
        raise hg.InvalidModelError(f"subgraphs are nested deeper than {MOST_DEPTH}")
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from all_nodes(graph.node, depth + 1)


def subgraphs(node: NodeProto) -> list[GraphProto]:
    """Return the subgraphs of a node."""
    return [
        graph for one in node.attribute for graph in ([one.g] if one.HasField("g") else []) + list(one.graphs)
    ]


def sizes_of(info: ValueInfoProto) -> tuple[int | str | None, ...] | None:
    """Return the declared sizes of a tensor: a number, a symbol, or None. None without a shape."""
    tensor = info.type.tensor_type
    if not info.type.HasField("tensor_type") or not tensor.HasField("shape"):
        return None
    found: list[int | str | None] = []
    for size in tensor.shape.dim:
        if size.HasField("dim_value"):
            if size.dim_value < 0:
                raise hg.InvalidModelError(f"input {info.name!r:.80} has a size of {size.dim_value}")
            found.append(size.dim_value)
        else:
            found.append(size.dim_param or None)
    return tuple(found)
