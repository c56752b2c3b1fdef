"""Conversion of rows between data types, and copies of rows of any elements.

Floats are rounded once, to the nearest, halves to even; NaN stays NaN. Sixteen elements are
converted at a time, gathered and scattered if rows are strided. The rest of a row goes one element
at a time through the first of sixteen lanes, with the same bits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types

from heliograph_backends.cpu.kernels.matmul.stored_lanes import HALVES, SHORTS, from_bfloat, from_half
from heliograph_backends.cpu.kernels.program.elements import Conversion
from heliograph_backends.cpu.kernels.vector.lanes import (
    F32,
    F32_VECTOR,
    F64,
    I32,
    I32_VECTOR,
    I64,
    LANES,
    Lanes,
    emitted,
    has_feature,
    integer,
    loop,
    pointer,
    subroutine,
)

I8, I16 = ir.IntType(8), ir.IntType(16)
FIRST = ir.Constant(I32, 0)


def _constant(value: int) -> ir.Constant:
    return ir.Constant(I32_VECTOR, [value] * LANES)


def to_half(builder: Any, lanes: Lanes) -> Any:
    """Return sixteen f16 as shorts."""
    if builder.module.triple.startswith("x86_64") and not has_feature("f16c"):
        return half_bits_by_hand(builder, lanes)
    return builder.bitcast(builder.fptrunc(lanes.value, HALVES), SHORTS)


def half_bits_by_hand(builder: Any, lanes: Lanes) -> Any:
    """Return sixteen f16 as shorts without an instruction for it; LLVM would call a function that
    may be missing.

    Small numbers: adding 2**-1 rounds to f16's smallest step, 2**-24, and leaves their digits in
    the lowest bits of the sum. Others: 13 digits are cut off; adding just under half of the last
    kept place and that place's digit first rounds halves to even. A carry correctly goes into the
    exponent.
    """
    bits = lanes.bits()
    size = builder.and_(bits, _constant(0x7FFFFFFF))
    small = Lanes.from_bits(builder, size) + 0.5
    denormal = builder.sub(small.bits(), _constant(0x3F000000))
    odd = builder.and_(builder.lshr(size, _constant(13)), _constant(1))
    moved = builder.add(builder.add(size, odd), _constant(0xFFF - (112 << 23) & 0xFFFFFFFF))
    normal = builder.lshr(moved, _constant(13))
    is_small = builder.icmp_unsigned("<", size, _constant(113 << 23))
    found = builder.select(is_small, denormal, normal)
    # From 65520 on the nearest is infinity.
    found = builder.select(builder.icmp_unsigned(">=", size, _constant(0x477FF000)), _constant(0x7C00), found)
    is_nan = builder.icmp_unsigned(">", size, _constant(0x7F800000))
    digits = builder.or_(builder.lshr(size, _constant(13)), _constant(0x7E00))
    found = builder.select(is_nan, builder.and_(digits, _constant(0x7FFF)), found)
    sign = builder.lshr(builder.and_(bits, _constant(0x80000000)), _constant(16))
    return builder.trunc(builder.or_(found, sign), SHORTS)


def to_bfloat(builder: Any, lanes: Lanes) -> Any:
    """Return sixteen bf16 as shorts."""
    bits = lanes.bits()
    upper = builder.lshr(bits, _constant(16))
    odd = builder.and_(upper, _constant(1))
    rounded = builder.lshr(builder.add(builder.add(bits, odd), _constant(0x7FFF)), _constant(16))
    # Rounding could turn a NaN into infinity; the quiet bit keeps it a NaN without the lower half.
    is_nan = builder.fcmp_unordered("uno", lanes.value, lanes.value)
    quiet = builder.or_(upper, _constant(0x40))
    return builder.trunc(builder.select(is_nan, quiet, rounded), SHORTS)


class _Element(NamedTuple):
    """An element in memory, and its conversions from and to lanes."""

    kind: ir.Type
    bytes: int
    read: Callable[[Any, Any], Lanes]
    write: Callable[[Any, Lanes], Any]


_F32 = _Element(F32, 4, Lanes, lambda builder, lanes: lanes.value)
_F16 = _Element(I16, 2, from_half, to_half)
_BF16 = _Element(I16, 2, from_bfloat, to_bfloat)


def _integers(bits: int) -> Any:
    return ir.VectorType(ir.IntType(bits), LANES)


def _to_wide(builder: Any, lanes: Lanes) -> Any:
    """Return the lanes as int64, rounded towards 0; the least one for numbers outside, and NaN."""
    kind = _integers(64)
    inside = builder.and_(
        builder.fcmp_ordered(">=", lanes.value, lanes.lift(-(2.0**63)).value),
        builder.fcmp_ordered("<", lanes.value, lanes.lift(2.0**63).value),
    )
    # An instruction of numbers outside has no defined result.
    safe = builder.select(inside, lanes.value, lanes.lift(0.0).value)
    least = ir.Constant(kind, [-(2**63)] * LANES)
    return builder.select(inside, builder.fptosi(safe, kind), least)


def _read(kind: ir.Type, size: int, change: Callable[[Any, Any], Any]) -> _Element:
    """Return elements that `change` turns into int32 of lanes."""
    return _Element(
        kind, size, lambda builder, found: Lanes.from_bits(builder, change(builder, found)), _bits
    )


def _write(kind: ir.Type, size: int, change: Callable[[Any, Any], Any]) -> _Element:
    """Return elements that `change` makes of the int32 of lanes."""
    return _Element(kind, size, Lanes, lambda builder, lanes: change(builder, lanes.bits()))


def _bits(builder: Any, lanes: Lanes) -> Any:
    return lanes.bits()


def _is_true(builder: Any, found: Any) -> Any:
    return builder.zext(builder.icmp_signed("!=", found, ir.Constant(found.type, None)), I32_VECTOR)


def _extended(builder: Any, found: Any) -> Any:
    return builder.sext(found, I32_VECTOR)


def _padded(builder: Any, found: Any) -> Any:
    return builder.zext(found, I32_VECTOR)


def _high(builder: Any, found: Any) -> Any:
    return builder.trunc(builder.lshr(found, ir.Constant(found.type, [32] * LANES)), I32_VECTOR)


def _narrowed(bits: int) -> Callable[[Any, Any], Any]:
    return lambda builder, found: builder.trunc(found, _integers(bits))


#: The elements that conversions of floats and integers read and write; others move bytes.
_FLOATS: dict[Conversion, tuple[_Element, _Element]] = {
    Conversion.F32_F16: (_F32, _F16),
    Conversion.F32_BF16: (_F32, _BF16),
    Conversion.F16_F32: (_F16, _F32),
    Conversion.F16_BF16: (_F16, _BF16),
    Conversion.BF16_F32: (_BF16, _F32),
    Conversion.BF16_F16: (_BF16, _F16),
    Conversion.I32_I8: (_F32, _write(I8, 1, _narrowed(8))),
    Conversion.I32_I16: (_F32, _write(I16, 2, _narrowed(16))),
    Conversion.I32_I64: (_F32, _write(I64, 8, lambda builder, found: builder.sext(found, _integers(64)))),
    Conversion.U32_I64: (_F32, _write(I64, 8, lambda builder, found: builder.zext(found, _integers(64)))),
    Conversion.F32_I64: (_F32, _Element(I64, 8, Lanes, _to_wide)),
    Conversion.F32_F64: (_F32, _Element(F64, 8, Lanes, lambda builder, lanes: lanes.widen())),
    Conversion.BOOL_I32: (_read(I8, 1, _is_true), _F32),
    Conversion.I8_I32: (_read(I8, 1, _extended), _F32),
    Conversion.U8_I32: (_read(I8, 1, _padded), _F32),
    Conversion.I16_I32: (_read(I16, 2, _extended), _F32),
    Conversion.U16_I32: (_read(I16, 2, _padded), _F32),
    Conversion.I64_I32: (_read(I64, 8, _narrowed(32)), _F32),
    Conversion.I64_HIGH: (_read(I64, 8, _high), _F32),
    Conversion.I64_F32: (
        _Element(I64, 8, lambda builder, found: Lanes(builder, builder.sitofp(found, F32_VECTOR)), _bits),
        _F32,
    ),
    Conversion.F64_F32: (_Element(F64, 8, Lanes.narrow, _bits), _F32),
}


#: Conversions that combine an element of the target with one of the source.
_COMBINED: dict[Conversion, Callable[[Lanes, Lanes], Lanes]] = {
    Conversion.ADD_F32: operator.add,
    Conversion.MUL_F32: operator.mul,
    Conversion.MAX_F32: Lanes.maximum,
    Conversion.MIN_F32: Lanes.minimum,
}


def _bytes(conversion: Conversion) -> tuple[_Element, _Element]:
    """Return the elements of a move, whose lanes are the unchanged values."""
    size = int(conversion.name.removeprefix("BYTES_"))
    kept = _Element(ir.IntType(8 * size), size, lambda builder, value: value, lambda builder, value: value)
    return kept, kept


def _gathered(builder: Any, place: Any, step: Any, element: _Element, count: int) -> Any:
    """Load the first `count` lanes from places that are `step` bytes apart."""
    found: Any = ir.Constant(ir.VectorType(element.kind, LANES), None)
    for lane in range(count):
        one = builder.load(pointer(builder, place, element.kind), align=element.bytes)
        found = builder.insert_element(found, one, ir.Constant(I32, lane))
        place = builder.add(place, step)
    return found


def _rows(conversion: Conversion) -> Callable[..., None]:
    combine = _COMBINED.get(conversion)
    read, write = (_F32, _F32) if combine else _FLOATS.get(conversion) or _bytes(conversion)
    some, others = ir.VectorType(read.kind, LANES), ir.VectorType(write.kind, LANES)

    def made(builder: Any, found: Any, there: Callable[[], Any]) -> Any:
        """Return the target's new elements; `there` loads the old ones."""
        lanes = read.read(builder, found)
        return write.write(builder, combine(Lanes(builder, there()), lanes) if combine else lanes)

    def beside(builder: Any, target: Any, source: Any, index: Any) -> None:
        place = builder.add(source, builder.mul(index, integer(read.bytes)))
        found = builder.load(pointer(builder, place, some), align=read.bytes)
        there = pointer(builder, builder.add(target, builder.mul(index, integer(write.bytes))), others)
        new = made(builder, found, lambda: builder.load(there, align=write.bytes))
        builder.store(new, there, align=write.bytes)

    def apart(
        builder: Any, target: Any, target_step: Any, source: Any, source_step: Any, index: Any, count: int
    ) -> None:
        here = builder.add(source, builder.mul(index, source_step))
        place = builder.add(target, builder.mul(index, target_step))
        found = _gathered(builder, here, source_step, read, count)
        new = made(builder, found, lambda: _gathered(builder, place, target_step, write, count))
        for lane in range(count):
            one = builder.extract_element(new, ir.Constant(I32, lane))
            builder.store(one, pointer(builder, place, write.kind), align=write.bytes)
            place = builder.add(place, target_step)

    def row(builder: Any, target: Any, target_step: Any, source: Any, source_step: Any, count: Any) -> None:
        dense = builder.and_(
            builder.icmp_signed("==", source_step, integer(read.bytes)),
            builder.icmp_signed("==", target_step, integer(write.bytes)),
        )
        whole = builder.and_(count, integer(-LANES))
        with builder.if_else(dense) as (yes, no):
            with yes, loop(builder, integer(0), whole, LANES) as index:
                beside(builder, target, source, index)
            with no, loop(builder, integer(0), whole, LANES) as index:
                apart(builder, target, target_step, source, source_step, index, LANES)
        with loop(builder, whole, count, 1) as index:
            apart(builder, target, target_step, source, source_step, index, 1)

    def body(
        builder: Any,
        target: Any,
        target_step: Any,
        source: Any,
        source_step: Any,
        count: Any,
        rows: Any,
        target_row: Any,
        source_row: Any,
    ) -> None:
        with loop(builder, integer(0), rows, 1) as index:
            there = builder.add(target, builder.mul(index, target_row))
            here = builder.add(source, builder.mul(index, source_row))
            row(builder, there, target_step, here, source_step, count)

    return body


@emitted(types.void, *[types.int64] * 9)
def convert_plain(
    builder: Any,
    conversion: Any,
    target: Any,
    target_step: Any,
    source: Any,
    source_step: Any,
    count: Any,
    rows: Any,
    target_row: Any,
    source_row: Any,
) -> None:
    """Convert rows of elements that are not blocks; steps within rows and between them are in
    bytes."""
    done = builder.append_basic_block("convert.done")
    switch = builder.switch(conversion, done)
    arguments = [target, target_step, source, source_step, count, rows, target_row, source_row]
    for each in Conversion:
        with builder.goto_block(builder.append_basic_block(each.name.lower())):
            switch.add_case(integer(each), builder.block)
            function = subroutine(builder, f"convert_{each.name.lower()}", (I64,) * 8, _rows(each))
            builder.call(function, arguments)
            builder.branch(done)
    builder.position_at_end(done)


@emitted(types.void, types.int64, types.float32)
def store_half(builder: Any, address: Any, value: Any) -> None:
    """Store a float32 as f16."""
    shorts = to_half(builder, Lanes.broadcast(builder, value))
    short = builder.extract_element(shorts, FIRST)
    builder.store(short, pointer(builder, address, I16), align=2)


@emitted(types.void, types.int64, types.int64)
def store_byte(builder: Any, address: Any, value: Any) -> None:
    """Store the lowest byte of an int64."""
    builder.store(builder.trunc(value, I8), pointer(builder, address, I8), align=1)
