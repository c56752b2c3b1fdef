"""ggml's blocks of 256 elements of -1, 0 and 1 times a scale: tq1_0, with five in a byte, and
tq2_0, with four.

Bit for bit as ggml, in both directions. A byte of tq1_0 is a fraction of 256 in base three: its
digits are the carries of repeated multiplications by 3.
"""

from __future__ import annotations

from typing import Any, Final

from heliograph_proto.quantization.k_quants import (
    F32,
    fields,
    half_bytes,
    halves,
    packed,
    unpacked,
)

Array = Any

#: The runs of bytes of tq1_0: their number of bytes, and of digits in each.
RUNS: Final = ((32, 5), (16, 5), (4, 4))
_ALL: Final = 3**5


def digit(byte: int, place: int) -> int:
    """Return a digit of a byte of tq1_0, the first one at place 0."""
    fraction: int = byte * 3**place & 255
    return fraction * 3 >> 8


def from_tq1_0(xp: Any, blocks: Array) -> Array:
    """Decode blocks [n, 54] to f32 [n, 256]."""
    *runs, scale = fields(blocks, *(size for size, _ in RUNS), 2)
    digits = [
        (run * xp.uint8(3**place)).astype(xp.uint16) * xp.uint16(3) >> xp.uint16(8)
        for run, (_, count) in zip(runs, RUNS, strict=True)
        for place in range(count)
    ]
    return (xp.concatenate(digits, -1).astype(xp.float32) - xp.float32(1)) * halves(xp, scale)


def from_tq2_0(xp: Any, blocks: Array) -> Array:
    """Decode blocks [n, 66] to f32 [n, 256]."""
    quanta, scale = fields(blocks, 64, 2)
    return (unpacked(xp, quanta, 2, 32).astype(xp.float32) - xp.float32(1)) * halves(xp, scale)


def _quanta(xp: Any, x: Array) -> tuple[Array, Array]:
    """Return elements of 0, 1 and 2, and the scale: the largest size."""
    scale = xp.abs(x).max(-1, keepdims=True)
    scaled = x * xp.where(scale == 0, F32(0), F32(1) / scale)
    away = xp.where(xp.abs(scaled) >= F32(0.5), xp.sign(scaled), F32(0))
    return (away + F32(1)).astype(xp.uint8), half_bytes(xp, scale)


def to_tq1_0(xp: Any, x: Array) -> Array:
    """Encode blocks [n, 256] of f32 as bytes [n, 54]."""
    quanta, scale = _quanta(xp, x)
    found = []
    for run, (size, count) in zip(fields(quanta, *(size * count for size, count in RUNS)), RUNS, strict=True):
        powers = xp.asarray([3 ** (4 - place) for place in range(count)], xp.uint16)[:, None]
        number = (run.reshape(len(x), count, size).astype(xp.uint16) * powers).sum(1)
        # Rounded up, so that no digit is one too small.
        found.append(((number * 256 + (_ALL - 1)) // _ALL).astype(xp.uint8))
    return xp.concatenate([*found, scale], -1)


def to_tq2_0(xp: Any, x: Array) -> Array:
    """Encode blocks [n, 256] of f32 as bytes [n, 66]."""
    quanta, scale = _quanta(xp, x)
    return xp.concatenate([packed(xp, quanta, 2, 32), scale], -1)
