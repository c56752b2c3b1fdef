"""soft_max of one row, in three passes; the first brings the row into the cache.

    largest   the maximum of t = x * scale + slope * mask and a sink; NaNs do not count, since
              their exponential makes the sum and the row NaN
    sum       e = exp(t - largest), kept; four vectors are added in float32, their sums in float64,
              and last the sink's
    result    e * (1 / sum)

The second pass computes t again, which costs less than keeping it. If the target is written past
the caches, e is kept in the scratch, and the factor of its sum behind it. The third pass over such
a row is made during the second one over the next row: memory takes a row's results while the next
row's exponentials are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from heliograph_backends.cpu.kernels.rows.row import (
    PARTS,
    Row,
    each_vector,
    fetch_ahead,
    load,
    store,
    tree,
)
from heliograph_backends.cpu.kernels.vector import vector_math
from heliograph_backends.cpu.kernels.vector.lanes import (
    F32,
    F32_VECTOR,
    F64,
    F64_VECTOR,
    I32,
    LANES,
    Lanes,
    element,
    integer,
    local,
    loop,
    pointer,
    subroutine,
    tail_mask,
)

# Vectors of exponentials that are added in float32 before their sum is added in float64.
GROUP = 4
NEGATIVE_INFINITY = float("-inf")


def _score_maximum(builder: Any, row: Row, score: Callable[[Any, Any], Lanes]) -> Any:
    """Return the largest score of a row; NaNs do not count."""
    cells = [local(builder, F32_VECTOR) for _ in range(PARTS)]
    lowest = Lanes.constant(builder, NEGATIVE_INFINITY)
    for cell in cells:
        builder.store(lowest.value, cell)

    def larger(first: Any, second: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", first, second), first, second)

    def act(index: Any, mask: Any, part: int) -> None:
        value = score(index, mask).value
        if mask is not None:
            value = builder.select(mask, value, lowest.value)
        builder.store(larger(value, builder.load(cells[part])), cells[part])

    each_vector(builder, row.count, act)
    return tree(builder, larger(*(builder.load(cell) for cell in cells)), larger)


def _exponentials(
    builder: Any, row: Row, score: Callable[[Any, Any], Lanes], largest: Lanes, staging: Any
) -> Any:
    """Store e**(score - largest); return the sum in float64 of the float32 sums of GROUP vectors
    each."""
    group, zero = LANES * GROUP, Lanes.constant(builder, 0.0)
    total, rest = (local(builder, kind) for kind in (F64_VECTOR, F32_VECTOR))
    builder.store(ir.Constant(F64_VECTOR, [0.0] * LANES), total)
    builder.store(zero.value, rest)

    def exponential(index: Any, mask: Any) -> Lanes:
        lanes = vector_math.exp_falling(score(index, mask) - largest)
        fetch_ahead(builder, row, index)
        store(builder, lanes, staging, index, mask)
        return lanes

    def add(lanes: Lanes) -> None:
        builder.store(builder.fadd(builder.load(total), lanes.widen()), total)

    follows = builder.icmp_signed("!=", row.before, integer(0))
    # Without a row before, any number is read: the source's first, since it ends at its last.
    place = builder.select(follows, element(builder, row.before, row.count), row.source)
    factor = _factor_at(builder, place)
    whole = builder.and_(row.count, integer(-group))
    with loop(builder, integer(0), whole, group) as index:
        places = [builder.add(index, integer(LANES * k)) for k in range(GROUP)]
        one, two, three, four = (exponential(place, None) for place in places)
        add((one + two) + (three + four))
        with builder.if_then(follows):
            for place in places:
                quotient = load(builder, row.before, place, None) * factor
                quotient.store_streamed(element(builder, row.before_target, place))
    with builder.if_then(follows):
        _finish_rest(builder, row.before_target, row.before, factor, whole, row.count)
    with loop(builder, whole, row.count, LANES) as index:
        mask = tail_mask(builder, builder.sub(row.count, index))
        lanes = builder.select(mask, exponential(index, mask).value, zero.value)
        builder.store(builder.fadd(builder.load(rest), lanes), rest)
    add(Lanes(builder, builder.load(rest)))
    return tree(builder, builder.load(total), builder.fadd)


def _factor_at(builder: Any, place: Any) -> Lanes:
    """Return the factor that lies behind a staged row."""
    return Lanes.broadcast(builder, builder.load(pointer(builder, place, F32)))


def _finish_rest(builder: Any, target: Any, staging: Any, factor: Lanes, start: Any, count: Any) -> None:
    """Write the results of a staged row from `start` past the caches, the last ones through them."""
    whole = builder.and_(count, integer(-LANES))
    with loop(builder, start, whole, LANES) as index:
        quotient = load(builder, staging, index, None) * factor
        quotient.store_streamed(element(builder, target, index))
    with builder.if_then(builder.icmp_signed("<", whole, count)):
        mask = tail_mask(builder, builder.sub(count, whole))
        store(builder, load(builder, staging, whole, mask) * factor, target, whole, mask)


def finish_staged(builder: Any, target: Any, staging: Any, count: Any) -> None:
    """Write the results of a staged row."""
    factor = _factor_at(builder, element(builder, staging, count))
    _finish_rest(builder, target, staging, factor, integer(0), count)


def _sunk(builder: Any, row: Row, largest: Any) -> tuple[Any, Any]:
    """Return the sink, or any number if there is none, and the larger of it and the largest
    score."""
    has_sink = builder.icmp_signed("!=", row.bias, integer(0))
    # Without a sink, any number is read.
    sink = builder.load(pointer(builder, builder.select(has_sink, row.bias, row.source), F32))
    above = builder.and_(has_sink, builder.fcmp_ordered(">", sink, largest))
    return builder.select(has_sink, sink, ir.Constant(F32, 0.0)), builder.select(above, sink, largest)


def _power(builder: Any, sink: Any, largest: Any) -> Any:
    """Return e**(sink - largest) in float64."""
    difference = Lanes.broadcast(builder, builder.fsub(sink, largest))
    power = vector_math.exp_falling(difference).value
    return builder.fpext(builder.extract_element(power, ir.Constant(I32, 0)), F64)


def _with_sink(builder: Any, row: Row, total: Any, sink: Any, largest: Any) -> Any:
    """Return the sum with the sink's power."""
    power = builder.call(subroutine(builder, "power_of_sink", (F32, F32), _power, F64), [sink, largest])
    has_sink = builder.icmp_signed("!=", row.bias, integer(0))
    return builder.select(has_sink, builder.fadd(total, power), total)


def soft_max(builder: Any, row: Row) -> None:
    """Write the soft maximum of source * parameter + slope * weight; the weight is the mask. A row
    with a staging is left there, and the row before is finished."""
    scale, slope = Lanes.broadcast(builder, row.parameter), Lanes.broadcast(builder, row.slope)
    staged = builder.icmp_signed("!=", row.staging, integer(0))
    staging = builder.select(staged, row.staging, row.target)
    one = ir.Constant(F64, 1.0)
    has_mask = builder.icmp_signed("!=", row.weight, integer(0))
    has_scale = builder.fcmp_unordered("!=", row.parameter, ir.Constant(F32, 1.0))
    plain = builder.not_(builder.or_(has_mask, has_scale))
    scaled_alone = builder.and_(has_scale, builder.not_(has_mask))
    for here, scaled, masked in ((plain, False, False), (scaled_alone, True, False), (has_mask, True, True)):

        def score(index: Any, mask: Any, scaled: bool = scaled, masked: bool = masked) -> Lanes:
            lanes = load(builder, row.source, index, mask)
            lanes = lanes * scale if scaled else lanes
            return lanes + load(builder, row.weight, index, mask) * slope if masked else lanes

        with builder.if_then(here):
            sink, top = _sunk(builder, row, _score_maximum(builder, row, score))
            largest = Lanes.broadcast(builder, top)
            total = _exponentials(builder, row, score, largest, staging)
            total = _with_sink(builder, row, total, sink, top)
            number = builder.fptrunc(builder.fdiv(one, total), F32)
            factor = Lanes.broadcast(builder, number)

            def quotients(index: Any, mask: Any, part: int, factor: Lanes = factor) -> None:
                store(builder, load(builder, row.target, index, mask) * factor, row.target, index, mask)

            with builder.if_else(staged) as (later, now):
                with later:
                    place = element(builder, staging, row.count)
                    builder.store(number, pointer(builder, place, F32))
                with now:
                    each_vector(builder, row.count, quotients)
