"""Where each value lies: in storage of its own, or as a view of another value's.

A view op shares its source's bytes when strides can express it; a reshape that they cannot express
becomes a copy. So does a view of a variable that a later node assigns to: what was read before the
assignment keeps the old value. The result of an assignment lies in the variable itself, unless it is read
and the variable is assigned to again later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heliograph_proto.graph import Graph, LeafKind
from heliograph_proto.ops import OPS
from heliograph_proto.types import TensorType

Strides = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A value's bytes: `root` is the value that owns the storage."""

    root: int
    offset_bytes: int
    strides: Strides


def place_values(graph: Graph) -> tuple[Place, ...]:
    """The place of every value, leaves first. A value with root == its own number owns storage."""
    assigned = last_assignments(graph)
    read = read_values(graph) if assigned else frozenset()
    places = [Place(value, 0, leaf.type.strides) for value, leaf in enumerate(graph.leaves)]
    for number, node in enumerate(graph.nodes):
        value = len(graph.leaves) + number
        place = None
        if node.op == "assign":
            if assigned[node.operands[0]] == number or value not in read:
                place = places[node.operands[0]]
        elif OPS[node.op].is_view:
            source = places[node.operands[0]]
            if assigned.get(source.root, -1) < number:
                source_type = graph.type_of(node.operands[0])
                place = view(node.op, node.attributes, source_type, node.type, source)
        places.append(place or Place(value, 0, node.type.strides))
    return tuple(places)


def read_values(graph: Graph) -> frozenset[int]:
    """Every value that is an operand or an output."""
    operands = (value for node in graph.nodes for value in node.operands)
    return frozenset(operands) | {output.value for output in graph.outputs}


def last_assignments(graph: Graph) -> dict[int, int]:
    """For each variable that is assigned to, by value number: the last node that does."""
    return {node.operands[0]: number for number, node in enumerate(graph.nodes) if node.op == "assign"}


def assigned_variables(graph: Graph) -> frozenset[str]:
    """Names of the variables that a run writes."""
    return frozenset(
        graph.leaves[value].name
        for value in last_assignments(graph)
        if graph.leaves[value].kind is LeafKind.VARIABLE
    )


def view(
    op: str, attributes: Mapping[str, Any], source: TensorType, result: TensorType, place: Place
) -> Place | None:
    """The place of a view op's result in its source's storage; None if strides cannot express it."""
    strides: Strides | None
    offset = place.offset_bytes
    match op:
        case "reshape":
            strides = reshape_strides(source.shape, place.strides, result.shape)
        case "permute":
            strides = tuple(place.strides[axis] for axis in attributes["axes"])
        case "broadcast_to":
            strides = broadcast_strides(source.shape, place.strides, result.shape)
        case _:
            starts, steps = attributes["start"], attributes["step"]
            offset += sum(a * b for a, b in zip(starts, place.strides, strict=True))
            strides = tuple(a * b for a, b in zip(steps, place.strides, strict=True))
    return None if strides is None else Place(place.root, offset if result.size else 0, strides)


def broadcast_strides(shape: tuple[int, ...], strides: Strides, target: tuple[int, ...]) -> Strides:
    """Strides with which a tensor reads as the target shape; 0 where it repeats."""
    extra = len(target) - len(shape)
    kept = (0 if size == 1 else step for size, step in zip(shape, strides, strict=True))
    return (0,) * extra + tuple(kept)


def reshape_strides(shape: tuple[int, ...], strides: Strides, target: tuple[int, ...]) -> Strides | None:
    """Strides of a reshape that moves nothing; None if there are none.

    Both shapes are cut into runs of dimensions with equal products; within a run the old dimensions
    must be contiguous among themselves, then the new ones are laid out over them.
    """
    if 0 in target:
        return (0,) * len(target)
    old = [(size, step) for size, step in zip(shape, strides, strict=True) if size != 1]
    result: list[int] = []
    new = list(target)
    while new:
        if new[0] == 1:
            new.pop(0)
            result.append(0)
            continue
        run = _take_run(old, new)
        if run is None:
            return None
        result.extend(run)
    return tuple(result)


def _take_run(old: list[tuple[int, int]], new: list[int]) -> list[int] | None:
    """Takes the shortest runs of equal products off both lists; the new run's strides, or None."""
    old_run, new_run = [old.pop(0)], [new.pop(0)]
    while (have := math.prod(size for size, _ in old_run)) != (want := math.prod(new_run)):
        if have < want:
            old_run.append(old.pop(0))
        else:
            new_run.append(new.pop(0))
    for (_, outer_step), (size, step) in zip(old_run, old_run[1:], strict=False):
        if outer_step != size * step:
            return None
    strides, step = [], old_run[-1][1]
    for size in reversed(new_run):
        strides.append(step)
        step *= size
    return strides[::-1]
