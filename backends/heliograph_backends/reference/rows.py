"""Formulas: ops that put rows, blocks and triangles into a tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from heliograph_backends.reference.base import Array, Attributes, Formula, Writer, check_indices, cycled, wide


def set_rows(xp: Any, attributes: Attributes, out: Array, target: Array, rows: Array, indices: Array) -> None:
    """Set rows; for a repeated index the last row counts. Libraries assign in any order, so the
    earlier rows are left out."""
    check_indices("set_rows", indices, target.shape[-2], "rows")
    out[...] = target
    count = rows.shape[-2]
    lead = math.prod(rows.shape[:-2])
    # For each row the number of its matrix and its place there.
    matrix = xp.repeat(xp.arange(lead), count)
    row = xp.tile(xp.arange(count, dtype=xp.int32), lead)
    place = cycled(xp, indices, rows.shape[:-1]).reshape(-1)
    last = xp.full((lead, target.shape[-2]), -1, xp.int32)
    xp.maximum.at(last, (matrix, place), row)
    kept = xp.flatnonzero(last[matrix, place] == row)
    flat = rows.reshape(lead * count, rows.shape[-1])
    out[(*_unravelled(matrix[kept], rows.shape[:-2]), place[kept])] = flat[kept]


def combining(op: str, ufunc: str) -> Writer:
    """Return the writer that combines rows of the target with others, in the order of the
    indices."""

    def writer(
        xp: Any, attributes: Attributes, out: Array, target: Array, rows: Array, indices: Array
    ) -> None:
        check_indices(op, indices, target.shape[-2], "rows")
        found = xp.array(wide(xp, target))
        combine(xp, getattr(xp, ufunc), found, indices, wide(xp, rows))
        out[...] = found

    return writer


def combine(xp: Any, ufunc: Any, found: Array, indices: Array, rows: Array) -> None:
    """Combine rows of a new array with others, in the order of the indices, which cycle."""
    there = found.shape[-2]
    count, width = rows.shape[-2:]
    lead = math.prod(rows.shape[:-2])
    places = xp.repeat(xp.arange(lead), count) * there + cycled(xp, indices, rows.shape[:-1]).reshape(-1)
    flat = found.reshape(lead * there, width)
    _combine(xp, ufunc, flat, places, rows.reshape(lead * count, width))
    found[...] = flat.reshape(found.shape)


def _combine(xp: Any, ufunc: Any, found: Array, places: Array, rows: Array) -> None:
    """Combine rows in their order. Other libraries than NumPy do so in any order, so rows of one
    place go one after the other there."""
    if xp is np:
        ufunc.at(found, places, rows)
        return
    order = xp.argsort(places * len(rows) + xp.arange(len(rows)))
    sorted_places = places[order]
    turn = xp.arange(len(rows)) - xp.searchsorted(sorted_places, sorted_places)
    for number in range(int(turn.max()) + 1 if len(rows) else 0):
        now = xp.flatnonzero(turn == number)
        at = sorted_places[now]
        found[at] = ufunc(found[at], rows[order[now]])


def _unravelled(number: Array, shape: tuple[int, ...]) -> list[Array]:
    """Convert row-major element numbers to an index for each dimension."""
    found = []
    for size in reversed(shape):
        found.append(number % size)
        number = number // size
    return found[::-1]


def _block(attributes: Attributes, b: Array) -> tuple[slice, ...]:
    """Return the slices where b lies; a block without elements may lie anywhere."""
    steps = attributes["step"] or (1,) * b.ndim
    walks = zip(attributes["start"], b.shape, steps, strict=True)
    return tuple(slice(at, at + (size - 1) * by + 1 if size else at, by) for at, size, by in walks)


def acc(xp: Any, attributes: Attributes, out: Array, a: Array, b: Array) -> None:
    out[...] = a
    out[_block(attributes, b)] += b


def set_(xp: Any, attributes: Attributes, out: Array, a: Array, b: Array) -> None:
    out[...] = a
    out[_block(attributes, b)] = b


def add_id(xp: Any, attributes: Attributes, a: Array, biases: Array, ids: Array) -> Array:
    check_indices("add_id", ids, biases.shape[0], "rows")
    return a + biases[ids]


def _after_diagonal(xp: Any, x: Array, offset: int) -> Array:
    """True where column > row + offset, for each element of the last two dimensions."""
    rows, columns = x.shape[-2:]
    return xp.arange(columns) > xp.arange(rows)[:, None] + offset


def diag(xp: Any, attributes: Attributes, x: Array) -> Array:
    row = x if x.ndim == 1 else x[..., 0, :]
    return xp.where(xp.eye(row.shape[-1], dtype=bool), row[..., None, :], row.dtype.type(0))


def diag_mask(value: float) -> Formula:
    """Return the formula that puts `value` after the diagonal that is `n_past` columns to the
    right."""

    def formula(xp: Any, attributes: Attributes, x: Array) -> Array:
        return xp.where(_after_diagonal(xp, x, attributes["n_past"]), x.dtype.type(value), x)

    return formula


def tri(xp: Any, attributes: Attributes, x: Array) -> Array:
    """Types 0 and 1 keep the elements above the diagonal, 2 and 3 those below; 0 and 2 also keep
    the diagonal."""
    kind = attributes["type"]
    # Above and on the diagonal means after the next diagonal to the left.
    beyond = _after_diagonal(xp, x, -1 if kind in (0, 3) else 0)
    return xp.where(beyond if kind < 2 else ~beyond, x, x.dtype.type(0))


def repeat(xp: Any, attributes: Attributes, x: Array) -> Array:
    return cycled(xp, x, tuple(attributes["shape"]))


FORMULAS: Mapping[str, Formula] = {
    "add1": lambda xp, attributes, a, b: a + b.reshape(()),
    "add_id": add_id,
    "diag": diag,
    "diag_mask_inf": diag_mask(-math.inf),
    "diag_mask_zero": diag_mask(0.0),
    "tri": tri,
    "repeat": repeat,
}
#: Ops that combine rows, and how.
COMBINED = {"add_rows": "add", "mul_rows": "multiply", "max_rows": "maximum", "min_rows": "minimum"}
WRITERS: Mapping[str, Writer] = {
    "set_rows": set_rows,
    **{op: combining(op, ufunc) for op, ufunc in COMBINED.items()},
    "acc": acc,
    "set": set_,
}
