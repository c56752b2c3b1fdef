"""What a caller says to the builder, and what it gets: plain frozen values, without numba."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from heliograph_backends.cpu.kernels.program.stored_types import Stored
from heliograph_backends.cpu.kernels.program.words import Operation

if TYPE_CHECKING:
    pass


class Operand(NamedTuple):
    """Float32 elements in the memory that slot `slot` is bound to."""

    slot: int
    offset: int
    """Bytes from the slot's base address to element (0, ..., 0)."""
    strides: tuple[int, ...]
    """Byte strides, last axis last. Missing leading axes have stride 0, so an operand broadcasts as
    in NumPy.
    """


class PackedOperand(NamedTuple):
    """A packed right side of a matrix product, as `pack_weight` makes it."""

    slot: int
    offset: int = 0
    batch_strides: tuple[int, ...] = ()


class StoredOperand(NamedTuple):
    """A right side of a matrix product; its columns are rows of a weight that is stored in another type."""

    slot: int
    offset: int
    strides: tuple[int, ...]
    """Byte strides of batch axes and columns; along k elements or blocks follow each other."""
    kind: Stored


#: A side of a matrix product.
AnyOperand: TypeAlias = Operand | PackedOperand | StoredOperand


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


class Instruction(NamedTuple):
    """`result = operation(*sources, *immediates)`, element by element in float32; a float is a
    constant source.
    """

    operation: Operation
    result: Register | Input
    sources: tuple[Source, ...]
    immediates: tuple[float, ...] = ()


class Elementwise(NamedTuple):
    """An elementwise program: operands over one iteration space, and instructions in order.

    An operand that is written may share memory with another one only when both have the same
    strides and offset, and nothing reads that other one after the write; otherwise they must not
    overlap.
    """

    operands: tuple[Operand, ...]
    instructions: tuple[Instruction, ...]
    narrow: tuple[int, ...] = ()
    """Of each operand `elements.HALF` or `BRAIN` if it is f16 or bf16, else 0; none: all are float32."""


class Experts(NamedTuple):
    """The sizes of a product with experts."""

    kind: Stored
    """How the experts are stored."""
    experts: int
    columns: int
    depth: int
    tokens: int
    used: int
    """Ids of a token."""
    own: int
    """Rows of a token, which its ids use in turn."""
    id_bytes: int


class Rotation(NamedTuple):
    """How the pairs of each head turn with the position, in radians."""

    width: int
    """Elements of a head."""
    start: int
    """The first element that turns."""
    adjacent: bool
    """Whether a pair are neighbours, rather than one of each half of what turns."""
    narrow: int
    """`elements.HALF` or `BRAIN` if rows are f16 or bf16, else 0."""
    size: float
    """Length of what was 1 long."""
    angles: tuple[float, ...]
    """Of each pair: the angle for one position, before it is divided by the pair's factor."""
    scales: tuple[float, ...]
    """Of each pair: what the angle is multiplied with after that."""
    positions: tuple[int, ...]
    """Of each pair: bytes from a token's first position to the one that it turns by."""


class Attention(NamedTuple):
    """What attention does with its rows of queries."""

    keys: int
    key_width: int
    value_width: int
    """A multiple of 16."""
    key_form: int
    """`elements.FLOAT32`, or a `Stored`."""
    value_form: int
    mask_conversion: int
    """Of the mask to float32."""
    scale: float
    cap: float
    """Scores become cap * tanh(score / cap); 0: they stay."""
    head_strides: tuple[int, ...]
    """From one outer index, or row, to the next in `slopes`, times 8."""
    slopes: tuple[float, ...] = ()
    """What each head's mask is multiplied with; none: 1."""


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
