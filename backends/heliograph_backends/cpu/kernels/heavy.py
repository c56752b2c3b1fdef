"""Blocks of steps that share the kernels of matrix products, in one function that is compiled once and called
by its address: half of all code is behind it. Other kernels convert rows by it.
"""

from __future__ import annotations

from .attention import attention_block
from .convert_lanes import convert_plain
from .elements import Conversion
from .experts import experts_block
from .lanes import ByAddress
from .layout import CONVERTED, Kind
from .matmul import matmul_block
from .moves import move_block

F16_F32 = int(Conversion.F16_F32)
MATMUL, ATTENTION, EXPERTS = int(Kind.MATMUL), int(Kind.ATTENTION), int(Kind.EXPERTS)


@ByAddress
def heavy_block(kind: int, step: int, block: int, slots: int, scratch: int) -> None:
    """Run one block of a product with a matrix or with experts, of attention, or of rows that move.

    For a row that is converted between float32, which lie side by side, and f16 or bf16 the other arguments
    are target, source, how many elements, and the stride of what is narrow.
    """
    if kind >= CONVERTED:
        conversion = kind - CONVERTED
        widens = conversion >= F16_F32
        convert_plain(conversion, step, 4 if widens else scratch, block, scratch if widens else 4, slots)
    elif kind == MATMUL:
        matmul_block(step, block, slots, scratch)
    elif kind == ATTENTION:
        attention_block(step, block, slots, scratch)
    elif kind == EXPERTS:
        experts_block(step, block, slots, scratch)
    else:
        move_block(kind, step, block, slots, scratch)
