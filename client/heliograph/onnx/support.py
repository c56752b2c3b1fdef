"""`hg.onnx.supported`: which nodes of a model cannot be run, before anything is uploaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from onnx import NodeProto

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


def supported(source: checks.Source) -> tuple[Missing, ...]:
    """Return the nodes of a model that cannot be run, those of subgraphs too; empty if all can.

    It looks at ops, not at shapes: a node that it finds may still be computed on import, where all
    of its inputs are constant, and one of another op may be refused for its types. Raises
    InvalidModelError, and UnsupportedError for another opset.
    """
    model, _ = checks.read(source)
    return tuple(_Search(functions_of(model)).missing(model.graph.node, opsets_of(model), 0))


class _Search:
    """A search through graphs and functions, which looks into each function once."""

    def __init__(self, own: functions.Functions) -> None:
        self._own = own
        #: The reason against each function; None while it is looked into.
        self._reasons: dict[tuple[str, str], str | None] = {}

    def missing(self, nodes: Iterable[NodeProto], opsets: Mapping[str, int], depth: int) -> list[Missing]:
        """Return the nodes that cannot be run."""
        found: list[Missing] = []
        for node in checks.all_nodes(nodes):
            key = (node.domain, node.op_type)
            reason = self._reason_of(key, opsets, depth) if key in self._own else _reason(node, opsets)
            if reason:
                name = node.name or next((one for one in node.output if one), "")
                found.append(Missing(name, node.op_type, reason))
        return found

    def _reason_of(self, key: tuple[str, str], opsets: Mapping[str, int], depth: int) -> str:
        if key in self._reasons:
            known = self._reasons[key]
            return "this function calls itself" if known is None else known
        if depth > checks.MOST_DEPTH:
            return f"functions are nested deeper than {checks.MOST_DEPTH}"
        self._reasons[key] = None
        function = self._own[key]
        imports = {one.domain: one.version for one in function.opset_import}
        inner = self.missing(function.node, {**opsets, **imports}, depth + 1)
        self._reasons[key] = reason = f"its body has {inner[0]}" if inner else ""
        return reason


def _reason(node: NodeProto, opsets: Mapping[str, int]) -> str:
    if node.op_type in REFUSED:
        return REFUSED[node.op_type]
    if node.op_type == "Constant" or find(node.domain, node.op_type) is not None:
        return ""
    if functions.has_body(node, {}, opsets) or is_folded_only(node):
        return ""
    return "there is no rule for this op"
