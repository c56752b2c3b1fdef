"""Cases of rotary position embedding, whose reference is ggml's loop over one row, and of timesteps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from backend_graphs import Array
from op_cases import FLOATS, Case, Cases, Refusal, data, t, wide

NORMAL, NEOX, MROPE, VISION, IMROPE = 0, 2, 8, 24, 40
DEFAULTS = {
    "mode": 0, "sections": (), "n_ctx_orig": 0, "freq_base": 10000.0, "freq_scale": 1.0, "ext_factor": 0.0,
    "attn_factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip


def angles(place: Sequence[int], width: int, factors: Sequence[float], a: dict[str, Any]) -> list[float]:
    """The angles of a token's pairs, one after the other, as ggml_rope_cache_init has them."""
    scale = a["freq_base"] ** (-2.0 / a["n_dims"])
    theta = [float(p) for p in place]
    found = []
    for pair in range(width // 2):
        axis = 0
        if a["mode"] in (MROPE, VISION, IMROPE):
            s = a["sections"]
            sector = pair % sum(s)
            bounds = [0, s[0], s[0] + s[1], s[0] + s[1] + s[2]]
            if a["mode"] == VISION and sector in bounds:
                axis = bounds.index(sector)
                theta[axis] = float(place[axis])
            if a["mode"] == IMROPE:
                inside = sector < 3 * s[sector % 3]
                axis = sector % 3 if inside else 3
            else:
                axis = sum(sector >= bound for bound in bounds[1:])
        found.append(theta[axis] / factors[pair])
        theta = [one * scale for one in theta]
    return found


def yarn(theta: float, pair: int, a: dict[str, Any]) -> tuple[float, float]:
    """ggml's rope_yarn: cosine and sine."""
    size, scaled = a["attn_factor"], a["freq_scale"] * theta
    if a["ext_factor"]:
        ends = [
            a["n_dims"] * math.log(a["n_ctx_orig"] / (a[beta] * 2 * math.pi)) / (2 * math.log(a["freq_base"]))
            for beta in ("beta_fast", "beta_slow")
        ]
        low, high = max(0, math.floor(ends[0])), min(a["n_dims"] - 1, math.ceil(ends[1]))
        ramp = 1 - min(1, max(0, (pair - low) / max(0.001, high - low)))
        mix = ramp * a["ext_factor"]
        scaled = scaled * (1 - mix) + theta * mix
        size *= 1 + 0.1 * math.log(1 / a["freq_scale"])
    return math.cos(scaled) * size, math.sin(scaled) * size


def rope(x: Array, positions: Array, factors: Array | None, attributes: dict[str, Any]) -> Array:
    a = {**DEFAULTS, **attributes}
    result, width, dims = x.copy(), x.shape[-1], a["n_dims"]
    count = dims if a["mode"] == VISION else dims // 2
    divisors = [1.0] * width if factors is None else [*map(float, factors), *[1.0] * width]
    for token in range(x.shape[-3]):
        place = [int(p) for p in np.atleast_2d(positions.T)[token if positions.ndim > 1 else 0]]
        place = place if positions.ndim > 1 else [int(positions[token])]
        for pair, theta in enumerate(angles(place, width, divisors, a)[:count]):
            cosine, sine = yarn(theta, pair, a)
            i, j = (2 * pair, 2 * pair + 1) if a["mode"] == NORMAL else (pair, pair + count)
            i, j = i + a.get("offset", 0), j + a.get("offset", 0)
            first, second = x[..., token, :, i], x[..., token, :, j]
            result[..., token, :, i] = first * cosine - second * sine
            result[..., token, :, j] = first * sine + second * cosine
    return result


MODES: list[tuple[int, int, int, tuple[int, ...]]] = [
    (NORMAL, 8, 8, ()), (NORMAL, 12, 8, ()), (NEOX, 8, 8, ()), (NEOX, 12, 8, ()), (NEOX, 9, 4, ()),
    (MROPE, 16, 16, (2, 3, 3, 0)), (MROPE, 20, 16, (1, 2, 1, 1)), (MROPE, 16, 16, (0, 4, 4, 0)),
    (VISION, 16, 8, (4, 4, 4, 4)), (VISION, 24, 12, (2, 2, 2, 1)), (IMROPE, 16, 16, (3, 3, 2, 0)),
    (IMROPE, 32, 24, (4, 3, 2, 4)),
]  # fmt: skip
YARN = [
    {},
    {"freq_base": 500.0, "freq_scale": 0.25, "attn_factor": 1.5},
    {"freq_scale": 0.125, "ext_factor": 1.0, "n_ctx_orig": 64, "beta_fast": 8.0},
    {"freq_scale": 0.5, "ext_factor": 0.75, "n_ctx_orig": 4096, "freq_base": 100.0},
]


def rope_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, (mode, width, dims, sections), extra in itertools.product(FLOATS, MODES, YARN):
        for lead, tokens, heads in (((), 5, 3), ((2,), 1, 1), ((2, 1), 2, 2)):
            attributes = {"n_dims": dims, "mode": mode, "sections": sections, **extra}
            x = data(random, name, (*lead, tokens, heads, width))
            shape = (4, tokens) if sections else (tokens,)
            positions = random.integers(-3, 60, shape).astype(np.int32)
            yield Case(op, [x, positions], rope(wide(x), positions, None, attributes), attributes)
            factors = random.uniform(0.5, 2, width).astype(np.float32)
            expected = rope(wide(x), positions, wide(factors), attributes)
            yield Case(op, [x, positions, factors], expected, attributes)
    for mode, width, dims, sections in MODES:
        offset = width - (2 * dims if mode == VISION else dims)
        if offset:
            attributes = {"n_dims": dims, "mode": mode, "sections": sections, "offset": offset}
            x = data(random, "f32", (3, 2, width))
            positions = random.integers(0, 60, (4, 3) if sections else (3,)).astype(np.int32)
            yield Case(op, [x, positions], rope(wide(x), positions, None, attributes), attributes)
    nothing = [np.zeros((0, 2, 4), np.float32), np.zeros(0, np.int32)]
    yield Case(op, nothing, np.zeros((0, 2, 4)), {"n_dims": 4})
    far = [data(random, "f32", (2, 1, 8)), np.array([2**31 - 1, -(2**31)], np.int32)]
    yield Case(op, far, rope(wide(far[0]), far[1], None, {"n_dims": 8}), {"n_dims": 8})


def timestep_embedding_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    for name, dim, period, count in itertools.product(FLOATS, (1, 2, 7, 32), (1, 1000, 10000), (0, 1, 5)):
        x = np.abs(data(random, name, (count,))) * 300
        expected = np.zeros((count, dim))
        for row, j in itertools.product(range(count), range(dim // 2)):
            angle = float(x[row]) * math.exp(-math.log(period) * j / (dim // 2))
            expected[row, [j, j + dim // 2]] = math.cos(angle), math.sin(angle)
        yield Case(op, [x], expected, {"dim": dim, "max_period": period})


CASES: dict[str, Cases] = {"rope": rope_cases, "timestep_embedding": timestep_embedding_cases}

X, P, P4 = t("f32", 3, 2, 8), t("i32", 3), t("i32", 4, 3)


def refused(what: str, message: str, *types: Any, n_dims: int = 8, **attributes: Any) -> Refusal:
    return (what, "rope", list(types or (X, P)), {"n_dims": n_dims, **attributes}, message)


REFUSED: list[Refusal] = [
    refused("a mode of no model", "mode is 1", mode=1),
    refused("odd dimensions", "must be even", n_dims=7),
    refused("more dimensions than the row", "n_dims is 10", n_dims=10),
    refused("an offset below 0", "offset is -1", n_dims=4, offset=-1),
    refused("an offset past the row", "offset is 5", n_dims=4, offset=5),
    refused("an offset in vision", "offset is 1", X, P4, n_dims=4, mode=VISION, sections=(1, 1, 1, 1),
            offset=1),
    refused("dimensions below 2", "n_dims is -2", n_dims=-2),
    refused("rotated matrices", "at least 3", t("f32", 3, 8), P),
    refused("positions that are i64", "needs i32[3]", X, t("i64", 3)),
    refused("positions too few", "needs i32[3]", X, t("i32", 2)),
    refused("one position of four", "needs i32[4, 3]", X, P, mode=MROPE, sections=(1, 1, 1, 1)),
    refused("four positions of one", "needs i32[3]", X, P4),
    refused("factors too few", "each of 4 pairs", X, P, t("f32", 3)),
    refused("factors for vision too few", "each of 4 pairs", X, P4, t("f32", 3), n_dims=4, mode=VISION,
            sections=(2, 2, 2, 2)),
    refused("factors that are f16", "each of 4 pairs", X, P, t("f16", 4)),
    refused("vision of the whole row", "half of the row", X, P4, mode=VISION, sections=(1, 1, 1, 1)),
    refused("no sections", "four sizes needed", X, P4, mode=MROPE),
    refused("sections of zero", "four sizes needed", X, P4, mode=MROPE, sections=(0, 0, 0, 1)),
    refused("a negative section", "four sizes needed", X, P4, mode=MROPE, sections=(1, -1, 1, 1)),
    refused("sections past the row", "four sizes needed", X, P4, mode=IMROPE, sections=(3, 3, 3, 0)),
    refused("sections past 64 bits", "four sizes needed", X, P4, mode=MROPE, sections=(2**63 - 1,) * 4),
    refused("an empty section", "must be the last", X, P4, n_dims=4, mode=VISION, sections=(0, 4, 0, 0)),
    refused("sections of a plain mode", "has no sections", sections=(1, 1, 1, 1)),
    refused("a base of 0", "freq_base is 0.0", freq_base=0.0),
    refused("a base that is NaN", "freq_base is nan", freq_base=math.nan),
    refused("a scale of -1", "freq_scale is -1.0", freq_scale=-1.0),
    refused("an infinite factor", "ext_factor is inf", ext_factor=math.inf),
    refused("an attention factor that is NaN", "attn_factor is nan", attn_factor=math.nan),
    refused("YaRN of no context", "needs n_ctx_orig", ext_factor=1.0),
    refused("YaRN of base 1", "freq_base that is not 1", ext_factor=1.0, n_ctx_orig=8, freq_base=1.0),
    refused("a negative context", "n_ctx_orig is -1", n_ctx_orig=-1),
    refused("a beta of 0", "beta_slow is 0.0", beta_slow=0.0),
    ("no embedding", "timestep_embedding", [t("f32", 2)], {"dim": 0}, "dim is 0"),
    ("a huge embedding", "timestep_embedding", [t("f32", 2)], {"dim": 2**31}, "dim is 2147483648"),
    ("a period of 0", "timestep_embedding", [t("f32", 2)], {"dim": 2, "max_period": 0}, "max_period is 0"),
    ("timesteps of two dimensions", "timestep_embedding", [t("f32", 2, 2)], {"dim": 2}, "one dimension"),
]  # fmt: skip
