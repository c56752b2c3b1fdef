"""Data types of weights that matrix products read in their stored form. Plain Python, without
numba."""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

#: The most rows of the left side for which a weight streams through registers instead of panels: of
#: one in its own order, and of one in groups of rows.
FEW_ROWS: Final = 4
FEW_GROUPED_ROWS: Final = 8
#: Columns that are computed together in a product with few rows.
FEW_COLUMNS: Final = 64


class Stored(IntEnum):
    """The data type of a weight's rows; its number in a step."""

    F16 = 2
    BF16 = 3
    Q8_0 = 4
    Q4_0 = 5
    Q4_K = 6
    Q6_K = 7
    Q4_1 = 8
    Q5_0 = 9
    Q5_1 = 10
    Q2_K = 11
    Q3_K = 12
    Q5_K = 13
    F32 = 14
    IQ4_NL = 15
    IQ4_XS = 16
    MXFP4 = 17
    TQ1_0 = 18
    TQ2_0 = 19
    IQ1_S = 20
    IQ1_M = 21
    IQ2_XXS = 22
    IQ2_XS = 23
    IQ2_S = 24
    IQ3_XXS = 25
    IQ3_S = 26
    NVFP4 = 27
    Q8_1 = 28
    Q8_K = 29
    Q1_0 = 30
    Q2_0 = 31


#: The number of rows in a group, see `RowGroups`.
GROUP_ROWS: Final = 16
#: Added to the number of a type in a step whose weight lies in groups of rows.
GROUPED: Final = 32


#: The types whose products with rows of q8_0 are in integers: blocks of small whole numbers.
INTEGER_KINDS: Final = frozenset(
    {
        Stored.Q8_0,
        Stored.Q4_0,
        Stored.Q4_1,
        Stored.Q5_0,
        Stored.Q5_1,
        Stored.Q2_K,
        Stored.Q3_K,
        Stored.Q4_K,
        Stored.Q5_K,
        Stored.Q6_K,
        Stored.IQ4_NL,
        Stored.IQ4_XS,
        Stored.MXFP4,
        Stored.TQ1_0,
        Stored.TQ2_0,
    }
)


def staged_bytes(depth: int) -> int:
    """Return the bytes of a staged row of q8_0."""
    return depth // STAGED_BLOCK * STAGED_BLOCK_BYTES


#: The types in groups of rows with another number. Most stream twice in less time than it takes to
#: write panels of them and to read these; digits in base three take long to read again.
_GROUPED_ROWS: Final[dict[int, int]] = {
    **dict.fromkeys(
        (
            Stored.F16,
            Stored.BF16,
            Stored.Q8_0,
            Stored.Q4_0,
            Stored.Q4_1,
            Stored.Q5_0,
            Stored.Q5_1,
            Stored.Q2_K,
            Stored.Q3_K,
            Stored.Q4_K,
            Stored.Q5_K,
            Stored.Q6_K,
            Stored.IQ4_NL,
            Stored.MXFP4,
            Stored.NVFP4,
            Stored.TQ2_0,
            Stored.Q1_0,
            Stored.Q2_0,
        ),
        2 * FEW_GROUPED_ROWS,
    ),
    Stored.TQ1_0: FEW_ROWS,
}


def few_rows(form: int) -> int:
    """Return the most rows for which a weight of this form, the number of a type in a step, streams
    through registers."""
    if form < GROUPED:
        return FEW_ROWS
    return _GROUPED_ROWS.get(form % GROUPED, FEW_GROUPED_ROWS)


#: By the number of a type in a step: `few_rows`, for the kernels.
MOST_ROWS: Final = tuple(few_rows(form) for form in range(2 * GROUPED))


#: Added to the number of a type in a step whose left side is rows of q8_0.
INTEGERS: Final = 256
#: Elements of these rows in a block, and bytes of a block as a worker stages it.
STAGED_BLOCK: Final = 32
STAGED_BLOCK_BYTES: Final = 80


class Form(NamedTuple):
    """The blocks of a data type."""

    block_size: int
    """Elements in a block."""
    block_bytes: int
    unit: int
    """Elements that the kernels convert at once."""
    halves: tuple[int, ...] = ()
    """The offsets of f16 and bf16 that lie before the words of a block in a group of rows."""
    exponents: int = 0
    """Bytes that lie before the words of a block: exponents of its scale."""

    @property
    def lead_bytes(self) -> int:
        """The bytes of a row before the words of a block in a group of rows."""
        return 2 * len(self.halves) + self.exponents


FORMS: Final = {
    Stored.F16: Form(1, 2, 32, (0,)),
    Stored.BF16: Form(1, 2, 32, (0,)),
    Stored.Q8_0: Form(32, 34, 32, (0,)),
    Stored.Q4_0: Form(32, 18, 32, (0,)),
    Stored.Q4_K: Form(256, 144, 64),
    Stored.Q6_K: Form(256, 210, 128, (208,)),
    Stored.Q4_1: Form(32, 20, 32, (0, 2)),
    Stored.Q5_0: Form(32, 22, 32, (0,)),
    Stored.Q5_1: Form(32, 24, 32, (0, 2)),
    Stored.Q2_K: Form(256, 84, 128),
    Stored.Q3_K: Form(256, 110, 128, (108,)),
    Stored.Q5_K: Form(256, 176, 64),
    Stored.F32: Form(1, 4, 16),
    Stored.IQ4_NL: Form(32, 18, 32, (0,)),
    Stored.IQ4_XS: Form(256, 136, 32),
    Stored.MXFP4: Form(32, 17, 32, exponents=1),
    Stored.TQ1_0: Form(256, 54, 256, (52,)),
    Stored.TQ2_0: Form(256, 66, 128, (64,)),
    Stored.IQ1_S: Form(256, 50, 256, (0,)),
    Stored.IQ1_M: Form(256, 56, 256),
    Stored.IQ2_XXS: Form(256, 66, 256, (0,)),
    Stored.IQ2_XS: Form(256, 74, 256, (0,)),
    Stored.IQ2_S: Form(256, 82, 256, (0,)),
    Stored.IQ3_XXS: Form(256, 98, 256, (0,)),
    Stored.IQ3_S: Form(256, 110, 256, (0,)),
    Stored.NVFP4: Form(64, 36, 64),
    Stored.Q8_1: Form(32, 36, 32, (0, 2)),
    Stored.Q8_K: Form(256, 292, 32),
    Stored.Q1_0: Form(128, 18, 128, (0,)),
    Stored.Q2_0: Form(64, 18, 64, (0,)),
}


def group_bytes(kind: Stored, depth: int) -> int:
    """Return the bytes of a group of rows."""
    return GROUP_ROWS * depth // FORMS[kind].block_size * FORMS[kind].block_bytes
