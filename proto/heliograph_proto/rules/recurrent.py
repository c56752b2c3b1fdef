"""Rules of state space models and linear attention, whose states run along the tokens, and of solve_tri."""

from __future__ import annotations

from collections.abc import Sequence

from heliograph_proto.errors import InvalidGraphError
from heliograph_proto.rules import FLOATS, Attributes, Types, require_kind, require_one_dtype, require_rank
from heliograph_proto.rules.activations import require_finite
from heliograph_proto.rules.products import accumulated, divides, require_indices
from heliograph_proto.rules.rows import require_within
from heliograph_proto.types import TensorType


def require_shape(name: str, found: TensorType, *allowed: Sequence[int]) -> None:
    """Raises unless the operand has one of these shapes."""
    if found.shape not in map(tuple, allowed):
        needed = " or ".join(str([*shape]) for shape in allowed)
        raise InvalidGraphError(f"{name} is {found}; its shape must be {needed}")


def _sizes(name: str, found: TensorType, words: str) -> tuple[int, ...]:
    """The operand's sizes, one for each word."""
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
    """States [m, h, d, s], x [n, t, h, d], dt [n, t, h], A [h, s or 1], B and C [n, t, g, s], ids [n]."""
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
        raise InvalidGraphError(f"{tokens} tokens are not those of {sequences} sequences of equal length")
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
    """q and k [n', t, h', s], v [n, t, h, s], g [n, t, h, s or 1], beta [n, t, h, 1], state [n, h, s, s]."""
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
