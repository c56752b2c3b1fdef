"""Blocks of the steps that use the kernels of matrix products.

All are in one function that is compiled once and called by its address: it contains half of all
code. Other kernels call it to convert rows.
"""

from __future__ import annotations

from heliograph_backends.cpu.kernels.matmul.experts import experts_block
from heliograph_backends.cpu.kernels.matmul.matmul import matmul_block
from heliograph_backends.cpu.kernels.program.elements import Conversion
from heliograph_backends.cpu.kernels.program.words import (
    CONVERTED,
    CONVERTED_COUNT,
    CONVERTED_FROM,
    CONVERTED_FROM_ROW,
    CONVERTED_ROWS,
    CONVERTED_STEP,
    CONVERTED_TO,
    CONVERTED_TO_ROW,
    Kind,
)
from heliograph_backends.cpu.kernels.rows.attention import attention_block
from heliograph_backends.cpu.kernels.rows.convert_lanes import convert_plain
from heliograph_backends.cpu.kernels.rows.moves import move_block
from heliograph_backends.cpu.kernels.vector.atomics import word
from heliograph_backends.cpu.kernels.vector.lanes import ByAddress, jit_inline

F16_F32 = int(Conversion.F16_F32)
MATMUL, ATTENTION, EXPERTS = int(Kind.MATMUL), int(Kind.ATTENTION), int(Kind.EXPERTS)


@jit_inline
def convert_staged(conversion: int, rows: int) -> None:
    """Convert the rows described by words."""
    widens, step = conversion >= F16_F32, word(rows, CONVERTED_STEP)
    convert_plain(
        conversion,
        word(rows, CONVERTED_TO),
        4 if widens else step,
        word(rows, CONVERTED_FROM),
        step if widens else 4,
        word(rows, CONVERTED_COUNT),
        word(rows, CONVERTED_ROWS),
        word(rows, CONVERTED_TO_ROW),
        word(rows, CONVERTED_FROM_ROW),
    )


@ByAddress
def heavy_block(kind: int, step: int, block: int, slots: int, scratch: int) -> None:
    """Run one block of a product with a matrix or with experts, of attention, or of a move.

    With CONVERTED + a conversion as the kind, convert rows between contiguous float32 and f16 or
    bf16; `step` is then the address of the words that describe them.
    """
    if kind >= CONVERTED:
        convert_staged(kind - CONVERTED, step)
    elif kind == MATMUL:
        matmul_block(step, block, slots, scratch)
    elif kind == ATTENTION:
        attention_block(step, block, slots, scratch)
    elif kind == EXPERTS:
        experts_block(step, block, slots, scratch)
    else:
        move_block(kind, step, block, slots, scratch)
