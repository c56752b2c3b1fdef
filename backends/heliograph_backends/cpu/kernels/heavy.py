"""Blocks of steps that share the kernels of matrix products, in one function that is compiled once and called
by its address: half of all code is behind it.
"""

from __future__ import annotations

from .attention import attention_block
from .experts import experts_block
from .lanes import ByAddress
from .layout import Kind
from .matmul import matmul_block
from .moves import move_block

MATMUL, ATTENTION, EXPERTS = int(Kind.MATMUL), int(Kind.ATTENTION), int(Kind.EXPERTS)


@ByAddress
def heavy_block(kind: int, step: int, block: int, slots: int, scratch: int) -> None:
    """Run one block of a product with a matrix or with experts, of attention, or of rows that move."""
    if kind == MATMUL:
        matmul_block(step, block, slots, scratch)
    elif kind == ATTENTION:
        attention_block(step, block, slots, scratch)
    elif kind == EXPERTS:
        experts_block(step, block, slots, scratch)
    else:
        move_block(kind, step, block, slots, scratch)
