"""Rules of ops that change shapes and move elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import helper

import heliograph as hg
from heliograph.lowerings import arrays
from heliograph.lowerings.arrays import along, cast, part
from heliograph.onnx.elements import Array, Item, element_of
from heliograph.onnx.node import Node
from heliograph.onnx.rules import rule


@rule("Identity", moves=True)
def _identity(node: Node) -> Item:
    return node.items[0]


@rule("Shape")
def _shape(node: Node) -> Item:
    found = node.shape(0)
    start, stop = node.int("start", 0), node.int("end", len(found))
    return np.array(found[slice(start, stop)], np.int64)


@rule("Size")
def _size(node: Node) -> Item:
    return np.array(math.prod(node.shape(0)), np.int64)


@rule("Reshape", moves=True)
def _reshape(node: Node) -> Item:
    x = node.value(0)
    target: list[int] = node.integers(1) if node.opset >= 5 else (node.ints("shape") or [])
    if not node.int("allowzero", 0):
        if any(one == 0 and place >= x.ndim for place, one in enumerate(target)):
            raise node.broken(f"shape {target} keeps a dimension that {x.shape} lacks")
        target = [x.shape[place] if one == 0 else one for place, one in enumerate(target)]
    if target.count(-1) == 1:
        rest = math.prod(one for one in target if one != -1)
        target[target.index(-1)] = x.size // rest if rest else 0
    return hg.reshape(x, target)


@rule("Flatten", moves=True)
def _flatten(node: Node) -> Item:
    x = node.value(0)
    axis = node.int("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    return hg.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


def _axes(node: Node, place: int = 1) -> list[int] | None:
    return node.integers(place) if node.has(place) else node.ints("axes")


@rule("Squeeze", moves=True)
def _squeeze(node: Node) -> Item:
    x, axes = node.value(0), _axes(node)
    if axes is None:
        gone = {place for place, one in enumerate(x.shape) if one == 1}
    else:
        gone = {node.axis(one, x.ndim) for one in axes}
    if any(x.shape[place] != 1 for place in gone):
        raise node.broken(f"axes {sorted(gone)} of {x.shape} are not all of size 1")
    return hg.reshape(x, [one for place, one in enumerate(x.shape) if place not in gone])


@rule("Unsqueeze", moves=True)
def _unsqueeze(node: Node) -> Item:
    x, axes = node.value(0), _axes(node) or []
    ndim = x.ndim + len(axes)
    places = {node.axis(one, ndim) for one in axes}
    sizes = iter(x.shape)
    return hg.reshape(x, [1 if place in places else next(sizes) for place in range(ndim)])


@rule("Transpose", moves=True)
def _transpose(node: Node) -> Item:
    x = node.value(0)
    order = node.ints("perm")
    return hg.permute_dims(x, order if order is not None else list(range(x.ndim))[::-1])


@rule("Expand", moves=True)
def _expand(node: Node) -> Item:
    x = node.value(0)
    return hg.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(node.integers(1))))


@rule("Tile", moves=True)
def _tile(node: Node) -> Item:
    return hg.tile(node.value(0), node.integers(1))


@rule("Concat", moves=True)
def _concat(node: Node) -> Item:
    values = node.values()
    return hg.concat(values, axis=node.axis(node.int("axis", 1), values[0].ndim))


def pieces(x: hg.Value, axis: int, sizes: Sequence[int]) -> list[hg.Value]:
    """Return parts of x of these sizes along an axis."""
    found, start = [], 0
    for one in sizes:
        found.append(part(x, axis, start, start + one))
        start += one
    return found


@rule("Split", moves=True)
def _split(node: Node) -> Item | tuple[Item, ...]:
    x = node.value(0)
    axis = node.axis(node.int("axis", 0), x.ndim)
    sizes = node.integers(1) if node.has(1) else node.ints("split")
    whole = x.shape[axis]
    if sizes is None:
        count = node.int("num_outputs", node.outputs)
        if count != node.outputs:
            raise node.broken(f"it makes {count} parts, and names {node.outputs} outputs")
        each = -(-whole // count)
        sizes = [max(0, min(each, whole - number * each)) for number in range(count)]
    if sum(sizes) != whole or min(sizes, default=0) < 0:
        raise node.broken(f"parts of {sizes} elements do not add up to {whole}")
    return tuple(pieces(x, axis, sizes))


@rule("Slice", moves=True)
def _slice(node: Node) -> Item:
    x = node.value(0)
    if node.opset < 10:
        starts, stops = node.ints("starts") or [], node.ints("ends") or []
        axes, steps = node.ints("axes"), None
    else:
        starts, stops = node.integers(1), node.integers(2)
        axes = node.integers(3) if node.has(3) else None
        steps = node.integers(4) if node.has(4) else None
    key: list[Any] = [slice(None)] * x.ndim
    for place, start in enumerate(starts):
        axis = node.axis(axes[place] if axes is not None else place, x.ndim)
        step = steps[place] if steps is not None else 1
        stop: int | None = stops[place]
        # Beyond the front, an end counts as before the first element.
        if step < 0 and stop is not None and stop < -x.shape[axis]:
            stop = None
        if step < 0 and start < -x.shape[axis]:
            key[axis] = slice(0, 0)
        else:
            key[axis] = slice(start, stop, step)
    return x[tuple(key)]


@rule("DepthToSpace", moves=True)
def _depth_to_space(node: Node) -> Item:
    x, block = node.value(0), node.int("blocksize")
    n, c, h, w = x.shape
    if node.string("mode", "DCR") == "DCR":
        split_up = hg.reshape(x, (n, block, block, c // block**2, h, w))
        moved = hg.permute_dims(split_up, (0, 3, 4, 1, 5, 2))
    else:
        split_up = hg.reshape(x, (n, c // block**2, block, block, h, w))
        moved = hg.permute_dims(split_up, (0, 1, 4, 2, 5, 3))
    return hg.reshape(moved, (n, c // block**2, h * block, w * block))


@rule("SpaceToDepth", moves=True)
def _space_to_depth(node: Node) -> Item:
    x, block = node.value(0), node.int("blocksize")
    n, c, h, w = x.shape
    split_up = hg.reshape(x, (n, c, h // block, block, w // block, block))
    order = (0, 1, 3, 5, 2, 4) if node.string("mode", "DCR") == "CRD" else (0, 3, 5, 1, 2, 4)
    return hg.reshape(hg.permute_dims(split_up, order), (n, c * block**2, h // block, w // block))


@rule("Pad")
def _pad(node: Node) -> Item:
    """Pad with a value, or with copies of the elements; negative padding cuts off."""
    x = node.value(0)
    pads: list[int] = node.integers(1) if node.opset >= 11 else (node.ints("pads") or [])
    axes = node.integers(3) if node.has(3) else list(range(x.ndim))
    if len(pads) != 2 * len(axes):
        raise node.broken(f"{len(pads)} paddings of {len(axes)} axes")
    low, high = [0] * x.ndim, [0] * x.ndim
    for place, one in enumerate(axes):
        axis = node.axis(one, x.ndim)
        low[axis], high[axis] = pads[place], pads[len(axes) + place]
    x = arrays.crop(x, [max(0, -one) for one in low], [max(0, -one) for one in high])
    low, high = [max(0, one) for one in low], [max(0, one) for one in high]
    mode = node.string("mode", "constant")
    if mode == "constant":
        fill = node.optional(2) if node.opset >= 11 else node.float("value", 0.0)
        return arrays.pad(x, low, high, 0 if fill is None else fill)
    if mode not in ("reflect", "edge", "wrap"):
        raise node.broken(f"there is no mode {mode!r}")
    for axis in range(x.ndim):
        if low[axis] or high[axis]:
            node.room(low[axis] + x.shape[axis] + high[axis])
            places: Array = np.pad(
                np.arange(x.shape[axis]),
                (low[axis], high[axis]),
                mode=mode,  # type: ignore[call-overload]
            )
            x = hg.take(x, places, axis=axis)
    return x


@rule("CenterCropPad")
def _center_crop_pad(node: Node) -> Item:
    x = node.value(0)
    axes = node.ints("axes") or list(range(x.ndim))
    for one, target in zip(axes, node.integers(1), strict=True):
        axis = node.axis(one, x.ndim)
        whole = x.shape[axis]
        if target < whole:
            start = (whole - target) // 2
            x = part(x, axis, start, start + target)
        elif target > whole:
            low, high = [0] * x.ndim, [0] * x.ndim
            low[axis] = (target - whole) // 2
            high[axis] = target - whole - low[axis]
            x = arrays.pad(x, low, high)
    return x


@rule("ReverseSequence")
def _reverse_sequence(node: Node) -> Item:
    x, lengths = node.value(0), cast(node.value(1), "i64")
    time = node.axis(node.int("time_axis", 0), x.ndim)
    batch = node.axis(node.int("batch_axis", 1), x.ndim)
    steps = np.arange(x.shape[time], dtype=np.int64).reshape(along(time, x.ndim))
    wide = hg.reshape(lengths, along(batch, x.ndim))
    places = hg.where(wide > steps, wide - 1 - steps, hg.broadcast_to(x.graph.constant(steps), x.shape))
    return hg.take_along_axis(x, hg.broadcast_to(places, x.shape), axis=time)


@rule("EyeLike")
def _eye_like(node: Node) -> Item:
    rows, columns = node.shape(0)
    element = node.int("dtype", 0) or element_of(node.item(0))
    node.room(rows, columns)
    return np.eye(rows, columns, k=node.int("k", 0)).astype(helper.tensor_dtype_to_np_dtype(element))


@rule("Trilu")
def _triangle(node: Node) -> Item:
    x = node.value(0)
    if not x.size:
        return x
    if node.has(1) and isinstance(node.item(1), hg.Value):
        rows, columns = (np.arange(size, dtype=np.int64) for size in x.shape[-2:])
        above = node.graph.constant(columns - rows[:, None]) - hg.reshape(node.value(1), ())
        return hg.where(above >= 0 if node.int("upper", 1) else above <= 0, x, hg.zeros_like(x))
    k = node.integer(1) if node.has(1) else 0
    # Beyond a matrix, all diagonals are alike.
    k = max(-x.shape[-2] - 1, min(k, x.shape[-1] + 1))
    return hg.triu(x, k=k) if node.int("upper", 1) else hg.tril(x, k=k)


@rule("ConstantOfShape", "Range")
def _constant_of_shape(node: Node) -> Item:
    """Fold, which has happened unless an input is not constant or the result is large."""
    for place in range(len(node.items)):
        node.array(place)
    if node.op == "Range":
        start, limit, step = (node.array(place).item() for place in range(3))
        if not step:
            raise node.broken("its step is 0")
        count = max(0, math.ceil((limit - start) / step))
        node.room(count)
        return hg.astype(hg.arange(start, limit, step, graph=node.graph), node.array(0).dtype)
    found = node.attribute("value")
    array = np.zeros(1, np.float32) if found is None else node.level.tensor(found)
    if array.size != 1:
        raise node.broken("its value is not one element")
    return hg.broadcast_to(node.graph.constant(array.reshape(())), node.integers(0))


@rule("MelWeightMatrix")
def _host_only(node: Node) -> Item:
    """Demand constants, which the host computes with."""
    for place in range(len(node.items)):
        node.array(place)
    raise node.refuse("it is too large to be computed on the host")
