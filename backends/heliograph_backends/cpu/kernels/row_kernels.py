"""Kernels along the last axis: normalisation, soft_max, reductions.

Sums are taken in float64, in 32 partial sums (element i goes to sum i mod 32) which one fixed tree
adds up: their bits depend on the row alone. Passes over a row, which stays in cache between them:

    layer_norm   sum; sum of squared deviations; ((x - mean) * rstd in float64) rounded, then
                 * weight, then + bias
    rms_norm     sum of squares; (x * rrms in float64) rounded, then * weight
    l2_norm      sum of squares; x / max(sqrt(sum), eps) in float64, rounded
    soft_max     t = x * scale + mask and its maximum; e = exp(t - maximum) and their sum; e / sum
    sum, mean    one; the float64 result is rounded

A NaN in a row makes its soft_max and max NaN; so does a row that is -inf everywhere, as exp(x -
max) / sum has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from . import vector_math
from .atomics import float_of_bits, word
from .lanes import (
    F32,
    F64,
    F64_VECTOR,
    I32,
    I64,
    LANES,
    Lanes,
    element,
    emitted,
    integer,
    intrinsic_function,
    jit,
    loop,
    pointer,
    splat,
    subroutine,
    tail_mask,
)
from .layout import BIAS, PARAMETER, ROW_STRIDE, SLOT, SOURCE, TARGET, WEIGHT, Kind
from .space import locate, operand_address

PARTS = 2
NEGATIVE_INFINITY = float("-inf")


def _tree(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine lane i with lane i + 8, then i + 4, i + 2, i + 1, and return lane 0."""
    for width in (8, 4, 2, 1):
        order = [lane + width if lane < width else 0 for lane in range(LANES)]
        mask = ir.Constant(ir.VectorType(I32, LANES), order)
        vector = combine(vector, builder.shuffle_vector(vector, vector, mask))
    return builder.extract_element(vector, ir.Constant(I32, 0))


def _each(builder: Any, count: Any, act: Callable[[Any, Any, int], None]) -> None:
    """Call `act(index, mask, part)` for each group of sixteen elements; `mask` is None where all
    are there.
    """
    whole = builder.and_(count, integer(-LANES * PARTS))
    with loop(builder, integer(0), whole, LANES * PARTS) as index:
        for part in range(PARTS):
            act(builder.add(index, integer(LANES * part)), None, part)
    middle = builder.and_(count, integer(-LANES))
    with loop(builder, whole, middle, LANES) as index:
        act(index, None, 0)
    with builder.if_then(builder.icmp_signed("<", middle, count)):
        # With the loop above the rest is the second half of 32 elements or the first.
        mask = tail_mask(builder, builder.sub(count, middle))
        odd = builder.icmp_signed(">", middle, whole)
        with builder.if_else(odd) as (second, first):
            with second:
                act(middle, mask, 1)
            with first:
                act(middle, mask, 0)


def _load(builder: Any, base: Any, index: Any, mask: Any, other: float = 0.0) -> Lanes:
    place = element(builder, base, index)
    return Lanes.load(builder, place) if mask is None else Lanes.load_masked(builder, place, mask, other)


def _store(builder: Any, lanes: Lanes, base: Any, index: Any, mask: Any) -> None:
    place = element(builder, base, index)
    if mask is None:
        lanes.store(place)
    else:
        lanes.store_masked(place, mask)


class _Sum:
    """32 partial sums in float64."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.cells = [builder.alloca(F64_VECTOR) for _ in range(PARTS)]
        for cell in self.cells:
            builder.store(ir.Constant(F64_VECTOR, [0.0] * LANES), cell)

    def add(self, wide: Any, mask: Any, part: int) -> None:
        builder = self.builder
        if mask is not None:
            wide = builder.select(mask, wide, ir.Constant(F64_VECTOR, [0.0] * LANES))
        builder.store(builder.fadd(builder.load(self.cells[part]), wide), self.cells[part])

    def total(self) -> Any:
        builder = self.builder
        both = builder.fadd(*(builder.load(cell) for cell in self.cells))
        return _tree(builder, both, builder.fadd)


def _total(builder: Any, source: Any, count: Any, term: Callable[[Any], Any]) -> Any:
    """Return the float64 sum of `term(x)` over a row."""
    total = _Sum(builder)

    def act(index: Any, mask: Any, part: int) -> None:
        total.add(term(_load(builder, source, index, mask).widen()), mask, part)

    _each(builder, count, act)
    return total.total()


def _square(builder: Any) -> Callable[[Any], Any]:
    return lambda wide: builder.fmul(wide, wide)


def _sqrt(builder: Any, value: Any) -> Any:
    return builder.call(intrinsic_function(builder, "llvm.sqrt.f64", F64, F64), [value])


def _scale_row(builder: Any, arguments: Any, center: Any, factor: Any) -> None:
    """Write ((x - center) * factor) rounded, times weight and plus bias where there are any."""
    target, source, weight, bias, count, _ = arguments
    center, factor = splat(builder, center, F64_VECTOR), splat(builder, factor, F64_VECTOR)
    zero = integer(0)
    for with_weight in (True, False):
        for with_bias in (True, False):
            here = builder.and_(
                builder.icmp_signed("!=" if with_weight else "==", weight, zero),
                builder.icmp_signed("!=" if with_bias else "==", bias, zero),
            )

            def act(
                index: Any,
                mask: Any,
                part: int,
                weighted: bool = with_weight,
                biased: bool = with_bias,
            ) -> None:
                wide = _load(builder, source, index, mask).widen()
                lanes = Lanes.narrow(builder, builder.fmul(builder.fsub(wide, center), factor))
                if weighted:
                    lanes = lanes * _load(builder, weight, index, mask)
                if biased:
                    lanes = lanes + _load(builder, bias, index, mask)
                _store(builder, lanes, target, index, mask)

            with builder.if_then(here):
                _each(builder, count, act)


def _layer_norm(builder: Any, *arguments: Any) -> None:
    _, source, _, _, count, epsilon = arguments
    size = builder.sitofp(count, F64)
    mean = builder.fdiv(_total(builder, source, count, lambda wide: wide), size)
    center = splat(builder, mean, F64_VECTOR)

    def deviation(wide: Any) -> Any:
        difference = builder.fsub(wide, center)
        return builder.fmul(difference, difference)

    variance = builder.fdiv(_total(builder, source, count, deviation), size)
    root = _sqrt(builder, builder.fadd(variance, builder.fpext(epsilon, F64)))
    _scale_row(builder, arguments, mean, builder.fdiv(ir.Constant(F64, 1.0), root))


def _rms_norm(builder: Any, *arguments: Any) -> None:
    _, source, _, _, count, epsilon = arguments
    total = _total(builder, source, count, _square(builder))
    mean = builder.fdiv(total, builder.sitofp(count, F64))
    root = _sqrt(builder, builder.fadd(mean, builder.fpext(epsilon, F64)))
    _scale_row(builder, arguments, ir.Constant(F64, 0.0), builder.fdiv(ir.Constant(F64, 1.0), root))


def _l2_norm(builder: Any, *arguments: Any) -> None:
    _, source, _, _, count, epsilon = arguments
    norm = _sqrt(builder, _total(builder, source, count, _square(builder)))
    smallest = builder.fpext(epsilon, F64)
    norm = builder.select(builder.fcmp_ordered("<", norm, smallest), smallest, norm)
    _scale_row(builder, arguments, ir.Constant(F64, 0.0), builder.fdiv(ir.Constant(F64, 1.0), norm))


class _Maximum:
    """32 partial maxima, NaN where a NaN was seen."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.cells = [builder.alloca(ir.VectorType(F32, LANES)) for _ in range(PARTS)]
        for cell in self.cells:
            builder.store(Lanes.constant(builder, NEGATIVE_INFINITY).value, cell)

    def add(self, lanes: Lanes, mask: Any, part: int) -> None:
        builder = self.builder
        if mask is not None:
            rest = Lanes.constant(builder, NEGATIVE_INFINITY).value
            lanes = Lanes(builder, builder.select(mask, lanes.value, rest))
        old = Lanes(builder, builder.load(self.cells[part]))
        builder.store(old.maximum(lanes).value, self.cells[part])

    def total(self) -> Any:
        builder = self.builder

        def combine(first: Any, second: Any) -> Any:
            return Lanes(builder, first).maximum(Lanes(builder, second)).value

        return _tree(builder, combine(*(builder.load(cell) for cell in self.cells)), combine)


def _soft_max(builder: Any, target: Any, source: Any, mask_row: Any, _: Any, count: Any, scale: Any) -> None:
    maximum, total = _Maximum(builder), _Sum(builder)
    factor = Lanes.broadcast(builder, scale)
    for masked in (True, False):
        here = builder.icmp_signed("!=" if masked else "==", mask_row, integer(0))

        def scores(index: Any, mask: Any, part: int, masked: bool = masked) -> None:
            lanes = _load(builder, source, index, mask) * factor
            if masked:
                lanes = lanes + _load(builder, mask_row, index, mask)
            maximum.add(lanes, mask, part)
            _store(builder, lanes, target, index, mask)

        with builder.if_then(here):
            _each(builder, count, scores)
    largest = Lanes.broadcast(builder, maximum.total())

    def exponentials(index: Any, mask: Any, part: int) -> None:
        lanes = vector_math.exp(_load(builder, target, index, mask) - largest)
        total.add(lanes.widen(), mask, part)
        _store(builder, lanes, target, index, mask)

    _each(builder, count, exponentials)
    divisor = Lanes.broadcast(builder, builder.fptrunc(total.total(), F32))

    def quotients(index: Any, mask: Any, part: int) -> None:
        _store(builder, _load(builder, target, index, mask) / divisor, target, index, mask)

    _each(builder, count, quotients)


def _put(builder: Any, target: Any, value: Any) -> None:
    builder.store(value, pointer(builder, target, F32))


def _sum(builder: Any, target: Any, source: Any, weight: Any, bias: Any, count: Any, parameter: Any) -> None:
    total = _total(builder, source, count, lambda wide: wide)
    _put(builder, target, builder.fptrunc(total, F32))


def _mean(builder: Any, target: Any, source: Any, weight: Any, bias: Any, count: Any, parameter: Any) -> None:
    total = _total(builder, source, count, lambda wide: wide)
    _put(builder, target, builder.fptrunc(builder.fdiv(total, builder.sitofp(count, F64)), F32))


def _max(builder: Any, target: Any, source: Any, weight: Any, bias: Any, count: Any, parameter: Any) -> None:
    maximum = _Maximum(builder)
    _each(
        builder,
        count,
        lambda index, mask, part: maximum.add(_load(builder, source, index, mask), mask, part),
    )
    _put(builder, target, maximum.total())


BODIES: dict[Kind, Callable[..., None]] = {
    Kind.LAYER_NORM: _layer_norm,
    Kind.RMS_NORM: _rms_norm,
    Kind.SOFT_MAX: _soft_max,
    Kind.L2_NORM: _l2_norm,
    Kind.SUM: _sum,
    Kind.MEAN: _mean,
    Kind.MAX: _max,
}


@emitted(types.void, *[types.int64] * 6, types.float32)
def apply_row(
    builder: Any,
    kind: Any,
    target: Any,
    source: Any,
    weight: Any,
    bias: Any,
    count: Any,
    parameter: Any,
) -> None:
    """Run a row kernel over one row of `count` float32; addresses of what is absent are 0."""
    done = builder.append_basic_block("row.done")
    switch = builder.switch(kind, done)
    for each, body in BODIES.items():
        with builder.goto_block(builder.append_basic_block(each.name.lower())):
            function = subroutine(builder, f"row_{each.name.lower()}", (I64,) * 5 + (F32,), body)
            switch.add_case(integer(each), builder.block)
            builder.call(function, [target, source, weight, bias, count, parameter])
            builder.branch(done)
    builder.position_at_end(done)


@jit
def first_row(operand: int, slots: int, scratch: int, row: int) -> int:
    """Return the address of an operand's row, 0 for an operand that is absent (its row stride is 0
    too).
    """
    if word(operand, SLOT) < 0:
        return 0
    address: int = operand_address(operand, slots, scratch, row, 0)
    return address


@jit
def rows_block(kind: int, step: int, block: int, slots: int, scratch: int) -> None:
    """Run one block of a row step."""
    row, rows, _, columns = locate(step, block, scratch)
    parameter = float_of_bits(word(step, PARAMETER))
    target = first_row(step + 8 * TARGET, slots, scratch, row)
    source = first_row(step + 8 * SOURCE, slots, scratch, row)
    weight = first_row(step + 8 * WEIGHT, slots, scratch, row)
    bias = first_row(step + 8 * BIAS, slots, scratch, row)
    for _ in range(rows):
        apply_row(kind, target, source, weight, bias, columns, parameter)
        target += word(step + 8 * TARGET, ROW_STRIDE)
        source += word(step + 8 * SOURCE, ROW_STRIDE)
        weight += word(step + 8 * WEIGHT, ROW_STRIDE)
        bias += word(step + 8 * BIAS, ROW_STRIDE)
