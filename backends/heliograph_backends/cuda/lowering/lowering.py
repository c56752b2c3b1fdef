"""Lowering of groups of nodes to launches of kernels and calls of cuBLAS. Pure.

Only op, types and strides decide what runs a node. A node without a kernel runs its reference
definition, with CuPy in place of NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from heliograph_backends.cuda.lowering import (
    attention,
    chains,
    fusion,
    moves,
    ordering,
    products,
    randomness,
    rope,
    rows,
    stored,
    typed,
)
from heliograph_backends.cuda.lowering.images import convolution, endings, places, windows
from heliograph_backends.cuda.lowering.launch import Launch, Located
from heliograph_backends.cuda.lowering.target import FAILURE_TYPE, Asked, CudaTarget, OwnSlots
from heliograph_backends.planning.fusion import other_operand
from heliograph_backends.planning.groups import Group, Role
from heliograph_backends.planning.layout import ValuePlace, value_types, view
from heliograph_backends.planning.storage import StorageLayout
from heliograph_proto.graph import Graph, Node
from heliograph_proto.ops.table import OPS
from heliograph_proto.types import TensorType

#: The work that a step puts on a queue.
Work: TypeAlias = Launch | products.Call

#: Ops that their own kernels or none compute, each as a step by itself.
KERNELS: Mapping[str, Callable[[Asked], Sequence[Work] | None]] = {
    **dict.fromkeys(convolution.OPS, convolution.convolution),
    **dict.fromkeys(("pool_1d", "pool_2d"), windows.pool), "pool_2d_back": windows.pool_back,
    **dict.fromkeys(("im2col", "im2col_3d"), windows.columns),
    **dict.fromkeys(("im2col_back", "col2im_1d"), windows.columns_back),
    "pad": places.pad, "pad_reflect_1d": places.pad_reflect_1d, "roll": places.roll,
    "repeat": places.repeat, "set": places.set_block,
    "acc": places.acc, "add1": places.add1,
    **dict.fromkeys(("tri", "diag_mask_inf", "diag_mask_zero"), places.triangle), "upscale": places.upscale,
    **dict.fromkeys(("argsort", "top_k"), ordering.sort), "argmax": ordering.argmax,
    **dict.fromkeys(("cumsum", "cumprod"), ordering.running),
    "get_rows_back": moves.get_rows_back, "group_norm": rows.group_norm,
}  # fmt: skip


class CudaLowering:
    """The lowering of one graph's groups."""

    def __init__(self, graph: Graph, places: tuple[ValuePlace, ...], target: CudaTarget) -> None:
        self.graph = graph
        self.places = places
        self.target = target
        self.leaves = len(graph.leaves)
        self.types = value_types(graph)

    # The choice of kernels

    def role(self, number: int) -> Role:
        """Return the role of a node in fusion."""
        node, operands = self._node(number)
        if chains.is_elementwise(node, operands) and not self._turns_rows(node):
            return "elementwise"
        if node.op in ("norm", "rms_norm") and rows.is_row_op(node, operands):
            return "norm"
        if convolution.takes_ending(node, operands):
            return "windows"
        return "matmul" if self._has_product(number) else "other"

    def _turns_rows(self, node: Node) -> bool:
        """True for a copy of a value with strided rows, which is copied by tiles and so joins no
        chain."""
        type, strides = node.type, self.places[node.operands[0]].strides
        return node.op == "cont" and type.shape[-1:] > (1,) and strides[-1] != type.dtype.block_bytes

    def _has_product(self, number: int) -> bool:
        """True if a kernel or cuBLAS reads a product's operands in place; slots do not matter."""
        node, types = self._node(number)
        if node.op not in ("matmul", "mul_mat"):
            return False
        result = Located(node.type, 0, 0, node.type.strides)
        return node.type.size == 0 or self._multiplied(node, types, self._placed(number), result) is not None

    def _multiplied(
        self, node: Node, types: Sequence[TensorType], operands: Sequence[Located], result: Located
    ) -> Sequence[Work] | None:
        """Return the work of a product; None if no kernel computes it."""
        if stored.is_product(node, types) and stored.reads_rows(operands, result):
            return (stored.product(operands[0], operands[1], result, self.target),)
        return products.calls(node, operands, result) if products.is_cublas(node, types) else None

    def is_row_operand(self, value: int) -> bool:
        """True if norms can take this value as their weight or bias."""
        return self.types[value].ndim > 0 and self.types[value].dtype.name in chains.FLOATS

    def gathers(self, number: int) -> bool:
        """True if a kernel gathers a node's rows."""
        return moves.gathers(*self._node(number))

    def attends(self, number: int) -> bool:
        """True if a kernel computes a node's attention."""
        node, types = self._node(number)
        return attention.is_attention(node, types) and attention.attends(
            node, self._placed(number), self.target
        )

    def takes_biases(self, number: int) -> bool:
        """True if that kernel adds rows to queries, keys and values itself."""
        return self.attends(number) and attention.takes_biases(
            self.graph.nodes[number], self._placed(number), self.target
        )

    def _placed(self, number: int) -> list[Located]:
        """Return a node's operands with their later strides; slots are not known yet."""
        return [
            Located(self.types[value], 0, self.places[value].offset_bytes, self.places[value].strides)
            for value in self.graph.nodes[number].operands
        ]

    def _node(self, number: int) -> tuple[Node, list[TensorType]]:
        node = self.graph.nodes[number]
        return node, [self.types[value] for value in node.operands]

    # Work

    def workspace_bytes(self, groups: Sequence[Group]) -> int:
        """Return the most workspace that any of the groups needs while it runs."""
        nodes = [self._node(number) for group in groups for number in group.nodes]
        found = [attention.workspace_bytes(*one, self.target.multiprocessors) for one in nodes]
        for own in (convolution.workspace_bytes, ordering.workspace_bytes):
            found += [own(*one, self.target) for one in nodes]
        return max(found, default=0)

    def work(self, group: Group, storage: StorageLayout, own: OwnSlots) -> tuple[Work, ...] | None:
        """Return the work of a group; None if it runs on its definition."""
        if self.types[self.leaves + group.last].size == 0 and group.role != "matmul":
            return ()
        if group.role == "elementwise":
            return self._chain(group.nodes, storage)
        if group.role == "matmul":
            return self._product(group, storage)
        if group.role == "norm":
            return (self._norm(group, storage),)
        if group.role == "windows":
            return self._convolution(group, storage, own)
        ops = {self.graph.nodes[number].op: number for number in group.nodes}
        attends = next((ops[op] for op in attention.OPS if op in ops), None)
        if attends is not None:
            return self._attention(attends, group, storage, own)
        if "get_rows" in ops:
            return self._gathered(ops["get_rows"], group, storage, own)
        return self._other(group.last, storage, own)

    def _at(self, storage: StorageLayout, value: int) -> Located:
        return Located(self.types[value], *storage.locate(value))

    def _operands(self, storage: StorageLayout, node: Node) -> list[Located]:
        return [self._at(storage, value) for value in node.operands]

    def _chain(
        self, nodes: Sequence[int], storage: StorageLayout, product: int | None = None
    ) -> tuple[Work, ...]:
        """Return the work of a chain; a product's result is read from the chain's result memory."""
        result = self._at(storage, self.leaves + nodes[-1])

        def locate(value: int) -> Located:
            return result if value == product else self._at(storage, value)

        if [self.graph.nodes[number].op for number in nodes] == ["cont"]:
            return self._moved(locate(self.graph.nodes[nodes[0]].operands[0]), result)
        return chains.chain(self.graph, nodes, locate, result, self.target)

    def _product(self, group: Group, storage: StorageLayout) -> tuple[Work, ...] | None:
        number = next(n for n in group.nodes if self.graph.nodes[n].op in ("matmul", "mul_mat"))
        node, types = self._node(number)
        if node.type.size == 0:
            return ()
        rest = [each for each in group.nodes if each != number]
        result = self._at(storage, self.leaves + group.last)
        operands = self._operands(storage, node)
        found = self._multiplied(node, types, operands, result)
        assert found is not None, "its role implies a kernel"
        return (*found, *(self._chain(rest, storage, self.leaves + number) if rest else ()))

    def _convolution(self, group: Group, storage: StorageLayout, own: OwnSlots) -> tuple[Work, ...] | None:
        """Return the work of a convolution with the elementwise ops after it: by the same kernel if
        it can, else as a chain in the result's memory."""
        number = next(n for n in group.nodes if self.graph.nodes[n].op in convolution.OPS)
        node, rest = self.graph.nodes[number], [one for one in group.nodes if one != number]
        result = self._at(storage, self.leaves + group.last)
        asked = Asked(number, node, self._operands(storage, node), result, own, self.target)
        ending = endings.ending_of(self.graph, number, rest, partial(self._at, storage)) if rest else None
        found = convolution.ended(asked, ending) if ending else None
        if found is not None:
            return found
        work = convolution.convolution(asked)
        assert work is not None, "its role implies a kernel"
        return (*work, *(self._chain(rest, storage, self.leaves + number) if rest else ()))

    def _norm(self, group: Group, storage: StorageLayout) -> Launch:
        """Return the launch of a norm with the sums before it and the ops after it."""
        place = next(place for place, n in enumerate(group.nodes) if self.graph.nodes[n].op in rows.NORMS)
        number = group.nodes[place]
        value, added = fusion.summands(self.graph, group.nodes[:place], number)
        found = []
        last = self.leaves + number
        for after in group.nodes[place + 1 :]:
            found.append(self._at(storage, other_operand(self.graph.nodes[after].operands, last)))
            last = self.leaves + after
        result = self._at(storage, self.leaves + group.last)
        sums = [self._at(storage, one) for one in added]
        return rows.norm(self.graph.nodes[number], self._at(storage, value), result, found, sums)

    def _attention(
        self, number: int, group: Group, storage: StorageLayout, own: OwnSlots
    ) -> tuple[Work, ...] | None:
        """Return the work of attention, with sums with rows before it and a conversion after it."""
        node = self.graph.nodes[number]
        if not self.attends(number):
            return None
        result = self._whole(node.type.shape, group, storage)
        if group.nodes[0] == number:
            values = self._operands(storage, node)
            return attention.attention(Asked(number, node, values, result, own, self.target))
        values, biases = fusion.biased(self.graph, storage, group.nodes[0], number)
        return attention.attention(Asked(number, node, values, result, own, self.target), biases)

    def _whole(self, shape: tuple[int, ...], group: Group, storage: StorageLayout) -> Located:
        """Return a group's result in another shape of as many elements; both are contiguous."""
        value = self._at(storage, self.leaves + group.last)
        if value.type.shape == shape:
            return value
        type = TensorType(value.type.dtype, shape)
        return Located(type, value.slot, value.offset, type.strides)

    def _gathered(
        self, number: int, group: Group, storage: StorageLayout, own: OwnSlots
    ) -> tuple[Work, ...] | None:
        """Return the work of gathering rows, in the table's type if a conversion back to it
        follows."""
        node = self.graph.nodes[number]
        if not self.gathers(number):
            return None
        table, indices = self._operands(storage, node)
        result = self._whole(node.type.shape, group, storage)
        report = Located(FAILURE_TYPE, own.report, 0, (8,))
        return (moves.get_rows(number, table, indices, result, report),)

    def _other(self, number: int, storage: StorageLayout, own: OwnSlots) -> tuple[Work, ...] | None:
        node, types = self._node(number)
        result = self._at(storage, self.leaves + number)
        values = self._operands(storage, node)
        asked = Asked(number, node, values, result, own, self.target)
        if node.op in KERNELS:
            work = KERNELS[node.op](asked)
            return None if work is None else tuple(work)
        report = asked.report
        if rows.is_row_op(node, types):
            if node.op == "soft_max":
                return (rows.soft_max(node, values[0], result, values[1:]),)
            return (rows.norm(node, values[0], result, ()),)
        if types and rows.is_reduction(node, types[0]):
            return (rows.reduction(node, values[0], result),)
        if rope.is_rope(node, types):
            return (rope.rope(node, values[0], result, values[1], values[2:]),)
        if randomness.is_random(node.op, result):
            return (randomness.philox(values[0], values[1], result),)
        if moves.scatters(node, types):
            return (
                *self._moved(values[0], result),
                moves.scatter(node.op, number, values[1], values[2], result, report),
            )
        if stored.is_expert_product(node, types) and stored.reads_rows(values[:2], result):
            return (stored.expert_product(number, values, result, report, self.target),)
        moved = self._move(node, types, values, result, storage)
        return typed.elements(asked) if moved is None else moved

    def _move(
        self,
        node: Node,
        types: Sequence[TensorType],
        values: Sequence[Located],
        result: Located,
        storage: StorageLayout,
    ) -> tuple[Work, ...] | None:
        """Return the work of copies: cont, concat, assign, cast between floats, and views that must
        be copied."""
        if node.op == "cast" and {types[0].dtype.name, node.type.dtype.name} <= set(chains.FLOATS):
            return chains.converted(values[0], result, self.target)
        if not moves.can_copy(node.type):
            return None
        if node.op in ("cont", "bitcast"):
            return self._moved(values[0], result)
        if node.op == "assign":
            return self._moved(values[1], values[0])
        if node.op == "concat" and node.type.dtype.block_size == 1:
            return self._concat(node, values, result)
        if OPS[node.op].is_view:
            return self._view(node, values[0], result, storage)
        return None

    def _view(
        self, node: Node, source: Located, result: Located, storage: StorageLayout
    ) -> tuple[Work, ...] | None:
        if node.op == "reshape":
            # With the source's shape the copy is contiguous, whatever its own shape is.
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
        """Return a copy, unless the source already lies there."""
        if source[1:] == result[1:] or result.type.size == 0:
            return ()
        return moves.copy(source, result)

    def _concat(self, node: Node, values: Sequence[Located], result: Located) -> tuple[Work, ...]:
        axis, offset = node.attributes["axis"] % node.type.ndim, result.offset
        found: list[Work] = []
        for one in values:
            if one.type.size:
                found += moves.copy(one, Located(one.type, result.slot, offset, result.strides))
            offset += one.type.shape[axis] * result.strides[axis]
        return tuple(found)
