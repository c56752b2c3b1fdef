"""Methods of a plan whose signatures name the plan's own inputs, so that `plan.run(` can be
completed.

The inputs of a plan are keywords of its methods, but only the plan knows them. Such a method is
looked up as a copy of its function, the plan's own, with `__signature__`; calls run the same code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import WRAPPER_ASSIGNMENTS, update_wrapper
from keyword import iskeyword
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from heliograph_proto.types import TensorType

if TYPE_CHECKING:
    from heliograph._base.plan import PlanBase

_F = TypeVar("_F", bound=Callable[..., Any])


def names_inputs(method: _F) -> _F:
    """Give a method of a plan, whose keywords are inputs, a signature with the plan's inputs."""
    return cast(_F, _NamesInputs(cast(FunctionType, method)))


class _NamesInputs:
    """The descriptor of such a method. Of the class it is the plain function."""

    def __init__(self, function: FunctionType) -> None:
        self._function = function
        self._name = function.__name__
        update_wrapper(cast(Any, self), function)

    def __get__(self, plan: PlanBase | None, owner: type[PlanBase]) -> Any:
        if plan is None:
            return self._function
        # Every run passes here. The functions are the plan's, and refer to no plan: no cycle keeps it.
        made = plan._methods.get(self._name)
        return MethodType(made or self._made(plan), plan)

    def _made(self, plan: PlanBase) -> FunctionType:
        function = self._function
        made = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, None
        )
        made.__kwdefaults__ = function.__kwdefaults__
        for name in WRAPPER_ASSIGNMENTS:
            if hasattr(function, name):
                setattr(made, name, getattr(function, name))
        made.__signature__ = named_signature(function, plan.inputs)  # type: ignore[attr-defined]
        plan._methods[self._name] = made
        return made


def named_signature(function: Callable[..., Any], inputs: Mapping[str, TensorType]) -> inspect.Signature:
    """Return a function's signature with the inputs as keywords before its options.

    Names that are no identifiers, or options of the method, can be given in a mapping alone.
    """
    plain = inspect.signature(function)
    kinds = inspect.Parameter
    own = list(plain.parameters.values())
    named = [
        kinds(name, kinds.KEYWORD_ONLY, annotation=str(type_))
        for name, type_ in inputs.items()
        if name.isidentifier() and not iskeyword(name) and name not in plain.parameters
    ]
    options = [one for one in own if one.kind is kinds.KEYWORD_ONLY]
    rest = [one for one in own if one.kind is kinds.VAR_KEYWORD]
    first = [one for one in own if one not in options and one not in rest]
    return plain.replace(parameters=[*first, *named, *options, *rest])
