"""`hg.conv`, `hg.max_pool` and `hg.avg_pool`: windows over images [n, c, ...], as the field has
them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import TypeAlias

import numpy as np

import heliograph as hg
from heliograph.graph.lowering import Operand, promoted
from heliograph.graph.source_lines import invalid
from heliograph.lowerings.arrays import channels
from heliograph.lowerings.windows import Window, convolve, sum_pool
from heliograph.lowerings.windows import max_pool as largest_of_windows

__all__ = ["avg_pool", "conv", "max_pool"]

#: A number for all dimensions, or one for each.
Sizes: TypeAlias = int | Sequence[int]


def conv(
    input: Operand,
    weight: Operand,
    bias: Operand | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> hg.Value:
    """The convolution, [n, oc, ...], of input [n, c, ...] with weight [oc, c / groups, ...].

    Any number of dimensions follows the channels: one for signals, two for images, three for
    volumes. As in networks, the weight is not mirrored.

    Args:
        input: Data, channels before the other dimensions.
        weight: A kernel for each output channel.
        bias: A number for each output channel.
        stride: The step of the window; one number, or one for each dimension.
        padding: Zeros on both sides of each dimension, likewise; "valid" is none, and "same" keeps
            the sizes, with stride 1.
        dilation: The distance of the elements in a window, likewise.
        groups: The groups of channels that do not mix; as many as channels are depthwise.
    """
    x, w = promoted(input, weight)
    if x.ndim < 3 or w.ndim != x.ndim:
        raise invalid(f"conv of {x.type} with {w.type}", "input [n, c, ...] and weight [oc, c / groups, ...]")
    if not x.dtype.is_float:
        raise invalid(f"conv of {x.type}", "floats are needed: hg.astype(x, 'f32')")
    count = index(groups)
    if count < 1 or x.shape[1] != w.shape[1] * count or w.shape[0] % count:
        raise invalid(
            f"conv: weight {w.type} of {count} groups does not fit {x.shape[1]} channels",
            "weight is [oc, c / groups, ...], and groups divides both numbers of channels",
        )
    window = _window("conv", x, w.shape[2:], stride, padding, dilation)
    found = convolve(x, w, window, count)
    if bias is None:
        return found
    _, b = promoted(x, bias)
    if b.shape != (w.shape[0],):
        raise invalid(f"conv: bias {b.type} for {w.shape[0]} output channels")
    return found + channels(b, found.ndim)


def max_pool(
    input: Operand,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
) -> hg.Value:
    """The largest element of each window of input [n, c, ...]; padding does not count.

    The stride is that of `conv`, by default the kernel's size, so that windows do not overlap. The
    other arguments are those of `conv`.
    """
    x = _images("max_pool", input)
    kernel = _numbers("max_pool", "kernel_size", kernel_size, x.ndim - 2, 1)
    step = kernel if stride is None else stride
    return largest_of_windows(x, _window("max_pool", x, kernel, step, padding, dilation))


def avg_pool(
    input: Operand,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes | str = 0,
    count_include_pad: bool = True,
) -> hg.Value:
    """The mean of each window of input [n, c, ...].

    Padding counts as zeros, unless `count_include_pad` is False. The other arguments are those of
    `max_pool`.
    """
    x = _images("avg_pool", input)
    if not x.dtype.is_float:
        raise invalid(f"avg_pool of {x.type}", "floats are needed: hg.astype(x, 'f32')")
    kernel = _numbers("avg_pool", "kernel_size", kernel_size, x.ndim - 2, 1)
    window = _window("avg_pool", x, kernel, kernel if stride is None else stride, padding, 1)
    total = sum_pool(x, window)
    count = _covered(window, x.shape[2:]) if not count_include_pad else np.array(np.prod(kernel), np.float64)
    return total / hg.asarray(count, dtype=x.dtype, graph=x.graph)


def _covered(window: Window, sizes: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """The elements of each window that are no padding."""
    found = np.ones((), np.float64)
    for axis, (size, places) in enumerate(zip(sizes, window.outputs(sizes), strict=True)):
        first = np.arange(places) * window.stride[axis] - window.low[axis]
        inside = np.minimum(first + window.kernel[axis], size) - np.maximum(first, 0)
        found = found[..., None] * inside
    return found


def _images(name: str, input: Operand) -> hg.Value:
    (x,) = promoted(input)
    if x.ndim < 3:
        raise invalid(f"{name} of {x.type}", "the input is [n, c, ...]")
    return x


def _window(
    name: str, x: hg.Value, kernel: Sequence[int], stride: Sizes, padding: Sizes | str, dilation: Sizes
) -> Window:
    count = x.ndim - 2
    steps = _numbers(name, "stride", stride, count, 1)
    spread = _numbers(name, "dilation", dilation, count, 1)
    if padding == "same":
        if any(one != 1 for one in steps):
            raise invalid(f"{name}: padding 'same' with stride {steps}", "give numbers: padding=1")
        reach = [step * (size - 1) for step, size in zip(spread, kernel, strict=True)]
        low = tuple(one // 2 for one in reach)
        high = tuple(one - one // 2 for one in reach)
    else:
        given = 0 if padding == "valid" else padding
        low = high = _numbers(name, "padding", given, count, 0)
    window = Window(tuple(kernel), steps, spread, low, high)
    if not all(kernel) or min(window.outputs(x.shape[2:]), default=1) < 1:
        raise invalid(f"{name}: a window of {tuple(kernel)} does not fit in {x.type} with padding {low}")
    return window


def _numbers(name: str, what: str, given: object, count: int, least: int) -> tuple[int, ...]:
    """One number for each dimension. Raises InvalidGraphError."""
    try:
        listed = given if isinstance(given, (tuple, list)) else [given] * count
        found = tuple(map(index, listed))
    except TypeError:
        found = ()
    if len(found) != count or any(one < least for one in found):
        raise invalid(
            f"{name}: {what} is {given!r:.40}",
            f"an int of {least} or more, or one for each of {count} dimensions",
        )
    return found
