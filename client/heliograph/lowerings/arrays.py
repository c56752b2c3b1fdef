"""Slices, padding and conversions along single axes."""

from __future__ import annotations

from collections.abc import Sequence

import heliograph as hg


def cast(x: hg.Value, dtype: hg.DType | str) -> hg.Value:
    """Return x as a data type; x itself if it has that."""
    return x if str(x.dtype) == str(dtype) else hg.astype(x, dtype)


def is_integer(x: hg.Value) -> bool:
    """True for signed and unsigned integers."""
    return x.dtype.kind in ("int", "uint")


def part(x: hg.Value, axis: int, start: int, stop: int, step: int = 1) -> hg.Value:
    """Return the elements from start to stop along one axis."""
    key: list[slice] = [slice(None)] * x.ndim
    key[axis] = slice(start, stop, step)
    return x[tuple(key)]


def along(axis: int, ndim: int) -> tuple[int, ...]:
    """Return the shape of a vector that lies along one axis of so many."""
    return tuple(-1 if place == axis else 1 for place in range(ndim))


def channels(v: hg.Value, ndim: int) -> hg.Value:
    """Return a vector along the axis of channels, which is the second."""
    return hg.reshape(v, along(1, ndim))


def pad(x: hg.Value, low: Sequence[int], high: Sequence[int], fill: hg.Value | float = 0) -> hg.Value:
    """Return x with elements of one value before and after it along each axis."""
    if not any(low) and not any(high):
        return x
    plain = x.dtype.kind == "float" or x.dtype.name in ("i32", "i64")
    if not isinstance(fill, hg.Value) and fill == 0 and plain:
        return hg.ops.pad(x, left=tuple(low), right=tuple(high))
    if isinstance(fill, hg.Value):
        one = cast(hg.reshape(fill, ()), x.dtype)
    else:
        kind = {"bool": bool, "float": float}.get(x.dtype.kind, int)
        one = hg.full((), kind(fill), x.dtype, graph=x.graph)
    for axis in range(x.ndim):
        shape = list(x.shape)
        parts = [x]
        if low[axis]:
            shape[axis] = low[axis]
            parts.insert(0, hg.broadcast_to(one, shape))
        if high[axis]:
            shape[axis] = high[axis]
            parts.append(hg.broadcast_to(one, shape))
        x = hg.concat(parts, axis=axis) if len(parts) > 1 else x
    return x


def pad_axis(x: hg.Value, axis: int, first: int, size: int) -> hg.Value:
    """Return x from one place of an axis of a size, among zeros."""
    low, high = [0] * x.ndim, [0] * x.ndim
    low[axis], high[axis] = first, size - first - x.shape[axis]
    return pad(x, low, high)


def crop(x: hg.Value, low: Sequence[int], high: Sequence[int]) -> hg.Value:
    """Return x without so many elements at the ends of each axis."""
    for axis in range(x.ndim):
        if low[axis] or high[axis]:
            x = part(x, axis, low[axis], x.shape[axis] - high[axis])
    return x


def insert_zeros(x: hg.Value, axis: int, step: int) -> hg.Value:
    """Return x with step - 1 zeros between neighbours along one axis."""
    size = x.shape[axis]
    if step == 1 or size < 2:
        return x
    wide = hg.expand_dims(x, axis=axis + 1)
    high = [0] * wide.ndim
    high[axis + 1] = step - 1
    shape = list(x.shape)
    shape[axis] = size * step
    spread = hg.reshape(pad(wide, [0] * wide.ndim, high), shape)
    return part(spread, axis, 0, (size - 1) * step + 1)


def from_front(indices: hg.Value, size: int, outside: int | None = None) -> hg.Value:
    """Return i64 indices, those below 0 counted from the end; those that are outside as `outside`.

    A place outside of its own dimension would be one inside of others, where dimensions are merged:
    minus the number of all elements is outside of those too.
    """
    wide = cast(indices, "i64")
    front = wide if indices.dtype.kind == "uint" else hg.where(wide < 0, wide + size, wide)
    return front if outside is None else hg.where((front < 0) | (front >= size), outside, front)
