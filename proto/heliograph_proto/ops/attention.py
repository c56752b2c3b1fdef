"""Rows and rules of softmax with ALiBi and sinks, of attention, and of group norm."""

from __future__ import annotations

from heliograph_proto.errors import InvalidGraphError
from heliograph_proto.ops.activations import require_finite, require_not_negative
from heliograph_proto.ops.products import accumulated, require_repeats
from heliograph_proto.ops.row import PRODUCT_TOLERANCE, Attribute, Op
from heliograph_proto.ops.rules import (
    FLOATS,
    Attributes,
    Types,
    broadcast_shapes,
    require_kind,
    require_rank,
    require_within,
)
from heliograph_proto.types import DType, TensorType


def require_bias_types(found: DType, others: Types) -> None:
    """Raise unless masks and sinks have the data type of the scores, or at most 32 bits."""
    for other in others:
        if other.dtype is not found and other.dtype.name not in ("bf16", "f16", "f32"):
            raise InvalidGraphError(
                f"mask or sinks {other} with scores of {found}: the data types do not fit"
            )


def require_sinks(sinks: TensorType, heads: int) -> None:
    """Raise unless there is one sink for each head."""
    if sinks.shape != (heads,):
        raise InvalidGraphError(f"sinks {sinks}: one number for each of {heads} heads needed")


def require_bias(types: Types, attributes: Attributes, mask: int) -> None:
    """Raise unless max_bias is valid, and a mask is given if it is not 0."""
    require_not_negative(attributes, "max_bias")
    if attributes["max_bias"] and len(types) <= mask:
        raise InvalidGraphError("max_bias without a mask: ALiBi's slopes multiply the mask")


def soft_max(types: Types, attributes: Attributes) -> TensorType:
    """Scores, optionally a mask that broadcasts to them, optionally sinks [heads]; heads are axis
    -3."""
    x = types[0]
    require_kind(types, FLOATS)
    require_rank(x, 1)
    if x.shape[-1] == 0:
        raise InvalidGraphError(f"operand {x} has empty rows")
    require_finite(attributes, "scale")
    require_bias(types, attributes, 1)
    require_bias_types(x.dtype, types[1:])
    if len(types) > 1 and broadcast_shapes(x.shape, types[1].shape) != x.shape:
        raise InvalidGraphError(f"mask {types[1]} does not broadcast to {x}")
    if len(types) > 2:
        require_sinks(types[2], x.shape[-3] if x.ndim > 2 else 1)
    return x


def flash_attn_ext(types: Types, attributes: Attributes) -> TensorType:
    """q [b, h, m, d], k [b', h', n, d], v [b', h', n, dv], mask [.., m, n], sinks [h] give [b, m,
    h, dv]."""
    q, k, v = types[:3]
    dtype = accumulated((k, v, q), weights=2)
    require_kind(types[3:], FLOATS)
    if not q.ndim == k.ndim == v.ndim == 4:
        raise InvalidGraphError(f"q {q}, k {k} and v {v}: four dimensions needed")
    if q.shape[-1] != k.shape[-1] or k.shape[:-1] != v.shape[:-1]:
        raise InvalidGraphError(f"q {q}, k {k} and v {v}: their sizes do not fit")
    require_repeats(k, q, 2)
    require_finite(attributes, "scale")
    require_not_negative(attributes, "logit_softcap")
    require_bias(types, attributes, 3)
    require_bias_types(dtype, types[3:])
    if len(types) > 3:
        _require_mask(types[3], TensorType(dtype, (*q.shape[:-1], k.shape[-2])))
    if len(types) > 4:
        require_sinks(types[4], q.shape[1])
    return TensorType(dtype, (q.shape[0], q.shape[2], q.shape[1], v.shape[-1]))


def flash_attn_paged(types: Types, attributes: Attributes) -> TensorType:
    """q [b, h, n, d], k [pages, h', page, d], v [pages, h', page, dv], mask [.., n, m * page],
    pages i32 [b, m], sinks [h] give [b, n, h, dv]."""
    q, k, v, mask, pages, *sinks = types
    require_kind((pages,), ("int",))
    if not q.ndim == k.ndim == v.ndim == 4:
        raise InvalidGraphError(f"q {q}, k {k} and v {v}: four dimensions needed")
    if q.shape[-1] != k.shape[-1] or k.shape[:-1] != v.shape[:-1]:
        raise InvalidGraphError(f"q {q}, k {k} and v {v}: their sizes do not fit")
    if pages.dtype.name != "i32" or pages.ndim != 2 or pages.shape[0] != q.shape[0]:
        raise InvalidGraphError(f"pages {pages} of q {q}: i32 [{q.shape[0]}, m] needed")
    _, heads, page, _ = k.shape
    keys = (q.shape[0], heads, pages.shape[1] * page)
    gathered = [TensorType(each.dtype, (*keys, each.shape[-1])) for each in (k, v)]
    return flash_attn_ext((q, *gathered, mask, *sinks), attributes)


def _require_mask(mask: TensorType, scores: TensorType) -> None:
    require_rank(mask, 2)
    if mask.shape[-2:] != scores.shape[-2:]:
        raise InvalidGraphError(f"mask {mask} of scores {scores}: rows and columns must be equal")
    require_repeats(mask, scores, 2)


def group_norm(types: Types, attributes: Attributes) -> TensorType:
    """[.., channels, h, w]; `groups` is from 1 to the number of channels."""
    require_kind(types, FLOATS)
    require_rank(types[0], 3)
    require_not_negative(attributes, "eps")
    require_within("groups", attributes["groups"], 1, max(1, types[0].shape[-3]))
    return types[0]


_SCALE = Attribute("scale", "real", 1.0)
_MAX_BIAS = Attribute("max_bias", "real", 0.0)

ROWS: tuple[Op, ...] = (
    Op(
        "soft_max", ("x", "mask?", "sinks?"), "rows", soft_max,
        "exp(y - max(y)) / sum, for each row of y = x * scale + slope * mask; slopes are 1, or with "
        "max_bias ALiBi's of the heads, axis -3. Each head may have a sink: one more score.",
        (_SCALE, _MAX_BIAS), (0,), 1e-6,
    ),
    Op(
        "flash_attn_ext", ("q", "k", "v", "mask?", "sinks?"), "attention", flash_attn_ext,
        "Attention, [b, m, h, dv], of q [b, h, m, d], k [b, kv, n, d] and v [b, kv, n, dv], where heads "
        "share keys as in mul_mat, with soft_max's mask, slopes and sinks; with a cap, scores are cap * "
        "tanh(score / cap). A fully masked row gives 0. k and v may be blocks.",
        (_SCALE, _MAX_BIAS, Attribute("logit_softcap", "real", 0.0)), (), PRODUCT_TOLERANCE,
    ),
    Op(
        "flash_attn_paged", ("q", "k", "v", "mask", "pages", "sinks?"), "attention", flash_attn_paged,
        "flash_attn_ext over keys and values in pages, k [pages, kv, page, d] and v [pages, kv, page, dv]: "
        "those of a row of q are those of its `pages` (i32 [b, m]) in order, m * page of them. All numbers "
        "must be of pages. Hidden positions may hold any finite "
        "numbers; pages of no others are not read.",
        (_SCALE, _MAX_BIAS, Attribute("logit_softcap", "real", 0.0)), (), PRODUCT_TOLERANCE,
    ),
    Op(
        "group_norm", ("x",), "rows", group_norm,
        "(x - mean) / sqrt(variance + eps) over each of the groups of channels of x [.., channels, h, w].",
        (Attribute("groups", "integer"), Attribute("eps", "real", 1e-5)), (0,), 1e-6,
    ),
)  # fmt: skip
