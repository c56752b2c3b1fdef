"""Rules of moves, views, gathers, and ops that write rows and blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from heliograph.autodiff.step import Gradients, Rule, Step, composed, each, picked, zeros
from heliograph.functions.elementwise import where
from heliograph.graph.lowering import apply, cast, permute, reshape
from heliograph.graph.value import Value
from heliograph_proto.types import F32


def _concat(step: Step, g: Value) -> Gradients:
    axis = step.attributes["axis"] % g.ndim
    ends = np.cumsum([one.shape[axis] for one in step.operands]).tolist()
    before = (slice(None),) * axis
    return {
        place: g[(*before, slice(ends[place] - step[place].shape[axis], ends[place]))]
        for place in step.wanted
    }


def _permute(step: Step, g: Value) -> Value:
    axes = [axis % g.ndim for axis in step.attributes["axes"]]
    return permute(g, [axes.index(axis) for axis in range(g.ndim)])


def _slice(step: Step, g: Value) -> Value:
    start, by, shape = step.attributes["start"], step.attributes["step"], step[0].shape
    if not g.size:
        return zeros(g, shape)
    if all(one == 1 for one in by):
        right = [whole - at - size for whole, at, size in zip(shape, start, g.shape, strict=True)]
        return apply("pad", g, left=tuple(start), right=tuple(right))
    return apply("set", zeros(g, shape), g, start=tuple(start), step=tuple(by))


def _rows_at(step: Step, g: Value) -> Value:
    """The part of a result's gradient at the rows that set_rows wrote, and wrote over by no later
    one."""
    indices, count = _all_indices(step), step[1].shape[-2]
    lead = step[1].shape[:-2]
    number = reshape(g.graph.constant(np.arange(count), F32), (count, 1))
    numbers = apply("broadcast_to", number, shape=(*lead, count, 1))
    last = apply("set_rows", zeros(number, (*g.shape[:-1], 1)), numbers, step[2])
    is_last = apply("get_rows", last, indices) == numbers
    return where(is_last, apply("get_rows", g, indices), 0.0)


def _all_indices(step: Step) -> Value:
    """The indices of set_rows for every matrix, of which few may serve many."""
    rows, indices = step[1], step[2]
    shape = rows.shape[:-1]
    return indices if indices.shape == shape else apply("repeat", indices, shape=shape)


def _rows_elsewhere(step: Step, g: Value) -> Value:
    return apply("set_rows", g, zeros(g, step[1].shape), step[2])


def _extreme_rows(step: Step, g: Value) -> Gradients:
    """Equal largest or smallest elements, of the target and of rows, share the gradient."""
    target, rows, _ = step.operands
    g = cast(g, target.dtype)
    is_target = cast(target == step.result, target.dtype)
    is_row = cast(_at(step, step.result) == rows, rows.dtype)
    share = g / apply("add_rows", is_target, is_row, step[2])
    found = {0: share * is_target, 1: _at(step, share) * is_row}
    return {place: found[place] for place in step.wanted}


def _at(step: Step, x: Value) -> Value:
    """The rows of x at the indices, in the data type of x."""
    return cast(apply("get_rows", x, _all_indices(step)), x.dtype)


def _product_target(step: Step, g: Value) -> Value:
    ones = g.graph.full(g.shape, 1.0, g.dtype)
    return g * apply("mul_rows", ones, step[1], step[2])


def _product_rows(step: Step, g: Value) -> Value:
    """The product of all others: by division, of which zeros are left out."""
    target, rows, indices = step.operands
    is_zero = rows == 0.0
    zeros_at = apply("add_rows", zeros(target), cast(is_zero, rows.dtype), indices)
    product = apply("mul_rows", target, where(is_zero, 1.0, rows), indices)
    others = _at(step, g * product) / where(is_zero, 1.0, rows)
    zeros_of_others = _at(step, zeros_at) - cast(is_zero, rows.dtype)
    return where(zeros_of_others == 0.0, others, 0.0)


def _block(step: Step, g: Value) -> Value:
    """The part of a gradient at the block that acc and set write."""
    part, start = step[1], step.attributes["start"]
    by = step.attributes["step"] or (1,) * part.ndim
    if not part.size:
        return zeros(g, part.shape)
    stop = [at + (size - 1) * one + 1 for at, size, one in zip(start, part.shape, by, strict=True)]
    return apply("slice", g, start=tuple(start), stop=tuple(stop), step=tuple(by))


def _outside_block(step: Step, g: Value) -> Value:
    attributes = {name: step.attributes[name] for name in ("start", "step")}
    return apply("set", g, zeros(g, step[1].shape), **attributes)


def _add_id_biases(step: Step, g: Value) -> Value:
    rows = reshape(g, (math.prod(g.shape[:-1]), g.shape[-1]))
    return apply("get_rows_back", rows, reshape(step[2], (step[2].size,)), rows=step[1].shape[0])


def _diagonal(step: Step, g: Value) -> Value:
    eye = g.graph.constant(np.eye(g.shape[-1]), g.dtype) if g.shape[-1] else zeros(g)
    return reshape(apply("reduce_sum", g * eye, axes=(-2,), keepdims=False), step[0].shape)


def _pad(step: Step, g: Value) -> Value:
    left, shape = step.attributes["left"], step[0].shape
    stop = tuple(at + size for at, size in zip(left, shape, strict=True))
    return apply("slice", g, start=tuple(left), stop=stop, step=(1,) * len(shape))


def _circular(attributes: Mapping[str, Any], x: Value) -> Value:
    for axis, (left, right) in enumerate(zip(attributes["left"], attributes["right"], strict=True)):
        if left or right:
            size = x.shape[axis]
            x = picked(x, [place % size for place in range(-left, size + right)], axis)
    return x


_WRAPPED = composed(_circular)


def _padded(step: Step, g: Value) -> Gradients:
    return _WRAPPED(step, g) if step.attributes["circular"] else each(_pad)(step, g)


def _reflected(attributes: Mapping[str, Any], x: Value) -> Value:
    size = x.shape[-1]
    places = [abs(place) for place in range(-attributes["left"], size + attributes["right"])]
    return picked(x, [place if place < size else 2 * size - 2 - place for place in places], x.ndim - 1)


def _relative(attributes: Mapping[str, Any], x: Value) -> Value:
    size = (x.shape[0] + 1) // 2
    places = [size - 1 + row - column for row in range(size) for column in range(size)]
    return reshape(picked(x, places, 0), (size, size, x.shape[1]))


def _add_relative(attributes: Mapping[str, Any], x: Value, columns: Value, rows: Value) -> Value:
    split = reshape(x, (*columns.shape, columns.shape[-1]))
    wide = split + reshape(rows, (*rows.shape, 1))
    return reshape(wide + reshape(columns, (*columns.shape[:-1], 1, columns.shape[-1])), x.shape)


RULES: Mapping[str, Rule] = {
    "cpy": each(lambda step, g: reshape(g, step[0].shape)),
    "cont": each(lambda step, g: g),
    "concat": _concat,
    "reshape": each(lambda step, g: reshape(g, step[0].shape)),
    "permute": each(_permute),
    "broadcast_to": each(lambda step, g: g),
    "slice": each(_slice),
    "assign": each(None, lambda step, g: g),
    "get_rows": each(lambda step, g: apply("get_rows_back", g, step[1], rows=step[0].shape[-2])),
    "get_rows_back": each(lambda step, g: apply("get_rows", g, step[1])),
    "set_rows": each(_rows_elsewhere, _rows_at),
    "add_rows": each(lambda step, g: g, lambda step, g: _at(step, g)),
    "mul_rows": each(_product_target, _product_rows),
    "max_rows": _extreme_rows,
    "min_rows": _extreme_rows,
    "add1": each(
        lambda step, g: g,
        lambda step, g: reshape(apply("reduce_sum", g, axes=(), keepdims=False), step[1].shape),
    ),
    "add_id": each(lambda step, g: g, _add_id_biases),
    "acc": each(lambda step, g: g, _block),
    "set": each(_outside_block, _block),
    "diag": each(_diagonal),
    "diag_mask_inf": each(lambda step, g: apply("diag_mask_zero", g, **step.attributes)),
    "diag_mask_zero": each(lambda step, g: apply("diag_mask_zero", g, **step.attributes)),
    "tri": each(lambda step, g: apply("tri", g, **step.attributes)),
    "repeat": each(lambda step, g: apply("repeat_back", g, shape=step[0].shape)),
    "repeat_back": each(lambda step, g: apply("repeat", g, shape=step[0].shape)),
    "pad": _padded,
    "pad_reflect_1d": composed(_reflected),
    "roll": each(lambda step, g: apply("roll", g, shifts=tuple(-one for one in step.attributes["shifts"]))),
    "win_part": each(lambda step, g: apply("win_unpart", g, height=step[0].shape[0], width=step[0].shape[1])),
    "win_unpart": each(lambda step, g: apply("win_part", g, window=step[0].shape[1])),
    "get_rel_pos": composed(_relative),
    "add_rel_pos": composed(_add_relative),
}
