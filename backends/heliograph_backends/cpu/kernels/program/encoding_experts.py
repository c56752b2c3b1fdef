"""Encodes products with experts as words without the places of their operands; see `encoding`.

Pure. Shapes are in elements, strides in bytes. Errors are ValueErrors.
"""

from __future__ import annotations

from heliograph_backends.cpu.kernels.program import words as layout
from heliograph_backends.cpu.kernels.program.encoding import (
    NOTHING,
    Encoding,
    broadcast,
    encoding_of,
    operand_words,
    step_words,
)
from heliograph_backends.cpu.kernels.program.program import Experts, Operand
from heliograph_backends.cpu.kernels.program.stored_types import (
    FEW_COLUMNS,
    FORMS,
    GROUP_ROWS,
    few_rows,
    group_bytes,
    staged_bytes,
)
from heliograph_backends.cpu.kernels.program.tiles import (
    TILE_NS,
    UNPACKED_COLUMN_BLOCK,
    UNPACKED_ROW_BLOCK,
    Space,
    matmul_ns,
    most_staged_rows,
)
from heliograph_backends.cpu.kernels.program.words import PANEL_COLUMNS, Kind

#: The number of blocks that workers can share evenly.
BLOCKS_WANTED = 16
_LINE = 64


def encode_experts(form: Experts, operands: tuple[Operand, Operand, Operand, Operand]) -> Encoding:
    """Encode a product over experts, rows, ids and result, see `ProgramBuilder.experts`."""
    places = form.tokens * form.used
    if places == 0 or form.columns == 0:
        return NOTHING
    weights, rows, ids, result = operands
    stored = FORMS[form.kind]
    expert, column = broadcast(weights, 2)
    if form.columns > 1 and result.strides[-1] != 4:
        raise ValueError("a product with experts needs contiguous columns")
    sides = [
        (expert, column, stored.block_bytes),
        broadcast(rows, 3),
        broadcast(ids, 2),
        broadcast(result, 3),
    ]
    space, nanoseconds = _cut(form, places)
    words = [word for side in sides for word in operand_words(side)]
    block_bytes = stored.block_bytes * (GROUP_ROWS if form.grouped else 1)
    words += [form.stored, stored.block_size, block_bytes]
    words += [form.experts, form.depth, form.tokens]
    words += [form.used, form.own, form.id_bytes, int(places < form.experts)]
    areas, pack_bytes = _areas(form, space, min(places, _rows_at_once(form)))
    code = step_words(Kind.EXPERTS, space, words + areas, nanoseconds, False)
    at = (layout.EXPERT_WEIGHTS, layout.EXPERT_ROWS, layout.EXPERT_IDS, layout.EXPERT_RESULT)
    if form.integers:
        return encoding_of([code], at, space, nanoseconds, pack_bytes, more=layout.FOR_INTEGERS)
    return encoding_of([code], at, space, nanoseconds, pack_bytes, stored=True)


def _cut(form: Experts, places: int) -> tuple[Space, float]:
    """Return blocks of columns for each expert or id, and one worker's time with evenly spread
    ids."""
    matrices = min(places, form.experts)
    rows = -(-places // max(1, matrices))
    nanoseconds = matmul_ns(max(1, matrices), rows, form.columns, form.depth)
    panels = -(-form.columns // PANEL_COLUMNS)
    wanted = max(-(-form.columns // UNPACKED_COLUMN_BLOCK), -(-BLOCKS_WANTED // max(1, matrices)))
    few = few_rows(form.stored)
    block = FEW_COLUMNS if rows <= few else -(-panels // min(panels, wanted)) * PANEL_COLUMNS
    space = Space((max(1, matrices),), 1, form.columns, 1, block)
    per_tile = max(1, round(TILE_NS * space.blocks / max(1.0, nanoseconds)))
    return Space(space.outer, 1, form.columns, 1, block, per_tile), nanoseconds


def _rows_at_once(form: Experts) -> int:
    """Return the most rows of an expert that are multiplied at once."""
    return most_staged_rows(form.depth) if form.integers else UNPACKED_ROW_BLOCK


def _areas(form: Experts, space: Space, rows: int) -> tuple[list[int], int]:
    """Return the number of rows that are multiplied at once with the places of products, rows and
    panels in a worker's scratch, after the list of rows; and the bytes of all areas.
    """
    part, few = min(form.depth, layout.UNPACKED_DEPTH), few_rows(form.stored)
    row_bytes = max(
        min(rows, few) * (4 * form.depth + layout.STRIP_GAP_BYTES),
        rows * (4 * part + layout.STRIP_GAP_BYTES),
    )
    if form.integers:
        row_bytes = rows * staged_bytes(form.depth)
    panels = space.column_block // PANEL_COLUMNS
    panel_bytes = 0 if rows <= few else panels * (part + 16) * 4 * PANEL_COLUMNS
    if form.integers:
        panel_bytes = group_bytes(form.kind, form.depth)
    found, end = [rows], 0
    for size in (16 * rows, 4 * rows * space.column_block, row_bytes, panel_bytes):
        found.append(layout.PACK_AT + end)
        end += -(-size // _LINE) * _LINE
    del found[1]
    return found, end
