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
#: Why an op is refused, by its name.
REFUSED: dict[str, str] = {}
#: Ops whose result differs from call to call, which are therefore never computed on the host.
RANDOM = frozenset({"bernoulli", "native_dropout", "rand", "rand_like", "randint", "randn", "randperm"})


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
