"""`hg.onnx.supported`: which nodes of a model cannot be run, before anything is uploaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onnx import FunctionProto, NodeProto

from heliograph.onnx import checks, functions, ops
from heliograph.onnx.folding import is_folded_only
from heliograph.onnx.importing import functions_of, opsets_of
from heliograph.onnx.rules import REFUSED, find

assert ops


@dataclass(frozen=True, slots=True)
class Missing:
    """A node that cannot be run."""

    node: str
    op: str
    reason: str

    def __str__(self) -> str:
        return f"{self.op} {self.node!r}: {self.reason}"


def supported(source: str | Path | bytes) -> tuple[Missing, ...]:
    """Return the nodes of a model that cannot be run, those of subgraphs too; empty if all can.

    It looks at ops, not at shapes: a node that it finds may still be computed on import, where all
    of its inputs are constant, and one of another op may be refused for its types. Raises
    InvalidModelError, and UnsupportedError for another opset.
    """
    model, _ = checks.read(source)
    own = functions_of(model)
    return tuple(_missing(model.graph.node, own, opsets_of(model), frozenset()))


def _missing(
    nodes: Sequence[NodeProto],
    own: functions.Functions,
    opsets: Mapping[str, int],
    called: frozenset[tuple[str, str]],
) -> list[Missing]:
    found: list[Missing] = []
    for node in checks.all_nodes(nodes):
        key = (node.domain, node.op_type)
        name = node.name or next((one for one in node.output if one), "")
        if key in own:
            if key in called:
                found.append(Missing(name, node.op_type, "this function calls itself"))
            elif inner := _missing_in(own[key], own, opsets, called | {key}):
                found.append(Missing(name, node.op_type, f"its body has {inner[0]}"))
        elif reason := _reason(node, opsets):
            found.append(Missing(name, node.op_type, reason))
    return found


def _missing_in(
    function: FunctionProto,
    own: functions.Functions,
    opsets: Mapping[str, int],
    called: frozenset[tuple[str, str]],
) -> list[Missing]:
    imports = {one.domain: one.version for one in function.opset_import}
    return _missing(function.node, own, {**opsets, **imports}, called)


def _reason(node: NodeProto, opsets: Mapping[str, int]) -> str:
    if node.op_type in REFUSED:
        return REFUSED[node.op_type]
    if node.op_type == "Constant" or find(node.domain, node.op_type) is not None:
        return ""
    if functions.has_body(node, {}, opsets) or is_folded_only(node):
        return ""
    return "there is no rule for this op"
