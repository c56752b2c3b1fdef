"""Matrix products whose right side is stored as f32, f16, bf16 or blocks, read without a copy in
float32.

Contract. The bits are those of the product with the dequantized weight, see `inner_loop`: one chain
of fused multiply-adds along k for each element. With few rows the weight is converted to float32 in
registers; with more, a block of it is converted to float32 panels in the cache. The chain is the
same.

Theory of operation, for few rows. Up to 64 rows of weights, which are columns of the product, are
processed together: some hundred elements of each go to a shelf (see `stored_words`), then sixteen
elements of sixteen rows at a time are converted to float32 and multiplied. So at least four chains
of vectors run at the same time, which hides the latency of an addition.

Memory is fast when it is read in order, which 64 rows at once are not. So while some rows are
multiplied, the rows after them are prefetched in order, a few lines with every sixteen elements:
few enough not to compete with each other, and always one pass over the current rows ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from llvmlite import ir
from numba import types

from heliograph_backends.cpu.kernels.matmul import stored_blocks as blocks
from heliograph_backends.cpu.kernels.matmul import stored_codes as codes
from heliograph_backends.cpu.kernels.matmul import stored_grids as grids
from heliograph_backends.cpu.kernels.matmul import stored_k_blocks as k_blocks
from heliograph_backends.cpu.kernels.matmul.grouped_matmul import (
    MOST_AT_ONCE,
    multiply_grouped,
    unpack_grouped,
)
from heliograph_backends.cpu.kernels.matmul.packing import PANEL_ROW_BYTES
from heliograph_backends.cpu.kernels.matmul.stored_lanes import SHORTS, from_half
from heliograph_backends.cpu.kernels.matmul.stored_readings import Reading, by_type
from heliograph_backends.cpu.kernels.matmul.stored_sums import GROUPS, Sums, runs_of
from heliograph_backends.cpu.kernels.matmul.stored_words import (
    COPIED_BYTES,
    COPIED_ROW_BYTES,
    LINE_BYTES,
    VECTOR_BYTES,
    Shelf,
    copy_rows,
    rows_from,
)
from heliograph_backends.cpu.kernels.program.stored_types import FEW_COLUMNS, FORMS, GROUPED, Stored
from heliograph_backends.cpu.kernels.program.words import CACHE_LINE_BYTES, PANEL_COLUMNS
from heliograph_backends.cpu.kernels.vector.lanes import (
    I32,
    I64,
    LANES,
    Entry,
    Lanes,
    emitted,
    integer,
    jit,
    local,
    loop,
    pointer,
    prefetch,
    subroutine,
    workspace,
)

READINGS: Final[dict[Stored, Reading]] = {
    Stored.F32: blocks.F32,
    Stored.F16: blocks.F16,
    Stored.BF16: blocks.BF16,
    Stored.Q8_0: blocks.Q8_0,
    Stored.Q4_0: blocks.Q4_0,
    Stored.Q4_1: blocks.Q4_1,
    Stored.Q5_0: blocks.Q5_0,
    Stored.Q5_1: blocks.Q5_1,
    Stored.Q2_K: k_blocks.Q2_K,
    Stored.Q3_K: k_blocks.Q3_K,
    Stored.Q4_K: k_blocks.Q4_K,
    Stored.Q5_K: k_blocks.Q5_K,
    Stored.Q6_K: k_blocks.Q6_K,
    Stored.IQ4_NL: codes.IQ4_NL,
    Stored.IQ4_XS: codes.IQ4_XS,
    Stored.MXFP4: codes.MXFP4,
    Stored.TQ1_0: codes.TQ1_0,
    Stored.TQ2_0: codes.TQ2_0,
    Stored.IQ1_S: grids.IQ1_S,
    Stored.IQ1_M: grids.IQ1_M,
    Stored.IQ2_XXS: grids.IQ2_XXS,
    Stored.IQ2_XS: grids.IQ2_XS,
    Stored.IQ2_S: grids.IQ2_S,
    Stored.IQ3_XXS: grids.IQ3_XXS,
    Stored.IQ3_S: grids.IQ3_S,
    Stored.NVFP4: codes.NVFP4,
    Stored.Q8_1: blocks.Q8_1,
    Stored.Q8_K: blocks.Q8_K,
    Stored.Q1_0: blocks.Q1_0,
    Stored.Q2_0: blocks.Q2_0,
}
#: Bytes that are prefetched ahead: about a quarter of a usual second-level cache.
AHEAD_BYTES = 256 * 1024
#: Columns that are processed together. With larger elements the product is limited more by memory,
#: which is faster with longer pieces of fewer rows, and less by the chains.
COLUMNS = {Stored.F32: 16, Stored.F16: 32, Stored.BF16: 32}
#: Rows of up to so many elements, such as keys, lie so near each other that FEW_COLUMNS of them are
#: processed together.
SHORT_ROWS = {Stored.F16: 512, Stored.BF16: 512}
#: By a type's number: elements and bytes of a block, elements and bytes that are read at a time.
_KINDS = [each if each in FORMS else min(FORMS) for each in range(max(Stored) + 1)]
BLOCK_ELEMENTS = tuple(FORMS[Stored(each)].block_size for each in _KINDS)
BLOCK_BYTES = tuple(FORMS[Stored(each)].block_bytes for each in _KINDS)
READ_ELEMENTS = tuple(READINGS[Stored(each)].elements for each in _KINDS)
READ_BYTES = tuple(READINGS[Stored(each)].bytes for each in _KINDS)
WIDTHS = tuple(COLUMNS.get(Stored(each), FEW_COLUMNS) for each in _KINDS)
SHORT_DEPTHS = tuple(SHORT_ROWS.get(Stored(each), 0) for each in _KINDS)


def _minimum(builder: Any, first: Any, second: Any) -> Any:
    return builder.select(builder.icmp_signed("<", first, second), first, second)


def _times(builder: Any, number: Any, size: int) -> Any:
    return builder.mul(number, integer(size))


def _prepare(kind: Stored) -> Callable[..., None]:
    """Return code that fills a shelf with some elements of up to sixteen rows."""
    reading, form = READINGS[kind], FORMS[kind]

    def body(builder: Any, shelf: Any, source: Any, step: Any, rows: Any, elements: Any) -> None:
        size = _times(builder, builder.udiv(elements, integer(form.block_size)), form.block_bytes)
        words = integer(reading.half_at) if reading.half_at else size
        words = builder.sub(words, integer(reading.words_at)) if reading.words_at else words
        whole = builder.and_(
            builder.icmp_signed(">=", rows, integer(LANES)),
            builder.and_(
                builder.icmp_signed(">=", words, integer(LINE_BYTES)),
                builder.icmp_signed("==", builder.and_(words, integer(reading.whole - 1)), integer(0)),
            ),
        )
        places = [local(builder, I64) for _ in range(3)]
        for place, value in zip(places, (source, step, words), strict=True):
            builder.store(value, place)
        with builder.if_then(builder.not_(whole), likely=False):
            copied = workspace(builder, COPIED_BYTES)
            copy_rows(builder, copied, source, step, _minimum(builder, rows, integer(LANES)), size)
            least = _minimum(builder, words, integer(LINE_BYTES))
            more = builder.sub(integer(LINE_BYTES), least)
            enough = builder.add(builder.add(words, more), integer(reading.whole - 1))
            enough = builder.and_(enough, integer(-reading.whole))
            for place, value in zip(places, (copied, integer(COPIED_ROW_BYTES), enough), strict=True):
                builder.store(value, place)
        first, step, words = (builder.load(place) for place in places)
        made = Shelf(builder, shelf)
        reading.transpose(builder, made, builder.add(first, integer(reading.words_at)), step, words)
        if reading.head is not None:
            heads = made.from_on(integer(reading.words))
            reading.head(builder, made, heads, lambda: half_of_rows(builder, first, step, reading.half_at))

    return body


def half_of_rows(builder: Any, first: Any, step: Any, offset: int) -> Lanes:
    """Return the f16 at `offset` of sixteen rows, which is not in a whole word."""
    found: Any = ir.Constant(SHORTS, ir.Undefined)
    for lane, row in enumerate(rows_from(builder, builder.add(first, integer(offset)), step)):
        short = builder.load(pointer(builder, row, SHORTS.element), align=1)
        found = builder.insert_element(found, short, ir.Constant(I32, lane))
    return from_half(builder, found)


def _prepared(
    builder: Any, kind: Stored, shelf: Any, source: Any, step: Any, rows: Any, elements: Any
) -> None:
    function = subroutine(builder, f"prepare_{kind.name.lower()}", (I64,) * 5, _prepare(kind))
    builder.call(function, [shelf, source, step, rows, elements])


def _place_of(builder: Any, kind: Stored, element: Any) -> Any:
    """Return the offset in a row of an element's block."""
    form = FORMS[kind]
    return _times(builder, builder.udiv(element, integer(form.block_size)), form.block_bytes)


def _lanes(builder: Any, kind: Stored, address: Any, run: Any) -> Iterator[Lanes]:
    """Make the lanes of a run from the shelf at an address."""
    shelf = Shelf(builder, address)
    return READINGS[kind].run(builder, shelf, shelf.from_on(integer(READINGS[kind].words)), run)


def _unpack(kind: Stored) -> Callable[..., None]:
    """Return code that unpacks a panel, sixteen columns at a time; it writes whole runs of sixteen
    k."""
    reading = READINGS[kind]

    def body(builder: Any, target: Any, source: Any, step: Any, depth: Any, columns: Any) -> None:
        shelf = workspace(builder, VECTOR_BYTES * reading.vectors)
        with loop(builder, integer(0), columns, LANES) as column:
            rows = builder.sub(columns, column)
            first = builder.add(source, builder.mul(column, step))
            panel = builder.add(target, _times(builder, column, 4))
            with loop(builder, integer(0), depth, reading.elements) as start:
                elements = _minimum(builder, builder.sub(depth, start), integer(reading.elements))
                here = builder.add(first, _place_of(builder, kind, start))
                _prepared(builder, kind, shelf, here, step, rows, elements)
                with loop(builder, integer(0), runs_of(builder, elements), 1) as run:
                    k = builder.add(start, _times(builder, run, LANES))
                    place = builder.add(panel, _times(builder, k, PANEL_ROW_BYTES))
                    for number, lanes in enumerate(_lanes(builder, kind, shelf, run)):
                        lanes.store(builder.add(place, integer(number * PANEL_ROW_BYTES)))

    return body


class _Ahead:
    """Prefetches rows in order, a share with each run."""

    def __init__(self, builder: Any, first: Any, step: Any, size: Any, share: int) -> None:
        """Start at the row `first`; `size`: bytes of a row; `share`: bytes of a prefetch, a divisor
        of size."""
        self._builder, self._step, self._size, self._share = builder, step, size, share
        self._row, self._offset = local(builder, I64), local(builder, I64)
        builder.store(first, self._row)
        builder.store(integer(0), self._offset)

    def go(self) -> None:
        """Prefetch the lines of the next share."""
        builder = self._builder
        row, offset = builder.load(self._row), builder.load(self._offset)
        start, end = builder.add(row, offset), builder.add(offset, integer(self._share))
        over = builder.icmp_signed(">=", end, self._size)
        builder.store(builder.select(over, builder.add(row, self._step), row), self._row)
        builder.store(builder.select(over, integer(0), end), self._offset)
        for line in range(0, self._share, CACHE_LINE_BYTES):
            prefetch(builder, builder.add(start, integer(line)), 2)


def _multiply(kind: Stored) -> Callable[..., None]:
    """Return code for the product of up to FEW_ROWS rows and FEW_COLUMNS columns."""
    reading = READINGS[kind]
    shelf_bytes = VECTOR_BYTES * reading.vectors
    share = reading.bytes * LANES // (reading.elements // LANES)

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
        ahead: Any,
    ) -> None:
        shelves = workspace(builder, shelf_bytes * GROUPS)
        sums = Sums(builder, rows, c, c_row, columns)
        sums.open(first)
        groups, whole = runs_of(builder, columns), builder.and_(depth, integer(-LANES))
        chunks = builder.udiv(builder.add(depth, integer(reading.elements - 1)), integer(reading.elements))
        fetches = _Ahead(builder, ahead, b_row, _times(builder, chunks, reading.bytes), share)
        with loop(builder, integer(0), whole, reading.elements) as start:
            elements = _minimum(builder, builder.sub(whole, start), integer(reading.elements))
            with loop(builder, integer(0), groups, 1) as group:
                column = _times(builder, group, LANES)
                here = builder.add(b, builder.mul(column, b_row))
                here = builder.add(here, _place_of(builder, kind, start))
                shelf = builder.add(shelves, _times(builder, group, shelf_bytes))
                _prepared(builder, kind, shelf, here, b_row, builder.sub(columns, column), elements)
            with loop(builder, integer(0), runs_of(builder, elements), 1) as run:
                k = builder.add(start, _times(builder, run, LANES))
                left = builder.add(a, _times(builder, k, 4))
                with loop(builder, integer(0), groups, 1) as group:
                    shelf = builder.add(shelves, _times(builder, group, shelf_bytes))
                    fetches.go()
                    sums.add(group, partial(_lanes, builder, kind, shelf, run), left, a_row)
        if FORMS[kind].block_size == 1:
            _add_rest(builder, kind, sums, (a, a_row), (b, b_row), (whole, depth), columns)
        sums.close()

    return body


def _add_rest(
    builder: Any, kind: Stored, sums: Sums, a: Any, b: Any, depths: tuple[Any, Any], columns: Any
) -> None:
    """Add the products of the last, less than sixteen elements, unpacked one group of columns at a
    time."""
    start, depth = depths
    panel = workspace(builder, PANEL_ROW_BYTES * LANES)
    rest = builder.sub(depth, start)
    with loop(builder, integer(0), columns, LANES) as column:
        source = builder.add(b[0], builder.mul(column, b[1]))
        source = builder.add(source, _place_of(builder, kind, start))
        function = subroutine(builder, f"unpack_{kind.name.lower()}", (I64,) * 5, _unpack(kind))
        present = _minimum(builder, builder.sub(columns, column), integer(LANES))
        builder.call(function, [panel, source, b[1], rest, present])
        with loop(builder, integer(0), rest, 1) as place:
            weights = Lanes.load(builder, builder.add(panel, _times(builder, place, PANEL_ROW_BYTES)))
            left = builder.add(a[0], _times(builder, builder.add(start, place), 4))
            sums.add(builder.udiv(column, integer(LANES)), lambda: [weights], left, a[1])


@emitted(types.void, *[types.int64] * 6)
def unpack_panel(
    builder: Any, kind: Any, target: Any, source: Any, step: Any, depth: Any, columns: Any
) -> None:
    """Unpack a panel of up to 32 columns from stored rows `step` bytes apart."""

    def call(each: Stored) -> None:
        name = f"unpack_{each.name.lower()}"
        function = subroutine(builder, name, (I64,) * 5, _unpack(each))
        builder.call(function, [target, source, step, depth, columns])

    by_type(builder, kind, call)


@emitted(types.void, *[types.int64] * 12)
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
    ahead: Any,
) -> None:
    """Multiply up to FEW_ROWS rows of a by up to FEW_COLUMNS rows of b, and prefetch as many bytes
    from `ahead` on. Strides are in bytes.
    """
    arguments = [rows, c, c_row, a, a_row, b, b_row, depth, columns, first, ahead]

    def call(each: Stored) -> None:
        name = f"multiply_{each.name.lower()}"
        builder.call(subroutine(builder, name, (I64,) * 11, _multiply(each)), arguments)

    by_type(builder, kind, call)


@Entry
def unpack_panels(
    kind: int, target: int, panel_bytes: int, source: int, step: int, depth: int, columns: int
) -> None:
    """Unpack stored rows `step` bytes apart, which are columns of the product, into panels.

    A panel must have room for whole runs of sixteen k.
    """
    for column in range(0, columns, PANEL_COLUMNS):
        present = min(columns - column, PANEL_COLUMNS)
        if kind >= GROUPED:
            unpack_grouped(kind - GROUPED, target, source + column * step, step, depth, present)
        else:
            unpack_panel(kind, target, source + column * step, step, depth, present)
        target += panel_bytes


@jit
def part_of(kind: int, depth: int) -> int:
    """Return the number of elements of a row that are multiplied before other rows; parts are
    equal."""
    times = (depth + READ_ELEMENTS[kind] - 1) // READ_ELEMENTS[kind]
    most = AHEAD_BYTES // WIDTHS[kind]
    parts = max(1, (times * READ_BYTES[kind] + most // 2) // most)
    found: int = (times + parts - 1) // parts * READ_ELEMENTS[kind]
    return max(found, 1)


@Entry
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
    ahead: int,
) -> None:
    """Multiply few rows by columns that are rows of the right side; the rows at `ahead` come
    next."""
    if kind >= GROUPED:
        most = MOST_AT_ONCE[kind - GROUPED]
        for row in range(0, rows, most):
            multiply_grouped(
                kind - GROUPED,
                min(rows - row, most),
                product + row * product_row,
                product_row,
                left + row * left_row,
                left_row,
                right,
                right_row,
                depth,
                columns,
                first,
            )
        return
    width = FEW_COLUMNS if depth <= SHORT_DEPTHS[kind] else WIDTHS[kind]
    part = part_of(kind, depth)
    for column in range(0, columns, width):
        last = column + width >= columns
        source = right + column * right_row
        for start in range(0, max(depth, 1), part):
            here = source + start // BLOCK_ELEMENTS[kind] * BLOCK_BYTES[kind]
            after = here + part // BLOCK_ELEMENTS[kind] * BLOCK_BYTES[kind]
            if start + part >= depth:
                after = ahead if last else source + width * right_row
            multiply_stored(
                kind,
                rows,
                product + 4 * column,
                product_row,
                left + 4 * start,
                left_row,
                here,
                right_row,
                min(part, depth - start),
                min(columns - column, width),
                first if start == 0 else 0,
                after,
            )
