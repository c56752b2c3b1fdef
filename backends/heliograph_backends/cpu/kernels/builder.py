"""Encodes steps as words. Plain Python, without numba: a plan can be built where nothing can be
compiled.

Every method appends one step; steps run in order and each sees what the earlier ones wrote. A step
over an empty space is left out. Shapes are in elements, strides and offsets in bytes, all elements
are float32. Errors are ValueErrors.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod

import numpy as np

from . import layout
from .geometry import (
    MEMORY_BYTES_PER_NS,
    PACKED_DEPTH_BLOCK,
    UNPACKED_DEPTH_BLOCK,
    Space,
    Strides,
    coalesce,
    cut_elements,
    cut_matmul,
    matmul_ns,
    split_axes,
)
from .layout import BINARY, IMMEDIATE_COUNTS, OUTER_DIMENSIONS, PANEL_COLUMNS, Kind, Operation
from .program import (
    Elementwise,
    Input,
    Instruction,
    Operand,
    PackedOperand,
    Program,
    Register,
    Source,
)

LONG_CHUNK, SHORT_CHUNK = 1024, 512
# Steps that take less than this gain nothing from a second worker.
SHARING_NS = 4000.0
SIMPLE_NS, TRANSCENDENTAL_NS = 0.05, 0.4
_SIMPLE = frozenset(Operation(number) for number in range(Operation.EXP)) | {
    Operation.RELU,
    Operation.SCALE_BIAS,
    Operation.CLAMP,
}


def float_bits(value: float) -> int:
    """Return the pattern of `value` as float32 (overflow becomes infinity)."""
    with np.errstate(over="ignore"):
        return int.from_bytes(np.float32(value).tobytes(), "little")


class ProgramBuilder:
    """Collects steps; `build` makes the program."""

    def __init__(self) -> None:
        self._words: list[int] = []
        self._steps = 0
        self._shared = 0
        self._slots = 0
        self._pack_bytes = 0
        self._shared_ns = 0.0

    def elementwise(self, shape: Sequence[int], body: Elementwise) -> None:
        """Run an elementwise program over `shape`, of any number of axes that merge to at most
        eight.
        """
        strides = [_broadcast(operand, len(shape)) for operand in body.operands]
        _check_results(body, shape, strides)
        if 0 in shape:
            return
        sizes, strides = split_axes(*coalesce(shape, strides), inner=2)
        space = cut_elements(sizes[:-2], sizes[-2], sizes[-1])
        nanoseconds = prod(shape) * _body_ns(body)
        self._append(Kind.ELEMENTWISE, space, self._body(body, strides), nanoseconds)

    def gemm(
        self,
        rows: int,
        columns: int,
        depth: int,
        left: Operand,
        right: Operand | PackedOperand,
        product: Operand,
        batch: Sequence[int] = (),
        epilogue: Elementwise | None = None,
    ) -> None:
        """Multiply `batch` times: product[rows, columns] = left[rows, depth] @ right[depth,
        columns].

        `product` has contiguous columns and overlaps neither side. The epilogue's operands lie over
        batch + (rows, columns); `product` itself takes part as one of them.
        """
        axes = len(batch) + 2
        sides = [_broadcast(left, axes), _right_strides(right, axes), _broadcast(product, axes)]
        extra = epilogue or Elementwise((), ())
        sides += [_broadcast(operand, axes) for operand in extra.operands]
        _check_results(extra, (*batch, rows, columns), sides[3:])
        if columns > 1 and sides[2][-1] != 4:
            raise ValueError("the product of a matrix multiplication needs contiguous columns")
        if 0 in batch or rows == 0 or columns == 0:
            return
        outer, rows, sides = _fold_batch(tuple(batch), rows, sides)
        packed = isinstance(right, PackedOperand)
        space = cut_matmul(outer, rows, columns, depth, packed)
        depth_block = PACKED_DEPTH_BLOCK if packed else UNPACKED_DEPTH_BLOCK
        pack_left = sides[0][-1] != 4 and depth > 1
        self._reserve_packing(space, min(depth, depth_block), pack_left, not packed)
        words = [
            *self._operand(left, sides[0]),
            *self._operand(right, sides[1]),
            *self._operand(product, sides[2]),
        ]
        words += [depth, depth_block, int(pack_left), int(not packed), int(epilogue is not None)]
        words += self._body(extra, sides[3:])
        nanoseconds = matmul_ns(prod(outer), rows, columns, depth)
        self._append(Kind.MATMUL, space, words, nanoseconds)

    def layer_norm(
        self,
        shape: Sequence[int],
        source: Operand,
        target: Operand,
        weight: Operand | None = None,
        bias: Operand | None = None,
        epsilon: float = 1e-5,
    ) -> None:
        """Write (x - mean) / sqrt(variance + epsilon) * weight + bias over the last axis."""
        self._rows(Kind.LAYER_NORM, shape, source, target, weight, bias, epsilon)

    def rms_norm(
        self,
        shape: Sequence[int],
        source: Operand,
        target: Operand,
        weight: Operand | None = None,
        epsilon: float = 1e-5,
    ) -> None:
        """Write x / sqrt(mean(x**2) + epsilon) * weight over the last axis."""
        self._rows(Kind.RMS_NORM, shape, source, target, weight, None, epsilon)

    def soft_max(
        self,
        shape: Sequence[int],
        source: Operand,
        target: Operand,
        mask: Operand | None = None,
        scale: float = 1.0,
    ) -> None:
        """Write the soft maximum of x * scale + mask over the last axis."""
        self._rows(Kind.SOFT_MAX, shape, source, target, mask, None, scale)

    def l2_norm(self, shape: Sequence[int], source: Operand, target: Operand, epsilon: float = 1e-12) -> None:
        """Write x / max(sqrt(sum(x**2)), epsilon) over the last axis."""
        self._rows(Kind.L2_NORM, shape, source, target, None, None, epsilon)

    def sum_rows(self, shape: Sequence[int], source: Operand, target: Operand) -> None:
        """Write the sum over the last axis; `target` lies over shape[:-1]."""
        self._reduce(Kind.SUM, shape, source, target)

    def mean_rows(self, shape: Sequence[int], source: Operand, target: Operand) -> None:
        """Write the mean over the last axis; `target` lies over shape[:-1]."""
        self._reduce(Kind.MEAN, shape, source, target)

    def max_rows(self, shape: Sequence[int], source: Operand, target: Operand) -> None:
        """Write the largest element over the last axis, NaN where there is one; `target` lies over
        shape[:-1].
        """
        if shape[-1] == 0 and 0 not in shape[:-1]:
            raise ValueError("the maximum of an empty row has no value")
        self._reduce(Kind.MAX, shape, source, target)

    def build(self) -> Program:
        """Return the program of the steps so far."""
        header = [self._steps] + [0] * (layout.PROGRAM_HEADER_WORDS - 1)
        return Program(
            code=np.array(header + self._words, dtype=np.int64),
            slots=self._slots,
            steps=self._steps,
            shared_steps=self._shared,
            scratch_bytes=layout.PACK_AT + self._pack_bytes,
            shared_cost_ns=self._shared_ns,
        )

    def _reduce(self, kind: Kind, shape: Sequence[int], source: Operand, target: Operand) -> None:
        leading = _broadcast(target, len(shape) - 1)
        self._rows(kind, shape, source, Operand(target.slot, target.offset, (*leading, 4)), None, None, 0.0)

    def _rows(
        self,
        kind: Kind,
        shape: Sequence[int],
        source: Operand,
        target: Operand,
        weight: Operand | None,
        bias: Operand | None,
        parameter: float,
    ) -> None:
        operands = [source, weight, bias, target]
        strides = [_broadcast(each, len(shape)) if each else (0,) * len(shape) for each in operands]
        for operand, steps in zip(operands, strides, strict=True):
            if operand is not None and shape[-1] > 1 and steps[-1] != 4:
                raise ValueError(
                    f"{kind.name.lower()} needs contiguous rows, not a stride of {steps[-1]} bytes"
                )
        if 0 in shape[:-1] or (shape[-1] == 0 and kind not in (Kind.SUM, Kind.MEAN)):
            return
        leading, steps_before = coalesce(shape[:-1], [steps[:-1] for steps in strides])
        leading, steps_before = split_axes(leading, steps_before, inner=1)
        space = cut_elements(leading[:-1], leading[-1], shape[-1], whole_rows=True)
        words = [
            word
            for operand, before, steps in zip(operands, steps_before, strides, strict=True)
            for word in self._operand(operand, (*before, steps[-1]))
        ]
        nanoseconds = prod(shape) * TRANSCENDENTAL_NS
        self._append(kind, space, [*words, float_bits(parameter)], nanoseconds)

    def _append(self, kind: Kind, space: Space, payload: list[int], nanoseconds: float) -> None:
        shared = space.tiles > 1 and nanoseconds > SHARING_NS
        padding = (1,) * (OUTER_DIMENSIONS - len(space.outer))
        header = [
            kind,
            layout.STEP_HEADER_WORDS + len(payload),
            space.tiles,
            space.blocks,
            space.blocks_per_tile,
        ]
        header += [
            self._shared if shared else -1,
            space.rows,
            space.columns,
            space.row_block,
            space.column_block,
        ]
        header += [space.row_blocks, space.column_blocks, *padding, *space.outer]
        self._words += [int(word) for word in header + payload]
        self._steps += 1
        self._shared += shared
        self._shared_ns += nanoseconds if shared else 0.0

    def _operand(self, operand: Operand | PackedOperand | None, strides: Strides) -> list[int]:
        """Encode an operand whose strides cover outer axes, rows and columns."""
        if operand is None:
            return [-1] + [0] * (layout.OPERAND_WORDS - 1)
        if operand.slot < 0 or operand.offset < 0:
            raise ValueError("slots and offsets are not negative")
        self._slots = max(self._slots, operand.slot + 1)
        *outer, row, column = strides
        padding = [0] * (OUTER_DIMENSIONS - len(outer))
        return [operand.slot, operand.offset, row, column, *padding, *outer]

    def _reserve_packing(self, space: Space, depth: int, pack_left: bool, pack_right: bool) -> None:
        row_bytes = 4 * depth + layout.STRIP_GAP_BYTES
        left = -(-space.row_block * row_bytes // 64) * 64 if pack_left else 0
        panels = -(-min(space.column_block, space.columns) // PANEL_COLUMNS)
        right = panels * (depth + 16) * PANEL_COLUMNS * 4 if pack_right else 0
        self._pack_bytes = max(self._pack_bytes, left + right)

    def _body(self, body: Elementwise, strides: Sequence[Strides]) -> list[int]:
        """Encode an elementwise program: operands, constants, instructions."""
        numbers = _number_values(body)
        constants = [value for value in numbers if isinstance(value, float)]
        registers = sum(isinstance(value, Register) for value in numbers)
        operands = len(body.operands)
        chunk = LONG_CHUNK if len(numbers) * LONG_CHUNK * 4 <= 48 * 1024 else SHORT_CHUNK
        words = [operands, registers, len(constants), len(body.instructions), chunk]
        access = _access(body)
        for number, (operand, steps) in enumerate(zip(body.operands, strides, strict=True)):
            words += [*self._operand(operand, steps), access[number]]
        words += [float_bits(constant) for constant in constants]
        for instruction in body.instructions:
            words += _encode(instruction, numbers)
        return words


def _encode(instruction: Instruction, numbers: dict[Source, int]) -> list[int]:
    """Return an instruction's words; a unary one reads its source twice, which costs nothing."""
    first, *rest = (numbers[_key(source)] for source in instruction.sources)
    low, high = (*(float_bits(value) for value in instruction.immediates), 0, 0)[:2]
    (immediates,) = struct.unpack("<q", struct.pack("<II", low, high))
    return [
        instruction.operation,
        numbers[instruction.result],
        first,
        rest[0] if rest else first,
        immediates,
    ]


def _key(source: Source) -> Source:
    return source if isinstance(source, (Register, Input)) else float(source)


def _number_values(body: Elementwise) -> dict[Source, int]:
    """Number operands, then registers, then constants."""
    values: list[Source] = [
        _key(source) for each in body.instructions for source in (each.result, *each.sources)
    ]
    ordered: list[Source] = [Input(number) for number in range(len(body.operands))]
    registers = {value for value in values if isinstance(value, Register)}
    in_order: list[Register] = sorted(registers, key=lambda register: register.number)
    ordered += in_order
    ordered += list(dict.fromkeys(value for value in values if isinstance(value, float)))
    if len(ordered) > layout.MAXIMUM_VALUES:
        raise ValueError(f"an elementwise program of {len(ordered)} values: at most {layout.MAXIMUM_VALUES}")
    return {value: number for number, value in enumerate(ordered)}


def _access(body: Elementwise) -> list[int]:
    """Return for each operand whether its memory is read (before it is written) and whether it is
    written.
    """
    access = [0] * len(body.operands)
    for instruction in body.instructions:
        for source in instruction.sources:
            if isinstance(source, Input) and not access[source.number] & layout.WRITTEN:
                access[source.number] |= layout.READ
        if isinstance(instruction.result, Input):
            access[instruction.result.number] |= layout.WRITTEN
    return access


def _check_results(body: Elementwise, shape: Sequence[int], strides: Sequence[Strides]) -> None:
    """Check the instructions' arities and references, and that no result is written through a
    broadcast axis.
    """
    written: set[Register] = set()
    for instruction in body.instructions:
        operation = instruction.operation
        arity = 2 if operation in BINARY else 1
        if len(instruction.sources) != arity or len(instruction.immediates) != IMMEDIATE_COUNTS.get(
            operation, 0
        ):
            raise ValueError(f"{operation.name.lower()} takes {arity} sources, not {instruction}")
        for source in instruction.sources:
            if isinstance(source, Register) and source not in written:
                raise ValueError(f"{instruction} reads a register that nothing wrote")
        values = (instruction.result, *instruction.sources)
        if any(isinstance(value, Input) and not 0 <= value.number < len(strides) for value in values):
            raise ValueError(f"{instruction} names an operand that is not there")
        if isinstance(instruction.result, Register):
            written.add(instruction.result)
        elif 0 not in shape and any(
            step == 0 and size > 1
            for step, size in zip(strides[instruction.result.number], shape, strict=True)
        ):
            raise ValueError(f"{instruction} writes through a broadcast axis")


def _broadcast(operand: Operand, axes: int) -> Strides:
    """Return the operand's strides over all axes, stride 0 over those that it lacks."""
    missing = axes - len(operand.strides)
    if missing < 0:
        raise ValueError(f"{operand} has more than {axes} axes")
    return (0,) * missing + tuple(operand.strides)


def _right_strides(right: Operand | PackedOperand, axes: int) -> Strides:
    if isinstance(right, Operand):
        return _broadcast(right, axes)
    missing = axes - 2 - len(right.batch_strides)
    if missing < 0:
        raise ValueError(f"{right} has more than {axes - 2} batch axes")
    return (0,) * missing + tuple(right.batch_strides) + (0, 0)


def _fold_batch(
    batch: tuple[int, ...], rows: int, sides: list[Strides]
) -> tuple[tuple[int, ...], int, list[Strides]]:
    """Merge batch axes with each other and, where the right side is the same for all, with the
    rows.
    """
    left, right, *others = sides
    if not any(right[:-2]):
        walks = [left[:-1], *(each[:-1] for each in others)]
        sizes, merged = split_axes(*coalesce((*batch, rows), walks), inner=1)
        rows = sizes[-1]
        merged.insert(1, (0,) * (len(sizes) - 1) + (right[-2],))
        return (
            sizes[:-1],
            rows,
            [(*walk, each[-1]) for walk, each in zip(merged, sides, strict=True)],
        )
    sizes, merged = split_axes(*coalesce(batch, [each[:-2] for each in sides]), inner=0)
    return sizes, rows, [(*walk, *each[-2:]) for walk, each in zip(merged, sides, strict=True)]


def _body_ns(body: Elementwise) -> float:
    """Estimate one worker's time for an element."""
    arithmetic = sum(
        SIMPLE_NS if each.operation in _SIMPLE else TRANSCENDENTAL_NS for each in body.instructions
    )
    return arithmetic + 4.0 * len(body.operands) / MEMORY_BYTES_PER_NS
