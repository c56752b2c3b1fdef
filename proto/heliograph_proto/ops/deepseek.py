"""Rows and rules of DeepSeek's ops: the lightning indexer, and hyper-connections."""

from __future__ import annotations

import math

from heliograph_proto.errors import InvalidGraphError
from heliograph_proto.ops.activations import require_finite, require_not_negative
from heliograph_proto.ops.attention import require_bias_types
from heliograph_proto.ops.products import accumulated, divides
from heliograph_proto.ops.recurrent import require_shape
from heliograph_proto.ops.row import PRODUCT_TOLERANCE, Attribute, Op
from heliograph_proto.ops.rules import FLOATS, Attributes, Types, require_kind, require_within
from heliograph_proto.types import TensorType

#: DeepSeek's models use 20 iterations, which converge long before this.
MOST_ITERATIONS = 1000


def lightning_indexer(types: Types, attributes: Attributes) -> TensorType:
    """q [s, t, h, d], k [s, n, 1, d], weights [s, 1, t, h] and mask [s', 1, t, n] give [s, 1, t,
    n]."""
    q, k, weights, mask = types
    dtype = accumulated((k, q, weights), weights=1)
    require_kind([mask], FLOATS)
    require_bias_types(dtype, [mask])
    if not q.ndim == k.ndim == mask.ndim == 4:
        raise InvalidGraphError(f"q {q}, k {k} and mask {mask}: four dimensions needed")
    streams, tokens, heads, width = q.shape
    keys = k.shape[1]
    require_shape("k", k, (streams, keys, 1, width))
    require_shape("weights", weights, (streams, 1, tokens, heads))
    require_shape("mask", mask, (mask.shape[0], 1, tokens, keys))
    if not divides(mask.shape[0], streams):
        raise InvalidGraphError(f"mask {mask}: its streams do not divide those of q {q}")
    return TensorType(dtype, (streams, 1, tokens, keys))


def dsv4_hc_comb(types: Types, attributes: Attributes) -> TensorType:
    """Mixes [t, (2 + hc) hc], a scale of three numbers or more, base [(2 + hc) hc] give [t, hc,
    hc]."""
    mixes, scale, base = types
    dtype = accumulated(types)
    require_not_negative(attributes, "eps")
    require_within("iterations", attributes["iterations"], 1, MOST_ITERATIONS)
    if mixes.ndim != 2:
        raise InvalidGraphError(f"mixes are {mixes}; [t, (2 + hc) hc] needed")
    count = math.isqrt(mixes.shape[1] + 1) - 1
    if count < 1 or (2 + count) * count != mixes.shape[1]:
        raise InvalidGraphError(f"mixes are {mixes}; rows of (2 + hc) hc elements needed, such as 24")
    require_shape("base", base, mixes.shape[1:])
    if scale.ndim != 1 or scale.size < 3:
        raise InvalidGraphError(f"scale is {scale}; three numbers needed")
    return TensorType(dtype, (mixes.shape[0], count, count))


def dsv4_hc_pre(types: Types, attributes: Attributes) -> TensorType:
    """x [t, hc, n] and weights [t, hc], or gates [t, hc, n] with `gated`, give [t, n]."""
    x, weights = types
    dtype = accumulated(types)
    require_finite(attributes, "scale")
    if x.ndim != 3:
        raise InvalidGraphError(f"x is {x}; [t, hc, n] needed")
    require_shape("weights", weights, x.shape if attributes["gated"] else x.shape[:2])
    return TensorType(dtype, (x.shape[0], x.shape[2]))


def dsv4_hc_post(types: Types, attributes: Attributes) -> TensorType:
    """x [t, n], residual [t, hc, n], post [t, hc] and optionally comb [t, hc, hc] give [t, hc,
    n]."""
    x, residual, post, *comb = types
    dtype = accumulated(types)
    if residual.ndim != 3:
        raise InvalidGraphError(f"residual is {residual}; [t, hc, n] needed")
    tokens, count, width = residual.shape
    require_shape("x", x, (tokens, width))
    require_shape("post", post, (tokens, count))
    for found in comb:
        require_shape("comb", found, (tokens, count, count))
    return TensorType(dtype, residual.shape)


ROWS: tuple[Op, ...] = (
    Op(
        "lightning_indexer", ("q", "k", "weights", "mask"), "attention", lightning_indexer,
        "Scores [s, 1, t, n], in f32: the sum over heads of relu(q k) times the head's weight, plus a mask; "
        "of q [s, t, h, d], k [s, n, 1, d], weights [s, 1, t, h], mask [s', 1, t, n], which repeats. k "
        "may be blocks.",
        (), (), PRODUCT_TOLERANCE,
    ),
    Op(
        "dsv4_hc_comb", ("mixes", "scale", "base"), "rows", dsv4_hc_comb,
        "The mixing weights of hc streams, [t, from, to], in f32: the last hc hc elements of mixes * "
        "scale[2] + base, soft_max by rows plus eps, then columns and rows normalised in turn to sum to 1.",
        (Attribute("eps", "real"), Attribute("iterations", "integer")), (), 1e-6,
    ),
    Op(
        "dsv4_hc_pre", ("x", "weights"), "rows", dsv4_hc_pre,
        "`scale` times the sum over hc of x [t, hc, n] times weights [t, hc], in f32; with `gated` times the "
        "sigmoid of weights [t, hc, n].",
        (Attribute("scale", "real", 1.0), Attribute("gated", "boolean", False)), (), 1e-6,
    ),
    Op(
        "dsv4_hc_post", ("x", "residual", "post", "comb?"), "rows", dsv4_hc_post,
        "x [t, n] times post [t, hc], plus the residual's streams [t, hc, n], mixed by comb "
        "[t, from, to] if given, in f32.",
        (), (), 1e-6,
    ),
)  # fmt: skip
