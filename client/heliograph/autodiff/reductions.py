"""Rules of reductions, and of sums and products along rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from heliograph.autodiff.step import Rule, Step, composed, each
from heliograph.functions.elementwise import where
from heliograph.graph.lowering import apply, axes_of, cast, permute, reshape, reverse
from heliograph.graph.value import Value
from heliograph_proto.types import I64


def _spread(step: Step, reduced: Value) -> Value:
    """A value in the shape of the result, as wide as the operand."""
    x = step[0]
    axes = axes_of(x, step.attributes.get("axes", ()) or None)
    kept = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    return apply("broadcast_to", reshape(reduced, kept), shape=x.shape)


def _extreme(step: Step, g: Value) -> Value:
    """Equal largest or smallest elements share the gradient."""
    x = step[0]
    chosen = cast(x == _spread(step, step.result), g.dtype)
    axes = axes_of(x, step.attributes["axes"] or None)
    count = apply("reduce_sum", chosen, axes=axes, keepdims=True)
    return _spread(step, g) * chosen / count


def _product(attributes: Mapping[str, Any], x: Value) -> Value:
    axes = axes_of(x, attributes["axes"] or None)
    others = [axis for axis in range(x.ndim) if axis not in axes]
    count = math.prod(x.shape[axis] for axis in axes)
    shape = [x.shape[axis] for axis in others]
    if not count:
        return x.graph.full(shape, 1.0, x.dtype)
    rows = reshape(permute(x, [*others, *axes]), (*shape, count))
    found = apply("cumprod", rows)[..., -1]
    kept = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    return reshape(found, kept) if attributes["keepdims"] else found


def _sums_from(x: Value) -> Value:
    """The sum of each row from each element on."""
    last = (x.ndim - 1,)
    return reverse(apply("cumsum", reverse(x, last)), last)


def _cumprod(step: Step, g: Value) -> Value:
    """By division; the first 0 of a row is left out of its products instead."""
    x, y = step[0], step.result
    is_zero = x == 0.0
    is_first = is_zero & (apply("cumsum", cast(is_zero, I64)) == 1)
    without = apply("cumprod", where(is_first, 1.0, x))
    by_division = _sums_from(g * y) / where(is_zero, 1.0, x)
    return where(is_first, _sums_from(g * without), by_division)


_MEAN = each(lambda step, g: _spread(step, g) / float(step[0].size // max(1, g.size)))
_SUM = each(_spread)
_OF_ROWS = each(lambda step, g: apply("broadcast_to", g, shape=step[0].shape))

RULES: Mapping[str, Rule] = {
    "reduce_sum": _SUM,
    "reduce_mean": _MEAN,
    "reduce_prod": composed(_product),
    "reduce_max": each(_extreme),
    "reduce_min": each(_extreme),
    "sum": _SUM,
    "sum_rows": _OF_ROWS,
    "mean": each(lambda step, g: apply("broadcast_to", g, shape=step[0].shape) / float(step[0].shape[-1])),
    "cumsum": each(lambda step, g: _sums_from(g)),
    "cumprod": each(_cumprod),
}
