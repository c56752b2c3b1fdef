"""Ops along rows, reductions and rope as launches. Pure."""

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
from heliograph_backends.cuda.parameters import REDUCE, ROPE, ROWS
from heliograph_backends.definition.rope import correction
from heliograph_proto.graph import Node
from heliograph_proto.rules.rope import NEOX, NORMAL, pairs
from heliograph_proto.types import TensorType

#: Ops on rows and their kernels.
NORMS = {"norm": "layer_norm", "rms_norm": "rms_norm", "l2_norm": "l2_norm"}
#: Reductions, by the kernel's number of what they do.
REDUCTIONS = {
    "reduce_sum": 0, "reduce_mean": 1, "reduce_max": 2, "reduce_min": 3, "sum_rows": 0, "mean": 1, "sum": 0,
}  # fmt: skip
#: Up to so many elements a warp has a row of its own; more have a block.
WARP_COLUMNS = 1024
WARPS_IN_BLOCK = 8


def threads_for(columns: int) -> tuple[int, int, int]:
    """Threads of a row, of a block, and rows of a block."""
    if columns <= WARP_COLUMNS:
        return 32, 32 * WARPS_IN_BLOCK, WARPS_IN_BLOCK
    threads = 256 if columns <= 4096 else 512 if columns <= 16384 else 1024
    return threads, threads, 1


def is_row_op(node: Node, operands: Sequence[TensorType]) -> bool:
    """Whether a kernel computes a node of these operands."""
    floats = all(one.dtype.name in FLOATS for one in operands)
    return (
        floats
        and node.type.ndim > 0
        and few(node.type.shape[:-1])
        and (node.op in NORMS or node.op == "soft_max")
    )


def norm(node: Node, x: Located, result: Located, rows: Sequence[Located]) -> Launch:
    """A norm, times a row and plus a row where these are given."""
    filling = Filling(ROWS)
    threads = _rows(filling, node, x, result)
    filling.set(scale=float(node.attributes["eps"]), heads=1, matrix_rows=1)
    for name, row in zip(("second", "third"), rows, strict=False):
        filling.operand(name, row, (0,) * (len(result.type.shape) - 1))
        filling.set(**{f"has_{name}": 1})
    inner = [row.strides[-1] for row in rows] + [0, 0]
    filling.parameters["inner"][0][2:] = inner[:2]
    return _launched(filling, NORMS[node.op], result.type, threads)


def soft_max(node: Node, x: Located, result: Located, rest: Sequence[Located]) -> Launch:
    """With a mask and sinks where these are given."""
    filling = Filling(ROWS)
    threads = _rows(filling, node, x, result)
    shape = result.type.shape
    heads = shape[-3] if len(shape) > 2 else 1
    filling.set(
        scale=float(node.attributes["scale"]),
        max_bias=float(node.attributes["max_bias"]),
        heads=max(1, heads),
        matrix_rows=shape[-2] if len(shape) > 1 else 1,
        slope_power=slope_power(heads),
    )
    if rest:
        steps = aligned(rest[0].type.shape, rest[0].strides, shape)
        filling.operand("second", rest[0], steps[:-1])
        filling.set(has_second=1)
        filling.parameters["inner"][0][2] = steps[-1]
    if len(rest) > 1:
        filling.operand("third", rest[1])
        filling.set(has_third=1)
        filling.parameters["inner"][0][3] = rest[1].strides[-1]
    return _launched(filling, "soft_max", result.type, threads)


def slope_power(heads: int) -> float:
    """The largest power of 2 that is not above the number of heads: ALiBi's slopes change behind it."""
    return float(2 ** int(math.log2(max(1, heads))))


def _rows(filling: Filling, node: Node, x: Located, result: Located) -> int:
    """Fills what all ops along rows have; the threads of a row."""
    *leading, columns = result.type.shape
    threads = threads_for(columns)[0]
    filling.walk(leading)
    filling.operand("x", x, x.strides[:-1])
    filling.operand("result", result, result.strides[:-1])
    filling.set(rows=math.prod(leading), columns=columns, threads=threads)
    filling.parameters["inner"][0][:2] = x.strides[-1], result.strides[-1]
    return threads


def _launched(filling: Filling, kernel: str, type: TensorType, threads: int) -> Launch:
    *leading, columns = type.shape
    _, block, rows = threads_for(columns)
    return filling.launch(kernel, (max(1, -(-math.prod(leading) // rows)), 1, 1), block)


# Reductions


def reduced_axes(node: Node, source: TensorType) -> tuple[int, ...]:
    """The dimensions that a reduction adds up."""
    if node.op in ("sum_rows", "mean"):
        return (source.ndim - 1,)
    axes = node.attributes.get("axes", ())
    return tuple(axis % source.ndim for axis in axes) or tuple(range(source.ndim))


def is_reduction(node: Node, source: TensorType) -> bool:
    """Whether the kernel computes it."""
    floats = node.op in REDUCTIONS and {source.dtype.name, node.type.dtype.name} <= set(FLOATS)
    return floats and source.ndim > 0 and source.size > 0 and fits(source.shape)


def reduction(node: Node, x: Located, result: Located) -> Launch:
    """The launch of a reduction; its result is contiguous."""
    axes = reduced_axes(node, x.type)
    kept = [axis for axis in range(x.type.ndim) if axis not in axes]
    sizes, (steps,) = collapsed([x.type.shape[axis] for axis in axes], [[x.strides[axis] for axis in axes]])
    rows, columns = math.prod(x.type.shape[axis] for axis in kept), math.prod(sizes)
    item = result.type.dtype.block_bytes
    shape = [x.type.shape[axis] for axis in kept]
    plain = [item * math.prod(shape[place + 1 :]) for place in range(len(shape))]
    outer, steps_of = collapsed(shape, [[x.strides[axis] for axis in kept], plain])
    filling = Filling(REDUCE)
    filling.walk(outer)
    filling.walk(sizes, "inner")
    filling.operand("x", x, steps_of[0])
    filling.operand("along", x, steps)
    filling.operand("result", result, steps_of[1])
    threads, block, each = threads_for(columns)
    filling.set(rows=rows, columns=columns, operation=REDUCTIONS[node.op], threads=threads)
    return filling.launch("reduce", (max(1, -(-rows // each)), 1, 1), block)


# Rope


def is_rope(node: Node, operands: Sequence[TensorType]) -> bool:
    """Whether the kernel turns a node's rows: with plain positions."""
    plain = node.op == "rope" and node.attributes["mode"] in (NORMAL, NEOX)
    return plain and operands[0].dtype.name in FLOATS and few(node.type.shape[:-2])


def rope(node: Node, x: Located, result: Located, positions: Located, factors: Sequence[Located]) -> Launch:
    """Rows are tokens, each with its heads."""
    *leading, heads, width = node.type.shape
    attributes = node.attributes
    count = pairs(dict(attributes))
    filling = Filling(ROPE)
    filling.walk(leading)
    filling.operand("x", x, x.strides[:-2])
    filling.operand("result", result, result.strides[:-2])
    filling.operand("positions", positions, aligned(positions.type.shape, positions.strides, leading))
    for one in factors:
        filling.operand("factors", one)
    low, high, size = 0.0, 0.0, attributes["attn_factor"]
    if attributes["ext_factor"]:
        low, high = correction(attributes)
        size = attributes["attn_factor"] * (1 - 0.1 * math.log(attributes["freq_scale"]))
    filling.set(
        tokens=math.prod(leading), heads=heads, width=width, has_factors=bool(factors), pairs=count,
        start=attributes["offset"], adjacent=attributes["mode"] == NORMAL,
        log_base=math.log(attributes["freq_base"]), per_pair=-2.0 / attributes["n_dims"],
        freq_scale=attributes["freq_scale"], size=size, ext_factor=attributes["ext_factor"], low=low,
        range=max(0.001, high - low),
    )  # fmt: skip
    for place, one in enumerate((x, result)):
        filling.parameters["head_strides"][0][place] = one.strides[-2]
        filling.parameters["inner"][0][place] = one.strides[-1]
    work = math.prod(leading) * (width - count)
    return filling.launch("rope", (blocks_for(work, 256), 1, 1), 256)
