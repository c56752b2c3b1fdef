"""The op path of a node on the CPU, found by lowering a graph of this node alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from heliograph_backends.cpu.lowering.lowering import CpuLowering
from heliograph_backends.planning.layout import is_step, place_values
from heliograph_backends.reference import PRODUCTS
from heliograph_proto.devices import OpPath
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.types import TensorType


def op_path_of(
    op: str,
    attributes: Mapping[str, Any],
    operands: Sequence[TensorType],
    result: TensorType,
    *,
    native: bool,
) -> OpPath:
    """Return the path of a node with contiguous operands; `native` is true if the device has
    kernels."""
    # An assignment's first operand is a variable.
    leaves = tuple(
        Leaf(LeafKind.VARIABLE if op == "assign" and not place else LeafKind.INPUT, f"x{place}", type)
        for place, type in enumerate(operands)
    )
    node = Node(op, tuple(range(len(leaves))), result, attributes)
    graph = Graph(leaves, (node,), (Output("y", len(leaves)),))
    places = place_values(graph)
    if not is_step(graph, places, 0):
        return OpPath.VIEW
    if native and CpuLowering(graph, places).has_kernel(0):
        return OpPath.KERNEL
    return OpPath.BLAS if op in PRODUCTS and result.dtype.is_float else OpPath.DEFINITION
