"""Rows in order as launches: sorts, the largest element, sums and products so far. Pure.

A block sorts a chunk of a row in shared memory. Of rows that no chunk holds, the largest elements
of each chunk are sorted again, until one chunk holds them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from heliograph_backends.cuda.driver.parameters import LARGEST, RUNNING, SORT, TYPES
from heliograph_backends.cuda.lowering.chains import FLOATS
from heliograph_backends.cuda.lowering.launch import Filling, Launch, Located, blocks_for, collapsed, fits
from heliograph_backends.cuda.lowering.target import Asked, CudaTarget
from heliograph_proto.graph import Node
from heliograph_proto.types import DTYPES, TensorType

#: The kernel's number of i32, beside those of floats.
RANKED = {**{name: TYPES[name] for name in FLOATS}, "i32": 3}
#: The kernels of sums so far.
RUNNING_KERNELS = {**dict.fromkeys(FLOATS, "running_floats"), "i32": "running_i32", "i64": "running_i64"}
KEY_BYTES = 8
#: The elements of a chunk of a row that is sorted in several, and the most that are kept of one.
CHUNK, MOST_KEPT = 4096, 1024
#: The most elements that a block sorts, if its shared memory holds their keys.
MOST_CHUNK = 16384
#: The most memory for keys between two sorts, and the most blocks and elements of a row.
MOST_WORKSPACE, MOST_BLOCKS, MOST_COLUMNS = 2**28, 2**31 - 1, 2**31 - 1
#: Only the address of the workspace matters.
WORKSPACE_TYPE = TensorType(DTYPES["u8"], (1,))


class Pass(NamedTuple):
    """One sort of all chunks."""

    columns: int
    chunk: int
    kept: int

    @property
    def chunks(self) -> int:
        return -(-self.columns // self.chunk)

    @property
    def padded(self) -> int:
        """The keys of a block: a power of two."""
        return 1 << max(1, (self.chunk - 1).bit_length())


def passes(columns: int, kept: int, target: CudaTarget) -> list[Pass] | None:
    """Return the sorts of rows of which the first elements are kept; None if there are too many."""
    room = min(MOST_CHUNK, 1 << (target.shared_bytes // KEY_BYTES).bit_length() - 1)
    found: list[Pass] = []
    if columns > room and kept > MOST_KEPT:
        return None
    while columns > (room if found else CHUNK if kept <= MOST_KEPT else room):
        found.append(Pass(columns, CHUNK, min(kept, CHUNK)))
        columns = found[-1].chunks * kept
    return [*found, Pass(columns, columns, kept)]


def _sorted(node: Node, operands: Sequence[TensorType], target: CudaTarget) -> list[Pass] | None:
    """Return the sorts of a node; None if the kernel does not compute it."""
    if node.op not in ("argsort", "top_k") or operands[0].dtype.name not in RANKED or not node.type.size:
        return None
    *lead, columns = operands[0].shape
    if not fits(lead) or columns > MOST_COLUMNS:
        return None
    found = passes(columns, node.type.shape[-1], target)
    rows = math.prod(lead)
    if found is None or rows * found[0].chunks > MOST_BLOCKS or sum(_kept(found, rows)) > MOST_WORKSPACE:
        return None
    return found


def _kept(found: Sequence[Pass], rows: int) -> list[int]:
    """Return the bytes between each sort and the next."""
    return [KEY_BYTES * rows * one.chunks * one.kept for one in found[:-1]]


def workspace_bytes(node: Node, operands: Sequence[TensorType], target: CudaTarget) -> int:
    """Return the workspace of a sort."""
    found = _sorted(node, operands, target)
    return sum(_kept(found, math.prod(operands[0].shape[:-1]))) if found else 0


def sort(asked: Asked) -> tuple[Launch, ...] | None:
    """Return the launches of argsort or top_k; None if no kernel computes it."""
    (x,), result, own = asked.values, asked.result, asked.own
    found = _sorted(asked.node, [x.type], asked.target)
    if found is None or result.strides != result.type.strides:
        return None
    *lead, _ = x.type.shape
    rows = math.prod(lead)
    descending = asked.node.op == "top_k" or asked.node.attributes["descending"]
    starts = [sum(_kept(found, rows)[:number]) for number in range(len(found))]
    launches = []
    for number, one in enumerate(found):
        filling = _walked(asked, SORT, x)
        if number:
            filling.address("keys", Located(WORKSPACE_TYPE, own.workspace, starts[number - 1], (1,)))
        if number + 1 < len(found):
            filling.address("found", Located(WORKSPACE_TYPE, own.workspace, starts[number], (1,)))
        else:
            filling.address("result", result)
        filling.set(
            step=x.strides[-1], columns=one.columns, chunks=one.chunks,
            chunk=one.chunk, padded=one.padded, kept=one.kept, descending=descending, reads_keys=number > 0,
            keeps_keys=number + 1 < len(found),
        )  # fmt: skip
        grid, threads = (rows * one.chunks, 1, 1), max(32, min(512, one.padded // 2))
        launches.append(filling.launch("sort_rows", grid, threads, KEY_BYTES * one.padded))
    return tuple(launches)


def _walked(asked: Asked, type: object, x: Located) -> Filling:
    """Fill in the rows of x, which the kernel walks."""
    filling = Filling(type)  # type: ignore[arg-type]
    sizes, (steps,) = collapsed(x.type.shape[:-1], [x.strides[:-1]])
    filling.walk(sizes)
    filling.operand("x", x, steps)
    filling.parameters["x"][0]["type"] = RANKED[x.type.dtype.name]
    return filling


def argmax(asked: Asked) -> tuple[Launch, ...] | None:
    """Return the launch of argmax; None if no kernel computes it."""
    (x,), result = asked.values, asked.result
    *lead, columns = x.type.shape
    plain = result.strides == result.type.strides and result.type.dtype.name == "i32"
    if x.type.dtype.name not in RANKED or not fits(lead) or columns > MOST_COLUMNS or not plain:
        return None
    filling = _walked(asked, LARGEST, x)
    filling.address("result", result)
    rows = math.prod(lead)
    filling.set(step=x.strides[-1], rows=rows, columns=columns)
    return (filling.launch("argmax", (blocks_for(rows, 1), 1, 1), 32 if columns <= 512 else 256),)


def running(asked: Asked) -> tuple[Launch, ...] | None:
    """Return the launch of cumsum or cumprod; None if no kernel computes it."""
    (x,), result = asked.values, asked.result
    lead = x.type.shape[:-1]
    kernel = RUNNING_KERNELS.get(x.type.dtype.name)
    if kernel is None or result.type.dtype is not x.type.dtype or not fits(lead):
        return None
    filling = Filling(RUNNING)
    sizes, steps = collapsed(lead, [x.strides[:-1], result.strides[:-1]])
    filling.walk(sizes)
    for name, value, own in zip(("x", "result"), (x, result), steps, strict=True):
        filling.operand(name, value, own)
    filling.parameters["steps"][0][:] = x.strides[-1], result.strides[-1]
    rows, columns = math.prod(lead), x.type.shape[-1]
    filling.set(rows=rows, columns=columns, is_product=asked.node.op == "cumprod")
    return (filling.launch(kernel, (blocks_for(rows, 1), 1, 1), 32 if columns <= 128 else 256),)
