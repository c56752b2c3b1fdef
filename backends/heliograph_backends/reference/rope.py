"""Formulas: rotary position embedding (Su et al., 2021; ggml's modes; YaRN, Peng et al., 2023)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy

from heliograph_backends.reference.base import Array, Attributes, Formula, in_wide
from heliograph_proto.ops.rope import IMROPE, NORMAL, SECTIONED, VISION, pairs


def rope(xp: Any, attributes: Attributes, x: Array, positions: Array, factors: Array | None = None) -> Array:
    """Rotate each pair of a row by its angle; elements outside of the pairs stay."""
    count = pairs(dict(attributes))
    theta = _angles(xp, attributes, positions, count)
    if factors is not None:
        theta = theta / factors[:count]
    theta, size = yarn(xp, attributes, theta)
    # One angle for all heads of a token: [tokens, 1, pairs].
    cosine, sine = ((size * f(theta)).astype(x.dtype)[:, None, :] for f in (xp.cos, xp.sin))
    first, second = _places(attributes, count)
    a, b = x[..., first], x[..., second]
    result = x.copy()
    result[..., first] = a * cosine - b * sine
    result[..., second] = a * sine + b * cosine
    return result


def _places(attributes: Attributes, count: int) -> tuple[slice, slice]:
    """Return where the first and the second elements of the pairs lie in a row."""
    start = attributes["offset"]
    middle, stop = start + count, start + 2 * count
    if attributes["mode"] == NORMAL:
        return slice(start, stop, 2), slice(start + 1, stop, 2)
    return slice(start, middle), slice(middle, stop)


def _angles(xp: Any, attributes: Attributes, positions: Array, count: int) -> Array:
    """Return the angle of each token's pairs before scaling, [tokens, pairs], in f64."""
    axis, exponent = powers(xp, attributes, xp.arange(count))
    own = positions[axis].T if attributes["mode"] in SECTIONED else positions[:, None]
    return own * attributes["freq_base"] ** (exponent * (-2.0 / attributes["n_dims"]))


def powers(xp: Any, attributes: Attributes, pair: Array) -> tuple[Array, Array]:
    """Return for each pair the index of the position that rotates it, and the power of the base."""
    if attributes["mode"] not in SECTIONED:
        return xp.zeros_like(pair), pair
    sections = attributes["sections"]
    sector = pair % sum(sections)
    ends = xp.asarray(numpy.cumsum(sections))
    if attributes["mode"] == IMROPE:
        # Time, height, width, time, ... while each has pairs left; the rest belongs to the fourth.
        turn = sector % 3
        return xp.where(sector < 3 * xp.asarray(sections)[turn], turn, 3), pair
    axis = xp.searchsorted(ends[:3], sector, side="right")
    if attributes["mode"] != VISION:
        return axis, pair
    return axis, sector - (ends - xp.asarray(sections))[axis]


def yarn(xp: Any, attributes: Attributes, theta: Array) -> tuple[Array, float]:
    """Return the angles and the length of the rotated vectors: scaled, or YaRN's mix of scaled and
    plain angles."""
    plain, theta = theta, attributes["freq_scale"] * theta
    if not attributes["ext_factor"]:
        return theta, attributes["attn_factor"]
    low, high = correction(attributes)
    ramp = (xp.arange(theta.shape[-1]) - low) / max(0.001, high - low)
    mix = (1 - xp.clip(ramp, 0, 1)) * attributes["ext_factor"]
    size = attributes["attn_factor"] * (1 - 0.1 * math.log(attributes["freq_scale"]))
    return theta * (1 - mix) + plain * mix, size


def correction(attributes: Attributes) -> tuple[float, float]:
    """Return the pairs between which the mix changes: those that make beta_fast and beta_slow turns
    in n_ctx_orig tokens."""
    dims, base = attributes["n_dims"], numpy.float64(attributes["freq_base"])

    def pair_of(turns: float) -> Any:
        return dims * numpy.log(attributes["n_ctx_orig"] / (turns * 2 * numpy.pi)) / (2 * numpy.log(base))

    low = numpy.floor(pair_of(numpy.float64(attributes["beta_fast"])))
    high = numpy.ceil(pair_of(numpy.float64(attributes["beta_slow"])))
    return max(0.0, float(low)), min(dims - 1.0, float(high))


def timestep_embedding(xp: Any, attributes: Attributes, timesteps: Array) -> Array:
    """The sinusoids of diffusion models, computed in f64 and rounded once."""
    half = attributes["dim"] // 2
    powers = xp.arange(half) * (-math.log(attributes["max_period"]) / max(1, half))
    angles = timesteps.astype(xp.float64)[:, None] * xp.exp(powers)
    odd = xp.zeros((timesteps.size, attributes["dim"] % 2))
    return xp.concatenate([xp.cos(angles), xp.sin(angles), odd], axis=-1)


FORMULAS: Mapping[str, Formula] = {"rope": in_wide(rope), "timestep_embedding": timestep_embedding}
