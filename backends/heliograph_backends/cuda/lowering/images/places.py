"""Elements that change places as launches: padded, rolled, repeated and resampled. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from heliograph_backends.cuda.driver.parameters import MOST_DIMENSIONS, PLACE, TRIANGLE, TYPES, UPSCALE
from heliograph_backends.cuda.lowering import chains, moves
from heliograph_backends.cuda.lowering.chains import FLOATS
from heliograph_backends.cuda.lowering.launch import Filling, Launch, Located, blocks_for, collapsed, fits
from heliograph_backends.cuda.lowering.target import Asked
from heliograph_proto.types import TensorType

#: Kernels count elements, and places along a dimension, in 32 bits.
MOST_COUNT = 2**31 - 1
#: The kernel's numbers for places outside of the source.
ZERO, AROUND, MIRRORED = range(3)
#: The kernel's number of a linear mode with triangles.
TRIANGLES = 3

#: The bits of minus infinity.
LOWEST_BITS = {"f32": 0xFF800000, "f16": 0xFC00, "bf16": 0xFF80}


class Axis(NamedTuple):
    """A dimension: the sizes of result and source, the result's place of element 0, and strides."""

    size: int
    have: int
    left: int
    to: int
    source: int


def pad(asked: Asked) -> tuple[Launch, ...] | None:
    """Return the launch of a pad; None if no kernel computes it."""
    attributes = asked.node.attributes
    return _placed(asked, attributes["left"], AROUND if attributes["circular"] else ZERO)


def pad_reflect_1d(asked: Asked) -> tuple[Launch, ...] | None:
    """Return the launch of a mirrored pad; None if no kernel computes it."""
    ahead = (0,) * (asked.result.type.ndim - 1)
    return _placed(asked, (*ahead, asked.node.attributes["left"]), MIRRORED)


def roll(asked: Asked) -> tuple[Launch, ...] | None:
    """Return the launch of a cyclic shift; None if no kernel computes it."""
    return _placed(asked, asked.node.attributes["shifts"], AROUND)


def _placed(asked: Asked, left: Sequence[int], outside: int) -> tuple[Launch, ...] | None:
    (source,), result = asked.values, asked.result
    sizes = zip(result.type.shape, source.type.shape, left, result.strides, source.strides, strict=True)
    axes = [Axis(*one) for one in sizes]
    if outside == AROUND:
        axes = [one._replace(left=one.left % one.have) for one in axes]
    axes = _merged(axes, outside)
    far = [one.size + abs(one.left) + 2 * one.have for one in axes]
    if len(axes) > MOST_DIMENSIONS or max(*far, result.type.size, 0, 0) > MOST_COUNT:
        return None
    filling = Filling(PLACE)
    filling.divisors([one.size for one in axes], "sizes")
    filling.address("from", source)
    filling.address("to", result)
    named = {"from_strides": "source", "to_strides": "to", "left": "left", "have": "have"}
    for name, field in named.items():
        filling.parameters[name][0][: len(axes)] = [getattr(one, field) for one in axes]
    filling.set(
        count=result.type.size,
        dimensions=len(axes),
        item_bytes=result.type.dtype.block_bytes,
        outside=outside,
    )
    return (filling.launch("place_elements", (blocks_for(result.type.size, 256), 1, 1), 256),)


def _merged(axes: Sequence[Axis], outside: int) -> list[Axis]:
    """Merge dimensions that lie in one piece in both, and of which the inner one is whole."""
    found: list[Axis] = []
    for one in axes:
        if one.size == one.have == 1:
            continue
        whole = one.size == one.have and not one.left
        outer = found[-1] if found else None
        turned = outside == MIRRORED and outer is not None and outer.size != outer.have
        by = one.size
        if outer and whole and not turned and (outer.to, outer.source) == (by * one.to, by * one.source):
            found[-1] = Axis(outer.size * by, outer.have * by, outer.left * by, one.to, one.source)
        else:
            found.append(one)
    return found


def repeat(asked: Asked) -> tuple[Launch, ...] | None:
    """Return the copies of a tensor that repeats along its dimensions; None if no kernel makes
    them."""
    (source,), result = asked.values, asked.result
    missing = result.type.ndim - source.type.ndim
    have, steps = (1,) * missing + source.type.shape, (0,) * missing + source.strides
    sizes: list[int] = []
    to: list[int] = []
    given: list[int] = []
    for size, own, step, by in zip(result.type.shape, have, result.strides, steps, strict=True):
        sizes += [size // max(1, own), own]
        to += [step * own, step]
        given += [0, by]
    if result.type.dtype.block_size > 1 or not fits(sizes):
        return None
    type = TensorType(result.type.dtype, tuple(sizes))
    target = Located(type, result.slot, result.offset, tuple(to))
    return moves.copy(Located(type, source.slot, source.offset, tuple(given)), target)


def set_block(asked: Asked) -> tuple[Launch, ...] | None:
    """Return the copies of a tensor and of the block that is set in it; None if no kernel makes
    them."""
    (whole, block), result = asked.values, asked.result
    if not moves.can_copy(result.type) or result.type.dtype.block_size > 1:
        return None
    found = () if whole[1:] == result[1:] else moves.copy(whole, result)
    if block.type.size:
        found = (*found, *moves.copy(block, _block_at(asked, block, result)))
    return found


def acc(asked: Asked) -> tuple[Launch, ...] | None:
    """Return the copy of a tensor and the sum of its block with another; None if no kernel makes
    them."""
    (whole, block), result = asked.values, asked.result
    names = {one.type.dtype.name for one in (whole, block, result)}
    if not moves.can_copy(result.type) or len(names) > 1 or names.isdisjoint(chains.FLOATS):
        return None
    found = () if whole[1:] == result[1:] else moves.copy(whole, result)
    if not block.type.size:
        return found
    at = _block_at(asked, block, result)
    return (*found, *chains.added(at, block, at, asked.target))


def add1(asked: Asked) -> tuple[Launch, ...] | None:
    """Return the launches that add one number; None if no kernel does."""
    (x, one), result = asked.values, asked.result
    names = {value.type.dtype.name for value in (x, one, result)}
    if not fits(result.type.shape) or len(names) > 1 or names.isdisjoint(chains.FLOATS):
        return None
    number = Located(TensorType(one.type.dtype, ()), one.slot, one.offset, ())
    return chains.added(x, number, result, asked.target)


def _block_at(asked: Asked, block: Located, result: Located) -> Located:
    """Return the place of a block in a result."""
    start, step = asked.node.attributes["start"], asked.node.attributes["step"] or (1,) * block.type.ndim
    offset = result.offset + sum(at * by for at, by in zip(start, result.strides, strict=True))
    strides = tuple(by * one for by, one in zip(step, result.strides, strict=True))
    return Located(block.type, result.slot, offset, strides)


# Triangles


def triangle(asked: Asked) -> tuple[Launch, ...] | None:
    """Return the launch of a triangle of matrices; None if no kernel computes it."""
    node, (x,), result = asked.node, asked.values, asked.result
    name, item = x.type.dtype.name, x.type.dtype.block_bytes
    if result.type.size > MOST_COUNT or (node.op == "diag_mask_inf" and name not in LOWEST_BITS):
        return None
    if node.op == "tri":
        kind = node.attributes["type"]
        keeps_beyond, offset, outside = kind < 2, -1 if kind in (0, 3) else 0, 0
    else:
        keeps_beyond, offset = False, node.attributes["n_past"]
        outside = LOWEST_BITS[name] if node.op == "diag_mask_inf" else 0
    lead, (given, made) = collapsed(x.type.shape[:-2], [x.strides[:-2], result.strides[:-2]])
    sizes = (*lead, *x.type.shape[-2:])
    if len(sizes) > MOST_DIMENSIONS:
        return None
    filling = Filling(TRIANGLE)
    filling.divisors(sizes, "sizes")
    filling.address("from", x)
    filling.address("to", result)
    for field, steps in (
        ("from_strides", (*given, *x.strides[-2:])),
        ("to_strides", (*made, *result.strides[-2:])),
    ):
        filling.parameters[field][0][: len(sizes)] = steps
    filling.set(
        offset=offset, outside=outside, count=result.type.size, dimensions=len(sizes), item_bytes=item,
        keeps_beyond=keeps_beyond,
    )  # fmt: skip
    return (filling.launch("triangle", (blocks_for(result.type.size, 256), 1, 1), 256),)


# Resampling


def upscale(asked: Asked) -> tuple[Launch, ...] | None:
    """Return the launch of a resampling; None if no kernel computes it."""
    (x,), result, attributes = asked.values, asked.result, asked.node.attributes
    far = (result.type.size, *x.type.shape)
    if x.type.ndim > MOST_DIMENSIONS or x.type.dtype.name not in FLOATS or max(far) > MOST_COUNT:
        return None
    corners = attributes["align_corners"]
    pairs = list(zip(x.type.shape[-2:], result.type.shape[-2:], strict=True))
    aligned = [corners and min(pair) > 1 for pair in pairs]
    less = [int(one) for one in aligned]
    scale = [(have - by) / (size - by) for (have, size), by in zip(pairs, less, strict=True)]
    filling = Filling(UPSCALE)
    filling.divisors(result.type.shape, "sizes")
    for name, value in (("x", x), ("result", result)):
        filling.address(name, value)
        filling.parameters[f"{name}_strides"][0][: x.type.ndim] = value.strides
    filling.parameters["have"][0][: x.type.ndim] = x.type.shape
    filling.parameters["corners"][0][:] = aligned
    filling.parameters["scale"][0][:] = scale
    filling.parameters["support"][0][:] = [max(1.0, one) for one in scale]
    filling.set(
        count=result.type.size, dimensions=x.type.ndim, type=TYPES[x.type.dtype.name],
        mode=TRIANGLES if attributes["antialias"] else attributes["mode"], offset=0.0 if corners else 0.5,
    )  # fmt: skip
    return (filling.launch("upscale", (blocks_for(result.type.size, 256), 1, 1), 256),)
