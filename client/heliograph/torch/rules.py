"""The registry of rules: the function that expresses each op of ATen.

A rule is given its node, and then all arguments of the op's schema in their order, with defaults
filled in. Tensors are values of the graph. Its results are cast to the data types that torch gives
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Rule:
    """The function that expresses an op.

    `host`: tensors that are known before a run are given as tensors of torch.
    """

    function: Callable[..., Any]
    host: bool = False


#: Rules by the name of the op, "add", or of one overload, "var.dim".
RULES: dict[str, Rule] = {}
#: Activations for which there is one op here; PyTorch would make several of them.
ACTIVATIONS = frozenset({"hardsigmoid", "hardswish", "silu", "softplus"})
_COMPLEX = ("there are no complex numbers", "compute their parts, or leave the transform on the host")
_COUNTED = ("the shape of its result depends on what a run computes", "use torch.where, or a mask")
#: Why an op that writes into its operands is refused, and what to do.
MUTABLE = ("it writes into a tensor", "torch.export and torch.compile replace such ops: lower what they give")
#: Why an op is refused, by its name, and what to do.
REFUSED: dict[str, tuple[str, str]] = {
    "_fft_c2c": _COMPLEX,
    "_fft_c2r": _COMPLEX,
    "_fft_r2c": _COMPLEX,
    "complex": _COMPLEX,
    "masked_select": _COUNTED,
    "nonzero": _COUNTED,
    "repeat_interleave": _COUNTED,
    "resize_": ("it changes the memory of a tensor", "use view or reshape"),
    "_unique2": _COUNTED,
    "unique_consecutive": _COUNTED,
    "unique_dim": _COUNTED,
    "view_as_complex": _COMPLEX,
    "view_as_real": _COMPLEX,
}
#: Ops whose result differs from call to call, which are therefore never computed on the host.
RANDOM = frozenset(
    {
        "bernoulli",
        "native_dropout",
        "normal_functional",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "randperm",
        "uniform",
    }
)


def rule(*ops: str, host: bool = False) -> Callable[[_Function], _Function]:
    """Register a rule for ops."""

    def register(function: _Function) -> _Function:
        for op in ops:
            RULES[op] = Rule(function, host)
        return function

    return register


def find(name: str, overload: str) -> Rule | None:
    """Return the rule of an overload, or None."""
    return RULES.get(f"{name}.{overload}") or RULES.get(name)
