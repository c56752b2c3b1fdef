"""Products with weights read as they are stored, and with experts that ids select among such
weights. Pure.

Products of up to `MOST_FEW` rows are bound by the weights' bytes and have their own kernels
(`products.cu`): one block on each multiprocessor, with a share of the weights' rows. Larger ones
use tiles (`products_many.cu`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from heliograph_backends.cuda.driver.parameters import PRODUCT, TYPES
from heliograph_backends.cuda.lowering.launch import Filling, Launch, Located, collapsed, few
from heliograph_backends.cuda.lowering.products import MOST_GRID, matrices
from heliograph_backends.cuda.lowering.products import reads_rows as lie_side_by_side
from heliograph_proto.graph import Node
from heliograph_proto.types import TensorType

if TYPE_CHECKING:
    from heliograph_backends.cuda.lowering.target import CudaTarget

#: The most rows of activations in a pass over the weights, and the kernels by the rows that they
#: hold.
MOST_FEW = 8
HELD = {1: "one", 4: "four", 8: "eight"}
#: Above this many rows, large tiles are used; the rows of the smallest tiles.
SEVERAL, LEAST_TILE = 64, 32
#: Up to this many rows for each expert, each row is a separate pass over the expert's weights.
ROWS_OF_EXPERT = 4
#: As in `products.cu`: rows of weights in a step of a warp, and steps in a ring.
GROUP, RING = 2, 3
#: Types whose units of 64 elements span their blocks, with four scales; of the others some have
#: four, too, and all other ones two.
CROSSED = ("q2_k", "q3_k", "q6_k", "tq2_0")
FOUR_SCALES = ("iq1_m", "iq2_xs", "iq2_s", "nvfp4")
#: Types whose blocks have offsets.
WITH_OFFSETS = ("q4_1", "q5_1", "q2_k", "q4_k", "q5_k")
#: With longer steps than this, a block has 8 warps, else 16.
MOST_STEP_BYTES = 1600
#: A block has fewer warps if it could not hold this many activations at once otherwise.
LEAST_ELEMENTS = 8192
#: The bytes that a multiprocessor could read while a block starts: 1 us at 4 TB/s.
START_BYTES = 32 * 1024


class WarpStep(NamedTuple):
    """The part of a row that a warp processes at once, in `products.cu`."""

    elements: int
    #: The bytes of the stored row, and of its activations in shared memory.
    bytes: int
    x_bytes: int


def step_of(type: TensorType) -> WarpStep:
    """Return the step for rows of a stored type."""
    dtype = type.dtype
    if dtype.block_size == 1:
        return WarpStep(1024, 1024 * dtype.block_bytes, 4096)
    unit = 176 if dtype.name in CROSSED else 144
    return WarpStep(2048, 2048 // dtype.block_size * dtype.block_bytes, 2048 // 64 * unit)


# Which nodes


def is_product(node: Node, operands: Sequence[TensorType]) -> bool:
    """True if the kernels read the weights of this node as they are stored."""
    if node.op != "mul_mat" or not _reads(operands):
        return False
    lead = operands[1].shape[:-1]
    return (
        math.prod(lead[:-1]) <= MOST_GRID and math.prod(lead) <= MOST_GRID * LEAST_TILE and few(2 * lead[:-1])
    )


def is_expert_product(node: Node, operands: Sequence[TensorType]) -> bool:
    """True if the kernels read the experts of this node as they are stored."""
    return node.op == "mul_mat_id" and _reads(operands) and operands[0].shape[0] <= MOST_GRID


def _reads(operands: Sequence[TensorType]) -> bool:
    weights, x = operands[:2]
    known = weights.dtype.name in TYPES and weights.dtype.name != "f32" and x.dtype.name == "f32"
    return known and weights.shape[-1] % 32 == 0 and weights.shape[-1] > 0


def reads_rows(operands: Sequence[Located], result: Located) -> bool:
    """True if the elements of rows are contiguous, as the kernels require."""
    weights = operands[0]
    return weights.strides[-1] == weights.type.dtype.block_bytes and lie_side_by_side((*operands[1:], result))


# Launches


def product(weights: Located, x: Located, result: Located, target: CudaTarget) -> Launch:
    """Return a product of contiguous rows."""
    filling = Filling(PRODUCT)
    rows, count = _walk(filling, weights, x, result)
    filling.set(n=weights.type.shape[-2], k=x.type.shape[-1], weight_stride=weights.strides[-2])
    if rows > MOST_FEW:
        kernel = _tiles_for(rows, weights.type, target)
        return _many(filling, kernel, weights.type, (-(-rows // TILES[kernel].rows), count))
    return _few(filling, weights.type, rows, count, target)


def _walk(filling: Filling, weights: Located, x: Located, result: Located) -> tuple[int, int]:
    """Set the places of matrices and rows. Returns the rows of each matrix, and the number of
    matrices."""
    rows, count, x_stride, result_stride = x.type.shape[-2], 1, x.strides[-2], result.strides[-2]
    sizes, (w, a, c) = matrices(weights, x, result)
    if not any(w):
        # All matrices have the same weights, so their rows can form one matrix.
        flat, strides = collapsed(x.type.shape[:-1], [x.strides[:-1], result.strides[:-1]])
        if len(flat) == 1:
            rows, ((x_stride,), (result_stride,)), sizes = flat[0], strides, ()
    count = math.prod(sizes)
    filling.walk(sizes)
    for name, one, steps in (("weights", weights, w), ("x", x, a), ("result", result, c)):
        filling.operand(name, one, steps if sizes else ())
    filling.set(rows=rows, x_stride=x_stride, result_stride=result_stride)
    return rows, count


def expert_product(
    number: int, values: Sequence[Located], result: Located, failure: Located, target: CudaTarget
) -> Launch:
    """Return the launch: a pass over an expert for each row, or tiles for each expert, whichever
    reads less."""
    experts, x, ids = values
    (count, n, k), (tokens, own, _), used = experts.type.shape, x.type.shape, ids.type.shape[1]
    by_token = ((x, (x.strides[0], 0, x.strides[1])), *(
        (one, (one.strides[0], own * one.strides[1], one.strides[1])) for one in (ids, result)
    ))  # fmt: skip
    sizes, steps = collapsed((tokens, used // own, own), [strides for _, strides in by_token])
    filling = Filling(PRODUCT)
    filling.walk(sizes)
    filling.operand("weights", experts)
    for name, (one, _), strides in zip(("x", "ids", "result"), by_token, steps, strict=True):
        filling.operand(name, one, strides)
    filling.address("failure", failure)
    filling.set(
        n=n, k=k, weight_stride=experts.strides[1], expert_stride=experts.strides[0], experts=count,
        node=number, wide_ids=ids.type.dtype.name == "i64", id_step=_step_between(ids),
    )  # fmt: skip
    rows = tokens * used
    if rows <= min(count * ROWS_OF_EXPERT, MOST_GRID):
        filling.set(rows=1)
        return _few(filling, experts.type, 1, rows, target)
    filling.set(rows=rows)
    kernel = _tiles_for(rows // max(1, count), experts.type, target)
    return _many(filling, kernel, experts.type, (max(1, count), 1))


def _step_between(ids: Located) -> int:
    """Return the bytes between consecutive ids; 0 if they are not evenly spaced."""
    tokens, used = ids.type.shape
    if used == 1 or tokens == 1:
        return ids.strides[0 if used == 1 else 1]
    return ids.strides[1] if ids.strides[0] == used * ids.strides[1] else 0


def _few(filling: Filling, weights: TensorType, rows: int, count: int, target: CudaTarget) -> Launch:
    """Return a pass over the weights of each of `count` matrices."""
    held = min(size for size in HELD if size >= rows)
    step, (n, k) = step_of(weights), weights.shape[-2:]
    warps, steps = fitted(step, held, k, target.shared_bytes)
    groups = -(-n // GROUP)
    group_bytes = GROUP * k // weights.dtype.block_size * weights.dtype.block_bytes
    blocks = blocks_of(groups, count, group_bytes, target.multiprocessors)
    filling.set(
        groups=groups // blocks, larger_blocks=groups % blocks, chunk=steps * step.elements,
        warp_bits=warps.bit_length() - 1,
    )  # fmt: skip
    name = f"product_{HELD[held]}_{weights.dtype.name}"
    return filling.launch(name, (blocks, count, 1), 32 * warps, few_bytes(step, held, warps, steps))


def fitted(step: WarpStep, held: int, k: int, shared_bytes: int) -> tuple[int, int]:
    """Return the warps of a block, and the steps of activations that fit its shared memory."""
    needed = -(-k // step.elements)
    enough = min(needed, LEAST_ELEMENTS // step.elements)
    few_warps = held == max(HELD) or step.bytes > MOST_STEP_BYTES
    for warps, least in ((8 if few_warps else 16, enough), (8, 1), (4, 1), (2, 1)):
        room = shared_bytes - few_bytes(step, held, warps, 0)
        steps = min(needed, room // (held * step.x_bytes))
        if steps >= least:
            break
    return warps, steps


def few_bytes(step: WarpStep, held: int, warps: int, steps: int) -> int:
    """Return the bytes of activations, rings with room for moved rows, and sums of rows that warps
    share."""
    ring = RING * GROUP * (step.bytes + 16)
    return held * steps * step.x_bytes + warps * (ring + 2 * GROUP * held * 4)


def blocks_of(groups: int, count: int, group_bytes: int, multiprocessors: int) -> int:
    """Return the number of blocks for the groups of each of `count` matrices, such that the last
    multiprocessor finishes early."""

    def seconds(blocks: int) -> int:
        rounds = -(-count * blocks // multiprocessors)
        return rounds * (-(-groups // blocks) * group_bytes + START_BYTES)

    most = max(1, min(groups, multiprocessors))
    return min(range(most, 0, -1), key=seconds)


# Many rows


class Tiles(NamedTuple):
    """The tiles of a kernel of `products_many.cu`."""

    #: Rows of activations and of weights, units of 64 elements in a step, and threads.
    rows: int
    n: int
    units: int
    threads: int

    def shared_bytes(self, type: TensorType) -> int:
        """Return the shared memory of a block, for weights of a type: two steps, packed bytes,
        addresses of rows, ids."""
        name, block_size, block_bytes = type.dtype.name, type.dtype.block_size, type.dtype.block_bytes
        spans = 1 if block_size == 1 else 4 if name in CROSSED + FOUR_SCALES else 2
        offsets = spans if name in WITH_OFFSETS else 0
        pitch, planes = 144, 2 if name == "f16" else 1
        unit = self.n * (planes * pitch + 4 * (spans + offsets)) + self.rows * (
            2 * pitch + 16 * bool(offsets)
        )
        elements = {1: 64 * self.units, 32: 128}.get(block_size, 256)
        raw = ((elements // block_size * block_bytes + 29) // 16 | 1) * 16
        stages = 2 if self.rows == 128 or block_size == 1 else 4
        return 2 * self.units * unit + stages * self.n * raw + 16 * self.rows + 2 * 2048 + 16


TILES = {"tiles": Tiles(32, 32, 2, 128), "large": Tiles(128, 128, 1, 256)}


def _tiles_for(rows: int, weights: TensorType, target: CudaTarget) -> str:
    """Return the kernel for a number of rows, of those that fit the device's shared memory."""
    fits = TILES["large"].shared_bytes(weights) <= target.shared_bytes
    return "large" if rows > SEVERAL and fits else "tiles"


def _many(filling: Filling, kernel: str, weights: TensorType, rows_and_count: tuple[int, int]) -> Launch:
    tiles = TILES[kernel]
    grid = (-(-weights.shape[-2] // tiles.n), *rows_and_count)
    name = f"product_{kernel}_{weights.dtype.name}"
    return filling.launch(name, grid, tiles.threads, tiles.shared_bytes(weights))
