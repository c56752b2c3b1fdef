"""Parts of row kernels: loops over a row, loads and stores, sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir

from heliograph_backends.cpu.kernels.vector.lanes import (
    F64_VECTOR,
    I32,
    LANES,
    Lanes,
    element,
    integer,
    local,
    loop,
    prefetch,
    tail_mask,
)

PARTS = 2


def tree(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine lane i with lane i + 8, then i + 4, i + 2, i + 1, and return lane 0."""
    for width in (8, 4, 2, 1):
        order = [lane + width if lane < width else 0 for lane in range(LANES)]
        mask = ir.Constant(ir.VectorType(I32, LANES), order)
        vector = combine(vector, builder.shuffle_vector(vector, vector, mask))
    return builder.extract_element(vector, ir.Constant(I32, 0))


def each_vector(builder: Any, count: Any, act: Callable[[Any, Any, int], None]) -> None:
    """Call `act(index, mask, part)` for each sixteen elements; `mask` is None for whole vectors."""
    whole = builder.and_(count, integer(-LANES * PARTS))
    with loop(builder, integer(0), whole, LANES * PARTS) as index:
        for part in range(PARTS):
            act(builder.add(index, integer(LANES * part)), None, part)
    middle = builder.and_(count, integer(-LANES))
    with loop(builder, whole, middle, LANES) as index:
        act(index, None, 0)
    with builder.if_then(builder.icmp_signed("<", middle, count)):
        # After the loop above, the rest is the second half of 32 elements, else the first.
        mask = tail_mask(builder, builder.sub(count, middle))
        odd = builder.icmp_signed(">", middle, whole)
        with builder.if_else(odd) as (second, first):
            with second:
                act(middle, mask, 1)
            with first:
                act(middle, mask, 0)


def load(builder: Any, base: Any, index: Any, mask: Any, other: float = 0.0) -> Lanes:
    """Load the elements from `index`; those outside of the mask are `other`."""
    place = element(builder, base, index)
    return Lanes.load(builder, place) if mask is None else Lanes.load_masked(builder, place, mask, other)


def store(builder: Any, lanes: Lanes, base: Any, index: Any, mask: Any) -> None:
    """Store the elements from `index` that are in the mask."""
    place = element(builder, base, index)
    if mask is None:
        lanes.store(place)
    else:
        lanes.store_masked(place, mask)


class Row(NamedTuple):
    """One row of a step: addresses, 0 for absent operands; the number of elements; the
    parameter."""

    target: Any
    source: Any
    weight: Any
    bias: Any
    count: Any
    parameter: Any
    #: The factor of soft_max's mask, which is the weight; its bias points at a sink.
    slope: Any
    #: The place of intermediate results, or 0 if the target is written through the caches.
    staging: Any
    #: The source's next row, which is prefetched during this one.
    ahead: Any
    #: The target and staging of a soft_max's row before, which is finished during this one, or 0.
    before_target: Any
    before: Any


def finish(builder: Any, lanes: Lanes, row: Row, index: Any, mask: Any) -> None:
    """Store a final result."""
    place = element(builder, row.target, index)
    if mask is not None:
        lanes.store_masked(place, mask)
        return
    with builder.if_else(builder.icmp_signed("!=", row.staging, integer(0))) as (past, through):
        with past:
            lanes.store_streamed(place)
        with through:
            lanes.store(place)


def fetch_ahead(builder: Any, row: Row, index: Any) -> None:
    """Prefetch the same place of the next row while this one keeps the core busy."""
    prefetch(builder, element(builder, row.ahead, index), 2)


class Sum:
    """32 partial sums in float64."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.cells = [local(builder, F64_VECTOR) for _ in range(PARTS)]
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
        return tree(builder, both, builder.fadd)


def total_of(builder: Any, row: Row, term: Callable[[Any], Any]) -> Any:
    """Return the float64 sum of `term(x)` over a row.

    It prefetches the next row, as the pass after it does: a processor drops prefetches while many
    are on their way. Measured on Zen 5, norms take a tenth less time with both.
    """
    total = Sum(builder)

    def act(index: Any, mask: Any, part: int) -> None:
        total.add(term(load(builder, row.source, index, mask).widen()), mask, part)
        fetch_ahead(builder, row, index)

    each_vector(builder, row.count, act)
    return total.total()
