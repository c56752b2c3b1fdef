"""Rules of ops that pick elements by indices, and put them there."""

from __future__ import annotations

import math
from typing import cast as typed

import numpy as np

import heliograph as hg
from heliograph.lowerings.arrays import along, cast, from_front, part
from heliograph.lowerings.scatters import Reduction, element_places, flat_indices, scatter_rows
from heliograph.onnx.elements import Array, Item
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


@rule("TopK")
def _top_k(node: Node) -> tuple[Item, ...]:
    x = node.value(0)
    axis = node.axis(node.int("axis", -1), x.ndim)
    count = node.integer(1) if node.opset >= 10 else node.int("k")
    order = hg.argsort(x, axis=axis, descending=bool(node.int("largest", 1)))
    places = part(order, axis, 0, count)
    return hg.take_along_axis(x, places, axis=axis), cast(places, "i64")


@rule("TfIdfVectorizer")
def _count_ngrams(node: Node) -> Item:
    """Count how often each n-gram of a list occurs in each row, also with tokens left out."""
    pool, starts, columns = (node.ints(name) for name in ("pool_int64s", "ngram_counts", "ngram_indexes"))
    if pool is None or starts is None or columns is None:
        raise node.refuse("it counts n-grams of strings, which no device has")
    x = cast(node.value(0), "i64")
    wide = x if x.ndim == 2 else hg.expand_dims(x, axis=0)
    least, most = node.int("min_gram_length", 1), node.int("max_gram_length", 1)
    lists = [pool[start:stop] for start, stop in zip(starts, [*starts[1:], len(pool)], strict=True)]
    counts: list[hg.Value] = []
    for length, flat in enumerate(lists, 1):
        grams = np.array(flat, np.int64).reshape(-1, length)
        total = hg.zeros((wide.shape[0], len(grams)), "f32", graph=node.graph)
        # Without neighbours there is nothing to leave out.
        skips = node.int("max_skip_count", 0) + 1 if length > 1 else 1
        node.parts(skips)
        for step in range(1, skips + 1) if least <= length <= most else ():
            if (count := wide.shape[1] - (length - 1) * step) > 0:
                total = total + _matches(wide, grams, step, count)
        if len(grams):
            counts.append(total)
    found = hg.concat(counts, axis=1)
    if len(columns) != found.shape[1] or min(columns) < 0:
        raise node.broken(f"{len(columns)} places of {found.shape[1]} n-grams")
    found = _weighted(node, found)
    node.room(max(columns) + 1, len(columns))
    order = np.zeros((len(columns), max(columns) + 1), np.float32)
    order[np.arange(len(columns)), columns] = 1
    result = hg.matmul(found, order)
    return result if x.ndim == 2 else result[0]


def _matches(x: hg.Value, grams: Array, step: int, count: int) -> hg.Value:
    """Return how often each n-gram begins in each row, with tokens `step` apart."""
    hits: hg.Value | None = None
    for place in range(grams.shape[1]):
        tokens = hg.expand_dims(part(x, 1, place * step, place * step + count), axis=2)
        here = tokens == np.ascontiguousarray(grams[:, place])
        hits = here if hits is None else hits & here
    assert hits is not None
    return hg.sum(cast(hits, "f32"), axis=1)


def _weighted(node: Node, counts: hg.Value) -> hg.Value:
    mode = node.string("mode", "TF")
    weights = np.array(node.floats("weights") or [1.0] * counts.shape[1], np.float32)
    if mode == "TF":
        return counts
    return (cast(counts > 0, "f32") if mode == "IDF" else counts) * weights
