"""Selections whose size a run decides: results padded to a bound, with the number that counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import heliograph as hg
from heliograph.lowerings.arrays import cast
from heliograph.lowerings.scatters import scatter_rows


def _numbers(count: int, graph: hg.Graph) -> hg.Value:
    return hg.arange(count, dtype="i64", graph=graph)


def _put(values: hg.Value, places: hg.Value, count: int) -> hg.Value:
    """Return `count` zeros with the values at the places; those at `count` are left out."""
    table = hg.zeros((count + 1, 1), values.dtype, graph=values.graph)
    return scatter_rows(table, hg.expand_dims(values, axis=1), places)[:count, 0]


def _ranks(flags: hg.Value) -> hg.Value:
    """Return for each flag how many before it and with it are true, less one."""
    return hg.cumulative_sum(cast(flags, "i64")) - 1


def true_places(flags: hg.Value) -> tuple[hg.Value, hg.Value]:
    """Return the places of the true flags [n] in their order, padded to [n] with 0, and their
    number."""
    many = flags.shape[0]
    places = hg.where(flags, _ranks(flags), many)
    return _put(_numbers(many, flags.graph), places, many), hg.sum(cast(flags, "i64"))


@dataclass(frozen=True, slots=True)
class Distinct:
    """The different rows of a table, padded to its length.

    `firsts`: the place of the first of each; `groups`: for each row of the table the number of its
    kind; `sizes`: how many rows are of each kind; `count`: how many kinds there are.
    """

    firsts: hg.Value
    groups: hg.Value
    sizes: hg.Value
    count: hg.Value


def distinct(rows: hg.Value, *, in_order: bool) -> Distinct:
    """Find the different rows of a table [n, k], `in_order` of their elements, else of their first
    places."""
    many, graph = rows.shape[0], rows.graph
    numbers = _numbers(many, graph)
    order = numbers
    for column in reversed(range(rows.shape[1])):
        keys = hg.take(rows[:, column], order, axis=0)
        order = hg.take(order, hg.argsort(keys, stable=True), axis=0)
    table = hg.take(rows, order, axis=0)
    changed = hg.any(table[1:] != table[:-1], axis=1)
    begins = hg.concat([hg.full((1,), True, "bool", graph=graph), changed])
    ranks = _ranks(begins)
    starts, count = true_places(begins)
    firsts = hg.take(order, starts, axis=0)
    if not in_order:
        # The kinds are numbered again by their first places; padding comes last.
        after = hg.argsort(hg.where(numbers < count, firsts, many), stable=True)
        firsts = hg.take(firsts, after, axis=0)
        ranks = hg.take(_put(numbers, cast(after, "i64"), many), ranks, axis=0)
    firsts = hg.where(numbers < count, firsts, 0)
    ones = hg.full((many, 1), 1, "i64", graph=graph)
    sizes = scatter_rows(hg.zeros_like(ones), ones, ranks, "add")[:, 0]
    return Distinct(firsts, _put(ranks, order, many), sizes, count)


def corners_of(boxes: hg.Value, *, centered: bool) -> hg.Value:
    """Return boxes [.., 4] by their lower and upper corners.

    They are given by two opposite corners or, centered, by their centers and sizes.
    """
    first, second = boxes[..., :2], boxes[..., 2:]
    if centered:
        return hg.concat([first - second / 2.0, first + second / 2.0], axis=-1)
    return hg.concat([hg.minimum(first, second), hg.maximum(first, second)], axis=-1)


def suppressed(
    boxes: hg.Value, scores: hg.Value, most: int, overlap: hg.Value | float, least: hg.Value | None
) -> tuple[hg.Value, hg.Value]:
    """Return the boxes with the largest scores of which no two overlap by more than `overlap`:
    for each batch and class the places [b, c, most], and whether there are so many.

    `boxes` [b, s, 4] by their corners, `scores` [b, c, s]; boxes need a score above `least`.
    """
    batches, classes, many = scores.shape
    sizes = boxes[..., 2:] - boxes[..., :2]
    table = hg.concat([boxes, hg.expand_dims(sizes[..., 0] * sizes[..., 1], axis=-1)], axis=-1)
    # A plane for each coordinate and for the areas, so that all steps go along rows.
    planes = [hg.reshape(table[..., place], (batches, 1, many)) for place in range(5)]
    rows = hg.reshape(table, (batches * many, 5))
    numbers = np.arange(many, dtype=np.float32)
    starts = np.arange(batches * classes, dtype=np.int64) * many
    of_batch = starts.reshape(batches, classes)[:, :1] // classes
    left = hg.where(hg.isfinite(scores) if least is None else scores > least, scores, float("-inf"))
    picks, tops = [], []
    for _ in range(most):
        best = cast(hg.argmax(left, axis=2), "i64")
        taken = hg.take(rows, hg.flatten(best + of_batch), axis=0)
        picked = [hg.reshape(taken[:, place], (batches, classes, 1)) for place in range(5)]
        picks.append(best)
        tops.append(hg.take(hg.flatten(left), hg.flatten(best) + starts, axis=0))
        low = [hg.maximum(picked[place], planes[place]) for place in (0, 1)]
        high = [hg.minimum(picked[place], planes[place]) for place in (2, 3)]
        shared = hg.maximum(high[0] - low[0], 0.0) * hg.maximum(high[1] - low[1], 0.0)
        # Two empty boxes give 0 / 0, which is above nothing.
        gone = shared / (picked[4] + planes[4] - shared) > overlap
        gone = gone | (hg.expand_dims(cast(best, "f32"), axis=2) == numbers)
        left = hg.where(gone, float("-inf"), left)
    found = hg.reshape(hg.stack(tops, axis=1), (batches, classes, most))
    return hg.stack(picks, axis=2), found > float("-inf")
