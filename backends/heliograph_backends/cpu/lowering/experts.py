"""Matrix products with matrices selected by ids (mul_mat_id), as steps. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from heliograph_backends.cpu import kernels as k
from heliograph_backends.cpu.lowering.moves import is_dense
from heliograph_backends.cpu.lowering.products import STORED, is_integer_product
from heliograph_proto.types import F32, TensorType

Strides = tuple[int, ...]


def has_kernel(types: Sequence[TensorType], strides: Sequence[Strides]) -> bool:
    """True if a kernel runs mul_mat_id on these operands; `strides`: those of operands and
    result."""
    experts, rows, _ = types
    integers = is_integer_product(types, strides[1])
    known = experts.dtype.name in STORED and (rows.dtype is F32 or integers) and is_dense(experts, strides[0])
    return known and experts.shape[1] > 0 and (experts.shape[1] == 1 or strides[-1][-1] == 4)


def append(
    builder: k.ProgramBuilder,
    types: Sequence[TensorType],
    places: Sequence[k.Operand],
    *,
    grouped: bool,
) -> None:
    """Append the step of a mul_mat_id; `places`: operands, then the result; `grouped`: see
    `RowGroups`."""
    (count, columns, depth), (tokens, own, _) = types[0].shape, types[1].shape
    used, id_bytes = types[2].shape[1], types[2].dtype.block_bytes
    kind = STORED[types[0].dtype.name]
    form = k.Experts(
        kind, count, columns, depth, tokens, used, own, id_bytes, grouped, types[1].dtype is not F32
    )
    weights, rows, ids, result = places
    builder.experts(form, (weights._replace(strides=weights.strides[:-1]), rows, ids, result))
