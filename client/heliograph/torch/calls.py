"""A call of an exported module: its arguments as the inputs of the graph, and its results."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree

import heliograph as hg

_KEYED = (dict, OrderedDict)
_ROWS = (list, tuple)
_ADVICE = "export the module with such example inputs: the graph has the structure that they had"


def arguments_of(
    signature: inspect.Signature, args: Sequence[Any], named: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name; those of `*args` as "args[0]".

    Raises TypeError for a call that does not fit.
    """
    found: dict[str, Any] = {}
    for name, value in signature.bind(*args, **named).arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            found.update((f"{name}[{place}]", one) for place, one in enumerate(value))
        elif kind is inspect.Parameter.VAR_KEYWORD:
            found.update(value)
        else:
            found[name] = value
    return found


class CallForm:
    """The form of the call that a module was exported with, which later calls must have.

    `form`: the structure of the example's arguments and results. `names`: the names of the inputs,
    in the order of that structure. `fixed`: those that the graph has as constants.
    """

    def __init__(
        self,
        signature: inspect.Signature,
        form: Any,
        names: Sequence[str],
        fixed: Mapping[str, Any],
    ) -> None:
        self._signature = signature
        self._results = form.out_spec
        self._fixed = fixed
        args, named = form.in_spec.children()
        left = iter(names)
        rows = [(one, [next(left) for _ in range(one.num_leaves)]) for one in args.children()]
        keyed = {
            key: (one, [next(left) for _ in range(one.num_leaves)])
            for key, one in zip(named.context, named.children(), strict=True)
        }
        #: The structure and the inputs of each argument of the example.
        self._examples: dict[str, tuple[Any, list[str]]] = arguments_of(signature, rows, keyed)

    def inputs(self, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a call gives by the names of the inputs. Raises InvalidInputError."""
        try:
            given = arguments_of(self._signature, args, named)
        except TypeError as error:
            raise hg.InvalidInputError(
                f"the call does not fit forward{self._signature!s:.200}: {error}",
                advice="call the plan as the module is called",
            ) from None
        found: dict[str, Any] = {}
        for name, (form, names) in self._examples.items():
            if name not in given and not self._has_default(name):
                raise hg.InvalidInputError(
                    f"argument {name!r:.80} was {self._wanted(form, names):.200} when the module was "
                    "exported, and is missing",
                    advice=_ADVICE,
                )
            found.update(
                self._leaves(form, given[name] if name in given else self._default(name), name, names)
            )
        for name, value in given.items():
            if name in self._examples:
                continue
            if not self._has_default(name):
                raise _misfit(name, "absent", value)
            if not _is_same(value, self._default(name)):
                raise _misfit(name, repr(self._default(name)), value)
        return found

    def restored(self, results: Sequence[Any]) -> Any:
        """Return the results in the structure that the module's forward gives."""
        return pytree.tree_unflatten(list(results), self._results)

    def _has_default(self, name: str) -> bool:
        known = self._signature.parameters
        return name in known and known[name].default is not inspect.Parameter.empty

    def _default(self, name: str) -> Any:
        return self._signature.parameters[name].default

    def _leaves(self, form: Any, value: Any, path: str, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """Yield the inputs' names with the leaves of a value of this structure.

        Raises InvalidInputError.
        """
        children, given = pytree.tree_flatten(value, is_leaf=lambda one: one is not value)
        if form.is_leaf() and given.is_leaf():
            name = names[0]
            is_same = _is_same(value, self._fixed[name]) if name in self._fixed else _is_feed(value)
            if not is_same:
                raise _misfit(path, self._wanted(form, names), value)
            yield name, value
            return
        keys: Sequence[Any] = range(form.num_children)
        if form.type in _KEYED and given.type in _KEYED and set(form.context) == set(given.context):
            keys = form.context
            children = [value[key] for key in keys]
        elif form.num_children != given.num_children or not (
            (form.type in _ROWS and given.type in _ROWS)
            or (form.type is given.type and form.context == given.context)
        ):
            raise _misfit(path, self._wanted(form, names), value)
        left = iter(names)
        for key, inner, one in zip(keys, form.children(), children, strict=True):
            yield from self._leaves(inner, one, f"{path}[{key!r}]", list(islice(left, inner.num_leaves)))

    def _wanted(self, form: Any, names: Sequence[str]) -> str:
        """Describe what the example had."""
        if form.is_leaf():
            return repr(self._fixed[names[0]]) if names[0] in self._fixed else "a tensor"
        return _container_text(form.type.__name__, form.context if form.type in _KEYED else form.num_children)


def _is_feed(value: Any) -> bool:
    """True if a value may serve as a tensor; a run checks what it is."""
    return value is not None and not isinstance(value, str)


def _is_same(value: Any, wanted: Any) -> bool:
    """True if a value is the constant that the graph was made with."""
    if value is wanted:
        return True
    is_array = isinstance(value, (torch.Tensor, np.ndarray))
    return type(value) is type(wanted) and not is_array and bool(value == wanted)


def _misfit(path: str, wanted: str, value: Any) -> hg.InvalidInputError:
    return hg.InvalidInputError(
        f"argument {path!r:.80} was {wanted:.200} when the module was exported, and is {shown(value):.200}",
        advice=_ADVICE,
    )


def shown(value: Any) -> str:
    """Describe a value in an error."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype} and shape {list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} and shape {list(value.shape)}"
    if isinstance(value, Mapping):
        return _container_text(type(value).__name__, list(value))
    if isinstance(value, (list, tuple)):
        return _container_text(type(value).__name__, len(value))
    return f"{value!r:.80}"


def _container_text(kind: str, content: Any) -> str:
    if isinstance(content, int):
        return f"of type {kind} and length {content}"
    return f"of type {kind} with the keys {content!r:.120}"
