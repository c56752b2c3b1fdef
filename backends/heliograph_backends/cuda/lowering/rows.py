"""Ops along rows and reductions as launches. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from heliograph_backends.cuda.driver.parameters import REDUCE, ROWS, TYPES
from heliograph_backends.cuda.driver.sources import HELD
from heliograph_backends.cuda.lowering.chains import FLOATS
from heliograph_backends.cuda.lowering.launch import Filling, Launch, Located, aligned, collapsed, few, fits
from heliograph_backends.cuda.lowering.target import Asked
from heliograph_proto.graph import Node
from heliograph_proto.types import TensorType

#: The kernel's numbers of norms.
NORMS = {"norm": 0, "rms_norm": 1, "l2_norm": 2}
#: Operands in the order of the kernel's `strides` and `inner`.
OPERANDS = ("x", "result", "second", "third", "added")
#: The kernel's numbers of reductions.
REDUCTIONS = {
    "reduce_sum": 0, "reduce_mean": 1, "reduce_max": 2, "reduce_min": 3, "sum_rows": 0, "mean": 1, "sum": 0,
}  # fmt: skip
#: Rows and their elements are counted in 32 bits.
MOST_ELEMENTS = 2**31 - 1
#: Rows of up to this many elements have a warp each; longer ones have a block.
WARP_COLUMNS = 1024
WARPS_IN_BLOCK = 4
#: Rows of up to this many elements are held in registers by a block.
HELD_COLUMNS = 8192


class RowShape(NamedTuple):
    """The distribution of rows over threads."""

    threads: int
    #: The threads and the rows of a block.
    block: int
    rows: int

    def grid(self, rows: int) -> tuple[int, int, int]:
        """Return the grid for a number of rows."""
        return max(1, -(-rows // self.rows)), 1, 1


def shape_for(columns: int) -> RowShape:
    """Return the threads of a row, and of a block, which depend only on the row's length."""
    if columns <= WARP_COLUMNS:
        return RowShape(32, 32 * WARPS_IN_BLOCK, WARPS_IN_BLOCK)
    threads = 256 if columns <= HELD_COLUMNS else 1024
    return RowShape(threads, threads, 1)


def kernel_for(op: str, columns: int) -> str:
    """Return the kernel that holds rows of this length in registers, or the one for longer rows."""
    if columns % 4 or columns > HELD_COLUMNS:
        return f"{op}_long"
    each = 4 * shape_for(columns).threads
    return f"{op}_{next(held for held in HELD if held * each >= columns)}"


def is_row_op(node: Node, operands: Sequence[TensorType]) -> bool:
    """True if a kernel computes a node of these operands."""
    floats = all(one.dtype.name in FLOATS for one in operands)
    counted = node.type.ndim > 0 and few(node.type.shape[:-1]) and node.type.size <= MOST_ELEMENTS
    return floats and counted and (node.op in NORMS or node.op == "soft_max")


def norm(
    node: Node, x: Located, result: Located, rows: Sequence[Located], added: Sequence[Located] = ()
) -> Launch:
    """Return a norm of x plus the `added` values, times a row and plus a row if these are given."""
    walked = [(name, row) for name, row in zip(("second", "third"), rows, strict=False)]
    filling = _rows(node, result, {"x": x, **dict(walked)}, added)
    filling.set(scale=float(node.attributes["eps"]), heads=1, matrix_rows=1, norm=NORMS[node.op])
    return _launched(filling, "norm", result.type)


def group_norm(asked: Asked) -> tuple[Launch, ...] | None:
    """Return a norm of groups of channels as rows; None if they are no rows of equal length."""
    node, (x,), result = asked.node, asked.values, asked.result
    *lead, channels, height, width = x.type.shape
    size = max(1, -(-channels // node.attributes["groups"]))
    plain = x.strides == x.type.strides and result.strides == result.type.strides
    if channels % size or not plain:
        return None
    type = TensorType(x.type.dtype, (math.prod(lead) * (channels // size), size * height * width))
    one = Node("norm", node.operands, type, {"eps": node.attributes["eps"]})
    if not is_row_op(one, [type]):
        return None
    lines = [Located(type, value.slot, value.offset, type.strides) for value in (x, result)]
    return (norm(one, lines[0], lines[1], ()),)


def soft_max(node: Node, x: Located, result: Located, rest: Sequence[Located]) -> Launch:
    """Return a soft_max, with a mask and sinks if these are given."""
    filling = _rows(node, result, {"x": x, **({"second": rest[0]} if rest else {})})
    shape = result.type.shape
    heads = shape[-3] if len(shape) > 2 else 1
    filling.set(
        scale=float(node.attributes["scale"]),
        max_bias=float(node.attributes["max_bias"]),
        heads=max(1, heads),
        matrix_rows=shape[-2] if len(shape) > 1 else 1,
        slope_power=slope_power(heads),
    )
    if len(rest) > 1:
        filling.address("third", rest[1], inner="address")
        filling.set(has_third=1, third_type=TYPES[rest[1].type.dtype.name])
        filling.parameters["inner"][0][3] = rest[1].strides[-1]
    return _launched(filling, "soft_max", result.type)


def slope_power(heads: int) -> float:
    """Return the largest power of 2 up to the number of heads, after which ALiBi's slopes
    change."""
    return float(2 ** int(math.log2(max(1, heads))))


def _rows(
    node: Node, result: Located, operands: Mapping[str, Located], added: Sequence[Located] = ()
) -> Filling:
    """Fill the parameters of all ops along rows. Operands broadcast to the result."""
    *leading, columns = result.type.shape
    values = [result, *operands.values(), *added]
    strides = [aligned(one.type.shape, one.strides, result.type.shape) for one in values]
    sizes, steps = collapsed(leading, [one[:-1] for one in strides])
    filling = Filling(ROWS)
    filling.parameters["sizes"][0][: len(sizes)] = sizes
    names = ["result", *operands, *["added"] * len(added)]
    for number, (name, one, step) in enumerate(zip(names, values, steps, strict=True)):
        place = number - 1 - len(operands) if name == "added" else None
        filling.address(name, one, place, "address")
        found = filling.parameters[name][0] if place is None else filling.parameters[name][0][place]
        found["step"] = step[0] if step else 0
        at = OPERANDS.index(name) + (place or 0)
        filling.parameters["strides"][0][at][: len(step)] = step
        filling.parameters["inner"][0][at] = strides[number][-1]
    for name in ("second", "third"):
        filling.set(**{f"has_{name}": name in operands})
        if name in operands:
            filling.set(**{f"{name}_type": TYPES[operands[name].type.dtype.name]})
    packed = all(step[-1] == one.type.dtype.block_bytes for one, step in zip(values, strides, strict=True))
    filling.set(
        dimensions=len(sizes), rows=math.prod(leading), columns=columns, packed=packed, adds=len(added),
        threads=shape_for(columns).threads, type=TYPES[result.type.dtype.name],
    )  # fmt: skip
    return filling


def _launched(filling: Filling, op: str, type: TensorType) -> Launch:
    *leading, columns = type.shape
    shape = shape_for(columns)
    return filling.launch(kernel_for(op, columns), shape.grid(math.prod(leading)), shape.block)


# Reductions


def reduced_axes(node: Node, source: TensorType) -> tuple[int, ...]:
    """Return the dimensions that a reduction reduces."""
    if node.op in ("sum_rows", "mean"):
        return (source.ndim - 1,)
    axes = node.attributes.get("axes", ())
    return tuple(axis % source.ndim for axis in axes) or tuple(range(source.ndim))


def is_reduction(node: Node, source: TensorType) -> bool:
    """True if the kernel computes the reduction."""
    floats = node.op in REDUCTIONS and {source.dtype.name, node.type.dtype.name} <= set(FLOATS)
    counted = source.size > 0 and node.type.size <= MOST_ELEMENTS
    return floats and source.ndim > 0 and counted and fits(source.shape)


def reduction(node: Node, x: Located, result: Located) -> Launch:
    """Return the launch of a reduction; its result is contiguous."""
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
    found = shape_for(columns)
    filling.set(rows=rows, columns=columns, operation=REDUCTIONS[node.op], threads=found.threads)
    return filling.launch("reduce", found.grid(rows), found.block)
