"""bf16 without a NumPy type for it: its bits, in uint16, and the floats that they are.

A bf16 is the upper half of an f32. `xp` is the array library, NumPy or CuPy.
"""

from __future__ import annotations

from typing import Any

import numpy

Array = Any


def from_bits(bits: Array, xp: Any = numpy) -> Array:
    """Bits (uint16) to f32, exactly."""
    wide = bits.astype(xp.uint32)
    # In place: an array of no dimensions stays one.
    wide <<= xp.uint32(16)
    return wide.view(xp.float32)


def to_bits(x: Array, xp: Any = numpy) -> Array:
    """Floats of any width to bits (uint16), rounded once to the nearest, halves to even; NaN stays NaN."""
    wide = _to_odd(xp, x) if x.dtype == xp.float64 else xp.ascontiguousarray(x, xp.float32)
    bits = wide.reshape(x.shape).view(xp.uint32)
    upper = bits >> xp.uint32(16)
    rounded = (bits + (upper & xp.uint32(1)) + xp.uint32(0x7FFF)) >> xp.uint32(16)
    # Rounding could carry a NaN into infinity; a set quiet bit cannot be lost with the lower half.
    return xp.where(xp.isnan(wide.reshape(x.shape)), upper | xp.uint32(0x40), rounded).astype(xp.uint16)


def _to_odd(xp: Any, x: Array) -> Array:
    """f64 to f32, inexact ones to the odd neighbour, from which a second rounding is right.

    See Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums" (2008).
    """
    near = xp.ascontiguousarray(x.astype(xp.float32))
    bits = near.view(xp.uint32)
    too_far = xp.abs(near.astype(xp.float64)) > xp.abs(x)
    inexact = near.astype(xp.float64) != x
    return ((bits - too_far.astype(xp.uint32)) | inexact.astype(xp.uint32)).view(xp.float32)
