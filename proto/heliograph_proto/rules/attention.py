"""Rules of softmax with ALiBi and sinks, and of group norm."""

from __future__ import annotations

from heliograph_proto.errors import InvalidGraphError
from heliograph_proto.rules import FLOATS, Attributes, Types, broadcast_shapes, require_kind, require_rank
from heliograph_proto.rules.activations import require_finite, require_not_negative
from heliograph_proto.rules.rows import require_within
from heliograph_proto.types import DType, TensorType


def require_bias_types(found: DType, others: Types) -> None:
    """Raises unless masks and sinks have the data type of the scores, or are f16 or f32 as in ggml."""
    for other in others:
        if other.dtype is not found and other.dtype.name not in ("f16", "f32"):
            raise InvalidGraphError(f"mask or sinks {other} beside {found}: the data types do not fit")


def require_sinks(sinks: TensorType, heads: int) -> None:
    """Raises unless there is one sink for each head."""
    if sinks.shape != (heads,):
        raise InvalidGraphError(f"sinks {sinks}: one number for each of {heads} heads needed")


def require_bias(types: Types, attributes: Attributes, mask: int) -> None:
    """Raises unless max_bias is a number that a mask is there for."""
    require_not_negative(attributes, "max_bias")
    if attributes["max_bias"] and len(types) <= mask:
        raise InvalidGraphError("max_bias without a mask: ALiBi's slopes multiply the mask")


def soft_max(types: Types, attributes: Attributes) -> TensorType:
    """Scores, optionally a mask that broadcasts to them, optionally sinks [heads]; heads are axis -3."""
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


def group_norm(types: Types, attributes: Attributes) -> TensorType:
    """[.., channels, h, w]; from 1 group up to as many as there are channels."""
    require_kind(types, FLOATS)
    require_rank(types[0], 3)
    require_not_negative(attributes, "eps")
    require_within("groups", attributes["groups"], 1, max(1, types[0].shape[-3]))
    return types[0]
