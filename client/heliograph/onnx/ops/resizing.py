"""Rules of ops that resize and sample images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import numpy as np

import heliograph as hg
from heliograph.lowerings.arrays import cast, channels, is_integer, part
from heliograph.lowerings.resampling import Resampling, blank, outside, resample
from heliograph.lowerings.sampling import Border, sample, weighted
from heliograph.onnx.elements import Item
from heliograph.onnx.node import Node
from heliograph.onnx.ops.convolutions import groups_of, window_of
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


@rule("RoiAlign")
def _roi_align(node: Node) -> Item:
    """Sample regions of images at the points of a grid, and pool these."""
    x, regions = node.value(0), node.value(1)
    height, width = node.int("output_height", 1), node.int("output_width", 1)
    ratio = node.int("sampling_ratio", 0)
    if ratio < 1:
        raise node.refuse("the number of its samples depends on the regions (sampling_ratio=0)")
    node.room(height, width, ratio, ratio)
    is_half = node.opset >= 16 and node.string("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    corners = regions * node.float("spatial_scale", 1.0) - (0.5 if is_half else 0.0)
    lines, outside = [], []
    for start, count, size in ((1, height, x.shape[2]), (0, width, x.shape[3])):
        low = corners[:, start : start + 1]
        span = corners[:, start + 2 : start + 3] - low
        span = span if is_half else hg.maximum(span, 1.0)
        steps = ((np.arange(count * ratio) + 0.5) / ratio / count).astype(x.dtype.numpy)
        line = low + span * steps
        lines.append(line)
        outside.append((line < -1.0) | (line > float(size)))
    shape = (regions.shape[0], height * ratio, width * ratio)
    rows, columns = hg.expand_dims(lines[0], axis=2), hg.expand_dims(lines[1], axis=1)
    flat = (shape[0], shape[1] * shape[2])
    places = [hg.reshape(hg.broadcast_to(one, shape), flat) for one in (rows, columns)]
    blank = hg.reshape(hg.expand_dims(outside[0], axis=2) | hg.expand_dims(outside[1], axis=1), flat)
    terms = list(weighted(x, places, "linear", Border("border"), node.value(2)))
    is_max = node.string("mode", "avg") == "max"
    # The largest is that of the weighted elements, as in the op's reference.
    found = reduce(hg.maximum if is_max else hg.add, terms)
    found = hg.where(hg.expand_dims(blank, axis=2), 0.0, found)
    grid = hg.reshape(found, (shape[0], height, ratio, width, ratio, x.shape[1]))
    pooled = (hg.max if is_max else hg.mean)(grid, axis=(2, 4))
    return hg.permute_dims(pooled, (0, 3, 1, 2))


@rule("DeformConv")
def _deform_conv(node: Node) -> Item:
    """Sample the data at shifted places of each window, and multiply with the weights."""
    x, weights, offset = node.value(0), node.value(1), node.value(2)
    if x.ndim != 4:
        raise node.refuse(f"it convolves data of {x.ndim} dimensions; 4 are computed")
    window = window_of(node, x.shape[2:], weights.shape[2:])
    groups, shifts = groups_of(node, x, weights), node.int("offset_group", 1)
    node.parts(shifts)
    taps, outputs = math.prod(window.kernel), offset.shape[2:]
    points = math.prod(outputs)
    node.room(taps, points)
    offsets = hg.reshape(offset, (x.shape[0], shifts, taps, 2, points))
    bases = []
    for axis in range(2):
        steps = np.arange(outputs[axis]) * window.stride[axis] - window.low[axis]
        inner = np.arange(window.kernel[axis]) * window.dilation[axis]
        tap = inner[:, None] if axis == 0 else inner[None, :]
        out = steps[:, None] if axis == 0 else steps[None, :]
        taps_line = np.broadcast_to(tap, window.kernel).reshape(-1, 1)
        bases.append((taps_line + np.broadcast_to(out, outputs).reshape(1, -1)).astype(x.dtype.numpy))
    mask = hg.reshape(node.value(4), (x.shape[0], shifts, 1, taps * points)) if node.has(4) else None
    channels_of, sampled = x.shape[1] // shifts, []
    for number in range(shifts):
        places = [
            hg.reshape(offsets[:, number, :, axis] + bases[axis], (x.shape[0], taps * points))
            for axis in range(2)
        ]
        one = part(x, 1, number * channels_of, (number + 1) * channels_of)
        found = sample(one, places, "linear", Border("zeros"))
        sampled.append(found if mask is None else found * mask[:, number])
    wide = hg.concat(sampled, axis=1) if shifts > 1 else sampled[0]
    columns = hg.reshape(wide, (x.shape[0], groups, x.shape[1] // groups * taps, points))
    kernel = hg.reshape(weights, (groups, weights.shape[0] // groups, weights.shape[1] * taps))
    result = hg.reshape(hg.matmul(kernel, columns), (x.shape[0], weights.shape[0], *outputs))
    return result + channels(node.value(3), 4) if node.has(3) else result
