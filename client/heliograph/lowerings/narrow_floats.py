"""Floats of 8 and 4 bits as their codes: conversions with the ops that there are.

A format is the values of all of its codes, in f32. Codes of the positive finite values rise from 0
without a gap; the sign is a bit of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import heliograph as hg
from heliograph.lowerings.arrays import cast

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Format:
    """A format of narrow floats.

    `values`: those of all codes. `zero_is_unsigned`: the code of -0 means NaN. `sign`: the bit of
    the sign, 0 without one.
    """

    values: Array
    sign: int
    zero_is_unsigned: bool = False

    @property
    def count(self) -> int:
        """The number of finite values from 0 on."""
        positive = self.values[: self.sign or len(self.values)]
        return int(np.isfinite(positive).sum())

    def code_of(self, value: float) -> int | None:
        """The code of an infinity or NaN; None if the format has none."""
        found = np.isnan(self.values) if np.isnan(value) else self.values == value
        return int(found.argmax()) if found.any() else None


def from_codes(codes: hg.Value, format_: Format, dtype: hg.DType | str) -> hg.Value:
    """Return the values of codes."""
    table = codes.graph.constant(format_.values.astype(np.float32))
    flat = hg.take(table, hg.reshape(cast(codes, "i32"), (codes.size,)), axis=0)
    return cast(hg.reshape(flat, codes.shape), dtype)


def to_codes(x: hg.Value, format_: Format, *, saturate: bool) -> hg.Value:
    """Return the codes (u8) of the nearest values; halves go to the even code.

    Numbers beyond the largest value become it if `saturate`, else infinity or NaN.
    """
    wide = x if x.dtype.name == "f64" else cast(x, "f32")
    count = format_.count
    values = format_.values[:count].astype(np.float64)
    # The last bound is where the value after the largest would begin.
    following = np.append(values[1:], 2 * values[-1] - values[-2])
    bounds = (values + following) / 2
    # The number of bounds below a magnitude is its code; a half below an odd code counts as above it.
    target = np.float64 if wide.dtype.name == "f64" else np.float32
    exact = bounds.astype(target)
    odd = np.arange(count) % 2 == 1
    exact[odd] = np.nextafter(exact[odd], target(0))
    nan = format_.code_of(np.nan)
    infinity = format_.code_of(np.inf)
    beyond = [one for one in (infinity, nan) if one is not None and not saturate]
    table = np.append(np.arange(count), beyond[0] if beyond else count - 1).astype(np.int32)
    places = hg.searchsorted(wide.graph.constant(exact), hg.reshape(hg.abs(wide), (wide.size,)))
    codes = hg.reshape(hg.take(wide.graph.constant(table), places, axis=0), x.shape)
    if format_.sign:
        negative = hg.signbit(wide)
        if format_.zero_is_unsigned:
            # NaN is the code that -0 would have.
            negative = negative & (codes != 0) & (codes != (nan or 0))
        codes = hg.where(negative, codes + format_.sign, codes)
    # A format without NaN has -0 in its place.
    codes = hg.where(hg.isnan(wide), format_.sign if nan is None else nan, codes)
    return cast(codes, "u8")


def to_exponents(x: hg.Value, *, rounding: str, saturate: bool) -> hg.Value:
    """Return the codes (u8) of powers of two from 2**-127 on: float8e8m0. 255 is NaN.

    `rounding`: "up", "down" or "nearest".
    """
    bits = hg.ops.bitcast(hg.abs(cast(x, "f32")), dtype="i32")
    exponent, fraction = bits >> 23, bits & 0x7FFFFF
    if rounding != "down":
        # Below 2**-126 the exponent's code is 0, where a half is rounded down.
        least = hg.where(exponent > 0, 0x400000, 0x400001) if rounding == "nearest" else 1
        rounded = exponent + cast(fraction >= least, "i32")
        rounded = hg.minimum(rounded, 254) if saturate else rounded
        exponent = hg.where(exponent == 255, exponent, rounded)
    return cast(exponent, "u8")


def wrap_integer(x: hg.Value, bits: int, *, signed: bool) -> hg.Value:
    """Return integers modulo a power of two, as i8 or u8 codes of so many bits."""
    wide = cast(x, "i32")
    half = 2 ** (bits - 1) if signed else 0
    return cast(((wide + half) & (2**bits - 1)) - half, "i8" if signed else "u8")
