"""Encodes convolutions and pools as words without the places of their operands; see `encoding`.

Pure. Shapes are in elements, strides in bytes. Errors are ValueErrors.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from heliograph_backends.cpu.kernels.program import words as layout
from heliograph_backends.cpu.kernels.program.body import (
    check_body,
    encode_body,
    float_bits,
    immediate_word,
)
from heliograph_backends.cpu.kernels.program.encoding import (
    NOTHING,
    Encoding,
    body_places,
    broadcast,
    encoding_of,
    operand_words,
    packing_bytes,
    step_words,
)
from heliograph_backends.cpu.kernels.program.program import (
    Elementwise,
    Geometry,
    Input,
    Operand,
    Register,
    Source,
)
from heliograph_backends.cpu.kernels.program.tiles import (
    FLOPS_PER_NS,
    MEMORY_BYTES_PER_NS,
    STAGED_ELEMENTS,
    UNPACKED_DEPTH_BLOCK,
    Strides,
    cut_convolution,
    cut_planes,
    matmul_ns,
)
from heliograph_backends.cpu.kernels.program.words import (
    CHAINED,
    OPERAND_WORDS,
    PANEL_COLUMNS,
    ChainForm,
    Kind,
    Operation,
    Windowing,
)

#: The most elements of a window.
MOST_TAPS = UNPACKED_DEPTH_BLOCK
#: Shorter lines of a result are computed as one.
SHORT_LINE = 32
#: The most places of an image, with its padding, of which sixteen channels are lanes.
MOST_PLACES = 2048
#: A worker's time to stage an element by itself, and to pack those of a row that are lanes.
SCATTERED_NS, RUN_NS = 2.0, 1.0
#: Elements that are read behind the last staged one.
_BEHIND = 64
_LINE_BYTES = 64
#: The elements of a vector.
_LANES = PANEL_COLUMNS // 2
#: The entries that each kind of epilogue needs.
EPILOGUE_NEEDS = {0: 0, 1: 0, 2: layout.FOR_CHAINS}


def encode_convolution(
    sizes: tuple[int, ...],
    channels: tuple[int, int],
    geometry: Geometry,
    operands: tuple[Operand, Operand, Operand],
    epilogue: Elementwise | None,
) -> Encoding:
    """Encode a convolution of kernel and data, see `ProgramBuilder.convolution`."""
    kernel, data, result = operands
    inner, rows = channels
    columns, depth = geometry.result[0] * geometry.result[1], inner * geometry.taps
    extra = epilogue or Elementwise((), ())
    strides = [flat_strides(each, sizes, geometry.result) for each in (result, *extra.operands)]
    check_body(extra, (*sizes, rows, columns), strides[1:])
    check_result(strides[0], columns)
    if 0 in sizes or rows == 0 or columns == 0 or depth == 0:
        return NOTHING
    if geometry.taps > MOST_TAPS:
        raise ValueError(f"a window of {geometry.taps} elements: at most {MOST_TAPS}")
    *outer, plane, line, pixel = broadcast(data, len(sizes) + 3)
    plain = is_plain(geometry, line, pixel) and not geometry.narrow[0]
    # The elements of a plain image are contiguous; a dimension of one element has no stride.
    right = (*outer, plane, 4) if plain else (*outer, 0, 0)
    space = cut_convolution(sizes, rows, columns, depth)
    words = operand_words(broadcast(kernel, len(sizes) + 2)) + operand_words(right)
    words += operand_words(strides[0])
    depth_block = UNPACKED_DEPTH_BLOCK // geometry.taps * geometry.taps
    form = 1 if plain else layout.PATCHES
    has, body, more = encode_epilogue(epilogue, strides[1:])
    left = geometry.narrow[1]
    words += [depth, depth_block, left, form, 1, has]
    packed_bytes = rounded(packing_bytes(space, min(depth, depth_block), left > 0, True))
    words += [layout.EPILOGUE + len(body), *body]
    words += geometry_words(geometry, (plane, line, pixel), packed_bytes)
    nanoseconds = matmul_ns(prod(sizes), rows, columns, depth)
    if not plain:
        packed = prod(sizes) * space.row_blocks * depth * -(-columns // PANEL_COLUMNS) * 2
        nanoseconds = max(nanoseconds, packed * _packing_ns(geometry, pixel))
    places = (layout.LEFT, layout.RIGHT, layout.PRODUCT, *(layout.EPILOGUE + place for place in more))
    code = step_words(Kind.MATMUL, space, words, nanoseconds, False)
    room = packed_bytes + wide_bytes(geometry, inner, space.column_block)
    needs = 0 if plain else layout.FOR_PATCHES
    return encoding_of([code], places, space, nanoseconds, room, more=needs | EPILOGUE_NEEDS[has])


def encode_windows(
    kind: Windowing,
    sizes: tuple[int, ...],
    channels: int,
    geometry: Geometry,
    operands: tuple[Operand, Operand | None, Operand],
    epilogue: Elementwise | None,
) -> Encoding:
    """Encode windows over each channel, see `ProgramBuilder.windows`."""
    data, weights, result = operands
    extra = epilogue or Elementwise((), ())
    strides = [flat_strides(each, sizes, geometry.result) for each in (result, *extra.operands)]
    (height, width), taps = geometry.result, geometry.taps
    check_body(extra, (*sizes, channels, height * width), strides[1:])
    check_result(strides[0], height * width)
    if 0 in sizes or channels == 0 or height * width == 0:
        return NOTHING
    if taps > MOST_TAPS:
        raise ValueError(f"a window of {taps} elements: at most {MOST_TAPS}")
    *outer, plane, line, pixel = broadcast(data, len(sizes) + 3)
    pitch, lines = geometry.pitch, staged_lines(geometry)
    long = lines * pitch if width < SHORT_LINE else 0
    line_at = rounded(8 * taps)
    planes_at = line_at + rounded(4 * (long + _BEHIND))
    staged = geometry.staged_elements(lines)
    end = planes_at + rounded(4 * (staged + _BEHIND))
    words = operand_words((*outer, plane, 0))
    words += (
        operand_words(broadcast(weights, len(sizes) + 2)) if weights else [-1, *[0] * (OPERAND_WORDS - 1)]
    )
    words += operand_words(strides[0])
    has, body, more = encode_epilogue(epilogue, strides[1:])
    by_channel = kind is Windowing.PRODUCT and _is_by_channel(geometry, channels, (line, pixel))
    words += [kind, pitch, line_at if long else 0, planes_at, has, end if by_channel else 0]
    words += geometry_words(geometry, (plane, line, pixel), end)
    words += body
    end += _channel_bytes(geometry) if by_channel else geometry.wide_bytes(lines, 1)
    space = cut_planes(sizes, channels, geometry.result, lines, staged, _LANES if by_channel else 1)
    each_ns = 8 / MEMORY_BYTES_PER_NS if _is_by_lanes(geometry, pixel) else SCATTERED_NS
    staging_ns = -(-height // lines) * staged * each_ns
    computed = height * (pitch if long else width)
    plane_ns = max(computed * max(4.0 * taps / FLOPS_PER_NS, 8 / MEMORY_BYTES_PER_NS), staging_ns)
    nanoseconds = prod(sizes) * channels * plane_ns
    places = [layout.WINDOWS_OF, *([layout.WINDOWS_WEIGHTS] if weights else []), layout.WINDOWED]
    places += [layout.WINDOWS_EPILOGUE + place for place in more]
    code = step_words(Kind.WINDOWS, space, words, nanoseconds, False)
    return encoding_of([code], tuple(places), space, nanoseconds, end, more=EPILOGUE_NEEDS[has])


def encode_epilogue(
    epilogue: Elementwise | None, strides: Sequence[Strides]
) -> tuple[int, list[int], tuple[int, ...]]:
    """Return the kind of an epilogue, its words, and the positions of its operands in them."""
    if epilogue is None:
        return 0, [], ()
    operands = [operand_words(each) for each in strides]
    chain = _encode_chain(epilogue, operands)
    if chain is not None:
        return 2, *chain
    return 1, encode_body(epilogue, operands, frozenset()), body_places(0, len(operands))


def _encode_chain(
    body: Elementwise, operands: Sequence[list[int]]
) -> tuple[list[int], tuple[int, ...]] | None:
    """Return the words of a chain and the positions of its operands; None for a body that is none."""
    form = _form_words(body, operands)
    words = [len(body.instructions), *form, *operands[0]]
    places = {0: layout.CHAIN_PRODUCT}
    value: Source = Input(0)
    if any(body.narrow):
        return None
    for instruction in body.instructions:
        others = [source for source in instruction.sources if source != value]
        known = form[0] != ChainForm.OTHER or instruction.operation in CHAINED
        if not known or len(others) != len(instruction.sources) - 1:
            return None
        operand, constant = [-1, *[0] * (OPERAND_WORDS - 1)], 0
        for other in others:
            if isinstance(other, Register) or (isinstance(other, Input) and other.number in places):
                return None
            if isinstance(other, Input):
                operand = operands[other.number]
                places[other.number] = len(words) + layout.LINK_OPERAND
                if operand[layout.COLUMN_STRIDE] not in (0, 4):
                    return None
            else:
                constant = float_bits(other)
        swapped = int(instruction.sources[0] != value)
        words += [instruction.operation, swapped, immediate_word(instruction.immediates), constant, *operand]
        value = instruction.result
    if value != Input(0) or len(places) != len(operands):
        return None
    return words, tuple(places[number] for number in range(len(operands)))


def _form_words(body: Elementwise, operands: Sequence[list[int]]) -> list[int]:
    """Return the form of a chain, and its bounds."""
    value: Source = Input(0)
    rest, steps = list(body.instructions), []
    while rest and rest[0].operation is Operation.ADD and rest[0].sources[0] == value:
        other, value = rest[0].sources[1], rest[0].result
        if not isinstance(other, Input):
            break
        steps.append(operands[other.number][layout.COLUMN_STRIDE])
        rest.pop(0)
    if steps not in ([0], [0, 4]):
        return [ChainForm.OTHER, 0, 0]
    form, least, most = int(ChainForm.BIASED if len(steps) == 1 else ChainForm.ADDED), 0.0, 0.0
    bounds = [(each.operation, each.sources[1:], each.immediates) for each in rest]
    match bounds:
        case []:
            pass
        case [(Operation.RELU, _, _)]:
            form |= ChainForm.RECTIFIED
        case [(Operation.HARDSWISH, _, _)]:
            form |= ChainForm.HARDSWISH
        case [(Operation.SILU, _, _)]:
            form |= ChainForm.SILU
        case [(Operation.CLAMP, _, (least, most))]:
            form |= ChainForm.BOUNDED
        case [(Operation.MAXIMUM, (float(least),), _), (Operation.MINIMUM, (float(most),), _)]:
            form |= ChainForm.BOUNDED
        case _:
            return [ChainForm.OTHER, 0, 0]
    return [form, float_bits(least), float_bits(most)]


def flat_strides(operand: Operand, sizes: tuple[int, ...], result: tuple[int, int]) -> Strides:
    """Return the strides of an operand of planes as rows. Raises ValueError if these are not rows."""
    *outer, down, across = broadcast(operand, len(sizes) + 3)
    step = flat_step(result, (down, across))
    if step is None:
        raise ValueError(f"{operand} has planes of {result} that are not rows")
    return (*outer, step)


def flat_step(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """Return the stride of a plane as one row; None if it has none."""
    (height, width), (down, across) = sizes, strides
    if height == 1 or down == width * across:
        return across if width > 1 else down if height > 1 else 0
    return down if width == 1 else None


def is_plain(geometry: Geometry, line: int, pixel: int) -> bool:
    """True if windows are single elements, each one once and in order, and lines have no gaps."""
    single = geometry[1:5] == ((1, 1), (1, 1), geometry.spread, (0, 0))
    return single and geometry.image == geometry.result and flat_step(geometry.image, (line, pixel)) == 4


def _is_by_lanes(geometry: Geometry, pixel: int) -> bool:
    """True if elements that windows read side by side are lanes of vectors."""
    return pixel == 4 and geometry.step[1] <= 2


def _packing_ns(geometry: Geometry, pixel: int) -> float:
    """Return the time to pack the elements at one place of sixteen windows."""
    if not _is_by_lanes(geometry, pixel):
        return _LANES * SCATTERED_NS
    return RUN_NS * (_LANES // geometry.result[1] + 1)


def check_result(strides: Strides, columns: int) -> None:
    if columns > 1 and strides[-1] != 4:
        raise ValueError("the result of windows needs contiguous planes")


def _is_by_channel(geometry: Geometry, channels: int, strides: tuple[int, int]) -> bool:
    """True for sums over small images without gaps, of at least a vector of channels."""
    if any(geometry.narrow) or channels < _LANES or geometry.step[1] > 2:
        return False
    whole = geometry.image == (1, 1) or flat_step(geometry.image, strides) == 4
    sizes = geometry.padded_places, prod(geometry.image), prod(geometry.result)
    return whole and staged_lines(geometry) == geometry.result[0] and max(sizes) <= MOST_PLACES


def _channel_bytes(geometry: Geometry) -> int:
    """Return the bytes of padded images, weights and images with channels as lanes."""
    places = geometry.padded_places + geometry.taps + max(prod(geometry.image), prod(geometry.result))
    return 4 * _LANES * (places + 2 * _LANES)


def staged_lines(geometry: Geometry) -> int:
    """Return the rows of windows of a channel that are computed at once."""
    behind = geometry.reach(0) // geometry.step[0]
    most = STAGED_ELEMENTS // (geometry.phases * geometry.pitch) - behind
    return min(geometry.result[0], max(1, most))


def wide_bytes(geometry: Geometry, channels: int, columns: int) -> int:
    """Return the bytes of the float32 that a block of so many windows reads at once of an image of
    f16 or bf16."""
    lines = min(geometry.result[0], (columns - 2) // geometry.result[1] + 2)
    return geometry.wide_bytes(lines, min(channels, UNPACKED_DEPTH_BLOCK // geometry.taps))


def geometry_words(geometry: Geometry, strides: tuple[int, int, int], wide_at: int = 0) -> list[int]:
    """Return the words of windows over images with these strides of planes, lines and elements.
    `wide_at`: the place of lines of f16 or bf16 as float32 in the packing area."""
    image, window, step, spread, padding, result, narrow = geometry
    return [*strides, *image, result[1], *window, *step, *spread, *padding, *narrow, wide_at]


def rounded(size: int) -> int:
    return -(-size // _LINE_BYTES) * _LINE_BYTES
