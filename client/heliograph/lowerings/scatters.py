"""Scattering rows into a table, also where several rows are added to one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

import heliograph as hg
from heliograph.lowerings.arrays import along, cast, from_front

Reduction = Literal["none", "add", "mul", "max", "min"]


def flat_indices(indices: hg.Value, sizes: Sequence[int]) -> hg.Value:
    """Return places in a row-major block for the tuples in the last dimension of the indices."""
    total: hg.Value | None = None
    for place, size in enumerate(sizes):
        one = from_front(indices[..., place], size, -math.prod(sizes) if len(sizes) > 1 else None)
        total = one if total is None else total * size + one
    if total is None:
        return hg.full(indices.shape[:-1], 0, "i64", graph=indices.graph)
    return total


def element_places(indices: hg.Value, shape: Sequence[int], axis: int) -> hg.Value:
    """Return flat places of the elements of a tensor that lie where the indices are, with their
    indices along one axis."""
    strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    found = from_front(indices, shape[axis], -math.prod(shape)) * strides[axis]
    for place, size in enumerate(indices.shape):
        if place != axis and size > 1:
            steps = np.arange(size, dtype=np.int64) * strides[place]
            found = found + steps.reshape(along(place, len(shape)))
    return found


def scatter_rows(table: hg.Value, rows: hg.Value, places: hg.Value, how: Reduction = "none") -> hg.Value:
    """Return table [n, k] with the rows [m, k] at the places [m] replaced, or combined with them in
    the order of the places."""
    if not places.size or not table.size:
        return table
    write = hg.ops.set_rows if how == "none" else getattr(hg.ops, f"{how}_rows")
    found: hg.Value = write(table, cast(rows, table.dtype), cast(places, "i64"))
    return found
