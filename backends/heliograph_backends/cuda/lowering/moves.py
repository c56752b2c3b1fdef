"""Copies, get_rows and set_rows as launches. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from heliograph_backends.cuda.driver.parameters import COPY, GATHER, GATHER_BACK, TRANSPOSE
from heliograph_backends.cuda.lowering.chains import FLOATS
from heliograph_backends.cuda.lowering.launch import (
    Filling,
    Launch,
    Located,
    Strides,
    aligned,
    blocks_for,
    few,
    fits,
)
from heliograph_backends.cuda.lowering.programs import ChainPiece, pieces
from heliograph_backends.cuda.lowering.target import Asked
from heliograph_proto.graph import Node
from heliograph_proto.types import DTYPES, TensorType

#: The side of tiles for transposing, and the shortest dimensions that it is used for.
TILE_SIDE, LEAST_SIDE = 64, 16
#: The most blocks that gather rows; each may process several.
MOST_BLOCKS = 65535


def as_items(value: Located) -> Located:
    """Return rows of blocks as rows of bytes; others unchanged."""
    if value.type.dtype.block_size == 1:
        return value
    bytes_of = TensorType(DTYPES["u8"], value.type.storage_shape)
    return Located(bytes_of, value.slot, value.offset, (*value.strides[:-1], 1))


def can_copy(type: TensorType) -> bool:
    """True if the kernel copies tensors of this type, regardless of strides."""
    return fits(type.shape)


def copy(source: Located, result: Located) -> tuple[Launch, ...]:
    """Copy between strides; the source broadcasts to the result."""
    source, result = as_items(source), as_items(result)
    item = result.type.dtype.block_bytes
    found = []
    for piece in pieces((result, source)):
        launch = _copied(piece, item)
        width = _width(piece, item)
        if width > item:
            launch = replace(_copied(_widened(piece, item, width), width), alignment=width, instead=launch)
        found.append(launch)
    return tuple(found)


def _copied(piece: ChainPiece, item: int) -> Launch:
    """Copy a piece's items one by one or by tiles."""
    to, source = piece.steps
    across, along = (_axis(steps, piece.sizes, item) for steps in (source, to))
    if item <= 8 and across is not None and along is not None and across != along:
        return _transposed(piece, item, across, along)
    filling = Filling(COPY)
    filling.divisors(piece.sizes)
    _strides(filling, piece, range(len(piece.sizes)))
    filling.set(count=piece.elements, item_bytes=item)
    return filling.launch("copy_elements", (blocks_for(piece.elements, 1024), 1, 1), 256)


def _axis(steps: Strides, sizes: Strides, item: int) -> int | None:
    """Return the dimension whose items are contiguous, if it is long enough."""
    found = (axis for axis, step in enumerate(steps) if step == item and sizes[axis] >= LEAST_SIDE)
    return next(found, None)


def _transposed(piece: ChainPiece, item: int, across: int, along: int) -> Launch:
    """Copy a piece whose source is contiguous along one dimension and whose result along
    another."""
    filling = Filling(TRANSPOSE)
    others = [axis for axis in range(len(piece.sizes)) if axis not in (across, along)]
    tiles = [-(-piece.sizes[axis] // TILE_SIDE) for axis in (across, along)]
    filling.divisors([piece.sizes[axis] for axis in others])
    filling.divisors(tiles, "tiles")
    _strides(filling, piece, others)
    to, source = piece.steps
    filling.set(
        from_step=source[along], to_step=to[across], across=piece.sizes[across], along=piece.sizes[along],
        item_bytes=item,
    )  # fmt: skip
    blocks = math.prod(tiles) * math.prod(piece.sizes[axis] for axis in others)
    shared = TILE_SIDE * (TILE_SIDE * item + max(4, item))
    return filling.launch("copy_transposed", (blocks, 1, 1), 256, shared)


def _strides(filling: Filling, piece: ChainPiece, axes: Sequence[int]) -> None:
    """Set addresses, and strides over these dimensions."""
    to, source = piece.steps
    filling.address("to", piece.operands[0])
    filling.address("from", piece.operands[1])
    filling.set(dimensions=len(axes))
    for name, steps in (("to_strides", to), ("from_strides", source)):
        filling.parameters[name][0][: len(axes)] = [steps[axis] for axis in axes]


def _width(piece: ChainPiece, item: int) -> int:
    """Return the bytes that are moved at once, if items are contiguous in both and aligned to that
    width."""
    if not piece.sizes or any(steps[-1] != item for steps in piece.steps):
        return item
    row = piece.sizes[-1] * item
    places = [row, *(one.offset for one in piece.operands)]
    places += [step for steps in piece.steps for step in steps[:-1]]
    return max(width for width in (item, 2, 4, 8, 16) if not any(place % width for place in places))


def _widened(piece: ChainPiece, item: int, width: int) -> ChainPiece:
    """Return the same bytes as wider items."""
    *outer, row = piece.sizes
    count = row * item // width
    # A row of one item is dropped as a dimension, so that rows may be transposed.
    if count == 1 and outer:
        return ChainPiece(tuple(outer), piece.operands, tuple(steps[:-1] for steps in piece.steps))
    return ChainPiece((*outer, count), piece.operands, tuple((*steps[:-1], width) for steps in piece.steps))


# Rows


def gathers(node: Node, operands: Sequence[TensorType]) -> bool:
    """True if a kernel gathers these rows."""
    return node.op == "get_rows" and few(operands[1].shape)


def get_rows(number: int, table: Located, indices: Located, result: Located, failure: Located) -> Launch:
    """Return the launch with one block for each row. Rows of narrow floats come out as f32, or
    unchanged if the result is narrow."""
    name = table.type.dtype.name
    filling = _gather(number, table, indices, result, failure)
    if table.type.dtype.kind == "quantized":
        return _gathered(filling, f"get_rows_{name}", indices)
    if name in ("f16", "bf16") and result.type.dtype is not table.type.dtype:
        return _gathered(filling, "get_rows_narrow", indices)
    filling.set(item_bytes=table.type.dtype.block_bytes)
    return _gathered(filling, "get_rows_plain", indices)


#: Ops that write rows by index.
SCATTERS = ("set_rows", "add_rows", "mul_rows", "max_rows", "min_rows")

#: The most rows of a matrix that the kernels write: each looks for its index among all others. The
#: definition sorts the indices.
MOST_SCATTERED = 2**14


def scatters(node: Node, operands: Sequence[TensorType]) -> bool:
    """True if a kernel writes these rows: set unchanged, or converted between floats, but not into
    blocks; combined floats."""
    if node.op not in SCATTERS or not few(operands[1].shape[:-1]):
        return False
    target, rows, indices = operands
    if rows.shape[-2] > MOST_SCATTERED:
        return False
    lead = rows.shape[:-1]
    sizes = zip((1,) * (len(lead) - indices.ndim) + indices.shape, lead, strict=True)
    if any(have not in (1, size) for have, size in sizes):
        return False
    same = node.op == "set_rows" and target.dtype is rows.dtype and target.dtype.block_size == 1
    return same or (target.dtype.name in FLOATS and rows.dtype.name in FLOATS)


def scatter(
    op: str, number: int, rows: Located, indices: Located, result: Located, failure: Located
) -> Launch:
    """Write rows of the result, which already holds the target."""
    lead = rows.type.shape[:-1]
    filling = _gather(number, result, _cycling(indices, lead), rows, failure)
    if rows.type.dtype is result.type.dtype:
        filling.set(item_bytes=rows.type.dtype.block_bytes)
    filling.set(last=max(1, lead[-1]))
    return _gathered(filling, op, _cycling(indices, lead))


def _cycling(indices: Located, lead: Sequence[int]) -> Located:
    """Return indices broadcast to all rows that they apply to."""
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
    work = columns // 32 if kernel not in ("get_rows_plain", "get_rows_narrow", *SCATTERS) else columns
    blocks = blocks_for(indices.type.size, 1, MOST_BLOCKS)
    return filling.launch(kernel, (blocks, 1, 1), _threads(work))


def _threads(items: int) -> int:
    """Return the threads of a block that moves this many items of a row."""
    return 32 if items <= 64 else 128 if items <= 512 else 256


def get_rows_back(asked: Asked) -> tuple[Launch, ...] | None:
    """Return the launch of the gradient of gathered rows, with a block for each row of the result;
    None if no kernel computes it."""
    (gradient, indices), result = asked.values, asked.result
    *lead, given, columns = gradient.type.shape
    if gradient.type.dtype.name not in FLOATS or given > MOST_SCATTERED or not few(lead):
        return None
    filling = Filling(GATHER_BACK)
    filling.walk(lead)
    for name, value, inner in (("result", result, 2), ("gradient", gradient, 2), ("indices", indices, 1)):
        filling.operand(name, value, value.strides[:-inner])
    filling.address("failure", asked.report)
    for name, value in (("result_steps", result), ("gradient_steps", gradient)):
        filling.parameters[name][0][:] = value.strides[-2:]
    there = result.type.shape[-2]
    filling.set(
        count=math.prod(lead) * there, columns=columns, there=there, given=given,
        index_step=indices.strides[-1], node=asked.number, wide_indices=indices.type.dtype.name == "i64",
    )  # fmt: skip
    blocks = blocks_for(math.prod(lead) * there, 1, MOST_BLOCKS)
    return (filling.launch("get_rows_back", (blocks, 1, 1), _threads(columns)),)
