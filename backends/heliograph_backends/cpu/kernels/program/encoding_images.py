"""Encodes resampling, windows as rows, and the gradients of windows as words without the places of
their operands; see `encoding`.

Pure. Shapes are in elements, strides in bytes. Errors are ValueErrors.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from heliograph_backends.cpu.kernels.program import words as layout
from heliograph_backends.cpu.kernels.program.encoding import (
    NOTHING,
    Encoding,
    broadcast,
    encoding_of,
    operand_words,
    step_words,
)
from heliograph_backends.cpu.kernels.program.encoding_windows import geometry_words
from heliograph_backends.cpu.kernels.program.program import Geometry, Operand
from heliograph_backends.cpu.kernels.program.tiles import Space, Strides, coalesce, cut_elements, split_axes
from heliograph_backends.cpu.kernels.program.words import Kind, Unfolding

#: The most words of the tables of a resampled image.
MOST_TABLE_WORDS = 2**18
#: The elements of a vector.
LANES = 16
#: Estimates of one worker's time: for a tap of a resampled element, an element that is copied or
#: added.
TAP_NS, COPY_NS, ADD_NS = 0.5, 1.0, 2.0
_ABSENT = [-1, *[0] * (layout.OPERAND_WORDS - 1)]


class Taps(NamedTuple):
    """The elements of one dimension that become each of the new ones: both arrays [size, taps]."""

    places: NDArray[np.int64]
    weights: NDArray[np.float64]


def encode_resample(
    outer: tuple[int, ...], source: Operand, target: Operand, down: Taps, across: Taps, *, copied: bool
) -> Encoding:
    """Encode resampled images, see `ProgramBuilder.resample`."""
    (height, taps), width = down.places.shape, across.places.shape[0]
    if 0 in (*outer, height, width):
        return NOTHING
    axes = len(outer) + 2
    *_, line, pixel = broadcast(source, axes)
    strides = [broadcast(each, axes) for each in (source, target)]
    if width > 1 and strides[1][-1] != 4:
        raise ValueError("resampled images need contiguous lines")
    sizes, before = split_axes(*coalesce(outer, [each[:-2] for each in strides]), inner=0)
    words = operand_words((*before[0], 0, 0)) + operand_words((*before[1], *strides[1][-2:]))
    pitch = -(-width // LANES) * LANES
    words += [0 if copied else taps, pitch, *_lines(down, line), *_columns(across, pixel, pitch)]
    space = cut_elements(sizes, height, width, whole_rows=True)
    nanoseconds = prod(outer) * height * width * (taps * taps * TAP_NS + TAP_NS)
    code = step_words(Kind.RESAMPLE, space, words, nanoseconds, False)
    return encoding_of([code], (layout.RESAMPLED, layout.RESAMPLED_TO), space, nanoseconds)


def _lines(down: Taps, line: int) -> list[int]:
    pairs = np.stack([down.places.astype(np.int64) * line, _patterns(down.weights)], axis=-1)
    found: list[int] = pairs.reshape(-1).tolist()
    return found


def _columns(across: Taps, pixel: int, pitch: int) -> list[int]:
    """Return for each tap the offsets of all columns, then their weights."""
    width, taps = across.places.shape
    table = np.zeros((taps, 2, pitch), np.int64)
    table[:, 0, :width] = across.places.T * pixel
    table[:, 1, :width] = _patterns(across.weights).T
    found: list[int] = table.reshape(-1).tolist()
    return found


def _patterns(weights: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.ascontiguousarray(weights, np.float64).view(np.int64)


def table_words(height: int, width: int, taps: int) -> int:
    """Return the words of the tables of a resampled image."""
    return 2 * taps * (height + -(-width // LANES) * LANES)


def encode_unfold(
    images: int, channels: int, geometry: Geometry, data: Operand, rows: Operand, size: int, rounded: int
) -> Encoding:
    """Encode windows that become rows, see `ProgramBuilder.unfold`."""
    columns, windows = channels * geometry.taps, geometry.result[0] * geometry.result[1]
    if 0 in (images, columns, windows):
        return NOTHING
    if rounded and columns * 4 > layout.BUFFER_AREA_BYTES:
        raise ValueError(f"rows of {columns} elements that are rounded")
    image, *steps = broadcast(data, 4)
    words = operand_words((image, 0, 0)) + operand_words(broadcast(rows, 3)) + _ABSENT
    words += [Unfolding.ROWS, size, rounded, channels, geometry.result[0]]
    words += geometry_words(geometry, (steps[0], steps[1], steps[2]))
    space = cut_elements((images,), windows, columns, whole_rows=True)
    nanoseconds = images * windows * columns * COPY_NS
    return _unfolding(space, words, nanoseconds)


def encode_fold(images: int, channels: int, geometry: Geometry, rows: Operand, data: Operand) -> Encoding:
    """Encode the sum of rows at the places of their elements, see `ProgramBuilder.fold`."""
    height, width = geometry.image
    if 0 in (images, channels, height, width):
        return NOTHING
    image, row, column = broadcast(rows, 3)
    if width > 1 and broadcast(data, 4)[-1] != 4:
        raise ValueError("the gradient of windows needs contiguous lines")
    words = operand_words((image, geometry.taps * column, row, column))
    words += operand_words(broadcast(data, 4)) + _ABSENT
    words += [Unfolding.ROWS_BACK, 4, 0, channels, geometry.result[0], *geometry_words(geometry, (0, 0, 0))]
    space = cut_elements((images, channels), height, width, weight=_adds(geometry))
    nanoseconds = images * channels * height * width * _adds(geometry) * ADD_NS
    return _unfolding(space, words, nanoseconds)


def encode_pool_back(
    planes: tuple[int, ...],
    geometry: Geometry,
    gradients: Operand,
    images: Operand,
    result: Operand,
    *,
    average: bool,
) -> Encoding:
    """Encode the gradient of a pool, see `ProgramBuilder.pool_back`."""
    height, width = geometry.image
    if 0 in (*planes, height, width):
        return NOTHING
    axes = len(planes) + 2
    strides: list[Strides] = [broadcast(each, axes) for each in (gradients, result, images)]
    if width > 1 and strides[1][-1] != 4:
        raise ValueError("the gradient of a pool needs contiguous lines")
    sizes, before = split_axes(*coalesce(planes, [each[:-2] for each in strides]), inner=0)
    words: list[int] = []
    for first, each in zip(before, strides, strict=True):
        words += operand_words((*first, *each[-2:]))
    kind = Unfolding.MEAN_BACK if average else Unfolding.LARGEST_BACK
    line, pixel = strides[2][-2:]
    words += [kind, 4, 0, 1, geometry.result[0], *geometry_words(geometry, (0, line, pixel))]
    # A window is searched by all blocks that it reaches into.
    least = 1 if average else geometry.window[0]
    space = cut_elements(sizes, height, width, whole_rows=True, weight=_adds(geometry), least_rows=least)
    windows = prod(planes) * geometry.result[0] * geometry.result[1]
    nanoseconds = windows * geometry.taps * ADD_NS
    return _unfolding(space, words, nanoseconds, pooled=True)


def _adds(geometry: Geometry) -> int:
    """Return the elements of windows for each element of an image."""
    return -(-prod(geometry.result) * geometry.taps // prod(geometry.image))


def _unfolding(space: Space, words: Sequence[int], nanoseconds: float, *, pooled: bool = False) -> Encoding:
    places = (layout.UNFOLDED, layout.UNFOLDED_TO, *((layout.UNFOLDED_OF,) if pooled else ()))
    code = step_words(Kind.UNFOLD, space, list(words), nanoseconds, False)
    return encoding_of([code], places, space, nanoseconds)
