"""Graphs made from their contract form instead of op by op: loaded, copied, or cut from others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from heliograph.graph.builder import Graph
from heliograph_proto import graph as contract
from heliograph_proto.graph import LeafKind


def thaw(frozen: contract.Graph, arrays: Mapping[bytes, np.ndarray[Any, Any]]) -> Graph:
    """Return a graph to compile or to go on building. Freezing it gives `frozen` again.

    `frozen` must be valid. `arrays` has the contents of its weights by digest, in the storage of
    their types (`TensorType.storage_shape`), and the first elements of its variables, whose leaves
    have digests in files alone. They are not copied, and their digests not checked.
    """
    made, count = Graph(), len(frozen.leaves)
    made._leaves = [replace(leaf, digest=b"") for leaf in frozen.leaves]
    with_content = [(number, leaf) for number, leaf in enumerate(frozen.leaves) if leaf.digest]
    for number, leaf in with_content:
        if leaf.kind is LeafKind.VARIABLE:
            made._initial[number] = arrays[leaf.digest]
        else:
            made._arrays[number] = arrays[leaf.digest]
            made._digests[number] = leaf.digest
    made._nodes = [
        replace(node, operands=tuple(_reference(value, count) for value in node.operands))
        for node in frozen.nodes
    ]
    made._sources = [None] * len(frozen.nodes)
    made._outputs = [(output.name, _reference(output.value, count)) for output in frozen.outputs]
    made._names = {(leaf.kind, leaf.name) for leaf in frozen.leaves}
    made._names |= {(None, output.name) for output in frozen.outputs}
    return made


def _reference(value: int, leaves: int) -> int:
    """The builder's reference of a value: a node's number, or the complement of a leaf's."""
    return value - leaves if value >= leaves else ~value
