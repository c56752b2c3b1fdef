"""The interface between `stored_matmul` and the readers of stored data types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from heliograph_backends.cpu.kernels.matmul.stored_lanes import shifted
from heliograph_backends.cpu.kernels.matmul.stored_words import Shelf, transpose_words
from heliograph_backends.cpu.kernels.vector.lanes import Lanes, integer


class Rows(NamedTuple):
    """The addresses of sixteen rows."""

    first: Any
    step: Any


class Reading(NamedTuple):
    """The conversion of a data type's elements to lanes, `elements` of each of sixteen rows at a
    time.

    Their words are transposed to a shelf. `head` adds factors and the like, once for all elements.
    `run` makes the lanes of sixteen consecutive elements; the number of the run is known at run
    time.
    """

    elements: int
    bytes: int
    """Bytes of the elements."""
    vectors: int
    """Vectors on the shelf: words, and those that the head adds."""
    run: Callable[[Any, Shelf, Any], Iterator[Lanes]]
    head: Callable[[Any, Shelf, Rows], None] | None = None
    words_bytes: int = 0
    """Bytes at the start whose words are transposed; 0: all."""
    transpose: Callable[..., None] = transpose_words
    whole: int = 4
    """The number of bytes for `transpose` is a multiple of this."""


def bits_of(builder: Any, number: Any, first: int, count: int, times: int = 1) -> Any:
    """Return `count` bits of an int64 from bit `first` on, times a number."""
    found = builder.lshr(number, integer(first)) if first else number
    found = builder.and_(found, integer((1 << count) - 1))
    return builder.mul(found, integer(times)) if times != 1 else found


def total(builder: Any, *numbers: Any) -> Any:
    """Return a sum of int64 values."""
    found, *others = (integer(each) if isinstance(each, int) else each for each in numbers)
    for each in others:
        found = builder.add(found, each)
    return found


def each_byte(builder: Any, words: Any) -> Iterator[Any]:
    """Yield the words with each byte in turn as the lowest."""
    for byte in range(4):
        yield shifted(builder, words, 8 * byte)
