"""One node on the way back from a loss, and the forms that rules have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from heliograph.graph import lowering as lowering
from heliograph.graph.value import Value
from heliograph_proto.types import F32

#: The gradients of a node's operands, by the operand's place.
Gradients: TypeAlias = Mapping[int, Value]


@dataclass(frozen=True, slots=True)
class Step:
    """A node whose result has a gradient, and the operands whose gradients are wanted."""

    operands: tuple[Value, ...]
    result: Value
    attributes: Mapping[str, Any]
    #: The places of the operands whose gradients are wanted.
    wanted: tuple[int, ...]
    #: Gradients of values, given a result that is made of them and its gradient, by nodes from a
    #: number on.
    pull_back: Callable[[Value, Value, Sequence[Value], int], dict[int, Value]]

    def __getitem__(self, place: int) -> Value:
        return self.operands[place]


#: The gradients of operands, given that of the result.
Rule: TypeAlias = Callable[[Step, Value], Gradients]
#: The gradient of one operand.
Part: TypeAlias = Callable[[Step, Value], Value]
#: A node's result as a graph of ops that have rules, from the operands and the attributes.
Forward: TypeAlias = Callable[..., Value]


def each(*parts: Part | None) -> Rule:
    """Return the rule with one function for each operand; None: no gradient reaches it."""

    def rule(step: Step, gradient: Value) -> Gradients:
        found = {place: parts[place] for place in step.wanted if place < len(parts)}
        return {place: part(step, gradient) for place, part in found.items() if part is not None}

    return rule


def composed(forward: Forward) -> Rule:
    """Return the rule of an op that is a composition of others, which differentiates those.

    `forward` takes the attributes and the operands, of which narrow floats and blocks come as f32.
    """

    def rule(step: Step, gradient: Value) -> Gradients:
        begin = len(gradient.graph._nodes)
        operands = [widened(one) for one in step.operands]
        first: dict[int, int] = {}
        for place in step.wanted:
            first.setdefault(operands[place].reference, place)
        result = forward(step.attributes, *operands)
        seed = gradient if gradient.dtype is result.dtype else lowering.cast(gradient, result.dtype)
        found = step.pull_back(result, seed, [operands[place] for place in first.values()], begin)
        return {first[reference]: one for reference, one in found.items()}

    return rule


def widened(x: Value) -> Value:
    """Return narrow floats and blocks as f32, and other values as they are."""
    is_wide = x.dtype.name in ("f32", "f64") or not (x.dtype.is_float or x.dtype.kind == "quantized")
    return x if is_wide else lowering.cast(x, F32)


def fitted(gradient: Value, like: Value) -> Value:
    """Return a gradient in the type of its value: summed over broadcast dimensions, and cast."""
    extra = gradient.ndim - like.ndim
    axes = [axis for axis in range(gradient.ndim) if axis < extra or like.shape[axis - extra] == 1]
    axes = [axis for axis in axes if axis < extra or gradient.shape[axis] != 1]
    if axes:
        gradient = lowering.reduce("reduce_sum", gradient, axes, keepdims=False)
    return lowering.cast(lowering.reshape(gradient, like.shape), like.dtype)


def zeros(like: Value, shape: Sequence[int] | None = None) -> Value:
    """Return zeros in the data type of a value, and in its shape unless another is given."""
    return like.graph.full(like.shape if shape is None else shape, 0.0, like.dtype)


def picked(x: Value, places: Sequence[int], axis: int) -> Value:
    """Return the elements at constant places along an axis."""
    return lowering.gather(x, x.graph.constant(np.asarray(places, np.int32).reshape(-1)), axis)
