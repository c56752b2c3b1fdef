"""Makes one of our graphs node by node: leaves come when they are first needed. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.ops.table import infer
from heliograph_proto.types import DType, TensorType
from heliograph_server.gateways.ggml_rpc import regions

#: The number of a value while the graph is made: leaves and nodes in one row.
Value = int


class Builder:
    """Leaves and nodes in the order in which they are made. Raises InvalidGraphError of the op
    table."""

    def __init__(self) -> None:
        self._made: list[Leaf | Node] = []
        self._outputs: list[Value] = []

    def __len__(self) -> int:
        return len(self._made)

    def type(self, value: Value) -> TensorType:
        return self._made[value].type

    def shape(self, value: Value) -> tuple[int, ...]:
        return self._made[value].type.shape

    def leaf(self, type: TensorType, kind: LeafKind = LeafKind.VARIABLE) -> Value:
        """Add a variable, or a weight, that will be bound to memory."""
        self._made.append(Leaf(kind, f"m{len(self._made)}", type))
        return len(self._made) - 1

    def node(self, op: str, *operands: Value, **attributes: Any) -> Value:
        """Add a node."""
        found, complete = infer(op, [self.type(one) for one in operands], attributes)
        self._made.append(Node(op, operands, found, complete))
        return len(self._made) - 1

    def output(self, value: Value) -> int:
        """Make a value an output, and return the output's place."""
        self._outputs.append(value)
        return len(self._outputs) - 1

    def graph(self) -> tuple[Graph, dict[Value, int]]:
        """Return the graph, and the number in it of each leaf."""
        leaves = [value for value, one in enumerate(self._made) if isinstance(one, Leaf)]
        number = {value: place for place, value in enumerate(leaves)}
        numbers = dict(number)
        nodes: list[Node] = []
        for value, one in enumerate(self._made):
            if isinstance(one, Node):
                numbers[value] = len(leaves) + len(nodes)
                given = tuple(numbers[operand] for operand in one.operands)
                nodes.append(Node(one.op, given, one.type, one.attributes, one.name))
        outputs = tuple(Output(f"o{place}", numbers[value]) for place, value in enumerate(self._outputs))
        found = tuple(one for one in self._made if isinstance(one, Leaf))
        return Graph(found, tuple(nodes), outputs), number

    # Shapes

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        """Return the value in a shape; itself if it has it."""
        if self.shape(value) == tuple(shape):
            return value
        return self.node("reshape", value, shape=tuple(shape))

    def permute(self, value: Value, axes: Sequence[int]) -> Value:
        """Return the value with its dimensions in an order; itself if that is theirs."""
        if list(axes) == sorted(axes):
            return value
        return self.node("permute", value, axes=tuple(axes))

    def cast(self, value: Value, dtype: DType) -> Value:
        """Return the value as another data type; itself if it has it."""
        return value if self.type(value).dtype is dtype else self.node("cast", value, dtype=dtype)

    def slice(self, value: Value, start: Sequence[int], sizes: Sequence[int]) -> Value:
        """Return a block of a value; itself if it is all of it."""
        if self.shape(value) == tuple(sizes):
            return value
        stop = tuple(at + size for at, size in zip(start, sizes, strict=True))
        return self.node("slice", value, start=tuple(start), stop=stop, step=(1,) * len(stop))

    def flat(self, value: Value) -> Value:
        """Return the value in one dimension."""
        return self.reshape(value, (math.prod(self.shape(value)),))

    def squeezed(self, value: Value, rank: int) -> Value:
        """Return the value with `rank` dimensions; those that go are of size 1, or join the
        next."""
        shape = self.shape(value)
        extra = len(shape) - rank
        if extra <= 0:
            return self.reshape(value, (1,) * -extra + shape)
        return self.reshape(value, (math.prod(shape[: extra + 1]), *shape[extra + 1 :]))

    # Parts of contiguous values

    def part(self, value: Value, offset: int, shape: Sequence[int], strides: Sequence[int]) -> Value | None:
        """Return a strided part of a contiguous value; None if it cannot be expressed.

        Offset and strides are in blocks; the shape is in elements, slowest dimension first.
        """
        found = self._nest(value, offset, shape, strides)
        if found is None:
            # Its rows cross those of the value, so they begin with it.
            value = self._piece(value, offset, _extent(shape, strides, self._block(value)))
            found = self._nest(value, 0, shape, strides)
        if found is None:
            return None
        block, used = self._block(value), _in_elements(found.shape, self._block(value))
        size = math.prod(used)
        if size < self.type(value).size:
            value = self.slice(self.flat(value), (0,), (size,))
        whole = self.reshape(value, used)
        cut = self.slice(whole, _in_elements(found.start, block), _in_elements(found.sizes, block))
        return self.reshape(self.permute(cut, _axes(found)), shape)

    def with_part(self, value: Value, part: Value, offset: int, strides: Sequence[int]) -> Value | None:
        """Return a contiguous value with a strided part of it replaced; None if it cannot be
        expressed."""
        shape, size = self.shape(part), self.type(value).size
        if math.prod(shape) == size and offset == 0:
            made = self.in_memory_order(part, strides)
            return None if made is None else self.reshape(made, self.shape(value))
        if self._block(value) > 1:
            return None
        found = self._nest(value, offset, shape, strides)
        if found is not None and math.prod(found.shape) == size:
            return self.reshape(self._replaced(value, part, found), self.shape(value))
        extent = _extent(shape, strides, 1)
        piece, end = self._piece(value, offset, extent), min(size, offset + extent)
        found = self._nest(piece, 0, shape, strides)
        if found is None:
            return None
        flat, changed = self.flat(value), self.flat(self._replaced(piece, part, found))
        pieces = [self.slice(flat, (0,), (offset,))] if offset else []
        pieces.append(self.slice(changed, (0,), (end - offset,)))
        if end < size:
            pieces.append(self.slice(flat, (end,), (size - end,)))
        return self.reshape(self.node("concat", *pieces, axis=0), self.shape(value))

    def _replaced(self, value: Value, part: Value, found: regions.Nest) -> Value:
        axes = _axes(found)
        block = self.permute(self.reshape(part, [found.sizes[axis] for axis in axes]), _inverse(axes))
        return self.node("set", self.reshape(value, found.shape), block, start=found.start)

    def _block(self, value: Value) -> int:
        return self.type(value).dtype.block_size

    def _piece(self, value: Value, offset: int, count: int) -> Value:
        """Return blocks of a contiguous value in one dimension, with zeros where they pass its
        end."""
        block, type = self._block(value), self.type(value)
        there = min(count, type.size // block - offset)
        found = self.slice(self.flat(value), (offset * block,), (there * block,))
        if there == count or block > 1:
            return found
        zeros = self.node("fill", shape=(count - there,), value=0.0, dtype=type.dtype)
        return self.node("concat", found, zeros, axis=0)

    def in_memory_order(self, value: Value, strides: Sequence[int]) -> Value | None:
        """Return a value with its dimensions in the order of their strides, slowest first; None for
        gaps."""
        shape = self.shape(value)
        block, last = self.type(value).dtype.block_size, len(shape) - 1
        sizes = (*shape[:-1], shape[-1] // block)
        # Of blocks, the elements of a row stay together.
        free = [place for place in range(last + 1) if sizes[place] != 1 and (block == 1 or place != last)]
        fixed = [place for place in range(last + 1) if place not in free]
        order = sorted(free, key=lambda place: -strides[place])
        order = [*order, *fixed] if block > 1 else [*fixed, *order]
        step = 1
        for place in reversed(order):
            if sizes[place] != 1 and strides[place] != step:
                return None
            step *= sizes[place]
        return self.permute(value, order)

    def _nest(
        self, value: Value, offset: int, shape: Sequence[int], strides: Sequence[int]
    ) -> regions.Nest | None:
        block = self._block(value)
        sizes = (*shape[:-1], shape[-1] // block)
        if block > 1 and sizes[-1] > 1 and strides[-1] != 1:
            return None
        found = regions.nest(self.type(value).size // block, offset, *regions.merged(sizes, strides))
        if found is None or block == 1:
            return found
        if sizes[-1] > 1 and found.axes and found.axes[-1] == len(found.shape) - 1:
            return found
        if sizes[-1] != 1:
            return None
        return regions.Nest((*found.shape, 1), (*found.start, 0), (*found.sizes, 1), found.axes)


def _extent(shape: Sequence[int], strides: Sequence[int], block: int) -> int:
    """The blocks of whole rows that a part lies in."""
    sizes = (*shape[:-1], shape[-1] // block)
    return max([1, *(size * step for size, step in zip(sizes, strides, strict=True) if size != 1)])


def _in_elements(sizes: Sequence[int], block: int) -> tuple[int, ...]:
    return (*sizes[:-1], sizes[-1] * block)


def _axes(nested: regions.Nest) -> tuple[int, ...]:
    """The dimensions of the block in the order of the part, with those that it does not have
    last."""
    rest = [axis for axis in range(len(nested.shape)) if axis not in nested.order]
    return (*nested.order, *rest)


def _inverse(axes: Sequence[int]) -> list[int]:
    return sorted(range(len(axes)), key=axes.__getitem__)
