"""Elementwise chains as programs: operands, and instructions that each compute one value. Pure.

A program runs in one of two ways: `interpreter` has one kernel for all programs, and
`code_generation` makes a kernel for a program over many elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from heliograph_backends.cuda.driver.operations import CudaOperation
from heliograph_backends.cuda.lowering.launch import Located, Strides, aligned, collapsed

#: A source: an operand's number, or -1 - an earlier instruction's number.
Ref: TypeAlias = int
#: Kernels count elements in 32 bits.
MOST_ELEMENTS = 2**31 - 1


class ChainInstruction(NamedTuple):
    """One operation. With `rounds`, its result is rounded to the result's type, as the op by itself
    would."""

    operation: CudaOperation
    sources: tuple[Ref, ...]
    numbers: tuple[float, ...]
    rounds: bool


class ChainProgram(NamedTuple):
    """The computation for each element; the first operand is the result."""

    operands: tuple[Located, ...]
    instructions: tuple[ChainInstruction, ...]


class ChainPiece(NamedTuple):
    """The elements that a kernel walks: sizes, and each operand with its strides over them in
    bytes."""

    sizes: Strides
    operands: tuple[Located, ...]
    steps: tuple[Strides, ...]

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)


def pieces(operands: Sequence[Located], most: int = MOST_ELEMENTS) -> list[ChainPiece]:
    """Return the elements of the first operand, to which all others broadcast, over as few
    dimensions as the strides allow, in pieces of at most `most`."""
    shape = operands[0].type.shape
    sizes, steps = collapsed(shape, [aligned(one.type.shape, one.strides, shape) for one in operands])
    return _cut(ChainPiece(sizes, tuple(operands), steps), most)


def _cut(piece: ChainPiece, most: int) -> list[ChainPiece]:
    """Split into halves along the outermost dimension, until they are small enough."""
    if piece.elements <= most:
        return [piece]
    first, *rest = piece.sizes
    if first == 1:
        return _cut(ChainPiece(tuple(rest), piece.operands, tuple(step[1:] for step in piece.steps)), most)
    half = first // 2
    later = tuple(
        one._replace(offset=one.offset + half * step[0])
        for one, step in zip(piece.operands, piece.steps, strict=True)
    )
    parts = (
        ChainPiece((half, *rest), piece.operands, piece.steps),
        ChainPiece((first - half, *rest), later, piece.steps),
    )
    return [one for part in parts for one in _cut(part, most)]
