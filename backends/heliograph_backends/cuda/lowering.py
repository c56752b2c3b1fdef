"""From groups of nodes to launches of kernels and calls of cuBLAS. Pure.

What runs a node is decided by op, types and strides alone. What has no kernel here runs on the definition,
with CuPy in place of NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from heliograph_backends.cuda import attending, chains, moves, products, rows
from heliograph_backends.cuda.filling import Launch, Located
from heliograph_backends.cuda.target import OwnSlots, Target
from heliograph_backends.planning.fusion import Group, Role, other_operand
from heliograph_backends.planning.layout import Place, value_types, view
from heliograph_backends.planning.storage import Storage
from heliograph_proto.graph import Graph, Node
from heliograph_proto.ops import OPS
from heliograph_proto.types import DTYPES, TensorType

#: What a step puts on a queue.
Work: TypeAlias = Launch | products.Call

#: The report of a failure: the node's number and what it met.
FAILURE_TYPE = TensorType(DTYPES["u64"], (2,))


class Lowering:
    """The kernels of one graph's groups."""

    def __init__(self, graph: Graph, places: tuple[Place, ...], target: Target) -> None:
        self.graph = graph
        self.places = places
        self.target = target
        self.leaves = len(graph.leaves)
        self.types = value_types(graph)

    # What has a kernel

    def role(self, number: int) -> Role:
        """The role of a node in fusion."""
        node, operands = self._node(number)
        if chains.is_elementwise(node, operands):
            return "elementwise"
        if node.op in ("norm", "rms_norm") and rows.is_row_op(node, operands):
            return "norm"
        return "matmul" if self._has_product(number) else "other"

    def _has_product(self, number: int) -> bool:
        """Whether a kernel or cuBLAS reads a product's operands where they lie; slots do not matter for
        that."""
        node, types = self._node(number)
        if node.op not in ("matmul", "mul_mat"):
            return False
        operands = [
            Located(self.types[value], 0, self.places[value].offset_bytes, self.places[value].strides)
            for value in node.operands
        ]
        result = Located(node.type, 0, 0, node.type.strides)
        return node.type.size == 0 or self._multiplied(node, types, operands, result) is not None

    @staticmethod
    def _multiplied(
        node: Node, types: Sequence[TensorType], operands: Sequence[Located], result: Located
    ) -> Sequence[Work] | None:
        """The work of a product; None if nothing here computes it."""
        adjacent = products.reads_rows([*operands[1:], result]) and operands[0].strides[-1:] == (
            types[0].dtype.block_bytes,
        )
        if products.is_stored_product(node, types) and adjacent:
            return (products.stored(node, operands[0], operands[1], result),)
        return products.calls(node, operands, result) if products.is_cublas(node, types) else None

    def is_row_operand(self, value: int) -> bool:
        """Whether norms can take this value as their weight or bias."""
        return self.types[value].ndim > 0 and self.types[value].dtype.name in chains.FLOATS

    def _node(self, number: int) -> tuple[Node, list[TensorType]]:
        node = self.graph.nodes[number]
        return node, [self.types[value] for value in node.operands]

    # Work

    def workspace_bytes(self, groups: Sequence[Group]) -> int:
        """The most that any of the groups needs while it runs."""
        nodes = (self._node(group.last) for group in groups)
        return max((attending.workspace_bytes(*one, self.target.multiprocessors) for one in nodes), default=0)

    def work(self, group: Group, storage: Storage, own: OwnSlots) -> tuple[Work, ...] | None:
        """What a group puts on a queue; None if it runs on the definition."""
        if self.types[self.leaves + group.last].size == 0 and group.role != "matmul":
            return ()
        if group.role == "elementwise":
            return self._chain(group.nodes, storage)
        if group.role == "matmul":
            return self._product(group, storage)
        if group.role == "norm":
            return (self._norm(group, storage),)
        return self._other(group.last, storage, own)

    def _at(self, storage: Storage, value: int) -> Located:
        return Located(self.types[value], *storage.locate(value))

    def _operands(self, storage: Storage, node: Node) -> list[Located]:
        return [self._at(storage, value) for value in node.operands]

    def _chain(self, nodes: Sequence[int], storage: Storage, product: int | None = None) -> tuple[Work, ...]:
        """A chain; what a product left in the result's memory is read there."""
        result = self._at(storage, self.leaves + nodes[-1])

        def locate(value: int) -> Located:
            return result if value == product else self._at(storage, value)

        return (chains.chain(self.graph, nodes, locate, result),)

    def _product(self, group: Group, storage: Storage) -> tuple[Work, ...] | None:
        number = next(n for n in group.nodes if self.graph.nodes[n].op in ("matmul", "mul_mat"))
        node, types = self._node(number)
        if node.type.size == 0:
            return ()
        rest = [each for each in group.nodes if each != number]
        result = self._at(storage, self.leaves + group.last)
        operands = self._operands(storage, node)
        found = self._multiplied(node, types, operands, result)
        assert found is not None, "its role says that it has a kernel"
        return (*found, *(self._chain(rest, storage, self.leaves + number) if rest else ()))

    def _norm(self, group: Group, storage: Storage) -> Launch:
        node = self.graph.nodes[group.nodes[0]]
        value, found = self.leaves + group.nodes[0], []
        for number in group.nodes[1:]:
            found.append(self._at(storage, other_operand(self.graph.nodes[number].operands, value)))
            value = self.leaves + number
        result = self._at(storage, self.leaves + group.last)
        return rows.norm(node, self._at(storage, node.operands[0]), result, found)

    def _other(self, number: int, storage: Storage, own: OwnSlots) -> tuple[Work, ...] | None:
        node, types = self._node(number)
        result = self._at(storage, self.leaves + number)
        values = self._operands(storage, node)
        report = Located(FAILURE_TYPE, own.report, 0, (8,))
        if rows.is_row_op(node, types):
            return (self._row_op(node, values, result),)
        if types and rows.is_reduction(node, types[0]):
            return (rows.reduction(node, values[0], result),)
        if rows.is_rope(node, types):
            return (rows.rope(node, values[0], result, values[1], values[2:]),)
        if moves.gathers(node, types):
            return (moves.get_rows(number, values[0], values[1], result, report),)
        if moves.sets_rows(node, types):
            return (
                *self._moved(values[0], result),
                moves.set_rows(number, values[1], values[2], result, report),
            )
        if attending.is_attention(node, types) and products.reads_rows([*values, result]):
            return attending.attention(node, values, result, own, self.target)
        return self._move(node, types, values, result, storage)

    @staticmethod
    def _row_op(node: Node, values: Sequence[Located], result: Located) -> Launch:
        if node.op == "soft_max":
            return rows.soft_max(node, values[0], result, values[1:])
        return rows.norm(node, values[0], result, ())

    def _move(
        self,
        node: Node,
        types: Sequence[TensorType],
        values: Sequence[Located],
        result: Located,
        storage: Storage,
    ) -> tuple[Work, ...] | None:
        """Copies: cont, concat, assign, cast between floats, and views that must be copied after all."""
        if node.op == "cast" and {types[0].dtype.name, node.type.dtype.name} <= set(chains.FLOATS):
            return (chains.converted(values[0], result),)
        if not moves.can_copy(node.type):
            return None
        if node.op == "cont":
            return self._moved(values[0], result)
        if node.op == "assign":
            return self._moved(values[1], values[0])
        if node.op == "concat" and node.type.dtype.block_size == 1:
            return self._concat(node, values, result)
        if OPS[node.op].is_view:
            return self._view(node, values[0], result, storage)
        return None

    def _view(
        self, node: Node, source: Located, result: Located, storage: Storage
    ) -> tuple[Work, ...] | None:
        if node.op == "reshape":
            # Over the source's shape the copy is contiguous, whatever its own shape is.
            return self._moved(source, Located(source.type, result.slot, result.offset, source.type.strides))
        place = self.places[node.operands[0]]
        moved = view(node.op, node.attributes, source.type, node.type, place)
        if moved is None:
            return None
        base = storage.regions[moved.root]
        at = Located(node.type, base.slot, base.offset_bytes + moved.offset_bytes, moved.strides)
        return self._moved(at, result)

    @staticmethod
    def _moved(source: Located, result: Located) -> tuple[Work, ...]:
        """A copy, but of what lies there already."""
        if source[1:] == result[1:] or result.type.size == 0:
            return ()
        return (moves.copy(source, result),)

    def _concat(self, node: Node, values: Sequence[Located], result: Located) -> tuple[Work, ...]:
        axis, offset, found = node.attributes["axis"] % node.type.ndim, result.offset, []
        for one in values:
            if one.type.size:
                found.append(moves.copy(one, Located(one.type, result.slot, offset, result.strides)))
            offset += one.type.shape[axis] * result.strides[axis]
        return tuple(found)
