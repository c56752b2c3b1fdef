"""Windows of a tensor at a place that a run computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import Any, TypeAlias, cast

import numpy as np

from heliograph.graph import lowering as lowering
from heliograph.graph.lowering import Operand
from heliograph.graph.source_lines import invalid
from heliograph.graph.value import Value
from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.types import I64, dtype

__all__ = ["dynamic_slice", "dynamic_update_slice"]

#: The place of a window: a number for each dimension, some of which a run may compute, or a vector.
Starts: TypeAlias = "Operand | Sequence[Operand]"


def dynamic_slice(x: Operand, starts: Starts, sizes: Sequence[int] | int, /) -> Value:
    """The window of x with these sizes at a place that a run may compute.

    `starts` has an integer for each dimension: numbers, values of the graph with one element, or
    one vector. As in XLA, a start is moved so that the window lies within x: below 0 it is 0, and
    beyond the end it is the last place. A run reads the window, not the rest of x.
    """
    graph = lowering.graph_of(x, *_listed(starts))
    value, shape = lowering.lift(graph, x), lowering.sizes(sizes)
    places, kept = _places(value, starts, shape, "dynamic_slice")
    if places is None:
        return value
    rows = _as_rows(value, kept)
    return lowering.reshape(lowering.gather(rows, places, 0), shape)


def dynamic_update_slice(x: Operand, update: Operand, starts: Starts, /) -> Value:
    """x, with the window at a place that a run may compute replaced by `update`.

    The window has the shape of `update`, which has as many dimensions as x. Starts are as in
    `dynamic_slice`. `hg.assign(variable, hg.dynamic_update_slice(variable, ...))` writes the window
    in place, and nothing else of the variable.
    """
    graph = lowering.graph_of(x, update, *_listed(starts))
    value, given = lowering.lift(graph, x), lowering.lift(graph, update)
    places, kept = _places(value, starts, given.shape, "dynamic_update_slice")
    if given.dtype is not value.dtype and value.dtype.kind != "quantized":
        given = lowering.cast(given, value.dtype)
    if places is None:
        return given
    written = lowering.apply("set_rows", _as_rows(value, kept), _as_rows(given, kept), places)
    return lowering.reshape(written, value.shape)


def _as_rows(x: Value, kept: int) -> Value:
    return lowering.reshape(x, (math.prod(x.shape[:kept]), math.prod(x.shape[kept:])))


def _listed(starts: Starts) -> list[Any]:
    return list(starts) if isinstance(starts, (list, tuple)) else [starts]


def _places(x: Value, starts: Starts, shape: tuple[int, ...], name: str) -> tuple[Value | None, int]:
    """Return the numbers of the rows of a window, and the first dimension of a row.

    The dimensions that the window has whole, at the end, are rows. None: the window is all of x.
    """
    if len(shape) != x.ndim or any(not 0 <= size <= room for size, room in zip(shape, x.shape, strict=True)):
        raise invalid(
            f"{name} of {x.type}: a window of {shape}", "it has as many dimensions, and no larger ones"
        )
    most = [room - size for size, room in zip(shape, x.shape, strict=True)]
    kept = max((axis + 1 for axis in range(x.ndim) if most[axis]), default=0)
    given = _one_for_each(x, starts, name)
    if not kept:
        return None, 0
    if kept == x.ndim and x.dtype.kind == "quantized":
        raise invalid(f"{name} of {x.type} along its last dimension", "its elements are blocks")
    strides = [math.prod(x.shape[axis + 1 : kept]) for axis in range(kept)]
    grid = np.zeros((), np.int64)
    for size, stride in zip(shape, strides, strict=False):
        grid = grid[..., None] + np.arange(size, dtype=np.int64) * stride
    offset: Value | None = None
    for start, room, stride in zip(given, most, strides, strict=False):
        if not isinstance(start, Value):
            grid = grid + min(max(start, 0), room) * stride
        elif room:
            part = _within(start, room) * stride if stride > 1 else _within(start, room)
            offset = part if offset is None else offset + part
    rows = x.graph.constant(np.ascontiguousarray(grid.reshape(-1)))
    return rows if offset is None else rows + offset, kept


def _one_for_each(x: Value, starts: Starts, name: str) -> list[Value | int]:
    """Return the start of each dimension: a number, or a value of shape ()."""
    if isinstance(starts, (list, tuple)):
        given = [_start(x, one, name) for one in starts]
    else:
        vector = lowering.lift(x.graph, cast(Operand, starts))
        if vector.ndim != 1:
            raise invalid(f"{name} at {vector.type}", "starts are one vector, or a number for each dimension")
        given = [_start(x, vector[axis], name) for axis in range(vector.shape[0])]
    if len(given) != x.ndim:
        raise invalid(f"{name} of {x.type} at {len(given)} starts", "give one for each dimension")
    return given


def _start(x: Value, one: Any, name: str) -> Value | int:
    if not isinstance(one, Value) and not getattr(one, "ndim", 0):
        try:
            return index(one)
        except TypeError:
            raise invalid(f"{name} at {one!r:.80}", "starts are integers", InvalidArgumentError) from None
    value = lowering.lift(x.graph, one)
    if value.size != 1 or not value.dtype.is_integer:
        raise invalid(f"{name} at {value.type}", "a start is one integer: hg.astype(i, 'i32')")
    return lowering.reshape(value, ())


def _within(start: Value, most: int) -> Value:
    """Return a start as i64, moved to 0 to `most`."""
    if start.dtype is dtype("u64"):
        start = lowering.apply("minimum", start, start.graph._scalar(2**62, start.dtype))
    wide, graph = lowering.cast(start, I64), start.graph
    low = lowering.apply("maximum", wide, graph._scalar(0, I64))
    return lowering.apply("minimum", low, graph._scalar(most, I64))
