"""Conversion of stored weights to float32 lanes, one for each row; see `stored_words`.

Every conversion is exact or rounds as the definition does, so the lanes are bit for bit the
dequantized weights of the definition.

The four bytes of a word are four quanta of eight bits, eight of four, or two halves. A quantum is
converted to float32 in the way that takes the fewest instructions:

- `small_numbers` looks up to five bits up in a table, `looked_up` in any table;
- `power_and_quanta` puts a quantum into the digits of a power of two, which the next multiply-add
  subtracts;
- `top_byte` and a conversion give the signed quantum times 2**24, which the block's scale
  compensates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from heliograph_backends.cpu.kernels.matmul.stored_words import shuffled
from heliograph_backends.cpu.kernels.vector.lanes import (
    F32_VECTOR,
    I32,
    I32_VECTOR,
    LANES,
    Lanes,
    has_feature,
    intrinsic_function,
    splat,
)

I8, I16 = ir.IntType(8), ir.IntType(16)
BYTES = ir.VectorType(I8, 4 * LANES)
SHORTS = ir.VectorType(I16, LANES)
HALVES = ir.VectorType(ir.HalfType(), LANES)
#: True if there is an instruction that looks bytes up in a table of 128.
PERMUTES = has_feature("avx512vbmi")


def constant(value: int) -> ir.Constant:
    return ir.Constant(I32_VECTOR, [value] * LANES)


def everywhere(builder: Any, number: Any) -> Any:
    """Return lanes that all have the low 32 bits of an int64, as the number of bits of a shift."""
    if isinstance(number, ir.Constant):
        return constant(number.constant)
    lanes = splat(builder, builder.trunc(number, I32), I32_VECTOR)
    if not has_feature("avx512f"):
        return lanes
    # A shift of each lane by its own number is one step, a shift by a number that all share is two.
    # LLVM prefers the latter, so the code hides from it that the lanes are equal.
    hidden = ir.InlineAsm(ir.FunctionType(I32_VECTOR, [I32_VECTOR]), "", "=v,0")
    return builder.call(hidden, [lanes])


def number(builder: Any, integers: Any) -> Lanes:
    return Lanes(builder, builder.sitofp(integers, F32_VECTOR))


def shifted(builder: Any, words: Any, right: int) -> Any:
    """Return the lanes shifted right by `right` bits, or left if it is negative."""
    if right == 0:
        return words
    move = builder.lshr if right > 0 else builder.shl
    return move(words, constant(abs(right)))


def turned(builder: Any, low: Any, high: Any, right: Any) -> Any:
    """Return the lower halves of 64-bit lanes shifted right; with low and high the same, a
    rotation."""
    function = intrinsic_function(builder, "llvm.fshr.v16i32", I32_VECTOR, *[I32_VECTOR] * 3)
    return builder.call(function, [high, low, right])


def chosen(builder: Any, mask: int, yes: Any, no: Any) -> Any:
    """Return lanes with the bits of `mask` from `yes` and the others from `no`."""
    return builder.or_(builder.and_(yes, constant(mask)), builder.and_(no, constant(~mask & 0xFFFFFFFF)))


def top_byte(builder: Any, words: Any, byte: int) -> Any:
    """Return byte 0 to 3 of each lane as its top byte, above zeros."""
    zeros = ir.Constant(BYTES, [0] * (4 * LANES))
    none = 4 * LANES
    order = [place for lane in range(LANES) for place in (none, none, none, 4 * lane + byte)]
    moved = shuffled(builder, builder.bitcast(words, BYTES), zeros, order)
    return builder.bitcast(moved, I32_VECTOR)


def small_numbers(builder: Any, words: Any, bits: int, zero: int) -> Lanes:
    """Return the lowest bits of each lane, at most five, less `zero`; the bits above them are
    ignored."""
    if not has_feature("avx512f"):
        low = builder.and_(words, constant(2**bits - 1))
        return number(builder, builder.sub(low, constant(zero)) if zero else low)
    count = max(LANES, 2**bits)
    return looked_up(builder, words, [float(place % 2**bits - zero) for place in range(count)])


def looked_up(builder: Any, words: Any, numbers: Sequence[float]) -> Lanes:
    """Return the numbers, 16 or 32, at the places in the lowest bits of each lane; for AVX-512."""
    tables = [
        ir.Constant(F32_VECTOR, numbers[first : first + LANES]) for first in range(0, len(numbers), LANES)
    ]
    if len(tables) == 1:
        name, arguments = "permvar.sf.512", [tables[0], words]
    else:
        name, arguments = "vpermi2var.ps.512", [tables[0], words, tables[1]]
    kinds = [each.type for each in arguments]
    function = intrinsic_function(builder, f"llvm.x86.avx512.{name}", F32_VECTOR, *kinds)
    return Lanes(builder, builder.call(function, arguments))


def bytes_at(builder: Any, table: Sequence[int], low: Any, high: Any = None) -> Any:
    """Return the bytes of a table at places: bytes, and bytes of the bits above them. The table has
    128 bytes times a power of two. Where PERMUTES is true."""
    kinds = (BYTES, BYTES, BYTES)
    function = intrinsic_function(builder, "llvm.x86.avx512.vpermi2var.qi.512", BYTES, *kinds)
    places = builder.bitcast(low, BYTES)
    sides = [
        ir.Constant(BYTES, list(table[first : first + 4 * LANES]))
        for first in range(0, len(table), 4 * LANES)
    ]
    found = [
        builder.call(function, [one, places, other])
        for one, other in zip(sides[::2], sides[1::2], strict=True)
    ]
    zeros = ir.Constant(BYTES, [0] * (4 * LANES))
    bit = 7
    while len(found) > 1:
        source = places if bit < 8 else builder.bitcast(high, BYTES)
        own = builder.and_(source, ir.Constant(BYTES, [1 << bit % 8] * (4 * LANES)))
        is_set = builder.icmp_unsigned("!=", own, zeros)
        both = zip(found[::2], found[1::2], strict=True)
        found = [builder.select(is_set, upper, lower) for lower, upper in both]
        bit += 1
    return builder.bitcast(found[0], I32_VECTOR)


def power_and_quanta(builder: Any, words: Any, bits: int, place: int) -> Lanes:
    """Return 2**(23 - place) plus the `bits` bits of each lane from bit `place` on.

    The bits are digits of a float32 with that exponent, so place + bits <= 23.
    """
    quanta = builder.and_(words, constant((2**bits - 1) << place))
    return Lanes.from_bits(builder, builder.or_(quanta, constant((127 + 23 - place) << 23)))


def from_half(builder: Any, shorts: Any) -> Lanes:
    """Return the lanes of sixteen f16."""
    if builder.module.triple.startswith("x86_64") and not has_feature("f16c"):
        return half_by_hand(builder, shorts)
    return Lanes(builder, builder.fpext(builder.bitcast(shorts, HALVES), F32_VECTOR))


def half_by_hand(builder: Any, shorts: Any) -> Lanes:
    """Return the lanes of sixteen f16 without an instruction for it; LLVM would call a function
    that may be missing.

    An f16's exponent and digits in an f32's places are 2**-112 times its value, except for
    infinities and NaN.
    """
    bits = builder.zext(shorts, I32_VECTOR)
    size = builder.shl(builder.and_(bits, constant(0x7FFF)), constant(13))
    scaled = (Lanes.from_bits(builder, size) * 2.0**112).bits()
    special = builder.icmp_unsigned(">=", size, constant(0x7C00 << 13))
    found = builder.select(special, builder.or_(size, constant(0x7F800000)), scaled)
    sign = builder.shl(builder.and_(bits, constant(0x8000)), constant(16))
    return Lanes.from_bits(builder, builder.or_(found, sign))


def low_half(builder: Any, words: Any) -> Lanes:
    """Return the f16 in the low half of each lane."""
    return from_half(builder, builder.trunc(words, SHORTS))


def halves_of_words(builder: Any, words: Any) -> tuple[Lanes, Lanes]:
    """Return the f16 in the low and in the high half of each lane."""
    return low_half(builder, words), low_half(builder, shifted(builder, words, 16))


def from_bfloat(builder: Any, shorts: Any) -> Lanes:
    """Return the lanes of sixteen bf16."""
    return Lanes.from_bits(builder, builder.shl(builder.zext(shorts, I32_VECTOR), constant(16)))
