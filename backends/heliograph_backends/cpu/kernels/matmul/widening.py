"""Lines of images of f16 or bf16 as float32, for the kernels of windows."""

from __future__ import annotations

from heliograph_backends.cpu.kernels.elementwise.interpreter import KINDS
from heliograph_backends.cpu.kernels.program.words import (
    BUFFERS_AT,
    GEOMETRY_WORDS,
    IMAGE_HEIGHT,
    IMAGE_WIDTH,
    LINE_STRIDE,
    NARROW_IMAGE,
    PACK_AT,
    PIXEL_STRIDE,
    PLANE_STRIDE,
    WIDE_LINES_AT,
    WIDENING,
)
from heliograph_backends.cpu.kernels.vector.atomics import set_word, word
from heliograph_backends.cpu.kernels.vector.lanes import jit
from heliograph_backends.cpu.kernels.vector.space import convert_rows


@jit
def widen_lines(geometry: int, source: int, top: int, behind: int, channels: int, scratch: int) -> int:
    """Convert the lines from `top` to `behind` that an image has, for some channels, and return the
    address of element (0, 0) in lines of float32. Their geometry is at BUFFERS_AT."""
    first = max(0, top)
    lines, width = max(0, min(behind, word(geometry, IMAGE_HEIGHT)) - first), word(geometry, IMAGE_WIDTH)
    staged, own = scratch + PACK_AT + word(geometry, WIDE_LINES_AT), scratch + BUFFERS_AT
    for place in range(GEOMETRY_WORDS):
        set_word(own, place, word(geometry, place))
    # Lines behind them, which no result needs, count as outside: they may be staged.
    set_word(own, IMAGE_HEIGHT, first + lines)
    set_word(own, PLANE_STRIDE, 4 * width * lines)
    set_word(own, LINE_STRIDE, 4 * width)
    set_word(own, PIXEL_STRIDE, 4)
    kind = word(geometry, NARROW_IMAGE) >> WIDENING & KINDS
    line, pixel = word(geometry, LINE_STRIDE), word(geometry, PIXEL_STRIDE)
    for channel in range(channels if lines > 0 else 0):
        here = source + channel * word(geometry, PLANE_STRIDE) + first * line
        there = staged + channel * 4 * width * lines
        convert_rows(scratch, kind, there, here, line, pixel, lines, width)
    begin: int = staged - 4 * width * first
    return begin
