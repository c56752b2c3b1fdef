"""Encodes convolutions with packed kernels as words without the places of their operands; see
`encoding`.

Pure. Shapes are in elements, strides in bytes. Errors are ValueErrors.
"""

from __future__ import annotations

from math import prod

from heliograph_backends.cpu.kernels.program import convolution_words as own
from heliograph_backends.cpu.kernels.program.body import check_body
from heliograph_backends.cpu.kernels.program.encoding import (
    NOTHING,
    Encoding,
    broadcast,
    encoding_of,
    operand_words,
    step_words,
)
from heliograph_backends.cpu.kernels.program.encoding_windows import (
    EPILOGUE_NEEDS,
    MOST_TAPS,
    check_result,
    encode_epilogue,
    flat_strides,
    geometry_words,
    is_plain,
    rounded,
)
from heliograph_backends.cpu.kernels.program.program import Elementwise, Geometry, Operand, PackedOperand
from heliograph_backends.cpu.kernels.program.tiles import (
    MEMORY_BYTES_PER_NS,
    TILE_NS,
    Space,
    Strides,
    matmul_ns,
)
from heliograph_backends.cpu.kernels.program.words import PANEL_COLUMNS, Kind

#: The bytes of a panel of the kernel that all sums of a block read before they go on.
PANEL_BYTES = 160 * 1024
#: The most and least places of a block that is a part of a line, the bytes that a block stages if it
#: has more than those or one line, and the longest line of windows of several elements.
PLACES, LEAST_PLACES, STAGED_BYTES, MOST_WIDTH = 224, 56, 288 * 1024, 512
MOST_STAGED_BYTES = 1024 * 1024
#: The channels of a block: more of them share what is staged for windows of few elements.
SOME_ROWS, MANY_ROWS, FEW_TAPS = 128, 512, 4
_LANES = PANEL_COLUMNS // 2
#: Elements that are read behind the last staged one.
_BEHIND = 64


def encode_direct(
    images: int,
    channels: tuple[int, int],
    geometry: Geometry,
    operands: tuple[PackedOperand, Operand, Operand],
    epilogue: Elementwise | None,
) -> Encoding:
    """Encode a convolution of a packed kernel and data, see `ProgramBuilder.direct`."""
    _, data, result = operands
    sizes, (inner, rows) = (images,), channels
    extra = epilogue or Elementwise((), ())
    strides = [flat_strides(each, sizes, geometry.result) for each in (result, *extra.operands)]
    columns = prod(geometry.result)
    check_body(extra, (*sizes, rows, columns), strides[1:])
    check_result(strides[0], columns)
    if 0 in (images, rows, columns, inner):
        return NOTHING
    image, plane, line, pixel = broadcast(data, 4)
    found = direct_geometry(geometry, inner, (line, pixel))
    if found is None:
        raise ValueError(f"{data} and {geometry} are not convolved directly")
    geometry, pixel = found, 4
    space, lines = _cut(sizes, rows, geometry, inner)
    words = operand_words((0, 0, 0)) + operand_words((image, plane, 4)) + operand_words(strides[0])
    together = max(1, min(inner, PANEL_BYTES // (4 * PANEL_COLUMNS * geometry.taps)))
    planes_at = rounded(8 * geometry.taps)
    count = min(space.column_block, geometry.result[1])
    staged = inner * geometry._replace(result=(lines, count)).staged_elements(lines)
    sums_at = planes_at + rounded(4 * (staged + _BEHIND))
    has, body, more = encode_epilogue(epilogue, strides[1:])
    words += [inner, together, planes_at, sums_at, has]
    words += geometry_words(geometry, (plane, line, pixel)) + body
    places = own.CONVOLVED_WEIGHTS, own.CONVOLVED_OF, own.CONVOLVED
    following = tuple(own.CONVOLVED_EPILOGUE + place for place in more)
    nanoseconds = matmul_ns(images, rows, columns, inner * geometry.taps)
    nanoseconds += space.blocks * 8 * staged / MEMORY_BYTES_PER_NS
    code = step_words(Kind.CONVOLVE, space, words, nanoseconds, False)
    # Behind the sums of a panel is room for as many of a vector that channels fill in part.
    room = sums_at + 4 * (PANEL_COLUMNS + _LANES) * -(-space.column_block // _LANES) * _LANES
    return encoding_of([code], (*places, *following), space, nanoseconds, room, more=EPILOGUE_NEEDS[has])


def direct_geometry(geometry: Geometry, inner: int, strides: Strides) -> Geometry | None:
    """Return the geometry of windows over images as the kernel has it: single elements without gaps
    are one line. None: there is no kernel. `inner`: channels in; `strides`: of lines and elements."""
    line, pixel = strides
    if any(geometry.narrow) or geometry.taps > MOST_TAPS:
        return None
    least = geometry.result[1]
    if is_plain(geometry, line, pixel):
        size = 1, prod(geometry.image)
        geometry, least = geometry._replace(image=size, result=size), min(size[1], LEAST_PLACES)
    elif pixel != 4 or geometry.image[1] == 1 or geometry.step[1] > 2 or least > MOST_WIDTH:
        return None
    staged = 4 * inner * geometry._replace(result=(1, least)).staged_elements(1)
    return geometry if staged <= MOST_STAGED_BYTES else None


def _cut(outer: tuple[int, ...], rows: int, geometry: Geometry, inner: int) -> tuple[Space, int]:
    """Cut into some channels by some lines, or a part of one; return the most lines, too."""
    (height, width), depth = geometry.result, inner * geometry.taps
    lines = max(1, min(height, PLACES // width))
    while lines > 1 and 4 * inner * geometry.staged_elements(lines) > STAGED_BYTES:
        lines -= 1
    lines = -(-height // -(-height // lines))
    fit = min(PLACES, max(LEAST_PLACES, STAGED_BYTES // (4 * inner)))
    places = lines * width if height > 1 else -(-width // -(-width // fit))
    most = MANY_ROWS if geometry.taps < FEW_TAPS or geometry.phases > 1 else SOME_ROWS
    blocks = -(-rows // most)
    row_block = -(-rows // (blocks * PANEL_COLUMNS)) * PANEL_COLUMNS
    block_ns = max(1.0, matmul_ns(1, min(rows, row_block), places, depth))
    return Space(outer, rows, height * width, row_block, places, max(1, round(TILE_NS / block_ns))), lines
