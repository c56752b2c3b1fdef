"""A graph with the content and the layout of its leaves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from heliograph_backends.conformance.harness.content import Content
from heliograph_proto.digests import DIGEST_BYTES
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output, validate
from heliograph_proto.ops.table import infer
from heliograph_proto.sessions import Limits
from heliograph_proto.types import TensorType


@dataclass(frozen=True, slots=True)
class LeafData:
    """A leaf, its elements, and the name of its layout in memory."""

    leaf: Leaf
    content: Content
    layout: str = "plain"


@dataclass
class Recipe:
    """A builder that collects leaves and nodes. A value is a leaf's number, or -1 - j for node
    j."""

    leaves: list[LeafData] = field(default_factory=list)
    nodes: list[tuple[str, tuple[int, ...], dict[str, Any], TensorType]] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    #: The layouts of outputs, by place; "plain" by default.
    output_layouts: dict[int, str] = field(default_factory=dict)

    def leaf(self, kind: LeafKind, content: Content, layout: str = "plain") -> int:
        """Add a leaf with this content."""
        digest = bytes(DIGEST_BYTES) if kind is LeafKind.WEIGHT else b""
        made = Leaf(kind, f"{kind.value}{len(self.leaves)}", content.type, digest)
        self.leaves.append(LeafData(made, content, layout))
        return len(self.leaves) - 1

    def input(self, content: Content, layout: str = "plain") -> int:
        """Add an input with this content."""
        return self.leaf(LeafKind.INPUT, content, layout)

    def node(self, op: str, *operands: int, **attributes: Any) -> int:
        """Add a node, whose type is inferred. Raises InvalidGraphError."""
        result, complete = infer(op, [self.type_of(value) for value in operands], attributes)
        self.nodes.append((op, operands, complete, result))
        return -len(self.nodes)

    def output(self, *values: int) -> None:
        """Make these values outputs."""
        self.outputs.extend(values)

    def type_of(self, value: int) -> TensorType:
        """Return the type of a leaf or a node."""
        return self.leaves[value].content.type if value >= 0 else self.nodes[-1 - value][3]

    def graph(self) -> Graph:
        """Return the validated graph."""
        nodes = tuple(
            Node(op, tuple(map(self._number, operands)), result, attributes, f"node{place}")
            for place, (op, operands, attributes, result) in enumerate(self.nodes)
        )
        outputs = tuple(Output(f"y{place}", self._number(v)) for place, v in enumerate(self.outputs))
        return validate(Graph(tuple(one.leaf for one in self.leaves), nodes, outputs), Limits())

    def _number(self, value: int) -> int:
        return value if value >= 0 else len(self.leaves) - 1 - value
