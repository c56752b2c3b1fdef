"""By which path the CPU computes a node: asked of what compiles plans, for the node alone. Pure."""

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
    """The path of a node whose operands are contiguous; `native`: whether the device has kernels."""
    graph = _alone(op, attributes, operands, result)
    places = place_values(graph)
    if not is_step(graph, places, 0):
        return OpPath.VIEW
    if native and CpuLowering(graph, places).has_kernel(0):
        return OpPath.KERNEL
    return OpPath.BLAS if op in PRODUCTS and result.dtype.is_float else OpPath.DEFINITION


def _alone(
    op: str, attributes: Mapping[str, Any], operands: Sequence[TensorType], result: TensorType
) -> Graph:
    """What is assigned to is a variable."""
    kinds = [
        LeafKind.VARIABLE if op == "assign" and not place else LeafKind.INPUT
        for place in range(len(operands))
    ]
    leaves = tuple(Leaf(kind, f"x{place}", operands[place]) for place, kind in enumerate(kinds))
    node = Node(op, tuple(range(len(leaves))), result, attributes)
    return Graph(leaves, (node,), (Output("y", len(leaves)),))
