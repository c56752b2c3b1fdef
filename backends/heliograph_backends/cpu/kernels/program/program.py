"""The values that callers pass to the builder, and the program: plain and frozen, without numba."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from heliograph_backends.cpu.kernels.program.stored_types import GROUPED, INTEGERS, Stored
from heliograph_backends.cpu.kernels.program.words import PANEL_COLUMNS, Operation


class Operand(NamedTuple):
    """Float32 elements in the memory of a slot."""

    slot: int
    offset: int
    """Bytes from the slot's base address to element (0, ..., 0)."""
    strides: tuple[int, ...]
    """Byte strides, last axis last. Missing leading axes have stride 0, as in NumPy's broadcasting."""


class PackedOperand(NamedTuple):
    """A packed right side of a matrix product, see `PackedForm`."""

    slot: int
    offset: int = 0
    batch_strides: tuple[int, ...] = ()


class StoredOperand(NamedTuple):
    """A right side of a matrix product whose columns are rows of a weight of another data type."""

    slot: int
    offset: int
    strides: tuple[int, ...]
    """Byte strides of batch axes and columns; along k, elements or blocks are adjacent."""
    kind: Stored
    grouped: bool = False
    """True if the columns lie in groups, see `RowGroups`."""
    integers: bool = False
    """True if the left side is rows of q8_0."""

    @property
    def stored(self) -> int:
        """The number of the type in a step."""
        return self.kind + self.grouped * GROUPED + self.integers * INTEGERS


#: A side of a matrix product.
AnyOperand: TypeAlias = Operand | PackedOperand | StoredOperand


@dataclass(frozen=True, slots=True)
class Register:
    """A value that exists only between instructions."""

    number: int


@dataclass(frozen=True, slots=True)
class Input:
    """An operand of an elementwise program, by its position in the list; it may be read and
    written."""

    number: int


Source = Register | Input | float


class Instruction(NamedTuple):
    """`result = operation(*sources, *immediates)` for each element, in float32; a float is a
    constant."""

    operation: Operation
    result: Register | Input
    sources: tuple[Source, ...]
    immediates: tuple[float, ...] = ()


class Elementwise(NamedTuple):
    """An elementwise program: operands over one iteration space, and instructions in order.

    A written operand may share memory with another one only if both have the same strides and
    offset and no instruction reads the other one after the write; otherwise they must not overlap.
    """

    operands: tuple[Operand, ...]
    instructions: tuple[Instruction, ...]
    narrow: tuple[int, ...] = ()
    """For each operand `elements.HALF` or `BRAIN` if it is f16 or bf16, else 0; empty: all are float32."""


class Experts(NamedTuple):
    """The sizes of a product with experts."""

    kind: Stored
    """The data type of the experts."""
    experts: int
    columns: int
    depth: int
    tokens: int
    used: int
    """Ids per token."""
    own: int
    """Rows per token, which its ids use in turn."""
    id_bytes: int
    grouped: bool = False
    """True if the columns of the experts lie in groups, see `RowGroups`."""
    integers: bool = False
    """True if the rows are q8_0."""

    @property
    def stored(self) -> int:
        """The number of the experts' type in a step."""
        return self.kind + self.grouped * GROUPED + self.integers * INTEGERS


class Rotation(NamedTuple):
    """The rotation of each head's pairs by the position, in radians."""

    width: int
    """Elements of a head."""
    start: int
    """The first rotated element."""
    adjacent: bool
    """True if a pair is adjacent elements, false if one of each half of the rotated elements."""
    narrow: int
    """`elements.HALF` or `BRAIN` if rows are f16 or bf16, else 0."""
    size: float
    """The factor of the length of a pair."""
    angles: tuple[float, ...]
    """For each pair the angle of one position, before the division by the pair's factor."""
    scales: tuple[float, ...]
    """For each pair the factor of the angle after that division."""
    positions: tuple[int, ...]
    """For each pair the bytes from a token's first position to the pair's position."""


class Pages(NamedTuple):
    """Keys and values in pages, and the tables that name them."""

    keys: int
    """Of a page."""
    pages: int
    """Numbers in tables are smaller."""
    key_bytes: int
    """From a page of keys to the next."""
    value_bytes: int
    tables: int
    table_bytes: int
    """From a table to the next."""
    of_table: int


class Attention(NamedTuple):
    """The sizes, data types and parameters of attention."""

    keys: int
    key_width: int
    value_width: int
    """A multiple of 16."""
    key_form: int
    """A `Stored`."""
    value_form: int
    """`elements.FLOAT32`, or a `Stored`."""
    mask_conversion: int
    """The conversion of the mask to float32."""
    scale: float
    cap: float
    """If not 0, scores become cap * tanh(score / cap)."""
    head_strides: tuple[int, ...]
    """Byte strides of outer indices and rows in `slopes`, at 8 bytes each."""
    slopes: tuple[float, ...] = ()
    """The factor of each head's mask; empty: 1."""
    pages: Pages | None = None


class Geometry(NamedTuple):
    """Windows that move over images: pairs of numbers down and across."""

    image: tuple[int, int]
    window: tuple[int, int]
    step: tuple[int, int]
    spread: tuple[int, int]
    """From an element of a window to the next."""
    padding: tuple[int, int]
    """Before the first row and column; what windows reach behind the last ones follows."""
    result: tuple[int, int]
    """The number of windows."""
    narrow: tuple[int, int] = (0, 0)
    """For image and kernel `elements.HALF` or `BRAIN` if it is f16 or bf16, else 0."""

    @property
    def taps(self) -> int:
        """The elements of a window."""
        return self.window[0] * self.window[1]

    @property
    def phases(self) -> int:
        """The parts of an image that windows read: every `step`-th element of each."""
        down, across = (min(step, self.reach(axis) + 1) for axis, step in enumerate(self.step))
        return down * across

    @property
    def line_elements(self) -> int:
        """The elements that are staged for one row of windows: those that it reads, with padding."""
        return self.staged_elements(1)

    @property
    def padded_places(self) -> int:
        """The places that windows read of an image with its padding."""
        down, across = ((self.result[axis] - 1) * self.step[axis] + self.reach(axis) + 1 for axis in (0, 1))
        return down * across

    @property
    def pitch(self) -> int:
        """The elements of a staged line."""
        return self.result[1] + self.reach(1) // self.step[1]

    def staged_elements(self, lines: int) -> int:
        """Return the elements that are staged for some rows of windows, with a gap for each phase."""
        staged = lines + self.reach(0) // self.step[0]
        return self.phases * (staged * self.pitch + PANEL_COLUMNS // 2)

    def wide_bytes(self, lines: int, channels: int) -> int:
        """Return the bytes of float32 that some rows of windows read of channels of f16 or bf16."""
        read = min(self.image[0], (lines - 1) * self.step[0] + self.reach(0) + 1)
        return 4 * channels * read * self.image[1] if self.narrow[0] else 0

    def reach(self, axis: int) -> int:
        """Return the distance from the first element of a window to the last."""
        return (self.window[axis] - 1) * self.spread[axis]


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Encoded steps, which can be bound to any memory of the right shapes."""

    code: NDArray[np.int64]
    slots: int
    """The number of base addresses in a binding."""
    steps: int
    shared_steps: int
    """The number of steps that workers share."""
    scratch_bytes: int
    """Bytes of scratch that each worker needs."""
    shared_cost_ns: float
    """A rough estimate of one worker's time for the shared steps."""
    long_cost_ns: float
    """The same for all steps that take long, also those that are no shared ones."""
    needs: int
    """The places of its entries in the table, as bits."""
