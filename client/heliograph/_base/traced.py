"""Functions of arrays that become plans, for both APIs: arguments, tracing, and known plans."""

from __future__ import annotations

import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, Generic, TypeVar, cast

import numpy as np

from heliograph._base.kept_plans import KeptPlans
from heliograph._base.plan import PlanBase
from heliograph._base.tensor import TensorBase
from heliograph.functions.trees import leaves_of, mapped, refilled
from heliograph.graph.arguments import counted
from heliograph.graph.builder import Graph
from heliograph.graph.symbol import Symbol
from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.types import TensorType, tensor_type

#: The most plans of a function, unless it says otherwise.
MAX_PLANS = 32

_PlanT = TypeVar("_PlanT", bound=PlanBase)


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a call, by the names of the function's parameters."""

    arguments: inspect.BoundArguments
    #: Arrays and tensors of the session, by their places in the arguments: "x", "model['w']".
    arrays: Mapping[str, Any]
    types: Mapping[str, TensorType]
    #: Everything that the plan depends on: structures, types, and the values of everything else.
    key: Hashable


@dataclass(frozen=True, slots=True)
class Traced:
    """The graph of a function for one kind of call."""

    graph: Graph
    #: The function's result; a value of the graph is the output of its number.
    returned: Any

    def filled(self, outputs: Mapping[str, Any]) -> Any:
        """Return what the function returned, with outputs of a run in the places of values."""
        places = iter(range(len(outputs)))
        return mapped(
            lambda leaf: outputs[str(next(places))] if isinstance(leaf, Symbol) else leaf, self.returned
        )


@dataclass(frozen=True, slots=True)
class Known(Generic[_PlanT]):
    """A plan of a function, and how its results are returned."""

    plan: _PlanT
    traced: Traced


class TracedFunction(Generic[_PlanT]):
    """A function of arrays whose plans are kept by the kinds of its arguments."""

    def __init__(self, function: Callable[..., Any], max_plans: int) -> None:
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise InvalidArgumentError(
                f"{function!r:.80} is no function of values",
                advice="a plain function, def f(x): ..., that computes with hg's functions",
            )
        if not isinstance(max_plans, int) or max_plans < 1:
            raise InvalidArgumentError(f"max_plans is {max_plans!r:.40}", advice="1 or more")
        self._function = function
        self._signature = inspect.signature(function)
        self._max_plans = max_plans
        self._known: KeptPlans[Known[_PlanT]] = KeptPlans(max_plans)
        self._has_warned = False
        update_wrapper(cast(Any, self), function)

    def __repr__(self) -> str:
        return f"<{self._name}, {counted(len(self._known), 'plan')}>"

    @property
    def _name(self) -> str:
        return f"function {getattr(self._function, '__qualname__', type(self._function).__name__)}"

    def _call(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Call:
        """Return the arguments in order. Raises InvalidArgumentError, TypeError."""
        bound = self._signature.bind(*arguments, **keywords)
        bound.apply_defaults()
        arrays: dict[str, Any] = {}
        types: dict[str, TensorType] = {}
        parts = []
        for name, argument in bound.arguments.items():
            parts.append(_structure(argument))
            for path, leaf in leaves_of(argument, name):
                parts.append(self._part(path, leaf, arrays, types))
        if not arrays:
            raise InvalidArgumentError(
                f"{self._name} was given no array",
                advice="its inputs are NumPy arrays and tensors of the session; numbers are constants",
            )
        return Call(bound, arrays, types, tuple(parts))

    def _part(self, path: str, leaf: Any, arrays: dict[str, Any], types: dict[str, TensorType]) -> Hashable:
        """Return the part of the key of one leaf, and note it if it is an array."""
        if isinstance(leaf, TensorBase):
            found: Any = leaf
            type_ = leaf.type
        elif hasattr(leaf, "__array__") and not isinstance(leaf, Symbol):
            found = np.asarray(leaf)
            type_ = _type_of(path, found)
        else:
            return self._constant(path, leaf)
        arrays[path], types[path] = found, type_
        return type_

    def _constant(self, path: str, leaf: Any) -> Hashable:
        if isinstance(leaf, Symbol):
            raise InvalidArgumentError(
                f"{self._name}: {path} is {leaf!r:.80}, a value of a graph",
                advice="inside of another function call the plain one: f.__wrapped__(x)",
            )
        try:
            hash(leaf)
        except TypeError:
            raise InvalidArgumentError(
                f"{self._name}: {path} is {leaf!r:.80}, neither an array nor a constant",
                advice="arguments are arrays, tensors, hashable constants, and lists, tuples and "
                "dictionaries of them",
            ) from None
        # -0.0 is no 0.0 here, and NaN is itself.
        return (type(leaf), leaf.hex() if isinstance(leaf, float) else leaf)

    def _keep(self, key: Hashable, made: Known[_PlanT]) -> Known[_PlanT]:
        """Keep a plan, and warn the first time that another one goes for it."""
        was_full = len(self._known) == self._max_plans
        kept = self._known.keep(key, made)
        if was_full and kept is made and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self._name} has more than {self._max_plans} kinds of calls, and the plans of the oldest "
                "are dropped: shapes, data types and the values of numbers make a kind; a number that "
                "changes is an input as np.float32(number), or raise max_plans",
                stacklevel=4,
            )
        return kept

    def _trace(self, call: Call) -> Traced:
        """Call the function with values in the places of arrays.

        Raises InvalidArgumentError for results that are none, and the function's own errors.
        """
        g = Graph()
        values = {path: g.input(path, type_.shape, type_.dtype) for path, type_ in call.types.items()}
        arguments = {
            name: refilled(one, (values.get(path, leaf) for path, leaf in leaves_of(one, name)))
            for name, one in call.arguments.arguments.items()
        }
        bound = inspect.BoundArguments(self._signature, OrderedDict(arguments))
        returned = self._function(*bound.args, **bound.kwargs)
        if inspect.isawaitable(returned) or isinstance(returned, Iterator):
            raise InvalidArgumentError(
                f"{self._name} returned {type(returned).__name__}", advice="return values of the graph"
            )
        outputs = [leaf for _, leaf in leaves_of(returned) if isinstance(leaf, Symbol)]
        if not outputs:
            raise InvalidArgumentError(
                f"{self._name} returned no value of the graph but {returned!r:.80}",
                advice="return what hg's functions gave: one value, or lists, tuples and dictionaries",
            )
        for number, value in enumerate(outputs):
            g.output(str(number), value)  # type: ignore[arg-type]
        return Traced(g, returned)


def _structure(tree: Any) -> Hashable:
    """Return the nesting of a tree, without its leaves."""
    if isinstance(tree, Mapping):
        return (dict, *((key, _structure(one)) for key, one in tree.items()))
    if isinstance(tree, (tuple, list)):
        return (type(tree), *map(_structure, tree))
    return tree is None


def _type_of(path: str, array: np.ndarray[Any, Any]) -> TensorType:
    try:
        return tensor_type(array.dtype, array.shape)
    except TypeError:
        raise InvalidArgumentError(
            f"{path} is an array of {array.dtype}, which no graph has", advice="convert it: array.astype(...)"
        ) from None
