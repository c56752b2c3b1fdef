"""Formulas: gated linear units, and activations with parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy

from heliograph_backends.reference import basic
from heliograph_backends.reference.base import Array, Attributes, Formula, constant, in_wide


def xielu(xp: Any, attributes: Attributes, x: Array) -> Array:
    """xIELU (Huang and Schlag, 2024), whose two slopes are softplus of the attributes."""
    beta = attributes["beta"]
    below = constant(x, beta + numpy.logaddexp(0.0, attributes["alpha_n"]))
    above = constant(x, numpy.logaddexp(0.0, attributes["alpha_p"]))
    linear = constant(x, beta) * x
    curved = xp.expm1(xp.minimum(x, constant(x, attributes["eps"]))) - x
    return xp.where(x > 0, above * x * x + linear, curved * below + linear)


def _parts(attributes: Attributes, x: Array, gate: Array | None) -> tuple[Array, Array]:
    """Return the activation's argument and its factor."""
    if gate is None:
        middle = x.shape[-1] // 2
        x, gate = x[..., :middle], x[..., middle:]
    return (gate, x) if attributes["swap"] else (x, gate)


def gated(activation: Formula) -> Formula:
    """Return the formula activation(x) * gate, where both are halves of the rows or two
    operands."""

    def formula(xp: Any, attributes: Attributes, x: Array, gate: Array | None = None) -> Array:
        x, gate = _parts(attributes, x, gate)
        return activation(xp, attributes, x) * gate

    return in_wide(formula)


def swiglu_clamp(xp: Any, attributes: Attributes, x: Array, gate: Array | None = None) -> Array:
    """The SwiGLU of DeepSeek V4 and GLM 5, clamped before the activation; x has no lower limit."""
    x, gate = _parts(attributes, x, gate)
    limit = constant(x, attributes["limit"])
    return basic.silu(xp, attributes, xp.minimum(x, limit)) * xp.clip(gate, -limit, limit)


def swiglu_oai(xp: Any, attributes: Attributes, x: Array, gate: Array | None = None) -> Array:
    """The SwiGLU of gpt-oss: clamped, with a slope in the sigmoid, times the gate plus 1."""
    x, gate = _parts(attributes, x, gate)
    limit, one = constant(x, attributes["limit"]), constant(x, 1)
    x, gate = xp.minimum(x, limit), xp.clip(gate, -limit, limit)
    return x / (one + xp.exp(constant(x, -attributes["alpha"]) * x)) * (gate + one)


FORMULAS: Mapping[str, Formula] = {
    "xielu": in_wide(xielu),
    "reglu": gated(basic.relu),
    "geglu": gated(basic.gelu),
    "geglu_erf": gated(basic.gelu_erf),
    "geglu_quick": gated(basic.gelu_quick),
    "swiglu": gated(basic.silu),
    "swiglu_clamp": in_wide(swiglu_clamp),
    "swiglu_oai": in_wide(swiglu_oai),
}
