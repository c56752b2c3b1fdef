"""Norms and softmax as native steps along rows. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy

from heliograph_backends.cpu import kernels as k
from heliograph_backends.cpu.kernels.program.elements import BRAIN, HALF
from heliograph_backends.cpu.kernels.program.words import MAXIMUM_NARROW
from heliograph_backends.reference.attention import alibi_slopes
from heliograph_proto.graph import Node
from heliograph_proto.types import F32, TensorType

NORMS = {"norm": "layer_norm", "rms_norm": "rms_norm", "l2_norm": "l2_norm"}
#: Ops on rows that have a kernel.
OPS = (*NORMS, "soft_max", "group_norm")
#: The number of a mask's data type.
MASKS = {"f32": 0, "f16": HALF, "bf16": BRAIN}
#: The same for rows.
FORMS = MASKS
#: The most elements of a row of f16 or bf16, which a worker's scratch has in f32.
MOST_NARROW = 2**18
#: The most heads with slopes: each has a word in the step.
MOST_SLOPES = 4096

Strides = tuple[int, ...]


def has_kernel(node: Node, types: Sequence[TensorType], strides: Sequence[Strides]) -> bool:
    """True if a kernel runs a node of operands with these types and strides; the result's are the
    last."""
    if types[0].dtype.name not in FORMS or node.type.dtype is not types[0].dtype:
        return False
    if node.op == "group_norm":
        return (
            _has_equal_groups(node)
            and all(_are_dense(node.type, steps) for steps in (strides[0], strides[-1]))
            and fits(node.type, _channels(node) * math.prod(node.type.shape[-2:]))
        )
    if node.op == "soft_max" and not _takes(node, types, strides):
        return False
    dense = all(_has_dense_rows(node.type, steps) for steps in (strides[0], strides[-1]))
    return dense and fits(types[0], types[0].shape[-1])


def fits(type: TensorType, columns: int) -> bool:
    """True if a worker's scratch has room for a row of so many elements."""
    return type.dtype is F32 or columns <= MOST_NARROW


def _has_dense_rows(type: TensorType, strides: Strides) -> bool:
    return type.ndim > 0 and (type.shape[-1] == 1 or strides[-1] == type.dtype.block_bytes)


def _takes(node: Node, types: Sequence[TensorType], strides: Sequence[Strides]) -> bool:
    """True if the kernel accepts this mask, of which it reads whole rows, and these sinks."""
    mask, sinks = types[1:2], types[2:3]
    if node.attributes["max_bias"] and _heads(node) > MOST_SLOPES:
        return False
    if any(one.dtype is not F32 for one in sinks):
        return False
    return all(
        one.dtype.name in MASKS
        and one.shape[-1:] == node.type.shape[-1:]
        and _has_dense_rows(one, strides[1])
        and (one.dtype is F32 or one.shape[-1] <= MAXIMUM_NARROW)
        for one in mask
    )


def _heads(node: Node) -> int:
    return node.type.shape[-3] if node.type.ndim > 2 else 1


def _channels(node: Node) -> int:
    """Return the channels of a group; the last group may have fewer."""
    groups: int = node.attributes["groups"]
    return max(1, -(-node.type.shape[-3] // groups))


def _has_equal_groups(node: Node) -> bool:
    """True if all groups have the same size, so that they are rows."""
    return node.type.size > 0 and node.type.shape[-3] % _channels(node) == 0


def _are_dense(type: TensorType, strides: Strides) -> bool:
    """True if the images have no gaps."""
    pairs = zip(type.shape[-3:], strides[-3:], type.strides[-3:], strict=True)
    return all(size == 1 or step == plain for size, step, plain in pairs)


def append(
    builder: k.ProgramBuilder, node: Node, types: Sequence[TensorType], places: Sequence[k.Operand]
) -> None:
    """Append the step; `places`: operands, then the result, with stride 0 where they repeat."""
    source, *rest, target = places
    if node.op == "soft_max":
        _soft_max(builder, node, types, source, target, rest)
    elif node.op == "group_norm":
        _group_norm(builder, node, source, target)
    else:
        getattr(builder, NORMS[node.op])(
            node.type.shape,
            source,
            target,
            epsilon=float(node.attributes["eps"]),
            form=FORMS[node.type.dtype.name],
        )


def _soft_max(
    builder: k.ProgramBuilder,
    node: Node,
    types: Sequence[TensorType],
    source: k.Operand,
    target: k.Operand,
    rest: Sequence[k.Operand],
) -> None:
    mask, sinks = [*rest, None, None][:2]
    slopes: tuple[float, ...] = ()
    if node.attributes["max_bias"]:
        slopes = tuple(alibi_slopes(numpy, _heads(node), node.attributes["max_bias"]).tolist())
    if sinks is not None:
        # The number of each head repeats over its rows and their elements.
        sinks = sinks._replace(strides=(*sinks.strides, 0, 0) if node.type.ndim > 2 else (0,))
    builder.soft_max(
        node.type.shape,
        source,
        target,
        mask,
        float(node.attributes["scale"]),
        narrow=MASKS[types[1].dtype.name] if mask else 0,
        sinks=sinks,
        slopes=slopes,
        form=FORMS[node.type.dtype.name],
    )


def _group_norm(builder: k.ProgramBuilder, node: Node, source: k.Operand, target: k.Operand) -> None:
    """Append a norm over groups as rows: the images of a group's channels are consecutive."""
    *leading, channels, height, width = node.type.shape
    each, size = _channels(node) * height * width, node.type.dtype.block_bytes
    shape = (*leading, channels // _channels(node), each)
    steps = [(*one.strides[:-3], size * each, size) for one in (source, target)]
    source, target = (one._replace(strides=own) for one, own in zip((source, target), steps, strict=True))
    form = FORMS[node.type.dtype.name]
    builder.layer_norm(shape, source, target, epsilon=float(node.attributes["eps"]), form=form)
