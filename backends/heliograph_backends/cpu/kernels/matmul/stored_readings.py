"""The interface between `stored_matmul` and the readers of stored data types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

from llvmlite import ir

from heliograph_backends.cpu.kernels.matmul.stored_lanes import shifted
from heliograph_backends.cpu.kernels.matmul.stored_words import Shelf, transpose_words
from heliograph_backends.cpu.kernels.program.stored_types import Stored
from heliograph_backends.cpu.kernels.vector.lanes import Lanes, integer

#: Makes the f16 of sixteen rows that is apart from the words.
Half: TypeAlias = Callable[[], Lanes]


class Reading(NamedTuple):
    """The conversion of a data type's elements to lanes, `elements` of each of sixteen rows at a
    time.

    Their words are transposed to a shelf. `head` makes factors and the like, once for all elements,
    on another shelf. `run` makes the lanes of sixteen consecutive elements from both; the number of
    the run is known at run time.
    """

    elements: int
    bytes: int
    """Bytes of the elements."""
    words: int
    """Vectors of words."""
    heads: int
    """Vectors that the head makes."""
    run: Callable[[Any, Shelf, Shelf, Any], Iterator[Lanes]]
    head: Callable[[Any, Shelf, Shelf, Half], None] | None = None
    half_at: int = 0
    """The offset of an f16 that is apart from the words."""
    words_at: int = 0
    """The offset of the words; greater than 0 if the f16 is before them."""
    transpose: Callable[..., None] = transpose_words
    whole: int = 4
    """The number of bytes for `transpose` is a multiple of this."""

    @property
    def vectors(self) -> int:
        """Vectors on a shelf for both."""
        return self.words + self.heads


def bits_of(builder: Any, number: Any, first: int, count: int, times: int = 1) -> Any:
    """Return `count` bits of an int64 from bit `first` on, times a number."""
    if isinstance(number, ir.Constant):
        return integer((number.constant >> first) % 2**count * times)
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


def by_type(builder: Any, kind: Any, call: Callable[[Stored], None]) -> None:
    """Emit a switch with a call for each stored type."""
    done = builder.append_basic_block("stored.done")
    switch = builder.switch(kind, done)
    for each in Stored:
        with builder.goto_block(builder.append_basic_block(each.name.lower())):
            switch.add_case(integer(each), builder.block)
            call(each)
            builder.branch(done)
    builder.position_at_end(done)
