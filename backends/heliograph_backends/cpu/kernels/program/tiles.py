"""Cuts steps into tiles, by shapes alone, so that bits and work do not depend on the number of
workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from heliograph_backends.cpu.kernels.program.stored_types import FEW_COLUMNS, GROUP_ROWS, staged_bytes
from heliograph_backends.cpu.kernels.program.words import OUTER_DIMENSIONS, PANEL_COLUMNS, UNPACKED_DEPTH

TILE_ELEMENTS = 32 * 1024
# Blocks of elements that each take long have at least so many.
LEAST_ELEMENTS = 64
TILE_NS = 6000.0
MAXIMUM_TILES_WANTED = 32
# Results of at least this many bytes are written past the caches, which avoids reading the
# overwritten lines. Measured with a chain of additions: below 32 MiB, where results stay in the
# cache for the next step, it costs up to a fifth; above, it saves as much or more.
STREAM_BYTES = 32 * 1024 * 1024
# Two axes with fewer elements make no good block; an axis of so many is walked last instead.
SHORT_BLOCK, LONG_AXIS = 32, 8
# Rough rates of one worker, sufficient to decide which steps are worth sharing.
FLOPS_PER_NS = 200.0
MEMORY_BYTES_PER_NS = 20.0
# A block of 48 rows is four strips of twelve. If the right side is packed for each block, blocks
# have more rows to share that work.
PACKED_ROW_BLOCK, UNPACKED_ROW_BLOCK, UNPACKED_COLUMN_BLOCK = 48, 192, 128
LARGEST_COLUMN_BLOCK, SMALLEST_COLUMN_BLOCK = 384, 96
# A product with windows has blocks of a multiple of the kernels' rows, and panels of so many bytes.
STRIP_ROWS, PANELS_BYTES, MOST_PANELS = 12, 384 * 1024, 4
# Elements of the results of small planes that are computed together, for their epilogue.
PLANE_ELEMENTS = 4096
# The most elements that are staged for the windows of a block, unless one line needs more.
STAGED_ELEMENTS = 48 * 1024
# Rows of q8_0 are multiplied eight at a time, and staged as long as they leave room in the cache for
# a group of columns; four groups share that work.
ROWS_AT_ONCE, STAGED_BYTES, LEAST_GROUPS = 8, 512 * 1024, 4
PACKED_DEPTH_BLOCK, UNPACKED_DEPTH_BLOCK = 2048, UNPACKED_DEPTH

Strides = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Space:
    """The iteration space of a step, and its blocks."""

    outer: tuple[int, ...]
    rows: int
    columns: int
    row_block: int
    column_block: int
    blocks_per_tile: int = 1

    @property
    def row_blocks(self) -> int:
        return -(-self.rows // self.row_block)

    @property
    def column_blocks(self) -> int:
        """At least one, since a reduction of empty rows writes results."""
        return max(1, -(-self.columns // self.column_block))

    @property
    def blocks(self) -> int:
        return prod(self.outer) * self.row_blocks * self.column_blocks

    @property
    def tiles(self) -> int:
        return -(-self.blocks // self.blocks_per_tile)


def coalesce(shape: Sequence[int], strides: Sequence[Strides]) -> tuple[tuple[int, ...], list[Strides]]:
    """Drop axes of size 1 and merge neighbours that every operand walks as one."""
    axes = [(size, tuple(each[axis] for each in strides)) for axis, size in enumerate(shape) if size != 1]
    merged: list[tuple[int, Strides]] = []
    for size, steps in axes:
        if merged and merged[-1][1] == tuple(step * size for step in steps):
            merged[-1] = (merged[-1][0] * size, steps)
        else:
            merged.append((size, steps))
    sizes = tuple(size for size, _ in merged)
    return sizes, [tuple(steps[number] for _, steps in merged) for number in range(len(strides))]


def with_long_rows(shape: tuple[int, ...], strides: list[Strides]) -> tuple[tuple[int, ...], list[Strides]]:
    """Move the innermost long axes to the end, if the last two are so short that a block of them is
    not worth its beginning. Only for steps that treat each element by itself."""
    if len(shape) < 3 or shape[-1] * shape[-2] >= SHORT_BLOCK:
        return shape, strides
    long = [axis for axis, size in enumerate(shape) if size >= LONG_AXIS][-2:]
    order = [axis for axis in range(len(shape)) if axis not in long] + long
    return tuple(shape[axis] for axis in order), [tuple(each[axis] for axis in order) for each in strides]


def split_axes(
    shape: Sequence[int], strides: Sequence[Strides], inner: int
) -> tuple[tuple[int, ...], list[Strides]]:
    """Prepend axes of size 1 up to `inner` axes. Raises ValueError for more axes than the runner
    walks."""
    missing = max(0, inner - len(shape))
    if len(shape) > OUTER_DIMENSIONS + inner:
        raise ValueError(f"{len(shape)} axes that do not merge: at most {OUTER_DIMENSIONS + inner}")
    return (1,) * missing + tuple(shape), [(0,) * missing + tuple(each) for each in strides]


def cut_elements(
    outer: tuple[int, ...],
    rows: int,
    columns: int,
    whole_rows: bool = False,
    *,
    weight: int = 1,
    least_rows: int = 1,
) -> Space:
    """Cut into blocks of about `TILE_ELEMENTS`; small blocks of several outer indices form a
    tile. `weight`: the elements that take as long as one of these; blocks have `least_rows`."""
    most = max(LEAST_ELEMENTS, TILE_ELEMENTS // max(1, weight))
    column_block = columns if whole_rows else min(columns, most)
    row_block = min(rows, max(least_rows, most // max(1, column_block)))
    per_tile = max(1, most // max(1, row_block * column_block))
    return Space(outer, rows, columns, row_block, max(1, column_block), per_tile)


def matmul_ns(batch: int, rows: int, columns: int, depth: int) -> float:
    """Estimate one worker's time for a product: arithmetic, or with few rows reading the right
    side."""
    arithmetic = 2.0 * rows * columns * depth / FLOPS_PER_NS
    return batch * max(arithmetic, 4.0 * depth * columns / MEMORY_BYTES_PER_NS)


def cut_streamed(outer: tuple[int, ...], rows: int, columns: int, depth: int) -> Space:
    """Cut a product of few rows with a stored weight into the columns that the kernels take
    together."""
    block_ns = max(1.0, matmul_ns(1, rows, min(columns, FEW_COLUMNS), depth))
    return Space(outer, rows, columns, rows, FEW_COLUMNS, max(1, round(TILE_NS / block_ns)))


def most_staged_rows(depth: int) -> int:
    """Return the most rows of q8_0 that a worker stages at once."""
    fit = STAGED_BYTES // max(1, staged_bytes(depth))
    return max(ROWS_AT_ONCE, min(fit, UNPACKED_ROW_BLOCK) // ROWS_AT_ONCE * ROWS_AT_ONCE)


def cut_integers(outer: tuple[int, ...], rows: int, columns: int, depth: int) -> Space:
    """Cut a product of rows of q8_0 into groups of columns, and rows that a worker stages for
    them."""
    row_block = min(rows, most_staged_rows(depth))
    tiles = -(-MAXIMUM_TILES_WANTED // max(1, prod(outer) * -(-rows // row_block)))
    groups = -(-columns // GROUP_ROWS)
    block = GROUP_ROWS * min(LARGEST_COLUMN_BLOCK // GROUP_ROWS, max(LEAST_GROUPS, groups // tiles))
    block_ns = max(1.0, matmul_ns(1, row_block, min(columns, block), depth) / 2)
    return Space(outer, rows, columns, row_block, block, max(1, round(TILE_NS / block_ns)))


def cut_matmul(outer: tuple[int, ...], rows: int, columns: int, depth: int, packed: bool) -> Space:
    """Cut into blocks of rows by groups of panels, of a few microseconds each if the product is
    large."""
    batch = prod(outer)
    row_block = min(rows, PACKED_ROW_BLOCK if packed else UNPACKED_ROW_BLOCK)
    row_blocks = -(-rows // row_block)
    whole_ns = matmul_ns(batch, rows, columns, depth)
    wanted = min(MAXIMUM_TILES_WANTED, max(1, round(whole_ns / TILE_NS)))
    largest = LARGEST_COLUMN_BLOCK if packed else UNPACKED_COLUMN_BLOCK
    column_ns = matmul_ns(1, row_block, PANEL_COLUMNS, depth) / PANEL_COLUMNS
    block = min(largest, max(SMALLEST_COLUMN_BLOCK, int(10 * TILE_NS / max(column_ns, 1e-3))))
    panels = -(-columns // PANEL_COLUMNS)
    groups = min(panels, max(-(-columns // block), -(-wanted // (row_blocks * batch))))
    column_block = -(-panels // groups) * PANEL_COLUMNS
    block_ns = max(1.0, matmul_ns(1, row_block, min(columns, column_block), depth))
    return Space(outer, rows, columns, row_block, column_block, max(1, round(TILE_NS / block_ns)))


def cut_convolution(outer: tuple[int, ...], rows: int, columns: int, depth: int) -> Space:
    """Cut a product with windows into even blocks of rows, by as many panels as fit in the cache."""
    row_blocks = -(-rows // UNPACKED_ROW_BLOCK)
    each = -(-rows // row_blocks)
    row_block = min(rows, -(-each // STRIP_ROWS) * STRIP_ROWS)
    panel_bytes = 4 * PANEL_COLUMNS * max(1, min(depth, UNPACKED_DEPTH_BLOCK))
    largest = min(MOST_PANELS, max(2, PANELS_BYTES // panel_bytes))
    panels = -(-columns // PANEL_COLUMNS)
    wanted = min(MAXIMUM_TILES_WANTED, max(1, round(matmul_ns(prod(outer), rows, columns, depth) / TILE_NS)))
    groups = min(panels, max(-(-panels // largest), -(-wanted // (row_blocks * prod(outer)))))
    column_block = -(-panels // groups) * PANEL_COLUMNS
    block_ns = max(1.0, matmul_ns(1, row_block, min(columns, column_block), depth))
    return Space(outer, rows, columns, row_block, column_block, max(1, round(TILE_NS / block_ns)))


def cut_planes(
    outer: tuple[int, ...], channels: int, result: tuple[int, int], lines: int, staged: int, least: int = 1
) -> Space:
    """Cut windows over each channel into some channels, or `lines` rows of one; `staged`: the
    elements that these rows read, which may be far more than they have. Channels are a multiple of
    `least`."""
    height, width = result
    most = min(PLANE_ELEMENTS // (height * width), STAGED_ELEMENTS // staged)
    together = max(1, most // least) * least if lines == height else 1
    per_tile = max(1, TILE_ELEMENTS // (together * max(4 * lines * width, staged)))
    return Space(outer, channels, height * width, min(channels, together), lines * width, per_tile)
