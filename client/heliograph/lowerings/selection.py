"""Selections whose size a run decides: results padded to a bound, with the number that counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import heliograph as hg
from heliograph.lowerings.arrays import cast, pad
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


def with_areas(boxes: hg.Value) -> hg.Value:
    """Return boxes [b, s, 4] by their corners as rows [b * s, 5], with their areas."""
    sizes = boxes[..., 2:] - boxes[..., :2]
    table = hg.concat([boxes, hg.expand_dims(sizes[..., 0] * sizes[..., 1], axis=-1)], axis=-1)
    return hg.reshape(table, (-1, 5))


def _overlap(a: Sequence[hg.Value], b: Sequence[hg.Value], most: hg.Value | float) -> hg.Value:
    """True where the share of the union that is in both boxes is above `most`. A box is four planes
    of coordinates and one of areas; planes broadcast."""
    low = [hg.maximum(a[place], b[place]) for place in (0, 1)]
    high = [hg.minimum(a[place], b[place]) for place in (2, 3)]
    shared = hg.maximum(high[0] - low[0], 0.0) * hg.maximum(high[1] - low[1], 0.0)
    # Two empty boxes give 0 / 0, which is above nothing.
    return shared / (a[4] + b[4] - shared) > most


def suppressed(
    rows: hg.Value, scores: hg.Value, most: int, overlap: hg.Value | float
) -> tuple[hg.Value, hg.Value]:
    """Return the boxes with the largest scores of which no two overlap by more than `overlap`:
    for each batch and class the places [b, c, most], and whether there are so many.

    `rows` as of `with_areas`, `scores` [b, c, s], -inf of those that are left out.
    """
    batches, classes, many = scores.shape
    # A plane for each coordinate, so that all steps go along rows.
    planes = [hg.reshape(rows[:, place], (batches, 1, many)) for place in range(5)]
    numbers = np.arange(many, dtype=np.float32)
    starts = np.arange(batches * classes, dtype=np.int64) * many
    of_batch = starts.reshape(batches, classes)[:, :1] // classes
    left, picks, tops = scores, [], []
    for _ in range(most):
        best = cast(hg.argmax(left, axis=2), "i64")
        taken = hg.take(rows, hg.flatten(best + of_batch), axis=0)
        picked = [hg.reshape(taken[:, place], (batches, classes, 1)) for place in range(5)]
        picks.append(best)
        tops.append(hg.take(hg.flatten(left), hg.flatten(best) + starts, axis=0))
        itself = hg.expand_dims(cast(best, "f32"), axis=2) == numbers
        left = hg.where(_overlap(picked, planes, overlap) | itself, float("-inf"), left)
    found = hg.reshape(hg.stack(tops, axis=1), (batches, classes, most))
    return hg.stack(picks, axis=2), found > float("-inf")


@dataclass(frozen=True, slots=True)
class Candidates:
    """Boxes in the order of their scores, for each batch and class: their rows in the table of
    boxes [g, s], and their scores, -inf of those left out. `s` is a multiple of BLOCK."""

    places: hg.Value
    scores: hg.Value


#: The candidates that a step of a loop looks at.
BLOCK = 32


def candidates(scores: hg.Value) -> Candidates:
    """Sort scores [b, c, s], -inf of those that are left out."""
    batches, classes, many = scores.shape
    order = cast(hg.argsort(scores, axis=2, descending=True), "i64")
    ordered = hg.reshape(hg.take_along_axis(scores, order, axis=2), (batches * classes, many))
    starts = np.arange(batches, dtype=np.int64).reshape(batches, 1, 1) * many
    order = hg.reshape(order + starts, (batches * classes, many))
    rest = -many % BLOCK
    return Candidates(pad(order, (0, 0), (0, rest)), pad(ordered, (0, 0), (0, rest), float("-inf")))


def next_picks(
    rows: hg.Value, found: Candidates, turn: hg.Value, state: Sequence[hg.Value], overlap: hg.Value | float
) -> tuple[hg.Value, list[hg.Value]]:
    """Look at the next candidates of all batches and classes, in a loop.

    Returns whether it goes on, and the state: the picked boxes [g, most + 1, 5], their rows
    [g, most + 1] and their number [g].
    The last place of each is for boxes that are not picked.
    """
    kept, picks, count = state
    groups, most = picks.shape[0], picks.shape[1] - 1
    at = turn * BLOCK + np.arange(BLOCK, dtype=np.int64)
    places, scores = (hg.take(one, at, axis=1) for one in (found.places, found.scores))
    boxes = hg.take(rows, hg.flatten(places), axis=0)
    mine = [hg.reshape(boxes[:, place], (groups, BLOCK, 1)) for place in range(5)]
    near = _overlap(mine, [hg.expand_dims(kept[:, :most, place], axis=1) for place in range(5)], overlap)
    stays = (scores > float("-inf")) & hg.logical_not(hg.any(near, axis=2))
    later = _overlap(mine, [hg.permute_dims(one, (0, 2, 1)) for one in mine], overlap)
    later = later & np.triu(np.ones((BLOCK, BLOCK), bool), 1)
    for place in range(BLOCK):
        stays = stays & hg.logical_not(stays[:, place : place + 1] & later[:, place])
    ranks = hg.expand_dims(count, axis=1) + hg.cumulative_sum(cast(stays, "i64"), axis=1) - 1
    slots = hg.where(stays & (ranks < most), ranks, most)
    slots = hg.flatten(slots + np.arange(groups, dtype=np.int64)[:, None] * (most + 1))
    kept = hg.reshape(scatter_rows(hg.reshape(kept, (-1, 5)), boxes, slots), kept.shape)
    picks = hg.reshape(
        scatter_rows(hg.reshape(picks, (-1, 1)), hg.reshape(places, (-1, 1)), slots), picks.shape
    )
    count = hg.minimum(count + hg.sum(cast(stays, "i64"), axis=1), most)
    return hg.any((count < most) & (scores[:, -1] > float("-inf"))), [kept, picks, count]
