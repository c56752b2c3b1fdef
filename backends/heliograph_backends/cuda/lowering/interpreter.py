"""Launches of the kernel that interprets programs. Pure.

A value that only the next instruction reads stays in registers; a value that is read later lies in
shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from heliograph_backends.cuda.driver.parameters import (
    ELEMENTWISE,
    ELEMENTWISE_FEW,
    FEW_INSTRUCTIONS,
    FEW_OPERANDS,
    IN_ORDER,
    MOST_INSTRUCTIONS,
    ONE_ELEMENT,
    STRIDED,
    TYPES,
)
from heliograph_backends.cuda.lowering.launch import Filling, Launch, Strides, blocks_for
from heliograph_backends.cuda.lowering.programs import ChainInstruction, ChainPiece
from heliograph_proto.types import TensorType

THREADS, LANES = 256, 8
TILE = THREADS * LANES
FIRST_REGISTER, LAST_RESULT = 16, 32
MOST_REGISTERS = LAST_RESULT - FIRST_REGISTER


def interpreted(piece: ChainPiece, instructions: Sequence[ChainInstruction]) -> Launch:
    """Return the launch of a program over a piece."""
    few = len(piece.operands) <= FEW_OPERANDS and len(instructions) <= FEW_INSTRUCTIONS
    filling = Filling(ELEMENTWISE_FEW if few else ELEMENTWISE)
    filling.divisors(piece.sizes)
    for place, (one, step) in enumerate(zip(piece.operands, piece.steps, strict=True)):
        filling.operand("operands", one, step, kind=_kind(one.type, piece.sizes, step), place=place)
    registers = _write(filling, instructions)
    type = TYPES[piece.operands[0].type.dtype.name]
    filling.set(count=piece.elements, dimensions=len(piece.sizes), type=type, instructions=len(instructions))
    grid = (blocks_for(piece.elements, TILE), 1, 1)
    return filling.launch("elementwise_few" if few else "elementwise", grid, THREADS, registers * TILE * 4)


def _kind(type: TensorType, sizes: Strides, strides: Strides) -> int:
    if not any(strides):
        return ONE_ELEMENT
    plain = len(sizes) == 1 and strides[0] == type.dtype.block_bytes
    return IN_ORDER if plain else STRIDED


def _write(filling: Filling, instructions: Sequence[ChainInstruction]) -> int:
    """Write the program, and return the number of registers that it needs."""
    reads: dict[int, list[int]] = {}
    for number, one in enumerate(instructions):
        for ref in one.sources:
            reads.setdefault(-1 - ref, []).append(number)
    homes: dict[int, int] = {}
    free: list[int] = []
    most = 0
    for number, one in enumerate(instructions):
        places = [_place(ref, number, homes) for ref in one.sources]
        for ref in set(one.sources):
            if -1 - ref in homes and reads[-1 - ref][-1] == number:
                free.append(homes.pop(-1 - ref))
        target = -1
        if any(reader > number + 1 for reader in reads.get(number, ())):
            target = homes[number] = free.pop() if free else len(homes) + len(free)
            most = max(most, target + 1)
        assert number < MOST_INSTRUCTIONS and target < MOST_REGISTERS, "a chain is short"
        second = places[1] if len(places) > 1 else -1
        p, q = (*one.numbers, 0.0, 0.0)[:2]
        written = one.operation, places[0], second, target, one.rounds, p, q
        filling.parameters["program"][0][number] = written
    return most


def _place(ref: int, number: int, homes: Mapping[int, int]) -> int:
    if ref >= 0:
        return ref
    return LAST_RESULT if -1 - ref == number - 1 else FIRST_REGISTER + homes[-1 - ref]
