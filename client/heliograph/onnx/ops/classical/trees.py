"""Ensembles of trees: all rows go through all trees at once, a level at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

import heliograph as hg
from heliograph.lowerings.arrays import cast
from heliograph.onnx.elements import Array
from heliograph.onnx.node import Node
from heliograph.onnx.ops.classical.models import features_of, labelled, numbers_of, transformed
from heliograph.onnx.rules import Result, rule

_COMPARE: dict[str, Callable[[hg.Value, hg.Value], hg.Value]] = {
    "BRANCH_LEQ": hg.less_equal,
    "BRANCH_LT": hg.less,
    "BRANCH_GTE": hg.greater_equal,
    "BRANCH_GT": hg.greater,
    "BRANCH_EQ": hg.equal,
    "BRANCH_NEQ": hg.not_equal,
}
#: The names of the modes in the order of their numbers; a leaf compares nothing.
_MODES = np.array([*_COMPARE, "BRANCH_MEMBER", "LEAF"])
_EQUAL, _MEMBER, _LEAF = 4, 6, 7
#: Whole numbers below it are the same in f32.
_MOST_EXACT = 2**24
_IDENTITY = {"SUM": 0.0, "AVERAGE": 0.0, "MIN": np.inf, "MAX": -np.inf}


@dataclass(slots=True)
class _Forest:
    """Nodes of all trees by their number, of which each branch knows its children; those of a leaf
    are itself."""

    modes: Array
    features: Array
    splits: Array
    #: Whether what is no number takes the way of the true.
    missing: Array
    yes: Array
    no: Array
    roots: Array

    def depth(self, node: Node) -> int:
        """Return the most branches on a way. Raises InvalidModelError for a cycle."""
        level, depth = self.roots, 0
        while (level := level[self.modes[level] != _LEAF]).size:
            level, depth = np.unique(np.concatenate([self.yes[level], self.no[level]])), depth + 1
            if depth > len(self.modes):
                raise node.broken("its nodes have a cycle")
        node.parts(depth)
        return depth


def _leaves(node: Node, forest: _Forest, x: hg.Value) -> hg.Value:
    """Return the leaf of each row [n, k] in each tree [n, trees]."""
    rows, width = x.shape
    if forest.features.size and not 0 <= forest.features.min() <= forest.features.max() < width:
        raise node.broken(f"it splits at feature {forest.features.max()} of {width}")

    # One table of all columns: a row of several elements is read almost as fast as one element.
    wide = x.dtype.numpy if max(len(forest.modes), width) < _MOST_EXACT else np.float64
    splits = forest.splits.astype(x.dtype.numpy)
    columns = (forest.features, splits, forest.no, forest.yes, forest.modes, forest.missing)
    table = node.level.lift(np.stack(columns, axis=1).astype(wide), node, f"{node.proto.name}.nodes")
    modes = np.unique(forest.modes[forest.modes != _LEAF])
    starts = np.arange(rows, dtype=np.int64)[:, None] * width
    places = hg.broadcast_to(node.graph.constant(forest.roots[None]), (rows, len(forest.roots)))
    for _ in range(forest.depth(node)):
        feature, split, no, yes, mode, missing = hg.unstack(hg.take(table, places, axis=0), axis=2)
        taken = hg.take(hg.flatten(x), cast(feature, "i64") + starts, axis=0)
        goes: hg.Value | None = None
        for one in modes:
            held = _COMPARE[_MODES[one]](taken, cast(split, x.dtype))
            goes = held if goes is None else hg.where(mode == float(one), held, goes)
        assert goes is not None
        if forest.missing.any():
            goes = goes | (hg.isnan(taken) & (missing > 0))
        places = cast(hg.where(goes, yes, no), "i64")
    return places


def _scores(
    node: Node, forest: _Forest, weights: tuple[Array, Array, Array], targets: int, how: str
) -> hg.Value:
    """Return the combined weights of the leaves [n, targets]. `weights`: leaves, targets, weights."""
    x = features_of(node)
    node.room(len(forest.modes), targets)
    if how not in _IDENTITY:
        raise node.broken(f"aggregate_function is {how!r:.80}")
    at, ids, values = weights
    if targets < 1 or (ids.size and not 0 <= ids.min() <= ids.max() < targets):
        raise node.broken(f"it has weights of target {ids.max() if ids.size else 0} of {targets}")
    # Sums of f64: shares of many trees that are equal stay equal.
    table = np.full((len(forest.modes), targets), _IDENTITY[how], np.float64)
    {"MIN": np.minimum, "MAX": np.maximum}.get(how, np.add).at(table, (at, ids), values)
    found = hg.take(
        node.level.lift(table, node, f"{node.proto.name}.weights"), _leaves(node, forest, x), axis=0
    )
    combine = {"SUM": hg.sum, "AVERAGE": hg.mean, "MIN": hg.min, "MAX": hg.max}[how]
    return combine(found, axis=1)


def _named_forest(node: Node) -> tuple[_Forest, dict[tuple[int, int], int]]:
    """Return the forest of nodes that are named by tree and number, and their places."""
    trees, ids = node.ints("nodes_treeids") or [], node.ints("nodes_nodeids") or []
    place = {key: number for number, key in enumerate(zip(trees, ids, strict=True))}
    numbers = np.arange(len(trees), dtype=np.int64)
    names = np.array(node.strings("nodes_modes") or [], str)
    known = {str(name): number for number, name in enumerate(_MODES) if number != _MEMBER}
    if unknown := sorted(set(names.tolist()) - known.keys()):
        raise node.broken(f"a node has the mode {unknown[0]!r:.80}")
    modes = np.array([known[one] for one in names.tolist()], np.int64)

    def children(name: str) -> Array:
        given = node.ints(name) or []
        pairs = zip(zip(trees, given, strict=True), modes == _LEAF, numbers, strict=True)
        return np.array([number if is_leaf else place[key] for key, is_leaf, number in pairs], np.int64)

    missing = np.array(node.ints("nodes_missing_value_tracks_true") or [0] * len(trees), bool)
    splits = numbers_of(node, "nodes_values")
    if splits is None or not len(trees):
        raise node.broken("it has no nodes")
    features = np.where(modes == _LEAF, 0, np.array(node.ints("nodes_featureids"), np.int64))
    roots = np.array([trees.index(one) for one in sorted(set(trees))], np.int64)
    arrays = (splits, missing, children("nodes_truenodeids"), children("nodes_falsenodeids"))
    if any(len(one) != len(trees) for one in (modes, features, *arrays)):
        raise node.broken("its lists of nodes have several lengths")
    return _Forest(modes, features, *arrays, roots), place


def _named_weights(node: Node, place: dict[tuple[int, int], int], kind: str) -> tuple[Array, Array, Array]:
    keys = zip(node.ints(f"{kind}_treeids") or [], node.ints(f"{kind}_nodeids") or [], strict=True)
    values = numbers_of(node, f"{kind}_weights")
    at = np.array([place[key] for key in keys], np.int64)
    ids = np.array(node.ints(f"{kind}_ids") or [], np.int64)
    if values is None or not len(at) == len(ids) == len(values):
        raise node.broken("its lists of weights have several lengths")
    return at, ids, values


def _based(node: Node, scores: hg.Value) -> hg.Value:
    base = numbers_of(node, "base_values")
    return scores if base is None or not base.size else scores + base.astype(np.float64)


@rule("TreeEnsembleRegressor")
def _regressor(node: Node) -> Result:
    forest, place = _named_forest(node)
    weights = _named_weights(node, place, "target")
    how = node.string("aggregate_function", "SUM")
    scores = _scores(node, forest, weights, node.int("n_targets", 1), how)
    return cast(transformed(node, _based(node, scores)), "f32")


@rule("TreeEnsembleClassifier")
def _classifier(node: Node) -> Result:
    forest, place = _named_forest(node)
    at, ids, values = _named_weights(node, place, "class")
    labels = node.ints("classlabels_int64s") or node.strings("classlabels_strings") or []
    scores = _scores(node, forest, (at, ids, values), max(len(labels), 1), "SUM")
    if len(labels) < 2:
        raise node.refuse("it has one class")
    base = numbers_of(node, "base_values")
    if len(set(ids.tolist())) == 1:
        # Of two classes, only one has weights: the other has the rest, or the opposite.
        second = scores[:, int(ids[0])][:, None]
        if base is not None and base.size:
            second = second + base.astype(np.float64)[:1]
        has_rest = node.string("post_transform", "NONE") in ("NONE", "PROBIT")
        scores = hg.concat([1.0 - second if has_rest else -second, second], axis=1)
    else:
        scores = _based(node, scores)
    return labelled(node, cast(transformed(node, scores), "f32"), "classlabels_int64s")


@rule("TreeEnsemble")
def _ensemble(node: Node) -> Result:
    """Trees whose leaves have a table of their own."""
    modes = node.level.tensor(node.attribute("nodes_modes")).astype(np.int64)
    splits = node.level.tensor(node.attribute("nodes_splits"))
    weights = node.level.tensor(node.attribute("leaf_weights"))
    count, leaves = len(modes), len(modes) + np.arange(len(weights), dtype=np.int64)

    def with_leaves(own: object, ends: object) -> Array:
        return np.concatenate([np.array(own), np.broadcast_to(np.array(ends), len(leaves))])

    def children(kind: str) -> Array:
        places = np.array(node.ints(f"nodes_{kind}nodeids"), np.int64)
        return with_leaves(places + count * np.array(node.ints(f"nodes_{kind}leafs"), np.int64), leaves)

    forest = _Forest(
        with_leaves(modes, _LEAF),
        with_leaves(node.ints("nodes_featureids"), 0),
        with_leaves(splits, splits.dtype.type(0)),
        with_leaves(node.ints("nodes_missing_value_tracks_true") or [0] * count, 0).astype(bool),
        children("true"),
        children("false"),
        np.array(node.ints("tree_roots"), np.int64),
    )
    if (members := node.attribute("membership_values")) is not None:
        forest = _without_members(forest, node.level.tensor(members).tolist())
    how = ("AVERAGE", "SUM", "MIN", "MAX")[node.int("aggregate_function", 1)]
    ids = np.array(node.ints("leaf_targetids"), np.int64)
    scores = _scores(node, forest, (leaves, ids, weights), node.int("n_targets", 1), how)
    return transformed(node, cast(scores, node.value(0).dtype))


def _without_members(forest: _Forest, values: list[float]) -> _Forest:
    """Replace each test for a set by one for each of its members, which follow one another, with no
    number after each set."""
    modes, features, splits, missing, yes, no = (
        list(one)
        for one in (forest.modes, forest.features, forest.splits, forest.missing, forest.yes, forest.no)
    )
    rest = iter(values)
    for first in np.flatnonzero(forest.modes == _MEMBER).tolist():
        members = list(takewhile(lambda one: one == one, rest)) or [np.nan]
        modes[first], splits[first] = _EQUAL, members[0]
        place, otherwise = first, no[first]
        for member in members[1:]:
            no[place] = place = len(modes)
            for table, entry in (
                (modes, _EQUAL), (features, features[first]), (splits, member),
                (missing, missing[first]), (yes, yes[first]), (no, otherwise),
            ):  # fmt: skip
                table.append(entry)
    tables = (np.array(one) for one in (modes, features, splits, missing, yes, no, forest.roots))
    return _Forest(*tables)
