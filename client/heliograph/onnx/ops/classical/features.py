"""Rules of ops that prepare features."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx import TensorProto

import heliograph as hg
from heliograph.lowerings.arrays import cast
from heliograph.onnx.elements import Array, Coded, Item, Maps
from heliograph.onnx.node import Node
from heliograph.onnx.ops.classical.models import features_of
from heliograph.onnx.rules import rule


@rule("Scaler")
def _scale(node: Node) -> Item:
    x = features_of(node)
    offset, scale = (np.array(node.floats(one) or [0.0], x.dtype.numpy) for one in ("offset", "scale"))
    return cast((x - offset) * scale, "f32")


@rule("Normalizer")
def _normalize(node: Node) -> Item:
    x, norm = features_of(node), node.string("norm", "MAX")
    sizes = {
        "MAX": lambda: hg.max(hg.abs(x), axis=1, keepdims=True),
        "L1": lambda: hg.sum(hg.abs(x), axis=1, keepdims=True),
        "L2": lambda: hg.sqrt(hg.sum(x * x, axis=1, keepdims=True)),
    }
    if norm not in sizes:
        raise node.broken(f"norm is {norm!r:.80}")
    return cast(x / hg.maximum(sizes[norm](), 1e-30), "f32")


@rule("Binarizer")
def _binarize(node: Node) -> Item:
    x = node.value(0)
    return cast(x > node.float("threshold", 0.0), x.dtype)


@rule("Imputer")
def _impute(node: Node) -> Item:
    """Replace a value, which may be no number, by another one of each column."""
    x = node.value(0)
    if node.floats("imputed_value_floats"):
        wanted: float = node.float("replaced_value_float", 0.0)
        values = np.array(node.floats("imputed_value_floats"))
    else:
        wanted = node.int("replaced_value_int64", 0)
        values = np.array(node.ints("imputed_value_int64s") or [0])
    found = hg.isnan(x) if math.isnan(wanted) else x == wanted
    return hg.where(found, hg.broadcast_to(node.graph.constant(values.astype(x.dtype.numpy)), x.shape), x)


@rule("ArrayFeatureExtractor", moves=True)
def _extract(node: Node) -> Item:
    """Pick elements along the last axis."""
    x, places = node.value(0), hg.flatten(cast(node.value(1), "i64"))
    found = hg.take(x, places, axis=-1)
    return hg.reshape(found, (1, found.size)) if x.ndim == 1 else found


@rule("FeatureVectorizer")
def _join(node: Node) -> Item:
    """Join columns, of each input so many as an attribute says."""
    parts = []
    for x, width in zip(node.values(), node.ints("inputdimensions") or [], strict=True):
        rows = cast(hg.reshape(x, (x.shape[0], -1)), "f32")
        parts.append(hg.ops.pad(rows, left=(0, 0), right=(0, max(0, width - rows.shape[1])))[:, :width])
    return hg.concat(parts, axis=1)


@rule("OneHotEncoder")
def _one_hot(node: Node) -> Item:
    classes = node.ints("cats_int64s")
    if not classes:
        raise node.refuse("its categories are strings, which no device has")
    if not node.int("zeros", 1):
        raise node.refuse("it fails for an element without a category")
    x = cast(node.value(0), "i64")
    return cast(hg.expand_dims(x, axis=-1) == np.array(classes, np.int64), "f32")


@rule("LabelEncoder")
def _encode(node: Node) -> Item:
    """Map numbers or strings to others; of a key that comes twice, the last one counts."""
    item, keys, values = node.item(0), _table(node, "keys"), _table(node, "values")
    if len(keys) != len(values):
        raise node.broken(f"it has {len(keys)} keys and {len(values)} values")
    known = dict(zip(keys.tolist(), values.tolist(), strict=True))
    if isinstance(item, Coded):
        assert item.names is not None
        default = _default(node, values)
        table = np.array([known.get(one, default) for one in item.names], values.dtype)
        return _picked(node, table, item.codes)
    x = node.value(0)
    ordered = np.array(sorted(known), x.dtype.numpy)
    table = np.array([*(known[one] for one in sorted(known)), _default(node, values)], values.dtype)
    place = hg.minimum(hg.searchsorted(node.graph.constant(ordered), hg.flatten(x)), len(ordered) - 1)
    found = hg.take(node.graph.constant(ordered), place, axis=0) == hg.flatten(x)
    return _picked(node, table, hg.reshape(hg.where(found, place, len(ordered)), x.shape))


def _table(node: Node, kind: str) -> Array:
    tensor = node.attribute(f"{kind}_tensor")
    if tensor is not None:
        return node.level.tensor(tensor)
    if (floats := node.floats(f"{kind}_floats")) is not None:
        return np.array(floats, np.float32)
    if (integers := node.ints(f"{kind}_int64s")) is not None:
        return np.array(integers, np.int64)
    return np.array(node.strings(f"{kind}_strings") or [], object)


def _default(node: Node, values: Array) -> Any:
    tensor = node.attribute("default_tensor")
    if tensor is not None:
        return node.level.tensor(tensor).item()
    if values.dtype.kind == "f":
        return node.float("default_float", -0.0)
    return (
        node.int("default_int64", -1)
        if values.dtype.kind == "i"
        else node.string("default_string", "_Unused")
    )


def _picked(node: Node, table: Array, places: hg.Value) -> Item:
    if table.dtype.kind == "O":
        return Coded(places, TensorProto.STRING, table)
    return hg.take(node.graph.constant(table), places, axis=0)


@rule("ZipMap")
def _zip(node: Node) -> Item:
    """Make a dictionary of each row."""
    labels = node.ints("classlabels_int64s") or node.strings("classlabels_strings") or []
    x = node.value(0)
    if x.ndim != 2 or x.shape[1] != len(labels):
        raise node.broken(f"it has {len(labels)} labels for a tensor of shape {list(x.shape)}")
    return Maps(x, tuple(labels))
