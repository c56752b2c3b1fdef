"""The type of a rule, which makes one of ggml's ops of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from heliograph_proto.types import DTYPES, DType, TensorType
from heliograph_server.gateways.ggml_rpc import wire
from heliograph_server.gateways.ggml_rpc.building import Builder, Value

F32 = DTYPES["f32"]


@dataclass(frozen=True, slots=True)
class Call:
    """A node: its op's parameters and the values that it reads, each of four dimensions."""

    builder: Builder
    tensor: wire.Tensor
    sources: Sequence[Value | None]
    #: The type of the result.
    want: TensorType
    #: The number of the result, of an op that writes several.
    result: int = 0
    #: True if rows are rounded for products with blocks, as ggml's CPU rounds them.
    rounds_rows: bool = False

    def __getitem__(self, place: int) -> Value:
        """Return a source that the rule requires."""
        found = self.sources[place]
        assert found is not None
        return found

    def optional(self, place: int) -> Value | None:
        return self.sources[place]

    def shape(self, place: int) -> tuple[int, ...]:
        return self.builder.shape(self[place])

    def dtype(self, place: int) -> DType:
        return self.builder.type(self[place]).dtype

    def of_rank(self, place: int, rank: int) -> Value:
        """Return a source with so many dimensions."""
        return self.builder.squeezed(self[place], rank)

    def integer(self, place: int) -> int:
        return self.tensor.op_params[place]

    def integers(self, first: int, count: int) -> tuple[int, ...]:
        """Return parameters from the last to the first: ggml has the fastest dimension first."""
        return self.tensor.op_params[first : first + count][::-1]

    def real(self, place: int) -> float:
        return self.tensor.real(place)

    def node(self, op: str, *operands: Value | None, **attributes: Any) -> Value:
        """Add a node; operands that are None, at the end, are left out."""
        return self.builder.node(op, *(one for one in operands if one is not None), **attributes)


Maker: TypeAlias = Callable[[Call], Value]


@dataclass(frozen=True, slots=True)
class Rule:
    """The way to make an op. The result may have another shape of as many elements, or another
    type."""

    make: Maker
    #: The sources that it requires, counted from the first.
    least: int = 1
    #: The places of the sources that it reads; None: all that are given.
    reads: frozenset[int] | None = None
    #: True if it changes a part of what lies at its place already.
    updates: bool = False
    #: The places of the sources that it writes too, with further results.
    also: tuple[int, ...] = ()


def plain(op: str, count: int = 1, *, ranks: Sequence[int] = (), **parameters: str) -> Rule:
    """Return the rule of an op that has a counterpart: `parameters` are "i3" for integer parameter
    3, or "f0" for real parameter 0; `ranks` are the numbers of dimensions of its sources."""

    def make(call: Call) -> Value:
        given = {
            name: (call.integer if where[0] == "i" else call.real)(int(where[1:]))
            for name, where in parameters.items()
        }
        sources = [call.of_rank(place, rank) for place, rank in enumerate(ranks)] or [
            call[place] for place in range(count)
        ]
        return call.node(op, *sources, **given)

    return Rule(make, len(ranks) or count, frozenset(range(len(ranks) or count)))
