"""Encodes sorts, searches and running sums along rows as words without the places of their
operands; see `encoding`.

Pure. Shapes are in elements, strides in bytes. Errors are ValueErrors.
"""

from __future__ import annotations

from math import prod

from heliograph_backends.cpu.kernels.program import words as layout
from heliograph_backends.cpu.kernels.program.encoding import (
    NOTHING,
    Encoding,
    broadcast,
    encoding_of,
    operand_words,
    step_words,
)
from heliograph_backends.cpu.kernels.program.program import Operand
from heliograph_backends.cpu.kernels.program.tiles import Strides, coalesce, cut_elements, split_axes
from heliograph_backends.cpu.kernels.program.words import Kind

#: The words that are held for each place that is written, and at least; and the most places that
#: are found that way.
HELD, LEAST_HELD, MOST_HELD = 4, 256, 1024
#: Words behind a row of words that are written, too.
_BEHIND = 8
#: Estimates of one worker's time for an element: to look at it, to sort it, to add it.
LOOK_NS, SORT_NS, ADD_NS = 0.15, 8.0, 1.0
_LINE = 64


def encode_sort(
    shape: tuple[int, ...], source: Operand, target: Operand, form: int, kept: int, *, falling: bool
) -> Encoding:
    """Encode a sort of rows, see `ProgramBuilder.sort`."""
    columns = shape[-1]
    leading, strides = _rows(shape, source, target)
    if not 0 <= kept <= columns:
        raise ValueError(f"{kept} places of rows of {columns}")
    if 0 in shape:
        return NOTHING
    room = 0
    if 0 < kept <= MOST_HELD and kept < columns:
        room = max(LEAST_HELD, HELD * kept)
    elif kept and columns > layout.MOST_SORTED:
        raise ValueError(f"rows of {columns} elements: at most {layout.MOST_SORTED} are sorted")
    area = 0 if kept == 0 else 8 * room if room else 16 * (columns + _BEHIND)
    space = cut_elements(leading[:-1], leading[-1], columns, whole_rows=True)
    words = [word for steps in strides for word in operand_words(steps)]
    words += [form, kept, int(falling), room]
    nanoseconds = prod(shape) * (LOOK_NS if kept == 0 or (room and room < columns) else SORT_NS)
    code = step_words(Kind.SORT, space, words, nanoseconds, False)
    area = -(-area // _LINE) * _LINE
    return encoding_of([code], (layout.SORTED, layout.SORTED_TO), space, nanoseconds, area, stored=False)


def encode_running(
    shape: tuple[int, ...], source: Operand, target: Operand, form: int, *, product: bool
) -> Encoding:
    """Encode running sums or products of rows, see `ProgramBuilder.running`."""
    if 0 in shape:
        return NOTHING
    leading, strides = _rows(shape, source, target)
    space = cut_elements(leading[:-1], leading[-1], shape[-1], whole_rows=True)
    words = [word for steps in strides for word in operand_words(steps)] + [form, int(product)]
    nanoseconds = prod(shape) * ADD_NS
    code = step_words(Kind.RUNNING, space, words, nanoseconds, False)
    return encoding_of([code], (layout.RUNNING, layout.RUNNING_TO), space, nanoseconds)


def _rows(shape: tuple[int, ...], source: Operand, target: Operand) -> tuple[tuple[int, ...], list[Strides]]:
    """Return the sizes of the dimensions before the last, merged, and the strides of both operands."""
    strides = [broadcast(each, len(shape)) for each in (source, target)]
    leading, before = split_axes(*coalesce(shape[:-1], [steps[:-1] for steps in strides]), inner=1)
    return leading, [(*steps, each[-1]) for steps, each in zip(before, strides, strict=True)]
