"""Transposition of memory to lanes: the words of sixteen rows.

Theory of operation. A lane belongs to a row, while memory runs along k. So rows are read a line at
a time and transposed: word i of sixteen rows becomes vector i of a shelf in the first-level cache.
With AVX-512 a line of 64 bytes of each row fills one register, and sixteen of them are exchanged in
four rounds of sixteen; elsewhere 16 bytes of each row fill a quarter of one. A row's last line
overlaps the one before it, so that no line extends past its row; the common words are written
twice.

Rows that are shorter than a line, and groups of less than sixteen rows, are copied to a buffer
first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from heliograph_backends.cpu.kernels.vector.lanes import (
    I32,
    I32_VECTOR,
    I64,
    LANES,
    Lanes,
    has_feature,
    integer,
    loop,
    pointer,
    subroutine,
)

VECTOR_BYTES = 4 * LANES
PIECE = ir.VectorType(I32, 4)
SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)
PIECE_BYTES = 16
#: Bytes of a row that are transposed at once.
LINE_BYTES = 64 if has_feature("avx512f") else PIECE_BYTES
#: The distance of copied rows, a multiple of a line, and the room for sixteen rows; see
#: `copy_rows`.
COPIED_ROW_BYTES = 320
COPIED_BYTES = LANES * COPIED_ROW_BYTES


class Shelf:
    """Vectors of float32 or int32 at an address, with indices known at compile time, or int64 at
    run time."""

    def __init__(self, builder: Any, address: Any, align: int = VECTOR_BYTES) -> None:
        self._builder, self.address, self._align = builder, address, align

    def _place(self, index: Any) -> Any:
        if isinstance(index, int):
            return self._builder.add(self.address, integer(VECTOR_BYTES * index))
        return self._builder.add(self.address, self._builder.mul(index, integer(VECTOR_BYTES)))

    def from_on(self, index: Any) -> Shelf:
        """Return the vectors from a number on."""
        return Shelf(self._builder, self._place(index), self._align)

    def put(self, index: Any, value: Any) -> None:
        """Store a vector."""
        words = self._builder.bitcast(value, I32_VECTOR)
        self._builder.store(words, pointer(self._builder, self._place(index), I32_VECTOR), align=self._align)

    def words(self, index: Any) -> Any:
        """Return an int32 vector."""
        return self._builder.load(pointer(self._builder, self._place(index), I32_VECTOR), align=self._align)

    def lanes(self, index: Any) -> Lanes:
        """Return a float32 vector."""
        return Lanes.from_bits(self._builder, self.words(index))


def rows_from(builder: Any, first: Any, step: Any) -> list[Any]:
    """Return the addresses of sixteen rows, from six bases and base + index * scale."""
    found: dict[int, Any] = {}
    for start in range(0, LANES, 3):
        base = builder.add(first, builder.mul(step, integer(start)))
        for times in (0, 1, 2, 4, 8):
            if start + times < LANES and start + times not in found:
                found[start + times] = builder.add(base, builder.mul(step, integer(times)))
    return [found[row] for row in range(LANES)]


def shuffled(builder: Any, first: Any, second: Any, order: Sequence[int]) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(order)), list(order)))


def _in_quarters(builder: Any, first: Any, second: Any, order: Sequence[int]) -> Any:
    """Choose four words from two vectors, the same in each quarter; numbers from 4 on mean the
    second."""
    places = [
        quarter + place if place < 4 else LANES + quarter + place - 4
        for quarter in range(0, LANES, 4)
        for place in order
    ]
    return shuffled(builder, first, second, places)


def _of_quarters(builder: Any, first: Any, second: Any, order: Sequence[int]) -> Any:
    """Choose four quarters from two vectors; numbers from 4 on mean the second."""
    return shuffled(builder, first, second, [4 * quarter + word for quarter in order for word in range(4)])


def _transposed_quarters(builder: Any, vectors: Sequence[Any]) -> list[Any]:
    """Transpose the four words of four vectors in each quarter."""
    a, b, c, d = vectors
    low, high = (0, 4, 1, 5), (2, 6, 3, 7)
    first, third = _in_quarters(builder, a, b, low), _in_quarters(builder, a, b, high)
    second, fourth = _in_quarters(builder, c, d, low), _in_quarters(builder, c, d, high)
    low, high = (0, 1, 4, 5), (2, 3, 6, 7)
    pairs = ((first, second), (third, fourth))
    return [_in_quarters(builder, one, other, order) for one, other in pairs for order in (low, high)]


def _line_words(builder: Any, rows: Sequence[Any]) -> list[Any]:
    """Return the words of 64 bytes of sixteen rows."""
    return transposed(builder, [builder.load(pointer(builder, row, I32_VECTOR), align=1) for row in rows])


def transposed(builder: Any, lines: Sequence[Any]) -> list[Any]:
    """Return sixteen vectors of words transposed."""
    # For each four rows: quarter j of vector i has word 4 * j + i.
    fours = [_transposed_quarters(builder, lines[first : first + 4]) for first in range(0, LANES, 4)]
    found: list[Any] = [None] * LANES
    for place in range(4):
        a, b, c, d = (four[place] for four in fours)
        for half, order in ((0, (0, 1, 4, 5)), (8, (2, 3, 6, 7))):
            left, right = _of_quarters(builder, a, b, order), _of_quarters(builder, c, d, order)
            found[half + place] = _of_quarters(builder, left, right, (0, 2, 4, 6))
            found[half + 4 + place] = _of_quarters(builder, left, right, (1, 3, 5, 7))
    return found


def piece_words(builder: Any, rows: Sequence[Any]) -> list[Any]:
    """Return the words of 16 bytes of sixteen rows: quarter j of vector i has those of row 4 * j +
    i."""
    pieces = [builder.load(pointer(builder, row, PIECE), align=1) for row in rows]
    joined = []
    for first in range(4):
        a, b, c, d = pieces[first::4]
        low, high = shuffled(builder, a, b, range(8)), shuffled(builder, c, d, range(8))
        joined.append(shuffled(builder, low, high, range(LANES)))
    return _transposed_quarters(builder, joined)


def _line_shorts(builder: Any, rows: Sequence[Any]) -> list[Any]:
    """Return the shorts of 64 bytes of sixteen rows.

    Of each sixteen consecutive shorts, vector i of eight has numbers i and i + 8 of all rows. Two
    interleaved rows are words with the same short of both.
    """
    lines = [builder.load(pointer(builder, row, SHORTS), align=1) for row in rows]
    fours = []
    for half in (0, 4):
        order = [
            quarter + half + place + side
            for quarter in range(0, 32, 8)
            for place in range(4)
            for side in (0, 32)
        ]
        pairs = [
            shuffled(builder, one, other, order) for one, other in zip(lines[::2], lines[1::2], strict=True)
        ]
        words = [builder.bitcast(pair, I32_VECTOR) for pair in pairs]
        fours += [_transposed_quarters(builder, words[first : first + 4]) for first in (0, 4)]
    found: list[Any] = [None] * LANES
    for half in (0, 1):
        for place, (some, others) in enumerate(zip(*fours[2 * half : 2 * half + 2], strict=True)):
            for eight, quarters in ((0, (0, 4, 1, 5)), (8, (2, 6, 3, 7))):
                found[eight + 4 * half + place] = _of_quarters(builder, some, others, quarters)
    return found


def _transpose(read: Callable[[Any, Sequence[Any]], list[Any]]) -> Callable[..., None]:
    def body(builder: Any, shelf: Any, source: Any, step: Any, size: Any) -> None:
        last = builder.sub(size, integer(LINE_BYTES))
        with loop(builder, integer(0), size, LINE_BYTES) as index:
            place = builder.select(builder.icmp_signed("<", index, last), index, last)
            rows = rows_from(builder, builder.add(source, place), step)
            found = Shelf(builder, builder.add(shelf, builder.mul(place, integer(LANES))))
            for number, vector in enumerate(read(builder, rows)):
                found.put(number, vector)

    return body


def transpose_words(builder: Any, shelf: Shelf, source: Any, step: Any, size: Any) -> None:
    """Put the words of `size` bytes of sixteen rows, `step` bytes apart, on a shelf.

    The size is at least a line, and a multiple of a word.
    """
    read = _line_words if LINE_BYTES > PIECE_BYTES else piece_words
    function = subroutine(builder, "transpose_words", (I64,) * 4, _transpose(read))
    builder.call(function, [shelf.address, source, step, size])


def transpose_shorts(builder: Any, shelf: Shelf, source: Any, step: Any, size: Any) -> None:
    """Put shorts on a shelf, see `_line_shorts`, for lines of 64 bytes; the size is a multiple of
    32 bytes."""
    function = subroutine(builder, "transpose_shorts", (I64,) * 4, _transpose(_line_shorts))
    builder.call(function, [shelf.address, source, step, size])


def _copy(builder: Any, target: Any, source: Any, step: Any, rows: Any, size: Any) -> None:
    """Copy whole pieces, the last of which ends with the row; a shorter row by shorts, its smallest
    unit."""
    short = ir.IntType(16)
    with loop(builder, integer(0), rows, 1) as row:
        there = builder.add(target, builder.mul(row, integer(COPIED_ROW_BYTES)))
        here = builder.add(source, builder.mul(row, step))
        last = builder.sub(size, integer(PIECE_BYTES))
        with builder.if_else(builder.icmp_signed(">=", last, integer(0))) as (long, few):
            with long, loop(builder, integer(0), size, PIECE_BYTES) as index:
                place = builder.select(builder.icmp_signed("<", index, last), index, last)
                piece = builder.load(pointer(builder, builder.add(here, place), PIECE), align=1)
                builder.store(piece, pointer(builder, builder.add(there, place), PIECE), align=1)
            with few, loop(builder, integer(0), size, 2) as index:
                one = builder.load(pointer(builder, builder.add(here, index), short), align=1)
                builder.store(one, pointer(builder, builder.add(there, index), short), align=1)


def copy_rows(builder: Any, target: Any, source: Any, step: Any, rows: Any, size: Any) -> None:
    """Copy `size` bytes of rows `step` bytes apart to a target of COPIED_BYTES, COPIED_ROW_BYTES
    apart."""
    function = subroutine(builder, "copy_rows", (I64,) * 5, _copy)
    builder.call(function, [target, source, step, rows, size])
