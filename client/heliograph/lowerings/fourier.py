"""Discrete Fourier transforms as products with matrices; complex numbers are pairs of reals."""

from __future__ import annotations

from typing import Any

import numpy as np

import heliograph as hg
from heliograph.lowerings.arrays import pad, part

Array = np.ndarray[Any, Any]
#: The most elements of a matrix of a transform.
MOST_WEIGHTS = 2**24


def transform(
    x: hg.Value, axis: int, count: int | None = None, *, inverse: bool = False, onesided: bool = False
) -> hg.Value:
    """Return the transform of x [..., 1] of reals or [..., 2] of complex numbers along an axis.

    `count`: the length, to which x is cut or padded. `onesided`: the first half, which decides the
    rest; the inverse takes it, and gives reals.
    """
    size = x.shape[axis]
    if inverse and onesided:
        return _real_inverse(x, axis, count or 2 * (size - 1))
    length = count or size
    x = _fit(x, axis, length)
    rows = np.arange(length // 2 + 1 if onesided else length)
    angle = 2 * np.pi * np.outer(rows, np.arange(length)) / length * (1 if inverse else -1)
    factor = 1 / length if inverse else 1.0
    cosine, sine = np.cos(angle) * factor, np.sin(angle) * factor
    real = x[..., 0]
    if x.shape[-1] == 1:
        return hg.stack([_times(real, axis, cosine), _times(real, axis, sine)], axis=-1)
    imaginary = x[..., 1]
    return hg.stack(
        [
            _times(real, axis, cosine) - _times(imaginary, axis, sine),
            _times(real, axis, sine) + _times(imaginary, axis, cosine),
        ],
        axis=-1,
    )


def _real_inverse(x: hg.Value, axis: int, length: int) -> hg.Value:
    half = length // 2 + 1
    x = _fit(x, axis, half)
    columns = np.arange(half)
    angle = 2 * np.pi * np.outer(np.arange(length), columns) / length
    # All but the first and the middle one stand for two.
    single = (columns == 0) | ((length % 2 == 0) & (columns == length // 2))
    weight = np.where(single, 1, 2) / length
    found = _times(x[..., 0], axis, np.cos(angle) * weight)
    if x.shape[-1] == 2:
        found = found - _times(x[..., 1], axis, np.sin(angle) * weight)
    return hg.expand_dims(found, axis=-1)


def _fit(x: hg.Value, axis: int, length: int) -> hg.Value:
    size = x.shape[axis]
    if length <= size:
        return x if length == size else part(x, axis, 0, length)
    high = [0] * x.ndim
    high[axis] = length - size
    return pad(x, [0] * x.ndim, high)


def _times(x: hg.Value, axis: int, matrix: Array) -> hg.Value:
    if matrix.size > MOST_WEIGHTS:
        raise hg.UnsupportedError(f"a Fourier transform of {matrix.shape[1]} elements is too long")
    weights = np.ascontiguousarray(matrix.T).astype(x.dtype.numpy)
    return hg.moveaxis(hg.matmul(hg.moveaxis(x, axis, -1), weights), -1, axis)
