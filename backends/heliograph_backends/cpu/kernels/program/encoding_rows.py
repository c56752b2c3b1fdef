"""Encodes moves of rows and attention as words without the places of their operands; see
`encoding`.

Pure. Shapes are in elements, strides in bytes. Errors are ValueErrors.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from heliograph_backends.cpu.kernels.program import words as layout
from heliograph_backends.cpu.kernels.program.body import TRANSCENDENTAL_NS, float_bits
from heliograph_backends.cpu.kernels.program.elements import FLOAT32, PACK, RANDOM, UNPACK, units_of
from heliograph_backends.cpu.kernels.program.encoding import (
    NOTHING,
    Encoding,
    broadcast,
    encoding_of,
    operand_words,
    step_words,
)
from heliograph_backends.cpu.kernels.program.program import Attention, Operand
from heliograph_backends.cpu.kernels.program.stored_types import FORMS, Stored
from heliograph_backends.cpu.kernels.program.tiles import (
    FLOPS_PER_NS,
    MEMORY_BYTES_PER_NS,
    TILE_ELEMENTS,
    TILE_NS,
    Space,
    Strides,
    coalesce,
    cut_elements,
    split_axes,
)
from heliograph_backends.cpu.kernels.program.words import KEY_BLOCK, OPERAND_WORDS, PANEL_COLUMNS, Kind

#: Rows of queries in a block; with so many, unpacking the keys costs little beside the products.
QUERY_BLOCK = 64
#: The columns of a block of a scatter are a multiple of this, which is whole blocks of every type.
WHOLE_BLOCKS = 256
_ABSENT = [-1, *[0] * (OPERAND_WORDS - 1)]
_LINE = 64


def encode_convert(shape: tuple[int, ...], source: Operand, target: Operand, conversion: int) -> Encoding:
    """Encode a copy of all elements, see `ProgramBuilder.convert`."""
    if 0 in shape:
        return NOTHING
    strides = [broadcast(each, len(shape)) for each in (source, target)]
    read, written = units_of(conversion)
    if read.elements == written.elements == 1:
        sizes, strides = split_axes(*coalesce(shape, strides), inner=2)
    else:
        # A row has whole blocks.
        _require_dense(strides, conversion, shape[-1])
        leading, before = split_axes(*coalesce(shape[:-1], [each[:-1] for each in strides]), inner=1)
        sizes = (*leading, shape[-1])
        strides = [(*steps, each[-1]) for steps, each in zip(before, strides, strict=True)]
    space = cut_elements(sizes[:-2], sizes[-2], sizes[-1])
    words = [word for each in strides for word in operand_words(each)] + _ABSENT
    words += _move_words(conversion, 0, 0, 0)
    return _moving(Kind.CONVERT, space, words, conversion, (layout.MOVED_FROM, layout.MOVED_TO))


def encode_gather(
    shape: tuple[int, ...],
    rows: int,
    source: Operand,
    indices: Operand,
    target: Operand,
    conversion: int,
    index_bytes: int,
) -> Encoding:
    """Encode a gather of rows, see `ProgramBuilder.gather`."""
    if 0 in shape:
        return NOTHING
    axes = len(shape)
    strides = [broadcast(each, axes) for each in (source, target)]
    which = (*broadcast(indices, axes - 1), 0)
    _require_dense(strides, conversion, shape[-1])
    outer, strides = _outer_axes(shape[:-2], [*strides, which])
    space = cut_elements(outer, shape[-2], shape[-1], whole_rows=True)
    words = [word for each in strides for word in operand_words(each)]
    words += _move_words(conversion, index_bytes, rows, shape[-2])
    places = (layout.MOVED_FROM, layout.MOVED_TO, layout.WHICH)
    return _moving(Kind.GATHER, space, words, conversion, places)


def encode_scatter(
    shape: tuple[int, ...],
    rows: int,
    source: Operand,
    indices: Operand,
    target: Operand,
    conversion: int,
    index_bytes: int,
) -> Encoding:
    """Encode a scatter of rows, see `ProgramBuilder.scatter`.

    A block has some columns of all rows, in order, so that the last row of a repeated index
    remains.
    """
    if 0 in shape:
        return NOTHING
    axes = len(shape)
    strides = [broadcast(each, axes) for each in (source, target)]
    which = (*broadcast(indices, axes - 1), 0)
    _require_dense(strides, conversion, shape[-1])
    outer, strides = _outer_axes(shape[:-2], [*strides, which])
    some = max(1, TILE_ELEMENTS // (shape[-2] * WHOLE_BLOCKS)) * WHOLE_BLOCKS
    column_block = min(some, shape[-1])
    per_tile = max(1, TILE_ELEMENTS // (shape[-2] * column_block))
    space = Space(outer, 1, shape[-1], 1, column_block, per_tile)
    words = [word for each in strides for word in operand_words(each)]
    words += _move_words(conversion, index_bytes, rows, shape[-2])
    places = (layout.MOVED_FROM, layout.MOVED_TO, layout.WHICH)
    return _moving(Kind.SCATTER, space, words, conversion, places)


def encode_random(count: int, *, as_floats: bool) -> Encoding:
    """Encode random numbers by a seed, into a contiguous target, and a counter, see
    `ProgramBuilder.random`."""
    if count == 0:
        return NOTHING
    words = [word for step in (0, 4, 0) for word in operand_words((0, step))]
    words += _move_words(RANDOM + as_floats, 0, 0, 0)
    places = (layout.MOVED_FROM, layout.MOVED_TO, layout.WHICH)
    return _moving(Kind.CONVERT, cut_elements((), 1, count), words, RANDOM + as_floats, places)


def _outer_axes(leading: tuple[int, ...], strides: list[Strides]) -> tuple[tuple[int, ...], list[Strides]]:
    """Merge leading axes; keep the last two."""
    sizes, before = coalesce(leading, [each[:-2] for each in strides])
    sizes, before = split_axes(sizes, before, inner=0)
    return sizes, [(*steps, *each[-2:]) for steps, each in zip(before, strides, strict=True)]


def _require_dense(strides: Sequence[Strides], conversion: int, columns: int) -> None:
    """Raise unless the rows of blocks and of their elements are contiguous."""
    if conversion < UNPACK:
        return
    for steps, unit in zip(strides, units_of(conversion), strict=True):
        if columns > unit.elements and steps[-1] != unit.bytes:
            raise ValueError(f"rows of blocks need a stride of {unit.bytes} bytes, not {steps[-1]}")
        if columns % unit.elements:
            raise ValueError(f"rows of {columns} elements are not whole blocks of {unit.elements}")


def _move_words(conversion: int, index_bytes: int, choices: int, count: int) -> list[int]:
    read, written = units_of(conversion)
    sizes = [read.elements, written.elements, read.bytes, written.bytes]
    return [conversion, *sizes, index_bytes, choices, count]


def _moving(kind: Kind, space: Space, words: list[int], conversion: int, places: tuple[int, ...]) -> Encoding:
    """Return the encoding of a move; blocks take longer, since they are computed."""
    rows = words[layout.WHICH_COUNT - layout.MOVED_FROM] if kind is Kind.SCATTER else space.rows
    elements = prod(space.outer) * rows * space.columns
    each = 8 / MEMORY_BYTES_PER_NS if conversion < UNPACK else TRANSCENDENTAL_NS
    nanoseconds = elements * each * (8 if conversion >= PACK else 1)
    code = step_words(kind, space, words, nanoseconds, False)
    return encoding_of([code], places, space, nanoseconds, stored=conversion >= UNPACK)


# Attention


def encode_attention(
    outer: tuple[int, ...], rows: int, form: Attention, operands: Sequence[Operand | None]
) -> Encoding:
    """Encode attention over queries, keys, values, target, mask, sinks and tables of pages, see
    `ProgramBuilder.attention`."""
    if form.value_width % 16 or form.key_width == 0:
        raise ValueError(f"attention over rows of {form.key_width} and {form.value_width} elements")
    if 0 in outer or rows == 0 or form.value_width == 0:
        return NOTHING
    axes = len(outer) + 2
    words, places = [], []
    for place, operand in enumerate(operands):
        words += operand_words(broadcast(operand, axes)) if operand else _ABSENT
        if operand is not None:
            places.append(layout.QUERIES + place * OPERAND_WORDS)
    words += operand_words((*form.head_strides, 0))
    blocks = -(-rows // QUERY_BLOCK)
    space = Space(outer, rows, form.value_width, -(-rows // blocks), form.value_width)
    nanoseconds = _attention_ns(prod(outer), rows, form)
    per_tile = max(1, round(TILE_NS * space.blocks / max(1.0, nanoseconds)))
    space = Space(outer, rows, form.value_width, space.row_block, form.value_width, per_tile)
    areas, pack_bytes = _areas(space.row_block, form)
    words += _form_words(form) + areas + _page_words(form)
    words += [float_bits(slope) for slope in form.slopes]
    code = step_words(Kind.ATTENTION, space, words, nanoseconds, False)
    return encoding_of([code], tuple(places), space, nanoseconds, pack_bytes, stored=True)


def _form_words(form: Attention) -> list[int]:
    elements, size = (1, 4) if form.value_form == FLOAT32 else FORMS[Stored(form.value_form)][:2]
    words = [form.keys, form.key_width, form.key_form, form.value_form, elements, size]
    words += [form.mask_conversion, float_bits(form.scale), float_bits(form.cap), len(form.slopes)]
    return words


def _page_words(form: Attention) -> list[int]:
    elements, size = FORMS[Stored(form.key_form)][:2]
    key_bytes = -(-form.key_width // elements) * size
    if form.pages is None:
        return [-(-form.keys // KEY_BLOCK) * KEY_BLOCK, 1, 0, 0, 0, 0, 0, key_bytes]
    return [*form.pages, key_bytes]


def _areas(rows: int, form: Attention) -> tuple[list[int], int]:
    """Return the places of states, biases, scores, panels, wide values and pieces in a worker's
    scratch, and their end."""
    panels = KEY_BLOCK // PANEL_COLUMNS * (form.key_width + 16) * PANEL_COLUMNS
    panels = max(panels, (form.value_width // PANEL_COLUMNS + 1) * KEY_BLOCK * PANEL_COLUMNS)
    wide = 0
    if form.value_form > Stored.BF16:
        wide = KEY_BLOCK * form.value_width
        panels = max(panels, FORMS[Stored(form.value_form)].block_size * PANEL_COLUMNS)
    pieces = (KEY_BLOCK + 1 if form.pages else 2) * layout.PIECE_BYTES
    scores = 4 * rows * KEY_BLOCK
    found, end = [], 0
    for size in (rows * layout.STATE_BYTES, 4 * KEY_BLOCK, scores, 4 * panels, 4 * wide, pieces):
        found.append(end)
        end += -(-size // _LINE) * _LINE
    return found, end


def _attention_ns(matrices: int, rows: int, form: Attention) -> float:
    """Estimate one worker's time: arithmetic and powers, or reading keys and values."""
    width = form.key_width + form.value_width
    arithmetic = rows * form.keys * (2.0 * width / FLOPS_PER_NS + TRANSCENDENTAL_NS)
    return matrices * max(arithmetic, 2.0 * form.keys * width / MEMORY_BYTES_PER_NS)
