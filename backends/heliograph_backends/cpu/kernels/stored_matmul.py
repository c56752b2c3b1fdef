"""Matrix products whose right side is stored as f32, f16, bf16 or blocks, read without a copy in float32.

Contract. The bits are those of the product with the dequantized weight, see `matmul_kernel`: one chain of
fused multiply-adds along k for each element. With few rows the weight streams through registers once;
with more, a block of it becomes float32 panels in the cache. The chain is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from llvmlite import ir
from numba import types

from . import stored_k_blocks as k_blocks
from .fetching import Fetches, behind_rows, in_rows, unit_bytes
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
from .stored_blocks import bf16, f16, f32, q4_0, q4_1, q5_0, q5_1, q8_0, single_bf16, single_f16, single_f32
from .stored_lanes import Shelf
from .stored_types import FEW_ROWS, FORMS, Stored

GROUPS = PANEL_COLUMNS // LANES


class KBlock(NamedTuple):
    """How blocks with parts are read."""

    shelf: int
    """Vectors that the head leaves."""
    head: Callable[[Any, Sequence[Any], Shelf], None]
    unit: Callable[[Any, Sequence[Any], Any, Shelf], Iterator[Lanes]]


UNITS: Final[dict[Stored, Callable[[Any, Sequence[Any]], Iterator[Lanes]]]] = {
    Stored.F32: f32,
    Stored.F16: f16,
    Stored.BF16: bf16,
    Stored.Q8_0: q8_0,
    Stored.Q4_0: q4_0,
    Stored.Q4_1: q4_1,
    Stored.Q5_0: q5_0,
    Stored.Q5_1: q5_1,
}
K_BLOCKS: Final = {
    Stored.Q2_K: KBlock(32, k_blocks.q2_k_head, k_blocks.q2_k_unit),
    Stored.Q3_K: KBlock(24, k_blocks.q3_k_head, k_blocks.q3_k_unit),
    Stored.Q4_K: KBlock(16, k_blocks.q4_k_head, k_blocks.q4_k_unit),
    Stored.Q5_K: KBlock(24, k_blocks.q5_k_head, k_blocks.q5_k_unit),
    Stored.Q6_K: KBlock(16, k_blocks.q6_k_head, k_blocks.q6_k_unit),
}
#: Of types whose blocks are single elements, which may be fewer than a unit at a row's end.
SINGLES: Final[dict[Stored, Callable[[Any, Sequence[Any]], Lanes]]] = {
    Stored.F32: single_f32,
    Stored.F16: single_f16,
    Stored.BF16: single_bf16,
}

#: Is told k and the weights there, for each group of sixteen columns.
Act = Callable[[Any, Sequence[Lanes]], None]


def _minimum(builder: Any, first: Any, second: Any) -> Any:
    return builder.select(builder.icmp_signed("<", first, second), first, second)


def _rows(builder: Any, base: Any, step: Any, count: Any, most: int) -> list[Any]:
    """Return the addresses of `most` rows; those behind the last of `count` are the last one's, unless all
    are there (`count` is None): addresses that need no choice need fewer registers.
    """
    if count is None:
        return [builder.add(base, builder.mul(step, integer(row))) for row in range(most)]
    last = builder.sub(count, integer(1))
    return [
        builder.add(base, builder.mul(step, _minimum(builder, integer(row), last))) for row in range(most)
    ]


def each_weight(
    builder: Any, kind: Stored, rows: Sequence[Any], depth: Any, act: Act, following: Any = None
) -> None:
    """Call `act` for each k of 32 rows of weights, in order. `following`: the address of as many rows that
    are read next, where whole rows are.
    """
    groups = [rows[first : first + LANES] for first in range(0, len(rows), LANES)]
    if kind in K_BLOCKS:
        _each_of_blocks(builder, kind, groups, depth, act, following)
        return
    form = FORMS[kind]
    whole = builder.and_(depth, integer(-form.unit))
    with loop(builder, integer(0), whole, form.unit) as start:
        moved = _moved(builder, groups, builder.udiv(start, integer(form.block_size)), form.block_bytes)
        units = [UNITS[kind](builder, group) for group in moved]
        if following is not None:
            fetches = behind_rows(builder, form, following, start, len(rows))
        else:
            # Measured: what is shorter than a line is there in time without being asked for.
            near = [row for group in moved for row in group] if kind in SINGLES else []
            fetches = in_rows(builder, form, near, integer(unit_bytes(form)))
        _each_lane(builder, units, start, act, fetches)
    if kind in SINGLES:
        with loop(builder, whole, depth, 1) as index:
            moved = _moved(builder, groups, index, form.block_bytes)
            act(index, [SINGLES[kind](builder, group) for group in moved])


def _each_of_blocks(
    builder: Any, kind: Stored, groups: Sequence[Any], depth: Any, act: Act, following: Any
) -> None:
    form, k_block = FORMS[kind], K_BLOCKS[kind]
    shelves = [Shelf(builder, k_block.shelf) for _ in groups]
    with loop(builder, integer(0), depth, form.block_size) as start:
        moved = _moved(builder, groups, builder.udiv(start, integer(form.block_size)), form.block_bytes)
        for group, shelf in zip(moved, shelves, strict=True):
            k_block.head(builder, group, shelf)
        with loop(builder, integer(0), integer(form.block_size), form.unit) as place:
            unit = builder.udiv(place, integer(form.unit))
            pairs = zip(moved, shelves, strict=True)
            units = [k_block.unit(builder, group, unit, shelf) for group, shelf in pairs]
            first = builder.add(start, place)
            if following is not None:
                fetches = behind_rows(builder, form, following, first, LANES * len(groups))
            else:
                near = [row for group in moved for row in group]
                ahead = builder.add(builder.mul(unit, integer(unit_bytes(form))), integer(form.block_bytes))
                fetches = in_rows(builder, form, near, ahead)
            _each_lane(builder, units, first, act, fetches)


def _moved(builder: Any, groups: Sequence[Any], index: Any, step: int) -> list[list[Any]]:
    offset = builder.mul(index, integer(step))
    return [[builder.add(row, offset) for row in group] for group in groups]


def _each_lane(
    builder: Any, units: Sequence[Iterator[Lanes]], start: Any, act: Act, fetches: Fetches
) -> None:
    for place, lanes in enumerate(zip(*units, strict=True)):
        fetches.go(place)
        act(builder.add(start, integer(place)), lanes)


def _unpack(kind: Stored) -> Callable[..., None]:
    """A panel, sixteen columns after the other; what is behind the last column stays as it is."""

    def body(builder: Any, target: Any, source: Any, step: Any, depth: Any, columns: Any) -> None:
        with loop(builder, integer(0), columns, LANES) as column:

            def act(k: Any, lanes: Sequence[Lanes]) -> None:
                place = builder.add(builder.mul(k, integer(PANEL_ROW_BYTES)), builder.mul(column, integer(4)))
                lanes[0].store(builder.add(target, place))

            first = builder.add(source, builder.mul(column, step))
            rows = _rows(builder, first, step, builder.sub(columns, column), LANES)
            each_weight(builder, kind, rows, depth, act)

    return body


def _multiply(kind: Stored, most: int) -> Callable[..., None]:
    """The product of one row and 32 columns, or of up to `most` rows and columns; rows that are not there
    repeat the last one.

    Two chains of multiply-adds at least run side by side: with one row both groups of sixteen columns, with
    more rows one group after the other, which is half the code.
    """
    groups = GROUPS if most == 1 else 1

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
        left, product = _rows(builder, a, a_row, rows, most), _rows(builder, c, c_row, rows, most)
        with loop(
            builder, integer(0), integer(PANEL_COLUMNS) if most == 1 else columns, groups * LANES
        ) as column:
            rest = builder.sub(columns, column)
            base = builder.add(b, builder.mul(b_row, column))
            right = _rows(builder, base, b_row, None if most == 1 else rest, groups * LANES)
            cells = _Cells(builder, [_element(builder, row, column) for row in product], rest, groups)
            with builder.if_then(builder.icmp_signed("==", first, integer(0))):
                cells.load()

            def act(k: Any, lanes: Sequence[Lanes]) -> None:
                cells.add([_element(builder, row, k) for row in left], lanes)

            following = builder.add(base, builder.mul(b_row, integer(groups * LANES)))
            each_weight(builder, kind, right, depth, act, following)
            cells.store()

    return body


def _element(builder: Any, row: Any, index: Any) -> Any:
    return builder.add(row, builder.mul(index, integer(4)))


class _Cells:
    """The sums of some rows and groups of sixteen columns, from +0."""

    def __init__(self, builder: Any, rows: Sequence[Any], columns: Any, groups: int) -> None:
        """`rows`: the addresses of the first elements; `columns`: those that are there."""
        self._builder = builder
        self._rows = [[local(builder, F32_VECTOR) for _ in range(groups)] for _ in rows]
        masks = [tail_mask(builder, builder.sub(columns, integer(LANES * group))) for group in range(groups)]
        self._places = [
            (cell, builder.add(row, integer(4 * LANES * group)), masks[group])
            for row, cells in zip(rows, self._rows, strict=True)
            for group, cell in enumerate(cells)
        ]
        for cell, _, _ in self._places:
            builder.store(ir.Constant(F32_VECTOR, [0.0] * LANES), cell)

    def load(self) -> None:
        for cell, address, mask in self._places:
            self._builder.store(Lanes.load_masked(self._builder, address, mask).value, cell)

    def add(self, left: Sequence[Any], lanes: Sequence[Lanes]) -> None:
        """Add the products of what is at `left`, for each row, and of a weight for each group."""
        builder = self._builder
        for address, cells in zip(left, self._rows, strict=True):
            factor = Lanes.broadcast(builder, builder.load(pointer(builder, address, F32)))
            for cell, weights in zip(cells, lanes, strict=True):
                sum_so_far = Lanes(builder, builder.load(cell))
                builder.store(weights.fma(factor, sum_so_far).value, cell)

    def store(self) -> None:
        for cell, address, mask in self._places:
            Lanes(self._builder, self._builder.load(cell)).store_masked(address, mask)


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
        single = builder.and_(
            builder.icmp_signed("==", rows, integer(1)),
            builder.icmp_signed(">=", columns, integer(PANEL_COLUMNS)),
        )
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
