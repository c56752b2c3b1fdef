"""Rotary position embedding as launches. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from heliograph_backends.cuda.driver.parameters import MOST_PAIRS, ROPE
from heliograph_backends.cuda.lowering.chains import FLOATS
from heliograph_backends.cuda.lowering.launch import Filling, Launch, Located, aligned, collapsed, few
from heliograph_backends.reference.rope import correction
from heliograph_proto.graph import Node
from heliograph_proto.ops.rope import NEOX, NORMAL, pairs
from heliograph_proto.types import TensorType

THREADS = 256
#: The most heads that a thread rotates by the same angles, and the fewest threads that a launch
#: should have.
MOST_HEADS, LEAST_THREADS = 8, 2**16
#: Rows are counted in 32 bits.
MOST_ROWS = 2**31 - 1


def is_rope(node: Node, operands: Sequence[TensorType]) -> bool:
    """True if the kernel rotates a node's rows: with plain positions, and few enough pairs for its
    parameters."""
    if node.op != "rope" or node.attributes["mode"] not in (NORMAL, NEOX):
        return False
    fits = operands[0].dtype.name in FLOATS and few(node.type.shape[:-2])
    return (
        fits and pairs(dict(node.attributes)) <= MOST_PAIRS and math.prod(node.type.shape[:-1]) <= MOST_ROWS
    )


def turns_of(node: Node) -> list[float]:
    """Return the turns by which a position rotates each pair, with all scaling of angles
    applied."""
    attributes, found = node.attributes, []
    low, high = correction(attributes) if attributes["ext_factor"] else (0.0, 0.0)
    for pair in range(pairs(dict(attributes))):
        ramp = min(1.0, max(0.0, (pair - low) / max(0.001, high - low)))
        mix = (1 - ramp) * attributes["ext_factor"]
        scale = attributes["freq_scale"] * (1 - mix) + mix
        angle = attributes["freq_base"] ** (pair * (-2.0 / attributes["n_dims"])) * scale
        found.append(angle / (2 * math.pi))
    return found


def rope(node: Node, x: Located, result: Located, positions: Located, factors: Sequence[Located]) -> Launch:
    """Return the launch of a rope. Rows are tokens, each with its heads."""
    *leading, heads, width = node.type.shape
    attributes = node.attributes
    turns, start, adjacent = turns_of(node), attributes["offset"], attributes["mode"] == NORMAL
    values = [x, result, positions]
    strides = [x.strides[:-2], result.strides[:-2], aligned(positions.type.shape, positions.strides, leading)]
    sizes, steps = collapsed(leading, strides)
    filling = Filling(ROPE)
    filling.walk(sizes)
    for name, one, step in zip(("x", "result", "positions"), values, steps, strict=True):
        filling.operand(name, one, step)
    for one in factors:
        filling.operand("factors", one)
    size = attributes["attn_factor"]
    if attributes["ext_factor"]:
        size *= 1 - 0.1 * math.log(attributes["freq_scale"])
    tokens, groups = math.prod(leading), -(-len(turns) // 4)
    heads_of_unit = _heads_of_unit(tokens, heads, groups)
    units_of_token = -(-heads // heads_of_unit)
    item = node.type.dtype.block_bytes
    packed = all(one.strides[-1] == item for one in (x, result)) and start % 4 == len(turns) % 4 == 0
    filling.set(
        tokens=tokens, heads=heads, width=width, has_factors=bool(factors), pairs=len(turns), start=start,
        adjacent=adjacent, heads_of_unit=heads_of_unit, units_of_token=units_of_token, size=size,
        packed=packed,
    )  # fmt: skip
    filling.parameters["turns"][0][: len(turns)] = turns
    for place, one in enumerate((x, result)):
        filling.parameters["head_strides"][0][place] = one.strides[-2]
        filling.parameters["inner"][0][place] = one.strides[-1]
    blocks = -(-tokens * units_of_token // (THREADS // groups))
    return filling.launch("rope", (max(1, blocks), 1, 1), THREADS)


def _heads_of_unit(tokens: int, heads: int, groups: int) -> int:
    """Return the heads of a thread: as many as leave enough threads to hide the latency of
    memory."""
    found = min(MOST_HEADS, max(1, heads))
    while found > 1 and tokens * -(-heads // found) * groups < LEAST_THREADS:
        found //= 2
    return found
