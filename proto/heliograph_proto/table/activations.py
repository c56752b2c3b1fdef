"""Rows: gated linear units, and activations with parameters."""

from __future__ import annotations

from heliograph_proto.rules import activations
from heliograph_proto.table.row import Attribute, Op

_SWAP = Attribute("swap", "boolean", False)
_HALVES = "; without b, a and b are the halves of x's rows, and `swap` exchanges them."


def _glu(name: str, doc: str) -> Op:
    return Op(name, ("x", "b?"), "elementwise", activations.glu, doc + _HALVES, (_SWAP,), (), 1e-6)


ROWS: tuple[Op, ...] = (
    Op(
        "xielu", ("x",), "elementwise", activations.xielu,
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
        "swiglu_clamp", ("x", "b?"), "elementwise", activations.swiglu_clamp,
        "silu(a) * b, with a at most `limit` and b within it" + _HALVES,
        (Attribute("limit", "real"), _SWAP), (), 1e-6,
    ),
    Op(
        "swiglu_oai", ("x", "b?"), "elementwise", activations.swiglu_oai,
        "a * sigmoid(alpha a) * (b + 1), with a at most `limit` and b within it" + _HALVES,
        (Attribute("alpha", "real", 1.702), Attribute("limit", "real", 7.0), _SWAP), (), 1e-6,
    ),
)  # fmt: skip
