"""Scattering rows into a table, also where several rows are added to one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

import heliograph as hg
from heliograph.lowerings.arrays import along, cast, from_front

Reduction = Literal["none", "add", "mul", "max", "min"]
#: The most elements of the table of all pairs that a reduction compares.
MOST_PAIRS = 2**26


def flat_indices(indices: hg.Value, sizes: Sequence[int]) -> hg.Value:
    """Return places in a row-major block for the tuples in the last dimension of the indices."""
    total: hg.Value | None = None
    for place, size in enumerate(sizes):
        one = from_front(indices[..., place], size)
        total = one if total is None else total * size + one
    if total is None:
        return hg.full(indices.shape[:-1], 0, "i64", graph=indices.graph)
    return total


def element_places(indices: hg.Value, shape: Sequence[int], axis: int) -> hg.Value:
    """Return flat places of the elements of a tensor that lie where the indices are, with their
    indices along one axis."""
    strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    found = from_front(indices, shape[axis]) * strides[axis]
    for place, size in enumerate(indices.shape):
        if place != axis and size > 1:
            steps = np.arange(size, dtype=np.int64) * strides[place]
            found = found + steps.reshape(along(place, len(shape)))
    return found


def scatter_rows(table: hg.Value, rows: hg.Value, places: hg.Value, how: Reduction = "none") -> hg.Value:
    """Return table [n, k] with the rows [m, k] at the places [m] replaced, or combined with them."""
    if not places.size or not table.size:
        return table
    if how == "none":
        return _replace(table, rows, places)
    count, many = table.shape[0], places.shape[0]
    if count * many * max(1, table.shape[1]) > MOST_PAIRS:
        raise hg.UnsupportedError(f"{how} of {many} rows into {count}: there is no op for it at this size")
    numbers = hg.arange(count, dtype="i64", graph=table.graph)
    hits = hg.expand_dims(hg.expand_dims(numbers, axis=1) == hg.expand_dims(places, axis=0), axis=2)
    wide = hg.expand_dims(rows, axis=0)
    if how in ("add", "mul"):
        neutral = hg.full((), 0 if how == "add" else 1, table.dtype, graph=table.graph)
        chosen = hg.where(hits, wide, neutral)
        if how == "add":
            return table + cast(hg.sum(chosen, axis=1), table.dtype)
        return table * cast(hg.prod(chosen, axis=1), table.dtype)
    chosen = hg.where(hits, wide, hg.expand_dims(table, axis=1))
    if how == "max":
        return hg.maximum(table, hg.max(chosen, axis=1))
    return hg.minimum(table, hg.min(chosen, axis=1))


def _replace(table: hg.Value, rows: hg.Value, places: hg.Value) -> hg.Value:
    target = table.dtype
    if target.name in ("f32", "f16", "bf16", "f64", "i32", "i64"):
        try:
            return hg.ops.set_rows(table, cast(rows, target), cast(places, "i64"))
        except hg.InvalidGraphError:
            pass
    wide = "i64" if target.name in ("u32", "u64", "i64") else "i32"
    return cast(hg.ops.set_rows(cast(table, wide), cast(rows, wide), cast(places, "i64")), target)
