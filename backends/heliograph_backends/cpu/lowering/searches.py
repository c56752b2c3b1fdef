"""Sorts, searches and running sums as native steps along rows. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from heliograph_backends.cpu import kernels as k
from heliograph_backends.cpu.kernels.program.elements import BRAIN, HALF
from heliograph_backends.cpu.kernels.program.encoding_searches import MOST_HELD
from heliograph_backends.cpu.kernels.program.words import (
    DOUBLES,
    INTEGERS,
    MOST_SORTED,
    WIDE_INTEGERS,
)
from heliograph_proto.graph import Node
from heliograph_proto.types import TensorType

SORTS = frozenset({"argsort", "top_k", "argmax"})
RUNNING = frozenset({"cumsum", "cumprod"})
OPS = SORTS | RUNNING
#: The numbers of data types.
SORTED_AS = {"f32": 0, "i32": INTEGERS, "f16": HALF, "bf16": BRAIN}
RUNNING_AS = {**SORTED_AS, "i64": WIDE_INTEGERS, "f64": DOUBLES}

Strides = tuple[int, ...]


def has_kernel(node: Node, types: Sequence[TensorType], strides: Sequence[Strides]) -> bool:
    """True if a kernel runs a node of operands with these types and strides; the result's are the
    last."""
    (type,) = types
    if not type.ndim or not type.size:
        return False
    if node.op in RUNNING:
        return type.dtype.name in RUNNING_AS
    if type.dtype.name not in SORTED_AS:
        return False
    return _kept(node, type) <= MOST_HELD or type.shape[-1] <= MOST_SORTED


def _kept(node: Node, type: TensorType) -> int:
    """Return the number of places in a row of the result; 0 if it has none of its own."""
    if node.op == "argmax":
        return 0
    kept: int = node.attributes["k"] if node.op == "top_k" else type.shape[-1]
    return kept


def append(
    builder: k.ProgramBuilder, node: Node, types: Sequence[TensorType], places: Sequence[k.Operand]
) -> None:
    """Append the step; `places`: operand and result."""
    (type,), (source, target) = types, places
    if node.op in RUNNING:
        product = node.op == "cumprod"
        builder.running(type.shape, source, target, RUNNING_AS[type.dtype.name], product=product)
        return
    falling = node.op != "argsort" or node.attributes["descending"]
    form = SORTED_AS[type.dtype.name]
    builder.sort(type.shape, source, target, form, _kept(node, type), falling=falling)
