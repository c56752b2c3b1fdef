"""Matrix products with stored weights whose rows lie in groups of sixteen, see `RowGroups`.

Contract. As `stored_matmul`: the same chains, and so the same bits.

Theory of operation. A lane belongs to a row. In a group the same word of all rows is a vector, and
so is the same f16 of a block, half as long. So nothing is transposed: memory is read in order, and
a block takes its conversion and the multiply-adds alone. Up to eight rows share the converted
weights, and the sums of these rows and of some groups stay in registers along k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from llvmlite import ir
from numba import types

from heliograph_backends.cpu.kernels.matmul import stored_blocks as blocks
from heliograph_backends.cpu.kernels.matmul import stored_codes as codes
from heliograph_backends.cpu.kernels.matmul import stored_grids as grids
from heliograph_backends.cpu.kernels.matmul import stored_k_blocks as k_blocks
from heliograph_backends.cpu.kernels.matmul.packing import PANEL_ROW_BYTES
from heliograph_backends.cpu.kernels.matmul.stored_lanes import SHORTS, from_bfloat, from_half
from heliograph_backends.cpu.kernels.matmul.stored_readings import Half, Reading, by_type
from heliograph_backends.cpu.kernels.matmul.stored_words import VECTOR_BYTES, Shelf
from heliograph_backends.cpu.kernels.program.stored_types import FORMS, GROUP_ROWS, GROUPED, Stored
from heliograph_backends.cpu.kernels.program.words import CACHE_LINE_BYTES
from heliograph_backends.cpu.kernels.vector.lanes import (
    F32,
    F32_VECTOR,
    I32_VECTOR,
    I64,
    LANES,
    Lanes,
    emitted,
    has_feature,
    integer,
    local,
    loop,
    pointer,
    prefetch,
    subroutine,
    workspace,
)

SHORTS_BYTES: Final = 2 * GROUP_ROWS
EXPONENTS: Final = ir.VectorType(ir.IntType(8), GROUP_ROWS)
#: Bytes of a group that are prefetched ahead of those in use.
AHEAD_BYTES: Final = 4096
#: The groups that are multiplied side by side, by the most rows: their sums fit in registers.
SIDE_BY_SIDE: Final = {1: 4, 2: 4, 4: 2, 8: 2} if has_feature("avx512f") else {1: 2, 2: 2, 4: 1}
#: A single row of types that need little but memory: each group is a stream of a thread, and few
#: streams are read faster than many.
STREAMS: Final = {Stored.F16: 2, Stored.BF16: 2}
ROWS_AT_ONCE: Final = max(SIDE_BY_SIDE)
#: So many rows leave no registers for words that two runs share.
MANY_ROWS: Final = 8
#: Conversions that leave registers for the sums of fewer rows.
_LONG: Final = (Stored.IQ4_XS, Stored.Q2_K, Stored.Q5_K, Stored.TQ1_0, Stored.TQ2_0)
#: By the number of a type: the most rows that are multiplied at once.
MOST_AT_ONCE: Final = tuple(4 if kind in _LONG else ROWS_AT_ONCE for kind in range(GROUPED))


class Block(NamedTuple):
    """A block of sixteen rows: its address, and a shelf of what its head made."""

    builder: Any
    address: Any
    heads: Shelf

    def shorts(self, number: int) -> Any:
        """Return the f16 or bf16 number `number` of each row."""
        place = self.builder.add(self.address, integer(SHORTS_BYTES * number))
        return self.builder.load(pointer(self.builder, place, SHORTS), align=SHORTS_BYTES)

    def power(self) -> Lanes:
        """Return the power of two of each row, whose exponent is a byte."""
        exponents = self.builder.load(pointer(self.builder, self.address, EXPONENTS), align=GROUP_ROWS)
        return codes.power_of(self.builder, self.builder.zext(exponents, I32_VECTOR))

    def factors(self, kind: Stored) -> list[Lanes]:
        """Return what lies before the words."""
        if FORMS[kind].exponents:
            return [self.power()]
        return [from_half(self.builder, self.shorts(number)) for number in range(len(FORMS[kind].halves))]

    def words(self, kind: Stored) -> Shelf:
        """Return the words."""
        form = FORMS[kind]
        address = self.builder.add(self.address, integer(GROUP_ROWS * form.lead_bytes))
        return Shelf(self.builder, address, GROUP_ROWS if form.exponents else SHORTS_BYTES)


class Grouped(NamedTuple):
    """The conversion of a data type's blocks to lanes."""

    elements: int
    run: Callable[[Block, Any], Iterator[Lanes]]
    """Makes the lanes of sixteen consecutive elements."""
    heads: int = 0
    """Vectors that the head makes."""
    head: Callable[[Block], None] | None = None
    shares_words: bool = False
    """True if the two runs of a block are in the same words."""


def _floats(convert: Callable[[Any, Any], Lanes]) -> Grouped:
    def run(block: Block, _run: Any) -> Iterator[Lanes]:
        for element in range(LANES):
            yield convert(block.builder, block.shorts(element))

    return Grouped(LANES, run)


def _f32(block: Block, _run: Any) -> Iterator[Lanes]:
    for element in range(LANES):
        yield block.words(Stored.F32).lanes(element)


def _nvfp4(block: Block, run: Any) -> Iterator[Lanes]:
    words = block.words(Stored.NVFP4)
    return codes.nvfp4(block.builder, words.from_on(1), words.words(0), run)


def _of_block(kind: Stored, convert: blocks.Convert, shares_words: bool = False) -> Grouped:
    def run(block: Block, run: Any) -> Iterator[Lanes]:
        return convert(block.builder, block.words(kind), block.factors(kind), run)

    return Grouped(FORMS[kind].block_size, run, shares_words=shares_words)


def _nibbles(kind: Stored, convert: blocks.Convert) -> Grouped:
    return _of_block(kind, convert, shares_words=True)


def _of_reading(kind: Stored, reading: Reading) -> Grouped:
    """Return the reading of a block that is read at a time."""

    def head(block: Block) -> None:
        half: Half = lambda: from_half(block.builder, block.shorts(0))  # noqa: E731
        assert reading.head is not None
        reading.head(block.builder, block.words(kind), block.heads, half)

    def run(block: Block, run: Any) -> Iterator[Lanes]:
        return reading.run(block.builder, block.words(kind), block.heads, run)

    return Grouped(reading.elements, run, reading.heads, head)


READINGS: Final[dict[Stored, Grouped]] = {
    Stored.F32: Grouped(LANES, _f32),
    Stored.F16: _floats(from_half),
    Stored.BF16: _floats(from_bfloat),
    Stored.Q8_0: _of_block(Stored.Q8_0, blocks.q8_0),
    Stored.Q4_0: _nibbles(Stored.Q4_0, blocks.q4_0),
    Stored.Q4_1: _nibbles(Stored.Q4_1, blocks.q4_1),
    Stored.Q5_0: _nibbles(Stored.Q5_0, blocks.q5_0),
    Stored.Q5_1: _nibbles(Stored.Q5_1, blocks.q5_1),
    Stored.Q2_K: _of_reading(Stored.Q2_K, k_blocks.Q2_K),
    Stored.Q3_K: _of_reading(Stored.Q3_K, k_blocks.Q3_K),
    Stored.Q4_K: _of_reading(Stored.Q4_K, k_blocks.Q4_K),
    Stored.Q5_K: _of_reading(Stored.Q5_K, k_blocks.Q5_K),
    Stored.Q6_K: _of_reading(Stored.Q6_K, k_blocks.Q6_K),
    Stored.IQ4_NL: _nibbles(Stored.IQ4_NL, codes.iq4_nl),
    Stored.IQ4_XS: _of_reading(Stored.IQ4_XS, codes.IQ4_XS),
    Stored.MXFP4: _nibbles(Stored.MXFP4, codes.mxfp4),
    Stored.TQ1_0: _of_reading(Stored.TQ1_0, codes.TQ1_0),
    Stored.TQ2_0: _of_reading(Stored.TQ2_0, codes.TQ2_0),
    Stored.IQ1_S: _of_reading(Stored.IQ1_S, grids.IQ1_S),
    Stored.IQ1_M: _of_reading(Stored.IQ1_M, grids.IQ1_M),
    Stored.IQ2_XXS: _of_reading(Stored.IQ2_XXS, grids.IQ2_XXS),
    Stored.IQ2_XS: _of_reading(Stored.IQ2_XS, grids.IQ2_XS),
    Stored.IQ2_S: _of_reading(Stored.IQ2_S, grids.IQ2_S),
    Stored.IQ3_XXS: _of_reading(Stored.IQ3_XXS, grids.IQ3_XXS),
    Stored.IQ3_S: _of_reading(Stored.IQ3_S, grids.IQ3_S),
    Stored.NVFP4: Grouped(4 * LANES, _nvfp4),
    Stored.Q8_1: _of_block(Stored.Q8_1, blocks.q8_0),
    Stored.Q8_K: _of_reading(Stored.Q8_K, blocks.Q8_K),
    Stored.Q1_0: _of_block(Stored.Q1_0, blocks.q1_0),
    Stored.Q2_0: _of_block(Stored.Q2_0, blocks.q2_0),
}


def bytes_of(kind: Stored) -> int:
    """Return the bytes of a block of sixteen rows that is read at a time."""
    form = FORMS[kind]
    return READINGS[kind].elements // form.block_size * form.block_bytes * GROUP_ROWS


class _Registers:
    """The sums of some rows and groups, in registers."""

    def __init__(self, builder: Any, rows: int, groups: int) -> None:
        self._builder = builder
        self._cells = [[local(builder, F32_VECTOR) for _ in range(groups)] for _ in range(rows)]

    def open(self, first: Any, places: Sequence[Sequence[Any]]) -> None:
        """Start with zeros, or with the product's elements at these places."""
        builder = self._builder
        for cells in self._cells:
            for cell in cells:
                builder.store(ir.Constant(F32_VECTOR, [0.0] * LANES), cell)
        with builder.if_then(builder.icmp_signed("==", first, integer(0))):
            for cells, row in zip(self._cells, places, strict=True):
                for cell, place in zip(cells, row, strict=True):
                    builder.store(Lanes.load(builder, place).value, cell)

    def add(self, weights: Sequence[Lanes], lefts: Sequence[Any], offset: Any) -> None:
        """Add the products of each group's weights with the element of each row at an offset."""
        builder = self._builder
        for cells, left in zip(self._cells, lefts, strict=True):
            element = builder.load(pointer(builder, builder.add(left, offset), F32))
            factor = Lanes.broadcast(builder, element)
            for cell, lanes in zip(cells, weights, strict=True):
                total = Lanes(builder, builder.load(cell))
                builder.store(lanes.fma(factor, total).value, cell)

    def close(self, places: Sequence[Sequence[Any]]) -> None:
        """Write the product."""
        for cells, row in zip(self._cells, places, strict=True):
            for cell, place in zip(cells, row, strict=True):
                Lanes(self._builder, self._builder.load(cell)).store(place)


def _multiply(kind: Stored, count: int) -> Callable[..., None]:
    """Return code for the product of up to `count` rows and any groups; `count`: a key of
    SIDE_BY_SIDE. Missing rows are the last one again, and so are groups."""
    reading, size = READINGS[kind], bytes_of(kind)
    together = STREAMS.get(kind, SIDE_BY_SIDE[count]) if count == 1 else SIDE_BY_SIDE[count]
    heads_bytes = VECTOR_BYTES * reading.heads

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
        heads = workspace(builder, max(heads_bytes * together, VECTOR_BYTES))
        sums = _Registers(builder, count, together)
        last, step = builder.sub(rows, integer(1)), builder.mul(b_row, integer(GROUP_ROWS))
        numbers = [least(builder, integer(row), last) for row in range(count)]
        lefts = [builder.add(a, builder.mul(row, a_row)) for row in numbers]
        targets = [builder.add(c, builder.mul(row, c_row)) for row in numbers]
        groups = builder.udiv(columns, integer(GROUP_ROWS))
        last = builder.sub(groups, integer(1))
        with loop(builder, integer(0), groups, together) as group:
            members = [least(builder, builder.add(group, integer(each)), last) for each in range(together)]
            starts = [builder.add(b, builder.mul(each, step)) for each in members]
            offsets = [builder.mul(each, integer(VECTOR_BYTES)) for each in members]
            places = [[builder.add(target, each) for each in offsets] for target in targets]
            sums.open(first, places)
            with loop(builder, integer(0), depth, reading.elements) as start:
                offset = builder.mul(builder.udiv(start, integer(reading.elements)), integer(size))
                blocks = []
                for place, each in enumerate(starts):
                    shelf = Shelf(builder, builder.add(heads, integer(heads_bytes * place)))
                    blocks.append(Block(builder, builder.add(each, offset), shelf))
                _add_blocks(builder, kind, sums, blocks, lefts, start, _Ahead(offset, step, together))
            sums.close(places)

    return body


class _Ahead(NamedTuple):
    """The place of prefetches: ahead in a group, and behind its end in the one that is read after
    it."""

    offset: Any
    """Of the block in its group."""
    group_bytes: Any
    together: int

    def distance(self, builder: Any, read: Any) -> Any:
        """Return the distance from the block's start, of which bytes are read already."""
        found = builder.add(read, integer(AHEAD_BYTES))
        is_behind = builder.icmp_signed(">=", builder.add(self.offset, found), self.group_bytes)
        # The groups between are read side by side with this one.
        between = builder.mul(self.group_bytes, integer(self.together - 1))
        return builder.add(found, builder.select(is_behind, between, integer(0)))


def _add_blocks(
    builder: Any,
    kind: Stored,
    sums: _Registers,
    blocks: Sequence[Block],
    lefts: Sequence[Any],
    start: Any,
    ahead: _Ahead,
) -> None:
    """Add the products of a block of each group with elements of rows from `start` on."""
    reading = READINGS[kind]
    if reading.head is not None:
        for block in blocks:
            reading.head(block)
    runs = reading.elements // LANES
    if reading.shares_words and len(lefts) < MANY_ROWS:
        for number in range(runs):
            _add_run(builder, kind, sums, blocks, lefts, start, integer(number), ahead)
        return
    with loop(builder, integer(0), integer(runs), 1) as run:
        _add_run(builder, kind, sums, blocks, lefts, start, run, ahead)


def _add_run(
    builder: Any,
    kind: Stored,
    sums: _Registers,
    blocks: Sequence[Block],
    lefts: Sequence[Any],
    start: Any,
    run: Any,
    ahead: _Ahead,
) -> None:
    """Add the products of a run of sixteen elements of each group."""
    reading = READINGS[kind]
    share = bytes_of(kind) * LANES // reading.elements
    k = builder.mul(builder.add(start, builder.mul(run, integer(LANES))), integer(4))
    distance = ahead.distance(builder, builder.mul(run, integer(share)))
    for block in blocks:
        for line in range(0, share, CACHE_LINE_BYTES):
            place = builder.add(builder.add(block.address, distance), integer(line))
            prefetch(builder, place)
    runs = (reading.run(block, run) for block in blocks)
    for element, weights in enumerate(zip(*runs, strict=True)):
        sums.add(weights, lefts, builder.add(k, integer(4 * element)))


def least(builder: Any, first: Any, second: Any) -> Any:
    """Return the smaller of two int64."""
    return builder.select(builder.icmp_signed("<", first, second), first, second)


def _unpack(kind: Stored) -> Callable[..., None]:
    """Return code that unpacks a panel, sixteen columns at a time."""
    reading, size = READINGS[kind], bytes_of(kind)

    def body(builder: Any, target: Any, source: Any, step: Any, depth: Any, columns: Any) -> None:
        heads = Shelf(builder, workspace(builder, VECTOR_BYTES * max(reading.heads, 1)))
        with loop(builder, integer(0), columns, LANES) as column:
            first = builder.add(source, builder.mul(column, step))
            panel = builder.add(target, builder.mul(column, integer(4)))
            with loop(builder, integer(0), depth, reading.elements) as start:
                number = builder.udiv(start, integer(reading.elements))
                block = Block(builder, builder.add(first, builder.mul(number, integer(size))), heads)
                if reading.head is not None:
                    reading.head(block)
                with loop(builder, integer(0), integer(reading.elements // LANES), 1) as run:
                    k = builder.add(start, builder.mul(run, integer(LANES)))
                    place = builder.add(panel, builder.mul(k, integer(PANEL_ROW_BYTES)))
                    for each, lanes in enumerate(reading.run(block, run)):
                        lanes.store(builder.add(place, integer(each * PANEL_ROW_BYTES)))

    return body


@emitted(types.void, *[types.int64] * 6)
def unpack_grouped(
    builder: Any, kind: Any, target: Any, source: Any, step: Any, depth: Any, columns: Any
) -> None:
    """Unpack a panel of up to 32 columns from groups of rows of `step` bytes."""

    def call(each: Stored) -> None:
        name = f"unpack_grouped_{each.name.lower()}"
        function = subroutine(builder, name, (I64,) * 5, _unpack(each))
        builder.call(function, [target, source, step, depth, columns])

    by_type(builder, kind, call)


@emitted(types.void, *[types.int64] * 11)
def multiply_grouped(
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
    """Multiply up to MOST_AT_ONCE rows of a by rows of b, which are whole groups. Strides are in
    bytes."""

    def call(each: Stored) -> None:
        counts = [count for count in sorted(SIDE_BY_SIDE) if count <= MOST_AT_ONCE[each]]
        done = builder.append_basic_block("rows.done")
        for count in counts:
            name = f"multiply_grouped_{each.name.lower()}_{count}"
            function = subroutine(builder, name, (I64,) * 10, _multiply(each, count))
            arguments = [rows, c, c_row, a, a_row, b, b_row, depth, columns, first]
            if count == counts[-1]:
                builder.call(function, arguments)
                continue
            with builder.if_then(builder.icmp_signed("<=", rows, integer(count))):
                builder.call(function, arguments)
                builder.branch(done)
        builder.branch(done)
        builder.position_at_end(done)

    by_type(builder, kind, call)
