"""The registry of rules: the function that expresses each ONNX op."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from heliograph.onnx.elements import Item
from heliograph.onnx.node import Node

#: The result of a rule: the outputs, or the only one.
Result: TypeAlias = "Item | tuple[Item, ...]"
Rule: TypeAlias = Callable[[Node], Result]

#: Rules by op; the domains of ONNX share no op's name with another meaning.
RULES: dict[str, Rule] = {}
DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training")
_STRINGS = "StringConcat StringNormalizer StringSplit RegexFullMatch CategoryMapper DictVectorizer CastMap"
#: Why an op is refused, by op.
REFUSED: dict[str, str] = {
    **dict.fromkeys(_STRINGS.split(), "it works on strings, which no device has"),
    "ImageDecoder": "it decodes images",
}
#: Ops that move elements without a look at them, and so serve narrow types as well.
MOVES: set[str] = set()


def rule(*ops: str, moves: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for ops; `moves` if it serves any element type as codes."""

    def register(function: Rule) -> Rule:
        for op in ops:
            RULES[op] = function
        if moves:
            MOVES.update(ops)
        return function

    return register


def find(domain: str, op: str) -> Rule | None:
    """Return the rule of an op, or None."""
    return RULES.get(op) if domain in DOMAINS else None


def _refuse(node: Node) -> Result:
    raise node.refuse(REFUSED[node.op])


rule(*REFUSED)(_refuse)
