"""What a caller says to the builder, and what it gets: plain frozen values, without numba."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .layout import Operation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .bound import BoundProgram
    from .memory import Scratch


@dataclass(frozen=True, slots=True)
class Operand:
    """Float32 elements in the memory that slot `slot` is bound to."""

    slot: int
    offset: int
    """Bytes from the slot's base address to element (0, ..., 0)."""
    strides: tuple[int, ...]
    """Byte strides, last axis last. Missing leading axes have stride 0, so an operand broadcasts as
    in NumPy.
    """


@dataclass(frozen=True, slots=True)
class PackedOperand:
    """A packed right side of a matrix product, as `pack_weight` makes it."""

    slot: int
    offset: int = 0
    batch_strides: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Register:
    """A value that lives between two instructions only."""

    number: int


@dataclass(frozen=True, slots=True)
class Input:
    """An operand of an elementwise program, by its position in the list; it may be read and
    written.
    """

    number: int


Source = Register | Input | float


@dataclass(frozen=True, slots=True)
class Instruction:
    """`result = operation(*sources, *immediates)`, element by element in float32; a float is a
    constant source.
    """

    operation: Operation
    result: Register | Input
    sources: tuple[Source, ...]
    immediates: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Elementwise:
    """An elementwise program: operands over one iteration space, and instructions in order.

    An operand that is written may share memory with another one only when both have the same
    strides and offset, and nothing reads that other one after the write; otherwise they must not
    overlap.
    """

    operands: tuple[Operand, ...]
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """An encoded run of steps, good for any memory of the right shapes."""

    code: NDArray[np.int64]
    slots: int
    """Number of base addresses that a binding gives."""
    steps: int
    shared_steps: int
    """Steps of more than one tile, which workers share."""
    scratch_bytes: int
    """What each worker needs."""
    shared_cost_ns: float
    """Rough estimate of the time that one worker needs for the shared steps."""

    def bind(self, slots: Sequence[int] | NDArray[np.int64], scratch: Scratch | None = None) -> BoundProgram:
        """Give each slot its base address in bytes; the caller keeps that memory alive. Needs
        numba.

        An int64 array is used as it is and may change between runs; other sequences are copied.
        Programs that never run at the same time may share `scratch`.
        """
        from .bound import BoundProgram

        return BoundProgram(self, slots, scratch)
