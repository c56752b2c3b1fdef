"""Rules of gated linear units, and of activations with parameters."""

from __future__ import annotations

import math

from heliograph_proto.errors import InvalidGraphError
from heliograph_proto.ops.row import Attribute, Op
from heliograph_proto.ops.rules import (
    FLOATS,
    Attributes,
    Types,
    require_kind,
    require_one_dtype,
    require_rank,
)
from heliograph_proto.types import TensorType


def require_finite(attributes: Attributes, *names: str) -> None:
    """Raise unless these attributes are finite numbers."""
    for name in names:
        if not math.isfinite(attributes[name]):
            raise InvalidGraphError(f"{name} is {attributes[name]}; it must be finite")


def require_not_negative(attributes: Attributes, *names: str) -> None:
    """Raise unless these attributes are finite and not negative."""
    require_finite(attributes, *names)
    for name in names:
        if attributes[name] < 0:
            raise InvalidGraphError(f"{name} is {attributes[name]}; it must not be negative")


def xielu(types: Types, attributes: Attributes) -> TensorType:
    """A float operand and four finite numbers."""
    require_kind(types, FLOATS)
    require_finite(attributes, "alpha_n", "alpha_p", "beta", "eps")
    return types[0]


def glu(types: Types, attributes: Attributes) -> TensorType:
    """Rows of two halves, [.., 2 n] to [.., n], or two operands of one type."""
    require_kind(types, FLOATS)
    require_one_dtype(types)
    x = types[0]
    require_rank(x, 1)
    if len(types) == 2:
        if types[1].shape != x.shape:
            raise InvalidGraphError(f"operands are {x} and {types[1]}; their shapes must be equal")
        return x
    if x.shape[-1] % 2:
        raise InvalidGraphError(f"operand {x}: its rows must have an even number of elements")
    return TensorType(x.dtype, (*x.shape[:-1], x.shape[-1] // 2))


def swiglu_clamp(types: Types, attributes: Attributes) -> TensorType:
    """As glu; limit is not negative."""
    require_not_negative(attributes, "limit")
    return glu(types, attributes)


def swiglu_oai(types: Types, attributes: Attributes) -> TensorType:
    """As glu; alpha is finite, limit not negative."""
    require_finite(attributes, "alpha")
    require_not_negative(attributes, "limit")
    return glu(types, attributes)


_SWAP = Attribute("swap", "boolean", False)
_HALVES = "; without b, a and b are the halves of x's rows, which `swap` exchanges."


def _glu(name: str, doc: str) -> Op:
    return Op(name, ("x", "b?"), "elementwise", glu, doc + _HALVES, (_SWAP,), (), 1e-6)


ROWS: tuple[Op, ...] = (
    Op(
        "xielu", ("x",), "elementwise", xielu,
        "softplus(alpha_p) x^2 + beta x above 0, else (expm1(min(x, eps)) - x) (beta + softplus(alpha_n)) + "
        "beta x.",
        (Attribute("alpha_n", "real"), Attribute("alpha_p", "real"), Attribute("beta", "real", 0.5),
         Attribute("eps", "real", -1e-6)), (0,), 1e-6,
    ),
    _glu("reglu", "relu(a) * b"),
    _glu("geglu", "gelu(a) * b"),
    _glu("geglu_erf", "gelu_erf(a) * b"),
    _glu("geglu_quick", "gelu_quick(a) * b"),
    _glu("swiglu", "silu(a) * b"),
    Op(
        "swiglu_clamp", ("x", "b?"), "elementwise", swiglu_clamp,
        "silu(a) * b, with a at most `limit` and b within it" + _HALVES,
        (Attribute("limit", "real"), _SWAP), (), 1e-6,
    ),
    Op(
        "swiglu_oai", ("x", "b?"), "elementwise", swiglu_oai,
        "a * sigmoid(alpha a) * (b + 1), with a at most `limit` and b within it" + _HALVES,
        (Attribute("alpha", "real", 1.702), Attribute("limit", "real", 7.0), _SWAP), (), 1e-6,
    ),
)  # fmt: skip
