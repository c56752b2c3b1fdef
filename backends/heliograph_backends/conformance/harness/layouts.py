"""Layouts of an operand: in memory with strides, as a view in the graph, or as another op's result.

In memory (the plan gets a Tensor with strides):

- "plain": contiguous;
- "transposed": the dimensions in the opposite order;
- "spaced": every second element in every dimension of a larger array;
- "repeated": stride 0 in the first dimension.

In the graph:

- "permute", "slice", "broadcast_to" and "slice of permute": views of an input;
- "computed": a result that has no other reader, so the op may take over its memory;
- "kept": a result that is read afterwards, so the op must not take over its memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from heliograph_backends.conformance.harness.content import Array, Content, decode
from heliograph_backends.conformance.harness.recipe import Recipe
from heliograph_proto.graph import LeafKind
from heliograph_proto.types import TensorType

IN_MEMORY = ("plain", "transposed", "spaced", "repeated")

#: The byte between the elements of a spaced tensor: as a float NaN, as an integer -1.
GAP = 0xFF


@dataclass(frozen=True, slots=True, eq=False)
class Laid:
    """Elements in memory: the bytes, the first element's offset, and byte strides (none:
    contiguous)."""

    image: Array
    offset_bytes: int = 0
    strides: tuple[int, ...] = ()


def possible(layout: str, type: TensorType) -> bool:
    """True if a tensor of this type can have the layout and then differs from a plain one."""
    if layout in ("plain", "computed", "kept"):
        return True
    if type.dtype.block_size > 1 or type.ndim == 0:
        return False
    return layout not in ("transposed", "permute") or type.ndim > 1


def prepared(layout: str, content: Content) -> Content:
    """Adapt elements to the layout: equal in the first dimension if it repeats."""
    if layout not in ("repeated", "broadcast_to") or content.type.shape[0] == 0:
        return content
    stored = _elements(content)
    return _content(content.type, np.broadcast_to(stored[:1], stored.shape))


def lay_out(layout: str, content: Content) -> Laid:
    """Return the bytes of a tensor in memory."""
    if layout == "plain" or content.type.size == 0:
        return Laid(content.raw)
    stored = _elements(content)
    if layout == "transposed":
        held = np.ascontiguousarray(stored.T)
        return Laid(_bytes(held), 0, held.T.strides)
    if layout == "repeated":
        held = np.ascontiguousarray(stored[:1])
        return Laid(_bytes(held), 0, (0, *held.strides[1:]))
    held = _spread(stored)
    return Laid(_bytes(held), sum(held.strides), tuple(2 * step for step in held.strides))


def gather(laid: Laid, image: Array, type: TensorType) -> Array:
    """Return the row-major bytes of a tensor from an image of memory with this layout."""
    if not laid.strides or type.size == 0:
        return image[laid.offset_bytes : laid.offset_bytes + type.nbytes]
    stored = np.ndarray(type.shape, type.dtype.storage, image, laid.offset_bytes, laid.strides)
    return _bytes(np.ascontiguousarray(stored))


def operand(recipe: Recipe, kind: LeafKind, content: Content, layout: str) -> int:
    """Add a value with these elements and this layout to the graph and return it."""
    if layout in IN_MEMORY:
        return recipe.leaf(kind, content, layout)
    if layout in ("computed", "kept"):
        return recipe.node("cont", recipe.leaf(kind, content))
    return _view(recipe, kind, content, layout)


def _view(recipe: Recipe, kind: LeafKind, content: Content, layout: str) -> int:
    stored, type = _elements(content), content.type
    axes = tuple(reversed(range(type.ndim)))
    if layout == "permute":
        leaf = recipe.leaf(kind, _content(type, stored.T))
        return recipe.node("permute", leaf, axes=axes)
    if layout == "broadcast_to":
        leaf = recipe.leaf(kind, _content(type, stored[: min(1, type.shape[0])]))
        return recipe.node("broadcast_to", leaf, shape=type.shape)
    larger = _spread(stored) if layout == "slice" else _spread(stored.T)
    value = recipe.leaf(kind, _content(type, larger))
    if layout == "slice of permute":
        value = recipe.node("permute", value, axes=axes)
    ends = recipe.type_of(value).shape
    return recipe.node("slice", value, start=(1,) * type.ndim, stop=ends, step=(2,) * type.ndim)


def _elements(content: Content) -> Array:
    """Return the stored elements, in the tensor's shape."""
    return content.raw.view(content.type.dtype.storage).reshape(content.type.storage_shape)


def _content(like: TensorType, stored: Array) -> Content:
    """Return stored elements as content of another tensor's data type."""
    held = np.ascontiguousarray(stored)
    return decode(TensorType(like.dtype, stored.shape), _bytes(held))


def _spread(stored: Array) -> Array:
    """Spread elements over every second place of a larger array; gaps are GAP bytes, or True in
    booleans."""
    shape = tuple(2 * size + 1 for size in stored.shape)
    held = np.empty(shape, stored.dtype)
    held.reshape(-1).view(np.uint8)[:] = 1 if stored.dtype.kind == "b" else GAP
    held[tuple(slice(1, None, 2) for _ in shape)] = stored
    return held


def _bytes(held: Array) -> Array:
    return held.reshape(-1).view(np.uint8)
