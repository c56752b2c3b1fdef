"""Encodes steps as words, without the places of their operands.

Most steps of a large graph have the form of an earlier one: kind, shape, strides and instructions.
So the form is encoded once, and each step is a copy in which slots and offsets are filled in. Pure.
Shapes are in elements, strides in bytes. Errors are ValueErrors.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple, TypeVar

from heliograph_backends.cpu.kernels.program import words as layout
from heliograph_backends.cpu.kernels.program.body import (
    TRANSCENDENTAL_NS,
    body_ns,
    check_body,
    encode_body,
    fetches_operands,
    float_bits,
    streamed_results,
)
from heliograph_backends.cpu.kernels.program.program import (
    AnyOperand,
    Elementwise,
    Operand,
    PackedOperand,
    Rotation,
    StoredOperand,
)
from heliograph_backends.cpu.kernels.program.stored_types import (
    FORMS,
    GROUP_ROWS,
    few_rows,
    group_bytes,
    staged_bytes,
)
from heliograph_backends.cpu.kernels.program.tiles import (
    PACKED_DEPTH_BLOCK,
    STREAM_BYTES,
    UNPACKED_DEPTH_BLOCK,
    Space,
    Strides,
    coalesce,
    cut_elements,
    cut_integers,
    cut_matmul,
    cut_streamed,
    matmul_ns,
    split_axes,
    with_long_rows,
)
from heliograph_backends.cpu.kernels.program.words import (
    OPERAND_WORDS,
    OUTER_DIMENSIONS,
    PANEL_COLUMNS,
    STEP_HEADER_WORDS,
    Kind,
)

Choice = TypeVar("Choice")
#: Shorter steps gain nothing from a second worker.
SHARING_NS = 4000.0
#: A worker claims tiles of about this time at most, so that a run can be paused within it.
CLAIM_NS = 500_000.0
#: Walks over spaces that are kept.
MOST_WALKS = 512
#: Row kernels that write as many elements as they read.
_MAPPING_ROWS = frozenset({Kind.LAYER_NORM, Kind.RMS_NORM, Kind.SOFT_MAX, Kind.L2_NORM})


@dataclass(frozen=True, slots=True)
class Encoding:
    """The words of a step, with 0 for its operands' slots and offsets."""

    code: bytes
    #: For each operand the position of its slot; its offset is the next word.
    operands: tuple[int, ...]
    shared: bool
    nanoseconds: float
    #: The places of its entries in the table, as bits.
    needs: int = 0
    #: Bytes of each worker's scratch for packing.
    pack_bytes: int = 0
    #: The same step without writes past the caches, if `code` has them.
    through_caches: bytes = b""


#: A step over an empty space.
NOTHING = Encoding(b"", (), False, 0.0)


def encode_elementwise(shape: tuple[int, ...], body: Elementwise) -> Encoding:
    """Encode an elementwise step, see `ProgramBuilder.elementwise`."""
    given = tuple([broadcast(operand, len(shape)) for operand in body.operands])
    check_body(body, shape, given)
    if 0 in shape:
        return NOTHING
    sizes, strides, space, operands, places = _walk(shape, given)
    nanoseconds = prod(sizes) * body_ns(body.instructions, body.operands)
    fetches = fetches_operands(body, prod(sizes))
    long_rows = sizes[-1] >= layout.WIDE_ROW or sizes[-2] == 1
    codes = [
        step_words(
            Kind.ELEMENTWISE,
            space,
            encode_body(body, operands, streamed, fetches, long_rows),
            nanoseconds,
            bool(streamed),
        )
        for streamed in _choices(streamed_results(body, strides, sizes), frozenset[int]())
    ]
    return encoding_of(codes, places, space, nanoseconds)


class _Walk(NamedTuple):
    """The walk of an elementwise step over its space."""

    sizes: tuple[int, ...]
    strides: list[Strides]
    space: Space
    #: The words of the operands, and their positions in the step.
    operands: list[list[int]]
    places: tuple[int, ...]


@lru_cache(maxsize=MOST_WALKS)
def _walk(shape: tuple[int, ...], strides: tuple[Strides, ...]) -> _Walk:
    """Return the walk over a shape, which many steps of a graph share."""
    sizes, walked = split_axes(*with_long_rows(*coalesce(shape, strides)), inner=2)
    space = cut_elements(sizes[:-2], sizes[-2], sizes[-1])
    operands = [operand_words(steps) for steps in walked]
    return _Walk(sizes, walked, space, operands, body_places(STEP_HEADER_WORDS, len(operands)))


def encode_gemm(
    rows: int,
    columns: int,
    depth: int,
    left: Operand,
    right: AnyOperand,
    product: Operand,
    batch: tuple[int, ...],
    epilogue: Elementwise | None,
) -> Encoding:
    """Encode a matrix product, see `ProgramBuilder.gemm`."""
    axes = len(batch) + 2
    sides = [broadcast(left, axes), _right_strides(right, axes), broadcast(product, axes)]
    extra = epilogue or Elementwise((), ())
    sides += [broadcast(operand, axes) for operand in extra.operands]
    check_body(extra, (*batch, rows, columns), sides[3:])
    if columns > 1 and sides[2][-1] != 4:
        raise ValueError("the product of a matrix multiplication needs contiguous columns")
    if 0 in batch or rows == 0 or columns == 0:
        return NOTHING
    outer, rows, sides = _fold_batch(batch, rows, sides)
    packed = isinstance(right, PackedOperand)
    integers = isinstance(right, StoredOperand) and right.integers
    pack_left = sides[0][-1] != 4 and depth > 1 and not integers
    form, block = _right_form(right)
    # With few rows a stored weight is never unpacked, so it streams through in a single pass.
    streams = form > 1 and rows <= few_rows(form) and not pack_left
    if integers:
        space = cut_integers(outer, rows, columns, depth)
    elif streams:
        space = cut_streamed(outer, rows, columns, depth)
    else:
        space = cut_matmul(outer, rows, columns, depth, packed)
    whole = streams or integers
    depth_block = PACKED_DEPTH_BLOCK if packed else max(1, depth) if whole else UNPACKED_DEPTH_BLOCK
    operands = [operand_words(side) for side in sides]
    words = [word for operand in operands[:3] for word in operand]
    words += [depth, depth_block, int(pack_left), form, block, int(epilogue is not None), 0]
    words += encode_body(extra, operands[3:], frozenset())
    nanoseconds = matmul_ns(prod(outer), rows, columns, depth)
    places = (layout.LEFT, layout.RIGHT, layout.PRODUCT, *body_places(layout.EPILOGUE, len(extra.operands)))
    code = step_words(Kind.MATMUL, space, words, nanoseconds, False)
    if isinstance(right, StoredOperand) and right.integers:
        staged = -(-space.row_block * staged_bytes(depth) // 64) * 64
        room = staged + group_bytes(right.kind, depth)
        return encoding_of([code], places, space, nanoseconds, room, more=layout.FOR_INTEGERS)
    room = packing_bytes(space, min(depth, depth_block), pack_left, not packed and not streams)
    return encoding_of([code], places, space, nanoseconds, room, stored=form > 1)


def encode_rows(
    kind: Kind,
    shape: tuple[int, ...],
    operands: Sequence[Operand | None],
    parameter: float,
    more: Sequence[int] = (),
    size: int = 4,
    heads: Strides | None = None,
    form: int = 0,
) -> Encoding:
    """Encode a row kernel over source, weight, bias and target, of elements of `size` bytes.

    The parameter and `form` are followed by an operand that only has the strides `heads`, if given,
    and by `more`. `form`: `elements.HALF` or `BRAIN` if a worker stages rows of f16 or bf16.
    """
    size = 2 if form else size
    strides = [broadcast(each, len(shape)) if each else (0,) * len(shape) for each in operands]
    _check_rows(kind, shape, operands, strides, size)
    strides += [heads] if heads is not None else []
    if 0 in shape[:-1] or (shape[-1] == 0 and kind not in (Kind.SUM, Kind.MEAN)):
        return NOTHING
    leading, steps_before = coalesce(shape[:-1], [steps[:-1] for steps in strides])
    leading, steps_before = split_axes(leading, steps_before, inner=1)
    space = cut_elements(leading[:-1], leading[-1], shape[-1], whole_rows=True)
    words, places = [], []
    for place, operand in enumerate(operands):
        steps = (*steps_before[place], strides[place][-1])
        words += [-1, *[0] * (OPERAND_WORDS - 1)] if operand is None else operand_words(steps)
        if operand is not None:
            places.append(layout.SOURCE + place * OPERAND_WORDS)
    words += [float_bits(parameter), form]
    words += operand_words((*steps_before[-1], 0)) if heads is not None else []
    words += more
    nanoseconds = prod(shape) * TRANSCENDENTAL_NS
    # A soft_max stages two of its rows, with a factor behind each, in the second-level cache.
    fits = not form and (kind is not Kind.SOFT_MAX or 4 * shape[-1] <= layout.BUFFER_AREA_BYTES)
    large = kind in _MAPPING_ROWS and prod(shape) * 4 >= STREAM_BYTES and fits
    staged = 4 * (shape[-1] + layout.CACHE_LINE_BYTES) if form else 0
    if large and kind is Kind.SOFT_MAX:
        staged = 2 * (4 * shape[-1] + 2 * layout.CACHE_LINE_BYTES)
    codes = [step_words(kind, space, words, nanoseconds, streams) for streams in _choices(large, False)]
    return encoding_of(codes, tuple(places), space, nanoseconds, staged)


def encode_soft_max(
    shape: tuple[int, ...],
    operands: Sequence[Operand | None],
    scale: float,
    narrow: int,
    slopes: tuple[float, ...],
    form: int = 0,
) -> Encoding:
    """Encode a soft maximum over source, mask, sinks and target, see `ProgramBuilder.soft_max`."""
    if narrow and shape[-1] > layout.MAXIMUM_NARROW:
        raise ValueError(f"rows of {shape[-1]} elements of 16 bits: at most {layout.MAXIMUM_NARROW}")
    if len(slopes) not in (0, shape[-3] if len(shape) > 2 else 1):
        raise ValueError(f"{len(slopes)} slopes of {shape}: one for each index of axis -3")
    heads = (0,) * len(shape)
    if slopes and len(shape) > 2:
        heads = (*heads[:-3], layout.WORD_BYTES, 0, 0)
    words = [narrow, len(slopes), *map(float_bits, slopes)]
    return encode_rows(Kind.SOFT_MAX, shape, operands, scale, words, heads=heads, form=form)


def encode_rotary(shape: tuple[int, ...], operands: Sequence[Operand | None], rotation: Rotation) -> Encoding:
    """Encode a rotary embedding over source, positions, factors and target, see
    `ProgramBuilder.rotary`."""
    width, start, adjacent, narrow, size, angles, scales, positions = rotation
    pairs = len(angles)
    if not 0 < pairs <= layout.MAXIMUM_PAIRS or start < 0 or start + 2 * pairs > width or shape[-1] % width:
        raise ValueError(f"{pairs} pairs from element {start} of heads of {width} in rows of {shape[-1]}")
    if narrow and width > layout.MAXIMUM_NARROW:
        raise ValueError(f"heads of {width} elements of 16 bits: at most {layout.MAXIMUM_NARROW}")
    words = [width, start, int(adjacent), *_patterns(size), narrow, pairs]
    for angle, scale, position in zip(angles, scales, positions, strict=True):
        words += [*_patterns(angle, scale), position]
    return encode_rows(Kind.ROTARY, shape, operands, 0.0, words, 2 if narrow else 4)


def _patterns(*values: float) -> tuple[int, ...]:
    """Return the patterns of float64 values."""
    return struct.unpack(f"<{len(values)}q", struct.pack(f"<{len(values)}d", *values))


def _choices(preferred: Choice, plain: Choice) -> tuple[Choice, ...]:
    """Return the preferred variant, if any, and the plain one for results that overwrite an
    operand."""
    return (preferred, plain) if preferred else (plain,)


def _check_rows(
    kind: Kind,
    shape: tuple[int, ...],
    operands: Sequence[Operand | None],
    strides: Sequence[Strides],
    size: int,
) -> None:
    """Raise unless rows are contiguous: float32, except in a rotary embedding and a mask."""
    for place, (operand, steps) in enumerate(zip(operands, strides, strict=True)):
        if (kind, place) in ((Kind.ROTARY, 1), (Kind.SOFT_MAX, 2)):
            continue  # one position, or one sink, for a whole row
        own = 4 if kind is Kind.ROTARY and place == 2 else size
        if kind is Kind.SOFT_MAX and place == 1 and operand is not None and steps[-1] in (2, 4):
            continue
        if operand is not None and shape[-1] > 1 and steps[-1] != own:
            raise ValueError(f"{kind.name.lower()} needs contiguous rows, not a stride of {steps[-1]} bytes")


# Words


def operand_words(strides: Strides) -> list[int]:
    """Encode an operand whose strides cover outer axes, rows and columns."""
    *outer, row, column = strides
    return [0, 0, row, column, *[0] * (OUTER_DIMENSIONS - len(outer)), *outer]


def body_places(start: int, operands: int) -> tuple[int, ...]:
    """Return the positions of the operands of an elementwise body."""
    first = start + layout.BODY_HEADER_WORDS
    return tuple(first + number * layout.BODY_OPERAND_WORDS for number in range(operands))


def step_words(kind: Kind, space: Space, payload: list[int], nanoseconds: float, streams: bool) -> bytes:
    """Prepend the header. `ProgramBuilder.build` fills in how a step is shared."""
    tiles = space.tiles
    words = [kind, STEP_HEADER_WORDS + len(payload), tiles, space.blocks, space.blocks_per_tile]
    words += [-1, space.rows, space.columns, space.row_block, space.column_block]
    most_claimed = max(1, int(tiles * CLAIM_NS / max(nanoseconds, 1.0)))
    words += [space.row_blocks, space.column_blocks, int(streams), 0, min(tiles, most_claimed)]
    words += [1] * (OUTER_DIMENSIONS - len(space.outer)) + list(space.outer)
    return array("q", words + payload).tobytes()


def encoding_of(
    codes: list[bytes],
    places: tuple[int, ...],
    space: Space,
    nanoseconds: float,
    pack_bytes: int = 0,
    *,
    stored: bool = False,
    more: int = 0,
) -> Encoding:
    """Return the encoding of a step. `stored`: operands of other data types take part; `more`:
    further entries that it needs."""
    shared = space.tiles > 1 and nanoseconds > SHARING_NS
    through_caches = codes[1] if len(codes) > 1 else b""
    kind = int.from_bytes(codes[0][: layout.WORD_BYTES], sys.byteorder)
    needs = 1 << kind | (layout.FOR_STORED if stored else 0) | more
    return Encoding(codes[0], places, shared, nanoseconds, needs, pack_bytes, through_caches)


def packing_bytes(space: Space, depth: int, pack_left: bool, pack_right: bool) -> int:
    """Return the bytes of scratch for packing the sides of a block."""
    row_bytes = 4 * depth + layout.STRIP_GAP_BYTES
    left = -(-space.row_block * row_bytes // 64) * 64 if pack_left else 0
    panels = -(-min(space.column_block, space.columns) // PANEL_COLUMNS)
    return left + (panels * (depth + 16) * PANEL_COLUMNS * 4 if pack_right else 0)


# Strides


def broadcast(operand: Operand, axes: int) -> Strides:
    """Return the operand's strides over all axes, 0 over missing ones."""
    missing = axes - len(operand.strides)
    if missing < 0:
        raise ValueError(f"{operand} has more than {axes} axes")
    return (0,) * missing + tuple(operand.strides)


def _right_form(right: AnyOperand) -> tuple[int, int]:
    """Return the words PACK_RIGHT and RIGHT_BLOCK."""
    if isinstance(right, StoredOperand):
        return right.stored, FORMS[right.kind].block_size
    return int(isinstance(right, Operand)), 1


def _right_strides(right: AnyOperand, axes: int) -> Strides:
    if isinstance(right, Operand):
        return broadcast(right, axes)
    if isinstance(right, StoredOperand):
        *leading, column = right.strides
        along_k = FORMS[right.kind].block_bytes * (GROUP_ROWS if right.grouped else 1)
        return broadcast(Operand(right.slot, right.offset, (*leading, along_k, column)), axes)
    missing = axes - 2 - len(right.batch_strides)
    if missing < 0:
        raise ValueError(f"{right} has more than {axes - 2} batch axes")
    return (0,) * missing + tuple(right.batch_strides) + (0, 0)


def _fold_batch(
    batch: tuple[int, ...], rows: int, sides: list[Strides]
) -> tuple[tuple[int, ...], int, list[Strides]]:
    """Merge batch axes with each other, and the last ones with the rows if the right side repeats
    along them.
    """
    left, right, *others = sides
    own = max((axis + 1 for axis, step in enumerate(right[:-2]) if step), default=0)
    sizes, merged = coalesce(batch[:own], [each[:own] for each in sides])
    walks = [each[own:-1] for each in (left, *others)]
    repeats, walks = split_axes(*coalesce((*batch[own:], rows), walks), inner=1)
    walks.insert(1, (0,) * (len(repeats) - 1) + (right[-2],))
    joined = [(*first, *walk) for first, walk in zip(merged, walks, strict=True)]
    sizes, joined = split_axes((*sizes, *repeats), joined, inner=1)
    lasts = [(*walk, each[-1]) for walk, each in zip(joined, sides, strict=True)]
    return sizes[:-1], sizes[-1], lasts
