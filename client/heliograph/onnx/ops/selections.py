"""Rules of ops whose result has a size that a run decides, within a bound."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

import heliograph as hg
from heliograph.lowerings.arrays import cast
from heliograph.lowerings.selection import (
    BLOCK,
    Candidates,
    candidates,
    corners_of,
    distinct,
    next_picks,
    suppressed,
    true_places,
    with_areas,
)
from heliograph.onnx.elements import Bounded, Item
from heliograph.onnx.node import Node
from heliograph.onnx.rules import rule

#: The most boxes of a class that are selected, each by a turn of an unrolled loop, or by a loop on the
#: server.
MOST_BOXES, MOST_LOOPED = 1024, 2**14
#: With so many boxes a run may say how many of them are selected.
FEW_BOXES = 64


@rule("NonZero")
def _nonzero(node: Node) -> Item:
    x = node.value(0)
    node.room(x.size)
    places, count = true_places(hg.reshape(x != 0 if x.dtype.kind != "bool" else x, (x.size,)))
    strides = np.array([math.prod(x.shape[axis + 1 :]) for axis in range(x.ndim)], np.int64)[:, None]
    sizes = np.array(x.shape, np.int64)[:, None]
    return Bounded(hg.expand_dims(places, axis=0) // strides % sizes, 1, count)


@rule("Compress")
def _compress(node: Node) -> Item:
    """Pick where a condition is true."""
    x = node.value(0)
    axis = node.axis(node.int("axis"), x.ndim) if node.given("axis") else 0
    x = x if node.given("axis") else hg.flatten(x)
    condition = node.item(1)
    if isinstance(condition, np.ndarray):
        return hg.take(x, np.flatnonzero(np.ravel(condition)[: x.shape[axis]]), axis=axis)
    flags = hg.flatten(node.value(1))[: x.shape[axis]]
    node.room(flags.size)
    places, count = true_places(flags)
    return Bounded(hg.take(x, places, axis=axis), axis, count)


@rule("Unique")
def _unique(node: Node) -> tuple[Item, ...]:
    x = node.value(0)
    axis = node.axis(node.int("axis"), x.ndim) if node.given("axis") else 0
    x = x if node.given("axis") else hg.flatten(x)
    rows = hg.moveaxis(x, axis, 0)
    node.room(x.size)
    if not rows.shape[0]:
        return x, *[np.zeros(0, np.int64)] * 3
    width = math.prod(rows.shape[1:])
    node.parts(width)
    found = distinct(hg.reshape(rows, (rows.shape[0], width)), in_order=bool(node.int("sorted", 1)))
    firsts, sizes = (Bounded(one, 0, found.count) for one in (found.firsts, found.sizes))
    return Bounded(hg.take(x, found.firsts, axis=axis), axis, found.count), firsts, found.groups, sizes


@rule("NonMaxSuppression")
def _suppress(node: Node) -> Item:
    """Select the boxes with the largest scores, as rows of batch, class and box."""
    corners, scores = cast(node.value(0), "f32"), cast(node.value(1), "f32")
    batches, classes, many = scores.shape
    limit = node.value(2) if node.has(2) and isinstance(node.item(2), hg.Value) else None
    if limit is not None and many > FEW_BOXES:
        limit = None
    most = many if limit is not None else min(node.integer(2) if node.has(2) else 0, many)
    if most > (MOST_LOOPED if node.level.may_loop else MOST_BOXES):
        raise node.refuse(f"it selects {most} boxes of each class; {MOST_BOXES} are the most")
    if most <= 0 or not classes * batches:
        return np.zeros((0, 3), np.int64)
    boxes = corners_of(corners, centered=bool(node.int("center_point_box", 0)))
    overlap = hg.reshape(node.value(3), ()) if node.has(3) else 0.0
    is_in = scores > hg.reshape(node.value(4), ()) if node.has(4) else hg.isfinite(scores)
    scores, rows = hg.where(is_in, scores, float("-inf")), with_areas(boxes)
    if node.level.may_loop and limit is None and most >= FEW_BOXES:
        picks, valid = _looped(node, rows, scores, most, overlap)
    else:
        picks, valid = suppressed(rows, scores, most, overlap)
    if limit is not None:
        valid = valid & (node.graph.constant(np.arange(most, dtype=np.int64)) < limit)
    size = batches * classes * most
    places, count = true_places(hg.reshape(valid, (size,)))
    numbers = np.indices((batches, classes, most), np.int64)[:2].reshape(2, size)
    columns = [*map(node.graph.constant, numbers), hg.reshape(picks, (size,))]
    return Bounded(hg.take(hg.stack(columns, axis=1), places, axis=0), 0, count)


def _looped(
    node: Node, rows: hg.Value, scores: hg.Value, most: int, overlap: hg.Value | float
) -> tuple[hg.Value, hg.Value]:
    """As `suppressed`, in a loop on the server, which ends when all classes have their boxes."""
    batches, classes, many = scores.shape
    groups, found = batches * classes, candidates(scores)
    limit = np.array(overlap, np.float32) if isinstance(overlap, float) else overlap

    def body(turn: hg.Value, state: Sequence[hg.Value]) -> tuple[Item, list[Item], list[Item]]:
        table, places, ordered, share = (
            node.level.lift(node.level.here(one), node) for one in (rows, found.places, found.scores, limit)
        )
        goes, after = next_picks(table, Candidates(places, ordered), turn, state, share)
        return goes, list(after), []

    state: list[Item] = [
        np.zeros((groups, most + 1, 5), np.float32),
        np.zeros((groups, most + 1), np.int64),
        np.zeros(groups, np.int64),
    ]
    made = node.level.loop(node, -(-many // BLOCK), np.array(True), state, body)
    picks, count = (node.level.lift(one, node) for one in made[1:])
    valid = np.arange(most, dtype=np.int64) < hg.expand_dims(count, axis=1)
    shape = (batches, classes, most)
    return hg.reshape(picks[:, :most] % many, shape), hg.reshape(valid, shape)
