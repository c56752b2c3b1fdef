"""Convolutions as launches and products. Pure.

A convolution whose windows are single elements is a product for cuBLAS. Others are tiles of a
product whose matrices are never made; groups of few channels have a thread for each result. A
transposed convolution is a convolution for each place modulo its stride, whose results lie beside
each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from heliograph_backends.cuda.driver.parameters import CONVOLUTION, TYPES
from heliograph_backends.cuda.lowering import products
from heliograph_backends.cuda.lowering.chains import FLOATS
from heliograph_backends.cuda.lowering.images.endings import Ending
from heliograph_backends.cuda.lowering.launch import Filling, Launch, Located, Strides, blocks_for
from heliograph_backends.cuda.lowering.products import MOST_GRID
from heliograph_backends.cuda.lowering.target import Asked, CudaTarget, OwnSlots
from heliograph_proto.graph import Node
from heliograph_proto.ops.windows import steps
from heliograph_proto.types import DTYPES, TensorType

OPS = ("conv_2d", "conv_2d_dw", "conv_3d", "conv_transpose_1d", "conv_transpose_2d")
#: Kernels count results, places and the depth of sums in 32 bits.
MOST_COUNT = 2**31 - 1
#: Groups of fewer channels of the result have a thread for each result.
LEAST_ROWS = 16
#: The sides of tiles, with their threads; elements of the depth in a step are those of 64 bytes.
TILES = {"tiles": (64, 128), "large": (128, 256)}
STEP_BYTES = 64
#: The most parts of a sum over the depth, and the fewest steps that are worth a part.
MOST_SPLITS, LEAST_STEPS = 16, 8
#: The kernel for windows of a channel by itself has this many results below each other in a thread.
BELOW, LEAST_BELOW = 4, 128
#: The most launches of a transposed convolution.
MOST_PHASES = 64
#: Only the address of the workspace matters.
WORKSPACE_TYPE = TensorType(DTYPES["u8"], (1,))


class Convolution(NamedTuple):
    """Operands with strides over [image or channel of the result, channel, three places]."""

    kernel: Located
    data: Located
    result: Located
    images: int
    groups: int
    #: Channels of a group: of the result and of the data.
    rows: int
    channels: int
    outputs: Strides
    taps: Strides
    sizes: Strides
    step: Strides
    padding: Strides
    spread: Strides
    ending: Ending = Ending()

    @property
    def depth(self) -> int:
        """The elements of a window."""
        return self.channels * math.prod(self.taps)

    @property
    def columns(self) -> int:
        return self.images * math.prod(self.outputs)

    @property
    def results(self) -> int:
        return self.columns * self.rows * self.groups

    @property
    def form(self) -> str:
        """The type of a kernel's tiles: that of both operands, or f32."""
        kernel, data = (one.type.dtype.name for one in (self.kernel, self.data))
        return kernel if kernel == data else "f32"


class Tiling(NamedTuple):
    """The distribution of a convolution over blocks."""

    name: str
    splits: int
    steps_of_split: int


def workspace_bytes(node: Node, operands: Sequence[TensorType], target: CudaTarget) -> int:
    """Return the workspace that the parts of sums take."""
    if not is_convolution(node, operands):
        return 0
    values = [Located(one, 0, 0, one.strides) for one in operands]
    result = Located(node.type, 0, 0, node.type.strides)
    tilings = ((one, tiling(one, target)) for one in _parts(node, values, result) if not is_direct(one))
    return max((4 * one.results * how.splits for one, how in tilings if how.splits > 1), default=0)


def is_convolution(node: Node, operands: Sequence[TensorType]) -> bool:
    """True if the kernels compute a node of these operands."""
    if node.op not in OPS or any(one.dtype.name not in FLOATS for one in operands):
        return False
    if node.op.startswith("conv_transpose"):
        places = node.type.shape[1 if node.op == "conv_transpose_1d" else 2 :]
        if math.prod(min(node.attributes["stride"], size) for size in places) > MOST_PHASES:
            return False
    values = [Located(one, 0, 0, one.strides) for one in operands]
    found = _parts(node, values, Located(node.type, 0, 0, node.type.strides))
    return all(map(_is_counted, found))


def _is_counted(one: Convolution) -> bool:
    reach = zip(one.outputs, one.step, one.padding, one.taps, one.spread, one.sizes, strict=True)
    far = [size + out * step + pad + tap * abs(by) for out, step, pad, tap, by, size in reach]
    counts = (one.results, one.depth + 64, *far)
    return max(counts) <= MOST_COUNT and (one.groups <= MOST_GRID or is_direct(one))


def takes_ending(node: Node, operands: Sequence[TensorType]) -> bool:
    """True if a convolution can be the first node of a step with elementwise ones behind it."""
    plain = not node.op.startswith("conv_transpose") and node.type.size > 0
    return plain and is_convolution(node, operands)


def ended(asked: Asked, ending: Ending) -> tuple[Launch, ...] | None:
    """Return the launches of a convolution with an ending; None if it is a product for cuBLAS."""
    (one,) = _parts(asked.node, asked.values, asked.result)
    if _as_product(one):
        return None
    if ending.addend:
        whole = Located(asked.result.type, *ending.addend[1:])
        is_volume = asked.node.op == "conv_3d"
        ending = ending._replace(addend=_split(whole, one.rows) if is_volume else _with(whole, 2))
    return _launches(one._replace(ending=ending), asked.own, asked.target)


def convolution(asked: Asked) -> tuple[Launch | products.Call, ...] | None:
    """Return the work of a convolution; None if no kernel computes it."""
    if not is_convolution(asked.node, [one.type for one in asked.values]):
        return None
    found: list[Launch | products.Call] = []
    for one in _parts(asked.node, asked.values, asked.result):
        found += (_as_product(one) or _launches(one, asked.own, asked.target)) if one.results else ()
    return tuple(found)


# The parts of each op


def _parts(node: Node, values: Sequence[Located], result: Located) -> Iterator[Convolution]:
    """Yield one convolution, or those that a transposed one consists of."""
    kernel, data = values
    if node.op == "conv_transpose_1d":
        kernel, data, result = _with(kernel, 2), _with(_with(data, 1), 0), _with(_with(result, 1), 0)
    if node.op.startswith("conv_transpose"):
        yield from _transposed(node.attributes["stride"], kernel, data, result)
    elif node.op == "conv_3d":
        yield _volume(node, kernel, data, result)
    else:
        yield _plane(node, kernel, data, result)


def _with(value: Located, axis: int) -> Located:
    """Return a value with another dimension of size 1."""
    shape, strides = value.type.shape, value.strides
    type = TensorType(value.type.dtype, (*shape[:axis], 1, *shape[axis:]))
    return value._replace(type=type, strides=(*strides[:axis], 0, *strides[axis:]))


def _plane(node: Node, kernel: Located, data: Located, result: Located) -> Convolution:
    groups = data.type.shape[1] if node.op == "conv_2d_dw" else node.attributes["groups"]
    step, padding, spread = _steps(node, 2)
    return Convolution(
        _with(kernel, 2), _with(data, 2), _with(result, 2), data.type.shape[0], groups,
        kernel.type.shape[0] // groups, kernel.type.shape[1], (1, *result.type.shape[2:]),
        (1, *kernel.type.shape[2:]), (1, *data.type.shape[2:]), (1, *step), (0, *padding), (1, *spread),
    )  # fmt: skip


def _volume(node: Node, kernel: Located, data: Located, result: Located) -> Convolution:
    """Channels and images, or channels of the result, are one dimension each."""
    channels = node.attributes["channels"]
    step, padding, spread = _steps(node, 3)
    rows, images = kernel.type.shape[0] // channels, data.type.shape[0] // channels
    return Convolution(
        _split(kernel, channels), _split(data, channels), _split(result, max(1, rows)), images, 1, rows,
        channels, result.type.shape[1:], kernel.type.shape[1:], data.type.shape[1:], step, padding, spread,
    )  # fmt: skip


def _split(value: Located, count: int) -> Located:
    """Return a value whose first dimension is two, the second of which has `count` elements."""
    (first, *rest), (stride, *others) = value.type.shape, value.strides
    type = TensorType(value.type.dtype, (first // count, count, *rest))
    return value._replace(type=type, strides=(count * stride, stride, *others))


def _steps(node: Node, count: int) -> tuple[tuple[int, ...], ...]:
    named = (("stride", 1), ("padding", 0), ("dilation", 1))
    return tuple(steps(dict(node.attributes), name, count, default) for name, default in named)


def _transposed(stride: int, kernel: Located, data: Located, result: Located) -> Iterator[Convolution]:
    """Result q stride + r of a dimension adds the taps r + j stride of data q - j."""
    kernel = _turned(kernel)
    phases = [range(min(stride, size)) for size in result.type.shape[2:]]
    for places in itertools.product(*phases):
        outputs = [-(-(size - r) // stride) for size, r in zip(result.type.shape[2:], places, strict=True)]
        reach = zip(kernel.type.shape[2:], places, strict=True)
        taps = [max(0, -(-(size - r) // stride)) for size, r in reach]
        channels = data.type.shape[1] if all(taps) else 0
        at = [
            one._replace(
                offset=one.offset + sum(r * by for r, by in zip(places, one.strides[2:], strict=True)),
                strides=(*one.strides[:2], *(stride * by for by in one.strides[2:])),
            )
            for one in (kernel, result)
        ]
        ahead, none, back = (1, 1, 1), (0, 0, 0), (-1, -1, -1)
        yield Convolution(
            _with(at[0], 2), _with(data, 2), _with(at[1], 2), data.type.shape[0], 1, kernel.type.shape[0],
            channels, (1, *outputs), (1, *(max(1, tap) for tap in taps)), (1, *data.type.shape[2:]),
            ahead, none, back,
        )  # fmt: skip


def _turned(kernel: Located) -> Located:
    """Return a kernel [c, oc, ..] as [oc, c, ..]."""
    (c, oc, *taps), (first, second, *rest) = kernel.type.shape, kernel.strides
    return kernel._replace(type=TensorType(kernel.type.dtype, (oc, c, *taps)), strides=(second, first, *rest))


# Kernels


def _as_product(one: Convolution) -> tuple[products.Call, ...] | None:
    """Return the product of a kernel of single taps with the data; None if cuBLAS cannot compute
    it."""
    plain = (*one.taps, *one.step) == (1,) * 6 and not any(one.padding) and one.spread[2] > 0
    names = one.kernel.type.dtype.name, one.data.type.dtype.name
    if not plain or names[0] != names[1] or not one.depth or is_direct(one):
        return None
    places = math.prod(one.sizes)
    lines = [_in_line(value) for value in (one.data, one.result)]
    if not all(lines):
        return None
    rows, channels = one.rows, one.channels
    a, b, c = (value.strides for value in (one.kernel, one.data, one.result))
    shapes = ((one.groups, rows, channels), (one.images, one.groups, channels, places))
    left, right = (
        _shaped(value, shape, strides)
        for value, shape, strides in zip(
            (one.kernel, one.data), shapes,
            ((rows * a[0], a[0], a[1]), (b[0], channels * b[1], b[1], lines[0])), strict=True,
        )
    )  # fmt: skip
    made = (one.images, one.groups, rows, places)
    result = _shaped(one.result, made, (c[0], rows * c[1], c[1], lines[1]))
    return products.calls(Node("matmul", (0, 1), result.type, {}), (left, right), result)


def _shaped(value: Located, shape: Strides, strides: Strides) -> Located:
    return value._replace(type=TensorType(value.type.dtype, shape), strides=strides)


def _in_line(value: Located) -> int:
    """Return the stride that walks all places; 0 if there is none."""
    places = [pair for pair in zip(value.type.shape[2:], value.strides[2:], strict=True) if pair[0] > 1]
    found = places[-1][1] if places else value.type.dtype.block_bytes
    expected = found
    for size, by in reversed(places):
        if by != expected:
            return 0
        expected *= size
    return found


def is_direct(one: Convolution) -> bool:
    """True if each result has a thread."""
    return one.groups > 1 and one.rows < LEAST_ROWS


def tiling(one: Convolution, target: CudaTarget) -> Tiling:
    """Return the tiles of a convolution: large ones if these fill the device; and the parts of its
    sums if the small ones do not."""
    name, count = "large", _tiles(one, "large")
    if one.rows <= TILES["tiles"][0] or count < target.multiprocessors:
        name, count = "tiles", _tiles(one, "tiles")
    all_steps = -(-one.depth * DTYPES[one.form].block_bytes // STEP_BYTES)
    wanted = min(MOST_SPLITS, 2 * target.multiprocessors // max(1, count), all_steps // LEAST_STEPS)
    each = -(-all_steps // max(1, wanted))
    return Tiling(name, max(1, -(-all_steps // max(1, each))), max(1, each))


def _tiles(one: Convolution, name: str) -> int:
    side, _ = TILES[name]
    return -(-one.rows // side) * -(-one.columns // side) * one.groups


def _launches(one: Convolution, own: OwnSlots, target: CudaTarget) -> tuple[Launch, ...]:
    if is_direct(one):
        return (_direct(one),)
    how = tiling(one, target)
    side, threads = TILES[how.name]
    row_tiles = -(-one.rows // side)
    filling = _filled(one)
    filling.divisors([row_tiles], "row_tiles")
    filling.set(splits=how.splits, steps_of_split=how.steps_of_split)
    if how.splits > 1:
        filling.address("partial", Located(WORKSPACE_TYPE, own.workspace, 0, (1,)))
    grid = (row_tiles * -(-one.columns // side), one.groups, how.splits)
    found = [filling.launch(f"convolution_{one.form}_{how.name}", grid, threads)]
    if how.splits > 1:
        found.append(filling.launch("convolution_merge", (blocks_for(one.results, 256), 1, 1), 256))
    return tuple(found)


def _direct(one: Convolution) -> Launch:
    _, taps, across = one.taps
    plane = -(-one.outputs[1] // BELOW) * one.outputs[2]
    plain = one.outputs[0] == one.sizes[0] == one.taps[0] == 1 and not one.padding[0] and one.channels == 1
    square = taps == across in (3, 5) and one.step[1] == one.step[2] in (1, 2)
    if plain and square and one.spread == (1, 1, 1) and plane >= LEAST_BELOW:
        grid = (blocks_for(plane, 256), min(MOST_GRID, one.images * one.rows * one.groups), 1)
        return _filled(one).launch(f"convolution_below_{taps}_{one.step[1]}", grid, 256)
    return _filled(one).launch("convolution_direct", (blocks_for(one.results, 256), 1, 1), 256)


def _filled(one: Convolution) -> Filling:
    filling = Filling(CONVOLUTION)
    for name, value in (("kernel", one.kernel), ("data", one.data), ("result", one.result)):
        filling.address(name, value)
        filling.parameters[f"{name}_strides"][0][:] = value.strides
    _end(filling, one.ending)
    for name in ("outputs", "taps"):
        filling.divisors(getattr(one, name), name)
    filling.divisors([one.rows * one.groups], "channels")
    for name in ("sizes", "step", "padding", "spread"):
        filling.parameters[name][0][:] = getattr(one, name)
    filling.set(
        rows=one.rows, data_channels=one.channels, depth=one.depth, splits=1, packed=_is_packed(one.kernel),
        kernel_type=TYPES[one.kernel.type.dtype.name], data_type=TYPES[one.data.type.dtype.name],
        columns=one.columns, results=one.results, images=one.images,
    )  # fmt: skip
    return filling


def _end(filling: Filling, ending: Ending) -> None:
    """Fill in what a kernel does with results."""
    if ending.bias:
        filling.address("bias", ending.bias)
        filling.set(has_bias=1, bias_stride=ending.bias.strides[1])
    if ending.addend:
        filling.address("addend", ending.addend)
        filling.parameters["addend_strides"][0][:] = ending.addend.strides
        filling.set(has_addend=1)
    filling.set(activation=ending.activation, low=ending.low, high=ending.high)


def _is_packed(kernel: Located) -> bool:
    """True if the part of each channel of the result has no gaps."""
    expected = kernel.type.dtype.block_bytes
    for size, by in zip(kernel.type.shape[:0:-1], kernel.strides[:0:-1], strict=True):
        if size > 1 and by != expected:
            return False
        expected *= size
    return True
