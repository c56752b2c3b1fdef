"""Elementwise chains as programs of the one kernel that interprets them. Pure.

An interpreter rather than a kernel for each chain: no client's graph makes the daemon compile anything, and
chains are bound by memory, where instructions from constant memory cost little. What the next instruction
alone reads stays in registers; what is read later lies in shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from heliograph_backends.cuda.filling import Filling, Launch, Located, aligned, blocks_for, collapsed, fits
from heliograph_backends.cuda.operations import Operation
from heliograph_backends.cuda.parameters import (
    ELEMENTWISE,
    IN_ORDER,
    MOST_INSTRUCTIONS,
    ONE_ELEMENT,
    STRIDED,
    TYPES,
)
from heliograph_proto.graph import Graph, Node
from heliograph_proto.types import TensorType

#: Ops that are one instruction of their name.
INSTRUCTIONS = {
    name: Operation[name.upper()]
    for name in (
        "add", "sub", "mul", "div", "maximum", "minimum", "neg", "abs", "sgn", "sqr", "sqrt", "rsqrt",
        "exp", "expm1", "log", "log1p", "sin", "cos", "tanh", "erf", "sigmoid", "relu", "elu", "silu",
        "gelu", "gelu_erf", "gelu_quick", "softplus", "hardswish", "hardsigmoid", "step", "floor", "ceil",
        "round", "trunc", "scale", "clamp", "leaky_relu",
    )
} | {"cont": Operation.COPY}  # fmt: skip
#: The attributes of ops that are an instruction's numbers.
NUMBERS: Mapping[str, tuple[str, ...]] = {
    "scale": ("scale", "bias"), "clamp": ("min", "max"), "leaky_relu": ("slope",),
}  # fmt: skip
#: Gated linear units: what the first part goes through.
GATED = {
    "reglu": Operation.RELU, "geglu": Operation.GELU, "geglu_erf": Operation.GELU_ERF,
    "geglu_quick": Operation.GELU_QUICK, "swiglu": Operation.SILU,
}  # fmt: skip
FLOATS = ("f32", "f16", "bf16")

THREADS, LANES = 256, 8
TILE = THREADS * LANES
FIRST_REGISTER, LAST_RESULT = 16, 32
MOST_REGISTERS = LAST_RESULT - FIRST_REGISTER

#: A source: an operand's number, or -1 - an earlier part's number.
Ref: TypeAlias = int
Locate: TypeAlias = Callable[[int], Located]


class _Part(NamedTuple):
    """An instruction before it has registers."""

    operation: Operation
    sources: tuple[Ref, ...]
    numbers: tuple[float, ...]
    rounds: bool


def is_elementwise(node: Node, operands: Sequence[TensorType]) -> bool:
    """Whether the kernel computes a node of these operands."""
    name = node.type.dtype.name
    if node.op not in INSTRUCTIONS and node.op not in GATED:
        return False
    return name in FLOATS and all(one.dtype.name == name for one in operands) and fits(node.type.shape)


def chain(graph: Graph, nodes: Sequence[int], locate: Locate, result: Located) -> Launch:
    """The launch of a chain, whose last node's value is the result. What another step left in the result's
    own memory is read there."""
    return _Chain(graph, nodes, locate, result).launch()


def converted(source: Located, result: Located) -> Launch:
    """The launch of a conversion between two of FLOATS."""
    filling = Filling(ELEMENTWISE)
    _fill(filling, result.type.shape, [result, source])
    _write(filling, 0, Operation.COPY, 1, -1, -1, (), True)
    filling.set(type=TYPES[result.type.dtype.name], instructions=1)
    return _launched(filling, result.type.size, 0)


class _Chain:
    """A chain under construction."""

    def __init__(self, graph: Graph, nodes: Sequence[int], locate: Locate, result: Located) -> None:
        self.graph, self.locate = graph, locate
        self.leaves = len(graph.leaves)
        self.shape = result.type.shape
        self.operands = [result]
        self.parts: list[_Part] = []
        self._sources: dict[int, Ref] = {}
        for number in nodes:
            self._add(number)

    def _add(self, number: int) -> None:
        node = self.graph.nodes[number]
        if node.op in GATED:
            x, gate = self._halves(node) if len(node.operands) == 1 else map(self._source, node.operands)
            if node.attributes["swap"]:
                x, gate = gate, x
            activated = self._put(GATED[node.op], (x,), (), rounds=False)
            made = self._put(Operation.MUL, (activated, gate), (), rounds=True)
        else:
            numbers = tuple(float(node.attributes[name]) for name in NUMBERS.get(node.op, ()))
            sources = tuple(map(self._source, node.operands))
            made = self._put(INSTRUCTIONS[node.op], sources, numbers, rounds=True)
        self._sources[self.leaves + number] = made

    def _source(self, value: int) -> Ref:
        if value not in self._sources:
            self.operands.append(self.locate(value))
            self._sources[value] = len(self.operands) - 1
        return self._sources[value]

    def _halves(self, node: Node) -> tuple[Ref, Ref]:
        """The halves of the rows of a gated unit's one operand."""
        type, slot, offset, strides = self.locate(node.operands[0])
        half = TensorType(type.dtype, node.type.shape)
        second = offset + node.type.shape[-1] * strides[-1]
        self.operands += [Located(half, slot, offset, strides), Located(half, slot, second, strides)]
        return len(self.operands) - 2, len(self.operands) - 1

    def _put(
        self, operation: Operation, sources: tuple[Ref, ...], numbers: tuple[float, ...], *, rounds: bool
    ) -> Ref:
        self.parts.append(_Part(operation, sources, numbers, rounds))
        return -len(self.parts)

    def launch(self) -> Launch:
        filling = Filling(ELEMENTWISE)
        _fill(filling, self.shape, self.operands)
        registers = self._write_program(filling)
        type = TYPES[self.operands[0].type.dtype.name]
        filling.set(type=type, instructions=len(self.parts))
        return _launched(filling, math.prod(self.shape), registers)

    def _write_program(self, filling: Filling) -> int:
        """Writes the instructions; how many registers they need."""
        reads: dict[int, list[int]] = {}
        for number, part in enumerate(self.parts):
            for ref in part.sources:
                reads.setdefault(-1 - ref, []).append(number)
        homes: dict[int, int] = {}
        free: list[int] = []
        most = 0
        for number, part in enumerate(self.parts):
            places = [self._place(ref, number, homes) for ref in part.sources]
            for ref in set(part.sources):
                if -1 - ref in homes and reads[-1 - ref][-1] == number:
                    free.append(homes.pop(-1 - ref))
            target = -1
            if any(reader > number + 1 for reader in reads.get(number, ())):
                target = homes[number] = free.pop() if free else len(homes) + len(free)
                most = max(most, target + 1)
            second = places[1] if len(places) > 1 else -1
            _write(filling, number, part.operation, places[0], second, target, part.numbers, part.rounds)
        return most

    @staticmethod
    def _place(ref: Ref, number: int, homes: Mapping[int, int]) -> int:
        if ref >= 0:
            return ref
        return LAST_RESULT if -1 - ref == number - 1 else FIRST_REGISTER + homes[-1 - ref]


def _fill(filling: Filling, shape: Sequence[int], operands: Sequence[Located]) -> None:
    """Operands over as few dimensions as they allow."""
    strides = [aligned(one.type.shape, one.strides, shape) for one in operands]
    sizes, steps = collapsed(shape, strides)
    filling.walk(sizes)
    filling.set(count=math.prod(shape))
    for place, (one, step) in enumerate(zip(operands, steps, strict=True)):
        filling.operand("operands", one, step, kind=_kind(one.type, sizes, step), place=place)


def _kind(type: TensorType, sizes: Sequence[int], strides: Sequence[int]) -> int:
    if not any(strides):
        return ONE_ELEMENT
    plain = len(sizes) == 1 and strides[0] == type.dtype.block_bytes
    return IN_ORDER if plain else STRIDED


def _write(
    filling: Filling,
    number: int,
    operation: Operation,
    first: int,
    second: int,
    target: int,
    numbers: Sequence[float],
    rounds: bool,
) -> None:
    assert number < MOST_INSTRUCTIONS and target < MOST_REGISTERS, "a chain is short"
    p, q = (*numbers, 0.0, 0.0)[:2]
    filling.parameters["program"][0][number] = (operation, first, second, target, p, q, rounds, 0)


def _launched(filling: Filling, count: int, registers: int) -> Launch:
    grid = (blocks_for(count, TILE), 1, 1)
    return filling.launch("elementwise", grid, THREADS, registers * TILE * 4)
