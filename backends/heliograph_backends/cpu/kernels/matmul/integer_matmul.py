"""Matrix products of rows of q8_0 with weights that are stored as blocks, in integers.

Contract. For each block of 32 elements along k, in order, and for each part of it that shares a
factor and an offset:

    total = fma(factor * scale, sum(quantum * number), total)
    total = fma(offset * scale, sum(number), total)        if the type has offsets

from +0, where `scale` and the numbers are those of the row. The sums of integers are exact and
factors round to f32, so the bits depend neither on the instructions, nor on the number of rows, nor
on the threads.

Theory of operation. A lane belongs to a row of the weight, see `RowGroups`; a weight in its own
order is brought into groups in the cache, sixteen rows at a time. The four bytes of a word of
quanta are multiplied by the four numbers of a word of the row, which all lanes share: one
instruction with VNNI, else two of pairs of 16 bits. Quanta are unsigned here, and what that adds is
known from the sum of the row's numbers, so rows are staged: scale, sums and numbers of a block are
adjacent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from llvmlite import ir
from numba import types

from heliograph_backends.cpu.kernels.matmul import integer_readings
from heliograph_backends.cpu.kernels.matmul.grouped_matmul import READINGS, Block, bytes_of, least
from heliograph_backends.cpu.kernels.matmul.stored_lanes import constant, from_half, shifted
from heliograph_backends.cpu.kernels.matmul.stored_readings import by_type
from heliograph_backends.cpu.kernels.matmul.stored_words import (
    PIECE_BYTES,
    VECTOR_BYTES,
    Shelf,
    piece_words,
    shuffled,
)
from heliograph_backends.cpu.kernels.program.stored_types import (
    FORMS,
    GROUP_ROWS,
    GROUPED,
    STAGED_BLOCK,
    STAGED_BLOCK_BYTES,
    Stored,
)
from heliograph_backends.cpu.kernels.program.words import CACHE_LINE_BYTES
from heliograph_backends.cpu.kernels.vector.lanes import (
    F32,
    F32_VECTOR,
    I32,
    I32_VECTOR,
    I64,
    LANES,
    Entry,
    Lanes,
    emitted,
    has_feature,
    integer,
    intrinsic_function,
    local,
    loop,
    pointer,
    prefetch,
    splat,
    subroutine,
    tail_mask,
    workspace,
)

#: A staged block: the scale, the sum of its first and its last sixteen numbers and of all, then the
#: numbers. The sums are integers times -zero, or floats for types with offsets.
SUMS_AT: Final = 4
NUMBERS_AT: Final = 16
Q8_0_BYTES: Final = FORMS[Stored.Q8_0].block_bytes
HAS_VNNI: Final = has_feature("avx512vnni") and has_feature("avx512f")
#: Rows that share the quanta of a group.
COUNTS: Final = (1, 2, 4, 8) if has_feature("avx512f") else (1, 2, 4)
ROWS_AT_ONCE: Final = max(COUNTS)
#: Bytes of a group that are prefetched ahead of those in use.
AHEAD_BYTES: Final = 4096
_SHORTS = ir.VectorType(ir.IntType(16), 16)
_HALF_SHORT = ir.VectorType(ir.IntType(16), LANES)


# Staging


def _stage(zero: int, offsets: bool) -> Callable[..., None]:
    """Return code that stages a row of q8_0."""

    def body(builder: Any, target: Any, source: Any, depth: Any) -> None:
        eight = ir.Constant(_SHORTS, [8] * 16)
        with loop(builder, integer(0), depth, STAGED_BLOCK) as k:
            block = builder.udiv(k, integer(STAGED_BLOCK))
            here = builder.add(source, builder.mul(block, integer(Q8_0_BYTES)))
            there = builder.add(target, builder.mul(block, integer(STAGED_BLOCK_BYTES)))
            half = builder.load(pointer(builder, here, _SHORTS.element), align=2)
            scale = from_half(builder, splat(builder, half, _HALF_SHORT))
            _put(builder, there, builder.extract_element(scale.value, ir.Constant(I32, 0)))
            place = pointer(builder, builder.add(here, integer(2)), _SHORTS)
            numbers = builder.load(place, align=2)
            even = builder.ashr(builder.shl(numbers, eight), eight)
            odd = builder.ashr(numbers, eight)
            for number, value in enumerate(_sums(builder, builder.add(even, odd))):
                less = builder.mul(value, ir.Constant(I32, -zero))
                found = builder.sitofp(value, F32) if offsets else less
                _put(builder, builder.add(there, integer(SUMS_AT + 4 * number)), found)
            start = builder.add(there, integer(NUMBERS_AT))
            if HAS_VNNI:
                builder.store(numbers, pointer(builder, start, _SHORTS), align=4)
                return
            # Bytes 0 and 2 of each word as a pair, then bytes 1 and 3.
            for number, pairs in enumerate((even, odd)):
                builder.store(
                    pairs, pointer(builder, builder.add(start, integer(32 * number)), _SHORTS), align=4
                )

    return body


def _put(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, pointer(builder, address, value.type), align=4)


def _sums(builder: Any, pairs: Any) -> list[Any]:
    """Return the sums of the first and the last eight of sixteen shorts, and of all, as int32."""
    for width in (4, 2, 1):
        pairs = builder.add(pairs, shuffled(builder, pairs, pairs, [lane ^ width for lane in range(16)]))
    halves = [builder.sext(builder.extract_element(pairs, ir.Constant(I32, lane)), I32) for lane in (0, 8)]
    return [*halves, builder.add(*halves)]


@emitted(types.void, *[types.int64] * 4)
def stage_row(builder: Any, kind: Any, target: Any, source: Any, depth: Any) -> None:
    """Stage a row of q8_0 for a product with a stored type."""

    def call(each: Stored) -> None:
        reading = integer_readings.READINGS.get(each)
        if reading is None:
            return
        name = f"stage_{reading.zero}"
        function = subroutine(builder, name, (I64,) * 3, _stage(reading.zero, reading.zero == 0))
        builder.call(function, [target, source, depth])

    by_type(builder, kind, call)


@Entry
def stage_integers(
    kind: int, target: int, target_row: int, source: int, source_row: int, rows: int, depth: int
) -> None:
    """Stage rows of q8_0 for `multiply_integers`."""
    for _ in range(rows):
        stage_row(kind % GROUPED, target, source, depth)
        target += target_row
        source += source_row


# Sums


def _multiplied(builder: Any, total: Any, words: Any, numbers: Any) -> Any:
    """Add the products of sixteen pairs of shorts to sixteen int32."""
    for feature, name, parts in (("avx512bw", "avx512.pmaddw.d.512", 1), ("avx2", "avx2.pmadd.wd", 2)):
        if has_feature(feature):
            return builder.add(total, _by_pairs(builder, name, parts, words, numbers))
    if builder.module.triple.startswith("x86_64"):
        return builder.add(total, _by_pairs(builder, "sse2.pmadd.wd", 4, words, numbers))
    # Words have positive shorts.
    for own, given in (
        (builder.and_(words, constant(0xFFFF)), shifted(builder, numbers, -16)),
        (shifted(builder, words, 16), numbers),
    ):
        total = builder.add(total, builder.mul(own, builder.ashr(given, constant(16))))
    return total


def _by_pairs(builder: Any, name: str, parts: int, words: Any, numbers: Any) -> Any:
    """Multiply shorts, and add those of a word, with an x86 instruction on a part of the lanes."""
    lanes = LANES // parts
    shorts, found = ir.VectorType(ir.IntType(16), 2 * lanes), ir.VectorType(I32, lanes)
    function = intrinsic_function(builder, f"llvm.x86.{name}", found, shorts, shorts)
    made = []
    for first in range(0, LANES, lanes):
        sides = [shuffled(builder, side, side, range(first, first + lanes)) for side in (words, numbers)]
        made.append(builder.call(function, [builder.bitcast(side, shorts) for side in sides]))
    while len(made) > 1:
        pairs = zip(made[::2], made[1::2], strict=True)
        made = [shuffled(builder, low, high, range(2 * low.type.count)) for low, high in pairs]
    return made[0]


def _word(builder: Any, address: Any) -> Any:
    """Return sixteen lanes of the word at an address."""
    return splat(builder, builder.load(pointer(builder, address, I32), align=4), I32_VECTOR)


class _Quanta:
    """The quanta of 32 elements of sixteen rows, and their products with numbers of a row."""

    def __init__(self, builder: Any, words: Sequence[Any]) -> None:
        self._builder = builder
        low = constant(0x00FF00FF)
        self._words: list[list[Any]] = [[each] for each in words]
        if not HAS_VNNI:
            self._words = [
                [builder.and_(each, low), builder.and_(shifted(builder, each, 8), low)] for each in words
            ]

    def sums(self, start: Any, numbers: Any, first: int, count: int) -> Any:
        """Return `start` plus the sums over `count` words from `first` on; `numbers`: the address
        of the row's."""
        builder, total = self._builder, start
        for place in range(first, first + count):
            for part, words in enumerate(self._words[place]):
                given = _word(builder, builder.add(numbers, integer(4 * place + 32 * part)))
                if HAS_VNNI:
                    name = "llvm.x86.avx512.vpdpbusd.512"
                    function = intrinsic_function(builder, name, I32_VECTOR, *[I32_VECTOR] * 3)
                    total = builder.call(function, [total, words, given])
                else:
                    total = _multiplied(builder, total, words, given)
        return total


# Products


def _multiply(kind: Stored, count: int) -> Callable[..., None]:
    """Return code for the product of up to `count` staged rows and a group of sixteen columns.
    Missing rows are the last one again."""
    reading, own = READINGS[kind], integer_readings.READINGS[kind]
    size, blocks = bytes_of(kind), READINGS[kind].elements // STAGED_BLOCK
    share = size // blocks

    def body(
        builder: Any, rows: Any, c: Any, c_row: Any, staged: Any, b: Any, depth: Any, columns: Any
    ) -> None:
        heads = Shelf(builder, workspace(builder, VECTOR_BYTES * max(reading.heads, 1)))
        cells = [local(builder, F32_VECTOR) for _ in range(count)]
        last = builder.sub(rows, integer(1))
        numbers = [least(builder, integer(row), last) for row in range(count)]
        row_bytes = builder.mul(builder.udiv(depth, integer(STAGED_BLOCK)), integer(STAGED_BLOCK_BYTES))
        lefts = [builder.add(staged, builder.mul(row, row_bytes)) for row in numbers]
        for cell in cells:
            builder.store(ir.Constant(F32_VECTOR, [0.0] * LANES), cell)
        with loop(builder, integer(0), depth, reading.elements) as start:
            number = builder.udiv(start, integer(reading.elements))
            block = Block(builder, builder.add(b, builder.mul(number, integer(size))), heads)
            if reading.head is not None:
                reading.head(block)
            with loop(builder, integer(0), integer(blocks), 1) as part:
                ahead = builder.add(builder.mul(part, integer(share)), integer(AHEAD_BYTES))
                for line in range(0, share, CACHE_LINE_BYTES):
                    prefetch(builder, builder.add(block.address, builder.add(ahead, integer(line))), 2)
                place = builder.add(builder.udiv(start, integer(STAGED_BLOCK)), part)
                place = builder.mul(place, integer(STAGED_BLOCK_BYTES))
                runs = [builder.add(builder.mul(part, integer(2)), integer(half)) for half in (0, 1)]
                quanta = _Quanta(builder, [each for run in runs for each in own.words(block, run)])
                factors = [own.factors(block, run) for run in runs[: own.parts]]
                for cell, left in zip(cells, lefts, strict=True):
                    _add(builder, cell, builder.add(left, place), quanta, factors)
        for row, cell in enumerate(cells):
            target = builder.add(c, builder.mul(numbers[row], c_row))
            Lanes(builder, builder.load(cell)).store_masked(target, tail_mask(builder, columns))

    return body


def _add(builder: Any, cell: Any, left: Any, quanta: _Quanta, factors: Sequence[Any]) -> None:
    """Add the products of a block to the sums of a row."""
    scale = Lanes.broadcast(builder, builder.load(pointer(builder, left, F32), align=4))
    total = Lanes(builder, builder.load(cell))
    each = 8 // len(factors)
    for part, (factor, offset) in enumerate(factors):
        sum_at = builder.add(left, integer(SUMS_AT + 4 * (part if len(factors) > 1 else 2)))
        start = constant(0) if offset is not None else _word(builder, sum_at)
        found = quanta.sums(start, builder.add(left, integer(NUMBERS_AT)), part * each, each)
        total = (factor * scale).fma(Lanes(builder, builder.sitofp(found, F32_VECTOR)), total)
        if offset is not None:
            whole = Lanes.broadcast(builder, builder.load(pointer(builder, sum_at, F32), align=4))
            total = (offset * scale).fma(whole, total)
    builder.store(total.value, cell)


@emitted(types.void, *[types.int64] * 8)
def multiply_group(
    builder: Any,
    kind: Any,
    rows: Any,
    c: Any,
    c_row: Any,
    staged: Any,
    b: Any,
    depth: Any,
    columns: Any,
) -> None:
    """Multiply up to ROWS_AT_ONCE staged rows by a group, the first `columns` of its rows."""

    def call(each: Stored) -> None:
        if each not in integer_readings.READINGS:
            return
        done = builder.append_basic_block("rows.done")
        arguments = [rows, c, c_row, staged, b, depth, columns]
        for count in COUNTS:
            name = f"multiply_integers_{each.name.lower()}_{count}"
            function = subroutine(builder, name, (I64,) * 7, _multiply(each, count))
            with builder.if_then(builder.icmp_signed("<=", rows, integer(count))):
                builder.call(function, arguments)
                builder.branch(done)
        builder.branch(done)
        builder.position_at_end(done)

    by_type(builder, kind, call)


def _regroup(kind: Stored) -> Callable[..., None]:
    """Return code that writes rows as a group, see `RowGroups`; missing rows are the last one
    again."""
    form = FORMS[kind]
    leads = [(offset, 2) for offset in form.halves] + [(place, 1) for place in range(form.exponents)]
    first = 0 if form.halves[:1] > (0,) else form.lead_bytes
    size = form.block_bytes - form.lead_bytes
    # The last piece of a block overlaps the one before it; the common words are written twice.
    pieces = sorted({*range(0, size - PIECE_BYTES, PIECE_BYTES), size - PIECE_BYTES})

    def body(builder: Any, target: Any, source: Any, step: Any, depth: Any, columns: Any) -> None:
        last = builder.sub(columns, integer(1))
        rows = [
            builder.add(source, builder.mul(least(builder, integer(lane), last), step))
            for lane in range(GROUP_ROWS)
        ]
        with loop(builder, integer(0), builder.udiv(depth, integer(form.block_size)), 1) as number:
            block = builder.mul(number, integer(form.block_bytes))
            there = builder.add(target, builder.mul(block, integer(GROUP_ROWS)))

            def places(offset: int, block: Any = block) -> list[Any]:
                return [builder.add(row, builder.add(block, integer(offset))) for row in rows]

            for offset, unit_bytes in leads:
                unit = ir.IntType(8 * unit_bytes)
                for lane, place in enumerate(places(offset)):
                    found = builder.load(pointer(builder, place, unit), align=1)
                    at = builder.add(there, integer(unit_bytes * lane))
                    builder.store(found, pointer(builder, at, unit), align=1)
                there = builder.add(there, integer(GROUP_ROWS * unit_bytes))
            shelf = Shelf(builder, there, 1)
            for offset in pieces:
                for word, lanes in enumerate(piece_words(builder, places(first + offset))):
                    shelf.put(offset // 4 + word, lanes)

    return body


@emitted(types.void, *[types.int64] * 6)
def regroup_rows(
    builder: Any, kind: Any, target: Any, source: Any, step: Any, depth: Any, columns: Any
) -> None:
    """Write up to sixteen rows, `step` bytes apart, as a group."""

    def call(each: Stored) -> None:
        if each in integer_readings.READINGS:
            name = f"regroup_{each.name.lower()}"
            function = subroutine(builder, name, (I64,) * 5, _regroup(each))
            builder.call(function, [target, source, step, depth, columns])

    by_type(builder, kind, call)


@Entry
def multiply_integers(
    kind: int,
    product: int,
    product_row: int,
    staged: int,
    staged_row: int,
    right: int,
    right_row: int,
    rows: int,
    columns: int,
    depth: int,
    group: int,
) -> None:
    """Multiply staged rows by columns that are rows of the right side; `group`: room for sixteen of
    these."""
    grouped, kind = kind % (2 * GROUPED) >= GROUPED, kind % GROUPED
    for column in range(0, columns, GROUP_ROWS):
        present = min(columns - column, GROUP_ROWS)
        here = right + column * right_row
        if not grouped:
            regroup_rows(kind, group, here, right_row, depth, present)
            here = group
        for row in range(0, rows, ROWS_AT_ONCE):
            multiply_group(
                kind,
                min(rows - row, ROWS_AT_ONCE),
                product + row * product_row + 4 * column,
                product_row,
                staged + row * staged_row,
                here,
                depth,
                present,
            )
