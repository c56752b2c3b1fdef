"""Blocks of columns, added up to an image where they overlap."""

from __future__ import annotations

import itertools
import math

import heliograph as hg
from heliograph.lowerings.arrays import crop, insert_zeros, pad
from heliograph.lowerings.windows import Window


def columns_to_image(x: hg.Value, image: tuple[int, ...], window: Window) -> hg.Value:
    """Return the image [n, c, ...] of columns [n, c * block, places], one for each place of the
    window."""
    count, block = window.ndim, window.kernel
    full = [image[axis] + window.low[axis] + window.high[axis] for axis in range(count)]
    x = hg.reshape(x, (x.shape[0], x.shape[1] // math.prod(block), math.prod(block), *window.outputs(image)))
    total: hg.Value | None = None
    for number, offset in enumerate(itertools.product(*map(range, block))):
        one = x[:, :, number]
        for axis in range(count):
            one = insert_zeros(one, 2 + axis, window.stride[axis])
        low = [0, 0, *(offset[axis] * window.dilation[axis] for axis in range(count))]
        high = [0, 0, *(full[axis] - one.shape[2 + axis] - low[2 + axis] for axis in range(count))]
        one = pad(one, low, high)
        total = one if total is None else total + one
    assert total is not None
    return crop(total, [0, 0, *window.low], [0, 0, *window.high])
