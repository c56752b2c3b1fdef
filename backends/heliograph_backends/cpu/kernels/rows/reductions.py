"""Kernels along the last axis: normalisation, soft_max, reductions.

Sums are computed in float64 (soft_max: see there), in 32 partial sums (element i goes to sum i mod
32) that a fixed tree adds up, so their bits depend only on the row. Passes over a row, which stays
in cache between them:

    layer_norm   sum; sum of squared deviations; ((x - mean) * rstd in float64) rounded, then
                 * weight, then + bias
    rms_norm     sum of squares; (x * rrms in float64) rounded, then * weight
    l2_norm      sum of squares; x / max(sqrt(sum), eps) in float64, rounded
    soft_max     see soft_max.py
    sum, mean    one pass; the float64 result is rounded

A NaN in a row makes its soft_max and max NaN. The soft_max of a row that is -inf everywhere is also
NaN, as in exp(x - max) / sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from heliograph_backends.cpu.kernels.elementwise.interpreter import KINDS
from heliograph_backends.cpu.kernels.program.words import (
    BIAS,
    INDEX_AT,
    MASKED_AS,
    OUTER_DIMENSIONS,
    OUTER_STRIDES,
    PACK_AT,
    PARAMETER,
    ROUNDING,
    ROW_SLOPES,
    ROW_SLOPES_AT,
    ROW_STRIDE,
    ROWS_AS,
    SLOPES_OF,
    SLOT,
    SOURCE,
    STAGED_AT,
    STREAMS,
    TARGET,
    WEIGHT,
    WIDENING,
    Kind,
)
from heliograph_backends.cpu.kernels.rows.row import (
    PARTS,
    Row,
    each_vector,
    fetch_ahead,
    finish,
    load,
    total_of,
    tree,
)
from heliograph_backends.cpu.kernels.rows.soft_max import NEGATIVE_INFINITY, finish_staged, soft_max
from heliograph_backends.cpu.kernels.vector.atomics import float_of_bits, word
from heliograph_backends.cpu.kernels.vector.lanes import (
    F32,
    F32_VECTOR,
    F64,
    F64_VECTOR,
    I64,
    Entry,
    Lanes,
    emitted,
    integer,
    intrinsic_function,
    jit,
    local,
    pointer,
    splat,
    subroutine,
)
from heliograph_backends.cpu.kernels.vector.space import convert_rows, locate, operand_address

SOFT_MAX, ONE = int(Kind.SOFT_MAX), np.float32(1)
#: From here on, a row becomes one element.
FIRST_REDUCTION = int(Kind.SUM)


def _square(builder: Any) -> Callable[[Any], Any]:
    return lambda wide: builder.fmul(wide, wide)


def _sqrt(builder: Any, value: Any) -> Any:
    return builder.call(intrinsic_function(builder, "llvm.sqrt.f64", F64, F64), [value])


def _scale_row(builder: Any, row: Row, center: Any, factor: Any) -> None:
    """Write ((x - center) * factor) rounded, times the weight and plus the bias if given."""
    center, factor = splat(builder, center, F64_VECTOR), splat(builder, factor, F64_VECTOR)
    zero = integer(0)
    for with_weight in (True, False):
        for with_bias in (True, False):
            here = builder.and_(
                builder.icmp_signed("!=" if with_weight else "==", row.weight, zero),
                builder.icmp_signed("!=" if with_bias else "==", row.bias, zero),
            )

            def act(
                index: Any,
                mask: Any,
                part: int,
                weighted: bool = with_weight,
                biased: bool = with_bias,
            ) -> None:
                wide = load(builder, row.source, index, mask).widen()
                fetch_ahead(builder, row, index)
                lanes = Lanes.narrow(builder, builder.fmul(builder.fsub(wide, center), factor))
                if weighted:
                    lanes = lanes * load(builder, row.weight, index, mask)
                if biased:
                    lanes = lanes + load(builder, row.bias, index, mask)
                finish(builder, lanes, row, index, mask)

            with builder.if_then(here):
                each_vector(builder, row.count, act)


def _layer_norm(builder: Any, row: Row) -> None:
    size = builder.sitofp(row.count, F64)
    mean = builder.fdiv(total_of(builder, row, lambda wide: wide), size)
    center = splat(builder, mean, F64_VECTOR)

    def deviation(wide: Any) -> Any:
        difference = builder.fsub(wide, center)
        return builder.fmul(difference, difference)

    variance = builder.fdiv(total_of(builder, row, deviation), size)
    root = _sqrt(builder, builder.fadd(variance, builder.fpext(row.parameter, F64)))
    _scale_row(builder, row, mean, builder.fdiv(ir.Constant(F64, 1.0), root))


def _rms_norm(builder: Any, row: Row) -> None:
    total = total_of(builder, row, _square(builder))
    mean = builder.fdiv(total, builder.sitofp(row.count, F64))
    root = _sqrt(builder, builder.fadd(mean, builder.fpext(row.parameter, F64)))
    _scale_row(builder, row, ir.Constant(F64, 0.0), builder.fdiv(ir.Constant(F64, 1.0), root))


def _l2_norm(builder: Any, row: Row) -> None:
    norm = _sqrt(builder, total_of(builder, row, _square(builder)))
    smallest = builder.fpext(row.parameter, F64)
    norm = builder.select(builder.fcmp_ordered("<", norm, smallest), smallest, norm)
    _scale_row(builder, row, ir.Constant(F64, 0.0), builder.fdiv(ir.Constant(F64, 1.0), norm))


class _Maximum:
    """32 partial maxima; NaN after a NaN."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.cells = [local(builder, F32_VECTOR) for _ in range(PARTS)]
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

        return tree(builder, combine(*(builder.load(cell) for cell in self.cells)), combine)


def _put(builder: Any, row: Row, value: Any) -> None:
    builder.store(value, pointer(builder, row.target, F32))


def _sum(builder: Any, row: Row) -> None:
    total = total_of(builder, row, lambda wide: wide)
    _put(builder, row, builder.fptrunc(total, F32))


def _mean(builder: Any, row: Row) -> None:
    total = total_of(builder, row, lambda wide: wide)
    _put(builder, row, builder.fptrunc(builder.fdiv(total, builder.sitofp(row.count, F64)), F32))


def _max(builder: Any, row: Row) -> None:
    maximum = _Maximum(builder)
    each_vector(
        builder,
        row.count,
        lambda index, mask, part: maximum.add(load(builder, row.source, index, mask), mask, part),
    )
    _put(builder, row, maximum.total())


BODIES: dict[Kind, Callable[..., None]] = {
    Kind.LAYER_NORM: _layer_norm,
    Kind.RMS_NORM: _rms_norm,
    Kind.SOFT_MAX: soft_max,
    Kind.L2_NORM: _l2_norm,
    Kind.SUM: _sum,
    Kind.MEAN: _mean,
    Kind.MAX: _max,
}


def _subroutine(builder: Any, kind: Kind) -> Any:
    def body(inner: Any, *arguments: Any) -> None:
        BODIES[kind](inner, Row(*arguments))

    return subroutine(builder, f"row_{kind.name.lower()}", (*(I64,) * 5, F32, F32, *(I64,) * 4), body)


@emitted(types.void, *[types.int64] * 6, types.float32, types.float32, *[types.int64] * 4)
def apply_row(
    builder: Any,
    kind: Any,
    target: Any,
    source: Any,
    weight: Any,
    bias: Any,
    count: Any,
    parameter: Any,
    slope: Any,
    staging: Any,
    ahead: Any,
    before_target: Any,
    before: Any,
) -> None:
    """Run a row kernel over one row of float32; the arguments are those of `Row`."""
    done = builder.append_basic_block("row.done")
    switch = builder.switch(kind, done)
    for each in BODIES:
        with builder.goto_block(builder.append_basic_block(each.name.lower())):
            switch.add_case(integer(each), builder.block)
            row = [target, source, weight, bias, count, parameter, slope, staging, ahead]
            builder.call(_subroutine(builder, each), [*row, before_target, before])
            builder.branch(done)
    builder.position_at_end(done)


@emitted(types.void, *[types.int64] * 3)
def finish_soft_max(builder: Any, target: Any, staging: Any, count: Any) -> None:
    """Write the results of a staged row of a soft_max."""
    function = subroutine(builder, "finish_soft_max", (I64,) * 3, finish_staged)
    builder.call(function, [target, staging, count])


@jit
def first_row(operand: int, slots: int, scratch: int, row: int) -> int:
    """Return the address of an operand's row; 0 for an absent operand, whose row stride is also
    0."""
    if word(operand, SLOT) < 0:
        return 0
    address: int = operand_address(operand, slots, scratch, row, 0)
    return address


@jit
def slope_of(step: int, scratch: int, row: int) -> Any:
    """Return the slope of the head of a row of a soft_max."""
    if word(step, ROW_SLOPES) == 0:
        return ONE
    place = step + 8 * ROW_SLOPES_AT + row * word(step + 8 * SLOPES_OF, ROW_STRIDE)
    for dimension in range(OUTER_DIMENSIONS):
        index = word(scratch + INDEX_AT, dimension)
        place += index * word(step + 8 * SLOPES_OF, OUTER_STRIDES + dimension)
    return float_of_bits(word(place, 0))


@jit
def apply_narrow_row(
    kind: int,
    form: int,
    target: int,
    source: int,
    mask: int,
    bias: int,
    columns: int,
    parameter: Any,
    slope: Any,
    scratch: int,
) -> None:
    """Run a row kernel over one row of f16 or bf16, as float32 in the packing area."""
    staged = scratch + PACK_AT
    convert_rows(scratch, form >> WIDENING & KINDS, staged, source, 0, 2, 1, columns)
    apply_row(kind, staged, staged, mask, bias, columns, parameter, slope, 0, staged, 0, 0)
    written = 1 if kind >= FIRST_REDUCTION else columns
    convert_rows(scratch, form >> ROUNDING & KINDS, staged, target, 0, 2, 1, written)


@jit
def stage_bytes(columns: int) -> int:
    """Return the bytes of a staged row and its factor, as whole cache lines; see `encode_rows`."""
    return (4 * columns + 127) & -64


@Entry
def rows_block(kind: int, step: int, block: int, slots: int, scratch: int) -> None:
    """Run one block of a row step."""
    row, rows, _, columns = locate(step, block, scratch)
    parameter = float_of_bits(word(step, PARAMETER))
    target = first_row(step + 8 * TARGET, slots, scratch, row)
    source = first_row(step + 8 * SOURCE, slots, scratch, row)
    weight = first_row(step + 8 * WEIGHT, slots, scratch, row)
    bias = first_row(step + 8 * BIAS, slots, scratch, row)
    streams, source_row = word(step, STREAMS), word(step + 8 * SOURCE, ROW_STRIDE)
    masked, slope = word(step, MASKED_AS) if kind == SOFT_MAX else 0, ONE
    form = word(step, ROWS_AS)
    before_target, before = 0, 0
    for number in range(row, row + rows):
        # A row that does not start at a cache line is written through the caches. Others take turns
        # in two places.
        place = scratch + PACK_AT + number % 2 * stage_bytes(columns)
        staging = place if streams and target & 63 == 0 else 0
        ahead, mask = source + source_row, weight
        if kind == SOFT_MAX:
            slope = slope_of(step, scratch, number)
        if masked:
            mask = scratch + STAGED_AT
            convert_rows(scratch, masked >> WIDENING & KINDS, mask, weight, 0, 2, 1, columns)
        if form:
            apply_narrow_row(kind, form, target, source, mask, bias, columns, parameter, slope, scratch)
        else:
            apply_row(
                kind,
                target,
                source,
                mask,
                bias,
                columns,
                parameter,
                slope,
                staging,
                ahead,
                before_target,
                before,
            )
        if kind == SOFT_MAX:
            before_target, before = target, staging
        target += word(step + 8 * TARGET, ROW_STRIDE)
        source = ahead
        weight += word(step + 8 * WEIGHT, ROW_STRIDE)
        bias += word(step + 8 * BIAS, ROW_STRIDE)
    if before:
        finish_soft_max(before_target, before, columns)
