"""Windows without products as launches: pools, windows as rows, and their gradients. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from heliograph_backends.cuda.driver.parameters import COLUMNS, POOL, TYPES
from heliograph_backends.cuda.lowering.chains import FLOATS
from heliograph_backends.cuda.lowering.launch import (
    Filling,
    Launch,
    Located,
    Strides,
    blocks_for,
    collapsed,
    divisor,
    fits,
)
from heliograph_backends.cuda.lowering.target import Asked
from heliograph_proto.ops.windows import steps, window_sizes

#: Kernels count results, and places along a dimension, in 32 bits.
MOST_COUNT = 2**31 - 1
#: Windows of at least this many elements have a warp each.
LEAST_WARP = 256
#: The most elements of windows that the gradient of a maximum reads for one element of x.
MOST_COMPARED = 4096


def pool(asked: Asked) -> tuple[Launch, ...] | None:
    """Return the launch of a pool; None if no kernel computes it."""
    node, (x,), result = asked.node, asked.values, asked.result
    count = int(node.op[5])
    filling = _pooled(asked, x, result, count)
    if filling is None:
        return None
    area = math.prod(min(pair) for pair in zip(node.attributes["kernel"], x.type.shape[-count:], strict=True))
    lanes = 32 if area >= LEAST_WARP else 1
    filling.set(leaves_padding_out=count == 1, lanes=lanes)
    return (filling.launch("pool", (blocks_for(result.type.size, 256 // lanes), 1, 1), 256),)


def pool_back(asked: Asked) -> tuple[Launch, ...] | None:
    """Return the launch of the gradient of a pool of two dimensions; None if no kernel computes
    it."""
    node, (gradient, x), result = asked.node, asked.values, asked.result
    kernel, stride = node.attributes["kernel"], steps(dict(node.attributes), "stride", 2, 1)
    windows = math.prod(-(-width // step) for width, step in zip(kernel, stride, strict=True))
    if not node.attributes["average"] and windows * math.prod(kernel) > MOST_COMPARED:
        return None
    filling = _pooled(asked, x, result, 2, gradient)
    if filling is None:
        return None
    filling.parameters["windows"][0][:] = gradient.type.shape[-2:]
    return (filling.launch("pool_back", (blocks_for(result.type.size, 256), 1, 1), 256),)


def _pooled(
    asked: Asked, x: Located, result: Located, count: int, gradient: Located | None = None
) -> Filling | None:
    attributes = dict(asked.node.attributes)
    kernel = attributes["kernel"]
    stride, padding = steps(attributes, "stride", count, 1), steps(attributes, "padding", count, 0)
    given = (x, result, *((gradient,) if gradient else ()))
    lead = x.type.shape[: x.type.ndim - count]
    sizes, strides = collapsed(lead, [one.strides[: len(lead)] for one in given])
    far = (*(a + 2 * b + c for a, b, c in zip(x.type.shape[-count:], padding, kernel, strict=True)), *stride)
    if not _are_floats(given) or not fits(lead) or max(*far, result.type.size) > MOST_COUNT:
        return None
    filling = Filling(POOL)
    _planes(filling, sizes, strides)
    for name, one in zip(("x", "result", "gradient"), given, strict=False):
        filling.address(name, one)
        filling.parameters[f"{name}_strides"][0][2 - count :] = one.strides[-count:]
    filling.divisors(_two(result.type.shape[-count:], 1), "results_along")
    named = {"sizes": x.type.shape[-count:], "kernel": kernel, "step": stride}
    for name, numbers in named.items():
        filling.parameters[name][0][:] = _two(numbers, 1)
    filling.parameters["padding"][0][:] = _two(padding, 0)
    filling.set(
        x_type=TYPES[x.type.dtype.name], is_mean=attributes["average"], results=result.type.size,
        gradient_type=TYPES[(gradient or x).type.dtype.name], area=math.prod(kernel),
    )  # fmt: skip
    return filling


def _two(numbers: Sequence[int], default: int) -> tuple[int, ...]:
    return (default,) * (2 - len(numbers)) + tuple(numbers)


def _are_floats(values: Sequence[Located]) -> bool:
    return all(one.type.dtype.name in FLOATS for one in values)


def _planes(filling: Filling, sizes: Strides, strides: Sequence[Strides]) -> None:
    planes = filling.parameters["planes"][0]
    planes["dimensions"] = len(sizes)
    for place, size in enumerate(sizes):
        planes["divisors"][place] = divisor(size)
    for operand, own in enumerate(strides):
        planes["strides"][operand][: len(sizes)] = own


def columns(asked: Asked) -> tuple[Launch, ...] | None:
    """Return the launch of windows as rows; None if no kernel computes it."""
    kernel, data = asked.values
    attributes = dict(asked.node.attributes)
    taps, channels = kernel.type.shape[2:], data.type.shape[1]
    sizes, strides = data.type.shape[2:], data.strides
    if asked.node.op == "im2col_3d":
        channels, taps, sizes = attributes["channels"], kernel.type.shape[1:], data.type.shape[1:]
        strides = (channels * strides[0], strides[0], *strides[1:])
    filling = _columned(asked, attributes, taps, sizes, data, (*strides[:2], *_three(strides[2:], 0)))
    if filling is None:
        return None
    filling.divisors([channels], "channels")
    return (filling.launch("columns", (blocks_for(asked.result.type.size, 256), 1, 1), 256),)


def columns_back(asked: Asked) -> tuple[Launch, ...] | None:
    """Return the launch of the sums of rows where their windows overlap; None if no kernel computes
    it."""
    attributes, rows = dict(asked.node.attributes), asked.values[0]
    if asked.node.op == "col2im_1d":
        channels, strides = attributes["channels"], (0, *_three(rows.strides[:1], 0), rows.strides[1])
        taps, sizes = [rows.type.shape[1] // channels], asked.result.type.shape[1:]
        attributes = {name: (attributes[name],) for name in ("stride", "padding")}
    else:
        taps, sizes = list(asked.values[1].type.shape[2:]), tuple(attributes["shape"])[2:]
        channels = attributes["shape"][1]
        image, *along, element = rows.strides
        strides = (image, *_three(along, 0), element)
    filling = _columned(asked, attributes, taps, sizes, rows, strides)
    if filling is None:
        return None
    filling.divisors([channels], "channels")
    return (filling.launch("columns_back", (blocks_for(asked.result.type.size, 256), 1, 1), 256),)


def _columned(
    asked: Asked,
    attributes: dict[str, object],
    taps: Sequence[int],
    sizes: Sequence[int],
    source: Located,
    strides: Strides,
) -> Filling | None:
    result, count = asked.result, len(taps)
    windows = window_sizes(attributes, sizes, taps)
    defaults = {"stride": 1, "dilation": 1, "padding": 0}
    named = {name: steps(attributes, name, count, by) for name, by in defaults.items()}
    reach = zip(sizes, named["padding"], taps, named["dilation"], strict=True)
    far = [size + 2 * pad + tap * by for size, pad, tap, by in reach]
    plain = result.strides == result.type.strides and _are_floats((source, result))
    if not plain or max(*far, *named["stride"], result.type.size, source.type.size) > MOST_COUNT:
        return None
    filling = Filling(COLUMNS)
    filling.address("from", source)
    filling.address("to", result)
    filling.parameters["strides"][0][:] = strides
    for name, numbers in (("taps", taps), ("windows", windows), ("places", sizes)):
        filling.divisors(_three(numbers, 1), name)
    for name, given, default in (("step", "stride", 1), ("spread", "dilation", 1), ("padding", "padding", 0)):
        filling.parameters[name][0][:] = _three(named[given], default)
    filling.set(
        from_type=TYPES[source.type.dtype.name], to_type=TYPES[result.type.dtype.name],
        count=result.type.size,
    )  # fmt: skip
    return filling


def _three(numbers: Sequence[int], default: int) -> tuple[int, ...]:
    return (default,) * (3 - len(numbers)) + tuple(numbers)
