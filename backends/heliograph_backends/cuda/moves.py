"""Copies, gathered rows and rows that are set as launches. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from heliograph_backends.cuda.chains import FLOATS
from heliograph_backends.cuda.filling import (
    Filling,
    Launch,
    Located,
    aligned,
    blocks_for,
    collapsed,
    few,
    fits,
)
from heliograph_backends.cuda.parameters import COPY, GATHER
from heliograph_proto.graph import Node
from heliograph_proto.types import DTYPES, TensorType

#: Rows that are gathered at once; blocks go on behind.
MOST_BLOCKS = 65535


def as_items(value: Located) -> Located:
    """Rows of blocks as rows of bytes; others as they are."""
    if value.type.dtype.block_size == 1:
        return value
    bytes_of = TensorType(DTYPES["u8"], value.type.storage_shape)
    return Located(bytes_of, value.slot, value.offset, (*value.strides[:-1], 1))


def can_copy(type: TensorType) -> bool:
    """Whether the kernel copies tensors of this type, whatever their strides."""
    return fits(type.shape)


def copy(source: Located, result: Located) -> Launch:
    """A copy between strides; the source broadcasts to the result."""
    source, result = as_items(source), as_items(result)
    shape = result.type.shape
    strides = [aligned(one.type.shape, one.strides, shape) for one in (source, result)]
    sizes, steps = collapsed(shape, strides)
    item = result.type.dtype.block_bytes
    filling = Filling(COPY)
    filling.walk(sizes)
    filling.operand("source", source, steps[0])
    filling.operand("result", result, steps[1])
    filling.set(count=math.prod(sizes), item_bytes=item)
    return filling.launch("copy_elements", (blocks_for(math.prod(sizes), 1024), 1, 1), 256)


# Rows


def gathers(node: Node, operands: Sequence[TensorType]) -> bool:
    """Whether a kernel gathers these rows."""
    return node.op == "get_rows" and few(operands[1].shape)


def get_rows(number: int, table: Located, indices: Located, result: Located, failure: Located) -> Launch:
    """One block for each row. Rows of narrow floats come out as f32, or as they are if the result is."""
    name = table.type.dtype.name
    filling = _gather(number, table, indices, result, failure)
    if table.type.dtype.kind == "quantized":
        return _gathered(filling, f"get_rows_{name}", indices)
    if name in ("f16", "bf16") and result.type.dtype is not table.type.dtype:
        return _gathered(filling, "get_rows_narrow", indices)
    filling.set(item_bytes=table.type.dtype.block_bytes)
    return _gathered(filling, "get_rows_plain", indices)


def sets_rows(node: Node, operands: Sequence[TensorType]) -> bool:
    """Whether the kernel sets these rows: as they are, or between floats; not into blocks."""
    if node.op != "set_rows" or not few(operands[1].shape[:-1]):
        return False
    target, rows, indices = operands
    lead = rows.shape[:-1]
    sizes = zip((1,) * (len(lead) - indices.ndim) + indices.shape, lead, strict=True)
    if any(have not in (1, size) for have, size in sizes):
        return False
    same = target.dtype is rows.dtype and target.dtype.block_size == 1
    return same or (target.dtype.name in FLOATS and rows.dtype.name in FLOATS)


def set_rows(number: int, rows: Located, indices: Located, result: Located, failure: Located) -> Launch:
    """Into the result, which holds the target already."""
    lead = rows.type.shape[:-1]
    filling = _gather(number, result, _cycling(indices, lead), rows, failure)
    if rows.type.dtype is result.type.dtype:
        filling.set(item_bytes=rows.type.dtype.block_bytes)
    filling.set(last=max(1, lead[-1]))
    return _gathered(filling, "set_rows", _cycling(indices, lead))


def _cycling(indices: Located, lead: Sequence[int]) -> Located:
    """Indices over all rows that they are for."""
    strides = aligned(indices.type.shape, indices.strides, lead)
    return Located(TensorType(indices.type.dtype, tuple(lead)), indices.slot, indices.offset, strides)


def _gather(number: int, table: Located, indices: Located, rows: Located, failure: Located) -> Filling:
    filling = Filling(GATHER)
    filling.walk(indices.type.shape)
    filling.operand("table", table, (*table.strides[:-2], 0))
    filling.operand("rows", rows, rows.strides[:-1])
    filling.operand("indices", indices, indices.strides)
    filling.address("failure", failure)
    filling.set(
        count=indices.type.size, columns=table.type.shape[-1], there=table.type.shape[-2],
        table_stride=table.strides[-2], node=number, wide_indices=indices.type.dtype.name == "i64", last=1,
    )  # fmt: skip
    filling.parameters["inner"][0][:] = table.strides[-1], rows.strides[-1]
    return filling


def _gathered(filling: Filling, kernel: str, indices: Located) -> Launch:
    columns = int(filling.parameters["columns"][0])
    work = columns // 32 if kernel not in ("get_rows_plain", "get_rows_narrow", "set_rows") else columns
    threads = 32 if work <= 64 else 128 if work <= 512 else 256
    return filling.launch(kernel, (blocks_for(indices.type.size, 1, MOST_BLOCKS), 1, 1), threads)
