"""From groups of nodes to steps of a native program, for what is f32.

Pure: which kernel runs a node is decided by op, types and strides alone. What has no kernel here runs
on the definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from heliograph_backends.cpu import kernels as k
from heliograph_backends.cpu.kernels import Operation
from heliograph_backends.cpu.storage import Storage, is_weight
from heliograph_backends.planning.fusion import Group, Role, other_operand
from heliograph_backends.planning.layout import Place, view
from heliograph_proto.graph import Graph, Node
from heliograph_proto.ops import OPS
from heliograph_proto.types import F32, contiguous_strides

#: Elementwise ops that are one instruction of the same name and meaning.
INSTRUCTIONS: Mapping[str, Operation] = {
    "add": Operation.ADD, "sub": Operation.SUB, "mul": Operation.MUL, "div": Operation.DIV,
    "maximum": Operation.MAXIMUM, "minimum": Operation.MINIMUM, "neg": Operation.NEG,
    "abs": Operation.ABS, "sqr": Operation.SQUARE, "sqrt": Operation.SQRT,
    "rsqrt": Operation.RSQRT, "exp": Operation.EXP, "log": Operation.LOG, "tanh": Operation.TANH,
    "erf": Operation.ERF, "sigmoid": Operation.SIGMOID, "relu": Operation.RELU,
    "gelu": Operation.GELU, "gelu_erf": Operation.GELU_ERF, "gelu_quick": Operation.GELU_QUICK,
    "silu": Operation.SILU, "scale": Operation.SCALE_BIAS, "clamp": Operation.CLAMP,
    "cont": Operation.COPY,
}  # fmt: skip
IMMEDIATES = {"scale": ("scale", "bias"), "clamp": ("min", "max")}
#: Ops on rows that have a kernel of their own.
ROW_KERNELS = ("norm", "rms_norm", "l2_norm", "soft_max")
REDUCTIONS = {"reduce_sum": "sum_rows", "reduce_mean": "mean_rows", "reduce_max": "max_rows"}

#: Matrix products; mul_mat's first operand is the right side, transposed.
PRODUCTS = frozenset({"matmul", "mul_mat"})

#: Registers a packed weight, or its transpose, and returns the slot that it will be bound to.
PackedSlot: TypeAlias = Callable[[int, bool], int]


class Lowering:
    """Appends the steps of one graph to program builders."""

    def __init__(self, graph: Graph, places: tuple[Place, ...]) -> None:
        self.graph = graph
        self.places = places
        self.leaves = len(graph.leaves)
        self.types = [*(leaf.type for leaf in graph.leaves), *(node.type for node in graph.nodes)]
        self._kernels: dict[int, bool] = {}

    # What has a kernel

    def role(self, number: int) -> Role:
        """The role of a node in fusion."""
        node = self.graph.nodes[number]
        if not self.has_kernel(number):
            return "other"
        if node.op in INSTRUCTIONS:
            return "elementwise"
        if node.op in PRODUCTS:
            return "matmul"
        return "norm" if node.op in ("norm", "rms_norm") else "other"

    def has_kernel(self, number: int) -> bool:
        """Whether a native step runs this node."""
        found = self._kernels.get(number)
        if found is None:
            found = self._kernels[number] = self._find_kernel(number)
        return found

    def _find_kernel(self, number: int) -> bool:
        node = self.graph.nodes[number]
        if node.type.dtype != F32 or any(self.types[value].dtype != F32 for value in node.operands):
            return False
        if node.op in INSTRUCTIONS or node.op in ("matmul", "concat"):
            return True
        if node.op == "mul_mat":
            weights, activations = (self.types[value].shape[:-2] for value in node.operands)
            # Strides can repeat one matrix for all, or none; ggml also repeats each for several.
            return weights == activations or all(size == 1 for size in weights)
        if node.op in ROW_KERNELS:
            if len(node.operands) > 2 or node.attributes.get("max_bias"):
                # The kernel of soft_max knows neither sinks nor slopes.
                return False
            # A mask may broadcast over rows, but kernels read each row of it whole.
            whole = all(self.types[value].shape[-1:] == node.type.shape[-1:] for value in node.operands)
            return whole and all(self._has_contiguous_rows(value) for value in node.operands)
        if node.op in REDUCTIONS:
            return self._reduces_rows(node)
        if node.op == "assign":
            return self.places[node.operands[1]].root != self.places[node.operands[0]].root
        return OPS[node.op].is_view

    def is_row_operand(self, value: int) -> bool:
        """Whether norms can take this value as their weight or bias."""
        return self.types[value].dtype == F32 and self._has_contiguous_rows(value)

    def _has_contiguous_rows(self, value: int) -> bool:
        found = self.types[value]
        return found.ndim > 0 and (found.shape[-1] == 1 or self.places[value].strides[-1] == 4)

    def _reduces_rows(self, node: Node) -> bool:
        source = self.types[node.operands[0]]
        axes = node.attributes["axes"] or tuple(range(source.ndim))
        rows = source.ndim > 0 and tuple(axis % source.ndim for axis in axes) == (source.ndim - 1,)
        return rows and self._has_contiguous_rows(node.operands[0])

    # Steps

    def append(self, builder: k.ProgramBuilder, group: Group, storage: Storage, packed: PackedSlot) -> None:
        """Appends the steps of one group."""
        node = self.graph.nodes[group.last]
        if group.role == "elementwise":
            body = self._body(group.nodes, storage, product=None)
            builder.elementwise(node.type.shape, body)
        elif group.role == "matmul":
            self._matmul(builder, group, storage, packed)
        elif group.role == "norm":
            self._norm(builder, group, storage)
        elif node.op in ROW_KERNELS:
            self._rows(builder, group.last, storage)
        elif node.op in REDUCTIONS:
            self._reduction(builder, group.last, storage)
        else:
            self._move(builder, group.last, storage)

    def operand(self, storage: Storage, value: int) -> k.Operand:
        """A value as an operand of a step. Dimensions of size 1 have stride 0, so that they repeat."""
        slot, offset, strides = storage.locate(value)
        sizes = self.types[value].shape
        steps = tuple(0 if size == 1 else step for size, step in zip(sizes, strides, strict=True))
        return k.Operand(slot, offset, steps)

    def _result(self, storage: Storage, number: int) -> k.Operand:
        return self.operand(storage, self.leaves + number)

    def _scalar(self, value: int) -> float | None:
        """The number that a `fill` of one element is, since instructions can hold it."""
        node = self.graph.nodes[value - self.leaves] if value >= self.leaves else None
        if node is None or node.op != "fill" or node.type.size != 1:
            return None
        return float(node.attributes["value"])

    def _body(self, nodes: tuple[int, ...], storage: Storage, product: int | None) -> k.Elementwise:
        """The instructions of elementwise nodes; `product` is a value that is already in place."""
        operands: list[k.Operand] = [self._result(storage, nodes[-1])]
        sources: dict[int, Any] = {} if product is None else {product: k.Input(0)}
        instructions = []
        for register, number in enumerate(nodes):
            node = self.graph.nodes[number]
            for value in node.operands:
                if value not in sources:
                    sources[value] = self._source(value, operands, storage)
            result = k.Input(0) if number == nodes[-1] else k.Register(register)
            immediates = tuple(float(node.attributes[name]) for name in IMMEDIATES.get(node.op, ()))
            inputs = tuple(sources[value] for value in node.operands)
            instructions.append(k.Instruction(INSTRUCTIONS[node.op], result, inputs, immediates))
            sources[self.leaves + number] = result
        return k.Elementwise(tuple(operands), tuple(instructions))

    def _source(self, value: int, operands: list[k.Operand], storage: Storage) -> Any:
        number = self._scalar(value)
        if number is not None:
            return number
        operands.append(self.operand(storage, value))
        return k.Input(len(operands) - 1)

    def _matmul(self, builder: k.ProgramBuilder, group: Group, storage: Storage, packed: PackedSlot) -> None:
        product = next(n for n in group.nodes if self.graph.nodes[n].op in PRODUCTS)
        node = self.graph.nodes[product]
        left, right = node.operands if node.op == "matmul" else reversed(node.operands)
        *batch, rows, columns = node.type.shape
        rest = tuple(number for number in group.nodes if number != product)
        epilogue = self._body(rest, storage, self.leaves + product) if rest else None
        right_operand: k.Operand | k.PackedOperand
        if self.can_pack(right):
            right_operand = k.PackedOperand(packed(right, node.op == "mul_mat"))
        else:
            right_operand = self.operand(storage, right)
            if node.op == "mul_mat":
                right_operand = transposed(right_operand)
        depth = self.types[left].shape[-1]
        result = self._result(storage, group.last)
        left_operand = self.operand(storage, left)
        builder.gemm(rows, columns, depth, left_operand, right_operand, result, batch, epilogue)

    def can_pack(self, value: int) -> bool:
        """Whether a value is a matrix of a weight, which is packed once and for all."""
        return self.types[value].ndim == 2 and is_weight(self.graph, self.places[value].root)

    def _norm(self, builder: k.ProgramBuilder, group: Group, storage: Storage) -> None:
        first = self.graph.nodes[group.nodes[0]]
        rows: list[k.Operand | None] = [None, None]
        value = self.leaves + group.nodes[0]
        for place, number in enumerate(group.nodes[1:]):
            row = other_operand(self.graph.nodes[number].operands, value)
            slot, offset, strides = storage.locate(row)
            rows[place] = k.Operand(slot, offset, strides[-1:])
            value = self.leaves + number
        source, target = self.operand(storage, first.operands[0]), self._result(storage, group.last)
        epsilon = float(first.attributes["eps"])
        if first.op == "norm":
            builder.layer_norm(first.type.shape, source, target, rows[0], rows[1], epsilon)
        else:
            builder.rms_norm(first.type.shape, source, target, rows[0], epsilon)

    def _rows(self, builder: k.ProgramBuilder, number: int, storage: Storage) -> None:
        node = self.graph.nodes[number]
        source, target = self.operand(storage, node.operands[0]), self._result(storage, number)
        shape = node.type.shape
        if node.op == "l2_norm":
            builder.l2_norm(shape, source, target, float(node.attributes["eps"]))
            return
        mask = self.operand(storage, node.operands[1]) if len(node.operands) == 2 else None
        builder.soft_max(shape, source, target, mask, float(node.attributes["scale"]))

    def _reduction(self, builder: k.ProgramBuilder, number: int, storage: Storage) -> None:
        node = self.graph.nodes[number]
        shape = self.types[node.operands[0]].shape
        slot, offset, _ = storage.locate(self.leaves + number)
        target = k.Operand(slot, offset, contiguous_strides(shape[:-1], F32))
        source = self.operand(storage, node.operands[0])
        getattr(builder, REDUCTIONS[node.op])(shape, source, target)

    def _move(self, builder: k.ProgramBuilder, number: int, storage: Storage) -> None:
        """cont, concat, assign, and views that must be copied after all."""
        node = self.graph.nodes[number]
        if node.op == "concat":
            self._concat(builder, number, storage)
            return
        value = node.operands[-1]
        source_type = self.types[value]
        # An assignment writes its variable, wherever its result is read.
        target = self.operand(storage, node.operands[0] if node.op == "assign" else self.leaves + number)
        if node.op == "reshape":
            # Over the source's shape the copy is contiguous, whatever its own shape is.
            plain = k.Operand(target.slot, target.offset, source_type.strides)
            copy(builder, source_type.shape, self.operand(storage, value), plain)
            return
        source = self.operand(storage, value)
        if OPS[node.op].is_view:
            moved = view(node.op, node.attributes, source_type, node.type, self.places[value])
            assert moved is not None, "only a reshape can be impossible by strides"
            base = storage.regions[moved.root]
            source = k.Operand(base.slot, base.offset_bytes + moved.offset_bytes, moved.strides)
        copy(builder, node.type.shape, source, target)

    def _concat(self, builder: k.ProgramBuilder, number: int, storage: Storage) -> None:
        node = self.graph.nodes[number]
        slot, offset, strides = storage.locate(self.leaves + number)
        axis = node.attributes["axis"] % node.type.ndim
        for value in node.operands:
            found = self.types[value]
            copy(builder, found.shape, self.operand(storage, value), k.Operand(slot, offset, strides))
            offset += found.shape[axis] * strides[axis]


def copy(builder: k.ProgramBuilder, shape: tuple[int, ...], source: k.Operand, target: k.Operand) -> None:
    """Appends a copy of f32 elements."""
    if math.prod(shape):
        instruction = k.Instruction(Operation.COPY, k.Input(0), (k.Input(1),))
        builder.elementwise(shape, k.Elementwise((target, source), (instruction,)))


def transposed(operand: k.Operand) -> k.Operand:
    """A matrix operand with rows and columns exchanged."""
    *leading, row, column = operand.strides
    return k.Operand(operand.slot, operand.offset, (*leading, column, row))
