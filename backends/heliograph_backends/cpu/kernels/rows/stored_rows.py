"""Conversion between rows of blocks and float32, bit for bit as
`heliograph_proto.quantization.blocks`.

To float32: the kernels of matrix products unpack one block of each of 32 rows into panels. Here the
32 rows are consecutive blocks of one row, and the panel is transposed. To blocks: one block after
the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from heliograph_backends.cpu.kernels.matmul.packing import PANEL_ROW_BYTES, transpose
from heliograph_backends.cpu.kernels.matmul.stored_words import shuffled
from heliograph_backends.cpu.kernels.program.elements import BLOCK_ELEMENTS, Block
from heliograph_backends.cpu.kernels.program.words import PANEL_COLUMNS
from heliograph_backends.cpu.kernels.rows.convert_lanes import store_byte, store_half, to_half
from heliograph_backends.cpu.kernels.vector.atomics import call_unpack_panels, load_f32
from heliograph_backends.cpu.kernels.vector.lanes import (
    I32,
    I32_VECTOR,
    I64,
    LANES,
    Entry,
    Lanes,
    emitted,
    integer,
    jit,
    jit_inline,
    loop,
    pointer,
    subroutine,
)

Q8_0, Q4_0, Q4_1, Q5_0 = int(Block.Q8_0), int(Block.Q4_0), int(Block.Q4_1), int(Block.Q5_0)
ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)


def _spread(builder: Any, target: Any, panel: Any, block_size: Any, blocks: Any) -> None:
    """Transpose sixteen blocks at a time; nothing is written after the last one."""
    for half in range(PANEL_COLUMNS // LANES):
        rest = builder.sub(blocks, integer(half * LANES))
        with loop(builder, integer(0), block_size, LANES) as k:
            rows = []
            for lane in range(LANES):
                place = builder.mul(builder.add(k, integer(lane)), integer(PANEL_ROW_BYTES))
                place = builder.add(builder.add(panel, place), integer(4 * LANES * half))
                rows.append(Lanes.load(builder, place).value)
            for lane, value in enumerate(transpose(builder, rows)):
                with builder.if_then(builder.icmp_signed("<", integer(lane), rest)):
                    block = builder.mul(integer(half * LANES + lane), block_size)
                    place = builder.mul(builder.add(block, k), integer(4))
                    Lanes(builder, value).store(builder.add(target, place))


@emitted(types.void, *[types.int64] * 4)
def spread_panel(builder: Any, target: Any, panel: Any, block_size: Any, blocks: Any) -> None:
    """Write a panel whose columns are up to 32 blocks as a row of float32."""
    function = subroutine(builder, "spread_panel", (I64,) * 4, _spread)
    builder.call(function, [target, panel, block_size, blocks])


@jit_inline
def unpack_row(
    scratch: int,
    kind: int,
    block_size: int,
    block_bytes: int,
    target: int,
    source: int,
    count: int,
    panel: int,
) -> None:
    """Write `count` stored elements as float32; the panel has room for 32 blocks."""
    blocks = count // block_size
    for first in range(0, blocks, PANEL_COLUMNS):
        present = min(blocks - first, PANEL_COLUMNS)
        here = source + first * block_bytes
        call_unpack_panels(scratch, kind, panel, 0, here, block_bytes, block_size, present)
        spread_panel(target + 4 * first * block_size, panel, block_size, present)


@jit
def inverse(scale: Any) -> Any:
    """Return 1 / scale, and 0 for 0."""
    return ONE / scale if scale != ZERO else ZERO


def _pack_q8_0(builder: Any, target: Any, source: Any, blocks: Any) -> None:
    byte_vector = ir.VectorType(ir.IntType(8), LANES)
    with loop(builder, integer(0), blocks, 1) as block:
        here = builder.add(source, builder.mul(block, integer(4 * BLOCK_ELEMENTS)))
        there = builder.add(target, builder.mul(block, integer(2 + BLOCK_ELEMENTS)))
        halves = [Lanes.load(builder, builder.add(here, integer(4 * at))) for at in (0, LANES)]
        largest = halves[0].abs().maximum(halves[1].abs())
        for width in (8, 4, 2, 1):
            order = [lane ^ width for lane in range(LANES)]
            largest = largest.maximum(Lanes(builder, shuffled(builder, largest.value, largest.value, order)))
        scale = largest / 127.0
        factor = scale.where("==", 0.0, 0.0, 1.0 / scale)
        short = builder.extract_element(to_half(builder, scale), ir.Constant(I32, 0))
        builder.store(short, pointer(builder, there, short.type), align=1)
        for number, half in enumerate(halves):
            scaled = half * factor
            size = scaled.abs()
            whole = size.call("llvm.floor")
            # Round halves away from zero; size + 0.5 could round up a number just below a half.
            rounded = (whole + (size - whole).where(">=", 0.5, 1.0, 0.0)).copysign(scaled)
            # A block that is not finite has zeros: the instruction's result for NaN.
            safe = size.where("<", 128.0, rounded, 0.0)
            quanta = builder.trunc(builder.fptosi(safe.value, I32_VECTOR), byte_vector)
            place = builder.add(there, integer(2 + LANES * number))
            builder.store(quanta, pointer(builder, place, byte_vector), align=1)


@emitted(types.void, *[types.int64] * 3)
def pack_q8_0(builder: Any, target: Any, source: Any, blocks: Any) -> None:
    """Round float32 to blocks of q8_0, 32 each."""
    function = subroutine(builder, "pack_q8_0", (I64,) * 3, _pack_q8_0)
    builder.call(function, [target, source, blocks])


@jit
def pack_quanta(target: int, source: int, factor: Any, offset: Any, start: Any, bits: int) -> None:
    """Write 32 quanta (x - start) * factor + offset, truncated: fifth bits, if any, then
    nibbles."""
    most = np.float32((1 << bits) - 1)
    nibbles = target if bits == 4 else target + 4
    fifth = 0
    for place in range(16):
        low = int(min((load_f32(source + 4 * place) - start) * factor + offset, most))
        high = int(min((load_f32(source + 64 + 4 * place) - start) * factor + offset, most))
        store_byte(nibbles + place, (low & 15) | (high & 15) << 4)
        fifth |= (low >> 4 & 1) << place | (high >> 4 & 1) << (16 + place)
    if bits == 5:
        for byte in range(4):
            store_byte(target + byte, fifth >> 8 * byte)


@jit
def pack_signed(target: int, source: int, bits: int) -> None:
    """Round 32 float32 to a block of q4_0 or q5_0, scaled by the element of the largest
    magnitude."""
    found = load_f32(source)
    for place in range(1, BLOCK_ELEMENTS):
        value = load_f32(source + 4 * place)
        if abs(value) > abs(found) or (value != value and found == found):
            found = value
    half = np.float32(1 << (bits - 1))
    scale = found / -half
    store_half(target, scale)
    pack_quanta(target + 2, source, inverse(scale), half + HALF, ZERO, bits)


@jit
def pack_unsigned(target: int, source: int, bits: int) -> None:
    """Round 32 float32 to a block of q4_1 or q5_1, from the smallest element to the largest."""
    least = load_f32(source)
    largest = least
    for place in range(1, BLOCK_ELEMENTS):
        value = load_f32(source + 4 * place)
        if value < least or value != value:
            least = value
        if value > largest or value != value:
            largest = value
    scale = (largest - least) / np.float32((1 << bits) - 1)
    store_half(target, scale)
    store_half(target + 2, least)
    pack_quanta(target + 4, source, inverse(scale), HALF, least, bits)


@Entry
def pack_row(kind: int, block_bytes: int, target: int, source: int, count: int) -> None:
    """Round `count` float32, a multiple of 32, to blocks."""
    if kind == Q8_0:
        pack_q8_0(target, source, count // BLOCK_ELEMENTS)
        return
    for _ in range(count // BLOCK_ELEMENTS):
        if kind in (Q4_0, Q5_0):
            pack_signed(target, source, 4 if kind == Q4_0 else 5)
        else:
            pack_unsigned(target, source, 4 if kind == Q4_1 else 5)
        target += block_bytes
        source += 4 * BLOCK_ELEMENTS
