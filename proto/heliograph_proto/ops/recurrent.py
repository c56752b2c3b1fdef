"""Rows and rules of state space models, linear attention and solve_tri."""

from __future__ import annotations

from collections.abc import Sequence

from heliograph_proto.errors import InvalidGraphError
from heliograph_proto.ops.activations import require_finite
from heliograph_proto.ops.products import accumulated, divides, require_indices
from heliograph_proto.ops.row import Attribute, Op
from heliograph_proto.ops.rules import (
    FLOATS,
    Attributes,
    Types,
    require_kind,
    require_one_dtype,
    require_rank,
    require_within,
)
from heliograph_proto.types import TensorType


def require_shape(name: str, found: TensorType, *allowed: Sequence[int]) -> None:
    """Raise unless the operand has one of these shapes."""
    if found.shape not in map(tuple, allowed):
        needed = " or ".join(str([*shape]) for shape in allowed)
        raise InvalidGraphError(f"{name} is {found}; its shape must be {needed}")


def _sizes(name: str, found: TensorType, words: str) -> tuple[int, ...]:
    """Return the operand's sizes, one per word."""
    if found.ndim != len(words.split()):
        raise InvalidGraphError(f"{name} is {found}; [{', '.join(words.split())}] needed")
    return found.shape


def ssm_conv(types: Types, attributes: Attributes) -> TensorType:
    """x [n, c, t + k - 1] and kernel [c, k] give [n, t, c]."""
    x, kernel = types
    dtype = accumulated(types)
    sequences, channels, length = _sizes("x", x, "n c length")
    taps = _sizes("kernel", kernel, "c k")[1]
    if kernel.shape[0] != channels or not 1 <= taps <= length + 1:
        raise InvalidGraphError(f"ssm_conv of {x} with {kernel}: their channels or lengths do not fit")
    return TensorType(dtype, (sequences, length - taps + 1, channels))


def ssm_scan(types: Types, attributes: Attributes) -> TensorType:
    """States [m, h, d, s], x [n, t, h, d], dt [n, t, h], A [h, s or 1], B and C [n, t, g, s], ids
    [n]."""
    states, x, dt, a, b, c, ids = types
    dtype = accumulated(types[:-1])
    require_indices(ids)
    sequences, tokens, heads, width = _sizes("x", x, "n t h d")
    state = _sizes("states", states, "m h d s")[-1]
    groups = _sizes("B", b, "n t g s")[2]
    require_shape("states", states, (states.shape[0], heads, width, state))
    require_shape("dt", dt, (sequences, tokens, heads))
    require_shape("A", a, (heads, state), (heads, 1))
    for name, found in (("B", b), ("C", c)):
        require_shape(name, found, (sequences, tokens, groups, state))
    require_shape("ids", ids, (sequences,))
    if not divides(groups, heads):
        raise InvalidGraphError(f"{groups} groups of B and C do not divide {heads} heads")
    kept = attributes["snapshots"]
    require_within("snapshots", kept, 1)
    if kept > 1 and a.shape[1] != 1:
        raise InvalidGraphError(f"snapshots is {kept}; with A {a} it must be 1", advice="A [h, 1] is Mamba 2")
    return TensorType(dtype, (x.size + kept * sequences * heads * width * state,))


def wkv(types: Types, tokenwise: Sequence[str]) -> TensorType:
    """Operands [t, h, s] with these names, and last a state [n, h s s], give [t + n s, h s]."""
    *others, state = types
    dtype = accumulated(types)
    tokens, heads, width = _sizes(tokenwise[0], others[0], "t h s")
    for name, found in zip(tokenwise, others, strict=True):
        require_shape(name, found, (tokens, heads, width))
    sequences = _sizes("state", state, "n elements")[0]
    require_shape("state", state, (sequences, heads * width * width))
    if sequences < 1 or tokens % sequences:
        raise InvalidGraphError(f"{tokens} tokens do not divide into {sequences} sequences of equal length")
    return TensorType(dtype, (tokens + sequences * width, heads * width))


def rwkv_wkv6(types: Types, attributes: Attributes) -> TensorType:
    """k, v, r, decay [t, h, s], first [h, s], state [n, h s s]."""
    k, v, r, first, decay, state = types
    accumulated(types)
    found = wkv([k, v, r, decay, state], ("k", "v", "r", "decay"))
    require_shape("first", first, k.shape[1:])
    return found


def rwkv_wkv7(types: Types, attributes: Attributes) -> TensorType:
    """r, w, k, v, a, b [t, h, s], state [n, h s s]."""
    return wkv(types, ("r", "w", "k", "v", "a", "b"))


def gated_linear_attn(types: Types, attributes: Attributes) -> TensorType:
    """k, v, q, g [t, h, s], state [n, h s s]; scale is finite."""
    require_finite(attributes, "scale")
    return wkv(types, ("k", "v", "q", "g"))


def gated_delta_net(types: Types, attributes: Attributes) -> TensorType:
    """q and k [n', t, h', s], v [n, t, h, s], g [n, t, h, s or 1], beta [n, t, h, 1], state [n, h,
    s, s]."""
    q, k, v, g, beta, state = types
    dtype = accumulated(types)
    sequences, tokens, heads, width = _sizes("v", v, "n t h s")
    for name, found in (("q", q), ("k", k)):
        own = _sizes(name, found, "n t h s")
        require_shape(name, found, (own[0], tokens, own[2], width))
        if not (divides(own[0], sequences) and divides(own[2], heads)):
            raise InvalidGraphError(f"{name} {found}: its sequences and heads do not divide those of v {v}")
    require_shape("g", g, (sequences, tokens, heads, width), (sequences, tokens, heads, 1))
    require_shape("beta", beta, (sequences, tokens, heads, 1))
    require_shape("state", state, (sequences, heads, width, width))
    kept = attributes["snapshots"]
    require_within("snapshots", kept, 1)
    return TensorType(dtype, (tokens * sequences + kept * width * sequences, heads * width))


def solve_tri(types: Types, attributes: Attributes) -> TensorType:
    """a [.., n, n] and b [.., n, k], equal in all other dimensions, give [.., n, k]."""
    a, b = types
    require_kind(types, FLOATS)
    require_one_dtype(types)
    require_rank(a, 2)
    require_rank(b, 2)
    if a.shape[-1] != a.shape[-2] or a.shape[:-1] != b.shape[:-1]:
        raise InvalidGraphError(f"solve_tri of {a} and {b}: [.., n, n] and [.., n, k] needed")
    return b


_SNAPSHOTS = Attribute("snapshots", "integer", 1)
_PACKED = " The result, [t + n s, h s], is the tokens' rows, then the states."

ROWS: tuple[Op, ...] = (
    Op(
        "ssm_conv", ("x", "kernel"), "window", ssm_conv,
        "The convolution, [n, t, c], of each channel of x [n, c, t + k - 1] with its kernel [c, k], in f32.",
        (), (), 1e-6,
    ),
    Op(
        "ssm_scan", ("states", "x", "dt", "a", "b", "c", "ids"), "attention", ssm_scan,
        "Mamba's scan, in f32: for each token of x [n, t, h, d] states [m, h, d, s] become exp(p a) state + "
        "p x b, p = softplus(dt), and y is the sum of state c; a is [h, s] (Mamba 1) or [h, 1] (Mamba 2). "
        "The result is flat: y in x's order, then the states of the last `snapshots` tokens, newest first, "
        "0 where there are none. ids select the initial states of sequences; an id out of range fails the "
        "run.",
        (_SNAPSHOTS,), (), 1e-6,
    ),
    Op(
        "rwkv_wkv6", ("k", "v", "r", "first", "decay", "state"), "attention", rwkv_wkv6,
        "RWKV 6, in f32: of k, v, r [t, h, s] a token's row is r (first kv + state), kv the outer product of "
        "k and v; then the state becomes decay state + kv." + _PACKED,
        (), (), 1e-6,
    ),
    Op(
        "rwkv_wkv7", ("r", "w", "k", "v", "a", "b", "state"), "attention", rwkv_wkv7,
        "RWKV 7, in f32: the state, [values, keys], becomes w state + v k^T + (state a) b^T, and a token's "
        "row is state r, of operands [t, h, s]." + _PACKED,
        (), (), 1e-6,
    ),
    Op(
        "gated_linear_attn", ("k", "v", "q", "g", "state"), "attention", gated_linear_attn,
        "Gated linear attention, in f32: the state, [keys, values], becomes g state + k v^T, and a token's "
        "row is scale q state, of operands [t, h, s]." + _PACKED,
        (Attribute("scale", "real", 1.0),), (), 1e-6,
    ),
    Op(
        "gated_delta_net", ("q", "k", "v", "g", "beta", "state"), "attention", gated_delta_net,
        "The gated delta rule, in f32: states [n, h, values, keys] become S exp(g), then S + beta (v - S k) "
        "k^T, and a token's row is S q / sqrt(s). Heads of q and k repeat over those of v. The result is "
        "[n t + snapshots n s, h s]: rows, then the states of the last tokens, newest first.",
        (_SNAPSHOTS,), (), 1e-6,
    ),
    Op(
        "solve_tri", ("a", "b"), "matmul", solve_tri,
        "The solution x of a x = b, for b [.., n, k] and the lower triangle of a [.., n, n].",
        (), (1,), 1e-6,
    ),
)  # fmt: skip
