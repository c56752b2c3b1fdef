"""Inputs of a graph: given elements, checked, or seeded ones that suit the graph.

Arrays are in the storage of their types, as in `raw`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np

from heliograph._base.tensor import as_elements
from heliograph_proto.errors import InvalidInputError
from heliograph_proto.graph import Graph, Leaf
from heliograph_proto.ops.table import OPS
from heliograph_proto.quantization import blocks
from heliograph_proto.types import TensorType

Array = np.ndarray[Any, Any]

#: For each op that looks up: the place of the indices, that of what they index, and its axis.
_LOOKUPS = {
    "get_rows": (1, 0, -2),
    **dict.fromkeys(("set_rows", "add_rows", "mul_rows", "max_rows", "min_rows"), (2, 0, -2)),
    "mul_mat_id": (2, 0, 0),
    "add_id": (2, 1, 0),
    "flash_attn_paged": (4, 1, 0),
}
#: Ops, beside views, whose result has the elements of these operands, so that indices pass through.
_CARRIERS = {
    **dict.fromkeys(("cont", "cast", "repeat", "roll"), slice(0, 1)),
    **dict.fromkeys(("assign", "where"), slice(1, None)),
    **dict.fromkeys(("concat", "set"), slice(None)),
}
#: Seeded integers that index nothing are below this.
_SMALL = 8
#: Seeded bytes of blocks are below this, so that their scales, which are f16, are finite: below 2.
_FINITE_BYTES = 64


def checked(leaf: Leaf, given: Any) -> Array:
    """Elements for a leaf: an array of exactly its type, or numbers. Raises InvalidInputError."""
    what, type_ = f"{leaf.kind.value} {leaf.name!r}", leaf.type
    try:
        found = np.asarray(given)
        if type_.dtype.name != "bf16":
            found = as_elements(given, type_.dtype)
        elif found.dtype.name == "bfloat16":
            found = found.view(np.uint16)
        elif found.dtype != np.uint16:
            raise InvalidInputError(
                f"an array of {found.dtype} for bf16",
                advice="uint16: the upper halves of f32; or bfloat16 of the package ml_dtypes",
            )
    except InvalidInputError as error:
        advice = error.advice or f"it is {type_}"
        raise InvalidInputError(f"{what} is {type_}: {error.message}", advice=advice) from None
    if found.shape != type_.storage_shape:
        raise InvalidInputError(
            f"{what} is {type_}: an array of shape {found.shape} does not fit",
            advice=f"give one of {type_.dtype.storage} and shape {type_.storage_shape}",
        )
    return np.ascontiguousarray(found).reshape(found.shape)


def check_names(known: Sequence[str], given: Mapping[str, Any], what: str) -> None:
    """Raises InvalidInputError for an unknown name."""
    for name in given:
        if name not in known:
            near = get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known) or 'none'}"
            raise InvalidInputError(f"the graph has no {what} {name!r:.80}", advice=hint)


def seeded(leaf: Leaf, seed: int, bound: int | None) -> Array:
    """Random elements for a leaf, determined by its name and type, the seed and the bound.

    Floats are uniform in [-1, 1], integers from 0 up to the bound, else small; indices along the
    last axis are distinct where they can be, so that the order of writing does not matter.
    """
    random = np.random.default_rng((seed, *leaf.name.encode()))
    type_ = leaf.type
    match type_.dtype.kind:
        case "float":
            values = random.uniform(-1.0, 1.0, type_.shape)
            exact = blocks.to_bits(values) if type_.dtype.name == "bf16" else values
            found = np.asarray(exact, type_.dtype.storage)
        case "bool":
            found = random.random(type_.shape) < 0.5
        case "quantized":
            found = random.integers(0, _FINITE_BYTES, type_.storage_shape, np.uint8)
        case _:
            found = _integers(random, type_, bound)
    return np.ascontiguousarray(found).reshape(type_.storage_shape)


def _integers(random: np.random.Generator, type_: TensorType, bound: int | None) -> Array:
    target = type_.dtype.storage
    if bound is None or not type_.shape or type_.shape[-1] > bound:
        return random.integers(0, max(_SMALL if bound is None else bound, 1), type_.shape).astype(target)
    rows = [random.choice(bound, type_.shape[-1], replace=False) for _ in range(_row_count(type_))]
    return np.array(rows, target).reshape(type_.shape)


def _row_count(type_: TensorType) -> int:
    return type_.size // type_.shape[-1] if type_.shape[-1] else 0


def index_bounds(graph: Graph) -> dict[int, int]:
    """The exclusive bound of each value of indices, by value number."""
    bounds: dict[int, int] = {}
    first = len(graph.leaves)
    for number in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[number]
        if node.op in _LOOKUPS:
            place, looked_up, axis = _LOOKUPS[node.op]
            size = graph.type_of(node.operands[looked_up]).shape[axis]
            _lower(bounds, node.operands[place], size)
        if first + number in bounds:
            for operand in _carried(node.op, node.operands):
                _lower(bounds, operand, bounds[first + number])
    return bounds


def _carried(op: str, operands: tuple[int, ...]) -> tuple[int, ...]:
    """The operands whose elements are those of the result."""
    if OPS[op].is_view:
        return operands[:1]
    return operands[_CARRIERS[op]] if op in _CARRIERS else ()


def _lower(bounds: dict[int, int], value: int, bound: int) -> None:
    bounds[value] = min(bound, bounds.get(value, bound))
