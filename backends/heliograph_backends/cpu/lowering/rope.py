"""Rotary embedding and its gradient as one native step, in all of ggml's modes. Pure.

The position and the frequency of each pair are known when the plan is made. So all modes share one
kernel, which reads them as numbers. The gradient is the rotation by the negative angles.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from heliograph_backends.cpu import kernels as k
from heliograph_backends.cpu.kernels.program.elements import BRAIN, HALF
from heliograph_backends.reference.rope import powers, yarn
from heliograph_proto.graph import Node
from heliograph_proto.ops.rope import NORMAL, SECTIONED, pairs
from heliograph_proto.types import TensorType

#: The most pairs of a head in the kernel's scratch, and the most elements of an f16 or bf16 head
#: there.
MOST_PAIRS = 4096
MOST_NARROW = 16384
FORMS = {"f32": 0, "f16": HALF, "bf16": BRAIN}

Strides = tuple[int, ...]


def has_kernel(node: Node, types: Sequence[TensorType], strides: Sequence[Strides]) -> bool:
    """True if the kernel rotates these rows: heads are adjacent, and the result has no gaps."""
    x, positions, *factors = types
    if x.dtype.name not in FORMS or 0 in x.shape:
        return False
    heads, width = x.shape[-2:]
    size = x.dtype.block_bytes
    side_by_side = strides[0][-1] == size and (heads == 1 or strides[0][-2] == size * width)
    dense = all(one.size == 1 or steps == (4,) for one, steps in zip(factors, strides[2:-1], strict=True))
    room = pairs(dict(node.attributes)) <= MOST_PAIRS and (size == 4 or width <= MOST_NARROW)
    return side_by_side and dense and room and strides[-1] == node.type.strides


def append(
    builder: k.ProgramBuilder, node: Node, types: Sequence[TensorType], places: Sequence[k.Operand]
) -> None:
    """Append the step, whose rows are tokens with all their heads; `places`: operands, then the
    result."""
    source, positions, *factors, target = places
    *leading, heads, width = node.type.shape
    size = node.type.dtype.block_bytes
    sectioned = node.attributes["mode"] in SECTIONED
    apart = positions.strides[0] if sectioned else 0
    builder.rotary(
        (*leading, heads * width),
        source._replace(strides=(*source.strides[:-2], size)),
        target._replace(strides=(*target.strides[:-2], size)),
        positions._replace(strides=(*positions.strides[sectioned:], 0)),
        rotation(node, apart),
        *(each._replace(strides=(4,)) for each in factors),
    )


def rotation(node: Node, apart: int) -> k.Rotation:
    """Return the angles of a rope, as in the definition; `apart`: bytes between a token's
    positions."""
    attributes = node.attributes
    count = pairs(dict(attributes))
    axes, exponents = powers(numpy, attributes, numpy.arange(count))
    scales, size = yarn(numpy, attributes, numpy.ones((1, count)))
    angles = attributes["freq_base"] ** (exponents * (-2.0 / attributes["n_dims"]))
    if node.op == "rope_back":
        angles = -angles
    return k.Rotation(
        width=node.type.shape[-1],
        start=attributes["offset"],
        adjacent=attributes["mode"] == NORMAL,
        narrow=FORMS[node.type.dtype.name],
        size=float(size),
        angles=tuple(angles.tolist()),
        scales=tuple(scales[0].tolist()),
        positions=tuple((axes * apart).tolist()),
    )
