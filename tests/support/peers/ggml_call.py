"""A node of ours on the way to ggml: its operands as leaves of ggml's graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from heliograph_backends.conformance.harness.content import Content
from heliograph_proto.types import TensorType
from peers.ggml import NUMPY_TYPES, Graph, Tensor

FLOATS = "f32 f16 bf16"
INDICES = "i32 i64"
#: Types that quantize in one step, without a matrix of importance; and all that ggml and we both
#: have.
SMALL = "q4_0 q4_1 q5_0 q5_1 q8_0"
#: Points of grids, which ggml encodes in other bytes than we do.
GRIDS = "iq1_s iq1_m iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s"
BLOCKS = f"{SMALL} q2_k q3_k q4_k q5_k q6_k iq4_nl iq4_xs mxfp4 nvfp4 tq1_0 tq2_0 q1_0 q2_0 {GRIDS}"
EVERY = f"{FLOATS} f64 i8 i16 i32 i64 {BLOCKS}"


class NotTaken(Exception):
    """ggml has no such case; the reason is the message."""


@dataclass(frozen=True)
class Call:
    """A node of ours, and the graph of ggml's in which its counterpart is made."""

    graph: Graph
    operands: Sequence[Content]
    attributes: Mapping[str, Any]
    result: TensorType

    def __getitem__(self, attribute: str) -> Any:
        return self.attributes[attribute]

    def __len__(self) -> int:
        return len(self.operands)

    def shape(self, place: int = 0) -> tuple[int, ...]:
        return self.operands[place].type.shape

    def type(self, place: int = 0) -> str:
        return self.operands[place].type.dtype.name

    def leaf(self, place: int = 0, as_type: str = "", shape: Sequence[int] | None = None) -> Tensor:
        """The operand as a leaf, in its type or another one that holds its values; stretched to
        `shape`."""
        operand = self.operands[place]
        name, target = as_type or self.type(place), tuple(self.shape(place) if shape is None else shape)
        if (name, target) == (self.type(place), self.shape(place)):
            return self.graph.weight(name, target, operand.raw)
        if name not in NUMPY_TYPES:
            raise NotTaken(f"{name} is not stretched here")
        values = operand.values.astype(NUMPY_TYPES[name])
        if not np.array_equal(values, operand.values, equal_nan=values.dtype.kind == "f"):
            raise NotTaken(f"ggml takes operand {place} as {name}, which does not hold its values")
        return self.graph.weight(name, target, np.broadcast_to(values, target))

    def optional(self, place: int, as_type: str = "", shape: Sequence[int] | None = None) -> Tensor | None:
        return self.leaf(place, as_type, shape) if place < len(self) else None

    def node(self, name: str, *parameters: Any) -> Tensor:
        return self.graph.node(name, *parameters)


Maker: TypeAlias = Callable[[Call], Tensor]
