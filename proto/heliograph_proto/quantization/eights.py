"""ggml's blocks of eight-bit quanta with their sums: q8_1 and q8_k, in which ggml holds
activations.

Bit for bit as ggml's reference encodes them. ggml never decodes them, and its products use their
sums; here a block stands for its quanta times its scale, and sums are not read.
"""

from __future__ import annotations

from typing import Any

from heliograph_proto.quantization.k_quants import (
    BLOCK,
    F32,
    clipped,
    fields,
    half_bytes,
    halves,
    largest,
)

Array = Any


def inverse_of(xp: Any, scale: Array) -> Array:
    """Return 1 / scale; 0 where it is 0."""
    return xp.where(scale == 0, F32(0), F32(1) / scale)


def rounded_away(xp: Any, x: Array) -> Array:
    """Round to int8, halves away from zero."""
    size = xp.abs(x)
    whole = xp.floor(size)
    # size + 0.5 itself could round up values just below a half.
    return xp.copysign(whole + (size - whole >= F32(0.5)), x).astype(xp.int8)


def _numbers(xp: Any, field: Array) -> Array:
    """Convert signed bytes to f32."""
    return field.astype(xp.int8).astype(xp.float32)


def from_q8_0(xp: Any, blocks: Array) -> Array:
    """Decode blocks [n, 34] to f32 [n, 32]."""
    scale, quanta = fields(blocks, 2, 32)
    return _numbers(xp, quanta) * halves(xp, scale)


def to_q8_0(xp: Any, x: Array) -> Array:
    """Encode blocks [n, 32] of f32 as bytes [n, 34]."""
    scale = xp.abs(x).max(-1, keepdims=True) / F32(127)
    quanta = rounded_away(xp, x * inverse_of(xp, scale))
    return xp.concatenate([half_bytes(xp, scale), quanta.view(xp.uint8)], -1)


def from_q8_1(xp: Any, blocks: Array) -> Array:
    """Decode blocks [n, 36] to f32 [n, 32]."""
    scale, _, quanta = fields(blocks, 2, 2, 32)
    return _numbers(xp, quanta) * halves(xp, scale)


def to_q8_1(xp: Any, x: Array) -> Array:
    """Encode blocks [n, 32] of f32 as bytes [n, 36]: the sum of the quanta is stored times the
    scale."""
    scale = xp.abs(x).max(-1, keepdims=True) / F32(127)
    quanta = rounded_away(xp, x * inverse_of(xp, scale))
    total = quanta.astype(xp.int32).sum(-1, keepdims=True).astype(xp.float32) * scale
    return xp.concatenate([half_bytes(xp, scale), half_bytes(xp, total), quanta.view(xp.uint8)], -1)


def from_q8_k(xp: Any, blocks: Array) -> Array:
    """Decode blocks [n, 292] to f32 [n, 256]."""
    scale, quanta, _ = fields(blocks, 4, BLOCK, 32)
    return _numbers(xp, quanta) * xp.ascontiguousarray(scale).view(xp.float32)


def to_q8_k(xp: Any, x: Array) -> Array:
    """Encode blocks [n, 256] of f32 as bytes [n, 292]: the largest element has quantum -127, and
    the sums are of sixteen quanta."""
    extreme = largest(xp, x, 1)[:, None]
    inverse = xp.where(extreme == 0, F32(0), F32(-127) / extreme)
    quanta = clipped(xp, inverse * x, -128, 127).astype(xp.int8)
    sums = quanta.reshape(len(x), 16, 16).astype(xp.int16).sum(-1, dtype=xp.int16)
    scale = xp.where(xp.isfinite(extreme), inverse_of(xp, inverse), F32("nan"))
    return xp.concatenate([scale.view(xp.uint8), quanta.view(xp.uint8), sums.view(xp.uint8)], -1)
