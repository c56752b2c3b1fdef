"""How the elements of a type that weights are stored in are read: what `stored_matmul` asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from heliograph_backends.cpu.kernels.matmul.stored_lanes import shifted
from heliograph_backends.cpu.kernels.matmul.stored_words import Shelf, transpose_words
from heliograph_backends.cpu.kernels.vector.lanes import Lanes, integer


class Rows(NamedTuple):
    """Where sixteen rows are."""

    first: Any
    step: Any


class Reading(NamedTuple):
    """How the elements of a type become lanes, `elements` of each of sixteen rows at a time.

    Their words are transposed to a shelf; `head` adds, once for all of them, factors and the like; `run`
    makes the lanes of sixteen consecutive elements, whose number is told at run time.
    """

    elements: int
    bytes: int
    """Of so many elements."""
    vectors: int
    """On the shelf, words and what the head adds."""
    run: Callable[[Any, Shelf, Any], Iterator[Lanes]]
    head: Callable[[Any, Shelf, Rows], None] | None = None
    words_bytes: int = 0
    """Bytes whose words are transposed, from the first on; 0: all."""
    transpose: Callable[..., None] = transpose_words
    whole: int = 4
    """Bytes that `transpose` takes a whole number of."""


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
    """Return words with each byte lowest in turn."""
    for byte in range(4):
        yield shifted(builder, words, 8 * byte)
