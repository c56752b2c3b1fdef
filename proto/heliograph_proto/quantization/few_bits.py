"""ggml's blocks of one and of two bits an element: q1_0, of signs, and q2_0, of -1, 0, 1 and 2
times a scale.

Bit for bit as ggml, in both directions.
"""

from __future__ import annotations

from typing import Any

from heliograph_proto.quantization.eights import inverse_of, rounded_away
from heliograph_proto.quantization.k_quants import F32, fields, half_bytes, halves, packed, unpacked

Array = Any


def from_q1_0(xp: Any, blocks: Array) -> Array:
    """Decode blocks [n, 18] to f32 [n, 128]."""
    scale, quanta = fields(blocks, 2, 16)
    size = halves(xp, scale)
    return xp.where(unpacked(xp, quanta, 1, 1) == 1, size, -size)


def to_q1_0(xp: Any, x: Array) -> Array:
    """Encode blocks [n, 128] of f32 as bytes [n, 18]; the scale is the mean of the sizes, which are
    added in order."""
    total, count = xp.zeros(len(x), xp.float32), x.shape[-1]
    for place in range(count):
        total += xp.abs(x[:, place])
    quanta = packed(xp, (x >= 0).astype(xp.uint8), 1, 1)
    return xp.concatenate([half_bytes(xp, total[:, None] / F32(count)), quanta], -1)


def from_q2_0(xp: Any, blocks: Array) -> Array:
    """Decode blocks [n, 18] to f32 [n, 64]."""
    scale, quanta = fields(blocks, 2, 16)
    return (unpacked(xp, quanta, 2, 1).astype(xp.float32) - F32(1)) * halves(xp, scale)


def to_q2_0(xp: Any, x: Array) -> Array:
    """Encode blocks [n, 64] of f32 as bytes [n, 18]; the scale is the largest size, so 2 does not
    occur."""
    scale = xp.abs(x).max(-1, keepdims=True)
    numbers = rounded_away(xp, x * inverse_of(xp, scale)) + xp.int8(1)
    return xp.concatenate([half_bytes(xp, scale), packed(xp, numbers.astype(xp.uint8), 2, 1)], -1)
