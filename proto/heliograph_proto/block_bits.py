"""Bits and bytes of blocks, for what makes and reads them. Arrays of blocks are uint8 [n, bytes]."""

from __future__ import annotations

from typing import Any

import numpy

Array = Any


def fields(blocks: Array, *sizes: int) -> list[Array]:
    """The bytes of blocks [n, sum(sizes)], cut into parts."""
    ends = numpy.cumsum(sizes)
    return [blocks[:, end - size : end] for size, end in zip(sizes, ends.tolist(), strict=True)]


def halves(xp: Any, field: Array) -> Array:
    """Bytes [n, 2 k] that are f16, as f32 [n, k]."""
    return xp.ascontiguousarray(field).view(xp.float16).astype(xp.float32)


def half_bytes(xp: Any, scale: Array) -> Array:
    return scale.astype(xp.float16).view(xp.uint8)


def unpacked(xp: Any, packed: Array, width: int, run: int) -> Array:
    """Bytes [n, m] of 8 / width numbers each, as numbers [n, m * 8 / width].

    Of every `run` bytes first come the lowest bits of each, then the next ones, and so on.
    """
    shifts = xp.arange(0, 8, width, dtype=xp.uint8)[:, None]
    numbers = packed.reshape(len(packed), -1, 1, run) >> shifts
    return (numbers & xp.uint8(2**width - 1)).reshape(len(packed), -1)


def packed(xp: Any, numbers: Array, width: int, run: int) -> Array:
    """The inverse of `unpacked`."""
    shifts = xp.arange(0, 8, width, dtype=xp.uint8)[:, None]
    parts = numbers.reshape(len(numbers), -1, 8 // width, run) << shifts
    return parts.sum(2, dtype=xp.uint8).reshape(len(numbers), -1)
