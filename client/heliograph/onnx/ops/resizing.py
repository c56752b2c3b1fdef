"""Rules of ops that resize and sample images."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

import heliograph as hg
from heliograph.lowerings.arrays import cast, is_integer
from heliograph.lowerings.resampling import Resampling, blank, outside, resample
from heliograph.lowerings.sampling import Border, sample
from heliograph.onnx.elements import Item
from heliograph.onnx.node import Node
from heliograph.onnx.rules import rule

_MODES = {"bilinear": "linear", "bicubic": "cubic"}


@rule("Upsample")
def _upsample(node: Node) -> Item:
    x = node.value(0)
    scales = [float(one) for one in node.array(1)] if node.opset >= 9 else node.floats("scales")
    return _resized(node, x, range(x.ndim), scales or [], None, None)


@rule("Resize")
def _resize(node: Node) -> Item:
    x = node.value(0)
    if node.opset < 11:
        return _resized(node, x, range(x.ndim), [float(one) for one in node.array(1)], None, None)
    axes = [node.axis(one, x.ndim) for one in node.ints("axes") or range(x.ndim)]
    region = [float(one) for one in node.array(1)] if node.has(1) else None
    scales = [float(one) for one in node.array(2)] if node.has(2) else []
    if scales or not node.has(3):
        return _resized(node, x, axes, scales, None, region)
    sizes = node.integers(3)
    policy = node.string("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch" and len(sizes) == len(axes):
        ratios = [size / x.shape[axis] for size, axis in zip(sizes, axes, strict=True)]
        ratio = min(ratios) if policy == "not_larger" else max(ratios)
        sizes = [int(ratio * x.shape[axis] + 0.5) for axis in axes]
        return _resized(node, x, axes, [ratio] * len(axes), sizes, region)
    return _resized(node, x, axes, [], sizes, region)


def _resized(
    node: Node,
    x: hg.Value,
    axes: Sequence[int],
    scales: list[float],
    sizes: list[int] | None,
    region: list[float] | None,
) -> hg.Value:
    """Resize along each axis by itself."""
    if len(sizes if sizes is not None else scales) != len(axes):
        raise node.broken(f"{len(axes)} axes with {len(scales)} scales and {len(sizes or [])} sizes")
    found = cast(x, "f32") if is_integer(x) else x
    gone = []
    for place, axis in enumerate(axes):
        whole = x.shape[axis]
        count = sizes[place] if sizes is not None else math.floor(whole * scales[place])
        scale = scales[place] if scales else count / whole
        how = _how(node, region, place, len(axes))
        crops = how.coordinates == "tf_crop_and_resize"
        if count < 0 or not scale > 0 or not math.isfinite(scale):
            raise node.broken(f"{whole} elements by {scale} to {count}")
        if (count, scale) == (whole, 1.0) and not crops:
            continue
        node.room(count)
        found = resample(found, axis, how, scale, count)
        if crops:
            gone.append((axis, outside(how, whole, scale, count)))
    for axis, mask in gone:
        if mask.any():
            found = blank(found, axis, mask, node.float("extrapolation_value", 0.0))
    if is_integer(x) and node.string("mode", "nearest") != "nearest":
        limits = np.iinfo(x.dtype.numpy)
        found = hg.clip(hg.round(found), float(limits.min), float(limits.max))
    return cast(found, x.dtype)


def _how(node: Node, region: list[float] | None, place: int, count: int) -> Resampling:
    mode = node.string("mode", "nearest")
    old = node.op == "Upsample" or node.opset < 11
    found = Resampling(
        mode=_MODES.get(mode, mode),
        coordinates=node.string("coordinate_transformation_mode", "asymmetric" if old else "half_pixel"),
        rounding=node.string("nearest_mode", "floor" if old else "round_prefer_floor"),
        cubic=node.float("cubic_coeff_a", -0.75),
        exclude_outside=bool(node.int("exclude_outside", 0)),
        antialias=bool(node.int("antialias", 0)),
        region=(region[place], region[count + place]) if region else (0.0, 1.0),
    )
    if found.mode not in ("nearest", "linear", "cubic"):
        raise node.broken(f"there is no mode {mode!r:.40}")
    return found


@rule("GridSample")
def _grid_sample(node: Node) -> Item:
    x, grid = node.value(0), node.value(1)
    mode = node.string("mode", "linear")
    corners = bool(node.int("align_corners", 0))
    border = Border(node.string("padding_mode", "zeros"), corners)
    sizes, ndim = x.shape[2:], x.ndim - 2
    shape = grid.shape[1:-1]
    flat = hg.reshape(grid, (x.shape[0], math.prod(shape), ndim))
    places = []
    for axis, size in enumerate(sizes):
        one = flat[:, :, ndim - 1 - axis]
        places.append((one + 1) * ((size - 1) / 2) if corners else ((one + 1) * size - 1) / 2.0)
    found = sample(x, places, _MODES.get(mode, mode), border)
    return hg.reshape(found, (*x.shape[:2], *shape))
