"""One node of an FX graph as its rule sees it: its graph, its types, and its errors."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.fx

import heliograph as hg
from heliograph.lowerings.arrays import cast
from heliograph.torch import errors
from heliograph.torch.elements import dtype_name, torch_dtype

#: The most elements of an array that a rule makes on the host.
MOST_HOST_ELEMENTS = 2**24
#: The most parts that a rule makes of one tensor, or terms that it adds up.
MOST_PARTS = 4096
#: A number of Python, whose data type is weak.
Number = bool | int | float


class Constants(Protocol):
    """Constants and random numbers, which all nodes of a graph share."""

    def lift(self, tensor: torch.Tensor) -> hg.Value: ...

    def known(self, value: hg.Value) -> torch.Tensor | None: ...

    def random(self, shape: tuple[int, ...], dtype: str) -> hg.Value: ...


class Node:
    """A node of an FX graph."""

    def __init__(self, fx: torch.fx.Node, graph: hg.Graph, constants: Constants) -> None:
        self.fx = fx
        self.graph = graph
        self._constants = constants

    @property
    def op(self) -> str:
        """The name of the op without its overload, such as "add"."""
        target: Any = self.fx.target
        name: str = target._schema.name
        return name.rpartition("::")[2]

    # Errors

    def refuse(self, why: str, advice: str = "") -> hg.UnsupportedError:
        """Return the error for what cannot be expressed; the rule raises it."""
        return errors.refusal(self.fx, why, advice)

    def room(self, count: int) -> None:
        """Check that an array of so many elements may be made on the host."""
        if count > MOST_HOST_ELEMENTS:
            raise self.refuse(f"it needs an array of {count:,} elements on the host, which is too large")

    def parts(self, count: int) -> None:
        """Check that a rule may make so many nodes."""
        if count > MOST_PARTS:
            raise self.refuse(f"it makes {count:,} parts or terms; {MOST_PARTS} are the most")

    # Types

    def dtype(self, place: int = 0) -> str:
        """Return the name of the data type of a result, as torch has it."""
        found = self.fx.meta["val"]
        one = found[place] if isinstance(found, (tuple, list)) else found
        return dtype_name(one.dtype)

    def wants(self, place: int) -> bool:
        """True if something reads this result of several."""
        return any(user.target is not operator.getitem or user.args[1] == place for user in self.fx.users)

    def strides(self, argument: int) -> tuple[int, ...]:
        """Return the strides of an argument that is a tensor, as torch has them."""
        given: Any = self.fx.args[argument]
        return tuple(int(one) for one in given.meta["val"].stride())

    def offset(self, argument: int) -> int:
        """Return where an argument that is a tensor begins in its storage, as torch has it."""
        given: Any = self.fx.args[argument]
        return int(given.meta["val"].storage_offset())

    # Values

    def known(self, x: hg.Value | torch.Tensor) -> torch.Tensor | None:
        """Return the elements of a value that are known before a run, or None."""
        return x if isinstance(x, torch.Tensor) else self._constants.known(x)

    def lift(self, x: hg.Value | torch.Tensor) -> hg.Value:
        """Return a tensor as a value of the graph."""
        return self._constants.lift(x) if isinstance(x, torch.Tensor) else x

    def random(self, shape: tuple[int, ...], dtype: str) -> hg.Value:
        """Return random numbers, others than all before: f32 from 0 to below 1, or u32."""
        return self._constants.random(shape, dtype)

    def full(self, shape: Sequence[int], number: Number, dtype: hg.DType | str) -> hg.Value:
        """Return a value of one number, converted to the data type as torch does."""
        return self.graph.full(tuple(shape), number_of(number, dtype), dtype)


def number_of(number: Number, dtype: hg.DType | str) -> Number:
    """Return a number of Python as one of a data type, as torch converts it."""
    name = str(dtype)
    if name == "bool":
        return bool(number)
    if name in ("f64", "f32", "f16", "bf16"):
        return float(number)
    # Beyond the range of the data type only the low bits count.
    size, whole = 1 << int(name[1:]), int(number)
    return whole % size if name[0] == "u" else (whole + size // 2) % size - size // 2


def common_dtype(*operands: Any) -> str:
    """Return the data type that torch computes in, of values and numbers."""
    found: Any = None
    for one in operands:
        found = _merged(found, one)
    return dtype_name(found if isinstance(found, torch.dtype) else torch.result_type(found, found))


def _merged(found: Any, one: Any) -> Any:
    probe = _probe(one) if isinstance(one, hg.Value) else one
    if found is None:
        return probe
    # Two of torch's types make a type; its dimensions count for the next one.
    dtype = torch.result_type(found, probe)
    dimensions = max(getattr(found, "ndim", 0), getattr(probe, "ndim", 0))
    return torch.empty((1,) * min(dimensions, 1), dtype=dtype, device="meta")


def _probe(value: hg.Value) -> torch.Tensor:
    """A tensor without elements, of the type and, for promotion, of the dimensions of a value."""
    return torch.empty((1,) * min(value.ndim, 1), dtype=torch_dtype(value.dtype), device="meta")


def promoted(node: Node, *operands: Any) -> list[hg.Value]:
    """Return values and numbers as values of the data type that torch computes in."""
    return in_dtype(node, common_dtype(*operands), *operands)


def in_dtype(node: Node, dtype: str, *operands: Any) -> list[hg.Value]:
    """Return values and numbers as values of a data type."""
    return [cast(one, dtype) if isinstance(one, hg.Value) else node.full((), one, dtype) for one in operands]


def as_float(x: hg.Value) -> hg.Value:
    """Return integers and bool as f32, and floats as they are."""
    return x if x.dtype.is_float else cast(x, "f32")


def in_f32(x: hg.Value) -> hg.Value:
    """Return floats of 16 bits as f32, and others as they are: what torch adds up in."""
    return cast(x, "f32") if x.dtype.name in ("f16", "bf16") else x


def axis_of(axis: int, ndim: int) -> int:
    """Return an axis counted from the front; a scalar has the axes 0 and -1."""
    return axis % max(ndim, 1)


def axes_of(axes: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Return axes counted from the front; none at all are all."""
    if axes is None or (not isinstance(axes, int) and not len(axes)):
        return tuple(range(ndim))
    listed = [axes] if isinstance(axes, int) else axes
    return tuple(one % ndim for one in listed) if ndim else ()


def shape_of(like: hg.Value | Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a value, or the given one."""
    return like.shape if isinstance(like, hg.Value) else tuple(int(one) for one in like)
