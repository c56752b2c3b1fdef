"""Rules of ops that pick elements by indices, and put them there."""

from __future__ import annotations

import math
from typing import cast as typed

import numpy as np

import heliograph as hg
from heliograph.lowerings.arrays import along, cast, from_front, part
from heliograph.lowerings.scatters import Reduction, element_places, flat_indices, scatter_rows
from heliograph.onnx.elements import Item
from heliograph.onnx.node import Node
from heliograph.onnx.rules import rule


@rule("Gather", moves=True)
def _gather(node: Node) -> Item:
    x, indices = node.value(0), node.item(1)
    axis = node.axis(node.int("axis", 0), x.ndim)
    if isinstance(indices, np.ndarray) and indices.ndim == 0:
        place = node.axis(int(indices), x.shape[axis])
        return hg.reshape(part(x, axis, place, place + 1), x.shape[:axis] + x.shape[axis + 1 :])
    if isinstance(indices, np.ndarray):
        return hg.take(x, indices.astype(np.int64), axis=axis)
    return hg.take(x, from_front(node.value(1), x.shape[axis]), axis=axis)


@rule("GatherElements", moves=True)
def _gather_elements(node: Node) -> Item:
    x, indices = node.value(0), cast(node.value(1), "i64")
    axis = node.axis(node.int("axis", 0), x.ndim)
    same = tuple(slice(None) if place == axis else slice(0, size) for place, size in enumerate(indices.shape))
    return hg.take_along_axis(x[same], indices, axis=axis)


@rule("GatherND", moves=True)
def _gather_nd(node: Node) -> Item:
    x, indices, batch = node.value(0), node.value(1), node.int("batch_dims", 0)
    depth = indices.shape[-1]
    inner, rest = x.shape[batch : batch + depth], x.shape[batch + depth :]
    places = flat_indices(indices, inner)
    if batch:
        count = math.prod(x.shape[:batch])
        starts = np.arange(count, dtype=np.int64)[:, None] * math.prod(inner)
        places = hg.reshape(places, (count, places.size // max(1, count))) + starts
    table = hg.reshape(x, (math.prod(x.shape[: batch + depth]), math.prod(rest)))
    found = hg.take(table, hg.reshape(places, (places.size,)), axis=0)
    return hg.reshape(found, (*indices.shape[:-1], *rest))


def _reduction(node: Node) -> Reduction:
    found = node.string("reduction", "none")
    if found not in ("none", "add", "mul", "max", "min"):
        raise node.broken(f"there is no reduction {found!r}")
    return typed(Reduction, found)


@rule("ScatterND")
def _scatter_nd(node: Node) -> Item:
    x, indices, updates = node.value(0), node.value(1), node.value(2)
    depth = indices.shape[-1]
    rest = math.prod(x.shape[depth:])
    places = flat_indices(indices, x.shape[:depth])
    rows = hg.reshape(updates, (places.size, rest))
    table = hg.reshape(x, (math.prod(x.shape[:depth]), rest))
    found = scatter_rows(table, rows, hg.reshape(places, (places.size,)), _reduction(node))
    return hg.reshape(found, x.shape)


@rule("ScatterElements", "Scatter")
def _scatter_elements(node: Node) -> Item:
    x, indices, updates = node.value(0), node.value(1), node.value(2)
    axis = node.axis(node.int("axis", 0), x.ndim)
    places = element_places(indices, x.shape, axis)
    rows = hg.reshape(updates, (updates.size, 1))
    table = hg.reshape(x, (x.size, 1))
    found = scatter_rows(table, rows, hg.reshape(places, (places.size,)), _reduction(node))
    return hg.reshape(found, x.shape)


@rule("TensorScatter")
def _tensor_scatter(node: Node) -> Item:
    """Write rows into a cache, from a place of its own for each batch."""
    x, updates = node.value(0), node.value(1)
    axis = node.axis(node.int("axis", -2), x.ndim)
    batch, whole, many = x.shape[0], x.shape[axis], updates.shape[axis]
    starts = cast(node.value(2), "i64") if node.has(2) else hg.full((batch,), 0, "i64", graph=node.graph)
    places = hg.expand_dims(starts, axis=1) + np.arange(many, dtype=np.int64)
    if node.string("mode", "linear") == "circular":
        places = places % whole
    table, rows = hg.moveaxis(x, axis, 1), hg.moveaxis(updates, axis, 1)
    rest = math.prod(table.shape[2:])
    flat = hg.reshape(places + np.arange(batch, dtype=np.int64)[:, None] * whole, (batch * many,))
    found = scatter_rows(
        hg.reshape(table, (batch * whole, rest)), hg.reshape(rows, (batch * many, rest)), flat
    )
    return hg.moveaxis(hg.reshape(found, table.shape), 1, axis)


@rule("OneHot")
def _one_hot(node: Node) -> Item:
    indices, depth, values = node.value(0), node.integer(1), node.value(2)
    node.room(depth)
    axis = node.axis(node.int("axis", -1), indices.ndim + 1)
    places = hg.expand_dims(from_front(cast(indices, "i64"), depth), axis=axis)
    numbers = np.arange(depth, dtype=np.int64).reshape(along(axis, indices.ndim + 1))
    return hg.where(places == numbers, values[1], values[0])


@rule("Compress")
def _compress(node: Node) -> Item:
    """Pick where a constant condition is true."""
    x, condition = node.value(0), np.ravel(node.array(1)).astype(bool)
    if not node.given("axis"):
        x, axis = hg.flatten(x), 0
    else:
        axis = node.axis(node.int("axis"), x.ndim)
    return hg.take(x, np.flatnonzero(condition[: x.shape[axis]]), axis=axis)


@rule("ArrayFeatureExtractor")
def _pick_features(node: Node) -> Item:
    x, places = node.value(0), node.value(1)
    wide = x if x.ndim > 1 else hg.expand_dims(x, axis=0)
    return hg.take(wide, hg.reshape(cast(places, "i64"), (places.size,)), axis=wide.ndim - 1)


@rule("TopK")
def _top_k(node: Node) -> tuple[Item, ...]:
    x = node.value(0)
    axis = node.axis(node.int("axis", -1), x.ndim)
    count = node.integer(1) if node.opset >= 10 else node.int("k")
    order = hg.argsort(x, axis=axis, descending=bool(node.int("largest", 1)))
    places = part(order, axis, 0, count)
    return hg.take_along_axis(x, places, axis=axis), cast(places, "i64")
