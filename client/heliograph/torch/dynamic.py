"""`dynamic`: which dimensions of the example inputs vary, and their names."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.utils._pytree as pytree
from torch.export.dynamic_shapes import Dim

import heliograph as hg
from heliograph.torch.calls import shown

#: Which dimensions of which inputs vary, as {"x": {0: "batch"}}; True: all.
Dynamic: TypeAlias = "Mapping[str, Any] | Sequence[Any] | bool | None"
_FORM = 'name the axes that vary: dynamic={"x": {0: "batch"}}'
_HINT: type = type(Dim.AUTO)


class DynamicShapes:
    """The dimensions that vary, checked against the arguments of an example by their names.

    Raises InvalidArgumentError.
    """

    def __init__(self, given: Mapping[str, Any], dynamic: Dynamic) -> None:
        #: The names of dimensions by axis, for each tensor by its identity.
        self._names: dict[int, dict[int, str]] = {}
        self._sizes: dict[str, int] = {}
        #: The argument `dynamic_shapes` of torch.export.
        self.spec: Any = None
        if dynamic is True:
            self.spec = pytree.tree_map(_all_dynamic, dict(given))
        elif dynamic is not None and dynamic is not False:
            by_name = _by_name(given, dynamic)
            self.spec = {name: self._marked(one, by_name.get(name), name) for name, one in given.items()}

    def names(self, example: Any) -> list[dict[int, str]]:
        """Return the names of dimensions, by axis, for each leaf of an example."""
        return [self._names.get(id(leaf), {}) for leaf in pytree.tree_leaves(example)]

    def _marked(self, value: Any, spec: Any, path: str) -> Any:
        """Return what is given for an argument with torch's marks in the place of names."""
        if spec is None:
            return pytree.tree_map(lambda _: None, value)
        if isinstance(value, torch.Tensor):
            return self._axes(value, spec, path)
        if isinstance(value, Mapping) and isinstance(spec, Mapping):
            if unknown := [key for key in spec if key not in value]:
                raise _refused(f"argument {path!r:.80} has no {unknown[0]!r:.80}")
            return {key: self._marked(one, spec.get(key), f"{path}[{key!r}]") for key, one in value.items()}
        if isinstance(value, (list, tuple)) and isinstance(spec, (list, tuple)):
            if len(value) != len(spec):
                raise _refused(f"argument {path!r:.80} has {len(value)} items, and {len(spec)} are given")
            pairs = enumerate(zip(value, spec, strict=True))
            return type(spec)(self._marked(one, inner, f"{path}[{place}]") for place, (one, inner) in pairs)
        return spec

    def _axes(self, tensor: torch.Tensor, spec: Any, path: str) -> dict[int, Any]:
        if isinstance(spec, (list, tuple)) and len(spec) == tensor.ndim:
            spec = dict(enumerate(spec))
        if not isinstance(spec, Mapping):
            raise _refused(f"argument {path!r:.80} has {tensor.ndim} dimensions, and {spec!r:.80} is given")
        found: dict[int, Any] = {}
        for axis, dim in spec.items():
            place = _axis(axis, tensor, path)
            name = dim if isinstance(dim, str) else getattr(dim, "__name__", "")
            if not isinstance(dim, (str, int, Dim, _HINT, type(None))):
                raise _refused(f"dimension {axis} of argument {path!r:.80} is given as {dim!r:.80}")
            if name:
                self._names.setdefault(id(tensor), {})[place] = name
                self._check_size(name, tensor.shape[place], f"dimension {axis} of argument {path!r:.80}")
            found[place] = Dim.DYNAMIC if isinstance(dim, str) else dim
        return found

    def _check_size(self, name: str, size: int, where: str) -> None:
        if size < 2:
            raise hg.InvalidArgumentError(
                f"dynamic: {where} has size {size} in the example inputs, of which tracing makes a constant",
                advice="give an example in which dimensions that vary have sizes of 2 or more",
            )
        if self._sizes.setdefault(name, size) != size:
            raise hg.InvalidArgumentError(
                f"dynamic: {where} is {name!r:.80} and has size {size} in the example inputs, where "
                f"another {name!r:.80} has {self._sizes[name]}",
                advice="dimensions of one name have one size: give them other names, or other examples",
            )


def _by_name(given: Mapping[str, Any], dynamic: Any) -> Mapping[str, Any]:
    """Return what is given for each argument by its name."""
    if isinstance(dynamic, Mapping):
        if unknown := [name for name in dynamic if name not in given]:
            raise hg.InvalidArgumentError(
                f"dynamic: there is no argument {unknown[0]!r:.80}",
                advice=f"arguments of the example inputs: {', '.join(given):.300}",
            )
        return dynamic
    if isinstance(dynamic, (list, tuple)) and len(dynamic) == len(given):
        return dict(zip(given, dynamic, strict=True))
    raise _refused(f"{dynamic!r:.80} is given for {len(given)} arguments ({', '.join(given):.200})")


def _axis(axis: Any, tensor: torch.Tensor, path: str) -> int:
    try:
        place = operator.index(axis)
    except TypeError:
        raise _refused(f"{axis!r:.80} of argument {path!r:.80} is no axis") from None
    if not -tensor.ndim <= place < tensor.ndim:
        raise _refused(f"argument {path!r:.80} is {shown(tensor)}, and has no axis {place}")
    return int(place % tensor.ndim)


def _all_dynamic(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return None
    return {axis: Dim.AUTO for axis, size in enumerate(leaf.shape) if size > 1}


def _refused(what: str) -> hg.InvalidArgumentError:
    return hg.InvalidArgumentError(f"dynamic: {what}", advice=_FORM)
