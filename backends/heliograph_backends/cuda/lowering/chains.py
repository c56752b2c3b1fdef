"""Elementwise chains of graphs as programs, and their launches. Pure.

A chain of few elements is interpreted, by one kernel for all chains. A chain of many elements has
its own kernel, since an interpreter spends more instructions on each element than the memory's
bandwidth leaves time for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from heliograph_backends.cuda.driver.operations import EXACT, CudaOperation
from heliograph_backends.cuda.lowering.code_generation import generated
from heliograph_backends.cuda.lowering.interpreter import interpreted
from heliograph_backends.cuda.lowering.launch import Launch, Located, fits
from heliograph_backends.cuda.lowering.programs import ChainInstruction, ChainProgram, Ref, pieces
from heliograph_backends.cuda.lowering.target import CudaTarget
from heliograph_proto.graph import Graph, Node
from heliograph_proto.types import TensorType

#: Ops that are one instruction, of the same name but for a copy.
INSTRUCTIONS = {"cont" if one is CudaOperation.COPY else one.name.lower(): one for one in CudaOperation}
#: The attributes of ops that become an instruction's numbers.
NUMBERS: Mapping[str, tuple[str, ...]] = {
    "scale": ("scale", "bias"), "clamp": ("min", "max"), "leaky_relu": ("slope",),
}  # fmt: skip
#: Gated linear units: the activation of the first part.
GATED = {
    "reglu": CudaOperation.RELU, "geglu": CudaOperation.GELU, "geglu_erf": CudaOperation.GELU_ERF,
    "geglu_quick": CudaOperation.GELU_QUICK, "swiglu": CudaOperation.SILU,
}  # fmt: skip
FLOATS = ("f32", "f16", "bf16")

Locate: TypeAlias = Callable[[int], Located]


def is_elementwise(node: Node, operands: Sequence[TensorType]) -> bool:
    """True if the kernel computes a node of these operands."""
    name = node.type.dtype.name
    if node.op not in INSTRUCTIONS and node.op not in GATED:
        return False
    return name in FLOATS and all(one.dtype.name == name for one in operands) and fits(node.type.shape)


def chain(
    graph: Graph, nodes: Sequence[int], locate: Locate, result: Located, target: CudaTarget
) -> tuple[Launch, ...]:
    """Return the launches of a chain, whose last node's value is the result. A value in the
    result's own memory is read from there."""
    return _launches(_Chain(graph, nodes, locate, result).program(), target)


def added(a: Located, b: Located, result: Located, target: CudaTarget) -> tuple[Launch, ...]:
    """Return the launches of a sum of two of one of FLOATS, which broadcast to the result."""
    instruction = ChainInstruction(CudaOperation.ADD, (1, 2), (), True)
    return _launches(ChainProgram((result, a, b), (instruction,)), target)


def converted(source: Located, result: Located, target: CudaTarget) -> tuple[Launch, ...]:
    """Return the launches of a conversion between two of FLOATS."""
    return _launches(
        ChainProgram((result, source), (ChainInstruction(CudaOperation.COPY, (1,), (), True),)), target
    )


def _launches(program: ChainProgram, target: CudaTarget) -> tuple[Launch, ...]:
    found = []
    for piece in pieces(program.operands):
        launch = interpreted(piece, program.instructions)
        if piece.elements >= target.least_generated:
            launch = generated(piece, program.instructions, target.multiprocessors, launch)
        found.append(launch)
    return tuple(found)


class _Chain:
    """A chain's program under construction."""

    def __init__(self, graph: Graph, nodes: Sequence[int], locate: Locate, result: Located) -> None:
        self.graph, self.locate = graph, locate
        self.leaves = len(graph.leaves)
        self.operands = [result]
        self.instructions: list[ChainInstruction] = []
        self._sources: dict[int, Ref] = {}
        for number in nodes:
            self._add(number)

    def program(self) -> ChainProgram:
        """Return the program after all nodes were added."""
        return ChainProgram(tuple(self.operands), tuple(self.instructions))

    def _add(self, number: int) -> None:
        node = self.graph.nodes[number]
        if node.op in GATED:
            x, gate = self._halves(node) if len(node.operands) == 1 else map(self._source, node.operands)
            if node.attributes["swap"]:
                x, gate = gate, x
            activated = self._put(GATED[node.op], (x,), (), rounds=False)
            made = self._put(CudaOperation.MUL, (activated, gate), (), rounds=True)
        else:
            numbers = tuple(float(node.attributes[name]) for name in NUMBERS.get(node.op, ()))
            operation, sources = INSTRUCTIONS[node.op], tuple(map(self._source, node.operands))
            made = self._put(operation, sources, numbers, rounds=operation not in EXACT)
        self._sources[self.leaves + number] = made

    def _source(self, value: int) -> Ref:
        if value not in self._sources:
            self.operands.append(self.locate(value))
            self._sources[value] = len(self.operands) - 1
        return self._sources[value]

    def _halves(self, node: Node) -> tuple[Ref, Ref]:
        """Return the halves of the rows of a gated unit's single operand."""
        type, slot, offset, strides = self.locate(node.operands[0])
        half = TensorType(type.dtype, node.type.shape)
        second = offset + node.type.shape[-1] * strides[-1]
        self.operands += [Located(half, slot, offset, strides), Located(half, slot, second, strides)]
        return len(self.operands) - 2, len(self.operands) - 1

    def _put(
        self, operation: CudaOperation, sources: tuple[Ref, ...], numbers: tuple[float, ...], *, rounds: bool
    ) -> Ref:
        self.instructions.append(ChainInstruction(operation, sources, numbers, rounds))
        return -len(self.instructions)
