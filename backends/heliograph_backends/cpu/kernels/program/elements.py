"""How rows of elements become rows of other elements. Plain Python, without numba."""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

from heliograph_backends.cpu.kernels.program.stored_types import FORMS, Stored
from heliograph_backends.cpu.kernels.program.words import CONVERTED, ROUNDING, WIDENING

#: A row of float32 where a kernel also takes stored ones; numbers of `Stored` are greater.
FLOAT32: Final = 1


class Conversion(IntEnum):
    """From which elements to which; behind these are UNPACK + a stored type and PACK + a block's."""

    BYTES_1 = 0  # moved as they are, so many at a time
    BYTES_2 = 1
    BYTES_4 = 2
    BYTES_8 = 3
    F32_F16 = 4
    F32_BF16 = 5
    F16_F32 = 6
    F16_BF16 = 7
    BF16_F32 = 8
    BF16_F16 = 9


def _staged(widen: Conversion, narrow: Conversion) -> int:
    return (CONVERTED + widen) << WIDENING | (CONVERTED + narrow) << ROUNDING


#: How kernels of float32 that stage f16 and bf16 convert them.
HALF: Final = _staged(Conversion.F16_F32, Conversion.F32_F16)
BRAIN: Final = _staged(Conversion.BF16_F32, Conversion.F32_BF16)

#: Added to a `Stored`: its blocks become float32.
UNPACK: Final = 64
#: Added to a `Block`: float32 become its blocks.
PACK: Final = 128


class Block(IntEnum):
    """Blocks of 32 elements to which rows of float32 can be rounded."""

    Q8_0 = 0
    Q4_0 = 1
    Q4_1 = 2
    Q5_0 = 3
    Q5_1 = 4


BLOCK_ELEMENTS: Final = 32
BLOCK_BYTES: Final = {Block.Q8_0: 34, Block.Q4_0: 18, Block.Q4_1: 20, Block.Q5_0: 22, Block.Q5_1: 24}
#: By the bytes of an element: how it is moved.
BYTES: Final = {
    1: Conversion.BYTES_1,
    2: Conversion.BYTES_2,
    4: Conversion.BYTES_4,
    8: Conversion.BYTES_8,
}
_SIZES: Final = {"F32": 4, "F16": 2, "BF16": 2}


class Unit(NamedTuple):
    """What lies side by side in a row: an element, or a block of them."""

    elements: int
    bytes: int


def units_of(conversion: int) -> tuple[Unit, Unit]:
    """What a conversion reads and what it writes. Raises ValueError for one that there is not."""
    if conversion >= PACK:
        return Unit(1, 4), Unit(BLOCK_ELEMENTS, BLOCK_BYTES[Block(conversion - PACK)])
    if conversion >= UNPACK:
        form = FORMS[Stored(conversion - UNPACK)]
        return Unit(form.block_size, form.block_bytes), Unit(1, 4)
    name = Conversion(conversion).name
    if name.startswith("BYTES_"):
        both = Unit(1, int(name.removeprefix("BYTES_")))
        return both, both
    source, _, target = name.partition("_")
    return Unit(1, _SIZES[source]), Unit(1, _SIZES[target])
