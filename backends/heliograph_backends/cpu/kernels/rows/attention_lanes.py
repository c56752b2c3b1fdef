"""The vector code of attention: scores to powers, and sums of values.

The order of operations of a number does not depend on other rows. A score is a product as in
`inner_loop`, times the scale (with a cap: cap * tanh(score * (scale / cap))), plus slope * mask. A
power is exp(score - largest), where largest is that of the keys up to the current block. Powers of
a block are added lane by lane in float32, the lanes in float64, and the blocks in float64. A sum of
values is one chain of fused multiply-adds over keys, scaled down when a block raises the largest
score.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from heliograph_backends.cpu.kernels.matmul.packing import PANEL_ROW_BYTES
from heliograph_backends.cpu.kernels.matmul.stored_lanes import SHORTS, from_bfloat, from_half
from heliograph_backends.cpu.kernels.program.elements import FLOAT32
from heliograph_backends.cpu.kernels.program.stored_types import FEW_ROWS, Stored
from heliograph_backends.cpu.kernels.program.words import CACHE_LINE_BYTES, LARGEST_SCORE, RESCALED, TOTAL
from heliograph_backends.cpu.kernels.rows.row import tree
from heliograph_backends.cpu.kernels.rows.soft_max import NEGATIVE_INFINITY
from heliograph_backends.cpu.kernels.vector import vector_math
from heliograph_backends.cpu.kernels.vector.lanes import (
    F32,
    F32_VECTOR,
    F64,
    I32,
    I64,
    LANES,
    Lanes,
    element,
    emitted,
    integer,
    local,
    loop,
    pointer,
    prefetch,
    subroutine,
    tail_mask,
)

#: Forms of values that are read sixteen at a time, with the bytes of a value.
PLAIN_FORMS = {FLOAT32: 4, int(Stored.F16): 2, int(Stored.BF16): 2}
# Vectors of sums in registers in one pass over the keys, for one row and for several.
WIDE_PASS, NARROW_PASS = 8, 4
# The distance of the prefetch: rows of values are often too far apart for the hardware prefetcher.
KEYS_AHEAD = 8


def _field(builder: Any, state: Any, offset: int, kind: ir.Type) -> Any:
    return pointer(builder, builder.add(state, integer(offset)), kind)


def _larger(builder: Any, first: Any, second: Any) -> Any:
    """Return the larger, lane by lane; a NaN in `first` does not count."""
    return builder.select(builder.fcmp_ordered(">", first, second), first, second)


def _first_lane(builder: Any, lanes: Lanes) -> Any:
    return builder.extract_element(lanes.value, ir.Constant(I32, 0))


def _scores(builder: Any, scores: Any, count: Any, finish: Callable[[Lanes, Any, Any], Lanes]) -> Any:
    """Write the final scores of a row, and return the largest that is not NaN."""
    lowest = Lanes.constant(builder, NEGATIVE_INFINITY).value
    cell = local(builder, F32_VECTOR)
    builder.store(lowest, cell)
    with loop(builder, integer(0), count, LANES) as index:
        place = element(builder, scores, index)
        mask = tail_mask(builder, builder.sub(count, index))
        lanes = finish(Lanes.load(builder, place), index, mask)
        lanes.store(place)
        found = builder.select(mask, lanes.value, lowest)
        builder.store(_larger(builder, found, builder.load(cell)), cell)
    return tree(builder, builder.load(cell), lambda one, other: _larger(builder, one, other))


def _weigh(
    builder: Any, scores: Any, count: Any, biases: Any, slope: Any, scale: Any, cap: Any, state: Any
) -> None:
    largest = local(builder, F32)
    capped = builder.fcmp_ordered("!=", cap, ir.Constant(F32, 0.0))
    masked = builder.icmp_signed("!=", biases, integer(0))
    inner = Lanes.broadcast(builder, builder.select(capped, builder.fdiv(scale, cap), scale))
    for with_cap in (False, True):
        for with_mask in (False, True):

            def finish(
                lanes: Lanes, index: Any, mask: Any, with_cap: bool = with_cap, with_mask: bool = with_mask
            ) -> Lanes:
                lanes = lanes * inner
                if with_cap:
                    lanes = vector_math.tanh(lanes) * Lanes.broadcast(builder, cap)
                if with_mask:
                    bias = Lanes.load_masked(builder, element(builder, biases, index), mask)
                    lanes = lanes + bias * Lanes.broadcast(builder, slope)
                return lanes

            here = builder.and_(
                capped if with_cap else builder.not_(capped), masked if with_mask else builder.not_(masked)
            )
            with builder.if_then(here):
                builder.store(_scores(builder, scores, count, finish), largest)
    _raise_powers(builder, scores, count, builder.load(largest), state)


def _raise_powers(builder: Any, scores: Any, count: Any, largest: Any, state: Any) -> None:
    """Turn scores into powers and update the state; if all keys are hidden, nothing is
    subtracted."""
    at, rescaled = _field(builder, state, LARGEST_SCORE, F32), _field(builder, state, RESCALED, F32)
    before, total = builder.load(at), _field(builder, state, TOTAL, F64)
    new = _larger(builder, largest, before)
    hidden = builder.fcmp_ordered("==", new, ir.Constant(F32, NEGATIVE_INFINITY))
    shift = Lanes.broadcast(builder, builder.select(hidden, ir.Constant(F32, 0.0), new))
    factor = _first_lane(builder, vector_math.exp_falling(Lanes.broadcast(builder, before) - shift))
    cell, zero = local(builder, F32_VECTOR), Lanes.constant(builder, 0.0).value
    builder.store(zero, cell)
    with loop(builder, integer(0), count, LANES) as index:
        place = element(builder, scores, index)
        mask = tail_mask(builder, builder.sub(count, index))
        lanes = vector_math.exp_falling(Lanes.load(builder, place) - shift)
        lanes.store(place)
        found = builder.select(mask, lanes.value, zero)
        builder.store(builder.fadd(builder.load(cell), found), cell)
    added = tree(builder, Lanes(builder, builder.load(cell)).widen(), builder.fadd)
    kept = builder.fmul(builder.load(total), builder.fpext(factor, F64))
    builder.store(builder.fadd(kept, added), total)
    builder.store(new, at)
    builder.store(factor, rescaled)


@emitted(types.void, *[types.int64] * 3, types.float32, types.float32, types.float32, types.int64)
def weigh_row(
    builder: Any, scores: Any, count: Any, biases: Any, slope: Any, scale: Any, cap: Any, state: Any
) -> None:
    """Turn a row of products into powers and update its state; `biases` is 0 without a mask."""
    kinds = (I64, I64, I64, F32, F32, F32, I64)
    function = subroutine(builder, "weigh_row", kinds, _weigh)
    builder.call(function, [scores, count, biases, slope, scale, cap, state])


@emitted(types.void, types.int64, types.int64, types.float32)
def scale_row(builder: Any, row: Any, count: Any, factor: Any) -> None:
    """Multiply a row of float32, of whole vectors, by a number; negative zeros become zeros."""
    lanes = Lanes.broadcast(builder, factor)
    with loop(builder, integer(0), count, LANES) as index:
        place = element(builder, row, index)
        (Lanes.load(builder, place) * lanes + 0.0).store(place)


def _load(builder: Any, form: int, address: Any) -> Lanes:
    """Return sixteen values as float32."""
    if form == FLOAT32:
        return Lanes.load(builder, address)
    shorts = builder.load(pointer(builder, address, SHORTS), align=2)
    return from_half(builder, shorts) if form == Stored.F16 else from_bfloat(builder, shorts)


def _add_values(form: int, most: int, width: int) -> Callable[..., None]:
    """Continue the sums of up to `most` rows, `width` vectors of each at a time.

    Missing rows and vectors repeat the last ones, with the same sums.
    """

    def body(
        builder: Any,
        rows: Any,
        target: Any,
        target_row: Any,
        powers: Any,
        powers_row: Any,
        values: Any,
        values_row: Any,
        keys: Any,
        columns: Any,
        first: Any,
        after: Any,
    ) -> None:
        last_row, last = builder.sub(rows, integer(1)), builder.sub(columns, integer(LANES))
        numbers = [_least(builder, integer(row), last_row) for row in range(most)]
        cells = [[local(builder, F32_VECTOR) for _ in range(width)] for _ in range(most)]
        with loop(builder, integer(0), columns, LANES * width) as column:
            offsets = [
                _least(builder, builder.add(column, integer(LANES * each)), last) for each in range(width)
            ]
            places = [
                [
                    element(builder, builder.add(target, builder.mul(target_row, number)), offset)
                    for offset in offsets
                ]
                for number in numbers
            ]
            _open_sums(builder, cells, places, first)
            with loop(builder, integer(0), keys, 1) as key:
                here = builder.add(values, builder.mul(values_row, key))
                ahead = _ahead(builder, values, after, values_row, key, keys)
                for offset in offsets[:: 64 // (LANES * PLAIN_FORMS[form])]:
                    prefetch(builder, builder.add(ahead, builder.mul(offset, integer(PLAIN_FORMS[form]))))
                found = [
                    _load(builder, form, builder.add(here, builder.mul(offset, integer(PLAIN_FORMS[form]))))
                    for offset in offsets
                ]
                for number, row in zip(numbers, cells, strict=True):
                    place = element(builder, builder.add(powers, builder.mul(powers_row, number)), key)
                    power = Lanes.broadcast(builder, builder.load(pointer(builder, place, F32)))
                    for lanes, cell in zip(found, row, strict=True):
                        builder.store(lanes.fma(power, Lanes(builder, builder.load(cell))).value, cell)
            for row, addresses in zip(cells, places, strict=True):
                for cell, address in zip(row, addresses, strict=True):
                    Lanes(builder, builder.load(cell)).store(address)

    return body


def _ahead(builder: Any, values: Any, after: Any, row: Any, key: Any, keys: Any) -> Any:
    """Return the address of the row that is read some rows after a key's."""
    number = builder.add(key, integer(KEYS_AHEAD))
    behind = builder.icmp_signed(">=", number, keys)
    number = builder.select(behind, builder.sub(number, keys), number)
    return builder.add(builder.select(behind, after, values), builder.mul(row, number))


def _least(builder: Any, first: Any, second: Any) -> Any:
    return builder.select(builder.icmp_signed("<", first, second), first, second)


def _open_sums(builder: Any, cells: Any, places: Any, first: Any) -> None:
    """Initialise the sums with zeros for the first keys, else with the target's elements."""
    pairs = [pair for some in zip(cells, places, strict=True) for pair in zip(*some, strict=True)]
    for cell, _ in pairs:
        builder.store(Lanes.constant(builder, 0.0).value, cell)
    with builder.if_then(builder.icmp_signed("==", first, integer(0))):
        for cell, address in pairs:
            builder.store(Lanes.load(builder, address).value, cell)


@emitted(types.void, *[types.int64] * 12)
def add_values(
    builder: Any,
    form: Any,
    rows: Any,
    target: Any,
    target_row: Any,
    powers: Any,
    powers_row: Any,
    values: Any,
    values_row: Any,
    keys: Any,
    columns: Any,
    first: Any,
    after: Any,
) -> None:
    """Add powers times values to up to FEW_ROWS rows of the target; columns are whole vectors. The
    values `after` come next."""
    done = builder.append_basic_block("values.done")
    switch = builder.switch(form, done)
    arguments = [
        rows,
        target,
        target_row,
        powers,
        powers_row,
        values,
        values_row,
        keys,
        columns,
        first,
        after,
    ]
    for each in PLAIN_FORMS:
        with builder.goto_block(builder.append_basic_block(f"values.{each}")):
            switch.add_case(integer(each), builder.block)
            single = builder.icmp_signed("==", rows, integer(1))
            with builder.if_else(single) as (one, several):
                for branch, most, width in ((one, 1, WIDE_PASS), (several, FEW_ROWS, NARROW_PASS)):
                    with branch:
                        body = _add_values(each, most, width)
                        name = f"add_values_{most}_{each}"
                        builder.call(subroutine(builder, name, (I64,) * 11, body), arguments)
            builder.branch(done)
    builder.position_at_end(done)


def _pack_values(form: int) -> Callable[..., None]:
    size = LANES * PLAIN_FORMS[form]

    def body(builder: Any, target: Any, source: Any, step: Any, keys: Any, columns: Any, after: Any) -> None:
        second = builder.icmp_signed(">", columns, integer(LANES))
        with loop(builder, integer(0), keys, 1) as key:
            here = builder.add(source, builder.mul(step, key))
            ahead = _ahead(builder, source, after, step, key, keys)
            for line in range(0, 2 * size, CACHE_LINE_BYTES):
                prefetch(builder, builder.add(ahead, integer(line)))
            row = builder.add(target, builder.mul(key, integer(PANEL_ROW_BYTES)))
            _load(builder, form, here).store(row)
            with builder.if_then(second):
                lanes = _load(builder, form, builder.add(here, integer(size)))
                lanes.store(builder.add(row, integer(4 * LANES)))

    return body


@emitted(types.void, *[types.int64] * 7)
def pack_values(
    builder: Any, form: Any, target: Any, source: Any, step: Any, keys: Any, columns: Any, after: Any
) -> None:
    """Pack a panel of one or two vectors of each row of values; rows are `step` bytes apart. The
    values `after` come next."""
    done = builder.append_basic_block("pack.done")
    switch = builder.switch(form, done)
    for each in PLAIN_FORMS:
        with builder.goto_block(builder.append_basic_block(f"pack.{each}")):
            switch.add_case(integer(each), builder.block)
            function = subroutine(builder, f"pack_values_{each}", (I64,) * 6, _pack_values(each))
            builder.call(function, [target, source, step, keys, columns, after])
            builder.branch(done)
    builder.position_at_end(done)


@emitted(types.void, *[types.int64] * 4)
def fetch_rows(builder: Any, source: Any, step: Any, rows: Any, size: Any) -> None:
    """Prefetch rows of `size` bytes, `step` bytes apart."""
    with loop(builder, integer(0), rows, 1) as row:
        here = builder.add(source, builder.mul(step, row))
        with loop(builder, integer(0), size, CACHE_LINE_BYTES) as line:
            prefetch(builder, builder.add(here, line), 2)
