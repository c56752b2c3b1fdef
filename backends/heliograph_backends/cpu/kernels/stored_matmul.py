"""Matrix products whose right side is stored as f16, bf16 or blocks, read without a copy in float32.

Contract. The bits are those of the product with the dequantized weight, see `matmul_kernel`: one chain of
fused multiply-adds along k for each element. With few rows the weight streams through registers once;
with more, a block of it becomes float32 panels in the cache. The chain is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types

from .lanes import (
    F32,
    F32_VECTOR,
    I64,
    LANES,
    Lanes,
    emitted,
    integer,
    jit_inline,
    local,
    loop,
    pointer,
    subroutine,
    tail_mask,
)
from .layout import PANEL_COLUMNS
from .packing import PANEL_ROW_BYTES
from .stored_lanes import SINGLES, UNITS, shorts_of_rows
from .stored_types import FEW_ROWS, FORMS, Stored

GROUPS = PANEL_COLUMNS // LANES

#: Is told k and the weights there, for each group of sixteen columns.
Act = Callable[[Any, Sequence[Lanes]], None]


def _minimum(builder: Any, first: Any, second: Any) -> Any:
    return builder.select(builder.icmp_signed("<", first, second), first, second)


def _rows(builder: Any, base: Any, step: Any, count: Any, most: int) -> list[Any]:
    """Return the addresses of `most` rows; those behind the last of `count` are the last one's."""
    last = builder.sub(count, integer(1))
    return [
        builder.add(base, builder.mul(step, _minimum(builder, integer(row), last))) for row in range(most)
    ]


def each_weight(builder: Any, kind: Stored, rows: Sequence[Any], depth: Any, act: Act) -> None:
    """Call `act` for each k of 32 rows of weights, in order."""
    form = FORMS[kind]
    whole = builder.and_(depth, integer(-form.unit))
    groups = [rows[first : first + LANES] for first in range(0, len(rows), LANES)]
    with loop(builder, integer(0), whole, form.unit) as start:
        block, rest = (divide(start, integer(form.block_size)) for divide in (builder.udiv, builder.urem))
        offset = builder.mul(block, integer(form.block_bytes))
        moved = [[builder.add(row, offset) for row in group] for group in groups]
        units = [UNITS[kind](builder, group, builder.udiv(rest, integer(form.unit))) for group in moved]
        for place, lanes in enumerate(zip(*units, strict=True)):
            act(builder.add(start, integer(place)), lanes)
    if kind in SINGLES:
        with loop(builder, whole, depth, 1) as index:
            offset = builder.mul(index, integer(form.block_bytes))
            found = [[builder.add(row, offset) for row in group] for group in groups]
            act(index, [SINGLES[kind](builder, shorts_of_rows(builder, group, 0)) for group in found])


def _unpack(kind: Stored) -> Callable[..., None]:
    def body(builder: Any, target: Any, source: Any, step: Any, depth: Any, columns: Any) -> None:
        def act(k: Any, lanes: Sequence[Lanes]) -> None:
            row = builder.add(target, builder.mul(k, integer(PANEL_ROW_BYTES)))
            for group, found in enumerate(lanes):
                found.store(builder.add(row, integer(4 * LANES * group)))

        rows = _rows(builder, source, step, columns, PANEL_COLUMNS)
        each_weight(builder, kind, rows, depth, act)

    return body


def _multiply(kind: Stored, most: int) -> Callable[..., None]:
    """The product of up to `most` rows and 32 columns; rows that are not there repeat the last one."""

    def body(
        builder: Any,
        rows: Any,
        c: Any,
        c_row: Any,
        a: Any,
        a_row: Any,
        b: Any,
        b_row: Any,
        depth: Any,
        columns: Any,
        first: Any,
    ) -> None:
        cells = [[local(builder, F32_VECTOR) for _ in range(GROUPS)] for _ in range(most)]
        left, product = _rows(builder, a, a_row, rows, most), _rows(builder, c, c_row, rows, most)
        masks = [tail_mask(builder, builder.sub(columns, integer(LANES * group))) for group in range(GROUPS)]
        places = [(row, group) for row in range(most) for group in range(GROUPS)]
        addresses = [builder.add(product[row], integer(4 * LANES * group)) for row, group in places]
        for row, group in places:
            builder.store(ir.Constant(F32_VECTOR, [0.0] * LANES), cells[row][group])
        with builder.if_then(builder.icmp_signed("==", first, integer(0))):
            for (row, group), address in zip(places, addresses, strict=True):
                builder.store(Lanes.load_masked(builder, address, masks[group]).value, cells[row][group])

        def act(k: Any, lanes: Sequence[Lanes]) -> None:
            for row in range(most):
                place = builder.add(left[row], builder.mul(k, integer(4)))
                factor = Lanes.broadcast(builder, builder.load(pointer(builder, place, F32)))
                for group, weights in enumerate(lanes):
                    sum_so_far = Lanes(builder, builder.load(cells[row][group]))
                    builder.store(weights.fma(factor, sum_so_far).value, cells[row][group])

        each_weight(builder, kind, _rows(builder, b, b_row, columns, PANEL_COLUMNS), depth, act)
        for (row, group), address in zip(places, addresses, strict=True):
            Lanes(builder, builder.load(cells[row][group])).store_masked(address, masks[group])

    return body


def _dispatch(builder: Any, kind: Any, call: Callable[[Stored], None]) -> None:
    """Emit one call for each type, and the choice between them."""
    done = builder.append_basic_block("stored.done")
    switch = builder.switch(kind, done)
    for each in Stored:
        with builder.goto_block(builder.append_basic_block(each.name.lower())):
            switch.add_case(integer(each), builder.block)
            call(each)
            builder.branch(done)
    builder.position_at_end(done)


@emitted(types.void, *[types.int64] * 6)
def unpack_panel(
    builder: Any, kind: Any, target: Any, source: Any, step: Any, depth: Any, columns: Any
) -> None:
    """Unpack a panel of up to 32 columns from stored rows `step` bytes apart."""

    def call(each: Stored) -> None:
        name = f"unpack_{each.name.lower()}"
        function = subroutine(builder, name, (I64,) * 5, _unpack(each))
        builder.call(function, [target, source, step, depth, columns])

    _dispatch(builder, kind, call)


@emitted(types.void, *[types.int64] * 11)
def multiply_stored(
    builder: Any,
    kind: Any,
    rows: Any,
    c: Any,
    c_row: Any,
    a: Any,
    a_row: Any,
    b: Any,
    b_row: Any,
    depth: Any,
    columns: Any,
    first: Any,
) -> None:
    """Multiply up to FEW_ROWS rows of a by up to 32 rows of b; strides in bytes."""
    arguments = [rows, c, c_row, a, a_row, b, b_row, depth, columns, first]

    def call(each: Stored) -> None:
        single = builder.icmp_signed("==", rows, integer(1))
        with builder.if_else(single) as (one, several):
            for branch, most in ((one, 1), (several, FEW_ROWS)):
                with branch:
                    name = f"multiply_{most}_{each.name.lower()}"
                    body = _multiply(each, most)
                    builder.call(subroutine(builder, name, (I64,) * 10, body), arguments)

    _dispatch(builder, kind, call)


@jit_inline
def unpack_panels(
    kind: int, target: int, panel_bytes: int, source: int, step: int, depth: int, columns: int
) -> None:
    """Unpack stored rows `step` bytes apart, which are columns of the product, into panels."""
    for column in range(0, columns, PANEL_COLUMNS):
        present = min(columns - column, PANEL_COLUMNS)
        unpack_panel(kind, target, source + column * step, step, depth, present)
        target += panel_bytes


@jit_inline
def multiply_few(
    kind: int,
    product: int,
    product_row: int,
    left: int,
    left_row: int,
    right: int,
    right_row: int,
    rows: int,
    columns: int,
    depth: int,
    first: int,
) -> None:
    """Multiply few rows by columns that are stored as rows of the right side."""
    for column in range(0, columns, PANEL_COLUMNS):
        multiply_stored(
            kind,
            rows,
            product + 4 * column,
            product_row,
            left,
            left_row,
            right + column * right_row,
            right_row,
            depth,
            min(columns - column, PANEL_COLUMNS),
            first,
        )
