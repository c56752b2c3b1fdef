"""Conversions of rows between data types. Plain Python, without numba."""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

from heliograph_backends.cpu.kernels.program.stored_types import FORMS, Stored
from heliograph_backends.cpu.kernels.program.words import CONVERTED, ROUNDING, WIDENING

#: The form of float32 rows in kernels that also take stored ones; the numbers of `Stored` are
#: greater.
FLOAT32: Final = 1


class Conversion(IntEnum):
    """A conversion of elements. UNPACK + a stored type and PACK + a block are conversions, too."""

    BYTES_1 = 0  # moved unchanged, by this element size
    BYTES_2 = 1
    BYTES_4 = 2
    BYTES_8 = 3
    F32_F16 = 4
    F32_BF16 = 5
    I32_I8 = 6  # the low bits
    I32_I16 = 7
    I32_I64 = 8
    U32_I64 = 9
    F32_I64 = 10  # towards 0; the least int64 for numbers outside, and NaN
    F32_F64 = 11
    F16_F32 = 12  # the first of those that end with four bytes, up to F64_F32
    BF16_F32 = 13
    BOOL_I32 = 14  # 1 for any byte but 0
    I8_I32 = 15
    U8_I32 = 16
    I16_I32 = 17
    U16_I32 = 18
    I64_I32 = 19  # the low bits
    I64_HIGH = 20  # the high bits, as int32
    I64_F32 = 21
    F64_F32 = 22
    F16_BF16 = 23
    BF16_F16 = 24
    ADD_F32 = 25  # combined with the target's elements
    MUL_F32 = 26
    MAX_F32 = 27
    MIN_F32 = 28


def _staged(widen: Conversion, narrow: Conversion) -> int:
    return (CONVERTED + widen) << WIDENING | (CONVERTED + narrow) << ROUNDING


#: The conversions of f16 and bf16 in float32 kernels that stage them.
HALF: Final = _staged(Conversion.F16_F32, Conversion.F32_F16)
BRAIN: Final = _staged(Conversion.BF16_F32, Conversion.F32_BF16)

#: The conversions of other elements, as which float32, int32 or uint32 are staged, by what they are
#: in an instruction: sources' data types and as what they are read, results' and of what they are
#: written.
READ_AS: Final = {
    **{(name, "int"): CONVERTED + Conversion[f"{name}_I32".upper()] << WIDENING
       for name in ("bool", "i8", "u8", "i16", "u16", "i64")},
    ("u64", "int"): CONVERTED + Conversion.I64_I32 << WIDENING,
    **dict.fromkeys([("i64", "high"), ("u64", "high")], CONVERTED + Conversion.I64_HIGH << WIDENING),
    ("f16", "float"): HALF, ("bf16", "float"): BRAIN,
    ("i64", "float"): CONVERTED + Conversion.I64_F32 << WIDENING,
    ("f64", "float"): CONVERTED + Conversion.F64_F32 << WIDENING,
    **dict.fromkeys([("f32", "float"), ("i32", "int"), ("u32", "int"), ("f32", "bits")], 0),
    **{(name, "bits"): CONVERTED + Conversion.U16_I32 << WIDENING for name in ("f16", "bf16")},
}  # fmt: skip
WRITTEN_AS: Final = {
    **dict.fromkeys([(name, "int") for name in ("bool", "i8", "u8")],
                    CONVERTED + Conversion.I32_I8 << ROUNDING),
    **dict.fromkeys([(name, "int") for name in ("i16", "u16")],
                    CONVERTED + Conversion.I32_I16 << ROUNDING),
    **dict.fromkeys([(name, "bits") for name in ("f16", "bf16")],
                    CONVERTED + Conversion.I32_I16 << ROUNDING),
    **dict.fromkeys([(name, "int") for name in ("i64", "u64")],
                    CONVERTED + Conversion.I32_I64 << ROUNDING),
    **dict.fromkeys([(name, "uint") for name in ("i64", "u64")],
                    CONVERTED + Conversion.U32_I64 << ROUNDING),
    ("f16", "float"): HALF, ("bf16", "float"): BRAIN,
    ("i64", "float"): CONVERTED + Conversion.F32_I64 << ROUNDING,
    ("f64", "float"): CONVERTED + Conversion.F32_F64 << ROUNDING,
    **dict.fromkeys([("f32", "float"), ("i32", "int"), ("u32", "int"), ("f32", "bits")], 0),
}  # fmt: skip

#: Of no operand's elements: random bits, and after it random float32.
RANDOM: Final = 32
#: Plus a `Stored`: the conversion of its blocks to float32.
UNPACK: Final = 64
#: Plus a `Block`: the conversion of float32 to its blocks.
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
#: The conversion that moves elements, by their size in bytes.
BYTES: Final = {
    1: Conversion.BYTES_1,
    2: Conversion.BYTES_2,
    4: Conversion.BYTES_4,
    8: Conversion.BYTES_8,
}
_SIZES: Final = {
    "F32": 4, "F16": 2, "BF16": 2, "F64": 8, "BOOL": 1,
    "HIGH": 4,
    **{f"{kind}{8 * size}": size for kind in "IU" for size in (1, 2, 4, 8)},
}  # fmt: skip


class Unit(NamedTuple):
    """The contiguous unit of a row: an element or a block."""

    elements: int
    bytes: int


def units_of(conversion: int) -> tuple[Unit, Unit]:
    """Return the units that a conversion reads and writes. Raises ValueError for an unknown one."""
    if conversion >= PACK:
        return Unit(1, 4), Unit(BLOCK_ELEMENTS, BLOCK_BYTES[Block(conversion - PACK)])
    if conversion >= UNPACK:
        form = FORMS[Stored(conversion - UNPACK)]
        return Unit(form.block_size, form.block_bytes), Unit(1, 4)
    if conversion >= RANDOM:
        return Unit(1, 4), Unit(1, 4)
    name = Conversion(conversion).name
    if name.startswith("BYTES_"):
        both = Unit(1, int(name.removeprefix("BYTES_")))
        return both, both
    source, _, target = name.partition("_")
    source = target if source not in _SIZES else source
    return Unit(1, _SIZES[source]), Unit(1, _SIZES[target])
