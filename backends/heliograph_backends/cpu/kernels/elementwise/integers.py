"""The instructions on truth values and integers, of sixteen lanes of 32 bits.

Lanes keep the bits of integers. A truth value is 1 or 0. Integers of fewer bits are extended to 32
before, and cut off after, so sums, products and shifts have the bits of the narrow type. Bytes and
shorts that lie side by side may stay as they are, several in a lane.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from heliograph_backends.cpu.kernels.program.words import Operation as Op
from heliograph_backends.cpu.kernels.vector.lanes import (
    F64_VECTOR,
    I32_VECTOR,
    I64,
    LANES,
    Lanes,
    intrinsic_function,
)

#: The result of two sources.
Formula = Callable[[Lanes, Lanes], Lanes]
WIDE = ir.VectorType(I64, LANES)
BYTES, SHORTS = ir.VectorType(ir.IntType(8), 4 * LANES), ir.VectorType(ir.IntType(16), 2 * LANES)
INFINITY = float("inf")


def _number(value: int, kind: ir.VectorType = I32_VECTOR) -> ir.Constant:
    return ir.Constant(kind, [value] * LANES)


def select(condition: Lanes, yes: Lanes, no: Lanes) -> Lanes:
    """Return `yes` where the condition, an integer, is not 0, else `no`; all bits are kept."""
    builder = condition.builder
    mask = builder.icmp_signed("!=", condition.bits(), _number(0))
    return Lanes.from_bits(builder, builder.select(mask, yes.bits(), no.bits()))


def _truth(x: Lanes, mask: ir.Value) -> Lanes:
    return Lanes.from_bits(x.builder, x.builder.zext(mask, I32_VECTOR))


def _compared(condition: str) -> Formula:
    return lambda x, y: _truth(x, x.builder.fcmp_ordered(condition, x.value, y.value))


def _is_nan(x: Lanes, y: Lanes) -> Lanes:
    return _truth(x, x.builder.fcmp_unordered("uno", x.value, x.value))


def _size_is(condition: str) -> Formula:
    return lambda x, y: _compared(condition)(x.abs(), x.lift(INFINITY))


def _is_zero(x: Lanes, y: Lanes) -> Lanes:
    return _truth(x, x.builder.icmp_signed("==", x.bits(), _number(0)))


def _signed(condition: str) -> Formula:
    return lambda x, y: _truth(x, x.builder.icmp_signed(condition, x.bits(), y.bits()))


def _uint_less(x: Lanes, y: Lanes) -> Lanes:
    return _truth(x, x.builder.icmp_unsigned("<", x.bits(), y.bits()))


def _of_bits(name: str) -> Formula:
    """Return the formula of a method of the builder."""
    return lambda x, y: Lanes.from_bits(x.builder, getattr(x.builder, name)(x.bits(), y.bits()))


def _of_intrinsic(name: str) -> Formula:
    def formula(x: Lanes, y: Lanes) -> Lanes:
        kinds = (I32_VECTOR, I32_VECTOR)
        function = intrinsic_function(x.builder, f"llvm.{name}.v16i32", I32_VECTOR, *kinds)
        return Lanes.from_bits(x.builder, x.builder.call(function, [x.bits(), y.bits()]))

    return formula


def _shifted(name: str, beyond: Callable[[Lanes], ir.Value]) -> Formula:
    """Return a shift, whose result for counts outside of 0 to 31 is `beyond`."""

    def formula(x: Lanes, y: Lanes) -> Lanes:
        builder, count = x.builder, y.bits()
        inside = builder.icmp_unsigned("<", count, _number(32))
        moved = getattr(builder, name)(x.bits(), builder.and_(count, _number(31)))
        return Lanes.from_bits(builder, builder.select(inside, moved, beyond(x)))

    return formula


def _absolute(x: Lanes, y: Lanes) -> Lanes:
    builder, bits = x.builder, x.bits()
    below = builder.icmp_signed("<", bits, _number(0))
    return Lanes.from_bits(builder, builder.select(below, builder.sub(_number(0), bits), bits))


def _sign(x: Lanes, y: Lanes) -> Lanes:
    builder, bits = x.builder, x.bits()
    above = builder.zext(builder.icmp_signed(">", bits, _number(0)), I32_VECTOR)
    return Lanes.from_bits(builder, builder.or_(above, builder.ashr(bits, _number(31))))


def _quotient(x: Lanes, y: Lanes, convert: str) -> tuple[ir.Value, ir.Value]:
    """Return floor(x / y), and the lanes where y is not 0.

    The quotient of numbers of 32 bits, rounded to float64, is on the side of each whole number on
    which the quotient itself is.
    """
    builder = x.builder
    not_zero: ir.Value = builder.icmp_signed("!=", y.bits(), _number(0))
    divisor = builder.select(not_zero, y.bits(), _number(1))
    above, below = (getattr(builder, convert)(bits, F64_VECTOR) for bits in (x.bits(), divisor))
    floor = intrinsic_function(builder, "llvm.floor.v16f64", F64_VECTOR, F64_VECTOR)
    whole = builder.call(floor, [builder.fdiv(above, below)])
    return builder.trunc(builder.fptosi(whole, WIDE), I32_VECTOR), not_zero


def _divided(convert: str) -> Formula:
    def formula(x: Lanes, y: Lanes) -> Lanes:
        quotient, not_zero = _quotient(x, y, convert)
        return Lanes.from_bits(x.builder, x.builder.select(not_zero, quotient, _number(0)))

    return formula


def _rest(convert: str) -> Formula:
    def formula(x: Lanes, y: Lanes) -> Lanes:
        builder = x.builder
        quotient, not_zero = _quotient(x, y, convert)
        rest = builder.sub(x.bits(), builder.mul(quotient, y.bits()))
        return Lanes.from_bits(builder, builder.select(not_zero, rest, _number(0)))

    return formula


def _floats(convert: str) -> Formula:
    return lambda x, y: Lanes(x.builder, getattr(x.builder, convert)(x.bits(), x.value.type))


def _whole(x: Lanes, bits: int) -> tuple[ir.Value, ir.Value]:
    """Return the lanes rounded towards 0 to integers of so many bits, and those within them."""
    builder, kind = x.builder, ir.VectorType(ir.IntType(bits), LANES)
    limit = 2.0 ** (bits - 1)
    inside: ir.Value = builder.and_(
        builder.fcmp_ordered(">=", x.value, x.lift(-limit).value),
        builder.fcmp_ordered("<", x.value, x.lift(limit).value),
    )
    # An instruction of numbers outside has no defined result.
    return builder.fptosi(builder.select(inside, x.value, x.lift(0.0).value), kind), inside


def _int_of_float(x: Lanes, y: Lanes) -> Lanes:
    whole, inside = _whole(x, 32)
    return Lanes.from_bits(x.builder, x.builder.select(inside, whole, _number(-(2**31))))


def _uint_of_float(x: Lanes, y: Lanes) -> Lanes:
    whole, _ = _whole(x, 64)
    return Lanes.from_bits(x.builder, x.builder.trunc(whole, I32_VECTOR))


def _invert(x: Lanes, y: Lanes) -> Lanes:
    return Lanes.from_bits(x.builder, x.builder.not_(x.bits()))


# Several integers of fewer bits in a lane, each by itself.


def _parts(x: Lanes, kind: ir.VectorType) -> ir.Value:
    return x.builder.bitcast(x.bits(), kind)


def _of_parts(builder: ir.IRBuilder, found: ir.Value) -> Lanes:
    return Lanes.from_bits(builder, builder.bitcast(found, I32_VECTOR))


def _bytes_compared(method: str, condition: str) -> Formula:
    def formula(x: Lanes, y: Lanes) -> Lanes:
        mask = getattr(x.builder, method)(condition, _parts(x, BYTES), _parts(y, BYTES))
        return _of_parts(x.builder, x.builder.zext(mask, BYTES))

    return formula


def _of_method_on(kind: ir.VectorType, name: str) -> Formula:
    return lambda x, y: _of_parts(x.builder, getattr(x.builder, name)(_parts(x, kind), _parts(y, kind)))


def _of_intrinsic_on(kind: ir.VectorType, name: str) -> Formula:
    def formula(x: Lanes, y: Lanes) -> Lanes:
        full = f"llvm.{name}.v{kind.count}i{kind.element.width}"
        function = intrinsic_function(x.builder, full, kind, kind, kind)
        return _of_parts(x.builder, x.builder.call(function, [_parts(x, kind), _parts(y, kind)]))

    return formula


_SMALLER_BYTES, _ONE_IN_BYTES = _of_intrinsic_on(BYTES, "umin"), ir.Constant(I32_VECTOR, [0x01010101] * LANES)


def _truths(x: Lanes) -> Lanes:
    """Return 1 for each byte but 0."""
    return _SMALLER_BYTES(x, Lanes.from_bits(x.builder, _ONE_IN_BYTES))


def _bytes_zero(x: Lanes, y: Lanes) -> Lanes:
    return _bytes_compared("icmp_signed", "==")(x, Lanes.from_bits(x.builder, _number(0)))


def _of_truths(formula: Formula) -> Formula:
    return lambda x, y: formula(_truths(x), _truths(y))


FORMULAS: dict[Op, Formula] = {
    Op.EQUAL: _compared("=="),
    Op.LESS: _compared("<"),
    Op.LESS_EQUAL: _compared("<="),
    Op.IS_NAN: _is_nan,
    Op.IS_INF: _size_is("=="),
    Op.IS_FINITE: _size_is("<"),
    Op.IS_ZERO: _is_zero,
    Op.SAME: _signed("=="),
    Op.INT_LESS: _signed("<"),
    Op.UINT_LESS: _uint_less,
    Op.AND: _of_bits("and_"),
    Op.OR: _of_bits("or_"),
    Op.XOR: _of_bits("xor"),
    Op.INVERT: _invert,
    Op.SHIFT_LEFT: _shifted("shl", lambda x: _number(0)),
    Op.INT_SHIFT_RIGHT: _shifted("ashr", lambda x: x.builder.ashr(x.bits(), _number(31))),
    Op.UINT_SHIFT_RIGHT: _shifted("lshr", lambda x: _number(0)),
    Op.INT_ADD: _of_bits("add"),
    Op.INT_SUB: _of_bits("sub"),
    Op.INT_MUL: _of_bits("mul"),
    Op.INT_MAXIMUM: _of_intrinsic("smax"),
    Op.INT_MINIMUM: _of_intrinsic("smin"),
    Op.UINT_MAXIMUM: _of_intrinsic("umax"),
    Op.UINT_MINIMUM: _of_intrinsic("umin"),
    Op.INT_ABS: _absolute,
    Op.INT_SGN: _sign,
    Op.INT_DIVIDE: _divided("sitofp"),
    Op.UINT_DIVIDE: _divided("uitofp"),
    Op.INT_REMAINDER: _rest("sitofp"),
    Op.UINT_REMAINDER: _rest("uitofp"),
    Op.FLOAT_OF_INT: _floats("sitofp"),
    Op.FLOAT_OF_UINT: _floats("uitofp"),
    Op.INT_OF_FLOAT: _int_of_float,
    Op.UINT_OF_FLOAT: _uint_of_float,
    Op.BYTES_BOTH: lambda x, y: _truths(_SMALLER_BYTES(x, y)),
    Op.BYTES_EITHER: lambda x, y: _truths(_of_bits("or_")(x, y)),
    Op.BYTES_DIFFER: _of_truths(_of_bits("xor")),
    Op.BYTES_AGREE: _of_truths(_bytes_compared("icmp_signed", "==")),
    Op.BYTES_ZERO: _bytes_zero,
    Op.BYTES_SAME: _bytes_compared("icmp_signed", "=="),
    Op.INT_BYTES_LESS: _bytes_compared("icmp_signed", "<"),
    Op.UINT_BYTES_LESS: _bytes_compared("icmp_unsigned", "<"),
    Op.BYTES_ADD: _of_method_on(BYTES, "add"),
    Op.BYTES_SUB: _of_method_on(BYTES, "sub"),
    Op.INT_BYTES_MAXIMUM: _of_intrinsic_on(BYTES, "smax"),
    Op.INT_BYTES_MINIMUM: _of_intrinsic_on(BYTES, "smin"),
    Op.UINT_BYTES_MAXIMUM: _of_intrinsic_on(BYTES, "umax"),
    Op.UINT_BYTES_MINIMUM: _of_intrinsic_on(BYTES, "umin"),
    Op.SHORTS_ADD: _of_method_on(SHORTS, "add"),
    Op.SHORTS_SUB: _of_method_on(SHORTS, "sub"),
    Op.SHORTS_MUL: _of_method_on(SHORTS, "mul"),
    Op.INT_SHORTS_MAXIMUM: _of_intrinsic_on(SHORTS, "smax"),
    Op.INT_SHORTS_MINIMUM: _of_intrinsic_on(SHORTS, "smin"),
    Op.UINT_SHORTS_MAXIMUM: _of_intrinsic_on(SHORTS, "umax"),
    Op.UINT_SHORTS_MINIMUM: _of_intrinsic_on(SHORTS, "umin"),
}
