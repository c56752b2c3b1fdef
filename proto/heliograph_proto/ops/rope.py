"""Rows and rules of rotary position embedding, in ggml's modes, and of timestep embedding."""

from __future__ import annotations

from heliograph_proto.errors import InvalidGraphError
from heliograph_proto.ops.activations import require_finite
from heliograph_proto.ops.row import Attribute, Op
from heliograph_proto.ops.rules import (
    FLOATS,
    LARGEST,
    Attributes,
    Types,
    require_kind,
    require_rank,
    require_within,
)
from heliograph_proto.types import F32, TensorType

#: ggml's numbers of the modes.
NORMAL, NEOX, MROPE, VISION, IMROPE = 0, 2, 8, 24, 40
#: Modes with four positions per token and sections of the row that use them.
SECTIONED = (MROPE, VISION, IMROPE)


def pairs(attributes: Attributes) -> int:
    """Return the number of rotated pairs in each row."""
    dims: int = attributes["n_dims"]
    return dims if attributes["mode"] == VISION else dims // 2


def rope(types: Types, attributes: Attributes) -> TensorType:
    """x [.., tokens, heads, d], positions i32 [tokens] or [4, tokens], optional factors f32 [>=
    pairs]."""
    x, positions, *factors = types
    require_kind(types[:1], FLOATS)
    require_rank(x, 3)
    _require_mode(x, attributes)
    _require_numbers(attributes)
    expected = (4, x.shape[-3]) if attributes["mode"] in SECTIONED else (x.shape[-3],)
    if positions.dtype.name != "i32" or positions.shape != expected:
        raise InvalidGraphError(
            f"positions are {positions}; mode {attributes['mode']} needs i32{[*expected]}"
        )
    for found in factors:
        if found.dtype is not F32 or found.ndim != 1 or found.size < pairs(attributes):
            raise InvalidGraphError(f"factors are {found}; f32 for each of {pairs(attributes)} pairs needed")
    return x


def _require_mode(x: TensorType, attributes: Attributes) -> None:
    mode, dims, width = attributes["mode"], attributes["n_dims"], x.shape[-1]
    if mode not in (NORMAL, NEOX, *SECTIONED):
        raise InvalidGraphError(f"mode is {mode}; ggml's are 0, 2, 8, 24 and 40")
    require_within("n_dims", dims, 2, width)
    if dims % 2 or (mode == VISION and 2 * dims != width):
        need = "half of the row" if mode == VISION else "even"
        raise InvalidGraphError(f"n_dims is {dims} of {x}; it must be {need}")
    require_within("offset", attributes["offset"], 0, width - 2 * pairs(attributes))
    sections = attributes["sections"]
    if mode not in SECTIONED:
        if sections:
            raise InvalidGraphError(f"mode {mode} has no sections")
        return
    if len(sections) != 4 or min(sections) < 0 or not any(sections[:3]) or sum(sections) > width:
        raise InvalidGraphError(f"sections are {sections}; four sizes needed, within {width} together")
    # ggml restarts the angles at the start of each section, which an empty one before it would
    # hide.
    if mode == VISION and any(not a and b for a, b in zip(sections, sections[1:], strict=False)):
        raise InvalidGraphError(f"sections are {sections}; an empty one must be the last")


def _require_numbers(attributes: Attributes) -> None:
    positive = ("freq_base", "freq_scale", "beta_fast", "beta_slow")
    require_finite(attributes, "ext_factor", "attn_factor", *positive)
    require_within("n_ctx_orig", attributes["n_ctx_orig"], 0)
    for name in positive:
        if attributes[name] <= 0:
            raise InvalidGraphError(f"{name} is {attributes[name]}; it must be positive")
    if attributes["ext_factor"] and (attributes["n_ctx_orig"] == 0 or attributes["freq_base"] == 1):
        raise InvalidGraphError("YaRN (ext_factor) needs n_ctx_orig, and a freq_base that is not 1")


def timestep_embedding(types: Types, attributes: Attributes) -> TensorType:
    """[n] to [n, dim], f32."""
    require_kind(types, FLOATS)
    require_within("dim", attributes["dim"], 1, LARGEST)
    require_within("max_period", attributes["max_period"], 1, LARGEST)
    if types[0].ndim != 1:
        raise InvalidGraphError(f"timesteps are {types[0]}; one dimension needed")
    return TensorType(F32, (*types[0].shape, attributes["dim"]))


#: ggml's, for angles computed in f32.
ANGLE_TOLERANCE = 1e-3

ROWS: tuple[Op, ...] = (
    Op(
        "rope", ("x", "positions", "factors?"), "rows", rope,
        "Rotary position embedding of x [.., tokens, heads, d] by positions [tokens], in ggml's `mode`: 0 "
        "pairs neighbours, 2 pairs halves (NeoX), 8, 24, 40 use positions [4, tokens] and `sections` "
        "(M-RoPE, vision, interleaved). Factors divide the frequencies; `ext_factor` is YaRN's. The "
        "`n_dims` rotated elements start at `offset`.",
        (
            Attribute("n_dims", "integer"), Attribute("mode", "integer", NORMAL),
            Attribute("sections", "integers", ()), Attribute("n_ctx_orig", "integer", 0),
            Attribute("freq_base", "real", 10000.0), Attribute("freq_scale", "real", 1.0),
            Attribute("ext_factor", "real", 0.0), Attribute("attn_factor", "real", 1.0),
            Attribute("beta_fast", "real", 32.0), Attribute("beta_slow", "real", 1.0),
            Attribute("offset", "integer", 0),
        ),
        (0,), ANGLE_TOLERANCE,
    ),
    Op(
        "timestep_embedding", ("timesteps",), "rows", timestep_embedding,
        "For each timestep, `dim` numbers in f32: cosines, then sines of it times falling frequencies from "
        "1 to almost 1 / max_period; with an odd `dim` the last is 0.",
        (Attribute("dim", "integer"), Attribute("max_period", "integer", 10000)), (), 1e-6,
    ),
)  # fmt: skip
