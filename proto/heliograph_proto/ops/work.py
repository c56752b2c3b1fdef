"""The work of a node: arithmetic and bytes, estimated from its op, shapes and data types."""

from __future__ import annotations

import math
from collections.abc import Sequence

from heliograph_proto.ops.table import OPS
from heliograph_proto.types import TensorType

#: Ops that read no more of their first operand than they return.
_READ_ROWS = frozenset({"get_rows"})
#: Products: each element of the result is a sum over the last axis of the first operand.
_PRODUCTS = frozenset({"matmul", "mul_mat", "mul_mat_id"})
#: Each element of the result is a sum over all but the first axis of the kernel, the first operand.
_CONVOLUTIONS = frozenset({"conv_2d", "conv_2d_dw", "conv_3d"})


def flops_of(op: str, operands: Sequence[TensorType], result: TensorType) -> int:
    """Return the operations on numbers; 0 for a view, which does nothing."""
    if OPS[op].is_view:
        return 0
    return math.prod(result.shape) * _flops_per_element(op, operands)


def read_bytes(op: str, operands: Sequence[TensorType], result: TensorType) -> list[int]:
    """Return the bytes that are read of each operand; none for a view."""
    if OPS[op].is_view:
        return [0] * len(operands)
    found = [one.nbytes for one in operands]
    if op in _READ_ROWS:
        found[0] = min(result.nbytes, found[0])
    if op == "flash_attn_paged":
        count, named = operands[1].shape[0], operands[4].size
        for place in (1, 2):
            found[place] = found[place] // max(1, count) * min(count, named)
    return found


def _flops_per_element(op: str, operands: Sequence[TensorType]) -> int:
    if op in _PRODUCTS and operands[0].shape:
        return 2 * operands[0].shape[-1]
    if op in _CONVOLUTIONS:
        return 2 * math.prod(operands[0].shape[1:])
    if op == "flash_attn_ext":
        return 4 * operands[1].shape[-2]
    if op == "flash_attn_paged":
        return 4 * operands[3].shape[-1]
    return 1
